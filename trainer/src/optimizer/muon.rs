//! Muon: momentum whose matrices are made orthogonal (Jordan et al., 2024), as DeepSeek-V4 was trained with it
//! (arXiv:2606.19348, sec. 2.4; v4/SPEC section 11). Shapes: E matrices of one kind, n rows, m columns.

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::AdamWConfig;

/// Muon for matrices, AdamW for the rest.
///
/// AdamW takes embedding, output head, RMSNorm weights and the hyper-connections' biases and scales, as the report says;
/// also every other vector (attention sinks) and the compressors' position biases (`ape`), tables that are added and
/// multiply nothing. The report does not name these two. Every other matrix is Muon's, whole (no head or group of it by
/// itself), the hyper-connections' `fn` among them; each expert's by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MuonConfig {
    /// Step size after the warm-up, of both: `update_rms` makes Muon's updates as large as AdamW's.
    pub learning_rate: f64,
    /// Share of the old momentum that an update keeps; at least 0, below 1. The report's value.
    pub momentum: f64,
    /// Root of the mean square of an update at learning rate 1. The report's value.
    pub update_rms: f64,
    /// Each step multiplies matrices by `1 - learning_rate * weight_decay`. The report pre-trains with 0.1; in RL, which
    /// starts from weights worth keeping, 0 is usual.
    pub weight_decay: f64,
    /// AdamW's, for what Muon does not take: decay of the gradients' running mean; at least 0, below 1.
    pub beta1: f64,
    /// AdamW's: decay of the squared gradients' running mean; at least 0, below 1.
    pub beta2: f64,
    /// AdamW's: added to the square root of the second moment. The report's 1e-20 follows tiny gradients at full speed.
    pub eps: f64,
    /// Gradients are scaled down to this norm, taken over all parameters together. Infinity never scales. Muon's own
    /// updates do not depend on a gradient's size, but its momentum weighs steps by it.
    pub max_grad_norm: f64,
    /// Steps over which the learning rate rises in a straight line; step 1 takes `1 / warmup_steps` of it.
    pub warmup_steps: u64,
}

impl Default for MuonConfig {
    fn default() -> Self {
        let AdamWConfig { learning_rate, beta1, beta2, eps, weight_decay, max_grad_norm, warmup_steps } =
            AdamWConfig::default();
        let (momentum, update_rms) = (0.95, 0.18);
        Self { learning_rate, momentum, update_rms, weight_decay, beta1, beta2, eps, max_grad_norm, warmup_steps }
    }
}

impl MuonConfig {
    /// What AdamW does with the parameters that Muon does not take.
    pub fn adamw(&self) -> AdamWConfig {
        let Self { learning_rate, beta1, beta2, eps, weight_decay, max_grad_norm, warmup_steps, .. } = *self;
        AdamWConfig { learning_rate, beta1, beta2, eps, weight_decay, max_grad_norm, warmup_steps }
    }
}

/// Whether Muon takes a parameter with this many dimensions; `name` is a [`Parameter`](crate::policy::Parameter)'s.
pub(super) fn takes(name: &str, num_dims: usize) -> bool {
    num_dims > 1 && !["embed.weight", "head.weight"].contains(&name) && !name.ends_with(".ape")
}

/// One update of `master`, `[n, m]` or `[E, n, m]`: `M = mu M + G`, `O = NS(mu M + G)`,
/// `W = W (1 - lr wd) - lr O sqrt(max(n, m)) update_rms` (v4/SPEC section 11).
pub(super) fn update(master: &mut Tensor, momentum: &mut Tensor, grad: &Tensor, lr: f64, config: &MuonConfig) {
    let _ = momentum.g_mul_scalar_(config.momentum).g_add_(grad);
    let direction = &*momentum * config.momentum + grad;
    let size = master.size();
    let longer = size[size.len() - 2].max(size[size.len() - 1]) as f64;
    let orthogonal = if size.len() == 2 {
        newton_schulz(&direction)
    } else {
        // One matrix after the other: a batched product need not give the bits of a single one.
        Tensor::stack(&direction.unbind(0).iter().map(newton_schulz).collect::<Vec<_>>(), 0)
    };
    if config.weight_decay != 0.0 {
        let _ = master.g_mul_scalar_(1.0 - lr * config.weight_decay);
    }
    let _ = master.g_add_(&(orthogonal * (-lr * longer.sqrt() * config.update_rms)));
}

