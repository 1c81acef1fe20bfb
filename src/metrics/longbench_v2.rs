//! `LongBench` v2: the choice that a reply names, and accuracy as its `result.py` sums it up.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use regex::Regex;
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::bags::compiled;

/// In parentheses first, then without; both in this spelling only.
static CHOICES: LazyLock<[Regex; 2]> =
    LazyLock::new(|| [r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"].map(compiled));

/// The choice A to D that a reply names; `None` where it names none.
pub fn extract_choice(reply: &str) -> Option<char> {
    let reply = reply.replace('*', "");
    CHOICES.iter().find_map(|choice| choice.captures(&reply)?.get(1)?.as_str().chars().next())
}

/// Some of the samples: how many, and the sum of their credits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Group {
    pub samples: usize,
    credits: f64,
}

impl Group {
    fn add(&mut self, credit: f64) {
        self.samples += 1;
        self.credits += credit;
    }

    /// Accuracy in per cent; `None` without samples.
    pub fn percent(&self) -> Option<f64> {
        (self.samples > 0).then(|| 100.0 * self.credits / self.samples as f64)
    }
}

/// In per cent with one decimal; `-` without samples.
impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.percent() {
            Some(percent) => write!(f, "{percent:.1}"),
            None => f.write_str("-"),
        }
    }
}

/// Accuracy over all, by difficulty, by length and by domain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LongBenchV2 {
    pub overall: Group,
    /// Easy; hard is whatever is not.
    pub by_difficulty: [Group; 2],
    /// Short, medium; long is whatever is neither.
    pub by_length: [Group; 3],
    pub by_domain: BTreeMap<String, Group>,
}

impl LongBenchV2 {
    pub const COLUMNS: [&'static str; 6] = ["Overall", "Easy", "Hard", "Short", "Medium", "Long"];

    /// Counts a sample that earns so much, from 0 to 1.
    pub fn add_credit(&mut self, [difficulty, length, domain]: [&str; 3], credit: f64) {
        self.overall.add(credit);
        self.by_difficulty[usize::from(difficulty != "easy")].add(credit);
        self.by_length[["short", "medium"].iter().position(|name| *name == length).unwrap_or(2)].add(credit);
        self.by_domain.entry(domain.to_owned()).or_default().add(credit);
    }

    /// The groups, in the order of [`LongBenchV2::COLUMNS`].
    fn groups(&self) -> [&Group; 6] {
        let ([easy, hard], [short, medium, long]) = (&self.by_difficulty, &self.by_length);
        [&self.overall, easy, hard, short, medium, long]
    }

    pub fn cells(&self) -> [String; 6] {
        self.groups().map(ToString::to_string)
    }
}

/// Per cent by the names of [`LongBenchV2::COLUMNS`] in lower case and by domain; null without samples.
impl Serialize for LongBenchV2 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, group) in Self::COLUMNS.iter().zip(self.groups()) {
            map.serialize_entry(&name.to_lowercase(), &group.percent())?;
        }
        let domains: BTreeMap<&str, Option<f64>> =
            self.by_domain.iter().map(|(name, group)| (&name[..], group.percent())).collect();
        map.serialize_entry("by_domain", &domains)?;
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_without_samples_has_no_accuracy() {
        let mut table = LongBenchV2::default();
        table.add_credit(["easy", "short", "Law"], 1.0);
        table.add_credit(["easy", "medium", "Law"], 0.0);
        assert_eq!(table.cells(), ["50.0", "50.0", "-", "100.0", "0.0", "-"]);
        assert_eq!(table.by_domain["Law"].percent(), Some(50.0));
        let json = r#"{"overall":50.0,"easy":50.0,"hard":null,"short":100.0,"medium":0.0,"long":null,"by_domain":{"Law":50.0}}"#;
        assert_eq!(serde_json::to_string(&table).unwrap(), json);
    }
}
