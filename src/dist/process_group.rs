//! The ranks of a run, as one of them sees the others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use super::heartbeat::{HeartbeatMonitor, PeerStatus, RankStatus};
use super::peer::{PeerGone, not_exchanged};
use super::rendezvous::{MeetingPlace, named_interface, unreached};
use super::{Launched, Peer};
use crate::native::cuda::NcclGroup;
use crate::native::{GlooGroup, PendingExchange, SharedStore};
use crate::units::{Fault, Seconds};

/// How long one look at an exchange under way takes.
pub(super) const LOOK: Duration = Duration::from_millis(100);
/// A rank that works and does not come is given up after so many time-outs.
const PATIENCE: u32 = 10;
/// Rounds without a heartbeat after which a rank is taken for gone, where an exchange with it has failed already.
const SILENT: u32 = 4;

/// The ranks of a run. One that is alone exchanges nothing: each of its calls is done at once.
///
/// All ranks make the same calls in the same order. After an error no further call is made: the ranks end.
pub struct ProcessGroup {
    pub(super) joined: Option<Joined>,
}

/// What a rank of several has.
pub(super) struct Joined {
    pub(super) monitor: PeerMonitor,
    group: GlooGroup,
    /// Between the GPUs of all, where it is chosen.
    pub(super) nccl: Option<NcclGroup>,
    failed: AtomicBool,
    /// Whether another rank has failed, and this one ends with it.
    repeats: AtomicBool,
    /// Dropped last: where it is the store itself, the others need it longest.
    _store: SharedStore,
}

/// How a rank sees the others.
pub(super) struct PeerMonitor {
    pub(super) rank: usize,
    pub(super) peers: Vec<Peer>,
    pub(super) timeout: Duration,
    /// Whether rank 0 serves it.
    store_of_first: bool,
    heartbeats: HeartbeatMonitor,
    has_left: AtomicBool,
}

impl ProcessGroup {
    pub fn alone() -> Self {
        Self { joined: None }
    }

    /// Meets the other ranks of `launch`; all must come within `timeout`. Later a rank that gives no sign of life for as long, or does
    /// nothing while others wait for it, is lost, and all end.
    pub fn join(launch: &Launched, timeout: Duration) -> Result<Self, Fault> {
        let joined = if launch.size > 1 { Some(Joined::within(launch, timeout)?) } else { None };
        Ok(Self { joined })
    }

    pub fn rank(&self) -> usize {
        self.joined.as_ref().map_or(0, |joined| joined.monitor.rank)
    }

    pub fn size(&self) -> usize {
        self.joined.as_ref().map_or(1, |joined| joined.monitor.peers.len())
    }

    /// Whether this is rank 0, which writes what all have made.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// All ranks and their hosts, by number; none where this one is alone.
    pub fn peers(&self) -> &[Peer] {
        self.joined.as_ref().map_or(&[], |joined| &joined.monitor.peers)
    }

    /// Tells the others that this rank ends, with what error if any; without this it ends with an unknown one.
    pub fn leave(&self, error: Option<&str>) -> Result<(), Fault> {
        let Some(joined) = &self.joined else { return Ok(()) };
        if let Some(error) = error {
            joined.monitor.leave(RankStatus::Failed(error.to_owned()));
            // Who only repeats another's error ends after that one: who has started them sees which was the first.
            if joined.repeats.load(Ordering::Relaxed) {
                sleep(joined.monitor.heartbeats.interval * 2);
            }
            return Ok(());
        }
        // Nobody is missed before all are here.
        self.barrier()?;
        joined.monitor.leave(RankStatus::Left);
        Ok(())
    }

    /// Notes that this rank ends for another one's sake.
    pub(super) fn repeat(&self) {
        if let Some(joined) = &self.joined {
            joined.repeats.store(true, Ordering::Relaxed);
        }
    }

    pub fn has_nccl(&self) -> bool {
        self.joined.as_ref().is_some_and(|joined| joined.nccl.is_some())
    }
}

fn interval(timeout: Duration) -> Duration {
    (timeout / 10).clamp(Duration::from_millis(50), Duration::from_millis(500))
}

impl Joined {
    /// Meets the others on a thread of its own: c10d waits for ever for the answer of one that listens and says nothing.
    fn within(launch: &Launched, timeout: Duration) -> Result<Self, Fault> {
        let (done, met) = mpsc::channel();
        let of_thread = launch.clone();
        let failed = |reason: &str| unreached(launch, &format!("{}:{}", launch.address, launch.port), timeout, reason);
        let meet = move || drop(done.send(Self::meet(&of_thread, timeout)));
        thread::Builder::new().name("rendezvous".to_owned()).spawn(meet).map_err(|error| failed(&error.to_string()))?;
        // What fails by itself in time says more.
        let limit = timeout + timeout / 10 + Duration::from_secs(1) + interval(timeout) * 4 * SILENT;
        met.recv_timeout(limit).map_err(|_| failed("who listens there does not answer"))?
    }

