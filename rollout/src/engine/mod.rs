//! The engine: requests in, responses out, on a thread of its own that runs the [`Scheduler`] step by step. A rollout's
//! tokens depend neither on the batch and the moment it falls into nor on the number of threads.

mod request;
mod scheduler;
mod sequence;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use datasets::{FinishReason, Group, IndexerChoices, Prompt, Rollout, RoutingChoices};
use kernels::pool::MAX_THREADS;

use crate::memory::free_memory;
use crate::model::{Model, ModelConfig, WeightUpdate, WeightUpdateError, checksum};
use crate::sampler::SamplingParams;
use crate::tokenizer::{Tokenizer, TokenizerError};

pub use request::{Completion, Event, Finish, Partial, Refusal, Request};
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

/// What the engine's thread is told.
enum Command {
    Submit(Vec<(Request, Sink)>, Answer),
    Abort(u64),
    AbortAll,
    Pause(PauseMode, Sender<()>),
    Resume(Sender<()>),
    Flush(Sender<bool>),
    Quit,
}

/// Told whether each of some requests was taken.
pub type Answer = Box<dyn FnOnce(Vec<Result<u64, Refusal>>) + Send>;

/// A model that answers requests. Dropping it ends its thread, and what is running with it.
pub struct Engine {
    config: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    model: Arc<RwLock<Arc<Model>>>,
    commands: Sender<Command>,
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
        let thread = {
            let (model, tokenizer, stats) = (model.clone(), tokenizer.clone(), stats.clone());
            let run = move || work(&mut Scheduler::new(model, tokenizer, stop_tokens, options), &inbox, &stats);
            std::thread::Builder::new().name("rollout-0".into()).spawn(run).expect("a thread can start")
        };
        Self { config, tokenizer, model, commands, stats, thread: Some(thread) }
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
    /// what was sent, and swaps. Responses that have begun go on with the new weights at their next token.
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

    /// Takes requests, before its next step and so that they run together; the events of each go to its sink, on the
    /// engine's thread, and `answer` is told there by which number each can be aborted, or why it is not taken.
    pub fn submit(&self, requests: Vec<(Request, Sink)>, answer: Answer) {
        self.tell(Command::Submit(requests, answer));
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

    /// What it had done, and was doing, after its last step.
    pub fn stats(&self) -> Stats {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// When a request is refused (before anything is generated), the weights are broken, or `progress` says to stop.
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
            };
            (asked, sink)
        };
        let asked: Vec<(usize, &GroupRequest)> =
            requests.iter().enumerate().filter(|(_, request)| request.group_size > 0).collect();
        let all = asked.iter().copied().map(ask).collect();
        let answers = self.ask(|answered: Sender<_>| {
            // Who asked waits for it.
            Command::Submit(all, Box::new(move |answers| drop(answered.send(answers))))
        });
        let mut submitted = Submitted { engine: self, ids: Vec::new() };
        submitted.ids.extend(answers.iter().filter_map(|answer| answer.as_ref().ok()));
        for ((_, request), answer) in asked.iter().zip(answers) {
            answer.map_err(|refusal| GenerateError::Refused { row: request.prompt.row, refusal })?;
        }
        drop(sender);
        let groups = self.collect(requests, &events, progress)?;
        submitted.ids.clear();
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
            if let (at, Event::Finished { completion, .. }) = event {
                let request = &requests[at];
                let index = completion.index;
                rollouts[at][index] = Some(self.rollout(request, *completion)?);
                num_open -= 1;
                progress.rollouts.fetch_add(1, Ordering::Relaxed);
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
    ids: Vec<u64>,
}

impl Drop for Submitted<'_> {
    fn drop(&mut self) {
        // A thread that has panicked has nothing to abort.
        self.ids.iter().for_each(|&id| drop(self.engine.commands.send(Command::Abort(id))));
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
                Command::Submit(requests, answer) => {
                    answer(requests.into_iter().map(|(request, sink)| scheduler.submit(request, sink)).collect());
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
                Command::Quit => return,
            };
        }
        scheduler.step();
    }
}
