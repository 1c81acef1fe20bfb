//! The replay log: every choice of the forward phase, to be repeated in the backward phase and walked over by the proof.

use tch::{Device, Tensor};

use super::{ChunkSpan, HeadBudgets, Routing, Scope, Victims};
use crate::units::{Bytes, Fault, LayerIdx, quoted};

/// The choices of one layer, by the index of the chunk.
#[derive(Clone, Debug, Default)]
pub struct LayerLog {
    /// Whether a chunk's choices are forgotten once it is written, as nobody follows the log.
    forgets: bool,
    forgotten: usize,
    victims: Vec<Option<Victims>>,
    /// Empty where the layer has no experts.
    routing: Vec<Routing>,
    pub budgets: Option<HeadBudgets>,
}

impl LayerLog {
    /// A log of which only the budgets are kept: a chunk's victims are forgotten once it is written, and its routing is never recorded.
    pub fn forgetting() -> Self {
        Self { forgets: true, ..Self::default() }
    }

    /// Records what a chunk evicted; `None` where it evicted nothing.
    pub fn record(&mut self, victims: Option<Victims>) {
        self.victims.push(victims);
    }

    /// The chunk whose choice was recorded last is written: its victims are needed on the host alone, or not at all.
    pub fn finish_chunk(&mut self) {
        if self.forgets {
            self.forgotten += self.victims.len();
            self.victims.clear();
        } else if let Some(Some(victims)) = self.victims.last_mut() {
            victims.release_device();
        }
    }

    /// Goes on behind so many chunks, of which it knows nothing.
    pub fn stand_behind(&mut self, chunks: usize) {
        self.forgotten = chunks;
    }

    pub fn victims(&self, index: usize) -> Option<&Victims> {
        self.victims.get(index.checked_sub(self.forgotten)?).and_then(Option::as_ref)
    }

    /// Records which experts the tokens of the next chunk are sent to.
    pub fn record_routing(&mut self, routing: impl FnOnce() -> Routing, continues: bool) {
        if self.forgets {
            return;
        }
        let routing = routing();
        match self.routing.pop_if(|_| continues) {
            Some(before) => self.routing.push(before.followed_by(&routing)),
            None => self.routing.push(routing),
        }
    }

    pub fn routing(&self, index: usize) -> Option<&Routing> {
        self.routing.get(index.checked_sub(self.forgotten)?)
    }

    pub fn bytes(&self) -> Bytes {
        let of_budgets = self.budgets.as_ref().map(|budgets| Bytes(budgets.leaving.len() as u64));
        self.all().map(Victims::bytes).chain(self.routing.iter().map(Routing::bytes)).chain(of_budgets).sum()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Victims> {
        self.victims.iter().flatten()
    }

    /// Replaces the first victim of chunk `index` by its neighbour: a fault for tests.
    #[cfg(test)]
    pub(crate) fn shift_first_victim(&mut self, index: usize) {
        let old = self.victims[index].take().unwrap();
        let size = old.packed().size();
        let mut slots: Vec<i64> = Vec::try_from(old.slots(size[0], size[1], tch::Device::Cpu).reshape([-1])).unwrap();
        // A head's own victims come first in the flat list; its neighbour below is filled, and so is the next one up.
        let own = &slots[..old.count()];
        let free = |slot: &i64| !own.contains(slot);
        slots[0] = (0..slots[0]).rev().find(free).or_else(|| (slots[0] + 1..=slots[0] + own.len() as i64).find(free)).unwrap();
        self.victims[index] = Some(Victims::new(&tch::Tensor::from_slice(&slots).view(&size[..]), 1 << 20));
    }

    /// The experts of the tokens of some chunks, one chunk after the other, checked to be those of so many experts a token and of
    /// `num_experts` in all.
    ///
    /// # Shapes
    /// `(B, n, k)`, int64.
    pub fn recall_routing(
        &self,
        layer: LayerIdx,
        spans: &[ChunkSpan],
        top_k: usize,
        num_experts: usize,
        device: Device,
    ) -> Result<Tensor, Fault> {
        let mut parts = Vec::with_capacity(spans.len());
        for span in spans {
            let expected = [span.num_sequences(), span.len, top_k].map(|n| n as i64);
            let found = self.routing(span.index).map_or([0; 3], Routing::size);
            same(&expected, &found, |size| format!("experts of size {size:?} in layer {layer}, chunk {}", span.index))?;
            let Some(routing) = self.routing(span.index) else { continue };
            if routing.largest >= num_experts as i64 {
                let expected = format!("experts below {num_experts} in layer {layer}");
                return Err(other_log(&expected, &format!("expert {}", routing.largest)));
            }
            parts.push(routing.chosen(device));
        }
        Ok(Tensor::cat(&parts, 1))
    }
}

/// The choices of all layers, with the chunks they belong to.
#[derive(Clone, Debug)]
pub struct ReplayLog {
    /// In the order of writing.
    pub spans: Vec<ChunkSpan>,
    /// Slots of each layer (at most the longest sequence's tokens).
    pub cache_lengths: Vec<usize>,
    pub layers: Vec<LayerLog>,
}

impl ReplayLog {
    pub fn bytes(&self) -> Bytes {
        self.layers.iter().map(LayerLog::bytes).sum()
    }

