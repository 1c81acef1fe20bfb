//! What ranks tell each other: what each has made, or why it has not.

use std::fmt::Display;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{DistError, ProcessGroup};
use crate::units::{Exit, Exits};

/// What a rank tells the others.
#[derive(Serialize, Deserialize)]
enum Told<T> {
    Made(T),
    /// It was asked to stop.
    GaveUp,
    Failed {
        reason: String,
        exit: Exit,
    },
}

impl ProcessGroup {
    /// How many ranks run on this rank's machine, itself counted.
    pub fn ranks_here(&self) -> usize {
        let own = self.peers().get(self.rank());
        self.peers().iter().filter(|peer| own.is_some_and(|own| own.host == peer.host)).count().max(1)
    }

    /// What every rank has made, by rank; all call it, at the same place, which `at` says in words. Where one has failed, all fail: that one
    /// with its own error, the others with what it said. `has_given_up` tells errors that only say that somebody asked to stop; another
    /// failure counts more.
    ///
    /// # Errors
    /// As above, and where a rank cannot be reached.
    pub fn agree<T, E>(&self, at: &'static str, made: Result<T, E>, has_given_up: impl Fn(&E) -> bool) -> Result<Vec<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: Display + Exits + From<DistError>,
    {
        if self.size() == 1 {
            return made.map(|made| vec![made]);
        }
        let told = match &made {
            Ok(made) => Told::Made(made),
            Err(error) if has_given_up(error) => Told::GaveUp,
            Err(error) => Told::Failed { reason: error.to_string(), exit: error.exit_code() },
        };
        let elsewhere = |rank: usize, found: &str| DistError::Elsewhere {
            peer: self.peers()[rank].clone(),
            at: found.to_owned(),
            own: self.rank(),
            own_at: at,
        };
        let own = serde_json::to_string(&told).map_err(|source| elsewhere(self.rank(), &source.to_string()))?;
        let all = match self.gather(format!("{at}\n{own}").as_bytes()) {
            Ok(all) => all,
            // Its own failure says more, of which the lost connection may be the cause.
            Err(lost) => return Err(made.err().filter(|error| !has_given_up(error)).unwrap_or_else(|| lost.into())),
        };
        made?;
        let (mut read, mut gave_up) = (Vec::with_capacity(all.len()), None);
        for (rank, bytes) in all.iter().enumerate() {
            let peer = || self.peers()[rank].clone();
            let text = String::from_utf8_lossy(bytes);
            let (found, told) = text.split_once('\n').unwrap_or_default();
            // A rank that has failed where the others did not may be on its way to the end.
            let told = serde_json::from_str(told).ok().filter(|_| found == at);
            match told.ok_or_else(|| elsewhere(rank, found))? {
                Told::Made(made) => read.push(made),
                Told::GaveUp => gave_up = gave_up.or_else(|| Some(peer())),
                Told::Failed { reason, exit } => {
                    self.repeat();
                    return Err(DistError::OtherFailed { peer: peer(), reason, exit }.into());
                }
            }
        }
        gave_up.map_or(Ok(read), |peer| Err(DistError::OtherGaveUp { peer }.into()))
    }

    /// Does `work` on the first rank, while the others wait; all fail where it does, as in [`agree`](Self::agree). What it came to, where this
    /// is the first.
    ///
    /// # Errors
    /// As there.
    pub fn first<T, E>(
        &self,
        at: &'static str,
        work: impl FnOnce() -> Result<T, E>,
        has_given_up: impl Fn(&E) -> bool,
    ) -> Result<Option<T>, E>
    where
        E: Display + Exits + From<DistError>,
    {
        let mut done = None;
        let made = if self.is_first() { work().map(|made| done = Some(made)) } else { Ok(()) };
        self.agree(at, made, has_given_up)?;
        Ok(done)
    }
}
