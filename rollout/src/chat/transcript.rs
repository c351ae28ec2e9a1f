//! A conversation that goes on over many turns, as tokens: what the model generated stays token for token what it was.
//!
//! Encoding generated text again may give other tokens than were sampled, and then logprobs belong to tokens that nobody
//! drew. So a transcript keeps the generated tokens and encodes only what is new: tool results, the next user message,
//! the header of the model's turn.

use std::ops::Range;

use super::{
    ChatError, ChatOptions, Completion, CompletionError, Message, ThinkingMode, control, parse_marked_completion,
    render,
};
use crate::tokenizer::{MarkedText, Tokenizer};

/// The messages of a conversation and its tokens.
///
/// Where the model generates what the template would write, the tokens are those of [`render`] over all messages.
#[derive(Debug)]
pub struct Transcript<'a> {
    tokenizer: &'a Tokenizer,
    options: ChatOptions,
    messages: Vec<Message>,
    /// What the template makes of the messages.
    rendered: MarkedText,
    tokens: Vec<u32>,
    generated: Vec<Range<usize>>,
    completion_is_due: bool,
}

impl<'a> Transcript<'a> {
    /// A conversation in which the model speaks next.
    ///
    /// # Errors
    /// When the messages cannot be rendered, or do not end with what the model answers.
    pub fn new(tokenizer: &'a Tokenizer, options: ChatOptions, messages: Vec<Message>) -> Result<Self, ChatError> {
        let rendered = render(&messages, &options)?;
        expect_completion(&messages)?;
        let tokens = tokenizer.encode_marked(&rendered)?;
        let generated = Vec::new();
        Ok(Self { tokenizer, options, messages, rendered, tokens, generated, completion_is_due: true })
    }

    /// Every token so far: the prompt of the next completion, when one is due.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where the generated tokens stand in [`tokens`](Self::tokens), one range a completion: what a loss may train.
    pub fn generated(&self) -> &[Range<usize>] {
        &self.generated
    }

    /// The messages so far, completions among them.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Takes what the engine generated after [`tokens`](Self::tokens), the end of sentence included where there is one.
    ///
    /// The inner result is the model's doing: a malformed completion is kept too, its text as the content of its message,
    /// so that the conversation can go on, say by telling the model what was wrong. Calls get ids `call_0`, `call_1`, ...
    ///
    /// # Errors
    /// When no completion is due, or tokens cannot be turned into text.
    pub fn push_completion(&mut self, tokens: &[u32]) -> Result<Result<Completion, CompletionError>, ChatError> {
        if !self.completion_is_due {
            return Err(out_of_turn(&self.messages, "tool results or a user message before the next completion"));
        }
        let text = self.tokenizer.decode_marked(tokens)?;
        let is_thinking = self.rendered.text().ends_with(control::THINK);
        let mode = if is_thinking { ThinkingMode::Thinking } else { ThinkingMode::Chat };
        let num_calls = self.messages.iter().map(calls_of).sum::<usize>();
        let parsed = parse_marked_completion(&text, mode).map(|mut completion| {
            for (i, call) in completion.tool_calls.iter_mut().enumerate() {
                call.id = format!("call_{}", num_calls + i);
            }
            completion
        });
        let as_text = |_| Completion { content: text.text().to_owned(), ..Completion::default() };
        self.messages.push(parsed.clone().unwrap_or_else(as_text).into());
        self.rendered = render(&self.messages, &self.options)?;
        self.generated.push(self.tokens.len()..self.tokens.len() + tokens.len());
        self.tokens.extend_from_slice(tokens);
        self.completion_is_due = false;
        Ok(parsed)
    }

    /// Adds tool results and messages after a completion, and the header of the model's next turn; the tokens that are
    /// new. A completion without its end of sentence gets one: no message may begin within another.
    ///
    /// # Errors
    /// When a completion is due, the messages do not end with what the model answers, or the template would write earlier
    /// turns differently now ([`ChatError::Rewritten`]). The transcript then is what it was.
    pub fn push_messages(&mut self, messages: Vec<Message>) -> Result<Range<usize>, ChatError> {
        if self.completion_is_due {
            return Err(out_of_turn(&self.messages, "the model's completion before further messages"));
        }
        let Some(role) = messages.first().map(Message::role) else {
            return Err(out_of_turn(&self.messages, "at least one message"));
        };
        expect_completion(&messages)?;
        let all = [self.messages.clone(), messages].concat();
        let rendered = render(&all, &self.options)?;
        let added = rendered.strip_prefix(&self.rendered).ok_or(ChatError::Rewritten { role })?;
        let end = self.tokenizer.control_token(control::END)?;
        let new_tokens = self.tokenizer.encode_marked(&added)?;
        let start = self.tokens.len();
        if self.tokens.last() != Some(&end) {
            self.tokens.push(end);
        }
        self.tokens.extend(new_tokens);
        self.messages = all;
        self.rendered = rendered;
        self.completion_is_due = true;
        Ok(start..self.tokens.len())
    }
}

fn calls_of(message: &Message) -> usize {
    match message {
        Message::Assistant { tool_calls, .. } => tool_calls.len(),
        _ => 0,
    }
}

/// Refuses messages after which the model does not begin a turn.
fn expect_completion(messages: &[Message]) -> Result<(), ChatError> {
    match messages.last() {
        Some(Message::User { .. } | Message::Developer { .. } | Message::Tool { .. }) => Ok(()),
        Some(Message::Assistant { task: Some(_), unfinished: false, .. }) => Ok(()),
        _ => Err(out_of_turn(messages, "a user message, a developer message or tool results, for the model to answer")),
    }
}

fn out_of_turn(messages: &[Message], expected: &'static str) -> ChatError {
    let found =
        messages.last().map_or("no message".into(), |message| format!("a message of role `{}`", message.role()));
    ChatError::OutOfTurn { found, expected }
}
