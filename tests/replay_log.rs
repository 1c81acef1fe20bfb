//! The replay log: kept exactly, hashed, weighed, followed; and a file of one that is wrong is refused.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvtune::cache::{LayerLog, ReplayLog, Routing, Victims};
use kvtune::engine::{ChunkPlan, ColumnWidth, NoObserver};
use kvtune::files::{self, Dtype, RawTensor, TensorFile};
use kvtune::units::Bytes;
use proptest::prelude::*;
use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use tch::{Device, Kind, Tensor};

use crate::support;
use crate::support::case::{Case, EXACT, PLAIN, compare, registered_policies};

const HEADS: usize = 2;

/// A log such as caches of these lengths could have made, deciding now for all, now by sequence, now by head.
fn drawn(lengths: &[usize], caches: &[usize], chunk: usize, seed: u64) -> ReplayLog {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let tokens = lengths.iter().copied().max().unwrap();
    let cache_lengths: Vec<usize> = caches.iter().map(|&c| c.min(tokens)).collect();
    let span = cache_lengths.iter().copied().min().unwrap();
    let spans = ChunkPlan::new(lengths, span, chunk.min(span), ColumnWidth::Chunks(1)).spans;
    let mut layer = |&cache_length: &usize| {
        let (mut log, mut filled) = (LayerLog::default(), 0);
        for span in &spans {
            let e = span.evictions(filled, cache_length);
            let (sequences, heads) = [(1, 1), (span.num_sequences(), 1), (span.num_sequences(), HEADS)][rng.random_range(0..3)];
            let own = |_| {
                let mut slots: Vec<i64> = (0..filled as i64).collect();
                slots.shuffle(&mut rng);
                slots.truncate(e);
                slots
            };
            let slots: Vec<i64> = (0..sequences * heads).flat_map(own).collect();
            let size = [sequences as i64, heads as i64, e as i64];
            log.record((e > 0).then(|| Victims::new(&Tensor::from_slice(&slots).view(size), cache_length)));
            filled += span.len - e;
        }
        log
    };
    let layers = cache_lengths.iter().map(&mut layer).collect();
    ReplayLog { spans, cache_lengths, layers }
}

/// Every slot of every head.
fn choices(log: &ReplayLog) -> Vec<Vec<Option<Vec<i64>>>> {
    let heads = (0..log.spans[0].num_sequences()).flat_map(|sequence| (0..HEADS).map(move |head| (sequence, head)));
    let heads: Vec<_> = heads.collect();
    let of_chunk = |victims: Option<&Victims>| {
        victims.map(|v| heads.iter().flat_map(|&(sequence, head)| v.of_head(sequence, head).unwrap()).collect())
    };
    log.layers.iter().map(|layer| (0..log.spans.len()).map(|c| of_chunk(layer.victims(c))).collect()).collect()
}

fn kept(log: &ReplayLog) -> ReplayLog {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    log.save(&path).unwrap();
    ReplayLog::load(&path).unwrap()
}

fn assert_same(a: &ReplayLog, b: &ReplayLog) {
    assert_eq!((&a.spans, &a.cache_lengths, a.bytes()), (&b.spans, &b.cache_lengths, b.bytes()));
    assert_eq!(choices(a), choices(b));
    assert_eq!(a.hash(), b.hash());
}

