//! What was trained, as other programs load it: an adapter for PEFT or a server, or a model with the adapter merged into it; and the cache
//! that it was trained with (`kv_policy.json`, docs/reference/kv-policy.md), with a test of whoever runs that.

mod card;
mod gguf;
mod hub;
mod policy_file;
mod policy_trial;
mod servers;
mod trained;
mod usage;
mod write;

pub use card::card_of_run;
pub use policy_file::{KV_POLICY, PolicyFile};
pub use policy_trial::{PolicyTrial, RecordedTrial};
pub use trained::{CacheResult, ExportTarget, Trained};
pub use write::export;
