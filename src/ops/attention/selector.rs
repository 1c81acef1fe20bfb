//! Which backend computes a chunk's attention. A kernel that comes with libtorch is tried on random numbers before the first step, whether it
//! gives those of the blocks, so that no kernel's habits need be taken on trust. Where it gives others, or none, blocks attend.

use std::any::Any;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use tch::{Device, Kind, Tensor, no_grad};

#[cfg(test)]
use super::backend::forced;
use super::backend::{Backend, WHOLE, all_parts, attend_backward_by, attend_by};
use super::chunk::{AttentionGrads, KvBlock, Qkv, ScoreRule};
use crate::native::cuda::Numerics;
use crate::native::{locked, panic_text};

/// The kernel for whole chunks attends to so many pairs of lengths at most: libtorch keeps a plan for each as long as the process lives, and
/// the past of a cache that grows is longer with every chunk.
const MAX_PLANS: usize = 64;

/// Lengths of a chunk and of what it attends to, for which there are plans.
static PLANNED: Mutex<BTreeSet<(i64, i64)>> = Mutex::new(BTreeSet::new());

/// Whether a chunk and the parts that it attends to are multiples of [`WHOLE`], and have plans or may have them: from then on they do.
fn are_planned(planned: &mut BTreeSet<(i64, i64)>, tokens: i64, parts: impl Iterator<Item = i64>) -> bool {
    let pairs: BTreeSet<(i64, i64)> = parts.map(|slots| (tokens, slots)).collect();
    let is_whole = tokens % WHOLE == 0 && pairs.iter().all(|(_, slots)| slots % WHOLE == 0);
    let serves = is_whole && planned.union(&pairs).count() <= MAX_PLANS;
    if serves {
        planned.extend(pairs);
    }
    serves
}

/// How the chunk attends to itself and to its past.
pub(super) fn backend_for(chunk: &Qkv, past: &[KvBlock]) -> Backend {
    #[cfg(test)]
    if let Some(backend) = forced::backend() {
        return backend;
    }
    #[cfg(test)]
    if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::MergeMissing) {
        return Backend::Blocks;
    }
    let q = &chunk.q_bhnd;
    backend_of(q.device(), q.kind(), q.size()[3], || {
        let parts = all_parts(chunk, past).into_iter().map(KvBlock::slots);
        chunk.is_plain(past) && are_planned(&mut locked(&PLANNED), chunk.num_tokens(), parts)
    })
}

/// Tokens and older slots on which a kernel must agree with the blocks: whole blocks of no kernel.
const ODD: [i64; 2] = [50, 83];
/// Tokens and older slots on which a kernel for whole chunks must agree with the blocks.
const EVEN: [i64; 2] = [2 * WHOLE, 3 * WHOLE];

/// Heads for which kernels were tried.
#[derive(Clone, Copy)]
struct Tried {
    device: Device,
    kind: Kind,
    head_dim: i64,
    is_refused: bool,
    /// What attends to whole chunks, where that is another kernel.
    of_whole_chunks: Option<Backend>,
}

static TRIED: Mutex<Vec<Tried>> = Mutex::new(Vec::new());

fn of_heads(device: Device, kind: Kind, head_dim: i64) -> Option<Tried> {
    locked(&TRIED).iter().find(|tried| (tried.device, tried.kind, tried.head_dim) == (device, kind, head_dim)).copied()
}

/// What attends with heads of so many channels, where nothing is capped or left out; `is_whole` says whether the kernel for whole chunks
/// may. That sums in no fixed order, so deterministic runs do without.
fn backend_of(device: Device, kind: Kind, head_dim: i64, is_whole: impl FnOnce() -> bool) -> Backend {
    match of_heads(device, kind, head_dim) {
        Some(Tried { of_whole_chunks: Some(backend), .. }) if !Numerics::now().0.is_deterministic && is_whole() => backend,
        Some(Tried { is_refused: true, .. }) => Backend::Blocks,
        _ => Backend::preferred(device, kind, head_dim),
    }
}

