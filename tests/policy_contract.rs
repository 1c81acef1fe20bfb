//! What every policy and every cache promise, seen at each chunk: entries tagged by position, a slow reference beside them, and the
//! way back to the bit.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on fails, and says what it saw")]

#[path = "policy_contract/slow_policies.rs"]
mod slow_policies;
mod support;

use kvtune::cache::{self, ChunkSpan, LayerCache, LayerLog, Policy, ReplayLog, Shape, Undo, Victims};
use kvtune::engine::{ChunkPlan, ColumnWidth};
use kvtune::recipe::Choice;
use kvtune::units::LayerIdx;
use kvtune::verify::walk;
use proptest::prelude::*;
use slow_policies::SlowPolicy;
use support::F64;
use tch::{Kind, Tensor};

/// One policy on one batch.
#[derive(Clone, Debug)]
struct Scene {
    policy: &'static str,
    params: String,
    groups: i64,
    lengths: Vec<usize>,
    capacity: usize,
    chunk: usize,
    /// Growing caches begin with a few slots.
    grows: bool,
    /// How many different amounts of attention there are: few make many ties.
    levels: u64,
}

/// Keys, values and positions of the filled slots.
type Snapshot = [Tensor; 3];

/// A scene with what came of it, chunk by chunk.
struct Played {
    spans: Vec<ChunkSpan>,
    shape: Shape,
    policy: Box<dyn Policy>,
    cache: LayerCache,
    log: LayerLog,
    undo: Vec<Undo>,
    snapshots: Vec<Snapshot>,
}

impl Scene {
    fn build(&self) -> Box<dyn Policy> {
        cache::build(&Choice::with_params(self.policy, toml::from_str(&self.params).unwrap()), self.capacity).unwrap()
    }

    /// The attention that chunk `index` pays to a position: multiples of 1/8, which sum without rounding.
    fn paid(&self, row: usize, head: usize, index: usize, position: i64) -> f32 {
        let mixed = [row as u64, head as u64, index as u64, position as u64]
            .iter()
            .fold(0x9e37_79b9_7f4a_7c15u64, |h, x| (h ^ x).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(23));
        (mixed % self.levels) as f32 / 8.0
    }

    /// Plays all chunks forward, with every assertion on the way.
    fn play(&self) -> Played {
        let policy = self.build();
        let total = self.lengths.iter().copied().max().unwrap();
        let span = if policy.evicts() { self.capacity } else { total };
        let plan = ChunkPlan::new(&self.lengths, span, self.chunk, ColumnWidth::Chunks(1));
        let cache_length = span.min(total);
        let allocated = if self.grows { 1 } else { cache_length };
        let (batch, kind, device) = (self.lengths.len() as i64, F64.0, F64.1);
        let shape = Shape { batch, groups: self.groups, head_dim: 4, cache_length, allocated, kind, device };
        let mut played = Played {
            cache: LayerCache::new(LayerIdx(0), shape, plan.prefill),
            spans: plan.spans,
            shape,
            policy,
            log: LayerLog::default(),
            undo: Vec::new(),
            snapshots: Vec::new(),
        };
        let mut reference = SlowPolicy::new(self, plan.prefill);
        for span in played.spans.clone() {
            let victims = played.cache.decide(&*played.policy, &span);
            self.check_victims(&played, &span, victims.as_ref());
            played.log.record(victims);
            played.write(&span);
            reference.step(&span, &*played.policy);
            self.check_entries(&played, &span, &reference);
            if played.policy.needs_attention() && span.start >= plan.prefill {
                played.cache.observe(&*played.policy, self.paid_by_slot(&played.cache, &span));
            }
        }
        played
    }

    fn paid_by_slot(&self, cache: &LayerCache, span: &ChunkSpan) -> Tensor {
        let positions = cache.positions();
        let size = positions.size();
        let flat = Vec::<i64>::try_from(positions.contiguous().view(-1)).unwrap();
        let of_slot = |(i, &position): (usize, &i64)| {
            let head = i / size[2] as usize;
            let (row, head) = (head / size[1] as usize, head % size[1] as usize);
            // A row without tokens in this chunk has no query that could pay, an empty slot nothing to be paid for.
            let pays = position >= 0 && span.real[row] > 0;
            if pays { self.paid(row, head, span.index, position) } else { 0.0 }
        };
        let paid: Vec<f32> = flat.iter().enumerate().map(of_slot).collect();
        Tensor::from_slice(&paid).view(&size[..])
    }

