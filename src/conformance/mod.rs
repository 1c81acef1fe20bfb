//! `kv_policy.json`: the cache that a model was trained with, for programs that are to run it with the same one, and a test of whether they do.
//!
//! `docs/reference/kv-policy.md` describes the file.

mod policy_file;
mod trial;

pub use policy_file::{KV_POLICY, PolicyFile, unfit};
pub use trial::{Departures, PolicyTrial, RecordedTrial};
