//! What CUDA is here: devices, driver, libtorch's CUDA half and the libraries beside it, each GPU, and how one works.

use std::time::Instant;

use tch::{Cuda, Device, Kind, TchError, Tensor};

use super::check::{DoctorCheck, Promise};
use super::graphs;
use super::product::{self, first_line};
use crate::native::KvPart;
use crate::native::cuda::{
    Companion, CudaSupport, Driver, Gpu, Levels, OpenedLibrary, attention_mass, compiler_release, device_nodes,
    free_device_memory, kernel_states, pinned, quantise, rms_norm, take_lowest, wait,
};
use crate::ops::attention::{self, AttendShape, Backend, Calibration, PartKernel};
use crate::store::Bits;
use crate::units::Bytes;

/// The oldest CUDA that a driver may serve for libtorch 2.11's wheels.
const NEEDED: (u32, u32) = (13, 0);
/// Bytes of a pinned copy, and how many are timed.
const PINNED: i64 = 256 << 20;
const COPIES: u32 = 4;
const ROW: i64 = 1 << 16;

/// A chunk of an 8-billion-parameter model on a full cache.
const SHAPE: AttendShape =
    AttendShape { kind: Kind::BFloat16, batch: 1, heads: 32, groups: 8, head_dim: 128, tokens: 2048, past: 14_336 };

const NO_DEVICE: &str = "CUDA needs an NVIDIA GPU; a container must be given it when it is started";
const DRIVER: &str = "install NVIDIA's driver 580 or newer";
const WHEELS: &str = "install the full set of torch 2.11 wheels and point `LD_LIBRARY_PATH` at its `torch/lib`";
const FIRST: &str = "the rows above it come first";
const INDEX: &str = "name another GPU with `--device`, and look at `CUDA_VISIBLE_DEVICES`";

/// All of it, for the GPU `index`; `half` is what came of loading libtorch's.
pub(super) fn examine(promise: Promise, index: usize, half: &CudaSupport, mut say: impl FnMut(DoctorCheck)) {
    say(nodes(&device_nodes(), promise));
    let driver = Driver::ask();
    say(of_driver(driver.as_ref(), promise));
    say(of_half(half, promise));
    say(library("CUDA runtime", Companion::Runtime.open(), promise));
    let gpus = driver.map(|driver| driver.gpus).unwrap_or_default();
    for (at, gpu) in gpus.iter().enumerate() {
        // Asking a GPU for what is free takes some of it.
        let free = if at == index && *half == CudaSupport::Loaded { free_device_memory(at) } else { None };
        say(of_gpu(at, gpu, free));
    }
    let usable = usable(gpus.len(), index, half);
    say(match &usable {
        Ok(device) => product::check("GPU product", *device, &[Kind::Float, Kind::BFloat16]),
        Err((why, hint)) => DoctorCheck::lacking("GPU product", *why, hint, promise),
    });
    say(match &usable {
        Ok(device) => of_attention(&attention::measure(SHAPE, *device)),
        Err((why, hint)) => DoctorCheck::lacking("GPU attention", *why, hint, promise),
    });
    say(match &usable {
        Ok(device) => of_kernels(*device),
        Err((why, hint)) => DoctorCheck::lacking("GPU kernels", *why, hint, promise),
    });
    say(match &usable {
        Ok(_) => graphs::check(index),
        Err((why, hint)) => DoctorCheck::lacking(graphs::NAME, *why, hint, promise),
    });
    say(compiler(compiler_release(), promise));
    // libtorch's CUDA half needs them to start; kvtune itself asks them for nothing.
    say(library("cuDNN", Companion::Cudnn.open(), Promise::Cpu));
    say(library("NCCL", Companion::Nccl.open(), Promise::Cpu));
    say(match usable {
        Ok(device) => of_copies(copies(device)),
        Err((why, hint)) => DoctorCheck::lacking("pinned memory", why, hint, promise),
    });
}

