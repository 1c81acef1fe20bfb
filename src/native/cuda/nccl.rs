//! NCCL by its C API, opened at run time: sums and copies of tensors between the GPUs of ranks, on a stream of their own.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use libloading::os::unix::RTLD_LOCAL;
use tch::{Device, Kind, Tensor};

use super::driver::launch_stream;
use super::libraries::{Companion, dotted};
use super::load::{functions, open_library};
use super::streams::{CudaEvent, SideStream};
use crate::native::ranks::{PendingExchange, Said};

type Communicator = *mut c_void;
type Stream = *mut c_void;

/// The number of `ncclSum` in NCCL's header.
const SUM: c_int = 0;
/// How long the host sleeps between two looks at a call under way.
const LOOK: Duration = Duration::from_micros(100);

/// What the ranks of one group find each other by: made by one, known to all.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NcclId(pub [u8; 128]);

functions! {
    /// What is asked of the library, as `nccl.h` declares it. All but the last two return 0, or the number of an error.
    struct NcclCalls {
        version = c"ncclGetVersion": unsafe extern "C" fn(*mut c_int) -> c_int,
        id = c"ncclGetUniqueId": unsafe extern "C" fn(*mut NcclId) -> c_int,
        init = c"ncclCommInitRank": unsafe extern "C" fn(*mut Communicator, c_int, NcclId, c_int) -> c_int,
        all_reduce = c"ncclAllReduce": unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, Stream) -> c_int,
        broadcast = c"ncclBroadcast": unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Communicator, Stream) -> c_int,
        async_error = c"ncclCommGetAsyncError": unsafe extern "C" fn(Communicator, *mut c_int) -> c_int,
        destroy = c"ncclCommDestroy": unsafe extern "C" fn(Communicator) -> c_int,
        abort = c"ncclCommAbort": unsafe extern "C" fn(Communicator) -> c_int,
        last_error = c"ncclGetLastError": unsafe extern "C" fn(Communicator) -> *const c_char,
        error_string = c"ncclGetErrorString": unsafe extern "C" fn(c_int) -> *const c_char,
    }
}

/// The library, which stays open as long as the process lives.
pub struct Nccl {
    calls: NcclCalls,
    /// The library's version, as `2.28.9`.
    pub version: String,
}

impl Nccl {
    /// Opens the library of `path`, or where it is found otherwise: as `KVTUNE_NCCL` says, beside libtorch, or where the loader looks.
    pub fn open(path: Option<&std::path::Path>) -> Said<Arc<Self>> {
        let path = path.map_or_else(|| Companion::Nccl.path(), |path| Ok(path.to_owned()))?;
        // SAFETY: the types are those of nccl.h.
        let calls = unsafe { NcclCalls::find(open_library(&path, RTLD_LOCAL)?)? };
        let mut number = 0;
        // SAFETY: the number may be written.
        calls.check("ncclGetVersion", unsafe { (calls.version)(&raw mut number) }, null_mut())?;
        Ok(Arc::new(Self { calls, version: dotted(usize::try_from(number).unwrap_or(0)) }))
    }

    pub fn new_id(&self) -> Said<NcclId> {
        let mut id = NcclId([0; 128]);
        // SAFETY: the id may be written.
        self.calls.check("ncclGetUniqueId", unsafe { (self.calls.id)(&raw mut id) }, null_mut())?;
        Ok(id)
    }

    /// Waits until all ranks have come, this one with its GPU. In tests the device may be the CPU, for a library that knows no GPUs.
    pub fn join(self: &Arc<Self>, id: NcclId, rank: usize, size: usize, device: Device) -> Said<NcclGroup> {
        let stream = if let Device::Cuda(index) = device { Some(SideStream::new(index)) } else { None };
        // Its GPU is that of the thread.
        let _entered = stream.as_ref().map(SideStream::enter);
        let mut communicator = null_mut();
        // SAFETY: the pointer may be written; id and numbers are passed by value.
        let code = unsafe { (self.calls.init)(&raw mut communicator, size as c_int, id, rank as c_int) };
        self.calls.check("ncclCommInitRank", code, null_mut())?;
        Ok(NcclGroup { nccl: self.clone(), communicator: Cell::new(communicator), device, stream })
    }
}

impl NcclCalls {
    fn check(&self, what: &str, code: c_int, of: Communicator) -> Said<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: no communicator means any.
        let texts = unsafe { [(self.error_string)(code), (self.last_error)(of)] };
        let [error, last] = texts.map(|text| {
            if text.is_null() {
                return String::new();
            }
            // SAFETY: the library's strings end with a zero, and stay until the thread's next call.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().replace('\n', " ")
        });
        let more = if last.is_empty() { String::new() } else { format!(": {last}") };
        Err(format!("`{what}` says {error} (error {code}){more}"))
    }
}

