//! A stream beside the one that computes, and events: how copies go on while a device computes, and neither the host nor the device
//! waits before it must.

use std::ffi::{c_int, c_void};
use std::ptr::null;

use tch::{Cuda, Device, Tensor};

use crate::native::autograd::{BackwardError, Raw, check, or_panic, pointer, written};
use crate::native::shim_object::ShimObject;

unsafe extern "C" {
    fn kvtune_stream_new(index: c_int, out: *mut *mut c_void) -> c_int;
    fn kvtune_stream_free(stream: *mut c_void);
    fn kvtune_stream_copy(stream: *const c_void, to: Raw, from: Raw) -> c_int;
    fn kvtune_stream_enter(stream: *const c_void, out: *mut *mut c_void) -> c_int;
    fn kvtune_stream_leave(guard: *mut c_void);
    fn kvtune_stream_holds(stream: *const c_void, tensor: Raw) -> c_int;
    fn kvtune_event_record(stream: *const c_void, index: c_int, is_timed: c_int, out: *mut *mut c_void) -> c_int;
    fn kvtune_event_free(event: *mut c_void);
    fn kvtune_event_block(event: *const c_void, stream: *const c_void, index: c_int) -> c_int;
    fn kvtune_event_query(event: *const c_void, is_done: *mut c_int) -> c_int;
    fn kvtune_event_synchronize(event: *const c_void) -> c_int;
    fn kvtune_event_elapsed(from: *const c_void, to: *const c_void, milliseconds: *mut f64) -> c_int;
}

/// The host waits for all that a CUDA device was asked for; elsewhere it has been done already.
pub fn wait(device: Device) {
    if let Device::Cuda(index) = device {
        Cuda::synchronize(index as i64);
    }
}

/// A stream of a CUDA device beside the one on which it computes.
#[derive(Debug)]
pub struct SideStream {
    handle: ShimObject,
    index: c_int,
}

// SAFETY: the object is a device, a number and a kind, which nobody changes.
unsafe impl Send for SideStream {}
// SAFETY: as above; what is asked of it goes through CUDA's runtime, which takes calls from all threads.
unsafe impl Sync for SideStream {}

impl SideStream {
    pub fn new(index: usize) -> Self {
        let index = index as c_int;
        // SAFETY: a new object is written; the stream itself belongs to libtorch's pool.
        Self { handle: or_panic(unsafe { ShimObject::made(kvtune_stream_free, |out| kvtune_stream_new(index, out)) }), index }
    }

    /// Copies one tensor over another of the same kind, when the stream has done all that it was asked for before. The host goes on
    /// where its side is pinned memory. Whoever asks sees to it that neither is written, freed or read before.
    ///
    /// # Shapes
    /// Those of `to` and `from` are the same; one is on the device, the other on the host.
    pub fn copy(&self, to: &Tensor, from: &Tensor) {
        // SAFETY: handle and tensors are alive; the tensors' memory is the caller's to keep, as said above.
        or_panic(check(unsafe { kvtune_stream_copy(self.handle.get(), pointer(to), pointer(from)) }));
    }

    /// Keeps the device's allocator from using the memory of `tensor` again before the stream has done what it was asked for.
    ///
    /// # Shapes
    /// Any.
    pub fn holds(&self, tensor: &Tensor) {
        // SAFETY: handle and tensor are alive.
        or_panic(check(unsafe { kvtune_stream_holds(self.handle.get(), pointer(tensor)) }));
    }

    pub fn record(&self) -> CudaEvent {
        // SAFETY: the handle is alive.
        or_panic(unsafe { CudaEvent::recorded(self.handle.get(), self.index, false) })
    }

    /// What this thread computes goes to it from now on, until the guard is dropped. Guards stay on their thread, as a `ShimObject` goes to no
    /// other, and the last one is dropped first.
    pub(super) fn enter(&self) -> ShimObject {
        // SAFETY: the handle is alive, and a new guard is written.
        or_panic(unsafe { ShimObject::made(kvtune_stream_leave, |out| kvtune_stream_enter(self.handle.get(), out)) })
    }

    /// The computing stream waits for all that it was asked for; the host does not. An error is told by what is asked of the device next,
    /// not here, where somebody may be cleaning up after it.
    pub(super) fn join(&self) {
        // SAFETY: the handle is alive.
        if let Ok(event) = unsafe { CudaEvent::recorded(self.handle.get(), self.index, false) } {
            // SAFETY: the event is alive; no stream means the current one.
            let _ = check(unsafe { kvtune_event_block(event.0.get(), null(), self.index) });
        }
    }

    /// What it is asked for from now on waits for the event.
    pub fn wait(&self, event: &CudaEvent) {
        // SAFETY: both handles are alive.
        or_panic(check(unsafe { kvtune_event_block(event.0.get(), self.handle.get(), self.index) }));
    }
}

/// A point in the order of a stream's work, recorded once.
#[derive(Debug)]
pub struct CudaEvent(ShimObject);

// SAFETY: after it was recorded nothing changes it, and CUDA's runtime takes calls from all threads.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Behind all that this thread has asked `cuda:index` to compute; `is_timed` where [`Self::seconds_until`] will be asked.
    pub fn of_compute(index: usize, is_timed: bool) -> Self {
        // SAFETY: no stream means the current one.
        or_panic(unsafe { Self::recorded(null(), index as c_int, is_timed) })
    }

    /// # Safety
    /// `stream` is null or alive.
    unsafe fn recorded(stream: *const c_void, index: c_int, is_timed: bool) -> Result<Self, BackwardError> {
        // SAFETY: the caller's promise; a new event is written.
        unsafe { ShimObject::made(kvtune_event_free, |out| kvtune_event_record(stream, index, c_int::from(is_timed), out)) }
            .map(Self)
    }

    /// What this thread asks `cuda:index` to compute from now on waits for the event; the host does not.
    pub fn compute_waits(&self, index: usize) {
        // SAFETY: the handle is alive; no stream means the current one.
        or_panic(check(unsafe { kvtune_event_block(self.0.get(), null(), index as c_int) }));
    }

    /// Whether it has passed. A device that has failed does nothing more: its error is told by what is asked of it next, not here,
    /// where somebody may be cleaning up after it.
    pub fn is_done(&self) -> bool {
        // SAFETY: the handle is alive, and the number may be written.
        written(0, |is_done| unsafe { kvtune_event_query(self.0.get(), is_done) }).map_or(true, |is_done| is_done != 0)
    }

    pub fn finish(&self) {
        // SAFETY: the handle is alive.
        or_panic(check(unsafe { kvtune_event_synchronize(self.0.get()) }));
    }

    /// The device's time from this event to a later one. Both are timed and have passed.
    pub fn seconds_until(&self, later: &Self) -> f64 {
        // SAFETY: both handles are alive, and the number may be written.
        or_panic(written(0.0, |out| unsafe { kvtune_event_elapsed(self.0.get(), later.0.get(), out) })) * 1e-3
    }
}
