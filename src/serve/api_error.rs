//! Errors as OpenAI's protocol has them: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::generation::{GenerationError, RuleFault};
use crate::units::{Exit, Failure};

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

    /// A request that can not be carried out as it is.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field of a request that is wrong.
    pub(super) fn field(name: &str, message: impl Into<String>) -> Self {
        Self { param: Some(name.to_owned()), ..Self::bad(message) }
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

impl From<&GenerationError> for ApiError {
    fn from(error: &GenerationError) -> Self {
        let message = error.to_string();
        match (error, error.exit()) {
            (GenerationError::TooLong { .. }, _) => Self::field("prompt", message).with_code("context_length_exceeded"),
            (GenerationError::EmptyPrompt | GenerationError::UnknownToken { .. }, _) => Self::field("prompt", message),
            (GenerationError::NothingLikely, _) | (_, Exit::Usage | Exit::Data) => Self::bad(message),
            (_, Exit::Memory) => Self::new(StatusCode::SERVICE_UNAVAILABLE, message),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}

impl From<RuleFault> for ApiError {
    fn from(fault: RuleFault) -> Self {
        Self::field(&fault.key.clone(), fault.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.to_json())).into_response()
    }
}
