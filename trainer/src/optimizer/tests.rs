//! Whole steps of both optimizers against plain loops in f64, and what a state brings back.

use rollout::model::{ModelConfig, Weights};
use tch::{Device, Kind};

use super::*;
use crate::policy::initial_weights;

fn policy_with(is_frozen: &dyn Fn(&str) -> bool) -> Policy {
    let config: ModelConfig = serde_json::from_value(serde_json::json!({
        "model_type": "deepseek_v4", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 1, "head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 4, "o_groups": 1,
        "o_lora_rank": 4, "sliding_window": 4, "compress_ratios": [0, 4], "rope_theta": 10000.0,
        "compress_rope_theta": 10000.0, "max_position_embeddings": 64, "index_n_heads": 1, "index_head_dim": 8,
        "index_topk": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4,
        "num_hash_layers": 0, "routed_scaling_factor": 1.0, "swiglu_limit": 10.0, "hc_mult": 2,
        "hc_sinkhorn_iters": 3, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1
    }))
    .unwrap();
    Policy::with_frozen(&config, &initial_weights(&config, 1), Device::Cpu, is_frozen).unwrap()
}

fn policy() -> Policy {
    policy_with(&|_| false)
}

/// A made-up gradient of every parameter: uniform in -scale..scale, by a hash of step, parameter and place.
///
/// Not a pattern: a matrix of low rank has singular values of rounding noise, which Newton-Schulz raises up to 8e4-fold
/// (3.4445^8 * 2^2), so that f32 and f64 would rightly differ.
fn made_up(policy: &Policy, step: usize, scale: f32) -> (Vec<Vec<f32>>, Gradients) {
    let number = |parameter: usize, x: usize| {
        let mut z = ((step * 1000 + parameter) * 1_000_000 + x) as u64; // splitmix64
        for multiplier in [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb] {
            z = (z ^ (z >> 30)).wrapping_add(0x9e37_79b9).wrapping_mul(multiplier);
        }
        scale * ((z >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    let (mut all, mut tensors) = (Vec::new(), Vec::new());
    for (i, p) in policy.parameters().iter().enumerate() {
        let grad: Vec<f32> = (0..p.leaf.numel()).map(|x| number(i, x)).collect();
        tensors.push(Tensor::from_slice(&grad).view_(p.leaf.size()));
        all.push(grad);
    }
    (all, Gradients::from_tensors(tensors))
}

fn masters(policy: &Policy) -> Vec<Vec<f32>> {
    policy.parameters().iter().map(|p| to_vec_f32(&p.master)).collect()
}

fn transposed(x: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..rows * columns).map(|at| x[at % rows * columns + at / rows]).collect()
}

fn product(a: &[f64], b: &[f64], rows: usize, inner: usize, columns: usize) -> Vec<f64> {
    let entry = |i: usize, j: usize| (0..inner).map(|k| a[i * inner + k] * b[k * columns + j]).sum();
    (0..rows * columns).map(|at| entry(at / columns, at % columns)).collect()
}

/// SPEC section 11, again.
fn plain_newton_schulz(g: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    if rows > columns {
        return transposed(&plain_newton_schulz(&transposed(g, rows, columns), columns, rows), columns, rows);
    }
    let norm = g.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut x: Vec<f64> = g.iter().map(|x| x / norm).collect();
    for (times, [a, b, c]) in [(8, [3.4445, -4.7750, 2.0315]), (2, [2.0, -1.5, 0.5])] {
        for _ in 0..times {
            let y = product(&x, &transposed(&x, rows, columns), rows, columns, rows);
            let y2 = product(&y, &y, rows, rows, rows);
            let (yx, y2x) = (product(&y, &x, rows, rows, columns), product(&y2, &x, rows, rows, columns));
            x = (0..x.len()).map(|i| a * x[i] + b * yx[i] + c * y2x[i]).collect();
        }
    }
    x
}

/// By the report, and by our choice for `ape` and sinks; spelled out apart from what is tested.
fn is_adamws(name: &str) -> bool {
    let ends = ["norm.weight", "_base", "_scale", ".attn_sink", ".ape"];
    name == "embed.weight" || name == "head.weight" || ends.iter().any(|end| name.ends_with(end))
}

/// Runs `scales.len()` steps beside plain loops; returns by how much a master differs at most.
fn largest_difference(config: &OptimizerConfig, scales: &[f32]) -> f64 {
    let (adamw, muon) = match config {
        OptimizerConfig::AdamW(adamw) => (adamw.clone(), None),
        OptimizerConfig::Muon(muon) => (muon.adamw(), Some(muon)),
    };
    let mut policy = policy();
    let mut optimizer = Optimizer::new(config, &policy);
    let mut w: Vec<Vec<f64>> = masters(&policy).iter().map(|p| p.iter().map(|&x| f64::from(x)).collect()).collect();
    let mut m: Vec<Vec<f64>> = w.iter().map(|p| vec![0.0; p.len()]).collect();
    let mut v = m.clone();
    let mut largest = 0.0f64;
    for (t, &scale) in scales.iter().enumerate().map(|(i, scale)| (i + 1, scale)) {
        let (grads, gradients) = made_up(&policy, t, scale);
        let report = optimizer.step(&mut policy, &gradients).unwrap();
        let norm = grads.iter().flatten().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        assert!((report.grad_norm / norm - 1.0).abs() < 1e-5);
        let clip = if norm > adamw.max_grad_norm { adamw.max_grad_norm / norm } else { 1.0 };
        let warmup = (t as f64 / adamw.warmup_steps.max(1) as f64).min(1.0);
        let rate = muon.map_or(adamw.learning_rate, |c| c.learning_rate);
        assert!((report.learning_rate - rate * warmup).abs() < 1e-12);
        for (i, p) in policy.parameters().iter().enumerate() {
            let g: Vec<f64> = grads[i].iter().map(|&g| f64::from(g) * clip).collect();
            let size: Vec<usize> = p.master.size().iter().map(|&n| n as usize).collect();
            match muon {
                Some(c) if !is_adamws(&p.name) => {
                    let [.., rows, columns] = size[..] else { panic!("`{}` is no matrix", p.name) };
                    let (mu, lr) = (c.momentum, c.learning_rate * warmup);
                    for at in (0..g.len()).step_by(rows * columns) {
                        let place = at..at + rows * columns;
                        place.clone().for_each(|x| m[i][x] = mu * m[i][x] + g[x]);
                        let ahead: Vec<f64> = place.clone().map(|x| mu * m[i][x] + g[x]).collect();
                        let o = plain_newton_schulz(&ahead, rows, columns);
                        for (x, o) in place.zip(o) {
                            let step = lr * o * (rows.max(columns) as f64).sqrt() * c.update_rms;
                            w[i][x] = w[i][x] * (1.0 - lr * c.weight_decay) - step;
                        }
                    }
                }
                _ => {
                    let (b1, b2, lr) = (adamw.beta1, adamw.beta2, adamw.learning_rate * warmup);
                    let decay = if size.len() > 1 { 1.0 - lr * adamw.weight_decay } else { 1.0 };
                    for x in 0..g.len() {
                        m[i][x] = b1 * m[i][x] + (1.0 - b1) * g[x];
                        v[i][x] = b2 * v[i][x] + (1.0 - b2) * g[x] * g[x];
                        let (mean, square) = (m[i][x] / (1.0 - b1.powi(t as i32)), v[i][x] / (1.0 - b2.powi(t as i32)));
                        w[i][x] = w[i][x] * decay - lr * mean / (square.sqrt() + adamw.eps);
                    }
                }
            }
            for (&got, &want) in to_vec_f32(&p.master).iter().zip(&w[i]) {
                largest = largest.max((f64::from(got) - want).abs());
            }
        }
    }
    largest
}

/// The second step stays below the norm that clips.
const SCALES: [f32; 5] = [1.0, 1e-4, 1.0, 0.5, 2.0];

/// Masters are about 1 and move by 0.05 a step: f32 keeps 6e-8 of that, five times over.
#[test]
fn adamw_steps_match_plain_loops() {
    let usual = AdamWConfig {
        learning_rate: 0.05,
        warmup_steps: 3,
        max_grad_norm: 2.0,
        weight_decay: 0.1,
        ..Default::default()
    };
    // An eps as large as the gradients: where it stands, and that it is not squared, is seen.
    let coarse = AdamWConfig { eps: 0.02, ..usual.clone() };
    let report = AdamWConfig { eps: 1e-20, max_grad_norm: f64::INFINITY, ..usual.clone() };
    for config in [usual, coarse, report] {
        let largest = largest_difference(&OptimizerConfig::AdamW(config.clone()), &SCALES);
        println!("AdamW in f32 differs from f64 by {largest:.1e}");
        assert!(largest < 1e-6, "{largest:e}: {config:?}");
    }
}

/// As for AdamW: the gradients have no singular value so small that Newton-Schulz would raise its rounding (see
/// [`made_up`]).
#[test]
fn muon_steps_match_plain_loops() {
    let usual = MuonConfig {
        learning_rate: 0.05,
        adamw_learning_rate: 0.02,
        weight_decay: 0.1,
        adamw_weight_decay: 0.3,
        warmup_steps: 3,
        max_grad_norm: 2.0,
        ..Default::default()
    };
    let other = MuonConfig { momentum: 0.5, update_rms: 1.0, max_grad_norm: f64::INFINITY, ..usual.clone() };
    for config in [usual, other] {
        let largest = largest_difference(&OptimizerConfig::Muon(config.clone()), &SCALES);
        println!("Muon in f32 differs from f64 by {largest:.1e}");
        assert!(largest < 1e-6, "{largest:e}: {config:?}");
    }
}

#[test]
fn muon_takes_the_matrices_that_the_report_gives_it() {
    let config = OptimizerConfig::Muon(MuonConfig::default());
    let policy = policy();
    let optimizer = Optimizer::new(&config, &policy);
    let state = optimizer.state();
    let mut bytes = 0;
    for p in policy.parameters() {
        let ends: Vec<&str> = ["mean", "square", "momentum"]
            .into_iter()
            .filter(|end| state.contains_key(&format!("{}.{end}", p.name)))
            .collect();
        let want: &[&str] = if is_adamws(&p.name) { &["mean", "square"] } else { &["momentum"] };
        assert_eq!(ends, want, "{}", p.name);
        bytes += 4 * want.len() * p.master.numel();
    }
    for name in ["layers.0.hc_attn_fn", "hc_head_fn", "layers.0.ffn.gate.weight", "layers.0.ffn.experts.w1"] {
        assert!(state.contains_key(&format!("{name}.momentum")), "{name}");
    }
    // What the plan says beforehand, by hub names, one expert after the other.
    let never = |name: &str| name.ends_with(".ffn.gate.bias") || name.contains(".attn.indexer.");
    let parameters = policy.config().parameters().into_iter().filter(|(name, _)| !never(name));
    assert_eq!(parameters.map(|(name, shape)| state_bytes(&config, &name, &shape)).sum::<usize>(), bytes);
}

#[test]
fn muon_gives_the_same_bits_with_any_number_of_threads() {
    let config = MuonConfig { learning_rate: 1e-2, ..Default::default() };
    let trained = |threads| {
        let mut policy = policy();
        let mut optimizer = Optimizer::muon(&config, &policy).with_threads(threads);
        for step in 1..4 {
            let gradients = made_up(&policy, step, 1.0).1;
            optimizer.step(&mut policy, &gradients).unwrap();
        }
        (masters(&policy), optimizer.state())
    };
    let want = trained(1);
    for threads in [2, 3, 8] {
        assert!(trained(threads) == want, "{threads} threads");
    }
}

#[test]
fn an_expert_is_updated_as_if_it_were_alone() {
    let config = MuonConfig { learning_rate: 0.1, weight_decay: 0.1, ..Default::default() };
    let random = |seed: i64| {
        tch::manual_seed(seed);
        Tensor::randn([3, 12, 5], (Kind::Float, Device::Cpu))
    };
    let (master, momentum, grad) = (random(1), random(2), random(3));
    let update = |master: &Tensor, momentum: &Tensor, grad: &Tensor| {
        let (master, momentum) = (master.copy(), momentum.copy());
        Matrix::all_of(&master, &momentum, grad).iter_mut().for_each(|matrix| matrix.update(0.7, 0.1, &config));
        (master, momentum)
    };
    let (all_masters, all_momenta) = update(&master, &momentum, &grad);
    for e in 0..3 {
        let (one_master, one_momentum) = update(&master.get(e), &momentum.get(e), &grad.get(e));
        assert_eq!(to_vec_f32(&all_masters.get(e)), to_vec_f32(&one_master));
        assert_eq!(to_vec_f32(&all_momenta.get(e)), to_vec_f32(&one_momentum));
    }
}

#[test]
fn a_zero_gradient_is_a_zero_update() {
    let mut policy = policy();
    let before = masters(&policy);
    let mut optimizer = Optimizer::muon(&MuonConfig { learning_rate: 1.0, ..Default::default() }, &policy);
    let gradients = made_up(&policy, 1, 0.0).1;
    optimizer.step(&mut policy, &gradients).unwrap();
    assert_eq!(masters(&policy), before);
}

#[test]
fn newton_schulz_forgets_the_size_of_a_matrix() {
    let matrix = Tensor::from_slice(&[1.0f32, 2.0, -1.0, 0.5, 3.0, 1.5]).view_([2, 3]);
    let want = to_vec_f32(&newton_schulz(&matrix));
    for scale in [1e-30, 1e-20, 1e20, 1e37] {
        let got = to_vec_f32(&newton_schulz(&(&matrix * scale)));
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5), "{scale:e}: {got:?}, not {want:?}");
    }
}

