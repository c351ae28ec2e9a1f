//! `POST /generate`: SGLang's native endpoint, with what a trainer wants to know of a rollout: log-probabilities under the
//! distribution that each token was drawn from, the weights that made it, its experts and its indexer's selections.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::call::Call;
use super::error::ApiError;
use super::openai::{Stop, logit_bias, null_as_default, spell, text_tokens, top_k};
use super::stream::{Teller, stream};
use super::{App, JsonBody};
use crate::engine::{Completion, Event, Finish, Partial, PromptScores, Request};
use crate::sampler::SamplingParams;

/// One thing for all prompts, or one for each.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a value, or an array of one for each prompt")]
enum Each<T> {
    One(T),
    Many(Vec<T>),
}

impl<T: Clone> Each<T> {
    /// # Errors
    /// When there are not as many as prompts.
    fn spread(self, name: &str, num_prompts: usize) -> Result<Vec<T>, ApiError> {
        match self {
            Self::One(one) => Ok(vec![one; num_prompts]),
            Self::Many(many) if many.len() == num_prompts => Ok(many),
            Self::Many(many) => {
                let expected = format!("as many as prompts, which are {num_prompts}");
                Err(ApiError::field(name, format_args!("an array of {}", many.len()), &expected))
            }
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected an array of tokens, or an array of such arrays")]
enum Tokens {
    One(Vec<u32>),
    Many(Vec<Vec<u32>>),
}

/// SGLang's names and defaults.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sampling {
    max_new_tokens: Option<usize>,
    min_new_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<HashMap<String, f32>>,
    stop: Option<Stop>,
    stop_token_ids: Option<Vec<u32>>,
    #[serde(default, deserialize_with = "null_as_default")]
    ignore_eos: bool,
    n: Option<usize>,
    sampling_seed: Option<i64>,
    skip_special_tokens: Option<bool>,
    spaces_between_special_tokens: Option<bool>,
    #[serde(default, deserialize_with = "null_as_default")]
    no_stop_trim: bool,
    // What this engine does not do.
    json_schema: Option<Value>,
    regex: Option<Value>,
    ebnf: Option<Value>,
    structural_tag: Option<Value>,
    stop_regex: Option<Value>,
    custom_params: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Body {
    text: Option<Each<String>>,
    input_ids: Option<Tokens>,
    sampling_params: Option<Each<Sampling>>,
    rid: Option<Each<String>>,
    #[serde(default, deserialize_with = "null_as_default")]
    return_logprob: bool,
    logprob_start_len: Option<i64>,
    top_logprobs_num: Option<usize>,
    #[serde(default, deserialize_with = "null_as_default")]
    return_text_in_logprobs: bool,
    #[serde(default, deserialize_with = "null_as_default")]
    stream: bool,
    #[serde(default, deserialize_with = "null_as_default")]
    return_routed_experts: bool,
    routed_experts_start_len: Option<usize>,
    #[serde(default, deserialize_with = "null_as_default")]
    return_indexer_topk: bool,
    /// Keys the random stream together with the seed; samples count up from it. Ours.
    rollout_id: Option<u64>,
    /// What `meta_info.resume` of an aborted response held: it goes on from there. Ours.
    resume: Option<Resume>,
    // What this engine does not do.
    token_ids_logprob: Option<Value>,
    #[serde(default, deserialize_with = "null_as_default")]
    return_hidden_states: bool,
    #[serde(default, deserialize_with = "null_as_default")]
    return_sampling_mask: bool,
    sampling_logprobs_mode: Option<String>,
    input_embeds: Option<Value>,
    image_data: Option<Value>,
    audio_data: Option<Value>,
    video_data: Option<Value>,
    lora_path: Option<Value>,
    // What says nothing about the answer.
    #[serde(rename = "model")]
    _model: Option<IgnoredAny>,
    #[serde(rename = "session_id")]
    _session_id: Option<IgnoredAny>,
    #[serde(rename = "priority")]
    _priority: Option<IgnoredAny>,
    #[serde(rename = "log_metrics")]
    _log_metrics: Option<IgnoredAny>,
    #[serde(rename = "data_parallel_rank")]
    _data_parallel_rank: Option<IgnoredAny>,
    #[serde(rename = "routing_key")]
    _routing_key: Option<IgnoredAny>,
}

/// An interrupted response.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Resume {
    output_ids: Vec<u32>,
    logprobs: Vec<f32>,
    base_logprobs: Vec<f32>,
    weight_versions: Vec<u64>,
}

/// What of a request its answers need.
#[derive(Clone, Debug)]
struct Form {
    id: String,
    prompt: Arc<[u32]>,
    return_logprob: bool,
    return_text: bool,
    has_top: bool,
    show_special: bool,
    keep_stop: bool,
    /// From which token on.
    experts_from: Option<usize>,
    /// From which token of the prompt on there are log-probabilities.
    scored_from: Option<usize>,
    blocks: bool,
}

pub(super) async fn answer(State(app): State<Arc<App>>, JsonBody(body): JsonBody<Body>) -> Result<Response, ApiError> {
    refuse_absent(&body)?;
    let records = app.engine.options().record_choices;
    if (body.return_routed_experts || body.return_indexer_topk) && !records {
        let message = "the choices of experts and blocks are not recorded; start the server with --record-choices";
        return Err(ApiError::bad(message));
    }
    let is_batch = matches!(body.text, Some(Each::Many(_))) || matches!(body.input_ids, Some(Tokens::Many(_)));
    let prompts = match (body.text, body.input_ids) {
        (Some(_), Some(_)) => return Err(ApiError::field("input_ids", "given beside `text`", "one of the two")),
        (None, None) => return Err(ApiError::field("text", "missing", "`text` or `input_ids`")),
        (None, Some(Tokens::One(tokens))) => vec![tokens],
        (None, Some(Tokens::Many(prompts))) => prompts,
        (Some(text), None) => {
            let texts = match text {
                Each::One(text) => vec![text],
                Each::Many(texts) => texts,
            };
            let encode = |text: &String| app.engine.tokenizer().encode(text);
            tokio::task::block_in_place(|| texts.iter().map(encode).collect::<Result<Vec<_>, _>>())?
        }
    };
    let n = prompts.len();
    let sampling = body.sampling_params.unwrap_or(Each::One(Sampling::default())).spread("sampling_params", n)?;
    let names = match body.rid {
        None => vec![None; n],
        Some(Each::One(name)) if n > 1 => (0..n).map(|i| Some(format!("{name}_{i}"))).collect(),
        Some(rid) => rid.spread("rid", n)?.into_iter().map(Some).collect(),
    };
    if body.resume.is_some() && n != 1 {
        return Err(ApiError::field("resume", format_args!("given with {n} prompts"), "one prompt with it"));
    }
    let mut forms = Vec::new();
    let mut requests = Vec::new();
    let top = if body.return_logprob { body.top_logprobs_num.unwrap_or(0) } else { 0 };
    let scored_from =
        body.logprob_start_len.filter(|_| body.return_logprob).and_then(|from| usize::try_from(from).ok());
    for (i, (tokens, sampling)) in prompts.into_iter().zip(sampling).enumerate() {
        let tokens: Arc<[u32]> = tokens.into();
        let num_samples = sampling.n.unwrap_or(1);
        forms.push(Form {
            id: names[i].clone().unwrap_or_else(|| format!("{:016x}", app.fresh())),
            prompt: tokens.clone(),
            return_logprob: body.return_logprob,
            return_text: body.return_text_in_logprobs,
            has_top: top > 0,
            show_special: sampling.skip_special_tokens == Some(false),
            keep_stop: sampling.no_stop_trim,
            experts_from: body.return_routed_experts.then(|| body.routed_experts_start_len.unwrap_or(0)),
            scored_from,
            blocks: body.return_indexer_topk,
        });
        let resumed = body.resume.clone().map(|said| Partial {
            top_logprobs: vec![Vec::new(); said.output_ids.len()],
            tokens: said.output_ids,
            logprobs: said.logprobs,
            base_logprobs: said.base_logprobs,
            weight_versions: said.weight_versions,
        });
        requests.push(Request {
            prompt_tokens: tokens,
            params: Arc::new(params(&app, sampling, top)?),
            num_samples,
            first_rollout_id: body.rollout_id.unwrap_or(0),
            resumed,
            stream: body.stream,
            prompt_logprobs_from: scored_from,
        });
    }
    let num_samples: Vec<usize> = requests.iter().map(|request| request.num_samples).collect();
    // A trainer aborts by the names that it gave; those of a batch begin alike.
    let name = names.into_iter().next().flatten();
    let mut call = Call::start(&app, name, requests).await?;
    if body.stream {
        let firsts = num_samples.iter().scan(0, |sum, n| Some(std::mem::replace(sum, *sum + n))).collect();
        let said = vec![(String::new(), Partial::default()); num_samples.iter().sum()];
        return Ok(stream(call, Vec::new(), Telling { forms, firsts, said }));
    }
    let done = call.finish().await?;
    let seconds = call.seconds();
    let tell = |(form, scores, completion): (&Form, &Option<PromptScores>, &Completion)| {
        let text = text(&app, form, completion)?;
        let mut told = form.tell(&app, text, scores.as_ref(), &completion.said);
        form.finish(&app, completion, &mut told);
        told["meta_info"]["e2e_latency"] = seconds.into();
        Ok(told)
    };
    let of = |((form, scores), samples): ((_, _), &Vec<Completion>)| {
        samples.iter().map(|one| tell((form, scores, one))).collect::<Vec<_>>()
    };
    let all: Vec<Value> = forms.iter().zip(&call.scores).zip(&done).flat_map(of).collect::<Result<_, ApiError>>()?;
    let is_one = !is_batch && all.len() == 1;
    Ok(Json(if is_one { all.into_iter().next().unwrap_or_default() } else { Value::Array(all) }).into_response())
}

/// # Errors
/// When something is asked for that this engine does not do, and that would change the answer.
fn refuse_absent(body: &Body) -> Result<(), ApiError> {
    let given = |value: &Option<Value>| value.as_ref().is_some_and(|value| !value.is_null());
    let absent = [
        ("token_ids_logprob", given(&body.token_ids_logprob)),
        ("return_hidden_states", body.return_hidden_states),
        ("return_sampling_mask", body.return_sampling_mask),
        ("sampling_logprobs_mode", body.sampling_logprobs_mode.as_ref().is_some_and(|mode| mode != "selected")),
        ("input_embeds", given(&body.input_embeds)),
        ("image_data", given(&body.image_data)),
        ("audio_data", given(&body.audio_data)),
        ("video_data", given(&body.video_data)),
        ("lora_path", given(&body.lora_path)),
    ];
    match absent.into_iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((name, _)) => {
            let message = format!("this engine has no `{name}`; leave it out");
            Err(ApiError { param: Some(name.into()), ..ApiError::absent(message) })
        }
    }
}

fn params(app: &App, sampling: Sampling, top: usize) -> Result<SamplingParams, ApiError> {
    let given = |value: &Option<Value>| value.as_ref().is_some_and(|value| !value.is_null());
    let absent = [
        ("json_schema", given(&sampling.json_schema)),
        ("regex", given(&sampling.regex)),
        ("ebnf", given(&sampling.ebnf)),
        ("structural_tag", given(&sampling.structural_tag)),
        ("stop_regex", given(&sampling.stop_regex)),
        ("custom_params", given(&sampling.custom_params)),
        ("spaces_between_special_tokens", sampling.spaces_between_special_tokens == Some(false)),
    ];
    if let Some((name, _)) = absent.into_iter().find(|(_, is_given)| *is_given) {
        let message = format!("this engine has no `sampling_params.{name}`; leave it out");
        return Err(ApiError { param: Some(format!("sampling_params.{name}")), ..ApiError::absent(message) });
    }
    let params = SamplingParams {
        temperature: sampling.temperature.unwrap_or(1.0),
        top_k: top_k(sampling.top_k)?,
        top_p: sampling.top_p.unwrap_or(1.0),
        min_p: sampling.min_p.unwrap_or(0.0),
        repetition_penalty: sampling.repetition_penalty.unwrap_or(1.0),
        presence_penalty: sampling.presence_penalty.unwrap_or(0.0),
        frequency_penalty: sampling.frequency_penalty.unwrap_or(0.0),
        logit_bias: logit_bias(sampling.logit_bias)?,
        seed: sampling.sampling_seed.map_or_else(|| app.fresh(), i64::cast_unsigned),
        min_tokens: sampling.min_new_tokens.unwrap_or(0),
        max_tokens: sampling.max_new_tokens.unwrap_or(128),
        stop_token_ids: sampling.stop_token_ids.unwrap_or_default(),
        stop: sampling.stop.map(Stop::texts).unwrap_or_default(),
        ignore_eos: sampling.ignore_eos,
        top_logprobs: top,
    };
    let our_name = |name: &str| match name {
        "max_tokens" => "sampling_params.max_new_tokens".to_owned(),
        "min_tokens" => "sampling_params.min_new_tokens".to_owned(),
        "top_logprobs" => "top_logprobs_num".to_owned(),
        name => format!("sampling_params.{name}"),
    };
    params.check(app.engine.config().vocab_size).map_err(|mut error| {
        let name = our_name(error.name);
        error.expected = error.expected.replace("`max_tokens`", "`max_new_tokens`");
        ApiError::field(&name, error.found, &error.expected)
    })?;
    Ok(params)
}

/// The text of a response that has ended.
fn text(app: &App, form: &Form, completion: &Completion) -> Result<String, ApiError> {
    let tokenizer = app.engine.tokenizer();
    let tokens = if form.keep_stop { &completion.said.tokens } else { text_tokens(completion) };
    match &completion.text {
        Some(text) if !form.show_special => match &completion.finish {
            Finish::StopText(stop) if form.keep_stop => Ok(format!("{text}{stop}")),
            _ => Ok(text.clone()),
        },
        _ if form.show_special => Ok(tokenizer.decode_marked(tokens)?.text().to_owned()),
        _ => Ok(tokenizer.decode(tokens)?),
    }
}

/// Base64 of little-endian integers of 32 bits, as numpy reads them.
fn pack(values: impl Iterator<Item = i32>) -> Value {
    BASE64_STANDARD.encode(values.flat_map(i32::to_le_bytes).collect::<Vec<u8>>()).into()
}

/// Which version made which of the tokens.
fn version_spans(versions: &[u64]) -> Vec<Value> {
    let mut spans = Vec::new();
    let mut start = 0;
    for run in versions.chunk_by(|a, b| a == b) {
        spans.push(json!({"version": run[0].to_string(), "start": start, "end": start + run.len()}));
        start += run.len();
    }
    spans
}

impl Form {
    /// What there is to tell of a response so far.
    fn tell(&self, app: &App, text: String, scores: Option<&PromptScores>, said: &Partial) -> Value {
        let version = said.weight_versions.last().copied().unwrap_or_else(|| app.engine.version());
        let mut meta = json!({
            "id": self.id,
            "finish_reason": null,
            "prompt_tokens": self.prompt.len(),
            "completion_tokens": said.tokens.len(),
            "weight_version": version.to_string(),
            "weight_versions": version_spans(&said.weight_versions),
        });
        if self.return_logprob {
            let told = |token: u32, logprob: Option<f32>| {
                let text = if self.return_text { spell(app, token).0.into() } else { Value::Null };
                json!([logprob, token, text])
            };
            let each = |tokens: &[u32], logprobs: &[f32]| -> Value {
                tokens.iter().zip(logprobs).map(|(&t, &l)| told(t, Some(l))).collect()
            };
            let tops = |tops: &[Vec<(u32, f32)>]| -> Vec<Value> {
                tops.iter().map(|top| top.iter().map(|&(t, l)| told(t, Some(l))).collect()).collect()
            };
            meta["output_token_logprobs"] = each(&said.tokens, &said.logprobs);
            meta["output_token_base_logprobs"] = each(&said.tokens, &said.base_logprobs);
            meta["input_token_logprobs"] = json!([]);
            if self.has_top {
                meta["output_top_logprobs"] = tops(&said.top_logprobs).into();
            }
            if let Some(scores) = scores {
                // From the asked position on; nothing stands before the first token.
                let unscored = self.scored_from == Some(0);
                let mut input: Vec<Value> =
                    self.prompt.first().filter(|_| unscored).map(|&t| told(t, None)).into_iter().collect();
                let from = scores.first.min(self.prompt.len());
                input.extend(self.prompt[from..].iter().zip(&scores.logprobs).map(|(&t, &l)| told(t, Some(l))));
                meta["input_token_logprobs"] = input.into();
                if self.has_top {
                    let first = unscored.then_some(Value::Null);
                    meta["input_top_logprobs"] = first.into_iter().chain(tops(&scores.top_logprobs)).collect();
                }
            }
        }
        json!({"text": text, "output_ids": said.tokens, "meta_info": meta})
    }

