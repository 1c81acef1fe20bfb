//! What the system lets a process have, looked at before any work: files, threads, the size of a file.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::SIGXFSZ;

use crate::native;
use crate::units::{Exit, Fault};

/// Open files that a run with few shards needs, and those that are asked for where the system allows them.
const FILES: (u64, u64) = (64, 8192);

/// Makes a file that grows beyond its limit an error like a full disk, and fails where files or threads are too few to work with.
pub(super) fn check() -> Result<(), Fault> {
    // The signal would end the process; handled, the write fails.
    let caught = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
    caught.map_err(|source| {
        Fault::new(Exit::Memory, format!("the signal of a file's limit cannot be handled: {source}")).with_hint("try again")
    })?;
    files()?;
    threads(native::usable_cpus())
}

fn files() -> Result<(), Fault> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(FILES.1, |maximum| maximum.min(FILES.1));
    let may_have = current.is_none_or(|current| current >= wanted)
        || setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).is_ok();
    match if may_have { wanted } else { current.unwrap_or(wanted) } {
        few if few < FILES.0 => {
            Err(Fault::new(Exit::Memory, format!("the process may open {few} files, expected at least {}", FILES.0))
                .with_hint("raise the limit with `ulimit -n`"))
        }
        _ => Ok(()),
    }
}

/// Fails where so many threads cannot be made; libraries that need them would end the process.
pub(super) fn threads(count: usize) -> Result<(), Fault> {
    native::try_threads(count).map_err(|source| {
        Fault::new(Exit::Memory, format!("the process cannot have {count} threads: {source}"))
            .with_hint("raise the limits of processes and memory (`ulimit -u`, `ulimit -v`), or take fewer with `--threads`")
    })
}
