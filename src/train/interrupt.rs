//! Signals: SIGTERM and Ctrl-C end a run in good order, SIGUSR1 has it save and go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;

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
    pub fn install() -> std::io::Result<Self> {
        let interrupt = Self::default();
        interrupt.watch_for_stops()?;
        Ok(interrupt)
    }

    /// Installs that of Ctrl-C alone: what mostly waits and has nothing to save ends at once with SIGTERM.
    pub fn install_for_ctrl_c() -> std::io::Result<Self> {
        let interrupt = Self::default();
        interrupt.watch_for(&[SIGINT])?;
        Ok(interrupt)
    }

    /// Installs that of SIGUSR1 alone: what is ended while it loads has nothing to save, and ends at once.
    pub fn install_for_saves() -> std::io::Result<Self> {
        let interrupt = Self::default();
        flag::register(SIGUSR1, interrupt.save.clone())?;
        Ok(interrupt)
    }

    /// From now on the first SIGTERM or Ctrl-C is a request, and the second ends the process.
    pub(super) fn watch_for_stops(&self) -> std::io::Result<()> {
        self.watch_for(&[SIGINT, SIGTERM])
    }

    fn watch_for(&self, signals: &[i32]) -> std::io::Result<()> {
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
