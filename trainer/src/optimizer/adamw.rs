//! AdamW: Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101, algorithm 2).

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::policy::Parameter;

/// The optimizer's numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Step size after the warm-up.
    pub learning_rate: f64,
    /// Decay of the gradients' running mean, per update; at least 0, below 1. V4 was pre-trained with 0.9.
    pub beta1: f64,
    /// Decay of the squared gradients' running mean, per update; at least 0, below 1. V4 was pre-trained with 0.95.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Each step multiplies matrices by `1 - learning_rate * weight_decay`. Vectors (norms, biases, gates) are spared.
    pub weight_decay: f64,
    /// Gradients are scaled down to this norm, taken over all parameters together. Infinity never scales.
    pub max_grad_norm: f64,
    /// Steps over which the learning rate rises in a straight line; step 1 takes `1 / warmup_steps` of it.
    pub warmup_steps: u64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-5,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            warmup_steps: 0,
        }
    }
}

/// The moments of one parameter.
pub(super) struct Moments {
    /// Mean of the gradients, and of their squares; shaped as the parameter.
    pub mean: Tensor,
    pub square: Tensor,
}

impl Moments {
    pub fn new(parameter: &Parameter) -> Self {
        let zeros = || parameter.master.detach().zeros_like();
        Self { mean: zeros(), square: zeros() }
    }

