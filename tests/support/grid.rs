//! The one list that proofs run over: policies × buffers × heads × tilings. Any two values of two of them meet in some case.

use kvtune::recipe::{BufferKind, Storage};

use super::case::{Case, HeadKind, IN_FILE, PLAIN, TargetsAt, Width, registered_policies};

const SMART: &str = "end_initial_regex = \"###\"\nmax_initial_fraction = 0.4";

/// A value of an axis, as what it changes of a case.
pub type Value = fn(Case) -> Case;

/// How entries are kept.
pub const BUFFERS: [Value; 5] = [
    // A policy that needs a quantised buffer has one already.
    |c| c,
    |c| Case { buffer: BufferKind::Int8, ..c },
    |c| Case { buffer: BufferKind::Int4, ..c },
    |c| Case { is_offloaded: true, ..c },
    |c| Case { buffer: BufferKind::Int8, is_offloaded: true, ..c },
];

/// What the loss is, and where.
pub const HEADS: [Value; 5] = [
    |c| c,
    |c| Case { head: HeadKind::Distilled, ..c },
    |c| Case { targets: TargetsAt::Last(3), ..c },
    |c| Case { head: HeadKind::Classify, ..c },
    |c| Case { head: HeadKind::Score, ..c },
];

/// Shapes of cells, how many of their graphs are kept, and where stores wait.
pub const TILINGS: [Value; 5] = [
    |c| c,
    |c| Case { width: Width::Chunks(1), kept: 1000, ..c },
    |c| Case { layers_per_cell: 3, width: Width::Chunks(100), ..c },
    |c| Case { layers_per_cell: 2, width: Width::Multiplier(1.0), kept: 2, ..c },
    |c| Case { layers_per_cell: 2, width: Width::Chunks(2), layer_checkpoints: IN_FILE, undo_log: IN_FILE, ..c },
];

/// The case of a policy with one value of each axis.
fn case_at(policy: &Case, [buffer, head, tiling]: [usize; 3]) -> Case {
    TILINGS[tiling](HEADS[head](BUFFERS[buffer](*policy)))
}

/// By policy and number of the buffer. Steps of 1 and 2 bring each head and each tiling to each buffer.
fn values_at(policy: usize, buffer: usize) -> [usize; 3] {
    [buffer, (buffer + policy) % HEADS.len(), (buffer + 2 * policy) % TILINGS.len()]
}

/// Every registered policy with every buffer, under heads and tilings in turn.
pub fn grid() -> Vec<Case> {
    let policies = registered_policies().into_iter().enumerate();
    let with_buffers = |(at, policy)| (0..BUFFERS.len()).map(move |buffer| case_at(&policy, values_at(at, buffer)));
    policies.flat_map(with_buffers).collect()
}

/// Every registered policy once, under buffers, heads and tilings in turn; every value of each axis is there.
pub fn each_policy() -> Vec<Case> {
    let policies = registered_policies().into_iter().enumerate();
    policies.map(|(at, policy)| case_at(&policy, values_at(at, at % BUFFERS.len()))).collect()
}

/// One budget over the heads of all layers.
pub const ACROSS_LAYERS: Case =
    Case { name: "adakv, all layers", policy: "adakv", params: "floor = 0.3\npolicy = \"knorm\"\nacross_layers = true", ..PLAIN };

