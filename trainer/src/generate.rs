//! The rollout and reward stages as the trainer runs them: requests from prompts, progress on the console, and what a
//! batch of groups says in numbers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use datasets::{FinishReason, Group, Verdict};
use rollout::engine::{Engine, GenerateError, GroupRequest, Progress, SchedulerOptions, Stats};
use rollout::sampler::SamplingParams;

use crate::recipe::{Recipe, RolloutConfig};
use crate::setup::PromptBook;
use crate::tracking::{Console, Metrics, Stage};

/// How often the console hears of a running generation.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// Requests for the prompts at `indices` of `book`, with ids that count up from `first_group_id`.
pub fn requests(book: &PromptBook, indices: &[usize], group_size: usize, first_group_id: u64) -> Vec<GroupRequest> {
    let ids = first_group_id..;
    ids.zip(indices)
        .map(|(group_id, &i)| GroupRequest {
            group_id,
            first_rollout_id: group_id * group_size as u64,
            group_size,
            prompt: book.prompts[i].clone(),
            prompt_tokens: book.tokens[i].clone(),
        })
        .collect()
}

/// How responses are made at `temperature`, which is one thing in training and may be another in evaluation.
pub fn params(recipe: &Recipe, temperature: f64) -> SamplingParams {
    SamplingParams {
        temperature: temperature as f32,
        seed: recipe.seed,
        max_tokens: recipe.rollout.max_response_tokens,
        ..SamplingParams::default()
    }
}

/// What the engine of a run may use.
pub fn engine_options(recipe: &Recipe, num_threads: usize) -> SchedulerOptions {
    let default = SchedulerOptions::default();
    let kv_cache_bytes = match recipe.rollout.kv_cache_mib {
        0 => default.kv_cache_bytes,
        mib => mib << 20,
    };
    let RolloutConfig { max_batch_rollouts: max_batch, speculative, .. } = recipe.rollout;
    SchedulerOptions { num_threads, max_batch, kv_cache_bytes, speculative, ..default }
}

/// What drafts were worth between two states of the engine, under Miles' names; nothing where there were none.
pub fn speculation_metrics(before: &Stats, after: &Stats) -> Metrics {
    let drafted_tokens = after.drafted_tokens - before.drafted_tokens;
    let accepted_tokens = after.accepted_tokens - before.accepted_tokens;
    let between = Stats { drafted_tokens, accepted_tokens, ..Stats::default() };
    let named =
        [("spec_accept_rate", between.spec_accept_rate()), ("spec_accept_length", between.spec_accept_length())];
    named.into_iter().filter_map(|(name, value)| Some((format!("rollout/{name}"), value?))).collect()
}

/// Generates and shows how far it is; `Ok(None)` when `stop` was set meanwhile.
///
/// # Errors
/// What the engine says.
pub fn generate(
    engine: &Engine,
    requests: &[GroupRequest],
    params: &SamplingParams,
    console: &Console,
    stage: Stage,
    stop: &AtomicBool,
) -> Result<Option<Vec<Group>>, GenerateError> {
    let total: usize = requests.iter().map(|r| r.group_size).sum();
    let progress = Progress::default();
    let show = || {
        let done = progress.rollouts.load(Ordering::Relaxed);
        console.stage(stage, done, total, progress.tokens.load(Ordering::Relaxed));
    };
    let finished = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        let watcher = std::thread::Builder::new().name("progress".into()).spawn_scoped(scope, || {
            while !finished.load(Ordering::Relaxed) {
                progress.cancel.store(stop.load(Ordering::Relaxed), Ordering::Relaxed);
                show();
                std::thread::park_timeout(REPORT_EVERY);
            }
        });
        let watcher = watcher.expect("a thread can start");
        // Also when the engine panics: the scope waits for the watcher before it lets the panic through.
        let _ends = OnDrop(|| {
            finished.store(true, Ordering::Relaxed);
            watcher.thread().unpark();
        });
        engine.generate(requests, params, &progress)
    });
    show();
    match result {
        Ok(groups) => Ok(Some(groups)),
        Err(GenerateError::Cancelled) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Runs its function when it goes out of scope, however that comes about.
struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// What scored groups say, under Miles' names with `prefix` before them (`rollout` or `eval`).
pub fn metrics_of(groups: &[Group], prefix: &str) -> Metrics {
    let rollouts: Vec<_> = groups.iter().flat_map(|g| &g.rollouts).collect();
    let num = rollouts.len().max(1) as f64;
    let mut metrics = Metrics::new();
    let mut put = |name: &str, value: f64| {
        metrics.insert(format!("{prefix}/{name}"), value);
    };
    let rewards: Vec<_> = rollouts.iter().filter_map(|r| r.reward.as_ref()).collect();
    let share = |verdict: Verdict| rewards.iter().filter(|r| r.verdict == verdict).count() as f64 / num;
    let scored: Vec<f64> = rewards.iter().filter(|r| r.verdict != Verdict::Unscorable).map(|r| r.score).collect();
    put(
        if prefix == "eval" { "reward" } else { "raw_reward" },
        scored.iter().sum::<f64>() / scored.len().max(1) as f64,
    );
    put("right_ratio", share(Verdict::Right));
    put("unscorable_ratio", share(Verdict::Unscorable));
    let mut parts: std::collections::BTreeMap<&str, (f64, f64)> = Default::default();
    for (name, value) in rewards.iter().flat_map(|r| &r.parts) {
        let (sum, n) = parts.entry(name).or_default();
        *sum += value;
        *n += 1.0;
    }
    for (name, (sum, n)) in parts {
        put(&format!("reward_part/{name}"), sum / n);
    }
    let lens: Vec<f64> = rollouts.iter().map(|r| r.response_tokens.len() as f64).collect();
    put("response_len/mean", lens.iter().sum::<f64>() / num);
    put("response_len/min", lens.iter().copied().fold(f64::INFINITY, f64::min));
    put("response_len/max", lens.iter().copied().fold(0.0, f64::max));
    let truncated = rollouts.iter().filter(|r| r.finish_reason == FinishReason::Length).count();
    put("truncated_ratio", truncated as f64 / num);
    let logprobs = rollouts.iter().flat_map(|r| &r.rollout_logprobs);
    let (mut sum, mut n) = (0.0, 0.0);
    for logprob in logprobs {
        sum += f64::from(*logprob);
        n += 1.0;
    }
    put("rollout_log_probs", sum / f64::max(n, 1.0));
    let versions: Vec<u64> = rollouts.iter().flat_map(|r| &r.weight_versions).copied().collect();
    put("weight_version/min", versions.iter().min().copied().unwrap_or(0) as f64);
    put("weight_version/max", versions.iter().max().copied().unwrap_or(0) as f64);
    let flat = groups.iter().filter(|g| {
        let mut scores = g.rollouts.iter().filter_map(|r| r.reward.as_ref()).map(|r| r.score);
        scores.next().is_none_or(|first| scores.all(|s| s == first))
    });
    put("zero_std/ratio", flat.count() as f64 / groups.len().max(1) as f64);
    metrics
}

/// Tokens that were sampled.
pub fn num_response_tokens(groups: &[Group]) -> usize {
    groups.iter().flat_map(|g| &g.rollouts).map(|r| r.response_tokens.len()).sum()
}

/// Group ids of held-out prompts start here, so that their random streams are never those of training.
pub const HELD_OUT_IDS: u64 = 1 << 40;

/// All rows of a book.
pub fn all_rows(book: &PromptBook) -> Vec<usize> {
    (0..book.prompts.len()).collect()
}
