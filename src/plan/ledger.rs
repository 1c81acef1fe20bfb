//! What the engine's objects hold in the course of a step, from sizes alone: the counterpart of `engine::MemoryByPart`, whose figures it
//! predicts to the byte where the choices of a policy have a size that is known beforehand.

use std::cell::Cell;
use std::ops::Range;

use tch::Kind;

use super::StepSpec;
use super::held::HeldMemory;
use super::outputs::WaitingOutputs;
use crate::cache::{CacheShape, ChunkSpan, Routing, Scope, log_bytes_per_token, notes_per_entry};
use crate::engine::{ChunkPlan, Schedule};
use crate::recipe::{StorePlace, StoreRecipe};
use crate::store::{Form, copies_are_async};
use crate::units::Bytes;

#[derive(Clone, Debug)]
struct LayerHolds {
    shape: CacheShape,
    /// Numbers in f32 that the policy keeps of an entry: in the prefill span, and behind it.
    notes: [usize; 2],
    scope: Option<Scope>,
    /// Bytes of the log for the experts of a token.
    routing: u64,
    slots: usize,
    noted: usize,
    has_gradients: bool,
    resident: u64,
    log: u64,
    /// The last write without pads, and what it overwrites: most are the same.
    last_undo: Cell<Option<(Write, (u64, u64))>>,
}

/// Sequences, evictions, columns, and the form of the store.
type Write = (usize, usize, usize, Form);

/// A store: what waits there now, and the most that does at a time in a step.
#[derive(Clone, Copy, Debug)]
struct StoreHolds {
    recipe: StoreRecipe,
    now: u64,
    most: u64,
}

impl StoreHolds {
    fn new(recipe: StoreRecipe) -> Self {
        Self { recipe, now: 0, most: 0 }
    }

    fn form(&self) -> Form {
        self.recipe.form.into()
    }

    /// In memory: what waits, and room that was used before.
    fn memory(&self) -> (u64, u64) {
        if self.recipe.place == StorePlace::File { (0, 0) } else { (self.now, self.most.saturating_sub(self.now)) }
    }
}

/// What was prefetched for the next cell, where copies run concurrently with the computation.
#[derive(Clone, Copy, Debug, Default)]
struct LookAhead {
    bytes: u64,
    /// Gradients of hidden states that are there: of the current cell, and of the next.
    gradients: [Option<u64>; 2],
}

#[derive(Debug)]
pub(super) struct Ledger<'a> {
    spec: &'a StepSpec<'a>,
    plan: &'a ChunkPlan,
    schedule: Schedule,
    layers: Vec<LayerHolds>,
    checkpoints: StoreHolds,
    undo: StoreHolds,
    outputs: WaitingOutputs,
    travelling: Vec<u64>,
    ahead: LookAhead,
    parameter_gradients: u64,
    /// Those of layers that are summed apart, where they are computed and on the host.
    summed_gradients: [u64; 2],
    kept_cells: usize,
}

