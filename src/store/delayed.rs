//! Copies that come as late as they may: a copier for tests, which makes a missing wait, or a range that is written too early, wrong
//! numbers.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

use super::copier::{Copier, CopyMark, CopyStream};
use super::{Store, Waiting};
use crate::native::locked;
use crate::recipe::StoreForm;
use crate::units::Seconds;

/// What becomes of the waits for a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum WaitFault {
    #[default]
    Kept,
    /// The device reads what is there: a fault.
    Lost,
}

thread_local! {
    static COPIER: RefCell<Option<Arc<DelayedCopier>>> = const { RefCell::new(None) };
}

/// Runs `body`, a step for example, as on a device that copies beside what it computes, with copies that are as late as they may be. The
/// CPU's backward runs on the calling thread, so a thread-local reaches all of it.
pub(crate) fn with_delayed_copies<T>(waits: WaitFault, body: impl FnOnce() -> T) -> T {
    COPIER.set(Some(Arc::new(DelayedCopier { waits, ..DelayedCopier::default() })));
    let result = body();
    COPIER.set(None);
    result
}

/// Who copies for this thread, whatever the device.
pub(super) fn copier() -> Option<Arc<dyn Copier>> {
    COPIER.with_borrow(|late| late.clone().map(|late| late as Arc<dyn Copier>))
}

/// How many copies of this thread's late copier are under way.
pub(crate) fn copies_in_flight() -> usize {
    let count = |late: &Arc<DelayedCopier>| locked(&late.streams).iter().map(|queue| queue.jobs.len()).sum();
    COPIER.with_borrow(|late| late.as_ref().map_or(0, count))
}

/// Keeps copies until somebody waits for them. What its device (the CPU) computes is done at once, so that all that a copy may rely on
/// is there when it is asked for, and nothing that it must wait for is.
#[derive(Debug, Default)]
struct DelayedCopier {
    streams: Mutex<[Queue; 2]>,
    waits: WaitFault,
}

#[derive(Debug, Default)]
struct Queue {
    asked: u64,
    done: u64,
    jobs: VecDeque<Job>,
}

#[derive(Debug)]
struct Job {
    copies: Vec<(Tensor, Tensor)>,
    after: Vec<CopyMark>,
}

/// Makes the next copy of a stream, and whatever that has to wait for.
fn advance(streams: &mut [Queue; 2], stream: CopyStream) {
    let Some(job) = streams[stream as usize].jobs.pop_front() else { return };
    job.after.iter().for_each(|&mark| finish(streams, mark));
    job.copies.iter().for_each(|(to, from)| to.shallow_clone().copy_(from));
    streams[stream as usize].done += 1;
}

fn finish(streams: &mut [Queue; 2], mark: CopyMark) {
    let (stream, number) = mark.place();
    while streams[stream as usize].done < number {
        advance(streams, stream);
    }
}

impl Copier for DelayedCopier {
    fn start(&self, stream: CopyStream, copies: &[(&Tensor, &Tensor)], after: &[CopyMark]) -> CopyMark {
        if stream == CopyStream::ToDevice {
            // What is read before it has come is wrong.
            for (to, _) in copies {
                let _ = to.view_dtype(Kind::Uint8).fill_(0x7f);
            }
        }
        let copies = copies.iter().map(|(to, from)| (to.shallow_clone(), from.shallow_clone())).collect();
        let queue = &mut locked(&self.streams)[stream as usize];
        queue.jobs.push_back(Job { copies, after: after.to_vec() });
        queue.asked += 1;
        CopyMark::new(stream, queue.asked)
    }

    fn wait(&self, mark: CopyMark) {
        if self.waits == WaitFault::Kept {
            self.finish(mark);
        }
    }

    fn finish(&self, mark: CopyMark) {
        // The streams stay locked: threads that share a room may finish each other's copies, and a stream has an order.
        finish(&mut locked(&self.streams), mark);
    }

    fn is_done(&self, mark: CopyMark) -> bool {
        let (stream, number) = mark.place();
        locked(&self.streams)[stream as usize].done >= number
    }

    fn drain(&self) {
        let streams = &mut *locked(&self.streams);
        for stream in [CopyStream::ToHost, CopyStream::ToDevice] {
            let last = CopyMark::new(stream, streams[stream as usize].asked);
            finish(streams, last);
        }
    }

    fn waited(&self) -> Option<Seconds> {
        Some(Seconds(0.0))
    }
}

/// What is done next; the numbers choose among what there is.
#[derive(Clone, Copy, Debug)]
enum CopyAction {
    /// Tensors of so many rows.
    Put(i64),
    SetOut(usize),
    Arrive(usize),
    /// The room is given back, whatever is under way.
    Free(usize),
    /// A stream gets on by itself.
    Advance(CopyStream),
    /// All that is under way comes to its end.
    Drain,
}

fn actions() -> impl Strategy<Value = Vec<CopyAction>> {
    let one = prop_oneof![
        4 => (1i64..40).prop_map(CopyAction::Put),
        3 => (0usize..64).prop_map(CopyAction::SetOut),
        2 => (0usize..64).prop_map(CopyAction::Arrive),
        3 => (0usize..64).prop_map(CopyAction::Free),
        1 => prop_oneof![Just(CopyAction::Advance(CopyStream::ToHost)), Just(CopyAction::Advance(CopyStream::ToDevice)), Just(CopyAction::Drain)],
    ];
    prop::collection::vec(one, 1..80)
}

