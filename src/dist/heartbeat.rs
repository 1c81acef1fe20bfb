//! Heartbeats: each rank leaves its status in the store again and again and reads that of the others, on a thread of its own. Time is counted
//! in rounds of this thread, not by the clock: who was stopped for an hour and goes on has not seen the others be silent for an hour.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Thread};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::native::{SharedStore, locked};
use crate::units::quoted;

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum RankStatus {
    Alive {
        /// How many heartbeats there were before.
        count: u64,
        /// How many exchanges the rank has begun.
        exchanges: u64,
        /// How long its process has been on a CPU, in milliseconds.
        worked: u64,
    },
    /// It has ended in good order.
    Left,
    /// It ends with an error of its own.
    Failed(String),
    /// It ends because another rank is gone.
    Lost { rank: usize, reason: String },
}

impl RankStatus {
    /// That of a rank that has just come.
    pub(super) const FIRST: Self = Self::Alive { count: 0, exchanges: 0, worked: 0 };

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// How many exchanges the rank has begun, where it lives.
    pub(super) fn exchanges(&self) -> Option<u64> {
        if let Self::Alive { exchanges, .. } = self { Some(*exchanges) } else { None }
    }

    /// Whether the rank has gone on since an earlier status, of which there is one each `interval`. Heartbeats alone keep it on a CPU for some
    /// thousandths of the time.
    fn is_ahead_of(&self, earlier: &Self, interval: Duration) -> bool {
        const AT_WORK: u128 = 20;
        let (Self::Alive { count, exchanges, worked }, Self::Alive { count: beats, exchanges: begun, worked: before }) =
            (self, earlier)
        else {
            return true;
        };
        let time = interval.as_millis() * u128::from(count.saturating_sub(*beats));
        exchanges != begun || u128::from(worked.saturating_sub(*before)) * AT_WORK >= time
    }
}

#[derive(Clone, Debug)]
pub(super) struct PeerStatus {
    pub(super) status: RankStatus,
    /// Rounds since its last new status.
    pub(super) silent: u32,
    /// The last rounds in which it lived, and neither worked nor began an exchange.
    pub(super) stuck: u32,
}

impl PeerStatus {
    /// Takes in what a rank says in a round, of which there is one each `interval`.
    fn hear(&mut self, status: Option<RankStatus>, interval: Duration) {
        match status {
            Some(status) if status != self.status => {
                let stuck = if status.is_ahead_of(&self.status, interval) { 0 } else { self.stuck.saturating_add(1) };
                *self = Self { status, silent: 0, stuck };
            }
            _ => self.silent = self.silent.saturating_add(1),
        }
    }

    /// In how many of the last `rounds`, in which it was waited for, it was stuck before the exchange `number`; `None` where it has begun
    /// that. What is heard may be two rounds old.
    pub(super) fn stuck_before(&self, number: u64, rounds: u64) -> Option<u32> {
        let is_before = self.status.exchanges()? < number;
        is_before.then(|| u64::from(self.stuck).min(rounds.saturating_sub(2)) as u32)
    }
}

/// What the thread and the rank's own thread share.
#[derive(Default)]
struct SharedStatus {
    /// What this rank says from now on, if it is not that it lives.
    last: Mutex<Option<RankStatus>>,
    peers: Mutex<Vec<PeerStatus>>,
    rounds: AtomicU64,
    exchanges: AtomicU64,
    /// What the store said when it could not be reached any more.
    lost_store: Mutex<Option<String>>,
    stops: AtomicBool,
}

pub(super) struct HeartbeatMonitor {
    shared: Arc<SharedStatus>,
    /// It is not waited for: it may hang in a connection that is dead.
    thread: Thread,
    pub(super) interval: Duration,
}

/// Where in the store a rank's status is.
pub(super) fn key(prefix: &str, rank: usize) -> String {
    format!("{prefix}/heartbeat/{rank}")
}

/// How long this process has been on a CPU, in milliseconds.
fn worked() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1000 + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000
}

impl HeartbeatMonitor {
    /// Begins; `store` is a connection of its own, so that no call of another thread holds it up.
    pub(super) fn start(store: SharedStore, prefix: &str, rank: usize, size: usize, interval: Duration) -> std::io::Result<Self> {
        let begins = PeerStatus { status: RankStatus::FIRST, silent: 0, stuck: 0 };
        let shared = Arc::new(SharedStatus { peers: Mutex::new(vec![begins; size]), ..SharedStatus::default() });
        let keys: Vec<_> = (0..size).map(|rank| key(prefix, rank)).collect();
        let of_thread = shared.clone();
        let thread = thread::Builder::new().name("heartbeat".to_owned()).spawn(move || {
            while !of_thread.stops.load(Ordering::Acquire) {
                if let Err(reason) = of_thread.round(&store, &keys, rank, interval) {
                    *locked(&of_thread.lost_store) = Some(reason);
                    return;
                }
                thread::park_timeout(interval);
            }
        })?;
        Ok(Self { shared, thread: thread.thread().clone(), interval })
    }

