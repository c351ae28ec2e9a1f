//! What a run is: one TOML file, or several layered. The comments on the fields are the manual.
//!
//! Defaults stand in `Default`; recipe files are laid over them left to right, tables merging deeply; `--set
//! key.path=value` comes last. A table that changes `type` starts anew, so the keys of two variants never mix. Paths are
//! relative to the folder in which `trainer` is started.

mod error;
mod layers;
mod optimizer_numbers;
mod tagged;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rollout::model::ModelConfig;
use serde::{Deserialize, Serialize};

pub use error::{Origin, RecipeError};
pub(crate) use layers::nearest;
use tagged::tagged_enum;

use crate::advantage::GrpoConfig;
use crate::loss::PpoClipConfig;
use crate::optimizer::{AdamWConfig, MuonConfig};
use crate::pack::PackConfig;
use reward::reasoning_gym::ReasoningGymConfig;

/// What a recipe is read for: which of its keys must be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Reinforcement learning.
    Train,
    /// Supervised fine-tuning.
    Sft,
    /// Measuring a checkpoint on held-out prompts.
    Eval,
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recipe {
    /// The run's folder is `output_dir/name`; letters, digits, `.`, `_` and `-`.
    pub name: String,
    /// Everything random follows from it: the order of prompts, sampling, fresh weights. Up to 2^63 - 1, TOML's largest
    /// number.
    pub seed: u64,
    /// Rollout batches to train on, in steps.
    pub num_steps: usize,
    /// Threads for the arithmetic, at most 1024; 0 takes every core.
    pub threads: usize,
    /// Where run folders are made.
    pub output_dir: PathBuf,
    /// Prompts drawn per step; each gets a group.
    pub prompts_per_step: usize,
    /// Rollouts per prompt. At least 2: a rollout is judged against its group.
    pub group_size: usize,
    /// Which model is trained.
    pub model: ModelSource,
    /// Which questions it is asked.
    pub prompts: PromptsConfig,
    /// How it answers.
    pub rollout: RolloutConfig,
    /// How answers are judged.
    pub reward: RewardConfig,
    /// How rewards become advantages.
    pub advantage: AdvantageConfig,
    /// What is minimised.
    pub loss: LossConfig,
    /// How samples share a forward pass.
    pub pack: PackConfig,
    /// How often a rollout batch is trained on, and what is replayed from it.
    pub train: TrainConfig,
    /// How gradients become weights; `sft` uses it too.
    pub optimizer: OptimizerConfig,
    /// Measuring on held-out prompts.
    pub eval: EvalConfig,
    /// What is kept on disk while it runs.
    pub checkpoint: CheckpointConfig,
    /// `trainer sft`: learning the reference answers by heart before reinforcement learning.
    pub sft: SftConfig,
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            name: "run".into(),
            seed: 1,
            num_steps: 100,
            threads: 0,
            output_dir: "runs".into(),
            prompts_per_step: 32,
            group_size: 8,
            model: ModelSource::default(),
            prompts: PromptsConfig::default(),
            rollout: RolloutConfig::default(),
            reward: RewardConfig::default(),
            advantage: AdvantageConfig::default(),
            loss: LossConfig::default(),
            pack: PackConfig::default(),
            train: TrainConfig::default(),
            optimizer: OptimizerConfig::default(),
            eval: EvalConfig::default(),
            checkpoint: CheckpointConfig::default(),
            sft: SftConfig::default(),
        }
    }
}

/// `[model]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSource {
    /// A checkpoint folder: `config.json`, `tokenizer.json` and safetensors. With `--dry-run` also `v4-flash` or
    /// `v4-pro`, for the sizes of the published models without their checkpoints.
    pub path: PathBuf,
}

impl ModelSource {
    /// The published model that `path` names, where no such folder exists.
    pub fn preset(&self) -> Option<ModelConfig> {
        ModelConfig::preset(&self.path.to_string_lossy()).filter(|_| !self.path.exists())
    }
}

