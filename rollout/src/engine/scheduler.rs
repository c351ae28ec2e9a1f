//! Which sequences go through the model in a step, with how many tokens each, and whose memory is given up when there is
//! none left. Sequences decode one token a step; prompts are read in chunks beside them, so that a long one stalls nobody.
//!
//! Nothing that a sequence says depends on any of this: every row of a forward pass is computed alone (`kernels`), every
//! draw has a random number of its own (`sampler`), and a state that was given up is made again from the tokens.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError, RwLock};

use kernels::pages::PagePool;

use crate::kv_cache::{KvCache, page_pool};
use crate::model::{ForwardOutput, Logits, Model, ModelConfig, Segment, Workspace};
use crate::prefix_cache::{Choices, PrefixCache};
use crate::sampler::{Drawn, Sampler, Turn};
use crate::tokenizer::Tokenizer;

use super::request::{Event, Finish, Partial, PromptScores, Refusal, Request};
use super::sequence::Sequence;
use super::speculation::Speculation;

/// Tokens of a prompt that are scored in a pass, at most: each has a row of logits.
const MAX_SCORED: usize = 64;
/// Tokens between the states of a long prompt that are kept for others which begin alike.
const PREFIX_STRIDE: usize = 256;

/// Tokens of a prompt that go through the model in a step at least, however many sequences decode.
const MIN_PREFILL: usize = 32;

/// What an engine may use.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// Threads of a forward pass.
    pub num_threads: usize,
    /// Sequences that decode together.
    pub max_batch: usize,
    /// Tokens of a step: those that decode, and chunks of prompts.
    pub max_step_tokens: usize,
    /// Requests that may wait.
    pub max_waiting: usize,
    /// Bytes of memory for sequences.
    pub kv_cache_bytes: usize,
    /// Whether states are kept for requests that begin alike.
    pub prefix_cache: bool,
    /// Whether the choices of experts and blocks are recorded.
    pub record_choices: bool,
    /// Whether a model's multi-token-prediction block, if it has one, drafts tokens where that pays.
    pub speculative: bool,
}

/// How running sequences are paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseMode {
    /// They end with what they have.
    Abort,
    /// They wait, and their state is made anew from their tokens when they go on.
    Retract,
    /// They wait with their state.
    InPlace,
}

/// What an engine has done and is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Sequences in the batch.
    pub num_running: usize,
    /// Sequences that wait.
    pub num_waiting: usize,
    /// Pages in use, of sequences and of kept states.
    pub pages_in_use: usize,
    /// Pages in all.
    pub pages: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// States that are kept for requests that begin alike.
    pub num_prefixes: usize,
    /// Tokens of prompts that went through the model, those of states made anew among them.
    pub prefill_tokens: u64,
    /// Tokens of prompts whose state was there.
    pub cached_tokens: u64,
    /// Tokens that were drawn.
    pub generated_tokens: u64,
    /// Samples that ended, aborted ones among them.
    pub finished: u64,
    /// Samples that were aborted.
    pub aborted: u64,
    /// How often a sequence's memory was given up for others.
    pub preemptions: u64,
    /// Forward passes.
    pub steps: u64,
    /// Tokens that were drafted and tried.
    pub drafted_tokens: u64,
    /// Those of them that the model drew too.
    pub accepted_tokens: u64,
    /// Whether nothing runs until it is resumed.
    pub is_paused: bool,
}

impl Stats {
    /// The part of all prompts' tokens whose state was there; 0 before the first.
    pub fn cache_hit_rate(&self) -> f64 {
        self.cached_tokens as f64 / (self.cached_tokens + self.prefill_tokens).max(1) as f64
    }

    /// The part of the drafts that were right; `None` before the first.
    pub fn spec_accept_rate(&self) -> Option<f64> {
        (self.drafted_tokens > 0).then(|| self.accepted_tokens as f64 / self.drafted_tokens as f64)
    }

    /// Tokens that came out of a pass with a draft, on average: 1 to 2; `None` before the first.
    pub fn spec_accept_length(&self) -> Option<f64> {
        self.spec_accept_rate().map(|rate| 1.0 + rate)
    }
}

