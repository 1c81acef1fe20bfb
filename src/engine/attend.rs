//! How a column's layers reach their caches: choosing, following recorded choices, or either of them under autograd; and the budget that
//! the heads of all layers share, which is given out before a column.

use std::ops::Range;

use tch::{Device, Tensor, no_grad};

use super::attended_chunk::ChunkPart;
use super::layer_state::{ChunkGrads, SharedLayer, link};
use super::router_balance::RouterTask;
use super::undo_log::KeepUndo;
use crate::cache::{ChunkSpan, HeadBudgets, Policy, Routing};
use crate::model::{Attend, Qkv, Routed};
use crate::native::{attach_backward, locked};
use crate::ops::attention::{KvBlock, ModelFeature};
use crate::units::{Fault, LayerIdx};

/// A column's chunks; attention goes chunk by chunk, everything else of a layer runs over the whole column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column<'a> {
    pub(super) spans: &'a [ChunkSpan],
    pub(super) states: &'a [SharedLayer],
    /// First layer, and the one behind the last, of those that the column runs through.
    pub(super) first: usize,
    pub(super) end: usize,
    /// Whether the pass goes on from here through all other layers: caches take turns in all of them.
    pub(super) continues: bool,
    /// Whether anything follows the attention of the uppermost layer that it runs through.
    pub(super) has_output: bool,
}

impl Column<'_> {
    /// Lets one layer work: its cache is brought to the device, the next one's is prefetched, and its own is sent back when it is
    /// done, unless it is the next one itself. Without offloading all of this is nothing.
    fn with_cache<T>(&self, layer: LayerIdx, next: usize, work: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
        for layer in [layer.0, next] {
            locked(&self.states[layer]).cache.prefetch();
        }
        let done = work()?;
        if self.has_waiting_layers() && next != layer.0 {
            locked(&self.states[layer.0]).cache.offload();
        }
        Ok(done)
    }

    /// Whether there are layers that wait while one works and one is on its way.
    pub(super) fn has_waiting_layers(&self) -> bool {
        self.turn_layers().len() > 2
    }

    /// The layers whose caches take turns.
    fn turn_layers(&self) -> Range<usize> {
        if self.continues { 0..self.states.len() } else { self.first..self.end }
    }

    /// The layer that is next on the way up; the lowest after the uppermost.
    fn above(&self, layer: LayerIdx) -> usize {
        let Range { start, end } = self.turn_layers();
        if layer.0 + 1 < end { layer.0 + 1 } else { start }
    }

    /// Writes the budgets of every layer's heads into its log, where policies share one over all layers and the column's first chunk is the first
    /// that evicts. A column goes through one layer after the other, so nobody sees two layers at once, but between two columns all caches stand
    /// after the same chunk: before it the entries of all layers are compared.
    pub(super) fn allocate_across_layers(&self, policies: &[Box<dyn Policy>]) {
        let (span, mut due, mut keys) = (&self.spans[0], Vec::new(), Vec::new());
        for (layer, policy) in self.states.iter().zip(policies) {
            let (mut state, rule) = (locked(layer), policy.traits().budgets.filter(|rule| rule.across_layers));
            let Some(rule) = rule.filter(|_| state.cache.is_budget_due(span)) else { continue };
            state.cache.prefetch();
            state.cache.enter(span);
            keys.push(state.cache.budget_keys(&**policy, span).to_device(Device::Cpu));
            due.push((layer, state.cache.shape().cache_length, rule.floor));
            state.cache.offload();
        }
        let Some(&(_, cache_length, floor)) = due.last() else { return };
        for ((layer, ..), budgets) in due.into_iter().zip(HeadBudgets::across_layers(&keys, span, cache_length, floor)) {
            locked(layer).log.budgets = Some(budgets);
        }
    }

    /// Calls `attend` for each chunk with its part of q, k, v and joins the outputs. Pads beyond the column's chunks attend to nothing.
    fn by_chunk(&self, qkv: &Qkv, mut attend: impl FnMut(&ChunkSpan, &Qkv) -> Result<Tensor, Fault>) -> Result<Tensor, Fault> {
        let mut lengths: Vec<i64> = self.spans.iter().map(|span| span.len as i64).collect();
        let pads = qkv.num_tokens() - lengths.iter().sum::<i64>();
        lengths.extend((pads > 0).then_some(pads));
        // Parts that are split off together get their gradients together: by themselves each would be as large as the column.
        let parts = |x: &Tensor| {
            if lengths.len() == 1 && pads == 0 { vec![x.shallow_clone()] } else { x.split_with_sizes(&lengths[..], 2) }
        };
        let (q, planes) = (parts(&qkv.q_bhnd), qkv.own.planes().map(parts).collect::<Vec<_>>());
        let mut outs = Vec::with_capacity(lengths.len());
        for (i, span) in self.spans.iter().enumerate() {
            let own = KvBlock::of_planes(planes.iter().map(|parts| parts[i].shallow_clone()));
            let sink_logit_h = qkv.sink_logit_h.as_ref().map(Tensor::shallow_clone);
            let tokens = Qkv { q_bhnd: q[i].shallow_clone(), own, rule: qkv.rule, sink_logit_h, joined: None };
            outs.push(attend(span, &tokens)?);
        }
        if pads > 0 {
            outs.push(q[self.spans.len()].zeros_like());
        }
        Ok(if outs.len() == 1 { outs.remove(0) } else { Tensor::cat(&outs, 2) })
    }
}

