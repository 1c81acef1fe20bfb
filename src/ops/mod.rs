//! Pure functions on tensors: no state, no configuration.

pub mod attention;
mod differentiable;
pub mod dropout;
pub mod experts;
pub mod frequencies;
pub mod head_vectors;
pub mod linear;
pub mod pointwise;
pub mod query_statistics;
pub mod rms_norm;
pub mod rope;
