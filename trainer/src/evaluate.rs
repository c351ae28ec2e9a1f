//! Measuring the model on held-out prompts, during a run and by `trainer eval`.

use std::time::Instant;

use crate::cli::Failure;
use crate::generate::{HELD_OUT_IDS, all_rows, generate, metrics_of, params, requests};
use crate::setup::Run;
use crate::tracking::{EvalLine, Stage};

/// Answers the held-out prompts, logs `eval/...` under `step` and returns the mean reward; `None` without held-out
/// prompts or when the run was stopped meanwhile.
///
/// Every evaluation of a run draws with the same random numbers, so that two of them differ by the model alone.
///
/// # Errors
/// When generation or the log fails.
pub fn evaluate(run: &mut Run<'_>, step: usize) -> Result<Option<f64>, Failure> {
    let Some(book) = &run.held_out else { return Ok(None) };
    let started = Instant::now();
    let config = &run.recipe.eval;
    let requests = requests(book, &all_rows(book), config.samples_per_prompt, HELD_OUT_IDS);
    let params = params(run.recipe, config.temperature);
    let Some(mut groups) = generate(&run.engine, &requests, &params, &run.console, Stage::Eval, &run.stop)? else {
        return Ok(None);
    };
    reward::score_groups(run.rule.as_ref(), &mut groups);
    let mut metrics = metrics_of(&groups, "eval");
    let seconds = started.elapsed().as_secs_f64();
    let num_responses: usize = groups.iter().map(|g| g.rollouts.len()).sum();
    let reward = metrics["eval/reward"];
    run.console.eval(&EvalLine {
        step,
        reward,
        num_responses,
        num_unscorable: (metrics["eval/unscorable_ratio"] * num_responses as f64).round() as usize,
        response_tokens: metrics["eval/response_len/mean"],
        seconds,
    });
    metrics.insert("perf/eval_time".into(), seconds);
    run.log(step, &metrics)?;
    Ok(Some(reward))
}