/// Tries the kernels that would attend with such heads, once; says of each why, where it is refused. Waits for the device.
pub fn try_kernels(device: Device, kind: Kind, head_dim: i64) -> Vec<String> {
    let backend = Backend::preferred(device, kind, head_dim);
    if !backend.is_of_libtorch() || of_heads(device, kind, head_dim).is_some() {
        return Vec::new();
    }
    let refused = no_grad(|| compared(backend, device, kind, head_dim, ODD)).err();
    let is_refused = refused.is_some();
    let mut said: Vec<String> =
        refused.into_iter().map(|why| format!("{backend} does not attend here, blocks do, slower: {why}")).collect();
    let of_whole_chunks = Backend::of_whole_chunks(device, kind, head_dim).filter(|whole| {
        let refused = no_grad(|| compared(*whole, device, kind, head_dim, EVEN)).err();
        said.extend(refused.as_ref().map(|why| format!("{whole} does not attend to whole chunks here: {why}")));
        refused.is_none()
    });
    locked(&TRIED).push(Tried { device, kind, head_dim, is_refused, of_whole_chunks });
    said
}

/// What attends with heads of so many channels.
#[derive(Clone, Debug)]
pub struct KernelsOfHeads {
    /// Their names, and why others are refused.
    pub text: String,
    /// Whether none of libtorch's kernels serves all lengths.
    pub is_blockwise: bool,
}

impl KernelsOfHeads {
    /// Tries them, if that has not been done; who asks first has the reasons of those that are refused.
    pub fn tried(device: Device, kind: Kind, head_dim: i64) -> Self {
        let refused = try_kernels(device, kind, head_dim);
        let [whole, other] = [true, false].map(|is_whole| backend_of(device, kind, head_dim, || is_whole));
        let text = if whole == other {
            other.to_string()
        } else {
            format!("{whole}, {other} for lengths that are no multiple of {WHOLE}")
        };
        let text = refused.iter().fold(text, |text, why| format!("{text}; {why}"));
        Self { text, is_blockwise: other == Backend::Blocks }
    }
}

/// Whether a backend gives on random numbers what the blocks make of them in double precision: products of f32 may round their factors.
fn compared(backend: Backend, device: Device, kind: Kind, head_dim: i64, lengths: [i64; 2]) -> Result<(), String> {
    caught(|| {
        let draw = |heads: i64, tokens: i64| Tensor::randn([2, heads, tokens, head_dim], (Kind::Float, device)).to_kind(kind);
        let [tokens, past] = lengths;
        let drawn = [draw(4, tokens), draw(4, tokens), draw(2, past + tokens), draw(2, past + tokens)];
        let expected = results(Backend::Blocks, &drawn.each_ref().map(|x| x.to_kind(Kind::Double)), lengths);
        agree(&results(backend, &drawn, lengths), &expected, kind)?;
        // Where past and chunk do not lie side by side, the same kernel attends to them in parts.
        match backend {
            Backend::Joined(kernel) => agree(&results(Backend::Parts(kernel), &drawn, lengths), &expected, kind),
            _ => Ok(()),
        }
    })
}

/// libtorch's complaint, if it has one: its first sentence.
fn caught<T>(body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let said = |panic: Box<dyn Any + Send>| panic_text(&*panic).unwrap_or("it panicked").to_owned();
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(said(panic)));
    let sentence = |text: &str| text.lines().next().and_then(|line| line.split(". ").next()).unwrap_or_default().to_owned();
    result.map_err(|text| sentence(text.trim_start_matches("libtorch: ")))
}

/// What a backend makes of queries, the gradient of their outputs, keys and values, which lie side by side as they do in a cache; in the order
/// of [`NAMES`].
fn results(backend: Backend, [q, dout, k, v]: &[Tensor; 4], [tokens, past]: [i64; 2]) -> Vec<Tensor> {
    let joined = KvBlock::new(k, v);
    let [k, v] = [k, v].map(|x| x.narrow(2, past, tokens).contiguous());
    let past = [joined.narrow(0, past)];
    let scale = (q.size()[3] as f64).powf(-0.5);
    let chunk = Qkv { joined: Some(joined), ..Qkv::new(q, &k, &v, ScoreRule::scaled(scale)) };
    let attended = attend_by(backend, &chunk, &past, None).0;
    let AttentionGrads { dq_bhnd, own, past } = attend_backward_by(backend, dout, &chunk, &past, &attended);
    let past = past.into_iter().flat_map(KvBlock::into_planes);
    [attended.out_bhnd, attended.lse_bhn, dq_bhnd, own.k, own.v].into_iter().chain(past).collect()
}

