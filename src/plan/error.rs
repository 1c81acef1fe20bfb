//! What can go wrong in planning.

use super::Limits;
use crate::engine::EngineError;
use crate::model::ModelError;
use crate::units::{Bytes, Exit, Failure};

/// An error of the planner.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The recipe's caches or chunks are refused.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// What is trained does not fit the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// No tiling that the recipe allows stays within the memory that there is.
    #[error("{}", shortage((*host, *device, *files), limits, *margin, *tokens))]
    DoesNotFit {
        /// What the process would take, of all tilings by that which comes nearest.
        host: Bytes,
        /// What a device with a memory of its own would have to give.
        device: Option<Bytes>,
        /// What would wait in files.
        files: Bytes,
        limits: Limits,
        /// Percent that must be to spare.
        margin: u64,
        tokens: usize,
        advice: String,
    },
}

fn shortage((host, device, files): (Bytes, Option<Bytes>, Bytes), limits: &Limits, margin: u64, tokens: usize) -> String {
    let of = |name: &str, bytes: Bytes, limit: Option<Bytes>| {
        limit.map_or_else(
            || format!("{bytes} of {name} memory"),
            |limit| format!("{bytes} of {name} memory, of which there are {limit}"),
        )
    };
    let device = device.map(|bytes| format!("{} and ", of("device", bytes, limits.device))).unwrap_or_default();
    let host = of("host", host, limits.host);
    let there = limits.files.map_or(String::new(), |limit| format!(", for which {limit} are free"));
    let files = if files > Bytes(0) { format!(" and {files} of scratch files{there}") } else { String::new() };
    format!("a step of {tokens} tokens does not fit with a margin of {margin} %: it takes at least {device}{host}{files}")
}

impl Failure for PlanError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::DoesNotFit { advice, .. } => Some(advice.clone()),
            _ => self.origin()?.hint(),
        }
    }

    fn exit(&self) -> Exit {
        self.origin().map_or(Exit::Memory, Failure::exit)
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Engine(e) => Some(e),
            Self::Model(e) => Some(e),
            Self::DoesNotFit { .. } => None,
        }
    }
}
