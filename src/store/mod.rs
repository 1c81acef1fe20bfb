//! Tensors that wait: on the host, plain or quantised, or in files.

mod arena;
mod blocks;
mod copier;
#[cfg(test)]
mod delayed;
mod segments;
mod tensor_io;
mod tensor_store;
mod vectors;
mod waiting;

pub use arena::StoreUsage;
pub use copier::{Copier, CopyMark, CopyStream, copier_of, copies_are_async};
#[cfg(test)]
pub(crate) use delayed::{WaitFault, copies_in_flight, with_delayed_copies};
pub use tensor_io::{
    LoadTarget, content_of, load_tensor, load_tensor_to, load_tensors, pt_metadata, room_for, save_streamed, save_tensors,
    tensor_heads,
};
pub use tensor_store::{Store, bytes_of};
pub use vectors::Bits;
pub use waiting::Waiting;
