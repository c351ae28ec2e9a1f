//! Draws the next token. The random number of a draw is a pure function of (seed, rollout id, token position), so the
//! same rollout comes out whatever the batch, the schedule or the number of threads.
//!
//! The distribution, in this order: bias, penalties and barred tokens change the logits; the temperature divides them;
//! then top-k, top-p on what that leaves, and min-p cut tokens off, and the rest is renormalised (as vLLM and
//! transformers do it; SGLang's top-p counts what top-k cut off too). Where a cut falls between equals the lower id stays.

mod params;
mod stop;

use std::collections::HashMap;
use std::sync::Arc;

use kernels::logits::{CHUNK, Chunk, RowSum, at_cumulative, first_greatest, summarise, total};
use kernels::pool::Parts;

use crate::model::{ForwardOutput, Workspace};

pub use params::{MAX_STOP_TEXTS, MAX_TOP_LOGPROBS, ParamsError, SamplingParams};
pub use stop::StopText;

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: u32,
    /// Its log-probability under the distribution that it was drawn from (greedy: under temperature 1).
    pub logprob: f32,
    /// Its log-probability under the model itself: temperature 1, nothing changed or cut off.
    pub base_logprob: f32,
    /// The likeliest tokens under the model itself, with their log-probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

/// Which tokens a sequence has, for penalties.
#[derive(Clone, Debug, Default)]
pub struct TokenCounts {
    /// Those of the prompt, each once.
    prompt: Arc<[u32]>,
    /// Those of the response, and how often.
    response: HashMap<u32, u32>,
}

impl TokenCounts {
    /// Of a prompt and what was said after it.
    pub fn new(prompt: &[u32], response: &[u32]) -> Self {
        let mut tokens = prompt.to_vec();
        tokens.sort_unstable();
        tokens.dedup();
        let mut counts = Self { prompt: tokens.into(), response: HashMap::new() };
        response.iter().for_each(|&token| counts.push(token));
        counts
    }

    /// Counts a token of the response.
    pub fn push(&mut self, token: u32) {
        *self.response.entry(token).or_default() += 1;
    }
}

/// What a draw is for.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    /// How.
    pub params: &'a SamplingParams,
    /// For which rollout.
    pub rollout_id: u64,
    /// The position in the response.
    pub position: u64,
    /// What penalties go by.
    pub counts: Option<&'a TokenCounts>,
    /// Tokens that may not be drawn.
    pub barred: &'a [u32],
}

/// Buffers of draws, one for each thread, that live from step to step.
#[derive(Debug, Default)]
pub struct Sampler {
    threads: Vec<Scratch>,
}

/// A thread's own buffers.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    logits: Vec<f32>,
    order: Vec<u32>,
}

/// Draws from `logits` `[V]`, whose `chunks` under temperature 1 become scratch.
///
/// Inverse-CDF sampling: the first token whose cumulative probability exceeds the uniform number.
///
/// `None` when the logits are not finite: the weights are broken, and no token would mean anything. Also when nothing may
/// be drawn.
pub fn draw(logits: &[f32], chunks: &mut [Chunk], turn: Turn<'_>, scratch: &mut Scratch) -> Option<Drawn> {
    let params = turn.params;
    let base = total(chunks);
    // One logit that is not a number spoils the sum; so does a quotient beyond f32.
    if !base.total.is_finite() {
        return None;
    }
    let top = likeliest(logits, params.top_logprobs, &mut scratch.order);
    let top = top.iter().map(|&token| (token, base.logprob(logits[token as usize], 1.0))).collect();
    let (token, logprob) = if params.is_plain() && turn.barred.is_empty() {
        draw_from(logits, chunks, base, turn)?
    } else {
        let mut adjusted = std::mem::take(&mut scratch.logits);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        adjust(&mut adjusted, turn);
        if params.temperature > 0.0 {
            cut_off(&mut adjusted, params, &mut scratch.order);
        }
        summarise(&adjusted, 1.0, chunks);
        let sum = total(chunks);
        let drawn = if sum.total.is_finite() { draw_from(&adjusted, chunks, sum, turn) } else { None };
        scratch.logits = adjusted;
        drawn?
    };
    Some(Drawn { token: token as u32, logprob, base_logprob: base.logprob(logits[token], 1.0), top })
}

