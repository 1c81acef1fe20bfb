//! Peak memory of the process.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::native::{allowed_memory, line_of, machine_memory};
use crate::units::Bytes;

/// The peak of the times before the one that [`reset_peak`] has begun.
static BEFORE: AtomicU64 = AtomicU64::new(0);

/// Begins a new time for [`peak`]; returns whether the system lets us.
pub fn reset_peak() -> bool {
    BEFORE.fetch_max(status("VmHWM:").0, Ordering::Relaxed);
    // 5 sets `VmHWM` to what is resident now.
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// The largest resident size since [`reset_peak`], or of the process where that could not be done; `None` where it can't be read.
pub fn peak() -> Option<Bytes> {
    Some(status("VmHWM:")).filter(|resident| resident.0 > 0)
}

/// The largest resident size of the process' whole life (Linux' `VmHWM`); zero where it can't be read.
pub fn peak_resident() -> Bytes {
    status("VmHWM:").max(Bytes(BEFORE.load(Ordering::Relaxed)))
}

pub fn planned_and_measured(planned: Bytes, measured: Bytes) -> String {
    let error = 100.0 * (planned.0 as f64 / measured.0.max(1) as f64 - 1.0);
    format!("peak memory of the process: planned {planned}, measured {measured} ({error:+.1} %)")
}

pub fn not_pinned(why: &str) -> String {
    format!("memory of the host is not pinned, so that copies to and from the device keep it waiting: {why}")
}

/// The resident size now; `None` where it can't be read.
pub fn resident() -> Option<Bytes> {
    Some(status("VmRSS:")).filter(|resident| resident.0 > 0)
}

/// What the process can still get, within the limits of the control groups that it is in; `None` where that can't be read.
pub fn available() -> Option<Bytes> {
    // Pages of files that the process has mapped count as available to the system, and are in use.
    let mapped = resident().map(|_| status("RssFile:"))?;
    let system = machine_memory()?.left.saturating_sub(mapped.0);
    Some(Bytes(allowed_memory().map_or(system, |allowed| system.min(allowed.left))))
}

/// How large the process may get: what it holds and what it can still get.
pub fn attainable() -> Option<Bytes> {
    Some(Bytes(resident()?.0 + available()?.0))
}

fn status(key: &str) -> Bytes {
    Bytes(line_of(Path::new("/proc/self/status"), key).unwrap_or(0) * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_time_forgets_no_peak_of_the_life() {
        let size = 64 << 20;
        drop(std::hint::black_box(vec![1u8; size]));
        let life = peak_resident();
        assert!(life.0 > size as u64);
        reset_peak();
        assert!(peak_resident() >= life && peak().unwrap() <= peak_resident());
    }

    #[test]
    fn a_process_may_get_larger_than_it_is() {
        let (own, may) = (resident().unwrap(), attainable().unwrap());
        assert!(may > own && may.0 < 1 << 50, "{may} of {own}");
    }
}
