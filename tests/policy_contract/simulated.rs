//! A scene simulated through: forward with every assertion on the way, again from the log, and back.

use kvtune::cache::{CacheShape, ChunkSpan, HeadBudgets, LayerCache, LayerLog, Policy, ReplayLog, Undo, Victims};
use kvtune::ops::attention::KvBlock;
use kvtune::units::LayerIdx;
use kvtune::verify::walk;
use tch::Tensor;

use super::content::{Content, Drawn, HEAD_DIM, TAG_WIDTH, mixed, tag};
use super::scene::Scene;
use super::slow_policies::SlowPolicy;
use super::synthetic_attention::{SyntheticAttention, by_head};

/// Keys, values, tags and positions of the filled slots.
type Snapshot = [Tensor; 4];

/// A scene with what came of it, chunk by chunk.
pub(crate) struct Played<'a> {
    scene: &'a Scene,
    content: &'a Content,
    shape: CacheShape,
    pub(crate) spans: Vec<ChunkSpan>,
    pub(crate) cache: LayerCache,
    log: LayerLog,
    pub(crate) undo: Vec<Undo>,
    /// Keys and values of each chunk's region as its own queries saw them.
    composed: Vec<KvBlock>,
    snapshots: Vec<Snapshot>,
    /// How often the policy has asked for attention.
    pub(crate) asked: usize,
    /// Whether some choice hung on the last digits of a score.
    pub(crate) is_unclear: bool,
}

/// Plays a scene with every assertion; what it leaves tells how often attention was asked for, and whether all was foreseen.
pub(crate) fn check(scene: &Scene) -> (usize, bool) {
    let content = Content::new(scene);
    let mut simulated = Played::forward(scene, &content);
    let found = (simulated.asked, simulated.is_unclear);
    simulated.check_replay();
    simulated.check_unwinding();
    simulated.check_replay_after_unwinding();
    simulated.check_walk();
    found
}

impl<'a> Played<'a> {
    /// Plays all chunks forward.
    pub(crate) fn forward(scene: &'a Scene, content: &'a Content) -> Self {
        let policy = scene.build();
        let plan = scene.plan(!policy.traits().keeps_all);
        let shape = scene.shape(!policy.traits().keeps_all);
        let mut simulated = Self {
            scene,
            content,
            shape,
            cache: LayerCache::new(LayerIdx(0), shape, plan.prefill),
            spans: plan.spans.clone(),
            log: LayerLog::default(),
            undo: Vec::new(),
            composed: Vec::new(),
            snapshots: Vec::new(),
            asked: 0,
            is_unclear: false,
        };
        simulated.cache.initial_parts = scene.told(&*policy);
        simulated.cache.query_statistics = scene.query_statistics();
        let mut reference = SlowPolicy::new(scene, (content, scene), plan.prefill, &*policy);
        for span in &plan.spans {
            simulated.step(span, &*policy, &mut reference);
        }
        simulated.is_unclear = reference.is_unclear();
        simulated
    }

    fn step(&mut self, span: &ChunkSpan, policy: &dyn Policy, reference: &mut SlowPolicy<'_>) {
        self.cache.enter(span);
        wander(&mut self.cache, span, 0);
        if let Some(budgets) = self.cache.allocate(policy, span) {
            assert!(self.log.budgets.is_none(), "{:?}, chunk {}: shared out twice", self.scene, span.index);
            self.log.budgets = Some(budgets);
        }
        apply_budgets(&mut self.cache, &self.log, span);
        let victims = self.cache.choose_victims(policy, span);
        self.check_victims(span, victims.as_ref());
        self.log.record(victims);
        wander(&mut self.cache, span, 1);
        let tokens = self.content.chunk(span.start, &span.real, span.len);
        let victims = self.cache.recall(&self.log, span).unwrap();
        let written = self.cache.write(span, victims, &tokens).unwrap();
        self.undo.push(written.undo);
        self.composed.push(written.own);
        wander(&mut self.cache, span, 2);
        self.snapshots.push(snapshot(&self.cache));
        reference.take(span);
        self.check_shares(span, reference);
        self.check_entries(span, reference);
        self.check_promises(span, policy);
        self.check_composed(span);
        let attention = SyntheticAttention::new(self.scene, self.content, span, &self.cache);
        self.cache.note(policy, span, &self.composed[span.index], &attention);
        self.asked += attention.asked.get();
        let announced: Vec<_> = policy.traits().required_queries(span.is_prefill()).into_iter().collect();
        assert_eq!(*attention.paid_for.borrow(), announced, "{:?}, chunk {}: it asks what it announces", self.scene, span.index);
        reference.observe(span);
        self.check_notes(span, reference);
    }

