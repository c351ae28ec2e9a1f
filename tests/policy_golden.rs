//! The trainer's forward and its gradients against the recorded cases, op by op and parameter by parameter.

use std::collections::BTreeSet;

use datasets::Sample;
use rollout::model::{MTP_PREFIX, Trace, Weights};
use tch::{Device, Kind, Tensor};
use trainer::pack::{Microbatch, PackConfig, pack};
use trainer::policy::{Gradients, Parameter, Policy, Replay};

use crate::golden::{Case, Recorded, cases, print_table};

/// Relative to the tensor's largest gradient (v4/SPEC section 15).
const GRADIENT_TOLERANCE: f32 = 1e-4;

/// Absolute, in nats per token.
const LOSS_TOLERANCE: f64 = 1e-4;

/// Sequences as the rows of one microbatch; `append` adds a token to each, so that all of its own are read.
fn microbatch(sequences: &[Vec<u32>], append: bool) -> Microbatch {
    let sample = |tokens: &Vec<u32>| {
        let tokens: Vec<u32> = tokens.iter().copied().chain(append.then_some(0)).collect();
        let n = tokens.len() - 1;
        Sample {
            group_id: 0,
            rollout_id: 0,
            tokens,
            loss_mask: vec![true; n],
            advantages: vec![1.0; n],
            rollout_logprobs: vec![0.0; n],
            routing: None,
            indexer: None,
        }
    };
    let samples: Vec<Sample> = sequences.iter().map(sample).collect();
    let tokens = sequences.iter().map(|tokens| tokens.len() + 1).sum();
    let mut packed = pack(&samples, &PackConfig { microbatch_tokens: tokens, row_tokens: tokens });
    assert_eq!(packed.len(), 1);
    packed.remove(0)
}

fn to_vec(x: &Tensor) -> Vec<f32> {
    let mut out = vec![0.0; x.numel()];
    x.contiguous().copy_data(&mut out, x.numel());
    out
}

/// Every op of a forward pass over whole sequences; of multi-token prediction over all positions but the last.
pub fn run(policy: &Policy, sequences: &[Vec<u32>]) -> Trace {
    let _guard = tch::no_grad_guard();
    let mut trace = Trace::default();
    let hidden = policy.forward(&microbatch(sequences, true), Replay::default(), Some(&mut trace));
    trace.numbers("logits", &[policy.config().vocab_size], to_vec(&policy.logits(&hidden)));
    if policy.config().has_mtp() {
        let mut shorter = Trace::default();
        let mb = microbatch(sequences, false);
        let (_, hidden) = policy.forward_with_mtp(&mb, Replay::default(), Some(&mut shorter));
        for (name, values) in shorter.ops().iter().filter(|(name, _)| name.starts_with("mtp.")) {
            trace.push(name, values.clone());
        }
        trace.numbers("mtp.logits", &[policy.config().vocab_size], to_vec(&policy.logits(&hidden)));
    }
    trace
}

fn policy(case: &Case) -> Policy {
    Policy::from_weights(&case.config, &case.weights, Device::Cpu).unwrap_or_else(|e| panic!("{}: {e}", case.name))
}

#[test]
fn golden_v4_policy_matches_the_reference() {
    let mut table = Vec::new();
    for case in cases() {
        // Experts that the engine would round: here the recorded values are those of the codes already.
        let policy = policy(&case);
        for recorded in case.files("run_") {
            table.push(recorded.check(&format!("policy {}", case.name), run(&policy, &recorded.input_ids())));
        }
    }
    print_table(&table);
}

/// Holds the gradient of `loss` against a file of recorded ones. The largest difference, in a line, and the names of all
/// that is trained: those that were compared, and the others, whose gradients are given.
fn check_gradients(
    case: &Case,
    policy: &Policy,
    loss: &Tensor,
    recorded: &Recorded,
) -> (String, BTreeSet<String>, Weights) {
    let gradients = Gradients::of(loss, policy);
    let mut rest = Weights::new();
    for (parameter, gradient) in policy.parameters().iter().zip(gradients.tensors()) {
        let gradient = if gradient.defined() { gradient.shallow_clone() } else { parameter.leaf.zeros_like() };
        Parameter { name: parameter.name.clone(), master: gradient, leaf: Tensor::new(), quantized: false }
            .write(&mut rest);
    }
    let mut worst = (0.0f32, String::new());
    let mut compared = BTreeSet::new();
    for name in recorded.names() {
        if ["loss", "loss_main", "loss_mtp"].contains(&name.as_str()) {
            continue;
        }
        let (shape, want) = recorded.f32(&name).unwrap_or_else(|| panic!("gradient of {name} holds no numbers"));
        let got = rest.remove(&name).unwrap_or_else(|| panic!("{}: `{name}` is not trained", case.name));
        assert_eq!(got.shape, shape, "{name}");
        let max = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let diff = got
            .as_f32()
            .iter()
            .zip(&want)
            .fold(0.0f32, |m, (a, b)| if (a - b).is_nan() { f32::INFINITY } else { m.max((a - b).abs()) });
        let relative = diff / max.max(f32::MIN_POSITIVE);
        assert!(
            diff == 0.0 || relative < GRADIENT_TOLERANCE,
            "{} {}: the gradient of `{name}` differs by {diff:e}, {relative:e} of its largest value",
            case.name,
            recorded.name()
        );
        if relative > worst.0 {
            worst = (relative, name.clone());
        }
        compared.insert(name);
    }
    let at = format!("policy {} {}", case.name, recorded.name());
    let line = format!(
        "{at:<44} {:>3} gradients, largest {:.1e} of the tensor's maximum ({})",
        compared.len(),
        worst.0,
        worst.1
    );
    (line, compared, rest)
}

