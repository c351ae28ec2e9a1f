//! What a run needs before it starts: every path, row, reward and token checked, and the parts put together.
//! `--dry-run` ends here.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Context;
use datasets::{Prompt, PromptColumns, PromptOrder, Sample, read_prompts};
use reward::RewardFn;
use rollout::engine::Engine;
use rollout::kv_cache::KvCache;
use rollout::model::checkpoint::load_weights;
use rollout::model::{Model, ModelConfig, Sizes, Weights, is_routed_expert, to_engine_format};
use rollout::stop_tokens::load_stop_tokens;
use rollout::tokenizer::Tokenizer;
use tch::Device;

use crate::cli::{Failure, OrBadInput};
use crate::generate::engine_options;
use crate::optimizer::{Optimizer, state_bytes};
use crate::policy::{Frozen, Policy, initial_weights};
use crate::recipe::{OptimizerConfig, Recipe, RewardConfig, Task};
use crate::sft::demonstrations;
use crate::tracking::{Console, Header, Metrics, MetricsFile, RunDir, Summary, Tracker};

/// Prompts of one file as the model reads them.
pub struct PromptBook {
    /// The file.
    pub path: PathBuf,
    /// The rows.
    pub prompts: Vec<Arc<Prompt>>,
    /// Their tokens, rendered by the recipe's template.
    pub tokens: Vec<Arc<[u32]>>,
    /// Which of them a step takes.
    pub order: PromptOrder,
}

/// Everything that was read from disk, checked.
pub struct Inputs {
    /// The model's architecture.
    pub config: ModelConfig,
    /// Its masters.
    pub weights: Weights,
    /// Which of them training leaves alone.
    pub frozen: Frozen,
    /// Where they and the tokenizer came from.
    pub source: PathBuf,
    /// Prompts to train on; `None` for an evaluation.
    pub prompts: Option<PromptBook>,
    /// For supervised fine-tuning, each of `prompts` with its answer.
    pub demonstrations: Vec<Sample>,
    /// Held-out prompts, if the recipe names some.
    pub held_out: Option<PromptBook>,
    /// The reward.
    pub rule: Box<dyn RewardFn>,
    /// Sentences that a person should read before the run.
    pub warnings: Vec<String>,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) stop_tokens: Vec<u32>,
}

impl Inputs {
    /// Reads and checks all that `recipe` names. Nothing is written.
    ///
    /// # Errors
    /// One sentence on the first thing that is missing or wrong.
    pub fn load(recipe: &Recipe, task: Task) -> Result<Self, Failure> {
        RunDir::check(&recipe.output_dir).or_bad_input()?;
        let fresh = if task == Task::Sft { recipe.sft.model.as_deref() } else { None };
        let source = fresh.unwrap_or(&recipe.model.path);
        let key = if fresh.is_some() { "`sft.model`" } else { "`model.path`" };
        if fresh.is_none() && recipe.model.preset().is_some() {
            let name = source.display();
            let error = anyhow::anyhow!("{key}: {name} is built in for --dry-run alone; set it to a checkpoint folder");
            return Err(Failure::BadInput(error));
        }
        let config = ModelConfig::load(&source.join("config.json")).context(key).or_bad_input()?;
        if recipe.rollout.speculative && !config.has_mtp() {
            let error = anyhow::anyhow!(
                "`rollout.speculative` is true, but the model has no multi-token-prediction block to draft with; set it to false"
            );
            return Err(Failure::BadInput(error));
        }
        let frozen = Frozen::new(&recipe.train, &config).or_bad_input()?;
        let tokenizer = Tokenizer::load(source, config.vocab_size).context(key).or_bad_input()?;
        let stop_tokens =
            load_stop_tokens(source, config.eos_token_id.ids(), config.vocab_size).context(key).or_bad_input()?;
        let weights = match fresh {
            Some(_) => {
                fits_in_memory(&config).context(key).or_bad_input()?;
                initial_weights(&config, recipe.seed)
            }
            None => load_weights(source, &config).context(key).or_bad_input()?,
        };
        let mut warnings = Vec::new();
        let mut book = |key, path: &Path, limit: usize| {
            read_book(path, limit, recipe, &config, &tokenizer, &mut warnings).context(key).or_bad_input()
        };
        let prompts = if task == Task::Eval { None } else { Some(book("`prompts.path`", &recipe.prompts.path, 0)?) };
        let demonstrations = match &prompts {
            Some(book) if task == Task::Sft => {
                demonstrations(book, &config, &tokenizer).context("`prompts.path`").or_bad_input()?
            }
            _ => Vec::new(),
        };
        let held_out = recipe.prompts.eval_path.as_deref();
        let held_out = held_out.map(|path| book("`prompts.eval_path`", path, recipe.eval.num_prompts)).transpose()?;
        let RewardConfig::ReasoningGym(rule) = &recipe.reward;
        let rule = reward::RewardConfig::ReasoningGym(rule.clone());
        let mut built = None;
        for book in prompts.iter().chain(&held_out) {
            let rows: Vec<Prompt> = book.prompts.iter().map(|p| Prompt::clone(p)).collect();
            let fitting = rule.build(&rows).and_then(|rule| reward::self_test(rule.as_ref(), &rows).map(|()| rule));
            built = Some(fitting.with_context(|| book.path.display().to_string()).or_bad_input()?);
        }
        let rule = built.expect("a task has prompts to train on or held-out ones; the recipe was checked for that");
        let source = source.to_owned();
        Ok(Self {
            config,
            weights,
            frozen,
            source,
            prompts,
            demonstrations,
            held_out,
            rule,
            warnings,
            tokenizer,
            stop_tokens,
        })
    }

