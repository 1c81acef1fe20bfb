//! What can go wrong among several ranks.

use std::fmt;
use std::io;
use std::time::Duration;

use crate::units::{Exit, Failure, FaultKind, Seconds, abridged};

/// A rank and its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The number of the rank, from 0.
    pub rank: usize,
    /// The name that its host gives itself.
    pub host: String,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} on `{}`", self.rank, abridged(&self.host))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum DistError {
    /// The environment's variables contradict each other, or one is missing.
    #[error("{message}")]
    Environment { message: String, hint: String },
    /// The `TCPStore` can't be served.
    #[error("rank 0 can't listen at {address}")]
    Unserved { address: String, source: io::Error },
    /// The `TCPStore` is not reached.
    #[error("rank {rank} does not reach the TCPStore at {address} within {}: {reason}", seconds(.waited))]
    Unreached {
        rank: usize,
        address: String,
        waited: Duration,
        /// What the last attempt came to.
        reason: String,
    },
    #[error("{} of {size} ranks came to {address} within {}: missing {}", size - missing.len(), seconds(.waited), ranks(.missing))]
    Missing {
        missing: Vec<usize>,
        /// How many there should be.
        size: usize,
        address: String,
        /// For how long they were waited for.
        waited: Duration,
    },
    /// The `TCPStore` at the address is another run's.
    #[error("rank {rank} belongs to {own}, and the TCPStore at {address} to {found}")]
    Foreign {
        rank: usize,
        address: String,
        own: String,
        /// The run that it found.
        found: String,
    },
    /// The rank is there already.
    #[error("there is a rank {rank} already in the run at {address}")]
    Taken { rank: usize, address: String },
    /// NCCL is asked for, and can't be had.
    #[error("`--backend nccl` can't be had: {reason}")]
    NoNccl { reason: String },
    /// A rank is gone, or the connection with it.
    #[error("{peer} is lost while rank {own} waits for it ({during}): {reason}")]
    Lost { peer: Peer, own: usize, during: &'static str, reason: String },
    #[error("{peer} has ended with an error, so rank {own} ends too ({during}): {reason}")]
    Ended { peer: Peer, own: usize, during: &'static str, reason: String },
    /// Another rank has failed in what all were at, and all end with it.
    #[error("{peer} has failed: {reason}")]
    OtherFailed { peer: Peer, reason: String, exit: Exit },
    /// Another rank was asked to stop, and has given up what all were at.
    #[error("{peer} was asked to stop")]
    OtherGaveUp { peer: Peer },
    /// Another rank is at something else.
    #[error("{peer} is {}, where rank {own} is {own_at}", abridged(at))]
    Elsewhere { peer: Peer, at: String, own: usize, own_at: &'static str },
    /// An exchange failed, and nobody is known to be gone.
    #[error("rank {own} can't go on ({during}): {reason}")]
    Exchange { own: usize, during: &'static str, reason: String },
}

fn seconds(time: &Duration) -> Seconds {
    Seconds(time.as_secs_f64())
}

/// `rank 1` or `ranks 1, 3`.
fn ranks(ranks: &[usize]) -> String {
    let many = if ranks.len() == 1 { "rank" } else { "ranks" };
    let shown: Vec<_> = ranks.iter().take(20).map(ToString::to_string).collect();
    let more = if ranks.len() > 20 { format!(" and {} more", ranks.len() - 20) } else { String::new() };
    format!("{many} {}{more}", shown.join(", "))
}

impl Failure for DistError {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Environment { hint, .. } => hint.clone(),
            Self::Unserved { source, .. } => match source.kind() {
                io::ErrorKind::AddrInUse => "another program or run listens there: choose another `MASTER_PORT`".into(),
                io::ErrorKind::AddrNotAvailable => "`MASTER_ADDR` must be an address of the machine on which rank 0 runs".into(),
                _ => "look at `MASTER_ADDR` and `MASTER_PORT`, by which the ranks find each other".into(),
            },
            Self::Unreached { .. } => {
                "see whether rank 0 runs, and whether `MASTER_ADDR` and `MASTER_PORT` lead from this machine to it (a name that is \
                 127.0.0.1 or 127.0.1.1 on rank 0's own machine does not)"
                    .into()
            }
            Self::Missing { .. } => "see what these ranks say, and whether as many are started as `WORLD_SIZE` or its like says".into(),
            Self::Foreign { .. } => "give each run a `MASTER_PORT` of its own, and all ranks of a run the same settings".into(),
            Self::Taken { .. } => "start each rank once; a second one was started with the same `RANK` or its like".into(),
            Self::Lost { .. } => {
                "see what that rank says and whether its machine is up; go on from the last checkpoint with `kvtune resume`; for one that waits \
                 longer for its disk raise `--dist-timeout`"
                    .into()
            }
            Self::NoNccl { .. } => {
                "NCCL needs a GPU of its own for each rank, and on all the same `libnccl.so.2`, which comes with libtorch's CUDA wheels \
                 (`KVTUNE_NCCL` names another); `--backend auto` does without"
                    .into()
            }
            Self::OtherGaveUp { .. } => "go on from the last checkpoint with `kvtune resume`".into(),
            Self::Elsewhere { .. } => "see what the other ranks say, and start all with the same version of kvtune".into(),
            Self::Ended { .. } | Self::OtherFailed { .. } => "see what that rank says; its error is the one to mend".into(),
            Self::Exchange { .. } => "see what the other ranks say, and whether the network between them is up".into(),
        })
    }

    fn kind(&self) -> FaultKind {
        match self {
            Self::OtherGaveUp { .. } => FaultKind::Interrupted,
            _ => self.origin().map_or(FaultKind::Other, Failure::kind),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Environment { .. } | Self::NoNccl { .. } => Exit::Usage,
            Self::OtherFailed { exit, .. } => *exit,
            _ => Exit::Failed,
        }
    }
}
