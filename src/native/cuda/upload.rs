//! Bytes of the host on their way to a device, through stretches of pinned memory.

use std::ffi::c_int;

use tch::{Device, Kind, Tensor};

use super::pinned::pinned;
use crate::native::autograd::{BackwardError, Raw, check, pointer};

unsafe extern "C" {
    fn kvtune_upload(from: *const u8, bytes: i64, to: Raw, stretches: *const Raw) -> c_int;
}

/// Bytes of each of the two stretches: long enough that a copy is worth its start.
const STRETCH: i64 = 32 << 20;

#[derive(Debug)]
pub struct Upload {
    stretches: [Tensor; 2],
    device: Device,
}

impl Upload {
    /// A way to `device`: by pinned memory to a CUDA device, and by ordinary memory where there is none to be had.
    pub fn to(device: Device) -> Self {
        Self::by(device, STRETCH)
    }

    fn by(device: Device, bytes: i64) -> Self {
        let stretch = || {
            let pinned = if device.is_cuda() { pinned(bytes).ok() } else { None };
            pinned.unwrap_or_else(|| Tensor::empty([bytes], (Kind::Uint8, Device::Cpu)))
        };
        Self { stretches: [stretch(), stretch()], device }
    }

    /// A new tensor on the device with these bytes in it; `Err` is libtorch's text.
    ///
    /// # Shapes
    /// `size`, of `kind`; there must be as many bytes as it has.
    pub fn bring(&self, bytes: &[u8], size: &[i64], kind: Kind) -> Result<Tensor, BackwardError> {
        let tensor = Tensor::empty(size, (kind, self.device));
        let expected = tensor.numel() * kind.elt_size_in_bytes();
        if bytes.len() != expected {
            return Err(BackwardError(format!("{} bytes for a tensor of {expected}", bytes.len())));
        }
        let stretches = [&self.stretches[0], &self.stretches[1]].map(pointer);
        // SAFETY: `bytes` has as many bytes as the tensor; two stretches, live tensors of the same length, are written.
        check(unsafe { kvtune_upload(bytes.as_ptr(), bytes.len() as i64, pointer(&tensor), stretches.as_ptr()) })?;
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_arrives_is_what_was_sent() {
        let upload = Upload::by(Device::Cpu, 10);
        for count in [0, 1, 2, 5, 6, 24] {
            let numbers: Vec<f32> = (0..count).map(|i| i as f32 - 3.5).collect();
            let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
            let found = upload.bring(&bytes, &[count], Kind::Float).unwrap();
            assert_eq!(Vec::<f32>::try_from(found).unwrap(), numbers);
        }
        assert!(upload.bring(&[0; 3], &[1], Kind::Float).unwrap_err().to_string().contains("3 bytes for a tensor of 4"));
    }
}
