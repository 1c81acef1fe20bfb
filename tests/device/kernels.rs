//! The same kernels on a GPU, where there is one, beside libtorch's own operations on the same device.

use kvtune::native::cuda::{self, Gpu, Numerics};
use kvtune::ops::attention::{KernelsOfHeads, KvBlock, Qkv, Queries, ScoreRule, attend, attend_backward, attention_mass};
use kvtune::ops::frequencies::RopeSpec;
use kvtune::ops::pointwise::swiglu;
use kvtune::ops::rms_norm::rms_norm;
use kvtune::ops::rope::Rotation;
use kvtune::store::Bits;
use tch::{Device, Kind, Tensor};

use super::gpu::gpu;

/// Query heads of a KV head, KV heads, tokens, slots of the past and channels.
const SHAPES: [(i64, i64, i64, i64, i64); 7] = [
    (7, 2, 300, 1000, 64),
    (1, 3, 257, 513, 128),
    (4, 1, 1, 4096, 128),
    (2, 2, 70, 30, 80),
    (8, 1, 1024, 5000, 32),
    (2, 1, 129, 700, 256),
    (3, 2, 5, 1, 96),
];

#[test]
fn the_kernel_pays_what_blocks_of_operations_pay_and_twice_the_same_bits() {
    let Some(device) = gpu() else { return };
    tch::manual_seed(4);
    for kind in [Kind::BFloat16, Kind::Half] {
        for (i, (per_group, groups, tokens, slots, width)) in SHAPES.into_iter().enumerate() {
            let narrow = |size: &[i64]| Tensor::randn(size, (Kind::Float, device)).to_kind(kind);
            let q = narrow(&[2, tokens, groups * per_group, width]).transpose(1, 2);
            // The past and the chunk are parts of one cache, which is longer.
            let cache = narrow(&[2, groups, slots + tokens + 9, width]);
            let (old, own) = (cache.narrow(2, 0, slots), cache.narrow(2, slots, tokens));
            let in_use = Tensor::rand([2, groups, slots], (Kind::Float, device)).gt(0.2);
            let lse = Tensor::randn([2, groups * per_group, tokens], (Kind::Float, device)) + 12.0;
            let pads = Tensor::rand(lse.size(), (Kind::Float, device)).gt(0.9);
            let lse = lse.masked_fill(&pads, f64::INFINITY);
            let wide = |x: &Tensor| x.to_kind(Kind::Float);
            let (wide_q, wide_old, wide_own) = (wide(&q), wide(&old), wide(&own));
            for queries in [Queries::All, Queries::Last(40)] {
                let in_use = (i % 2 == 0).then_some(&in_use);
                let mass = |q, old, own| {
                    let chunk = Qkv::new(q, own, own, ScoreRule::scaled(0.1));
                    attention_mass(
                        &chunk,
                        &[KvBlock { valid: in_use.map(Tensor::shallow_clone), ..KvBlock::new(old, old) }],
                        &lse,
                        queries,
                    )
                };
                let found = mass(&q, &old, &own);
                assert!(found.equal(&mass(&q, &old, &own)), "two runs differ");
                // In single precision blocks of operations compute it.
                let expected = mass(&wide_q, &wide_old, &wide_own);
                let error = ((&found - &expected).abs() / (expected.abs() + 1e-9)).max().double_value(&[]);
                assert!(
                    error < 1e-3,
                    "{kind:?}, {per_group} × {groups} heads of {width}, {tokens} tokens, {slots} slots: {error:.1e}"
                );
            }
        }
    }
    // Two kinds of six widths.
    let states = cuda::kernel_states();
    let ours = states.iter().filter(|(kernel, _)| kernel.starts_with("`attention_mass`"));
    assert!(ours.clone().count() == 12 && ours.clone().all(|(_, missing)| missing.is_none()), "{states:?}");
}

/// Whole chunks and others, of which kernels of their own may attend, beside one another in f64.
#[test]
fn attention_is_that_of_blocks_in_double_precision() {
    let Some(device) = gpu() else { return };
    tch::manual_seed(3);
    for (kind, bound) in [(Kind::BFloat16, 3e-2), (Kind::Half, 5e-3)] {
        for (width, tokens, slots) in [(128, 512, 1024), (64, 256, 320), (128, 300, 1000), (128, 512, 0), (256, 128, 192)] {
            let kernels = KernelsOfHeads::tried(device, kind, width).text;
            println!("{kernels}");
            let has_cudnn = width <= 128 && Gpu::at(0).unwrap().capability.0 == 9 && !Numerics::now().0.is_deterministic;
            assert!(
                kernels.starts_with(if has_cudnn { "cuDNN in parts, FlashAttention" } else { "FlashAttention" }),
                "{kernels}"
            );
            let drawn = |heads: i64, n: i64| Tensor::randn([2, heads, n, width], (Kind::Float, device)).to_kind(kind);
            let (q, dout) = (drawn(8, tokens), drawn(8, tokens));
            let (k, v) = (drawn(2, slots + tokens), drawn(2, slots + tokens));
            let gradients = |kind: Kind| {
                let [q, dout, k, v] = [&q, &dout, &k, &v].map(|x| x.to_kind(kind));
                let joined = KvBlock::new(&k, &v);
                let [own_k, own_v] = [&k, &v].map(|x| x.narrow(2, slots, tokens).contiguous());
                let past: Vec<KvBlock> = (slots > 0).then(|| joined.narrow(0, slots)).into_iter().collect();
                let rule = ScoreRule::scaled((width as f64).powf(-0.5));
                let chunk = Qkv { joined: Some(joined), ..Qkv::new(&q, &own_k, &own_v, rule) };
                let attended = attend(&chunk, &past);
                let grads = attend_backward(&dout, &chunk, &past, &attended);
                let past = grads.past.into_iter().flat_map(KvBlock::into_planes);
                let first = [attended.out_bhnd, attended.lse_bhn, grads.dq_bhnd, grads.own.k, grads.own.v];
                first.into_iter().chain(past).collect::<Vec<_>>()
            };
            for (i, (found, expected)) in gradients(kind).iter().zip(gradients(Kind::Double)).enumerate() {
                let error = (found.to_kind(Kind::Double) - &expected).abs().max() / expected.abs().max();
                let error = error.double_value(&[]);
                assert!(error <= bound, "{kind:?}, {width} channels, {tokens} tokens on {slots}, tensor {i}: {error:.1e}");
            }
        }
    }
}

