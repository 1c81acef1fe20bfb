//! What an entry has beside key and value is differentiated as they are: chunk by chunk, with the cache and its gradient unwound, against
//! autograd over all tokens at once.

use kvtune::cache::{self, CacheShape, ChunkSpan, LayerCache, LayerLog, Undo};
use kvtune::ops::attention::KvBlock;
use kvtune::recipe::{BufferKind, PolicyRecipe};
use kvtune::units::LayerIdx;
use tch::{Device, Kind, Tensor};

const OPTS: (Kind, Device) = (Kind::Double, Device::Cpu);
const WIDTH: i64 = 3;

/// Chunks of two sequences, the second of which ends first, in the middle of a chunk.
fn spans(chunk: usize, lengths: [usize; 2]) -> Vec<ChunkSpan> {
    let span = |index: usize| {
        let start = index * chunk;
        let real = lengths.iter().map(|&length| length.saturating_sub(start).min(chunk)).filter(|&real| real > 0).collect();
        ChunkSpan { index, chunk: index, start, len: chunk, real, is_block: false }
    };
    (0..lengths[0].div_ceil(chunk)).map(span).collect()
}

/// How every chunk weighs the further plane of all entries that its queries see.
struct Weighed {
    span: ChunkSpan,
    undo: Undo,
    weight: Tensor,
    positions: Tensor,
}

fn loss(plane: &Tensor, weight: &Tensor) -> Tensor {
    (plane.sin() * weight).sum(Kind::Double)
}

/// Policy, buffer, and whether the cache is offloaded.
const CASES: [(&str, BufferKind, bool); 3] =
    [("lastrec", BufferKind::Plain, false), ("knorm", BufferKind::Plain, true), ("knorm", BufferKind::Int8, false)];

#[test]
fn a_further_plane_gets_the_gradient_that_autograd_gives_it() {
    tch::manual_seed(9);
    for (policy, buffer, is_offloaded) in CASES {
        let policy = cache::build(&PolicyRecipe::with_params(policy, toml::Table::new()), 8).unwrap();
        let shape = CacheShape {
            batch: 2,
            groups: 2,
            head_dim: 4,
            further: &[WIDTH],
            model_feature: None,
            cache_length: 8,
            allocated: 8,
            is_paged: false,
            buffer,
            is_offloaded,
            kind: Kind::Double,
            device: Device::Cpu,
        };
        let (tokens, lengths) = (21, [21, 16]);
        let [k, v] = [4, 4].map(|width| Tensor::randn([2, 2, tokens, width], OPTS));
        let plane = Tensor::randn([2, 2, tokens, WIDTH], OPTS).set_requires_grad(true);
        let (mut cache, mut log, mut chunks) = (LayerCache::new(LayerIdx(0), shape, 8), LayerLog::default(), Vec::new());
        let mut total = Tensor::zeros([1], OPTS);
        for span in spans(3, lengths) {
            cache.enter(&span);
            log.record(cache.choose_victims(&*policy, &span));
            let here = |x: &Tensor| x.narrow(0, 0, span.num_sequences() as i64).narrow(2, span.start as i64, span.len as i64);
            let own = KvBlock::of_planes([&k, &v, &plane].map(|x| here(x).detach()));
            let victims = cache.recall(&log, &span).unwrap();
            let undo = cache.write(&span, victims, &own).unwrap().undo;
            let (positions, seen) = (cache.positions().copy(), cache.entries().further[0].copy());
            // Slots that hold nothing, and pads, weigh nothing.
            let held = positions.ge(0).unsqueeze(-1);
            let weight = Tensor::randn(seen.size(), OPTS).where_scalarother(&held, 0);
            let index = positions.clamp_min(0).unsqueeze(-1).expand_as(&seen);
            let all = plane.narrow(0, 0, span.num_sequences() as i64).gather(2, &index, false);
            assert!(all.where_self(&held, &seen).equal(&seen), "every entry has the plane of its position");
            total += loss(&all, &weight);
            chunks.push(Weighed { span, undo, weight, positions });
            cache.offload();
        }
        total.backward();

        let (mut grads, found) = (cache.zero_gradients(Kind::Double), Tensor::zeros_like(&plane).detach());
        for Weighed { span, undo, weight, positions } in chunks.iter().rev() {
            cache.enter(span);
            assert!(cache.positions().equal(positions));
            let entries = cache.entries();
            let seen = entries.further[0].detach().set_requires_grad(true);
            loss(&seen, weight).backward();
            let zero = |x: &Tensor| x.zeros_like().to_kind(Kind::Double);
            let all = KvBlock { further: vec![seen.grad()], ..KvBlock::new(&zero(&entries.k), &zero(&entries.v)) };
            let region = cache.region(span);
            grads.add(&all.narrow(region, span.len as i64), &[all.narrow(0, region)]);
            let own = grads.unwind(undo);
            let placed = cache.placement(span, undo).unplace(&own.further[0]);
            cache.unwind(span, undo).unwrap();
            found.narrow(0, 0, span.num_sequences() as i64).narrow(2, span.start as i64, span.len as i64).copy_(&placed);
            assert!(own.k.abs().max().double_value(&[]) == 0.0);
        }
        let worst = (found - plane.grad()).abs().max().double_value(&[]);
        assert!(worst < 1e-12 && plane.grad().abs().max().double_value(&[]) > 0.1, "{buffer:?}: {worst:e}");
    }
}
