//! Several ranks: who they are, how they find each other, and what they exchange. One rank alone opens nothing.
//!
//! The engine is libtorch's c10d: a `TCPStore` in which the ranks meet, and Gloo between them; between GPUs it is NCCL, where it can be had.
//! A launcher starts the processes, and says by variables of the environment which is which ([`Launched`]); a [`ProcessGroup`] connects them.

mod agree;
mod backend;
mod exchange;
mod heartbeat;
mod launch;
mod peer;
mod process_group;
mod rendezvous;
#[cfg(test)]
pub(crate) mod tests;

pub use backend::RankBackend;
pub use launch::Launched;
pub use peer::Peer;
pub use process_group::ProcessGroup;
