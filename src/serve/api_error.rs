//! Errors as OpenAI's protocol has them: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::units::{Exit, Fault, FaultKind};

/// What a client is told that does not get what it asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    /// The field that is wrong.
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(super) fn field(name: &str, message: impl Into<String>) -> Self {
        Self { param: Some(name.to_owned()), ..Self::bad(message) }
    }

    /// Says the same about a prompt that a request has in the field `name`.
    pub(super) fn about(mut self, name: &str) -> Self {
        self.param.iter_mut().filter(|param| *param == "prompt").for_each(|param| name.clone_into(param));
        self
    }

    pub(super) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    pub(super) fn to_json(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": self.code } })
    }
}

impl From<&Fault> for ApiError {
    fn from(error: &Fault) -> Self {
        let message = error.to_string();
        match (error.kind(), error.exit()) {
            (FaultKind::ContextLength, _) => Self::field("prompt", message).with_code("context_length_exceeded"),
            (FaultKind::BadPrompt, _) => Self::field("prompt", message),
            (FaultKind::NothingLikely, _) | (_, Exit::Usage | Exit::Data) => Self::bad(message),
            (_, Exit::Memory) => Self::new(StatusCode::SERVICE_UNAVAILABLE, message),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.to_json())).into_response()
    }
}