    fn meet(launch: &Launched, timeout: Duration) -> Result<Self, Fault> {
        let until = Instant::now() + timeout;
        // Before it takes a place for which the others would wait.
        let interface = named_interface()?;
        let (place, own) = MeetingPlace::of(launch, timeout, until)?;
        let (prefix, peers) = place.meet(until)?;
        let MeetingPlace { store, at, .. } = place;
        let Launched { rank, size, .. } = *launch;
        let failed = |during| move |reason: String| not_exchanged(rank, during, &reason);
        let second =
            SharedStore::open(&at.ip().to_string(), at.port(), None, timeout).map_err(failed("joining the store again"))?;
        let heartbeats = HeartbeatMonitor::start(second, &prefix, rank, size, interval(timeout))
            .map_err(|error| failed("starting the thread of its heartbeats")(error.to_string()))?;
        let has_left = AtomicBool::new(false);
        let monitor = PeerMonitor { rank, peers, timeout, store_of_first: !launch.is_served, heartbeats, has_left };
        let connecting = until.saturating_duration_since(Instant::now()).max(timeout.min(Duration::from_secs(1)));
        let timeouts = [connecting, timeout * (PATIENCE + 1)];
        let (prefix, address) = (format!("{prefix}/gloo"), own.to_string());
        let group = GlooGroup::open(&store, &prefix, [rank, size], interface.as_deref(), &address, timeouts)
            .map_err(|reason| monitor.tell(monitor.whose_fault("connecting with all ranks", 0, &reason)))?;
        Ok(Self { monitor, group, nccl: None, failed: AtomicBool::new(false), repeats: AtomicBool::new(false), _store: store })
    }

    /// Does an exchange: begins it and waits until it is done, or until a rank is known to be lost.
    pub(super) fn exchange<'a, P: PendingExchange>(
        &'a self,
        during: &'static str,
        begin: impl FnOnce(&'a GlooGroup) -> Result<P, String>,
    ) -> Result<(), Fault> {
        let failed = |reason: String| not_exchanged(self.monitor.rank, during, &reason);
        if self.failed.load(Ordering::Relaxed) {
            return Err(failed("an exchange before has failed".to_owned()));
        }
        let number = self.monitor.heartbeats.begin_exchange();
        let done = begin(&self.group).map_err(failed).and_then(|work| self.monitor.wait(&work, during, number));
        done.map_err(|error| {
            self.failed.store(true, Ordering::Relaxed);
            self.repeats.store(true, Ordering::Relaxed);
            // A GPU would wait for ever for what is lost.
            self.nccl.iter().for_each(|nccl| nccl.close(false));
            self.monitor.tell(error)
        })
    }
}

impl PeerMonitor {
    /// Says a last status, unless there was one. Who serves the store stays a moment, until the others have heard it or are silent.
    fn leave(&self, status: RankStatus) {
        if self.has_left.swap(true, Ordering::Relaxed) {
            return;
        }
        self.heartbeats.say(status);
        let serves = self.store_of_first && self.rank == 0;
        for _ in 0..if serves { 4 * SILENT } else { 0 } {
            let waits = |peer: &PeerStatus| peer.status.exchanges().is_some() && peer.silent < SILENT;
            let peers = self.heartbeats.peers();
            let others = peers.iter().enumerate().filter(|(rank, _)| *rank != self.rank);
            if !others.into_iter().any(|(_, peer)| waits(peer)) || self.heartbeats.lost_store().is_some() {
                return;
            }
            sleep(self.heartbeats.interval / 2);
        }
    }

    /// Leaves with an error. Whom one takes for lost is lost for all: the first who sees it tells the others.
    fn tell(&self, error: Fault) -> Fault {
        self.leave(match error.payload::<PeerGone>().cloned() {
            Some(PeerGone { rank, reason, has_ended: false }) => RankStatus::Lost { rank, reason },
            Some(PeerGone { rank, reason, .. }) => {
                RankStatus::Lost { rank, reason: format!("it has ended with an error: {reason}") }
            }
            None => RankStatus::Failed(error.to_string()),
        });
        error
    }

    fn wait(&self, work: &impl PendingExchange, during: &'static str, number: u64) -> Result<(), Fault> {
        // Looks, not the clock, for the same reason as the rounds of heartbeats.
        let (mut looks, mut looks_at_round, mut round) = (0_u32, 0_u32, self.heartbeats.rounds());
        let begin = round;
        loop {
            if work.wait(LOOK).map_err(|reason| self.whose_fault(during, number, &reason))? {
                return Ok(());
            }
            looks += 1;
            if self.heartbeats.rounds() != round {
                (round, looks_at_round) = (self.heartbeats.rounds(), looks);
            }
            let unheard = LOOK * (looks - looks_at_round);
            if let Some(error) =
                self.who_is_gone(during, self.timeout, unheard).or_else(|| self.who_hangs(during, number, round - begin))
            {
                return Err(error);
            }
            if LOOK * looks >= self.timeout * PATIENCE {
                return Err(self.whose_fault(during, number, &format!("it has not ended for {}", seconds(LOOK * looks))));
            }
        }
    }