    /// Adds what is known when it has ended.
    fn finish(&self, app: &App, completion: &Completion, told: &mut Value) {
        let meta = &mut told["meta_info"];
        meta["cached_tokens"] = completion.num_cached_tokens.into();
        meta["finish_reason"] = match &completion.finish {
            Finish::StopToken(token) => json!({"type": "stop", "matched": token}),
            Finish::StopText(text) => json!({"type": "stop", "matched": text}),
            Finish::Length => json!({"type": "length", "length": completion.said.tokens.len()}),
            Finish::Aborted | Finish::NotFinite(_) => json!({"type": "abort", "message": "the request was aborted"}),
        };
        if completion.finish == Finish::Aborted {
            let said = &completion.said;
            meta["resume"] = json!({
                "output_ids": said.tokens, "logprobs": said.logprobs, "base_logprobs": said.base_logprobs,
                "weight_versions": said.weight_versions,
            });
        }
        let recomputed = completion.recomputed.iter();
        meta["recomputed"] =
            recomputed.map(|(at, version)| json!({"position": at, "version": version.to_string()})).collect();
        let config = app.engine.config();
        if let Some(from) = self.experts_from {
            let width = config.num_hidden_layers * config.num_experts_per_tok;
            let chosen = completion.choices.expert_idx.get(from * width..).unwrap_or(&[]);
            meta["routed_experts"] = pack(chosen.iter().map(|&expert| i32::from(expert)));
        }
        if self.blocks {
            meta["indexer_topk"] = pack(completion.choices.block_idx.iter().map(|&block| block.cast_signed()));
        }
    }
}

struct Telling {
    forms: Vec<Form>,
    /// Which of all samples is the first of each request.
    firsts: Vec<usize>,
    /// The text and the tokens so far, of each sample.
    said: Vec<(String, Partial)>,
}

impl Teller for Telling {
    fn tell(&mut self, call: &Call, at: usize, event: Event) -> Result<Vec<Value>, ApiError> {
        let app = &*call.app;
        let (form, scores) = (&self.forms[at], call.scores[at].as_ref());
        let (index, mut told) = match event {
            Event::Token { index, token, logprob, base_logprob, top_logprobs, weight_version, text: piece } => {
                let index = self.firsts[at] + index;
                let (text, said) = &mut self.said[index];
                text.push_str(&piece);
                said.tokens.push(token);
                said.logprobs.push(logprob);
                said.base_logprobs.push(base_logprob);
                said.top_logprobs.push(top_logprobs);
                said.weight_versions.push(weight_version);
                (index, form.tell(app, text.clone(), scores, said))
            }
            Event::Finished { completion, .. } => {
                let mut told = form.tell(app, text(app, form, &completion)?, scores, &completion.said);
                form.finish(app, &completion, &mut told);
                (self.firsts[at] + completion.index, told)
            }
            Event::Taken | Event::PromptScored(_) | Event::Refused(_) => return Ok(Vec::new()),
        };
        if self.said.len() > 1 {
            told["index"] = index.into();
        }
        Ok(vec![told])
    }
}
