//! From logits to log-probabilities and a draw, for vocabularies of any size: the log-sum-exp in chunks of fixed length,
//! which the threads of the last product make while their logits are in the cache, and by which a draw finds its token
//! without a walk over the whole row. Shapes: V vocabulary, C chunks of a row.

use crate::math::{exp, max, sum};

/// Logits of a chunk; the last of a row may be shorter.
pub const CHUNK: usize = 128;

/// What a chunk of a row of logits, divided by the temperature, comes to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Chunk {
    /// The greatest of them.
    pub greatest: f32,
    /// The sum of `exp(logit / temperature - greatest)`; not finite where a logit is not (but for negative infinity).
    pub sum: f32,
}

/// What a row comes to: the log-probability of a token is `logit / temperature - greatest - ln(total)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSum {
    /// The greatest logit, divided by the temperature.
    pub greatest: f32,
    /// The sum of `exp(logit / temperature - greatest)`; not finite where the row has no distribution.
    pub total: f64,
}

impl RowSum {
    /// The log-probability (natural) of a token with this logit.
    pub fn logprob(&self, logit: f32, temperature: f32) -> f32 {
        logit * (1.0 / temperature) - self.greatest - self.total.ln() as f32
    }
}

vectorised! {
    /// Fills the chunks of `logits`, as many of the row as are given: `[C * CHUNK]`, or less at a row's end, to `[C]`.
    ///
    /// # Panics
    /// When the temperature is not positive, or the chunks are not those of the logits.
    pub fn summarise(logits: &[f32], temperature: f32, chunks: &mut [Chunk]) {
        assert!(temperature > 0.0, "temperature {temperature} is not positive");
        assert_eq!(chunks.len(), logits.len().div_ceil(CHUNK), "chunks of {} logits", logits.len());
        let inverse = 1.0 / temperature;
        let mut scratch = [0.0; CHUNK];
        for (logits, chunk) in logits.chunks(CHUNK).zip(chunks) {
            let scratch = &mut scratch[..logits.len()];
            for (x, logit) in scratch.iter_mut().zip(logits) {
                *x = logit * inverse;
            }
            let greatest = max(scratch);
            // Negative infinity from itself would not be a number.
            let base = if greatest == f32::NEG_INFINITY { 0.0 } else { greatest };
            for x in scratch.iter_mut() {
                *x = exp(*x - base);
            }
            *chunk = Chunk { greatest, sum: sum(scratch) };
        }
    }
}

vectorised! {
    /// Puts the sums of a row's chunks on one scale, that of the row's greatest logit, and adds them up in order.
    pub fn total(chunks: &mut [Chunk]) -> RowSum {
        let mut greatest = f32::NEG_INFINITY;
        for chunk in chunks.iter() {
            greatest = if chunk.greatest > greatest { chunk.greatest } else { greatest };
        }
        let mut total = 0.0;
        for chunk in chunks {
            chunk.sum *= exp(chunk.greatest - greatest);
            total += f64::from(chunk.sum);
        }
        RowSum { greatest, total }
    }
}

vectorised! {
    /// The first token of the row at which the cumulative sum of `exp(logit / temperature - greatest)` exceeds `target`,
    /// by chunks that [`total`] has put on one scale: the chunk first, then the token in it.
    ///
    /// A target within a rounding of a chunk's end may find nothing in it: the chunk's last possible token then takes that
    /// sliver. Inverse-CDF sampling is a uniform number of [0, 1) times the row's total as the target.
    ///
    /// # Panics
    /// When no token is possible.
    pub fn at_cumulative(logits: &[f32], temperature: f32, greatest: f32, chunks: &[Chunk], target: f64) -> usize {
        let mut before = 0.0;
        let mut found = None;
        for (c, chunk) in chunks.iter().enumerate() {
            if chunk.sum > 0.0 {
                found = Some((c, before));
                before += f64::from(chunk.sum);
                if before > target {
                    break;
                }
            }
        }
        let (c, mut cumulative) = found.expect("a row with a token to draw");
        let logits = &logits[c * CHUNK..];
        let logits = &logits[..CHUNK.min(logits.len())];
        let inverse = 1.0 / temperature;
        let mut parts = [0.0; CHUNK];
        for (part, logit) in parts.iter_mut().zip(logits) {
            *part = exp(logit * inverse - greatest);
        }
        let mut last = 0;
        for (i, &part) in parts[..logits.len()].iter().enumerate() {
            if part > 0.0 {
                cumulative += f64::from(part);
                last = i;
                if cumulative > target {
                    break;
                }
            }
        }
        c * CHUNK + last
    }
}

