//! Counts on the command line: they refuse with its other mistakes what is no count, and what no machine can hold.

use clap::builder::RangedU64ValueParser;

/// At least one.
pub(super) fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 24)
}

/// None or more.
pub(super) fn any_number() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(0..=1 << 24)
}