/// Told what happens to a request; false when nobody listens any more.
pub type Sink = Box<dyn FnMut(Event) -> bool + Send>;

struct OpenRequest {
    sink: Sink,
    /// Samples that have not ended.
    num_open: usize,
}

/// The sequences of an engine. Single-threaded: [`Scheduler::step`] is one forward pass.
pub struct Scheduler {
    config: ModelConfig,
    options: SchedulerOptions,
    stop_tokens: Vec<u32>,
    tokenizer: Arc<Tokenizer>,
    model: Arc<RwLock<Arc<Model>>>,
    workspace: Workspace,
    output: ForwardOutput,
    sampler: Sampler,
    drawn: Vec<Option<Drawn>>,
    pages: PagePool,
    prefixes: PrefixCache,
    requests: HashMap<u64, OpenRequest>,
    /// In the order of their arrival, as those that wait.
    active: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    paused: bool,
    speculation: Speculation,
    stats: Stats,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler").field("stats", &self.stats()).field("paused", &self.paused).finish_non_exhaustive()
    }
}

impl Scheduler {
    /// For the weights that `model` holds, whichever they are at the time of a step.
    pub fn new(
        model: Arc<RwLock<Arc<Model>>>,
        tokenizer: Arc<Tokenizer>,
        stop_tokens: Vec<u32>,
        options: SchedulerOptions,
    ) -> Self {
        let (config, version) = {
            let model = model.read().unwrap_or_else(PoisonError::into_inner);
            (model.config().clone(), model.version())
        };
        let page_bytes = 4 * page_pool(&config, 0).page_len();
        let pages = page_pool(&config, options.kv_cache_bytes / page_bytes);
        Self {
            config,
            stop_tokens,
            tokenizer,
            model,
            workspace: Workspace::new(options.num_threads),
            output: ForwardOutput::default(),
            sampler: Sampler::default(),
            drawn: Vec::new(),
            pages,
            prefixes: PrefixCache::new(version),
            requests: HashMap::new(),
            active: Vec::new(),
            waiting: VecDeque::new(),
            paused: false,
            speculation: Speculation::default(),
            stats: Stats::default(),
            options,
        }
    }

    /// Whether there is nothing that a step would do.
    pub fn is_idle(&self) -> bool {
        self.paused || self.active.is_empty() && self.waiting.is_empty()
    }

    /// Whether sequences are paused.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// What it has done and is doing.
    pub fn stats(&self) -> Stats {
        Stats {
            num_running: self.active.len(),
            num_waiting: self.waiting.len(),
            pages_in_use: self.pages.num_in_use(),
            pages: self.pages.capacity(),
            page_bytes: 4 * self.pages.page_len(),
            num_prefixes: self.prefixes.len(),
            is_paused: self.paused,
            ..self.stats
        }
    }

    /// Takes a request under a number that no other has; requests are served in the order of their numbers. Its events go
    /// to `sink`: first whether it is taken, which it is not when it cannot be answered or too many wait.
    pub fn submit(&mut self, id: u64, request: Request, mut sink: Sink) {
        if let Err(refusal) = self.check(&request) {
            sink(Event::Refused(refusal));
            return;
        }
        if !sink(Event::Taken) {
            return;
        }
        let Request { prompt_tokens, params, num_samples, first_rollout_id, resumed, stream, prompt_logprobs_from } =
            request;
        self.requests.insert(id, OpenRequest { sink, num_open: num_samples });
        let said = resumed.unwrap_or_default();
        let (tokenizer, eos) = (&self.tokenizer, &self.stop_tokens);
        let mut sequence =
            Sequence::new(id, &prompt_tokens, params, num_samples, first_rollout_id, said, stream, tokenizer, eos);
        sequence.scores = prompt_logprobs_from.map(PromptScores::starting);
        self.waiting.push_back(sequence);
    }

