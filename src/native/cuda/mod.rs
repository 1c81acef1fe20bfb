//! The one door to CUDA: everything that only a CUDA device has is asked for here, at run time.

mod allocator;
mod attention;
mod attention_mass;
mod built;
mod disk_cache;
mod driver;
mod gpus;
mod graphs;
mod libraries;
mod load;
mod nccl;
mod numerics;
mod nvrtc;
mod pinned;
mod pointwise;
mod streams;

pub use allocator::{Allocated, DeviceStats, device_stats, pinned_stats, release_cached_memory, reset_device_peak};
pub use attention::{TorchKernel, TorchKernelMask, vendor_attend, vendor_attend_backward};
pub use attention_mass::attention_mass;
pub use built::{kernel_states, missing_kernels};
pub use driver::{free_device_memory, place_of_gpu};
pub use gpus::{Driver, Gpu};
pub use graphs::{Graph, GraphError, GraphRecorder, graph_replays};
pub use libraries::Companion;
pub use load::{CudaSupport, device_nodes, libtorch_folder, load_cuda};
pub use nccl::{Nccl, NcclGroup, NcclId, NcclWork};
pub use numerics::Numerics;
pub use nvrtc::compiler_release;
pub use pinned::{Upload, host_memory, host_tensor, on_device, pinned, upload, why_not_pinned};
pub use pointwise::{rms_norm, rms_norm_backward, rotate, swiglu, swiglu_backward};
pub use streams::{CudaEvent, SideStream, wait};
