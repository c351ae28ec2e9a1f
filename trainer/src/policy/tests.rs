//! The policy against itself; against numbers from PyTorch it is held in the golden tests.

use datasets::Sample;
use rollout::model::{ModelConfig, Trace, Values};
use tch::{Device, Kind, Tensor};

use super::*;
use crate::pack::{PackConfig, pack};

fn max_diff(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, |a, b| if b.is_nan() { f32::INFINITY } else { a.max(b) })
}

fn plain_sample(tokens: Vec<u32>) -> Sample {
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
}

fn mean_cross_entropy(policy: &Policy, mb: &Microbatch) -> Tensor {
    let (logprobs, _) = policy.token_logprobs(mb, Replay::default(), 1.0);
    -logprobs.mean(None::<Kind>)
}

/// A small model of every kind of layer, with weights that make every choice matter.
fn small_config(fp4: bool) -> ModelConfig {
    let mut json = serde_json::json!({
        "model_type": "deepseek_v4", "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 2, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 2,
        "o_lora_rank": 8, "sliding_window": 6, "compress_ratios": [0, 4, 8, 4], "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0, "max_position_embeddings": 4096, "index_n_heads": 4, "index_head_dim": 16,
        "index_topk": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "num_hash_layers": 1, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1,
        "initializer_range": 0.5
    });
    if fp4 {
        json["expert_dtype"] = "fp4".into();
    }
    serde_json::from_value(json).unwrap()
}

fn small_policy(fp4: bool) -> Policy {
    let config = small_config(fp4);
    Policy::from_weights(&config, &initial_weights(&config, 3), Device::Cpu).unwrap()
}

fn samples(lens: &[usize]) -> Vec<Sample> {
    let token = |i: usize, t: usize| ((i * 11 + t * t * 7 + t * 3) % 40) as u32;
    lens.iter().enumerate().map(|(i, &n)| plain_sample((0..n).map(|t| token(i, t)).collect())).collect()
}

const LENS: [usize; 9] = [31, 5, 17, 2, 9, 26, 12, 3, 40];

/// Target log-probabilities of every sample, and the gradient of their sum.
fn logprobs_and_grads(policy: &Policy, samples: &[Sample], config: &PackConfig) -> (Vec<Vec<f32>>, Gradients) {
    let mut gradients = Gradients::default();
    let mut logprobs = vec![Vec::new(); samples.len()];
    for mb in pack(samples, config) {
        let (got, _) = policy.token_logprobs(&mb, Replay::default(), 1.0);
        let mask: Vec<f32> = mb.segment_ids.iter().map(|&s| f32::from(s >= 0)).collect();
        gradients.add(Gradients::of(&(got.view([-1]) * Tensor::from_slice(&mask)).sum(None::<Kind>), policy));
        let got = to_vec_f32(&got);
        for s in &mb.segments {
            let at = s.row * mb.row_len + s.start;
            logprobs[s.sample_idx] = got[at..at + s.len].to_vec();
        }
    }
    (logprobs, gradients)
}

#[test]
fn packing_does_not_change_the_result() {
    let policy = small_policy(false);
    let samples = samples(&LENS);
    // Every sample alone, then side by side in rows and microbatches of several sizes.
    let alone = logprobs_and_grads(&policy, &samples, &PackConfig { microbatch_tokens: 1, row_tokens: 1 });
    for (microbatch_tokens, row_tokens) in [(39, 39), (90, 64), (400, 20), (400, 400)] {
        let config = PackConfig { microbatch_tokens, row_tokens };
        let packed = logprobs_and_grads(&policy, &samples, &config);
        let mean = |logprobs: &[Vec<f32>]| {
            let all: Vec<f64> = logprobs.iter().flatten().map(|&x| f64::from(x)).collect();
            all.iter().sum::<f64>() / all.len() as f64
        };
        let error = (mean(&packed.0) - mean(&alone.0)).abs();
        assert!(error < 1e-6, "{config:?}: the loss differs by {error}");
        // Matrix products of other sizes add in another order: f32 rounding is what is left.
        let error = max_diff(&packed.0.concat(), &alone.0.concat());
        assert!(error < 5e-6, "{config:?}: log-probabilities differ by {error}");
        for ((got, want), p) in packed.1.tensors().iter().zip(alone.1.tensors()).zip(policy.parameters()) {
            let (got, want) = (to_vec_f32(got), to_vec_f32(want));
            let max = want.iter().fold(1e-3f32, |a, b| a.max(b.abs()));
            let error = max_diff(&got, &want) / max;
            assert!(error < 1e-4, "{config:?}: gradients of `{}` differ by {error}", p.name);
        }
    }
}

