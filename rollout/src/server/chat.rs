//! `POST /v1/chat/completions`: conversations in V4's form, with reasoning and tool calls read back.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::call::Call;
use super::error::ApiError;
use super::openai::{Body, StreamOptions, finish_reason, spell, text_of, text_tokens, usage};
use super::stream::{Teller, stream};
use super::{App, JsonBody};
use crate::chat::{
    ChatOptions, Completion as Parts, Effort, Message, ThinkingMode, Tool, ToolCall, parse_marked_completion, render,
};
use crate::engine::{Completion, Event, Finish, Partial, Request};

/// What of a request its answer needs.
struct Form {
    id: String,
    model: String,
    created: u64,
    mode: ThinkingMode,
    prompt_len: usize,
    logprobs: bool,
}

impl Form {
    fn whole(&self, object: &str, choices: &[Value], usage: &Value) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": choices, "usage": usage,
        })
    }
}

pub(super) async fn answer(
    State(app): State<Arc<App>>,
    JsonBody(mut body): JsonBody<Body>,
) -> Result<Response, ApiError> {
    body.check_model(&app)?;
    let wants_form = body.response_format.as_ref().is_some_and(|format| format["type"] != "text");
    body.refuse(
        "/v1/chat/completions",
        &[
            ("prompt", body.prompt.is_some()),
            ("best_of", body.best_of.is_some()),
            ("echo", body.echo.is_some()),
            ("suffix", body.suffix.is_some()),
            ("response_format", wants_form),
            ("separate_reasoning", body.separate_reasoning == Some(false)),
        ],
    )?;
    let is_wanted = match &body.logprobs {
        None | Some(Value::Null) => false,
        Some(Value::Bool(wanted)) => *wanted,
        Some(other) => return Err(ApiError::field("logprobs", other, "true or false")),
    };
    if body.top_logprobs.is_some_and(|n| n > 0) && !is_wanted {
        return Err(ApiError::field("top_logprobs", "given without `logprobs`", "`logprobs` to be true with it"));
    }
    let options = options(&body)?;
    let Some(messages) = &body.messages else {
        return Err(ApiError::field("messages", "missing", "an array of messages"));
    };
    let messages = with_tools(Message::list_from_json(messages)?, body.tools.take(), body.tool_choice.as_ref())?;
    let tokens = tokio::task::block_in_place(|| -> Result<Vec<u32>, ApiError> {
        Ok(app.engine.tokenizer().encode_marked(&render(&messages, &options)?)?)
    })?;
    let rest = app.engine.max_sequence_len().saturating_sub(tokens.len()).max(1);
    let params = body.params(&app, rest, body.top_logprobs.unwrap_or(0))?;
    let num_samples = body.n.unwrap_or(1);
    let form = Form {
        id: format!("chatcmpl-{:016x}", app.fresh()),
        model: app.options.model_name.clone(),
        created: App::now(),
        mode: options.thinking_mode,
        prompt_len: tokens.len(),
        logprobs: is_wanted,
    };
    let request = Request {
        prompt_tokens: tokens.into(),
        params: Arc::new(params),
        num_samples,
        first_rollout_id: 0,
        resumed: None,
        stream: body.stream,
        prompt_logprobs_from: None,
    };
    let mut call = Call::start(&app, body.rid.take(), vec![request]).await?;
    if body.stream {
        let states = (0..num_samples).map(|_| Spoken::new(options.thinking_mode)).collect();
        let teller = Telling { form, options: body.stream_options.unwrap_or_default(), states };
        let first =
            (0..num_samples).map(|index| teller.chunk(index, json!({"role": "assistant", "content": ""}), None, None));
        let first = first.collect();
        return Ok(stream(call, first, teller));
    }
    let done = call.finish().await?;
    let (mut choices, mut said, mut cached) = (Vec::new(), 0, 0);
    for completion in done.iter().flatten() {
        let parts = read(&app, completion, form.mode)?;
        let reason = reason(&completion.finish, &parts.tool_calls);
        let logprobs = form.logprobs.then(|| logprobs(&app, &completion.said, text_tokens(completion).len()));
        let mut message = json!({"role": "assistant", "content": parts.content, "reasoning_content": parts.reasoning});
        if !parts.tool_calls.is_empty() {
            message["tool_calls"] = json!(parts.tool_calls);
        }
        choices.push(json!({
            "index": completion.index, "message": message, "logprobs": logprobs, "finish_reason": reason,
        }));
        said += completion.said.tokens.len();
        cached = completion.num_cached_tokens;
    }
    let usage = usage(form.prompt_len, said, cached);
    Ok(Json(form.whole("chat.completion", &choices, &usage)).into_response())
}

