//! How ranks find each other: the `TCPStore`, who belongs to the run, and the connections between all.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::heartbeat::{self, RankStatus};
use super::{Launched, Peer};
use crate::native::{SharedStore, host_name};
use crate::units::{Fault, Seconds, quoted};

/// How often who waits looks again.
const LOOK: Duration = Duration::from_millis(50);

/// Serves the store at the address of rank 0 alone, and nowhere else.
fn serve(launch: &Launched, timeout: Duration) -> Result<(SharedStore, SocketAddr, IpAddr), Fault> {
    let address = format!("{}:{}", launch.address, launch.port);
    let unserved = |source: io::Error| {
        let hint = match source.kind() {
            io::ErrorKind::AddrInUse => "another program or run listens there: choose another `MASTER_PORT`",
            io::ErrorKind::AddrNotAvailable => "`MASTER_ADDR` must be an address of the machine on which rank 0 runs",
            _ => "look at `MASTER_ADDR` and `MASTER_PORT`, by which the ranks find each other",
        };
        Fault::failed(format!("rank 0 can't listen at {address}")).with_hint(hint).caused_by(source)
    };
    let listener = TcpListener::bind((launch.address.as_str(), launch.port)).map_err(unserved)?;
    let at = listener.local_addr().map_err(unserved)?;
    let store = SharedStore::open(&at.ip().to_string(), at.port(), Some(listener), timeout)
        .map_err(|reason| unreached(launch, &at.to_string(), timeout, &reason))?;
    Ok((store, at, at.ip()))
}

/// Connects with the store, which may begin later.
fn reach(launch: &Launched, timeout: Duration, until: Instant) -> Result<(SharedStore, SocketAddr, IpAddr), Fault> {
    let address = format!("{}:{}", launch.address, launch.port);
    loop {
        // Names, too, may come later: a pod's is known once it runs.
        let (found, mut why) = match (launch.address.as_str(), launch.port).to_socket_addrs() {
            Ok(found) => (found.collect(), "the name has no address".to_owned()),
            Err(error) => (Vec::new(), error.to_string()),
        };
        for at in found {
            let left = until.saturating_duration_since(Instant::now()).max(LOOK);
            // First by a plain connection: it says at once what is wrong, and which of our addresses leads there.
            let own = TcpStream::connect_timeout(&at, left.min(Duration::from_secs(10))).and_then(|stream| stream.local_addr());
            let open = |own: SocketAddr| Ok((SharedStore::open(&at.ip().to_string(), at.port(), None, left)?, at, own.ip()));
            match own.map_err(|error| error.to_string()).and_then(open) {
                Ok(reached) => return Ok(reached),
                Err(reason) => why = reason,
            }
        }
        if Instant::now() >= until {
            return Err(unreached(launch, &address, timeout, &quoted(why)));
        }
        sleep(LOOK);
    }
}

/// The store in which ranks meet, as one of them has reached it.
pub(super) struct MeetingPlace<'a> {
    pub(super) store: SharedStore,
    /// Where the store is, for those who connect once more.
    pub(super) at: SocketAddr,
    launch: &'a Launched,
    timeout: Duration,
}

impl<'a> MeetingPlace<'a> {
    /// Serves the store, or reaches it; with the address of this machine by which the others reach this rank.
    pub(super) fn of(launch: &'a Launched, timeout: Duration, until: Instant) -> Result<(Self, IpAddr), Fault> {
        let serves = launch.rank == 0 && !launch.is_served;
        let (store, at, own) = if serves { serve(launch, timeout)? } else { reach(launch, timeout, until)? };
        Ok((Self { store, at, launch, timeout }, own))
    }

    /// Meets all ranks; returns where the run's keys begin, and who they are.
    pub(super) fn meet(&self, until: Instant) -> Result<(String, Vec<Peer>), Fault> {
        let (prefix, rank) = (self.agree()?, self.launch.rank);
        self.set(&heartbeat::key(&prefix, rank), &RankStatus::FIRST.to_bytes())?;
        self.set(&format!("{prefix}/host/{rank}"), host_name().as_bytes())?;
        let peers = self.wait_for_all(&prefix, until)?;
        Ok((prefix, peers))
    }