    /// As many as the chunk needs, all different, all of slots in use.
    fn check_victims(&self, played: &Played, span: &ChunkSpan, victims: Option<&Victims>) {
        let filled = played.cache.positions().size()[2];
        let needed = span.evictions(filled as usize, played.shape.cache_length);
        assert_eq!(victims.map_or(0, Victims::len), needed, "{self:?}, chunk {}", span.index);
        let Some(victims) = victims else { return };
        let slots = victims.slots(played.shape.batch, played.shape.groups, F64.1).contiguous().view([-1, needed as i64]);
        for head in 0..slots.size()[0] {
            let mut slots = Vec::<i64>::try_from(slots.get(head)).unwrap();
            slots.sort_unstable();
            slots.dedup();
            assert_eq!(slots.len(), needed, "{self:?}, chunk {}: a slot twice", span.index);
            assert!(slots.iter().all(|s| (0..filled).contains(s)), "{self:?}, chunk {}: {slots:?} of {filled}", span.index);
        }
    }

    /// After a write: what the slow reference holds, once each, with the content of its position, newest last.
    fn check_entries(&self, played: &Played, span: &ChunkSpan, reference: &SlowPolicy<'_>) {
        let (k, v) = played.cache.entries();
        for (row, head, positions) in by_head(&played.cache) {
            let what = || format!("{self:?}, chunk {}, row {row}, head {head}: {positions:?}", span.index);
            let mut live: Vec<i64> = positions.iter().copied().filter(|&p| p >= 0).collect();
            live.sort_unstable();
            assert!(live.windows(2).all(|w| w[0] < w[1]), "{}: a position twice", what());
            assert_eq!(live, reference.held(row, head), "{}", what());
            let (start, real) = (span.start as i64, span.real[row] as i64);
            let seen = start + real;
            assert_eq!(live.len() as i64, seen.min(self.lengths[row] as i64).min(played.shape.cache_length as i64), "{}", what());
            let is_promised = |p: i64| p < played.policy.sinks() as i64 || p >= start - played.policy.grace() as i64;
            if real > 0 {
                assert!((0..seen).filter(|&p| is_promised(p)).all(|p| live.contains(&p)), "{}: a promise broken", what());
            }
            let region = &positions[positions.len() - span.len..];
            if span.real[row] == span.len {
                assert_eq!(region, (start..seen).collect::<Vec<_>>(), "{}: the chunk does not stand at the end", what());
            }
            let of_head = |x: &Tensor| Vec::<f64>::try_from(x.get(row as i64).get(head as i64).contiguous().view(-1)).unwrap();
            for (slot, (key, value)) in of_head(&k).chunks(4).zip(of_head(&v).chunks(4)).enumerate() {
                if positions[slot] >= 0 {
                    let expected = [positions[slot] as f64, row as f64, head as f64, 1.0];
                    assert_eq!(key, expected, "{}: slot {slot}", what());
                    assert_eq!(value, expected.map(|x| -x), "{}: slot {slot}", what());
                }
            }
        }
    }
}

/// Positions of the filled slots by row and head.
fn by_head(cache: &LayerCache) -> Vec<(usize, usize, Vec<i64>)> {
    let positions = cache.positions();
    let (rows, heads) = (positions.size()[0] as usize, positions.size()[1] as usize);
    let of = |row: usize, head: usize| Vec::try_from(positions.get(row as i64).get(head as i64).contiguous()).unwrap();
    (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))).map(|(row, head)| (row, head, of(row, head))).collect()
}

/// Keys of a chunk: position, row, head, one. Values are their negatives.
fn tagged(span: &ChunkSpan, shape: Shape) -> (Tensor, Tensor) {
    let one = |row: i64, head: i64, p: usize| [p as f64, row as f64, head as f64, 1.0];
    let mut all = Vec::new();
    for row in 0..shape.batch {
        for head in 0..shape.groups {
            all.extend((span.start..span.start + span.len).flat_map(|p| one(row, head, p)));
        }
    }
    let k = Tensor::from_slice(&all).view([shape.batch, shape.groups, span.len as i64, 4]);
    let v = k.neg();
    (k, v)
}

fn snapshot(cache: &LayerCache) -> Snapshot {
    let (k, v) = cache.entries();
    [k.copy(), v.copy(), cache.positions().copy()]
}

fn assert_same(a: &Snapshot, b: &Snapshot, what: &str) {
    assert!(a.iter().zip(b).all(|(a, b)| a.size() == b.size() && a.equal(b)), "{what}");
}

impl Played {
    fn write(&mut self, span: &ChunkSpan) {
        let (k, v) = tagged(span, self.shape);
        let victims = self.cache.recall(&self.log, span).unwrap();
        let written = self.cache.write(span, victims, &k, &v).unwrap();
        self.undo.push(written.undo);
        self.snapshots.push(snapshot(&self.cache));
    }

    /// The recorded choices, on a fresh cache, make the same cache to the bit at every chunk.
    fn check_replay(&self, scene: &Scene) {
        let mut cache = LayerCache::new(LayerIdx(0), self.shape, 0);
        for (span, expected) in self.spans.iter().zip(&self.snapshots) {
            let (k, v) = tagged(span, self.shape);
            cache.write(span, cache.recall(&self.log, span).unwrap(), &k, &v).unwrap();
            assert_same(&snapshot(&cache), expected, &format!("{scene:?}: replay of chunk {}", span.index));
        }
    }

