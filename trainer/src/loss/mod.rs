//! What is minimised: one loss a file, a formula per token; how token losses become one number is here.
//! Shapes: B rows, L positions.

mod cross_entropy;
mod ppo_clip;

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::pack::{Microbatch, Segment};
use crate::policy::{Gradients, Policy, Replay, TokenScores};
use crate::recipe::LossConfig;

pub use cross_entropy::cross_entropy;
pub use ppo_clip::{PpoClipConfig, ppo_clip};

/// How the losses of a batch's tokens become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregation {
    /// The mean over all tokens that are trained on: a long response weighs more than a short one (DAPO).
    TokenMean,
    /// The mean over each response, then over responses: each response weighs the same (GRPO).
    SequenceMean,
}

/// Per-token values of a policy loss, `[B, L]` each; padding and masked positions hold finite values that mean nothing.
#[derive(Debug)]
pub struct TokenLoss {
    /// To be minimised.
    pub loss: Tensor,
    /// 1 where the clip cut the gradient off, else 0.
    pub clipped: Tensor,
}

/// How much every token's loss weighs in an update, so that the sum over all its microbatches is the aggregate.
///
/// The weights come from counts over the whole update, so the loss and its gradient do not depend on the cut into
/// microbatches.
#[derive(Clone, Copy, Debug)]
pub struct Normaliser {
    aggregation: Aggregation,
    num_tokens: usize,
    num_sequences: usize,
    num_mtp_tokens: usize,
}

impl Normaliser {
    /// Counts what is trained on in all of an update's microbatches. An update without a trained token has loss 0.
    pub fn new<'a>(microbatches: impl IntoIterator<Item = &'a Microbatch>, aggregation: Aggregation) -> Self {
        let (mut num_tokens, mut num_sequences, mut num_mtp_tokens) = (0, 0, 0);
        for mb in microbatches {
            num_mtp_tokens += mb.mtp_mask().into_iter().filter(|is_trained| *is_trained).count();
            for segment in &mb.segments {
                let n = trained_tokens(mb, segment);
                num_tokens += n;
                num_sequences += usize::from(n > 0);
            }
        }
        Self { aggregation, num_tokens, num_sequences, num_mtp_tokens }
    }

    /// The cross entropy of multi-token prediction, its part of the mean over the update's tokens.
    fn mtp_loss(&self, mtp_logprobs: &Tensor) -> Tensor {
        -mtp_logprobs.sum(tch::Kind::Float) / self.num_mtp_tokens.max(1) as f64
    }

    /// The weight of every token of `mb`, `[B, L]`; 0 where masked.
    fn weights(&self, mb: &Microbatch) -> Vec<f32> {
        let mut weights = vec![0.0; mb.loss_mask.len()];
        for segment in &mb.segments {
            let weight = match self.aggregation {
                Aggregation::TokenMean => 1.0 / self.num_tokens as f64,
                Aggregation::SequenceMean => 1.0 / (self.num_sequences * trained_tokens(mb, segment)) as f64,
            };
            for at in range(mb, segment) {
                if mb.loss_mask[at] {
                    weights[at] = weight as f32;
                }
            }
        }
        weights
    }
}

fn range(mb: &Microbatch, segment: &Segment) -> std::ops::Range<usize> {
    let from = segment.row * mb.row_len + segment.start;
    from..from + segment.len
}

fn trained_tokens(mb: &Microbatch, segment: &Segment) -> usize {
    range(mb, segment).filter(|&at| mb.loss_mask[at]).count()
}

/// What a microbatch contributes to the log: sums over its trained tokens, and what trajectories are shown with.
#[derive(Clone, Debug, Default)]
pub struct LossStats {
    /// Trained tokens.
    pub num_tokens: usize,
    /// The aggregated loss.
    pub loss: f64,
    /// The cross entropy of multi-token prediction, if it is trained; not part of `loss`.
    pub mtp_loss: f64,
    /// Sum of `old_logprob - new_logprob`, the k1 estimate of KL(old, new).
    pub kl_sum: f64,
    /// Tokens whose gradient the clip cut off.
    pub clipped: f64,
    /// Sum of the entropies, in nats.
    pub entropy_sum: f64,
    /// Sum of the trainer's log-probabilities.
    pub logprob_sum: f64,
    /// Sum of `|trainer_logprob - rollout_logprob|`, both before the first update.
    pub mismatch_sum: f64,
    /// The largest of them.
    pub mismatch_max: f64,
}

