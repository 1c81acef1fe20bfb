//! Whether a kernel that comes with libtorch gives the numbers of the blocks: it is tried on random ones before the first step, so that no
//! kernel's habits need be taken on trust. Where it gives others, or none, blocks attend.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};

use tch::{Device, Kind, Tensor, no_grad};

use super::backend::{Backend, WHOLE};
use super::by_backend::{attend_backward_by, attend_by};
use super::chunk::{AttentionGrads, KvBlock, Qkv, ScoreRule};
use crate::native::cuda::Numerics;
use crate::native::{locked, panic_text};

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

fn tried() -> MutexGuard<'static, Vec<Tried>> {
    locked(&TRIED)
}

fn of_heads(device: Device, kind: Kind, head_dim: i64) -> Option<Tried> {
    tried().iter().find(|tried| (tried.device, tried.kind, tried.head_dim) == (device, kind, head_dim)).copied()
}

/// What attends with heads of so many channels, where nothing is capped or left out; `is_whole` says whether the kernel for whole chunks
/// may. That sums in no fixed order, so deterministic runs do without.
pub(super) fn backend_of(device: Device, kind: Kind, head_dim: i64, is_whole: impl FnOnce() -> bool) -> Backend {
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
    tried().push(Tried { device, kind, head_dim, is_refused, of_whole_chunks });
    said
}

/// What attends with heads of so many channels.
#[derive(Clone, Debug)]
pub struct KernelsOfHeads {
    names: String,
    refused: Vec<String>,
    /// Whether none of libtorch's kernels serves all lengths.
    pub is_blockwise: bool,
}

impl KernelsOfHeads {
    /// Tries them, if that has not been done; who asks first has the reasons of those that are refused.
    pub fn tried(device: Device, kind: Kind, head_dim: i64) -> Self {
        let refused = try_kernels(device, kind, head_dim);
        let [whole, other] = [true, false].map(|is_whole| backend_of(device, kind, head_dim, || is_whole));
        let names = if whole == other {
            other.to_string()
        } else {
            format!("{whole}, {other} for lengths that are no multiple of {WHOLE}")
        };
        Self { names, refused, is_blockwise: other == Backend::Blocks }
    }
}

impl fmt::Display for KernelsOfHeads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names)?;
        self.refused.iter().try_for_each(|why| write!(f, "; {why}"))
    }
}

/// Whether a backend gives on random numbers what the blocks make of them in double precision: products of f32 may round their factors.
fn compared(backend: Backend, device: Device, kind: Kind, head_dim: i64, lengths: [i64; 2]) -> Result<(), String> {
    caught(|| {
        let drawn = RandomInputs::new(device, kind, head_dim, lengths);
        let expected = drawn.to_kind(Kind::Double).all(Backend::Blocks);
        agree(&drawn.all(backend), &expected, kind)?;
        // Where past and chunk do not lie side by side, the same kernel attends to them in parts.
        match backend {
            Backend::Joined(kernel) => agree(&drawn.all(Backend::Parts(kernel)), &expected, kind),
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

/// Random queries, keys and values, and the gradient of an output.
struct RandomInputs {
    q: Tensor,
    dout: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: [i64; 2],
}

impl RandomInputs {
    fn new(device: Device, kind: Kind, head_dim: i64, lengths: [i64; 2]) -> Self {
        let draw = |heads: i64, tokens: i64| Tensor::randn([2, heads, tokens, head_dim], (Kind::Float, device)).to_kind(kind);
        let [tokens, past] = lengths;
        let (q, dout) = (draw(4, tokens), draw(4, tokens));
        Self { q, dout, k: draw(2, past + tokens), v: draw(2, past + tokens), lengths }
    }

    fn to_kind(&self, kind: Kind) -> Self {
        let [q, dout, k, v] = [&self.q, &self.dout, &self.k, &self.v].map(|x| x.to_kind(kind));
        Self { q, dout, k, v, lengths: self.lengths }
    }

    /// What a backend makes of them, the keys lying side by side as they do in a cache; in the order of [`NAMES`].
    fn all(&self, backend: Backend) -> Vec<Tensor> {
        let [tokens, past] = self.lengths;
        let [k, v] = [&self.k, &self.v].map(|x| x.narrow(2, past, tokens).contiguous());
        let joined = KvBlock::new(&self.k, &self.v);
        let past = [joined.narrow(0, past)];
        let scale = (self.q.size()[3] as f64).powf(-0.5);
        let chunk = Qkv { joined: Some(joined), ..Qkv::new(&self.q, &k, &v, ScoreRule::scaled(scale)) };
        let attended = attend_by(backend, &chunk, &past, None).0;
        let AttentionGrads { dq_bhnd, own, past } = attend_backward_by(backend, &self.dout, &chunk, &past, &attended);
        let past = past.into_iter().flat_map(KvBlock::into_planes);
        [attended.out_bhnd, attended.lse_bhn, dq_bhnd, own.k, own.v].into_iter().chain(past).collect()
    }
}

/// The largest error, of the largest number, that rounding can excuse: of inputs that are rounded, and of a backward from an output
/// that is.
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
        assert!(here.to_string() == "kvtune's CPU kernel" && !here.is_blockwise);
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
