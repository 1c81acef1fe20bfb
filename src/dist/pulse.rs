//! Signs of life: each rank leaves its own in the store again and again and reads those of the others, on a thread of its own.
//!
//! Time is counted in rounds of this thread, not by the clock: who was stopped for an hour and goes on has not seen the others be
//! silent for an hour.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::native::SharedStore;
use crate::units::quoted;

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    Beat(Beat),
    /// It has ended in good order.
    Left,
    /// It ends with an error of its own.
    Failed(String),
    /// It ends, for another rank is gone: which, and how it knows.
    Lost(usize, String),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Beat {
    /// How often it has said so.
    count: u64,
    /// How many exchanges it has begun.
    pub(super) exchanges: u64,
    /// How long its process has been on a CPU, in milliseconds.
    worked: u64,
}

impl Beat {
    /// Whether the rank has gone on since an earlier beat. Its signs alone keep it on a CPU for some thousandths of the time.
    fn is_ahead_of(self, earlier: Self, interval: Duration) -> bool {
        const AT_WORK: u128 = 20;
        let time = interval.as_millis() * u128::from(self.count.saturating_sub(earlier.count));
        self.exchanges != earlier.exchanges || u128::from(self.worked.saturating_sub(earlier.worked)) * AT_WORK >= time
    }
}

impl Sign {
    fn to_text(&self) -> String {
        match self {
            Self::Beat(Beat { count, exchanges, worked }) => format!("beat {count} {exchanges} {worked}"),
            Self::Left => "left".to_owned(),
            Self::Failed(reason) => format!("failed {}", quoted(reason)),
            Self::Lost(rank, reason) => format!("lost {rank} {}", quoted(reason)),
        }
    }

    /// `None` for what no rank writes.
    fn of_text(text: &str) -> Option<Self> {
        let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
        match word {
            "beat" => {
                let mut numbers = rest.split(' ').map(|number| number.parse().ok());
                let [count, exchanges, worked] = [(); 3].map(|()| numbers.next().flatten());
                let beat = Beat { count: count?, exchanges: exchanges?, worked: worked? };
                numbers.next().is_none().then_some(Self::Beat(beat))
            }
            "left" => Some(Self::Left),
            "failed" => Some(Self::Failed(rest.to_owned())),
            "lost" => rest.split_once(' ').and_then(|(rank, reason)| Some(Self::Lost(rank.parse().ok()?, reason.to_owned()))),
            _ => None,
        }
    }

    /// Whether it is the last one of its rank.
    pub(super) fn is_last(&self) -> bool {
        !matches!(self, Self::Beat(..))
    }
}

/// What a rank was last heard to say.
#[derive(Clone, Debug)]
pub(super) struct Heard {
    pub(super) sign: Sign,
    /// In how many rounds since then it has said nothing new.
    pub(super) silent: u32,
    /// In how many rounds, the last ones, it has said that it lives, and neither worked nor begun an exchange.
    pub(super) stuck: u32,
}

impl Heard {
    /// Takes in what a rank says in a round, of which there is one each `interval`.
    fn hear(&mut self, sign: Option<Sign>, interval: Duration) {
        match sign {
            Some(sign) if sign != self.sign => {
                let has_gone_on = match (&sign, &self.sign) {
                    (Sign::Beat(beat), Sign::Beat(earlier)) => beat.is_ahead_of(*earlier, interval),
                    _ => true,
                };
                *self = Self { sign, silent: 0, stuck: if has_gone_on { 0 } else { self.stuck.saturating_add(1) } };
            }
            _ => self.silent = self.silent.saturating_add(1),
        }
    }

    /// In how many of the last `rounds`, in which it was waited for, it was stuck before the exchange `number`; `None` where it has begun
    /// that. What is heard may be two rounds old.
    pub(super) fn stuck_before(&self, number: u64, rounds: u64) -> Option<u32> {
        let Sign::Beat(beat) = self.sign else { return None };
        (beat.exchanges < number).then(|| u64::from(self.stuck).min(rounds.saturating_sub(2)) as u32)
    }

    /// How many exchanges it has begun, where it lives.
    pub(super) fn exchanges(&self) -> Option<u64> {
        if let Sign::Beat(beat) = self.sign { Some(beat.exchanges) } else { None }
    }
}

/// What the thread and the rank's own thread share.
struct SharedSigns {
    /// What this rank says from now on, if it is not that it lives.
    last: Mutex<Option<Sign>>,
    heard: Mutex<Vec<Heard>>,
    rounds: AtomicU64,
    /// Exchanges that this rank has begun.
    exchanges: AtomicU64,
    /// What the store said when it could not be reached any more.
    lost_store: Mutex<Option<String>>,
    stops: AtomicBool,
}

pub(super) struct Pulse {
    shared: Arc<SharedSigns>,
    thread: Option<JoinHandle<()>>,
    pub(super) interval: Duration,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is in there is whole at every moment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where in the store a rank's sign is.
pub(super) fn key(prefix: &str, rank: usize) -> String {
    format!("{prefix}/sign/{rank}")
}

/// The sign of a rank that has just come.
pub(super) fn first() -> Vec<u8> {
    Sign::Beat(Beat::default()).to_text().into_bytes()
}

/// How long this process has been on a CPU, in milliseconds.
fn worked() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1000 + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000
}

