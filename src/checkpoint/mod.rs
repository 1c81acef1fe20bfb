//! What a run leaves on disk: checkpoints committed whole, read back exactly, found again after a crash.
//!
//! A checkpoint is a directory: the adapter in PEFT's format or a complete model, `optimizer.safetensors`, `state.json`, and `MANIFEST.json` with the
//! size and hash of every file. It counts only if its manifest verifies. The last one of a run, `final`, is what others load: it has tokenizer and
//! model card, and no optimiser state, which the checkpoint of the same step has.

mod aside;
mod commit;
mod find;
mod list;
mod manifest;
mod state;

pub use aside::{abandon, set_aside};
pub use commit::{OptimizerTensors, Snapshot, latest, retain, save};
pub use find::{
    NewestCheckpoint, adapter_hash, check, clean_leftovers, holds, load, load_optimizer, names, newest, refuse_links, state_of,
};
pub use list::{CheckpointListing, list, look};
pub use manifest::{CARD, Manifest};
pub use state::{Best, FINAL, ParameterInfo, SampleCounts, SaveKind, TrainState};