    fn check(&self, request: &Request) -> Result<(), Refusal> {
        if request.prompt_tokens.is_empty() {
            return Err(Refusal::EmptyPrompt);
        }
        if request.num_samples == 0 {
            return Err(Refusal::NoSample);
        }
        let said = request.resumed.as_ref().map_or(&[][..], |said| &said.tokens);
        let vocab_size = self.config.vocab_size;
        let mut tokens = request.prompt_tokens.iter().chain(said);
        if let Some(position) = tokens.position(|&token| token as usize >= vocab_size) {
            let token = *request.prompt_tokens.iter().chain(said).nth(position).expect("found just now");
            return Err(Refusal::Vocabulary { token, position, vocab_size });
        }
        if let Some(Partial { tokens, logprobs, base_logprobs, top_logprobs, weight_versions }) = &request.resumed {
            let n = tokens.len();
            if request.num_samples != 1 {
                return Err(Refusal::Resumed("it is one sample's, and several are asked for"));
            }
            if [logprobs.len(), base_logprobs.len(), top_logprobs.len(), weight_versions.len()] != [n; 4] {
                return Err(Refusal::Resumed("its lists differ in length"));
            }
            if n >= request.params.max_tokens {
                return Err(Refusal::Resumed("it has all the tokens that it may have"));
            }
        }
        let (tokens, response, context) =
            (request.prompt_tokens.len(), request.params.max_tokens, self.config.max_position_embeddings);
        if tokens.saturating_add(response) > context {
            return Err(Refusal::Context { tokens, response, context });
        }
        let needed = KvCache::num_pages_at(&self.config, tokens + response);
        if needed > self.pages.capacity() {
            return Err(Refusal::Memory { tokens: tokens + response, needed, pages: self.pages.capacity() });
        }
        if (request.stream || !request.params.stop.is_empty()) && !self.tokenizer.writes_bytes() {
            return Err(Refusal::Text);
        }
        if self.waiting.len() >= self.options.max_waiting {
            return Err(Refusal::Full { waiting: self.waiting.len() });
        }
        Ok(())
    }

    /// Ends the samples of a request with what they have; false when it has ended already.
    pub fn abort(&mut self, request: u64) -> bool {
        self.abort_those(|sequence| sequence.request == request)
    }

    /// Ends all requests with what they have.
    pub fn abort_all(&mut self) {
        self.abort_those(|_| true);
    }

    fn abort_those(&mut self, which: impl Fn(&Sequence) -> bool) -> bool {
        let mut any = false;
        while let Some(at) = self.active.iter().position(&which) {
            let gone = self.active.remove(at);
            self.finish(gone, Finish::Aborted);
            any = true;
        }
        while let Some(gone) = self.waiting.iter().position(&which).and_then(|at| self.waiting.remove(at)) {
            self.finish(gone, Finish::Aborted);
            any = true;
        }
        any
    }

    /// Lets nothing run until [`Scheduler::resume`].
    pub fn pause(&mut self, mode: PauseMode) {
        self.paused = true;
        match mode {
            PauseMode::Abort => self.abort_all(),
            PauseMode::Retract => {
                for sequence in self.active.drain(..).rev().collect::<Vec<_>>() {
                    self.waiting.push_front(sequence);
                }
                self.waiting.iter_mut().for_each(give_up_state);
            }
            PauseMode::InPlace => {}
        }
    }

    /// Goes on after a pause.
    pub fn resume(&mut self) {
        self.paused = false;
    }

    /// Forgets the states that are kept for requests that begin alike; false where sequences hold states of their own, as
    /// they do while they run or are paused in place.
    pub fn flush(&mut self) -> bool {
        let is_free = self.active.is_empty() && self.waiting.iter().all(|sequence| sequence.cache.is_none());
        if is_free {
            self.prefixes.clear(self.prefixes.version());
            self.pages.shrink();
        }
        is_free
    }

    /// One forward pass over what is to be done, and a token for each sequence that is ready for one. False when there is
    /// nothing to do.
    pub fn step(&mut self) -> bool {
        if self.is_idle() {
            return false;
        }
        let model = self.model.read().unwrap_or_else(PoisonError::into_inner).clone();
        self.meet_weights(model.version());
        self.admit();
        let takes = self.plan();
        self.forward(&model, &takes);
        self.score(model.version());
        self.draw(model.version());
        self.draft(&model);
        self.stats.steps += 1;
        true
    }

