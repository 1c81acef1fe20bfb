//! What an optimiser is.

use tch::Tensor;

use crate::units::{Bytes, Fault};

/// An optimiser over named parameters. A further one is one file, and a line in [`build`](super::build).
pub trait Optimizer: Send {
    /// Applies one update. `gradients` has one entry per parameter.
    fn step(&mut self, parameters: &[(String, Tensor)], gradients: &[(String, Tensor)], learning_rate: f64);

    /// The state by name, to be saved.
    fn state(&self) -> Vec<(String, Tensor)>;

    fn bytes(&self) -> Bytes;

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<(), Fault>;
}
