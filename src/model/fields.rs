//! The keys of a `config.json`, read with checks, and what can be wrong with them.

use std::fmt;

use serde_json::{Map, Value};

use crate::units::{Exit, Failure};

/// The keys of a JSON object, read with checks; `null` counts as absent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// The value of a key.
    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// Whether a key is there and says `null`.
    pub(super) fn is_null(self, key: &str) -> bool {
        self.0.get(key).is_some_and(Value::is_null)
    }

    /// A whole number from 1 to `max` that must be there.
    pub(super) fn count(self, key: &'static str, max: usize) -> Result<usize, ConfigFault> {
        if self.get(key).is_none() {
            return Err(ConfigFault::Missing { key, expected: "a whole number" });
        }
        self.count_or(key, 0, max)
    }

    /// A whole number from 1 to `max`, or `default` where there is none.
    pub(super) fn count_or(self, key: &'static str, default: usize, max: usize) -> Result<usize, ConfigFault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok()).filter(|count| (1..=max).contains(count));
        count.ok_or_else(|| self.range(key, format!("a whole number from 1 to {max}")))
    }

    /// A whole number, 0 among them, or `default` where there is none.
    pub(super) fn count_from_zero_or(self, key: &'static str, default: usize) -> Result<usize, ConfigFault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        count.ok_or_else(|| self.range(key, "a whole number".into()))
    }

    /// A positive number, or `default`.
    pub(super) fn number_or(self, key: &'static str, default: f64) -> Result<f64, ConfigFault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        number.ok_or_else(|| self.range(key, "a positive number".into()))
    }

    /// `true` or `false`, or `default`.
    pub(super) fn flag_or(self, key: &'static str, default: bool) -> Result<bool, ConfigFault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.range(key, "`true` or `false`".into()))
    }

    /// Refuses any value but the one that is built; a missing key stands for it.
    pub(super) fn only(self, key: &'static str, built: impl Into<Value>) -> Result<(), ConfigFault> {
        let built = built.into();
        match self.get(key) {
            // 0 and 0.0 are the same number, but not the same JSON value.
            Some(found) if *found != built && (found.as_f64().is_none() || found.as_f64() != built.as_f64()) => {
                Err(ConfigFault::Unsupported { key, found: shown(found), supported: format!("`{built}`") })
            }
            _ => Ok(()),
        }
    }

    /// The error for a value out of its range.
    pub(super) fn range(self, key: &'static str, expected: String) -> ConfigFault {
        ConfigFault::OutOfRange { key, expected, found: self.get(key).map_or_else(|| "nothing".into(), shown) }
    }
}

/// A value as it is shown in an error: on one line, and cut.
pub(super) fn shown(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= LONGEST {
        return text;
    }
    text.chars().take(LONGEST).chain("…".chars()).collect()
}

/// What is wrong with `config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigFault {
    /// The family isn't known.
    UnknownFamily {
        /// Its `model_type`.
        found: Option<String>,
        /// Those that are known.
        known: Vec<&'static str>,
    },
    /// A key must be there.
    Missing {
        /// The key.
        key: &'static str,
        /// What is expected.
        expected: &'static str,
    },
    /// A value is of the wrong type or out of bounds.
    OutOfRange {
        /// The key.
        key: &'static str,
        /// What is expected.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// A value asks for what isn't built.
    Unsupported {
        /// The key.
        key: &'static str,
        /// What stands there.
        found: String,
        /// What is built.
        supported: String,
    },
}

impl fmt::Display for ConfigFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownFamily { found: Some(found), known } => {
                write!(f, "unknown `model_type` `{found}`, expected one of `{}`", known.join("`, `"))
            }
            Self::UnknownFamily { found: None, known } => {
                write!(f, "no `model_type`, expected one of `{}`", known.join("`, `"))
            }
            Self::Missing { key, expected } => write!(f, "`{key}` is missing, expected {expected}"),
            Self::OutOfRange { key, expected, found } => write!(f, "`{key}` is {found}, expected {expected}"),
            Self::Unsupported { key, found, supported } => {
                write!(f, "`{key}` is {found}, which is not supported: expected {supported}")
            }
        }
    }
}

impl Failure for ConfigFault {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::UnknownFamily { .. } => "use a model of a known family".into(),
            Self::Missing { .. } | Self::OutOfRange { .. } => "take `config.json` from the model's source again".into(),
            Self::Unsupported { key, .. } => format!("use a model without this, or correct `{key}` if the model doesn't need it"),
        })
    }

    fn exit(&self) -> Exit {
        Exit::Data
    }
}
