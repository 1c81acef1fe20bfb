//! The seam between a layer and whoever remembers the past.

use std::error::Error;
use std::fmt;

use tch::Tensor;

pub use crate::ops::attention::Qkv;
use crate::units::LayerIdx;

/// What a layer asks of whoever remembers the past.
pub trait Attend {
    /// Attends one layer's new tokens to the past and, causally, to themselves.
    ///
    /// # Shapes
    /// As in [`Qkv`]; `(B, H, n, D)` out.
    fn attend(&mut self, layer: LayerIdx, qkv: Qkv<'_>) -> Result<Tensor, AttendError>;
}

/// Why attention was refused: a message, or another room's error that is passed on as it is.
#[derive(Debug)]
pub struct AttendError(Cause);

#[derive(Debug)]
enum Cause {
    Message(String),
    Error(Box<dyn Error + Send + Sync>),
}

impl AttendError {
    /// An error that is only a message.
    pub fn new(message: impl Into<String>) -> Self {
        Self(Cause::Message(message.into()))
    }

    /// Another room's error.
    pub fn caused_by(error: impl Error + Send + Sync + 'static) -> Self {
        Self(Cause::Error(Box::new(error)))
    }

    /// The other room's error, to be downcast by whoever knows its type (for its hint, say).
    pub fn cause(&self) -> Option<&(dyn Error + Send + Sync + 'static)> {
        match &self.0 {
            Cause::Message(_) => None,
            Cause::Error(error) => Some(error.as_ref()),
        }
    }
}

impl fmt::Display for AttendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Cause::Message(message) => f.write_str(message),
            Cause::Error(error) => error.fmt(f),
        }
    }
}

impl Error for AttendError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // Display is the cause's own, so the chain goes on behind it.
        self.cause().and_then(Error::source)
    }
}