/// The device; or why it cannot compute, and what to do.
fn usable(shown: usize, index: usize, half: &CudaSupport) -> Result<Device, (&'static str, &'static str)> {
    if *half != CudaSupport::Loaded {
        return Err(("no CUDA to ask", FIRST));
    }
    if shown == 0 {
        return Err(("no GPU", FIRST));
    }
    if index >= shown {
        return Err(("no such GPU", INDEX));
    }
    if Cuda::is_available() { Ok(Device::Cuda(index)) } else { Err(("libtorch finds no CUDA device", FIRST)) }
}

fn nodes(nodes: &[String], promise: Promise) -> DoctorCheck {
    const NAME: &str = "NVIDIA devices";
    match nodes {
        [] => DoctorCheck::lacking(NAME, "none in `/dev`", NO_DEVICE, promise),
        nodes => DoctorCheck::ok(NAME, nodes.join(", ")),
    }
}

fn of_driver(driver: Result<&Driver, &String>, promise: Promise) -> DoctorCheck {
    const NAME: &str = "driver";
    let driver = match driver {
        Ok(driver) => driver,
        Err(why) => return DoctorCheck::lacking(NAME, why.as_str(), DRIVER, promise),
    };
    let (major, minor) = driver.cuda;
    let served = format!("{}serves CUDA {major}.{minor}", driver.release.as_ref().map_or(String::new(), |r| format!("{r}, ")));
    if driver.cuda < NEEDED {
        return DoctorCheck::lacking(NAME, format!("{served}; libtorch needs {}.{}", NEEDED.0, NEEDED.1), DRIVER, promise);
    }
    if driver.gpus.is_empty() {
        return DoctorCheck::lacking(NAME, format!("{served}, and shows no GPU"), INDEX, promise);
    }
    DoctorCheck::ok(NAME, served)
}

fn of_half(half: &CudaSupport, promise: Promise) -> DoctorCheck {
    const NAME: &str = "libtorch's CUDA half";
    match half {
        CudaSupport::Loaded => DoctorCheck::ok(NAME, "loaded"),
        CudaSupport::NoDevice => DoctorCheck::lacking(NAME, "not loaded: there is no NVIDIA device", NO_DEVICE, promise),
        CudaSupport::Unavailable(why) => DoctorCheck::lacking(NAME, why.as_str(), WHEELS, promise),
    }
}

fn library(name: &str, found: Result<OpenedLibrary, String>, promise: Promise) -> DoctorCheck {
    match found {
        Ok(found) => DoctorCheck::ok(name, format!("{}, `{}`", found.version, found.path.display())),
        Err(why) => DoctorCheck::lacking(name, why, WHEELS, promise),
    }
}

fn compiler(release: Result<String, String>, promise: Promise) -> DoctorCheck {
    const NAME: &str = "NVRTC";
    match release {
        Ok(release) => DoctorCheck::ok(NAME, release),
        Err(why) => DoctorCheck::lacking(NAME, why, WHEELS, promise),
    }
}

/// The ways to attend, each with its times or why it does not serve.
fn of_attention(found: &Calibration) -> DoctorCheck {
    const NAME: &str = "GPU attention";
    let hint = "look at the reasons: the GPU may be too old for these kernels, or libtorch's CUDA half without them";
    if found.chosen == Backend::Parts(PartKernel::Blocks) {
        return DoctorCheck::failed(NAME, found.to_string(), hint);
    }
    DoctorCheck::ok(NAME, found.to_string())
}

/// kvtune's own kernels, compiled and started.
fn of_kernels(device: Device) -> DoctorCheck {
    const NAME: &str = "GPU kernels";
    let x = Tensor::ones([2, 512], (Kind::BFloat16, device)) * 3.0;
    let weight = Tensor::ones([512], (Kind::BFloat16, device));
    // Threes are ones when they are normed.
    let norms = || rms_norm(&x, &weight, 1e-6).is_some_and(|(y, _)| y.equal(&x.ones_like()));
    let serves = pays(device) && norms() && encodes(&x.view([-1, 64])) && chooses(device);
    wait(device);
    let states = kernel_states();
    let missing: Vec<String> =
        states.iter().filter_map(|state| Some(format!("{}: {}", state.kernel, state.missing.as_ref()?))).collect();
    if serves && missing.is_empty() {
        return DoctorCheck::ok(NAME, states.iter().map(|state| state.kernel.as_str()).collect::<Vec<_>>().join(", "));
    }
    let found = if missing.is_empty() { "other numbers came out than should".to_owned() } else { missing.join("; ") };
    DoctorCheck::failed(NAME, found, "libtorch's operations do their work, slower; look at the row of NVRTC and at the reason")
}

