//! What a client is told when it gets no answer: a status, and one sentence in the form of OpenAI's errors.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::chat::ChatError;
use crate::engine::Refusal;
use crate::sampler::ParamsError;
use crate::tokenizer::TokenizerError;

/// Seconds after which a client that was turned away may try again.
const RETRY_AFTER: u64 = 1;

/// An answer that is none.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// The field that is wrong.
    pub(super) param: Option<String>,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None }
    }

    /// What was asked for is wrong.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field is wrong: "`name` is `found`, expected `expected`".
    pub(super) fn field(name: &str, found: impl std::fmt::Display, expected: &str) -> Self {
        Self { param: Some(name.into()), ..Self::bad(format!("`{name}` is {found}, expected {expected}")) }
    }

    /// A part of the protocol that this engine does not have.
    pub(super) fn absent(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, message)
    }

    /// The body of the answer.
    pub(super) fn body(&self) -> serde_json::Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::NOT_IMPLEMENTED => "not_implemented_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.status.as_u16(),
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER));
        }
        response
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let status = match refusal {
            Refusal::Full { .. } => StatusCode::TOO_MANY_REQUESTS,
            _ => StatusCode::BAD_REQUEST,
        };
        Self::new(status, refusal.to_string())
    }
}

impl From<ParamsError> for ApiError {
    fn from(error: ParamsError) -> Self {
        Self { param: Some(error.name.into()), ..Self::bad(error.to_string()) }
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        Self { param: Some("messages".into()), ..Self::bad(error.to_string()) }
    }
}

impl From<TokenizerError> for ApiError {
    fn from(error: TokenizerError) -> Self {
        Self::bad(error.to_string())
    }
}
