//! Copies between a device and the host that go beside its computing: who asks for one goes on, and waits where the copy is first
//! needed, if it has not come by then.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard};

use tch::{Device, Tensor};

use crate::native::cuda::{CudaEvent, SideStream};
use crate::native::locked;
use crate::units::Seconds;

/// One of two streams, by its direction. The copies of one go on in their order; the two go on beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyStream {
    ToHost,
    ToDevice,
}

/// A point in the order of a stream: the end of some copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyMark {
    stream: CopyStream,
    number: u64,
}

impl CopyMark {
    /// The end of copies that were done at once.
    pub(super) const PAST: Self = Self { stream: CopyStream::ToHost, number: 0 };

    #[cfg(test)]
    pub(super) fn new(stream: CopyStream, number: u64) -> Self {
        Self { stream, number }
    }

    #[cfg(test)]
    pub(super) fn place(self) -> (CopyStream, u64) {
        (self.stream, self.number)
    }
}

pub trait Copier: Debug + Send + Sync {
    /// Asks for copies, each of a tensor (second) over another of the same size and kind (first). They begin when the device has
    /// computed what it was asked for so far, and when what `after` marks is done. What is copied must not be written, nor the target
    /// read or written, before the mark; dropping either is safe, but the host's side is the caller's to keep.
    fn start(&self, stream: CopyStream, copies: &[(&Tensor, &Tensor)], after: &[CopyMark]) -> CopyMark;

    /// What the device is asked to compute from now on waits for the mark; the host does not.
    fn wait(&self, mark: CopyMark);

    fn finish(&self, mark: CopyMark);

    fn is_done(&self, mark: CopyMark) -> bool;

    /// The host waits for all copies, and nothing is kept for their sake any more: after a failure nobody else may come to wait for them.
    fn drain(&self);

    fn measure(&self, _is_on: bool) {}

    /// How long the device has waited for marks since it was asked last; `None` where nothing ever waits. It must have done all that was asked.
    fn waited(&self) -> Option<Seconds> {
        None
    }
}

/// Whether copies between the host and a device go on beside what it computes.
pub fn copies_are_async(device: Device) -> bool {
    #[cfg(test)]
    if super::delayed::copier().is_some() {
        return true;
    }
    device != Device::Cpu
}

/// Copiers by the index of their CUDA device.
static OF_DEVICES: Mutex<Option<HashMap<usize, Arc<StreamCopier>>>> = Mutex::new(None);

/// There is one for each device.
pub fn copier_of(device: Device) -> Arc<dyn Copier> {
    #[cfg(test)]
    if let Some(late) = super::delayed::copier() {
        return late;
    }
    let Device::Cuda(index) = device else { return Arc::new(BlockingCopier) };
    let mut all = locked(&OF_DEVICES);
    all.get_or_insert_default().entry(index).or_insert_with(|| Arc::new(StreamCopier::new(index))).clone()
}

/// Copies while the host waits: on a CPU there is nobody else to do it.
#[derive(Debug)]
struct BlockingCopier;

impl Copier for BlockingCopier {
    fn start(&self, _lane: CopyStream, copies: &[(&Tensor, &Tensor)], _after: &[CopyMark]) -> CopyMark {
        for (to, from) in copies {
            to.shallow_clone().copy_(from);
        }
        CopyMark::PAST
    }

    fn wait(&self, _mark: CopyMark) {}

    fn finish(&self, _mark: CopyMark) {}

    fn is_done(&self, _mark: CopyMark) -> bool {
        true
    }

    fn drain(&self) {}
}

/// Copies by two streams of a CUDA device, one for each direction.
#[derive(Debug)]
struct StreamCopier {
    index: usize,
    streams: [Mutex<StreamState>; 2],
    /// The device's waits, while they are measured: events before and behind each.
    waits: Mutex<Option<Vec<(CudaEvent, CudaEvent)>>>,
}

#[derive(Debug)]
struct StreamState {
    beside: SideStream,
    /// The number of the copies that were asked for last.
    last: u64,
    /// Copies that may still be running, in their order.
    under_way: VecDeque<InFlight>,
}