/// How the conversation is written. Reasoning is off unless the client wants it, as with the other servers of V4.
fn options(body: &Body) -> Result<ChatOptions, ApiError> {
    let template = body.chat_template_kwargs.clone().unwrap_or_default();
    let named = template.reasoning_effort.as_ref().or(body.reasoning_effort.as_ref());
    let effort = match named.map(String::as_str) {
        None | Some("none" | "minimal" | "low" | "medium") => None,
        Some(name) => match Effort::deserialize(json!(name)) {
            Ok(effort) => Some(effort),
            Err(_) => {
                let expected = "none, minimal, low, medium, high or max";
                return Err(ApiError::field("reasoning_effort", format_args!("{name:?}"), expected));
            }
        },
    };
    let asked = template.thinking.or(template.enable_thinking);
    let is_thinking = asked.unwrap_or(named.is_some_and(|name| name != "none"));
    Ok(ChatOptions {
        thinking_mode: if is_thinking { ThinkingMode::Thinking } else { ThinkingMode::Chat },
        reasoning_effort: effort,
        drop_thinking: template.drop_thinking.unwrap_or(true),
        ..ChatOptions::default()
    })
}

/// Puts the tools of a request where V4 reads them: into its system message.
fn with_tools(
    mut messages: Vec<Message>,
    tools: Option<Vec<Tool>>,
    choice: Option<&Value>,
) -> Result<Vec<Message>, ApiError> {
    let new = match choice {
        None => tools.unwrap_or_default(),
        Some(Value::String(word)) if word == "auto" => tools.unwrap_or_default(),
        // Tools that must not be called are not shown.
        Some(Value::String(word)) if word == "none" => Vec::new(),
        Some(other) => return Err(ApiError::field("tool_choice", other, "\"auto\" or \"none\"")),
    };
    if new.is_empty() {
        return Ok(messages);
    }
    match messages.first_mut() {
        Some(Message::System { tools, .. }) => tools.extend(new),
        _ => messages.insert(0, Message::system_with_tools("", new)),
    }
    Ok(messages)
}

/// A response in its parts; one that was cut, or is not in V4's form, is told as the text it is.
fn read(app: &App, completion: &Completion, mode: ThinkingMode) -> Result<Parts, ApiError> {
    let tokenizer = app.engine.tokenizer();
    // Where a stop text cut the response its tokens go on beyond it.
    if !matches!(completion.finish, Finish::StopText(_))
        && let Ok(marked) = tokenizer.decode_marked(&completion.said.tokens)
        && let Ok(mut parts) = parse_marked_completion(&marked, mode)
    {
        for call in &mut parts.tool_calls {
            call.id = format!("call_{:016x}", app.fresh());
        }
        return Ok(parts);
    }
    let text = text_of(app, completion)?;
    let (reasoning, content) = match (mode, text.split_once("</think>")) {
        (ThinkingMode::Chat, _) => (None, text),
        (ThinkingMode::Thinking, Some((reasoning, content))) => (Some(reasoning.to_owned()), content.to_owned()),
        (ThinkingMode::Thinking, None) => (Some(text), String::new()),
    };
    Ok(Parts { reasoning, content, tool_calls: Vec::new() })
}

