//! The engine: requests in, responses out, on a thread of its own that runs the [`Scheduler`] step by step. A rollout's
//! tokens depend neither on the batch and the moment it falls into nor on the number of threads.

mod request;
mod scheduler;
mod sequence;
mod speculation;

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use datasets::{FinishReason, Group, IndexerChoices, Prompt, Rollout, RoutingChoices};
use kernels::pool::MAX_THREADS;

use crate::kv_cache::KvCache;
use crate::memory::free_memory;
use crate::model::{HostTensor, Model, ModelBuilder, ModelConfig, WeightUpdate, WeightUpdateError};
use crate::sampler::SamplingParams;
use crate::tokenizer::{Tokenizer, TokenizerError};

pub use request::{Completion, Event, Finish, Partial, PromptScores, Refusal, Request};
pub use scheduler::{PauseMode, Scheduler, SchedulerOptions, Sink, Stats};

/// How often [`Engine::generate`] looks whether it is to stop.
const CANCEL_EVERY: Duration = Duration::from_millis(20);

/// What an engine may use where nobody says.
impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            num_threads: std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS),
            max_batch: 256,
            max_step_tokens: 512,
            max_waiting: usize::MAX,
            // The other half is for what else runs: weights that are being exchanged, a trainer.
            kv_cache_bytes: free_memory().unwrap_or(4 << 30) / 4,
            prefix_cache: true,
            record_choices: true,
            speculative: false,
        }
    }
}

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
        /// `max_tokens`.
        response: usize,
        /// `max_position_embeddings`.
        context: usize,
    },
    /// The engine does not take a prompt for another reason.
    #[error("prompt {row}: {refusal}")]
    Refused {
        /// The prompt's row.
        row: usize,
        /// Why.
        refusal: Refusal,
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

/// New weights on their way into an engine: packed beside the old ones as they come, and served when all have come and are
/// what was sent. Dropping it changes nothing.
#[derive(Debug)]
pub struct Update<'a> {
    engine: &'a Engine,
    version: u64,
    next: ModelBuilder,
}

impl Update<'_> {
    /// Takes a tensor in the engine's format (see [`to_engine_format`](crate::model::to_engine_format)).
    ///
    /// # Errors
    /// When the model has no such tensor, or it came before.
    pub fn push(&mut self, name: &str, tensor: Cow<'_, HostTensor>) -> Result<(), WeightUpdateError> {
        self.next.push(name, tensor)
    }

    /// Serves the new weights: responses that have begun go on with them at their next token. The checksum of them.
    ///
    /// # Errors
    /// When a tensor has not come, `checksum` (made by the sender) is not that of what the kernels will compute on, or
    /// another update with such a version came first; the engine then keeps what it serves.
    pub fn finish(self, checksum: Option<u64>) -> Result<u64, WeightUpdateError> {
        self.engine.swap(self.next.finish(self.version)?, checksum)
    }
}

/// What the engine's thread is told.
enum Command {
    Submit(u64, Vec<(Request, Sink)>),
    Abort(u64),
    AbortAll,
    Pause(PauseMode, Sender<()>),
    Resume(Sender<()>),
    Flush(Sender<bool>),
    Stats(Sender<Stats>),
    Quit,
}