#[test]
fn the_quantiser_gives_on_a_gpu_what_it_gives_on_the_cpu() {
    let Some(device) = gpu() else { return };
    tch::manual_seed(5);
    let mut vectors = 0;
    let mut different = 0;
    for bits in [Bits::Four, Bits::Five, Bits::Eight, Bits::Nine] {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for width in [1, 31, 50, 64, 128, 256] {
                let cpu = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu));
                let x = (cpu([200, width]) * cpu([200, 1]).exp() + cpu([200, 1]) * 20.0).to_kind(kind);
                let (here, there) = (bits.quantise(&x), bits.quantise(&x.to_device(device)));
                let differs = |a: &Tensor, b: &Tensor| a.ne_tensor(&b.to_device(Device::Cpu)).any_dim(-1, false);
                let differs = differs(&here[0], &there[0]).logical_or(&differs(&here[1], &there[1]));
                vectors += x.size()[0];
                different += differs.sum(Kind::Int64).int64_value(&[]);
                let expected = bits.restore(&here[0], &here[1], width, kind);
                let found = bits.restore(&here[0].to_device(device), &here[1].to_device(device), width, kind);
                assert!(found.to_device(Device::Cpu).equal(&expected), "{bits:?}, {kind:?}, {width}");
            }
        }
    }
    // The CPU divides by the number of steps, where a GPU multiplies with its reciprocal: a scale may be its neighbour.
    assert!(different * 200 < vectors, "{different} of {vectors} vectors differ");
}

#[test]
fn norms_gates_and_rotations_are_on_a_gpu_what_they_are_on_the_cpu() {
    let Some(device) = gpu() else { return };
    tch::manual_seed(6);
    for kind in [Kind::BFloat16, Kind::Half] {
        let cpu = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu)).to_kind(kind);
        for width in [512, 896, 3584, 8200] {
            let inputs = [cpu(&[2, 37, width]), cpu(&[width]), cpu(&[2, 37, width])];
            let norm = |device| {
                let [x, weight, dy] = inputs.each_ref().map(|x| x.to_device(device).detach());
                let leaf = x.set_requires_grad(true);
                let y = rms_norm(&leaf, &weight, 1e-6);
                (&y * &dy).sum(Kind::Float).backward();
                [y.detach(), leaf.grad()]
            };
            agree(kind, norm(device), norm(Device::Cpu));
            let gate = |device| {
                let [gate, _, dy] = inputs.each_ref().map(|x| x.to_device(device).detach());
                let (gate, up) = (gate.set_requires_grad(true), (&dy * 0.5).set_requires_grad(true));
                let y = swiglu(&gate, &up);
                (&y * &dy).sum(Kind::Float).backward();
                [y.detach(), gate.grad(), up.grad()]
            };
            agree(kind, gate(device), gate(Device::Cpu));
        }
        for (heads, tokens, width) in [(28, 65, 128), (3, 1, 16), (2, 300, 80)] {
            let (x, dy) = (cpu(&[2, tokens, heads, width]).transpose(1, 2), cpu(&[2, heads, tokens, width]));
            let turn = |device| {
                let position = Tensor::arange(tokens, (Kind::Int64, device)).view([1, -1]) + 1000;
                let leaf = x.to_device(device).detach().set_requires_grad(true);
                let frequencies = RopeSpec::plain(1e6, width as usize).frequencies(&[], kind, device);
                let y = Rotation::at(&position, &frequencies, kind).apply(&leaf);
                (&y * dy.to_device(device)).sum(Kind::Float).backward();
                [y.detach(), leaf.grad()]
            };
            // A cosine may fall to either side of a rounding, and a channel is the difference of two products of it.
            agree_above(2.0, kind, turn(device), turn(Device::Cpu));
        }
    }
    let states = cuda::kernel_states();
    let ours = states.iter().filter(|(kernel, _)| kernel.starts_with("`pointwise`"));
    assert!(ours.clone().count() == 2 && ours.clone().all(|(_, missing)| missing.is_none()), "{states:?}");
}

/// To a unit in the last place, where a power or a root may fall to either side of a rounding.
fn agree<const N: usize>(kind: Kind, found: [Tensor; N], expected: [Tensor; N]) {
    agree_above(0.05, kind, found, expected);
}

/// Of numbers smaller than `least` the error may be as large as of that.
fn agree_above<const N: usize>(least: f64, kind: Kind, found: [Tensor; N], expected: [Tensor; N]) {
    let bound = if kind == Kind::Half { 1.0 / 512.0 } else { 1.0 / 64.0 };
    for (found, expected) in found.into_iter().zip(expected) {
        let (found, expected) = (found.to_device(Device::Cpu).to_kind(Kind::Float), expected.to_kind(Kind::Float));
        let error = ((&found - &expected).abs() / expected.abs().clamp_min(least)).max().double_value(&[]);
        assert!(error <= bound, "{kind:?}: {error:.1e}");
    }
}