    /// The plan of the run for `--dry-run`: parameters, memory, work per step.
    pub fn plan(&self, recipe: &Recipe, task: Task) -> String {
        let (total, active) = self.config.num_parameters();
        let experts: usize = self
            .config
            .parameters()
            .iter()
            .filter(|(name, _)| is_routed_expert(name))
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum();
        let mib = |bytes: usize| format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64);
        // As after an update: of plain values, whatever the checkpoint stores.
        let masters = self.weights.iter().map(|(name, tensor)| (name.clone(), tensor.clone().into_f32())).collect();
        let engine = Model::new(&self.config, 0, &to_engine_format(&self.config, masters)).num_bytes();
        let leaves = if self.config.experts_are_fp4() { 4 * experts } else { 0 };
        let longest = |book: &PromptBook| book.tokens.iter().map(|t| t.len()).max().unwrap_or(0);
        let response = recipe.rollout.max_response_tokens;
        let context = self.prompts.iter().chain(&self.held_out).map(longest).max().unwrap_or(0) + response;
        let batch = recipe.rollout.max_batch_rollouts.min(recipe.rollouts_per_step());
        let kv = batch * KvCache::num_bytes_at(&self.config, context);
        let mut lines = vec![
            format!("parameters   {total} in all, {active} used by a token, {experts} in routed experts"),
            format!("masters      {} of weights (f32), {} of expert values", mib(4 * total), mib(leaves)),
            format!(
                "engine       {} of packed weights, {} of KV caches ({batch} rollouts of {context} tokens)",
                mib(engine),
                mib(kv)
            ),
        ];
        if task != Task::Eval {
            let mut trained = self.config.parameters();
            trained.retain(|(name, _)| self.frozen.is_trained(name));
            let num_trained: usize = trained.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
            let state: usize = trained.iter().map(|(name, shape)| state_bytes(&recipe.optimizer, name, shape)).sum();
            lines.insert(1, format!("training     {num_trained} parameters, {} are frozen", total - num_trained));
            let activations = recipe.pack.microbatch_tokens * activation_bytes_per_token(&self.config, context);
            lines.insert(3, format!("optimizer    {} of gradients, {} of moments", mib(4 * num_trained), mib(state)));
            lines.push(format!(
                "activations  about {} for each of {} microbatches under way, of {} tokens",
                mib(activations),
                num_threads(recipe),
                recipe.pack.microbatch_tokens
            ));
        }
        for (name, book) in [("prompts", &self.prompts), ("held out", &self.held_out)] {
            if let Some(book) = book {
                let tokens: usize = book.tokens.iter().map(|t| t.len()).sum();
                let mean = tokens as f64 / book.tokens.len() as f64;
                lines.push(format!(
                    "{name:<12} {} rows, {mean:.1} tokens on average, {} at most",
                    book.tokens.len(),
                    longest(book)
                ));
            }
        }
        if task == Task::Train {
            lines.push(format!(
                "a step       {} prompts x {} rollouts, up to {} sampled tokens, {} {}",
                recipe.prompts_per_step,
                recipe.group_size,
                recipe.rollouts_per_step() * response,
                recipe.train.updates_per_step,
                if recipe.train.updates_per_step == 1 { "update" } else { "updates" },
            ));
        }
        lines.join("\n")
    }
}