/// A model that answers requests. Dropping it ends its thread, and what is running with it.
pub struct Engine {
    config: ModelConfig,
    options: SchedulerOptions,
    max_sequence_len: usize,
    tokenizer: Arc<Tokenizer>,
    model: Arc<RwLock<Arc<Model>>>,
    commands: Sender<Command>,
    next_request: AtomicU64,
    stats: Arc<Mutex<Stats>>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("version", &self.model().version()).finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine over `model`; a response ends with any of `stop_tokens`.
    ///
    /// # Panics
    /// When the system gives no thread.
    pub fn new(model: Model, tokenizer: Tokenizer, stop_tokens: Vec<u32>, options: SchedulerOptions) -> Self {
        let (config, tokenizer, model) =
            (model.config().clone(), Arc::new(tokenizer), Arc::new(RwLock::new(Arc::new(model))));
        let ((commands, inbox), stats) = (channel(), Arc::<Mutex<Stats>>::default());
        let mut scheduler = Scheduler::new(model.clone(), tokenizer.clone(), stop_tokens, options.clone());
        let pages = scheduler.stats().pages;
        let max_sequence_len = longest_within(&config, pages);
        let thread = {
            let stats = stats.clone();
            let run = move || work(&mut scheduler, &inbox, &stats);
            std::thread::Builder::new().name("rollout-0".into()).spawn(run).expect("a thread can start")
        };
        Self {
            config,
            options,
            max_sequence_len,
            tokenizer,
            model,
            commands,
            next_request: AtomicU64::new(0),
            stats,
            thread: Some(thread),
        }
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

    /// Takes new weights that are in memory whole.
    ///
    /// # Errors
    /// As [`Update::finish`].
    pub fn update_weights(&self, update: &WeightUpdate) -> Result<(), WeightUpdateError> {
        let mut next = self.begin_update(update.version)?;
        for (name, tensor) in &update.weights {
            next.push(name, Cow::Borrowed(tensor))?;
        }
        next.finish(Some(update.checksum)).map(drop)
    }

    /// Takes the weights of the checkpoint in `dir`, tensor by tensor; the checksum of what is served then.
    ///
    /// # Errors
    /// When the folder cannot be read, and as [`Update::finish`].
    pub fn update_weights_from_dir(
        &self,
        dir: &Path,
        version: u64,
        checksum: Option<u64>,
    ) -> Result<u64, WeightUpdateError> {
        self.check_version(version)?;
        let model = Model::load(dir, &self.config)?.with_version(version);
        self.swap(model, checksum)
    }

    /// Begins to take new weights that come in pieces, such as buckets from another process.
    ///
    /// # Errors
    /// When the version does not count up.
    pub fn begin_update(&self, version: u64) -> Result<Update<'_>, WeightUpdateError> {
        self.check_version(version)?;
        Ok(Update { engine: self, version, next: ModelBuilder::new(&self.config) })
    }

    /// Lets the weights that are served be of another version from the next token on: for who publishes numbers apart from
    /// weights.
    ///
    /// # Errors
    /// When the version does not count up.
    pub fn set_version(&self, version: u64) -> Result<(), WeightUpdateError> {
        self.check_version(version)?;
        let mut model = self.model.write().unwrap_or_else(PoisonError::into_inner);
        *model = Arc::new(model.with_version(version));
        Ok(())
    }

    fn check_version(&self, version: u64) -> Result<(), WeightUpdateError> {
        let current = self.version();
        if version > current { Ok(()) } else { Err(WeightUpdateError::Stale { version, current }) }
    }

    /// Serves `model` from the next token on, if it is what was sent.
    fn swap(&self, model: Model, expected: Option<u64>) -> Result<u64, WeightUpdateError> {
        let found = model.checksum();
        let mut current = self.model.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(expected) = expected.filter(|&expected| expected != found) {
            let (version, current) = (model.version(), current.version());
            return Err(WeightUpdateError::Checksum { version, found, expected, current });
        }
        if model.version() <= current.version() {
            return Err(WeightUpdateError::Stale { version: model.version(), current: current.version() });
        }
        *current = Arc::new(model);
        Ok(found)
    }

    /// The version of the weights it serves now.
    pub fn version(&self) -> u64 {
        self.model().version()
    }

    /// What it may use.
    pub fn options(&self) -> &SchedulerOptions {
        &self.options
    }

    /// Tokens of the longest sequence that fits into the model's context and into the memory for sequences.
    pub fn max_sequence_len(&self) -> usize {
        self.max_sequence_len
    }

    /// Whether its thread still runs; it ends only with the engine, or in a panic.
    pub fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Takes requests, before its next step and so that they run together; the events of each go to its sink, on the
    /// engine's thread: first [`Event::Taken`] or [`Event::Refused`]. The numbers by which they can be aborted.
    pub fn submit(&self, requests: Vec<(Request, Sink)>) -> Range<u64> {
        let num_requests = requests.len() as u64;
        let first = self.next_request.fetch_add(num_requests, Ordering::Relaxed);
        self.tell(Command::Submit(first, requests));
        first..first + num_requests
    }

    /// Ends a request with what it has, if it is still running; each of its samples is told so.
    pub fn abort(&self, request: u64) {
        self.tell(Command::Abort(request));
    }

    /// Ends all requests with what they have.
    pub fn abort_all(&self) {
        self.tell(Command::AbortAll);
    }

