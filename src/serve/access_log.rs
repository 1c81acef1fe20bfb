//! The access log: one line on standard error for each request, when its reply has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use chrono::{SecondsFormat, Utc};
use tokio::task_local;
use tokio::time::Instant;

use super::access::ConnectionEnds;
use crate::report::console;
use crate::units::abridged;

/// The status of a request whose client has gone before there was one: nginx' own.
const CLIENT_GONE: u16 = 499;

task_local! {
    /// The line of the request that this task answers.
    static LINE: Arc<LogLine>;
}

/// A line to be. It is written when the last who works on the reply lets go of it.
#[derive(Debug)]
pub(super) struct LogLine {
    /// Peer, method and path; `None` where nothing is written.
    request: Option<String>,
    pub(super) began: Instant,
    status: AtomicU16,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) new_tokens: AtomicU64,
}

impl LogLine {
    fn new(request: Option<String>) -> Arc<Self> {
        Arc::new(Self {
            request,
            began: Instant::now(),
            status: CLIENT_GONE.into(),
            prompt_tokens: AtomicU64::default(),
            new_tokens: AtomicU64::default(),
        })
    }

    pub(super) fn here() -> Arc<Self> {
        LINE.try_with(Arc::clone).unwrap_or_else(|_| Self::new(None))
    }
}

impl Drop for LogLine {
    fn drop(&mut self) {
        let Some(request) = &self.request else { return };
        let (now, seconds) = (Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true), self.began.elapsed().as_secs_f64());
        let (status, [read, written]) = (self.status.get_mut(), [&self.prompt_tokens, &self.new_tokens]);
        let [read, written] = [read, written].map(|tokens| tokens.load(Ordering::Relaxed));
        console::note(&format!("{now} {request} {status} {read} tokens in, {written} out, {seconds:.3} s"));
    }
}

pub(super) async fn logged(State(is_on): State<bool>, request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<ConnectionEnds>().map_or_else(|| "-".to_owned(), |ends| ends.peer.to_string());
    let words = || format!("{peer} {} {}", abridged(request.method()), abridged(request.uri().path()));
    let line = LogLine::new(is_on.then(words));
    let response = LINE.scope(Arc::clone(&line), next.run(request)).await;
    line.status.store(response.status().as_u16(), Ordering::Relaxed);
    response
}
