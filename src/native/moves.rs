//! Rows of a cache that change their places: on the CPU in one pass, and anywhere by libtorch's operations.

use std::ffi::c_int;
use std::ptr;

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::autograd::{check, or_panic, pointer};
use super::kernels::made;

unsafe extern "C" {
    fn kvtune_move_rows_back(x: *mut C_tensor, to: *mut C_tensor, from: *mut C_tensor, saved: *mut C_tensor) -> c_int;
    fn kvtune_write_rows(
        planes: *const *mut C_tensor,
        chunks: *const *mut C_tensor,
        count: usize,
        to: *mut C_tensor,
        from: *mut C_tensor,
        slot: i64,
        saved: *mut *mut C_tensor,
    ) -> c_int;
    fn kvtune_plan_moves(
        victim: *mut C_tensor,
        batch: i64,
        groups: i64,
        slots: i64,
        region: i64,
        results: *mut *mut C_tensor,
    ) -> c_int;
}

/// The inverse of the moves of [`write_rows`] in one plane, given what it returned; zeros in its place, where there is nothing.
///
/// # Shapes
/// As there.
pub fn move_rows_back(x: &Tensor, to: &Tensor, from: &Tensor, saved: Option<&Tensor>) {
    let [x, to, from] = [x, to, from].map(pointer);
    // SAFETY: all are live tensors, but for what was saved, which may be null.
    or_panic(check(unsafe { kvtune_move_rows_back(x, to, from, saved.map_or(ptr::null_mut(), pointer)) }));
}

/// What one write does to the planes of a cache: in each, rows `from` take the places of rows `to`, where moves are given, and then its
/// chunk comes to stand from slot `slot` on, where it has one, in the first sequences. Returns what the moves wrote over, by plane. A row in
/// both lists must be its own destination.
///
/// # Shapes
/// Planes `(B, G, C, …)`, whose rows are counted over the first three dimensions, chunks `(b, G, n, …)`; `to` and `from (e)`, i64; results
/// `(e, …)`.
pub fn write_rows(planes: &[(&Tensor, Option<&Tensor>)], moves: Option<(&Tensor, &Tensor)>, slot: i64) -> Vec<Tensor> {
    let null = ptr::null_mut();
    let whole: Vec<_> = planes.iter().map(|(plane, _)| pointer(plane)).collect();
    let chunks: Vec<_> = planes.iter().map(|(_, chunk)| chunk.map_or(null, pointer)).collect();
    let (to, from) = moves.map_or((null, null), |(to, from)| (pointer(to), pointer(from)));
    let count = if moves.is_some() { planes.len() } else { 0 };
    // SAFETY: all are live tensors, or null where that is allowed; a result is written for each plane where rows move, and else none.
    made(count, |saved| unsafe { kvtune_write_rows(whole.as_ptr(), chunks.as_ptr(), whole.len(), to, from, slot, saved) })
}

/// Heads of a cache, and the slots of each.
#[derive(Clone, Copy, Debug)]
pub struct MovePlan {
    pub batch: i64,
    /// KV heads of a sequence.
    pub groups: i64,
    /// Slots from head to head.
    pub slots: i64,
    /// The first slot that the chunk takes.
    pub region: i64,
}

impl MovePlan {
    /// For each head its victims in order, those from the region on last; their order; and the slots from the region on, as many, in order,
    /// victims last. Slots count on from head to head. On the CPU alone.
    ///
    /// # Shapes
    /// `victim (1 or B, 1 or G, e)`, i64, all different in a row; out `(B·G·e)`, `(B, G, e)` and `(B·G·e)`.
    pub fn on_cpu(self, victim: &Tensor) -> Option<[Tensor; 3]> {
        let Self { batch, groups, slots, region } = self;
        let victim = (victim.device() == Device::Cpu).then(|| victim.contiguous())?;
        // SAFETY: it is a live tensor; three results are written.
        let plan = |results| unsafe { kvtune_plan_moves(pointer(&victim), batch, groups, slots, region, results) };
        let [to, order, from]: [Tensor; 3] = made(3, plan).try_into().ok()?;
        Some([to.view(-1), order, from.view(-1)])
    }
}
