//! Threads of the CPU: how many there are to compute with, and how they wait where others want the CPUs too.
//!
//! libtorch's threads meet at the end of every operation that they share. Those who come first look out for the others for some
//! milliseconds before they sleep (libgomp's spinning), which is quick as long as each has a CPU. Where one has not, they burn the very
//! time that it waits for, and a step takes many times as long. libgomp looks out a thousand times shorter while it has more threads
//! than there are CPUs, sleeping ones included ([`GOMP_SPINCOUNT`](https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html)). So
//! while the system lets our threads wait for CPUs, some more are held asleep.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::fs;
use std::num::NonZero;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, available_parallelism};
use std::time::{Duration, Instant};

use rustix::thread::sched_getaffinity;

use super::at_end::AtEnd;

unsafe extern "C" {
    safe fn kvtune_is_libgomp() -> c_int;
    safe fn kvtune_hold_threads(count: c_uint);
}

/// Variables by which a user says how OpenMP's threads wait; then they wait like that.
const OF_USER: [&str; 2] = ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"];

/// How often the machine is looked at, for each so many threads, as every one of them is asked.
const LOOK: (Duration, usize) = (Duration::from_millis(25), 16);
/// The part of a look that one of the threads waits for a CPU from which on the machine is busy. With two threads alone on two CPUs it was
/// below 0.15, beside one busy process 0.35 and more.
const BUSY: f64 = 0.2;
/// Looks for which threads are held at first, and at most: each time that the machine is busy still, it is twice as long.
const HELD: (u32, u32) = (40, 320);
/// No more threads than these are held: libgomp ends the process where it can't have one.
const MAX_HELD: usize = 64;

/// Locks what is whole at every moment: the lock is poisoned where a panic is on its way up, and hides nothing.
pub fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// CPUs that this process may use: by its affinity, and within the quota of its control groups.
pub fn usable_cpus() -> usize {
    available_parallelism().map_or(1, NonZero::get)
}

/// Makes so many threads, which end at once; an error where the system lets the process have fewer.
pub fn try_threads(count: usize) -> std::io::Result<()> {
    // All at the same time: they wait until the last one is there.
    let (begun, waiting) = channel::<()>();
    let waiting = Arc::new(Mutex::new(waiting));
    let make = |_| {
        let waiting = Arc::clone(&waiting);
        let wait = move || drop(waiting.lock().map(|waiting| waiting.recv()));
        thread::Builder::new().name("kvtune-try".to_owned()).spawn(wait)
    };
    let made: Vec<std::io::Result<JoinHandle<()>>> = (0..count).map(make).collect();
    drop(begun);
    made.into_iter().try_for_each(|thread| thread.map(|thread| drop(thread.join())))
}

/// From now on `threads` threads of libtorch's sleep soon where others want their CPUs. To be called once.
pub fn make_room_for_others(threads: usize) {
    let is_told = OF_USER.iter().any(|name| std::env::var_os(name).is_some());
    // libgomp counts CPUs by affinity alone.
    let cpus = sched_getaffinity(None).map_or(threads, |cpus| cpus.count() as usize);
    let more = cpus.saturating_sub(threads) + 2;
    if threads < 2 || is_told || more > MAX_HELD || kvtune_is_libgomp() == 0 || delays().is_none() {
        return;
    }
    let pause = LOOK.0 * threads.div_ceil(LOOK.1) as u32;
    // Without it they wait as they do in any program.
    let _ = thread::Builder::new().name("kvtune-watch".to_owned()).spawn(move || watch(pause, more));
}

fn watch(pause: Duration, more: usize) {
    let (mut watch, mut held) = (LoadWatch::default(), None);
    let mut before = (delays().unwrap_or_default(), Instant::now());
    loop {
        thread::sleep(pause);
        let Some(now) = delays() else { continue };
        let seconds = before.1.elapsed().as_secs_f64();
        let waited = |(thread, delay): (&u64, &u64)| delay.saturating_sub(before.0.get(thread).copied().unwrap_or(*delay));
        let longest = now.iter().map(waited).max().unwrap_or(0);
        let holds = watch.look(longest as f64 * 1e-9 / seconds);
        if !holds {
            held = None;
        } else if held.is_none() {
            held = sleeping_threads(more);
            if held.is_none() {
                return;
            }
        }
        before = (now, Instant::now());
    }
}