#[derive(Debug)]
struct InFlight {
    number: u64,
    done: Arc<CudaEvent>,
    /// Targets on the device. They were allocated for the stream that computes, which might be given their memory again as soon as
    /// they are dropped: they stay until it has been told to wait for the copy.
    targets: Vec<Tensor>,
}

impl StreamCopier {
    fn new(index: usize) -> Self {
        let state = || Mutex::new(StreamState { beside: SideStream::new(index), last: 0, under_way: VecDeque::new() });
        Self { index, streams: [state(), state()], waits: Mutex::default() }
    }

    fn state(&self, stream: CopyStream) -> MutexGuard<'_, StreamState> {
        locked(&self.streams[stream as usize])
    }

    /// The event of a mark; `None` where it has passed.
    fn event(&self, mark: CopyMark) -> Option<Arc<CudaEvent>> {
        let stream = self.state(mark.stream);
        let event = stream.under_way.iter().find(|copy| copy.number == mark.number).map(|copy| copy.done.clone());
        drop(stream);
        event.filter(|event| !event.is_done())
    }

    /// Lets go of the targets up to a mark, for which somebody waits or has waited.
    fn let_go(&self, mark: CopyMark) {
        let mut stream = self.state(mark.stream);
        // To the host nothing is kept for its sake, and others may still have to ask for the event.
        if mark.stream == CopyStream::ToDevice {
            stream.under_way.iter_mut().take_while(|copy| copy.number <= mark.number).for_each(|copy| copy.targets.clear());
        }
        stream.sweep();
    }
}

impl StreamState {
    fn sweep(&mut self) {
        while self.under_way.front().is_some_and(|copy| copy.done.is_done()) {
            self.under_way.pop_front();
        }
    }
}

impl Copier for StreamCopier {
    fn start(&self, stream: CopyStream, copies: &[(&Tensor, &Tensor)], after: &[CopyMark]) -> CopyMark {
        // What is in pieces is put together by the device before.
        let copies: Vec<(&Tensor, Tensor)> = copies.iter().map(|(to, from)| (*to, from.contiguous())).collect();
        let computed = CudaEvent::of_compute(self.index, false);
        // Asked before the stream is locked: they may be of the same.
        let after: Vec<Arc<CudaEvent>> = after.iter().filter_map(|mark| self.event(*mark)).collect();
        let mut own = self.state(stream);
        own.sweep();
        own.beside.wait(&computed);
        for event in &after {
            own.beside.wait(event);
        }
        for (to, from) in &copies {
            own.beside.copy(to, from);
            if stream == CopyStream::ToHost {
                own.beside.holds(from);
            }
        }
        own.last += 1;
        let targets = copies.iter().filter(|_| stream == CopyStream::ToDevice).map(|(to, _)| to.shallow_clone()).collect();
        let (number, done) = (own.last, Arc::new(own.beside.record()));
        own.under_way.push_back(InFlight { number, done, targets });
        CopyMark { stream, number }
    }

    fn wait(&self, mark: CopyMark) {
        if let Some(event) = self.event(mark) {
            let mut waits = locked(&self.waits);
            let before = waits.is_some().then(|| CudaEvent::of_compute(self.index, true));
            event.compute_waits(self.index);
            if let Some((waits, before)) = waits.as_mut().zip(before) {
                waits.push((before, CudaEvent::of_compute(self.index, true)));
            }
        }
        self.let_go(mark);
    }

    fn finish(&self, mark: CopyMark) {
        if let Some(event) = self.event(mark) {
            event.finish();
        }
        self.let_go(mark);
    }

    fn is_done(&self, mark: CopyMark) -> bool {
        self.event(mark).is_none()
    }

    fn drain(&self) {
        for stream in &self.streams {
            let mut stream = locked(stream);
            // A stream runs in order, so all copies before this one are done too.
            if let Some(last) = stream.under_way.back() {
                last.done.finish();
            }
            stream.under_way.clear();
        }
    }

    fn measure(&self, is_on: bool) {
        *locked(&self.waits) = is_on.then(Vec::new);
    }

    fn waited(&self) -> Option<Seconds> {
        let around = locked(&self.waits).as_mut().map(std::mem::take).unwrap_or_default();
        Some(Seconds(around.iter().map(|(before, behind)| before.seconds_until(behind).max(0.0)).sum()))
    }
}
