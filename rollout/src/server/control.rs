//! What a trainer drives the engine by, under SGLang's names; health, metrics, and sentences for what is not here.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::error::ApiError;
use super::openai::null_as_default;
use super::{App, JsonBody, PATIENCE};
use crate::engine::{PauseMode, Request};
use crate::model::{ModelConfig, checksum};
use crate::sampler::SamplingParams;

/// How often a probe looks.
const LOOK_EVERY: Duration = Duration::from_millis(5);

type Answer = Result<Json<Value>, ApiError>;

/// Endpoints that this engine does not have, and what to do instead.
const ABSENT: [(&str, &str); 15] = [
    (
        "/update_weights_from_tensor",
        "it takes Python objects; write a safetensors folder and call /update_weights_from_disk",
    ),
    ("/init_weights_update_group", "there is no transport between processes yet; call /update_weights_from_disk"),
    ("/destroy_weights_update_group", "there is no transport between processes yet; call /update_weights_from_disk"),
    ("/update_weights_from_distributed", "there is no transport between processes yet; call /update_weights_from_disk"),
    ("/update_weights_from_ipc", "it takes handles of GPU memory; call /update_weights_from_disk"),
    ("/resume_memory_occupation", "weights are never released; memory for sequences comes back when it is needed"),
    ("/load_lora_adapter", "this engine has no LoRA adapters; merge them into a checkpoint"),
    ("/load_lora_adapter_from_tensors", "this engine has no LoRA adapters; merge them into a checkpoint"),
    ("/unload_lora_adapter", "this engine has no LoRA adapters"),
    ("/start_profile", "profile the process from outside, with perf or samply"),
    ("/stop_profile", "profile the process from outside, with perf or samply"),
    ("/v1/embeddings", "this engine generates and does not embed"),
    ("/v1/score", "score texts with `rollout score`"),
    ("/encode", "this engine generates and does not embed"),
    ("/v1/responses", "call /v1/chat/completions"),
];

pub(super) fn routes() -> Router<Arc<App>> {
    let mut router = Router::new()
        .route("/health", get(health))
        .route("/health_generate", get(health))
        .route("/metrics", get(metrics))
        .route("/model_info", get(model_info))
        .route("/get_model_info", get(model_info))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/get_weight_version", get(weight_version))
        .route("/weight_version", get(weight_version))
        .route("/get_weights_by_name", any(weights_by_name))
        .route("/pause_generation", post(pause))
        .route("/continue_generation", post(resume))
        .route("/flush_cache", get(flush).post(flush))
        .route("/abort_request", post(abort))
        .route("/begin_weight_update", post(nothing_to_pack))
        .route("/end_weight_update", post(nothing_to_pack))
        .route("/update_weights_from_disk", post(update_from_disk))
        .route("/update_weight_version", post(update_version))
        .route("/weights_checker", post(check_weights))
        .route("/release_memory_occupation", post(release_memory));
    for (path, reason) in ABSENT {
        router =
            router.route(path, any(async move || ApiError::absent(format!("this engine has no {path}: {reason}"))));
    }
    router
}

/// Says that the engine works only when a token came out of it just now. While it is busy that need not be the probe's own,
/// and while it is paused there can be none.
async fn health(State(app): State<Arc<App>>) -> Response {
    if app.engine.stats().is_paused {
        return Json(json!({"status": "paused"})).into_response();
    }
    let before = app.engine.stats().generated_tokens;
    let request = Request {
        prompt_tokens: Arc::new([0]),
        params: Arc::new(SamplingParams { max_tokens: 1, temperature: 0.0, ..SamplingParams::default() }),
        num_samples: 1,
        first_rollout_id: 0,
        resumed: None,
        stream: false,
        prompt_logprobs_from: None,
    };
    let ids = app.engine.submit(vec![(request, Box::new(|_| true))]);
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        tokio::time::sleep(LOOK_EVERY).await;
        let stats = app.engine.stats();
        if stats.generated_tokens > before || stats.is_paused {
            ids.for_each(|id| app.engine.abort(id));
            return Json(json!({"status": "ok"})).into_response();
        }
        if !app.engine.is_alive() {
            break;
        }
    }
    ids.for_each(|id| app.engine.abort(id));
    let message = format!("no token came out of the engine within {} s; restart the server", PATIENCE.as_secs());
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).into_response()
}

