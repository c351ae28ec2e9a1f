//! A prompt gets a group of rollouts; a rollout is what one sampling of the model produced, and later its reward.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::Prompt;

/// Why a rollout ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model said the end-of-sequence token, which is the last of `response_tokens`.
    Stop,
    /// The token limit was reached first: the response is truncated.
    Length,
}

/// The experts that were chosen for each token, so that training can repeat the choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingChoices {
    /// Layers of the model (every V4 layer has experts).
    pub num_layers: usize,
    /// Experts per token, `K`.
    pub num_experts_per_token: usize,
    /// `[T, num_layers, K]`, row-major, each layer's experts in the router's order.
    pub expert_idx: Vec<u16>,
}

/// The compressed blocks that the lightning indexer chose for each token, in its CSA layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexerChoices {
    /// CSA layers of the model, in their order.
    pub num_layers: usize,
    /// Slots per token and layer, `index_topk`.
    pub top_k: usize,
    /// `[T, num_layers, top_k]`, row-major, ascending block numbers; unused slots hold `u32::MAX`.
    pub block_idx: Vec<u32>,
}

/// How sure the reward is. `Unscorable` never poses as a score of 0 without being counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Full marks.
    Right,
    /// Less than full marks, down to none.
    Wrong,
    /// The reward could not judge (a broken reference, a bound on work reached).
    Unscorable,
}

/// What a reward said of one rollout.
#[derive(Clone, Debug, PartialEq)]
pub struct Reward {
    /// Right, wrong or unscorable.
    pub verdict: Verdict,
    /// The number that advantages are made of; 0 where the verdict is `Unscorable`.
    pub score: f64,
    /// The named parts it is made of, for the log.
    pub parts: BTreeMap<String, f64>,
}

/// One sampled response with everything the trainer needs to know about its making.
///
/// `T` is the number of tokens that went through the model: the prompt and all of the response but its last token.
#[derive(Clone, Debug)]
pub struct Rollout {
    /// Unique within a run; keys the random stream together with the run's seed.
    pub rollout_id: u64,
    /// Sampled tokens, the end-of-sequence token included if it was said.
    pub response_tokens: Vec<u32>,
    /// The response as text, without the end-of-sequence token.
    pub response_text: String,
    /// The engine's log-probability of each response token under the distribution it was drawn from.
    pub rollout_logprobs: Vec<f32>,
    /// The version of the weights that made each response token.
    pub weight_versions: Vec<u64>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Expert choices for the `T` tokens that went through the model.
    pub routing: Arc<RoutingChoices>,
    /// Indexer selections for the same tokens.
    pub indexer: Arc<IndexerChoices>,
    /// Filled by the reward stage.
    pub reward: Option<Reward>,
}

/// All rollouts of one prompt.
#[derive(Clone, Debug)]
pub struct Group {
    /// Unique within a run.
    pub group_id: u64,
    /// What was asked.
    pub prompt: Arc<Prompt>,
    /// The prompt as the model read it.
    pub prompt_tokens: Arc<[u32]>,
    /// The group's rollouts.
    pub rollouts: Vec<Rollout>,
}
