//! The seam between a layer and whoever remembers the past.

use std::error::Error;
use std::fmt;

use tch::Tensor;

use crate::native::cuda::GraphError;
pub use crate::ops::attention::Qkv;
use crate::units::{Exit, Failure, FaultKind, LayerIdx};

/// What a layer asks of whoever remembers the past.
pub trait Attend {
    /// Attends one layer's new tokens to the past and, causally, to themselves.
    ///
    /// # Shapes
    /// As in [`Qkv`]; `(B, H, n, D)` out.
    fn attend(&mut self, layer: LayerIdx, qkv: Qkv) -> Result<Tensor, AttendError>;

    /// Which experts one layer's new tokens go to. `choose` takes those that the router prefers; whoever computes a chunk once more gives
    /// the experts that it had before, as a rounding could make the router prefer others.
    ///
    /// # Shapes
    /// As in [`Routed`]; `(B, n, k)`, int64, out.
    fn route(&mut self, layer: LayerIdx, routed: Routed<'_>, choose: &dyn Fn() -> Tensor) -> Result<Tensor, AttendError> {
        let _ = (layer, routed);
        Ok(choose())
    }
}

/// What a router says of some tokens.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// The probability of each expert `(B, n, X)`, over all experts; with the router's history, where it is trained.
    pub probability_bnx: &'a Tensor,
    /// k, experts of a token.
    pub top_k: usize,
}

/// Why attention was refused: a message, or another room's error that is passed on as it is.
#[derive(Debug)]
pub struct AttendError(Cause);

#[derive(Debug)]
enum Cause {
    Message(String),
    Graph(GraphError),
    Error(Box<dyn PassedError>),
}

/// An error of another room that a layer passes on.
trait PassedError: Error + Failure + Send + Sync {}

impl<T: Error + Failure + Send + Sync> PassedError for T {}

impl AttendError {
    pub fn new(message: impl Into<String>) -> Self {
        Self(Cause::Message(message.into()))
    }

    pub fn caused_by(error: impl Error + Failure + Send + Sync + 'static) -> Self {
        Self(Cause::Error(Box::new(error)))
    }

    /// Why no CUDA graph was captured, if that is the reason.
    pub fn graph(&self) -> Option<&GraphError> {
        match &self.0 {
            Cause::Graph(error) => Some(error),
            _ => None,
        }
    }
}

impl From<GraphError> for AttendError {
    fn from(error: GraphError) -> Self {
        Self(Cause::Graph(error))
    }
}

impl Failure for AttendError {
    fn hint(&self) -> Option<String> {
        match &self.0 {
            Cause::Graph(_) => Some("set `grad.cuda_graphs = false`; `kvtune doctor` tries a graph by itself".into()),
            _ => self.origin()?.hint(),
        }
    }

    fn kind(&self) -> FaultKind {
        match &self.0 {
            Cause::Graph(GraphError::Lacking(_)) => FaultKind::NoGraphs,
            _ => self.origin().map_or(FaultKind::Other, Failure::kind),
        }
    }

    fn exit(&self) -> Exit {
        match &self.0 {
            Cause::Graph(GraphError::Lacking(_)) => Exit::Usage,
            _ => self.origin().map_or(Exit::Failed, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match &self.0 {
            Cause::Error(error) => Some(error.as_ref()),
            _ => None,
        }
    }
}

impl fmt::Display for AttendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Cause::Message(message) => f.write_str(message),
            Cause::Graph(error) => error.fmt(f),
            Cause::Error(error) => error.fmt(f),
        }
    }
}

impl Error for AttendError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // Display is the cause's own, so the chain goes on behind it.
        match &self.0 {
            Cause::Message(_) => None,
            Cause::Graph(error) => error.source(),
            Cause::Error(error) => error.source(),
        }
    }
}