    /// Kept states are of one version of the weights. Sequences that drew tokens by their state go on with it, and it then
    /// is of several; the others begin it again.
    fn meet_weights(&mut self, version: u64) {
        if self.prefixes.version() == version {
            return;
        }
        self.prefixes.clear(version);
        // Drafts of other weights may pay where those of the old did not.
        self.speculation = Speculation::default();
        let of_several = |sequence: &mut Sequence| {
            if sequence.said.tokens.len() == sequence.num_said_before {
                give_up_state(sequence);
                sequence.scores = sequence.scores.take().map(|scores| PromptScores::starting(scores.first));
            } else {
                sequence.version = None;
            }
        };
        self.waiting.iter_mut().for_each(of_several);
        let mut active = std::mem::take(&mut self.active);
        for sequence in &mut active {
            of_several(sequence);
            if sequence.cache.is_none() {
                self.restore(sequence);
            }
        }
        self.active = active;
    }

    /// Lets sequences in, in the order of their arrival, while there is a place and memory for them.
    fn admit(&mut self) {
        let mut num_active: usize = self.active.iter().map(|sequence| sequence.num_samples).sum();
        while let Some(next) = self.waiting.front() {
            if !self.active.is_empty() && num_active + next.num_samples > self.options.max_batch {
                return;
            }
            // What it needs to come back to where it was and some way beyond.
            let len = (next.tokens.len() + MIN_PREFILL).min(self.config.max_position_embeddings);
            let needed = KvCache::num_pages_at(&self.config, len);
            let mut next = self.waiting.pop_front().expect("it was there just now");
            let held = next.cache.as_ref().map_or(0, KvCache::num_pages);
            if next.cache.is_none() {
                self.restore(&mut next);
            }
            while !self.active.is_empty()
                && needed.saturating_sub(held) > self.pages.capacity() - self.pages.num_in_use()
            {
                if !self.prefixes.evict() {
                    self.waiting.push_front(next);
                    return;
                }
            }
            num_active += next.num_samples;
            let at = self.active.partition_point(|other| (other.request, other.index) < (next.request, next.index));
            self.active.insert(at, next);
        }
    }

    /// Gives a sequence without a state the longest kept one that fits, or an empty one.
    fn restore(&mut self, sequence: &mut Sequence) {
        let version = self.prefixes.version();
        if sequence.said.tokens.is_empty() && sequence.choices_version != Some(version) {
            // Nothing was drawn by them: they are not yet of any rollout.
            sequence.choices = Choices::default();
        }
        let found = self.prefixes.longest(sequence.restorable());
        let cached = found.as_ref().map_or(0, |prefix| prefix.cache.len);
        let cache = match found {
            Some(prefix) => {
                if sequence.choices.num_tokens < prefix.cache.len {
                    sequence.note_version(version);
                    sequence.choices = prefix.choices;
                }
                prefix.cache
            }
            None => KvCache::in_pages(&self.config, &self.pages),
        };
        sequence.cache = Some(cache);
        sequence.num_said_before = sequence.said.tokens.len();
        if sequence.said.weight_versions.iter().any(|&made_by| made_by != version) {
            sequence.recomputed.push((sequence.said.tokens.len(), version));
        }
        sequence.version = Some(version);
        if sequence.num_cached_tokens.is_none() {
            let cached = cached.min(sequence.prompt_len);
            sequence.num_cached_tokens = Some(cached);
            self.stats.cached_tokens += cached as u64;
        }
    }

