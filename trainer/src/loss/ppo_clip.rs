//! The clipped policy-gradient loss of PPO, which GRPO and its kin share.

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::{Aggregation, TokenLoss};

/// `[loss] type = "ppo_clip"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PpoClipConfig {
    /// The ratio of probabilities is clipped below at `1 - clip_eps_low`; above 0, at most 1.
    pub clip_eps_low: f64,
    /// The ratio is clipped above at `1 + clip_eps_high`; above 0. More than `clip_eps_low` is DAPO's clip-higher.
    pub clip_eps_high: f64,
    /// How token losses become one number.
    pub aggregation: Aggregation,
}

impl Default for PpoClipConfig {
    fn default() -> Self {
        Self { clip_eps_low: 0.2, clip_eps_high: 0.2, aggregation: Aggregation::TokenMean }
    }
}

/// Beyond this the ratio's exponent is cut off: e^20 is already no ratio anyone wants to weigh by.
const MAX_LOG_RATIO: f64 = 20.0;

/// `max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))` per token, `r = exp(logp_new - logp_old)`.
///
/// PPO, arXiv:1707.06347, equation 7, minimised; two bounds as in DAPO, arXiv:2503.14476, equation 10. All tensors are
/// `[B, L]`; log-probabilities in nats. The gradient flows through `new` alone. The log-ratio is held within +-20 before
/// the exponential, so that a token far off gives a finite value and, beyond the bound, no gradient.
pub fn ppo_clip(new: &Tensor, old: &Tensor, advantages: &Tensor, config: &PpoClipConfig) -> TokenLoss {
    let ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp();
    let clipped_ratio = ratio.clamp(1.0 - config.clip_eps_low, 1.0 + config.clip_eps_high);
    let unclipped = -(advantages * ratio);
    let clipped = -(advantages * clipped_ratio);
    let is_clipped = clipped.gt_tensor(&unclipped).to_kind(Kind::Float);
    TokenLoss { loss: unclipped.max_other(&clipped), clipped: is_clipped }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loss and gradient of one token.
    fn one(log_ratio: f64, advantage: f64) -> (f64, f64, f64) {
        let config = PpoClipConfig { clip_eps_low: 0.2, clip_eps_high: 0.3, ..PpoClipConfig::default() };
        let new = Tensor::from_slice(&[log_ratio]).set_requires_grad(true);
        let token = ppo_clip(&new, &Tensor::from_slice(&[0.0]), &Tensor::from_slice(&[advantage]), &config);
        token.loss.sum(Kind::Double).backward();
        (token.loss.double_value(&[0]), new.grad().double_value(&[0]), token.clipped.double_value(&[0]))
    }

    #[track_caller]
    fn check(log_ratio: f64, advantage: f64, want: (f64, f64, f64)) {
        let got = one(log_ratio, advantage);
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-12 * b.abs().max(1.0);
        assert!(close(got.0, want.0) && close(got.1, want.1) && got.2 == want.2, "{got:?} {want:?}");
    }

    #[test]
    fn on_policy_the_gradient_is_the_advantage() {
        check(0.0, 2.0, (-2.0, -2.0, 0.0));
        check(0.0, -2.0, (2.0, 2.0, 0.0));
    }

    #[test]
    fn a_good_token_is_not_pushed_beyond_the_upper_bound() {
        check(0.5, 1.0, (-1.3, 0.0, 1.0));
    }

    #[test]
    fn a_bad_token_is_not_pushed_below_the_lower_bound() {
        check(-0.5, -1.0, (0.8, 0.0, 1.0));
    }

    #[test]
    fn what_went_the_wrong_way_is_pulled_back() {
        let r = 0.5f64.exp();
        check(0.5, -1.0, (r, r, 0.0));
    }

    #[test]
    fn a_token_far_off_has_a_finite_gradient() {
        for log_ratio in [-120.0, 120.0] {
            let (loss, gradient, _) = one(log_ratio, -1.0);
            assert!(loss.is_finite() && gradient == 0.0, "{log_ratio}: {loss} {gradient}");
        }
    }
}