/// The sizes of a model that is built in, for `--dry-run`; nothing of it is allocated.
pub fn preset_plan(config: &ModelConfig, optimizer: &OptimizerConfig) -> String {
    let sizes = Sizes::new(config);
    let total = sizes.total().0;
    let gb = |bytes: usize| format!("{:.1} GB", bytes as f64 / 1e9);
    let state = config.parameters().iter().map(|(name, shape)| state_bytes(optimizer, name, shape)).sum();
    let name = match optimizer {
        OptimizerConfig::AdamW(_) => "AdamW",
        OptimizerConfig::Muon(_) => "Muon",
    };
    format!(
        "{sizes}training                {} of masters (f32), {} of gradients, {} of moments ({name})\n",
        gb(4 * total),
        gb(4 * total),
        gb(state)
    )
}

/// Whether fresh weights of this shape, their gradients and their moments have room in the machine's memory.
fn fits_in_memory(config: &ModelConfig) -> anyhow::Result<()> {
    let needed = 16 * config.num_parameters().0;
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    match memory_bytes() {
        Some(memory) if needed > memory => anyhow::bail!(
            "config.json describes {} parameters, which take {:.1} GiB to train; this machine has {:.1} GiB: choose smaller \
             sizes",
            config.num_parameters().0,
            gib(needed),
            gib(memory)
        ),
        _ => Ok(()),
    }
}

/// The machine's memory, if it says.
fn memory_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: usize =
        text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// Bytes of activations that the backward pass keeps per token: the streams before each mixing, the inputs of each
/// product, and the attention's scores. An estimate to plan by: for the quick start it says 126 KiB, and the peak of the
/// process grew by 96 KiB per token between microbatches of 1024 and 4096 tokens.
fn activation_bytes_per_token(config: &ModelConfig, context: usize) -> usize {
    let (d, n, heads) = (config.hidden_size, config.hc_mult, config.num_attention_heads);
    let streams = 3 * n * d;
    let attention = 6 * heads * config.head_dim + 4 * heads * context + 8 * config.head_dim + 4 * d;
    let experts = (config.num_experts_per_tok + 1) * (4 * config.moe_intermediate_size + 3 * d);
    4 * config.num_hidden_layers * (2 * streams + attention + experts) + 12 * config.vocab_size
}

fn read_book(
    path: &Path,
    limit: usize,
    recipe: &Recipe,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    warnings: &mut Vec<String>,
) -> anyhow::Result<PromptBook> {
    let columns =
        PromptColumns { prompt: recipe.prompts.prompt_column.clone(), answer: recipe.prompts.answer_column.clone() };
    let mut set = read_prompts(path, &columns, recipe.prompts.skip_bad_rows)?;
    if let Some((place, reason)) = set.skipped.first() {
        let n = set.skipped.len();
        warnings.push(format!("{}: {n} rows were skipped, the first at {place}: {reason}", path.display()));
    }
    for (column, kind) in &set.unread_columns {
        warnings
            .push(format!("{}: column `{column}` ({kind}) has no form in metadata and is left out", path.display()));
    }
    if limit > 0 {
        set.prompts.truncate(limit);
    }
    let mut tokens: Vec<Arc<[u32]>> = Vec::with_capacity(set.prompts.len());
    for prompt in &set.prompts {
        // The template's control tokens are meant; what a data set spells is text.
        let encoded = tokenizer.encode_marked(&tokenizer.fill_template(&recipe.prompts.template, &prompt.text))?;
        let (len, response, context) =
            (encoded.len(), recipe.rollout.max_response_tokens, config.max_position_embeddings);
        if len.saturating_add(response) > context {
            anyhow::bail!(
                "{}: row {} has {len} tokens; with up to {response} more it exceeds the model's context of {context}: \
                 shorten the prompt or lower `rollout.max_response_tokens`",
                path.display(),
                prompt.row
            );
        }
        if len == 0 {
            anyhow::bail!(
                "{}: row {} has no token; the tokenizer knows none of its text: look at `prompts.template` and tokenizer.json",
                path.display(),
                prompt.row
            );
        }
        tokens.push(encoded.into());
    }
    let order = PromptOrder::new(set.prompts.len(), recipe.seed, recipe.prompts.shuffle);
    Ok(PromptBook { path: path.to_owned(), prompts: set.prompts.into_iter().map(Arc::new).collect(), tokens, order })
}

/// A run under way: its parts, its folder, and what it tells.
pub struct Run<'a> {
    /// What was asked.
    pub recipe: &'a Recipe,
    /// Prompts to train on.
    pub prompts: Option<PromptBook>,
    /// Held-out prompts.
    pub held_out: Option<PromptBook>,
    /// The reward.
    pub rule: Box<dyn RewardFn>,
    /// The engine that samples.
    pub engine: Engine,
    /// The model that learns.
    pub policy: Policy,
    /// Handles to it, one for each thread that differentiates.
    pub workers: Vec<Policy>,
    /// How it learns.
    pub optimizer: Optimizer,
    /// The run's folder.
    pub dir: RunDir,
    /// What a person sees.
    pub console: Console,
    /// Set by Ctrl-C and SIGTERM.
    pub stop: Arc<AtomicBool>,
    /// Threads for the arithmetic.
    pub threads: usize,
    metrics: MetricsFile,
    started: Instant,
    checkpoint: Option<PathBuf>,
}

