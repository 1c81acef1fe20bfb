//! Peak memory of the process.

use crate::units::Bytes;

/// The largest resident size so far (Linux' `VmHWM`); zero where it can't be read.
pub fn peak_resident() -> Bytes {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmHWM:"));
    let kib = line.and_then(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok());
    Bytes(kib.unwrap_or(0) * 1024)
}
