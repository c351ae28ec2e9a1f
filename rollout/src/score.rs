//! `rollout score` and `rollout diff`: log-probabilities of given tokens under one checkpoint, and how far two are apart.

use kernels::logits::{self, Chunk, first_greatest};

use crate::kv_cache::KvCache;
use crate::model::{ForwardOutput, Logits, Model, Segment, Workspace};

/// Tokens that one forward pass takes: logits of a large vocabulary take much room.
const CHUNK: usize = 64;

/// Why tokens have no log-probabilities.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScoreError {
    /// A token that the model does not have.
    #[error("token {token} at position {position} is outside the model's vocabulary of {vocab_size}")]
    Vocabulary {
        /// The token.
        token: u32,
        /// Where.
        position: usize,
        /// `vocab_size`.
        vocab_size: usize,
    },
    /// Fewer than two tokens: nothing is predicted.
    #[error("{len} tokens, expected at least 2: a token is scored by what stands before it")]
    TooShort {
        /// How many.
        len: usize,
    },
    /// More tokens than the model's context.
    #[error("{len} tokens, the model's context holds {context}")]
    TooLong {
        /// How many.
        len: usize,
        /// `max_position_embeddings`.
        context: usize,
    },
    /// The weights gave logits that are not finite.
    #[error("the model's logits at position {position} are not finite: its weights are broken")]
    NotFinite {
        /// Where.
        position: usize,
    },
}

/// What a model makes of a sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// The log-probability (natural) of each token but the first, given those before it: `[T - 1]`.
    pub logprobs: Vec<f32>,
    /// Whether each of them is the likeliest token there.
    pub is_greedy: Vec<bool>,
}

/// Log-probabilities of `tokens` at temperature 1.
///
/// # Errors
/// When there are fewer than two tokens, more than the context holds, one outside the vocabulary, or logits are broken.
pub fn score(model: &Model, tokens: &[u32]) -> Result<Scores, ScoreError> {
    let mut scores = Scores::default();
    walk(&[model], tokens, |position, [(logits, chunks)]| {
        let next = tokens[position] as usize;
        let sum = logits::total(chunks);
        let logprob = sum.logprob(logits[next], 1.0);
        scores.logprobs.push(logprob);
        scores.is_greedy.push(next == first_greatest(logits, chunks));
        logprob.is_finite() && sum.total.is_finite()
    })?;
    Ok(scores)
}

/// How far two models are apart on the same tokens. All sums are over predicted tokens, in nats.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Divergence {
    /// Predicted tokens.
    pub num_tokens: usize,
    /// Sum of log-probabilities of the given tokens, under A and B.
    pub sum_logprobs: [f64; 2],
    /// Sum of absolute differences of those log-probabilities.
    pub sum_abs_diff: f64,
    /// The largest of them.
    pub max_abs_diff: f64,
    /// Sum of KL(A || B) over the whole vocabulary.
    pub sum_kl: f64,
    /// The largest of them.
    pub max_kl: f64,
    /// Positions where both have the same likeliest token.
    pub num_same_greedy: usize,
}

impl Divergence {
    /// Compares models `a` and `b`, which have one vocabulary, on `tokens`.
    ///
    /// # Errors
    /// As [`score`].
    pub fn measure(a: &Model, b: &Model, tokens: &[u32]) -> Result<Self, ScoreError> {
        let mut out = Self::default();
        walk(&[a, b], tokens, |position, [a, b]| {
            let same_greedy = first_greatest(a.0, a.1) == first_greatest(b.0, b.1);
            let (a, b) = (a.0, b.0);
            // Log-probabilities in f64 from the engine's f32 logits: a KL of nearly equal models is a small difference.
            let normaliser = |logits: &[f32]| {
                let top = logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
                f64::from(top) + logits.iter().map(|x| f64::from(x - top).exp()).sum::<f64>().ln()
            };
            let (norm_a, norm_b) = (normaliser(a), normaliser(b));
            let kl: f64 = a
                .iter()
                .zip(b)
                .map(|(x, y)| {
                    let (x, y) = (f64::from(*x) - norm_a, f64::from(*y) - norm_b);
                    x.exp() * (x - y)
                })
                .sum();
            // A sum of roundings may end below zero.
            let kl = kl.max(0.0);
            let next = tokens[position] as usize;
            let logprobs = [f64::from(a[next]) - norm_a, f64::from(b[next]) - norm_b];
            let diff = (logprobs[0] - logprobs[1]).abs();
            out.add(&Self {
                num_tokens: 1,
                sum_logprobs: logprobs,
                sum_abs_diff: diff,
                max_abs_diff: diff,
                sum_kl: kl,
                max_kl: kl,
                num_same_greedy: usize::from(same_greedy),
            });
            kl.is_finite() && diff.is_finite()
        })?;
        Ok(out)
    }

    /// Takes in what was measured on other tokens.
    pub fn add(&mut self, other: &Self) {
        self.num_tokens += other.num_tokens;
        self.sum_logprobs[0] += other.sum_logprobs[0];
        self.sum_logprobs[1] += other.sum_logprobs[1];
        self.sum_abs_diff += other.sum_abs_diff;
        self.max_abs_diff = self.max_abs_diff.max(other.max_abs_diff);
        self.sum_kl += other.sum_kl;
        self.max_kl = self.max_kl.max(other.max_kl);
        self.num_same_greedy += other.num_same_greedy;
    }
}

/// A row of logits and its sums under temperature 1.
type LogitRow<'a> = (&'a [f32], &'a mut [Chunk]);

/// Runs `models` over `tokens` and hands each position's logits, with the position that they predict, to `visit`, which
/// says whether they made sense.
fn walk<const M: usize>(
    models: &[&Model; M],
    tokens: &[u32],
    mut visit: impl FnMut(usize, [LogitRow<'_>; M]) -> bool,
) -> Result<(), ScoreError> {
    let vocab_size = models[0].config().vocab_size;
    let context = models.iter().map(|model| model.config().max_position_embeddings).min().unwrap_or(0);
    if tokens.len() < 2 {
        return Err(ScoreError::TooShort { len: tokens.len() });
    }
    if tokens.len() > context {
        return Err(ScoreError::TooLong { len: tokens.len(), context });
    }
    if let Some(position) = tokens.iter().position(|&token| token as usize >= vocab_size) {
        return Err(ScoreError::Vocabulary { token: tokens[position], position, vocab_size });
    }
    let mut caches = models.map(|model| KvCache::new(model.config()));
    let mut outputs = models.map(|_| ForwardOutput::default());
    let mut workspace = Workspace::default();
    // The last token predicts nothing that is asked for.
    let inputs = &tokens[..tokens.len() - 1];
    for (chunk_idx, chunk) in inputs.chunks(CHUNK).enumerate() {
        for ((model, cache), out) in models.iter().zip(&mut caches).zip(&mut outputs) {
            let segment = Segment { cache, tokens: chunk, logits: Logits::All };
            model.forward(&mut [segment], &mut workspace, out, None);
        }
        let num_chunks = vocab_size.div_ceil(logits::CHUNK);
        let mut rows = outputs
            .each_mut()
            .map(|out| out.logits.chunks_exact(vocab_size).zip(out.chunks.chunks_exact_mut(num_chunks)));
        for row in 0..chunk.len() {
            let position = chunk_idx * CHUNK + row + 1;
            let logits = rows.each_mut().map(|rows| rows.next().expect("a row of logits for every token"));
            if !visit(position, logits) {
                return Err(ScoreError::NotFinite { position });
            }
        }
    }
    Ok(())
}
