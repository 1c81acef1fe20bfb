//! What layers and columns of a step take, each asked of its owner.

use std::ops::Range;
use std::rc::Rc;

use super::StepSpec;
use crate::cache::{CacheShape, ChunkSpan, Routing, UndoBytes, stats_per_entry};
use crate::engine::ChunkPlan;
use crate::head::HeadFootprint;
use crate::model::{ColumnShape, LayerBytes, LayerFootprint};
use crate::recipe::{BufferKind, full_cache_chunk_size};

/// One layer in a whole step.
#[derive(Clone, Debug)]
pub(super) struct LayerMemory {
    pub(super) cache: u64,
    /// Bytes of keys and values that wait on the host.
    pub(super) waiting_cache: u64,
    /// Bytes of a policy's statistics of the entries.
    pub(super) stats: u64,
    pub(super) gradients: u64,
    /// The copy of a cache that grows.
    pub(super) growing: u64,
    pub(super) log: u64,
    pub(super) columns: Rc<[LayerColumn]>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LayerColumn {
    pub(super) bytes: LayerBytes,
    /// Overwritten entries where they wait, and where they are unwound.
    pub(super) undo: u64,
    pub(super) resident_undo: u64,
    pub(super) outputs: u64,
}

/// A column of tokens in all layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedColumn {
    /// Tokens of all sequences, pads with them.
    pub(super) tokens: usize,
    pub(super) hidden: u64,
    /// Hidden states, and the rotations that all layers share.
    pub(super) shared: u64,
    pub(super) checkpoint: u64,
    pub(super) head: u64,
    pub(super) has_targets: bool,
    /// Whether anything follows the uppermost layer's attention.
    pub(super) has_output: bool,
}

/// Hidden states of so many sequences, and the rotations that all layers share.
fn shared(spec: &StepSpec<'_>, sequences: usize, length: usize) -> u64 {
    let rotated: usize = spec.config.rotations().into_iter().map(|rope| rope.rotary_dim).sum();
    (sequences * length) as u64 * spec.hidden() * spec.element() + (length * rotated) as u64 * spec.element()
}

/// All columns of a plan; `targets` are the positions with a target, by column.
pub(super) fn columns(spec: &StepSpec<'_>, plan: &ChunkPlan, targets: &[usize]) -> Vec<PlannedColumn> {
    let form = spec.settings.grad().layer_checkpoints.form;
    let of_column = |(column, &targets): (&Range<usize>, &usize)| {
        let (sequences, (_, length)) = (plan.sequences(column), plan.tokens(column));
        let tokens = sequences * length;
        let hidden = tokens as u64 * spec.hidden() * spec.element();
        let size = [sequences, length, spec.config.hidden_size].map(|n| n as i64);
        let head = HeadFootprint {
            targets,
            choices: spec.config.num_scores(),
            hidden: spec.config.hidden_size,
            trained: spec.output_numbers(),
            is_widened: spec.is_narrow() && !spec.trains_weights(),
            is_distilled: spec.recipe.distill.is_some(),
            of_output: of_output(spec),
            kind: spec.kind,
            device: spec.device,
        };
        PlannedColumn {
            tokens,
            hidden,
            shared: shared(spec, sequences, length),
            checkpoint: form.bytes_of(&size, spec.kind).0,
            head: head.bytes(),
            has_targets: targets > 0,
            has_output: targets > 0 || spec.config.ends_in_experts(),
        }
    };
    plan.columns.iter().zip(targets).map(of_column).collect()
}

/// All layers, of which those that are alike are looked at once. The uppermost one ends at its attention in columns without an output.
pub(super) fn layers(spec: &StepSpec<'_>, plan: &ChunkPlan, columns: &[PlannedColumn]) -> Vec<LayerMemory> {
    let shapes = spec.settings.cache_shapes(spec.config, plan, spec.kind, spec.device);
    let mut layers: Vec<LayerMemory> = Vec::new();
    for (index, shape) in shapes.iter().enumerate() {
        // The lowest that is trained has no gradient below it.
        let kind = |layer: usize| (&spec.config.layers[layer], shapes[layer], layer > spec.trained.first_layer);
        let known = (0..index).find(|&other| kind(other) == kind(index)).map(|other| layers[other].clone());
        layers.push(known.unwrap_or_else(|| layer(spec, plan, index, shape)));
    }
    let ending = |(layer, column): (&LayerColumn, &PlannedColumn)| LayerColumn {
        bytes: if column.has_output { layer.bytes } else { layer.bytes.of_attention(column.hidden) },
        ..*layer
    };
    if let Some(top) = layers.last_mut() {
        top.columns = top.columns.iter().zip(columns).map(ending).collect();
    }
    layers
}

