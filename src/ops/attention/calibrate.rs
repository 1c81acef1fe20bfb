//! Which backend is the fastest for a shape: tried on random numbers, once for each kind of GPU; what is found is kept on disk. A backend that
//! does not give the numbers of the blocks is refused, so that no kernel's habits need be taken on trust.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tch::{Device, Kind, Tensor, no_grad};

use super::backend::{AttendShape, Backend, BackendChoice, is_for_torch_kernels};
use super::by_backend::{attend_backward_by, attend_by};
use super::chunk::{Attended, AttentionGrads, KvBlock, Qkv};
use super::part::PartKernel;
use super::rule::ScoreRule;
use crate::native::cuda::{self, Companion, Numerics, TorchKernel, keep, kind_of_gpu, recall};
use crate::native::libtorch_version;

/// The backends that are tried; where none of them serves, blocks do.
const WAYS: [Backend; 4] = [
    Backend::Joined(TorchKernel::Flash),
    Backend::Parts(PartKernel::TorchKernel(TorchKernel::Flash)),
    Backend::Parts(PartKernel::TorchKernel(TorchKernel::Cudnn)),
    Backend::Parts(PartKernel::TorchKernel(TorchKernel::Efficient)),
];
const CUDNN: Backend = WAYS[2];
/// What choices are called among what is kept for the next start.
const KEPT: &str = "attention";
/// How often a backend is timed; the median counts.
const REPETITIONS: usize = 3;
/// Tokens and slots on which a backend must agree with the blocks: whole blocks of no kernel, but of cuDNN's, which gets no others.
const CHECKED: (i64, i64) = (50, 83);
const CHECKED_CUDNN: (i64, i64) = (128, 256);

/// What one backend takes, or why it does not serve.
#[derive(Clone, Debug)]
pub struct Timed {
    pub backend: Backend,
    /// Milliseconds forward and backward.
    pub milliseconds: Result<(f64, f64), String>,
}

impl Timed {
    /// Of a step: the forward phase, the recomputation and the backward.
    fn cost(&self) -> Option<f64> {
        self.milliseconds.as_ref().ok().map(|(forward, backward)| 2.0 * forward + backward)
    }
}

/// What was measured for a shape.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// The shape, rounded up to powers of two.
    pub shape: AttendShape,
    pub chosen: Backend,
    /// The fastest for chunks and pasts that are no whole blocks of cuDNN's.
    pub elsewhere: Backend,
    /// All that were tried; none where the choice was kept by an earlier start.
    pub timed: Vec<Timed>,
}

impl Calibration {
    /// Not if another start might find more: with more memory, or with libraries that can be opened.
    fn is_worth_keeping(&self) -> bool {
        let lacked_memory = |t: &Timed| t.milliseconds.as_ref().is_err_and(|why| why.contains("memory") || why.contains("ALLOC"));
        self.chosen != Backend::Parts(PartKernel::Blocks) && !self.timed.iter().any(lacked_memory)
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attention of {}: {}", self.shape, self.chosen)?;
        if self.elsewhere != self.chosen {
            write!(f, ", {} where lengths are no multiples of 128", self.elsewhere)?;
        }
        for (i, Timed { backend, milliseconds }) in self.timed.iter().enumerate() {
            f.write_str(if i == 0 { " (" } else { "; " })?;
            match milliseconds {
                Ok((forward, backward)) => write!(f, "{backend} {forward:.2} + {backward:.2} ms")?,
                Err(reason) => write!(f, "{backend} not: {reason}")?,
            }
        }
        f.write_str(if self.timed.is_empty() { " (as found before)" } else { ")" })
    }
}

static DONE: Mutex<Vec<Calibration>> = Mutex::new(Vec::new());

fn done() -> MutexGuard<'static, Vec<Calibration>> {
    DONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All that this process has measured.
pub fn calibrations() -> Vec<Calibration> {
    done().clone()
}

/// What was chosen for a rounded shape.
pub(super) fn chosen(rounded: &AttendShape) -> Option<BackendChoice> {
    let known = done();
    let of_shape = known.iter().find(|calibration| calibration.shape == *rounded)?;
    Some(BackendChoice { backend: of_shape.chosen, elsewhere: of_shape.elsewhere })
}