pub(super) enum Mode<'a> {
    /// Policies choose, and what they choose is recorded.
    Choose {
        policies: &'a [Box<dyn Policy>],
        /// The part of a chunk that the column is, where it is no whole one.
        part: Option<&'a ChunkPart>,
    },
    /// Recorded choices are followed: in a forward phase that is given its log, or in a layer band's second forward.
    Follow,
    /// A cell is computed with autograd: one custom node per layer and chunk, over the shared buffers.
    Differentiate {
        /// What chooses, in the forward phase; recorded choices are followed without it.
        policies: Option<&'a [Box<dyn Policy>]>,
        /// The leaf at which every layer's chain begins.
        chain: &'a Tensor,
        /// The ends of the chains, which are roots of the backward.
        chain_ends: Vec<Tensor>,
    },
}

/// How a column's layers reach their caches.
pub(super) struct ColumnAttention<'a> {
    pub(super) column: Column<'a>,
    pub(super) mode: Mode<'a>,
    /// The layers whose undo log is kept; under autograd a cell has its own.
    pub(super) keeps_undo: Range<usize>,
    pub(super) routers: Option<RouterTask<'a>>,
}

impl ColumnAttention<'_> {
    /// Distributes a budget that all layers share, where policies choose and the column begins with the first chunk that evicts.
    pub(super) fn allocate_budgets(&self) {
        // A chunk whose tokens come in parts has its budgets from the call that began it.
        let (Mode::Choose { policies, part: None } | Mode::Differentiate { policies: Some(policies), .. }) = self.mode else {
            return;
        };
        // Where a column is run band by band, the bands below have written its chunks when the next one begins.
        if self.column.first == 0 {
            self.column.allocate_across_layers(policies);
        }
    }
}

impl Attend for ColumnAttention<'_> {
    fn attend(&mut self, layer: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault> {
        let (column, state, wants_output) = (self.column, &self.column.states[layer.0], self.wants_output(layer));
        let keep = if self.keeps_undo.contains(&layer.0) { KeepUndo::Parked } else { KeepUndo::Nothing };
        match &mut self.mode {
            Mode::Choose { policies, part } => column.with_cache(layer, column.above(layer), || {
                column.by_chunk(&qkv, |span, qkv| {
                    let (mut state, policy) = (locked(state), &*policies[layer.0]);
                    match *part {
                        Some(part) => state.forward_part(policy, part, qkv),
                        None => Ok(state.forward_chunk(policy, span, qkv, keep)?.0),
                    }
                })
            }),
            Mode::Follow => column.with_cache(layer, column.above(layer), || {
                column.by_chunk(&qkv, |span, qkv| locked(state).replay(span, qkv, keep, wants_output))
            }),
            Mode::Differentiate { policies, chain, chain_ends } => {
                let policy = policies.map(|policies| &*policies[layer.0]);
                let (out, end) = column.differentiate(layer, policy, &qkv, chain)?;
                chain_ends.extend(end);
                Ok(out)
            }
        }
    }

    fn wants_output(&self, layer: LayerIdx) -> bool {
        self.column.has_output || layer.0 + 1 < self.column.end
    }

    fn model_feature(&self, layer: LayerIdx) -> Option<ModelFeature> {
        locked(&self.column.states[layer.0]).cache.shape().model_feature
    }

    fn see_input(&mut self, layer: LayerIdx, x_bne: &Tensor, queries: &dyn Fn() -> Tensor) {
        if let Mode::Differentiate { .. } = self.mode
            && let Some(importance) = &mut locked(&self.column.states[layer.0]).importance
        {
            importance.see_inputs(self.column.spans, x_bne, queries);
        }
    }

    fn route(&mut self, layer: LayerIdx, routed: Routed<'_>, choose: &dyn Fn() -> Tensor) -> Result<Tensor, Fault> {
        let num_experts = routed.probability_bnx.size()[2] as usize;
        let (spans, state) = (self.column.spans, &mut *locked(&self.column.states[layer.0]));
        let part = match self.mode {
            Mode::Choose { part, .. } => Some(part),
            Mode::Differentiate { policies: Some(_), .. } => Some(None),
            _ => None,
        };
        let chosen_bnk = if let Some(part) = part {
            let chosen_bnk = no_grad(choose);
            for span in spans {
                let start = (span.start - spans[0].start) as i64;
                let routing = || Routing::new(&chosen_bnk.narrow(1, start, span.len as i64), num_experts);
                state.log.record_routing(routing, part.is_some_and(|part| part.from > 0));
            }
            chosen_bnk
        } else {
            state.log.recall_routing(layer, spans, routed.top_k, num_experts, routed.probability_bnx.device())?
        };
        if let Some(routers) = &mut self.routers {
            routers.take(spans, routed.probability_bnx, &chosen_bnk);
        }
        Ok(chosen_bnk)
    }
}

