//! Memory of the host that a device copies from and to by itself, while the host goes on.

use std::ffi::c_int;
use std::sync::{Mutex, OnceLock};

use tch::{Device, Kind, Tensor, kind::Element};

use crate::native::autograd::{BackwardError, Raw, check, pointer, tensors};
use crate::native::locked;
use crate::native::memory::{HostMemory, allowed_memory, machine_memory};

unsafe extern "C" {
    fn kvtune_pinned_bytes(count: i64, out: *mut Raw) -> c_int;
    fn kvtune_upload(from: *const u8, bytes: i64, to: Raw, stretches: *const Raw) -> c_int;
}

/// The part of the memory that locked memory leaves to everybody else: an eighth.
const LEFT_TO_OTHERS: u64 = 8;
/// Less than this is locked unasked: mostly it is memory that was locked before.
const SMALL: i64 = 1 << 20;

/// Why memory of the host is not pinned, the first time that it is not.
static REFUSED: Mutex<Option<String>> = Mutex::new(None);

/// Why some memory of the host could not be pinned, so that copies from and to it keep the host waiting; `None` where all could.
pub fn why_not_pinned() -> Option<String> {
    locked(&REFUSED).clone()
}

/// Memory of the host for tensors of `device`, not initialised, and whether it is pinned: it is where that is a CUDA device and its
/// driver locks so much. libtorch rounds pinned memory up to a power of two.
///
/// # Shapes
/// `(len)`, u8.
pub fn host_memory(len: i64, device: Device) -> (Tensor, bool) {
    let pageable = || (Tensor::empty([len], (Kind::Uint8, Device::Cpu)), false);
    if device == Device::Cpu || len == 0 {
        return pageable();
    }
    match pinned(len) {
        Ok(memory) => (memory, true),
        Err(reason) => {
            locked(&REFUSED).get_or_insert(reason);
            pageable()
        }
    }
}

/// [`host_memory`] for a tensor of this size and kind.
///
/// # Shapes
/// `size`.
pub fn host_tensor(size: &[i64], kind: Kind, device: Device) -> Tensor {
    let len = size.iter().product::<i64>() * kind.elt_size_in_bytes() as i64;
    host_memory(len, device).0.view_dtype(kind).view(size)
}

/// A tensor of the host on a device, on its way while the host goes on; on the CPU it is the very tensor.
///
/// # Shapes
/// Any.
pub fn upload(host: &Tensor, device: Device) -> Tensor {
    if device == Device::Cpu || host.numel() == 0 {
        return host.to_device(device);
    }
    let mut waiting = host_tensor(&host.size(), host.kind(), device);
    waiting.copy_(host);
    // libtorch gives the pinned memory to nobody else before the copy is done.
    waiting.to_device_(device, waiting.kind(), true, false)
}

/// Numbers of the host as a tensor of `device`, which the host does not wait for.
///
/// # Shapes
/// `(values.len())`.
pub fn on_device<T: Element>(values: &[T], device: Device) -> Tensor {
    upload(&Tensor::from_slice(values), device)
}

/// Memory of the host that a CUDA device reads and writes without a detour; `Err` says why there is none.
///
/// # Shapes
/// `(len)`, u8, on the CPU.
pub fn pinned(len: i64) -> Result<Tensor, String> {
    if len >= SMALL {
        room(len as u64, machine_memory(), allowed_memory(), tells_all())?;
    }
    // SAFETY: one result is written.
    let made = tensors(|out| unsafe { kvtune_pinned_bytes(len, out) });
    made.map(|[memory]| memory.unwrap_or_default()).map_err(|error| error.0)
}

/// Whether so many bytes may be asked for: of what the control group allows and of what the machine has, an eighth is left. A machine that
/// does not tell of all that it has, or of less than the group's limit, makes more when it is needed: there only the group counts.
fn room(len: u64, machine: Option<HostMemory>, allowed: Option<HostMemory>, machine_tells_all: bool) -> Result<(), String> {
    let limit = allowed.map_or(0, |memory| memory.total);
    let machine = machine.filter(|memory| machine_tells_all && memory.total >= limit);
    let counted = [allowed.map(|memory| (memory, "that the control group allows")), machine.map(|memory| (memory, "there are"))];
    for (HostMemory { total, left }, of) in counted.into_iter().flatten() {
        if left.saturating_sub(len) < total / LEFT_TO_OTHERS {
            return Err(format!("{len} bytes more would leave less than an eighth of the {total} {of}: {left} are available"));
        }
    }
    Ok(())
}

/// Whether the machine has as much memory as when it was first asked: one that has more by now makes more when it is needed.
fn tells_all() -> bool {
    static FIRST: OnceLock<Option<u64>> = OnceLock::new();
    let now = machine_memory().map(|memory| memory.total);
    now <= *FIRST.get_or_init(|| now)
}

/// Bytes of each of the two stretches: long enough that a copy is worth its start.
const STRETCH: i64 = 32 << 20;

/// Bytes of the host on their way to a device, through stretches of pinned memory.
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
    fn for_the_cpu_memory_is_as_any_other() {
        let found = host_tensor(&[2, 3], Kind::BFloat16, Device::Cpu);
        assert_eq!((found.size(), found.kind()), (vec![2, 3], Kind::BFloat16));
        assert_eq!(host_tensor(&[2, 0], Kind::Double, Device::Cpu).size(), [2, 0]);
        assert_eq!(Vec::<i64>::try_from(on_device(&[3i64, 1], Device::Cpu)).unwrap(), [3, 1]);
        assert_eq!(on_device::<bool>(&[], Device::Cpu).size(), [0]);
    }

    #[test]
    fn what_cannot_be_pinned_is_pageable_and_says_why() {
        if tch::Cuda::is_available() {
            eprintln!("skipped: a CUDA device is there, and pins memory");
            return;
        }
        let found = host_tensor(&[4, 2], Kind::Float, Device::Cuda(0));
        assert_eq!((found.size(), found.device()), (vec![4, 2], Device::Cpu));
        assert!(why_not_pinned().is_some_and(|why| !why.is_empty()), "{:?}", why_not_pinned());
    }

    #[test]
    fn an_eighth_is_left_of_what_the_group_allows_or_else_of_what_the_machine_has() {
        let of = |total, left| Some(HostMemory { total, left });
        assert_eq!(room(700, of(1000, 900), None, true), Ok(()));
        let short = room(800, of(1000, 900), None, true).unwrap_err();
        assert_eq!(short, "800 bytes more would leave less than an eighth of the 1000 there are: 900 are available");
        assert_eq!(room(800, of(1000, 900), None, false), Ok(()), "a machine that grows is asked");
        assert_eq!(room(800, of(1000, 900), of(4000, 3000), true), Ok(()), "it grows as far as the group allows");
        assert!(room(800, of(9000, 900), of(4000, 3000), true).is_err_and(|why| why.contains("the 9000 there are")));
        assert!(room(800, of(9000, 8000), of(4000, 1200), true).is_err_and(|why| why.contains("control group")));
        assert_eq!(room(800, None, None, true), Ok(()));
        assert!(tells_all());
    }

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
