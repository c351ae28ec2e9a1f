//! One sequence on its way: its tokens, the model's state, and what has been said of it.

use std::ops::Range;
use std::sync::Arc;

use crate::kv_cache::{KvCache, Mark};
use crate::prefix_cache::Choices;
use crate::sampler::{Drawn, SamplingParams, StopText, TokenCounts, Turn};
use crate::tokenizer::{TextStream, Tokenizer};

use super::request::{Completion, Event, Finish, Partial, PromptScores};

/// A sample, or, until its prompt is read, all samples of a request.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) request: u64,
    pub(super) index: usize,
    pub(super) rollout_id: u64,
    /// Samples that begin when the prompt is read; after that 1.
    pub(super) num_samples: usize,
    pub(super) params: Arc<SamplingParams>,
    /// The prompt, then the response.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    /// `None` where the state has to be made from the tokens.
    pub(super) cache: Option<KvCache>,
    /// The version that made all of the state; `None` where several did.
    pub(super) version: Option<u64>,
    /// Tokens of the response that were there when the state was begun.
    pub(super) num_said_before: usize,
    /// Of the first tokens; a state that is made anew does not change them.
    pub(super) choices: Choices,
    /// The version that made all of them; `None` where several did, or there are none.
    pub(super) choices_version: Option<u64>,
    pub(super) said: Partial,
    pub(super) num_cached_tokens: Option<usize>,
    pub(super) recomputed: Vec<(usize, u64)>,
    pub(super) stream: bool,
    /// Of the prompt's tokens so far, where they are wanted and not yet told.
    pub(super) scores: Option<PromptScores>,
    /// What the token after the last one may be.
    pub(super) draft: Option<u32>,
    /// How to take the draft back that went through the model, while it is open whether it is right.
    pub(super) before_draft: Option<Mark>,
    /// Its rows in the last forward pass: the first, and how many.
    pub(super) rows: (usize, usize),
    /// Those that have logits, among all that have.
    pub(super) logit_rows: Range<usize>,
    letters: TextStream,
    text: StopText,
    counts: Option<TokenCounts>,
    /// Tokens that end it.
    ends: Arc<[u32]>,
}

impl Sequence {
    pub(super) fn new(
        request: u64,
        prompt: &[u32],
        params: Arc<SamplingParams>,
        num_samples: usize,
        first_rollout_id: u64,
        said: Partial,
        stream: bool,
        tokenizer: &Tokenizer,
        eos: &[u32],
    ) -> Self {
        let eos = if params.ignore_eos { &[] } else { eos };
        let ends = params.stop_token_ids.iter().chain(eos).copied().collect();
        let mut sequence = Self {
            request,
            index: 0,
            rollout_id: first_rollout_id,
            num_samples,
            params,
            tokens: prompt.iter().chain(&said.tokens).copied().collect(),
            prompt_len: prompt.len(),
            cache: None,
            version: None,
            num_said_before: 0,
            choices: Choices::default(),
            choices_version: None,
            said,
            num_cached_tokens: None,
            recomputed: Vec::new(),
            stream,
            scores: None,
            draft: None,
            before_draft: None,
            rows: (0, 0),
            logit_rows: 0..0,
            letters: TextStream::default(),
            text: StopText::default(),
            counts: None,
            ends,
        };
        if sequence.params.has_penalties() {
            sequence.counts = Some(TokenCounts::new(prompt, &sequence.said.tokens));
        }
        if sequence.reads_text() {
            // What was said before was told before.
            for at in sequence.prompt_len..sequence.tokens.len() {
                sequence.read(tokenizer, sequence.tokens[at]);
            }
            sequence.text.take_certain(&sequence.params.stop);
        }
        sequence
    }

    fn reads_text(&self) -> bool {
        self.stream || !self.params.stop.is_empty()
    }

    fn read(&mut self, tokenizer: &Tokenizer, token: u32) {
        // A token that ends the response is no text of it.
        if !self.ends.contains(&token) {
            // Whether the tokenizer writes bytes was asked when the request came.
            let piece = self.letters.push(tokenizer, token).unwrap_or_default();
            let is_barred = self.said.tokens.len() < self.params.min_tokens;
            self.text.push(&piece, if is_barred { &[] } else { &self.params.stop });
        }
    }