fn reason(finish: &Finish, calls: &[ToolCall]) -> &'static str {
    match finish {
        Finish::StopToken(_) if !calls.is_empty() => "tool_calls",
        _ => finish_reason(finish),
    }
}

/// The first `n` tokens with their log-probabilities under the model itself.
fn logprobs(app: &App, said: &Partial, n: usize) -> Value {
    let one = |token: u32, logprob: f32| {
        let (text, bytes) = spell(app, token);
        json!({"token": text, "logprob": logprob, "bytes": bytes})
    };
    let content = (0..n).map(|i| {
        let mut told = one(said.tokens[i], said.base_logprobs[i]);
        let tops = said.top_logprobs[i].iter().map(|&(token, logprob)| one(token, logprob));
        told["top_logprobs"] = tops.collect();
        told
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}

/// How V4 begins its tool calls.
const CALLS: &str = "\n\n<｜DSML｜tool_calls";
const END_THINK: &str = "</think>";

/// What part of a response its text is, while it comes.
struct Spoken {
    is_reasoning: bool,
    /// What may be the beginning of a sign that ends the part.
    held: String,
    is_calling: bool,
    num_tokens: usize,
    num_cached: usize,
}

impl Spoken {
    fn new(mode: ThinkingMode) -> Self {
        let is_reasoning = mode == ThinkingMode::Thinking;
        Self { is_reasoning, held: String::new(), is_calling: false, num_tokens: 0, num_cached: 0 }
    }

    /// Takes the next text; what is certain of the reasoning and of the answer.
    fn push(&mut self, text: &str) -> (String, String) {
        self.held.push_str(text);
        let (mut reasoning, mut content) = (String::new(), String::new());
        if self.is_reasoning {
            reasoning = self.take_until(END_THINK);
            if !self.held.starts_with(END_THINK) {
                return (reasoning, content);
            }
            self.held.drain(..END_THINK.len());
            self.is_reasoning = false;
        }
        if !self.is_calling {
            content = self.take_until(CALLS);
            self.is_calling = self.held.starts_with(CALLS);
        }
        (reasoning, content)
    }

    /// Takes what stands before `sign`, or before what may become it.
    fn take_until(&mut self, sign: &str) -> String {
        let begins = |at: &usize| sign.starts_with(&self.held[*at..]);
        let borders = self.held.char_indices().map(|(at, _)| at);
        let end = self.held.find(sign).or_else(|| borders.into_iter().find(begins)).unwrap_or(self.held.len());
        self.held.drain(..end).collect()
    }

    /// Nothing follows: what was held back is what it seems.
    fn finish(&mut self) -> (String, String) {
        let rest = if self.is_calling { String::new() } else { std::mem::take(&mut self.held) };
        if self.is_reasoning { (rest, String::new()) } else { (String::new(), rest) }
    }
}

struct Telling {
    form: Form,
    options: StreamOptions,
    states: Vec<Spoken>,
}

impl Telling {
    fn usage(&self) -> Value {
        let said = self.states.iter().map(|state| state.num_tokens).sum();
        usage(self.form.prompt_len, said, self.states.first().map_or(0, |state| state.num_cached))
    }

    fn chunk(&self, index: usize, delta: Value, logprobs: Option<Value>, reason: Option<&str>) -> Value {
        let choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason});
        let usage = if self.options.continuous_usage_stats { self.usage() } else { Value::Null };
        self.form.whole("chat.completion.chunk", &[choice], &usage)
    }

    fn delta(&self, (reasoning, content): (String, String)) -> Value {
        let mut delta = serde_json::Map::new();
        if !reasoning.is_empty() {
            delta.insert("reasoning_content".into(), reasoning.into());
        }
        if !content.is_empty() {
            delta.insert("content".into(), content.into());
        }
        Value::Object(delta)
    }
}

