//! The engine behind HTTP: OpenAI's completions and chat, SGLang's `/generate` and the endpoints by which a trainer drives
//! it, health and metrics.
//!
//! Requests are read strictly: a field that this server does not know is refused rather than ignored, since an ignored
//! one changes what an experiment is. Fields that say nothing about the answer (`user`, `metadata`) are let through.

mod call;
mod chat;
mod completions;
mod control;
mod error;
mod generate;
mod metrics;
mod openai;
mod stream;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, MatchedPath, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;

use self::error::ApiError;
use self::metrics::Metrics;
use crate::engine::Engine;

/// What a server is told when it starts.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// What clients call the model.
    pub model_name: String,
    /// Where it lies.
    pub model_dir: PathBuf,
    /// What clients must show; everybody may ask where there is none.
    pub api_key: Option<String>,
    /// Bytes of a request's body.
    pub max_body_bytes: usize,
    /// Samples of a request, over all its prompts.
    pub max_samples: usize,
    /// How long an answer may take.
    pub request_timeout: Duration,
    /// How long answers may go on after the server was told to end.
    pub drain_timeout: Duration,
}

/// How long a client may take to send its body, and a probe to be answered.
const PATIENCE: Duration = Duration::from_secs(30);

struct App {
    engine: Arc<Engine>,
    options: ServerOptions,
    /// Seconds since 1970.
    started: u64,
    /// By name, what is in flight.
    calls: Mutex<HashMap<String, Range<u64>>>,
    /// One weight update at a time.
    update: tokio::sync::Mutex<()>,
    is_draining: AtomicBool,
    metrics: Metrics,
    random: RandomState,
    next_call: AtomicU64,
}

impl App {
    fn calls(&self) -> MutexGuard<'_, HashMap<String, Range<u64>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seconds since 1970.
    fn now() -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }

    /// A number that nobody had before.
    fn fresh(&self) -> u64 {
        self.random.hash_one(self.next_call.fetch_add(1, Ordering::Relaxed))
    }

    /// The name of a call: the client's, which no other in flight may have, or a new one.
    fn name_call(&self, name: Option<String>) -> Result<String, ApiError> {
        match name {
            Some(name) if self.calls().contains_key(&name) => {
                Err(ApiError::field("rid", format_args!("{name:?}"), "a name that no request in flight has"))
            }
            Some(name) => Ok(name),
            None => Ok(format!("{:016x}{:016x}", self.fresh(), self.fresh())),
        }
    }
}

/// The routes of a server over `engine`.
fn routes(app: Arc<App>) -> Router {
    let max_body_bytes = app.options.max_body_bytes;
    Router::new()
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{*name}", get(openai::model))
        .route("/v1/completions", post(completions::answer))
        .route("/v1/chat/completions", post(chat::answer))
        .route("/generate", post(generate::answer).put(generate::answer))
        .merge(control::routes())
        .fallback(async |request: Request| {
            let path = request.uri().path().to_owned();
            ApiError::new(
                StatusCode::NOT_FOUND,
                format!("there is no {path} here; GET /server_info says what there is"),
            )
        })
        .method_not_allowed_fallback(async |request: Request| {
            let message = format!("{} does not take {}", request.uri().path(), request.method());
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
        })
        .layer(from_fn_with_state(app.clone(), admit))
        .layer(DefaultBodyLimit::max(max_body_bytes))
        .with_state(app)
}

/// Before a request reaches its route: whether the client may, and whether there is still time. After it: counts it.
async fn admit(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    let is_open = matches!(path.as_str(), "/health" | "/health_generate" | "/metrics");
    let shown = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let response = if !is_open && app.options.api_key.as_deref().is_some_and(|key| !is_bearer_of(shown, key)) {
        let message = "the API key is missing or wrong, expected the header `Authorization: Bearer KEY`";
        let mut response = ApiError::new(StatusCode::UNAUTHORIZED, message).into_response();
        response.headers_mut().insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
        response
    } else if request.method() == Method::POST && app.is_draining.load(Ordering::Relaxed) {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is ending; ask another one").into_response()
    } else {
        next.run(request).await
    };
    app.metrics.answered(&path, response.status().as_u16());
    response
}

/// Compares in a time that does not tell how much of the key was right.
fn is_bearer_of(shown: Option<&str>, key: &str) -> bool {
    let Some(shown) = shown.and_then(|shown| shown.strip_prefix("Bearer ")) else { return false };
    let difference = shown.bytes().zip(key.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    shown.len() == key.len() && std::hint::black_box(difference) == 0
}

/// A body of JSON; an empty one reads as `{}`.
struct JsonBody<T>(T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let bytes = match tokio::time::timeout(PATIENCE, Bytes::from_request(request, app)).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(rejection)) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
                let most = app.options.max_body_bytes;
                let message = format!("the body is too long, expected at most {most} bytes; split it into several");
                return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
            }
            Ok(Err(rejection)) => return Err(ApiError::new(rejection.status(), rejection.body_text())),
            Err(_) => {
                let message = format!("the body took longer than {} s to arrive", PATIENCE.as_secs());
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message));
            }
        };
        let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        let mut reader = serde_json::Deserializer::from_slice(text);
        let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
            let (path, error) = (error.path().to_string(), error.inner());
            if error.is_syntax() || error.is_eof() {
                return ApiError::bad(format!("the body is no JSON: {error}"));
            }
            let param = (path != ".").then_some(path);
            let place = param.as_ref().map_or(String::new(), |path| format!("`{path}`: "));
            // Bodies are written by programs; their lines and columns help nobody.
            let message = error.to_string();
            let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(message, _)| message);
            ApiError { param, ..ApiError::bad(format!("{place}{message}")) }
        })?;
        reader.end().map_err(|_| ApiError::bad("something follows the JSON of the body, expected nothing more"))?;
        Ok(Self(value))
    }
}

/// Answers requests that come to `listener` until `end` is ready; what is being answered then may go on for a while.
///
/// # Errors
/// When the listener fails.
pub async fn serve(
    engine: Arc<Engine>,
    listener: TcpListener,
    options: ServerOptions,
    end: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let drain_timeout = options.drain_timeout;
    let app = Arc::new(App {
        engine,
        options,
        started: App::now(),
        calls: Mutex::default(),
        update: tokio::sync::Mutex::default(),
        is_draining: AtomicBool::new(false),
        metrics: Metrics::new(),
        random: RandomState::new(),
        next_call: AtomicU64::new(0),
    });
    let (told, mut was_told) = tokio::sync::watch::channel(false);
    let drained = {
        let app = app.clone();
        async move {
            end.await;
            app.is_draining.store(true, Ordering::Relaxed);
            // Nobody would continue what is paused.
            app.engine.resume();
            told.send_replace(true);
        }
    };
    let server = axum::serve(listener, routes(app.clone())).with_graceful_shutdown(drained);
    let overdue = async {
        // The sender goes only with the server.
        if was_told.wait_for(|told| *told).await.is_err() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(drain_timeout).await;
        app.engine.abort_all();
        // Aborted answers are still written; connections that do not take them are dropped.
        tokio::time::sleep(Duration::from_secs(2)).await;
    };
    tokio::select! {
        done = server.into_future() => done,
        () = overdue => Ok(()),
    }
}
