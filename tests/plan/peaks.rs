//! The planned peak of a process against the measured one.

use std::path::Path;

use super::draws::{Sizes, draws, measure};

/// Small enough for a test; `cargo bench --bench planner` draws larger ones.
const SMALL: Sizes =
    Sizes { layers: &[2, 3, 4], hidden: &[128, 256, 384], slots: &[128, 256, 512], chunks: &[32, 64, 128], caches: &[2, 3] };

#[test]
fn the_planned_peak_is_within_a_tenth_of_the_measured_one() {
    let home = tempfile::tempdir().unwrap();
    let kvtune = Path::new(env!("CARGO_BIN_EXE_kvtune"));
    for (i, draw) in draws(5, 6, SMALL).iter().enumerate() {
        let peaks = measure(kvtune, &home.path().join(i.to_string()), draw, 1);
        let (process, tensors) = peaks.errors();
        let (planned, measured) = peaks.seconds;
        println!("{:+.1} % {:+.1} %, {planned:.2} s of {measured:.2}  {}", 100.0 * process, 100.0 * tensors, draw.words);
        assert!(planned > 0.02 * measured && planned < 50.0 * measured, "{planned} s of {measured}: {}", draw.words);
        assert!(process.abs() <= 0.1, "{process:+.3} of the process: {}: {peaks:?}", draw.words);
        assert!(tensors.abs() <= 0.1, "{tensors:+.3} of the tensors: {}: {peaks:?}", draw.words);
    }
}
