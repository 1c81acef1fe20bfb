//! Parsers under seeded mutation: no panic, no endless work, and words that name the file. `benches/parsers.rs` tries many more.

use super::parsers::{Parser, parsers};

#[test]
fn each_parser_takes_what_comes() {
    let faults = |parser: &Parser| {
        parser.check_seeds();
        (0..200).filter_map(|number| parser.fault(number)).collect::<Vec<_>>()
    };
    let faults: Vec<String> = parsers().iter().flat_map(faults).collect();
    assert!(faults.is_empty(), "{} of 2000:\n{}", faults.len(), faults[..faults.len().min(20)].join("\n"));
}