    /// The experts of all tokens in a layer that has some, for a batch of so many sequences: expert 0 and on for those that have left. `T` is
    /// the longest sequence; a last block of decoding may have been longer.
    ///
    /// # Shapes
    /// `(B, T, k)`, int64.
    pub fn routing(&self, layer: usize, sequences: usize, device: Device) -> Option<Tensor> {
        let padded = |span: &ChunkSpan| {
            let chosen_bnk = self.layers[layer].routing(span.index)?.chosen(device);
            let left = sequences - span.num_sequences();
            Some(if left == 0 { chosen_bnk } else { chosen_bnk.constant_pad_nd([0, 0, 0, 0, 0, left as i64]) })
        };
        let parts: Option<Vec<Tensor>> = self.spans.iter().map(padded).collect();
        let tokens = self.spans.iter().map(|span| span.start + span.real.iter().max().unwrap_or(&0)).max()?;
        parts.map(|parts| Tensor::cat(&parts, 1).narrow(1, 0, tokens as i64))
    }

    /// Fails if the log was made on another batch, with other caches, or by a model with another number of heads.
    pub fn check_fits(&self, spans: &[ChunkSpan], cache_lengths: &[usize], num_kv_heads: &[usize]) -> Result<(), Fault> {
        same(&cache_lengths.len(), &self.layers.len(), |n| format!("{n} layers"))?;
        let batch = |spans: &[ChunkSpan]| spans.first().map_or(0, ChunkSpan::num_sequences);
        same(&batch(spans), &batch(&self.spans), |n| format!("a batch of {n}"))?;
        for (expected, found) in spans.iter().zip(&self.spans) {
            let words = |s: &ChunkSpan| {
                let ChunkSpan { index, chunk, start, len, real, is_block } = s;
                let kind = if *is_block { "block" } else { "chunk" };
                format!("{kind} {index} (event {chunk}) of {len} positions from {start}, with {real:?} tokens by sequence")
            };
            same(expected, found, words)?;
        }
        same(&spans.len(), &self.spans.len(), |n| format!("{n} chunks"))?;
        for (layer, (expected, found)) in cache_lengths.iter().zip(&self.cache_lengths).enumerate() {
            same(expected, found, |n| format!("{n} slots in layer {layer}"))?;
        }
        self.head_counts().try_for_each(|(layer, heads)| same(&num_kv_heads[layer], &heads, |n| format!("{n} KV heads")))
    }

    /// KV heads of a layer that chose for themselves; 1 where all agreed.
    pub fn num_deciders(&self, layer: usize) -> usize {
        self.head_counts().filter(|(other, _)| *other == layer).map(|(_, heads)| heads).max().unwrap_or(1)
    }

    /// Layer and number of heads of each choice that heads made for themselves.
    pub(super) fn head_counts(&self) -> impl Iterator<Item = (usize, usize)> {
        let of_layer = |(layer, log): (usize, &LayerLog)| {
            let chosen: Vec<usize> = log.all().map(Victims::num_heads).filter(|&heads| heads > 1).collect();
            let shared = log.budgets.as_ref().and_then(|budgets| budgets.shares.first()).map(Vec::len);
            chosen.into_iter().chain(shared).map(move |heads| (layer, heads))
        };
        self.layers.iter().enumerate().flat_map(of_layer)
    }
}

/// Bytes that the log keeps of one evicted entry of all sequences and heads in one layer, at most: so many choices of a slot below `capacity`.
pub fn log_bytes_per_token(scope: Scope, capacity: usize, batch: usize, num_kv_heads: usize) -> Bytes {
    let choices = match scope {
        Scope::Batch => 1,
        Scope::Sequence => batch,
        Scope::Head => batch * num_kv_heads,
    };
    Bytes((choices * Victims::kind(capacity).elt_size_in_bytes()) as u64)
}

fn same<T: PartialEq>(expected: &T, found: &T, words: impl Fn(&T) -> String) -> Result<(), Fault> {
    if expected == found { Ok(()) } else { Err(other_log(&words(expected), &words(found))) }
}

fn other_log(expected: &str, found: &str) -> Fault {
    let found = quoted(found);
    Fault::data(
        format!("the replay log belongs to another model or batch: expected {expected}, found {found}"),
        "take the recipe, the data and the number of samples with which the log was written",
    )
}
