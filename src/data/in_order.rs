//! Work on all cores whose results are consumed in order: one thread makes pieces, several work on them, and none waits for all of them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread;

use crate::native::{locked, usable_cpus};

/// Pieces under way for each thread that works: enough that none waits, and few enough for any memory.
const AHEAD: usize = 4;

/// Hands what `produce` makes on a thread of its own to `work` on all cores, and what comes of it to `consume`, in its order. The first error
/// of `consume` ends everything: what `produce` calls then says `false`.
pub(super) fn in_order<I: Send, O: Send, E>(
    produce: impl FnOnce(&mut dyn FnMut(I) -> bool) + Send,
    work: impl Fn(I) -> O + Sync,
    mut consume: impl FnMut(O) -> Result<(), E>,
) -> Result<(), E> {
    let num_threads = usable_cpus();
    let (hand_on, jobs) = channel::<(I, Sender<thread::Result<O>>)>();
    let jobs = Mutex::new(jobs);
    // Where each result will come, in the order of the pieces: so many are under way, and no more.
    let (promise, promised) = sync_channel(AHEAD * num_threads);
    thread::scope(|scope| {
        scope.spawn(move || {
            produce(&mut |piece| {
                let (answer, answered) = channel();
                promise.send(answered).is_ok() && hand_on.send((piece, answer)).is_ok()
            });
        });
        for _ in 0..num_threads {
            scope.spawn(|| {
                loop {
                    let job = locked(&jobs).recv();
                    let Ok((piece, answer)) = job else { break };
                    // It goes on where the result is consumed.
                    let result = catch_unwind(AssertUnwindSafe(|| work(piece)));
                    if answer.send(result).is_err() {
                        break;
                    }
                }
            });
        }
        // Whichever way this ends, the receivers go with it, and the threads notice.
        promised
            .into_iter()
            .map_while(|answered| answered.recv().ok())
            .try_for_each(|result| consume(result.unwrap_or_else(|panic| resume_unwind(panic))))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn results_come_in_order_and_few_are_under_way() {
        let (made, consumed, most) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        let mut squares = Vec::new();
        let produce = |hand_on: &mut dyn FnMut(usize) -> bool| {
            for number in 0..500 {
                most.fetch_max(made.fetch_add(1, Ordering::SeqCst) - consumed.load(Ordering::SeqCst), Ordering::SeqCst);
                assert!(hand_on(number));
            }
        };
        let work = |number: usize| {
            if number.is_multiple_of(7) {
                thread::yield_now();
            }
            number * number
        };
        let consume = |square| {
            squares.push(square);
            consumed.fetch_add(1, Ordering::SeqCst);
            Ok::<_, ()>(())
        };
        in_order(produce, work, consume).unwrap();
        assert_eq!(squares, (0..500).map(|number| number * number).collect::<Vec<_>>());
        let threads = thread::available_parallelism().unwrap().get();
        assert!(most.into_inner() <= AHEAD * threads + 1);
    }

    #[test]
    fn the_first_error_and_a_panic_end_it() {
        let endless = |hand_on: &mut dyn FnMut(usize) -> bool| {
            let mut numbers = 0..;
            while numbers.next().is_some_and(&mut *hand_on) {}
        };
        let refuse = |number: usize| if number < 40 { Ok(()) } else { Err(number) };
        assert_eq!(in_order(endless, |number| number, refuse), Err(40));
        let broken = |number: usize| assert!(number != 9, "nine");
        let ended = catch_unwind(|| in_order(endless, broken, |()| Ok::<_, ()>(())));
        assert!(ended.is_err());
    }
}
