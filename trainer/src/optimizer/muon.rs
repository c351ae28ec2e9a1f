//! Muon: momentum whose matrices are made orthogonal, as DeepSeek-V4 was trained with it (V4's report, sec. 2.4; v4/SPEC
//! section 11). Shapes: E expert matrices, n rows, m columns.

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::AdamWConfig;

/// Muon for matrices, AdamW for the rest.
///
/// AdamW's are the embedding, the output head, the hyper-connections' `base` and `scale`, and all RMSNorm weights, as the
/// report says. The report leaves open the attention sinks, the compressors' `ape`, and the hyper-connections' `fn`. Our
/// choice: sinks are vectors, which have no orthogonal form, and `ape` is a table of offsets that are looked up by
/// position and added, like an embedding: both are AdamW's. `fn` multiplies activations: it is Muon's, like every other
/// matrix. A matrix is made orthogonal whole, not by head or group; each expert's by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MuonConfig {
    /// Muon's step size after the warm-up. The root mean square of an update is `update_rms` of it, where AdamW's first
    /// updates have nearly 1: several times AdamW's rate is where to start.
    pub learning_rate: f64,
    /// Share of the old momentum that an update keeps; at least 0, below 1. The report's value is 0.95.
    pub momentum: f64,
    /// Root mean square of an update of a square matrix at learning rate 1. The report's value is 0.18.
    pub update_rms: f64,
    /// Each step multiplies Muon's matrices by `1 - learning_rate * weight_decay`. The report pre-trains with 0.1; RL starts
    /// from weights worth keeping, so the default is 0.
    pub weight_decay: f64,
    /// AdamW's step size after the warm-up, for what Muon does not take.
    pub adamw_learning_rate: f64,
    /// AdamW's decay of the gradients' running mean, per update; at least 0, below 1. The report's value is 0.9.
    pub adamw_beta1: f64,
    /// AdamW's decay of the squared gradients' running mean, per update; at least 0, below 1. The report's value is 0.95.
    pub adamw_beta2: f64,
    /// AdamW's, added to the square root of the second moment. The report's 1e-20 moves a weight at full speed however
    /// small its gradient; RL's small gradients are mostly noise, so the default is 1e-8.
    pub adamw_eps: f64,
    /// Each step multiplies AdamW's tables (embedding, head, `ape`) by `1 - adamw_learning_rate * adamw_weight_decay`.
    /// The report pre-trains with 0.1; the default is 0, as for `weight_decay`.
    pub adamw_weight_decay: f64,
    /// Gradients are scaled down to this norm, taken over all parameters together. Infinity never scales. The length of
    /// Muon's steps does not depend on a gradient's size, but the weight of a gradient in its momentum does.
    pub max_grad_norm: f64,
    /// Steps over which both learning rates rise in a straight line; step 1 takes `1 / warmup_steps` of them.
    pub warmup_steps: u64,
}

impl Default for MuonConfig {
    fn default() -> Self {
        let AdamWConfig { learning_rate, beta1, beta2, eps, weight_decay, max_grad_norm, warmup_steps } =
            AdamWConfig::default();
        Self {
            learning_rate,
            momentum: 0.95,
            update_rms: 0.18,
            weight_decay,
            adamw_learning_rate: learning_rate,
            adamw_beta1: beta1,
            adamw_beta2: beta2,
            adamw_eps: eps,
            adamw_weight_decay: weight_decay,
            max_grad_norm,
            warmup_steps,
        }
    }
}

impl MuonConfig {
    /// What AdamW does with the parameters that Muon does not take.
    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig {
            learning_rate: self.adamw_learning_rate,
            beta1: self.adamw_beta1,
            beta2: self.adamw_beta2,
            eps: self.adamw_eps,
            weight_decay: self.adamw_weight_decay,
            max_grad_norm: self.max_grad_norm,
            warmup_steps: self.warmup_steps,
        }
    }
}

/// Whether Muon takes the parameter `name` of so many dimensions; [`MuonConfig`] says why.
pub(super) fn takes(name: &str, num_dims: usize) -> bool {
    num_dims > 1 && !matches!(name, "embed.weight" | "head.weight") && !name.ends_with(".ape")
}

/// One matrix to update: `[n, m]` views into the master, the momentum and the gradient of a parameter.
pub(super) struct Matrix {
    master: Tensor,
    momentum: Tensor,
    grad: Tensor,
}

impl Matrix {
    /// The matrix of a parameter `[n, m]`, or the matrices of `[E, n, m]`.
    ///
    /// Experts do not share one batched product: for small matrices libtorch adds a batch up in another order than a
    /// single product (1x32 and 4x8 differ by 5e-7), so an expert would depend on being one of several; and at the quick
    /// start's sizes a batch takes as long (8 of 64x128 on one thread: 8.5 ms, one by one 9.0 ms).
    pub fn all_of(master: &Tensor, momentum: &Tensor, grad: &Tensor) -> Vec<Self> {
        let matrices = |t: &Tensor| if t.dim() == 2 { vec![t.shallow_clone()] } else { t.unbind(0) };
        let parts = matrices(&master.detach()).into_iter().zip(matrices(momentum)).zip(matrices(grad));
        parts.map(|((master, momentum), grad)| Self { master, momentum, grad }).collect()
    }

    /// A step at learning rate `lr`: with `G` the gradient times `clip`, `M = mu M + G`, `O = NS(mu M + G)`,
    /// `W = W (1 - lr wd) - lr O sqrt(max(n, m)) update_rms` (v4/SPEC section 11).
    pub fn update(&mut self, clip: f64, lr: f64, config: &MuonConfig) {
        let grad = &self.grad * clip;
        let _ = self.momentum.g_mul_scalar_(config.momentum).g_add_(&grad);
        let orthogonal = newton_schulz(&(&self.momentum * config.momentum + grad));
        let longer_side = orthogonal.size().into_iter().max().expect("a matrix has sides") as f64;
        if config.weight_decay != 0.0 {
            let _ = self.master.g_mul_scalar_(1.0 - lr * config.weight_decay);
        }
        let _ = self.master.g_add_(&(orthogonal * (-lr * longer_side.sqrt() * config.update_rms)));
    }
}

/// About `U V^T` of the matrix `U S V^T`, `[n, m]`: eight Newton-Schulz iterations that are fast, then two that bring the
/// singular values to 1 (V4's report, sec. 2.4; v4/SPEC section 11). Zero stays zero.
pub fn newton_schulz(matrix: &Tensor) -> Tensor {
    let is_tall = matrix.size()[0] > matrix.size()[1];
    let x = if is_tall { matrix.transpose(0, 1) } else { matrix.shallow_clone() };
    // In f64: squares of f32 overflow from 1e19 on and vanish below 1e-23.
    let x = x.to_kind(Kind::Double);
    let mut x = (&x / x.norm().clamp_min(f64::MIN_POSITIVE)).to_kind(matrix.kind());
    for iteration in 0..10 {
        let (a, b, c) = if iteration < 8 { (3.4445, -4.7750, 2.0315) } else { (2.0, -1.5, 0.5) };
        let y = x.mm(&x.transpose(0, 1));
        x = &x * a + (&y * b + y.mm(&y) * c).mm(&x);
    }
    if is_tall { x.transpose(0, 1).contiguous() } else { x }
}