/// How long each thread of the process has waited for a CPU, in nanoseconds; `None` where the system does not tell.
fn delays() -> Option<BTreeMap<u64, u64>> {
    let mut delays = BTreeMap::new();
    for task in fs::read_dir("/proc/self/task").ok()?.flatten() {
        // Time on a CPU, time waited for one, and turns; a thread may have ended meanwhile.
        let Ok(text) = fs::read_to_string(task.path().join("schedstat")) else { continue };
        let (thread, delay) = (task.file_name().to_str()?.parse().ok()?, text.split(' ').nth(1)?.trim().parse().ok()?);
        delays.insert(thread, delay);
    }
    (!delays.is_empty()).then_some(delays)
}

#[derive(Debug, Default)]
struct LoadWatch {
    was_busy: bool,
    /// Looks for which they stay held.
    left: u32,
    /// For how many it was last time.
    last: u32,
}

impl LoadWatch {
    /// After a look of whose time a thread has waited so large a part.
    fn look(&mut self, part: f64) -> bool {
        if self.left > 0 {
            // Threads that sleep wait a little each time that they wake: what they wait now says nothing.
            self.left -= 1;
            self.was_busy = self.left == 0;
            return self.left > 0;
        }
        let is_busy = part > BUSY;
        if is_busy && self.was_busy {
            self.last = (2 * self.last).clamp(HELD.0, HELD.1);
            self.left = self.last;
        } else if !is_busy {
            self.last = 0;
        }
        self.was_busy = is_busy;
        self.left > 0
    }
}

/// Threads of libgomp's that sleep until this is dropped; `None` where the system has not so many more: libgomp would end the process for it.
fn sleeping_threads(count: usize) -> Option<AtEnd<impl FnMut()>> {
    try_threads(count + 1).ok()?;
    let (end, ended) = channel::<()>();
    let hold = move || {
        kvtune_hold_threads(count as c_uint + 1);
        // Its pool ends with it.
        let _ = ended.recv();
    };
    let mut held = Some((end, thread::Builder::new().name("kvtune-hold".to_owned()).spawn(hold).ok()?));
    Some(AtEnd(move || {
        if let Some((end, owner)) = held.take() {
            drop(end);
            let _ = owner.join();
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(parts: &[f64]) -> Vec<bool> {
        let mut watch = LoadWatch::default();
        parts.iter().map(|part| watch.look(*part)).collect()
    }

    #[test]
    fn one_busy_look_is_nothing_and_two_hold_for_a_second() {
        assert!(!looks(&[0.9, 0.1, 0.9, 0.0, 0.3, 0.2]).contains(&true));
        let mut parts = vec![0.1, 0.9, 0.9];
        parts.resize(80, 0.0);
        let held = looks(&parts);
        assert_eq!(held.iter().position(|held| *held), Some(2));
        assert_eq!(held.iter().filter(|held| **held).count(), HELD.0 as usize);
    }

    #[test]
    fn where_it_stays_busy_a_look_between_is_enough_and_rarer_each_time() {
        let held = looks(&[1.0; 2000]);
        let pauses: Vec<usize> = (1..2000).filter(|&at| held[at - 1] && !held[at]).collect();
        let between: Vec<usize> = pauses.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(between[..4], [81, 161, 321, 321], "{pauses:?}");
        // Each pause is one look, which is in the sums.
        assert!(pauses.iter().all(|&at| held[at + 1]), "{pauses:?}");
    }

    #[test]
    fn after_a_quiet_look_it_begins_anew() {
        let mut watch = LoadWatch::default();
        for _ in 0..600 {
            watch.look(1.0);
        }
        while watch.look(0.0) {}
        watch.look(0.0);
        watch.look(1.0);
        assert!(watch.look(1.0));
        assert_eq!(watch.left, HELD.0);
    }

    fn num_threads(name: &str) -> usize {
        let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
        tasks.filter(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)).count()
    }

    fn wait_until(is_so: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(60), "waited in vain");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn threads_are_held_and_let_go() {
        if kvtune_is_libgomp() == 0 {
            eprintln!("skipped: libtorch's threads are not libgomp's");
            return;
        }
        // Threads inherit the name of who makes them.
        let held = sleeping_threads(3).unwrap();
        wait_until(|| num_threads("kvtune-hold") == 4);
        drop(held);
        wait_until(|| num_threads("kvtune-hold") == 0);
    }

    #[test]
    fn how_long_a_thread_has_waited_is_known_and_never_less() {
        // Not every system tells.
        let Some(before) = delays() else { return };
        let after = delays().unwrap();
        assert!(
            before.iter().all(|(thread, delay)| after.get(thread).is_none_or(|later| later >= delay)),
            "{before:?} {after:?}"
        );
    }
}
