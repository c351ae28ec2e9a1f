//! The engine: groups of rollouts from prompts. Each worker thread takes whole groups, prefills a group's prompt once,
//! forks the cache for its rollouts and decodes all it holds as one batch. A rollout's tokens do not depend on which
//! worker, batch or moment it falls into.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use datasets::{FinishReason, Group, IndexerChoices, Prompt, Rollout, RoutingChoices};

use crate::kv_cache::KvCache;
use crate::model::{ForwardOutput, Model, ModelConfig, Segment, WeightUpdate, WeightUpdateError, Workspace, checksum};
use crate::sampler::{Sampling, draw};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Prompt tokens that one forward pass takes, so that a long prompt needs no more memory than a large batch.
const PREFILL_CHUNK: usize = 256;

/// One prompt to be answered several times.
#[derive(Clone, Debug)]
pub struct GroupRequest {
    /// Names the group.
    pub group_id: u64,
    /// The first rollout's id; the others count up from it.
    pub first_rollout_id: u64,
    /// How many rollouts.
    pub group_size: usize,
    /// What is asked.
    pub prompt: Arc<Prompt>,
    /// The same as the model reads it.
    pub prompt_tokens: Arc<[u32]>,
}

/// How rollouts are made.
#[derive(Clone, Copy, Debug)]
pub struct GenerateOptions {
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// A rollout that has not ended by then is truncated.
    pub max_response_tokens: usize,
    /// Rollouts that decode together, over all threads.
    pub max_batch_rollouts: usize,
}

/// What a running [`Engine::generate`] has done, and the switch that ends it early.
#[derive(Debug, Default)]
pub struct Progress {
    /// Response tokens drawn.
    pub tokens: AtomicUsize,
    /// Rollouts finished.
    pub rollouts: AtomicUsize,
    /// Set to stop at the next token.
    pub cancel: AtomicBool,
}

/// Why nothing was generated.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// [`Progress::cancel`] was set.
    #[error("generation was stopped")]
    Cancelled,
    /// A prompt has no token: there is nothing to continue.
    #[error("prompt {row} has no token, expected at least one; give it text, or `prompts.template` a token")]
    EmptyPrompt {
        /// The prompt's row.
        row: usize,
    },
    /// A prompt and its response would not fit into the model's context.
    #[error(
        "prompt {row} has {tokens} tokens; with up to {response} more it exceeds the model's context of {context}: \
         shorten the prompt or lower `rollout.max_response_tokens`"
    )]
    TooLong {
        /// The prompt's row.
        row: usize,
        /// Its length.
        tokens: usize,
        /// `max_response_tokens`.
        response: usize,
        /// `max_position_embeddings`.
        context: usize,
    },
    /// The weights gave logits that are not finite.
    #[error(
        "the model's logits for prompt {row} are not finite at response token {position}: weights of version {version} \
         have grown too large. Lower `optimizer.learning_rate`, or start from another checkpoint"
    )]
    NotFinite {
        /// The prompt's row.
        row: usize,
        /// Which token of the response, counted from 0.
        position: usize,
        /// The version of the weights.
        version: u64,
    },
    /// The text of a response could not be made.
    #[error("a response could not be turned into text")]
    Decode(#[from] TokenizerError),
}

/// A model that answers prompts.
#[derive(Debug)]
pub struct Engine {
    config: ModelConfig,
    stop_tokens: Vec<u32>,
    tokenizer: Tokenizer,
    model: RwLock<Arc<Model>>,
    num_threads: usize,
}

impl Engine {
    /// An engine over `model` with `num_threads` worker threads; a response ends with `eos_token_id` of its config.
    pub fn new(model: Model, tokenizer: Tokenizer, num_threads: usize) -> Self {
        let (config, model) = (model.config().clone(), RwLock::new(Arc::new(model)));
        Self { stop_tokens: config.eos_token_id.ids().to_vec(), config, tokenizer, model, num_threads }
    }

    /// The same engine, where a response ends with any of `stop_tokens`.
    pub fn with_stop_tokens(self, stop_tokens: Vec<u32>) -> Self {
        Self { stop_tokens, ..self }
    }

