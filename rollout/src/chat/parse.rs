//! What the model answered, read back: reasoning, answer, tool calls.
//!
//! Strict, as the reference is, since a call that is guessed at does what nobody asked for. Where tokens are at hand, only
//! control tokens count as structure: a model that quotes `</think>` letter by letter has not stopped thinking.

use std::collections::HashSet;

use super::json::quoted;
use super::{Message, Task, ThinkingMode, ToolCall, control};
use crate::tokenizer::MarkedText;

/// A completion in its parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// What stood before `</think>`; `None` in chat mode.
    pub reasoning: Option<String>,
    /// The answer.
    pub content: String,
    /// The calls, in order, without ids: V4 writes none.
    pub tool_calls: Vec<ToolCall>,
}

impl From<Completion> for Message {
    fn from(completion: Completion) -> Self {
        Self::Assistant {
            content: completion.content,
            reasoning_content: completion.reasoning,
            tool_calls: completion.tool_calls,
            task: None,
            unfinished: false,
        }
    }
}

/// Why a completion is not what the template has the model write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompletionError {
    /// The reasoning was not ended.
    #[error(
        "the completion has no `</think>`, expected one between reasoning and answer; it was cut, or raise the token limit"
    )]
    OpenReasoning,
    /// The completion was not ended.
    #[error(
        "the completion has no `<｜end▁of▁sentence｜>`, expected one after the answer; it was cut, or raise the token limit"
    )]
    Unfinished,
    /// A control token where words belong.
    #[error("the {place} holds the control token `{token}`, expected text only; treat the completion as malformed")]
    StrayControl {
        /// `reasoning` or `answer`.
        place: &'static str,
        /// Which token.
        token: String,
    },
    /// Something follows the end.
    #[error("{found:?} follows the {end}, expected nothing more; treat the completion as malformed")]
    Trailing {
        /// The end of what.
        end: &'static str,
        /// The first letters of it.
        found: String,
    },
    /// A tool call that is not in the form that the prompt prescribes.
    #[error(
        "tool call {call}: found {found:?}, expected {expected}; report it to the model or treat the completion as malformed"
    )]
    ToolCall {
        /// Which, counted from 1.
        call: usize,
        /// The first letters of what stands there.
        found: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// A parameter is given twice.
    #[error(
        "tool call {call}: parameter {name:?} is given twice, expected once; report it to the model or treat the completion as malformed"
    )]
    RepeatedParameter {
        /// Which call, counted from 1.
        call: usize,
        /// Which parameter.
        name: String,
    },
}

/// Reads a completion from its text, which begins after the `<think>` or `</think>` of the prompt and holds the end of
/// sentence. Control tokens are taken for real wherever they are spelled out; see [`parse_marked_completion`].
///
/// # Errors
/// When it does not have the template's form: the end of sentence may be missing after tool calls, and nowhere else.
pub fn parse_completion(text: &str, mode: ThinkingMode) -> Result<Completion, CompletionError> {
    let tasks = [Task::Action, Task::Query, Task::Authority, Task::Domain, Task::Title, Task::ReadUrl];
    let spellings: Vec<&str> = [control::BEGIN, control::END, control::USER, control::ASSISTANT, control::THINK]
        .into_iter()
        .chain([control::END_THINK, control::DSML, control::LATEST_REMINDER])
        .chain(tasks.map(control::task))
        .collect();
    let mut marked = MarkedText::default();
    let mut rest = text;
    while let Some(at) = rest.find(['<', '｜']) {
        marked.push_plain(&rest[..at]);
        rest = &rest[at..];
        if let Some(spelling) = spellings.iter().find(|spelling| rest.starts_with(**spelling)) {
            marked.push_control(spelling);
            rest = &rest[spelling.len()..];
        } else {
            let next = rest.chars().next().map_or(0, char::len_utf8);
            marked.push_plain(&rest[..next]);
            rest = &rest[next..];
        }
    }
    marked.push_plain(rest);
    parse_marked_completion(&marked, mode)
}