/// How a device attends, in words: what is measured before the first step can only be told after it, by [`calibrations`].
pub fn in_words(device: Device, kind: Kind) -> String {
    let backend = Backend::unmeasured(device, kind);
    if is_for_torch_kernels(device, kind) {
        format!("{backend}, or the fastest of those that are measured")
    } else {
        backend.to_string()
    }
}

/// Measures the backends to attend for a shape, once, where there is more than one: on CUDA. Waits for the device.
pub fn calibrate(shape: AttendShape, device: Device) -> Option<Calibration> {
    let shape = shape.rounded();
    if !is_for_torch_kernels(device, shape.kind) || chosen(&shape).is_some() {
        return None;
    }
    let parts = told_apart_by(&shape, device);
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let known = recall(KEPT, &parts).and_then(|text| read(&String::from_utf8(text).ok()?));
    let calibration = match known {
        Some(BackendChoice { backend, elsewhere }) => Calibration { shape, chosen: backend, elsewhere, timed: Vec::new() },
        None => measure(shape, device),
    };
    let Calibration { chosen: backend, elsewhere, .. } = calibration;
    if known.is_none() && calibration.is_worth_keeping() {
        keep(KEPT, &parts, format!("{backend}\n{elsewhere}").as_bytes());
    }
    done().push(calibration.clone());
    Some(calibration)
}

/// The same anew, whatever was found before, and kept nowhere.
pub fn measure(shape: AttendShape, device: Device) -> Calibration {
    no_grad(|| tried(&WAYS, shape.rounded(), device))
}

/// What was kept of a choice.
fn read(text: &str) -> Option<BackendChoice> {
    let of =
        |name: &str| WAYS.into_iter().chain([Backend::Parts(PartKernel::Blocks)]).find(|backend| backend.to_string() == name);
    let (backend, elsewhere) = text.split_once('\n')?;
    Some(BackendChoice { backend: of(backend)?, elsewhere: of(elsewhere)? })
}

/// What a choice depends on. A GPU that cannot be told from others keeps none for them.
fn told_apart_by(shape: &AttendShape, device: Device) -> [String; 5] {
    let gpu = if let Device::Cuda(index) = device { kind_of_gpu(index) } else { None };
    let is_deterministic = Numerics::now().0.is_deterministic;
    let cudnn = Companion::Cudnn.open().map_or_else(|why| why, |found| found.version);
    let gpu = gpu.unwrap_or_else(|| std::process::id().to_string());
    [libtorch_version(), cudnn, gpu, shape.to_string(), is_deterministic.to_string()]
}

pub(super) fn tried(backends: &[Backend], shape: AttendShape, device: Device) -> Calibration {
    // What a kernel makes of lengths such as the run's is seen on one KV head, so that the blocks take little memory.
    let own = AttendShape { batch: 1, heads: shape.heads / shape.groups.max(1), groups: 1, ..shape };
    let own = caught(|| Ok(Expected::new(&own, device)));
    let serves = |backend: Backend| {
        let (tokens, past) = if backend == CUDNN { CHECKED_CUDNN } else { CHECKED };
        caught(|| Expected::new(&AttendShape { batch: 2, tokens, past, ..shape }, device).compare(backend))?;
        match &own {
            Ok(own) => caught(|| own.compare(backend).and_then(|()| own.drawn.stays_finite(backend)))
                .map_err(|why| format!("at these lengths {why}")),
            // Without it cuDNN is not trusted: at some lengths it is known to fail.
            Err(why) if backend == CUDNN => Err(why.clone()),
            Err(_) => Ok(()),
        }
    };
    let timed: Vec<Timed> = backends
        .iter()
        .map(|&backend| Timed {
            backend,
            milliseconds: serves(backend).and_then(|()| caught(|| Ok(time(backend, &shape, device)))),
        })
        .collect();
    let costs = || timed.iter().filter_map(|t| t.cost().map(|cost| (cost, t.backend)));
    // A time is not the same twice: who wants the same bits gets the first backend that serves.
    let is_deterministic = Numerics::now().0.is_deterministic;
    let fastest = |backends: &mut dyn Iterator<Item = (f64, Backend)>| {
        let best = if is_deterministic { backends.next() } else { backends.min_by(|a, b| a.0.total_cmp(&b.0)) };
        best.map_or(Backend::Parts(PartKernel::Blocks), |(_, backend)| backend)
    };
    let elsewhere = fastest(&mut costs().filter(|(_, backend)| *backend != CUDNN));
    Calibration { shape, chosen: fastest(&mut costs()), elsewhere, timed }
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
    past: i64,
}

