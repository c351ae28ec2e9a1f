//! Rewards become advantages: one algorithm a file, by group id and never by reshape.

mod grpo;

pub use grpo::GrpoConfig;

use datasets::{Group, Sample};

use crate::recipe::AdvantageConfig;

/// The advantage of every rollout, in the order of `groups` and their rollouts.
///
/// Every rollout must have been scored. An unscorable rollout takes no part in its group's statistics and gets 0.
///
/// # Panics
/// When a rollout has no reward yet.
pub fn assign(groups: &[Group], config: &AdvantageConfig) -> Vec<Vec<f32>> {
    groups
        .iter()
        .map(|group| {
            let rewards: Vec<Option<f64>> = group
                .rollouts
                .iter()
                .map(|rollout| {
                    let reward = rollout.reward.as_ref().expect("the reward stage has scored every rollout");
                    (reward.verdict != datasets::Verdict::Unscorable).then_some(reward.score)
                })
                .collect();
            let scored: Vec<f64> = rewards.iter().flatten().copied().collect();
            let advantages = match config {
                AdvantageConfig::Grpo(config) => grpo::group_advantage(&scored, config),
            };
            let mut advantages = advantages.into_iter();
            rewards.iter().map(|r| r.map_or(0.0, |_| advantages.next().expect("one a scored rollout") as f32)).collect()
        })
        .collect()
}

/// The training sample of every rollout: its trajectory, trained on the response, with one advantage for all its tokens.
///
/// Rollouts whose advantage is 0 carry no signal for a policy-gradient loss, but stay: they count in the mean.
pub fn samples(groups: &[Group], advantages: &[Vec<f32>]) -> Vec<Sample> {
    let rollouts =
        groups.iter().zip(advantages).flat_map(|(group, a)| group.rollouts.iter().zip(a).map(move |r| (group, r)));
    rollouts
        .map(|(group, (rollout, &advantage))| {
            let (prompt, response) = (group.prompt_tokens.len(), rollout.response_tokens.len());
            // The first prediction of the response is made at the prompt's last token.
            let masked = prompt - 1;
            let aligned = |values: &[f32]| [vec![0.0; masked], values.to_vec()].concat();
            Sample {
                group_id: group.group_id,
                rollout_id: rollout.rollout_id,
                tokens: group.prompt_tokens.iter().chain(&rollout.response_tokens).copied().collect(),
                loss_mask: (0..masked + response).map(|t| t >= masked).collect(),
                advantages: aligned(&vec![advantage; response]),
                rollout_logprobs: aligned(&rollout.rollout_logprobs),
                routing: Some(rollout.routing.clone()),
                indexer: Some(rollout.indexer.clone()),
            }
        })
        .collect()
}
