//! The memory of a step: what stands all the while, and the most that its phases hold in addition. Every term is a closed form of sizes,
//! written down beside what it is the size of: the cache, its undo log, stores, layers, the head.

use std::ops::Range;

use super::StepSpec;
use super::moment::{Moment, StepPart};
use super::sizes::{LayerColumn, LayerMemory, PlannedColumn, columns, layers, of_full_cache};
use crate::engine::{ChunkPlan, MemoryPlace, Schedule};
use crate::model::LayerBytes;
use crate::recipe::{StorePlace, StoreRecipe};
use crate::store::copies_are_async;
use crate::units::Bytes;

/// The part of a peak that is the graph of the cell under way, and of those that are kept.
pub const GRAPHS: &str = "graph of the cell";

/// A layer band in a column, or several of these.
#[derive(Clone, Copy, Debug, Default)]
struct CellMemory {
    graph: u64,
    undo: u64,
    resident_undo: u64,
    outputs: u64,
}

/// All sizes of a step.
pub(super) struct StepMemory<'a> {
    spec: &'a StepSpec<'a>,
    schedule: Schedule,
    layers: Vec<LayerMemory>,
    columns: Vec<PlannedColumn>,
    /// Cells by band from the top, and by column.
    cells: Vec<Vec<CellMemory>>,
    /// By band from the top, and by column, sums over the cells to the left of it: graphs and resident entries of those whose graphs are
    /// kept, and of the others what waits. One more than there are columns.
    running: Vec<Vec<CellMemory>>,
    /// Hidden states of the columns to the left of each, and of those among them that have targets.
    hidden_before: Vec<[u64; 2]>,
    checkpoints: u64,
    undo: u64,
    tokens: u64,
    /// What a teacher's cache takes, and what a chunk does beside it; `None` without one.
    teacher: Option<(u64, u64)>,
}

impl<'a> StepMemory<'a> {
    /// `targets` are the positions with a target, by column of `plan`.
    pub(super) fn new(spec: &'a StepSpec<'a>, plan: &ChunkPlan, targets: &[usize]) -> Self {
        let schedule = Schedule::new(spec.settings, plan, spec.trained.first_layer, spec.layers_wait());
        let columns = columns(spec, plan, targets);
        let mut memory = Self {
            spec,
            layers: layers(spec, plan, &columns),
            columns,
            cells: Vec::new(),
            running: Vec::new(),
            hidden_before: vec![[0; 2]],
            checkpoints: 0,
            undo: 0,
            tokens: 8 * (plan.len() * plan.num_sequences()) as u64,
            // It is asked first, with a full cache.
            teacher: spec.recipe.distill.as_ref().map(|_| of_full_cache(spec, plan)),
            schedule,
        };
        let (bands, columns) = memory.schedule.size();
        memory.cells = (0..bands).map(|band| (0..columns).map(|c| memory.cell_of(band, c)).collect()).collect();
        for (c, column) in memory.columns.iter().enumerate() {
            let [all, targeted] = memory.hidden_before[c];
            let of_targets = if column.has_targets { column.hidden } else { 0 };
            memory.hidden_before.push([all + column.hidden, targeted + of_targets]);
        }
        memory.running = (0..bands).map(|band| memory.running_of(band)).collect();
        let borders = |c: usize| (0..memory.layers.len()).filter(|&layer| memory.schedule.is_border(layer, c)).count() as u64;
        memory.checkpoints = (0..columns).map(|c| borders(c) * memory.columns[c].checkpoint).sum();
        memory.undo = memory.running.iter().flatten().map(|sums| sums.undo).max().unwrap_or(0);
        memory
    }

