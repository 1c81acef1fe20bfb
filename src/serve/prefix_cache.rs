//! Sessions that wait for a prompt which begins with what they have read.

use crate::engine::{Session, Settings};
use crate::generation::{Continued, at_beginning, shared_tokens};

/// The sessions that were used last.
pub(super) struct PrefixCache {
    /// Each with the tokens that it has read.
    sessions: Vec<Continued>,
    capacity: usize,
}

impl PrefixCache {
    /// None yet, and never more than so many.
    pub(super) fn new(capacity: usize) -> Self {
        Self { sessions: Vec::new(), capacity }
    }

    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// A copy of the one that has read most of the beginning of a prompt, as it stood there.
    pub(super) fn find(&mut self, prompt: &[u32], settings: &Settings) -> Option<Session> {
        let shared = self.sessions.iter().map(|held| shared_tokens(settings, &held.ids, prompt)).enumerate();
        let (at, tokens) = shared.max_by_key(|&(_, tokens)| tokens).filter(|&(_, tokens)| tokens > 0)?;
        // The one that was used last is the last to go.
        let held = self.sessions.remove(at);
        let copy = held.session.fork().ok();
        self.sessions.push(held);
        at_beginning(copy?, tokens)
    }

    /// Holds a session that has read `ids`, in place of one that has read the same, or of the one that was not used for longest.
    pub(super) fn hold(&mut self, ids: &[u32], session: Session) {
        let ids = ids[..session.num_tokens().min(ids.len())].to_vec();
        self.sessions.retain(|held| held.ids != ids);
        self.sessions.push(Continued { session, ids });
        while self.sessions.len() > self.capacity {
            self.sessions.remove(0);
        }
    }
}
