//! A conversation as the prompt that V4 reads.
//!
//! Follows the reference in every sequence of messages, also where a sequence makes little sense: a system message
//! between turns is text without a mark, and an assistant message that no user message precedes has no header.

use std::collections::HashMap;

use serde_json::Value;

use super::control;
use super::json::{members, python_json};
use super::{ChatError, ChatOptions, Effort, EffortLevels, Message, Task, ThinkingMode, Tool, ToolCall};
use crate::tokenizer::MarkedText;

const ABSOLUTE_MAXIMUM: &str = "\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.

";

const BEYOND_MAXIMUM: &str = "\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.

";

/// `{dsml}`, `{think}` and `{end_think}` are the control tokens, `{schemas}` one schema a line.
const TOOLS: &str = r#"## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{dsml}tool_calls>" block like the following:

<{dsml}tool_calls>
<{dsml}invoke name="$TOOL_NAME">
<{dsml}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{dsml}parameter>
...
</{dsml}invoke>
<{dsml}invoke name="$TOOL_NAME2">
...
</{dsml}invoke>
</{dsml}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {think}), you MUST output your complete reasoning inside {think}...{end_think} BEFORE any tool calls or final response.

Otherwise, output directly after {end_think} with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"#;

const RESPONSE_FORMAT: &str = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

/// The prompt of a conversation: its text, with the template's control tokens marked.
///
/// It ends where the model is to go on: after `<think>` or `</think>` when a user message, a developer message or tool
/// results are last, after a task's token, after the last word of an unfinished assistant message. A finished assistant
/// message ends it with the end of sentence.
///
/// # Errors
/// When a message or the effort has no place in the template.
pub fn render(messages: &[Message], options: &ChatOptions) -> Result<MarkedText, ChatError> {
    let is_thinking = options.thinking_mode == ThinkingMode::Thinking;
    let drops = options.drop_thinking && !messages.iter().any(|message| !tools_of(message).is_empty());
    let mut turns = merge(messages)?;
    if is_thinking && drops {
        let last_user = last_user(&turns);
        let mut place = 0..;
        turns.retain(|turn| place.next() >= last_user || !matches!(turn.said, Said::Developer { .. }));
    }
    let last_user = last_user(&turns);
    let thinks = |place: usize| is_thinking && (!drops || Some(place) >= last_user);

    let mut out = MarkedText::default();
    out.push_control(control::BEGIN);
    if let Some(preamble) = preamble(options)?.filter(|_| is_thinking && !turns.is_empty()) {
        out.push_plain(preamble);
    }
    for (place, turn) in turns.iter().enumerate() {
        let previous_has_task = place > 0 && turns[place - 1].said.task().is_some();
        turn.said.write(&mut out, thinks(place) && !previous_has_task);
        let goes_on = turns.get(place + 1).is_some_and(|next| !next.said.follows_a_header());
        match turn.said.task() {
            Some(_) if goes_on => return Err(ChatError::LostTask { index: turn.index }),
            Some(task) => {
                if task == Task::Action {
                    out.push_control(control::ASSISTANT);
                    out.push_control(if is_thinking { control::THINK } else { control::END_THINK });
                }
                out.push_control(control::task(task));
            }
            None if turn.said.is_user() && !goes_on => {
                out.push_control(control::ASSISTANT);
                out.push_control(if thinks(place) { control::THINK } else { control::END_THINK });
            }
            None => {}
        }
    }
    Ok(out)
}

fn preamble(options: &ChatOptions) -> Result<Option<&'static str>, ChatError> {
    match (options.effort_levels, options.reasoning_effort) {
        (EffortLevels::April, Some(Effort::Low)) => Err(ChatError::Effort),
        (EffortLevels::April, None | Some(Effort::High)) | (EffortLevels::July, Some(Effort::Low)) => Ok(None),
        (EffortLevels::April, Some(Effort::Max)) | (EffortLevels::July, None | Some(Effort::High)) => {
            Ok(Some(ABSOLUTE_MAXIMUM))
        }
        (EffortLevels::July, Some(Effort::Max)) => Ok(Some(BEYOND_MAXIMUM)),
    }
}

/// A turn as the template sees it: tool results and the user's words are one.
struct Turn<'a> {
    /// The message that opened it.
    index: usize,
    said: Said<'a>,
}

