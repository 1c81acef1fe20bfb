//! Tensors that wait: on the host, plain or quantised, or in files.

mod arena;
mod away;
mod blocks;
mod copier;
mod error;
#[cfg(test)]
mod late;
mod park;
mod ranges;
mod stretches;
mod tensor_io;
mod vectors;

pub use arena::Taken;
pub use away::{Away, Returning};
pub use copier::{Copier, Lane, Mark, copier_of, copies_go_beside};
pub use error::StoreError;
#[cfg(test)]
pub(crate) use late::{Waits, copies_under_way, while_copies_are_late};
pub use park::{Ahead, Form, Parked, Store, bytes_of};
pub use tensor_io::{Home, load_tensor, load_tensor_to, load_tensors, pt_metadata, raw_tensors, save_tensors};
pub use vectors::{Bits, Quantised};