/// What every layer chose, two a position, as a microbatch carries it.
fn recorded(mb: &Microbatch, trace: &Trace, op: &str) -> crate::pack::Choices {
    let mut choices = crate::pack::Choices { num_layers: 0, width: 2, idx: Vec::new() };
    for layer in 0..4 {
        let Some(Values::Choices(rows)) = trace.get(&format!("layers.{layer}.{op}")) else { continue };
        choices.num_layers += 1;
        let mut rows = rows.iter();
        for segment in &mb.segment_ids {
            let row = if *segment < 0 { &[] } else { rows.next().expect("a row for every position").as_slice() };
            choices.idx.extend((0..2).map(|slot| row.get(slot).map_or(-1, |&choice| i64::from(choice))));
        }
    }
    choices
}

#[test]
fn replayed_choices_are_the_ones_used() {
    let policy = small_policy(false);
    let config = PackConfig { microbatch_tokens: 90, row_tokens: 64 };
    for mut mb in pack(&samples(&LENS), &config) {
        let mut own = Trace::default();
        let want = policy.forward(&mb, Replay::default(), Some(&mut own));
        mb.routing = Some(recorded(&mb, &own, "router.experts"));
        mb.indexer = Some(recorded(&mb, &own, "indexer.topk"));
        let replay = Replay { experts: true, indexer: true };
        let got = policy.forward(&mb, replay, None);
        assert_eq!(to_vec_f32(&got), to_vec_f32(&want), "replaying the policy's own choices changes nothing");

        let routing = mb.routing.as_mut().unwrap();
        routing.idx.iter_mut().filter(|e| **e >= 0).for_each(|e| *e = (*e + 1) % 6);
        routing.idx.chunks_exact_mut(2).for_each(<[i64]>::sort_unstable); // as a trace tells them
        let mut other = Trace::default();
        let _ = policy.forward(&mb, replay, Some(&mut other));
        assert_eq!(&recorded(&mb, &other, "router.experts"), mb.routing.as_ref().unwrap());
    }
}

#[test]
fn fp4_experts_compute_on_their_codes_and_train_their_masters() {
    let weights = initial_weights(&small_config(true), 3);
    let mut policy = small_policy(true);
    assert_eq!(policy.to_weights(), weights, "masters are kept as they came");
    // The same model with the rounded values as plain weights.
    let mut rounded = weights.clone();
    for (name, tensor) in &mut rounded {
        if name.contains(".ffn.experts.") {
            let codes = kernels::quant::quantize_mxfp4(tensor.as_f32());
            let values = kernels::quant::dequantize_mxfp4(&codes);
            assert_ne!(values, tensor.as_f32());
            *tensor = rollout::model::HostTensor::f32(&tensor.shape.clone(), values);
        }
    }
    let plain = Policy::from_weights(&small_config(false), &rounded, Device::Cpu).unwrap();
    let samples = samples(&LENS);
    let config = PackConfig::default();
    let (got, gradients) = logprobs_and_grads(&policy, &samples, &config);
    let (want, plain_gradients) = logprobs_and_grads(&plain, &samples, &config);
    assert_eq!(got, want);
    let values = |g: &Gradients| g.tensors().iter().map(to_vec_f32).collect::<Vec<_>>();
    assert_eq!(values(&gradients), values(&plain_gradients), "straight-through: the gradient at the rounded values");

    // A step moves the master by less than a rounding step; the codes follow only when it has moved far enough.
    let cfg = crate::optimizer::AdamWConfig { learning_rate: 1e-4, weight_decay: 0.0, ..Default::default() };
    let mut optimizer = crate::optimizer::Optimizer::adamw(&cfg, &policy);
    optimizer.step(&mut policy, &gradients).unwrap();
    for p in policy.parameters().iter().filter(|p| p.quantized) {
        let (master, leaf) = (to_vec_f32(&p.master), to_vec_f32(&p.leaf));
        assert_eq!(leaf, kernels::quant::dequantize_mxfp4(&kernels::quant::quantize_mxfp4(&master)));
        let (name, w) = p.name.split_once(".ffn.experts.").unwrap();
        let before = weights[&format!("{name}.ffn.experts.0.{w}.weight")].as_f32();
        assert!(master.iter().zip(before).any(|(a, b)| a != b), "`{}` did not move", p.name);
    }
}

