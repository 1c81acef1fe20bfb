//! What it costs to quantise a number and to restore it, beside copying it.
//!
//! `cargo bench --bench quantiser` prints nanoseconds of CPU time for each f32 and ratios to a copy of the same tensor, on one thread.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench that cannot go on fails")]

mod shapes;

use kvtune::recipe::StoreForm;
use kvtune::report::table::Table;
use kvtune::store::{Bits, Store};
use shapes::{cpu_seconds, randn};
use tch::{Device, Kind, Tensor};

/// Tokens and numbers of each: vectors of heads, and hidden states.
const VECTORS: [[i64; 2]; 3] = [[16384, 32], [16384, 64], [16384, 128]];
const HIDDEN: [[i64; 2]; 2] = [[2048, 256], [1024, 1536]];

fn main() {
    tch::set_num_threads(1);
    println!("\nf32, one thread:");
    let mut table =
        Table::new(&["what", "shape", "copy, ns", "quantise, ns", "restore, ns", "quantise / copy", "restore / copy"]);
    let mut line = |name: &str, x: &Tensor, quantise: f64, restore: f64| {
        let to = x.zeros_like();
        let copy = cpu_seconds(|| to.shallow_clone().copy_(x));
        let ns = |seconds: f64| format!("{:.2}", 1e9 * seconds / x.numel() as f64);
        let ratio = |seconds: f64| format!("{:.1}", seconds / copy);
        let shape = format!("{:?}", x.size());
        table.row(&[name, &shape, &ns(copy), &ns(quantise), &ns(restore), &ratio(quantise), &ratio(restore)]);
    };
    for [tokens, width] in VECTORS {
        let x = randn(&[1, 1, tokens, width]);
        for (name, bits) in [("cache entries, int8", Bits::Eight), ("cache entries, int4", Bits::Four)] {
            let [level, range] = bits.quantise(&x);
            let restore = cpu_seconds(|| drop(bits.restore(&level, &range, width, Kind::Float)));
            line(name, &x, cpu_seconds(|| drop(bits.quantise(&x))), restore);
        }
    }
    for [tokens, width] in HIDDEN {
        let x = randn(&[1, tokens, width]);
        for (name, form) in [("layer checkpoints, int8", StoreForm::Int8), ("layer checkpoints, int4", StoreForm::Int4)] {
            let store = Store::in_memory(form);
            let parked = store.offload(&x).unwrap();
            let restore = cpu_seconds(|| drop(parked.fetch(Device::Cpu).unwrap()));
            line(name, &x, cpu_seconds(|| drop(store.offload(&x).unwrap())), restore);
        }
    }
    println!("{table}");
}
