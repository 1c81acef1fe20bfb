//! Every backend of attention against plain attention under autograd.

use tch::{Device, Kind, Tensor};

use super::mass::mass_in_blocks;
use super::*;
use crate::native;
use crate::native::cuda::TorchKernel;

pub(super) const OPTS: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Plain softmax attention over past and chunk, under autograd.
fn naive(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> (Tensor, Tensor) {
    let (r, n, total) = (q.size()[1] / k.size()[1], q.size()[2], k.size()[2]);
    let (k, v) = (k.repeat_interleave_self_int(r, 1, None), v.repeat_interleave_self_int(r, 1, None));
    let mask = Tensor::ones([n, total], (Kind::Bool, Device::Cpu)).tril(total - n).logical_not();
    let scores = (q.matmul(&k.transpose(-1, -2)) * scale).masked_fill(&mask, f64::NEG_INFINITY);
    let weights = scores.softmax(-1, Kind::Double);
    (weights.matmul(&v), weights)
}

pub(super) fn worst(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

const ASKED: [Queries; 4] = [Queries::All, Queries::Last(1), Queries::Last(3), Queries::Last(100)];

/// Every backend that there is without a GPU: kvtune's own kernel, and what serves other devices, with a kernel for the CPU in the place of
/// those for CUDA.
pub(super) const WAYS: [Backend; 4] =
    [Backend::Own, Backend::Blocks, Backend::Parts(TorchKernel::Cpu), Backend::Joined(TorchKernel::Cpu)];

/// Those that leave slots out.
const WITH_MASKS: [Backend; 2] = [WAYS[0], WAYS[1]];

fn mass_by(backend: Backend, chunk: &Qkv, past: &[KvBlock], lse_bhn: &Tensor, queries: Queries) -> Tensor {
    if backend == Backend::Own {
        attention_mass(chunk, past, lse_bhn, queries)
    } else {
        mass_in_blocks(chunk, past, lse_bhn, queries)
    }
}

#[test]
fn all_ways_equal_plain_attention_forward_backward_and_in_sums() {
    for (n, past, h, g, d) in [
        (5, 7, 6, 2, 8),
        (1, 3, 4, 4, 8),
        (70, 9, 8, 1, 8),
        (4, 0, 2, 2, 8),
        (130, 300, 4, 2, 14),
        (1, 259, 7, 1, 80),
        (300, 65, 14, 2, 10),
    ] {
        let (b, scale) = (2, 0.3);
        let q = Tensor::randn([b, h, n, d], OPTS).set_requires_grad(true);
        let k = Tensor::randn([b, g, past + n, d], OPTS).set_requires_grad(true);
        let v = Tensor::randn([b, g, past + n, d], OPTS).set_requires_grad(true);
        let dout = Tensor::randn([b, n, h, d], OPTS).transpose(1, 2);
        let (expected, weights) = naive(&q, &k, &v, scale);
        (&expected * &dout).sum(Kind::Double).backward();

        let (q0, k0, v0) = (q.detach(), k.detach(), v.detach());
        let (ko, vo) = (k0.narrow(2, 0, past).contiguous(), v0.narrow(2, 0, past).contiguous());
        let (kn, vn) = (k0.narrow(2, past, n).contiguous(), v0.narrow(2, past, n).contiguous());
        // The past as one part, and as two pages.
        let cut = past / 2;
        let pages = [(0, cut), (cut, past - cut)].map(|(start, len)| (ko.narrow(2, start, len), vo.narrow(2, start, len)));
        let pages: Vec<KvBlock> = pages.iter().filter(|p| p.0.size()[2] > 0).map(|(k, v)| KvBlock::new(k, v)).collect();
        let chunk = Qkv::new(&q0, &kn, &vn, ScoreRule::scaled(scale));
        for backend in WAYS {
            let merged = attend_by(backend, &chunk, &pages, None).0;
            assert!(worst(&merged.out_bhnd, &expected) < 1e-13);

            let grads = attend_backward_by(backend, &dout, &chunk, &pages, &merged);
            let all =
                |old: fn(&KvBlock) -> &Tensor, new| Tensor::cat(&grads.past.iter().map(old).chain([new]).collect::<Vec<_>>(), 2);
            assert!(worst(&grads.dq_bhnd, &q.grad()) < 1e-12);
            assert!(worst(&all(|p| &p.k, &grads.own.k), &k.grad()) < 1e-12);
            assert!(worst(&all(|p| &p.v, &grads.own.v), &v.grad()) < 1e-12);

            for queries in ASKED {
                let on_the_way = attend_and_sum(&chunk, &pages, Some(queries)).1.unwrap();
                let mass = mass_by(backend, &chunk, &pages, &merged.lse_bhn, queries);
                let first = queries.first(n);
                let weights = weights.narrow(2, first, n - first);
                let sums = weights.sum_dim_intlist(&[2i64][..], false, Kind::Double).view([b, g, h / g, past + n]);
                let mean = sums.mean_dim(&[2i64][..], false, Kind::Double);
                assert!(worst(&mass, &mean) < 1e-12 && worst(&on_the_way, &mean) < 1e-12);
            }
        }
    }
}

/// Output, log-sum-exp, gradients of values and keys, then what is added up over the tasks: dq and the sums.
fn everything(chunk: &Qkv, past: &[KvBlock], dout: &Tensor) -> Vec<Tensor> {
    let (attended, sums) = attend_and_sum(chunk, past, Some(Queries::All));
    let grads = attend_backward(dout, chunk, past, &attended);
    let mut all = vec![attended.out_bhnd, attended.lse_bhn, grads.own.k, grads.own.v];
    all.extend(grads.past.into_iter().flat_map(|block| [block.k, block.v]));
    all.extend([grads.dq_bhnd, sums.unwrap()]);
    all
}

#[test]
fn the_kernel_gives_on_any_number_of_threads_the_same_numbers_and_twice_the_same_bits() {
    tch::manual_seed(8);
    let threads = tch::get_num_threads();
    // One head of keys is divided among the threads, several are shared out.
    for (h, g, d) in [(7, 1, 14), (8, 2, 32)] {
        let float = (Kind::Float, Device::Cpu);
        let [q, dout] = [h, h].map(|heads| Tensor::randn([1, heads, 300, d], float));
        let [k, v, old_k, old_v] = [300, 300, 700, 700].map(|tokens| Tensor::randn([1, g, tokens, d], float));
        let chunk = Qkv::new(&q, &k, &v, ScoreRule::scaled(0.2));
        let past = [KvBlock::new(&old_k, &old_v)];
        let run = |threads: i32| {
            tch::set_num_threads(threads);
            everything(&chunk, &past, &dout)
        };
        let one = run(1);
        for several in [2, 3, 4] {
            let (some, again) = (run(several), run(several));
            assert!(some.iter().zip(&again).all(|(a, b)| a.equal(b)));
            assert!(one.iter().zip(&some).take(6).all(|(a, b)| a.equal(b)));
            assert!(one.iter().zip(&some).all(|(a, b)| a.allclose(b, 1e-5, 1e-5, false)));
        }
        tch::set_num_threads(threads);

        let wide = |x: &Tensor| x.to_kind(Kind::Double);
        let [q, k, v, old_k, old_v, dout] = [&q, &k, &v, &old_k, &old_v, &dout].map(wide);
        let chunk = Qkv::new(&q, &k, &v, ScoreRule::scaled(0.2));
        let past = [KvBlock::new(&old_k, &old_v)];
        for (i, (single, double)) in one.iter().zip(everything(&chunk, &past, &dout)).enumerate() {
            assert!(worst(&wide(single), &double) < 2e-5, "{i}: {:.1e}", worst(&wide(single), &double));
        }
    }
}

#[test]
fn tasks_are_shared_out_among_threads() {
    let threads = tch::get_num_threads();
    let seen = [1, 2, 3].map(|threads| {
        tch::set_num_threads(threads);
        native::threads_at_work()
    });
    tch::set_num_threads(threads);
    assert_eq!(seen, [1, 2, 3]);
}

/// As a projection leaves it: tokens before heads in memory, so that `(B, heads, tokens, D)` is a view.
fn scattered(b: i64, heads: i64, tokens: i64, d: i64) -> Tensor {
    Tensor::randn([b, tokens, heads, d], (Kind::Float, Device::Cpu)).transpose(1, 2)
}

#[test]
fn attention_mass_in_single_precision_is_that_of_a_dense_softmax_without_the_pads() {
    tch::manual_seed(5);
    // Past slots, queries, and how many of them are pads in the second sequence; blocks of 64 queries end evenly or not.
    for (past, n, pads, h, g) in [(0, 9, 0, 4, 2), (40, 7, 3, 8, 1), (33, 64, 64, 6, 2), (300, 130, 61, 4, 4)] {
        let (b, d, scale) = (2, 16, 0.25);
        let (q, k, v) = (scattered(b, h, n, d), scattered(b, g, past + n, d), scattered(b, g, past + n, d));
        let double = |x: &Tensor| x.to_kind(Kind::Double);
        let (_, weights) = naive(&double(&q), &double(&k), &double(&v), scale);
        let _ = weights.get(1).narrow(1, n - pads, pads).zero_();

        let (kn, vn) = (k.narrow(2, past, n), v.narrow(2, past, n));
        let (old_k, old_v) = (k.narrow(2, 0, past), v.narrow(2, 0, past));
        let pages = if past > 0 { vec![KvBlock::new(&old_k, &old_v)] } else { Vec::new() };
        let chunk = Qkv::new(&q, &kn, &vn, ScoreRule::scaled(scale));
        let lse = attend(&chunk, &pages).lse_bhn;
        let _ = lse.get(1).narrow(1, n - pads, pads).fill_(f64::INFINITY);
        for queries in ASKED {
            let mass = attention_mass(&chunk, &pages, &lse, queries);
            let first = queries.first(n);
            let sums = weights.narrow(2, first, n - first).sum_dim_intlist(&[2i64][..], false, Kind::Double);
            let expected = sums.view([b, g, h / g, past + n]).mean_dim(&[2i64][..], false, Kind::Double);
            assert_eq!(mass.kind(), Kind::Float);
            let error = ((double(&mass) - &expected).abs() / expected.clamp_min(1.0)).max().double_value(&[]);
            assert!(error <= 1e-6, "{past} slots, {n} queries, {pads} pads, {queries:?}: {error:.1e}");
        }
    }
}

#[test]
fn a_head_that_uses_no_slot_sees_its_chunk_alone() {
    let (q, own) = (Tensor::randn([1, 4, 3, 8], OPTS), Tensor::randn([1, 2, 3, 8], OPTS));
    let (old, dout) = (Tensor::randn([1, 2, 5, 8], OPTS), Tensor::randn([1, 4, 3, 8], OPTS));
    let in_use = Tensor::from_slice(&[true, false]).view([1, 2, 1]).expand([1, 2, 5], false);
    let chunk = Qkv::new(&q, &own, &own, ScoreRule::scaled(0.5));
    let past = [KvBlock { valid: Some(in_use), ..KvBlock::new(&old, &old) }];
    let (with, without) = (attend(&chunk, &past), attend(&chunk, &[]));
    let alone = |x: &Tensor| x.narrow(1, 2, 2);
    assert!(worst(&alone(&with.out_bhnd), &alone(&without.out_bhnd)) < 1e-15);
    assert!(worst(&alone(&with.lse_bhn), &alone(&without.lse_bhn)) < 1e-15);
    let (with, without) = (attend_backward(&dout, &chunk, &past, &with), attend_backward(&dout, &chunk, &[], &without));
    assert!(worst(&alone(&with.dq_bhnd), &alone(&without.dq_bhnd)) < 1e-14);
    assert!(with.past[0].k.get(0).get(1).abs().max().double_value(&[]) == 0.0);
    let lse = attend(&chunk, &past).lse_bhn;
    assert!(attention_mass(&chunk, &past, &lse, Queries::All).get(0).get(1).narrow(0, 0, 5).abs().max().double_value(&[]) == 0.0);
}

#[test]
fn slots_that_do_not_count_are_left_out_wherever_they_lie() {
    tch::manual_seed(3);
    let used = |b, g, slots| Tensor::rand([b, g, slots], OPTS).gt(0.4);
    for (n, past, h, g) in [(5, 7, 6, 2), (70, 300, 4, 4), (260, 520, 2, 1)] {
        let (b, d, scale) = (2, 8, 0.4);
        let [q, dout] = [h, h].map(|heads| Tensor::randn([b, heads, n, d], OPTS));
        let [k, v] = [n, n].map(|tokens| Tensor::randn([b, g, tokens, d], OPTS));
        let [old_k, old_v] = [past, past].map(|slots| Tensor::randn([b, g, slots, d], OPTS));
        let (own_used, old_used) = (used(b, g, n), used(b, g, past));
        // Everybody sees something, or the two backends say nothing in their own words.
        let _ = old_used.narrow(2, past / 2, 1).fill_(1);
        let mut chunk = Qkv::new(&q, &k, &v, ScoreRule::scaled(scale));
        chunk.own.valid = Some(own_used);
        let pages = [KvBlock { valid: Some(old_used.shallow_clone()), ..KvBlock::new(&old_k, &old_v) }];
        let [one, other] = WITH_MASKS.map(|backend| {
            let merged = attend_by(backend, &chunk, &pages, None).0;
            let grads = attend_backward_by(backend, &dout, &chunk, &pages, &merged);
            let mass = mass_by(backend, &chunk, &pages, &merged.lse_bhn, Queries::Last(4)).narrow(2, 0, past);
            let KvBlock { k: past_dk, v: past_dv, .. } = grads.past.into_iter().next().unwrap();
            [merged.out_bhnd, merged.lse_bhn, mass, grads.dq_bhnd, grads.own.k, grads.own.v, past_dk, past_dv]
        });
        for (i, (one, other)) in one.iter().zip(&other).enumerate() {
            assert!(worst(one, other) < 1e-12, "{i} of {n} tokens and {past} slots: {:.1e}", worst(one, other));
        }
    }
}

#[test]
fn bf16_is_attended_to_in_single_precision() {
    tch::manual_seed(4);
    let made = |heads, tokens| Tensor::randn([1, heads, tokens, 16], OPTS).to_kind(Kind::BFloat16);
    let (q, dout, [k, v, old_k, old_v]) = (made(4, 40), made(4, 40), [40, 40, 290, 290].map(|tokens| made(2, tokens)));
    let run = |kind: Kind| {
        let all = [&q, &k, &v, &old_k, &old_v, &dout].map(|x| x.to_kind(kind));
        let chunk = Qkv::new(&all[0], &all[1], &all[2], ScoreRule::scaled(0.2));
        let pages = [KvBlock::new(&all[3], &all[4])];
        let attended = attend(&chunk, &pages);
        let grads = attend_backward(&all[5], &chunk, &pages, &attended);
        let past = grads.past.into_iter().next().unwrap();
        [attended.out_bhnd, grads.dq_bhnd, attended.lse_bhn, grads.own.k, grads.own.v, past.k, past.v]
    };
    let (narrow, wide) = (run(Kind::BFloat16), run(Kind::Float));
    let kinds = [Kind::BFloat16, Kind::BFloat16, Kind::Float, Kind::Float, Kind::Float, Kind::Float, Kind::Float];
    assert_eq!(narrow.each_ref().map(Tensor::kind), kinds);
    // Output and dq are rounded once; the backward takes the rounded output.
    for (narrow, wide) in narrow.iter().zip(&wide) {
        let error = worst(&narrow.to_kind(Kind::Float), wide) / wide.abs().max().double_value(&[]);
        assert!(error < 4e-3, "{error:.1e}");
    }
}

#[test]
fn a_query_with_infinite_log_sum_exp_pays_nothing() {
    let q = Tensor::randn([1, 2, 3, 4], OPTS);
    let k = Tensor::randn([1, 1, 3, 4], OPTS);
    let chunk = Qkv::new(&q, &k, &k, ScoreRule::scaled(0.5));
    let lse = attend(&chunk, &[]).lse_bhn;
    let _ = lse.narrow(2, 1, 2).fill_(f64::INFINITY);
    let mass = attention_mass(&chunk, &[], &lse, Queries::All);
    assert!((mass.sum(Kind::Double).double_value(&[]) - 1.0).abs() < 1e-12);
}

/// Where the slots of a window lie in any order, each query sees what is less than a window older than it, and nothing else.
#[test]
fn a_window_hides_what_is_older() {
    tch::manual_seed(6);
    let ints = (Kind::Int64, Device::Cpu);
    for (n, past, h, g, d) in [(5, 7, 6, 2, 8), (1, 3, 4, 4, 8), (70, 300, 4, 2, 8), (300, 65, 14, 2, 10)] {
        for window in [1, 2, n, n + past / 2, n + past] {
            let (b, scale) = (2, 0.3);
            let [q, dout] = [h, h].map(|heads| Tensor::randn([b, heads, n, d], OPTS));
            let [k, v] = [g, g].map(|heads| Tensor::randn([b, heads, past + n, d], OPTS));
            let [q, k, v] = [q, k, v].map(|x| x.set_requires_grad(true));
            // Slot by slot, the chunk's own last.
            let position = Tensor::cat(&[Tensor::randperm(past, ints), Tensor::arange_start(past, past + n, ints)], 0);
            let query = Tensor::arange_start(past, past + n, ints).unsqueeze(1);
            let seen = position.le_tensor(&query).logical_and(&position.gt_tensor(&(&query - window)));
            let wide = |x: &Tensor| x.repeat_interleave_self_int(h / g, 1, None);
            let scores = q.matmul(&wide(&k).transpose(-1, -2)) * scale;
            let weights = scores.masked_fill(&seen.logical_not(), f64::NEG_INFINITY).softmax(-1, Kind::Double);
            let expected = weights.matmul(&wide(&v));
            (&expected * &dout).sum(Kind::Double).backward();

            let [q0, k0, v0] = [&q, &k, &v].map(Tensor::detach);
            let part = |x: &Tensor, start, len| x.narrow(2, start, len).contiguous();
            let until = (&position + (window - past)).clamp(0, n).view([1, 1, -1]).expand([b, g, past + n], false);
            let (old, own) = (part(&until, 0, past), part(&until, past, n));
            let (old_k, old_v, own_k, own_v) = (part(&k0, 0, past), part(&v0, 0, past), part(&k0, past, n), part(&v0, past, n));
            let rule = ScoreRule { window: Some(window as usize), ..ScoreRule::scaled(scale) };
            let mut chunk = Qkv::new(&q0, &own_k, &own_v, rule);
            chunk.own.visible_until = Some(own);
            let pages = [KvBlock { visible_until: Some(old), ..KvBlock::new(&old_k, &old_v) }];
            let sums = weights.detach().sum_dim_intlist(&[2i64][..], false, Kind::Double).view([b, g, h / g, past + n]);
            let mean = sums.mean_dim(&[2i64][..], false, Kind::Double);
            for backend in WITH_MASKS {
                let merged = attend_by(backend, &chunk, &pages, None).0;
                assert!(worst(&merged.out_bhnd, &expected) < 1e-13, "{backend:?}, {n} tokens, window {window}");
                let grads = attend_backward_by(backend, &dout, &chunk, &pages, &merged);
                let all = |old: &Tensor, new: &Tensor| Tensor::cat(&[old, new], 2);
                assert!(worst(&grads.dq_bhnd, &q.grad()) < 1e-12);
                assert!(worst(&all(&grads.past[0].k, &grads.own.k), &k.grad()) < 1e-12);
                assert!(worst(&all(&grads.past[0].v, &grads.own.v), &v.grad()) < 1e-12);
                assert!(worst(&mass_by(backend, &chunk, &pages, &merged.lse_bhn, Queries::All), &mean) < 1e-12);
            }
        }
    }
}

/// Scores far below the cap, at it and far above it, with a window and without, against a textbook's softmax under autograd; in more
/// queries and keys than one block or tile has.
#[test]
fn a_soft_cap_holds_in_every_way() {
    tch::manual_seed(7);
    for (n, past, h, g, d) in [(5, 7, 6, 2, 8), (1, 3, 4, 4, 8), (70, 300, 4, 2, 8), (600, 65, 2, 1, 10)] {
        for (scale, window) in [(0.02, None), (0.6, None), (20.0, None), (0.6, Some(n + past / 3))] {
            let (b, cap) = (2, 2.5);
            let [q, dout] = [h, h].map(|heads| Tensor::randn([b, heads, n, d], OPTS));
            let [k, v] = [g, g].map(|heads| Tensor::randn([b, heads, past + n, d], OPTS));
            let [q, k, v] = [q, k, v].map(|x| x.set_requires_grad(true));
            let wide = |x: &Tensor| x.repeat_interleave_self_int(h / g, 1, None);
            let scores = (q.matmul(&wide(&k).transpose(-1, -2)) * (scale / cap)).tanh() * cap;
            let ones = || Tensor::ones([n, past + n], (Kind::Bool, Device::Cpu));
            let hidden =
                window.map_or_else(|| ones().triu(past + 1), |w| ones().triu(past + 1).logical_or(&ones().tril(past - w)));
            let weights = scores.masked_fill(&hidden, f64::NEG_INFINITY).softmax(-1, Kind::Double);
            let expected = weights.matmul(&wide(&v));
            (&expected * &dout).sum(Kind::Double).backward();

            let [q0, k0, v0] = [&q, &k, &v].map(Tensor::detach);
            let part = |x: &Tensor, start, len| x.narrow(2, start, len).contiguous();
            let (old_k, old_v, own_k, own_v) = (part(&k0, 0, past), part(&v0, 0, past), part(&k0, past, n), part(&v0, past, n));
            let until = window.map(|w| {
                let position = Tensor::arange(past + n, (Kind::Int64, Device::Cpu));
                (position + (w - past)).clamp(0, n).view([1, 1, -1]).expand([b, g, past + n], false)
            });
            let until = until.map(|until| (part(&until, 0, past), part(&until, past, n)));
            let rule = ScoreRule { soft_cap: Some(cap), window: window.map(|w| w as usize), ..ScoreRule::scaled(scale) };
            let mut chunk = Qkv::new(&q0, &own_k, &own_v, rule);
            let (old_until, own_until) = until.unzip();
            chunk.own.visible_until = own_until;
            chunk.joined = window.is_none().then(|| KvBlock::new(&k0, &v0));
            let pages = [KvBlock { visible_until: old_until, ..KvBlock::new(&old_k, &old_v) }];
            let weights = weights.detach();
            for backend in WAYS {
                let merged = attend_by(backend, &chunk, &pages, None).0;
                let error = worst(&merged.out_bhnd, &expected);
                assert!(error < 1e-13, "{backend:?}, {n} tokens, scale {scale}: {error:.1e}");
                let grads = attend_backward_by(backend, &dout, &chunk, &pages, &merged);
                let all = |old: &Tensor, new: &Tensor| Tensor::cat(&[old, new], 2);
                let near = |ours: &Tensor, theirs: &Tensor| worst(ours, theirs) < 1e-13 * (1.0 + scale) * n as f64;
                assert!(near(&grads.dq_bhnd, &q.grad()), "{backend:?}, {n} tokens, scale {scale}");
                assert!(near(&all(&grads.past[0].k, &grads.own.k), &k.grad()));
                assert!(near(&all(&grads.past[0].v, &grads.own.v), &v.grad()));
                for queries in ASKED {
                    let first = queries.first(n);
                    let sums = weights.narrow(2, first, n - first).sum_dim_intlist(&[2i64][..], false, Kind::Double);
                    let mean = sums.view([b, g, h / g, past + n]).mean_dim(&[2i64][..], false, Kind::Double);
                    assert!(worst(&mass_by(backend, &chunk, &pages, &merged.lse_bhn, queries), &mean) < 1e-12);
                    let on_the_way = attend_by(backend, &chunk, &pages, Some(queries)).1;
                    assert!(on_the_way.is_none_or(|sums| worst(&sums, &mean) < 1e-12));
                }
            }
        }
    }
}

/// The cap is made of powers by hand: it is as exact as a rounding of the score, near 0 too, and no score exceeds it.
#[test]
fn a_capped_score_is_right_to_some_roundings() {
    for (kind, bound) in [(Kind::Float, 4e-7), (Kind::Double, 1e-15)] {
        // One channel, and one query: the log-sum-exp of its only key is the score.
        let score = Tensor::cat(&[Tensor::linspace(-400.0, 400.0, 4001, OPTS), Tensor::logspace(-8.0, 0.0, 400, 10.0, OPTS)], 0);
        let q = score.to_kind(kind).view([-1, 1, 1, 1]);
        let one = q.ones_like();
        let rule = ScoreRule { soft_cap: Some(50.0), ..ScoreRule::scaled(1.0) };
        let found = attend_by(Backend::Own, &Qkv::new(&q, &one, &one, rule), &[], None).0.lse_bhn.view([-1]);
        let expected = (q.to_kind(Kind::Double).view([-1]) / 50.0).tanh() * 50.0;
        let error =
            ((found.to_kind(Kind::Double) - &expected).abs() / expected.abs().clamp_min(1e-300)).nan_to_num(0.0, None, None);
        assert!(error.max().double_value(&[]) < bound, "{kind:?}: {:e}", error.max().double_value(&[]));
        assert!(found.abs().max().double_value(&[]) <= 50.0 * (1.0 + bound));
    }
}