/// `[prompts]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptsConfig {
    /// The training prompts: a JSONL or Parquet file.
    pub path: PathBuf,
    /// Held-out prompts for evaluation, same columns; left out, nothing is evaluated.
    pub eval_path: Option<PathBuf>,
    /// The column that the model reads.
    pub prompt_column: String,
    /// The column with the reference answer.
    pub answer_column: String,
    /// What the model reads of a row: `{prompt}` stands for the prompt's text; special tokens are spelled out.
    pub template: String,
    /// Leave out rows that cannot be read instead of stopping; they are counted and shown.
    pub skip_bad_rows: bool,
    /// Draw prompts in an order that follows from `seed`, anew each epoch. Off: in the order of the file.
    pub shuffle: bool,
}

impl Default for PromptsConfig {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            eval_path: None,
            prompt_column: "prompt".into(),
            answer_column: "answer".into(),
            template: "{prompt}".into(),
            skip_bad_rows: false,
            shuffle: true,
        }
    }
}

/// `[rollout]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutConfig {
    /// Where a response is cut, in tokens, the end-of-sequence token included.
    pub max_response_tokens: usize,
    /// Logits are divided by it before sampling; 0.001 to 1000. 1 samples from the model as it is.
    pub temperature: f64,
    /// Rollouts that decode at once. More is faster until memory for their KV cache runs out.
    pub max_batch_rollouts: usize,
    /// MiB of memory for the engine's sequences; 0: a quarter of what the machine has left.
    pub kv_cache_mib: usize,
    /// Whether the model's multi-token-prediction block drafts tokens while few rollouts decode; those stay the same.
    pub speculative: bool,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self { max_response_tokens: 64, temperature: 1.0, max_batch_rollouts: 256, kv_cache_mib: 0, speculative: false }
    }
}

tagged_enum! {
    /// `[reward]`
    pub enum RewardConfig {
        /// The scoring rules of Reasoning Gym's tasks; a row's `metadata` says which task it is.
        "reasoning_gym" => ReasoningGym(ReasoningGymConfig),
    }
}

impl Default for RewardConfig {
    fn default() -> Self {
        Self::ReasoningGym(ReasoningGymConfig::default())
    }
}

tagged_enum! {
    /// `[advantage]`
    pub enum AdvantageConfig {
        /// The rollout's reward against its group's (arXiv:2402.03300, section 4.1.2).
        "grpo" => Grpo(GrpoConfig),
    }
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        Self::Grpo(GrpoConfig::default())
    }
}

tagged_enum! {
    /// `[loss]`
    pub enum LossConfig {
        /// PPO's clipped ratio (arXiv:1707.06347, equation 7), with a bound on each side.
        "ppo_clip" => PpoClip(PpoClipConfig),
    }
}

impl Default for LossConfig {
    fn default() -> Self {
        Self::PpoClip(PpoClipConfig::default())
    }
}

/// `[train]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Optimizer updates per rollout batch: the batch is cut into so many equal parts. 1 is on-policy.
    pub updates_per_step: usize,
    /// Send each token to the experts that the rollout chose, instead of choosing anew.
    pub replay_experts: bool,
    /// Attend to the compressed blocks that the rollout's indexer chose, instead of choosing anew.
    pub replay_indexer: bool,
    /// Parameters that training leaves as they are: patterns over tensor names, `*` for any characters, as in
    /// `["embed.weight", "layers.0.*"]`. Beside these, indexers and the routers' selection biases are frozen, as no
    /// gradient reaches them, and multi-token prediction while `mtp_loss_weight` is 0.
    pub frozen: Vec<String>,
    /// Weight of the cross entropy of multi-token prediction beside the loss (V4's report: 0.3, then 0.1). 0 leaves its
    /// block out of training. Above 0 the model must have one.
    pub mtp_loss_weight: f64,
    /// After each step of `train`, a router's selection bias moves by this much towards an even load of the experts that
    /// the rollouts used (V4's pre-training: 0.001). 0, as usual in RL, leaves it: rollouts and updates then agree on
    /// what was chosen.
    pub router_bias_update_speed: f64,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            updates_per_step: 1,
            replay_experts: true,
            replay_indexer: true,
            frozen: Vec::new(),
            mtp_loss_weight: 0.0,
            router_bias_update_speed: 0.0,
        }
    }
}

tagged_enum! {
    /// `[optimizer]`
    pub enum OptimizerConfig {
        /// Adam with decoupled weight decay (arXiv:1711.05101).
        "adamw" => AdamW(AdamWConfig),
        /// Muon for matrices, AdamW for the rest, as DeepSeek-V4 was trained (its report, section 2.4).
        "muon" => Muon(MuonConfig),
    }
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self::AdamW(AdamWConfig::default())
    }
}