/// The log-probability of `token` under the model itself, and the likeliest `num_top` tokens with theirs; `None` when the
/// logits are not finite. `chunks` become scratch.
pub fn score(
    logits: &[f32],
    chunks: &mut [Chunk],
    token: u32,
    num_top: usize,
    scratch: &mut Scratch,
) -> Option<(f32, Vec<(u32, f32)>)> {
    let base = total(chunks);
    let with_logprob = |&token: &u32| (token, base.logprob(logits[token as usize], 1.0));
    let top = likeliest(logits, num_top, &mut scratch.order).iter().map(with_logprob).collect();
    base.total.is_finite().then(|| (with_logprob(&token).1, top))
}

/// From these logits, whose sum under temperature 1 is `sum`: a token and its log-probability.
fn draw_from(logits: &[f32], chunks: &mut [Chunk], sum: RowSum, turn: Turn<'_>) -> Option<(usize, f32)> {
    let Turn { params: SamplingParams { temperature, seed, .. }, rollout_id, position, .. } = turn;
    if *temperature <= 0.0 {
        let token = first_greatest(logits, chunks);
        return Some((token, sum.logprob(logits[token], 1.0)));
    }
    let row = if *temperature == 1.0 {
        sum
    } else {
        summarise(logits, *temperature, chunks);
        total(chunks)
    };
    if !row.total.is_finite() {
        return None;
    }
    let target = uniform(*seed, rollout_id, position) * row.total;
    let token = at_cumulative(logits, *temperature, row.greatest, chunks, target);
    Some((token, row.logprob(logits[token], *temperature)))
}

/// Bias, penalties and barred tokens.
fn adjust(logits: &mut [f32], turn: Turn<'_>) {
    let params = turn.params;
    for &(token, bias) in &params.logit_bias {
        logits[token as usize] += bias;
    }
    if let Some(TokenCounts { prompt, response }) = turn.counts.filter(|_| params.has_penalties()) {
        let said = response.keys().filter(|token| prompt.binary_search(token).is_err());
        for &token in prompt.iter().chain(said) {
            let logit = &mut logits[token as usize];
            *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
        }
        for (&token, &count) in response {
            logits[token as usize] -= params.presence_penalty + params.frequency_penalty * count as f32;
        }
    }
    for &token in turn.barred {
        logits[token as usize] = f32::NEG_INFINITY;
    }
}

/// Takes the tokens out that top-k, top-p and min-p leave no chance.
fn cut_off(logits: &mut [f32], params: &SamplingParams, order: &mut Vec<u32>) {
    let &SamplingParams { temperature, top_k, top_p, min_p, .. } = params;
    let vocab_size = logits.len();
    if let Some(k) = top_k.filter(|&k| k < vocab_size) {
        likeliest(logits, k, order);
        keep_only(logits, order);
    }
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| (f64::from(logit - greatest) / f64::from(temperature)).exp();
    if top_p < 1.0 {
        let enough = f64::from(top_p) * logits.iter().map(|&logit| weight(logit)).sum::<f64>();
        // Few tokens are enough as a rule: they are looked for among more and more of the likeliest.
        let mut among = 64.min(vocab_size);
        loop {
            likeliest(logits, among, order);
            let mut sum = 0.0;
            let num_kept = order.iter().take_while(|&&token| {
                let more = sum < enough;
                sum += weight(logits[token as usize]);
                more
            });
            let num_kept = num_kept.count().max(1);
            if num_kept < among || among == vocab_size {
                order.truncate(num_kept);
                break;
            }
            among = (8 * among).min(vocab_size);
        }
        keep_only(logits, order);
    }
    if min_p > 0.0 {
        for logit in logits.iter_mut().filter(|logit| weight(**logit) < f64::from(min_p)) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// Leaves these tokens, each of which is there once, and no other.
fn keep_only(logits: &mut [f32], tokens: &mut [u32]) {
    tokens.sort_unstable();
    let mut from = 0;
    for &token in &*tokens {
        logits[from..token as usize].fill(f32::NEG_INFINITY);
        from = token as usize + 1;
    }
    logits[from..].fill(f32::NEG_INFINITY);
}

/// The `n` likeliest tokens, best first, ties to the lower id; in linear time but for their order.
fn likeliest<'a>(logits: &[f32], n: usize, order: &'a mut Vec<u32>) -> &'a [u32] {
    order.clear();
    if n == 0 {
        return order;
    }
    order.extend(0..logits.len() as u32);
    let better = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if n < order.len() {
        order.select_nth_unstable_by(n, better);
        order.truncate(n);
    }
    order.sort_unstable_by(better);
    order
}