/// Three tokens without a preference: each key gets one from every query that sees it.
fn pays(device: Device) -> bool {
    let q = Tensor::zeros([1, 1, 3, 128], (Kind::BFloat16, device));
    let own = KvPart::of(&q, &q);
    let mass = attention_mass(&q, &[own], &Tensor::zeros([1, 1, 3], (Kind::Float, device)), 1.0, 0);
    mass.is_some_and(|mass| mass.equal(&Tensor::from_slice(&[3.0_f32, 2.0, 1.0]).view([1, 1, 3]).to_device(device)))
}

fn encodes(x: &Tensor) -> bool {
    quantise(x, Levels { bits: 9, width: 64, bytes: Bits::Nine.level_bytes(64) }).is_some()
}

/// The two lowest of five, of which two are the same.
fn chooses(device: Device) -> bool {
    let key = Tensor::from_slice(&[7_i64, -2, 1 << 40, -2, -1]).view([1, 1, 5]).to_device(device);
    take_lowest(&key, 2).is_some_and(|slot| slot.equal(&Tensor::from_slice(&[1_i64, 3]).view([1, 1, 2]).to_device(device)))
}

fn of_gpu(index: usize, gpu: &Gpu, free: Option<u64>) -> DoctorCheck {
    let Gpu { name, capability: (major, minor), multiprocessors, memory } = gpu;
    let memory = match free {
        Some(free) => format!("{} of {} free", Bytes(free), Bytes(*memory)),
        None => Bytes(*memory).to_string(),
    };
    let found = format!("{name}, compute capability {major}.{minor}, {multiprocessors} multiprocessors, {memory}");
    let mut check = DoctorCheck::ok(&format!("GPU {index}"), found).with(&[
        ("capability_major", f64::from(*major)),
        ("capability_minor", f64::from(*minor)),
        ("multiprocessors", f64::from(*multiprocessors)),
        ("memory_bytes", gpu.memory as f64),
    ]);
    check.figures.extend(free.map(|free| ("free_bytes", free as f64)));
    check
}

/// Bytes a second of copies between pinned memory and a device.
struct CopyRates {
    to_device: f64,
    to_host: f64,
    is_right: bool,
}

fn of_copies(copies: Result<CopyRates, String>) -> DoctorCheck {
    const NAME: &str = "pinned memory";
    let hint = "look at `ulimit -l`, at the memory that the host has free, and for errors in `dmesg`";
    let copies = match copies {
        Ok(copies) => copies,
        Err(why) => return DoctorCheck::failed(NAME, why, hint),
    };
    let found = format!("{:.1} GB/s to the device, {:.1} GB/s back", copies.to_device / 1e9, copies.to_host / 1e9);
    let check = if copies.is_right {
        DoctorCheck::ok(NAME, found)
    } else {
        DoctorCheck::failed(NAME, format!("{found}; other bytes came back"), hint)
    };
    check.with(&[("to_device_bytes_per_second", copies.to_device), ("to_host_bytes_per_second", copies.to_host)])
}

fn copies(device: Device) -> Result<CopyRates, String> {
    let [sent, mut back] = [pinned(PINNED)?, pinned(PINNED)?];
    let mut timed = || -> Result<CopyRates, TchError> {
        // Numbers that differ from one byte to the next, and from what memory holds by chance.
        let row = Tensor::f_arange(ROW, (Kind::Int, Device::Cpu))?.f_remainder(251)?.f_to_kind(Kind::Uint8)?;
        sent.f_view([-1, ROW])?.f_copy_(&row)?;
        let mut there = Tensor::f_zeros([PINNED], (Kind::Uint8, device))?;
        let to_device = rate(device, || there.f_copy_(&sent))?;
        let to_host = rate(device, || back.f_copy_(&there))?;
        Ok(CopyRates { to_device, to_host, is_right: back.f_equal(&sent)? })
    };
    timed().map_err(|error| first_line(&error))
}

