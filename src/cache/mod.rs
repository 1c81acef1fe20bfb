//! Slots, policies, buffers, replay log and undo log: what remembers the past of one layer. Knows no model, no tokenizer.

mod error;
mod gradients;
mod layer;
mod moves;
pub mod policies;
mod policy;
mod ragged;
mod replay;
mod span;
mod victims;

pub use error::CacheError;
pub use gradients::CacheGrads;
pub use layer::{LayerCache, Shape, Undo, Written};
pub use policy::{Entries, Policy, Rank, build};
pub use ragged::Placement;
pub use replay::{LayerLog, ReplayLog};
pub use span::ChunkSpan;
pub use victims::Victims;