/// Logs that were written before sequences left their batch have choices of those that have ended.
#[test]
fn a_log_with_choices_of_ended_sequences_is_read_without_them() {
    let log = drawn(&[60, 41, 9], &[20], 7, 3);
    let mut earlier = log.clone();
    earlier.layers = vec![LayerLog::default()];
    for span in &log.spans {
        let whole = log.layers[0].victims(span.index).map(|own| {
            let (heads, e) = (HEADS, own.count() as i64);
            let all: Vec<i64> = (0..3 * heads).flat_map(|at| own.of_head(at / heads, at % heads).unwrap()).collect();
            Victims::new(&Tensor::from_slice(&all).view([3, heads as i64, e]), 20)
        });
        earlier.layers[0].record(whole);
    }
    let read = kept(&earlier);
    assert_eq!((&read.spans, choices(&read)), (&log.spans, choices(&log)));
    assert!(log.spans.iter().any(|span| span.num_sequences() == 1) && read.bytes() < earlier.bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_log_is_kept_exactly(
        lengths in prop::collection::vec(1usize..700, 1..4), caches in prop::collection::vec(1usize..400, 1..4),
        chunk in 1usize..60, seed: u64,
    ) {
        let log = drawn(&lengths, &caches, chunk, seed);
        assert_same(&log, &kept(&log));
    }

    /// Whatever a byte is changed to: what is still read is a log, and another one.
    #[test]
    fn a_damaged_file_is_refused_or_another_log(at in 0usize..4000, value: u8, seed: u64) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = drawn(&[60, 41], &[20, 33], 7, seed);
        log.save(&path).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        let at = at % bytes.len();
        // The header may be written in several ways.
        let header = 8 + usize::from(bytes[0]) + (usize::from(bytes[1]) << 8);
        let is_changed = at >= header && bytes[at] != value;
        bytes[at] = value;
        std::fs::write(&path, bytes).unwrap();
        match ReplayLog::load(&path) {
            Ok(found) => prop_assert!(!is_changed || found.hash() != log.hash()),
            Err(e) => prop_assert!(e.hint().is_some() && e.to_string().contains("log"), "{e}"),
        }
    }
}

#[test]
fn slots_of_every_width_are_kept() {
    for (tokens, cache) in [(300, 256), (300, 257), (65_600, 65_536), (65_600, 65_537)] {
        let log = drawn(&[tokens], &[cache], 40_000, 5);
        let width = if cache <= 256 {
            1
        } else if cache <= 65_536 {
            2
        } else {
            4
        };
        assert_eq!(log.bytes().0 % ((tokens - cache) * width) as u64, 0);
        assert_same(&log, &kept(&log));
    }
}

#[test]
fn each_choice_and_each_chunk_is_in_the_hash() {
    let hash = |lengths: &[usize], caches: &[usize], chunk, seed| drawn(lengths, caches, chunk, seed).hash();
    let first = hash(&[60, 41], &[20, 33], 7, 1);
    assert_eq!((first.len(), &first), (64, &hash(&[60, 41], &[20, 33], 7, 1)));
    for other in [
        hash(&[60, 41], &[20, 33], 7, 2),
        hash(&[60, 42], &[20, 33], 7, 1),
        hash(&[60, 41], &[20, 34], 7, 1),
        hash(&[60, 41], &[20, 33], 6, 1),
    ] {
        assert_ne!(first, other);
    }
}

fn numbers(name: &str, shape: &[usize], values: &[i64]) -> RawTensor<'static> {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    RawTensor { name: name.into(), dtype: Dtype::I64, shape: shape.into(), bytes: bytes.into() }
}

fn slots(dtype: Dtype, bytes: &[u8]) -> RawTensor<'static> {
    let shape = vec![bytes.len() * 8 / dtype.bitsize()];
    RawTensor { name: "layer.0.slots".into(), dtype, shape, bytes: bytes.to_vec().into() }
}

