//! What memory of the host there is: the machine's, what the control groups of the process allow it, and what the process takes. All in bytes.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The peak of the times before the one that [`reset_peak_memory`] has begun.
static BEFORE: AtomicU64 = AtomicU64::new(0);

/// So much memory, and what of it nobody needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostMemory {
    pub total: u64,
    /// What can still be had, pages of files counted as free.
    pub left: u64,
}

/// The machine's, as the system tells, if it does. A machine whose memory grows when it is asked for tells less than it will have.
pub(super) fn machine_memory() -> Option<HostMemory> {
    let line = |key| line_of(Path::new("/proc/meminfo"), key).map(|kibibytes| kibibytes * 1024);
    Some(HostMemory { total: line("MemTotal:")?, left: line("MemAvailable:")? })
}

/// What the control groups of the process allow: the limit of which the least is left; `None` where none of them has a limit.
pub(super) fn allowed_memory() -> Option<HostMemory> {
    groups().iter().filter_map(|group| of_group(group)).min_by_key(|memory| memory.left)
}

/// The number behind `key` in a file of such lines.
pub(super) fn line_of(file: &Path, key: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.split_whitespace().next()?.parse().ok())
}

const GROUPS: &str = "/sys/fs/cgroup";
/// Older systems write a number as large as this where there is no limit.
const NO_LIMIT: u64 = 1 << 60;

/// The control groups of the process, which limit its memory: its own and those above.
fn groups() -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let root = match controllers {
            "" => PathBuf::from(GROUPS),
            _ if controllers.split(',').any(|controller| controller == "memory") => Path::new(GROUPS).join("memory"),
            _ => continue,
        };
        let own = root.join(path.trim_start_matches('/'));
        groups.extend(own.ancestors().take_while(|group| group.starts_with(&root)).map(Path::to_owned));
    }
    groups
}

/// What a control group allows and has left; `None` where it has no limit.
fn of_group(group: &Path) -> Option<HostMemory> {
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    let (total, used) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?),
        None => (number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?),
    };
    let stat = group.join("memory.stat");
    let files = ["inactive_file ", "active_file "].map(|key| line_of(&stat, key).unwrap_or(0)).iter().sum();
    (total < NO_LIMIT).then(|| HostMemory { total, left: total.saturating_sub(used.saturating_sub(files)) })
}

/// Begins a new time for [`peak_memory`]; returns whether the system lets us.
pub fn reset_peak_memory() -> bool {
    BEFORE.fetch_max(status("VmHWM:"), Ordering::Relaxed);
    // 5 sets `VmHWM` to what is resident now.
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// The largest resident size since [`reset_peak_memory`], or of the process where that could not be done; `None` where it can't be read.
pub fn peak_memory() -> Option<u64> {
    Some(status("VmHWM:")).filter(|resident| *resident > 0)
}

/// The largest resident size of the process' whole life (Linux' `VmHWM`); zero where it can't be read.
pub fn peak_resident() -> u64 {
    status("VmHWM:").max(BEFORE.load(Ordering::Relaxed))
}

/// The resident size now; `None` where it can't be read.
pub fn resident_memory() -> Option<u64> {
    Some(status("VmRSS:")).filter(|resident| *resident > 0)
}

/// What the process can still get, within the limits of the control groups that it is in; `None` where that can't be read.
pub fn available_memory() -> Option<u64> {
    // Pages of files that the process has mapped count as available to the system, and are in use.
    let mapped = resident_memory().map(|_| status("RssFile:"))?;
    let system = machine_memory()?.left.saturating_sub(mapped);
    Some(allowed_memory().map_or(system, |allowed| system.min(allowed.left)))
}

/// How large the process may get: what it holds and what it can still get.
pub fn attainable_memory() -> Option<u64> {
    Some(resident_memory()? + available_memory()?)
}

fn status(key: &str) -> u64 {
    line_of(Path::new("/proc/self/status"), key).unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_time_forgets_no_peak_of_the_life() {
        let size = 64 << 20;
        drop(std::hint::black_box(vec![1u8; size]));
        let life = peak_resident();
        assert!(life > size as u64);
        reset_peak_memory();
        assert!(peak_resident() >= life && peak_memory().unwrap() <= peak_resident());
    }

    #[test]
    fn a_process_may_get_larger_than_it_is() {
        let (own, may) = (resident_memory().unwrap(), attainable_memory().unwrap());
        assert!(may > own && may < 1 << 50, "{may} of {own}");
    }

    #[test]
    fn a_group_leaves_what_is_not_used_and_what_are_pages_of_files() {
        let home = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| fs::write(home.path().join(file), text).unwrap();
        let found = || of_group(home.path()).map(|memory| (memory.total, memory.left));
        assert_eq!(found(), None);
        write("memory.limit_in_bytes", "9223372036854771712\n");
        write("memory.usage_in_bytes", "700\n");
        assert_eq!(found(), None, "no limit");
        write("memory.limit_in_bytes", "1000\n");
        assert_eq!(found(), Some((1000, 300)));
        write("memory.max", "max\n");
        assert_eq!(found(), Some((1000, 300)), "the older names");
        write("memory.max", "2000\n");
        write("memory.current", "1800\n");
        write("memory.stat", "anon 900\ninactive_file 400\nactive_file 100\n");
        assert_eq!(found(), Some((2000, 700)));
    }

    #[test]
    fn the_machine_has_memory() {
        let found = machine_memory().unwrap();
        assert!(found.total >= found.left && found.total > 0, "{found:?}");
        assert_eq!(line_of(Path::new("/proc/meminfo"), "NoSuchLine:"), None);
    }
}