impl LossStats {
    /// Adds another microbatch's sums.
    pub fn add(&mut self, other: &Self) {
        self.num_tokens += other.num_tokens;
        self.loss += other.loss;
        self.mtp_loss += other.mtp_loss;
        self.kl_sum += other.kl_sum;
        self.clipped += other.clipped;
        self.entropy_sum += other.entropy_sum;
        self.logprob_sum += other.logprob_sum;
        self.mismatch_sum += other.mismatch_sum;
        self.mismatch_max = self.mismatch_max.max(other.mismatch_max);
    }

    /// A sum's mean over the trained tokens; 0 of none.
    pub fn per_token(&self, sum: f64) -> f64 {
        if self.num_tokens == 0 { 0.0 } else { sum / self.num_tokens as f64 }
    }
}

/// The gradient of the policy loss of a microbatch.
///
/// `old_logprobs` (`[B, L]`, row-major) are the trainer's own before the first update on these rollouts; without them the policy is
/// on-policy: it stands where it stood, so the ratio is exactly 1 and only its gradient counts.
///
/// With the gradient come the sums for the log and the trainer's new log-probabilities `[B, L]`.
pub fn policy_backward(
    policy: &Policy,
    mb: &Microbatch,
    old_logprobs: Option<&[f32]>,
    normaliser: &Normaliser,
    config: &LossConfig,
    replay: Replay,
    temperature: f64,
    mtp_loss_weight: f64,
) -> (Gradients, LossStats, Vec<f32>) {
    let TokenScores { logprobs, entropy, mtp_logprobs } = policy.score(mb, replay, temperature, mtp_loss_weight > 0.0);
    let old = old_logprobs.map_or_else(|| logprobs.detach(), |old| on_rows(old, mb, policy.device()));
    let advantages = on_rows(&mb.advantages, mb, policy.device());
    let token = match config {
        LossConfig::PpoClip(config) => ppo_clip(&logprobs, &old, &advantages, config),
    };
    let weights = on_rows(&normaliser.weights(mb), mb, policy.device());
    let loss = (&token.loss * weights).sum(tch::Kind::Float);
    let (objective, mtp_loss) = with_mtp(&loss, mtp_logprobs, normaliser, mtp_loss_weight);
    let gradients = Gradients::of(&objective, policy);

    let new = to_vec(&logprobs);
    let (old, entropy, clipped) = (to_vec(&old), to_vec(&entropy), to_vec(&token.clipped));
    let mut stats = LossStats { loss: loss.double_value(&[]), mtp_loss, ..LossStats::default() };
    for at in (0..new.len()).filter(|&at| mb.loss_mask[at]) {
        let mismatch = f64::from((old[at] - mb.rollout_logprobs[at]).abs());
        stats.num_tokens += 1;
        stats.logprob_sum += f64::from(old[at]);
        stats.kl_sum += f64::from(old[at]) - f64::from(new[at]);
        stats.clipped += f64::from(clipped[at]);
        stats.entropy_sum += f64::from(entropy[at]);
        stats.mismatch_sum += mismatch;
        stats.mismatch_max = stats.mismatch_max.max(mismatch);
    }
    (gradients, stats, new)
}

/// The gradient of the cross entropy of a microbatch, its part of the mean, and that of multi-token prediction's.
pub fn cross_entropy_backward(
    policy: &Policy,
    mb: &Microbatch,
    normaliser: &Normaliser,
    mtp_loss_weight: f64,
) -> (Gradients, f64, f64) {
    let replay = Replay { experts: false, indexer: false };
    let scores = policy.score(mb, replay, 1.0, mtp_loss_weight > 0.0);
    let weights = on_rows(&normaliser.weights(mb), mb, policy.device());
    let loss = (cross_entropy(&scores.logprobs) * weights).sum(tch::Kind::Float);
    let (objective, mtp_loss) = with_mtp(&loss, scores.mtp_logprobs, normaliser, mtp_loss_weight);
    (Gradients::of(&objective, policy), loss.double_value(&[]), mtp_loss)
}

/// What is differentiated, `loss + weight * mtp_loss` (v4/SPEC section 11), and the latter's value.
fn with_mtp(loss: &Tensor, mtp_logprobs: Option<Tensor>, normaliser: &Normaliser, weight: f64) -> (Tensor, f64) {
    match mtp_logprobs {
        None => (loss.shallow_clone(), 0.0),
        Some(mtp_logprobs) => {
            let mtp_loss = normaliser.mtp_loss(&mtp_logprobs);
            (loss + &mtp_loss * weight, mtp_loss.double_value(&[]))
        }
    }
}

fn on_rows(values: &[f32], mb: &Microbatch, device: Device) -> Tensor {
    Tensor::from_slice(values).view_([mb.num_rows as i64, mb.row_len as i64]).to_device(device)
}

fn to_vec(x: &Tensor) -> Vec<f32> {
    crate::policy::to_vec_f32(x)
}