/// Parameters, storages and initial parts that change what a policy does, beside its defaults.
pub const FURTHER: &[Case] = &[
    Case { name: "dense, growing", policy: "dense", cache: &[16], storage: Storage::Growing, ..PLAIN },
    Case { name: "dense, paged", policy: "dense", cache: &[16], chunk: 3, storage: Storage::Paged, ..PLAIN },
    Case { name: "lastrec without sinks", policy: "lastrec", params: "init_grace_tokens = 0", ..PLAIN },
    Case { name: "lastrec with sinks", policy: "lastrec", params: "init_grace_tokens = 4", ..PLAIN },
    Case { name: "h2o without first tokens", params: "keep_initial_fraction = 0.0", ..PLAIN },
    Case { name: "h2o with first tokens", params: "keep_initial_fraction = 0.4", ..PLAIN },
    Case { name: "h2o, grace 1", params: "grace_period = 1", ..PLAIN },
    Case { name: "h2o, grace 4", params: "grace_period = 4", ..PLAIN },
    Case { name: "h2o, grace 12", params: "grace_period = 12", ..PLAIN },
    Case { name: "h2o, normalised", params: "normalize_scores = true", ..PLAIN },
    Case { name: "h2o, normalised as the reference counts", params: "normalize_scores = true\nreference_counts = true", ..PLAIN },
    Case { name: "h2o, prefill scored", params: "score_prefill = true", ..PLAIN },
    Case { name: "h2o-vlen, grace 3", policy: "h2o-vlen", params: "grace_period = 3\nscore_prefill = true", ..PLAIN },
    Case { name: "h2o-vlen, normalised", policy: "h2o-vlen", params: "normalize_scores = true", ..PLAIN },
    Case { name: "h2o-orig, prefill scored", policy: "h2o-orig", params: "score_prefill = true", ..PLAIN },
    Case { name: "streaming-llm, one sink", policy: "streaming-llm", params: "init_grace_tokens = 1", ..PLAIN },
    Case { name: "keydiff, grace 3", policy: "keydiff", params: "grace_period = 3", ..PLAIN },
    Case { name: "knorm, grace 3", policy: "knorm", params: "grace_period = 3", ..PLAIN },
    Case { name: "tova, grace 3", policy: "tova", params: "grace_period = 3", ..PLAIN },
    Case { name: "snapkv, wide", policy: "snapkv", params: "window_size = 6\nkernel_size = 7", ..PLAIN },
    Case { name: "snapkv, mean", policy: "snapkv", params: "kernel_size = 3\npooling = \"mean\"", ..PLAIN },
    Case { name: "defensivekv, of a short window", policy: "defensivekv", params: "window_size = 3\nkernel_size = 3", ..PLAIN },
    Case { name: "dropkv, single entries", policy: "dropkv", params: "window_size = 3\nkernel_size = 1", ..PLAIN },
    Case { name: "lagkv, short partitions", policy: "lagkv", params: "lag_size = 2\ninit_grace_tokens = 1", ..PLAIN },
    Case { name: "rkv, mostly attention", policy: "rkv", params: "attention_weight = 0.9\nsimilarity_threshold = 0.1", ..PLAIN },
    Case {
        name: "expected-attention, grace 3",
        policy: "expected-attention",
        params: "init_grace_tokens = 0\ngrace_period = 3",
        ..PLAIN
    },
    Case { name: "qh2o", policy: "qh2o", buffer: BufferKind::Int8, params: "combination_constant = 0.3", ..PLAIN },
    Case { name: "qh2o-vlen", policy: "qh2o-vlen", buffer: BufferKind::Int4, params: "combination_constant = 0.3", ..PLAIN },
    Case {
        name: "smart-lastrec, one range",
        params: SMART,
        policy: "smart-lastrec",
        initial: &[(0, 6), (0, 6), (0, 6)],
        ..PLAIN
    },
    Case { name: "smart-lastrec, late ranges", params: SMART, policy: "smart-lastrec", initial: &[(12, 40), (17, 25)], ..PLAIN },
    Case { name: "adakv over h2o", policy: "adakv", params: "floor = 0.3\npolicy.h2o = { score_prefill = true }", ..PLAIN },
    Case {
        name: "adakv, unequal layers",
        policy: "adakv",
        params: "floor = 0.4\npolicy = \"keydiff\"",
        cache: &[18, 25, 31],
        ..PLAIN
    },
    ACROSS_LAYERS,
    Case { name: "adakv, all layers, on the host", is_offloaded: true, layers_per_cell: 2, ..ACROSS_LAYERS },
    Case {
        name: "adakv over knorm",
        policy: "adakv",
        params: "floor = 0.28\npolicy = \"knorm\"",
        lengths: &[44, 19, 20, 30],
        ..PLAIN
    },
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn any_two_values_of_two_axes_meet() {
        let policies = registered_policies().len();
        let all = (0..policies).flat_map(|policy| (0..BUFFERS.len()).map(move |buffer| (policy, values_at(policy, buffer))));
        let rows: Vec<[usize; 4]> = all.map(|(policy, [buffer, head, tiling])| [policy, buffer, head, tiling]).collect();
        let sizes = [policies, BUFFERS.len(), HEADS.len(), TILINGS.len()];
        for (a, b) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
            let met: BTreeSet<(usize, usize)> = rows.iter().map(|row| (row[a], row[b])).collect();
            assert_eq!(met.len(), sizes[a] * sizes[b], "axes {a} and {b}");
        }
    }
}
