//! What the next cell needs from the host, prefetched while the one before it computes: never more than one cell ahead.

use tch::{Device, Tensor};

use crate::store::{HostTensor, Prefetch, TensorPrefetch};
use crate::units::Bytes;

/// A cell's input and the gradient of its output, prefetched; its undo entries are with the layers.
#[derive(Debug, Default)]
pub(super) struct Prepared {
    input: Option<Prefetch>,
    gradient: Option<TensorPrefetch>,
}

impl Prepared {
    /// Sets a gradient out, beside an input that was.
    pub(super) fn new(input: Option<Prefetch>, gradient: Option<&HostTensor>, device: Device) -> Self {
        Self { input, gradient: gradient.map(|gradient| gradient.prefetch(device)) }
    }

    /// What it takes on the device before it is used.
    pub(super) fn bytes(&self) -> Bytes {
        let gradient = self.gradient.iter().map(TensorPrefetch::bytes);
        self.input.iter().map(Prefetch::bytes).chain(gradient).sum()
    }

    /// The input, where a layer checkpoint was prefetched.
    pub(super) fn take_input(&mut self) -> Option<Tensor> {
        self.input.take().map(|ahead| ahead.wait().swap_remove(0))
    }

    /// The gradient of the output, where any later token has a target.
    pub(super) fn take_gradient(&mut self) -> Option<Tensor> {
        self.gradient.take().map(TensorPrefetch::wait)
    }
}