/// The first token with the row's greatest logit, by its chunks under temperature 1. Of logits that are all NaN or negative
/// infinity, the first.
pub fn first_greatest(logits: &[f32], chunks: &[Chunk]) -> usize {
    let mut best = 0;
    for (c, chunk) in chunks.iter().enumerate() {
        if chunk.greatest > chunks[best].greatest {
            best = c;
        }
    }
    let mut token = best * CHUNK;
    for (i, logit) in logits.iter().enumerate().skip(token).take(CHUNK) {
        if *logit > logits[token] || logits[token].is_nan() {
            token = i;
        }
    }
    token
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunks_of(logits: &[f32], temperature: f32) -> Vec<Chunk> {
        let mut chunks = vec![Chunk::default(); logits.len().div_ceil(CHUNK)];
        summarise(logits, temperature, &mut chunks);
        chunks
    }

    proptest! {
        #[test]
        fn totals_and_draws_are_those_of_the_whole_row(
            logits in prop::collection::vec(prop_oneof![9 => -30.0f32..30.0, 1 => Just(f32::NEG_INFINITY)], 1..500),
            temperature in 0.2f32..3.0,
            uniform in 0.0f64..1.0,
        ) {
            prop_assume!(logits.iter().any(|l| l.is_finite()));
            let mut chunks = chunks_of(&logits, temperature);
            let row = total(&mut chunks);
            let scaled: Vec<f64> = logits.iter().map(|&l| f64::from(l) / f64::from(temperature)).collect();
            let greatest = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let want: f64 = scaled.iter().map(|l| (l - greatest).exp()).sum();
            prop_assert!((row.total / want - 1.0).abs() < 1e-5, "{} for {want}", row.total);

            let token = at_cumulative(&logits, temperature, row.greatest, &chunks, uniform * row.total);
            prop_assert!(logits[token].is_finite());
            let before: f64 = scaled[..token].iter().map(|l| (l - greatest).exp()).sum::<f64>() / want;
            let upto = before + (scaled[token] - greatest).exp() / want;
            prop_assert!(before - 1e-5 <= uniform && uniform <= upto + 1e-5, "{before} <= {uniform} < {upto}");
            let logprob = f64::from(row.logprob(logits[token], temperature));
            prop_assert!((logprob - (scaled[token] - greatest - want.ln())).abs() < 1e-4);
        }

        /// Threads summarise what columns they have, and the chunks are the same.
        #[test]
        fn a_row_may_be_summarised_in_pieces(logits in prop::collection::vec(-9.0f32..9.0, 1..700), cut in 0usize..6) {
            let whole = chunks_of(&logits, 0.7);
            let (left, right) = logits.split_at((cut * CHUNK).min(logits.len()));
            prop_assert_eq!(whole, [chunks_of(left, 0.7), chunks_of(right, 0.7)].concat());
        }

        #[test]
        fn the_first_of_the_greatest_is_found(logits in prop::collection::vec((-3i8..3).prop_map(f32::from), 1..500)) {
            let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let want = logits.iter().position(|&l| l == greatest).expect("it is one of them");
            prop_assert_eq!(first_greatest(&logits, &chunks_of(&logits, 1.0)), want);
        }
    }

    #[test]
    fn broken_rows_have_no_finite_total() {
        for broken in [f32::NAN, f32::INFINITY] {
            for at in [0, 5, CHUNK, 299] {
                for others in [0.0, f32::NEG_INFINITY] {
                    let mut logits = vec![others; 300];
                    logits[at] = broken;
                    assert!(!total(&mut chunks_of(&logits, 1.0)).total.is_finite(), "{broken} at {at} of {others}");
                }
            }
        }
        assert!(!total(&mut chunks_of(&[f32::NEG_INFINITY; 300], 1.0)).total.is_finite());
    }
}
