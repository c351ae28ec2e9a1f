//! An engine over a checkpoint, as the commands that generate ask for it.

use std::path::Path;

use clap::Args;
use rollout::engine::{Engine, SchedulerOptions};
use rollout::model::{Model, ModelConfig};
use rollout::stop_tokens::load_stop_tokens;
use rollout::tokenizer::Tokenizer;

/// What the engine may use.
#[derive(Args, Clone, Debug)]
pub struct EngineArgs {
    /// Threads of a forward pass; all processors unless said
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Samples that decode together
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    max_batch: u32,
    /// Tokens of a forward pass: those that decode, and pieces of prompts
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    max_step_tokens: u32,
    /// Memory for sequences, in MiB; a quarter of what is free unless said
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    kv_cache_mib: Option<u32>,
    /// Let the model's multi-token-prediction block draft tokens; the answers stay the same
    #[arg(long)]
    speculative: bool,
    /// Keep no states for requests that begin alike
    #[arg(long)]
    no_prefix_cache: bool,
}

impl EngineArgs {
    /// As the scheduler takes them.
    pub fn options(&self) -> SchedulerOptions {
        let default = SchedulerOptions::default();
        SchedulerOptions {
            num_threads: self.threads.map_or(default.num_threads, usize::from),
            max_batch: self.max_batch as usize,
            max_step_tokens: self.max_step_tokens as usize,
            kv_cache_bytes: self.kv_cache_mib.map_or(default.kv_cache_bytes, |mib| (mib as usize) << 20),
            prefix_cache: !self.no_prefix_cache,
            record_choices: false,
            speculative: self.speculative,
            ..default
        }
    }
}

/// Reads the checkpoint in `dir` and starts an engine over it.
pub fn load_engine(dir: &Path, options: SchedulerOptions) -> anyhow::Result<Engine> {
    let config = ModelConfig::load(&dir.join("config.json"))?;
    if options.speculative && !config.has_mtp() {
        anyhow::bail!(
            "{} has no multi-token-prediction block, expected one with --speculative; leave it out",
            dir.display()
        );
    }
    let tokenizer = Tokenizer::load(dir, config.vocab_size)?;
    let stop_tokens = load_stop_tokens(dir, config.eos_token_id.ids(), config.vocab_size)?;
    Ok(Engine::new(Model::load(dir, &config)?, tokenizer, stop_tokens, options))
}
