//! Values on the command line: what is none of theirs is refused with its other mistakes, and so are counts that no machine can hold.

use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};

use crate::metrics::Metric;
use crate::units::Bytes;

pub(super) fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 24)
}

pub(super) fn any_number() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(0..=1 << 24)
}

pub(super) fn metric() -> impl TypedValueParser<Value = Metric> {
    PossibleValuesParser::new(Metric::names()).try_map(|name| name.parse::<Metric>())
}

/// A bare number below it is one of larger units.
const MIN_MEMORY: Bytes = Bytes(1 << 20);

/// Bytes of memory with their unit, of which there is at least one.
pub(super) fn bytes() -> impl TypedValueParser<Value = Bytes> {
    |text: &str| match Bytes::parse(text)? {
        Bytes(0) => Err("expected more than 0 bytes".to_owned()),
        bytes if bytes < MIN_MEMORY && text.ends_with(|c: char| c.is_ascii_digit()) => {
            Err(format!("this is {} bytes: write the unit, as `{text}GiB`", bytes.0))
        }
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use clap::{Arg, Command};

    use super::*;

    /// What clap makes of `--memory TEXT`: the bytes, or the first line that it says.
    fn parsed(text: &str) -> Result<Bytes, String> {
        let command = Command::new("kvtune").arg(Arg::new("memory").long("memory").value_name("BYTES").value_parser(bytes()));
        match command.try_get_matches_from(["kvtune", "--memory", text]) {
            Ok(matches) => Ok(*matches.get_one("memory").unwrap()),
            Err(error) => Err(error.to_string().lines().next().unwrap_or_default().to_owned()),
        }
    }

    #[test]
    fn bytes_have_a_unit_and_are_not_none() {
        assert_eq!((parsed("40GB"), parsed("1.5 GiB")), (Ok(Bytes(40_000_000_000)), Ok(Bytes(3 << 29))));
        let refused = |text: &str, expected: &str| {
            assert_eq!(parsed(text), Err(format!("error: invalid value '{text}' for '--memory <BYTES>': {expected}")));
        };
        for nothing in ["0", "0GB", "0.1B"] {
            refused(nothing, "expected more than 0 bytes");
        }
        refused("24", "this is 24 bytes: write the unit, as `24GiB`");
        assert_eq!(
            (parsed("24gb"), parsed("24 GiB"), parsed("24B")),
            (Ok(Bytes(24_000_000_000)), Ok(Bytes(24 << 30)), Ok(Bytes(24)))
        );
        refused("40G", Bytes::parse("40G").unwrap_err());
        refused("16777216TiB", "expected less than 2^64 bytes");
    }
}
