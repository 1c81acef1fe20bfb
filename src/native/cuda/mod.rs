//! The one door to CUDA: everything that only a CUDA device has is asked for here, at run time.

mod load;

pub use load::{CudaSupport, free_device_memory, load_cuda};
