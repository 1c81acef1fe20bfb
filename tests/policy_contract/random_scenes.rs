//! The contract on scenes that nobody chose.

use kvtune::recipe::{BufferKind, Storage};
use proptest::prelude::*;

use super::scene::Scene;
use super::scenes::policies;
use super::simulated::{check, is_exact};

/// A policy's parameters for any capacity: as the table has them, with a grace of its own where there is one.
fn params(p: usize, capacity: usize, grace: usize) -> String {
    let (_, params) = policies()[p];
    let within = |line: &str| match line.split_once(" = ") {
        Some((key, _)) if key == "grace_period" => format!("{key} = {}", grace.min(capacity - 1)),
        Some((key @ ("init_grace_tokens" | "sink_tokens" | "window_size"), count)) => {
            format!("{key} = {}", count.parse::<usize>().unwrap().min(capacity - 1))
        }
        _ => line.to_owned(),
    };
    params.lines().map(within).collect::<Vec<_>>().join("\n")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn promises_hold_on_random_scenes(
        p in 0..policies().len(), groups in 1i64..5, lengths in prop::collection::vec(1usize..60, 1..5), capacity in 5usize..36,
        chunk in 1usize..30, protected in prop::collection::vec((0usize..20, 0usize..6), 0..2),
        grace in 0usize..12, levels in 1u64..64, buffer in 0..3usize, is_offloaded: bool,
        shorter in prop_oneof![Just(0usize), 1usize..20],
    ) {
        tch::set_num_threads(1);
        let buffer = [BufferKind::Plain, BufferKind::Int8, BufferKind::Int4][buffer];
        let (policy, storage) = (policies()[p].0, Storage::Preallocated);
        let params = params(p, capacity, grace);
        let of_sequence = |sequence: usize| protected.first().map_or((0, 0), |&(start, len)| (start + sequence, start + sequence + len));
        let initial_parts = (0..lengths.len()).map(of_sequence).collect();
        let first = capacity.saturating_sub(shorter).max(1);
        let mut scene =
            Scene { policy, params, buffer, is_offloaded, storage, groups, lengths, capacity, chunk, levels, first, initial_parts };
        let largest = scene.largest_chunk();
        prop_assume!(largest > 0);
        scene.chunk = chunk.min(largest);
        let (_, is_unclear) = check(&scene);
        prop_assert!(!is_unclear || !is_exact(&scene), "{scene:?}: exact scores, and yet unforeseen");
    }
}
