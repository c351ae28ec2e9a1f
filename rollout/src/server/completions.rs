//! `POST /v1/completions`: prompts as they are, without a chat's form.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::call::Call;
use super::error::ApiError;
use super::openai::{Body, Prompts, StreamOptions, finish_reason, spell, text_of, text_tokens, usage};
use super::stream::{Teller, stream};
use super::{App, JsonBody};
use crate::engine::{Completion, Event, Partial, PromptScores, Request};
use crate::tokenizer::TokenizerError;

/// OpenAI's default.
const MAX_TOKENS: usize = 16;

/// What of a request its answer needs.
struct Form {
    id: String,
    model: String,
    created: u64,
    num_samples: usize,
    /// What stands before each answer.
    echoes: Vec<String>,
    prompts: Vec<Arc<[u32]>>,
    logprobs: bool,
}

impl Form {
    fn whole(&self, choices: &[Value], usage: &Value) -> Value {
        json!({
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": usage,
        })
    }

    fn num_prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|tokens| tokens.len()).sum()
    }
}

pub(super) async fn answer(
    State(app): State<Arc<App>>,
    JsonBody(mut body): JsonBody<Body>,
) -> Result<Response, ApiError> {
    body.check_model(&app)?;
    let is_best_of = body.best_of.is_some_and(|best_of| best_of != body.n.unwrap_or(1));
    body.refuse(
        "/v1/completions",
        &[
            ("messages", body.messages.is_some()),
            ("tools", body.tools.is_some()),
            ("tool_choice", body.tool_choice.is_some()),
            ("response_format", body.response_format.is_some()),
            ("reasoning_effort", body.reasoning_effort.is_some()),
            ("chat_template_kwargs", body.chat_template_kwargs.is_some()),
            ("separate_reasoning", body.separate_reasoning.is_some()),
            ("max_completion_tokens", body.max_completion_tokens.is_some()),
            ("top_logprobs", body.top_logprobs.is_some()),
            ("suffix", body.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty())),
            ("best_of", is_best_of),
        ],
    )?;
    let top = match &body.logprobs {
        None | Some(Value::Null) => None,
        Some(value) => match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) => Some(n),
            None => return Err(ApiError::field("logprobs", value, "a number of tokens")),
        },
    };
    let params = Arc::new(body.params(&app, MAX_TOKENS, top.unwrap_or(0))?);
    let num_samples = body.n.unwrap_or(1);
    let Some(prompts) = body.prompt.take() else { return Err(ApiError::field("prompt", "missing", "text or tokens")) };
    let prompts = tokio::task::block_in_place(|| read_prompts(&app, prompts))?;
    let is_echo = body.echo.unwrap_or(false);
    let prompts: Vec<Arc<[u32]>> = prompts.into_iter().map(Into::into).collect();
    let echo = |tokens: &Arc<[u32]>| if is_echo { app.engine.tokenizer().decode(tokens) } else { Ok(String::new()) };
    let form = Form {
        id: format!("cmpl-{:016x}", app.fresh()),
        model: app.options.model_name.clone(),
        created: App::now(),
        num_samples,
        echoes: prompts.iter().map(echo).collect::<Result<_, _>>()?,
        prompts: prompts.clone(),
        logprobs: top.is_some(),
    };
    let requests = prompts
        .into_iter()
        .map(|tokens| Request {
            prompt_tokens: tokens,
            params: params.clone(),
            num_samples,
            first_rollout_id: 0,
            resumed: None,
            stream: body.stream,
            prompt_logprobs_from: (is_echo && top.is_some()).then_some(0),
        })
        .collect();
    let mut call = Call::start(&app, body.rid.take(), requests).await?;
    if body.stream {
        let options = body.stream_options.unwrap_or_default();
        let num_choices = num_samples * form.prompts.len();
        let teller = Telling { form, options, states: vec![Told::default(); num_choices] };
        return Ok(stream(call, Vec::new(), teller));
    }
    let done = call.finish().await?;
    let mut choices = Vec::new();
    let (mut said, mut cached) = (0, 0);
    for (at, completion) in done.iter().enumerate().flat_map(|(at, of)| of.iter().map(move |one| (at, one))) {
        let echo = &form.echoes[at];
        let scores = call.scores[at].as_ref().map(|scores| (&*form.prompts[at], scores));
        let num_said = text_tokens(completion).len();
        let logprobs = form.logprobs.then(|| logprobs(&app, scores, &completion.said, num_said, 0));
        choices.push(json!({
            "index": choices.len(),
            "text": format!("{echo}{}", text_of(&app, completion)?),
            "logprobs": logprobs,
            "finish_reason": finish_reason(&completion.finish),
        }));
        said += completion.said.tokens.len();
        cached += if completion.index == 0 { completion.num_cached_tokens } else { 0 };
    }
    let usage = usage(form.num_prompt_tokens(), said, cached);
    Ok(Json(form.whole(&choices, &usage)).into_response())
}

