//! Newtypes for the quantities that meet in one call, and the way out that every error offers.

use std::fmt;

/// A decoder layer, counted from 0 at the bottom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIdx(pub usize);

/// An event of the cache, counted from 0: the whole prefill span is chunk 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkIdx(pub usize);

/// A number of bytes; prints in binary units (`1.5 GiB`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// A duration in seconds; prints as a person reads it (`1 h 02 m`).
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Seconds(pub f64);

/// What a user can do about an error. Every error that a user can cause has a hint.
pub trait Hint {
    /// One sentence without a full stop, in lower case, or `None` where there is nothing to do.
    fn hint(&self) -> Option<String>;
}

impl std::ops::AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        Self(all.map(|bytes| bytes.0).sum())
    }
}

impl fmt::Display for LayerIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for ChunkIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        for unit in ["B", "KiB", "MiB", "GiB"] {
            if value < 1024.0 {
                let digits = usize::from(unit != "B" && value < 100.0);
                return write!(f, "{value:.digits$} {unit}");
            }
            value /= 1024.0;
        }
        write!(f, "{value:.1} TiB")
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0;
        if s < 1.0 {
            write!(f, "{:.0} ms", s * 1000.0)
        } else if s < 60.0 {
            write!(f, "{s:.1} s")
        } else if s < 3600.0 {
            write!(f, "{} m {:02} s", (s / 60.0) as u64, (s % 60.0) as u64)
        } else {
            write!(f, "{} h {:02} m", (s / 3600.0) as u64, (s % 3600.0 / 60.0) as u64)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_print_as_a_person_reads_them() {
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes(1536 * 1024 * 1024).to_string(), "1.5 GiB");
        assert_eq!(Seconds(0.25).to_string(), "250 ms");
        assert_eq!(Seconds(62.0).to_string(), "1 m 02 s");
        assert_eq!(Seconds(3720.0).to_string(), "1 h 02 m");
    }
}