/// A file of a sequence of 5 tokens in chunks of 2 and a cache of 3, with other tensors in the place of its own.
fn file_with(dir: &Path, changed: Vec<RawTensor<'static>>) -> PathBuf {
    let path = dir.join("x");
    let mut all = vec![
        numbers("spans", &[3, 3], &[0, 0, 2, 0, 2, 1, 1, 3, 2]),
        numbers("real", &[3, 1], &[2, 1, 2]),
        numbers("cache_lengths", &[1], &[3]),
        numbers("layer.0.deciders", &[3, 2], &[0, 0, 0, 0, 1, 2]),
        slots(Dtype::U8, &[0, 1, 2, 0]),
    ];
    for new in changed {
        all.retain(|old| old.name != new.name);
        all.push(new);
    }
    let metadata = [("format", "kvtune replay log"), ("version", "1")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    files::write_tensors(&path, &all, &BTreeMap::from(metadata)).unwrap();
    path
}

#[test]
fn what_contradicts_itself_is_refused_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(ReplayLog::load(&file_with(dir.path(), vec![])).unwrap().bytes(), Bytes(4));
    let huge = 1i64 << 30;
    for (changed, words) in [
        (slots(Dtype::U8, &[0, 0, 2, 0]), "chunk 2: expected 2 different slots below 3"),
        (slots(Dtype::U8, &[0, 3, 2, 0]), "chunk 2: expected 2 different slots below 3"),
        (slots(Dtype::U8, &[0, 1, 2]), "chunk 2: expected 1 × 2 × 2 slots, found 3"),
        (slots(Dtype::U8, &[0, 1, 2, 0, 1]), "layer 0: 1 slots too many"),
        (slots(Dtype::F32, &[0, 1, 2, 0]), "`layer.0.slots` is F32, expected U8, U16 or U32"),
        (numbers("layer.0.deciders", &[3, 2], &[0, 0, 1, 1, 1, 2]), "chunk 1: 1 sequences and 1 heads decide which 0 of 2"),
        (numbers("layer.0.deciders", &[3, 2], &[0, 0, 0, 0, 2, 2]), "chunk 2: 2 sequences and 2 heads decide which 2 of 3"),
        (numbers("layer.0.deciders", &[3, 2], &[0, 0, 0, 0, 1, huge]), "chunk 2: expected 1 × 1073741824 × 2 slots, found 4"),
        (
            numbers("layer.0.deciders", &[2, 2], &[0; 4]),
            "`layer.0.deciders` is I64 of shape [2, 2], expected I64 of shape [3, 2]",
        ),
        (numbers("cache_lengths", &[1], &[1]), "chunk 0: 0 sequences and 0 heads decide which 1 of 0"),
        (numbers("cache_lengths", &[1], &[-1]), "`cache_lengths` holds -1"),
        (numbers("cache_lengths", &[2], &[3, 3]), "expected 7 tensors for 2 layers, found 5"),
        (numbers("cache_lengths", &[0], &[]), "expected 3 tensors for 0 layers, found 5"),
        (numbers("spans", &[3, 3], &[0, 0, 2, 0, 3, 1, 1, 4, 2]), "chunk 1 does not follow"),
        (numbers("spans", &[3, 3], &[0, 0, 2, 2, 2, 1, 3, 3, 2]), "chunk 1 does not follow"),
        (numbers("spans", &[3, 3], &[0, 0, huge, 0, huge, 1, 1, huge + 1, 2]), "chunk 0 does not follow"),
        (numbers("spans", &[0, 3], &[]), "`real` is I64 of shape [3, 1], expected I64 of shape [0, any]"),
        (numbers("real", &[3, 1], &[1, 1, 2]), "chunk 0 does not follow"),
        (numbers("real", &[3, 1], &[2, 1, 1]), "its chunks have 5 positions"),
        (numbers("real", &[3, 0], &[]), "it has no chunks"),
    ] {
        let error = ReplayLog::load(&file_with(dir.path(), vec![changed])).unwrap_err();
        assert!(error.to_string().contains(words) && error.hint().is_some(), "{error}, expected {words}");
    }
}

#[test]
fn a_file_of_another_kind_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = file_with(dir.path(), vec![]);
    let file = TensorFile::open(&path).unwrap();
    let raw = |name: &str| {
        let view = file.get(name).unwrap();
        RawTensor { name: name.into(), dtype: view.dtype, shape: view.shape.to_vec(), bytes: view.bytes.to_vec().into() }
    };
    let all: Vec<_> = file.names().iter().map(|name| raw(name)).collect();
    files::write_tensors(&path, &all, &BTreeMap::new()).unwrap();
    assert!(ReplayLog::load(&path).unwrap_err().to_string().contains("is not a valid replay log"));
}

/// A case in caches that become full one after the other, if anything ever leaves them.
fn full_one_by_one(case: &Case) -> Case {
    Case { cache: if case.policy == "dense" { case.cache } else { &[18, 20, 22] }, chunk: 4, ..*case }
}

