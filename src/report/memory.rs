//! Peak memory of the process.

use std::fs;

use crate::units::Bytes;

/// The largest resident size of the process over some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peak {
    /// The size.
    pub resident: Bytes,
    /// Whether the time began when [`reset_peak`] was called; otherwise it began with the process.
    pub was_reset: bool,
}

/// Begins a new time for [`peak`]; returns whether the system lets us.
pub fn reset_peak() -> bool {
    // 5 sets `VmHWM` to what is resident now.
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// The peak since [`reset_peak`], if that could be done; `None` where it can't be read.
pub fn peak(was_reset: bool) -> Option<Peak> {
    Some(peak_resident()).filter(|resident| resident.0 > 0).map(|resident| Peak { resident, was_reset })
}

/// The largest resident size so far (Linux' `VmHWM`); zero where it can't be read.
pub fn peak_resident() -> Bytes {
    status("VmHWM:")
}

/// What of the process is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// All of it.
    pub all: Bytes,
    /// Pages of files: programs, libraries, and what is mapped.
    pub files: Bytes,
}

/// The resident size now; `None` where it can't be read.
pub fn resident() -> Option<Resident> {
    Some(Resident { all: status("VmRSS:"), files: status("RssFile:") }).filter(|resident| resident.all.0 > 0)
}

fn status(key: &str) -> Bytes {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(key));
    let kib = line.and_then(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok());
    Bytes(kib.unwrap_or(0) * 1024)
}