/// Two tensors that no other number gives.
fn tensors(number: i64, rows: i64) -> Vec<Tensor> {
    let whole = Tensor::arange(rows * 32, (Kind::Int64, Device::Cpu)) + number * 100_000;
    vec![whole.to_kind(Kind::Float).view([rows, 32]), whole.narrow(0, 0, rows).to_kind(Kind::Int)]
}

/// The same through a store that copies at once.
fn at_once(form: StoreForm, number: i64, rows: i64) -> Vec<Tensor> {
    Store::in_memory(form).offload(&tensors(number, rows)).unwrap().wait(Device::Cpu).unwrap()
}

/// Number and rows of tensors, and where they wait.
type Numbered = (i64, i64, Waiting<Vec<Tensor>>);

/// Plays the actions; returns whether every tensor came back as it would at once.
fn all_come_back(form: StoreForm, copier: &Arc<DelayedCopier>, actions: &[CopyAction]) -> bool {
    let store = Store::copied_by(form, copier.clone());
    let (mut parked, mut ahead): (Vec<Numbered>, Vec<Numbered>) = (Vec::new(), Vec::new());
    let mut is_right = true;
    let set_out = |(number, rows, waiting): &Numbered| {
        let mut copy = waiting.clone();
        copy.leave(Device::Cpu).unwrap();
        (*number, *rows, copy)
    };
    let mut wait = |(number, rows, mut ahead): Numbered| {
        let found = ahead.wait(Device::Cpu).unwrap();
        is_right &= found.iter().zip(&at_once(form, number, rows)).all(|(found, expected)| found.equal(expected));
    };
    for (number, action) in actions.iter().enumerate() {
        match *action {
            CopyAction::Put(rows) => {
                parked.push((number as i64, rows, store.offload(&tensors(number as i64, rows)).unwrap()));
            }
            CopyAction::SetOut(which) if !parked.is_empty() => ahead.push(set_out(&parked[which % parked.len()])),
            CopyAction::Arrive(which) if !ahead.is_empty() => wait(ahead.swap_remove(which % ahead.len())),
            CopyAction::Free(which) if !parked.is_empty() => drop(parked.swap_remove(which % parked.len())),
            CopyAction::Advance(stream) => advance(&mut locked(&copier.streams), stream),
            CopyAction::Drain => copier.drain(),
            _ => {}
        }
    }
    ahead.extend(parked.iter().map(set_out));
    ahead.into_iter().for_each(&mut wait);
    drop(parked);
    is_right && store.bytes().in_use.0 == 0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn whatever_comes_late_comes_right(actions in actions(), is_plain: bool) {
        let form = if is_plain { StoreForm::Plain } else { StoreForm::Int8 };
        prop_assert!(all_come_back(form, &Arc::default(), &actions));
    }
}

#[test]
fn room_that_was_given_back_waits_for_the_copies_from_it() {
    let copier = Arc::<DelayedCopier>::default();
    let store = Store::copied_by(StoreForm::Plain, copier.clone());
    let a = tensors(1, 8);
    let mut first = store.offload(&a).unwrap();
    first.leave(Device::Cpu).unwrap();
    let c = tensors(2, 8);
    let second = store.offload(&c).unwrap();
    assert_eq!(store.bytes().most, second.bytes_in_store(), "the same room");
    // The second comes first, as far as it may.
    advance(&mut locked(&copier.streams), CopyStream::ToHost);
    advance(&mut locked(&copier.streams), CopyStream::ToHost);
    assert!(first.wait(Device::Cpu).unwrap()[0].equal(&a[0]));
    assert!(second.fetch(Device::Cpu).unwrap()[0].equal(&c[0]));
}

#[test]
fn what_has_not_arrived_is_not_there() {
    let store = Store::copied_by(StoreForm::Plain, Arc::<DelayedCopier>::default());
    let a = tensors(3, 4);
    let mut waiting = store.offload(&a).unwrap();
    waiting.prefetch(Device::Cpu).unwrap();
    assert!(!waiting.tensors_ahead()[0].equal(&a[0]), "the copier is late");
    assert!(waiting.wait(Device::Cpu).unwrap()[0].equal(&a[0]));
}

#[test]
fn what_is_drained_has_come_and_is_kept_for_nobody() {
    let copier = Arc::<DelayedCopier>::default();
    let store = Store::copied_by(StoreForm::Plain, copier.clone());
    let a = tensors(5, 4);
    let mut waiting = store.offload(&a).unwrap();
    waiting.prefetch(Device::Cpu).unwrap();
    let count = || locked(&copier.streams).each_ref().map(|queue| queue.jobs.len());
    assert_eq!(count(), [1, 1]);
    copier.drain();
    assert_eq!(count(), [0, 0]);
    assert!(waiting.tensors_ahead()[0].equal(&a[0]), "nobody had to wait for it");
    let (ahead, again) = (waiting.wait(Device::Cpu).unwrap(), waiting.fetch(Device::Cpu).unwrap());
    assert!(ahead[1].equal(&a[1]) && again[0].equal(&a[0]));
}
