//! A tensor that waits on the host, plain or in 8-bit blocks.

use tch::{Device, Tensor};

use super::quant::Int8Blocks;
use crate::units::Bytes;

/// A parked tensor.
#[derive(Debug)]
pub struct Parked(Form);

#[derive(Debug)]
enum Form {
    Plain(Tensor),
    Int8(Int8Blocks),
}

impl Parked {
    /// Parks an exact copy.
    pub fn plain(x: &Tensor) -> Self {
        // A view of a larger tensor would keep all of it alive.
        let host = x.to_device(Device::Cpu);
        Self(Form::Plain(if host.data_ptr() == x.data_ptr() { host.copy() } else { host }))
    }

    /// Parks 8 bits a value, quantised in blocks of 64 along the last axis; channels above 16 times the median one stay apart.
    pub fn int8(x: &Tensor) -> Self {
        Self(Form::Int8(Int8Blocks::new(x).to_device(Device::Cpu)))
    }

    /// The tensor, in its own dtype and shape.
    pub fn fetch(&self, device: Device) -> Tensor {
        match &self.0 {
            Form::Plain(x) => x.to_device(device),
            Form::Int8(blocks) => blocks.to_device(device).restore(),
        }
    }

    /// Host memory in use.
    pub fn bytes(&self) -> Bytes {
        let size = |x: &Tensor| (x.numel() * x.kind().elt_size_in_bytes()) as u64;
        Bytes(match &self.0 {
            Form::Plain(x) => size(x),
            Form::Int8(blocks) => blocks.tensors().into_iter().map(size).sum(),
        })
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn plain_is_exact_and_int8_is_a_quarter() {
        let x = Tensor::randn([2, 5, 128], (Kind::Float, Device::Cpu));
        assert!(Parked::plain(&x).fetch(Device::Cpu).equal(&x));
        let (plain, small) = (Parked::plain(&x).bytes().0, Parked::int8(&x).bytes().0);
        assert_eq!(plain, 2 * 5 * 128 * 4);
        assert_eq!(small, 2 * 5 * (128 + 2 * 8));
    }
}