enum Said<'a> {
    System { content: &'a str, tools: &'a [Tool], response_format: Option<&'a Value> },
    Developer { content: &'a str, tools: &'a [Tool], response_format: Option<&'a Value> },
    User { blocks: Vec<Block<'a>>, task: Option<Task> },
    Assistant { content: &'a str, reasoning: &'a str, calls: &'a [ToolCall], task: Option<Task>, unfinished: bool },
    LatestReminder { content: &'a str },
}

#[derive(Clone, Copy)]
enum Block<'a> {
    Text(&'a str),
    ToolResult { id: &'a str, content: &'a str },
}

/// Messages to turns; tool results in the order of the latest calls.
fn merge(messages: &[Message]) -> Result<Vec<Turn<'_>>, ChatError> {
    let mut turns: Vec<Turn<'_>> = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let previous = turns.last_mut().map(|turn| &mut turn.said);
        let said = match (message, previous) {
            (Message::Tool { tool_call_id, content }, previous) => {
                let block = Block::ToolResult { id: tool_call_id, content };
                if let Some(Said::User { blocks, .. }) = previous {
                    blocks.push(block);
                    continue;
                }
                Said::User { blocks: vec![block], task: None }
            }
            (Message::User { content, task }, Some(Said::User { blocks, task: None })) => {
                if task.is_some() {
                    return Err(ChatError::LostTask { index });
                }
                blocks.push(Block::Text(content));
                continue;
            }
            (Message::User { content, task }, _) => Said::User { blocks: vec![Block::Text(content)], task: *task },
            (Message::System { content, tools, response_format }, _) => {
                Said::System { content, tools, response_format: response_format.as_ref() }
            }
            (Message::Developer { content, .. }, _) if content.is_empty() => {
                return Err(ChatError::EmptyDeveloper { index });
            }
            (Message::Developer { content, tools, response_format }, _) => {
                Said::Developer { content, tools, response_format: response_format.as_ref() }
            }
            (Message::Assistant { content, reasoning_content, tool_calls, task, unfinished }, _) => Said::Assistant {
                content,
                reasoning: reasoning_content.as_deref().unwrap_or_default(),
                calls: tool_calls,
                task: *task,
                unfinished: *unfinished,
            },
            (Message::LatestReminder { content }, _) => Said::LatestReminder { content },
        };
        turns.push(Turn { index, said });
    }
    let mut order = HashMap::new();
    for turn in &mut turns {
        match &mut turn.said {
            Said::Assistant { calls, .. } if !calls.is_empty() => order = order_of(calls),
            Said::User { blocks, .. } => sort_tool_results(blocks, &order),
            _ => {}
        }
    }
    Ok(turns)
}

fn order_of(calls: &[ToolCall]) -> HashMap<&str, usize> {
    calls.iter().enumerate().filter(|(_, call)| !call.id.is_empty()).map(|(i, call)| (call.id.as_str(), i)).collect()
}

/// Puts the results into the order of the calls; the places between texts stay. A result of no call counts as the first.
fn sort_tool_results(blocks: &mut [Block<'_>], order: &HashMap<&str, usize>) {
    let is_result = |block: &Block<'_>| matches!(block, Block::ToolResult { .. });
    let mut results: Vec<Block<'_>> = blocks.iter().copied().filter(is_result).collect();
    results.sort_by_key(|block| match block {
        Block::ToolResult { id, .. } => order.get(id).copied().unwrap_or(0),
        Block::Text(_) => 0,
    });
    for (place, result) in blocks.iter_mut().filter(|block| is_result(block)).zip(results) {
        *place = result;
    }
}

fn tools_of(message: &Message) -> &[Tool] {
    match message {
        Message::System { tools, .. } | Message::Developer { tools, .. } => tools,
        _ => &[],
    }
}

fn last_user(turns: &[Turn<'_>]) -> Option<usize> {
    turns.iter().rposition(|turn| turn.said.is_user())
}

impl Said<'_> {
    fn is_user(&self) -> bool {
        matches!(self, Self::User { .. } | Self::Developer { .. })
    }

    /// Whether the turn before it ends with the header of the model's turn.
    fn follows_a_header(&self) -> bool {
        matches!(self, Self::Assistant { .. } | Self::LatestReminder { .. })
    }

    fn task(&self) -> Option<Task> {
        match self {
            Self::User { task, .. } | Self::Assistant { task, .. } => *task,
            _ => None,
        }
    }

    /// `thinks`: an assistant's reasoning is written.
    fn write(&self, out: &mut MarkedText, thinks: bool) {
        match self {
            Self::System { content, tools, response_format } => {
                out.push_plain(content);
                write_tools_and_format(out, tools, *response_format);
            }
            Self::Developer { content, tools, response_format } => {
                out.push_control(control::USER);
                out.push_plain(content);
                write_tools_and_format(out, tools, *response_format);
            }
            Self::User { blocks, .. } => {
                out.push_control(control::USER);
                for (i, block) in blocks.iter().enumerate() {
                    out.push_plain(if i == 0 { "" } else { "\n\n" });
                    match block {
                        Block::Text(text) => out.push_plain(text),
                        Block::ToolResult { content, .. } => {
                            out.push_plain("<tool_result>");
                            out.push_plain(content);
                            out.push_plain("</tool_result>");
                        }
                    }
                }
            }
            Self::Assistant { content, reasoning, calls, unfinished, .. } => {
                if thinks {
                    out.push_plain(reasoning);
                    out.push_control(control::END_THINK);
                }
                out.push_plain(content);
                write_calls(out, calls);
                if !unfinished {
                    out.push_control(control::END);
                }
            }
            Self::LatestReminder { content } => {
                out.push_control(control::LATEST_REMINDER);
                out.push_plain(content);
            }
        }
    }
}

fn write_tools_and_format(out: &mut MarkedText, tools: &[Tool], response_format: Option<&Value>) {
    if !tools.is_empty() {
        let schemas: Vec<String> = tools.iter().map(|tool| json_of(&tool.function())).collect();
        out.push_plain("\n\n");
        fill(out, TOOLS, &[("{schemas}", &schemas.join("\n"))]);
    }
    // As in the reference, an empty schema asks for nothing.
    let asks = |format: &&Value| !matches!(format, Value::Null) && format.as_object().is_none_or(|o| !o.is_empty());
    if let Some(format) = response_format.filter(asks) {
        out.push_plain("\n\n");
        out.push_plain(RESPONSE_FORMAT);
        out.push_plain(&json_of(format));
    }
}

fn write_calls(out: &mut MarkedText, calls: &[ToolCall]) {
    if calls.is_empty() {
        return;
    }
    fill(out, "\n\n<{dsml}tool_calls>\n", &[]);
    for call in calls {
        fill(out, "<{dsml}invoke name=\"{name}\">\n", &[("{name}", &call.name)]);
        let as_one = || vec![("arguments".to_owned(), "true", call.arguments.clone())];
        for (i, (name, is_string, value)) in arguments_of(call).unwrap_or_else(as_one).into_iter().enumerate() {
            out.push_plain(if i == 0 { "" } else { "\n" });
            let slots = [("{name}", name.as_str()), ("{is_string}", is_string), ("{value}", &value)];
            fill(out, r#"<{dsml}parameter name="{name}" string="{is_string}">{value}</{dsml}parameter>"#, &slots);
        }
        fill(out, "\n</{dsml}invoke>\n", &[]);
    }
    fill(out, "</{dsml}tool_calls>", &[]);
}

/// Name, whether it is a string, and text of each argument; `None` if they are no JSON object.
fn arguments_of(call: &ToolCall) -> Option<Vec<(String, &'static str, String)>> {
    let argument = |(name, value): (String, &str)| match serde_json::from_str::<String>(value) {
        Ok(text) => Some((name, "true", text)),
        Err(_) => python_json(value).map(|json| (name, "false", json)),
    };
    members(&call.arguments)?.into_iter().map(argument).collect()
}

fn json_of(value: &impl serde::Serialize) -> String {
    let text = serde_json::to_string(value).expect("a JSON value is JSON");
    // Deeper than serde_json reads, a value made in memory keeps serde_json's form.
    python_json(&text).unwrap_or(text)
}

/// Writes `template`: `{dsml}`, `{think}` and `{end_think}` as control tokens, the given slots as plain text.
fn fill(out: &mut MarkedText, template: &str, slots: &[(&str, &str)]) {
    let mut rest = template;
    while let Some(start) = rest.find('{') {
        out.push_plain(&rest[..start]);
        let end = start + rest[start..].find('}').expect("a slot of a template of ours is closed") + 1;
        match &rest[start..end] {
            "{dsml}" => out.push_control(control::DSML),
            "{think}" => out.push_control(control::THINK),
            "{end_think}" => out.push_control(control::END_THINK),
            slot => {
                let (_, text) = slots.iter().find(|(name, _)| *name == slot).expect("every slot is given");
                out.push_plain(text);
            }
        }
        rest = &rest[end..];
    }
    out.push_plain(rest);
}
