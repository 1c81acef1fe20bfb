//! Another rank, and what is said of it when it is gone.

use std::fmt;

use crate::units::{Fault, abridged};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub rank: usize,
    /// The name that its host gives itself.
    pub host: String,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} on `{}`", self.rank, abridged(&self.host))
    }
}

/// That a rank is gone, as its fault carries it.
#[derive(Clone, Debug)]
pub(super) struct PeerGone {
    pub(super) rank: usize,
    pub(super) reason: String,
    /// Whether it has ended with an error of its own; else it, or the connection with it, is lost.
    pub(super) has_ended: bool,
}

impl PeerGone {
    /// The fault of rank `own`, which waits for `peer`.
    pub(super) fn fault(self, peer: &Peer, own: usize, during: &str) -> Fault {
        let reason = &self.reason;
        let (message, hint) = if self.has_ended {
            let message = format!("{peer} has ended with an error, so rank {own} ends too ({during}): {reason}");
            (message, "see what that rank says; its error is the one to mend")
        } else {
            let hint = "see what that rank says and whether its machine is up; go on from the last checkpoint with `kvtune resume`; for one \
                        that waits longer for its disk raise `--dist-timeout`";
            (format!("{peer} is lost while rank {own} waits for it ({during}): {reason}"), hint)
        };
        Fault::failed(message).with_hint(hint).carrying(self)
    }
}

/// An exchange failed, and nobody is known to be gone.
pub(super) fn not_exchanged(own: usize, during: &str, reason: &str) -> Fault {
    let message = format!("rank {own} can't go on ({during}): {reason}");
    Fault::failed(message).with_hint("see what the other ranks say, and whether the network between them is up")
}
