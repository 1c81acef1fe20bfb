//! The keys of a `config.json`, read with checks, and what can be wrong with them.

use serde_json::{Map, Value};

use crate::recipe::diagnose::nearest;
use crate::units::{Fault, quoted};

/// The keys of a JSON object, read with checks; `null` counts as absent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Under which key of the file it stands, if under any.
    table: Option<&'static str>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(object: &'a Map<String, Value>) -> Self {
        Self { object, table: None }
    }

    /// The keys of an object that stands under a key.
    pub(super) fn table(self, key: &'static str) -> Result<Option<Self>, Fault> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let object = value.as_object().ok_or_else(|| self.range(key, "an object".into()))?;
        Ok(Some(Self { object, table: Some(key) }))
    }

    /// A key with the one of its object before it.
    pub(super) fn named(self, key: &str) -> String {
        self.table.map_or_else(|| key.to_owned(), |table| format!("{table}.{key}"))
    }

    /// Refuses an object of an object with keys that are not known.
    pub(super) fn only_keys(self, known: &[&'static str]) -> Result<(), Fault> {
        let unknown = self.object.iter().find(|(key, value)| !value.is_null() && !known.contains(&key.as_str()));
        unknown.map_or(Ok(()), |(key, _)| Err(unknown_key(&self.named(key), known)))
    }

    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn is_null(self, key: &str) -> bool {
        self.object.get(key).is_some_and(Value::is_null)
    }

    /// A whole number from 1 to `max` that must be there.
    pub(super) fn count(self, key: &'static str, max: usize) -> Result<usize, Fault> {
        if self.get(key).is_none() {
            return Err(missing(&self.named(key), "a whole number"));
        }
        self.count_or(key, 0, max)
    }

    /// A whole number from 1 to `max`, or `default` where there is none.
    pub(super) fn count_or(self, key: &'static str, default: usize, max: usize) -> Result<usize, Fault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok()).filter(|count| (1..=max).contains(count));
        count.ok_or_else(|| self.range(key, format!("a whole number from 1 to {max}")))
    }

    /// A whole number, 0 among them, or `default` where there is none.
    pub(super) fn count_from_zero_or(self, key: &'static str, default: usize) -> Result<usize, Fault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        count.ok_or_else(|| self.range(key, "a whole number".into()))
    }

    pub(super) fn number_or(self, key: &'static str, default: f64) -> Result<f64, Fault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        number.ok_or_else(|| self.range(key, "a positive number".into()))
    }

    /// A positive number up to 1, or `default`.
    pub(super) fn at_most_one_or(self, key: &'static str, default: f64) -> Result<f64, Fault> {
        let number = self.number_or(key, default)?;
        if number <= 1.0 { Ok(number) } else { Err(self.range(key, "a positive number, 1 at most".into())) }
    }

    /// A positive number that must be there.
    pub(super) fn number(self, key: &'static str) -> Result<f64, Fault> {
        if self.get(key).is_none() {
            return Err(missing(&self.named(key), "a positive number"));
        }
        self.number_or(key, 0.0)
    }

    /// A positive number; `None` where there is none, or a 0 in its place.
    pub(super) fn number_but_zero(self, key: &'static str) -> Result<Option<f64>, Fault> {
        let is_given = self.get(key).is_some_and(|value| value.as_f64() != Some(0.0));
        is_given.then(|| self.number(key)).transpose()
    }

    /// A list of so many positive numbers that must be there.
    pub(super) fn numbers(self, key: &'static str, count: usize) -> Result<Vec<f64>, Fault> {
        let Some(value) = self.get(key) else { return Err(missing(&self.named(key), "a list of positive numbers")) };
        let positive = |value: &Value| value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        let numbers: Option<Vec<f64>> = value.as_array().and_then(|list| list.iter().map(positive).collect());
        let expected = || self.range(key, format!("a list of {count} positive numbers"));
        numbers.filter(|numbers| numbers.len() == count).ok_or_else(expected)
    }

    pub(super) fn flag_or(self, key: &'static str, default: bool) -> Result<bool, Fault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.range(key, "`true` or `false`".into()))
    }

    /// Refuses any value but the one that is built; a missing key stands for it.
    pub(super) fn only(self, key: &'static str, built: impl Into<Value>) -> Result<(), Fault> {
        let built = built.into();
        match self.get(key) {
            // 0 and 0.0 are the same number, but not the same JSON value.
            Some(found) if *found != built && (found.as_f64().is_none() || found.as_f64() != built.as_f64()) => {
                Err(self.unsupported(key, format!("`{built}`")))
            }
            _ => Ok(()),
        }
    }

    /// The error for a value out of its range.
    #[expect(clippy::needless_pass_by_value, reason = "callers have just made it")]
    pub(super) fn range(self, key: &str, expected: String) -> Fault {
        let message = format!("`{}` is {}, expected {expected}", self.named(key), self.found(key));
        Fault::data(message, FROM_SOURCE)
    }

    /// The error for a value that asks for what isn't built.
    #[expect(clippy::needless_pass_by_value, reason = "callers have just made it")]
    pub(super) fn unsupported(self, key: &str, supported: String) -> Fault {
        unsupported(&self.named(key), &self.found(key), &supported)
    }

    fn found(self, key: &str) -> String {
        self.get(key).map_or_else(|| "nothing".into(), quoted)
    }
}

const FROM_SOURCE: &str = "take `config.json` from the model's source again";

/// A name that isn't known: of a family, or of a kind of rotary embedding.
pub(super) fn unknown_name(key: &str, found: Option<&str>, known: &[&'static str]) -> Fault {
    let listed = known.join("`, `");
    let message = match found {
        Some(found) => format!("unknown `{key}` `{}`, expected one of `{listed}`", quoted(found)),
        None => format!("no `{key}`, expected one of `{listed}`"),
    };
    let near = found.and_then(|found| nearest(found, known.iter().copied()));
    Fault::data(message, near.map_or_else(|| format!("use a model of a known `{key}`"), |near| format!("did you mean `{near}`?")))
}

/// A key that could change the numbers, and isn't among those that are known beside it.
pub(super) fn unknown_key(key: &str, known: &[&'static str]) -> Fault {
    let expected = if known.is_empty() {
        " for this `model_type`".to_owned()
    } else {
        format!(", expected one of `{}`", known.join("`, `"))
    };
    let name = key.rsplit_once('.').map_or(key, |(_, name)| name);
    let near = nearest(name, known.iter().copied()).map(|near| format!("did you mean `{near}`?"));
    let hint = near.unwrap_or_else(|| "use a model without this, or remove the key if the model doesn't need it".into());
    Fault::data(format!("unknown key `{}`{expected}", quoted(key)), hint)
}

pub(super) fn missing(key: &str, expected: &str) -> Fault {
    Fault::data(format!("`{key}` is missing, expected {expected}"), FROM_SOURCE)
}

pub(super) fn unsupported(key: &str, found: &str, supported: &str) -> Fault {
    let hint = format!("use a model without this, or correct `{key}` if the model doesn't need it");
    Fault::data(format!("`{key}` is {found}, which is not supported: expected {supported}"), hint)
}