/// The largest error, of the largest number, that rounding can excuse: of inputs, and of the output from which a backward begins.
fn tolerance(kind: Kind) -> f64 {
    match kind {
        Kind::BFloat16 => 3e-2,
        Kind::Half => 5e-3,
        _ => 1e-4,
    }
}

const NAMES: [&str; 7] = [
    "output",
    "log-sum-exp",
    "gradient of queries",
    "gradient of own keys",
    "gradient of own values",
    "gradient of past keys",
    "gradient of past values",
];

fn agree(found: &[Tensor], expected: &[Tensor], kind: Kind) -> Result<(), String> {
    for ((found, expected), name) in found.iter().zip(expected).zip(NAMES) {
        let error = (found.to_kind(Kind::Double) - expected).abs().max() / expected.abs().max();
        let error = error.double_value(&[]);
        if error.is_nan() || error > tolerance(kind) {
            return Err(format!("its {name} is off by {error:.1e} of the largest"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_have_plans_keep_them_and_new_ones_get_none_when_there_are_many() {
        let mut planned = BTreeSet::new();
        let mut asked = |tokens, past: i64| are_planned(&mut planned, tokens, [past, tokens].into_iter());
        assert!(!asked(4096, 100) && !asked(100, 4096), "no multiples");
        // Its own length and 63 pasts.
        assert!((1..=63).all(|chunk| asked(4096, 8192 + 4096 * chunk)));
        assert!(!asked(4096, 1 << 20) && !asked(2048, 12_288), "no room");
        assert!(asked(4096, 12_288), "as before");
    }
}

#[cfg(test)]
mod tests_of_kernels {
    use super::*;
    use crate::native::cuda::TorchKernel;

    #[test]
    fn kernels_of_the_cpu_agree_with_the_blocks_and_those_of_a_gpu_say_why_they_do_not_serve() {
        for backend in [Backend::Joined(TorchKernel::Cpu), Backend::Parts(TorchKernel::Cpu), Backend::Blocks] {
            for lengths in [ODD, EVEN] {
                assert_eq!(compared(backend, Device::Cpu, Kind::Float, 16, lengths), Ok(()), "{backend}");
            }
        }
        for (kernel, operation) in
            [(TorchKernel::Flash, "aten::_flash_attention_forward"), (TorchKernel::Cudnn, "aten::_cudnn_attention_forward")]
        {
            let refused = compared(Backend::Parts(kernel), Device::Cpu, Kind::Float, 16, EVEN).unwrap_err();
            assert!(refused.contains(operation), "{refused}");
        }
        // A CPU has nothing to choose.
        assert_eq!(try_kernels(Device::Cpu, Kind::Float, 16), Vec::<String>::new());
        let here = KernelsOfHeads::tried(Device::Cpu, Kind::Float, 16);
        assert!(here.text == "kvtune's CPU kernel" && !here.is_blockwise);
    }

    #[test]
    fn a_way_that_gives_other_numbers_is_refused() {
        let numbers = || (0..7).map(|i| Tensor::arange(9, (Kind::Float, Device::Cpu)) + i).collect::<Vec<_>>();
        assert!(agree(&numbers(), &numbers(), Kind::BFloat16).is_ok());
        for wrong in [f64::NAN, 20.0] {
            let found = numbers();
            let _ = found[3].narrow(0, 4, 1).fill_(wrong);
            let reason = agree(&found, &numbers(), Kind::BFloat16).unwrap_err();
            assert!(reason.starts_with("its gradient of own keys is off by "), "{reason}");
        }
    }
}
