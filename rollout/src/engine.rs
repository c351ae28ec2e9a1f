//! The engine: groups of rollouts from prompts. Prompts are prefilled once for their group, several at a time, and the
//! cache is forked for each rollout; all rollouts that run decode as one batch, whose forward pass the threads share. A
//! rollout's tokens depend neither on the batch and the moment it falls into nor on the number of threads.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use datasets::{FinishReason, Group, IndexerChoices, Prompt, Rollout, RoutingChoices};
use kernels::logits::{CHUNK, Chunk};
use kernels::pool::MAX_THREADS;

use crate::kv_cache::KvCache;
use crate::model::{ForwardOutput, Model, ModelConfig, Segment, WeightUpdate, WeightUpdateError, Workspace, checksum};
use crate::sampler::{Drawn, Sampling, draw, draw_rows};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Prompt tokens that one forward pass takes, so that a long prompt needs no more memory than a large batch.
const PREFILL_CHUNK: usize = 256;

/// Response tokens that a rollout has room for from the start, so that decoding allocates nothing.
const RESERVED_TOKENS: usize = 4096;

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
    /// Rollouts that decode together.
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
    /// An engine over `model` on `num_threads` threads; a response ends with `eos_token_id` of its config.
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
        let mut worker = Worker::new(self, options, progress);
        let longest = requests.iter().map(|request| request.prompt_tokens.len()).max().unwrap_or(0);
        worker.workspace.reserve(&self.config, longest + options.max_response_tokens.min(RESERVED_TOKENS));
        let finished = worker.run(requests.iter().enumerate().collect())?;
        let mut groups: Vec<Option<Group>> = requests.iter().map(|_| None).collect();
        for (index, group) in finished {
            groups[index] = Some(group);
        }
        Ok(groups.into_iter().map(|group| group.expect("every request was taken")).collect())
    }
}

/// The groups that were begun and the rollouts that decode now.
struct Worker<'a> {
    engine: &'a Engine,
    options: &'a GenerateOptions,
    progress: &'a Progress,
    max_batch: usize,
    active: Vec<Decoding>,
    groups: Vec<OpenGroup>,
    workspace: Workspace,
    output: ForwardOutput,
    drawn: Vec<Option<Drawn>>,
}

/// A group whose prompt is being prefilled.
struct Prefill<'r> {
    index: usize,
    request: &'r GroupRequest,
    cache: KvCache,
    /// Prompt tokens that the next pass takes.
    take: usize,
    expert_idx: Vec<u16>,
    block_idx: Vec<u32>,
    /// After its last token.
    logits: Vec<f32>,
    chunks: Vec<Chunk>,
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

type Queue<'r> = VecDeque<(usize, &'r GroupRequest)>;

impl<'a> Worker<'a> {
    fn new(engine: &'a Engine, options: &'a GenerateOptions, progress: &'a Progress) -> Self {
        Self {
            engine,
            options,
            progress,
            max_batch: options.max_batch_rollouts.max(1),
            active: Vec::new(),
            groups: Vec::new(),
            workspace: Workspace::new(engine.num_threads.clamp(1, MAX_THREADS)),
            output: ForwardOutput::default(),
            drawn: Vec::new(),
        }
    }