    /// Lets nothing run from here on.
    pub fn pause(&self, mode: PauseMode) {
        self.ask(|answer| Command::Pause(mode, answer));
    }

    /// Goes on after a pause.
    pub fn resume(&self) {
        self.ask(Command::Resume);
    }

    /// See [`Scheduler::flush`].
    pub fn flush(&self) -> bool {
        self.ask(Command::Flush)
    }

    /// What it had done, and was doing, after a step not long ago; for looking on.
    pub fn stats(&self) -> Stats {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, with everything that was told of until now.
    pub fn settled_stats(&self) -> Stats {
        self.ask(Command::Stats)
    }

    fn tell(&self, command: Command) {
        self.commands.send(command).expect("the engine's thread lives as long as the engine");
    }

    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> T {
        let (answer, answered) = channel();
        self.tell(command(answer));
        answered.recv().expect("the engine's thread lives as long as the engine")
    }

    /// Answers every request; the result is in the order of `requests`.
    ///
    /// # Errors
    /// When a request is refused, the weights are broken, or `progress` says to stop; the others are then aborted.
    ///
    /// # Panics
    /// When the engine's thread has.
    pub fn generate(
        &self,
        requests: &[GroupRequest],
        params: &SamplingParams,
        progress: &Progress,
    ) -> Result<Vec<Group>, GenerateError> {
        let (context, response) = (self.config.max_position_embeddings, params.max_tokens);
        for request in requests {
            let (row, tokens) = (request.prompt.row, request.prompt_tokens.len());
            if tokens == 0 {
                return Err(GenerateError::EmptyPrompt { row });
            }
            if tokens.saturating_add(response) > context {
                return Err(GenerateError::TooLong { row, tokens, response, context });
            }
        }
        let (sender, events) = channel();
        let params = Arc::new(params.clone());
        let ask = |(at, request): (usize, &GroupRequest)| {
            let sender = sender.clone();
            let sink: Sink = Box::new(move |event| sender.send((at, event)).is_ok());
            let asked = Request {
                prompt_tokens: request.prompt_tokens.clone(),
                params: params.clone(),
                num_samples: request.group_size,
                first_rollout_id: request.first_rollout_id,
                resumed: None,
                stream: false,
                prompt_logprobs_from: None,
            };
            (asked, sink)
        };
        let all = requests.iter().enumerate().filter(|(_, request)| request.group_size > 0).map(ask).collect();
        let mut submitted = Submitted { engine: self, ids: self.submit(all) };
        drop(sender);
        let groups = self.collect(requests, &events, progress)?;
        submitted.ids = 0..0;
        Ok(groups)
    }

    fn collect(
        &self,
        requests: &[GroupRequest],
        events: &Receiver<(usize, Event)>,
        progress: &Progress,
    ) -> Result<Vec<Group>, GenerateError> {
        let mut rollouts: Vec<Vec<Option<Rollout>>> = requests.iter().map(|r| vec![None; r.group_size]).collect();
        let mut num_open: usize = requests.iter().map(|request| request.group_size).sum();
        let before = self.stats().generated_tokens;
        while num_open > 0 {
            if progress.cancel.load(Ordering::Relaxed) {
                return Err(GenerateError::Cancelled);
            }
            let event = match events.recv_timeout(CANCEL_EVERY) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    // Others may draw tokens too; while a trainer generates, nobody does.
                    let tokens = self.stats().generated_tokens - before;
                    progress.tokens.store(tokens as usize, Ordering::Relaxed);
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => panic!("the engine's thread has panicked"),
            };
            match event {
                (at, Event::Refused(refusal)) => {
                    return Err(GenerateError::Refused { row: requests[at].prompt.row, refusal });
                }
                (at, Event::Finished { completion, .. }) => {
                    let request = &requests[at];
                    let index = completion.index;
                    rollouts[at][index] = Some(self.rollout(request, *completion)?);
                    num_open -= 1;
                    progress.rollouts.fetch_add(1, Ordering::Relaxed);
                }
                (_, Event::Taken | Event::PromptScored(_) | Event::Token { .. }) => {}
            }
        }
        let tokens = rollouts.iter().flatten().flatten().map(|rollout| rollout.response_tokens.len()).sum();
        progress.tokens.store(tokens, Ordering::Relaxed);
        let group = |(request, rollouts): (&GroupRequest, Vec<Option<Rollout>>)| Group {
            group_id: request.group_id,
            prompt: request.prompt.clone(),
            prompt_tokens: request.prompt_tokens.clone(),
            rollouts: rollouts.into_iter().map(|rollout| rollout.expect("every sample has ended")).collect(),
        };
        Ok(requests.iter().zip(rollouts).map(group).collect())
    }

