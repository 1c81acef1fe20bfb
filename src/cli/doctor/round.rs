//! The round: everything is looked at, one after the other, apart from who hears of it.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use super::check::{DoctorCheck, Promise};
use super::{gpu, host};
use crate::cli::device::{Wanted, set_threads};
use crate::native::cuda::{CudaSupport, Numerics, device_nodes, load_cuda};

/// A check that takes longer will not answer any more: a driver that hangs. Libraries that are read from a slow disk take their time.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is asked.
pub(super) struct Round {
    pub(super) wanted: Wanted,
    pub(super) threads: Option<u16>,
    pub(super) scratch: PathBuf,
}

impl Round {
    /// What must work: who asks for CUDA, or has a device, is promised that it computes.
    pub(super) fn promise(&self) -> Promise {
        match self.wanted {
            Wanted::Cuda(_) => Promise::Cuda,
            Wanted::Auto if !device_nodes().is_empty() => Promise::Cuda,
            Wanted::Auto | Wanted::Cpu => Promise::Cpu,
        }
    }

    /// Makes all checks, and hands over each as soon as it is made; ends at one that does not answer.
    pub(super) fn make<E>(self, mut hear: impl FnMut(DoctorCheck) -> Result<(), E>) -> Result<(), E> {
        let (sender, receiver) = channel();
        let at_work = thread::spawn(move || self.examine(&sender));
        let mut last = "the start".to_owned();
        loop {
            match receiver.recv_timeout(PATIENCE) {
                Ok(check) => {
                    last.clone_from(&check.name);
                    hear(check)?;
                }
                Err(RecvTimeoutError::Timeout) => return hear(silent(&last)),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        at_work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok(())
    }

    fn examine(&self, sender: &Sender<DoctorCheck>) {
        // Before any other call into libtorch, which would remember that there is no CUDA.
        let half = if self.wanted == Wanted::Cpu { CudaSupport::NoDevice } else { load_cuda() };
        set_threads(self.threads);
        Numerics::default().set();
        // Who no longer listens has told already why.
        let say = |check| drop(sender.send(check));
        host::examine(Path::new(&self.scratch), say);
        match self.wanted {
            Wanted::Cpu => say(DoctorCheck::lacking("CUDA", "not asked for: `--device cpu`", "", Promise::Cpu)),
            Wanted::Auto => gpu::examine(self.promise(), 0, &half, say),
            Wanted::Cuda(index) => gpu::examine(self.promise(), index, &half, say),
        }
    }
}

fn silent(last: &str) -> DoctorCheck {
    let found = format!("no answer within {} s after `{last}`; what would have come is not looked at", PATIENCE.as_secs());
    DoctorCheck::failed("patience", found, "look at `nvidia-smi` and `dmesg`; ask again with `--device cpu` to leave CUDA out")
}
