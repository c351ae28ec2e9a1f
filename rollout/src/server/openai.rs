//! What completions and chat of OpenAI's API share: their body, sampling, and how tokens are told.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use crate::chat::Tool;
use crate::engine::{Completion, Finish};
use crate::sampler::SamplingParams;

/// One stop text, or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
pub(super) enum Stop {
    One(String),
    Many(Vec<String>),
}

impl Stop {
    pub(super) fn texts(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// Clients in Python send `null` for what they leave out.
pub(super) fn null_as_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// A prompt: text or tokens, one or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, an array of strings, an array of tokens, or an array of such arrays")]
pub(super) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    ManyTokens(Vec<Vec<u32>>),
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StreamOptions {
    #[serde(default, deserialize_with = "null_as_default")]
    pub(super) include_usage: bool,
    #[serde(default, deserialize_with = "null_as_default")]
    pub(super) continuous_usage_stats: bool,
}

/// The fields of both endpoints; each refuses those that are the other's.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Body {
    pub(super) model: Option<String>,
    pub(super) prompt: Option<Prompts>,
    pub(super) messages: Option<Value>,
    pub(super) tools: Option<Vec<Tool>>,
    pub(super) tool_choice: Option<Value>,
    pub(super) response_format: Option<Value>,
    pub(super) reasoning_effort: Option<String>,
    pub(super) chat_template_kwargs: Option<TemplateArguments>,
    pub(super) separate_reasoning: Option<bool>,
    pub(super) max_tokens: Option<usize>,
    pub(super) max_completion_tokens: Option<usize>,
    pub(super) n: Option<usize>,
    pub(super) best_of: Option<usize>,
    pub(super) echo: Option<bool>,
    pub(super) suffix: Option<String>,
    pub(super) logprobs: Option<Value>,
    pub(super) top_logprobs: Option<usize>,
    #[serde(default, deserialize_with = "null_as_default")]
    pub(super) stream: bool,
    pub(super) stream_options: Option<StreamOptions>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<HashMap<String, f32>>,
    seed: Option<i64>,
    stop: Option<Stop>,
    stop_token_ids: Option<Vec<u32>>,
    min_tokens: Option<usize>,
    #[serde(default, deserialize_with = "null_as_default")]
    ignore_eos: bool,
    pub(super) rid: Option<String>,
    // What says nothing about the answer.
    #[serde(rename = "user")]
    _user: Option<IgnoredAny>,
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
    #[serde(rename = "store")]
    _store: Option<IgnoredAny>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<IgnoredAny>,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Option<IgnoredAny>,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Option<IgnoredAny>,
    #[serde(rename = "parallel_tool_calls")]
    _parallel_tool_calls: Option<IgnoredAny>,
}

/// What vLLM and SGLang pass to a chat template.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TemplateArguments {
    pub(super) thinking: Option<bool>,
    pub(super) enable_thinking: Option<bool>,
    pub(super) reasoning_effort: Option<String>,
    pub(super) drop_thinking: Option<bool>,
}

impl Body {
    /// # Errors
    /// When the client means another model.
    pub(super) fn check_model(&self, app: &App) -> Result<(), ApiError> {
        let ours = &app.options.model_name;
        match &self.model {
            Some(name) if name != ours && name != "default" => {
                let message = format!("there is no model {name:?} here, expected {ours:?}, which GET /v1/models lists");
                Err(ApiError { param: Some("model".into()), ..ApiError::new(StatusCode::NOT_FOUND, message) })
            }
            _ => Ok(()),
        }
    }

