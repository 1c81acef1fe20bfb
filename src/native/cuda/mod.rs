//! The one door to CUDA: everything that only a CUDA device has is asked for here, at run time.

mod attention;
mod load;
mod memory;

pub use attention::{Vendor, VendorSight, vendor_attend, vendor_attend_backward};
pub use load::{CudaSupport, free_device_memory, load_cuda};
pub use memory::release_cached_memory;