impl RandomInputs {
    fn new(shape: &AttendShape, device: Device) -> Self {
        let AttendShape { kind, batch, heads, groups, head_dim, tokens, past } = *shape;
        let draw = |heads, tokens| Tensor::randn([batch, heads, tokens, head_dim], (Kind::Float, device)).to_kind(kind);
        let (q, dout) = (draw(heads, tokens), draw(heads, tokens));
        Self { q, dout, k: draw(groups, past + tokens), v: draw(groups, past + tokens), past }
    }

    fn to_kind(&self, kind: Kind) -> Self {
        let [q, dout, k, v] = [&self.q, &self.dout, &self.k, &self.v].map(|x| x.to_kind(kind));
        Self { q, dout, k, v, past: self.past }
    }

    /// Calls `work` with chunk and past, the keys lying side by side as they do in a cache.
    fn with<T>(&self, work: impl FnOnce(&Qkv, &[KvBlock]) -> T) -> T {
        let own = self.q.size()[2];
        let [k, v] = [&self.k, &self.v].map(|x| x.narrow(2, self.past, own).contiguous());
        let [old_k, old_v] = [&self.k, &self.v].map(|x| x.narrow(2, 0, self.past));
        let scale = (self.q.size()[3] as f64).powf(-0.5);
        let joined = Some(KvBlock::new(&self.k, &self.v));
        let chunk = Qkv { joined, ..Qkv::new(&self.q, &k, &v, ScoreRule::scaled(scale)) };
        let past = [KvBlock::new(&old_k, &old_v)];
        work(&chunk, if self.past > 0 { &past } else { &[] })
    }

    fn forward(&self, backend: Backend) -> Attended {
        self.with(|chunk, past| attend_by(backend, chunk, past, None).0)
    }

    fn backward(&self, backend: Backend, attended: &Attended) -> AttentionGrads {
        self.with(|chunk, past| attend_backward_by(backend, &self.dout, chunk, past, attended))
    }

    /// Whether numbers come out where all scores are far below zero, so that the inverse of a sum of powers is more than f32 holds: cuDNN
    /// is known to lose gradients there (pytorch issue 196678).
    fn stays_finite(&self, backend: Backend) -> Result<(), String> {
        let (mut sunk, below) = (self.to_kind(self.q.kind()), -120.0 * (self.q.size()[3] as f64).sqrt());
        (sunk.q, sunk.k) = (sunk.q.copy(), sunk.k.copy());
        let _ = (sunk.q.select(3, 0).fill_(1.0), sunk.k.select(3, 0).fill_(below));
        let is_finite = |x: &Tensor| x.isfinite().all().int64_value(&[]) != 0;
        let lost = sunk.all(backend).iter().zip(NAMES).find(|(x, _)| !is_finite(x)).map(|(_, name)| name);
        lost.map_or(Ok(()), |name| Err(format!("its {name} is no number where scores are far below zero")))
    }