    /// How many tokens each active sequence takes, with the pages for them in its hands; sequences for which there are
    /// none go back to wait, the last that came first.
    fn plan(&mut self) -> Vec<usize> {
        let pending = |sequence: &Sequence| sequence.num_pending();
        let num_ready = self.active.iter().filter(|sequence| pending(sequence) == 1).count();
        let speculates = self.speculates();
        let mut num_reading = self.active.len() - num_ready;
        let mut room = self.options.max_step_tokens.saturating_sub(num_ready).max(MIN_PREFILL);
        let mut takes: Vec<usize> = Vec::with_capacity(self.active.len());
        for sequence in &mut self.active {
            if pending(sequence) == 1 && sequence.only_reads() {
                takes.push(0);
                continue;
            }
            if pending(sequence) == 1 {
                sequence.draft = sequence.draft.filter(|_| speculates && sequence.can_speculate());
                sequence.before_draft = sequence.draft.and(sequence.cache.as_ref()).map(KvCache::mark);
                takes.push(1 + usize::from(sequence.draft.is_some()));
                continue;
            }
            // An equal share of what is left; all but the last token, which waits until all before it are there.
            let share = room.div_ceil(num_reading.max(1));
            let to_stride = PREFIX_STRIDE - sequence.num_computed() % PREFIX_STRIDE;
            let most = if sequence.scores.is_some() { MAX_SCORED } else { usize::MAX };
            let take = share.min(pending(sequence) - 1).min(to_stride).min(most);
            room -= take;
            num_reading -= 1;
            takes.push(take);
        }
        let mut at = 0;
        while at < self.active.len() {
            let cache = self.active[at].cache.as_mut().expect("active sequences have a state");
            if cache.prepare(takes[at]).is_ok() {
                at += 1;
            } else if self.active[at].before_draft.is_some() {
                self.active[at].before_draft = None;
                self.active[at].draft = None;
                takes[at] = 1;
            } else if self.prefixes.evict() || self.give_up_waiting() {
            } else if takes[at] > 1 {
                takes[at] /= 2;
            } else {
                // A sequence that is alone fits: that was seen to when it came.
                let mut last = self.active.pop().expect("the one that needs pages is there");
                takes.pop();
                give_up_state(&mut last);
                self.stats.preemptions += 1;
                self.waiting.push_front(last);
            }
        }
        takes
    }

    /// Takes the state from the last of the waiting sequences that has one; false when none has.
    fn give_up_waiting(&mut self) -> bool {
        match self.waiting.iter_mut().rev().find(|sequence| sequence.cache.is_some()) {
            Some(sequence) => {
                give_up_state(sequence);
                true
            }
            None => false,
        }
    }

    fn forward(&mut self, model: &Model, takes: &[usize]) {
        let longest = self.active.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
        self.workspace.reserve(&self.config, longest.next_power_of_two());
        for sequence in &mut self.active {
            sequence.logit_rows = 0..0;
            if sequence.before_draft.is_some() {
                sequence.tokens.extend(sequence.draft);
            }
        }
        let mut num_logits = 0;
        let mut segments: Vec<Segment<'_>> = self
            .active
            .iter_mut()
            .zip(takes)
            .filter(|(_, take)| **take > 0)
            .map(|(Sequence { cache, tokens, before_draft, scores, logit_rows, .. }, &take)| {
                let cache = cache.as_mut().expect("active sequences have a state");
                let end = cache.len + take;
                // A row is for the token after it; the last one of a sequence goes through the model alone.
                let is_scored = scores.as_ref().is_some_and(|scores| scores.next() <= end);
                let (logits, num_rows) = if end < tokens.len() && is_scored || before_draft.is_some() {
                    (Logits::All, take)
                } else if end == tokens.len() {
                    (Logits::Last, 1)
                } else {
                    (Logits::None, 0)
                };
                *logit_rows = num_logits..num_logits + num_rows;
                num_logits += num_rows;
                Segment { tokens: &tokens[cache.len..][..take], cache, logits }
            })
            .collect();
        if segments.is_empty() {
            self.output.logits.clear();
            self.output.chunks.clear();
            return;
        }
        model.forward(&mut segments, &mut self.workspace, &mut self.output, None);
        for sequence in self.active.iter_mut().filter(|sequence| sequence.before_draft.is_some()) {
            sequence.tokens.pop();
        }
        let mut row = 0;
        for (sequence, &take) in self.active.iter_mut().zip(takes) {
            sequence.rows = (row, take);
            row += take;
            if take == 0 {
                continue;
            }
            // A draft is none of its tokens before it is known to be right.
            let take = take - usize::from(sequence.before_draft.is_some());
            let len = sequence.num_computed() - usize::from(sequence.before_draft.is_some());
            if self.options.record_choices && len > sequence.choices.num_tokens {
                let end = sequence.rows.0 + take;
                let rows = end - (len - sequence.choices.num_tokens)..end;
                record(&self.config, &self.output, sequence, rows, model.version());
            }
            if len <= sequence.prompt_len || take > 1 {
                self.stats.prefill_tokens += take as u64;
            }
            // Others may begin alike as far as a whole stride, and up to the last token of a prompt.
            if len.is_multiple_of(PREFIX_STRIDE) && len < sequence.prompt_len || len + 1 == sequence.prompt_len {
                keep(&mut self.prefixes, &self.options, sequence);
            }
        }
    }

