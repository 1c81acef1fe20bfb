//! The C++ shim over libtorch, and the only `unsafe` of the project.

#![allow(unsafe_code)]

mod allocator;
mod at_end;
mod autograd;
mod bounded;
pub mod cuda;
mod facts;
mod kernels;
mod mapped;
mod memory;
mod meter;
mod pointwise;
mod quantiser;
mod ranks;
mod shim_object;
mod threads;
mod unpack;

pub use allocator::Allocator;
pub use autograd::{BackwardError, attach_backward, gradients_of, run_backward, take_gradient};
pub(crate) use autograd::{or_panic, panic_text};
pub use bounded::{Bounds, GivenUp, ProcessLimits, apart, num_given_up, within};
pub use cuda::Allocated;
pub use facts::{cpu_capability, cpu_has, libtorch_version, loaded_libtorch, terminal_width, threads_at_work};
pub use kernels::{
    AttentionShape, KvBlock, ScoreRule, add_product, attend, attend_backward, attention_mass, computes, product, widened_bytes,
};
pub use mapped::{FileMap, arrow_buffer, tensor_over};
pub use memory::{attainable_memory, available_memory, peak_memory, peak_resident, reset_peak_memory, resident_memory};
pub use meter::{AllocationMeter, give_free_memory_back};
pub use pointwise::{RotationDirection, rms_norm, rms_norm_backward, rotate, swiglu, swiglu_backward};
pub use quantiser::{quantise_on_cpu, restore_on_cpu};
pub use ranks::{GlooGroup, GroupWork, PendingExchange, SharedStore, host_name};
pub use threads::{locked, make_room_for_others, try_threads, usable_cpus};
pub use unpack::{Codes, CodesLayout, first_bad_block, packed_product, unpack};
