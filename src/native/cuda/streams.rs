//! A stream beside the one that computes, and events: how copies go on while a device computes, and neither the host nor the device
//! waits before it must.

use std::ffi::{c_int, c_void};
use std::ptr::{NonNull, null, null_mut};

use tch::{Cuda, Device, Tensor};
use torch_sys::C_tensor;

use crate::native::autograd::{check, or_panic, pointer, written};

unsafe extern "C" {
    fn kvtune_stream_new(index: c_int, out: *mut *mut c_void) -> c_int;
    fn kvtune_stream_free(stream: *mut c_void);
    fn kvtune_stream_copy(stream: *const c_void, to: *mut C_tensor, from: *mut C_tensor) -> c_int;
    fn kvtune_stream_enter(stream: *const c_void, out: *mut *mut c_void) -> c_int;
    fn kvtune_stream_leave(guard: *mut c_void);
    fn kvtune_stream_holds(stream: *const c_void, tensor: *mut C_tensor) -> c_int;
    fn kvtune_event_record(stream: *const c_void, index: c_int, is_timed: c_int, out: *mut *mut c_void) -> c_int;
    fn kvtune_event_free(event: *mut c_void);
    fn kvtune_event_block(event: *const c_void, stream: *const c_void, index: c_int) -> c_int;
    fn kvtune_event_query(event: *const c_void, is_done: *mut c_int) -> c_int;
    fn kvtune_event_synchronize(event: *const c_void) -> c_int;
    fn kvtune_event_elapsed(from: *const c_void, to: *const c_void, milliseconds: *mut f64) -> c_int;
}

/// What a call of the shim that fills in a pointer has made; a panic with libtorch's text where it could not.
fn made(call: impl FnOnce(*mut *mut c_void) -> c_int) -> NonNull<c_void> {
    // Without an error there is an object.
    NonNull::new(or_panic(written(null_mut(), call))).unwrap_or(NonNull::dangling())
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
    handle: NonNull<c_void>,
    index: c_int,
}

// SAFETY: the object is a device, a number and a kind, which nobody changes.
unsafe impl Send for SideStream {}
// SAFETY: as above; what is asked of it goes through CUDA's runtime, which takes calls from all threads.
unsafe impl Sync for SideStream {}

impl SideStream {
    pub fn new(index: usize) -> Self {
        let index = index as c_int;
        // SAFETY: the pointer may be written.
        Self { handle: made(|out| unsafe { kvtune_stream_new(index, out) }), index }
    }

    /// Copies one tensor over another of the same kind, when the stream has done all that it was asked for before. The host goes on
    /// where its side is pinned memory. Whoever asks sees to it that neither is written, freed or read before.
    ///
    /// # Shapes
    /// Those of `to` and `from` are the same; one is on the device, the other on the host.
    pub fn copy(&self, to: &Tensor, from: &Tensor) {
        // SAFETY: handle and tensors are alive; the tensors' memory is the caller's to keep, as said above.
        or_panic(check(unsafe { kvtune_stream_copy(self.handle.as_ptr(), pointer(to), pointer(from)) }));
    }

    /// Keeps the device's allocator from using the memory of `tensor` again before the stream has done what it was asked for.
    ///
    /// # Shapes
    /// Any.
    pub fn holds(&self, tensor: &Tensor) {
        // SAFETY: handle and tensor are alive.
        or_panic(check(unsafe { kvtune_stream_holds(self.handle.as_ptr(), pointer(tensor)) }));
    }

    pub fn record(&self) -> CudaEvent {
        // SAFETY: the handle is alive, and the pointer may be written.
        CudaEvent(made(|out| unsafe { kvtune_event_record(self.handle.as_ptr(), self.index, 0, out) }))
    }

    /// What this thread computes goes to it from now on, until the guard is dropped.
    pub(super) fn enter(&self) -> Entered {
        // SAFETY: the handle is alive, and the pointer may be written.
        Entered(made(|out| unsafe { kvtune_stream_enter(self.handle.as_ptr(), out) }))
    }

    /// The computing stream waits for all that it was asked for; the host does not. An error is told by what is asked of the device next,
    /// not here, where somebody may be cleaning up after it.
    pub(super) fn join(&self) {
        // SAFETY: the handle is alive, and the pointer may be written.
        let event = written(null_mut(), |out| unsafe { kvtune_event_record(self.handle.as_ptr(), self.index, 0, out) });
        if let Some(event) = event.ok().and_then(NonNull::new).map(CudaEvent) {
            // SAFETY: the event is alive; no stream means the current one.
            let _ = check(unsafe { kvtune_event_block(event.0.as_ptr(), null(), self.index) });
        }
    }

    /// What it is asked for from now on waits for the event.
    pub fn wait(&self, event: &CudaEvent) {
        // SAFETY: both handles are alive.
        or_panic(check(unsafe { kvtune_event_block(event.0.as_ptr(), self.handle.as_ptr(), self.index) }));
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: the handle came from `kvtune_stream_new` and is given back once; the stream itself belongs to libtorch's pool.
        unsafe { kvtune_stream_free(self.handle.as_ptr()) };
    }
}

/// A thread's stay on a side stream. Guards are dropped on their own thread, the last one first.
#[derive(Debug)]
pub(super) struct Entered(NonNull<c_void>);

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: the handle came from `kvtune_stream_enter` on this thread, as a `NonNull` goes to no other, and is given back once.
        unsafe { kvtune_stream_leave(self.0.as_ptr()) };
    }
}

/// A point in the order of a stream's work, recorded once.
#[derive(Debug)]
pub struct CudaEvent(NonNull<c_void>);

// SAFETY: after it was recorded nothing changes it, and CUDA's runtime takes calls from all threads.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Behind all that the stream on which this thread computes was asked for on `cuda:index`; `is_timed` where
    /// [`Self::seconds_until`] will be asked.
    pub fn of_compute(index: usize, is_timed: bool) -> Self {
        // SAFETY: no stream means the current one; the pointer may be written.
        Self(made(|out| unsafe { kvtune_event_record(null(), index as c_int, c_int::from(is_timed), out) }))
    }

    /// What this thread asks `cuda:index` to compute from now on waits for the event; the host does not.
    pub fn compute_waits(&self, index: usize) {
        // SAFETY: the handle is alive; no stream means the current one.
        or_panic(check(unsafe { kvtune_event_block(self.0.as_ptr(), null(), index as c_int) }));
    }

    /// Whether it has passed. A device that has failed does nothing more: its error is told by what is asked of it next, not here,
    /// where somebody may be cleaning up after it.
    pub fn is_done(&self) -> bool {
        // SAFETY: the handle is alive, and the number may be written.
        written(0, |is_done| unsafe { kvtune_event_query(self.0.as_ptr(), is_done) }).map_or(true, |is_done| is_done != 0)
    }

    pub fn finish(&self) {
        // SAFETY: the handle is alive.
        or_panic(check(unsafe { kvtune_event_synchronize(self.0.as_ptr()) }));
    }

    /// The device's time from this event to a later one. Both are timed and have passed.
    pub fn seconds_until(&self, later: &Self) -> f64 {
        // SAFETY: both handles are alive, and the number may be written.
        or_panic(written(0.0, |out| unsafe { kvtune_event_elapsed(self.0.as_ptr(), later.0.as_ptr(), out) })) * 1e-3
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: the handle came from `kvtune_event_record` and is given back once.
        unsafe { kvtune_event_free(self.0.as_ptr()) };
    }
}
