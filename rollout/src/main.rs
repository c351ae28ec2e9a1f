//! `rollout`: the engine by itself, without the trainer and without libtorch.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::{Parser, Subcommand};
use datasets::{FinishReason, Prompt};
use rollout::chat::{ChatOptions, Message, ThinkingMode, render};
use rollout::engine::{Engine, GenerateError, GenerateOptions, GroupRequest, Progress};
use rollout::kv_cache::KvCache;
use rollout::model::checkpoint::load_weights;
use rollout::model::{LayerKind, Model, ModelConfig, to_engine_format};
use rollout::sampler::Sampling;
use rollout::stop_tokens::load_stop_tokens;
use rollout::tokenizer::Tokenizer;

/// The Furlong rollout engine
#[derive(Parser)]
#[command(name = "rollout", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say what a checkpoint is: its layers, its parameters, its memory
    Info {
        /// A checkpoint folder
        model: PathBuf,
    },
    /// Answer prompts
    Generate {
        /// A checkpoint folder
        model: PathBuf,
        /// The prompts
        #[arg(required = true)]
        prompts: Vec<String>,
        /// What the model reads of a prompt
        #[arg(long, default_value = "<｜begin▁of▁sentence｜><｜User｜>{prompt}<｜Assistant｜>")]
        template: String,
        /// Ask as in a chat: each prompt is a user message in V4's format
        #[arg(long, conflicts_with = "template")]
        chat: bool,
        /// Let the model reason before it answers
        #[arg(long, requires = "chat")]
        thinking: bool,
        /// Responses per prompt
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
        samples: u32,
        /// Divides the logits, 0.001 to 1000; 0 takes the likeliest token
        #[arg(long, default_value_t = 1.0, value_parser = temperature)]
        temperature: f32,
        /// Where a response is cut, in tokens
        #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
        max_tokens: u32,
        /// Keys the random numbers
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

/// A number that the kernels can divide logits by.
fn temperature(text: &str) -> Result<f32, String> {
    let is_usable = |t: &f32| *t == 0.0 || (1e-3..=1e3).contains(t);
    text.parse().ok().filter(is_usable).ok_or_else(|| "expected 0 or a number from 0.001 to 1000".into())
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Info { model } => info(&model),
        Command::Generate { model, prompts, template, chat, thinking, samples, temperature, max_tokens, seed } => {
            let options = GenerateOptions {
                sampling: Sampling { temperature, seed },
                max_response_tokens: max_tokens as usize,
                max_batch_rollouts: 256,
            };
            let mode = if thinking { ThinkingMode::Thinking } else { ThinkingMode::Chat };
            let form = if chat { PromptForm::Chat(mode) } else { PromptForm::Template(template) };
            generate(&model, &prompts, &form, samples as usize, &options)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not `eprintln!`, which panics when stderr cannot be written to: the status still says what happened.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn info(dir: &std::path::Path) -> anyhow::Result<()> {
    let config = ModelConfig::load(&dir.join("config.json"))?;
    let (total, active) = config.num_parameters();
    say(format!("parameters  {total} in all, {active} used by a token"))?;
    let experts = if config.experts_are_fp4() { "MXFP4" } else { "f32" };
    say(format!(
        "experts     {} a layer, {} used by a token, {experts}",
        config.n_routed_experts, config.num_experts_per_tok
    ))?;
    for layer in 0..config.num_hidden_layers {
        let attention = match config.layer_kind(layer) {
            LayerKind::Window => format!("window of {}", config.sliding_window),
            LayerKind::Csa => {
                format!("window of {} and {} of the blocks of 4", config.sliding_window, config.index_topk)
            }
            LayerKind::Hca { ratio } => format!("window of {} and all blocks of {ratio}", config.sliding_window),
        };
        let routing = if config.is_hash_layer(layer) { "hash-routed" } else { "score-routed" };
        say(format!("layer {layer:<5} {attention}; {routing}"))?;
    }
    for tokens in [1024, 4096, 131_072].into_iter().filter(|&n| n <= config.max_position_embeddings) {
        say(format!(
            "KV cache    {:.1} KiB for {tokens} tokens",
            KvCache::num_bytes_at(&config, tokens) as f64 / 1024.0
        ))?;
    }
    Ok(())
}

/// What the model reads of a prompt.
enum PromptForm {
    Template(String),
    Chat(ThinkingMode),
}

fn generate(
    dir: &std::path::Path,
    prompts: &[String],
    form: &PromptForm,
    samples: usize,
    options: &GenerateOptions,
) -> anyhow::Result<()> {
    let config = ModelConfig::load(&dir.join("config.json"))?;
    let tokenizer = Tokenizer::load(dir, config.vocab_size)?;
    let weights = to_engine_format(&config, load_weights(dir, &config)?);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let stop_tokens = load_stop_tokens(dir, config.eos_token_id, config.vocab_size)?;
    let engine = Engine::new(Model::new(&config, 0, &weights), tokenizer, threads).with_stop_tokens(stop_tokens);
    let mut requests = Vec::new();
    for (row, text) in prompts.iter().enumerate() {
        let rendered = match form {
            PromptForm::Template(template) => engine.tokenizer().fill_template(template, text),
            PromptForm::Chat(thinking_mode) => {
                let options = ChatOptions { thinking_mode: *thinking_mode, ..ChatOptions::default() };
                render(&[Message::user(text.as_str())], &options)?
            }
        };
        let tokens = engine.tokenizer().encode_marked(&rendered)?;
        requests.push(GroupRequest {
            group_id: row as u64,
            first_rollout_id: (row * samples) as u64,
            group_size: samples,
            prompt: Arc::new(Prompt {
                row,
                text: text.clone(),
                answer: String::new(),
                metadata: serde_json::Value::Null,
            }),
            prompt_tokens: tokens.into(),
        });
    }
    let groups = engine.generate(&requests, options, &Progress::default()).map_err(|error| match error {
        GenerateError::TooLong { row, tokens, response, context } => anyhow::anyhow!(
            "prompt {row} has {tokens} tokens; with up to {response} more it exceeds the model's context of {context}: \
             shorten the prompt or lower --max-tokens"
        ),
        GenerateError::EmptyPrompt { row } => {
            anyhow::anyhow!("prompt {row} has no token, expected at least one; give it text, or --template a token")
        }
        other => other.into(),
    })?;
    let to_terminal = std::io::stdout().is_terminal();
    for group in groups {
        for rollout in group.rollouts {
            let cut = if rollout.finish_reason == FinishReason::Length { " ..." } else { "" };
            let logprob: f32 = rollout.rollout_logprobs.iter().sum();
            let text = if to_terminal { without_control(&rollout.response_text) } else { rollout.response_text };
            say(format!("{text}{cut}\t(log-probability {logprob:.3})"))?;
        }
    }
    Ok(())
}

/// `text` with its control characters spelled out, so that what a model says cannot drive a terminal.
fn without_control(text: &str) -> String {
    let is_harmless = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().map(|c| if is_harmless(c) { c.to_string() } else { c.escape_default().to_string() }).collect()
}

/// Prints a line to stdout. A reader that has gone away (`| head`) is no error; a full disk is.
fn say(line: String) -> anyhow::Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot write to stdout"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_response_cannot_drive_the_terminal() {
        assert_eq!(super::without_control("é\n\tok\u{1b}[2J\r\u{9b}1m\u{7}"), "é\n\tok\\u{1b}[2J\\r\\u{9b}1m\\u{7}");
    }
}
