//! What a chunk's attention costs: forward, backward and the sums that a policy asks for, beside one product of square matrices with as
//! many operations.
//!
//! `cargo bench --bench operator` prints milliseconds of CPU time, operations per second, and how many times the product's time each
//! takes, on one thread.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench that cannot go on fails")]

mod shapes;

use kvtune::report::table::Table;
use shapes::{ChunkAttention, cpu_seconds, product_of};

/// Query heads, KV heads and their width; tokens of a chunk and slots of the cache.
const SHAPES: [((i64, i64, i64), i64, i64); 4] =
    [((8, 2, 32), 256, 1024), ((8, 2, 32), 256, 4096), ((14, 2, 64), 512, 4096), ((12, 2, 128), 1024, 8192)];

fn main() {
    tch::set_num_threads(1);
    for (heads, chunk, slots) in SHAPES {
        println!(
            "\n{} query heads, {} KV heads of {}, {slots} slots, chunks of {chunk}, f32, one thread:",
            heads.0, heads.1, heads.2
        );
        let attention = ChunkAttention::new(heads, (chunk, slots), tch::Kind::Float);
        let (past, attended) = (slots - chunk, attention.forward(slots - chunk));
        let product = attention.product(past);
        let mut table = Table::new(&["operator", "ms", "GFLOP/s", "the product, ms", "times the product"]);
        let mut line = |name: &str, products: f64, seconds: f64| {
            let flops = products * product;
            let plain = product_of(flops);
            let cells = [1e3 * seconds, flops / seconds / 1e9, 1e3 * plain, seconds / plain].map(|x| format!("{x:.2}"));
            table.row(&[&[name], &cells.each_ref().map(String::as_str)[..]].concat());
        };
        line("forward", 2.0, cpu_seconds(|| drop(attention.forward(past))));
        line("backward", 5.0, cpu_seconds(|| attention.backward(past, &attended)));
        line("sums", 1.0, cpu_seconds(|| attention.sums(past, &attended)));
        println!("{table}");
    }
}
