//! Every policy with every buffer, on batches and chunks of all shapes.

use kvtune::recipe::{BufferKind, Storage};

use super::scene::Scene;
use super::simulated::check;
use crate::support::policies::registered;

/// Parameters that change what a policy does, for a cache of at least 10 slots.
const LISTED: &[(&str, &str)] = &[
    ("dense", ""),
    ("lastrec", ""),
    ("lastrec", "init_grace_tokens = 0"),
    ("lastrec", "sink_tokens = 4"),
    ("streaming-llm", ""),
    ("streaming-llm", "init_grace_tokens = 1"),
    ("h2o", ""),
    ("h2o", "keep_initial_fraction = 0.0"),
    ("h2o", "keep_initial_fraction = 0.6"),
    ("h2o", "grace_period = 1"),
    ("h2o", "grace_period = 4\nkeep_initial_fraction = 0.5"),
    ("h2o", "normalize_scores = true"),
    ("h2o", "normalize_scores = true\nreference_counts = true\ngrace_period = 3"),
    ("h2o", "score_prefill = true"),
    ("h2o", "score_prefill = true\nnormalize_scores = true"),
    ("h2o-vlen", ""),
    ("h2o-vlen", "grace_period = 2\nscore_prefill = true"),
    ("h2o-vlen", "normalize_scores = true\nkeep_initial_fraction = 0.3"),
    ("h2o-orig", ""),
    ("h2o-orig", "keep_initial_fraction = 0.4\nscore_prefill = true"),
    ("qh2o", ""),
    ("qh2o", "combination_constant = 0.1\ngrace_period = 2"),
    ("qh2o", "combination_constant = 1.0\nnormalize_scores = true"),
    ("qh2o", "combination_constant = 0.0\nscore_prefill = true"),
    ("qh2o-vlen", ""),
    ("qh2o-vlen", "combination_constant = 0.8\ngrace_period = 3\nkeep_initial_fraction = 0.2"),
    ("keydiff", ""),
    ("keydiff", "grace_period = 3"),
    ("knorm", ""),
    ("knorm", "grace_period = 2"),
    ("tova", ""),
    ("tova", "grace_period = 3"),
    ("snapkv", ""),
    ("snapkv", "window_size = 4\nkernel_size = 3"),
    ("snapkv", "window_size = 1\nkernel_size = 1"),
    ("snapkv", "window_size = 3\nkernel_size = 7\npooling = \"mean\""),
    ("expected-attention", ""),
    ("expected-attention", "init_grace_tokens = 0\ngrace_period = 2"),
    ("defensivekv", ""),
    ("defensivekv", "window_size = 3\nkernel_size = 3"),
    ("dropkv", ""),
    ("dropkv", "window_size = 3\nkernel_size = 1"),
    ("lagkv", ""),
    ("lagkv", "lag_size = 2\ninit_grace_tokens = 0"),
    ("learned", ""),
    ("learned", "init_grace_tokens = 0\ngrace_period = 3"),
    ("learned", "gate_alone = true"),
    ("rkv", ""),
    ("rkv", "window_size = 1\nkernel_size = 3\nattention_weight = 0.6\nsimilarity_threshold = 0.2"),
    ("triattention", ""),
    ("triattention", "init_grace_tokens = 0\ngrace_period = 3"),
    ("smart-lastrec", "end_initial_regex = 'x'"),
    ("smart-lastrec", "end_initial_regex = 'x'\nmax_initial_fraction = 0.4"),
    ("adakv", ""),
    ("adakv", "floor = 0.5\n[policy.snapkv]\nwindow_size = 2\nkernel_size = 3"),
    ("adakv", "floor = 0.4\n[policy.snapkv]\nwindow_size = 1\nkernel_size = 5\npooling = \"mean\""),
    ("adakv", "floor = 0.3\npolicy = \"knorm\""),
    ("adakv", "floor = 1.0\npolicy = \"knorm\""),
    ("adakv", "floor = 0.6\n[policy.knorm]\ngrace_period = 2"),
    ("adakv", "floor = 0.3\n[policy.h2o]\nscore_prefill = true"),
    ("adakv", "floor = 0.5\n[policy.h2o]\nscore_prefill = true\nnormalize_scores = true\ngrace_period = 2"),
    ("adakv", "floor = 0.4\n[policy.h2o-orig]\nscore_prefill = true"),
    ("adakv", "floor = 0.4\n[policy.h2o-vlen]\nscore_prefill = true"),
    ("adakv", "floor = 0.4\n[policy.qh2o]\nscore_prefill = true"),
    ("adakv", "floor = 0.4\npolicy = \"keydiff\""),
    ("adakv", "floor = 0.6\npolicy = \"expected-attention\""),
    ("adakv", "floor = 0.6\n[policy.defensivekv]\nwindow_size = 2"),
    ("adakv", "floor = 0.6\n[policy.dropkv]\nwindow_size = 2"),
    ("adakv", "floor = 0.6\npolicy = \"learned\""),
    ("adakv", "floor = 0.6\n[policy.rkv]\nwindow_size = 2"),
    ("adakv", "floor = 0.6\npolicy = \"triattention\""),
];

