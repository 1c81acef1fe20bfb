//! The ranks of a run, and what somebody has asked of any of them.

use std::cell::Cell;
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::Interrupt;
use crate::dist::ProcessGroup;
use crate::recipe::Recipe;
use crate::units::Fault;

/// The ranks that make a run's steps together, and its signals. One rank hears them when it looks; several agree on them once a step.
pub struct RunRanks {
    pub(super) world: Rc<ProcessGroup>,
    interrupt: Interrupt,
    /// What all have agreed on, where there are several.
    agreed: Cell<SignalRequests>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SignalRequests {
    signal: Option<i32>,
    save: bool,
}

impl RunRanks {
    pub fn new(world: Rc<ProcessGroup>, interrupt: Interrupt) -> Self {
        Self { world, interrupt, agreed: Cell::default() }
    }

    /// The ranks of `world`, of which nobody asks anything.
    pub fn of(world: Rc<ProcessGroup>) -> Self {
        Self::new(world, Interrupt::default())
    }

    pub(super) fn are_several(&self) -> bool {
        self.world.size() > 1
    }

    /// What was asked of this rank alone, to be told to all.
    pub(super) fn heard(&self) -> SignalRequests {
        SignalRequests { signal: self.interrupt.signal(), save: self.are_several() && self.interrupt.takes_save() }
    }

    /// Takes over what was asked of any.
    pub(super) fn agree(&self, heard: impl Iterator<Item = SignalRequests>) {
        let all = heard
            .fold(self.agreed.get(), |all, one| SignalRequests { signal: all.signal.or(one.signal), save: all.save || one.save });
        self.agreed.set(all);
    }

    /// Agrees on what was asked outside of a step; all ranks call it.
    pub(super) fn listen(&self) -> Result<(), Fault> {
        let heard = self.world.agree("looking for signals", Ok(self.heard()))?;
        self.agree(heard.into_iter());
        Ok(())
    }

    pub(super) fn signal(&self) -> Option<i32> {
        if self.are_several() { self.agreed.get().signal } else { self.interrupt.signal() }
    }

    pub(super) fn wants_save(&self) -> bool {
        if self.are_several() { self.agreed.get().save || self.signal().is_some() } else { self.interrupt.wants_save() }
    }

    pub(super) fn takes_save(&self) -> bool {
        if !self.are_several() {
            return self.interrupt.takes_save();
        }
        let agreed = self.agreed.get();
        self.agreed.set(SignalRequests { save: false, ..agreed });
        agreed.save
    }
}

/// Fails where the micro-batches of a step cannot be dealt evenly.
pub fn check_even(world: &ProcessGroup, recipe: &Recipe) -> Result<(), Fault> {
    let (ranks, micro_batches) = (world.size(), recipe.train.gradient_accumulation_steps);
    if micro_batches.is_multiple_of(ranks) {
        return Ok(());
    }
    let message = format!("`train.gradient_accumulation_steps` is {micro_batches}, which {ranks} ranks can't share evenly");
    let hint = format!("it counts the micro-batches of all ranks: set it to {ranks} or a multiple, or start fewer ranks");
    Err(Fault::usage(message, hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{Exit, FaultKind};

    #[test]
    fn what_is_asked_of_one_is_asked_of_all() {
        let seen = super::super::tests::as_ranks(3, |world| {
            let rank = world.rank();
            let ranks = RunRanks::of(world);
            let asked = [
                SignalRequests::default(),
                SignalRequests { signal: None, save: true },
                SignalRequests { signal: Some(15), save: false },
            ];
            ranks.agree(ranks.world.agree("asking", Ok(asked[rank])).unwrap().into_iter());
            assert!(ranks.wants_save() && ranks.takes_save() && !ranks.takes_save());
            ranks.listen().unwrap();
            let failed = ranks.world.first::<()>("writing", || Err(Fault::usage("no samples", "hold some out"))).unwrap_err();
            let given_up = if rank == 1 { Err(Fault::interrupted()) } else { Ok(()) };
            assert_eq!(ranks.world.agree("working", given_up).unwrap_err().kind(), FaultKind::Interrupted);
            (ranks.signal(), failed.exit() as u8, failed.to_string())
        });
        for (rank, (signal, exit, failed)) in seen.into_iter().enumerate() {
            assert_eq!((signal, exit), (Some(15), Exit::Usage as u8));
            assert_eq!(failed.ends_with("has failed: no samples"), rank > 0);
        }
    }
}