    fn what(&self, span: &ChunkSpan, sequence: usize, head: usize, positions: &[i64]) -> String {
        format!("{:?}, chunk {}, sequence {sequence}, head {head}: {positions:?}", self.scene, span.index)
    }

    /// The budgets in force when a chunk is written.
    fn budgets(&self, span: &ChunkSpan) -> Option<&HeadBudgets> {
        self.log.budgets.as_ref().filter(|budgets| budgets.index <= span.index)
    }

    /// Slots of a head that may hold something.
    fn share(&self, span: &ChunkSpan, sequence: usize, head: usize) -> usize {
        self.budgets(span).map_or(self.shape.cache_length, |budgets| budgets.shares[sequence][head])
    }

    /// Together what the heads would have had anyway, each at least its floor, no buffer longer than twice the cache.
    fn check_shares(&self, span: &ChunkSpan, reference: &SlowPolicy<'_>) {
        let Some(budgets) = self.budgets(span) else { return };
        let (scene, capacity, groups) = (self.scene, self.shape.cache_length, self.shape.groups as usize);
        let floor = (scene.rule().2.unwrap() * capacity as f64) as usize;
        assert!((capacity..=2 * capacity).contains(&budgets.slots), "{scene:?}: {budgets:?}");
        for (sequence, shares) in budgets.shares.iter().enumerate() {
            assert_eq!(shares.iter().sum::<usize>(), groups * capacity, "{scene:?}, sequence {sequence}: {shares:?}");
            assert!(
                shares.iter().all(|share| (floor..=budgets.slots).contains(share)),
                "{scene:?}, sequence {sequence}: {shares:?}"
            );
            if let Some(expected) = reference.shares(sequence) {
                assert_eq!(shares, expected, "{scene:?}, sequence {sequence}");
            }
        }
    }

    /// As many as the chunk needs, all different, all of slots in use.
    fn check_victims(&self, span: &ChunkSpan, victims: Option<&Victims>) {
        let (scene, filled) = (self.scene, self.cache.positions().size()[2]);
        let slots = self.budgets(span).map_or(self.shape.cache_length, |budgets| budgets.slots);
        let needed = span.evictions(filled as usize, slots);
        assert_eq!(victims.map_or(0, Victims::count), needed, "{scene:?}, chunk {}", span.index);
        let Some(victims) = victims else { return };
        for (sequence, head, mut slots) in
            by_head(&victims.slots(span.num_sequences() as i64, self.shape.groups, self.shape.device))
        {
            slots.sort_unstable();
            slots.dedup();
            assert_eq!(slots.len(), needed, "{}: a slot twice", self.what(span, sequence, head, &slots));
            assert!(slots.iter().all(|s| (0..filled).contains(s)), "{}: {filled} slots", self.what(span, sequence, head, &slots));
        }
    }

    /// After a write: what the slow reference holds, once each, with the content of its position, the chunk last.
    fn check_entries(&self, span: &ChunkSpan, reference: &SlowPolicy<'_>) {
        let entries = self.cache.entries();
        let (keys, values, tags) = (flat(&entries.k), flat(&entries.v), flat(&entries.further[0]));
        let mut slot = 0;
        for (sequence, head, positions) in by_head(&self.cache.positions()) {
            let what = || self.what(span, sequence, head, &positions);
            if let Some(held) = reference.held(sequence, head) {
                assert_eq!(live(&positions), held, "{}", what());
            }
            if span.real_of(sequence) == span.len {
                let chunk: Vec<i64> = (span.start..span.start + span.len).map(|p| p as i64).collect();
                assert!(positions.ends_with(&chunk), "{}: the chunk does not stand at the end", what());
            }
            for &position in &positions {
                if let Ok(position) = usize::try_from(position) {
                    let (key, value) = self.content.stored([sequence, head, position]);
                    assert_eq!(&keys[slot..slot + key.len()], key, "{}: key of {position}", what());
                    assert_eq!(&values[slot..slot + value.len()], value, "{}: value of {position}", what());
                    let own = slot / self.shape.head_dim as usize * TAG_WIDTH as usize;
                    let tag = tag([sequence, head, position]);
                    assert_eq!(&tags[own..own + tag.len()], tag, "{}: tag of {position}", what());
                }
                slot += self.shape.head_dim as usize;
            }
        }
    }

