//! Answers told piece by piece, as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::response::sse::{Event as Message, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use serde_json::Value;

use super::call::Call;
use super::error::ApiError;
use crate::engine::Event;

/// Says what clients are sent of what happens.
pub(super) trait Teller: Send + 'static {
    /// Something happened to request `at` of the call.
    ///
    /// # Errors
    /// When it cannot be told; nothing more is then.
    fn tell(&mut self, call: &Call, at: usize, event: Event) -> Result<Vec<Value>, ApiError>;

    /// Everything has ended.
    fn end(&mut self) -> Vec<Value> {
        Vec::new()
    }
}

struct Stream<T> {
    /// `None` when it has ended: the engine then has nothing more to do for it.
    call: Option<Call>,
    teller: T,
    ready: VecDeque<String>,
}

impl<T: Teller> Stream<T> {
    async fn advance(&mut self) {
        let Some(call) = &mut self.call else { return };
        let told = match call.next().await {
            Ok(Some((at, event))) => self.teller.tell(call, at, event).map(|told| (told, false)),
            Ok(None) => Ok((self.teller.end(), true)),
            Err(error) => Err(error),
        };
        let (told, is_over) = told.unwrap_or_else(|error| (vec![error.body()], true));
        self.ready.extend(told.iter().map(Value::to_string));
        if is_over {
            self.ready.push_back("[DONE]".into());
            self.call = None;
        }
    }
}

/// The answer: `first`, then what the teller says of each event, then `[DONE]`.
pub(super) fn stream(call: Call, first: Vec<Value>, teller: impl Teller) -> Response {
    let ready = first.iter().map(Value::to_string).collect();
    let events = unfold(Stream { call: Some(call), teller, ready }, async |mut stream| {
        loop {
            if let Some(data) = stream.ready.pop_front() {
                return Some((Ok::<_, Infallible>(Message::default().data(data)), stream));
            }
            stream.call.as_ref()?;
            stream.advance().await;
        }
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}