/// Prompts as tokens.
///
/// # Errors
/// When the tokenizer fails.
pub(super) fn read_prompts(app: &App, prompts: Prompts) -> Result<Vec<Vec<u32>>, TokenizerError> {
    let encode = |text: String| app.engine.tokenizer().encode(&text);
    match prompts {
        Prompts::Text(text) => Ok(vec![encode(text)?]),
        Prompts::Texts(texts) => texts.into_iter().map(encode).collect(),
        Prompts::Tokens(tokens) => Ok(vec![tokens]),
        Prompts::ManyTokens(prompts) => Ok(prompts),
    }
}

/// A prompt's tokens, if they are wanted, and the first `n` said ones with their log-probabilities under the model itself;
/// `offset` is where their text begins.
fn logprobs(app: &App, prompt: Option<(&[u32], &PromptScores)>, said: &Partial, n: usize, offset: usize) -> Value {
    let told = |logprob: f32, top: &[(u32, f32)]| {
        let top: Map<String, Value> = top.iter().map(|&(token, p)| (spell(app, token).0, p.into())).collect();
        (Value::from(logprob), Value::Object(top))
    };
    let mut all: Vec<(u32, (Value, Value))> = Vec::new();
    if let Some((tokens, scores)) = prompt {
        // Nothing stands before the first.
        let unscored = tokens[..scores.first].iter().map(|&token| (token, (Value::Null, Value::Null)));
        let scored = tokens[scores.first..].iter().zip(&scores.logprobs).zip(&scores.top_logprobs);
        all.extend(unscored.chain(scored.map(|((&token, &logprob), top)| (token, told(logprob, top)))));
    }
    let said_tokens = said.tokens[..n].iter().zip(&said.base_logprobs).zip(&said.top_logprobs);
    all.extend(said_tokens.map(|((&token, &logprob), top)| (token, told(logprob, top))));
    let (mut tokens, mut offsets, mut logprobs, mut tops) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut at = offset;
    for (token, (logprob, top)) in all {
        let (text, _) = spell(app, token);
        offsets.push(at);
        at += text.chars().count();
        tokens.push(text);
        logprobs.push(logprob);
        tops.push(top);
    }
    json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
}

/// What was told of a choice.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    num_tokens: usize,
    num_letters: usize,
    num_cached: usize,
}

struct Telling {
    form: Form,
    options: StreamOptions,
    states: Vec<Told>,
}

impl Telling {
    fn usage(&self) -> Value {
        let cached = self.states.iter().step_by(self.form.num_samples).map(|state| state.num_cached).sum();
        usage(self.form.num_prompt_tokens(), self.states.iter().map(|state| state.num_tokens).sum(), cached)
    }

    fn chunk(&self, choices: &[Value], with_usage: bool) -> Value {
        let usage = if with_usage { self.usage() } else { Value::Null };
        self.form.whole(choices, &usage)
    }
}

impl Teller for Telling {
    fn tell(&mut self, call: &Call, at: usize, event: Event) -> Result<Vec<Value>, ApiError> {
        let app = &*call.app;
        let choice = |index: usize| at * self.form.num_samples + index;
        let (index, text, said, finish) = match event {
            Event::Token { index, token, base_logprob, top_logprobs, text, .. } => {
                let said = Partial {
                    tokens: vec![token],
                    base_logprobs: vec![base_logprob],
                    top_logprobs: vec![top_logprobs],
                    ..Partial::default()
                };
                (choice(index), text, said, None)
            }
            Event::Finished { text, completion } => {
                let Completion { index, finish, num_cached_tokens, .. } = *completion;
                self.states[choice(index)].num_cached = num_cached_tokens;
                (choice(index), text, Partial::default(), Some(finish))
            }
            Event::Taken | Event::PromptScored(_) | Event::Refused(_) => return Ok(Vec::new()),
        };
        let state = &mut self.states[index];
        let is_first = state.num_tokens == 0 && state.num_letters == 0;
        let text = if is_first { format!("{}{text}", self.form.echoes[at]) } else { text };
        let scores = call.scores[at].as_ref().filter(|_| is_first).map(|scores| (&*self.form.prompts[at], scores));
        let offset = state.num_letters;
        state.num_letters += text.chars().count();
        state.num_tokens += said.tokens.len();
        let logprobs = self.form.logprobs.then(|| logprobs(app, scores, &said, said.tokens.len(), offset));
        let choice = json!({
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish.as_ref().map(finish_reason),
        });
        Ok(vec![self.chunk(&[choice], self.options.continuous_usage_stats)])
    }

    fn end(&mut self) -> Vec<Value> {
        if self.options.include_usage { vec![self.chunk(&[], true)] } else { Vec::new() }
    }
}
