//! The same gradient by another road: plain autograd through dense attention, masked by an independent walk over the replay log.

mod compare;
mod error;
mod fit;
#[cfg(test)]
mod mutations;
mod nearness;
mod reference;
mod walk;

pub use compare::{Comparison, MatrixError, check_finite, compare};
pub use error::VerifyError;
pub use fit::fits_in_f64;
pub use nearness::Nearness;
pub use reference::reference_gradients;
pub use walk::{Walk, walk};
