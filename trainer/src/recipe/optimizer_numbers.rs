//! What the numbers of `[optimizer]` must be.

use super::{Conflict, Number, OptimizerConfig, not_negative, positive, require};

/// Checks the numbers of the optimizer that the recipe picks.
pub(super) fn check(config: &OptimizerConfig) -> Result<(), Conflict> {
    let (max_grad_norm, eps, betas) = match config {
        OptimizerConfig::AdamW(c) => {
            let keys = ["optimizer.learning_rate", "optimizer.weight_decay"];
            rate_and_decay(keys, [c.learning_rate, c.weight_decay])?;
            let betas = [("optimizer.beta1", c.beta1), ("optimizer.beta2", c.beta2)];
            (c.max_grad_norm, ("optimizer.eps", c.eps), betas)
        }
        OptimizerConfig::Muon(c) => {
            let keys = ["optimizer.learning_rate", "optimizer.weight_decay"];
            rate_and_decay(keys, [c.learning_rate, c.weight_decay])?;
            let keys = ["optimizer.adamw_learning_rate", "optimizer.adamw_weight_decay"];
            rate_and_decay(keys, [c.adamw_learning_rate, c.adamw_weight_decay])?;
            share("optimizer.momentum", c.momentum, "it is the share of the old momentum that an update keeps")?;
            positive("optimizer.update_rms", c.update_rms, "0.18 is V4's")?;
            let betas = [("optimizer.adamw_beta1", c.adamw_beta1), ("optimizer.adamw_beta2", c.adamw_beta2)];
            (c.max_grad_norm, ("optimizer.adamw_eps", c.adamw_eps), betas)
        }
    };
    positive(eps.0, eps.1, "1e-8 is usual")?;
    for (key, beta) in betas {
        share(key, beta, "it is the share of the old mean that an update keeps")?;
    }
    require(
        max_grad_norm > 0.0,
        "optimizer.max_grad_norm",
        max_grad_norm,
        "a number above 0",
        "`inf` leaves gradients as they are",
    )
}

fn share(key: &'static str, x: f64, advice: &str) -> Result<(), Conflict> {
    require((0.0..1.0).contains(&x), key, x, "at least 0 and below 1", advice)
}

fn rate_and_decay(keys: [&'static str; 2], [rate, decay]: [f64; 2]) -> Result<(), Conflict> {
    positive(keys[0], rate, "with 0 nothing is learned")?;
    not_negative(keys[1], decay, "0 leaves it out")?;
    require(
        rate * decay < 1.0,
        keys[1],
        Number(decay),
        &format!("less than 1 / {} ({})", keys[0], Number(1.0 / rate)),
        "a step takes off that share of a weight; 0.1 is usual",
    )
}