    fn run(mut self, mut queue: Queue<'_>) -> Result<Vec<(usize, Group)>, GenerateError> {
        loop {
            self.start(&mut queue)?;
            if self.active.is_empty() {
                break;
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

    /// Takes groups until the batch is full, prefills their prompts, each once and several in a pass, and draws the first
    /// token of each of their rollouts.
    fn start(&mut self, queue: &mut Queue<'_>) -> Result<(), GenerateError> {
        loop {
            let mut num_rollouts = self.active.len();
            let mut prefills = Vec::new();
            while num_rollouts < self.max_batch
                && let Some((index, request)) = queue.pop_front()
            {
                num_rollouts += request.group_size.max(1);
                prefills.push(Prefill {
                    index,
                    request,
                    cache: KvCache::new(&self.engine.config),
                    take: 0,
                    expert_idx: Vec::new(),
                    block_idx: Vec::new(),
                    logits: Vec::new(),
                    chunks: Vec::new(),
                });
            }
            if prefills.is_empty() {
                return Ok(());
            }
            let model = self.engine.model();
            while prefills.iter().any(|p| p.cache.len < p.request.prompt_tokens.len()) {
                self.prefill(&model, &mut prefills)?;
            }
            for prefill in prefills {
                self.fork(prefill, model.version())?;
            }
        }
    }

    /// One pass over prompts, of [`PREFILL_CHUNK`] tokens at most.
    fn prefill(&mut self, model: &Model, prefills: &mut [Prefill<'_>]) -> Result<(), GenerateError> {
        if self.progress.cancel.load(Ordering::Relaxed) {
            return Err(GenerateError::Cancelled);
        }
        let mut room = PREFILL_CHUNK;
        for prefill in prefills.iter_mut() {
            prefill.take = room.min(prefill.request.prompt_tokens.len() - prefill.cache.len);
            room -= prefill.take;
        }
        let mut taken: Vec<&mut Prefill<'_>> = prefills.iter_mut().filter(|p| p.take > 0).collect();
        let mut segments: Vec<Segment<'_>> = taken
            .iter_mut()
            .map(|prefill| Segment {
                tokens: &prefill.request.prompt_tokens[prefill.cache.len..][..prefill.take],
                cache: &mut prefill.cache,
                all_logits: false,
            })
            .collect();
        model.forward(&mut segments, &mut self.workspace, &mut self.output, None);
        let (experts, blocks) = self.choices_per_token();
        let vocab_size = self.engine.config.vocab_size;
        let mut from = 0;
        let chunks = self.output.chunks.chunks_exact(vocab_size.div_ceil(CHUNK));
        let rows_of_logits = self.output.logits.chunks_exact(vocab_size).zip(chunks);
        for (prefill, (logits, chunks)) in taken.into_iter().zip(rows_of_logits) {
            let rows = from..from + prefill.take;
            prefill.expert_idx.extend_from_slice(&self.output.expert_idx[rows.start * experts..rows.end * experts]);
            prefill.block_idx.extend_from_slice(&self.output.block_idx[rows.start * blocks..rows.end * blocks]);
            if prefill.cache.len == prefill.request.prompt_tokens.len() {
                prefill.logits.extend_from_slice(logits);
                prefill.chunks.extend_from_slice(chunks);
            }
            from = rows.end;
        }
        Ok(())
    }

    /// Begins the rollouts of a group whose prompt is prefilled.
    fn fork(&mut self, prefill: Prefill<'_>, version: u64) -> Result<(), GenerateError> {
        let Prefill { index, request, cache, expert_idx, block_idx, logits, chunks, .. } = prefill;
        let group = self.groups.len();
        let rollouts = (0..request.group_size).map(|_| None).collect();
        self.groups.push(OpenGroup { index, request: request.clone(), rollouts });
        let most = self.options.max_response_tokens.min(RESERVED_TOKENS);
        let (experts, blocks) = self.choices_per_token();
        for slot in 0..request.group_size {
            let mut rollout = Decoding {
                group,
                slot,
                rollout_id: request.first_rollout_id + slot as u64,
                cache: cache.clone(),
                tokens: Vec::with_capacity(most),
                logprobs: Vec::with_capacity(most),
                versions: Vec::with_capacity(most),
                expert_idx: Vec::with_capacity(expert_idx.len() + most * experts),
                block_idx: Vec::with_capacity(block_idx.len() + most * blocks),
            };
            rollout.expert_idx.extend_from_slice(&expert_idx);
            rollout.block_idx.extend_from_slice(&block_idx);
            rollout.cache.reserve(most);
            let drawn = draw(&logits, &mut chunks.clone(), self.options.sampling, rollout.rollout_id, 0);
            self.take(&mut rollout, drawn, version)?;
            match self.finish_reason(&rollout) {
                Some(reason) => self.finish(rollout, reason)?,
                None => self.active.push(rollout),
            }
        }
        Ok(())
    }

    /// Expert choices, and indexer selections, of a token.
    fn choices_per_token(&self) -> (usize, usize) {
        let config = &self.engine.config;
        (config.num_hidden_layers * config.num_experts_per_tok, config.csa_layers().count() * config.index_topk)
    }

    /// One token for every active rollout.
    fn step(&mut self) -> Result<(), GenerateError> {
        if self.progress.cancel.load(Ordering::Relaxed) {
            return Err(GenerateError::Cancelled);
        }
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

        let (active, sampling) = (&self.active, self.options.sampling);
        draw_rows(&mut self.workspace, &mut self.output, &mut self.drawn, |i| {
            (sampling, active[i].rollout_id, active[i].tokens.len() as u64)
        });

        let (experts, blocks) = self.choices_per_token();
        let mut still_active = Vec::with_capacity(self.active.len());
        for (i, mut rollout) in std::mem::take(&mut self.active).into_iter().enumerate() {
            rollout.expert_idx.extend_from_slice(&self.output.expert_idx[i * experts..][..experts]);
            rollout.block_idx.extend_from_slice(&self.output.block_idx[i * blocks..][..blocks]);
            self.take(&mut rollout, self.drawn[i], model.version())?;
            match self.finish_reason(&rollout) {
                Some(reason) => self.finish(rollout, reason)?,
                None => still_active.push(rollout),
            }
        }
        self.active = still_active;
        Ok(())
    }

    fn take(&self, rollout: &mut Decoding, drawn: Option<Drawn>, version: u64) -> Result<(), GenerateError> {
        let Some(drawn) = drawn else {
            let row = self.groups[rollout.group].request.prompt.row;
            return Err(GenerateError::NotFinite { row, position: rollout.tokens.len(), version });
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