    /// Takes the scores of prompts' tokens, tells those that are whole, and ends what was only to be read.
    fn score(&mut self, version: u64) {
        for mut sequence in std::mem::take(&mut self.active) {
            match self.score_prompt(&mut sequence) {
                Err(finish) => self.finish(sequence, finish.unwrap_or(Finish::NotFinite(version))),
                Ok(()) if sequence.only_reads() && sequence.num_pending() == 1 => {
                    self.finish(sequence, Finish::Length);
                }
                Ok(()) => self.active.push(sequence),
            }
        }
    }

    /// # Errors
    /// When it is to be ended: what for, or that the logits are not finite.
    fn score_prompt(&mut self, sequence: &mut Sequence) -> Result<(), Option<Finish>> {
        let Some(scores) = &mut sequence.scores else { return Ok(()) };
        let vocab_size = self.config.vocab_size;
        let num_chunks = self.output.chunks.len() / (self.output.logits.len() / vocab_size).max(1);
        // A row is for the token after it.
        let first_position = sequence.cache.as_ref().map_or(0, |cache| cache.len) + 1 - sequence.logit_rows.len();
        for (row, position) in sequence.logit_rows.clone().zip(first_position..) {
            if position != scores.next() || position >= sequence.prompt_len {
                continue;
            }
            let logits = &self.output.logits[row * vocab_size..][..vocab_size];
            let chunks = &mut self.output.chunks[row * num_chunks..][..num_chunks];
            let (token, num_top) = (sequence.tokens[position], sequence.params.top_logprobs);
            let (logprob, top) = self.sampler.score(logits, chunks, token, num_top).ok_or(None)?;
            scores.logprobs.push(logprob);
            scores.top_logprobs.push(top);
        }
        if scores.next() < sequence.prompt_len {
            return Ok(());
        }
        let event = Event::PromptScored(Box::new(std::mem::take(scores)));
        sequence.scores = None;
        let listens = self.requests.get_mut(&sequence.request).is_none_or(|request| (request.sink)(event));
        if listens { Ok(()) } else { Err(Some(Finish::Aborted)) }
    }

