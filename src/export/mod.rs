//! What was trained, as other programs load it: an adapter for PEFT or a server, or a model with the adapter merged into it.

mod card;
mod error;
mod servers;
mod trained;
mod write;

pub use error::ExportError;
pub use trained::{ExportTarget, Trained};
pub use write::export;