    /// Counts an exchange that this rank begins; returns how many there were with it.
    pub(super) fn begin_exchange(&self) -> u64 {
        self.shared.exchanges.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn peers(&self) -> Vec<PeerStatus> {
        locked(&self.shared.peers).clone()
    }

    pub(super) fn rounds(&self) -> u64 {
        self.shared.rounds.load(Ordering::Acquire)
    }

    pub(super) fn lost_store(&self) -> Option<String> {
        locked(&self.shared.lost_store).clone()
    }

    /// Says a last status, and waits a little until it is in the store.
    pub(super) fn say(&self, status: RankStatus) {
        *locked(&self.shared.last) = Some(match status {
            RankStatus::Failed(reason) => RankStatus::Failed(quoted(reason)),
            RankStatus::Lost { rank, reason } => RankStatus::Lost { rank, reason: quoted(reason) },
            other => other,
        });
        let before = self.rounds();
        // The round under way may have begun before.
        for _ in 0..40 {
            if self.rounds() > before + 1 || self.lost_store().is_some() {
                return;
            }
            self.thread.unpark();
            thread::sleep(Duration::from_millis(25));
        }
    }
}

impl Drop for HeartbeatMonitor {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

impl SharedStatus {
    /// Says the own status, and listens to the others.
    fn round(&self, store: &SharedStore, keys: &[String], rank: usize, interval: Duration) -> Result<(), String> {
        let (count, exchanges) = (self.rounds.load(Ordering::Relaxed) + 1, self.exchanges.load(Ordering::Relaxed));
        let own = locked(&self.last).clone().unwrap_or(RankStatus::Alive { count, exchanges, worked: worked() });
        store.set(&keys[rank], &own.to_bytes())?;
        for (other, key) in keys.iter().enumerate().filter(|(other, _)| *other != rank) {
            // What no rank writes says nothing.
            let status = serde_json::from_slice(&store.get(key)?).ok();
            locked(&self.peers)[other].hear(status, interval);
        }
        self.rounds.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_as_it_was_written() {
        for status in [
            RankStatus::Alive { count: 3, exchanges: 17, worked: 1200 },
            RankStatus::Left,
            RankStatus::Failed("out of memory: 3 GiB".into()),
            RankStatus::Failed(String::new()),
            RankStatus::Lost { rank: 2, reason: "connection closed".into() },
        ] {
            assert_eq!(serde_json::from_slice::<RankStatus>(&status.to_bytes()).ok(), Some(status));
        }
        for foreign in ["", "beat", "{\"Alive\":{}}", "{\"Lost\":{\"rank\":-1,\"reason\":\"\"}}", "GET / HTTP/1.1"] {
            assert_eq!(serde_json::from_str::<RankStatus>(foreign).ok(), None, "{foreign}");
        }
    }

    #[test]
    fn who_lives_and_neither_works_nor_begins_an_exchange_is_stuck() {
        let interval = Duration::from_millis(500);
        let mut peer = PeerStatus { status: RankStatus::FIRST, silent: 0, stuck: 0 };
        let mut after = |count, exchanges, worked| {
            peer.hear(Some(RankStatus::Alive { count, exchanges, worked }), interval);
            (peer.silent, peer.stuck)
        };
        // A twentieth of the time is work; one round may bring several heartbeats.
        assert_eq!([after(1, 0, 25), after(2, 0, 49), after(4, 0, 98), after(5, 1, 98)], [(0, 0), (0, 1), (0, 2), (0, 0)]);
        assert_eq!([after(5, 1, 98), after(6, 1, 98), after(7, 1, 400)], [(1, 0), (0, 1), (0, 0)]);
    }

    #[test]
    fn only_what_it_was_waited_for_counts() {
        let beat = |exchanges| RankStatus::Alive { count: 90, exchanges, worked: 7 };
        let peer = PeerStatus { status: beat(4), silent: 0, stuck: 30 };
        // It waited itself for most of the time, or has come meanwhile.
        assert_eq!([1, 2, 12, 100].map(|rounds| peer.stuck_before(5, rounds)), [Some(0), Some(0), Some(10), Some(30)]);
        assert_eq!((peer.stuck_before(4, 100), peer.status.exchanges()), (None, Some(4)));
        let left = PeerStatus { status: RankStatus::Left, ..peer };
        assert_eq!((left.stuck_before(5, 100), left.status.exchanges()), (None, None));
    }
}