    /// What its next token is drawn by.
    pub(super) fn turn(&self) -> Turn<'_> {
        self.turn_after(0)
    }

    /// What the token after so many more is drawn by, where no penalties depend on those.
    pub(super) fn turn_after(&self, num_more: usize) -> Turn<'_> {
        let position = self.said.tokens.len() + num_more;
        let barred = if position < self.params.min_tokens { &*self.ends } else { &[] };
        let (params, rollout_id) = (&*self.params, self.rollout_id);
        Turn { params, rollout_id, position: position as u64, counts: self.counts.as_ref(), barred }
    }

    /// Tokens that went through the model.
    pub(super) fn num_computed(&self) -> usize {
        self.cache.as_ref().map_or(0, |cache| cache.len)
    }

    /// Tokens that did not; at least one.
    pub(super) fn num_pending(&self) -> usize {
        self.tokens.len() - self.num_computed()
    }

    /// How many of its tokens a kept state may have read: not those that have to go through the model to be scored.
    pub(super) fn restorable(&self) -> &[u32] {
        let most = self.scores.as_ref().map_or(self.tokens.len(), PromptScores::next);
        &self.tokens[..most.min(self.tokens.len())]
    }

    /// Whether it only waits to be told of, its prompt read.
    pub(super) fn only_reads(&self) -> bool {
        self.params.max_tokens == 0
    }

    /// Whether it could use a draft: not where penalties make a draw depend on the one before.
    pub(super) fn can_speculate(&self) -> bool {
        self.counts.is_none() && self.said.tokens.len() + 2 <= self.params.max_tokens
    }

    /// Makes its state that of its tokens alone again.
    pub(super) fn take_back_draft(&mut self) {
        if let (Some(mark), Some(cache)) = (self.before_draft.take(), &mut self.cache) {
            cache.take_back(mark);
            self.rows.1 -= 1;
        }
    }

    /// Sample `index` of those that it stands for.
    pub(super) fn fork(&self, index: usize) -> Self {
        Self { index: self.index + index, rollout_id: self.rollout_id + index as u64, num_samples: 1, ..self.clone() }
    }

    /// To be told before choices are added that this version made.
    pub(super) fn note_version(&mut self, version: u64) {
        let same = self.choices.num_tokens == 0 || self.choices_version == Some(version);
        self.choices_version = same.then_some(version);
    }

    /// Takes the next token; what to tell of it, if that is wanted.
    pub(super) fn push(&mut self, drawn: Drawn, version: u64, tokenizer: &Tokenizer) -> Option<Event> {
        let Drawn { token, logprob, base_logprob, top } = drawn;
        self.tokens.push(token);
        self.said.tokens.push(token);
        self.said.logprobs.push(logprob);
        self.said.base_logprobs.push(base_logprob);
        self.said.weight_versions.push(version);
        if let Some(counts) = &mut self.counts {
            counts.push(token);
        }
        if self.reads_text() {
            self.read(tokenizer, token);
        }
        let event = self.stream.then(|| Event::Token {
            index: self.index,
            token,
            logprob,
            base_logprob,
            top_logprobs: top.clone(),
            weight_version: version,
            text: self.text.take_certain(&self.params.stop),
        });
        self.said.top_logprobs.push(top);
        event
    }

    /// Why it ends here, if it does.
    pub(super) fn finish_reason(&self) -> Option<Finish> {
        let token = self.said.tokens.last().copied()?;
        if self.ends.contains(&token) {
            Some(Finish::StopToken(token))
        } else if let Some(text) = self.text.found() {
            Some(Finish::StopText(text.to_owned()))
        } else if self.said.tokens.len() >= self.params.max_tokens {
            Some(Finish::Length)
        } else {
            None
        }
    }

    /// What there is to tell at its end: the text that was held back, and all of it.
    pub(super) fn finish(mut self, finish: Finish) -> Event {
        if self.reads_text() && self.text.found().is_none() {
            // A character that was never finished.
            let piece = std::mem::take(&mut self.letters).finish();
            self.text.push(&piece, &[]);
        }
        let completion = Completion {
            index: self.index,
            rollout_id: self.rollout_id,
            text: self.reads_text().then(|| self.text.text().to_owned()),
            said: self.said,
            finish,
            choices: self.choices,
            num_cached_tokens: self.num_cached_tokens.unwrap_or(0),
            recomputed: self.recomputed,
        };
        Event::Finished { text: self.text.take_rest(), completion: Box::new(completion) }
    }
}
