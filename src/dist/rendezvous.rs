//! How ranks find each other: the `TCPStore`, who belongs to the run, and the connections between all.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{DistError, Launched, Peer, heartbeat};
use crate::native::{LocalEnd, SharedStore, host_name};
use crate::units::quoted;

/// How often who waits looks again.
const LOOK: Duration = Duration::from_millis(50);

/// What a rank knows when it has met the others.
pub(super) struct Rendezvous {
    pub(super) store: SharedStore,
    /// Where this rank's keys begin.
    pub(super) prefix: String,
    pub(super) peers: Vec<Peer>,
    /// Where the store is, for those who connect once more.
    pub(super) at: SocketAddr,
    /// The end of this machine by which the others reach this rank.
    pub(super) end: LocalEnd,
    /// Until when all must have connected.
    pub(super) until: Instant,
}

impl Rendezvous {
    /// Meets all ranks within `timeout`.
    pub(super) fn of(launch: &Launched, timeout: Duration) -> Result<Self, DistError> {
        let until = Instant::now() + timeout;
        // Before it takes a place for which the others would wait.
        let named = std::env::var("GLOO_SOCKET_IFNAME").ok().filter(|names| !names.is_empty());
        let named = named.as_deref().map(interface).transpose()?;
        let (store, at, own) =
            if launch.rank == 0 && !launch.is_served { serve(launch, timeout)? } else { reach(launch, timeout, until)? };
        let place = MeetingPlace { store: &store, at, launch, timeout };
        let prefix = place.agree()?;
        let end = named.map_or_else(|| LocalEnd::Address(own.to_string()), LocalEnd::Interface);
        place.set(&heartbeat::key(&prefix, launch.rank), &heartbeat::first())?;
        place.set(&format!("{prefix}/host/{}", launch.rank), host_name().as_bytes())?;
        let peers = place.wait_for_all(&prefix, until)?;
        Ok(Self { store, prefix, peers, at, end, until })
    }
}

/// Serves the store at the address of rank 0 alone, and nowhere else.
fn serve(launch: &Launched, timeout: Duration) -> Result<(SharedStore, SocketAddr, IpAddr), DistError> {
    let address = format!("{}:{}", launch.address, launch.port);
    let unserved = |source| DistError::Unserved { address: address.clone(), source };
    let listener = TcpListener::bind((launch.address.as_str(), launch.port)).map_err(unserved)?;
    let at = listener.local_addr().map_err(unserved)?;
    let store = SharedStore::open(&at.ip().to_string(), at.port(), Some(listener), timeout)
        .map_err(|reason| unreached(launch, at, timeout, reason))?;
    Ok((store, at, at.ip()))
}

/// Connects with the store, which may begin later.
fn reach(launch: &Launched, timeout: Duration, until: Instant) -> Result<(SharedStore, SocketAddr, IpAddr), DistError> {
    let address = format!("{}:{}", launch.address, launch.port);
    let failed = |reason: String| DistError::Unreached { rank: launch.rank, address: address.clone(), waited: timeout, reason };
    loop {
        // Names, too, may come later: a pod's is known once it runs.
        let why = match (launch.address.as_str(), launch.port).to_socket_addrs() {
            Ok(found) => {
                let mut why = "the name has no address".to_owned();
                for at in found {
                    let left = until.saturating_duration_since(Instant::now()).max(LOOK);
                    // First by a plain connection: it says at once what is wrong, and which of our addresses leads there.
                    match TcpStream::connect_timeout(&at, left.min(Duration::from_secs(10)))
                        .and_then(|stream| stream.local_addr())
                    {
                        Ok(own) => match SharedStore::open(&at.ip().to_string(), at.port(), None, left) {
                            Ok(store) => return Ok((store, at, own.ip())),
                            Err(reason) => why = reason,
                        },
                        Err(error) => why = error.to_string(),
                    }
                }
                why
            }
            Err(error) => error.to_string(),
        };
        if Instant::now() >= until {
            return Err(failed(quoted(why)));
        }
        sleep(LOOK);
    }
}

/// The store in which ranks meet, as one of them has reached it.
struct MeetingPlace<'a> {
    store: &'a SharedStore,
    at: SocketAddr,
    launch: &'a Launched,
    timeout: Duration,
}

impl MeetingPlace<'_> {
    fn lost(&self, reason: String) -> DistError {
        unreached(self.launch, self.at, self.timeout, reason)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<(), DistError> {
        self.store.set(key, value).map_err(|reason| self.lost(reason))
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, DistError> {
        self.store.get(key).map_err(|reason| self.lost(reason))
    }

    /// Whether store and ranks belong to one run: what rank 0 writes there all others must find. Returns where the run's keys begin.
    fn agree(&self) -> Result<String, DistError> {
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
            let found = String::from_utf8_lossy(&found).chars().take(200).collect();
            return Err(DistError::Foreign { rank: *rank, address: self.at.to_string(), own, found });
        }
        self.claim(&prefix)?;
        Ok(prefix)
    }

    /// Takes the rank's place, which one process can.
    fn claim(&self, prefix: &str) -> Result<(), DistError> {
        let rank = self.launch.rank;
        match self.store.add(&format!("{prefix}/claim/{rank}"), 1).map_err(|reason| self.lost(reason))? {
            1 => Ok(()),
            _ => Err(DistError::Taken { rank, address: self.at.to_string() }),
        }
    }

    /// Waits until all ranks have said where they are.
    fn wait_for_all(&self, prefix: &str, until: Instant) -> Result<Vec<Peer>, DistError> {
        let key = |rank: usize| format!("{prefix}/host/{rank}");
        let size = self.launch.size;
        let mut missing: Vec<usize> = (0..size).collect();
        loop {
            let mut still = Vec::new();
            for rank in missing {
                if !self.store.has(&key(rank)).map_err(|reason| self.lost(reason))? {
                    still.push(rank);
                }
            }
            missing = still;
            if missing.is_empty() {
                break;
            }
            if Instant::now() >= until {
                return Err(DistError::Missing { missing, size, address: self.at.to_string(), waited: self.timeout });
            }
            sleep(LOOK);
        }
        let peer = |rank| Ok(Peer { rank, host: String::from_utf8_lossy(&self.get(&key(rank))?).into_owned() });
        (0..size).map(peer).collect()
    }
}

fn unreached(launch: &Launched, at: SocketAddr, waited: Duration, reason: String) -> DistError {
    DistError::Unreached { rank: launch.rank, address: at.to_string(), waited, reason }
}

/// The first of the interfaces that `GLOO_SOCKET_IFNAME` names; it must be one of this machine.
fn interface(names: &str) -> Result<String, DistError> {
    let name = names.split(',').next().unwrap_or_default().trim();
    let mut there: Vec<String> = std::fs::read_dir("/sys/class/net")
        .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    there.sort();
    if there.is_empty() || there.iter().any(|known| known == name) {
        return Ok(name.to_owned());
    }
    Err(DistError::Environment {
        message: format!("`GLOO_SOCKET_IFNAME={}` is no network interface of this machine", quoted(names)),
        hint: format!("there are {}; without the variable the one that leads to `MASTER_ADDR` is taken", there.join(", ")),
    })
}