/// The GPUs of all ranks. All make the same calls in the same order.
pub struct NcclGroup {
    nccl: Arc<Nccl>,
    /// Null once it is closed.
    communicator: Cell<Communicator>,
    pub device: Device,
    /// Absent where the device is no GPU.
    stream: Option<SideStream>,
}

// SAFETY: NCCL lets any thread call, one at a time; a cell goes to no two threads.
unsafe impl Send for NcclGroup {}

impl NcclGroup {
    /// Begins a sum over all ranks in the memory of `tensor`, which lies in one piece.
    ///
    /// # Shapes
    /// Any, the same on all ranks.
    pub fn sum(&self, tensor: &Tensor) -> Said<NcclWork<'_>> {
        let (data, kind) = (tensor.data_ptr(), kind_of(tensor.kind())?);
        // SAFETY: as many numbers of this type, which `begin` keeps from being used elsewhere; a communicator and a stream that are alive.
        self.begin("ncclAllReduce", tensor, |comm, stream| unsafe {
            (self.nccl.calls.all_reduce)(data, data, tensor.numel(), kind, SUM, comm, stream)
        })
    }

    /// Begins to overwrite `tensor`, which lies in one piece, with that of the rank `from`.
    ///
    /// # Shapes
    /// Any, the same on all ranks.
    pub fn broadcast(&self, tensor: &Tensor, from: usize) -> Said<NcclWork<'_>> {
        let (data, kind) = (tensor.data_ptr(), kind_of(tensor.kind())?);
        // SAFETY: as in `sum`.
        self.begin("ncclBroadcast", tensor, |comm, stream| unsafe {
            (self.nccl.calls.broadcast)(data, data, tensor.numel(), kind, from as c_int, comm, stream)
        })
    }

    /// Asks the group's stream for a call, behind all that the device was asked for; what is computed next waits for it.
    fn begin(&self, what: &str, tensor: &Tensor, call: impl FnOnce(Communicator, Stream) -> c_int) -> Said<NcclWork<'_>> {
        let communicator = self.communicator.get();
        if communicator.is_null() {
            return Err("the GPUs are not connected any more".to_owned());
        }
        let check = |code| self.nccl.calls.check(what, code, communicator);
        let (Device::Cuda(index), Some(stream)) = (self.device, &self.stream) else {
            check(call(communicator, null_mut()))?;
            return Ok(NcclWork { group: self, passed: None });
        };
        stream.wait(&CudaEvent::of_compute(index, false));
        stream.holds(tensor);
        {
            let _entered = stream.enter();
            check(call(communicator, launch_stream(index)?))?;
        }
        let passed = stream.record();
        passed.compute_waits(index);
        Ok(NcclWork { group: self, passed: Some(passed) })
    }

    /// Ends the connections; where `in_order` is false, without waiting for what is under way, which may never end.
    pub fn close(&self, in_order: bool) {
        let communicator = self.communicator.replace(null_mut());
        if !communicator.is_null() {
            let close = if in_order { self.nccl.calls.destroy } else { self.nccl.calls.abort };
            // SAFETY: it was made by `ncclCommInitRank`, and is null from now on. Whatever comes of it, nothing more is asked of it.
            let _ = unsafe { close(communicator) };
        }
    }
}

pub struct NcclWork<'a> {
    group: &'a NcclGroup,
    /// Behind it; none without a GPU, where it has ended.
    passed: Option<CudaEvent>,
}

impl PendingExchange for NcclWork<'_> {
    fn wait(&self, time: Duration) -> Said<bool> {
        let (calls, communicator, until) = (&self.group.nccl.calls, self.group.communicator.get(), Instant::now() + time);
        loop {
            let is_done = self.passed.as_ref().is_none_or(CudaEvent::is_done);
            let mut error = 0;
            // SAFETY: a communicator that is alive while the group is used, and a number that may be written.
            calls.check("ncclCommGetAsyncError", unsafe { (calls.async_error)(communicator, &raw mut error) }, communicator)?;
            calls.check("a call under way", error, communicator)?;
            if is_done || Instant::now() >= until {
                return Ok(is_done);
            }
            sleep(LOOK);
        }
    }
}

fn kind_of(kind: Kind) -> Said<c_int> {
    Ok(match kind {
        Kind::Uint8 => 1,
        Kind::Half => 6,
        Kind::Float => 7,
        Kind::Double => 8,
        Kind::BFloat16 => 9,
        other => return Err(format!("NCCL has no numbers of the kind {other:?}")),
    })
}
