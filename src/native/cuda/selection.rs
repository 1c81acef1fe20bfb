//! The kernels that order entries, choose those that leave and plan who moves into their slots. `cache` has the rules, in libtorch's
//! operations.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr;

use tch::{Kind, Tensor};

use super::built::{self, Grid, KernelSource, Setting};

pub(super) static SOURCE: KernelSource = KernelSource {
    name: "selection",
    text: include_str!("kernels/selection.cu"),
    kernels: &["rank_entries", "take_lowest", "plan_moves"],
};

const SETTINGS: [Setting; 0] = [];
/// Threads of a block that has a row, and of one where each has an entry.
const THREADS: usize = 1024;
const EACH_OWN: usize = 256;
/// Slots of a row above which the kernels' own numbers would not hold an index.
const LARGEST: i64 = 1 << 30;
const LARGEST_GRID: i64 = 65_535;

/// The parameter of `rank_entries`, as the kernels' text has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RankParams {
    score: *const c_void,
    position: *const c_void,
    bounds: *const c_void,
    key: *mut c_void,
    score_strides: [i64; 2],
    position_strides: [i64; 2],
    sinks: i64,
    young: i64,
    groups: c_int,
    slots: c_int,
}

/// The parameter of `take_lowest`, as the kernels' text has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct LowestParams {
    key: *const c_void,
    slot: *mut c_void,
    scratch: *mut c_void,
    slots: c_int,
    taken: c_int,
}

/// The parameter of `plan_moves`, as the kernels' text has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct MoveParams {
    victim: *const c_void,
    to: *mut c_void,
    order: *mut c_void,
    from: *mut c_void,
    scratch: *mut c_void,
    region: i64,
    victims: c_int,
}

// The kernels' text asserts the same.
const _: () = assert!(size_of::<RankParams>() == 88 && size_of::<LowestParams>() == 32 && size_of::<MoveParams>() == 56);

#[derive(Clone, Copy, Debug)]
pub struct Staying<'a> {
    /// Positions from 0 to below this stay.
    pub sinks: i64,
    pub young: i64,
    /// Begin and end of a range of positions that stay, by row.
    pub protected: &'a [(usize, usize)],
}

/// Rows and what each has, of a tensor `(B, G, n)`; `None` for sizes that the kernels' numbers would not hold.
fn sizes(x_bgn: &Tensor) -> Option<(i64, i64)> {
    let (batch, groups, each) = x_bgn.size3().ok()?;
    (batch * groups <= LARGEST_GRID && each < LARGEST).then_some((batch * groups, each))
}

/// A block for each row.
fn of_rows(rows: i64) -> Grid {
    Grid { blocks: [rows as usize, 1, 1], threads: THREADS }
}

/// The order of entries as integers, lowest first: by score, ties by position; what may not leave has the largest. -0 is 0, NaN as large
/// as any. `None` where the kernels do not serve, and libtorch's operations must.
///
/// # Shapes
/// `score (B, G, n)` and `position (B, G, n)`, i64, each with 1 for B or G where all share it; out `(B, G, n)`, i64.
pub fn rank_entries(score_bgn: &Tensor, position_bgn: &Tensor, staying: Staying<'_>) -> Option<Tensor> {
    if !score_bgn.device().is_cuda() || position_bgn.device() != score_bgn.device() || position_bgn.kind() != Kind::Int64 {
        return None;
    }
    let ((score_b, score_g, slots), (batch, groups, positions)) = (score_bgn.size3().ok()?, position_bgn.size3().ok()?);
    let (batch, groups) = (batch.max(score_b), groups.max(score_g));
    let key = Tensor::empty([batch, groups, slots], (Kind::Int64, score_bgn.device()));
    let (rows, _) = sizes(&key).filter(|_| positions == slots)?;
    let is_protected = staying.protected.iter().any(|(start, end)| start != end);
    let flat: Vec<i64> = staying.protected.iter().flat_map(|&(start, end)| [start as i64, end as i64]).collect();
    if is_protected && flat.len() as i64 != 2 * batch {
        return None;
    }
    if key.numel() == 0 {
        return Some(key);
    }
    let bounds = is_protected.then(|| super::on_device(&flat, key.device()));
    let (score, position) = (in_rows(&score_bgn.to_kind(Kind::Float)), in_rows(position_bgn));
    let params = RankParams {
        score: score.data_ptr(),
        position: position.data_ptr(),
        bounds: bounds.as_ref().map_or(ptr::null(), |bounds| bounds.data_ptr().cast_const()),
        key: key.data_ptr(),
        score_strides: strides(&score),
        position_strides: strides(&position),
        sinks: staying.sinks,
        young: staying.young,
        groups: groups as c_int,
        slots: slots as c_int,
    };
    let blocks = [(slots as usize).div_ceil(EACH_OWN), rows as usize, 1];
    // SAFETY: the parameter is the kernel's; the tensors are of this device and of these sizes, along strides of 0 where there is one.
    unsafe { built::launch(&key, &SOURCE, &SETTINGS, "rank_entries", Grid { blocks, threads: EACH_OWN }, &params) }.map(|()| key)
}

