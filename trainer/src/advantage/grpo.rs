//! Group relative policy optimisation: a rollout is judged against its siblings.
//! Shapes: G rollouts of one prompt.

use serde::{Deserialize, Serialize};

/// `[advantage] type = "grpo"`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoConfig {
    /// Divide by the group's reward std (GRPO). Off: mean baseline only (Dr. GRPO).
    pub normalize_std: bool,
    /// Added to the std, in reward units.
    pub eps: f64,
}

impl Default for GrpoConfig {
    fn default() -> Self {
        Self { normalize_std: true, eps: 1e-6 }
    }
}

/// One advantage per rollout of a group: `A_i = (r_i - mean(r)) / (std(r) + eps)`.
///
/// GRPO with outcome rewards, arXiv:2402.03300, section 4.1.2; without the division it is Dr. GRPO's
/// (arXiv:2503.20783, section 3.2). `rewards_g` is `[G]`, in reward units; the result keeps its order. The std is the
/// sample's (G - 1), as in the published implementations. A group of one has no siblings to be judged against, and equal
/// rewards carry no signal: both give zeros.
pub fn group_advantage(rewards_g: &[f64], config: &GrpoConfig) -> Vec<f64> {
    let g = rewards_g.len() as f64;
    // Told by the rewards, for the mean of equal numbers may be a rounding off, and `eps` may be 0.
    if rewards_g.iter().all(|&r| r == rewards_g[0]) {
        return vec![0.0; rewards_g.len()];
    }
    let mean = rewards_g.iter().sum::<f64>() / g;
    let variance = rewards_g.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (g - 1.0);
    let scale = if config.normalize_std { 1.0 / (variance.sqrt() + config.eps) } else { 1.0 };
    rewards_g.iter().map(|r| (r - mean) * scale).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(rewards_g: &[f64], config: &GrpoConfig, want: &[f64]) {
        let got = group_advantage(rewards_g, config);
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() < 1e-5, "{got} {want}");
        }
    }

    #[test]
    fn equal_rewards_carry_no_signal() {
        check(&[1.0; 4], &GrpoConfig::default(), &[0.0; 4]);
        for g in 2..12 {
            check(&vec![0.1; g], &GrpoConfig { normalize_std: true, eps: 0.0 }, &vec![0.0; g]);
        }
    }

    #[test]
    fn a_lone_rollout_carries_no_signal() {
        check(&[0.7], &GrpoConfig::default(), &[0.0]);
    }

    #[test]
    fn better_than_the_group_is_positive() {
        let half = std::f64::consts::FRAC_1_SQRT_2;
        check(&[0.0, 1.0], &GrpoConfig::default(), &[-half, half]);
    }

    #[test]
    fn without_the_std_the_mean_is_all() {
        check(&[0.0, 1.0, 1.0, 2.0], &GrpoConfig { normalize_std: false, eps: 1e-6 }, &[-1.0, 0.0, 0.0, 1.0]);
    }
}