impl Teller for Telling {
    fn tell(&mut self, call: &Call, _: usize, event: Event) -> Result<Vec<Value>, ApiError> {
        let app = &*call.app;
        match event {
            Event::Token { index, token, base_logprob, top_logprobs, text, .. } => {
                let state = &mut self.states[index];
                state.num_tokens += 1;
                let said = state.push(&text);
                let partial = Partial {
                    tokens: vec![token],
                    base_logprobs: vec![base_logprob],
                    top_logprobs: vec![top_logprobs],
                    ..Partial::default()
                };
                let logprobs = self.form.logprobs.then(|| logprobs(app, &partial, 1));
                if said.0.is_empty() && said.1.is_empty() && logprobs.is_none() {
                    return Ok(Vec::new());
                }
                Ok(vec![self.chunk(index, self.delta(said), logprobs, None)])
            }
            Event::Finished { text, completion } => {
                let index = completion.index;
                let state = &mut self.states[index];
                state.num_cached = completion.num_cached_tokens;
                let mut said = state.push(&text);
                let is_calling = state.is_calling;
                let parts = if is_calling { read(app, &completion, self.form.mode)? } else { Parts::default() };
                if is_calling && parts.tool_calls.is_empty() {
                    // They are in no form that could be called: they are told as the text they are.
                    self.states[index].is_calling = false;
                }
                let rest = self.states[index].finish();
                said.0.push_str(&rest.0);
                said.1.push_str(&rest.1);
                let mut chunks = Vec::new();
                if !(said.0.is_empty() && said.1.is_empty()) {
                    chunks.push(self.chunk(index, self.delta(said), None, None));
                }
                if !parts.tool_calls.is_empty() {
                    let numbered = parts.tool_calls.iter().enumerate().map(|(at, call)| {
                        let mut call = json!(call);
                        call["index"] = at.into();
                        call
                    });
                    let delta = json!({"tool_calls": numbered.collect::<Vec<_>>()});
                    chunks.push(self.chunk(index, delta, None, None));
                }
                let reason = reason(&completion.finish, &parts.tool_calls);
                chunks.push(self.chunk(index, json!({}), None, Some(reason)));
                Ok(chunks)
            }
            Event::Taken | Event::PromptScored(_) | Event::Refused(_) => Ok(Vec::new()),
        }
    }

    fn end(&mut self) -> Vec<Value> {
        if self.options.include_usage {
            vec![self.form.whole("chat.completion.chunk", &[], &self.usage())]
        } else {
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes out when a response comes in pieces: reasoning, answer, and whether calls began.
    fn spoken(mode: ThinkingMode, pieces: &[&str]) -> (String, String, bool) {
        let mut spoken = Spoken::new(mode);
        let (mut reasoning, mut content) = (String::new(), String::new());
        let mut add = |(r, c): (String, String)| {
            reasoning.push_str(&r);
            content.push_str(&c);
        };
        pieces.iter().for_each(|piece| add(spoken.push(piece)));
        add(spoken.finish());
        (reasoning, content, spoken.is_calling)
    }

    #[test]
    fn reasoning_answer_and_calls_are_told_apart_as_they_come() {
        let text = "so\n\n</think>is < it\n\n<｜DSML｜tool_calls>\n<x";
        let want = ("so\n\n".to_owned(), "is < it".to_owned(), true);
        assert_eq!(spoken(ThinkingMode::Thinking, &[text]), want);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(spoken(ThinkingMode::Thinking, &letters), want);
        for at in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
            assert_eq!(spoken(ThinkingMode::Thinking, &[&text[..at], &text[at..]]), want, "cut at {at}");
        }
    }

    #[test]
    fn what_only_looks_like_a_sign_is_text() {
        let chat = |pieces: &[&str]| spoken(ThinkingMode::Chat, pieces);
        assert_eq!(chat(&["a\n", "\n", "<", "｜DSML｜tool"]), (String::new(), "a\n\n<｜DSML｜tool".into(), false));
        assert_eq!(chat(&["</think>", "b"]), (String::new(), "</think>b".into(), false));
        assert_eq!(spoken(ThinkingMode::Thinking, &["a</thin"]), ("a</thin".into(), String::new(), false));
    }
}