/// The slots of the `count` lowest keys, lowest first, of equals the lower slot first; `None` where the kernels do not serve.
///
/// # Shapes
/// `key (B, G, n)`, i64; out `(B, G, count)`, i64.
pub fn take_lowest(key_bgn: &Tensor, count: i64) -> Option<Tensor> {
    if !key_bgn.device().is_cuda() || key_bgn.kind() != Kind::Int64 {
        return None;
    }
    let (rows, slots) = sizes(key_bgn).filter(|(_, slots)| (0..=*slots).contains(&count))?;
    let key = key_bgn.contiguous();
    let slot = Tensor::empty([key.size()[0], key.size()[1], count], (Kind::Int64, key.device()));
    if slot.numel() == 0 {
        return Some(slot);
    }
    let scratch = Tensor::empty([rows, 2, count], (Kind::Int, key.device()));
    let params = LowestParams {
        key: key.data_ptr(),
        slot: slot.data_ptr(),
        scratch: scratch.data_ptr(),
        slots: slots as c_int,
        taken: count as c_int,
    };
    // SAFETY: the parameter is the kernel's; the tensors are contiguous, of this device and of these sizes.
    unsafe { built::launch(&key, &SOURCE, &SETTINGS, "take_lowest", of_rows(rows), &params) }.map(|()| slot)
}

/// For slots that are left: those slots from the lowest on, which of the given each of them was, and as many slots from `region` on, those
/// that are left behind the others. `None` where the kernels do not serve.
///
/// # Shapes
/// `victim (B, G, e)`, i64, all different in a row; out three of the same.
pub fn plan_moves(victim_bge: &Tensor, region: i64) -> Option<[Tensor; 3]> {
    if !victim_bge.device().is_cuda() || victim_bge.kind() != Kind::Int64 {
        return None;
    }
    let (rows, victims) = sizes(victim_bge)?;
    let victim = victim_bge.contiguous();
    let made @ [to, order, from] = &[(); 3].map(|()| Tensor::empty(victim.size(), (Kind::Int64, victim.device())));
    if victim.numel() > 0 {
        let scratch = Tensor::empty([rows, 3, victims], (Kind::Int, victim.device()));
        let params = MoveParams {
            victim: victim.data_ptr(),
            to: to.data_ptr(),
            order: order.data_ptr(),
            from: from.data_ptr(),
            scratch: scratch.data_ptr(),
            region,
            victims: victims as c_int,
        };
        // SAFETY: as above.
        unsafe { built::launch(&victim, &SOURCE, &SETTINGS, "plan_moves", of_rows(rows), &params)? };
    }
    Some(made.each_ref().map(Tensor::shallow_clone))
}

/// The tensor itself where the last of its dimensions lies in one piece.
fn in_rows(x: &Tensor) -> Tensor {
    if x.stride()[2] == 1 { x.shallow_clone() } else { x.contiguous() }
}

/// The strides of the first two dimensions: 0 where there is one of them, which serves all.
fn strides(x: &Tensor) -> [i64; 2] {
    let (size, stride) = (x.size(), x.stride());
    [0, 1].map(|dim| if size[dim] == 1 { 0 } else { stride[dim] })
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::super::nvrtc::tests::spills_nothing;
    use super::*;

    #[test]
    fn other_places_are_left_to_others() {
        let key = Tensor::zeros([1, 2, 5], (Kind::Int64, Device::Cpu));
        let staying = Staying { sinks: 0, young: 9, protected: &[] };
        assert!(take_lowest(&key, 3).is_none() && plan_moves(&key, 4).is_none());
        assert!(rank_entries(&key.to_kind(Kind::Float), &key, staying).is_none());
    }

    #[test]
    fn what_one_row_or_head_has_for_all_is_read_again() {
        let x = Tensor::zeros([3, 4, 10], (Kind::Float, Device::Cpu));
        assert_eq!(strides(&x.narrow(2, 0, 7)), [40, 10]);
        assert_eq!([strides(&x.narrow(1, 0, 1)), strides(&x.narrow(0, 1, 1))], [[40, 0], [0, 10]]);
        let turned = x.transpose(1, 2);
        assert_eq!((in_rows(&turned).stride(), in_rows(&x).data_ptr()), (vec![40, 4, 1], x.data_ptr()));
    }

    #[test]
    fn what_their_numbers_would_not_hold_is_left_to_others() {
        let of = |size: [i64; 3]| sizes(&Tensor::zeros([1, 1, 1], (Kind::Uint8, Device::Cpu)).expand(size, false));
        assert_eq!(of([2, 4, 70_000]), Some((8, 70_000)));
        assert_eq!([of([1, 65_536, 3]), of([1, 1, 1 << 30])], [None; 2]);
    }

    #[test]
    fn they_compile_for_ampere_hopper_and_blackwell_and_spill_no_register() {
        for line in ["constexpr int THREADS = 1024;", "constexpr int EACH_OWN = 256;"] {
            assert!(SOURCE.text.contains(line), "{line}");
        }
        for kernel in SOURCE.kernels {
            assert!(SOURCE.text.contains(&format!(" {kernel}(const ")), "{kernel}");
        }
        spills_nothing(&SOURCE, &[SETTINGS]);
    }
}
