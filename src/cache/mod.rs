//! Slots, policies, buffers, replay log and undo log: what remembers the past of one layer. Knows no model, no tokenizer.

mod budget;
mod buffer;
mod entry_stats;
mod footprint;
mod gradients;
mod layer;
mod moves;
pub mod policies;
mod policy;
mod policy_view;
mod ragged;
mod replay;
mod replay_file;
mod routing;
mod shape;
mod snapshot;
mod undo;
mod victims;

pub use budget::HeadBudgets;
pub use buffer::as_stored;
pub use footprint::{UndoBytes, stats_per_entry};
pub use gradients::CacheGrads;
pub use layer::{LayerCache, Written};
pub(crate) use policies::{STREAMING_LLM_SINKS, rolling};
pub use policies::{build, initial_part, of_any_length};
pub use policy::{BudgetRule, ChunkAttention, Entries, EvictionOrder, NewEntries, Observed, Policy, PolicyTraits, Scope};
pub use ragged::Placement;
pub use replay::{LayerLog, ReplayLog, log_bytes_per_token};
pub use routing::Routing;
pub use shape::{CacheShape, ChunkSpan};
pub use snapshot::CacheSnapshot;
pub use undo::Undo;
pub use victims::Victims;

pub use crate::ops::attention::Queries;