impl Column<'_> {
    /// Attends chunk by chunk under autograd, along a chain that begins at `leaf`; also returns the chain's end. `policy` chooses; recorded
    /// choices are followed without it.
    fn differentiate(
        self,
        layer: LayerIdx,
        policy: Option<&dyn Policy>,
        qkv: &Qkv,
        leaf: &Tensor,
    ) -> Result<(Tensor, Option<Tensor>), Fault> {
        let mut chain = leaf.shallow_clone();
        #[cfg(test)]
        if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::ChainRemoved) {
            chain = chain.detach();
        }
        // Where the backward follows at once it comes from above, where the uppermost layer comes first again.
        let next = if self.continues || layer.0 + 1 < self.end { self.above(layer) } else { layer.0 };
        let out = self.with_cache(layer, next, || {
            self.by_chunk(qkv, |span, qkv| {
                let (out, next) = self.attend_chunk(layer, policy, span, qkv, &chain)?;
                chain = next;
                Ok(out)
            })
        })?;
        #[cfg(test)]
        if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::ChainRemoved) {
            return Ok((out, None));
        }
        Ok((out, Some(chain)))
    }

    /// The fused operator: writes the chunk into the shared buffers and attends; its backward attends backward over the buffers as
    /// they stand, adds to their gradient, and unwinds both.
    ///
    /// The node must exist and run whatever is trained, and in reverse order of the chunks: so it takes and returns a one-element
    /// tensor that requires grad. Without that chain, LoRA on the MLP alone would leave layer 0's cache wound up.
    fn attend_chunk(
        self,
        layer: LayerIdx,
        policy: Option<&dyn Policy>,
        span: &ChunkSpan,
        qkv: &Qkv,
        chain: &Tensor,
    ) -> Result<(Tensor, Tensor), Fault> {
        let state = &self.states[layer.0];
        // For offloaded caches: the column's last chunk, whose backward comes first, sets the layer below on its way, and the first sends its
        // own layer back.
        let is = |edge: Option<&ChunkSpan>| edge.is_some_and(|edge| edge.index == span.index);
        let below = (is(self.spans.last()) && layer.0 > self.first).then(|| self.states[layer.0 - 1].clone());
        let parks = is(self.spans.first()) && self.has_waiting_layers();
        let inputs: Vec<&Tensor> = [&qkv.q_bhnd, chain].into_iter().chain(qkv.own.planes()).chain(&qkv.sink_logit_h).collect();
        let needs: Vec<bool> = inputs.iter().map(|input| input.requires_grad()).collect();
        let (out, saved, next) = no_grad(|| {
            let (own, sink_logit_h) = (qkv.own.map(Tensor::detach), qkv.sink_logit_h.as_ref().map(Tensor::detach));
            let tokens = &Qkv { q_bhnd: qkv.q_bhnd.detach(), own, rule: qkv.rule, sink_logit_h, joined: None };
            let mut layer = locked(state);
            let made = match policy {
                Some(policy) => layer.forward_chunk(policy, span, tokens, KeepUndo::Resident),
                None => layer.recompute(span, tokens),
            };
            let (out, saved) = made?;
            // Autograd hangs its history on a tensor of its own; its numbers are those that the backward keeps.
            Ok::<_, Fault>((out.detach(), saved, link(chain)))
        })?;
        let (shared, here, trains_sinks) =
            (state.clone(), span.clone(), qkv.sink_logit_h.as_ref().is_some_and(Tensor::requires_grad));
        attach_backward(&inputs, &[&out, &next], move |grads| {
            locked(&shared).cache.prefetch();
            if let Some(below) = &below {
                locked(below).cache.prefetch();
            }
            let made = no_grad(|| locked(&shared).backward(&here, &saved, grads[0].as_ref(), trains_sinks));
            let ChunkGrads { q, own, sink_logit } = made.map_err(|e| e.to_string())?;
            if parks {
                locked(&shared).cache.offload();
            }
            let end = link(&q);
            let all = [q, end].into_iter().chain(own.into_planes()).map(Some).chain([sink_logit]);
            Ok(all.zip(needs).map(|(grad, needed)| grad.filter(|_| needed)).collect())
        })?;
        Ok((out, next))
    }
}
