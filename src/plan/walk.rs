//! A step's events in their order, as the engine would tell them, with what it would hold at each: the walk of the forward and the
//! backward phase over sizes in place of tensors.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use super::attention::Kernel;
use super::held::HeldMemory;
use super::layer::{Layer, LayerBytes};
use super::ledger::Ledger;
use super::part::StepPart;
use super::{StepSpec, head};
use crate::cache::CacheShape;
use crate::engine::{BackwardStage, ChunkPlan, ForwardStage, Schedule};
use crate::units::Bytes;

/// The span from one event to the next.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// To which part of the step it belongs.
    pub part: StepPart,
    /// What the engine's objects hold when it begins.
    pub held: HeldMemory,
    /// What the graphs of the current cell and of those that are kept take, and what waits for its backward, in bytes.
    pub graph: u64,
    /// The most beyond both until it ends, in bytes.
    pub inside: u64,
}

/// A step that is walked through.
pub(super) struct StepWalk<'a> {
    spec: &'a StepSpec<'a>,
    plan: &'a ChunkPlan,
    /// Positions with a target, by column.
    targets: &'a [usize],
    shapes: Vec<CacheShape>,
    schedule: Schedule,
    ledger: Ledger<'a>,
    /// What the graphs take that are kept by now.
    kept: u64,
    /// Channels of a head that some rotation turns, over all rotations.
    rotated: usize,
    /// By layer, the first one that is made like it.
    alike: Vec<usize>,
    /// What is known of layers that were looked at.
    layers: RefCell<HashMap<Look, LayerBytes>>,
}

/// What the graph of a cell takes, in bytes.
struct CellBytes {
    graph: u64,
    beside: u64,
    layers: Vec<LayerBytes>,
}

/// Whether the layer is the lowest, the first one like it, its slots, tokens of how many sequences and whether they are one chunk, the longest chunk, entries, and
/// whether victims are chosen.
type Look = (bool, usize, usize, (u64, usize, bool), u64, u64, bool);

impl<'a> StepWalk<'a> {
    /// `targets` are the positions with a target, by column of `plan`.
    pub(super) fn new(spec: &'a StepSpec<'a>, plan: &'a ChunkPlan, targets: &'a [usize]) -> Self {
        let shapes = spec.settings.cache_shapes(spec.config, plan, (spec.kind, spec.device));
        let schedule = Schedule::new(spec.settings, plan);
        let ledger = Ledger::new(spec, (plan, schedule.clone()), shapes.clone());
        let rotated = spec.config.rotations().into_iter().map(|rope| rope.rotary_dim).sum();
        let layers = &spec.config.layers;
        let alike =
            layers.iter().enumerate().map(|(at, layer)| layers.iter().position(|other| other == layer).unwrap_or(at)).collect();
        Self { spec, plan, targets, shapes, schedule, ledger, kept: 0, rotated, alike, layers: RefCell::default() }
    }

    /// Goes from the first column of the forward phase to the last cell, and shows every span to `visit`. Returns what waits in files
    /// at most.
    pub(super) fn each(mut self, visit: &mut dyn FnMut(Span)) -> Bytes {
        for stage in self.schedule.forward() {
            match stage {
                ForwardStage::Column(column) => self.forward(column, visit),
                ForwardStage::Head(column) => self.forward_head(column, visit),
            }
        }
        for stage in self.schedule.backward() {
            match stage {
                BackwardStage::Replay { band } => self.replay(&self.schedule.layers(band), visit),
                BackwardStage::Cell { band, column } => self.cell((band, &self.schedule.layers(band)), column, visit),
                BackwardStage::BandDone { band } => self.ledger.end_band((band, &self.schedule.layers(band))),
            }
        }
        self.end(visit);
        self.ledger.in_files()
    }

