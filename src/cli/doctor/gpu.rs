//! What CUDA is here: devices, driver, libtorch's CUDA half and its libraries, each GPU, and how one works.

use tch::{Cuda, Device, Kind, Tensor, no_grad};

use super::check::DoctorCheck;
use super::host;
use crate::engine::guarded;
use crate::native::cuda::{
    Companion, CudaSupport, Driver, Gpu, GraphRecorder, compiler_release, device_nodes, free_device_memory, kernel_states,
    rms_norm, wait,
};
use crate::ops::attention::KernelsOfHeads;
use crate::units::{Bytes, Fault, FaultKind};

/// The oldest CUDA that a driver may serve for libtorch 2.11's wheels.
const NEEDED: (u32, u32) = (13, 0);

/// Channels of a head of an 8-billion-parameter model.
const HEAD_DIM: i64 = 128;

const NO_DEVICE: &str = "CUDA needs an NVIDIA GPU; a container must be given it when it is started";
const DRIVER: &str = "install NVIDIA's driver 580 or newer";
const WHEELS: &str = "install the full set of torch 2.11 wheels and point `LD_LIBRARY_PATH` at its `torch/lib`";
const FIRST: &str = "the rows above it come first";
const INDEX: &str = "name another GPU with `--device`, and look at `CUDA_VISIBLE_DEVICES`";

const PRODUCT: &str = "GPU product";
const ATTENTION: &str = "GPU attention";
const KERNELS: &str = "GPU kernels";
const GRAPHS: &str = "CUDA graphs";

/// All of it, for the GPU `index`; `is_promised` says whether CUDA is asked for or there is a device, `half` what came of loading libtorch's.
pub(super) fn examine(is_promised: bool, index: usize, half: &CudaSupport) -> Vec<DoctorCheck> {
    let driver = Driver::ask();
    let mut checks = vec![
        DoctorCheck::needed("NVIDIA devices", nodes(&device_nodes()), is_promised),
        DoctorCheck::needed("driver", of_driver(driver.as_ref()), is_promised),
        DoctorCheck::needed("libtorch's CUDA half", of_half(half), is_promised),
    ];
    let library = |name, found: Result<String, String>, is_promised| {
        DoctorCheck::needed(name, found.map_err(|why| (why, WHEELS)), is_promised)
    };
    // libtorch's CUDA half needs cuDNN and NCCL to start. kvtune itself asks NCCL among ranks, and cuDNN on GPUs where other kernels would do.
    let companions =
        [("CUDA runtime", Companion::Runtime, is_promised), ("cuDNN", Companion::Cudnn, false), ("NCCL", Companion::Nccl, false)];
    for (name, companion, is_promised) in companions {
        let found = companion.open().map(|(version, path)| format!("{version}, `{}`", path.display()));
        checks.push(library(name, found, is_promised));
    }
    checks.push(library("NVRTC", compiler_release(), is_promised));
    let gpus = driver.map(|driver| driver.gpus).unwrap_or_default();
    for (at, gpu) in gpus.iter().enumerate() {
        // Asking a GPU for what is free takes some of it.
        let free = if at == index && *half == CudaSupport::Loaded { free_device_memory(at) } else { None };
        checks.push(of_gpu(at, gpu, free));
    }
    checks.extend(match usable(gpus.len(), index, half) {
        Ok(device) => {
            [host::product(PRODUCT, device), attends(device), runs_kernels(device), told(guarded(|| no_grad(|| replays(device))))]
        }
        Err((why, hint)) => {
            [PRODUCT, ATTENTION, KERNELS, GRAPHS].map(|name| DoctorCheck::needed(name, Err((why.to_owned(), hint)), is_promised))
        }
    });
    checks
}

/// The device; or why it cannot compute, and what to do.
fn usable(shown: usize, index: usize, half: &CudaSupport) -> Result<Device, (&'static str, &'static str)> {
    match () {
        () if *half != CudaSupport::Loaded => Err(("not tested: CUDA is not loaded", FIRST)),
        () if shown == 0 => Err(("no GPU", FIRST)),
        () if index >= shown => Err(("no such GPU", INDEX)),
        () if !Cuda::is_available() => Err(("libtorch finds no CUDA device", FIRST)),
        () => Ok(Device::Cuda(index)),
    }
}

fn nodes(nodes: &[String]) -> Result<String, (String, &'static str)> {
    if nodes.is_empty() { Err(("none in `/dev`".to_owned(), NO_DEVICE)) } else { Ok(nodes.join(", ")) }
}

fn of_driver(driver: Result<&Driver, &String>) -> Result<String, (String, &'static str)> {
    let driver = driver.map_err(|why| (why.clone(), DRIVER))?;
    let (major, minor) = driver.cuda;
    let served = format!("{}serves CUDA {major}.{minor}", driver.release.as_ref().map_or(String::new(), |r| format!("{r}, ")));
    match () {
        () if driver.cuda < NEEDED => Err((format!("{served}; libtorch needs {}.{}", NEEDED.0, NEEDED.1), DRIVER)),
        () if driver.gpus.is_empty() => Err((format!("{served}, and shows no GPU"), INDEX)),
        () => Ok(served),
    }
}

fn of_half(half: &CudaSupport) -> Result<String, (String, &'static str)> {
    match half {
        CudaSupport::Loaded => Ok("loaded".to_owned()),
        CudaSupport::NoDevice => Err(("not loaded: there is no NVIDIA device".to_owned(), NO_DEVICE)),
        CudaSupport::Unavailable(why) => Err((why.clone(), WHEELS)),
    }
}

