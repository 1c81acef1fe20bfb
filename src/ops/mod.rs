//! Pure functions on tensors: no state, no configuration.

pub mod attention;
pub mod clamped_swiglu;
mod differentiable;
pub mod dropout;
pub mod experts;
pub mod frequencies;
pub mod geglu;
pub mod head_vectors;
pub mod linear;
pub mod query_statistics;
pub mod rms_norm;
pub mod rope;
pub mod soft_cap;
pub mod swiglu;
