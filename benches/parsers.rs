//! Parsers under mutation: `cargo bench --profile dev --bench parsers [-- --files 10000 --only recipe]` changes valid files by a seed, has
//! the library read them, and prints n/n, seconds and the memory that the process took beyond what it had.
//!
//! Ends with 1 where a file makes a parser panic, takes more than ten seconds or 512 MiB, or where an error does not name the file.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::panic, reason = "a bench that cannot go on fails")]

#[path = "../tests/hostile/mutated.rs"]
mod mutated;
#[path = "../tests/hostile/parsers.rs"]
mod parsers;

use std::time::Instant;

use kvtune::native::{peak_memory, reset_peak_memory, resident_memory};

/// In bytes.
const MAX_MEMORY: u64 = 512 << 20;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let after = |name: &str| arguments.iter().position(|argument| argument == name).and_then(|at| arguments.get(at + 1));
    let files: u64 = after("--files").map_or(10_000, |value| value.parse().unwrap());
    let mut has_failed = false;
    for parser in parsers::parsers().iter().filter(|parser| after("--only").is_none_or(|only| only == parser.name)) {
        parser.check_seeds();
        // Of each parser its own, not hidden by what those before it took.
        reset_peak_memory();
        let (began, before) = (Instant::now(), resident_memory().unwrap());
        let faults: Vec<String> = (0..files).filter_map(|number| parser.fault(number)).collect();
        let (good, more) = (files - faults.len() as u64, peak_memory().unwrap().saturating_sub(before));
        println!("{good}/{files}  {}  {:.1} s, {} MiB", parser.name, began.elapsed().as_secs_f64(), more >> 20);
        faults.iter().take(10).for_each(|fault| println!("    {fault}"));
        has_failed |= !faults.is_empty() || more > MAX_MEMORY;
    }
    std::process::exit(i32::from(has_failed));
}
