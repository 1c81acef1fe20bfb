//! Slots, policies, buffers, replay log and undo log: what remembers the past of one layer. Knows no model, no tokenizer.

mod buffer;
mod error;
mod footprint;
mod gradients;
mod judge;
mod layer;
mod moves;
mod notes;
pub mod policies;
mod policy;
mod quota;
mod ragged;
mod replay;
mod replay_file;
mod span;
mod undo;
mod victims;

pub use buffer::as_stored;
pub use error::CacheError;
pub use footprint::{UndoBytes, notes_per_entry};
pub use gradients::CacheGrads;
pub use layer::{LayerCache, Shape, Written};
pub use policy::{Attention, Entries, NewEntries, Observed, Policy, Scope, Score, build, initial_part};
pub use quota::Quota;
pub use ragged::Placement;
pub use replay::{LayerLog, ReplayLog, log_bytes_per_token};
pub use span::ChunkSpan;
pub use undo::{ParkedUndo, Undo, UndoAhead};
pub use victims::Victims;

pub use crate::ops::attention::Queries;