    fn cell_of(&self, band: usize, c: usize) -> CellMemory {
        let layers = self.layers[self.schedule.layers(band)].iter().map(|layer| &layer.columns[c]);
        let sum = |of: fn(&LayerColumn) -> u64| layers.clone().map(of).sum::<u64>();
        CellMemory {
            graph: sum(|layer| layer.bytes.graph) + self.columns[c].shared,
            undo: sum(|layer| layer.undo),
            resident_undo: sum(|layer| layer.resident_undo),
            outputs: sum(|layer| layer.outputs),
        }
    }

    fn running_of(&self, band: usize) -> Vec<CellMemory> {
        let mut sums = vec![CellMemory::default()];
        for (c, cell) in self.cells[band].iter().enumerate() {
            let so_far = sums[c];
            sums.push(if self.schedule.is_kept(band, c) {
                let (graph, resident_undo) = (so_far.graph + cell.graph, so_far.resident_undo + cell.resident_undo);
                CellMemory { graph, resident_undo, ..so_far }
            } else {
                CellMemory { undo: so_far.undo + cell.undo, outputs: so_far.outputs + cell.outputs, ..so_far }
            });
        }
        sums
    }

    pub(super) fn in_files(&self) -> Bytes {
        let grad = self.spec.settings.grad();
        let of = |store: StoreRecipe, bytes| if store.place == StorePlace::File { bytes } else { 0 };
        Bytes(of(grad.layer_checkpoints, self.checkpoints) + of(grad.undo_log, self.undo))
    }

    /// The moments at which the step may hold the most. Of neighbours that are alike the first or the last has it: what waits shrinks to the
    /// left, and what travels may grow.
    pub(super) fn moments(&self) -> Vec<Moment> {
        let has_head_in_cells = self.schedule.has_head_in_cells();
        let mut moments = Vec::new();
        for c in self.looked_at(|column| (column.head, true)) {
            moments.push(self.forward(c));
            if !has_head_in_cells {
                moments.push(self.head(c));
            }
        }
        for band in 0..self.cells.len() {
            let of_head = |column: &PlannedColumn| if has_head_in_cells { column.head } else { 0 };
            let columns = self.looked_at(|column| (of_head(column), band > 0 || column.has_targets));
            moments.extend(columns.into_iter().flat_map(|c| [self.replay(band, c), Some(self.cell(band, c))]).flatten());
        }
        moments.extend(self.end());
        moments.extend(self.teacher());
        moments
    }

    /// The first and the last of neighbouring columns that are alike, and in `further` respects.
    fn looked_at(&self, further: impl Fn(&PlannedColumn) -> (u64, bool)) -> Vec<usize> {
        let columns = self.columns.len();
        let alike = |c: usize| (self.columns[c].tokens, further(&self.columns[c]), self.schedule.kept_bands(c), c + 1 == columns);
        let is_end = |&c: &usize| c == 0 || c + 1 == columns || alike(c - 1) != alike(c) || alike(c + 1) != alike(c);
        (0..columns).filter(is_end).collect()
    }

    /// A sample passes the model without its adapter, whose cache keeps everything; the step has not begun.
    fn teacher(&self) -> Option<Moment> {
        let (cache, computing) = self.teacher?;
        let waits = self.layers.iter().any(|layer| layer.waiting_cache > 0);
        let mut moment = Moment::new(self.spec, StepPart::Forward);
        self.stores(&mut moment);
        moment.add("teacher's cache", if waits { MemoryPlace::Host } else { MemoryPlace::Device }, cache);
        moment.add(
            "inside",
            MemoryPlace::Device,
            computing.max(self.columns.iter().map(|column| column.head).max().unwrap_or(0)),
        );
        Some(moment)
    }