impl Sampler {
    /// [`draw`]s a token after each row of a forward pass that has logits, on the threads of its pool; `turn` says for what,
    /// or that none is wanted.
    pub fn draw_rows<'t>(
        &mut self,
        workspace: &mut Workspace,
        output: &mut ForwardOutput,
        drawn: &mut Vec<Option<Drawn>>,
        turn: impl Fn(usize) -> Option<Turn<'t>> + Sync,
    ) {
        let (vocab_size, num_chunks) = (output.vocab_size, output.vocab_size.div_ceil(CHUNK));
        drawn.clear();
        drawn.resize(output.chunks.len() / num_chunks.max(1), None);
        let pool = workspace.pool();
        self.threads.resize(pool.num_threads(), Scratch::default());
        let (num_rows, num_threads) = (drawn.len(), pool.num_threads());
        let (drawn, scratch) = (Parts::new(drawn, 1, num_threads), Parts::new(&mut self.threads, 1, num_threads));
        let (logits, chunks) = (&output.logits, Parts::new(&mut output.chunks, num_chunks, num_threads));
        pool.run_items(num_rows, &|t| {
            let scratch = &mut scratch.take(t)[0];
            let rows = drawn.take(t).iter_mut().zip(chunks.take(t).chunks_exact_mut(num_chunks));
            for (i, (drawn, chunks)) in drawn.share(t).zip(rows) {
                *drawn = turn(i).and_then(|turn| draw(&logits[i * vocab_size..][..vocab_size], chunks, turn, scratch));
            }
        });
    }

    /// [`score`]s a token by its row of logits.
    pub fn score(
        &mut self,
        logits: &[f32],
        chunks: &mut [Chunk],
        token: u32,
        num_top: usize,
    ) -> Option<(f32, Vec<(u32, f32)>)> {
        self.threads.resize(self.threads.len().max(1), Scratch::default());
        score(logits, chunks, token, num_top, &mut self.threads[0])
    }

    /// [`draw`]s for several rollouts from one row of logits.
    pub fn draw_several<'t>(
        &mut self,
        logits: &[f32],
        chunks: &[Chunk],
        turns: impl Iterator<Item = Turn<'t>>,
    ) -> Vec<Option<Drawn>> {
        self.threads.resize(self.threads.len().max(1), Scratch::default());
        let scratch = &mut self.threads[0];
        let mut own = chunks.to_vec();
        let one = |turn| {
            own.copy_from_slice(chunks);
            draw(logits, &mut own, turn, scratch)
        };
        turns.map(one).collect()
    }
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
    use proptest::prelude::*;

    fn params(temperature: f32, seed: u64) -> SamplingParams {
        SamplingParams { temperature, seed, ..SamplingParams::default() }
    }

    fn draw_with(
        logits: &[f32],
        params: &SamplingParams,
        position: u64,
        counts: Option<&TokenCounts>,
        barred: &[u32],
    ) -> Option<Drawn> {
        let mut chunks = vec![Chunk::default(); logits.len().div_ceil(CHUNK)];
        summarise(logits, 1.0, &mut chunks);
        let turn = Turn { params, rollout_id: 3, position, counts, barred };
        draw(logits, &mut chunks, turn, &mut Scratch::default())
    }

    /// The distribution by the book: everything sorted, in f64.
    fn by_the_book(logits: &[f32], params: &SamplingParams, counts: &TokenCounts, barred: &[u32]) -> Vec<f64> {
        let mut l: Vec<f64> = logits.iter().map(|&l| f64::from(l)).collect();
        for &(token, bias) in &params.logit_bias {
            l[token as usize] += f64::from(bias);
        }
        for token in 0..l.len() as u32 {
            let said = counts.response.get(&token).copied().unwrap_or(0);
            let at = &mut l[token as usize];
            if said > 0 || counts.prompt.contains(&token) {
                let r = f64::from(params.repetition_penalty);
                *at = if *at > 0.0 { *at / r } else { *at * r };
            }
            if said > 0 {
                *at -= f64::from(params.presence_penalty) + f64::from(params.frequency_penalty) * f64::from(said);
            }
        }
        for &token in barred {
            l[token as usize] = f64::NEG_INFINITY;
        }
        let greedy = params.temperature == 0.0;
        let t = if greedy { 1.0 } else { f64::from(params.temperature) };
        let greatest = l.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut p: Vec<f64> = l.iter().map(|l| ((l - greatest) / t).exp()).collect();
        if !greedy {
            let mut order: Vec<usize> = (0..p.len()).collect();
            order.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
            for &token in order.iter().skip(params.top_k.unwrap_or(usize::MAX)) {
                p[token] = 0.0;
            }
            let all: f64 = p.iter().sum();
            let mut before = 0.0;
            for (i, &token) in order.iter().enumerate() {
                let own = p[token];
                if i > 0 && before >= f64::from(params.top_p) * all {
                    p[token] = 0.0;
                }
                before += own;
            }
            p.iter_mut().filter(|p| **p < f64::from(params.min_p)).for_each(|p| *p = 0.0);
        }
        let all: f64 = p.iter().sum();
        p.iter().map(|p| p / all).collect()
    }

    prop_compose! {
        fn any_params()(
            temperature in prop_oneof![Just(0.0f32), Just(1.0), 0.3f32..2.0],
            top_k in prop::option::of(1usize..12), top_p in prop_oneof![Just(1.0f32), 0.05f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.01f32..1.0], repetition_penalty in prop_oneof![Just(1.0f32), 0.5f32..2.0],
            presence_penalty in prop_oneof![Just(0.0f32), -2.0f32..2.0],
            frequency_penalty in prop_oneof![Just(0.0f32), -2.0f32..2.0],
            bias in prop::option::of((0u32..5, -9.0f32..9.0)), seed in any::<u64>(),
        ) -> SamplingParams {
            let logit_bias = bias.into_iter().collect();
            SamplingParams {
                temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, seed,
                top_logprobs: 3, ..SamplingParams::default()
            }
        }
    }

    proptest! {
        /// A draw's probability is the book's, and the draw is where the cumulative sum passes the uniform number. Logits
        /// are whole numbers apart by 0.01 at least, so that no cut falls within a rounding.
        #[test]
        fn draws_follow_the_distribution_of_the_book(
            params in any_params(),
            logits in prop::collection::vec((-800i32..800).prop_map(|x| x as f32 * 0.01), 6..300),
            prompt in prop::collection::vec(0u32..6, 0..5), response in prop::collection::vec(0u32..6, 0..5),
            barred in prop::collection::vec(0u32..3, 0..2), position in 0u64..1000,
        ) {
            let counts = TokenCounts::new(&prompt, &response);
            let drawn = draw_with(&logits, &params, position, Some(&counts), &barred).expect("finite");
            let token = drawn.token as usize;
            let got = f64::from(drawn.logprob).exp();
            // Where a cut by probability falls within a rounding, a token more or less may be left.
            let want = [1.0f32, 1.0 - 1e-5, 1.0 + 1e-5].map(|by| {
                let cut = SamplingParams { top_p: params.top_p * by, min_p: params.min_p * by, ..params.clone() };
                by_the_book(&logits, if params.top_p < 1.0 || params.min_p > 0.0 { &cut } else { &params }, &counts, &barred)
            });
            let is_it = |want: &&Vec<f64>| (got - want[token]).abs() <= 1e-4 * want[token];
            let found = want.iter().find(is_it);
            prop_assert!(found.is_some(), "{got} for {}", want[0][token]);
            let want = found.expect("just seen");
            if params.temperature == 0.0 {
                let best = want.iter().copied().fold(0.0, f64::max);
                prop_assert!(want[token] >= best * (1.0 - 1e-6));
            } else {
                let u = uniform(params.seed, 3, position);
                let before: f64 = want[..token].iter().sum();
                prop_assert!(before - 1e-4 <= u && u <= before + want[token] + 1e-4, "{before} {u} {}", want[token]);
            }
            let base = by_the_book(&logits, &SamplingParams::default(), &TokenCounts::default(), &[]);
            prop_assert!((f64::from(drawn.base_logprob) - base[token].ln()).abs() < 1e-4);
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
            prop_assert_eq!(drawn.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), &order[..3]);
        }
    }

    #[test]
    fn cuts_keep_the_lower_of_equal_tokens_and_at_least_one() {
        let logits = [1.0f32, 2.0, 2.0, 2.0, 0.0];
        let support = |params: SamplingParams| -> Vec<u32> {
            let mut tokens: Vec<u32> =
                (0..400).map(|i| draw_with(&logits, &params, i, None, &[]).expect("finite").token).collect();
            tokens.sort_unstable();
            tokens.dedup();
            tokens
        };
        let with = |top_k, top_p, min_p| support(SamplingParams { top_k, top_p, min_p, ..params(1.0, 5) });
        assert_eq!(with(Some(2), 1.0, 0.0), [1, 2]);
        assert_eq!(with(Some(1), 1.0, 0.0), [1]);
        assert_eq!(with(Some(100), 1.0, 0.0), [0, 1, 2, 3, 4]);
        assert_eq!(with(None, 1e-6, 0.0), [1]);
        // The three are 0.29 each: the second passes a half.
        assert_eq!(with(None, 0.5, 0.0), [1, 2]);
        assert_eq!(with(None, 1.0, 1.0), [1, 2, 3]);
        assert_eq!(with(None, 1.0, 0.3), [0, 1, 2, 3]);
        // Of the two that are left the first is a half.
        assert_eq!(with(Some(2), 0.5, 0.0), [1]);
    }

    #[test]
    fn a_bias_of_a_hundred_forces_and_bars() {
        for temperature in [0.0, 1.0] {
            let forced = SamplingParams { logit_bias: vec![(3, 100.0)], ..params(temperature, 1) };
            let barred = SamplingParams { logit_bias: vec![(3, -100.0)], ..params(temperature, 1) };
            for position in 0..50 {
                let logits = [0.0f32, 1.0, -1.0, 4.0];
                assert_eq!(draw_with(&logits, &forced, position, None, &[]).expect("finite").token, 3);
                assert_ne!(draw_with(&logits, &barred, position, None, &[]).expect("finite").token, 3);
                assert_ne!(draw_with(&logits, &params(temperature, 1), position, None, &[3]).expect("finite").token, 3);
            }
        }
        assert_eq!(draw_with(&[0.0, 1.0], &params(1.0, 1), 0, None, &[0, 1]), None, "nothing may be drawn");
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
        let sampling = params(0.0, 1);
        let drawn = draw_with(&[0.0, 2.0, 2.0, 1.0], &sampling, 0, None, &[]).expect("finite");
        assert_eq!(drawn.token, 1);
        let total = 2.0 * 2f32.exp() + 1.0 + 1f32.exp();
        assert!((drawn.logprob - (2.0 - total.ln())).abs() < 1e-6);
    }

    #[test]
    fn broken_logits_give_no_token() {
        for temperature in [0.0, 1.0] {
            let sampling = params(temperature, 1);
            for broken in
                [[f32::NAN; 2], [f32::NEG_INFINITY; 2], [0.0, f32::INFINITY], [0.0, f32::NAN], [f32::NAN, 0.0]]
            {
                assert_eq!(draw_with(&broken, &sampling, 0, None, &[]), None, "{broken:?}");
            }
        }
        assert_eq!(draw_with(&[1e20, 0.0], &params(1e-30, 1), 0, None, &[]), None);
    }

    #[test]
    fn frequencies_follow_the_tempered_distribution() {
        let sampling = params(0.5, 7);
        let logits = [0.0f32, 0.5, -1.0, f32::NEG_INFINITY];
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(*l / 0.5).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut counts = [0.0; 4];
        let draws = 40_000;
        for position in 0..draws {
            let drawn = draw_with(&logits, &sampling, position, None, &[]).expect("finite");
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