    fn lost(&self, rank: usize, during: &'static str, reason: String) -> Fault {
        PeerGone { rank, reason, has_ended: false }.fault(&self.peers[rank], self.rank, during)
    }

    /// Who is known to have ended, or gives no heartbeat for `limit`; `unheard` is how long this rank could not listen.
    pub(super) fn who_is_gone(&self, during: &'static str, limit: Duration, unheard: Duration) -> Option<Fault> {
        let own = self.rank;
        let ended = |rank: usize, reason| PeerGone { rank, reason, has_ended: true }.fault(&self.peers[rank], own, during);
        let peers: Vec<_> = self.heartbeats.peers().into_iter().enumerate().filter(|(rank, _)| *rank != own).collect();
        let said = peers.iter().find_map(|(rank, peer)| match &peer.status {
            RankStatus::Failed(reason) => Some(ended(*rank, reason.clone())),
            // Either its own loss, or one that it has heard of.
            RankStatus::Lost { rank: other, reason } if *other < self.peers.len() && *other != own => {
                Some(self.lost(*other, during, reason.clone()))
            }
            RankStatus::Lost { reason, .. } => Some(ended(*rank, format!("it has given this rank up: {reason}"))),
            _ => None,
        });
        let silent = || {
            // Where several are, the first to fall silent has taken the others along.
            let (rank, peer) = peers.iter().max_by_key(|(_, peer)| peer.silent)?;
            let time = self.heartbeats.interval * peer.silent;
            (time >= limit).then(|| match peer.status {
                RankStatus::Left => ended(*rank, "it has left in good order, and others have not".to_owned()),
                _ => self.lost(*rank, during, format!("no sign of life for {}", seconds(time))),
            })
        };
        let store = || {
            let has_hung = (unheard >= self.timeout).then(|| format!("it has not answered for {}", seconds(unheard)));
            let reason = format!("the TCPStore is not reached any more: {}", self.heartbeats.lost_store().or(has_hung)?);
            let is_of_other = self.store_of_first && own != 0;
            Some(if is_of_other { self.lost(0, during, reason) } else { not_exchanged(own, during, &reason) })
        };
        said.or_else(silent).or_else(store)
    }

    /// Why the exchange `number` failed: a rank that is gone is silent soon, another has seen more, or one lives and has not come.
    fn whose_fault(&self, during: &'static str, number: u64, reason: &str) -> Fault {
        // Rounds of heartbeats, which are longer where the machine is busy.
        let begin = self.heartbeats.rounds();
        for _ in 0..16 * SILENT {
            if self.heartbeats.rounds() > begin + 2 * u64::from(SILENT) {
                break;
            }
            if let Some(error) = self.who_is_gone(during, self.heartbeats.interval * SILENT, Duration::ZERO) {
                let Some(PeerGone { rank, reason: sign, has_ended: false }) = error.payload() else { return error };
                return self.lost(*rank, during, format!("{sign}; {reason}"));
            }
            sleep(self.heartbeats.interval / 2);
        }
        let peers = self.heartbeats.peers();
        let is_late = |rank: &usize| *rank != self.rank && peers[*rank].status.exchanges().is_some_and(|begun| begun < number);
        match (0..peers.len()).find(is_late) {
            Some(rank) => self.lost(rank, during, format!("it gives signs of life, and has not come here: {reason}")),
            None => not_exchanged(self.rank, during, reason),
        }
    }

    /// Who lives, has not come to the exchange `number` for which this rank waits since so many `rounds`, and does nothing on its way there:
    /// it waits for what does not come, a disk say.
    fn who_hangs(&self, during: &'static str, number: u64, rounds: u64) -> Option<Fault> {
        let peers = self.heartbeats.peers();
        let stuck = |rank: usize| Some(self.heartbeats.interval * peers[rank].stuck_before(number, rounds)?);
        let hangs = |rank: &usize| *rank != self.rank && stuck(*rank).is_some_and(|stuck| stuck >= self.timeout);
        // Others may be further on and wait for it, too.
        let rank = (0..peers.len()).filter(hangs).min_by_key(|rank| peers[*rank].status.exchanges())?;
        let time = seconds(stuck(rank)?);
        Some(self.lost(
            rank,
            during,
            format!("it hangs: it gives signs of life, and has neither worked nor come here for {time}"),
        ))
    }
}

fn seconds(time: Duration) -> Seconds {
    Seconds(time.as_secs_f64())
}

impl Drop for Joined {
    fn drop(&mut self) {
        if self.monitor.has_left.load(Ordering::Relaxed) && !self.failed.load(Ordering::Relaxed) {
            self.nccl.iter().for_each(|nccl| nccl.close(true));
            self.group.close();
        } else {
            self.monitor.leave(RankStatus::Failed("it does not say why".to_owned()));
        }
    }
}