    /// What is there in both phases: caches, stores with their room, the log, the ids.
    fn standing(&self, part: StepPart) -> Moment {
        let sum = |of: fn(&LayerMemory) -> u64| self.layers.iter().map(of).sum::<u64>();
        let mut moment = Moment::new(self.spec, part);
        // Of caches that wait, the layer that computes is here, the next, and one that is copied back.
        let turns = self.layers.iter().map(|layer| layer.waiting_cache).max().unwrap_or(0) * 3.min(self.layers.len() as u64);
        moment.add("caches", MemoryPlace::Device, sum(|layer| layer.cache) + turns);
        moment.add("waiting caches", MemoryPlace::Host, sum(|layer| layer.waiting_cache));
        moment.add("replay log", MemoryPlace::Host, sum(|layer| layer.log));
        moment.add("tokens", MemoryPlace::Host, self.tokens);
        self.stores(&mut moment);
        moment
    }

    /// Room of stores in memory, which they keep from step to step.
    fn stores(&self, moment: &mut Moment) {
        let grad = self.spec.settings.grad();
        let undo = ("undo log", grad.undo_log, self.undo);
        for (name, store, bytes) in [("layer checkpoints", grad.layer_checkpoints, self.checkpoints), undo] {
            moment.add(name, MemoryPlace::Host, if store.place == StorePlace::Memory { bytes } else { 0 });
        }
        if copies_are_async(self.spec.device) {
            self.outputs(moment, 0..self.cells.len(), 0..self.columns.len());
        }
    }

    /// A column passes all layers.
    fn forward(&self, c: usize) -> Moment {
        let kept = self.schedule.kept_bands(c);
        let below = 0..self.schedule.first_kept_layer(c).min(self.layers.len());
        let computing = self.columns[c].shared + self.most(&below, c, |layer| layer.forward);
        let making: u64 = kept.clone().map(|band| self.cells[band][c].graph).sum();
        let beside = kept.map(|band| self.beside(&self.schedule.layers(band), c, true)).max().unwrap_or(0);
        let mut moment = self.in_forward(StepPart::Forward, c);
        moment.add("inside", MemoryPlace::Device, computing.max(making + beside) + self.growing(&(0..self.layers.len())));
        moment
    }

    /// The loss of a column whose forward is done.
    fn head(&self, c: usize) -> Moment {
        let mut moment = self.in_forward(StepPart::Head, c);
        moment.add(GRAPHS, MemoryPlace::Device, self.sum(0..self.cells.len(), c..c + 1, |sums| sums.graph));
        moment.add("inside", MemoryPlace::Device, 2 * self.columns[c].hidden + self.columns[c].head);
        moment
    }

    /// What the forward phase holds in column `c`, of which nothing is kept yet but its choices.
    fn in_forward(&self, part: StepPart, c: usize) -> Moment {
        let (bands, mut moment) = (0..self.cells.len(), self.standing(part));
        moment.add("caches", MemoryPlace::Device, self.layers.iter().map(|layer| layer.stats).sum());
        moment.add(GRAPHS, MemoryPlace::Device, self.sum(bands.clone(), 0..c, |sums| sums.graph));
        moment.add("resident undo entries", MemoryPlace::Device, self.sum(bands.clone(), 0..c + 1, |sums| sums.resident_undo));
        moment.add("travelling gradients", MemoryPlace::Host, self.came_before(0, c));
        if !copies_are_async(self.spec.device) {
            self.outputs(&mut moment, bands, 0..c + 1);
        }
        moment
    }

    /// A band runs forward once more, if it has to.
    fn replay(&self, band: usize, c: usize) -> Option<Moment> {
        if !self.schedule.is_replayed(band) {
            return None;
        }
        let (layers, column) = (self.schedule.layers(band), &self.columns[c]);
        let mut moment = self.in_backward(StepPart::Replay, band, self.columns.len() - 1);
        let computing = column.hidden + column.shared + self.most(&layers, c, |layer| layer.forward);
        moment.add("inside", MemoryPlace::Device, computing + self.growing(&layers));
        Some(moment)
    }

