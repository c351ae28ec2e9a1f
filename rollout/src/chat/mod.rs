//! Conversations as DeepSeek-V4 reads and writes them: messages to a prompt, a completion back to a message.
//!
//! The format is that of `encoding/encoding_dsv4.py` in the published checkpoints (MIT licence), letter for letter and
//! token for token; golden cases hold it to that. [`render`] writes a conversation, [`parse_completion`] reads what the
//! model answered, and [`Transcript`] does both over many turns without ever encoding again what the model generated.
//!
//! What people, tools and data say is letters, whatever it spells: `<｜Assistant｜>` in a user's message does not become
//! the control token, nor does `</think>` in a tool's result. The reference renders to text and encodes that, which takes
//! spelled-out control tokens for real; `tokenizer.encode(rendered.text())` is that reading, for comparison only.

mod json;
mod message;
mod parse;
mod render;
mod transcript;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::tokenizer::TokenizerError;

pub use self::message::{Message, Task, Tool, ToolCall};
pub use self::parse::{Completion, CompletionError, parse_completion, parse_marked_completion};
pub use self::render::render;
pub use self::transcript::Transcript;

/// Whether the model reasons before it answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThinkingMode {
    /// Its turn opens with `<think>`.
    #[default]
    Thinking,
    /// Its turn opens with `</think>`: no reasoning, and none of earlier turns is shown.
    Chat,
}

/// How hard to think, as the first words of a prompt in thinking mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effort {
    /// July only: nothing is said.
    Low,
    /// April: nothing is said. July: "Absolute maximum with no shortcuts permitted", and what follows.
    High,
    /// April: "Absolute maximum with no shortcuts permitted". July: "Beyond maximum".
    Max,
}

/// Which release's words an [`Effort`] stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EffortLevels {
    /// The checkpoints of April 2026; no effort given says nothing.
    #[default]
    April,
    /// Those of July 2026 (0731) and DeepSeek's renderer `deepseek-recipe` 0.2; no effort given means high.
    July,
}

/// How a conversation is written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChatOptions {
    /// Whether the model reasons first.
    pub thinking_mode: ThinkingMode,
    /// How hard; only in thinking mode.
    pub reasoning_effort: Option<Effort>,
    /// What the effort's levels mean.
    pub effort_levels: EffortLevels,
    /// In thinking mode, leave out the reasoning of turns before the last user message, and developer messages there.
    /// Declared tools override it: then everything is kept.
    pub drop_thinking: bool,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            thinking_mode: ThinkingMode::default(),
            reasoning_effort: None,
            effort_levels: EffortLevels::default(),
            drop_thinking: true,
        }
    }
}

/// Why a conversation cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The messages are not in an array.
    #[error("the messages are {found}, expected an array of objects with `role` and `content`; put them into one")]
    NotAList {
        /// What was found.
        found: &'static str,
    },
    /// One message is malformed.
    #[error("message {index}: {reason}; correct the message")]
    Message {
        /// Which, counted from 0.
        index: usize,
        /// What is wrong.
        reason: String,
    },
    /// The effort has no meaning in this release.
    #[error(
        "`reasoning_effort` is `low`, but the April release knows `high` and `max`; \
         leave it out, or set `effort_levels` to `july`"
    )]
    Effort,
    /// A developer message without text.
    #[error("message {index}: a developer message has no text, expected some; give it text or leave it out")]
    EmptyDeveloper {
        /// Which, counted from 0.
        index: usize,
    },
    /// A task where the template has no place for it: the reference drops it without a word.
    #[error(
        "message {index}: its task has no place, expected the message to open its turn and nothing or an assistant \
         message to follow it; put the task on the first message of the last user turn"
    )]
    LostTask {
        /// Which, counted from 0.
        index: usize,
    },
    /// A transcript was handed a completion or messages when it was the other's turn.
    #[error("the conversation ends with {found}, expected {expected}")]
    OutOfTurn {
        /// What its last message is.
        found: String,
        /// What must come.
        expected: &'static str,
    },
    /// The template writes earlier turns differently once these messages follow.
    #[error(
        "with a {role} message after it, the template leaves reasoning or developer messages of earlier turns out, so \
         what was generated is no prefix of the new prompt; set `drop_thinking = false`, declare tools, or begin a new \
         transcript from the messages"
    )]
    Rewritten {
        /// Role of the first new message.
        role: &'static str,
    },
    /// The tokenizer does not fit the template.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The control tokens of the template, as they are spelled.
mod control {
    pub(super) const BEGIN: &str = "<｜begin▁of▁sentence｜>";
    pub(super) const END: &str = "<｜end▁of▁sentence｜>";
    pub(super) const USER: &str = "<｜User｜>";
    pub(super) const ASSISTANT: &str = "<｜Assistant｜>";
    pub(super) const THINK: &str = "<think>";
    pub(super) const END_THINK: &str = "</think>";
    pub(super) const DSML: &str = "｜DSML｜";
    pub(super) const LATEST_REMINDER: &str = "<｜latest_reminder｜>";

    /// The control token of a quick instruction.
    pub(super) const fn task(task: super::Task) -> &'static str {
        match task {
            super::Task::Action => "<｜action｜>",
            super::Task::Query => "<｜query｜>",
            super::Task::Authority => "<｜authority｜>",
            super::Task::Domain => "<｜domain｜>",
            super::Task::Title => "<｜title｜>",
            super::Task::ReadUrl => "<｜read_url｜>",
        }
    }
}
