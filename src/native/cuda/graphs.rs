//! CUDA graphs: operations that are captured once, and from then on launched as one. A device whose operations are short is otherwise
//! kept waiting by the host, which launches each of them.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use tch::{Device, Kind, Tensor};

use super::allocator::release_cached_memory;
use super::streams::{CudaEvent, SideStream};
use crate::native::at_end::AtEnd;
use crate::native::autograd::{BackwardError, SILENT, check, or_panic, panic_text, written};
use crate::native::locked;
use crate::native::shim_object::ShimObject;

unsafe extern "C" {
    fn kvtune_graph_pool(out: *mut u64) -> c_int;
    fn kvtune_graph_begin(pool: *const u64, out: *mut *mut c_void) -> c_int;
    fn kvtune_graph_end(graph: *mut c_void) -> c_int;
    fn kvtune_graph_replay(graph: *mut c_void) -> c_int;
    fn kvtune_graph_free(graph: *mut c_void);
}

/// Nothing can be captured; why.
#[derive(Clone, Debug)]
pub enum GraphError {
    Lacking(String),
    Failed(String),
}

impl fmt::Display for GraphError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lacking(what) => write!(f, "no CUDA graph can be captured: {what}"),
            Self::Failed(why) => write!(f, "a CUDA graph was not captured: {why}"),
        }
    }
}

impl From<BackwardError> for GraphError {
    fn from(error: BackwardError) -> Self {
        Self::Failed(error.0)
    }
}

static REPLAYS: AtomicU64 = AtomicU64::new(0);

pub fn graph_replays() -> u64 {
    REPLAYS.load(Ordering::Relaxed)
}

/// One thread captures at a time, as there is one stream.
static CAPTURING: Mutex<()> = Mutex::new(());

/// Recorders by index of the device, or why there is none: where a capture could not be ended the allocator still waits for its end.
static RECORDERS: Mutex<BTreeMap<usize, Result<&'static GraphRecorder, GraphError>>> = Mutex::new(BTreeMap::new());

/// Captures graphs of a device that are launched one after the other, on the stream that computes. It lives as long as the process: cuBLAS
/// has a workspace for each stream, and a pool of memory is kept by the allocator but given to nobody once its last graph is gone, so that
/// whoever captured next would take another one. One pool serves all graphs, as they run one after the other.
#[derive(Debug)]
pub struct GraphRecorder {
    index: usize,
    stream: SideStream,
    pool: [u64; 2],
}

impl GraphRecorder {
    /// The recorder of the device `cuda:index`; `Err` says what libtorch lacks, or what a capture has failed with before.
    pub fn of(index: usize) -> Result<&'static Self, GraphError> {
        locked(&RECORDERS).entry(index).or_insert_with(|| Self::first(index)).clone()
    }

    /// A device's recorder, with a graph that stays in the pool for ever: a pool that no graph uses any more is marked to be freed, and the
    /// allocator refuses to begin in it again.
    fn first(index: usize) -> Result<&'static Self, GraphError> {
        // SAFETY: there is room for the two numbers that are written.
        let pool = written([0; 2], |pool| unsafe { kvtune_graph_pool(pool.cast()) });
        let pool = pool.map_err(|error| GraphError::Lacking(error.0))?;
        let recorder: &'static Self = Box::leak(Box::new(Self { index, stream: SideStream::new(index), pool }));
        let mut zero = Tensor::zeros([1], (Kind::Float, Device::Cuda(index)));
        let anchor = recorder.captured(|| drop(zero.zero_()))?;
        std::mem::forget((anchor, zero));
        Ok(recorder)
    }

    /// Does `work`, then captures it. What it reads and writes beside tensors of its own must be there at every replay, under the same
    /// addresses, and the host's part of it must have no other effect, as it is done twice now (or three times, where memory is short)
    /// and at no replay. After an `Err` nothing more is captured on the device. It panics as `work` does.
    pub fn capture(&self, work: impl FnMut()) -> Result<Graph, GraphError> {
        let captured = self.captured(work);
        if let Err(reason) = &captured {
            locked(&RECORDERS).insert(self.index, Err(reason.clone()));
        }
        captured
    }

    fn captured(&self, mut work: impl FnMut()) -> Result<Graph, GraphError> {
        let _alone = locked(&CAPTURING);
        // The stream of captures is the current one, behind all that was asked of the stream that computes; at the end that one is current
        // again, and waits for what was asked meanwhile.
        self.stream.wait(&CudaEvent::of_compute(self.index, false));
        let mut entered = Some(self.stream.enter());
        let _end = AtEnd(|| {
            drop(entered.take());
            self.stream.join();
        });
        // Libraries are loaded, and workspaces taken, outside of the graph.
        work();
        if let Ok(graph) = self.attempt(&mut work)? {
            return Ok(graph);
        }
        // Within a capture the allocator gives nothing back that it holds free.
        release_cached_memory(Device::Cuda(self.index));
        self.attempt(&mut work)?.map_err(|panic| resume_unwind(panic))
    }

    /// One capture. What `work` has panicked with, or what was short of memory, may be tried once more.
    fn attempt(&self, work: &mut dyn FnMut()) -> Result<thread::Result<Graph>, GraphError> {
        let graph = Graph::begin(self.pool)?;
        match (catch_unwind(AssertUnwindSafe(work)), graph.ended()) {
            (done, Ok(graph)) => Ok(done.map(|()| graph)),
            // It is made ready at its end, when the allocator has ended its own part.
            (Ok(()), Err(end)) if end.0.contains("out of memory") => Ok(Err(Box::new(end.0))),
            (Ok(()), Err(end)) => Err(end.into()),
            // The end says no more than that something has failed before.
            (Err(panic), Err(end)) => Err(GraphError::Failed(format!("{}; {}", panic_text(&*panic).unwrap_or(SILENT), end.0))),
        }
    }
}

#[derive(Debug)]
pub struct Graph(ShimObject);

impl Graph {
    /// From now on what this thread asks its stream for is captured, and not done.
    fn begin(pool: [u64; 2]) -> Result<Self, BackwardError> {
        // SAFETY: two numbers are read, and a new graph is written. When it is dropped, what is still being done of it is done to its end.
        unsafe { ShimObject::made(kvtune_graph_free, |out| kvtune_graph_begin(pool.as_ptr(), out)) }.map(Self)
    }

    /// The end of the capture, on the stream on which it began. Where it fails the allocator may go on asking the graph whether it still
    /// captures, so that it must not go.
    fn ended(self) -> Result<Self, BackwardError> {
        // SAFETY: the graph is alive, and this thread computes on the stream on which its capture began.
        match check(unsafe { kvtune_graph_end(self.0.get()) }) {
            Ok(()) => Ok(self),
            Err(error) => {
                std::mem::forget(self);
                Err(error)
            }
        }
    }

    /// Asks the device to do them once more, on the stream on which this thread computes; the host does not wait.
    pub fn replay(&self) {
        REPLAYS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the graph is alive, and its capture has ended well.
        or_panic(check(unsafe { kvtune_graph_replay(self.0.get()) }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_cudas_half_the_reason_is_told_each_time() {
        if tch::Cuda::is_available() {
            eprintln!("skipped: a CUDA device is there");
            return;
        }
        for _ in 0..2 {
            let reason = GraphRecorder::of(0).err();
            assert!(matches!(&reason, Some(GraphError::Lacking(text)) if text.contains("this libtorch has no")), "{reason:?}");
        }
    }
}