/// A loss against the recorded ones: in the file of gradients under `key`, and in meta.json.
fn check_loss(case: &Case, recorded: &Recorded, key: &str, in_meta: &str, loss: &Tensor) {
    let got = loss.double_value(&[]);
    let (_, want) = recorded.f32(key).unwrap_or_else(|| panic!("{}: `{key}` is not recorded", recorded.name()));
    let meta = case.meta()[in_meta].as_f64().unwrap_or_else(|| panic!("{}: no `{in_meta}` in meta.json", case.name));
    for want in [f64::from(want[0]), meta] {
        assert!((got - want).abs() < LOSS_TOLERANCE, "{} {key}: {got}, expected {want}", case.name);
    }
}

/// The sequences that gradients were recorded on.
fn gradient_sequences(case: &Case) -> Vec<Vec<u32>> {
    let meta = case.meta();
    let at = |i: usize| meta["grad_at"][i].as_u64().expect("meta.json says where gradients were taken");
    let name = format!("run_{}x{}.", at(0), at(1));
    case.files(&name).first().unwrap_or_else(|| panic!("{}: no {name}safetensors", case.name)).input_ids()
}

fn is_mtp(name: &str) -> bool {
    name.starts_with(MTP_PREFIX)
}

#[test]
fn golden_v4_gradients_match_the_reference() {
    let mut table = Vec::new();
    for case in cases() {
        let policy = policy(&case);
        for recorded in case.files("grads.") {
            let scores = policy.score(&microbatch(&gradient_sequences(&case), false), Replay::default(), 1.0, false);
            let loss = -scores.logprobs.mean(None::<Kind>);
            check_loss(&case, &recorded, "loss", "loss", &loss);
            let (line, compared, rest) = check_gradients(&case, &policy, &loss, &recorded);
            table.push(line);
            // All that is trained was compared, but for multi-token prediction, which this loss does not reach.
            for (name, gradient) in &rest {
                assert!(is_mtp(name), "{}: no gradient of `{name}` is recorded", case.name);
                assert!(gradient.as_f32().iter().all(|g| *g == 0.0), "{}: `{name}` has a gradient", case.name);
            }
            // And what is not trained is what the reference has no gradient for, and the selection biases, which are no
            // parameters there.
            let trained: BTreeSet<String> = compared.into_iter().chain(rest.into_keys()).collect();
            let untrained: BTreeSet<String> = case.config.parameters().into_iter().map(|(name, _)| name).collect();
            let untrained = untrained.difference(&trained).filter(|name| !name.ends_with(".ffn.gate.bias"));
            let meta = case.meta();
            let no_gradient = meta["no_gradient"].as_array().expect("meta.json lists what has no gradient");
            let no_gradient: BTreeSet<&str> = no_gradient.iter().filter_map(serde_json::Value::as_str).collect();
            assert_eq!(untrained.map(String::as_str).collect::<BTreeSet<_>>(), no_gradient, "{}", case.name);
        }
    }
    print_table(&table);
}

#[test]
fn golden_v4_gradients_with_multi_token_prediction_match_the_reference() {
    let mut table = Vec::new();
    for case in cases() {
        for recorded in case.files("grads_with_mtp.") {
            let policy = policy(&case);
            let mb = microbatch(&gradient_sequences(&case), false);
            let scores = policy.score(&mb, Replay::default(), 1.0, true);
            let main = -scores.logprobs.mean(None::<Kind>);
            let num_mtp = mb.mtp_mask().iter().filter(|is_trained| **is_trained).count() as f64;
            let mtp = -scores.mtp_logprobs.expect("asked for").sum(None::<Kind>) / num_mtp;
            check_loss(&case, &recorded, "loss_main", "loss", &main);
            check_loss(&case, &recorded, "loss_mtp", "loss_mtp", &mtp);
            let (line, _, rest) = check_gradients(&case, &policy, &(main + mtp * 0.3), &recorded);
            table.push(line);
            // The reference keeps those of the block itself, of the last layer and of what is in no layer.
            let missing = rest.keys().find(|name| is_mtp(name) || !name.starts_with("layers."));
            assert_eq!(missing, None, "{}: its gradient is not recorded", case.name);
        }
    }
    // Most folders of cases have none with multi-token prediction.
    if !table.is_empty() {
        print_table(&table);
    }
}
