//! What has come of a chunk whose tokens come in parts.

use tch::Tensor;

use crate::cache::ChunkSpan;
use crate::ops::attention::{Attended, KvBlock, Qkv};

/// The next tokens of a chunk whose tokens come in parts.
#[derive(Clone, Debug)]
pub(super) struct ChunkPart {
    pub(super) span: ChunkSpan,
    /// How many tokens of the chunk came before.
    pub(super) from: usize,
}

/// What has come of the chunk, part by part; exact, whatever the cache stores.
#[derive(Debug, Default)]
pub(super) struct PartialChunk {
    pub(super) q: Vec<Tensor>,
    pub(super) own: Vec<KvBlock>,
    pub(super) out: Vec<Tensor>,
    pub(super) lse: Vec<Tensor>,
}

impl Clone for PartialChunk {
    fn clone(&self) -> Self {
        // What has come is never changed.
        let all = |parts: &[Tensor]| parts.iter().map(Tensor::shallow_clone).collect();
        Self { q: all(&self.q), own: self.own.clone(), out: all(&self.out), lse: all(&self.lse) }
    }
}

impl PartialChunk {
    pub(super) fn add(&mut self, tokens: &Qkv, attended: &Attended) {
        // Copies: what a layer hands over may be written over for the next token.
        self.q.push(tokens.q_bhnd.copy());
        self.own.push(tokens.own.map(Tensor::copy));
        self.out.push(attended.out_bhnd.shallow_clone());
        self.lse.push(attended.lse_bhn.shallow_clone());
    }
}