/// `[eval]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Steps between evaluations; there is always one before the first step and one after the last. 0: only those.
    pub every_steps: usize,
    /// Held-out prompts to ask, from the top of `prompts.eval_path`; 0 asks all.
    pub num_prompts: usize,
    /// Responses per prompt; their rewards are averaged.
    pub samples_per_prompt: usize,
    /// Logits are divided by it before sampling, 0.001 to 1000; 0 takes the likeliest token.
    pub temperature: f64,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self { every_steps: 10, num_prompts: 0, samples_per_prompt: 1, temperature: 0.0 }
    }
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; there is always one after the last step. 0: only that.
    pub every_steps: usize,
    /// Checkpoints kept; older ones are removed. At least 1.
    pub keep_last: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { every_steps: 50, keep_last: 2 }
    }
}

/// `[sft]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SftConfig {
    /// A folder with `config.json` and `tokenizer.json`: start from fresh weights of that shape. Left out: start from
    /// `model.path`.
    pub model: Option<PathBuf>,
    /// Prompts with their answers per update.
    pub batch_size: usize,
    /// Updates.
    pub num_steps: usize,
    /// Updates between evaluations on held-out prompts. 0: only after the last.
    pub eval_every_steps: usize,
    /// Stop as soon as the held-out mean reward reaches this; left out, all updates are made.
    pub stop_at_reward: Option<f64>,
}

impl Default for SftConfig {
    fn default() -> Self {
        Self { model: None, batch_size: 32, num_steps: 1000, eval_every_steps: 100, stop_at_reward: None }
    }
}

impl Recipe {
    /// Reads recipe files, left to right, and `--set` arguments over them, and checks the result for `task`.
    ///
    /// # Errors
    /// One sentence on the first thing that is wrong: where it was written, what was found, what was expected.
    pub fn load(files: &[PathBuf], sets: &[String], task: Task) -> Result<Self, RecipeError> {
        let files = files.iter().map(|path| layers::from_file(path).map(|layer| (path.as_path(), layer)));
        Self::from_layers(files.collect::<Result<_, _>>()?, sets, task)
    }

    fn from_layers(files: Vec<(&Path, layers::Node)>, sets: &[String], task: Task) -> Result<Self, RecipeError> {
        let last: Arc<Path> = files.last().ok_or(RecipeError::NoFile)?.0.into();
        let mut root = layers::from_default(&Self::default());
        for (_, layer) in files {
            layers::merge(&mut root, layer);
        }
        layers::merge(&mut root, layers::from_sets(sets)?);
        let recipe: Self = layers::read(&root, &known_keys())?;
        recipe.validate(task).map_err(|Conflict { key, found, expected, advice }| {
            let origin = match layers::origin_of(&root, key) {
                None | Some(Origin::Default) => Origin::Absent(last),
                Some(origin) => origin.clone(),
            };
            RecipeError::Invalid { origin, key, found: layers::shorten(&found), expected, advice }
        })?;
        Ok(recipe)
    }

