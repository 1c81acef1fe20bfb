//! The metrics by name.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

use super::ranking::{Ranking, parse_ranking};
use super::rouge::RougeMeasure;
use super::{bags, infinitebench, longbench_v1, longbench_v2, python, ruler};

/// What says how good a prediction is: a number from 0 to 1, of the best reference unless it says otherwise. What each one counts, and which
/// benchmark it is of, says `docs/reference/metrics.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    ExactMatch,
    Substring,
    F1,
    QaF1,
    QaF1Zh,
    Rouge(RougeMeasure),
    RulerAll,
    RulerPart,
    RulerRecall,
    LongBenchRougeL,
    Count,
    Retrieval,
    CodeSimilarity,
    LongBenchV2,
    KvRetrieval,
    FirstNumber,
    Choice,
    Ndcg10,
}

/// Why a metric cannot score a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricError {
    /// What the references must be.
    pub expected: &'static str,
    pub found: String,
}

impl fmt::Display for MetricError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected {}, found {}", self.expected, self.found)
    }
}

impl std::error::Error for MetricError {}

static NAMES: LazyLock<Vec<(String, Metric)>> = LazyLock::new(|| {
    let rouge = RougeMeasure::all().map(|measure| (measure.to_string(), Metric::Rouge(measure)));
    let other = [
        ("exact_match", Metric::ExactMatch),
        ("substring", Metric::Substring),
        ("f1", Metric::F1),
        ("qa_f1", Metric::QaF1),
        ("qa_f1_zh", Metric::QaF1Zh),
        ("ruler_all", Metric::RulerAll),
        ("ruler_part", Metric::RulerPart),
        ("ruler_recall", Metric::RulerRecall),
        ("longbench_rouge_l", Metric::LongBenchRougeL),
        ("count", Metric::Count),
        ("retrieval", Metric::Retrieval),
        ("code_similarity", Metric::CodeSimilarity),
        ("longbench_v2", Metric::LongBenchV2),
        ("kv_retrieval", Metric::KvRetrieval),
        ("first_number", Metric::FirstNumber),
        ("choice", Metric::Choice),
        ("ndcg_10", Metric::Ndcg10),
    ];
    other.map(|(name, metric)| (name.to_owned(), metric)).into_iter().chain(rouge).collect()
});

static KNOWN: LazyLock<Vec<&'static str>> = LazyLock::new(|| NAMES.iter().map(|(name, _)| name.as_str()).collect());

impl Metric {
    pub fn names() -> &'static [&'static str] {
        &KNOWN
    }

    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(_, metric)| *metric == self).map_or("", |(name, _)| name)
    }

    /// Scores a prediction, from 0 to 1.
    ///
    /// # Errors
    /// There is no reference, or `retrieval` finds one that names no paragraph, or `ndcg_10` one without labels.
    pub fn score(self, prediction: &str, references: &[String]) -> Result<f64, MetricError> {
        if references.is_empty() {
            return Err(MetricError { expected: "at least 1 reference", found: "an empty array".into() });
        }
        if let Some(other) = references.iter().find(|text| self == Self::Retrieval && longbench_v1::paragraph(text).is_none()) {
            return Err(MetricError { expected: "`Paragraph N` for `retrieval`", found: format!("`{other}`") });
        }
        let best = |score: &dyn Fn(&str, &str) -> f64| references.iter().map(|text| score(prediction, text)).fold(0.0, f64::max);
        Ok(match self {
            Self::ExactMatch => best(&bags::exact_match),
            Self::Substring => best(&bags::substring),
            Self::F1 => best(&bags::f1),
            Self::QaF1 => best(&bags::qa_f1),
            Self::QaF1Zh => best(&bags::qa_f1_zh),
            Self::Rouge(measure) => best(&|prediction, text| measure.score(prediction, text)),
            Self::RulerAll => ruler::all(prediction, references),
            Self::RulerPart => ruler::part(prediction, references),
            Self::RulerRecall => ruler::recall(prediction, references),
            Self::LongBenchRougeL => best(&longbench_v1::rouge_l),
            Self::Count => best(&longbench_v1::count),
            Self::Retrieval => best(&longbench_v1::retrieval),
            Self::CodeSimilarity => longbench_v1::code_similarity(prediction, &references[0]),
            Self::LongBenchV2 => {
                let choice = longbench_v2::extract_choice(prediction);
                best(&|_, text| python::one_if(choice.is_some_and(|choice| text.chars().eq([choice]))))
            }
            Self::KvRetrieval => infinitebench::kv_retrieval(prediction, references),
            Self::FirstNumber => infinitebench::first_number(prediction, references),
            Self::Choice => infinitebench::choice(prediction, references),
            Self::Ndcg10 => Ranking::new(&parse_ranking(prediction), &labels_of(references)?).ndcg(10),
        })
    }
}

/// Labels by id, as in `{"12": 2, "7": 0}`.
fn labels_of(references: &[String]) -> Result<BTreeMap<String, u32>, MetricError> {
    let labels = references.iter().find_map(|text| serde_json::from_str(text).ok());
    let expected = "an object of labels by id, as `{\"12\": 2, \"7\": 0}`, for `ndcg_10`";
    labels.ok_or_else(|| MetricError { expected, found: format!("`{}`", references.join("`, `")) })
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Metric {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Metric {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map_err(|_| D::Error::unknown_variant(&name, Self::names()))
    }
}

impl FromStr for Metric {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|(name, _)| name == text).map(|(_, metric)| *metric);
        found.ok_or_else(|| format!("unknown metric `{text}`, expected one of {}", Self::names().join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_one_metric() {
        let mut names: Vec<&str> = Metric::names().to_vec();
        assert!(names.iter().all(|name| name.parse::<Metric>().is_ok_and(|metric| metric.name() == *name)));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), NAMES.len());
        assert!("f2".parse::<Metric>().is_err_and(|message| message.contains("`f2`")));
    }

    #[test]
    fn what_cannot_be_scored_is_refused() {
        assert!(Metric::F1.score("x", &[]).is_err());
        assert!(Metric::Retrieval.score("1", &["1".into()]).is_err_and(|error| error.found == "`1`"));
    }
}
