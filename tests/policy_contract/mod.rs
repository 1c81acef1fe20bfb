//! What every policy and every buffer promise, seen at each chunk: entries told apart by content, a slow reference beside them, and
//! the way back to the bit.

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
mod synthetic_attention;