fn case_of(policy: &'static str, params: &'static str) -> Case {
    full_one_by_one(&Case { policy, params, ..PLAIN })
}

#[test]
fn choices_of_different_numbers_of_heads_are_refused() {
    let mut log = drawn(&[40, 31], &[18, 18], 5, 3);
    // Layer 0 decides with two heads, layer 1 with three.
    for (layer, heads) in [(0, 2), (1, 3)] {
        let mut own = LayerLog::default();
        for span in &log.spans {
            let e = span.evictions(span.start.min(18), 18) as i64;
            let slots = Tensor::arange(e, (Kind::Int64, Device::Cpu)).expand([span.num_sequences() as i64, heads, e], false);
            own.record((e > 0).then(|| Victims::new(&slots, 18)));
        }
        log.layers[layer] = own;
    }
    let dir = tempfile::tempdir().unwrap();
    log.save(&dir.path().join("log")).unwrap();
    let error = ReplayLog::load(&dir.path().join("log")).unwrap_err();
    assert!(error.to_string().contains("some of its choices are of 2 KV heads"), "{error}");
}

#[test]
fn the_size_is_known_beforehand() {
    let sizes = |case: &Case| {
        let model = support::model(case);
        let engine = support::engine(case, &model);
        let plan = engine.settings().plan(&support::batch(case), None).unwrap();
        let log = engine.gradients(&model, &support::batch(case), support::context(case), &mut NoObserver).unwrap().log;
        let of_layer = |layer| engine.settings().log_bytes(layer, &plan, case.heads.1);
        let (per_token, whole): (Vec<Bytes>, Vec<Bytes>) = (0..log.layers.len()).map(of_layer).unzip();
        (log.bytes(), (per_token.into_iter().sum(), whole.into_iter().sum()))
    };
    for case in registered_policies() {
        let (real, (_, predicted)) = sizes(&full_one_by_one(&case));
        assert!(real <= predicted, "{}: {real}, predicted {predicted}", case.policy);
    }
    // 26, 24 and 22 positions leave: one choice for all, and one for each of the sequences that are under way, with 2 heads.
    assert_eq!(sizes(&case_of("lastrec", "")), (Bytes(72), (Bytes(3), Bytes(72))));
    assert_eq!(sizes(&case_of("streaming-llm", "")), (Bytes(72), (Bytes(3), Bytes(72))));
    assert_eq!(sizes(&case_of("h2o", "score_prefill = true")), (Bytes(252), (Bytes(18), Bytes(252))));
    // Until something has been scored, the first choice is one of positions: 4 of them a layer, or what a longer cache leaves of them.
    let (real, (_, predicted)) = sizes(&case_of("h2o", ""));
    assert!(predicted == Bytes(252) && real < predicted, "{real}");
}

#[test]
fn a_forward_phase_that_follows_a_log_is_the_one_that_wrote_it() {
    for case in registered_policies() {
        let (name, case) = (case.policy, full_one_by_one(&case));
        let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
        let first = support::engine(&case, &model).gradients(&model, &batch, context, &mut NoObserver).unwrap();
        // The policy of the engine that follows is another one: it is not asked.
        let other = Case { policy: if name == "dense" { "dense" } else { "lastrec" }, params: "", ..case };
        let engine = support::engine(&other, &model).following(kept(&first.log));
        let second = engine.gradients(&model, &batch, context, &mut NoObserver).unwrap();
        assert_eq!(first.losses, second.losses, "{name}");
        assert!(first.gradients.iter().all(|(key, gradient)| gradient.equal(&second.gradients[key])), "{name}");
        assert_eq!(first.log.hash(), second.log.hash(), "{name}");
    }
}

const MIXTRAL: &str = r#"{"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2}"#;

