//! Draws the next token. The random number of a draw is a pure function of (seed, rollout id, token position), so the
//! same rollout comes out whatever the batch, the schedule or the number of threads.

use kernels::logits::{CHUNK, Chunk, at_cumulative, first_greatest, summarise, total};
use kernels::pool::Parts;

use crate::model::{ForwardOutput, Workspace};

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token, ties to the lowest id.
    pub temperature: f32,
    /// Keys the random stream, with the rollout id and the position.
    pub seed: u64,
}

/// A drawn token and its log-probability under the distribution it was drawn from (greedy: under temperature 1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
}

/// Draws from `logits` `[V]`, whose `chunks` under temperature 1 become scratch.
///
/// Inverse-CDF sampling: the first token whose cumulative probability exceeds the uniform number.
///
/// `None` when the logits are not finite: the weights are broken, and no token would mean anything.
pub fn draw(logits: &[f32], chunks: &mut [Chunk], sampling: Sampling, rollout_id: u64, position: u64) -> Option<Drawn> {
    let greedy = sampling.temperature <= 0.0;
    let temperature = if greedy { 1.0 } else { sampling.temperature };
    if temperature != 1.0 {
        summarise(logits, temperature, chunks);
    }
    let row = total(chunks);
    // One logit that is not a number spoils the sum; so does a quotient beyond f32.
    if !row.total.is_finite() {
        return None;
    }
    let token = if greedy {
        first_greatest(logits, chunks)
    } else {
        let target = uniform(sampling.seed, rollout_id, position) * row.total;
        at_cumulative(logits, temperature, row.greatest, chunks, target)
    };
    Some(Drawn { token: token as u32, logprob: row.logprob(logits[token], temperature) })
}

/// [`draw`]s a token after each row of a forward pass, on the threads of its pool: `of_row` says how, for which rollout
/// and at which position.
pub fn draw_rows(
    workspace: &mut Workspace,
    output: &mut ForwardOutput,
    drawn: &mut Vec<Option<Drawn>>,
    of_row: impl Fn(usize) -> (Sampling, u64, u64) + Sync,
) {
    let (vocab_size, num_chunks) = (output.vocab_size, output.vocab_size.div_ceil(CHUNK));
    drawn.clear();
    drawn.resize(output.chunks.len() / num_chunks.max(1), None);
    let pool = workspace.pool();
    let num_rows = drawn.len();
    let drawn = Parts::new(drawn, 1, pool.num_threads());
    let (logits, chunks) = (&output.logits, Parts::new(&mut output.chunks, num_chunks, pool.num_threads()));
    pool.run_items(num_rows, &|t| {
        let rows = drawn.take(t).iter_mut().zip(chunks.take(t).chunks_exact_mut(num_chunks));
        for (i, (drawn, chunks)) in drawn.share(t).zip(rows) {
            let (sampling, rollout_id, position) = of_row(i);
            *drawn = draw(&logits[i * vocab_size..][..vocab_size], chunks, sampling, rollout_id, position);
        }
    });
}

/// A uniform number in [0, 1) with 53 bits, from Philox4x32-10 keyed by the seed, counting (rollout id, position).
fn uniform(seed: u64, rollout_id: u64, position: u64) -> f64 {
    let counter = [rollout_id as u32, (rollout_id >> 32) as u32, position as u32, (position >> 32) as u32];
    let [a, b, ..] = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
    ((u64::from(a) << 32 | u64::from(b)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let low = u64::from(counter[0]) * 0xd251_1f53;
        let high = u64::from(counter[2]) * 0xcd9e_8d57;
        counter = [
            (high >> 32) as u32 ^ counter[1] ^ key[0],
            high as u32,
            (low >> 32) as u32 ^ counter[3] ^ key[1],
            low as u32,
        ];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(logits: &[f32], sampling: Sampling, rollout_id: u64, position: u64) -> Option<Drawn> {
        let mut chunks = vec![Chunk::default(); logits.len().div_ceil(CHUNK)];
        summarise(logits, 1.0, &mut chunks);
        super::draw(logits, &mut chunks, sampling, rollout_id, position)
    }

    /// The known-answer vectors published with the generator (Random123, kat_vectors).
    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32_10([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32_10([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn greedy_takes_the_lowest_of_equal_tokens() {
        let sampling = Sampling { temperature: 0.0, seed: 1 };
        let drawn = draw(&[0.0, 2.0, 2.0, 1.0], sampling, 0, 0).expect("finite");
        assert_eq!(drawn.token, 1);
        let total = 2.0 * 2f32.exp() + 1.0 + 1f32.exp();
        assert!((drawn.logprob - (2.0 - total.ln())).abs() < 1e-6);
    }

    #[test]
    fn broken_logits_give_no_token() {
        for temperature in [0.0, 1.0] {
            let sampling = Sampling { temperature, seed: 1 };
            for broken in
                [[f32::NAN; 2], [f32::NEG_INFINITY; 2], [0.0, f32::INFINITY], [0.0, f32::NAN], [f32::NAN, 0.0]]
            {
                assert_eq!(draw(&broken, sampling, 0, 0), None, "{broken:?}");
            }
        }
        assert_eq!(draw(&[1e20, 0.0], Sampling { temperature: 1e-30, seed: 1 }, 0, 0), None);
    }

    #[test]
    fn frequencies_follow_the_tempered_distribution() {
        let sampling = Sampling { temperature: 0.5, seed: 7 };
        let logits = [0.0f32, 0.5, -1.0, f32::NEG_INFINITY];
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(*l / 0.5).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut counts = [0.0; 4];
        let draws = 40_000;
        for position in 0..draws {
            let drawn = draw(&logits, sampling, 3, position).expect("finite");
            counts[drawn.token as usize] += 1.0;
            let p = weights[drawn.token as usize] / total;
            assert!((f64::from(drawn.logprob) - p.ln()).abs() < 1e-5);
        }
        for (count, weight) in counts.iter().zip(&weights) {
            let p = weight / total;
            let sigma = (p * (1.0 - p) * draws as f64).sqrt();
            assert!((count - p * draws as f64).abs() <= 4.0 * sigma + 1e-9, "{counts:?}");
        }
    }
}