impl<'a> Run<'a> {
    /// Puts the parts together and makes the run's folder.
    ///
    /// # Errors
    /// When the folder cannot be made, or signals cannot be caught.
    pub fn start(recipe: &'a Recipe, recipe_files: &str, inputs: Inputs, num_steps: usize) -> Result<Self, Failure> {
        let stop = catch_signals()?;
        let threads = num_threads(recipe);
        // Our threads each differentiate microbatches of their own; libtorch's would only wait for one another.
        tch::set_num_threads(1);
        let Inputs {
            config, weights, frozen, source, prompts, held_out, rule, warnings, tokenizer, stop_tokens, ..
        } = inputs;
        let policy = Policy::with_frozen(&config, &weights, Device::Cpu, &|name| frozen.contains(name))?;
        let model = Model::new(&config, 0, &to_engine_format(&config, weights));
        let optimizer = Optimizer::new(&recipe.optimizer, &policy).with_threads(threads);
        let dir = RunDir::create(&recipe.output_dir, &recipe.name).or_bad_input()?;
        dir.write_recipe(&recipe.to_toml())?;
        let metrics = MetricsFile::open(&dir.metrics())?;
        let console = Console::new(num_steps);
        console.header(&Header {
            name: recipe.name.clone(),
            model: source.display().to_string(),
            num_parameters: config.num_parameters(),
            device: format!("cpu ({})", backend_name()),
            threads,
            recipe: recipe_files.to_owned(),
            run_dir: dir.path().to_owned(),
        });
        for warning in &warnings {
            console.warning(warning);
        }
        Ok(Self {
            recipe,
            prompts,
            held_out,
            rule,
            engine: Engine::new(model, tokenizer, stop_tokens, engine_options(recipe, threads)),
            workers: (0..threads).map(|_| policy.share()).collect(),
            policy,
            optimizer,
            dir,
            console,
            stop,
            threads,
            metrics,
            started: Instant::now(),
            checkpoint: None,
        })
    }

    /// Writes a step's metrics.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn log(&mut self, step: usize, metrics: &Metrics) -> Result<(), Failure> {
        Ok(self.metrics.log(step, metrics)?)
    }

    /// Whether the run was asked to stop.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Writes a checkpoint of the model after `step` steps and removes those beyond `checkpoint.keep_last`.
    ///
    /// # Errors
    /// When it cannot be written; earlier ones are untouched then.
    pub fn save(&mut self, step: usize) -> Result<(), Failure> {
        let path = self.dir.checkpoint(step);
        if self.checkpoint.as_ref() == Some(&path) {
            return Ok(());
        }
        crate::checkpoint::save(&path, self.engine.tokenizer(), &self.policy, &self.optimizer, step)
            .with_context(|| format!("checkpoint of step {step}"))?;
        crate::checkpoint::prune(&path, self.recipe.checkpoint.keep_last)
            .with_context(|| format!("removing checkpoints older than that of step {step}"))?;
        self.checkpoint = Some(path);
        Ok(())
    }

    /// Says how the run ended.
    ///
    /// # Errors
    /// [`Failure::Interrupted`] if it was stopped; or when the metrics cannot be made safe.
    pub fn finish(mut self, steps: usize) -> Result<(), Failure> {
        self.metrics.finish()?;
        let interrupted = self.is_stopped();
        self.console.summary(&Summary {
            steps,
            seconds: self.started.elapsed().as_secs_f64(),
            interrupted,
            checkpoint: self.checkpoint,
            run_dir: self.dir.path().to_owned(),
            program: std::env::args().next().unwrap_or_else(|| "trainer".into()),
        });
        if interrupted { Err(Failure::Interrupted) } else { Ok(()) }
    }
}

pub(crate) fn num_threads(recipe: &Recipe) -> usize {
    match recipe.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    }
}

fn backend_name() -> &'static str {
    match kernels::backend() {
        kernels::Backend::Scalar => "scalar kernels",
        kernels::Backend::Avx2 => "AVX2 kernels",
        kernels::Backend::Avx512 => "AVX-512 kernels",
    }
}

/// A first Ctrl-C or SIGTERM asks the run to stop at the next safe place; a second one ends the process at once.
fn catch_signals() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })
    .context("cannot catch Ctrl-C")?;
    Ok(stop)
}