    fn forward(&mut self, c: usize, visit: &mut dyn FnMut(Span)) {
        let layers = 0..self.spec.config.num_layers();
        let before = self.ledger.memory();
        let moved = self.ledger.run_column(c, &layers, &self.schedule.layers_with_undo(c), true);
        self.ledger.checkpoint(c);
        let below = 0..self.schedule.first_kept_layer(c).min(layers.end);
        let (mut inside, mut made) = (self.of_column(c) + self.forward_of(&below, c, true), 0);
        for band in self.schedule.kept_bands(c).rev() {
            let cell = self.graph_of(&self.schedule.layers(band), c, true);
            inside = inside.max(made + cell.graph + cell.beside);
            made += cell.graph;
        }
        inside += self.growth(&before) + moved;
        visit(Span { part: StepPart::Forward, held: before, graph: self.kept, inside });
        self.kept += made;
    }

    fn forward_head(&mut self, c: usize, visit: &mut dyn FnMut(Span)) {
        let inside = self.hidden(c) + self.head(c);
        visit(Span { part: StepPart::Head, held: self.ledger.memory(), graph: self.kept, inside });
        self.ledger.travel(c, self.targets[c] > 0);
    }

    fn replay(&mut self, layers: &Range<usize>, visit: &mut dyn FnMut(Span)) {
        let before = self.ledger.memory();
        self.ledger.begin_again(layers);
        let mut inside = 0;
        for c in 0..self.plan.columns.len() {
            let moved = self.ledger.run_column(c, layers, layers, false);
            inside =
                inside.max(self.growth(&before) + moved + self.hidden(c) + self.of_column(c) + self.forward_of(layers, c, false));
        }
        visit(Span { part: StepPart::Replay, held: before, graph: 0, inside });
    }

    fn cell(&mut self, (band, layers): (usize, &Range<usize>), c: usize, visit: &mut dyn FnMut(Span)) {
        let (cell, is_kept) = (self.graph_of(layers, c, false), self.schedule.is_kept(band, c));
        let before = self.ledger.memory();
        self.ledger.look_ahead((band, layers), c);
        // Of the cell, and of those that are still kept.
        let mut graph = self.kept;
        if is_kept {
            visit(Span { part: StepPart::Backward, held: before, graph, inside: self.growth(&before) });
            self.kept -= cell.graph;
        } else {
            self.ledger.bring_undo(layers, c);
            let inside = self.growth(&before) + cell.graph + cell.beside;
            visit(Span { part: StepPart::Recompute, held: before, graph, inside });
            graph += cell.graph;
        }
        let taken = self.ledger.take_travelling(c);
        let mut seed = if taken > 0 { 0 } else { self.hidden(c) };
        if self.schedule.has_head_in_cells() {
            visit(Span { part: StepPart::Head, held: self.ledger.memory(), graph, inside: self.head(c) });
            seed = self.hidden(c);
        }
        let held = self.ledger.memory();
        let leaves = if self.spec.sums_apart() { layers.clone().map(|layer| self.spec.of_layer(layer)).sum() } else { 0 };
        let inside = self.backward(layers, &cell.layers) + leaves * self.spec.element();
        let graph = graph + seed + taken;
        visit(Span { part: StepPart::Backward, held, graph, inside });
        let has_input_gradient = layers.start > 0 || self.spec.trains_embedding();
        self.ledger.end_cell((band, layers), c, has_input_gradient);
    }

    /// What a band's graph of a column keeps in addition to its input, all other hidden states with the output; and what there is beside it
    /// at most while it is made: where its last layer attends, the graph of that layer's MLP is still to come.
    fn graph_of(&self, layers: &Range<usize>, c: usize, is_choosing: bool) -> CellBytes {
        let made: Vec<LayerBytes> = layers.clone().map(|layer| self.layer(layer, c, is_choosing)).collect();
        let last = made.last().copied().unwrap_or_default();
        let attending = if is_choosing { last.attending.saturating_sub(last.graph_of_mlp) } else { 0 };
        CellBytes {
            graph: made.iter().map(|layer| layer.graph).sum::<u64>() + self.of_column(c),
            beside: (2 * self.hidden(c)).max(last.in_addition_to_graph).max(attending),
            layers: made,
        }
    }

