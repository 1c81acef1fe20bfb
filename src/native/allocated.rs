//! Bytes that an allocator has handed out.

/// Bytes of one kind of memory. What was allocated before the meter began, or is freed by another thread, is not counted, so that
/// `live` may be below zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    /// Bytes of the tensors that there are now.
    pub live: i64,
    /// The largest `live` since [`AllocationMeter::reset_peak`](super::AllocationMeter::reset_peak).
    pub peak: i64,
    /// The most that a caching allocator has held, for tensors that are and that were, since it began or, by its own statistics, since
    /// [`AllocationMeter::reset_peak`](super::AllocationMeter::reset_peak); 0 where there is none.
    pub reserved: i64,
}
