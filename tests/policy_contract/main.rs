//! What every policy and every buffer promise, seen at each chunk: entries told apart by content, a slow reference beside them, and
//! the way back to the bit.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on fails, and says what it saw")]

mod content;
mod guide;
mod played;
mod random_scenes;
mod real_attention;
mod reference;
mod refusals;
mod scene;
mod scenes;
mod shelf;
mod slow_policies;
mod slow_scores;
mod slow_shares;
#[path = "../support/mod.rs"]
mod support;
mod synthetic_attention;

// The guide's policy names its rooms as if it stood in `src`.
use kvtune::{cache, recipe};