    /// A cell is computed again and differentiated.
    fn cell(&self, band: usize, c: usize) -> Moment {
        let (layers, cell, column) = (self.schedule.layers(band), self.cells[band][c], self.columns[c]);
        let is_last = c + 1 == self.columns.len();
        let is_kept = self.schedule.is_kept(band, c);
        let recomputing = if is_kept { 0 } else { self.beside(&layers, c, false) };
        let seed = if band == 0 && column.has_targets && self.schedule.has_head_in_cells() { column.hidden } else { 0 };
        let leaves: u64 = if self.spec.sums_apart() { layers.clone().map(|layer| self.spec.of_layer(layer)).sum() } else { 0 };
        let backward = seed + leaves * self.spec.element() + self.backward(&layers, c, is_last);
        let head = if self.schedule.has_head_in_cells() { column.hidden + column.head } else { 0 };
        let ways = [(StepPart::Recompute, recomputing), (StepPart::Head, head), (StepPart::Backward, backward)];
        let (part, inside) = ways.into_iter().max_by_key(|(_, bytes)| *bytes).unwrap_or(ways[0]);
        let mut moment = self.in_backward(part, band, c);
        let (graph, resident) = if is_kept { (0, 0) } else { (cell.graph, cell.resident_undo) };
        moment.add(GRAPHS, MemoryPlace::Device, graph);
        moment.add("resident undo entries", MemoryPlace::Device, resident);
        moment.add("prefetched copies", MemoryPlace::Device, self.prefetched(band, c));
        if !is_last {
            moment.add("gradients of caches", MemoryPlace::Device, self.layers[layers].iter().map(|layer| layer.gradients).sum());
        }
        moment.add("inside", MemoryPlace::Device, inside);
        moment
    }

    /// What the backward phase holds when it comes to a cell.
    fn in_backward(&self, part: StepPart, band: usize, c: usize) -> Moment {
        let (layers, bands, mut moment) = (self.schedule.layers(band), band + 1..self.cells.len(), self.standing(part));
        moment.add("caches", MemoryPlace::Device, self.layers[..layers.start].iter().map(|layer| layer.stats).sum());
        let kept = |of: fn(&CellMemory) -> u64| {
            self.sum(bands.clone(), 0..self.columns.len(), of) + self.sum(band..band + 1, 0..c + 1, of)
        };
        moment.add(GRAPHS, MemoryPlace::Device, kept(|sums| sums.graph));
        moment.add("resident undo entries", MemoryPlace::Device, kept(|sums| sums.resident_undo));
        let continues = layers.start > self.schedule.first_layer() || self.spec.trains_embedding();
        let [behind, all] = [c + 1, self.columns.len()].map(|end| self.hidden_before[end][0]);
        let gone_on = if continues { all - behind } else { 0 };
        moment.add("travelling gradients", MemoryPlace::Host, self.came_before(band, c + 1) + gone_on);
        if !copies_are_async(self.spec.device) {
            self.outputs(&mut moment, bands, 0..self.columns.len());
            self.outputs(&mut moment, band..band + 1, 0..c);
        }
        // The last column's backward makes them.
        let is_begun = c + 1 < self.columns.len();
        self.sums(&mut moment, layers.end, if is_begun { layers.start } else { layers.end });
        moment
    }

    /// Gradients of layers whose weights are trained: of those from `done` on whose bands are done, and of the band that begins at `begun`.
    fn sums(&self, moment: &mut Moment, done: usize, begun: usize) {
        if self.spec.trains_weights() {
            let summed = |layers: Range<usize>| layers.map(|layer| self.spec.of_layer(layer)).sum::<u64>() * self.spec.wide();
            moment.add("gradients of what is trained", MemoryPlace::Device, summed(begun..done));
            let (name, place) = if self.spec.layers_wait() {
                ("waiting gradients of what is trained", MemoryPlace::Host)
            } else {
                ("gradients of what is trained", MemoryPlace::Device)
            };
            moment.add(name, place, summed(done..self.layers.len()));
        }
    }