impl Pulse {
    /// Begins; `store` is a connection of its own, so that no call of another thread holds it up.
    pub(super) fn start(
        store: SharedStore,
        prefix: &str,
        (rank, size): (usize, usize),
        interval: Duration,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(SharedSigns {
            last: Mutex::new(None),
            heard: Mutex::new(vec![Heard { sign: Sign::Beat(Beat::default()), silent: 0, stuck: 0 }; size]),
            rounds: AtomicU64::new(0),
            exchanges: AtomicU64::new(0),
            lost_store: Mutex::new(None),
            stops: AtomicBool::new(false),
        });
        let keys: Vec<_> = (0..size).map(|rank| key(prefix, rank)).collect();
        let of_thread = shared.clone();
        let thread = thread::Builder::new().name("signs of life".to_owned()).spawn(move || {
            while !of_thread.stops.load(Ordering::Acquire) {
                if let Err(reason) = of_thread.round(&store, &keys, rank, interval) {
                    *locked(&of_thread.lost_store) = Some(reason);
                    return;
                }
                thread::park_timeout(interval);
            }
        })?;
        Ok(Self { shared, thread: Some(thread), interval })
    }

    /// Counts an exchange that this rank begins; returns how many there were with it.
    pub(super) fn begin_exchange(&self) -> u64 {
        self.shared.exchanges.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What was heard of all ranks.
    pub(super) fn heard(&self) -> Vec<Heard> {
        locked(&self.shared.heard).clone()
    }

    pub(super) fn rounds(&self) -> u64 {
        self.shared.rounds.load(Ordering::Acquire)
    }

    /// Why the store is not reached any more.
    pub(super) fn lost_store(&self) -> Option<String> {
        locked(&self.shared.lost_store).clone()
    }

    /// Says a last sign, unless there was one, and waits a little until it is in the store.
    pub(super) fn say(&self, sign: Sign) {
        locked(&self.shared.last).get_or_insert(sign);
        let before = self.rounds();
        // The round under way may have begun before.
        for _ in 0..40 {
            if self.rounds() > before + 1 || self.lost_store().is_some() {
                return;
            }
            self.wake();
            thread::sleep(Duration::from_millis(25));
        }
    }

    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::Release);
        self.wake();
        // It is not waited for: it may hang in a connection that is dead.
    }
}

impl SharedSigns {
    /// Says the own sign, and listens to the others.
    fn round(&self, store: &SharedStore, keys: &[String], rank: usize, interval: Duration) -> Result<(), String> {
        let (count, exchanges) = (self.rounds.load(Ordering::Relaxed) + 1, self.exchanges.load(Ordering::Relaxed));
        let own = locked(&self.last).clone().unwrap_or(Sign::Beat(Beat { count, exchanges, worked: worked() }));
        store.set(&keys[rank], own.to_text().as_bytes())?;
        for (other, key) in keys.iter().enumerate().filter(|(other, _)| *other != rank) {
            let text = store.get(key)?;
            let sign = Sign::of_text(&String::from_utf8_lossy(&text));
            locked(&self.heard)[other].hear(sign, interval);
        }
        self.rounds.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_are_read_as_they_were_written() {
        for sign in [
            Sign::Beat(Beat { count: 3, exchanges: 17, worked: 1200 }),
            Sign::Left,
            Sign::Failed("out of memory: 3 GiB".into()),
            Sign::Failed(String::new()),
            Sign::Lost(2, "connection closed".into()),
        ] {
            assert_eq!(Sign::of_text(&sign.to_text()), Some(sign));
        }
        for foreign in
            ["", "beat", "beat x 1 1", "beat 1 1", "beat 1 1 1 1", "lost 1", "lost x y", "GET / HTTP/1.1", "beat 1 -1 1"]
        {
            assert_eq!(Sign::of_text(foreign), None, "{foreign}");
        }
        // A message stays on its line, and is cut.
        let long = Sign::Failed(format!("a\n{}", "ä".repeat(500)));
        let Some(Sign::Failed(read)) = Sign::of_text(&long.to_text()) else { panic!("{}", long.to_text()) };
        assert!(read.starts_with("a\\nää") && read.ends_with("… (502 characters)") && read.len() < 500, "{read}");
    }

    #[test]
    fn who_lives_and_neither_works_nor_begins_an_exchange_is_stuck() {
        let interval = Duration::from_millis(500);
        let mut heard = Heard { sign: Sign::Beat(Beat::default()), silent: 0, stuck: 0 };
        let mut after = |count, exchanges, worked| {
            heard.hear(Some(Sign::Beat(Beat { count, exchanges, worked })), interval);
            (heard.silent, heard.stuck)
        };
        // A twentieth of the time is work; one round may bring several beats.
        assert_eq!([after(1, 0, 25), after(2, 0, 49), after(4, 0, 98), after(5, 1, 98)], [(0, 0), (0, 1), (0, 2), (0, 0)]);
        assert_eq!([after(5, 1, 98), after(6, 1, 98), after(7, 1, 400)], [(1, 0), (0, 1), (0, 0)]);
    }

    #[test]
    fn only_what_it_was_waited_for_counts() {
        let beat = |exchanges| Sign::Beat(Beat { count: 90, exchanges, worked: 7 });
        let heard = Heard { sign: beat(4), silent: 0, stuck: 30 };
        // It waited itself for most of the time, or has come meanwhile.
        assert_eq!([1, 2, 12, 100].map(|rounds| heard.stuck_before(5, rounds)), [Some(0), Some(0), Some(10), Some(30)]);
        assert_eq!((heard.stuck_before(4, 100), heard.exchanges()), (None, Some(4)));
        let left = Heard { sign: Sign::Left, ..heard };
        assert_eq!((left.stuck_before(5, 100), left.exchanges()), (None, None));
    }
}
