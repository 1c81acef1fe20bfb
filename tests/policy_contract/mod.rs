//! What every policy and every buffer promise, seen at each chunk: entries told apart by content, a slow reference beside them, and
//! the way back to the bit.

pub(crate) mod content;
mod guide;
mod planes;
mod random_scenes;
mod real_attention;
mod reference;
mod refusals;
pub(crate) mod scene;
pub(crate) mod scenes;
mod shelf;
mod simulated;
mod slow_policies;
mod slow_scores;
mod slow_shares;
pub(crate) mod synthetic_attention;
