//! Ctrl-C and SIGTERM: the first asks the run to save and stop after its step, the second ends it at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Tells whether somebody asked the run to stop.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    signal: Arc<AtomicUsize>,
    /// Whether another signal ends the process.
    again: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs the handlers. They only set flags: the loop does the work.
    pub fn install() -> std::io::Result<Self> {
        let interrupt = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // Order matters: the shutdown looks at the flag before the next line's handler sets it.
            flag::register_conditional_shutdown(signal, 128 + signal, interrupt.again.clone())?;
            // One flag for both: Ctrl-C after SIGTERM is the second, too.
            flag::register(signal, interrupt.again.clone())?;
            flag::register_usize(signal, interrupt.signal.clone(), signal as usize)?;
        }
        Ok(interrupt)
    }

    /// Forgets the signals so far: what was asked to stop has stopped, and something else begins.
    pub fn reset(&self) {
        self.signal.store(0, Ordering::Relaxed);
        self.again.store(false, Ordering::Relaxed);
    }

    /// The signal that arrived, if any.
    pub fn signal(&self) -> Option<i32> {
        let signal = self.signal.load(Ordering::Relaxed);
        (signal != 0).then_some(signal as i32)
    }
}