    fn all(&self, backend: Backend) -> Vec<Tensor> {
        let attended = self.forward(backend);
        let AttentionGrads { dq_bhnd, own, past } = self.backward(backend, &attended);
        let past = past.into_iter().flat_map(|block| [block.k, block.v]);
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

/// Random numbers, and what the blocks make of them in double precision: products of f32 may be allowed to round their factors.
struct Expected {
    drawn: RandomInputs,
    numbers: Vec<Tensor>,
}

impl Expected {
    fn new(shape: &AttendShape, device: Device) -> Self {
        let drawn = RandomInputs::new(shape, device);
        let numbers = drawn.to_kind(Kind::Double).all(Backend::Parts(PartKernel::Blocks));
        Self { drawn, numbers }
    }

    /// Whether a backend gives the same.
    fn compare(&self, backend: Backend) -> Result<(), String> {
        agree(&self.drawn.all(backend), &self.numbers, self.drawn.q.kind())
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

fn time(backend: Backend, shape: &AttendShape, device: Device) -> (f64, f64) {
    let drawn = RandomInputs::new(shape, device);
    let attended = drawn.forward(backend);
    drop(drawn.backward(backend, &attended));
    let median = |work: &dyn Fn()| {
        let mut times: Vec<f64> = (0..REPETITIONS).map(|_| milliseconds(device, work)).collect();
        times.sort_by(f64::total_cmp);
        times[REPETITIONS / 2]
    };
    (median(&|| drop(drawn.forward(backend))), median(&|| drop(drawn.backward(backend, &attended))))
}

fn milliseconds(device: Device, work: &dyn Fn()) -> f64 {
    cuda::wait(device);
    let began = Instant::now();
    work();
    cuda::wait(device);
    began.elapsed().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttendShape =
        AttendShape { kind: Kind::Float, batch: 1, heads: 6, groups: 2, head_dim: 16, tokens: 40, past: 100 };

    #[test]
    fn the_fastest_of_those_that_agree_is_chosen_and_the_others_say_why_not() {
        let own = [
            Backend::Joined(TorchKernel::Cpu),
            Backend::Parts(PartKernel::TorchKernel(TorchKernel::Cpu)),
            Backend::Parts(PartKernel::Blocks),
        ];
        let of_cuda = [Backend::Joined(TorchKernel::Flash), Backend::Parts(PartKernel::TorchKernel(TorchKernel::Cudnn))];
        let all: Vec<Backend> = of_cuda.into_iter().chain(own).collect();
        let found = tried(&all, SHAPE, Device::Cpu);
        for timed in &found.timed {
            assert_eq!(timed.milliseconds.is_ok(), own.contains(&timed.backend), "{timed:?}");
        }
        let least = found.timed.iter().filter_map(Timed::cost).fold(f64::INFINITY, f64::min);
        assert!(found.timed.iter().any(|t| t.backend == found.chosen && t.cost() == Some(least)));
        let text = found.to_string();
        assert!(text.starts_with("attention of 1 × 6/2 heads of 16, 40 tokens on 100 slots, Float: "), "{text}");
        assert!(
            text.contains("FlashAttention not: ") && text.contains("; blockwise ") && !text.contains("blockwise not"),
            "{text}"
        );
        let none = tried(&of_cuda, SHAPE, Device::Cpu);
        assert_eq!((none.chosen, none.elsewhere), (Backend::Parts(PartKernel::Blocks), Backend::Parts(PartKernel::Blocks)));
    }

    #[test]
    fn scores_far_below_zero_are_numbers_by_every_way_of_the_cpu() {
        let drawn = RandomInputs::new(&SHAPE, Device::Cpu);
        for backend in [
            Backend::Joined(TorchKernel::Cpu),
            Backend::Parts(PartKernel::TorchKernel(TorchKernel::Cpu)),
            Backend::Parts(PartKernel::Blocks),
        ] {
            assert_eq!(drawn.stays_finite(backend), Ok(()), "{backend}");
        }
        assert!(drawn.q.select(3, 0).ne(1.0).any().int64_value(&[]) != 0, "the numbers themselves stay");
        let broken = RandomInputs { v: &drawn.v / 0.0, ..drawn };
        let reason = broken.stays_finite(Backend::Parts(PartKernel::Blocks)).unwrap_err();
        assert_eq!(reason, "its output is no number where scores are far below zero");
    }

    #[test]
    fn a_choice_is_read_as_it_was_kept() {
        let blocks = Backend::Parts(PartKernel::Blocks);
        for (backend, elsewhere) in [(CUDNN, WAYS[0]), (WAYS[1], WAYS[1]), (blocks, blocks)] {
            assert_eq!(read(&format!("{backend}\n{elsewhere}")), Some(BackendChoice { backend, elsewhere }));
        }
        assert_eq!([read(""), read("cuDNN in parts"), read("cuDNN in parts\nanother")], [None; 3]);
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