/// Reads a completion whose control tokens are marked, as [`Tokenizer::decode_marked`] gives it.
///
/// # Errors
/// As [`parse_completion`].
///
/// [`Tokenizer::decode_marked`]: crate::tokenizer::Tokenizer::decode_marked
pub fn parse_marked_completion(text: &MarkedText, mode: ThinkingMode) -> Result<Completion, CompletionError> {
    let starts = text.marks().iter().map(|mark| mark.start).collect();
    let mut reader = Reader { text, starts, at: 0 };
    let reasoning = match mode {
        ThinkingMode::Chat => None,
        ThinkingMode::Thinking => {
            let (reasoning, _) = reader.read_until(&[END_THINK]).ok_or(CompletionError::OpenReasoning)?;
            reader.refuse_control(reasoning.clone(), "reasoning")?;
            Some(text.text()[reasoning].to_owned())
        }
    };
    let (content, end) = reader.read_until(&[END, CALLS]).ok_or(CompletionError::Unfinished)?;
    reader.refuse_control(content.clone(), "answer")?;
    let mut tool_calls = Vec::new();
    if end == CALLS {
        tool_calls = reader.read_calls()?;
        if !reader.rest().is_empty() {
            let (between, _) = reader.read_until(&[END]).unwrap_or((reader.at..text.text().len(), END));
            if !between.is_empty() {
                let found = start_of(&text.text()[between]);
                return Err(CompletionError::Trailing { end: "tool calls", found });
            }
        }
    }
    if !reader.rest().is_empty() {
        return Err(CompletionError::Trailing { end: "end of sentence", found: start_of(reader.rest()) });
    }
    Ok(Completion { reasoning, content: text.text()[content].to_owned(), tool_calls })
}

/// A piece of structure and the place of the control token in it, in bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Sign {
    text: &'static str,
    control_at: usize,
}

const END_THINK: Sign = Sign { text: control::END_THINK, control_at: 0 };
const END: Sign = Sign { text: control::END, control_at: 0 };
const CALLS: Sign = Sign { text: "\n\n<｜DSML｜tool_calls", control_at: 3 };
const END_CALLS: Sign = Sign { text: "</｜DSML｜tool_calls>", control_at: 2 };
const CALL: Sign = Sign { text: "<｜DSML｜invoke", control_at: 1 };
const END_CALL: Sign = Sign { text: "</｜DSML｜invoke", control_at: 2 };
const PARAMETER: Sign = Sign { text: "<｜DSML｜parameter", control_at: 1 };
/// Without its `<`, so that a value that is cut short is not read on to the end of the next.
const END_PARAMETER: Sign = Sign { text: "/｜DSML｜parameter", control_at: 1 };

