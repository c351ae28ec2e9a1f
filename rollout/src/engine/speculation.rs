//! Speculative decoding: the multi-token-prediction block drafts the token after next, the model reads it together with
//! the next one, and where the model itself draws what was drafted, two tokens came out of one pass. Lossless, since a draw
//! is a function of the model's logits and of its position alone (`sampler`): a draft only says which row to compute early.

use crate::model::ForwardOutput;
use crate::sampler::Drawn;

/// Sequences that decode beside each other when drafts still pay. Few: a draft is a row of its own, with experts of its own
/// to be read, so that a pass over two rows takes 1.4 times one over a single row, and the block a fifth on top (122 M
/// parameters, 6 of 32 experts, two cores). What is left to gain is 1.1 times for one sequence, nothing for four.
const MAX_BATCH: usize = 2;
/// Drafts after which it is asked whether they pay.
const TRIAL: u64 = 128;
/// The part of them that has to be right for that.
const LEAST_ACCEPTED: f64 = 0.75;
/// Passes without drafts where they did not.
const REST: u64 = 1024;

/// Whether drafts pay, and the buffers for making them.
#[derive(Debug, Default)]
pub(super) struct Speculation {
    /// Streams of the rows that the block reads, `[R, N, D]`.
    pub(super) streams: Vec<f32>,
    pub(super) output: ForwardOutput,
    pub(super) drawn: Vec<Option<Drawn>>,
    drafted: u64,
    accepted: u64,
    rest: u64,
}

impl Speculation {
    /// Whether to draft in a pass over so many samples.
    pub(super) fn pays(&self, num_samples: usize) -> bool {
        self.rest == 0 && num_samples <= MAX_BATCH
    }

    /// A draft was tried.
    pub(super) fn note(&mut self, is_accepted: bool) {
        self.drafted += 1;
        self.accepted += u64::from(is_accepted);
        if self.drafted == TRIAL {
            if (self.accepted as f64) < LEAST_ACCEPTED * self.drafted as f64 {
                self.rest = REST;
            }
            (self.drafted, self.accepted) = (0, 0);
        }
    }

    /// A pass is over.
    pub(super) fn tick(&mut self) {
        self.rest = self.rest.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_that_are_wrong_are_left_alone_for_a_while() {
        let mut speculation = Speculation::default();
        (0..TRIAL).for_each(|i| speculation.note(i % 5 > 0));
        assert!(speculation.pays(1) && !speculation.pays(MAX_BATCH + 1));
        (0..TRIAL).for_each(|i| speculation.note(i % 2 == 0));
        assert!(!speculation.pays(1));
        (0..REST).for_each(|_| speculation.tick());
        assert!(speculation.pays(1));
    }
}
