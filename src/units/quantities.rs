//! Bytes and seconds, as people write and read them.

use std::fmt;

/// A number of bytes; prints in binary units (`1.5 GiB`), and is read from those and from decimal ones (`40GB`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// A duration in seconds; prints as a person reads it (`1 h 02 m`).
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Seconds(pub f64);

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

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        for unit in ["B", "KiB", "MiB", "GiB"] {
            // What rounds to 1024 is one of the next unit.
            if value < 1023.5 {
                let digits = usize::from(unit != "B" && value < 99.95);
                return write!(f, "{value:.digits$} {unit}");
            }
            value /= 1024.0;
        }
        write!(f, "{value:.1} TiB")
    }
}

/// `40G` is one of two numbers that are 7 % apart: which of them is not guessed.
const UNITS: &str = "expected a number of bytes with `kB`, `MB`, `GB` or `TB` (powers of 1000), with `KiB`, `MiB`, `GiB` or `TiB` \
                     (powers of 1024), or with `B` or nothing, as `40GB` or `1.5GiB`";

const FACTORS: [(&str, u64); 8] = [
    ("kB", 1000),
    ("MB", 1000_u64.pow(2)),
    ("GB", 1000_u64.pow(3)),
    ("TB", 1000_u64.pow(4)),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

impl Bytes {
    /// Reads `40GB`, `40gb`, `1.5 GiB` or `512`, rounded to whole bytes.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = (&text[..end], text[end..].strip_prefix(' ').unwrap_or(&text[end..]));
        // Of bits no one writes all letters small or all large.
        let is_unit = |name: &str| [name.to_owned(), name.to_lowercase(), name.to_uppercase()].iter().any(|name| name == unit);
        let factor: u64 = match unit {
            "" | "B" => 1,
            _ => FACTORS.iter().find(|(name, _)| is_unit(name)).ok_or(UNITS)?.1,
        };
        // A whole number is taken as it is: not each has its own float.
        let bytes = if let Ok(whole) = number.parse::<u64>() {
            whole.checked_mul(factor)
        } else {
            let bytes = (number.parse::<f64>().map_err(|_| UNITS)? * factor as f64).round();
            (bytes < u64::MAX as f64).then_some(bytes as u64)
        };
        bytes.map(Self).ok_or("expected less than 2^64 bytes")
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0;
        // A unit is left where its number would be rounded up to one of the next.
        if s < 0.9995 {
            write!(f, "{:.0} ms", s * 1000.0)
        } else if s < 59.95 {
            write!(f, "{s:.1} s")
        } else if s < 3600.0 {
            let s = s.max(60.0);
            write!(f, "{} m {:02} s", (s / 60.0) as u64, (s % 60.0) as u64)
        } else {
            write!(f, "{} h {:02} m", (s / 3600.0) as u64, (s % 3600.0 / 60.0) as u64)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_print_as_a_person_reads_them() {
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes(1536 * 1024 * 1024).to_string(), "1.5 GiB");
        assert_eq!(Bytes((1 << 30) - 1).to_string(), "1.0 GiB");
        assert_eq!(Bytes((100 << 20) - 4096).to_string(), "100 MiB");
        assert_eq!(Seconds(0.25).to_string(), "250 ms");
        assert_eq!(Seconds(0.9997).to_string(), "1.0 s");
        assert_eq!(Seconds(59.97).to_string(), "1 m 00 s");
        assert_eq!(Seconds(62.0).to_string(), "1 m 02 s");
        assert_eq!(Seconds(3720.0).to_string(), "1 h 02 m");
    }

    #[test]
    fn bytes_are_read_in_powers_of_1000_and_of_1024() {
        let read = [
            ("512", 512),
            ("512B", 512),
            ("0", 0),
            ("40kB", 40_000),
            ("40 MB", 40_000_000),
            ("40GB", 40_000_000_000),
            ("2TB", 2_000_000_000_000),
            ("24gb", 24_000_000_000),
            ("24 gib", 24 << 30),
            ("24 GIB", 24 << 30),
            ("40KB", 40_000),
            ("40kb", 40_000),
            ("3KiB", 3 << 10),
            ("3MiB", 3 << 20),
            ("40 GiB", 40 << 30),
            ("2TiB", 2 << 40),
            ("1.5GiB", 3 << 29),
            ("0.1GB", 100_000_000),
            ("1.0004kB", 1000),
            ("9007199254740993", 9_007_199_254_740_993),
            ("18446744073709551615B", u64::MAX),
        ];
        for (text, bytes) in read {
            assert_eq!(Bytes::parse(text), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn what_may_mean_another_number_of_bytes_is_refused() {
        let refused = "| |GB|40G|40g|40b|40Gb|40gB|40kiB|40 bytes|40  GB|40GB | 40GB|4 0GB|40\u{a0}GB|-1GB|+1GB|1e9|1,5GB|\
                       1_000|1.5.0GB|.|.GB|inf|nan|40GB/s|\u{664}GB";
        for text in refused.split('|') {
            assert_eq!(Bytes::parse(text), Err(UNITS), "{text}");
        }
        for text in ["18446744073709551616", "16777216TiB", "16777216.0TiB", "99999999999999999999999GB", "18446745TB"] {
            assert_eq!(Bytes::parse(text), Err("expected less than 2^64 bytes"), "{text}");
        }
        for unit in ["kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "B"] {
            assert!(UNITS.contains(&format!("`{unit}`")) && Bytes::parse(&format!("1{unit}")).is_ok(), "{unit}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_within_its_rounding(number in any::<u64>(), shift in 1..64_u32) {
            let bytes = number >> shift;
            let shown = Bytes(bytes).to_string();
            let unit = Bytes::parse(&format!("1 {}", shown.split(' ').nth(1).unwrap())).unwrap();
            // Half of the last digit that is shown; a byte has no parts.
            let rounding = unit.0 as f64 * if shown.contains('.') { 0.05 } else { 0.5 };
            let read = Bytes::parse(&shown).unwrap();
            let error = read.0.abs_diff(bytes) as f64;
            prop_assert!(if unit.0 == 1 { read.0 == bytes } else { error <= rounding + 1.0 }, "{} is read as {}", shown, read.0);
        }

        #[test]
        fn whole_numbers_of_a_unit_are_exact(number in 0..=u64::MAX >> 41) {
            for (unit, factor) in [("", 1), ("kB", 1000), ("TB", 1_000_000_000_000), ("KiB", 1 << 10), ("TiB", 1_u64 << 40)] {
                prop_assert_eq!(Bytes::parse(&format!("{number}{unit}")), Ok(Bytes(number * factor)));
            }
        }
    }
}