fn layer(spec: &StepSpec<'_>, plan: &ChunkPlan, index: usize, shape: &CacheShape) -> LayerMemory {
    let traits = spec.settings.policy(index).traits();
    let experts = spec.config.layers[index].feed_forward.experts();
    let routing = experts.map_or(0, |experts| Routing::bytes_of_token(experts.top_k, experts.num_experts));
    let routed = |span: &ChunkSpan| routing * (span.num_sequences() * span.len) as u64;
    let (slots, copied) = shape.growth(&plan.spans, traits.budgets);
    let entries = (plan.num_sequences() * slots) as u64 * shape.groups as u64;
    let (all, positions) = (shape.slot_bytes(slots).0, shape.position_bytes(slots).0);
    let (cache, waiting_cache) = if shape.is_offloaded { (positions, all - positions) } else { (all, 0) };
    let phases = plan.spans.iter().map(ChunkSpan::is_prefill);
    let policy = spec.settings.policy(index);
    let phases = [true, false].into_iter().filter(|wanted| phases.clone().any(|is_prefill| is_prefill == *wanted));
    let stats = phases.map(|is_prefill| stats_per_entry(policy, is_prefill)).max().unwrap_or(0) as u64;
    LayerMemory {
        cache,
        waiting_cache,
        stats: 4 * stats * entries,
        gradients: entries * (2 * shape.head_dim + shape.further_widths().sum::<i64>()) as u64 * spec.wide(),
        growing: copied.0,
        log: spec.settings.log_bytes(index, plan, shape.groups as usize).1.0 + plan.spans.iter().map(routed).sum::<u64>(),
        columns: layer_columns(spec, plan, index, shape),
    }
}

fn footprint<'a>(spec: &StepSpec<'a>, index: usize) -> LayerFootprint<'a> {
    LayerFootprint {
        layer: &spec.config.layers[index],
        hidden: spec.config.hidden_size,
        trained: spec.trained,
        has_gradient_below: index > spec.trained.first_layer || spec.trains_embedding(),
        kind: spec.kind,
        device: spec.device,
        threads: spec.threads,
    }
}

/// What the longest sequence of a plan takes alone in caches that keep everything, and what its last chunk takes at most on its way through
/// the layers.
pub(super) fn of_full_cache(spec: &StepSpec<'_>, plan: &ChunkPlan) -> (u64, u64) {
    let chunk = plan.len().min(full_cache_chunk_size(spec.settings.chunk_size()));
    let slots = spec.settings.slots_of_full_cache(plan.len(), chunk);
    let shapes = spec.settings.cache_shapes(spec.config, plan, spec.kind, spec.device);
    let plain = |shape: &CacheShape| CacheShape { batch: 1, model_feature: None, buffer: BufferKind::Plain, ..*shape };
    let cache = shapes.iter().zip(&slots).map(|(shape, &slots)| plain(shape).slot_bytes(slots).0).sum();
    let forward = |(index, &slots): (usize, &usize)| {
        let column = ColumnShape { tokens: chunk, sequences: 1, chunk, slots, is_one_chunk: true };
        footprint(spec, index).bytes(&column, 0).forward
    };
    (cache, shared(spec, 1, chunk) + slots.iter().enumerate().map(forward).max().unwrap_or(0))
}

fn layer_columns(spec: &StepSpec<'_>, plan: &ChunkPlan, index: usize, shape: &CacheShape) -> Rc<[LayerColumn]> {
    let form = spec.settings.grad().undo_log.form;
    let footprint = footprint(spec, index);
    let mut last: Option<(ColumnShape, LayerBytes)> = None;
    let of_column = |column: &Range<usize>| {
        let (spans, sequences) = (&plan.spans[column.clone()], plan.sequences(column));
        let filled = |span: &ChunkSpan| span.start.min(shape.cache_length);
        let own = ColumnShape {
            tokens: plan.tokens(column).1 * sequences,
            sequences,
            chunk: spans.iter().map(|span| span.len).max().unwrap_or(0),
            slots: spans.last().map_or(0, |span| (span.start + span.len).min(shape.cache_length)),
            is_one_chunk: spans.len() == 1 && !spans[0].is_ragged(),
        };
        // Most columns are alike.
        let bytes = last.filter(|(known, _)| *known == own).map_or_else(
            || {
                let restored = CacheShape { batch: sequences as i64, ..*shape }.restored_bytes(own.slots).0;
                footprint.bytes(&own, restored)
            },
            |(_, bytes)| bytes,
        );
        last = Some((own, bytes));
        let undo: Vec<UndoBytes> = spans.iter().map(|span| shape.undo_bytes(span, filled(span), form)).collect();
        LayerColumn {
            bytes,
            undo: undo.iter().map(|undo| undo.waiting.0).sum(),
            resident_undo: undo.iter().map(|undo| undo.at_hand.0).sum(),
            outputs: footprint.waiting_outputs(&own),
        }
    };
    plan.columns.iter().map(of_column).collect()
}

/// Bytes for each score that the output takes beside the scores themselves.
fn of_output(spec: &StepSpec<'_>) -> u64 {
    let is_capped = spec.config.logit_soft_cap.is_some() && spec.config.num_classes.is_none();
    // More is trained behind the layers than the final norm.
    let has_dora = spec.output_numbers() > spec.hidden() && spec.trained.has_magnitudes;
    // The cap's backward makes a slope. In a narrow model the cap's result is kept beside its wide copy as well, which is as much again.
    let of_cap = if is_capped { spec.wide() } else { 0 };
    // What the magnitudes scale is kept, and the backward makes the gradients of both factors.
    of_cap + if has_dora { 3 * spec.element() } else { 0 }
}