#[test]
fn weights_survive_the_round_trip() {
    let config = small_config(false);
    let weights = initial_weights(&config, 3);
    let policy = Policy::from_weights(&config, &weights, Device::Cpu).unwrap();
    assert_eq!(policy.to_weights(), weights);
    let mut broken = weights.clone();
    broken.remove("norm.weight");
    let missing = Policy::from_weights(&config, &broken, Device::Cpu).err().unwrap().to_string();
    assert!(missing.starts_with("tensor `norm.weight` is missing"), "{missing}");
}

#[test]
fn initial_weights_are_whole_and_hash_tables_fair() {
    let config = small_config(false);
    let weights = initial_weights(&config, 3);
    assert_eq!(weights, initial_weights(&config, 3));
    assert_ne!(weights, initial_weights(&config, 4));
    assert_eq!(weights.len(), config.parameters().len() + config.hash_tables().len());
    let rollout::model::TensorData::I64(table) = &weights[&config.hash_tables()[0]].data else { panic!("not a table") };
    let mut uses = [0; 6];
    for experts in table.chunks(2) {
        assert_ne!(experts[0], experts[1]);
        experts.iter().for_each(|&e| uses[e as usize] += 1);
    }
    assert!(uses.iter().max().unwrap() - uses.iter().min().unwrap() <= 1, "{uses:?}");
}