    /// Each position once, as many as there can be; first, young and protected tokens among them.
    fn check_promises(&self, span: &ChunkSpan, policy: &dyn Policy) {
        for (sequence, head, positions) in by_head(&self.cache.positions()) {
            let (live, what) = (live(&positions), || self.what(span, sequence, head, &positions));
            assert!(live.windows(2).all(|w| w[0] < w[1]), "{}: a position twice", what());
            let seen = (span.start + span.real_of(sequence)).min(self.scene.lengths[sequence]);
            assert_eq!(live.len(), seen.min(self.share(span, sequence, head)), "{}", what());
            let is_young = |p: usize| p + policy.traits().grace >= span.start;
            let is_promised = |p: &usize| *p < policy.traits().sinks || is_young(*p) || self.scene.protects(sequence, *p);
            if span.real_of(sequence) > 0 {
                assert!((0..seen).filter(is_promised).all(|p| live.contains(&(p as i64))), "{}: a promise broken", what());
            }
        }
    }

    /// A chunk sees its own tokens exactly, what stands in front of them as it is stored, and nothing where nothing is.
    fn check_composed(&self, span: &ChunkSpan) {
        let KvBlock { k, v, .. } = &self.composed[span.index];
        let (keys, values) = (flat(k), flat(v));
        let (width, region) = (self.shape.head_dim as usize, self.cache.region(span));
        let of_region = by_head(&self.cache.positions().narrow(2, region, span.len as i64));
        // What stands where nothing is in use is masked.
        let is_masked = self.cache.valid_in_region(span).is_some_and(|in_use| {
            let held = self.cache.positions().narrow(2, region, span.len as i64).ge(0);
            assert!(in_use.equal(&held), "{:?}, chunk {}", self.scene, span.index);
            true
        });
        let places =
            of_region.iter().flat_map(|(sequence, head, positions)| positions.iter().map(move |&p| (*sequence, *head, p)));
        for ((key, value), (sequence, head, position)) in keys.chunks(width).zip(values.chunks(width)).zip(places) {
            let at = |p: usize| [sequence, head, p];
            let seen = match usize::try_from(position) {
                Ok(p) if p >= span.start => self.content.exact(at(p)),
                Ok(p) => self.content.stored(at(p)),
                Err(_) if is_masked => continue,
                Err(_) => (&[0.0; HEAD_DIM], &[0.0; HEAD_DIM]),
            };
            assert_eq!((key, value), (&seen.0[..], &seen.1[..]), "{}", self.what(span, sequence, head, &[position]));
        }
    }

    /// What is noted of each entry, in sequences that go on.
    fn check_notes(&self, span: &ChunkSpan, reference: &SlowPolicy<'_>) {
        let Some(observed) = self.cache.observed() else { return };
        let observed = Vec::<f32>::try_from(observed.contiguous().view(-1)).unwrap();
        let mut observed = observed.into_iter();
        let tolerance = reference.tolerance();
        for (sequence, head, positions) in by_head(&self.cache.positions()) {
            for (&position, found) in positions.iter().zip(observed.by_ref()) {
                if position < 0 || span.real_of(sequence) < span.len {
                    continue;
                }
                if let Some(expected) = reference.noted([sequence, head], position as usize) {
                    let what = || self.what(span, sequence, head, &positions);
                    let is_same = (found - expected).abs() <= tolerance * expected.abs();
                    assert!(is_same, "{}: {found} is noted of {position}, expected {expected}", what());
                }
            }
        }
    }

    /// The recorded choices, on a fresh cache, make the same cache to the bit at every chunk.
    pub(crate) fn check_replay(&self) {
        let mut cache = LayerCache::new(LayerIdx(0), self.shape, 0);
        for (span, expected) in self.spans.iter().zip(&self.snapshots) {
            self.replay(&mut cache, span);
            self.assert_same(&cache, expected, || format!("replay of chunk {}", span.index));
        }
    }

    /// The same in the cache that was unwound, where slots that hold nothing have seen better days.
    pub(crate) fn check_replay_after_unwinding(&mut self) {
        let mut cache = std::mem::replace(&mut self.cache, LayerCache::new(LayerIdx(0), self.shape, 0));
        for (span, expected) in self.spans.iter().zip(&self.snapshots) {
            self.replay(&mut cache, span);
            let is_same = held_alone(&snapshot(&cache)).iter().zip(&held_alone(expected)).all(|(a, b)| a.equal(b));
            assert!(is_same, "{:?}: second replay of chunk {}", self.scene, span.index);
        }
    }

