//! Which entries leave a cache, on the CPU. `cache` has the rules, in libtorch's operations.

use std::ffi::c_int;
use std::ptr;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::autograd::pointer;
use super::cuda::Staying;
use super::kernels::{first, made};

unsafe extern "C" {
    fn kvtune_rank_entries(
        score: *mut C_tensor,
        position: *mut C_tensor,
        bounds: *const i64,
        sinks: i64,
        young: i64,
        key: *mut *mut C_tensor,
    ) -> c_int;
    fn kvtune_take_lowest(key: *mut C_tensor, count: i64, slot: *mut *mut C_tensor) -> c_int;
    fn kvtune_pack_slots(slot: *mut C_tensor, bytes: i64, offset: i64, result: *mut *mut C_tensor) -> c_int;
    fn kvtune_unpack_slots(slot: *mut C_tensor, offset: i64, result: *mut *mut C_tensor) -> c_int;
    fn kvtune_leave_by_position(
        position: *const i64,
        slots: i64,
        young: i64,
        begin: i64,
        end: i64,
        keep_first: i64,
        count: i64,
        slot: *mut *mut C_tensor,
    ) -> c_int;
}

/// The order of entries as integers, lowest first, as [`super::cuda::rank_entries`] has it; `None` where the kernel does not serve.
///
/// # Shapes
/// `score (B, G, n)` and `position (B, G, n)`, i64, each with 1 for B or G where all share it; out `(B, G, n)`, i64.
pub fn rank_on_cpu(score_bgn: &Tensor, position_bgn: &Tensor, staying: Staying<'_>) -> Option<Tensor> {
    let is_served = score_bgn.device() == Device::Cpu && position_bgn.device() == Device::Cpu;
    let batch = score_bgn.size().first().max(position_bgn.size().first()).copied()?;
    let is_protected = staying.protected.iter().any(|(start, end)| start != end);
    if !is_served || (is_protected && staying.protected.len() as i64 != batch) {
        return None;
    }
    let flat: Vec<i64> = staying.protected.iter().flat_map(|&(start, end)| [start as i64, end as i64]).collect();
    let bounds = if is_protected { flat.as_ptr() } else { ptr::null() };
    let score = score_bgn.to_kind(Kind::Float);
    let (score, position) = (pointer(&score), pointer(position_bgn));
    // SAFETY: both are live tensors, and there are two bounds for each row, or null; one result is written.
    Some(first(made(1, |key| unsafe { kvtune_rank_entries(score, position, bounds, staying.sinks, staying.young, key) })))
}

/// The slots of the `count` lowest keys, lowest first; `None` where the kernel does not serve.
///
/// # Shapes
/// `key (B, G, n)`, i64; out `(B, G, count)`, i64.
pub fn take_lowest_on_cpu(key_bgn: &Tensor, count: i64) -> Option<Tensor> {
    // SAFETY: it is a live tensor; one result is written.
    let take = || first(made(1, |slot| unsafe { kvtune_take_lowest(pointer(key_bgn), count, slot) }));
    (key_bgn.device() == Device::Cpu).then(take)
}

/// Of positions by slot, the slots of the `count` smallest below `young` and outside of `protected`, begin and end, smallest first; those
/// below `keep_first` follow last, the largest of them first. Fewer where there are no more.
///
/// # Shapes
/// Out `(1, 1, count)`, i64.
pub fn leave_by_position(positions: &[i64], young: i64, (begin, end): (i64, i64), keep_first: usize, count: usize) -> Tensor {
    let (slots, keep_first, count) = (positions.len() as i64, keep_first as i64, count as i64);
    // SAFETY: there are so many positions; one result is written.
    first(made(1, |slot| unsafe {
        kvtune_leave_by_position(positions.as_ptr(), slots, young, begin, end, keep_first, count, slot)
    }))
}

/// Slots, i64, as integers of a narrower kind, of which 0 stands for `offset`: u8, i16 or i32.
///
/// # Shapes
/// Any, out the same.
pub fn pack_slots(slot: &Tensor, kind: Kind, offset: i64) -> Tensor {
    if slot.device() != Device::Cpu {
        return (slot - offset).to_kind(kind).contiguous();
    }
    let bytes = kind.elt_size_in_bytes() as i64;
    // SAFETY: it is a live tensor; one result is written.
    first(made(1, |result| unsafe { kvtune_pack_slots(pointer(slot), bytes, offset, result) }))
}

/// The inverse of [`pack_slots`].
///
/// # Shapes
/// Any, out the same, i64.
pub fn unpack_slots(packed: &Tensor, offset: i64) -> Tensor {
    if packed.device() != Device::Cpu {
        return packed.to_kind(Kind::Int64) + offset;
    }
    // SAFETY: it is a live tensor; one result is written.
    first(made(1, |result| unsafe { kvtune_unpack_slots(pointer(packed), offset, result) }))
}