fn rate(device: Device, mut copy: impl FnMut() -> Result<(), TchError>) -> Result<f64, TchError> {
    copy()?;
    wait(device);
    let begun = Instant::now();
    (0..COPIES).try_for_each(|_| copy())?;
    wait(device);
    Ok(PINNED as f64 * f64::from(COPIES) / begun.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::super::check::State;
    use super::*;

    fn h200() -> Gpu {
        Gpu { name: "NVIDIA H200".to_owned(), capability: (9, 0), multiprocessors: 132, memory: 150_754_820_096 }
    }

    fn driver(cuda: (u32, u32), gpus: Vec<Gpu>) -> Driver {
        Driver { cuda, release: Some("580.95.05".to_owned()), gpus }
    }

    #[test]
    fn what_is_missing_fails_where_it_is_promised_and_says_what_to_do() {
        let why = "`libcuda.so.1` cannot be opened".to_owned();
        let half = CudaSupport::Unavailable("`libtorch_cuda.so` does not exist".to_owned());
        for (promise, state) in [(Promise::Cpu, State::Missing), (Promise::Cuda, State::Failed)] {
            let all = [
                nodes(&[], promise),
                of_driver(Err(&why), promise),
                of_driver(Ok(&driver((12, 8), vec![h200()])), promise),
                of_driver(Ok(&driver((13, 0), Vec::new())), promise),
                of_half(&CudaSupport::NoDevice, promise),
                of_half(&half, promise),
                library("cuDNN", Err(why.clone()), promise),
                compiler(Err(why.clone()), promise),
            ];
            for check in all {
                assert_eq!((check.state, check.hint.is_some()), (state, promise == Promise::Cuda), "{check:?}");
            }
        }
        assert_eq!(usable(1, 0, &half), Err(("no CUDA to ask", FIRST)));
        assert_eq!(usable(0, 0, &CudaSupport::Loaded), Err(("no GPU", FIRST)));
        assert_eq!(usable(1, 1, &CudaSupport::Loaded), Err(("no such GPU", INDEX)));
    }

    #[test]
    fn what_is_there_is_told() {
        let told = |check: DoctorCheck| format!("{} {}: {}", check.name, check.state.name(), check.found);
        assert_eq!(told(nodes(&["nvidia0".into(), "nvidiactl".into()], Promise::Cuda)), "NVIDIA devices ok: nvidia0, nvidiactl");
        assert_eq!(told(of_driver(Ok(&driver((13, 0), vec![h200()])), Promise::Cuda)), "driver ok: 580.95.05, serves CUDA 13.0");
        let old = of_driver(Ok(&driver((12, 8), vec![h200()])), Promise::Cuda);
        assert_eq!(told(old), "driver FAILED: 580.95.05, serves CUDA 12.8; libtorch needs 13.0");
        let gpu = of_gpu(0, &h200(), Some(130 << 30));
        assert_eq!(
            told(gpu.clone()),
            "GPU 0 ok: NVIDIA H200, compute capability 9.0, 132 multiprocessors, 130 GiB of 140 GiB free"
        );
        assert_eq!(gpu.figures.last(), Some(&("free_bytes", (130_u64 << 30) as f64)));
        let rates = |is_right| Ok(CopyRates { to_device: 55.4e9, to_host: 53e9, is_right });
        assert_eq!(told(of_copies(rates(true))), "pinned memory ok: 55.4 GB/s to the device, 53.0 GB/s back");
        assert!(told(of_copies(rates(false))).ends_with("53.0 GB/s back; other bytes came back"));
        assert_eq!(of_copies(Err("out of memory".to_owned())).state, State::Failed);
    }
}
