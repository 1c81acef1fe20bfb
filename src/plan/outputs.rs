//! Attention's outputs that wait for their cells, in bytes.

use std::collections::HashMap;

use super::StepSpec;
use crate::cache::ChunkSpan;
use crate::ops::attention::accumulation_kind;
use crate::store::{Form, copies_are_async};

/// What waits, by layer and column.
#[derive(Debug, Default)]
pub(super) struct WaitingOutputs {
    waiting: HashMap<(usize, usize), u64>,
    now: u64,
    most: u64,
}

impl WaitingOutputs {
    /// Those of a column's chunks in a layer begin to wait.
    pub(super) fn put(&mut self, spec: &StepSpec<'_>, (layer, column): (usize, usize), spans: &[ChunkSpan]) {
        if spec.settings.keeps_attention_outputs() {
            let bytes = bytes(spec, layer, spans);
            self.waiting.insert((layer, column), bytes);
            self.now += bytes;
            self.most = self.most.max(self.now);
        }
    }

    /// They have been fetched; returns what they took, where they waited.
    pub(super) fn take(&mut self, layer: usize, column: usize) -> u64 {
        let taken = self.waiting.remove(&(layer, column)).unwrap_or(0);
        self.now -= taken;
        taken
    }

    /// What waits; and room of the store that was used before, where there is one.
    pub(super) fn memory(&self, spec: &StepSpec<'_>) -> (u64, u64) {
        (self.now, if copies_are_async(spec.device) { self.most - self.now } else { 0 })
    }

    /// A step was made: nothing waits, and the store has the room.
    pub(super) fn forget(&mut self) {
        (self.waiting, self.now) = (HashMap::new(), 0);
    }
}

/// An output and a log-sum-exp for each chunk.
fn bytes(spec: &StepSpec<'_>, layer: usize, spans: &[ChunkSpan]) -> u64 {
    let attention = &spec.config.layers[layer].attention;
    let of_span = |span: &ChunkSpan| {
        let [b, h, n, d] = [span.num_sequences(), attention.num_heads, span.len, attention.head_dim].map(|n| n as i64);
        if copies_are_async(spec.device) {
            return Form::Plain.bytes_of(&[b, h, n, d], spec.kind).0
                + Form::Plain.bytes_of(&[b, h, n], accumulation_kind(spec.kind)).0;
        }
        (b * h * n) as u64 * (d as u64 * spec.element() + spec.wide())
    };
    spans.iter().map(of_span).sum()
}
