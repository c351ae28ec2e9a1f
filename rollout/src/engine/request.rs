//! What is asked of the engine, and what it answers.

use std::sync::Arc;

use crate::prefix_cache::Choices;
use crate::sampler::SamplingParams;

/// A prompt to be continued once or several times.
#[derive(Clone, Debug)]
pub struct Request {
    /// What the model reads.
    pub prompt_tokens: Arc<[u32]>,
    /// How it is continued.
    pub params: Arc<SamplingParams>,
    /// How many times.
    pub num_samples: usize,
    /// The id of the first sample; the others count up from it. With the seed it keys the random stream.
    pub first_rollout_id: u64,
    /// What was said before, of a request for one sample that goes on where it was interrupted.
    pub resumed: Option<Partial>,
    /// Whether every token is told as it comes.
    pub stream: bool,
    /// From which position on the prompt's own tokens are told with their log-probabilities ([`Event::PromptScored`]);
    /// a state of that part is then made even where one is kept.
    pub prompt_logprobs_from: Option<usize>,
}

/// What the model itself thinks of a prompt's tokens: temperature 1, nothing cut off.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptScores {
    /// The position of the first token that has a score: at least 1, as nothing stands before the first of all.
    pub first: usize,
    /// The log-probability of each token from there on, given those before it.
    pub logprobs: Vec<f32>,
    /// For each, the likeliest tokens and their log-probabilities, as many as were asked for.
    pub top_logprobs: Vec<Vec<(u32, f32)>>,
}

impl PromptScores {
    /// Of the tokens from position `from` on; none yet.
    pub(super) fn starting(from: usize) -> Self {
        Self { first: from.max(1), ..Self::default() }
    }

    /// The position of the next token to be scored.
    pub(super) fn next(&self) -> usize {
        self.first + self.logprobs.len()
    }
}

/// The tokens of a response so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Partial {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Their log-probabilities under the distribution that each was drawn from.
    pub logprobs: Vec<f32>,
    /// Their log-probabilities under the model itself: temperature 1, nothing cut off.
    pub base_logprobs: Vec<f32>,
    /// For each, the likeliest tokens and their log-probabilities under the model itself, as many as were asked for.
    pub top_logprobs: Vec<Vec<(u32, f32)>>,
    /// The version of the weights that made each.
    pub weight_versions: Vec<u64>,
}

/// Why a response ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Finish {
    /// It said a token that ends it.
    StopToken(u32),
    /// It said a text that ends it.
    StopText(String),
    /// It has all the tokens that it may have.
    Length,
    /// It was told to end.
    Aborted,
    /// The model's logits are not finite: the weights of this version are broken.
    NotFinite(u64),
}

/// A response that has ended.
#[derive(Clone, Debug)]
pub struct Completion {
    /// Which sample of its request.
    pub index: usize,
    /// Its id.
    pub rollout_id: u64,
    /// Its tokens, with the one that ended it.
    pub said: Partial,
    /// Its text, without what ended it, where it was read: of requests that stream or have stop texts.
    pub text: Option<String>,
    /// Why it ended.
    pub finish: Finish,
    /// What the tokens that went through the model chose: all but the last one said.
    pub choices: Choices,
    /// Tokens of the prompt whose state was there already.
    pub num_cached_tokens: usize,
    /// After how many tokens of the response the state was made anew from the tokens, and by which version: where that is
    /// not the one that had made it before, later tokens see another past.
    pub recomputed: Vec<(usize, u64)>,
}

/// What happens to a request.
#[derive(Clone, Debug)]
pub enum Event {
    /// It waits for its turn.
    Taken,
    /// It is not taken, and nothing else will happen to it.
    Refused(Refusal),
    /// The prompt's scores, where they were asked for: once, before the first token.
    PromptScored(Box<PromptScores>),
    /// A sample has one more token.
    Token {
        /// Which sample.
        index: usize,
        /// The token.
        token: u32,
        /// Its log-probability under the distribution that it was drawn from.
        logprob: f32,
        /// The same under the model itself.
        base_logprob: f32,
        /// The likeliest tokens under the model itself.
        top_logprobs: Vec<(u32, f32)>,
        /// The version of the weights.
        weight_version: u64,
        /// The text that is certain now.
        text: String,
    },
    /// A sample has ended; its last token was told before, its last text is here.
    Finished {
        /// The text since the last token that was told.
        text: String,
        /// All of it.
        completion: Box<Completion>,
    },
}

/// Why a request is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is nothing to continue.
    #[error("the prompt has no token, expected at least one")]
    EmptyPrompt,
    /// Nothing is asked for.
    #[error("no sample is asked for, expected at least one")]
    NoSample,
    /// A token that the model does not have.
    #[error("token {token} at position {position} is outside the model's vocabulary of {vocab_size}")]
    Vocabulary {
        /// The token.
        token: u32,
        /// Where.
        position: usize,
        /// `vocab_size`.
        vocab_size: usize,
    },
    /// It does not fit into the model's context.
    #[error("the prompt has {tokens} tokens; with up to {response} more it exceeds the model's context of {context}")]
    Context {
        /// Its length.
        tokens: usize,
        /// What may follow.
        response: usize,
        /// `max_position_embeddings`.
        context: usize,
    },
    /// It does not fit into the memory for sequences.
    #[error(
        "a sequence of {tokens} tokens needs {needed} pages of memory, and there are {pages} in all: ask for less, or give \
         the engine more memory for sequences"
    )]
    Memory {
        /// Prompt and response.
        tokens: usize,
        /// What they take.
        needed: usize,
        /// What there is.
        pages: usize,
    },
    /// The queue is full.
    #[error("{waiting} requests are waiting, which is as many as may: try again later")]
    Full {
        /// How many.
        waiting: usize,
    },
    /// The tokenizer cannot give a text token by token.
    #[error("stop texts and streams need a tokenizer that writes tokens as bytes, and this model's does not")]
    Text,
    /// What was said before does not belong together, or leaves nothing to say.
    #[error("what is to be resumed does not fit: {0}")]
    Resumed(&'static str),
}