    /// Backwards, each chunk's undo entry restores what stood before it, to the bit.
    fn check_unwinding(&mut self, scene: &Scene) {
        for span in self.spans.iter().rev() {
            assert_same(
                &snapshot(&self.cache),
                &self.snapshots[span.index],
                &format!("{scene:?}: before chunk {} is unwound", span.index),
            );
            self.cache.unwind(span, &self.undo[span.index]).unwrap();
            assert_eq!(self.cache.stands(), span.index);
        }
        assert_eq!(self.cache.positions().size()[2], 0);
    }

    /// The proof's own walk over the log holds the same positions after every event.
    fn check_walk(self, scene: &Scene) {
        let groups = self.shape.groups as usize;
        let log = ReplayLog { spans: self.spans, cache_lengths: vec![self.shape.cache_length], layers: vec![self.log] };
        let walk = walk(&log, 0, groups).unwrap();
        for (span, [_, _, positions]) in log.spans.iter().zip(&self.snapshots) {
            // A piece of the prefill span is not yet an event.
            if log.spans.get(span.index + 1).is_some_and(|next| next.chunk == span.chunk) {
                continue;
            }
            for row in 0..span.real.len() {
                for head in 0..groups {
                    let mut held = Vec::<i64>::try_from(positions.get(row as i64).get(head as i64).contiguous()).unwrap();
                    let mut walked = walk.held[span.chunk.0][row][head].clone();
                    held.sort_unstable();
                    walked.sort_unstable();
                    assert_eq!(held, walked, "{scene:?}, chunk {}, row {row}, head {head}", span.index);
                }
            }
        }
    }
}

fn check(scene: &Scene) {
    let mut played = scene.play();
    played.check_replay(scene);
    played.check_unwinding(scene);
    played.check_walk(scene);
}

/// Policies, each with the parameters that change what it does, for a cache of 18 slots.
const POLICIES: &[(&str, &str)] = &[
    ("dense", ""),
    ("lastrec", ""),
    ("lastrec", "init_grace_tokens = 0"),
    ("lastrec", "init_grace_tokens = 4"),
    ("h2o", ""),
    ("h2o", "keep_initial_fraction = 0.0"),
    ("h2o", "keep_initial_fraction = 0.6"),
    ("h2o", "grace_period = 1"),
    ("h2o", "grace_period = 4\nkeep_initial_fraction = 0.5"),
    ("h2o", "normalize_scores = true"),
    ("h2o", "normalize_scores = true\nreference_counts = true\ngrace_period = 3"),
];

#[test]
fn every_registered_policy_is_held_to_the_contract() {
    for name in cache::policies::names() {
        assert!(POLICIES.iter().any(|(policy, _)| *policy == name), "`{name}` is not in this file's table");
    }
}

#[test]
fn every_policy_keeps_its_promises() {
    tch::set_num_threads(1);
    for &(policy, params) in POLICIES {
        for groups in [1, 4] {
            for chunk in [1, 5, 7, 14] {
                for lengths in [&[47][..], &[40, 40], &[47, 18, 9], &[19, 1, 38, 23]] {
                    for (levels, grows) in [(1_000_000, false), (3, policy == "dense")] {
                        let (params, lengths) = (params.to_owned(), lengths.to_vec());
                        check(&Scene { policy, params, groups, lengths, capacity: 18, chunk, grows, levels });
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn promises_hold_on_random_scenes(
        policy in 0..3usize, groups in 1i64..5, lengths in prop::collection::vec(1usize..70, 1..5),
        capacity in 4usize..40, chunk in 1usize..40, protected in 0usize..12, keep in 0.0f64..1.0, levels in 1u64..40, normalized: bool,
    ) {
        tch::set_num_threads(1);
        let (policy, params) = match policy {
            0 => ("dense", String::new()),
            1 => ("lastrec", format!("init_grace_tokens = {}", protected.min(capacity - 1))),
            _ => ("h2o", format!(
                "grace_period = {}\nkeep_initial_fraction = {keep:?}\nnormalize_scores = {normalized}", protected.min(capacity - 1)
            )),
        };
        let mut scene = Scene { policy, params, groups, lengths, capacity, chunk, grows: policy == "dense", levels };
        scene.chunk = chunk.min(scene.build().max_chunk_size(capacity)).max(1);
        check(&scene);
    }
}

#[test]
fn writing_and_unwinding_out_of_order_is_refused() {
    let scene = Scene {
        policy: "lastrec",
        params: String::new(),
        groups: 2,
        lengths: vec![30],
        capacity: 18,
        chunk: 5,
        grows: false,
        levels: 9,
    };
    let mut played = scene.play();
    let first = played.spans[0].clone();
    let (k, v) = tagged(&first, played.shape);
    assert!(played.cache.write(&first, None, &k, &v).is_err());
    assert!(played.cache.unwind(&first, &played.undo[0]).is_err());
    assert!(played.cache.positions().kind() == Kind::Int64);
}