    fn lost(&self, reason: &str) -> Fault {
        unreached(self.launch, &self.at.to_string(), self.timeout, reason)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<(), Fault> {
        self.store.set(key, value).map_err(|reason| self.lost(&reason))
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, Fault> {
        self.store.get(key).map_err(|reason| self.lost(&reason))
    }

    /// Whether store and ranks belong to one run: what rank 0 writes there all others must find. Returns where the run's keys begin.
    fn agree(&self) -> Result<String, Fault> {
        let Launched { rank, size, run_id, is_served, .. } = self.launch;
        let own = format!("run `{run_id}` of {size} ranks with kvtune {}", env!("CARGO_PKG_VERSION"));
        // A store that outlives a run has the next one's keys beside.
        let prefix = format!("kvtune/{run_id}");
        let sign = if *is_served { format!("{prefix}/sign") } else { "kvtune/sign".to_owned() };
        if *rank == 0 {
            // Not even its first key is overwritten by a second rank 0.
            self.claim(&prefix)?;
            self.set(&sign, own.as_bytes())?;
            return Ok(prefix);
        }
        let found = self.get(&sign)?;
        if found != own.as_bytes() {
            let found: String = String::from_utf8_lossy(&found).chars().take(200).collect();
            let message = format!("rank {rank} belongs to {own}, and the TCPStore at {} to {found}", self.at);
            let hint = "give each run a `MASTER_PORT` of its own, and all ranks of a run the same settings";
            return Err(Fault::failed(message).with_hint(hint));
        }
        self.claim(&prefix)?;
        Ok(prefix)
    }

    /// Takes the rank's place, which one process can.
    fn claim(&self, prefix: &str) -> Result<(), Fault> {
        let rank = self.launch.rank;
        if self.store.add(&format!("{prefix}/claim/{rank}"), 1).map_err(|reason| self.lost(&reason))? == 1 {
            Ok(())
        } else {
            let hint = "start each rank once; a second one was started with the same `RANK` or its like";
            Err(Fault::failed(format!("there is a rank {rank} already in the run at {}", self.at)).with_hint(hint))
        }
    }

    /// Waits until all ranks have said where they are.
    fn wait_for_all(&self, prefix: &str, until: Instant) -> Result<Vec<Peer>, Fault> {
        let key = |rank: usize| format!("{prefix}/host/{rank}");
        let size = self.launch.size;
        let mut missing: Vec<usize> = (0..size).collect();
        loop {
            let mut still = Vec::new();
            for rank in missing {
                if !self.store.has(&key(rank)).map_err(|reason| self.lost(&reason))? {
                    still.push(rank);
                }
            }
            missing = still;
            if missing.is_empty() {
                break;
            }
            if Instant::now() >= until {
                let (came, waited) = (size - missing.len(), Seconds(self.timeout.as_secs_f64()));
                let message = format!("{came} of {size} ranks came to {} within {waited}: missing {}", self.at, ranks(&missing));
                let hint = "see what these ranks say, and whether as many are started as `WORLD_SIZE` or its like says";
                return Err(Fault::failed(message).with_hint(hint));
            }
            sleep(LOOK);
        }
        let peer = |rank| Ok(Peer { rank, host: String::from_utf8_lossy(&self.get(&key(rank))?).into_owned() });
        (0..size).map(peer).collect()
    }
}

/// The store is not reached; `reason` is what the last attempt came to.
pub(super) fn unreached(launch: &Launched, address: &str, waited: Duration, reason: &str) -> Fault {
    let (rank, waited) = (launch.rank, Seconds(waited.as_secs_f64()));
    let message = format!("rank {rank} does not reach the TCPStore at {address} within {waited}: {reason}");
    Fault::failed(message).with_hint(
        "see whether rank 0 runs, and whether `MASTER_ADDR` and `MASTER_PORT` lead from this machine to it (a name that is 127.0.0.1 or \
         127.0.1.1 on rank 0's own machine does not)",
    )
}

/// `rank 1` or `ranks 1, 3`.
fn ranks(ranks: &[usize]) -> String {
    let many = if ranks.len() == 1 { "rank" } else { "ranks" };
    let shown: Vec<_> = ranks.iter().take(20).map(ToString::to_string).collect();
    let more = if ranks.len() > 20 { format!(" and {} more", ranks.len() - 20) } else { String::new() };
    format!("{many} {}{more}", shown.join(", "))
}

/// The first of the interfaces that `GLOO_SOCKET_IFNAME` names, if it does; it must be one of this machine.
pub(super) fn named_interface() -> Result<Option<String>, Fault> {
    let Some(names) = std::env::var("GLOO_SOCKET_IFNAME").ok().filter(|names| !names.is_empty()) else { return Ok(None) };
    let name = names.split(',').next().unwrap_or_default().trim();
    let mut there: Vec<String> = std::fs::read_dir("/sys/class/net")
        .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    there.sort();
    if there.is_empty() || there.iter().any(|known| known == name) {
        return Ok(Some(name.to_owned()));
    }
    Err(Fault::usage(
        format!("`GLOO_SOCKET_IFNAME={}` is no network interface of this machine", quoted(&names)),
        format!("there are {}; without the variable the one that leads to `MASTER_ADDR` is taken", there.join(", ")),
    ))
}