fn adamw(learning_rate: f64) -> OptimizerConfig {
    OptimizerConfig::AdamW(AdamWConfig { learning_rate, ..Default::default() })
}

fn muon(learning_rate: f64) -> OptimizerConfig {
    OptimizerConfig::Muon(MuonConfig { learning_rate, adamw_learning_rate: learning_rate, ..Default::default() })
}

#[test]
fn a_restored_state_repeats_the_steps() {
    for config in [adamw(1e-5), muon(1e-2)] {
        let mut policy = policy();
        let mut optimizer = Optimizer::new(&config, &policy);
        let (first, second) = (made_up(&policy, 1, 1.0).1, made_up(&policy, 2, 1.0).1);
        optimizer.step(&mut policy, &first).unwrap();
        let (weights, state, num_steps) = (policy.to_weights(), optimizer.state(), optimizer.num_steps());

        optimizer.step(&mut policy, &second).unwrap();
        let mut resumed = Policy::from_weights(policy.config(), &weights, Device::Cpu).unwrap();
        let mut again = Optimizer::new(&config, &resumed);
        again.restore(&state, num_steps).unwrap();
        again.step(&mut resumed, &second).unwrap();
        assert_eq!(masters(&resumed), masters(&policy));
        assert_eq!(again.state(), optimizer.state());

        let mut partial = state;
        partial.remove("norm.weight.mean");
        assert!(matches!(again.restore(&partial, 1), Err(OptimizerError::Missing { .. })));
    }
}