    /// The recipe as TOML, every key spelled out; [`Recipe::load`] reads it back to the same value.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a recipe is TOML: its keys are names and its numbers came from TOML")
    }

    /// Rollouts per step.
    pub fn rollouts_per_step(&self) -> usize {
        self.prompts_per_step.saturating_mul(self.group_size)
    }

    /// Everything that a single key's type cannot say.
    fn validate(&self, task: Task) -> Result<(), Conflict> {
        let LossConfig::PpoClip(loss) = &self.loss;
        let AdvantageConfig::Grpo(advantage) = &self.advantage;

        let name_is_plain = self.name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
        require(
            !self.name.is_empty() && !self.name.starts_with(['.', '-']) && name_is_plain,
            "name",
            format!("{:?}", self.name),
            "letters, digits, `.`, `_` and `-`, starting with a letter or digit",
            "it becomes the name of the run's folder",
        )?;
        for (key, n) in [
            ("num_steps", self.num_steps),
            ("prompts_per_step", self.prompts_per_step),
            ("rollout.max_response_tokens", self.rollout.max_response_tokens),
            ("rollout.max_batch_rollouts", self.rollout.max_batch_rollouts),
            ("pack.microbatch_tokens", self.pack.microbatch_tokens),
            ("pack.row_tokens", self.pack.row_tokens),
            ("train.updates_per_step", self.train.updates_per_step),
            ("eval.samples_per_prompt", self.eval.samples_per_prompt),
            ("checkpoint.keep_last", self.checkpoint.keep_last),
            ("sft.batch_size", self.sft.batch_size),
            ("sft.num_steps", self.sft.num_steps),
        ] {
            require(n > 0, key, n, "at least 1", "raise it")?;
        }
        // What is allocated at once, or counted up in ids: far above use, far below what overflows.
        for (key, n, most) in [
            ("threads", self.threads, MAX_THREADS),
            ("prompts_per_step", self.prompts_per_step, MAX_ROLLOUTS),
            ("group_size", self.group_size, MAX_ROLLOUTS),
            ("rollout.max_response_tokens", self.rollout.max_response_tokens, MAX_TOKENS),
            ("pack.microbatch_tokens", self.pack.microbatch_tokens, MAX_TOKENS),
            ("eval.samples_per_prompt", self.eval.samples_per_prompt, MAX_ROLLOUTS),
            ("sft.batch_size", self.sft.batch_size, MAX_ROLLOUTS),
        ] {
            require(n <= most, key, n, &format!("at most {most}"), "lower it")?;
        }
        require(
            self.prompts.template.contains("{prompt}"),
            "prompts.template",
            format!("{:?}", self.prompts.template),
            "a text with `{prompt}` in it",
            "it stands for the prompt's text; without it every prompt would read the same",
        )?;
        require(
            self.group_size >= 2,
            "group_size",
            self.group_size,
            "at least 2",
            "a rollout's advantage is its reward against the rest of its group",
        )?;
        let rollouts = self.rollouts_per_step();
        require(
            rollouts <= MAX_ROLLOUTS,
            "prompts_per_step",
            self.prompts_per_step,
            &format!("at most {} with a group_size of {}", MAX_ROLLOUTS / self.group_size, self.group_size),
            "lower one of the two",
        )?;
        let updates = self.train.updates_per_step;
        let divides = |n: &usize| rollouts.is_multiple_of(*n);
        require(
            divides(&updates),
            "train.updates_per_step",
            updates,
            &format!(
                "a divisor of prompts_per_step * group_size ({} * {} = {rollouts}), for every update trains on as many \
                 rollouts",
                self.prompts_per_step, self.group_size
            ),
            &match ((1..updates.min(rollouts + 1)).rev().find(divides), (updates + 1..=rollouts).find(divides)) {
                (Some(below), Some(above)) => format!("the nearest are {below} and {above}"),
                (below, above) => format!("the nearest is {}", below.or(above).unwrap_or(1)),
            },
        )?;
        require(
            self.pack.row_tokens <= self.pack.microbatch_tokens,
            "pack.row_tokens",
            self.pack.row_tokens,
            &format!("at most pack.microbatch_tokens ({})", self.pack.microbatch_tokens),
            "a microbatch holds at least one row",
        )?;
        require(
            self.pack.row_tokens > self.rollout.max_response_tokens,
            "pack.row_tokens",
            self.pack.row_tokens,
            &format!("more than rollout.max_response_tokens ({})", self.rollout.max_response_tokens),
            "a row holds a prompt and its response; raise it or shorten the responses",
        )?;

        let is_temperature = |x: f64| (1e-3..=1e3).contains(&x);
        require(
            is_temperature(self.rollout.temperature),
            "rollout.temperature",
            Number(self.rollout.temperature),
            "a number from 0.001 to 1000",
            "1 samples from the model as it is",
        )?;
        optimizer_numbers::check(&self.optimizer)?;
        not_negative("advantage.eps", advantage.eps, "1e-6 is usual")?;
        not_negative("train.mtp_loss_weight", self.train.mtp_loss_weight, "0.1 to 0.3 is usual; 0 leaves it out")?;
        let speed = self.train.router_bias_update_speed;
        let advice = "0.001 is usual in pre-training, 0 in RL; scores lie between 0 and some units";
        require((0.0..=1.0).contains(&speed), "train.router_bias_update_speed", Number(speed), "0 to 1", advice)?;
        require(
            self.eval.temperature == 0.0 || is_temperature(self.eval.temperature),
            "eval.temperature",
            Number(self.eval.temperature),
            "0 or a number from 0.001 to 1000",
            "0 takes the likeliest token",
        )?;
        require(
            loss.clip_eps_low > 0.0 && loss.clip_eps_low <= 1.0,
            "loss.clip_eps_low",
            loss.clip_eps_low,
            "above 0 and at most 1",
            "a ratio of probabilities is never below 0; 0.2 is usual",
        )?;
        positive("loss.clip_eps_high", loss.clip_eps_high, "0.2 is usual")?;
        if let Some(reward) = self.sft.stop_at_reward {
            require(reward.is_finite(), "sft.stop_at_reward", reward, "a finite number", "leave it out to never stop")?;
            require(
                self.prompts.eval_path.is_some(),
                "prompts.eval_path",
                "not set",
                "a file, since sft.stop_at_reward watches the held-out reward",
                "add `eval_path = \"...\"` under [prompts] or remove `stop_at_reward`",
            )?;
        }

        let is_set = |path: &Path| !path.as_os_str().is_empty();
        require(
            is_set(&self.model.path) || (task == Task::Sft && self.sft.model.is_some()),
            "model.path",
            "not set",
            "a checkpoint folder",
            match task {
                Task::Sft => "add `path = \"...\"` under [model], or `model = \"...\"` under [sft] to start afresh",
                Task::Train | Task::Eval => "add `path = \"...\"` under [model]",
            },
        )?;
        require(
            task == Task::Eval || is_set(&self.prompts.path),
            "prompts.path",
            "not set",
            "a JSONL or Parquet file",
            "add `path = \"...\"` under [prompts]",
        )?;
        require(
            task != Task::Eval || self.prompts.eval_path.is_some(),
            "prompts.eval_path",
            "not set",
            "a JSONL or Parquet file of held-out prompts",
            "add `eval_path = \"...\"` under [prompts]",
        )
    }
}

