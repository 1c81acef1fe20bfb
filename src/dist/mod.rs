//! Several ranks: who they are, how they find each other, and what they exchange. One rank alone opens nothing.
//!
//! The engine is libtorch's c10d: a `TCPStore` in which the ranks meet, and Gloo between them; between GPUs it is NCCL, where it can be had. Others start the processes, and say by
//! variables of the environment which is which ([`Launched`]); a [`World`] is what comes of it.

mod agree;
mod backend;
mod error;
mod exchange;
mod join;
mod launch;
mod pulse;
#[cfg(test)]
pub(crate) mod tests;
mod world;

pub use backend::RankBackend;
pub use error::{DistError, Peer};
pub use launch::Launched;
pub use world::World;
