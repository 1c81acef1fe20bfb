//! Work on foreign files that may take no more than so much memory and time.
//!
//! A tokenizer's patterns, a packed page or a template can ask for any amount of both in a few bytes, deep inside a library that knows no
//! limit, and a thread cannot be ended from outside. So the process ends, with one line and the exit code of wrong data, before it takes
//! what others need.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread;
use std::time::Duration;

use signal_hook::low_level::exit;

/// How often the time is looked at. Looks are counted, so that a process that was stopped is not blamed for it.
const LOOK: Duration = Duration::from_millis(100);

/// What work may take.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Who works on what, as a message says it: `` tokenizer `a/tokenizer.json` ``.
    pub subject: Arc<str>,
    /// Bytes that may be allocated on its thread and not freed.
    pub bytes: usize,
    /// How long it may take.
    pub time: Duration,
}

thread_local! {
    /// Bytes that this thread may still allocate; `None` where it is not bounded.
    static LEFT: Cell<Option<isize>> = const { Cell::new(None) };
    /// The subject of its work. It outlives the work, at whose end the pointer goes.
    static SUBJECT: Cell<Option<(*const u8, usize)>> = const { Cell::new(None) };
}

/// Of each work that goes on, the looks that are left and the subject.
static AT_WORK: Mutex<BTreeMap<u64, (u64, Arc<str>)>> = Mutex::new(BTreeMap::new());

/// Runs `work` within bounds; beyond them the process ends. Memory is counted where [`Allocator`](super::Allocator) is the program's.
pub fn within<T>(bounds: &Bounds, work: impl FnOnce() -> T) -> T {
    static WATCH: Once = Once::new();
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Without a thread to watch only memory is bounded.
    WATCH.call_once(|| drop(thread::Builder::new().name("kvtune-bounds".to_owned()).spawn(watch)));
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let looks = (bounds.time.as_millis() / LOOK.as_millis()) as u64 + 1;
    at_work().insert(number, (looks, Arc::clone(&bounds.subject)));
    let _end = EndOfWork { number, before: (LEFT.get(), SUBJECT.get()) };
    SUBJECT.set(Some((bounds.subject.as_ptr(), bounds.subject.len())));
    LEFT.set(Some(isize::try_from(bounds.bytes).unwrap_or(isize::MAX)));
    work()
}

/// Whatever way work ends.
struct EndOfWork {
    number: u64,
    before: (Option<isize>, Option<(*const u8, usize)>),
}

impl Drop for EndOfWork {
    fn drop(&mut self) {
        LEFT.set(self.before.0);
        SUBJECT.set(self.before.1);
        at_work().remove(&self.number);
    }
}

fn at_work() -> std::sync::MutexGuard<'static, BTreeMap<u64, (u64, Arc<str>)>> {
    AT_WORK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch() {
    loop {
        thread::sleep(LOOK);
        for (left, subject) in at_work().values_mut() {
            *left -= 1;
            if *left == 0 {
                give_up(subject.as_bytes(), "time");
            }
        }
    }
}

/// Counts what is allocated on this thread, and what is freed as a negative number.
pub(super) fn charge(bytes: isize) {
    let Some(left) = LEFT.get() else { return };
    let left = left.saturating_sub(bytes);
    LEFT.set(Some(left));
    if left < 0
        && let Some((start, length)) = SUBJECT.get()
    {
        LEFT.set(None);
        // SAFETY: the subject of the work that this thread does right now.
        give_up(unsafe { std::slice::from_raw_parts(start, length) }, "memory");
    }
}

/// Allocates nothing: it may be called by the allocator.
fn give_up(subject: &[u8], of: &str) -> ! {
    const DATA: i32 = 3;
    let mut to = std::io::stderr();
    let parts: [&[u8]; 5] = [
        b"error: ",
        subject,
        b" takes too much ",
        of.as_bytes(),
        b"\n\nhint: take the file from its source again; if it is meant to be so, use it in the program that it was made for\n",
    ];
    for part in parts {
        let _ = to.write_all(part);
    }
    exit(DATA)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_within_its_bounds_goes_on_and_bounds_end_with_the_work() {
        let bounds = Bounds { subject: "x".into(), bytes: 1 << 20, time: Duration::from_secs(60) };
        let inner = || LEFT.get();
        assert_eq!(within(&bounds, || within(&Bounds { bytes: 5, ..bounds.clone() }, inner)), Some(5));
        assert_eq!(inner(), None);
        let caught = std::panic::catch_unwind(|| within(&bounds, || panic!("within")));
        assert!(caught.is_err() && inner().is_none() && SUBJECT.get().is_none());
        within(&bounds, || {
            charge(1000);
            charge(-1000);
            assert_eq!(LEFT.get(), Some(1 << 20));
        });
    }
}