/// Most threads: each takes a stack, and the engine is no faster for more than there are cores.
const MAX_THREADS: usize = 1024;
/// Most rollouts of a step, and most of what makes them up.
const MAX_ROLLOUTS: usize = 1 << 20;
/// Most tokens of a response or a microbatch.
const MAX_TOKENS: usize = 1 << 30;

/// A value that the rest of the recipe rules out.
struct Conflict {
    key: &'static str,
    found: String,
    expected: String,
    advice: String,
}

fn require(
    ok: bool,
    key: &'static str,
    found: impl std::fmt::Display,
    expected: &str,
    advice: &str,
) -> Result<(), Conflict> {
    if ok {
        return Ok(());
    }
    Err(Conflict { key, found: found.to_string(), expected: expected.to_owned(), advice: advice.to_owned() })
}

/// The arithmetic is f32: what it cannot hold would come out as 0 or infinity.
fn positive(key: &'static str, x: f64, advice: &str) -> Result<(), Conflict> {
    let holds = (x as f32).is_normal() && x > 0.0;
    require(holds, key, Number(x), "a number above 0 (1e-37 to 1e38)", advice)
}

fn not_negative(key: &'static str, x: f64, advice: &str) -> Result<(), Conflict> {
    require(x >= 0.0 && (x as f32).is_finite(), key, Number(x), "0 or a number above", advice)
}

/// A number in as few letters as a person would write.
struct Number(f64);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Self(x) = self;
        let is_short = *x == 0.0 || !x.is_finite() || (1e-4..1e7).contains(&x.abs());
        if is_short { write!(f, "{x}") } else { write!(f, "{x:e}") }
    }
}

/// Every dotted key of the default recipe.
fn known_keys() -> Vec<String> {
    fn walk(prefix: &str, value: &serde_json::Value, keys: &mut Vec<String>) {
        for (name, value) in value.as_object().into_iter().flatten() {
            let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            walk(&key, value, keys);
            keys.push(key);
        }
    }
    let mut keys = Vec::new();
    walk("", &serde_json::to_value(Recipe::default()).expect("a recipe is JSON"), &mut keys);
    keys
}