impl<'a> Ledger<'a> {
    pub(super) fn new(spec: &'a StepSpec<'a>, (plan, schedule): (&'a ChunkPlan, Schedule), shapes: Vec<CacheShape>) -> Self {
        let layer = |(index, shape): (usize, CacheShape)| {
            let policy = spec.settings.policy(index);
            let notes = [true, false].map(|is_prefill| notes_per_entry(policy, is_prefill));
            let traits = policy.traits();
            let length = shape.slots_for(shape.allocated.max(1), 0);
            let slots = match traits.shares_out {
                // A share is not known before. It is largest where all entries of a head are in the better half: then it has its floor,
                // and twice what that leaves of the cache length.
                Some(floor) if shape.groups > 1 => 2 * length - (floor * length as f64) as usize,
                _ => length,
            };
            LayerHolds {
                slots,
                shape,
                notes,
                scope: traits.evicts.then_some(traits.scope),
                routing: spec.config.layers[index]
                    .feed_forward
                    .experts()
                    .map_or(0, |e| Routing::bytes_of_token(e.top_k, e.num_experts)),
                noted: 0,
                has_gradients: false,
                resident: 0,
                log: 0,
                last_undo: Cell::new(None),
            }
        };
        let (checkpoints, undo) = spec.settings.stores();
        let mut ledger = Self {
            spec,
            plan,
            schedule,
            layers: shapes.into_iter().enumerate().map(layer).collect(),
            checkpoints: StoreHolds::new(checkpoints),
            undo: StoreHolds::new(undo),
            outputs: WaitingOutputs::default(),
            travelling: vec![0; plan.columns.len()],
            ahead: LookAhead::default(),
            parameter_gradients: parameter_gradients(spec),
            summed_gradients: [0; 2],
            kept_cells: 0,
        };
        ledger.remember_a_step();
        ledger
    }

    /// Lets the stores have the room of the step before: all borders, all outputs, and the undo log of that band which has most.
    fn remember_a_step(&mut self) {
        let columns = || self.plan.columns.iter().enumerate();
        self.checkpoints.most = columns().map(|(c, _)| self.borders(c) * self.checkpoint_bytes(c)).sum();
        let form = self.undo.form();
        let of_band = |band: usize| -> u64 {
            let spans = columns()
                .filter(|(c, _)| !self.schedule.is_kept(band, *c))
                .flat_map(|(_, column)| &self.plan.spans[column.clone()]);
            let layers = &self.layers[self.schedule.layers(band)];
            spans.flat_map(|span| layers.iter().map(|layer| layer.undo(span, form).0)).sum()
        };
        self.undo.most = (0..self.schedule.size().0).map(of_band).max().unwrap_or(0);
        for (c, column) in self.plan.columns.iter().enumerate() {
            for layer in 0..self.schedule.first_kept_layer(c).min(self.layers.len()) {
                self.outputs.put(self.spec, (layer, c), &self.plan.spans[column.clone()]);
            }
        }
        self.outputs.forget();
    }

    /// Layer bands whose input of a column is kept.
    fn borders(&self, c: usize) -> u64 {
        (0..self.layers.len()).filter(|&layer| self.schedule.is_border(layer, c)).count() as u64
    }

    /// The most that has waited in files.
    pub(super) fn in_files(&self) -> Bytes {
        let in_file = [&self.checkpoints, &self.undo].into_iter().filter(|store| store.recipe.place == StorePlace::File);
        Bytes(in_file.map(|store| store.most).sum())
    }

    /// What the engine would tell.
    pub(super) fn memory(&self) -> HeldMemory {
        let mut memory = HeldMemory {
            travelling_gradients: Bytes(self.travelling.iter().sum()),
            ahead: Bytes(self.ahead.bytes),
            parameter_gradients: Bytes(self.parameter_gradients + self.summed_gradients[0]),
            waiting_gradients: Bytes(self.summed_gradients[1]),
            tokens: Bytes(8 * (self.plan.len() * self.plan.num_sequences()) as u64),
            kept_cells: self.kept_cells,
            ..HeldMemory::default()
        };
        for layer in &self.layers {
            let (device, host) = self.cache_bytes(layer);
            memory.caches += Bytes(device);
            memory.waiting_caches += Bytes(host);
            memory.resident_undo += Bytes(layer.resident);
            memory.replay_log += Bytes(layer.log);
            memory.cache_gradients += Bytes(if layer.has_gradients { self.gradient_bytes(layer) } else { 0 });
        }
        let offloaded = self.layers.iter().filter(|layer| layer.shape.is_offloaded).map(LayerHolds::entry_bytes);
        // The layer that computes, the next, and one that is being copied back.
        let turns = offloaded.max().unwrap_or(0) * 3.min(self.layers.len() as u64);
        memory.caches += Bytes(turns);
        for ((waiting, free), part) in [
            (self.checkpoints.memory(), &mut memory.layer_checkpoints),
            (self.undo.memory(), &mut memory.undo_log),
            (self.outputs.memory(self.spec), &mut memory.attention_outputs),
        ] {
            *part += Bytes(waiting);
            memory.free_room += Bytes(free);
        }
        memory
    }

    /// A column through some layers, decided or replayed. Returns what a cache that grows has twice for a moment.
    pub(super) fn run_column(&mut self, c: usize, layers: &Range<usize>, keeps_undo: &Range<usize>, is_deciding: bool) -> u64 {
        let (mut moved, kept_from) = (0, self.schedule.first_kept_layer(c));
        for index in layers.clone() {
            if is_deciding && index < kept_from {
                self.outputs.put(self.spec, (index, c), &self.plan.spans[self.plan.columns[c].clone()]);
            }
            for span in &self.plan.spans[self.plan.columns[c].clone()] {
                let layer = &mut self.layers[index];
                let slots = layer.shape.slots_for(layer.slots, (span.start + span.len).min(layer.shape.cache_length));
                if slots > layer.slots && !layer.shape.is_paged {
                    moved = moved.max(layer.shape.slot_bytes(layer.slots).0);
                }
                layer.slots = slots;
                if is_deciding {
                    layer.noted = layer.noted.max(layer.notes[usize::from(span.start >= self.plan.prefill)]);
                    let routed = layer.routing * (span.num_sequences() * span.len) as u64;
                    layer.log += logged(layer, span) + routed;
                }
                if keeps_undo.contains(&index) {
                    let waiting = layer.undo(span, self.undo.form()).0;
                    self.undo.now += waiting;
                }
                if is_deciding && index >= kept_from {
                    layer.resident += layer.undo(span, Form::Plain).1;
                }
            }
        }
        moved
    }

    /// A column's hidden states at the borders of bands, or the bands' graphs.
    pub(super) fn checkpoint(&mut self, c: usize) {
        let bytes = self.borders(c) * self.checkpoint_bytes(c);
        self.checkpoints.now += bytes;
        self.kept_cells += self.schedule.kept_bands(c).len();
    }

    fn checkpoint_bytes(&self, c: usize) -> u64 {
        let column = &self.plan.columns[c];
        let size = [self.plan.sequences(column), self.plan.tokens(column).1, self.spec.hidden() as usize].map(|n| n as i64);
        self.checkpoints.form().bytes_of(&size, self.spec.kind).0
    }

    /// A column's gradient is there, and waits for the band below.
    pub(super) fn travel(&mut self, c: usize, is_there: bool) {
        let column = &self.plan.columns[c];
        let n = self.plan.tokens(column).1 * self.plan.sequences(column);
        self.travelling[c] = if is_there { n as u64 * self.spec.hidden() * self.spec.element() } else { 0 };
    }

    pub(super) fn take_travelling(&mut self, c: usize) -> u64 {
        self.ahead.gradients[0].take().unwrap_or_else(|| std::mem::take(&mut self.travelling[c]))
    }

    /// A cell begins: what it needs was prefetched before, and what the one to its left needs is prefetched now.
    pub(super) fn look_ahead(&mut self, (band, layers): (usize, &Range<usize>), c: usize) {
        if !copies_are_async(self.spec.device) {
            return;
        }
        let own = self.ahead.gradients[1].take().unwrap_or_else(|| std::mem::take(&mut self.travelling[c]));
        self.ahead = LookAhead { bytes: 0, gradients: [Some(own), None] };
        if c == 0 {
            return;
        }
        let (form, spans) = (self.undo.form(), &self.plan.spans[self.plan.columns[c - 1].clone()]);
        let undo: u64 = self.layers[layers.clone()].iter().flat_map(|l| spans.iter().map(|span| l.undo(span, form).0)).sum();
        let input = if layers.start > 0 { self.checkpoint_bytes(c - 1) } else { 0 };
        let of_cell = if self.schedule.is_kept(band, c - 1) { 0 } else { undo + input + self.take_outputs(layers, c - 1) };
        let gradient = std::mem::take(&mut self.travelling[c - 1]);
        let coming = Form::Plain.bytes_of(&[gradient as i64], Kind::Uint8).0;
        self.ahead = LookAhead { bytes: of_cell + coming, gradients: [Some(own), Some(gradient)] };
    }

    /// A cell's outputs of attention are on their way.
    fn take_outputs(&mut self, layers: &Range<usize>, c: usize) -> u64 {
        layers.clone().map(|layer| self.outputs.take(layer, c)).sum()
    }

    /// The layers begin at their first chunk again.
    pub(super) fn begin_again(&mut self, layers: &Range<usize>) {
        for layer in &mut self.layers[layers.clone()] {
            (layer.noted, layer.has_gradients, layer.resident) = (0, false, 0);
        }
    }

    /// A cell's undo entries are where they are used, and its outputs of attention in its graph.
    pub(super) fn bring_undo(&mut self, layers: &Range<usize>, c: usize) {
        self.take_outputs(layers, c);
        let column = self.plan.columns[c].clone();
        for layer in &mut self.layers[layers.clone()] {
            layer.resident = self.plan.spans[column.clone()].iter().map(|span| layer.undo(span, Form::Plain).1).sum();
            // Who unwinds gives up the notes, and a cell of one chunk does so at its end only.
            if column.len() > 1 {
                layer.noted = 0;
            }
        }
    }

    pub(super) fn end_cell(&mut self, (band, layers): (usize, &Range<usize>), c: usize, has_input_gradient: bool) {
        let is_kept = self.schedule.is_kept(band, c);
        self.kept_cells -= usize::from(is_kept);
        for span in &self.plan.spans[self.plan.columns[c].clone()] {
            for layer in &mut self.layers[layers.clone()] {
                if is_kept {
                    layer.resident -= layer.undo(span, Form::Plain).1;
                } else {
                    self.undo.now -= layer.undo(span, self.undo.form()).0;
                }
            }
        }
        let is_first = layers.clone().all(|layer| !self.layers[layer].has_gradients);
        if is_first && self.spec.sums_apart() {
            self.summed_gradients[0] += layers.clone().map(|layer| self.spec.of_layer(layer)).sum::<u64>() * self.spec.wide();
        }
        for layer in &mut self.layers[layers.clone()] {
            (layer.noted, layer.has_gradients) = (0, true);
            if !is_kept {
                layer.resident = 0;
            }
        }
        self.travel(c, has_input_gradient);
    }

    /// A band is done: its border, and its caches' gradients, are gone.
    pub(super) fn end_band(&mut self, (band, layers): (usize, &Range<usize>)) {
        self.begin_again(layers);
        if self.spec.layers_wait() {
            self.summed_gradients[1] += std::mem::take(&mut self.summed_gradients[0]);
        }
        if layers.start > 0 {
            let columns = (0..self.plan.columns.len()).filter(|&c| !self.schedule.is_kept(band, c));
            let border: u64 = columns.map(|c| self.checkpoint_bytes(c)).sum();
            self.checkpoints.now -= border;
        }
    }

    /// Gradients of a layer's cache that are still to be made.
    pub(super) fn missing_gradients(&self, layer: usize) -> u64 {
        let layer = &self.layers[layer];
        if layer.has_gradients { 0 } else { self.gradient_bytes(layer) }
    }

    fn gradient_bytes(&self, layer: &LayerHolds) -> u64 {
        let numbers = layer.shape.groups * layer.shape.head_dim;
        2 * (self.plan.num_sequences() * layer.slots) as u64 * numbers as u64 * self.spec.wide()
    }

    fn cache_bytes(&self, layer: &LayerHolds) -> (u64, u64) {
        let entries = (self.plan.num_sequences() * layer.slots) as u64 * layer.shape.groups as u64;
        let notes = 4 * layer.noted as u64 * entries;
        if layer.shape.is_offloaded {
            return (8 * entries + notes, layer.entry_bytes());
        }
        (layer.shape.slot_bytes(layer.slots).0 + notes, 0)
    }
}

/// The leaves' own, which stay from step to step, and those that the head sums up. Of an embedding that is no output projection the
/// gradient is made at the end.
fn parameter_gradients(s: &StepSpec<'_>) -> u64 {
    if s.sums_apart() {
        return s.output_numbers() * s.wide();
    }
    s.trained_bytes().0 - s.embedding_gradients()
}

impl LayerHolds {
    fn entry_bytes(&self) -> u64 {
        self.shape.slot_bytes(self.slots).0 - 8 * (self.shape.batch * self.shape.groups) as u64 * self.slots as u64
    }

    /// What a write overwrites, in a store and resident on the device.
    fn undo(&self, span: &ChunkSpan, form: Form) -> (u64, u64) {
        let filled = span.start.min(self.shape.cache_length);
        let key = (span.num_sequences(), span.evictions(filled, self.shape.cache_length), span.len, form);
        if let Some((_, known)) = self.last_undo.get().filter(|(last, _)| *last == key && !span.is_ragged()) {
            return known;
        }
        let bytes = self.shape.undo_bytes(span, filled, form);
        let found = (bytes.waiting.0, bytes.at_hand.0);
        if !span.is_ragged() {
            self.last_undo.set(Some((key, found)));
        }
        found
    }
}

/// What the log keeps of a chunk's choice.
fn logged(layer: &LayerHolds, span: &ChunkSpan) -> u64 {
    let batch = (span.num_sequences(), layer.shape.groups as usize);
    let cache_length = layer.shape.cache_length;
    let evicted = span.evictions(span.start.min(cache_length), cache_length) as u64;
    layer.scope.map_or(0, |scope| evicted * log_bytes_per_token(scope, cache_length, batch).0)
}
