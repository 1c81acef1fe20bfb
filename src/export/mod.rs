//! What was trained, as other programs load it: an adapter for PEFT or a server, or a model with the adapter merged into it.

mod card;
mod hub;
mod servers;
mod trained;
mod usage;
mod write;

pub use card::card_of_run;
pub use trained::{CacheResult, ExportTarget, Trained};
pub use write::{Exported, export};
