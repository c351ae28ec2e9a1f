//! The trainer's forward and its gradients against the recorded cases, op by op and parameter by parameter.

use std::collections::BTreeSet;

use datasets::Sample;
use rollout::model::Trace;
use tch::{Device, Kind, Tensor};
use trainer::pack::{Microbatch, PackConfig, pack};
use trainer::policy::{Gradients, Parameter, Policy, Replay};

use crate::golden::{Case, Recorded, cases};

/// Relative to the tensor's largest gradient (v4/SPEC section 15).
const GRADIENT_TOLERANCE: f32 = 1e-4;

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
fn run(policy: &Policy, sequences: &[Vec<u32>]) -> Trace {
    let _guard = tch::no_grad_guard();
    let mut trace = Trace::default();
    let hidden = policy.forward(&microbatch(sequences, true), Replay::default(), Some(&mut trace));
    trace.numbers("logits", to_vec(&policy.logits(&hidden)));
    if policy.config().has_mtp() {
        let mut shorter = Trace::default();
        let mb = microbatch(sequences, false);
        let (_, hidden) = policy.forward_with_mtp(&mb, Replay::default(), Some(&mut shorter));
        for (name, values) in shorter.ops().iter().filter(|(name, _)| name.starts_with("mtp.")) {
            match values {
                rollout::model::Values::Numbers(values) => trace.numbers(name, values.clone()),
                rollout::model::Values::Choices(rows) => trace.choices(name, rows.clone()),
            }
        }
        trace.numbers("mtp.logits", to_vec(&policy.logits(&hidden)));
    }
    trace
}

fn policy(case: &Case) -> Policy {
    Policy::from_weights(&case.config, &case.weights, Device::Cpu).unwrap_or_else(|e| panic!("{}: {e}", case.name))
}

#[test]
fn golden_v4_policy_matches_the_reference() {
    for case in cases() {
        // Experts that the engine would round: here the recorded values are those of the codes already.
        let policy = policy(&case);
        for recorded in case.files("run_") {
            recorded.check(&format!("policy {}", case.name), run(&policy, &recorded.input_ids()));
        }
    }
}

/// Holds the gradient of `loss` against a file of recorded ones, and prints the largest difference; the names it has.
fn check_gradients(case: &Case, policy: &Policy, loss: &Tensor, recorded: &Recorded) -> BTreeSet<String> {
    let gradients = Gradients::of(loss, policy);
    let mut by_name = rollout::model::Weights::new();
    for (parameter, gradient) in policy.parameters().iter().zip(gradients.tensors()) {
        let gradient = if gradient.defined() { gradient.shallow_clone() } else { parameter.leaf.zeros_like() };
        Parameter { name: parameter.name.clone(), master: gradient, leaf: Tensor::new(), quantized: false }
            .write(&mut by_name);
    }
    let mut worst = (0.0f32, String::new());
    let mut compared = BTreeSet::new();
    for name in recorded.names().into_iter().filter(|name| !name.starts_with("loss")) {
        let (shape, want) = recorded.f32(&name).unwrap_or_else(|| panic!("gradient of {name} holds no numbers"));
        let got = by_name.get(&name).unwrap_or_else(|| panic!("{}: `{name}` is not trained", case.name));
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
    println!(
        "policy {} {}: {} gradients, largest {:.1e} of the tensor's maximum ({})",
        case.name,
        recorded.name(),
        compared.len(),
        worst.0,
        worst.1
    );
    // And what the reference has no gradient for has none here.
    let meta: serde_json::Value =
        serde_json::from_slice(&std::fs::read(case.dir.join("meta.json")).expect("reads")).expect("JSON");
    for name in meta["no_gradient"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_str) {
        let none = by_name.get(name).is_none_or(|gradient| gradient.as_f32().iter().all(|g| *g == 0.0));
        assert!(none, "{}: `{name}` has a gradient", case.name);
    }
    compared
}

/// The sequences that gradients were recorded on.
fn gradient_sequences(case: &Case) -> Vec<Vec<u32>> {
    let meta: serde_json::Value =
        serde_json::from_slice(&std::fs::read(case.dir.join("meta.json")).expect("reads")).expect("JSON");
    let at = |i: usize| meta["grad_at"][i].as_u64().expect("meta.json says where gradients were taken");
    let name = format!("run_{}x{}.", at(0), at(1));
    case.files(&name).first().unwrap_or_else(|| panic!("{}: no {name}safetensors", case.name)).input_ids()
}

#[test]
fn golden_v4_gradients_match_the_reference() {
    let mut num_cases = 0;
    for case in cases() {
        let policy = policy(&case);
        for recorded in case.files("grads.") {
            let scores = policy.score(&microbatch(&gradient_sequences(&case), false), Replay::default(), 1.0, false);
            let loss = -scores.logprobs.mean(None::<Kind>);
            let (_, want) = recorded.f32("loss").expect("the loss is recorded");
            assert!((loss.double_value(&[]) as f32 - want[0]).abs() < 1e-4, "{}: loss {loss} for {want:?}", case.name);
            let compared = check_gradients(&case, &policy, &loss, &recorded);
            // Of every parameter that is trained, multi-token prediction aside.
            for name in policy.parameters().iter().map(|p| &p.name).filter(|name| !name.starts_with("mtp.")) {
                let (prefix, w) = name.split_once(".ffn.experts.").unwrap_or((name, ""));
                let name = if w.is_empty() { name.clone() } else { format!("{prefix}.ffn.experts.0.{w}.weight") };
                assert!(compared.contains(&name), "{}: no gradient of `{name}` is recorded", case.name);
            }
            num_cases += 1;
        }
    }
    assert!(num_cases > 0, "no case records gradients");
}

#[test]
fn golden_v4_gradients_with_multi_token_prediction_match_the_reference() {
    for case in cases() {
        for recorded in case.files("grads_with_mtp") {
            let policy = policy(&case);
            let mb = microbatch(&gradient_sequences(&case), false);
            let scores = policy.score(&mb, Replay::default(), 1.0, true);
            let main = -scores.logprobs.mean(None::<Kind>);
            let num_mtp = mb.mtp_mask().iter().filter(|is_trained| **is_trained).count() as f64;
            let mtp = -scores.mtp_logprobs.expect("asked for").sum(None::<Kind>) / num_mtp;
            for (name, loss) in [("loss_main", &main), ("loss_mtp", &mtp)] {
                let (_, want) = recorded.f32(name).expect("losses are recorded");
                assert!((loss.double_value(&[]) as f32 - want[0]).abs() < 1e-4, "{} {name}: {loss}", case.name);
            }
            check_gradients(&case, &policy, &(main + mtp * 0.3), &recorded);
        }
    }
}