/// The policies that are listed, and those of the registry that are not.
pub(crate) fn policies() -> Vec<(&'static str, &'static str)> {
    let rest = registered().into_iter().filter(|(name, _)| LISTED.iter().all(|(listed, _)| listed != name));
    LISTED.iter().copied().chain(rest).collect()
}

/// Slots and sequences: single, equal, one that ends in the prefill span, ones that end anywhere.
const BATCHES: [(usize, &[usize]); 5] =
    [(18, &[47]), (18, &[38, 38]), (18, &[47, 18, 9]), (18, &[19, 1, 38, 23]), (13, &[13, 31, 30])];
/// For chunks of one token, of which there are many.
const SHORT: [(usize, &[usize]); 3] = [(10, &[21, 5]), (11, &[23]), (10, &[14, 19, 11])];

/// How the tokens of a scene are cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Single,
    Prime,
    Largest,
}

/// The scenes of one policy in one buffer: all three cuts; the rest in turn, where `p` is the policy's.
pub(crate) fn scenes(
    (p, (policy, params)): (usize, (&'static str, &str)),
    (buffer, is_offloaded): (BufferKind, bool),
    storage: Storage,
) -> Vec<Scene> {
    let b = buffer as usize * 2 + usize::from(is_offloaded) + storage as usize;
    let of = |(i, cut): (usize, Cut)| {
        let turn = p + b + i;
        let (capacity, lengths) = match cut {
            Cut::Single => SHORT[turn % SHORT.len()],
            _ => BATCHES[turn % BATCHES.len()],
        };
        let (groups, levels) = ([2, 1, 4][(p + 2 * b + i) % 3], [3, 64][(turn / 2) % 2]);
        let (params, lengths) = (params.to_owned(), lengths.to_vec());
        // A policy that looks for an initial part finds the same in all sequences, or another in each.
        let initial = |sequence: usize| {
            if turn.is_multiple_of(2) { (0, 4) } else { (sequence % 2 * 3, sequence % 2 * 3 + 2 + 5 * sequence) }
        };
        let sequences = if policy == "smart-lastrec" { lengths.len() } else { 0 };
        let initial_parts = (0..sequences).map(initial).collect();
        let scene = Scene {
            policy,
            params,
            buffer,
            is_offloaded,
            storage,
            groups,
            lengths,
            capacity,
            chunk: 1,
            levels,
            first: capacity,
            initial_parts,
        };
        let largest = scene.largest_chunk();
        let chunk = match cut {
            Cut::Single => 1,
            Cut::Prime => [5, 7, 3][turn % 3].min(largest),
            Cut::Largest => largest,
        };
        Scene { chunk, ..scene }
    };
    [Cut::Single, Cut::Prime, Cut::Largest].into_iter().enumerate().map(of).collect()
}

/// Plays the scenes of every policy in one buffer; few of their choices may hang on the last digits.
fn play_all(buffer: BufferKind) {
    tch::set_num_threads(1);
    let (mut simulated, mut unclear) = (0, 0);
    for is_offloaded in [false, true] {
        for (p, &policy) in policies().iter().enumerate() {
            for scene in scenes((p, policy), (buffer, is_offloaded), Storage::Preallocated) {
                let (_, is_unclear) = check(&scene);
                (simulated, unclear) = (simulated + 1, unclear + usize::from(is_unclear));
            }
        }
    }
    println!("{buffer:?}: {simulated} scenes, {unclear} with a choice that hung on the last digits");
    assert!(unclear * 50 <= simulated, "{unclear} of {simulated} scenes could not be foreseen");
}

#[test]
fn every_policy_keeps_its_promises_in_a_plain_buffer() {
    play_all(BufferKind::Plain);
}

#[test]
fn every_policy_keeps_its_promises_in_eight_bits() {
    play_all(BufferKind::Int8);
}

#[test]
fn every_policy_keeps_its_promises_in_four_bits() {
    play_all(BufferKind::Int4);
}

#[test]
fn a_dense_cache_grows_by_doubling_or_by_pages() {
    tch::set_num_threads(1);
    for storage in [Storage::Growing, Storage::Paged] {
        for buffer in [BufferKind::Plain, BufferKind::Int8, BufferKind::Int4] {
            for is_offloaded in [false, true] {
                for scene in scenes((0, ("dense", "")), (buffer, is_offloaded), storage) {
                    check(&scene);
                }
            }
        }
    }
}

#[test]
fn protected_positions_stay() {
    tch::set_num_threads(1);
    for (p, &policy) in policies().iter().enumerate().filter(|(_, (policy, _))| *policy != "dense") {
        // The error of quantisation is measured against what may leave.
        let is_about_errors = policy.0.starts_with("qh2o") || policy.1.contains("qh2o");
        let buffer = if is_about_errors { BufferKind::Int4 } else { BufferKind::Plain };
        for (i, scene) in scenes((p, policy), (buffer, false), Storage::Preallocated).into_iter().enumerate() {
            // The same range in all sequences, or another in each; begun before the tokens that stay anyway end, or behind them.
            let of_sequence =
                |sequence: usize| if (p + i) % 2 == 0 { (2, 5) } else { (sequence * 5, sequence * 5 + 3 - sequence % 3) };
            let scene = Scene { initial_parts: (0..scene.lengths.len()).map(of_sequence).collect(), ..scene };
            let chunk = scene.chunk.min(scene.largest_chunk());
            if chunk > 0 {
                check(&Scene { chunk, ..scene });
            }
        }
    }
}

/// In a layer that is longer than the smallest, sequences can end in the very chunk that brings the first eviction: they lose nothing.
#[test]
fn layers_longer_than_the_smallest_become_full_later() {
    tch::set_num_threads(1);
    for (p, &policy) in policies().iter().enumerate().filter(|(_, (policy, _))| *policy != "dense") {
        for scene in scenes((p, policy), (BufferKind::Plain, false), Storage::Preallocated) {
            let full = scene.capacity;
            for (first, lengths) in
                [(full - 1, vec![full, full + 20]), (full / 2, vec![full, full + 9]), (full / 2, vec![full - 1, full + 9, 2])]
            {
                let ranges = scene.initial_parts.iter().copied().cycle();
                let initial_parts = ranges.take(lengths.len()).collect();
                check(&Scene { lengths, first, initial_parts, ..scene.clone() });
            }
        }
    }
}

#[test]
fn attention_is_computed_only_for_those_who_ask() {
    tch::set_num_threads(1);
    for (p, &(policy, params)) in policies().iter().enumerate() {
        let scene = &scenes((p, (policy, params)), (BufferKind::Plain, false), Storage::Preallocated)[1];
        let rule = scene.rule().0;
        let never =
            ["dense", "lastrec", "smart-lastrec", "streaming-llm", "knorm", "keydiff", "triattention"].contains(&rule.as_str());
        let (asked, _) = check(scene);
        let never = never || params.contains("gate_alone");
        assert_eq!(asked == 0, never, "`{policy}` with `{params}` asked {asked} times");
    }
}
