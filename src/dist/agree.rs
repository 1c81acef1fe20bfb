//! What ranks tell each other: what each has made, or why it has not.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ProcessGroup;
use crate::units::{Exit, Fault, FaultKind, abridged};

/// What a rank has made, or why it has failed; without a reason it was asked to stop.
type Told<T> = Result<T, Option<(String, Exit)>>;

impl ProcessGroup {
    /// How many ranks run on this rank's machine, itself counted.
    pub fn ranks_here(&self) -> usize {
        let own = self.peers().get(self.rank());
        self.peers().iter().filter(|peer| own.is_some_and(|own| own.host == peer.host)).count().max(1)
    }

    /// What every rank has made, by rank; all call it, at the same place, which `at` says in words. Where one has failed, all fail: that one
    /// with its own error, the others with what it said; and all fail where one cannot be reached. An interruption counts less than another
    /// failure.
    pub fn agree<T>(&self, at: &'static str, made: Result<T, Fault>) -> Result<Vec<T>, Fault>
    where
        T: Serialize + DeserializeOwned,
    {
        if self.size() == 1 {
            return made.map(|made| vec![made]);
        }
        let has_failed = |error: &Fault| error.kind() != FaultKind::Interrupted;
        let told: Told<&T> = made.as_ref().map_err(|error| has_failed(error).then(|| (error.to_string(), error.exit())));
        let elsewhere = |rank: usize, found: &str| {
            let message = format!("{} is {}, where rank {} is {at}", self.peers()[rank], abridged(found), self.rank());
            Fault::failed(message).with_hint("see what the other ranks say, and start all with the same version of kvtune")
        };
        let own = serde_json::to_string(&told).map_err(|source| elsewhere(self.rank(), &source.to_string()))?;
        let all = match self.gather(format!("{at}\n{own}").as_bytes()) {
            Ok(all) => all,
            // Its own failure says more, of which the lost connection may be the cause.
            Err(lost) => return Err(made.err().filter(has_failed).unwrap_or(lost)),
        };
        made?;
        let (mut read, mut gave_up) = (Vec::with_capacity(all.len()), None);
        for (rank, bytes) in all.iter().enumerate() {
            let peer = &self.peers()[rank];
            let text = String::from_utf8_lossy(bytes);
            let (found, told) = text.split_once('\n').unwrap_or_default();
            // A rank that has failed where the others did not may be on its way to the end.
            let told: Option<Told<T>> = serde_json::from_str(told).ok().filter(|_| found == at);
            match told.ok_or_else(|| elsewhere(rank, found))? {
                Ok(made) => read.push(made),
                Err(None) => gave_up = gave_up.or(Some(peer)),
                Err(Some((reason, exit))) => {
                    self.repeat();
                    let message = format!("{peer} has failed: {reason}");
                    return Err(Fault::new(exit, message).with_hint("see what that rank says; its error is the one to mend"));
                }
            }
        }
        let Some(peer) = gave_up else { return Ok(read) };
        let hint = "go on from the last checkpoint with `kvtune resume`";
        Err(Fault::failed(format!("{peer} was asked to stop")).with_hint(hint).of_kind(FaultKind::Interrupted))
    }

    /// Does `work` on the first rank, which gets what it came to, while the others wait; all fail where it does, as in [`agree`](Self::agree).
    pub fn first<T>(&self, at: &'static str, work: impl FnOnce() -> Result<T, Fault>) -> Result<Option<T>, Fault> {
        let mut done = None;
        let made = if self.is_first() { work().map(|made| done = Some(made)) } else { Ok(()) };
        self.agree(at, made)?;
        Ok(done)
    }

    /// What the first rank has made, on all; they fail as in [`agree`](Self::agree).
    pub fn of_first<T>(&self, at: &'static str, make: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault>
    where
        T: Default + Serialize + DeserializeOwned,
    {
        let made = if self.is_first() { make() } else { Ok(T::default()) };
        Ok(self.agree(at, made)?.swap_remove(0))
    }
}