    /// The tokenizer of its model.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The configuration of its model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The weights it serves now.
    pub fn model(&self) -> Arc<Model> {
        self.model.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes new weights: packs them beside the old ones, proves by checksum that what the kernels will compute on is
    /// what was sent, and swaps. Running rollouts go on with the new weights at their next token.
    ///
    /// # Errors
    /// When the version does not count up or the checksum differs; the engine then keeps what it serves.
    pub fn update_weights(&self, update: &WeightUpdate) -> Result<(), WeightUpdateError> {
        let current = self.model().version();
        if update.version <= current {
            return Err(WeightUpdateError::Stale { version: update.version, current });
        }
        let model = Model::new(&self.config, update.version, &update.weights);
        let found = checksum(&model.export());
        if found != update.checksum {
            let (version, expected) = (update.version, update.checksum);
            return Err(WeightUpdateError::Checksum { version, found, expected, current });
        }
        *self.model.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(model);
        Ok(())
    }

    /// Answers every request; the result is in the order of `requests`.
    ///
    /// # Errors
    /// When a prompt is empty or too long (before anything is generated), or the run was cancelled.
    pub fn generate(
        &self,
        requests: &[GroupRequest],
        options: &GenerateOptions,
        progress: &Progress,
    ) -> Result<Vec<Group>, GenerateError> {
        let context = self.config.max_position_embeddings;
        for request in requests {
            let (row, tokens, response) =
                (request.prompt.row, request.prompt_tokens.len(), options.max_response_tokens);
            if tokens == 0 {
                return Err(GenerateError::EmptyPrompt { row });
            }
            if tokens.saturating_add(response) > context {
                return Err(GenerateError::TooLong { row, tokens, response, context });
            }
        }
        let queue = Mutex::new(requests.iter().enumerate().collect::<VecDeque<_>>());
        let num_workers = self.num_threads.clamp(1, requests.len().max(1));
        let worker =
            || Worker::new(self, options, progress, options.max_batch_rollouts.div_ceil(num_workers)).run(&queue);
        let finished: Result<Vec<_>, GenerateError> = if num_workers == 1 {
            worker()
        } else {
            std::thread::scope(|scope| {
                let handles: Vec<_> = (0..num_workers)
                    .map(|i| {
                        let name = format!("rollout-{i}");
                        std::thread::Builder::new().name(name).spawn_scoped(scope, worker).expect("a thread can start")
                    })
                    .collect();
                let results = handles
                    .into_iter()
                    .map(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
                results.collect::<Result<Vec<_>, _>>().map(|parts| parts.into_iter().flatten().collect())
            })
        };
        let mut groups: Vec<Option<Group>> = requests.iter().map(|_| None).collect();
        for (index, group) in finished? {
            groups[index] = Some(group);
        }
        Ok(groups.into_iter().map(|group| group.expect("every request was taken by a worker")).collect())
    }
}

/// One thread's share: the groups it took and the rollouts that decode now.
struct Worker<'a> {
    engine: &'a Engine,
    options: &'a GenerateOptions,
    progress: &'a Progress,
    max_batch: usize,
    active: Vec<Decoding>,
    groups: Vec<OpenGroup>,
    workspace: Workspace,
    output: ForwardOutput,
}

/// A rollout in the making.
struct Decoding {
    group: usize,
    slot: usize,
    rollout_id: u64,
    cache: KvCache,
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    versions: Vec<u64>,
    expert_idx: Vec<u16>,
    block_idx: Vec<u32>,
}

struct OpenGroup {
    index: usize,
    request: GroupRequest,
    rollouts: Vec<Option<Rollout>>,
}

type Queue<'r> = Mutex<VecDeque<(usize, &'r GroupRequest)>>;

impl<'a> Worker<'a> {
    fn new(engine: &'a Engine, options: &'a GenerateOptions, progress: &'a Progress, max_batch: usize) -> Self {
        Self {
            engine,
            options,
            progress,
            max_batch: max_batch.max(1),
            active: Vec::new(),
            groups: Vec::new(),
            workspace: Workspace::default(),
            output: ForwardOutput::default(),
        }
    }

    fn run(mut self, queue: &Queue<'_>) -> Result<Vec<(usize, Group)>, GenerateError> {
        loop {
            while self.active.len() < self.max_batch {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                let Some((index, request)) = next else { break };
                self.start(index, request)?;
            }
            if self.active.is_empty() {
                break;
            }
            if self.progress.cancel.load(Ordering::Relaxed) {
                return Err(GenerateError::Cancelled);
            }
            self.step()?;
        }
        let groups = self.groups.into_iter().map(|open| {
            let rollouts = open.rollouts.into_iter().map(|r| r.expect("every rollout of a group was finished"));
            let group = Group {
                group_id: open.request.group_id,
                prompt: open.request.prompt,
                prompt_tokens: open.request.prompt_tokens,
                rollouts: rollouts.collect(),
            };
            (open.index, group)
        });
        Ok(groups.collect())
    }