    /// A token for each sequence whose tokens all went through the model.
    fn draw(&mut self, version: u64) {
        let is_ready = |sequence: &Sequence| sequence.num_computed() >= sequence.tokens.len();
        // Of each row of logits the sequence, and for how many tokens after its last one it is; others were for scores.
        let num_rows = self.output.logits.len() / self.config.vocab_size;
        let mut rows: Vec<Option<(usize, usize)>> = vec![None; num_rows];
        for (i, sequence) in self.active.iter().enumerate().filter(|(_, sequence)| is_ready(sequence)) {
            for (num_more, row) in sequence.logit_rows.clone().enumerate() {
                rows[row] = Some((i, num_more));
            }
        }
        if rows.iter().all(Option::is_none) {
            return;
        }
        // Samples that begin here share a row of logits; what a draw does to its sums must not reach the next.
        let (vocab_size, num_chunks) = (self.config.vocab_size, self.output.chunks.len() / rows.len());
        let mut begun: Vec<(usize, Vec<Option<Drawn>>)> = Vec::new();
        let is_group = |sequence: &&Sequence| is_ready(sequence) && sequence.num_samples > 1;
        for sequence in self.active.iter().filter(is_group) {
            let row = sequence.logit_rows.start;
            let logits = &self.output.logits[row * vocab_size..][..vocab_size];
            let chunks = &self.output.chunks[row * num_chunks..][..num_chunks];
            let turn = sequence.turn();
            let turns = (0..sequence.num_samples as u64).map(|n| Turn { rollout_id: sequence.rollout_id + n, ..turn });
            begun.push((row, self.sampler.draw_several(logits, chunks, turns)));
        }
        let active = &self.active;
        self.sampler.draw_rows(&mut self.workspace, &mut self.output, &mut self.drawn, |row| {
            rows[row].map(|(i, num_more)| active[i].turn_after(num_more))
        });

        let mut drawn = std::mem::take(&mut self.drawn);
        let mut begun = begun.into_iter().peekable();
        let mut num_active = 0;
        for mut sequence in std::mem::take(&mut self.active) {
            if !is_ready(&sequence) {
                num_active += sequence.num_samples;
                self.active.push(sequence);
                continue;
            }
            let row = sequence.logit_rows.start;
            if let Some((_, drawn)) = begun.next_if(|&(at, _)| at == row) {
                let mut over = Vec::new();
                for (n, drawn) in drawn.into_iter().enumerate() {
                    if let Some(going_on) = self.take(sequence.fork(n), drawn, version) {
                        if num_active < self.options.max_batch || self.active.is_empty() {
                            num_active += 1;
                            self.active.push(going_on);
                        } else {
                            over.push(going_on);
                        }
                    }
                }
                over.into_iter().rev().for_each(|sequence| self.waiting.push_front(sequence));
                continue;
            }
            let next = drawn[row].take();
            let was_tried = sequence.before_draft.is_some();
            let is_right = was_tried && next.as_ref().map(|drawn| drawn.token) == sequence.draft;
            if was_tried {
                self.speculation.note(is_right);
                self.stats.drafted_tokens += 1;
                self.stats.accepted_tokens += u64::from(is_right);
            }
            if !is_right {
                sequence.take_back_draft();
            }
            let mut going_on = self.take(sequence, next, version);
            if is_right && let Some(mut sequence) = going_on.take() {
                sequence.before_draft = None;
                if self.options.record_choices && sequence.choices.num_tokens < sequence.num_computed() {
                    let (first, num_rows) = sequence.rows;
                    let own = first + num_rows - 1..first + num_rows;
                    record(&self.config, &self.output, &mut sequence, own, version);
                }
                going_on = self.take(sequence, drawn[row + 1].take(), version);
            }
            if let Some(going_on) = going_on {
                num_active += 1;
                self.active.push(going_on);
            }
        }
        self.drawn = drawn;
    }

    fn speculates(&self) -> bool {
        let num_samples = self.active.iter().map(|sequence| sequence.num_samples).sum();
        self.options.speculative && self.config.has_mtp() && self.speculation.pays(num_samples)
    }