    /// A completion as the trainer reads it.
    fn rollout(&self, request: &GroupRequest, completion: Completion) -> Result<Rollout, GenerateError> {
        let Completion { rollout_id, said, text, finish, choices, .. } = completion;
        let (finish_reason, num_said) = match finish {
            Finish::StopToken(_) => (FinishReason::Stop, said.tokens.len() - 1),
            Finish::StopText(_) => (FinishReason::Stop, said.tokens.len()),
            Finish::Length => (FinishReason::Length, said.tokens.len()),
            Finish::Aborted => return Err(GenerateError::Cancelled),
            Finish::NotFinite(version) => {
                let (row, position) = (request.prompt.row, said.tokens.len());
                return Err(GenerateError::NotFinite { row, position, version });
            }
        };
        let response_text = match text {
            Some(text) => text,
            None => self.tokenizer.decode(&said.tokens[..num_said])?,
        };
        Ok(Rollout {
            rollout_id,
            response_text,
            response_tokens: said.tokens,
            rollout_logprobs: said.logprobs,
            weight_versions: said.weight_versions,
            finish_reason,
            routing: Arc::new(RoutingChoices {
                num_layers: self.config.num_hidden_layers,
                num_experts_per_token: self.config.num_experts_per_tok,
                expert_idx: choices.expert_idx,
            }),
            indexer: Arc::new(IndexerChoices {
                num_layers: self.config.csa_layers().count(),
                top_k: self.config.index_topk,
                block_idx: choices.block_idx,
            }),
            reward: None,
        })
    }
}

/// Requests that are aborted when their caller gives up.
struct Submitted<'a> {
    engine: &'a Engine,
    ids: Range<u64>,
}

impl Drop for Submitted<'_> {
    fn drop(&mut self) {
        // A thread that has panicked has nothing to abort.
        self.ids.clone().for_each(|id| drop(self.engine.commands.send(Command::Abort(id))));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Where the thread has panicked, its callers were told.
        let _ = self.commands.send(Command::Quit);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Tokens of the longest sequence whose state takes at most as many pages, and that the model can read.
fn longest_within(config: &ModelConfig, pages: usize) -> usize {
    let (mut fits, mut beyond) = (0, config.max_position_embeddings + 1);
    while fits + 1 < beyond {
        let len = fits + (beyond - fits) / 2;
        if KvCache::num_pages_at(config, len) <= pages { fits = len } else { beyond = len }
    }
    fits
}

/// The engine's thread: what it is told, then a step, and so on; it sleeps while there is nothing to do.
fn work(scheduler: &mut Scheduler, inbox: &Receiver<Command>, stats: &Mutex<Stats>) {
    loop {
        *stats.lock().unwrap_or_else(PoisonError::into_inner) = scheduler.stats();
        let first = if scheduler.is_idle() { inbox.recv().ok() } else { None };
        if scheduler.is_idle() && first.is_none() {
            return;
        }
        for command in first.into_iter().chain(inbox.try_iter()) {
            // Who asked may be gone.
            let _ = match command {
                Command::Submit(first, requests) => {
                    for (id, (request, sink)) in (first..).zip(requests) {
                        scheduler.submit(id, request, sink);
                    }
                    true
                }
                Command::Abort(request) => scheduler.abort(request),
                Command::AbortAll => {
                    scheduler.abort_all();
                    true
                }
                Command::Pause(mode, answer) => {
                    scheduler.pause(mode);
                    answer.send(()).is_ok()
                }
                Command::Resume(answer) => {
                    scheduler.resume();
                    answer.send(()).is_ok()
                }
                Command::Flush(answer) => answer.send(scheduler.flush()).is_ok(),
                Command::Stats(answer) => answer.send(scheduler.stats()).is_ok(),
                Command::Quit => return,
            };
        }
        scheduler.step();
    }
}