    /// # Errors
    /// When a field is given that this endpoint does not have.
    pub(super) fn refuse(&self, endpoint: &str, fields: &[(&str, bool)]) -> Result<(), ApiError> {
        match fields.iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((name, _)) => {
                let message = format!("`{name}` is no field of {endpoint} here; leave it out");
                Err(ApiError { param: Some((*name).into()), ..ApiError::bad(message) })
            }
        }
    }

    /// How tokens are drawn; `max_tokens` where the client says nothing of it.
    ///
    /// # Errors
    /// When a parameter makes no sense.
    pub(super) fn params(&mut self, app: &App, max_tokens: usize, top: usize) -> Result<SamplingParams, ApiError> {
        let params = SamplingParams {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: top_k(self.top_k)?,
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            logit_bias: logit_bias(self.logit_bias.take())?,
            seed: self.seed.map_or_else(|| app.fresh(), i64::cast_unsigned),
            min_tokens: self.min_tokens.unwrap_or(0),
            max_tokens: self.max_completion_tokens.or(self.max_tokens).unwrap_or(max_tokens),
            stop_token_ids: self.stop_token_ids.take().unwrap_or_default(),
            stop: self.stop.take().map(Stop::texts).unwrap_or_default(),
            ignore_eos: self.ignore_eos,
            top_logprobs: top,
        };
        params.check(app.engine.config().vocab_size)?;
        Ok(params)
    }
}

/// -1, as 0 and nothing, is all tokens.
///
/// # Errors
/// When it is another negative number.
pub(super) fn top_k(k: Option<i64>) -> Result<Option<usize>, ApiError> {
    match k {
        None | Some(-1 | 0) => Ok(None),
        Some(k) => usize::try_from(k).map(Some).map_err(|_| ApiError::field("top_k", k, "-1 or a number of tokens")),
    }
}

/// In the order of the tokens, whatever the order of the keys.
///
/// # Errors
/// When a key is no token.
pub(super) fn logit_bias(bias: Option<HashMap<String, f32>>) -> Result<Vec<(u32, f32)>, ApiError> {
    let read = |(key, bias): (String, f32)| match key.parse() {
        Ok(token) => Ok((token, bias)),
        Err(_) => Err(ApiError::field("logit_bias", format_args!("for {key:?}"), "tokens as keys")),
    };
    let mut read: Vec<(u32, f32)> = bias.unwrap_or_default().into_iter().map(read).collect::<Result<_, _>>()?;
    read.sort_unstable_by_key(|(token, _)| *token);
    Ok(read)
}

/// OpenAI's word for why a response ended.
pub(super) fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::StopToken(_) | Finish::StopText(_) => "stop",
        Finish::Length => "length",
        Finish::Aborted | Finish::NotFinite(_) => "abort",
    }
}

/// The tokens that are its text: not the one that ended it.
pub(super) fn text_tokens(completion: &Completion) -> &[u32] {
    let tokens = &completion.said.tokens;
    match completion.finish {
        Finish::StopToken(_) => &tokens[..tokens.len() - 1],
        _ => tokens,
    }
}

/// Its text.
///
/// # Errors
/// When the tokenizer fails.
pub(super) fn text_of(app: &App, completion: &Completion) -> Result<String, ApiError> {
    match &completion.text {
        Some(text) => Ok(text.clone()),
        None => Ok(app.engine.tokenizer().decode(text_tokens(completion))?),
    }
}

/// A token as text, and as the bytes that it stands for.
pub(super) fn spell(app: &App, token: u32) -> (String, Vec<u8>) {
    let bytes = match app.engine.tokenizer().token_bytes(token) {
        Ok(bytes) => bytes,
        // A tokenizer of another kind knows only texts.
        Err(_) => app.engine.tokenizer().decode(&[token]).unwrap_or_default().into_bytes(),
    };
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

/// What was read and said, as OpenAI counts it.
pub(super) fn usage(prompt: usize, said: usize, cached: usize) -> Value {
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

fn describe(app: &App) -> Value {
    json!({
        "id": app.options.model_name,
        "object": "model",
        "created": app.started,
        "owned_by": "furlong",
        "root": app.options.model_dir,
        "max_model_len": app.engine.max_sequence_len(),
    })
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [describe(&app)]}))
}

pub(super) async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    Body { model: Some(name), ..Body::default() }.check_model(&app)?;
    Ok(Json(describe(&app)))
}