    /// Lets the multi-token-prediction block follow the pass just made, and draft a token for each sequence that decodes.
    fn draft(&mut self, model: &Model) {
        self.speculation.tick();
        self.active.iter_mut().for_each(|sequence| sequence.draft = None);
        if !self.speculates() {
            return;
        }
        let row_len = self.config.hc_mult * self.config.hidden_size;
        let Speculation { streams, output, drawn, .. } = &mut self.speculation;
        streams.clear();
        let (mut segments, mut asking) = (Vec::new(), Vec::new());
        for (i, sequence) in self.active.iter_mut().enumerate() {
            let (first_row, num_rows) = sequence.rows;
            let Some(cache) = sequence.cache.as_mut().filter(|_| num_rows > 0) else { continue };
            let position = cache.len - num_rows;
            // Where the block did not follow, or there is no page for it, there is no draft.
            if cache.mtp_len != position && !cache.restart_mtp(position) || cache.prepare_mtp(num_rows).is_err() {
                continue;
            }
            streams.extend_from_slice(&self.workspace.streams()[first_row * row_len..][..num_rows * row_len]);
            let is_asking = sequence.num_samples == 1 && cache.len + 1 == sequence.tokens.len();
            if is_asking {
                asking.push(i);
            }
            let logits = if is_asking { Logits::Last } else { Logits::None };
            segments.push(Segment { tokens: &sequence.tokens[position + 1..][..num_rows], cache, logits });
        }
        if segments.is_empty() {
            return;
        }
        model.forward_mtp(streams, &mut segments, &mut self.workspace, output, None);
        drop(segments);
        if asking.is_empty() {
            return;
        }
        let active = &self.active;
        self.sampler.draw_rows(&mut self.workspace, output, drawn, |row| Some(active[asking[row]].turn()));
        for (i, drawn) in asking.into_iter().zip(drawn) {
            self.active[i].draft = drawn.take().map(|drawn| drawn.token);
        }
    }

    /// Gives a sequence its next token; the sequence, if it goes on.
    fn take(&mut self, mut sequence: Sequence, drawn: Option<Drawn>, version: u64) -> Option<Sequence> {
        let Some(drawn) = drawn else {
            self.finish(sequence, Finish::NotFinite(version));
            return None;
        };
        self.stats.generated_tokens += 1;
        let event = sequence.push(drawn, version, &self.tokenizer);
        if let Some(event) = event {
            let listens = self.requests.get_mut(&sequence.request).is_none_or(|request| (request.sink)(event));
            if !listens {
                self.finish(sequence, Finish::Aborted);
                return None;
            }
        }
        match sequence.finish_reason() {
            Some(finish) => {
                self.finish(sequence, finish);
                None
            }
            None => Some(sequence),
        }
    }

    /// Ends a sequence, which may stand for several samples, and tells so.
    fn finish(&mut self, mut sequence: Sequence, finish: Finish) {
        sequence.take_back_draft();
        if sequence.cache.as_ref().is_some_and(|cache| cache.len > sequence.prompt_len) {
            keep(&mut self.prefixes, &self.options, &sequence);
        }
        let (id, num_samples) = (sequence.request, sequence.num_samples);
        self.stats.finished += num_samples as u64;
        if finish == Finish::Aborted {
            self.stats.aborted += num_samples as u64;
        }
        let Some(request) = self.requests.get_mut(&id) else { return };
        for n in 0..num_samples {
            (request.sink)(sequence.fork(n).finish(finish.clone()));
        }
        request.num_open -= num_samples;
        if request.num_open == 0 {
            self.requests.remove(&id);
        }
    }
}

/// Adds what the tokens of these rows chose.
fn record(
    config: &ModelConfig,
    output: &ForwardOutput,
    sequence: &mut Sequence,
    rows: std::ops::Range<usize>,
    version: u64,
) {
    let experts = config.num_hidden_layers * config.num_experts_per_tok;
    let blocks = config.csa_layers().count() * config.index_topk;
    sequence.note_version(version);
    let choices = &mut sequence.choices;
    choices.expert_idx.extend_from_slice(&output.expert_idx[rows.start * experts..rows.end * experts]);
    choices.block_idx.extend_from_slice(&output.block_idx[rows.start * blocks..rows.end * blocks]);
    choices.num_tokens += rows.len();
}

fn give_up_state(sequence: &mut Sequence) {
    sequence.cache = None;
    sequence.before_draft = None;
    sequence.draft = None;
    sequence.version = None;
}

/// Keeps a sequence's state for others that begin alike, if all of it, choices too, is of the weights that those will see.
fn keep(prefixes: &mut PrefixCache, options: &SchedulerOptions, sequence: &Sequence) {
    if let Some(cache) = sequence.cache.as_ref().filter(|cache| options.prefix_cache && cache.len > 0)
        && sequence.version == Some(prefixes.version())
        && (!options.record_choices || sequence.choices_version == sequence.version)
    {
        prefixes.insert(&sequence.tokens, &sequence.choices, cache);
    }
}