/// The matrix nearest to orthogonal, about `U V^T` of `g = U S V^T`: eight fast Newton-Schulz iterations, then two that
/// bring the singular values to 1 (arXiv:2606.19348, sec. 2.4; v4/SPEC section 11). Zero stays zero.
pub fn newton_schulz(g: &Tensor) -> Tensor {
    let is_tall = g.size()[0] > g.size()[1];
    let x = if is_tall { g.transpose(0, 1) } else { g.shallow_clone() };
    // The norm in f64: squares of small gradients underflow in f32.
    let norm = x.to_kind(Kind::Double).norm().clamp_min(f64::from(f32::MIN_POSITIVE)).to_kind(x.kind());
    let mut x = x / norm;
    for iteration in 0..10 {
        let (a, b, c) = if iteration < 8 { (3.4445, -4.7750, 2.0315) } else { (2.0, -1.5, 0.5) };
        let y = x.mm(&x.transpose(0, 1));
        x = &x * a + (&y * b + y.mm(&y) * c).mm(&x);
    }
    if is_tall { x.transpose(0, 1).contiguous() } else { x }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rollout::model::ModelConfig;
    use safetensors::SafeTensors;
    use tch::Device;

    use super::super::adamw::tests::{made_up, masters, policy};
    use super::super::{Optimizer, OptimizerError};
    use super::*;
    use crate::policy::{Policy, to_vec_f32};

    /// The iteration again, in plain loops of f64.
    fn reference(g: &[f64], rows: usize, columns: usize) -> Vec<f64> {
        let transpose = |x: &[f64], rows: usize, columns: usize| -> Vec<f64> {
            (0..columns).flat_map(|j| (0..rows).map(move |i| x[i * columns + j])).collect()
        };
        if rows > columns {
            return transpose(&reference(&transpose(g, rows, columns), columns, rows), columns, rows);
        }
        let product = |a: &[f64], b: &[f64], n: usize, k: usize, m: usize| -> Vec<f64> {
            let element = |i: usize, j: usize| (0..k).map(|x| a[i * k + x] * b[x * m + j]).sum();
            (0..n * m).map(|at| element(at / m, at % m)).collect()
        };
        let norm = g.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut x: Vec<f64> = g.iter().map(|x| if norm == 0.0 { 0.0 } else { x / norm }).collect();
        for iteration in 0..10 {
            let (a, b, c) = if iteration < 8 { (3.4445, -4.7750, 2.0315) } else { (2.0, -1.5, 0.5) };
            let y = product(&x, &transpose(&x, rows, columns), rows, columns, rows);
            let yy = product(&y, &y, rows, rows, rows);
            let z: Vec<f64> = y.iter().zip(&yy).map(|(y, yy)| b * y + c * yy).collect();
            let zx = product(&z, &x, rows, rows, columns);
            x = x.iter().zip(&zx).map(|(x, zx)| a * x + zx).collect();
        }
        x
    }

    #[test]
    fn golden_v4_newton_schulz() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/v4/formats/formats.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let values = |name: &str| -> (Vec<usize>, Vec<f32>) {
            let view = file.tensor(name).unwrap();
            (view.shape().to_vec(), view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
        };
        let mut num_cases = 0;
        for name in file.names().into_iter().filter_map(|n| n.strip_prefix("muon_ns.")?.strip_suffix(".in")) {
            let (shape, input) = values(&format!("muon_ns.{name}.in"));
            let (_, want) = values(&format!("muon_ns.{name}.out"));
            let x = Tensor::from_slice(&input).view_([shape[0] as i64, shape[1] as i64]);
            let got = to_vec_f32(&newton_schulz(&x));
            let error = got.iter().zip(&want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
            // The iteration draws every singular value to 1, so roundings of f32 do not add up: some units in the last
            // place of values up to 1.
            println!("{name}: f32 differs from f64 by {error:.1e}");
            assert!(error < 2e-6, "{name}: {error}");
            num_cases += 1;
        }
        assert!(num_cases > 0);
    }

    #[test]
    fn steps_match_scalar_loops() {
        let config = MuonConfig { learning_rate: 0.05, weight_decay: 0.1, max_grad_norm: 2.0, ..Default::default() };
        let mut policy = policy();
        let mut optimizer = Optimizer::muon(&config, &policy);
        let before = masters(&policy);
        let mut w: Vec<Vec<f64>> = before.iter().map(|p| p.iter().map(|&x| f64::from(x)).collect()).collect();
        let mut momentum: Vec<Vec<f64>> = w.iter().map(|p| vec![0.0; p.len()]).collect();
        let mut num_muon = 0;
        for step in 1..=3 {
            let (grads, gradients) = made_up(&policy, step, 1.0);
            optimizer.step(&mut policy, &gradients).unwrap();
            let norm = grads.iter().flatten().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
            let clip = (config.max_grad_norm / norm).min(1.0);
            for (i, p) in policy.parameters().iter().enumerate() {
                if !takes(&p.name, p.master.dim()) {
                    continue;
                }
                num_muon += 1;
                let size: Vec<usize> = p.master.size().iter().map(|&n| n as usize).collect();
                let (rows, columns) = (size[size.len() - 2], size[size.len() - 1]);
                let scale = (rows.max(columns) as f64).sqrt() * config.update_rms;
                for at in (0..w[i].len()).step_by(rows * columns) {
                    let range = at..at + rows * columns;
                    let mut direction = Vec::new();
                    for x in range.clone() {
                        let g = f64::from(grads[i][x]) * clip;
                        momentum[i][x] = config.momentum * momentum[i][x] + g;
                        direction.push(config.momentum * momentum[i][x] + g);
                    }
                    let orthogonal = reference(&direction, rows, columns);
                    for (x, o) in range.zip(orthogonal) {
                        w[i][x] = w[i][x] * (1.0 - config.learning_rate * config.weight_decay)
                            - config.learning_rate * o * scale;
                        let got = f64::from(to_vec_f32(&p.master)[x]);
                        assert!((got - w[i][x]).abs() < 2e-5, "step {step}, `{}`[{x}]: {got}, not {}", p.name, w[i][x]);
                    }
                }
            }
        }
        assert!(num_muon >= 3 * 12, "{num_muon}");
    }

    #[test]
    fn who_takes_what() {
        for name in
            ["embed.weight", "head.weight", "layers.0.attn.compressor.ape", "layers.2.attn.indexer.compressor.ape"]
        {
            assert!(!takes(name, 2), "{name}");
        }
        for name in ["norm.weight", "layers.0.hc_attn_base", "layers.0.hc_ffn_scale", "layers.0.attn.attn_sink"] {
            assert!(!takes(name, 1), "{name}");
        }
        for name in ["layers.0.attn.wq_a.weight", "layers.0.hc_attn_fn", "hc_head_fn", "layers.0.ffn.gate.weight"] {
            assert!(takes(name, 2), "{name}");
        }
        assert!(takes("layers.0.ffn.experts.w1", 3));
    }

    #[test]
    fn nothing_to_go_by_changes_nothing() {
        assert_eq!(to_vec_f32(&newton_schulz(&Tensor::zeros([3, 5], (Kind::Float, Device::Cpu)))), [0.0; 15]);
        // And a gradient of any size that f32 holds gives the same direction.
        let g = Tensor::from_slice(&[1.0f32, 2.0, -1.0, 0.5, 3.0, 1.5]).view_([2, 3]);
        let want = to_vec_f32(&newton_schulz(&g));
        for scale in [1e-30, 1e30] {
            let got = to_vec_f32(&newton_schulz(&(&g * scale)));
            assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5), "{scale:e}: {got:?} {want:?}");
        }
    }

    #[test]
    fn a_restored_state_repeats_the_steps_and_another_type_is_refused() {
        let (mut policy, config) = (policy(), MuonConfig { learning_rate: 1e-2, ..Default::default() });
        let mut optimizer = Optimizer::muon(&config, &policy);
        let (first, second) = (made_up(&policy, 1, 1.0).1, made_up(&policy, 2, 1.0).1);
        optimizer.step(&mut policy, &first).unwrap();
        let (weights, state, num_steps) = (policy.to_weights(), optimizer.state(), optimizer.num_steps());
        optimizer.step(&mut policy, &second).unwrap();
        let model: &ModelConfig = policy.config();
        let mut resumed = Policy::from_weights(model, &weights, Device::Cpu).unwrap();
        let mut again = Optimizer::muon(&config, &resumed);
        again.restore(&state, num_steps).unwrap();
        again.step(&mut resumed, &second).unwrap();
        assert_eq!(masters(&resumed), masters(&policy));
        assert_eq!(again.state(), optimizer.state());
        let mut other = Optimizer::adamw(&config.adamw(), &policy);
        let error = other.restore(&state, 1).unwrap_err();
        assert!(matches!(error, OptimizerError::Missing { .. }));
        assert!(
            error.to_string().ends_with("was it saved for another model, or by another `optimizer.type`?"),
            "{error}"
        );
    }
}