#[test]
fn the_state_of_another_type_is_refused_in_a_sentence() {
    let policy = policy();
    let after = |config: &OptimizerConfig, from: &Weights| {
        let mut optimizer = Optimizer::new(config, &policy);
        let before = optimizer.state();
        let said = optimizer.restore(from, 7).unwrap_err().to_string();
        assert_eq!((optimizer.state(), optimizer.num_steps()), (before, 0), "nothing is restored");
        said
    };
    let state = |config: &OptimizerConfig| Optimizer::new(config, &policy).state();
    insta::assert_snapshot!(after(&adamw(1e-5), &state(&muon(1e-5))), @r#"the optimizer's state was saved by `optimizer.type = "muon"`, the recipe has "adamw"; set it to "muon", or start a new run whose `model.path` is the checkpoint"#);
    insta::assert_snapshot!(after(&muon(1e-5), &state(&adamw(1e-5))), @r#"the optimizer's state was saved by `optimizer.type = "adamw"`, the recipe has "muon"; set it to "adamw", or start a new run whose `model.path` is the checkpoint"#);
}

#[test]
fn what_is_frozen_has_no_state_and_stays_bit_for_bit() {
    let is_frozen = |name: &str| name == "embed.weight" || name.starts_with("layers.1.ffn.");
    let mut policy = policy_with(&is_frozen);
    let before = policy.to_weights();
    let mut optimizer = Optimizer::new(&muon(1e-2), &policy);
    let gradients = made_up(&policy, 1, 1.0).1;
    optimizer.step(&mut policy, &gradients).unwrap();
    assert!(!optimizer.state().keys().any(|name| is_frozen(name.rsplit_once('.').expect("a kind").0)));
    for (name, after) in policy.to_weights() {
        let never = name.ends_with(".gate.bias") || name.contains(".indexer.") || name.ends_with(".tid2eid");
        assert_eq!(after == before[&name], is_frozen(&name) || never, "{name}");
    }
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    for config in [adamw(1e-5), muon(1e-5)] {
        let mut policy = policy();
        let mut optimizer = Optimizer::new(&config, &policy);
        let before = masters(&policy);
        let (_, gradients) = made_up(&policy, 1, f32::INFINITY);
        assert!(matches!(optimizer.step(&mut policy, &gradients), Err(OptimizerError::NotFinite { step: 1, .. })));
        assert_eq!(masters(&policy), before);
        assert_eq!(optimizer.num_steps(), 0);
    }
}

#[test]
fn an_update_that_overflows_is_an_error() {
    for config in [adamw(1e38), muon(1e38)] {
        let mut policy = policy();
        let mut optimizer = Optimizer::new(&config, &policy);
        let mut steps = (1..9).map(|step| {
            let (_, gradients) = made_up(&policy, step, 1.0);
            optimizer.step(&mut policy, &gradients)
        });
        let error = steps.find_map(Result::err).expect("1e38 a step is soon too much");
        assert!(matches!(error, OptimizerError::Overflow { .. }), "{error}");
    }
}
