//! The one door to CUDA: everything that only a CUDA device has is asked for here, at run time.

mod allocator;
mod attention;
mod built;
mod driver;
mod gpus;
mod graphs;
mod kept;
mod libraries;
mod load;
mod numerics;
mod nvrtc;
mod paid;
mod pinned;
mod pointwise;
mod quantiser;
mod selection;
mod streams;
mod upload;

pub use allocator::{DeviceStats, device_stats, pinned_stats, release_cached_memory, reset_device_peak};
pub use attention::{Vendor, VendorSight, vendor_attend, vendor_attend_backward};
pub use built::{KernelState, kernel_states, missing_kernels};
pub use driver::kind_of_gpu;
pub use gpus::{Driver, Gpu};
pub use graphs::{Graph, GraphError, GraphRecorder, graph_replays};
pub use kept::{keep, recall};
pub use libraries::{Companion, Found};
pub use load::{CudaSupport, device_nodes, free_device_memory, libtorch_folder, load_cuda};
pub use numerics::Numerics;
pub use nvrtc::compiler_release;
pub use paid::attention_paid;
pub use pinned::{host_memory, host_tensor, on_device, pinned, upload, why_not_pinned};
pub use pointwise::{rms_norm, rms_norm_backward, rotate, swiglu, swiglu_backward};
pub use quantiser::{Levels, quantise, restore};
pub use selection::{Staying, plan_moves, rank_entries, take_lowest};
pub use streams::{Event, SideStream, wait};
pub use upload::Upload;
