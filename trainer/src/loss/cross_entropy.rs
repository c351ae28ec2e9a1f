//! Supervised fine-tuning: the negative log-likelihood of the reference answer.

use tch::Tensor;

/// `-logp` per token, `[B, L]`, in nats.
pub fn cross_entropy(logprobs: &Tensor) -> Tensor {
    -logprobs
}
