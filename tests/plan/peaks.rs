//! The planned peak of a step's tensors against the allocators' count. What the process takes in addition depends on the machine: how near
//! the plan comes to it is measured by `cargo bench --bench planner`, and here only that it is of the right size.

use std::path::Path;

use super::draws::{Sizes, draws, measure};

/// Small enough for a test; the bench draws larger ones.
const SMALL: Sizes =
    Sizes { layers: &[2, 3, 4], hidden: &[128, 256, 384], slots: &[128, 256, 512], chunks: &[32, 64, 128], caches: &[2, 3] };

#[test]
fn the_planned_peak_of_tensors_is_within_a_tenth_of_what_was_allocated() {
    let home = tempfile::tempdir().unwrap();
    let kvtune = Path::new(env!("CARGO_BIN_EXE_kvtune"));
    for (i, draw) in draws(5, 6, SMALL).iter().enumerate() {
        let peaks = measure(kvtune, &home.path().join(i.to_string()), draw, 1);
        let (process, tensors) = peaks.errors();
        let (planned, measured) = peaks.seconds;
        println!("{:+.1} % {:+.1} %, {planned:.2} s of {measured:.2}  {}", 100.0 * process, 100.0 * tensors, draw.words);
        assert!((-0.5..1.0).contains(&process), "{process:+.3} of the process: {}: {peaks:?}", draw.words);
        assert!(tensors.abs() <= 0.1, "{tensors:+.3} of the tensors: {}: {peaks:?}", draw.words);
    }
}
