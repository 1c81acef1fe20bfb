//! `--device` and `--threads`.

use std::fmt;

use tch::{Cuda, Device};

use super::limits;
use crate::native::cuda::{CudaSupport, load_cuda};
use crate::native::{make_room_for_others, usable_cpus};
use crate::report::console;
use crate::units::Fault;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// CUDA where there is one.
    Auto,
    Cpu,
    /// The GPU with this number, or with the rank's number on its machine.
    Cuda(Option<usize>),
}

impl Wanted {
    pub(super) fn parse(text: &str) -> Result<Self, &'static str> {
        let unknown = "expected `auto`, `cpu`, `cuda` or `cuda:1`";
        match text.split_once(':') {
            None if text == "auto" => Ok(Self::Auto),
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(None)),
            Some(("cuda", index)) => index.parse().map(|index| Self::Cuda(Some(index))).map_err(|_| unknown),
            _ => Err(unknown),
        }
    }

    /// The number of the GPU of the rank that has this number on its machine.
    pub(super) fn gpu(self, local_rank: usize) -> usize {
        match self {
            Self::Cuda(Some(index)) => index,
            // Who shows each rank a device of its own shows it as the first.
            _ if Cuda::device_count() == 1 => 0,
            _ => local_rank,
        }
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(index)) => write!(f, "cuda:{index}"),
        }
    }
}

/// Loads CUDA where it is wanted, sets the number of threads, and returns the device: by the rank's number on its machine, unless one is named.
pub(super) fn prepare(wanted: Wanted, threads: Option<u16>, local_rank: usize) -> Result<Device, Fault> {
    // Before any other call into libtorch, which would remember that there is no CUDA.
    let state = if wanted == Wanted::Cpu { CudaSupport::NoDevice } else { load_cuda() };
    set_threads(threads)?;
    if wanted == Wanted::Cpu || (wanted == Wanted::Auto && matches!(state, CudaSupport::NoDevice)) {
        return Ok(Device::Cpu);
    }
    let index = wanted.gpu(local_rank);
    let has_device = !matches!(state, CudaSupport::NoDevice);
    let why = match state {
        CudaSupport::Loaded if Cuda::is_available() && (index as i64) < Cuda::device_count() => return Ok(Device::Cuda(index)),
        CudaSupport::Loaded => format!("libtorch finds {} CUDA devices", Cuda::device_count()),
        CudaSupport::NoDevice => "this machine has no NVIDIA device".to_owned(),
        CudaSupport::Unavailable(reason) => reason,
    };
    // Some ranks on GPUs and others on the CPU would all wait for the latter.
    let is_one_too_many = local_rank > 0 && Cuda::device_count() > 0;
    if wanted == Wanted::Auto && !is_one_too_many {
        console::note(&format!("no CUDA ({why}): running on the CPU"));
        return Ok(Device::Cpu);
    }
    let hint = if is_one_too_many {
        "start as many ranks on a machine as it has GPUs, or use `--device cpu`"
    } else if !has_device {
        "use `--device cpu`, or start on a machine with an NVIDIA GPU; a container needs `--gpus all`"
    } else {
        "install the full set of torch 2.11 wheels and point `LD_LIBRARY_PATH` at its `torch/lib`, or use `--device cpu`"
    };
    let rank = if local_rank > 0 { format!(" by rank {local_rank} of this machine") } else { String::new() };
    Err(Fault::usage(format!("`--device {wanted}` is not available{rank}: {why}"), hint))
}

/// Variables by which a user tells libtorch how many threads compute.
const THREADS: [&str; 2] = ["OMP_NUM_THREADS", "MKL_NUM_THREADS"];

/// Threads for each CPU beyond which they only wait for each other.
const THREADS_PER_CPU: usize = 4;

/// Sets the number of threads: as asked for, else as libtorch was told or chooses, but no more than the process has CPUs.
pub(super) fn set_threads(asked: Option<u16>) -> Result<(), Fault> {
    let own = usize::try_from(tch::get_num_threads()).unwrap_or(1);
    let told = THREADS.into_iter().find(|name| std::env::var_os(name).is_some());
    let threads = asked.map_or_else(|| if told.is_some() { own } else { own.min(usable_cpus()) }, usize::from);
    let (cpus, by) = (usable_cpus(), if asked.is_some() { "--threads" } else { told.unwrap_or_default() });
    if threads > THREADS_PER_CPU * cpus {
        let message = format!("`{by}` asks for {threads} threads, expected at most {} for {cpus} CPUs", THREADS_PER_CPU * cpus);
        return Err(Fault::usage(message, format!("take one for each CPU: `--threads {cpus}`")));
    }
    if threads > cpus {
        limits::threads(threads)?;
    }
    // Also where it is the same number: libtorch then keeps its libraries from taking fewer, which would be other sums.
    if asked.is_some() || threads != own {
        tch::set_num_threads(threads as i32);
    }
    make_room_for_others(threads);
    Ok(())
}
