//! The same gradient by another road: plain autograd through dense attention, masked by an independent walk over the replay log.

mod compare;
#[cfg(test)]
pub(crate) mod mutations;
mod proofs;
mod reference;
#[cfg(test)]
mod static_widths;
mod tilings;
#[cfg(test)]
mod waiting_weights;
mod walk;

pub use compare::{Comparison, ErrorBound, MatrixError, check_finite, fits_in_f64};
pub use proofs::{Proofs, TilingProof, Verdict};
pub use reference::Reference;
pub use tilings::every_tiling;
pub use walk::{departures, stays, walk};
