//! How fast a device computes, measured in about a second, and the time of a step that follows from it.

use tch::{Device, Kind, Tensor, no_grad};

use super::clock::time_of;
use super::flops::{self, Flops};
use super::{StepPart, StepSpec, gemm};
use crate::engine::ChunkPlan;
use crate::model::ModelConfig;
use crate::ops::attention::{AttendShape, Chunk, KvPage, ScoreRule, attend, attend_backward, calibrate};

/// Operations, or bytes, in a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Of a chunk through a layer's projections.
    pub linear: f64,
    /// Of a chunk's attention.
    pub attention: f64,
    /// Of its backward.
    pub attention_backward: f64,
    /// Bytes that an operation by element reads and writes.
    pub elementwise: f64,
}

/// Operations of attention that are timed at most: a longer past costs in proportion.
const TIMED: u64 = 4_000_000_000;
/// Tokens that are timed at most: more make no product faster.
const LONGEST: usize = 2048;
/// How often operations by element go over what a layer's graph keeps, in its forward and again in its backward (norms, rotations,
/// activations, sums, moves); as seen in `kvtune bench`.
const PASSES: f64 = 3.0;
/// A quantiser goes over a tensor so many times.
const PASSES_OF_QUANTISER: f64 = 20.0;
/// Bytes a second to and from a file: an ordinary solid-state disk.
const DISK: f64 = 1e9;
/// For each layer of each cell, beside its arithmetic: calls, nodes, locks.
const SECONDS_OF_A_CELL: f64 = 2e-4;

impl Rates {
    /// Of no device in particular: good to order tilings by.
    pub(super) const UNKNOWN: Self = Self { linear: 1e14, attention: 5e13, attention_backward: 5e13, elementwise: 1e12 };

    /// Measures a model's shapes in a kind on a device, which must be there, with chunks of `chunk` tokens in `sequences` sequences and caches of
    /// `slots`.
    pub fn measured(config: &ModelConfig, options: (Kind, Device), (sequences, chunk, slots): (usize, usize, usize)) -> Self {
        let (b, n, d) = (sequences as i64, chunk.min(LONGEST) as i64, config.layers[0].attention.head_dim as i64);
        let (heads, groups) = (config.layers[0].attention.num_heads as i64, config.layers[0].attention.num_kv_heads as i64);
        let of_key = 4 * (b * heads * n * d) as u64;
        let past = (slots as u64).min(TIMED / of_key.max(1)).max(1) as i64;
        // Drawn, as in `gemm`.
        let tensor = |heads: i64, tokens: i64| Tensor::randn([b, heads, tokens, d], options);
        let (q, k, old) = (tensor(heads, n), tensor(groups, n), tensor(groups, past));
        let own = Chunk::of(&q, (&k, &k), ScoreRule::scaled((d as f64).powf(-0.5)));
        let past_part = [KvPage::of(&old, &old)];
        let pairs = (b * heads * n) as f64 * (past as f64 + n as f64 / 2.0);
        let large = Tensor::randn([1 << 20], (Kind::Float, options.1));
        // The way that the step will go.
        let shape = AttendShape { kind: options.0, batch: b, heads, groups, head_dim: d, tokens: n, past };
        let _ = calibrate(shape, options.1);
        no_grad(|| {
            let attended = attend(own, &past_part);
            let forward = time_of(options.1, || drop(attend(own, &past_part))).seconds;
            drop(attend_backward(&q, own, &past_part, &attended));
            let backward = time_of(options.1, || drop(attend_backward(&q, own, &past_part, &attended))).seconds;
            let _ = &large + &large;
            let by_element = time_of(options.1, || drop(&large + &large)).seconds;
            Self {
                linear: gemm::chunk_rate(config, (sequences * chunk).min(LONGEST), options).per_second,
                attention: 4.0 * pairs * d as f64 / forward,
                attention_backward: 10.0 * pairs * d as f64 / backward,
                // Two read, one written.
                elementwise: 3.0 * 4.0 * large.numel() as f64 / by_element,
            }
        })
    }

    /// Seconds of a step by part, in the order of [`StepPart::ALL`]; `kept` is what the graphs of all cells keep together.
    pub(super) fn seconds(&self, s: &StepSpec<'_>, plan: &ChunkPlan, (tokens, targets): (usize, usize), kept: f64) -> [f64; 6] {
        let flops = flops::by_part(s, plan, (tokens, targets));
        let forward = |f: &Flops| f.linear / self.linear + f.attention / self.attention;
        let pass = PASSES * kept / self.elementwise;
        let replayed = s.settings.replayed_layers() as f64 / s.config.num_layers() as f64;
        let cells = (s.config.num_layers() * plan.columns.len()) as f64 * SECONDS_OF_A_CELL;
        let scores = (targets * s.config.vocab_size) as f64 * 4.0 * s.wide() as f64;
        StepPart::ALL.map(|part| match part {
            StepPart::Forward | StepPart::Recompute => forward(&flops.forward) + pass + cells,
            StepPart::Head => flops.forward.head / self.linear + scores / self.elementwise,
            StepPart::Replay => forward(&flops.replay) + (pass + cells) * replayed,
            StepPart::Backward => {
                let Flops { linear, attention, .. } = flops.backward;
                linear / self.linear + attention / self.attention_backward + pass + cells
            }
            StepPart::Optimizer => 8.0 * s.trained_bytes().0 as f64 / self.elementwise,
        })
    }

    /// Seconds that stores take: `bytes` go in and out, rounded or not, to memory or a file.
    pub(super) fn of_store(&self, bytes: f64, rounds: bool, is_file: bool) -> f64 {
        let passes = if rounds { PASSES_OF_QUANTISER } else { 4.0 };
        passes * bytes / self.elementwise + if is_file { 2.0 * bytes / DISK } else { 0.0 }
    }
}