fn of_gpu(index: usize, gpu: &Gpu, free: Option<u64>) -> DoctorCheck {
    let Gpu { name, capability: (major, minor), multiprocessors, memory } = gpu;
    let free = free.map_or(String::new(), |free| format!("{} free of ", Bytes(free)));
    let found =
        format!("{name}, compute capability {major}.{minor}, {multiprocessors} multiprocessors, {free}{}", Bytes(*memory));
    DoctorCheck::ok(&format!("GPU {index}"), found)
}

/// Whether libtorch's kernels for attention serve, and give the numbers that they should.
fn attends(device: Device) -> DoctorCheck {
    let found = KernelsOfHeads::tried(device, Kind::BFloat16, HEAD_DIM);
    let hint = "look at the reasons: the GPU may be too old for these kernels, or libtorch's CUDA half without them";
    DoctorCheck::judged(ATTENTION, found.text, !found.is_blockwise, hint)
}

/// kvtune's own kernels: one of their texts is compiled and started, for all that compiling needs.
fn runs_kernels(device: Device) -> DoctorCheck {
    let x = Tensor::full([2, 512], 3.0, (Kind::BFloat16, device));
    // Threes are ones when they are normed.
    let norms = rms_norm(&x, &x.ones_like().get(0), 1e-6).is_some_and(|(y, _)| y.equal(&x.ones_like()));
    wait(device);
    let states = kernel_states();
    let missing: Vec<String> =
        states.iter().filter_map(|(kernel, missing)| Some(format!("{kernel}: {}", missing.as_ref()?))).collect();
    let found = match () {
        () if !missing.is_empty() => missing.join("; "),
        () if norms => states.iter().map(|(kernel, _)| kernel.as_str()).collect::<Vec<_>>().join(", "),
        () => "other numbers came out than should".to_owned(),
    };
    let hint = "libtorch's operations do their work, slower; look at the row of NVRTC and at the reason";
    DoctorCheck::judged(KERNELS, found, norms && missing.is_empty(), hint)
}

/// Whether a sum that was captured as a graph is right for other numbers than those that it was captured with.
fn replays(device: Device) -> Result<bool, Fault> {
    let Device::Cuda(index) = device else { return Ok(false) };
    let recorder = GraphRecorder::of(index)?;
    let mut x = Tensor::ones([64], (Kind::Float, device));
    let mut y = x.zeros_like();
    let graph = recorder.capture(|| y.copy_(&(&x + &x)))?;
    let _ = x.fill_(3.0);
    graph.replay();
    Ok(y.equal(&(&x + &x)))
}

fn told(replayed: Result<bool, Fault>) -> DoctorCheck {
    let hint = "leave `grad.cuda_graphs = false`; everything else goes without graphs";
    match replayed {
        Ok(true) => DoctorCheck::ok(GRAPHS, "captured and replayed"),
        Ok(false) => DoctorCheck::failed(GRAPHS, "other numbers came out", hint),
        Err(error) => {
            let found = error.to_string().lines().next().unwrap_or_default().to_owned();
            match error.kind() {
                // A recipe that does not ask for graphs goes without.
                FaultKind::NoGraphs => DoctorCheck::missing(GRAPHS, found),
                _ => DoctorCheck::failed(GRAPHS, found, hint),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::State;
    use super::*;

    fn driver(cuda: (u32, u32), gpus: Vec<Gpu>) -> Driver {
        Driver { cuda, release: Some("580.95.05".to_owned()), gpus }
    }

    #[test]
    fn what_is_missing_fails_where_it_is_promised_and_says_what_to_do() {
        let why = "`libcuda.so.1` cannot be opened".to_owned();
        let half = CudaSupport::Unavailable("`libtorch_cuda.so` does not exist".to_owned());
        for (is_promised, state) in [(false, State::Missing), (true, State::Failed)] {
            let all = [
                nodes(&[]),
                of_driver(Err(&why)),
                of_driver(Ok(&driver((12, 8), Vec::new()))),
                of_driver(Ok(&driver((13, 0), Vec::new()))),
                of_half(&CudaSupport::NoDevice),
                of_half(&half),
            ];
            for check in all.map(|found| DoctorCheck::needed("it", found, is_promised)) {
                assert_eq!((check.state, check.hint.is_some()), (state, is_promised), "{check:?}");
            }
        }
        assert_eq!(usable(1, 0, &half), Err(("not tested: CUDA is not loaded", FIRST)));
        assert_eq!(usable(0, 0, &CudaSupport::Loaded), Err(("no GPU", FIRST)));
        assert_eq!(usable(1, 1, &CudaSupport::Loaded), Err(("no such GPU", INDEX)));
        assert_eq!((told(Ok(true)).state, told(Ok(false)).state), (State::Ok, State::Failed));
        assert_eq!(told(Err(Fault::failed("libtorch: operation not permitted\nat"))).state, State::Failed);
    }

    #[test]
    fn what_is_there_is_told() {
        let gpu = Gpu { name: "NVIDIA H200".to_owned(), capability: (9, 0), multiprocessors: 132, memory: 150_754_820_096 };
        let check = of_gpu(0, &gpu, Some(130 << 30));
        assert_eq!(check.found, "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 130 GiB free of 140 GiB");
        assert_eq!(of_driver(Ok(&driver((13, 0), vec![gpu]))), Ok("580.95.05, serves CUDA 13.0".to_owned()));
    }
}