/// Which experts tokens go to is kept with the log, followed to the bit, and proved as any other choice is.
#[test]
fn experts_are_kept_and_followed() {
    let case = Case { config: MIXTRAL, ..case_of("h2o", "") };
    let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
    let first = support::engine(&case, &model).gradients(&model, &batch, context, &mut NoObserver).unwrap();
    let read = kept(&first.log);
    assert_eq!((read.hash(), read.bytes()), (first.log.hash(), first.log.bytes()));
    let follow = |log: ReplayLog| support::engine(&case, &model).following(log);
    let second = follow(read).gradients(&model, &batch, context, &mut NoObserver).unwrap();
    assert_eq!((&first.losses, first.router_loss, &first.gradients), (&second.losses, second.router_loss, &second.gradients));

    // Others than the router prefers.
    let mut turned = first.log.clone();
    for (layer, log) in turned.layers.iter_mut().enumerate() {
        let mut own = LayerLog::default();
        for span in &first.log.spans {
            own.record(log.victims(span.index).cloned());
            let chosen = log.routing(span.index).unwrap().chosen(Device::Cpu);
            own.record_routing(|| Routing::new(&((chosen + layer as i64 + 1).remainder(5)), 5), false);
        }
        *log = own;
    }
    assert_ne!(turned.hash(), first.log.hash());
    let found = compare(&follow(turned.clone()), &model, &batch, context).unwrap();
    assert!(found.worst() <= EXACT && (found.loss - first.losses.iter().map(|l| l.loss_sum).sum::<f64>()).abs() > 1e-6);

    let dense = Case { config: PLAIN.config, ..case };
    let engine = |log| support::engine(&dense, &support::model(&dense)).following(log);
    assert!(
        engine(first.log.clone()).losses(&support::model(&dense), &batch, &mut NoObserver).is_ok(),
        "nobody asks for experts"
    );
    let without =
        support::engine(&dense, &support::model(&dense)).gradients(&support::model(&dense), &batch, context, &mut NoObserver);
    let error = follow(without.unwrap().log).losses(&model, &batch, &mut NoObserver).unwrap_err();
    assert!(error.to_string().contains("experts of size"), "{error}");
}

#[test]
fn any_log_is_proved() {
    let case = Case { cache: &[18, 20, 22], ..PLAIN };
    let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
    let own = compare(&support::engine(&case, &model), &model, &batch, context).unwrap();
    for seed in 0..6 {
        let log = drawn(case.lengths, case.cache, case.chunk, seed);
        let found = compare(&support::engine(&case, &model).following(log), &model, &batch, context).unwrap();
        assert!(found.worst() <= EXACT, "{:.2e} with seed {seed}", found.worst());
        assert!((found.loss - own.loss).abs() > 1e-6, "other choices give another loss");
    }
}

#[test]
fn a_log_of_another_batch_or_model_is_refused() {
    let case = Case { cache: &[18, 20, 22], ..PLAIN };
    let model = support::model(&case);
    let drawn = |lengths: &[usize], caches: &[usize], chunk| drawn(lengths, caches, chunk, 1);
    let mut fewer = drawn(case.lengths, case.cache, case.chunk);
    fewer.layers.pop();
    for (log, words) in [
        (fewer, "expected 3 layers, found 2 layers"),
        (drawn(&[44, 37], case.cache, 5), "expected a batch of 3, found a batch of 2"),
        (drawn(&[44, 37, 10], case.cache, 5), "chunk 1 (event 0) of 5 positions from 5, with [5, 5, 5] tokens by sequence"),
        (drawn(case.lengths, case.cache, 4), "chunk 0 (event 0) of 4 positions"),
        (drawn(case.lengths, &[18, 20, 23], 5), "expected 22 slots in layer 2, found 23 slots in layer 2"),
    ] {
        let engine = support::engine(&case, &model).following(log);
        match engine.gradients(&model, &support::batch(&case), support::context(&case), &mut NoObserver) {
            Err(e) => assert!(e.to_string().contains("belongs to another") && e.to_string().contains(words), "{e}"),
            other => panic!("{words}: {other:?}"),
        }
    }
    let one = Case { heads: (6, 1), ..case };
    let model = support::model(&one);
    let engine = support::engine(&one, &model).following(drawn(case.lengths, case.cache, 5));
    let error = engine.gradients(&model, &support::batch(&one), support::context(&one), &mut NoObserver).unwrap_err();
    assert!(error.to_string().contains("expected 1 KV heads, found 2 KV heads"), "{error}");
}