#[test]
fn a_small_model_learns_its_samples() {
    use crate::optimizer::{AdamWConfig, MuonConfig, Optimizer};

    tch::set_num_threads(1); // as in a run: products this small only wait for threads
    let config = ModelConfig { initializer_range: None, ..small_config(true) };
    let adamw = AdamWConfig { learning_rate: 1e-2, ..Default::default() };
    let muon = MuonConfig { learning_rate: 3e-2, adamw_learning_rate: 1e-2, ..Default::default() };
    type Make<'a> = &'a dyn Fn(&Policy) -> Optimizer;
    let optimizers: [(&str, Make<'_>); 2] =
        [("adamw", &|policy| Optimizer::adamw(&adamw, policy)), ("muon", &|policy| Optimizer::muon(&muon, policy))];
    for (name, optimizer) in optimizers {
        let mut policy = Policy::from_weights(&config, &initial_weights(&config, 5), Device::Cpu).unwrap();
        let mut optimizer = optimizer(&policy);
        let mb = pack(&samples(&[40; 8]), &PackConfig::default()).remove(0);
        let mut losses = Vec::new();
        for _ in 0..30 {
            let loss = mean_cross_entropy(&policy, &mb);
            losses.push(loss.double_value(&[]));
            let gradients = Gradients::of(&loss, &policy);
            optimizer.step(&mut policy, &gradients).unwrap();
        }
        assert!((losses[0] - 40f64.ln()).abs() < 0.1, "starts near the uniform distribution: {}", losses[0]);
        assert!(losses[29] < 1.5, "{name}: {losses:?}");
    }
}

fn mtp_config() -> ModelConfig {
    ModelConfig { num_nextn_predict_layers: 1, ..small_config(true) }
}

fn frozen(patterns: &[&str], mtp_loss_weight: f64, config: &ModelConfig) -> Result<Frozen, FrozenError> {
    let frozen = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
    Frozen::new(&crate::recipe::TrainConfig { frozen, mtp_loss_weight, ..Default::default() }, config)
}

#[test]
fn what_is_frozen_stays_bit_for_bit_and_the_rest_moves() {
    let config = mtp_config();
    let weights = initial_weights(&config, 5);
    let patterns = ["embed.weight", "layers.1.*", "*.ffn.experts.*.w2.weight"];
    let frozen = frozen(&patterns, 0.0, &config).unwrap();
    let mut policy = Policy::with_frozen(&config, &weights, Device::Cpu, &|name| frozen.contains(name)).unwrap();
    let mb = pack(&samples(&[40; 8]), &PackConfig::default()).remove(0);
    let mut optimizer = crate::optimizer::Optimizer::adamw(&crate::optimizer::AdamWConfig::default(), &policy);
    // A worker's handle differentiates, as in training.
    let worker = policy.share();
    for _ in 0..2 {
        let gradients = Gradients::of(&mean_cross_entropy(&worker, &mb), &worker);
        optimizer.step(&mut policy, &gradients).unwrap();
    }
    let never = |name: &str| name.ends_with(".gate.bias") || name.contains(".indexer.") || name.ends_with(".tid2eid");
    for (name, after) in policy.to_weights() {
        let is_same = after == weights[&name];
        assert_eq!(is_same, frozen.contains(&name) || never(&name), "{name}");
        assert_eq!(
            frozen.contains(&name),
            name.starts_with("mtp.0.")
                || name == "embed.weight"
                || name.starts_with("layers.1.")
                || name.contains("w2.weight") && name.contains(".experts."),
            "{name}"
        );
    }
    let (trained, left) = policy.num_trained_and_frozen();
    assert_eq!(trained + left, config.num_parameters().0);
}

#[test]
fn patterns_that_make_no_sense_are_refused() {
    let config = small_config(true);
    let said = |patterns: &[&str], weight| frozen(patterns, weight, &config).unwrap_err().to_string();
    assert_eq!(
        said(&["layers.0.attn.wq_a", "*"], 0.0),
        "`train.frozen`: no parameter is called `layers.0.attn.wq_a`; the nearest name is `layers.0.attn.wq_a.weight`"
    );
    assert_eq!(
        said(&["*"], 0.0),
        "`train.frozen` matches every parameter, expected one that is trained; remove a pattern"
    );
    assert_eq!(
        said(&[], 0.3),
        "`train.mtp_loss_weight` is 0.3, but the model has no multi-token-prediction block; set it to 0"
    );
    assert_eq!(
        said(&["*.experts.3.w1.weight"], 0.0),
        "`train.frozen`: 1 of the 6 experts in `layers.0.ffn.experts.*.w1.weight` are frozen, expected all or none of a \
         layer's; widen the pattern"
    );
    let train = crate::recipe::TrainConfig {
        frozen: vec!["layers.2.*".into()],
        router_bias_update_speed: 0.01,
        ..Default::default()
    };
    let error = Frozen::new(&train, &config).unwrap_err().to_string();
    assert!(error.starts_with("`train.frozen` matches `layers.2.ffn.gate.bias`, which"), "{error}");
}

#[test]
fn multi_token_prediction_is_trained_when_its_loss_has_a_weight() {
    let config = ModelConfig { initializer_range: None, ..mtp_config() };
    let mut policy = Policy::from_weights(&config, &initial_weights(&config, 5), Device::Cpu).unwrap();
    let cfg = crate::optimizer::AdamWConfig { learning_rate: 1e-2, ..Default::default() };
    let mut optimizer = crate::optimizer::Optimizer::adamw(&cfg, &policy);
    let mb = pack(&samples(&[40; 8]), &PackConfig::default()).remove(0);
    let normaliser = crate::loss::Normaliser::new([&mb], crate::loss::Aggregation::TokenMean);
    let mut losses = Vec::new();
    for _ in 0..30 {
        let (gradients, loss, mtp_loss) = crate::loss::cross_entropy_backward(&policy, &mb, &normaliser, 0.3);
        losses.push((loss, mtp_loss));
        optimizer.step(&mut policy, &gradients).unwrap();
    }
    let (first, last) = (losses[0], losses[29]);
    assert!((first.1 - 40f64.ln()).abs() < 0.1, "starts near the uniform distribution: {first:?}");
    assert!(last.0 < 1.5 && last.1 < 2.0, "{losses:?}");
}

#[test]
fn samples_too_short_for_multi_token_prediction_train_the_rest() {
    let config = mtp_config();
    let policy = Policy::from_weights(&config, &initial_weights(&config, 5), Device::Cpu).unwrap();
    // One target each: there is no token after it.
    let mb = pack(&samples(&[2, 2]), &PackConfig::default()).remove(0);
    assert!(mb.mtp_mask().iter().all(|is_trained| !is_trained));
    let normaliser = crate::loss::Normaliser::new([&mb], crate::loss::Aggregation::TokenMean);
    let (with, loss, mtp_loss) = crate::loss::cross_entropy_backward(&policy, &mb, &normaliser, 0.3);
    let (without, same, _) = crate::loss::cross_entropy_backward(&policy, &mb, &normaliser, 0.0);
    assert_eq!((loss, mtp_loss), (same, 0.0));
    for ((with, without), p) in with.tensors().iter().zip(without.tensors()).zip(policy.parameters()) {
        let values = |x: &Tensor| if x.defined() { to_vec_f32(x) } else { vec![0.0; p.master.numel()] };
        assert_eq!(values(with), values(without), "{}", p.name);
    }
}

#[test]
fn multi_token_prediction_does_not_depend_on_packing() {
    let config = mtp_config();
    let policy = Policy::from_weights(&config, &initial_weights(&config, 5), Device::Cpu).unwrap();
    let mut samples = samples(&LENS);
    // Some tokens are not trained on, as those of a prompt or of a tool.
    for sample in &mut samples {
        (0..).zip(&mut sample.loss_mask).for_each(|(t, is_trained)| *is_trained = t % 5 != 2);
    }
    let loss_and_gradients = |config: &PackConfig| {
        let microbatches = pack(&samples, config);
        let normaliser = crate::loss::Normaliser::new(&microbatches, crate::loss::Aggregation::TokenMean);
        let (mut sum, mut all) = (0.0, Gradients::default());
        for mb in &microbatches {
            let (gradients, _, mtp_loss) = crate::loss::cross_entropy_backward(&policy, mb, &normaliser, 0.3);
            all.add(gradients);
            sum += mtp_loss;
        }
        (sum, all)
    };
    let alone = loss_and_gradients(&PackConfig { microbatch_tokens: 1, row_tokens: 1 });
    for (microbatch_tokens, row_tokens) in [(39, 39), (90, 64), (400, 400)] {
        let packed = loss_and_gradients(&PackConfig { microbatch_tokens, row_tokens });
        assert!((packed.0 - alone.0).abs() < 1e-6, "{} packed, {} alone", packed.0, alone.0);
        for ((got, want), p) in packed.1.tensors().iter().zip(alone.1.tensors()).zip(policy.parameters()) {
            let (got, want) = (to_vec_f32(got), to_vec_f32(want));
            let max = want.iter().fold(1e-3f32, |a, b| a.max(b.abs()));
            assert!(max_diff(&got, &want) / max < 1e-4, "gradients of `{}`", p.name);
        }
    }
}

#[test]
fn a_selection_bias_moves_towards_an_even_load_everywhere() {
    let config = small_config(true);
    let weights = initial_weights(&config, 3);
    let mut policy = Policy::from_weights(&config, &weights, Device::Cpu).unwrap();
    let worker = policy.share();
    let loads: Vec<u64> = (0..4).flat_map(|_| [9, 1, 5, 5, 0, 10]).collect(); // the mean is 5
    policy.update_router_bias(&loads, 0.25);
    for policy in [&policy, &worker] {
        let after = policy.to_weights();
        for layer in 1..4 {
            let name = format!("layers.{layer}.ffn.gate.bias");
            let moved: Vec<f32> =
                after[&name].as_f32().iter().zip(weights[&name].as_f32()).map(|(a, b)| a - b).collect();
            assert_eq!(moved, [-0.25, 0.25, 0.0, 0.0, 0.25, -0.25], "{name}");
        }
        assert!(!after.contains_key("layers.0.ffn.gate.bias"), "layer 0 is hash-routed");
    }
}