    fn replay(&self, cache: &mut LayerCache, span: &ChunkSpan) {
        let tokens = self.content.chunk(span.start, &span.real, span.len);
        cache.enter(span);
        wander(cache, span, 3);
        apply_budgets(cache, &self.log, span);
        cache.write(span, cache.recall(&self.log, span).unwrap(), &tokens).unwrap();
    }

    /// Backwards, each chunk's undo entry restores what stood before it, to the bit; and the chunk is composed again as it was.
    pub(crate) fn check_unwinding(&mut self) {
        for span in self.spans.clone().iter().rev() {
            self.cache.enter(span);
            self.assert_same(&self.cache, &self.snapshots[span.index], || format!("before chunk {} is unwound", span.index));
            wander(&mut self.cache, span, 4);
            let tokens = self.content.chunk(span.start, &span.real, span.len);
            let undo = &self.undo[span.index];
            let own = self.cache.recompose(&self.cache.placement(span, undo), undo, &tokens);
            let is_same = own.planes().zip(self.composed[span.index].planes()).all(|(own, composed)| own.equal(composed));
            assert!(is_same, "{:?}: chunk {} composed again", self.scene, span.index);
            self.cache.unwind(span, undo).unwrap();
            assert_eq!(self.cache.num_chunks(), span.index);
        }
        assert_eq!(self.cache.positions().size()[2], 0);
    }

    fn assert_same(&self, cache: &LayerCache, expected: &Snapshot, what: impl Fn() -> String) {
        let is_same = |(a, b): (&Tensor, &Tensor)| a.size() == b.size() && a.equal(b);
        assert!(snapshot(cache).iter().zip(expected).all(is_same), "{:?}: {}", self.scene, what());
    }

    /// The proof's own walk over the log holds the same positions after every event.
    pub(crate) fn check_walk(self) {
        let groups = self.shape.groups as usize;
        let log = ReplayLog { spans: self.spans, cache_lengths: vec![self.shape.cache_length], layers: vec![self.log] };
        let walk = walk(&log, 0, groups).unwrap();
        for (span, [.., positions]) in log.spans.iter().zip(&self.snapshots) {
            // A piece of the prefill span is not yet an event.
            if log.spans.get(span.index + 1).is_some_and(|next| next.chunk == span.chunk) {
                continue;
            }
            for (sequence, head, held) in by_head(positions) {
                assert_eq!(sorted(&held), sorted(&walk[span.chunk][sequence][head]), "{:?}, chunk {}", self.scene, span.index);
            }
        }
    }
}

/// Sends an offloaded buffer to the host, or brings it back, at moments that mean nothing.
fn wander(cache: &mut LayerCache, span: &ChunkSpan, moment: usize) {
    match mixed(&[11, span.index, span.start, moment]) % 3 {
        0 => cache.offload(),
        1 => cache.prefetch(),
        _ => {}
    }
}

/// Brings the budgets into force where its chunk has come, as the engine does.
fn apply_budgets(cache: &mut LayerCache, log: &LayerLog, span: &ChunkSpan) {
    if let Some(budgets) = log.budgets.as_ref().filter(|budgets| budgets.index == span.index) {
        cache.apply_budgets(budgets);
    }
}

fn flat(x: &Tensor) -> Vec<f64> {
    Vec::try_from(x.contiguous().view(-1)).unwrap()
}

fn snapshot(cache: &LayerCache) -> Snapshot {
    let entries = cache.entries();
    [entries.k.copy(), entries.v.copy(), entries.further[0].copy(), cache.positions().copy()]
}

/// A snapshot in which slots that hold nothing are zero.
fn held_alone([k, v, tags, positions]: &Snapshot) -> Snapshot {
    let held = positions.ge(0).unsqueeze(-1);
    let alone = |x: &Tensor| x.where_self(&held, &x.zeros_like());
    [alone(k), alone(v), alone(tags), positions.shallow_clone()]
}

fn sorted(positions: &[i64]) -> Vec<i64> {
    let mut positions = positions.to_vec();
    positions.sort_unstable();
    positions
}

fn live(positions: &[i64]) -> Vec<i64> {
    sorted(positions).into_iter().filter(|&p| p >= 0).collect()
}

/// Whether all sums of a scene are exact, so that nothing may be left unforeseen.
pub(crate) fn is_exact(scene: &Scene) -> bool {
    Content::new(scene).drawn != Drawn::Real
}