    /// One update, the `step`-th, of `master` by the clipped gradient `g`: `m = b1 m + (1 - b1) g`,
    /// `v = b2 v + (1 - b2) g^2`, `w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`.
    pub fn update(&mut self, master: &mut Tensor, grad: &Tensor, step: u64, lr: f64, config: &AdamWConfig) {
        let (b1, b2) = (config.beta1, config.beta2);
        let bias1 = 1.0 - b1.powf(step as f64);
        let bias2 = 1.0 - b2.powf(step as f64);
        let _ = self.mean.lerp_(grad, 1.0 - b1);
        let _ = self.square.g_mul_scalar_(b2);
        let _ = self.square.addcmul_(grad, &(grad * (1.0 - b2)));
        if master.dim() > 1 && config.weight_decay != 0.0 {
            let _ = master.g_mul_scalar_(1.0 - lr * config.weight_decay);
        }
        let divisor = (&self.square / bias2).sqrt_().g_add_scalar_(config.eps);
        let _ = master.addcdiv_(&(&self.mean * (-lr / bias1)), &divisor);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use rollout::model::ModelConfig;
    use tch::Device;

    use super::super::{Optimizer, OptimizerError};
    use super::*;
    use crate::policy::{Gradients, Policy, initial_weights, to_vec_f32};

    pub fn policy() -> Policy {
        let config: ModelConfig = serde_json::from_value(serde_json::json!({
            "model_type": "deepseek_v4", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 4, "o_groups": 1,
            "o_lora_rank": 4, "sliding_window": 4, "compress_ratios": [0], "rope_theta": 10000.0,
            "compress_rope_theta": 10000.0, "max_position_embeddings": 64, "index_n_heads": 1, "index_head_dim": 8,
            "index_topk": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4,
            "num_hash_layers": 0, "routed_scaling_factor": 1.0, "swiglu_limit": 10.0, "hc_mult": 2,
            "hc_sinkhorn_iters": 3, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1
        }))
        .unwrap();
        Policy::from_weights(&config, &initial_weights(&config, 1), Device::Cpu).unwrap()
    }

    /// A made-up gradient of every parameter, a function of step and place.
    pub fn made_up(policy: &Policy, step: usize, scale: f32) -> (Vec<Vec<f32>>, Gradients) {
        let (mut all, mut tensors) = (Vec::new(), Vec::new());
        for (i, p) in policy.parameters().iter().enumerate() {
            let grad: Vec<f32> =
                (0..p.leaf.numel()).map(|x| scale * (((x * 31 + i * 7 + step * 13) % 17) as f32 - 8.0) / 8.0).collect();
            tensors.push(Tensor::from_slice(&grad).view_(p.leaf.size()));
            all.push(grad);
        }
        (all, Gradients::from_tensors(tensors))
    }

    pub fn masters(policy: &Policy) -> Vec<Vec<f32>> {
        policy.parameters().iter().map(|p| to_vec_f32(&p.master)).collect()
    }

    #[test]
    fn steps_match_a_scalar_loop() {
        let config = AdamWConfig {
            learning_rate: 0.05,
            warmup_steps: 3,
            max_grad_norm: 2.0,
            weight_decay: 0.1,
            ..Default::default()
        };
        let mut policy = policy();
        let mut optimizer = Optimizer::adamw(&config, &policy);
        let mut w: Vec<Vec<f64>> = masters(&policy).iter().map(|p| p.iter().map(|&x| f64::from(x)).collect()).collect();
        let mut m: Vec<Vec<f64>> = w.iter().map(|p| vec![0.0; p.len()]).collect();
        let mut v = m.clone();
        let (b1, b2) = (config.beta1, config.beta2);
        for step in 1..=5 {
            let scale = if step == 2 { 1e-4 } else { 1.0 }; // one step below the norm that clips
            let (grads, gradients) = made_up(&policy, step, scale);
            let report = optimizer.step(&mut policy, &gradients).unwrap();
            let norm = grads.iter().flatten().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
            assert!((report.grad_norm / norm - 1.0).abs() < 1e-5);
            let clip = (config.max_grad_norm / norm).min(1.0);
            let lr = config.learning_rate * (step as f64 / 3.0).min(1.0);
            assert!((report.learning_rate - lr).abs() < 1e-12);
            for (i, p) in policy.parameters().iter().enumerate() {
                let decay = if p.master.dim() > 1 { 1.0 - lr * config.weight_decay } else { 1.0 };
                for x in 0..w[i].len() {
                    let g = f64::from(grads[i][x]) * clip;
                    m[i][x] = b1 * m[i][x] + (1.0 - b1) * g;
                    v[i][x] = b2 * v[i][x] + (1.0 - b2) * g * g;
                    let (mean, square) =
                        (m[i][x] / (1.0 - b1.powi(step as i32)), v[i][x] / (1.0 - b2.powi(step as i32)));
                    w[i][x] = w[i][x] * decay - lr * mean / (square.sqrt() + config.eps);
                    let got = f64::from(to_vec_f32(&p.master)[x]);
                    assert!((got - w[i][x]).abs() < 1e-5, "step {step}, `{}`[{x}]: {got}, not {}", p.name, w[i][x]);
                }
            }
        }
    }

    #[test]
    fn a_restored_state_repeats_the_steps() {
        let (mut policy, config) = (policy(), AdamWConfig::default());
        let mut optimizer = Optimizer::adamw(&config, &policy);
        let (first, second) = (made_up(&policy, 1, 1.0).1, made_up(&policy, 2, 1.0).1);
        optimizer.step(&mut policy, &first).unwrap();
        let (weights, state, num_steps) = (policy.to_weights(), optimizer.state(), optimizer.num_steps());

        optimizer.step(&mut policy, &second).unwrap();
        let mut resumed = Policy::from_weights(policy.config(), &weights, Device::Cpu).unwrap();
        let mut again = Optimizer::adamw(&config, &resumed);
        again.restore(&state, num_steps).unwrap();
        again.step(&mut resumed, &second).unwrap();
        assert_eq!(masters(&resumed), masters(&policy));
        assert_eq!(again.state(), optimizer.state());

        let mut partial = state;
        partial.remove("norm.weight.mean");
        assert!(matches!(again.restore(&partial, 1), Err(OptimizerError::Missing { .. })));
    }

    #[test]
    fn a_gradient_that_is_not_finite_changes_nothing() {
        let mut policy = policy();
        let mut optimizer = Optimizer::adamw(&AdamWConfig::default(), &policy);
        let before = masters(&policy);
        let (_, gradients) = made_up(&policy, 1, f32::INFINITY);
        assert!(matches!(optimizer.step(&mut policy, &gradients), Err(OptimizerError::NotFinite { step: 1, .. })));
        assert_eq!(masters(&policy), before);
        assert_eq!(optimizer.num_steps(), 0);
    }

    #[test]
    fn an_update_that_overflows_is_an_error() {
        let mut policy = policy();
        let mut optimizer = Optimizer::adamw(&AdamWConfig { learning_rate: 1e38, ..Default::default() }, &policy);
        let mut steps = (1..9).map(|step| {
            let (_, gradients) = made_up(&policy, step, 1.0);
            optimizer.step(&mut policy, &gradients)
        });
        let error = steps.find_map(Result::err).expect("1e38 a step is soon too much");
        assert!(matches!(error, OptimizerError::Overflow { .. }), "{error}");
    }
}
