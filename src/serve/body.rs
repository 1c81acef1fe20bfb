//! Bodies of requests: how much of them is held and worked on at a time, and by whom they are parsed.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::HttpBody;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ApiError;
use super::fields::BodyFields;
use crate::native::give_free_memory_back;

/// What all requests together may have of the server while they come in, and while they are read.
pub(super) struct BodyLimits {
    /// Bodies that have come, in KiB.
    arrived: Arc<Semaphore>,
    /// Bodies that are parsed and tokenised, which takes many times as much, in KiB.
    read: Arc<Semaphore>,
    max_body: usize,
}

/// Bodies of the largest size that may be held at a time; one of them is read at a time.
const MAX_FULL_BODIES: usize = 4;
/// Bytes of a body behind which memory is given back.
const LARGE: usize = 1 << 20;

/// The right to read a body. Nobody else reads as much until it is gone.
pub(super) struct ReadingPermit {
    _permit: OwnedSemaphorePermit,
    bytes: usize,
}

impl Drop for ReadingPermit {
    fn drop(&mut self) {
        if self.bytes > LARGE {
            give_free_memory_back();
        }
    }
}

impl BodyLimits {
    pub(super) fn new(max_body: usize) -> Self {
        let read = kibibytes(max_body).max(1) as usize;
        let arrived = read.saturating_mul(MAX_FULL_BODIES).min(Semaphore::MAX_PERMITS);
        Self { arrived: Arc::new(Semaphore::new(arrived)), read: Arc::new(Semaphore::new(read)), max_body }
    }

    pub(super) async fn fields(&self, request: Request) -> Result<(BodyFields, ReadingPermit), ApiError> {
        let failed = |error: String| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error);
        let (body, arrived) = self.body(request).await?;
        let bytes = body.len();
        let permit = Arc::clone(&self.read).acquire_many_owned(kibibytes(bytes)).await;
        let permit = ReadingPermit { _permit: permit.map_err(|error| failed(error.to_string()))?, bytes };
        // Not on the thread of the connections, which others wait for.
        let parse = move || {
            let fields = BodyFields::read(&body);
            drop((body, arrived));
            fields.map(|fields| (fields, permit))
        };
        tokio::task::spawn_blocking(parse).await.map_err(|error| failed(error.to_string()))?
    }

    async fn body(&self, request: Request) -> Result<(Vec<u8>, Vec<OwnedSemaphorePermit>), ApiError> {
        let most = self.max_body;
        let too_large = || ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {most} bytes"));
        let busy = |_| {
            let message = "the bodies of other requests take all memory for them: try again later";
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
        };
        let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
        if length.is_some_and(|length| length > most) {
            return Err(too_large());
        }
        let mut incoming = request.into_body();
        let (mut body, mut permits) = (Vec::new(), Vec::new());
        while let Some(frame) = poll_fn(|context| Pin::new(&mut incoming).poll_frame(context)).await {
            let frame = frame.map_err(|error| ApiError::bad(format!("the body can not be read: {error}")))?;
            let Ok(piece) = frame.into_data() else { continue };
            if piece.len() > most - body.len() {
                return Err(too_large());
            }
            permits.push(Arc::clone(&self.arrived).try_acquire_many_owned(kibibytes(piece.len())).map_err(busy)?);
            body.extend_from_slice(&piece);
        }
        Ok((body, permits))
    }
}

fn kibibytes(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}