    /// The gradient of the embedding is made; then all are clipped and applied.
    fn end(&self) -> [Moment; 2] {
        let s = self.spec;
        let of_embedding = s.trained.embedding_numbers as u64 * s.wide();
        let mut last = self.standing(StepPart::Backward);
        let travelled = if s.trains_embedding() { self.columns.iter().map(|column| column.hidden).sum() } else { 0 };
        last.add("travelling gradients", MemoryPlace::Host, travelled);
        self.sums(&mut last, 0, 0);
        last.add("inside", MemoryPlace::Device, of_embedding);
        let mut update = Moment::new(s, StepPart::Optimizer);
        self.stores(&mut update);
        self.sums(&mut update, 0, 0);
        update.add("inside", MemoryPlace::Device, s.embedding_gradients() + s.largest_update());
        [last, update]
    }

    /// One of the sums, over some bands and columns.
    fn sum(&self, bands: Range<usize>, columns: Range<usize>, of: impl Fn(&CellMemory) -> u64) -> u64 {
        self.running[bands].iter().map(|sums| of(&sums[columns.end]) - of(&sums[columns.start])).sum()
    }

    /// Adds outputs of attention that wait.
    fn outputs(&self, moment: &mut Moment, bands: Range<usize>, columns: Range<usize>) {
        if self.spec.settings.keeps_attention_outputs() {
            moment.add("attention outputs", MemoryPlace::Host, self.sum(bands, columns, |sums| sums.outputs));
        }
    }

    /// The most of a layer in a column.
    fn most(&self, layers: &Range<usize>, c: usize, of: fn(&LayerBytes) -> u64) -> u64 {
        self.layers[layers.clone()].iter().map(|layer| of(&layer.columns[c].bytes)).max().unwrap_or(0)
    }

    /// The most beside a graph while it is made: the top layer has the whole below it.
    fn beside(&self, layers: &Range<usize>, c: usize, is_choosing: bool) -> u64 {
        let top = self.layers[layers.end - 1].columns[c].bytes;
        let attending = if is_choosing { top.attending.saturating_sub(top.graph_of_mlp) } else { 0 };
        (2 * self.columns[c].hidden).max(top.beside_graph).max(attending)
    }

    /// The most beyond the graphs in a cell's backward, which frees them from the top; the last column's makes the gradients of caches.
    fn backward(&self, layers: &Range<usize>, c: usize, makes_gradients: bool) -> u64 {
        let (mut there, mut most) = (0i64, 0i64);
        for layer in self.layers[layers.clone()].iter().rev() {
            let bytes = layer.columns[c].bytes;
            most = most.max(there + bytes.backward_of_mlp as i64);
            there += if makes_gradients { layer.gradients as i64 } else { 0 };
            most = most.max(there - bytes.graph_of_mlp as i64 + bytes.backward_of_attention as i64);
            there -= bytes.graph as i64;
        }
        most as u64
    }

    /// Gradients that wait for a band, of the columns before `end`; without bands nobody keeps them.
    fn came_before(&self, band: usize, end: usize) -> u64 {
        let [all, targeted] = self.hidden_before[end];
        if band > 0 {
            all
        } else if self.cells.is_empty() || self.schedule.has_head_in_cells() {
            0
        } else {
            targeted
        }
    }

    fn growing(&self, layers: &Range<usize>) -> u64 {
        self.layers[layers.clone()].iter().map(|layer| layer.growing).max().unwrap_or(0)
    }

    /// What is on its way for the cell to the left, where copies are asynchronous.
    fn prefetched(&self, band: usize, c: usize) -> u64 {
        if c == 0 || !copies_are_async(self.spec.device) {
            return 0;
        }
        let (cell, column) = (self.cells[band][c - 1], &self.columns[c - 1]);
        let input = if self.schedule.layers(band).start > 0 { column.checkpoint } else { 0 };
        let gradient = self.came_before(band, c) - self.came_before(band, c - 1);
        gradient + if self.schedule.is_kept(band, c - 1) { 0 } else { cell.undo + input + cell.outputs }
    }
}
