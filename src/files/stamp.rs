//! A file as the system lists it, by which what was once found out of it is believed later; and the folder where such things are kept.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// How exactly the time of a change tells changes apart, at worst.
pub(super) const SETTLED: Duration = Duration::from_secs(2);

/// A file as the system lists it: while this is the same, so is the content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    pub size: u64,
    device: u64,
    inode: u64,
    /// Seconds since 1970 and nanoseconds. Who writes to a file can set its other times, and not this one.
    changed: (i64, i64),
}

impl Stamp {
    /// The stamp of the file at a path; `None` where the system does not list it.
    pub fn of(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        let changed = (found.ctime(), found.ctime_nsec());
        Some(Self { size: found.len(), device: found.dev(), inode: found.ino(), changed })
    }

    /// Whether the last change is so long ago. A file that was changed just now may be changed again and look the same.
    pub(super) fn is_older_than(&self, age: Duration) -> bool {
        let (Ok(seconds), Ok(nanoseconds)) = (u64::try_from(self.changed.0), u32::try_from(self.changed.1)) else { return false };
        let changed = UNIX_EPOCH + Duration::new(seconds, nanoseconds);
        SystemTime::now().duration_since(changed).is_ok_and(|since| since >= age)
    }
}

/// The user's folder for what can be made again; `None` where the environment names none.
pub fn cache_folder() -> Option<PathBuf> {
    let folder = |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
    cache.map(|cache| cache.join("kvtune"))
}
