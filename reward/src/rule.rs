//! What every rule offers, and the stage itself: fill the reward of every rollout.

use datasets::{Group, Prompt, Reward};

use crate::RewardError;

/// Scores one response to a prompt.
///
/// `score` must come back on any text: its work is bounded by counting, and it does not panic. A prompt that passed
/// `check` can be scored; one that would not pass gives `Unscorable`.
pub trait RewardFn: Send + Sync {
    /// The rule's name, as a recipe's `type` says it.
    fn name(&self) -> &'static str;

    /// Whether `prompt` carries what the rule reads.
    ///
    /// # Errors
    /// One sentence that names the row, what was found, what was expected and what to do.
    fn check(&self, prompt: &Prompt) -> Result<(), RewardError>;

    /// The reward of `response_text`, the text of a rollout without its end-of-sequence token.
    fn score(&self, prompt: &Prompt, response_text: &str) -> Reward;

    /// A response that the rule must call right: the reference answer in the form in which the rule looks for one.
    fn reference_response(&self, prompt: &Prompt) -> String {
        prompt.answer.clone()
    }
}

/// Fills `Rollout::reward` of every rollout in `groups`; groups and rollouts keep their order.
pub fn score_groups(rule: &dyn RewardFn, groups: &mut [Group]) {
    for group in groups {
        for rollout in &mut group.rollouts {
            rollout.reward = Some(rule.score(&group.prompt, &rollout.response_text));
        }
    }
}
