//! `trainer sft`: supervised fine-tuning on the reference answers, from a checkpoint or from fresh weights.

use std::time::Instant;

use datasets::Sample;
use rollout::model::ModelConfig;
use rollout::tokenizer::Tokenizer;

use crate::cli::Failure;
use crate::evaluate::evaluate;
use crate::loss::{Aggregation, Normaliser, cross_entropy_backward};
use crate::pack::pack;
use crate::parallel::in_order;
use crate::policy::Gradients;
use crate::recipe::Recipe;
use crate::setup::{Inputs, PromptBook, Run};
use crate::tracking::{Metrics, Stage, StepLine};
use crate::weight_sync;

/// Trains until the steps are made or the held-out reward reaches `sft.stop_at_reward`.
///
/// # Errors
/// When training, the disk or the engine fails.
pub fn sft(recipe: &Recipe, recipe_files: &str, mut inputs: Inputs) -> Result<(), Failure> {
    let samples = std::mem::take(&mut inputs.demonstrations);
    let mut run = Run::start(recipe, recipe_files, inputs, recipe.sft.num_steps)?;
    let book = run.prompts.take().expect("sft reads training prompts");
    let mut done = 0;
    for step in 1..=recipe.sft.num_steps {
        if run.is_stopped() {
            break;
        }
        let started = Instant::now();
        run.console.step_started(step);
        let batch = batch(&book, &samples, step - 1, recipe.sft.batch_size);
        let microbatches = pack(&batch, &recipe.pack);
        let normaliser = Normaliser::new(&microbatches, Aggregation::TokenMean);
        let (mut gradients, mut loss, mut mtp_loss, mut tokens) = (Gradients::default(), 0.0, 0.0, 0);
        let mtp_loss_weight = recipe.train.mtp_loss_weight;
        let whole = in_order(
            &mut run.workers,
            microbatches.len(),
            &run.stop,
            |policy, m| cross_entropy_backward(policy, &microbatches[m], &normaliser, mtp_loss_weight),
            |m, (gradient, part, mtp_part)| {
                gradients.add(gradient);
                loss += part;
                mtp_loss += mtp_part;
                tokens += microbatches[m].num_tokens();
                run.console.stage(Stage::Train, m + 1, microbatches.len(), tokens);
            },
        );
        if !whole {
            break;
        }
        let report = run.optimizer.step(&mut run.policy, &gradients)?;
        done = step;
        let seconds = started.elapsed().as_secs_f64();
        let tokens_per_s = tokens as f64 / seconds;
        let mut metrics = Metrics::from([
            ("train/loss".into(), loss),
            ("train/grad_norm".into(), report.grad_norm),
            ("train/lr".into(), report.learning_rate),
            ("perf/step_time".into(), seconds),
            ("perf/train_tokens_per_s".into(), tokens_per_s),
        ]);
        if mtp_loss_weight > 0.0 {
            metrics.insert("train/mtp_loss".into(), mtp_loss);
        }
        run.log(step, &metrics)?;
        run.console.step_finished(&StepLine {
            step,
            loss,
            grad_norm: report.grad_norm,
            tokens_per_s,
            step_time_s: seconds,
            ..StepLine::default()
        });
        let every = recipe.sft.eval_every_steps;
        if step == recipe.sft.num_steps || (every > 0 && step.is_multiple_of(every)) {
            weight_sync::publish(&run.policy, &run.engine, step as u64)?;
            let reward = evaluate(&mut run, step)?;
            if let (Some(reward), Some(enough)) = (reward, recipe.sft.stop_at_reward)
                && reward >= enough
            {
                break;
            }
        }
    }
    if done > 0 {
        run.save(done)?;
    }
    run.finish(done)
}

/// Every prompt with its reference answer and the end-of-sequence token, trained on the answer.
///
/// # Errors
/// When an answer cannot be encoded or does not fit into the model's context.
pub fn demonstrations(
    book: &PromptBook,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
) -> Result<Vec<Sample>, anyhow::Error> {
    book.prompts
        .iter()
        .zip(&book.tokens)
        .map(|(prompt, prompt_tokens)| {
            let answer = tokenizer.encode(&prompt.answer)?;
            let (asked, answered, context) = (prompt_tokens.len(), answer.len() + 1, config.max_position_embeddings);
            anyhow::ensure!(
                asked + answered <= context,
                "{}: row {} has {asked} tokens and its answer {answered}, more than the model's context of {context}: \
                 shorten the answer or leave the row out",
                book.path.display(),
                prompt.row
            );
            let tokens: Vec<u32> =
                prompt_tokens.iter().copied().chain(answer).chain([config.eos_token_id.first()]).collect();
            let n = tokens.len() - 1;
            Ok(Sample {
                group_id: prompt.row as u64,
                rollout_id: prompt.row as u64,
                loss_mask: (0..n).map(|t| t + 1 >= asked).collect(),
                advantages: vec![0.0; n],
                rollout_logprobs: vec![0.0; n],
                tokens,
                routing: None,
                indexer: None,
            })
        })
        .collect()
}

fn batch(book: &PromptBook, samples: &[Sample], step: usize, batch_size: usize) -> Vec<Sample> {
    book.order.batch(step as u64, batch_size).into_iter().map(|(i, _epoch)| samples[i].clone()).collect()
}