async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.metrics.page(&app.engine.stats(), app.engine.version()))
}

async fn model_info(State(app): State<Arc<App>>) -> Json<Value> {
    let config = app.engine.config();
    Json(json!({
        "model_path": app.options.model_dir,
        "tokenizer_path": app.options.model_dir,
        "served_model_name": app.options.model_name,
        "is_generation": true,
        "weight_version": app.engine.version().to_string(),
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_experts_per_tok": config.num_experts_per_tok,
        "index_topk": config.index_topk,
        "context_length": config.max_position_embeddings,
    }))
}

async fn server_info(State(app): State<Arc<App>>) -> Json<Value> {
    let (stats, options) = (app.engine.stats(), app.engine.options());
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model_path": app.options.model_dir,
        "served_model_name": app.options.model_name,
        "weight_version": app.engine.version().to_string(),
        "max_running_requests": options.max_batch,
        "max_queued_requests": options.max_waiting,
        "chunked_prefill_size": options.max_step_tokens,
        "context_length": app.engine.config().max_position_embeddings,
        "max_req_input_len": app.engine.max_sequence_len(),
        "num_threads": options.num_threads,
        "num_running_reqs": stats.num_running,
        "num_queue_reqs": stats.num_waiting,
        "kv_pages": stats.pages,
        "kv_pages_in_use": stats.pages_in_use,
        "kv_page_bytes": stats.page_bytes,
        "is_paused": stats.is_paused,
        "endpoints": [
            "/v1/completions", "/v1/chat/completions", "/v1/models", "/generate", "/health", "/health_generate",
            "/metrics", "/model_info", "/server_info", "/weight_version", "/get_weights_by_name", "/pause_generation",
            "/continue_generation", "/flush_cache", "/abort_request", "/begin_weight_update", "/end_weight_update",
            "/update_weights_from_disk", "/update_weight_version", "/weights_checker", "/release_memory_occupation",
        ],
    }))
}

async fn weight_version(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"weight_version": app.engine.version().to_string()}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ByName {
    name: String,
    #[serde(default = "a_hundred")]
    truncate_size: usize,
}

fn a_hundred() -> usize {
    100
}

async fn weights_by_name(State(app): State<Arc<App>>, JsonBody(body): JsonBody<ByName>) -> Answer {
    let model = app.engine.model();
    let weights = blocking(move || model.export()).await?;
    let Some(tensor) = weights.get(&body.name) else {
        return Err(ApiError::field("name", format_args!("{:?}", body.name), "the name of a parameter of this model"));
    };
    let tensor = tensor.clone().into_f32();
    Ok(Json(
        json!({"shape": tensor.shape, "parameter": tensor.as_f32().iter().take(body.truncate_size).collect::<Vec<_>>()}),
    ))
}

/// Runs what takes long where it keeps no other request waiting.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    let failed = |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the server failed at this; see its log");
    tokio::task::spawn_blocking(work).await.map_err(failed)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pause {
    #[serde(default)]
    mode: Mode,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    #[default]
    Abort,
    Retract,
    InPlace,
}

