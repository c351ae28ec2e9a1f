//! What a client has asked for and not yet been told. A client that goes away takes its call with it, and the engine stops
//! working on it at its next step.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, timeout_at};

use super::App;
use super::error::ApiError;
use crate::engine::{Completion, Event, Finish, PromptScores, Request, Sink};

/// Requests of one HTTP request, in flight.
pub(super) struct Call {
    pub(super) app: Arc<App>,
    /// What [`abort_request`](super::control) calls it.
    pub(super) name: String,
    ids: Range<u64>,
    events: UnboundedReceiver<(usize, Event)>,
    num_samples: Vec<usize>,
    /// Of each prompt, where they were asked for and are there.
    pub(super) scores: Vec<Option<PromptScores>>,
    num_open: usize,
    started: Instant,
    has_spoken: bool,
}

impl Call {
    /// Hands requests to the engine and waits until it has taken all of them.
    ///
    /// # Errors
    /// When it takes one of them not: then none.
    pub(super) async fn start(app: &Arc<App>, name: Option<String>, requests: Vec<Request>) -> Result<Self, ApiError> {
        let num_samples: Vec<usize> = requests.iter().map(|request| request.num_samples).collect();
        let num_open = num_samples.iter().fold(0usize, |sum, n| sum.saturating_add(*n));
        let most = app.options.max_samples;
        if num_open > most {
            let message = format!("{num_open} samples are asked for in one request, expected at most {most}; split it");
            return Err(ApiError::bad(message));
        }
        let (sender, events) = unbounded_channel();
        let with_sink = |(at, request)| {
            let sender = sender.clone();
            let sink: Sink = Box::new(move |event| sender.send((at, event)).is_ok());
            (request, sink)
        };
        let num_requests = requests.len();
        let name = app.name_call(name)?;
        let ids = app.engine.submit(requests.into_iter().enumerate().map(with_sink).collect());
        app.calls().insert(name.clone(), ids.clone());
        let mut call = Self {
            app: app.clone(),
            name,
            ids,
            events,
            scores: vec![None; num_samples.len()],
            num_samples,
            num_open,
            started: Instant::now(),
            has_spoken: false,
        };
        for _ in 0..num_requests {
            match call.receive().await? {
                (_, Event::Taken) => {}
                (at, Event::Refused(refusal)) => {
                    let mut error = ApiError::from(refusal);
                    if num_requests > 1 {
                        error.message = format!("prompt {at}: {}", error.message);
                    }
                    return Err(error);
                }
                // A request that was taken may speak before the next one is looked at only if they did not come together.
                (_, Event::PromptScored(_) | Event::Token { .. } | Event::Finished { .. }) => {
                    unreachable!("requests are taken before a step")
                }
            }
        }
        Ok(call)
    }

    /// Seconds since it was asked.
    pub(super) fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// What happens next, and to which of the requests; `None` when everything has ended.
    ///
    /// # Errors
    /// When it takes too long, or the model is broken.
    pub(super) async fn next(&mut self) -> Result<Option<(usize, Event)>, ApiError> {
        if self.num_open == 0 {
            return Ok(None);
        }
        let (at, event) = loop {
            match self.receive().await? {
                (at, Event::PromptScored(scores)) => self.scores[at] = Some(*scores),
                told => break told,
            }
        };
        if !self.has_spoken {
            self.has_spoken = true;
            self.app.metrics.first_token(self.seconds());
        }
        if let Event::Finished { completion, .. } = &event {
            self.num_open -= 1;
            if let Finish::NotFinite(version) = completion.finish {
                let message = format!("the model's logits are not finite: weights of version {version} are broken");
                return Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message));
            }
            if self.num_open == 0 {
                self.app.metrics.finished(self.seconds());
            }
        }
        Ok(Some((at, event)))
    }

    /// Waits for everything: the samples of each request.
    ///
    /// # Errors
    /// As [`Call::next`].
    pub(super) async fn finish(&mut self) -> Result<Vec<Vec<Completion>>, ApiError> {
        let mut done: Vec<Vec<Option<Completion>>> = self.num_samples.iter().map(|&n| vec![None; n]).collect();
        while let Some((at, event)) = self.next().await? {
            if let Event::Finished { completion, .. } = event {
                let index = completion.index;
                done[at][index] = Some(*completion);
            }
        }
        Ok(done.into_iter().map(|samples| samples.into_iter().flatten().collect()).collect())
    }

    async fn receive(&mut self) -> Result<(usize, Event), ApiError> {
        let limit = self.app.options.request_timeout;
        match timeout_at(self.started + limit, self.events.recv()).await {
            Ok(Some(event)) => Ok(event),
            Ok(None) => {
                Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the engine has stopped; restart the server"))
            }
            Err(_) => {
                let message = format!(
                    "the answer took longer than {} s, which is the limit; ask for fewer tokens",
                    Duration::as_secs(&limit)
                );
                Err(ApiError::new(StatusCode::GATEWAY_TIMEOUT, message))
            }
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.app.calls().remove(&self.name);
        if self.num_open > 0 {
            self.ids.clone().for_each(|id| self.app.engine.abort(id));
        }
    }
}
