//! Work on foreign files that may take no more than so much memory and time.
//!
//! A tokenizer's patterns, a packed page or a template can ask for any amount of both in a few bytes, deep inside a library that knows no
//! limit, and a thread cannot be ended from outside. So the process ends, with one line and the exit code of wrong data, before it takes
//! what others need. A server must not end by what a client sends: its work is done on threads that can be given up ([`apart`]).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::Write;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};
use std::{fmt, fs, thread};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{Pid, gettid};
use rustix::time::{ClockId, clock_gettime};
use signal_hook::low_level::exit;

use super::at_end::AtEnd;
use super::memory::line_of;
use super::threads::locked;

const LOOK: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub struct Bounds {
    /// Who works on what, as a message says it: `` tokenizer `a/tokenizer.json` ``.
    pub subject: Arc<str>,
    /// Bytes that may be allocated on its thread and not freed.
    pub bytes: usize,
    /// How long it may be at work: what its thread waits for a CPU or a file does not count.
    pub time: Duration,
}

/// Why work that was done [`apart`] has no outcome.
#[derive(Debug)]
pub enum GivenUp {
    Beyond,
    /// The system lets the process have no thread for it.
    NoThread(std::io::Error),
}

impl fmt::Display for GivenUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Beyond => f.write_str("it takes too much memory or time"),
            Self::NoThread(error) => write!(f, "the system has no thread for it: {error}"),
        }
    }
}

thread_local! {
    /// Bytes that this thread may still allocate; `None` where it is not bounded.
    static LEFT: Cell<Option<isize>> = const { Cell::new(None) };
    /// The subject of its work. It outlives the work, at whose end the pointer goes.
    static SUBJECT: Cell<Option<*const str>> = const { Cell::new(None) };
    /// Set when this thread is given up; `None` where the process ends instead.
    static GIVEN_UP: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

struct AtWork {
    thread: Pid,
    time: Duration,
    /// How long its thread may have been at work altogether: known from the first look on.
    end: Option<Duration>,
    subject: Arc<str>,
    given_up: Option<Arc<AtomicBool>>,
}

static AT_WORK: Mutex<BTreeMap<u64, AtWork>> = Mutex::new(BTreeMap::new());

static NUM_GIVEN_UP: AtomicUsize = AtomicUsize::new(0);

/// Runs `work` within bounds; beyond them the process ends. Memory is counted where [`Allocator`](super::Allocator) is the program's.
pub fn within<T>(bounds: &Bounds, work: impl FnOnce() -> T) -> T {
    static WATCH: Once = Once::new();
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Without a thread to watch only memory is bounded.
    WATCH.call_once(|| drop(thread::Builder::new().name("kvtune-bounds".to_owned()).spawn(watch)));
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let (subject, given_up) = (Arc::clone(&bounds.subject), GIVEN_UP.with_borrow(Clone::clone));
    if given_up.as_ref().is_some_and(|given_up| given_up.load(Ordering::Relaxed)) {
        // Nobody waits for the rest of it.
        resume_unwind(Box::new("given up"));
    }
    // Not counted: a thread that is given up for it would keep the lock for ever.
    let (left, subject_before) = (LEFT.take(), SUBJECT.get());
    locked(&AT_WORK).insert(number, AtWork { thread: gettid(), time: bounds.time, end: None, subject, given_up });
    let _end = AtEnd(|| {
        LEFT.set(None);
        SUBJECT.set(subject_before);
        locked(&AT_WORK).remove(&number);
        LEFT.set(left);
    });
    SUBJECT.set(Some(&raw const *bounds.subject));
    LEFT.set(Some(isize::try_from(bounds.bytes).unwrap_or(isize::MAX)));
    work()
}

/// Runs `work` on a thread of its own, and waits for it. Where work [`within`] bounds goes beyond them there, the thread is given up, and
/// not the process. A panic of `work` goes on here.
pub fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, GivenUp> {
    let given_up = Arc::new(AtomicBool::new(false));
    let (done, outcome) = sync_channel(1);
    let own = Arc::clone(&given_up);
    let body = move || {
        GIVEN_UP.set(Some(Arc::clone(&own)));
        // It is watched no more by then.
        let _end = AtEnd(|| {
            if own.load(Ordering::Relaxed) {
                NUM_GIVEN_UP.fetch_sub(1, Ordering::Relaxed);
            }
        });
        let _ = done.send(work());
    };
    let thread = thread::Builder::new().name("kvtune-apart".to_owned()).spawn(body).map_err(GivenUp::NoThread)?;
    loop {
        match outcome.recv_timeout(LOOK) {
            Ok(done) => return Ok(done),
            Err(_) if given_up.load(Ordering::Relaxed) => return Err(GivenUp::Beyond),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => resume_unwind(panic),
                Ok(()) => return Err(GivenUp::Beyond),
            },
        }
    }
}

/// Limits of this process, beyond which the system ends it.
#[derive(Clone, Copy, Debug)]
pub struct ProcessLimits {
    /// Addresses that it has had from the start, in bytes: libraries, mostly.
    begun: usize,
    set: Option<(u64, u64)>,
}

/// Limits on memory go up in such steps: most of what follows each other has the same, which need not be set again.
const STEP: usize = 16 << 20;

