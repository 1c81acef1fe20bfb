//! What a cell costs: computing it again with autograd, and its backward, beside its products of matrices alone.
//!
//! `cargo bench --bench cell` prints milliseconds of CPU time of a cell with full caches, and ratios to the products, for several
//! heights and widths of cells, on one thread. The model is that of `recipes/bench/step.toml`.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench that cannot go on fails")]

mod shapes;

use std::path::Path;

use kvtune::data::{Batch, Sequence, Targets};
use kvtune::engine::{Event, MicroBatchContext, Observer};
use kvtune::recipe::Recipe;
use kvtune::report::table::Table;
use kvtune::train;
use shapes::{Work, cpu_now, cpu_seconds, median};
use tch::Device;

const TOKENS: u32 = 4096;
const CHUNK: i64 = 256;
const SLOTS: i64 = 1024;

/// CPU-seconds of each cell: computed again, and backward; whether its caches are full when it begins.
#[derive(Default)]
struct Cells {
    timed: Vec<(bool, [f64; 2])>,
    since: f64,
    open: Option<usize>,
}

impl Cells {
    fn close(&mut self) {
        let now = cpu_now();
        if let Some(half) = self.open.take() {
            self.timed.last_mut().unwrap().1[half] = now - self.since;
        }
        self.since = now;
    }
}

impl Observer for Cells {
    fn observe(&mut self, event: Event) {
        self.close();
        match event {
            Event::Cell { column: (index, columns), .. } => {
                // All columns are of one width.
                let first = index * TOKENS as usize / columns;
                self.timed.push((first >= SLOTS as usize, [0.0; 2]));
                self.open = Some(0);
            }
            Event::CellBackward { .. } => self.open = Some(1),
            _ => {}
        }
    }
}

fn batch() -> Batch {
    let inputs: Vec<u32> = (0..TOKENS).map(|i| i * 7919 % 2048).collect();
    let targets = Targets::NextToken(inputs.iter().map(|&id| i64::from(id)).collect());
    Batch { sequences: vec![Sequence { sample: 0, inputs, targets, initial: None }] }
}

fn main() {
    tch::set_num_threads(1);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/bench/step.toml");
    println!("\n{TOKENS} tokens, layers of 256, LoRA r 8 on all projections, C = {SLOTS}, chunks of {CHUNK}, f32, one thread:");
    let header =
        ["layers", "chunks", "recompute, ms", "backward, ms", "products, ms", "recompute / products", "whole / products"];
    let mut table = Table::new(&header);
    for (layers, chunks) in [(1, 1), (1, 2), (1, 4), (4, 1), (4, 2), (4, 4)] {
        let overrides = [format!("grad.layers_per_cell={layers}"), format!("grad.chunks_per_cell={chunks}")];
        let recipe = Recipe::load(&path, &overrides).unwrap().recipe;
        let model = train::drawn_model(&recipe, Device::Cpu).unwrap();
        model.adapter().unwrap().set_b_normal(0.02, 1);
        let engine = train::engine(&recipe, model.config(), None, None).unwrap();
        let context = MicroBatchContext { weight: 1.0 / f64::from(TOKENS), dropout: None, chunk_sizes: None };
        let mut cells = Cells::default();
        // The first step is for warming up.
        for _ in 0..2 {
            cells = Cells::default();
            engine.gradients(&model, &batch(), context, &mut cells).unwrap();
            cells.close();
        }
        let of = |half: usize| median(cells.timed.iter().filter(|(is_full, _)| *is_full).map(|(_, times)| times[half]).collect());
        let (recompute, backward) = (of(0), of(1));
        let work = Work::new(model.config(), CHUNK * chunks, SLOTS);
        let times = f64::from(layers);
        let (forward, back) = (times * cpu_seconds(|| work.linear_forward()), times * cpu_seconds(|| work.linear_backward()));
        let mut cells = vec![layers.to_string(), chunks.to_string()];
        cells.extend([recompute, backward, forward + back].map(|seconds| format!("{:.1}", 1e3 * seconds)));
        cells.extend([recompute / forward, (recompute + backward) / (forward + back)].map(|ratio| format!("{ratio:.2}")));
        table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
    }
    println!("{table}");
}