async fn pause(State(app): State<Arc<App>>, JsonBody(body): JsonBody<Pause>) -> Answer {
    let mode = match body.mode {
        Mode::Abort => PauseMode::Abort,
        Mode::Retract => PauseMode::Retract,
        Mode::InPlace => PauseMode::InPlace,
    };
    blocking(move || app.engine.pause(mode)).await?;
    Ok(Json(json!({"status": "ok", "message": "nothing is generated until /continue_generation"})))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Resume {
    #[serde(rename = "torch_empty_cache")]
    _torch_empty_cache: Option<IgnoredAny>,
}

async fn resume(State(app): State<Arc<App>>, JsonBody(_): JsonBody<Resume>) -> Answer {
    blocking(move || app.engine.resume()).await?;
    Ok(Json(json!({"status": "ok", "message": "generation goes on"})))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Flush {
    timeout_s: Option<f64>,
}

async fn flush(State(app): State<Arc<App>>, JsonBody(body): JsonBody<Flush>) -> Answer {
    let wait = body.timeout_s.unwrap_or(0.0);
    let Ok(wait) = Duration::try_from_secs_f64(wait) else {
        return Err(ApiError::field("timeout_s", wait, "a number of seconds from 0 on"));
    };
    flush_within(app, wait).await?;
    Ok(Json(json!({"status": "ok", "message": "the states kept for requests that begin alike are forgotten"})))
}

async fn flush_within(app: Arc<App>, wait: Duration) -> Result<(), ApiError> {
    let start = Instant::now();
    loop {
        let engine = app.engine.clone();
        if blocking(move || engine.flush()).await? {
            return Ok(());
        }
        if start.elapsed() >= wait {
            let message = "requests are running, or are paused in place with their state: pause them with mode abort or \
                           retract, or let them end";
            return Err(ApiError::bad(message));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Abort {
    rid: Option<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    abort_all: bool,
    #[serde(rename = "finished_reason")]
    _finished_reason: Option<IgnoredAny>,
    #[serde(rename = "abort_message")]
    _abort_message: Option<IgnoredAny>,
}

/// A name that no request has is no error: it may have ended just now.
async fn abort(State(app): State<Arc<App>>, JsonBody(body): JsonBody<Abort>) -> Answer {
    match body.rid {
        _ if body.abort_all => app.engine.abort_all(),
        Some(rid) => {
            let ids = app.calls().get(&rid).cloned();
            ids.into_iter().flatten().for_each(|id| app.engine.abort(id));
        }
        None => return Err(ApiError::field("rid", "missing", "a request's `rid`, or `abort_all` to be true")),
    }
    Ok(Json(json!({"status": "ok"})))
}

/// Between the two, SGLang unpacks its weights to be written to; this engine packs new ones beside those it serves.
async fn nothing_to_pack(JsonBody(_): JsonBody<IgnoredAny>) -> Json<Value> {
    Json(json!({"success": true, "message": "nothing to do: new weights are packed beside those that are served"}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FromDisk {
    model_path: PathBuf,
    load_format: Option<String>,
    weight_version: Option<Version>,
    /// `checksum` of the weights in the engine's format, in hexadecimal. Ours.
    checksum: Option<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    abort_all_requests: bool,
    #[serde(default, deserialize_with = "null_as_default")]
    keep_pause: bool,
    // What is so here anyway: kept states are of one version, and nothing is captured.
    #[serde(rename = "flush_cache")]
    _flush_cache: Option<IgnoredAny>,
    #[serde(rename = "recapture_cuda_graph")]
    _recapture_cuda_graph: Option<IgnoredAny>,
    #[serde(rename = "torch_empty_cache")]
    _torch_empty_cache: Option<IgnoredAny>,
    #[serde(rename = "is_async")]
    _is_async: Option<IgnoredAny>,
    #[serde(rename = "token_step")]
    _token_step: Option<IgnoredAny>,
}

/// A version as a number or as SGLang writes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a number that counts up, or such a number as a string")]
enum Version {
    Number(u64),
    Text(String),
}

impl Version {
    fn number(&self, name: &str) -> Result<u64, ApiError> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Text(text) => text.parse().map_err(|_| {
                ApiError::field(name, format_args!("{text:?}"), "a number that counts up, as a string or not")
            }),
        }
    }
}

async fn update_from_disk(State(app): State<Arc<App>>, JsonBody(body): JsonBody<FromDisk>) -> Answer {
    if body.load_format.as_ref().is_some_and(|format| !matches!(format.as_str(), "auto" | "safetensors")) {
        let found = format!("{:?}", body.load_format.unwrap_or_default());
        return Err(ApiError::field("load_format", found, "auto or safetensors"));
    }
    let _one_at_a_time = app.update.lock().await;
    let version = match &body.weight_version {
        Some(version) => version.number("weight_version")?,
        None => app.engine.version() + 1,
    };
    let expected = match body.checksum.as_deref().map(|text| u64::from_str_radix(text, 16)) {
        None => None,
        Some(Ok(checksum)) => Some(checksum),
        Some(Err(_)) => return Err(ApiError::field("checksum", "no number", "a number in hexadecimal")),
    };
    if body.abort_all_requests {
        app.engine.abort_all();
    }
    let (engine, dir) = (app.engine.clone(), body.model_path.clone());
    let loaded = blocking(move || {
        let config = ModelConfig::load(&dir.join("config.json")).map_err(|error| ApiError::bad(error.to_string()))?;
        if &config != engine.config() {
            let message = format!("{}: config.json is of another model than the one served", dir.display());
            return Err(ApiError::field("model_path", message, "a checkpoint of the same model"));
        }
        engine.update_weights_from_dir(&dir, version, expected).map_err(|error| ApiError::bad(error.to_string()))
    });
    let checksum = loaded.await??;
    if !body.keep_pause {
        app.engine.resume();
    }
    let message = format!("weights of version {version} are served, checksum {checksum:016x}");
    Ok(Json(
        json!({"success": true, "message": message, "checksum": format!("{checksum:016x}"), "num_paused_requests": 0}),
    ))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewVersion {
    new_version: Version,
    /// False unless it is asked for, unlike SGLang's: a number that is published must end nothing.
    #[serde(default, deserialize_with = "null_as_default")]
    abort_all_requests: bool,
}

async fn update_version(State(app): State<Arc<App>>, JsonBody(body): JsonBody<NewVersion>) -> Answer {
    let version = body.new_version.number("new_version")?;
    if body.abort_all_requests {
        app.engine.abort_all();
    }
    app.engine.set_version(version).map_err(|error| ApiError::bad(error.to_string()))?;
    Ok(Json(json!({"success": true, "message": "the version is set", "new_version": version.to_string()})))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Check {
    action: String,
    #[serde(rename = "allow_quant_error")]
    _allow_quant_error: Option<IgnoredAny>,
    skip_tensor_list: Option<Vec<String>>,
}

async fn check_weights(State(app): State<Arc<App>>, JsonBody(body): JsonBody<Check>) -> Answer {
    if body.action != "checksum" {
        let message = format!("this engine has no action {:?} of /weights_checker; it has `checksum`", body.action);
        return Err(ApiError { param: Some("action".into()), ..ApiError::absent(message) });
    }
    let model = app.engine.model();
    let version = model.version();
    let skipped = body.skip_tensor_list.unwrap_or_default();
    let sum = blocking(move || {
        let mut weights = model.export();
        weights.retain(|name, _| !skipped.contains(name));
        checksum(&weights)
    });
    let sum = format!("{:016x}", sum.await?);
    Ok(Json(
        json!({"success": true, "message": "parameters and buffers", "checksum": sum, "weight_version": version.to_string()}),
    ))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Release {
    tags: Option<Vec<String>>,
}

async fn release_memory(State(app): State<Arc<App>>, JsonBody(body): JsonBody<Release>) -> Answer {
    let tags = body.tags.unwrap_or_default();
    if tags.is_empty() || tags.iter().any(|tag| tag != "kv_cache") {
        let message = "this engine releases only the memory for sequences, and it serves its weights from where they are; \
                       set `tags` to [\"kv_cache\"]";
        return Err(ApiError { param: Some("tags".into()), ..ApiError::absent(message) });
    }
    flush_within(app, Duration::ZERO).await?;
    Ok(Json(json!({"success": true, "message": "the memory for sequences is released until it is needed"})))
}