struct Reader<'a> {
    text: &'a MarkedText,
    starts: HashSet<usize>,
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text.text()[self.at..]
    }

    /// Goes behind the first of `signs`; what stood before it, and which it was.
    fn read_until(&mut self, signs: &[Sign]) -> Option<(std::ops::Range<usize>, Sign)> {
        let place = |sign: &Sign| {
            let mut places = self.rest().match_indices(sign.text).map(|(place, _)| self.at + place);
            places.find(|place| self.starts.contains(&(place + sign.control_at)))
        };
        let (end, sign) = signs.iter().filter_map(|sign| Some((place(sign)?, *sign))).min_by_key(|(end, _)| *end)?;
        let before = self.at..end;
        self.at = end + sign.text.len();
        Some((before, sign))
    }

    fn refuse_control(&self, within: std::ops::Range<usize>, place: &'static str) -> Result<(), CompletionError> {
        let stray = self.text.marks().iter().find(|mark| within.contains(&mark.start));
        stray.map_or(Ok(()), |mark| {
            Err(CompletionError::StrayControl { place, token: self.text.text()[mark.clone()].into() })
        })
    }

    /// The calls, from behind `<｜DSML｜tool_calls` to behind `</｜DSML｜tool_calls>`.
    fn read_calls(&mut self) -> Result<Vec<ToolCall>, CompletionError> {
        let mut calls = Vec::new();
        loop {
            let call = calls.len() + 1;
            let wrong =
                |found: &str, expected| Err(CompletionError::ToolCall { call, found: start_of(found), expected });
            let rest = self.rest();
            let Some((between, sign)) = self.read_until(&[CALL, END_CALLS]) else {
                return wrong(rest, "`<｜DSML｜invoke` or `</｜DSML｜tool_calls>`");
            };
            if &self.text.text()[between.clone()] != ">\n" {
                return wrong(&self.text.text()[between], "`>` and a new line before the next call or the end");
            }
            if sign == CALL {
                calls.push(self.read_call(call)?);
            } else if calls.is_empty() {
                return wrong(sign.text, "at least one call between the tags");
            } else {
                return Ok(calls);
            }
        }
    }

    /// One call, from behind `<｜DSML｜invoke` to behind `</｜DSML｜invoke`.
    fn read_call(&mut self, call: usize) -> Result<ToolCall, CompletionError> {
        let text = self.text.text();
        let wrong = |found: &str, expected| CompletionError::ToolCall { call, found: start_of(found), expected };
        let unclosed = "`<｜DSML｜parameter` or `</｜DSML｜invoke`";
        let rest = self.rest();
        let (header, mut sign) = self.read_until(&[PARAMETER, END_CALL]).ok_or_else(|| wrong(rest, unclosed))?;
        let header = &text[header];
        // Without parameters the reference writes an empty line between the tags.
        let name = header
            .trim_ascii_start()
            .strip_prefix("name=\"")
            .and_then(|named| named.strip_suffix("\">\n").or_else(|| named.strip_suffix("\">\n\n")));
        let name = name.ok_or_else(|| wrong(header, "` name=\"...\">` and a new line"))?;
        let mut arguments: Vec<(String, String)> = Vec::new();
        while sign == PARAMETER {
            let rest = self.rest();
            let ended = self.read_until(&[END_PARAMETER]);
            let (parameter, _) = ended.ok_or_else(|| wrong(rest, "`</｜DSML｜parameter>` after the value"))?;
            let parameter = &text[parameter];
            let (name, value) = parameter
                .strip_suffix('<')
                .and_then(read_parameter)
                .ok_or_else(|| wrong(parameter, "` name=\"...\" string=\"true|false\">` and a value"))?;
            let value = value.ok_or_else(|| wrong(parameter, "JSON as the value, since it says string=\"false\""))?;
            let key = quoted(name);
            if arguments.iter().any(|(other, _)| *other == key) {
                return Err(CompletionError::RepeatedParameter { call, name: name.into() });
            }
            arguments.push((key, value));
            let rest = self.rest();
            let (between, next) = self.read_until(&[PARAMETER, END_CALL]).ok_or_else(|| wrong(rest, unclosed))?;
            if &text[between.clone()] != ">\n" {
                return Err(wrong(&text[between], "`>` and a new line after the parameter"));
            }
            sign = next;
        }
        let members: Vec<String> = arguments.iter().map(|(key, value)| format!("{key}: {value}")).collect();
        Ok(ToolCall { id: String::new(), name: name.into(), arguments: format!("{{{}}}", members.join(", ")) })
    }
}

/// The name and the JSON of ` name="n" string="s">value`; the value is `None` if it says to be JSON and is none.
fn read_parameter(text: &str) -> Option<(&str, Option<String>)> {
    let named = text.strip_prefix(" name=\"")?;
    let split = |flag: &str| named.find(flag).map(|at| (at, &named[..at], &named[at + flag.len()..]));
    let as_text = split("\" string=\"true\">");
    let as_json = split("\" string=\"false\">");
    match (as_text, as_json) {
        (Some((at, name, value)), json) if json.is_none_or(|(other, ..)| at < other) => {
            Some((name, Some(quoted(value))))
        }
        (_, Some((_, name, value))) => {
            Some((name, serde_json::from_str::<serde_json::Value>(value).is_ok().then(|| value.to_owned())))
        }
        _ => None,
    }
}

/// The first letters of `text`, for a sentence.
fn start_of(text: &str) -> String {
    let mut start: String = text.chars().take(40).collect();
    if start.len() < text.len() {
        start.push('…');
    }
    start
}
