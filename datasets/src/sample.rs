//! A rollout made ready for training: one token sequence with its mask and advantages.

use std::sync::Arc;

use crate::{IndexerChoices, RoutingChoices};

/// One trajectory as the trainer reads it.
///
/// The model reads `tokens[..n-1]` and predicts `tokens[1..]`, so every per-token field has `n - 1` entries: entry `t`
/// belongs to the prediction of `tokens[t + 1]`.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The group it belongs to.
    pub group_id: u64,
    /// The rollout it was made of.
    pub rollout_id: u64,
    /// Prompt and response, `n` tokens.
    pub tokens: Vec<u32>,
    /// Which predictions are trained on, `n - 1`.
    pub loss_mask: Vec<bool>,
    /// Advantage of each prediction, `n - 1`; 0 where masked.
    pub advantages: Vec<f32>,
    /// The engine's log-probability of each predicted token, `n - 1`; 0 where masked.
    pub rollout_logprobs: Vec<f32>,
    /// Expert choices of the rollout for `tokens[..n-1]`, if it made any.
    pub routing: Option<Arc<RoutingChoices>>,
    /// Indexer selections of the rollout for `tokens[..n-1]`.
    pub indexer: Option<Arc<IndexerChoices>>,
}