    /// Gradients are copied from their leaves, or that of the embedding is made beside the others; then they are clipped and applied, one
    /// after the other.
    fn end(&self, visit: &mut dyn FnMut(Span)) {
        let (s, held) = (self.spec, self.ledger.memory());
        let copies = if s.sums_apart() { s.of_embedding() * s.wide() } else { s.trained_bytes().0 };
        let of_ends = if s.trains_weights() { 0 } else { s.embedding_gradients() };
        visit(Span { part: StepPart::Backward, held, graph: 0, inside: copies + of_ends });
        let held = HeldMemory {
            free_room: held.free_room,
            parameter_gradients: held.parameter_gradients,
            waiting_gradients: held.waiting_gradients,
            ..Default::default()
        };
        visit(Span { part: StepPart::Optimizer, held, graph: 0, inside: copies + s.largest_update() });
    }

    /// The most beyond the graph in a cell's backward, which takes the layers from the top, frees what their graphs have kept, and in
    /// the band's first cell makes the gradients of their caches.
    fn backward(&self, layers: &Range<usize>, made: &[LayerBytes]) -> u64 {
        let (mut freed, mut most, mut gradients) = (0i64, 0i64, 0i64);
        for (layer, bytes) in layers.clone().zip(made).rev() {
            most = most.max(gradients - freed + bytes.backward_of_mlp as i64);
            gradients += self.ledger.missing_gradients(layer) as i64;
            most = most.max(gradients - freed - bytes.graph_of_mlp as i64 + bytes.backward_of_attention as i64);
            freed += bytes.graph as i64;
        }
        most.max(0) as u64
    }

    /// Of one layer in a column. Most columns and layers are alike.
    fn layer(&self, index: usize, c: usize, is_choosing: bool) -> LayerBytes {
        let spans = &self.plan.spans[self.plan.columns[c].clone()];
        let sequences = self.plan.sequences(&self.plan.columns[c]);
        let (shape, tokens) = (CacheShape { batch: sequences as i64, ..self.shapes[index] }, self.tokens(c));
        let chunk = spans.iter().map(|span| span.len).max().unwrap_or(0) as u64;
        let filled = spans.last().map_or(0, |span| (span.start + span.len).min(shape.cache_length)) as u64;
        let is_one_chunk = spans.len() == 1 && !spans[0].is_ragged();
        let key =
            (index == 0, self.alike[index], shape.cache_length, (tokens, sequences, is_one_chunk), chunk, filled, is_choosing);
        *self.layers.borrow_mut().entry(key).or_insert_with(|| {
            let kernel = Kernel::of(self.spec, index, &shape, (chunk, filled), is_choosing);
            Layer { spec: self.spec, index, tokens, is_one_chunk, kernel }.bytes()
        })
    }

    fn forward_of(&self, layers: &Range<usize>, c: usize, is_choosing: bool) -> u64 {
        layers.clone().map(|layer| self.layer(layer, c, is_choosing).forward).max().unwrap_or(0)
    }

    /// The most in the head's turn for a column.
    fn head(&self, c: usize) -> u64 {
        head::inside(self.spec, self.targets[c], self.hidden(c))
    }

    /// Tokens of a column, of all sequences, pads with them.
    fn tokens(&self, c: usize) -> u64 {
        let column = &self.plan.columns[c];
        (self.plan.tokens(column).1 * self.plan.sequences(column)) as u64
    }

    /// Hidden states of a column.
    fn hidden(&self, c: usize) -> u64 {
        self.tokens(c) * self.spec.hidden() * self.spec.element()
    }

    /// What all layers share: hidden states, and the rotations of a sequence's positions.
    fn of_column(&self, c: usize) -> u64 {
        let (_, tokens) = self.plan.tokens(&self.plan.columns[c]);
        self.hidden(c) + (tokens * self.rotated) as u64 * self.spec.element()
    }

    fn growth(&self, before: &HeldMemory) -> u64 {
        let sum = |memory: &HeldMemory| memory.entries().iter().map(|entry| entry.bytes.0).sum::<u64>();
        sum(&self.ledger.memory()).saturating_sub(sum(before))
    }
}