    /// Prefills a group's prompt once and draws the first token of each of its rollouts.
    fn start(&mut self, index: usize, request: &GroupRequest) -> Result<(), GenerateError> {
        let model = self.engine.model();
        let mut cache = KvCache::new(&self.engine.config);
        let (mut expert_idx, mut block_idx) = (Vec::new(), Vec::new());
        for tokens in request.prompt_tokens.chunks(PREFILL_CHUNK) {
            let segment = Segment { cache: &mut cache, tokens, all_logits: false };
            model.forward(&mut [segment], &mut self.workspace, &mut self.output, None);
            expert_idx.extend_from_slice(&self.output.expert_idx);
            block_idx.extend_from_slice(&self.output.block_idx);
        }
        let group = self.groups.len();
        let rollouts = (0..request.group_size).map(|_| None).collect();
        self.groups.push(OpenGroup { index, request: request.clone(), rollouts });
        let logits = std::mem::take(&mut self.output.logits);
        for slot in 0..request.group_size {
            let mut rollout = Decoding {
                group,
                slot,
                rollout_id: request.first_rollout_id + slot as u64,
                cache: cache.clone(),
                tokens: Vec::new(),
                logprobs: Vec::new(),
                versions: Vec::new(),
                expert_idx: expert_idx.clone(),
                block_idx: block_idx.clone(),
            };
            self.draw(&mut rollout, &mut logits.clone(), model.version())?;
            match self.finish_reason(&rollout) {
                Some(reason) => self.finish(rollout, reason)?,
                None => self.active.push(rollout),
            }
        }
        Ok(())
    }

    /// One token for every active rollout.
    fn step(&mut self) -> Result<(), GenerateError> {
        let model = self.engine.model();
        let mut segments: Vec<Segment<'_>> = self
            .active
            .iter_mut()
            .map(|rollout| Segment {
                tokens: &rollout.tokens[rollout.tokens.len() - 1..],
                cache: &mut rollout.cache,
                all_logits: false,
            })
            .collect();
        model.forward(&mut segments, &mut self.workspace, &mut self.output, None);
        let mut logits = std::mem::take(&mut self.output.logits);
        let config = &self.engine.config;
        let experts = config.num_hidden_layers * config.num_experts_per_tok;
        let blocks = config.csa_layers().count() * config.index_topk;
        let mut still_active = Vec::with_capacity(self.active.len());
        for (i, mut rollout) in std::mem::take(&mut self.active).into_iter().enumerate() {
            rollout.expert_idx.extend_from_slice(&self.output.expert_idx[i * experts..][..experts]);
            rollout.block_idx.extend_from_slice(&self.output.block_idx[i * blocks..][..blocks]);
            let row = &mut logits[i * config.vocab_size..][..config.vocab_size];
            self.draw(&mut rollout, row, model.version())?;
            match self.finish_reason(&rollout) {
                Some(reason) => self.finish(rollout, reason)?,
                None => still_active.push(rollout),
            }
        }
        self.active = still_active;
        self.output.logits = logits;
        Ok(())
    }

    fn draw(&self, rollout: &mut Decoding, logits: &mut [f32], version: u64) -> Result<(), GenerateError> {
        let position = rollout.tokens.len();
        let Some(drawn) = draw(logits, self.options.sampling, rollout.rollout_id, position as u64) else {
            let row = self.groups[rollout.group].request.prompt.row;
            return Err(GenerateError::NotFinite { row, position, version });
        };
        rollout.tokens.push(drawn.token);
        rollout.logprobs.push(drawn.logprob);
        rollout.versions.push(version);
        self.progress.tokens.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn finish_reason(&self, rollout: &Decoding) -> Option<FinishReason> {
        if rollout.tokens.last().is_some_and(|token| self.engine.stop_tokens.contains(token)) {
            Some(FinishReason::Stop)
        } else if rollout.tokens.len() >= self.options.max_response_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    fn finish(&mut self, rollout: Decoding, finish_reason: FinishReason) -> Result<(), GenerateError> {
        let config = &self.engine.config;
        let said = match finish_reason {
            FinishReason::Stop => &rollout.tokens[..rollout.tokens.len() - 1],
            FinishReason::Length => &rollout.tokens,
        };
        let finished = Rollout {
            rollout_id: rollout.rollout_id,
            response_text: self.engine.tokenizer.decode(said)?,
            response_tokens: rollout.tokens,
            rollout_logprobs: rollout.logprobs,
            weight_versions: rollout.versions,
            finish_reason,
            routing: Arc::new(RoutingChoices {
                num_layers: config.num_hidden_layers,
                num_experts_per_token: config.num_experts_per_tok,
                expert_idx: rollout.expert_idx,
            }),
            indexer: Arc::new(IndexerChoices {
                num_layers: config.csa_layers().count(),
                top_k: config.index_topk,
                block_idx: rollout.block_idx,
            }),
            reward: None,
        };
        self.groups[rollout.group].rollouts[rollout.slot] = Some(finished);
        self.progress.rollouts.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