impl ProcessLimits {
    /// What the process has now is not counted. It leaves no core behind.
    pub fn from_here() -> std::io::Result<Self> {
        setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
        let kilobytes = line_of(Path::new("/proc/self/status"), "VmSize:").ok_or(std::io::ErrorKind::NotFound)?;
        Ok(Self { begun: (kilobytes as usize) << 10, set: None })
    }

    /// Lets it have so many bytes beyond what it began with, and work for so long from now on: up to a second more.
    pub fn set(&mut self, bytes: usize, time: Duration) -> std::io::Result<()> {
        let worked = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs();
        let limits = (self.begun.saturating_add(bytes).div_ceil(STEP).saturating_mul(STEP) as u64, worked + 1 + time.as_secs());
        if self.set == Some(limits) {
            return Ok(());
        }
        let soft = |resource, limit: u64| {
            let Rlimit { maximum, .. } = getrlimit(resource);
            let current = Some(maximum.map_or(limit, |maximum| maximum.min(limit)));
            setrlimit(resource, Rlimit { current, maximum })
        };
        soft(Resource::As, limits.0)?;
        soft(Resource::Cpu, limits.1)?;
        self.set = Some(limits);
        Ok(())
    }
}

/// How many threads were given up and have not ended. Each keeps what it had.
pub fn num_given_up() -> usize {
    NUM_GIVEN_UP.load(Ordering::Relaxed)
}

fn watch() {
    // Where the system does not tell, all time counts.
    let (began, tells) = (Instant::now(), worked(gettid()).is_some());
    loop {
        thread::sleep(LOOK);
        locked(&AT_WORK).retain(|_, work| {
            let now = if tells { worked(work.thread) } else { Some(began.elapsed()) };
            // It may fail once: for want of an open file, say.
            let Some(now) = now else { return true };
            let is_in_time = now < *work.end.get_or_insert(now + work.time);
            match &work.given_up {
                _ if is_in_time => {}
                Some(given_up) => give_up(given_up),
                None => end_beyond(&work.subject, "time"),
            }
            is_in_time
        });
    }
}

/// How long a thread of this process has been on a CPU.
fn worked(thread: Pid) -> Option<Duration> {
    let text = fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

/// Counts what is allocated on this thread, and what is freed as a negative number.
pub(super) fn charge(bytes: isize) {
    // It is asked once, as every allocation comes here.
    let is_beyond = LEFT.with(|left| {
        let Some(before) = left.get() else { return false };
        let now = before.saturating_sub(bytes);
        left.set(Some(now));
        now < 0
    });
    if is_beyond && let Some(subject) = SUBJECT.get() {
        LEFT.set(None);
        // An allocator may not unwind: the thread stays where it is.
        if GIVEN_UP.with_borrow(|given_up| given_up.as_ref().map(|given_up| give_up(given_up)).is_some()) {
            loop {
                thread::park();
            }
        }
        // SAFETY: the subject of the work that this thread does right now.
        end_beyond(unsafe { &*subject }, "memory");
    }
}

/// Allocates nothing, as the allocator calls it.
fn give_up(given_up: &AtomicBool) {
    if !given_up.swap(true, Ordering::Relaxed) {
        NUM_GIVEN_UP.fetch_add(1, Ordering::Relaxed);
    }
}

fn end_beyond(subject: &str, of: &str) -> ! {
    const DATA: i32 = 3;
    const HINT: &str = "take the file from its source again; if it is meant to be so, use it in the program that it was made for";
    end(DATA, format_args!("{subject} takes too much {of}"), HINT)
}

/// Says why, and ends the process. Allocates nothing, as the allocator calls it.
#[cold]
pub(super) fn end(code: i32, why: fmt::Arguments<'_>, hint: &str) -> ! {
    let _ = std::io::stderr().write_fmt(format_args!("error: {why}\n\nhint: {hint}\n"));
    exit(code)
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

    /// One test, because the threads that are given up are counted for the whole process.
    #[test]
    fn work_apart_is_given_up_and_not_the_process() {
        assert_eq!(apart(|| 7).unwrap(), 7);
        assert!(std::panic::catch_unwind(|| apart(|| panic!("apart"))).is_err());
        let bounds = |bytes, millis| Bounds { subject: "x".into(), bytes, time: Duration::from_millis(millis) };
        let (ends, waits) = std::sync::mpsc::channel::<()>();
        let (went_on, rest) = std::sync::mpsc::channel();
        // At work for too long; a thread that only waits is not.
        assert!(matches!(
            apart(move || {
                within(&bounds(1 << 20, 50), || while waits.try_recv().is_err() {});
                within(&bounds(1 << 20, 50), || went_on.send(()))
            }),
            Err(GivenUp::Beyond)
        ));
        assert!(apart(move || within(&bounds(1 << 20, 50), || thread::sleep(4 * LOOK))).is_ok());
        ends.send(()).unwrap();
        for _ in 0..600 {
            if num_given_up() == 0 {
                break;
            }
            thread::sleep(LOOK);
        }
        assert_eq!(num_given_up(), 0, "one that has ended counts no more");
        assert!(rest.recv().is_err(), "nobody waits for the rest of its work");
        assert!(matches!(apart(move || within(&bounds(1000, 60_000), || charge(1001))), Err(GivenUp::Beyond)));
        assert_eq!(num_given_up(), 1, "what went beyond its memory stays where it is");
    }
}
