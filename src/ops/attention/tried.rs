//! Whether a kernel that comes with libtorch gives the numbers of the blocks: it is tried on random ones before the first step, so that no
//! kernel's habits need be taken on trust. Where it gives others, or none, blocks attend.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor, no_grad};

use super::backend::Backend;
use super::by_backend::{attend_backward_by, attend_by};
use super::chunk::{Attended, AttentionGrads, KvBlock, Qkv};
use super::part::PartKernel;
use super::rule::ScoreRule;

/// Tokens and older slots on which a kernel must agree with the blocks: whole blocks of no kernel.
const TOKENS: i64 = 50;
const PAST: i64 = 83;

/// Heads for which a kernel was tried.
struct Tried {
    device: Device,
    kind: Kind,
    head_dim: i64,
    is_refused: bool,
}

static TRIED: Mutex<Vec<Tried>> = Mutex::new(Vec::new());

fn tried() -> MutexGuard<'static, Vec<Tried>> {
    TRIED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_refused(device: Device, kind: Kind, head_dim: i64) -> Option<bool> {
    let tried = tried();
    let of_heads = tried.iter().find(|tried| (tried.device, tried.kind, tried.head_dim) == (device, kind, head_dim));
    of_heads.map(|tried| tried.is_refused)
}

/// What attends with heads of so many channels, where nothing is capped or left out.
pub(super) fn backend_of(device: Device, kind: Kind, head_dim: i64) -> Backend {
    match is_refused(device, kind, head_dim) {
        Some(true) => Backend::Parts(PartKernel::Blocks),
        _ => Backend::preferred(device, kind, head_dim),
    }
}

/// Tries the kernel that would attend with such heads, once; says why, where it is refused. Waits for the device.
pub fn try_kernel(device: Device, kind: Kind, head_dim: i64) -> Option<String> {
    let backend = Backend::preferred(device, kind, head_dim);
    if !backend.is_of_libtorch() || is_refused(device, kind, head_dim).is_some() {
        return None;
    }
    let refused = no_grad(|| compared(backend, device, kind, head_dim)).err();
    tried().push(Tried { device, kind, head_dim, is_refused: refused.is_some() });
    refused.map(|why| format!("{backend} does not attend here, blocks do, slower: {why}"))
}

/// Whether a backend gives on random numbers what the blocks make of them in double precision: products of f32 may round their factors.
fn compared(backend: Backend, device: Device, kind: Kind, head_dim: i64) -> Result<(), String> {
    caught(|| {
        let drawn = RandomInputs::new(device, kind, head_dim);
        let expected = drawn.to_kind(Kind::Double).all(Backend::Parts(PartKernel::Blocks));
        agree(&drawn.all(backend), &expected, kind)?;
        // Where past and chunk do not lie side by side, the same kernel attends to them in parts.
        match backend {
            Backend::Joined(kernel) => agree(&drawn.all(Backend::Parts(PartKernel::TorchKernel(kernel))), &expected, kind),
            _ => Ok(()),
        }
    })
}

/// libtorch's complaint, if it has one: its first sentence.
fn caught<T>(body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let said = |panic: Box<dyn Any + Send>| match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast_ref::<&str>().map_or("it panicked", |text| text).to_owned(),
    };
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
}

impl RandomInputs {
    fn new(device: Device, kind: Kind, head_dim: i64) -> Self {
        let draw = |heads: i64, tokens: i64| Tensor::randn([2, heads, tokens, head_dim], (Kind::Float, device)).to_kind(kind);
        let (q, dout) = (draw(4, TOKENS), draw(4, TOKENS));
        Self { q, dout, k: draw(2, PAST + TOKENS), v: draw(2, PAST + TOKENS) }
    }

    fn to_kind(&self, kind: Kind) -> Self {
        let [q, dout, k, v] = [&self.q, &self.dout, &self.k, &self.v].map(|x| x.to_kind(kind));
        Self { q, dout, k, v }
    }

    /// Calls `work` with chunk and past, the keys lying side by side as they do in a cache.
    fn with<T>(&self, work: impl FnOnce(&Qkv, &[KvBlock]) -> T) -> T {
        let [k, v] = [&self.k, &self.v].map(|x| x.narrow(2, PAST, TOKENS).contiguous());
        let joined = KvBlock::new(&self.k, &self.v);
        let past = [joined.narrow(0, PAST)];
        let scale = (self.q.size()[3] as f64).powf(-0.5);
        let chunk = Qkv { joined: Some(joined), ..Qkv::new(&self.q, &k, &v, ScoreRule::scaled(scale)) };
        work(&chunk, &past)
    }

    fn forward(&self, backend: Backend) -> Attended {
        self.with(|chunk, past| attend_by(backend, chunk, past, None).0)
    }

    fn backward(&self, backend: Backend, attended: &Attended) -> AttentionGrads {
        self.with(|chunk, past| attend_backward_by(backend, &self.dout, chunk, past, attended))
    }

    fn all(&self, backend: Backend) -> Vec<Tensor> {
        let attended = self.forward(backend);
        let AttentionGrads { dq_bhnd, own, past } = self.backward(backend, &attended);
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
        for backend in [
            Backend::Joined(TorchKernel::Cpu),
            Backend::Parts(PartKernel::TorchKernel(TorchKernel::Cpu)),
            Backend::Parts(PartKernel::Blocks),
        ] {
            assert_eq!(compared(backend, Device::Cpu, Kind::Float, 16), Ok(()), "{backend}");
        }
        assert!(compared(Backend::Joined(TorchKernel::Flash), Device::Cpu, Kind::Float, 16).is_err());
        // A CPU has nothing to choose.
        assert_eq!(try_kernel(Device::Cpu, Kind::Float, 16), None);
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
