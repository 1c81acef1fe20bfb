//! Signals: SIGTERM and Ctrl-C end a run in good order, SIGUSR1 has it save and go on.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;

use crate::units::Fault;

/// Tells whether somebody asked the run to stop, or to save.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    signal: Arc<AtomicUsize>,
    /// Whether another signal ends the process.
    again: Arc<AtomicBool>,
    save: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs those of SIGTERM and Ctrl-C. They only set flags: the loop does the work.
    pub fn install() -> Result<Self, Fault> {
        Self::watching(Self::watch_for_stops)
    }

    /// Installs that of Ctrl-C alone: what mostly waits and has nothing to save ends at once with SIGTERM.
    pub fn install_for_ctrl_c() -> Result<Self, Fault> {
        Self::watching(|interrupt| interrupt.watch_for(&[SIGINT]))
    }

    /// Installs that of SIGUSR1 alone: what is ended while it loads has nothing to save, and ends at once.
    pub fn install_for_saves() -> Result<Self, Fault> {
        Self::watching(|interrupt| flag::register(SIGUSR1, interrupt.save.clone()).map(drop))
    }

    fn watching(watch: impl FnOnce(&Self) -> io::Result<()>) -> Result<Self, Fault> {
        let interrupt = Self::default();
        watch(&interrupt)
            .map_err(|e| Fault::usage(format!("can't watch for signals: {e}"), "look at the limits of this process"))?;
        Ok(interrupt)
    }

    /// From now on the first SIGTERM or Ctrl-C is a request, and the second ends the process.
    pub(super) fn watch_for_stops(&self) -> io::Result<()> {
        self.watch_for(&[SIGINT, SIGTERM])
    }

    fn watch_for(&self, signals: &[i32]) -> io::Result<()> {
        for &signal in signals {
            // Order matters: the shutdown looks at the flag before the next line's handler sets it.
            flag::register_conditional_shutdown(signal, 128 + signal, self.again.clone())?;
            // One flag for both: Ctrl-C after SIGTERM is the second, too.
            flag::register(signal, self.again.clone())?;
            flag::register_usize(signal, self.signal.clone(), signal as usize)?;
        }
        Ok(())
    }

    /// Forgets the signals so far: what was asked to stop has stopped, and something else begins.
    pub fn reset(&self) {
        self.signal.store(0, Ordering::Relaxed);
        self.again.store(false, Ordering::Relaxed);
    }

    pub fn signal(&self) -> Option<i32> {
        let signal = self.signal.load(Ordering::Relaxed);
        (signal != 0).then_some(signal as i32)
    }

    pub(super) fn is_terminated(&self) -> bool {
        self.signal() == Some(SIGTERM)
    }

    /// Whether a save was asked for, or an end, which begins with one.
    pub(super) fn wants_save(&self) -> bool {
        self.save.load(Ordering::Relaxed) || self.signal().is_some()
    }

    /// Whether a save was asked for since the last call.
    pub(super) fn takes_save(&self) -> bool {
        self.save.swap(false, Ordering::Relaxed)
    }
}
