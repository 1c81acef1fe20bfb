//! Attention of a chunk to the past and to itself, its backward, and the attention mass to each slot.
//!
//! Flash attention in the sense of Dao 2023 (arXiv 2307.08691): forward keeps the log-sum-exp, backward recomputes the weights. Whose
//! kernel it is, and whether past and chunk are seen at once or as parts that are merged, is the [`Backend`].

mod backend;
mod blocks;
mod chunk;
mod mass;
mod merged;
mod selector;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_of_sinks;

use tch::Tensor;

pub use backend::Backend;
#[cfg(test)]
pub(crate) use backend::forced;
pub use blocks::squared_score_gradients;
pub use chunk::{Attended, AttentionGrads, KvBlock, ModelFeature, Qkv, Queries, ScoreRule, accumulation_kind, zero_sum_of};
pub use mass::{attention_mass, attention_weights};
pub use merged::sink_logit_backward;
pub use selector::{KernelsOfHeads, try_kernels};

use backend::{attend_backward_by, attend_by};
use selector::backend_for;

/// Attends a chunk to its past (all of it, part by part) and causally to itself.
///
/// # Shapes
/// As in [`Qkv`] and [`KvBlock`]; the past is older than every query of the chunk.
pub fn attend(chunk: &Qkv, past: &[KvBlock]) -> Attended {
    attend_and_sum(chunk, past, None).0
}

/// Attends like [`attend`]. Where `asked` names queries and the kernel sums on the way, it also returns their attention mass, as in
/// [`attention_mass`].
pub fn attend_and_sum(chunk: &Qkv, past: &[KvBlock], asked: Option<Queries>) -> (Attended, Option<Tensor>) {
    let backend = backend_for(chunk, past);
    let Some(sink_logit_h) = &chunk.sink_logit_h else { return attend_by(backend, chunk, past, asked) };
    // What a kernel sums on the way are weights without the sink logit.
    (merged::with_sink(attend_by(backend, chunk, past, None).0, sink_logit_h), None)
}

/// The backward of [`attend`].
///
/// # Shapes
/// `dout_bhnd (B, H, n, D)`; the rest as in [`AttentionGrads`].
pub fn attend_backward(dout_bhnd: &Tensor, chunk: &Qkv, past: &[KvBlock], merged: &Attended) -> AttentionGrads {
    attend_backward_by(backend_for(chunk, past), dout_bhnd, chunk, past, merged)
}
