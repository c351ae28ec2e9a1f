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

/// What AdamW remembers of one parameter.
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

    /// Step `t` of `master` at learning rate `lr`: with the clipped gradient `g`, `m = b1 m + (1 - b1) g`,
    /// `v = b2 v + (1 - b2) g^2`, `w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`.
    pub fn update(&mut self, master: &mut Tensor, grad: &Tensor, t: u64, lr: f64, config: &AdamWConfig) {
        let (b1, b2) = (config.beta1, config.beta2);
        let bias1 = 1.0 - b1.powf(t as f64);
        let bias2 = 1.0 - b2.powf(t as f64);
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
