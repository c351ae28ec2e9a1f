//! `rollout`: the engine by itself, without the trainer and without libtorch.
#![forbid(unsafe_code)]

mod cli;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use cli::bench::{BenchArgs, run_bench};
use cli::chat::{ChatArgs, run_chat};
use cli::engine::load_engine;
use cli::score::{Side, Texts, run_diff, run_score};
use cli::serve::{ServeArgs, run_serve};
use cli::{say, temperature, template, without_control};
use datasets::{FinishReason, Prompt};
use rollout::chat::{ChatOptions, Message, ThinkingMode, render};
use rollout::convert::{Formats, Target, convert};
use rollout::engine::{GenerateError, GroupRequest, Progress, SchedulerOptions};
use rollout::model::checkpoint::{Format, Layout, Naming};
use rollout::model::{LayerKind, ModelConfig, Sizes};
use rollout::sampler::SamplingParams;

/// The Furlong rollout engine
#[derive(Parser)]
#[command(name = "rollout", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say what a model is: its parameters, its memory, its layers
    Info {
        /// A checkpoint folder (its config.json is enough), or v4-flash or v4-pro for the published models
        model: PathBuf,
    },
    /// Write a checkpoint in another number format or naming
    Convert {
        /// The checkpoint folder to read
        from: PathBuf,
        /// The folder to write, which must not exist
        to: PathBuf,
        /// What the routed experts are stored in; other tensors as the release has them beside such experts
        #[arg(long = "to", value_name = "FORMAT")]
        layout: Layout,
        /// With mxfp4: leave all but the routed experts in this instead of FP8 and bf16
        #[arg(long)]
        others: Option<Others>,
        /// The names of the tensors and of config.json's fields
        #[arg(long, default_value = "release")]
        naming: Naming,
        /// Begin another file before one grows larger than this, in megabytes
        #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
        shard_mb: u64,
    },
    /// Log-probabilities of given texts or tokens, JSON lines in and out
    Score {
        /// A checkpoint folder
        model: PathBuf,
        #[command(flatten)]
        texts: Texts,
    },
    /// How far two checkpoints are apart on given texts, or one in two formats (`diff M M --a-as bf16 --b-as mxfp4`)
    Diff {
        /// A checkpoint folder, whose tokenizer reads the texts
        a: PathBuf,
        /// Another, with the same vocabulary
        b: PathBuf,
        /// Round A to this format first
        #[arg(long, value_name = "FORMAT")]
        a_as: Option<Layout>,
        /// Round B to this format first
        #[arg(long, value_name = "FORMAT")]
        b_as: Option<Layout>,
        /// With mxfp4: leave all but the routed experts in this instead of FP8 and bf16
        #[arg(long)]
        others: Option<Others>,
        #[command(flatten)]
        texts: Texts,
    },
    /// Serve a model to clients of OpenAI's and SGLang's HTTP interfaces
    Serve(ServeArgs),
    /// Talk with a model
    Chat(ChatArgs),
    /// Say how fast a model answers here
    Bench(BenchArgs),
    /// Answer prompts
    Generate {
        /// A checkpoint folder
        model: PathBuf,
        /// The prompts
        #[arg(required = true)]
        prompts: Vec<String>,
        /// What the model reads of a prompt
        #[arg(long, value_parser = template, default_value = "<｜begin▁of▁sentence｜><｜User｜>{prompt}<｜Assistant｜>")]
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

/// What `convert` may leave tensors in.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Others {
    Bf16,
    F32,
}

impl From<Others> for Format {
    fn from(others: Others) -> Self {
        match others {
            Others::Bf16 => Self::Bf16,
            Others::F32 => Self::F32,
        }
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Info { model } => info(&model),
        Command::Serve(args) => run_serve(args),
        Command::Chat(args) => run_chat(args),
        Command::Bench(args) => run_bench(args),
        Command::Score { model, texts } => run_score(&model, &texts),
        Command::Diff { a_as, b_as, others: Some(_), .. } if ![a_as, b_as].contains(&Some(Layout::Mxfp4)) => {
            Err(anyhow::anyhow!("--others says what stands beside mxfp4; give --a-as or --b-as mxfp4, or leave it out"))
        }
        Command::Diff { a, b, a_as, b_as, others, texts } => {
            let others = others.map(Format::from);
            let formats = |layout: Option<Layout>| layout.map(|layout| Formats { layout, others });
            let (a, b) = (Side { dir: &a, formats: formats(a_as) }, Side { dir: &b, formats: formats(b_as) });
            run_diff(&a, &b, &texts)
        }
        Command::Convert { layout, others: Some(_), .. } if layout != Layout::Mxfp4 => {
            Err(anyhow::anyhow!("--others says what stands beside mxfp4; give --to mxfp4, or leave it out"))
        }
        Command::Convert { from, to, layout, others, naming, shard_mb } => {
            let formats = Formats { layout, others: others.map(Format::from) };
            let target = Target { formats, naming, shard_bytes: shard_mb as usize * 1_000_000 };
            convert(&from, &to, target)
                .map_err(anyhow::Error::from)
                .and_then(|done| say(format!("{}: {done}", to.display())))
        }
        Command::Generate { model, prompts, template, chat, thinking, samples, temperature, max_tokens, seed } => {
            let params =
                SamplingParams { temperature, seed, max_tokens: max_tokens as usize, ..SamplingParams::default() };
            let mode = if thinking { ThinkingMode::Thinking } else { ThinkingMode::Chat };
            let form = if chat { PromptForm::Chat(mode) } else { PromptForm::Template(template) };
            generate(&model, &prompts, &form, samples as usize, &params)
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

fn info(model: &Path) -> anyhow::Result<()> {
    let config = match ModelConfig::preset(&model.to_string_lossy()).filter(|_| !model.exists()) {
        Some(preset) => preset,
        None => ModelConfig::load(&model.join("config.json"))?,
    };
    say(Sizes::new(&config).to_string().trim_end().to_owned())?;
    let experts = if config.experts_are_fp4() { "MXFP4" } else { "the checkpoint's values" };
    say(format!(
        "experts                 {} a layer, {} used by a token, on {experts}",
        config.n_routed_experts, config.num_experts_per_tok
    ))?;
    let describe = |layer: usize| {
        let attention = match config.layer_kind(layer) {
            LayerKind::Window => format!("window of {}", config.sliding_window),
            LayerKind::Csa => {
                format!("window of {} and {} of the blocks of 4", config.sliding_window, config.index_topk)
            }
            LayerKind::Hca { ratio } => format!("window of {} and all blocks of {ratio}", config.sliding_window),
        };
        let routing = if config.is_hash_layer(layer) { "hash-routed" } else { "score-routed" };
        format!("{attention}; {routing}")
    };
    for layer in 0..config.num_hidden_layers {
        say(format!("layer {layer:<18}{}", describe(layer)))?;
    }
    Ok(())
}

/// What the model reads of a prompt.
enum PromptForm {
    Template(String),
    Chat(ThinkingMode),
}

fn generate(
    dir: &Path,
    prompts: &[String],
    form: &PromptForm,
    samples: usize,
    params: &SamplingParams,
) -> anyhow::Result<()> {
    let options = SchedulerOptions { record_choices: false, ..SchedulerOptions::default() };
    let engine = load_engine(dir, options)?;
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
    let groups = engine.generate(&requests, params, &Progress::default()).map_err(|error| match error {
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
