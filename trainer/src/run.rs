//! `trainer train`: the loop on one screen. The recipe says what each stage is.

use std::time::Instant;

use datasets::{Group, TrajectoryExtra, write_trajectories};

use crate::advantage;
use crate::cli::Failure;
use crate::evaluate::evaluate;
use crate::generate::{generate, metrics_of, num_response_tokens, params, requests, speculation_metrics};
use crate::recipe::Recipe;
use crate::setup::{Inputs, Run};
use crate::tracking::{Metrics, Stage, StepLine};
use crate::update::{UpdateReport, train_on};
use crate::weight_sync;

/// Reinforcement learning by `recipe`.
///
/// # Errors
/// When a stage fails or the run was stopped; the run's folder is whole either way.
pub fn train(recipe: &Recipe, recipe_files: &str, inputs: Inputs) -> Result<(), Failure> {
    let mut run = Run::start(recipe, recipe_files, inputs, recipe.num_steps)?;
    evaluate(&mut run, 0)?;
    let mut done = 0;
    while done < recipe.num_steps {
        let step = done + 1;
        let mut clock = Clock::start(&run, step);
        let before = run.engine.settled_stats();
        let Some(mut groups) = clock.time(Stage::Rollout, || rollouts(&run, step))? else { break };
        let drafts = speculation_metrics(&before, &run.engine.settled_stats());
        clock.time(Stage::Reward, || reward::score_groups(run.rule.as_ref(), &mut groups));
        let advantages = advantage::assign(&groups, &recipe.advantage);
        let samples = advantage::samples(&groups, &advantages);
        let Some(mut report) = clock.time(Stage::Train, || train_on(&mut run, &samples))? else { break };
        report.metrics.extend(drafts);
        clock.time(Stage::Sync, || weight_sync::publish(&run.policy, &run.engine, step as u64))?;
        record(&mut run, step, &groups, &advantages, report, clock)?;
        done = step;
        if done < recipe.num_steps {
            if is_due(recipe.eval.every_steps, done) {
                evaluate(&mut run, done)?;
            }
            if is_due(recipe.checkpoint.every_steps, done) {
                run.save(done)?;
            }
        }
    }
    if done == recipe.num_steps {
        evaluate(&mut run, done)?;
    }
    // Stopped between two updates of a step, the weights are no step's: the checkpoint before is the one to go on from.
    let is_whole_step = run.optimizer.num_steps() == (done * recipe.train.updates_per_step) as u64;
    if done > 0 && is_whole_step {
        run.save(done)?;
    }
    run.finish(done)
}

fn is_due(every: usize, step: usize) -> bool {
    every > 0 && step.is_multiple_of(every)
}

/// A group of rollouts for each of the step's prompts; `None` when the run was stopped.
fn rollouts(run: &Run<'_>, step: usize) -> Result<Option<Vec<Group>>, Failure> {
    let recipe = run.recipe;
    let book = run.prompts.as_ref().expect("training reads prompts");
    let batch = book.order.batch(step as u64 - 1, recipe.prompts_per_step);
    let indices: Vec<usize> = batch.into_iter().map(|(index, _epoch)| index).collect();
    let first_group_id = ((step - 1) * recipe.prompts_per_step) as u64;
    let requests = requests(book, &indices, recipe.group_size, first_group_id);
    let params = params(recipe, recipe.rollout.temperature);
    Ok(generate(&run.engine, &requests, &params, &run.console, Stage::Rollout, &run.stop)?)
}

/// Where a step's time goes.
struct Clock {
    started: Instant,
    stages_s: Vec<(Stage, f64)>,
}

impl Clock {
    fn start(run: &Run<'_>, step: usize) -> Self {
        run.console.step_started(step);
        Self { started: Instant::now(), stages_s: Vec::new() }
    }

    fn time<T>(&mut self, stage: Stage, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        self.stages_s.push((stage, started.elapsed().as_secs_f64()));
        result
    }
}

/// Writes what a step was: its trajectories, its metrics, its line on the console.
fn record(
    run: &mut Run<'_>,
    step: usize,
    groups: &[Group],
    advantages: &[Vec<f32>],
    report: UpdateReport,
    clock: Clock,
) -> Result<(), Failure> {
    let extras: Vec<TrajectoryExtra> = advantages
        .iter()
        .flatten()
        .zip(report.trainer_logprobs)
        .map(|(&advantage, trainer_logprobs)| TrajectoryExtra { advantage, trainer_logprobs })
        .collect();
    write_trajectories(&run.dir.trajectories(step), step as u64, groups, Some(&extras))?;

    let mut metrics = metrics_of(groups, "rollout");
    metrics.extend(report.metrics);
    let step_time_s = clock.started.elapsed().as_secs_f64();
    let sampled = num_response_tokens(groups) as f64;
    for (stage, seconds) in &clock.stages_s {
        let name = match stage {
            Stage::Rollout => "perf/rollout_time",
            Stage::Reward => "perf/reward_time",
            Stage::Train => "perf/actor_train_time",
            Stage::Sync => "perf/update_weights_time",
            Stage::Eval => "perf/eval_time",
        };
        metrics.insert(name.into(), *seconds);
        match stage {
            Stage::Rollout => metrics.insert("perf/rollout_tok_per_s".into(), sampled / seconds),
            Stage::Train => metrics.insert("perf/actor_train_tok_per_s".into(), report.num_tokens as f64 / seconds),
            _ => None,
        };
    }
    metrics.insert("perf/step_time".into(), step_time_s);
    run.log(step, &metrics)?;
    run.console.step_finished(&line(step, &metrics, step_time_s, report.num_tokens, clock.stages_s));
    for sentence in crate::tracking::why_nothing_is_learned(step, &metrics) {
        run.console.warning(&sentence);
    }
    Ok(())
}

fn line(step: usize, metrics: &Metrics, step_time_s: f64, num_tokens: usize, stages_s: Vec<(Stage, f64)>) -> StepLine {
    StepLine {
        step,
        reward: metrics.get("rollout/raw_reward").copied(),
        response_tokens: metrics.get("rollout/response_len/mean").copied(),
        loss: metrics["train/loss"],
        grad_norm: metrics["train/grad_norm"],
        tokens_per_s: num_tokens as f64 / step_time_s,
        step_time_s,
        stages_s,
    }
}
