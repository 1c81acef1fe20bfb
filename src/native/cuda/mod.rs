//! The one door to CUDA: everything that only a CUDA device has is asked for here, at run time.

mod attention;
mod gpus;
mod libraries;
mod load;
mod memory;
mod numerics;
mod upload;

pub use attention::{Vendor, VendorSight, vendor_attend, vendor_attend_backward};
pub use gpus::{Driver, Gpu};
pub use libraries::{Companion, Found};
pub use load::{CudaSupport, device_nodes, free_device_memory, libtorch_folder, load_cuda};
pub use memory::release_cached_memory;
pub use numerics::Numerics;
pub use upload::{Upload, pinned};
