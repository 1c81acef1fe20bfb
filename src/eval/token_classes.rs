//! Classes of tokens: a file that says, for some samples, which of their targets a loss is reported for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

use super::SampleLoss;
use crate::files::{self, FileKind};
use crate::units::{Fault, abridged};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenClasses(BTreeMap<u64, BTreeMap<String, Vec<usize>>>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassesOfSample {
    sample: u64,
    classes: BTreeMap<String, Vec<usize>>,
}

impl TokenClasses {
    /// Reads JSON lines `{"sample": 3, "classes": {"far": [0, 17]}}`: indices of samples in the data file, and of targets in the sample, from 0.
    pub fn read(path: &Path) -> Result<Self, Fault> {
        let text = files::read_text(path, FileKind::Lines)?;
        let mut classes = BTreeMap::new();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let wrong = |reason: String| {
                let message = format!("`{}:{}`: {reason}", abridged(path.display()), at + 1);
                Fault::data(message, "write a line for each sample, as `{\"sample\": 3, \"classes\": {\"far\": [0, 17]}}`")
            };
            let ClassesOfSample { sample, classes: of_sample } =
                serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
            if classes.insert(sample, of_sample).is_some() {
                return Err(wrong(format!("sample {sample} is there twice")));
            }
        }
        Ok(Self(classes))
    }

    /// Refuses samples of which several have the same index, as windows of one text: a rank would mean a target of each.
    pub fn check_samples(&self, mut samples: impl Iterator<Item = u64>) -> Result<(), Fault> {
        let mut known = BTreeSet::new();
        let again = samples.find(|sample| self.0.contains_key(sample) && !known.insert(*sample));
        let Some(sample) = again else { return Ok(()) };
        let message = format!("classes of tokens are given for sample {sample}, and several samples have this index");
        Err(Fault::usage(message, "evaluate one data set, without `data.on_too_long = \"split\"`"))
    }

    /// Sums of cross-entropies of a sample's targets by class, and how many targets each has.
    pub fn sums(&self, loss: &SampleLoss) -> Result<BTreeMap<String, (f64, usize)>, Fault> {
        let mut sums = BTreeMap::new();
        // What has no target has no mean.
        let classes = self.0.get(&loss.sample).into_iter().flatten();
        for (name, ranks) in classes.filter(|(_, ranks)| !ranks.is_empty()) {
            let sum: &mut (f64, usize) = sums.entry(name.clone()).or_default();
            for &rank in ranks {
                let value = loss.by_target.get(rank).ok_or_else(|| {
                    let (sample, targets) = (loss.sample, loss.by_target.len());
                    let message = format!("the class `{name}` has target {rank} of sample {sample}, which has {targets}");
                    Fault::data(
                        message,
                        "count a sample's targets from 0, and evaluate the samples that the classes were made for",
                    )
                })?;
                *sum = (sum.0 + f64::from(*value), sum.1 + 1);
            }
        }
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::SequenceLoss;

    #[test]
    fn sums_are_those_of_the_targets_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.jsonl");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            TokenClasses::read(&path)
        };
        let classes = read("{\"sample\": 3, \"classes\": {\"far\": [0, 2], \"near\": [1]}}\n\n").unwrap();
        let loss = |sample| SampleLoss {
            sample,
            tokens: 4,
            has_class: false,
            loss: SequenceLoss::default(),
            by_target: vec![1.0, 2.0, 4.0],
        };
        assert_eq!(
            classes.sums(&loss(3)).unwrap(),
            BTreeMap::from([("far".to_owned(), (5.0, 2)), ("near".to_owned(), (2.0, 1))])
        );
        assert!(classes.sums(&loss(4)).unwrap().is_empty());
        let far = read("{\"sample\": 3, \"classes\": {\"far\": [3]}}").unwrap();
        assert!(far.sums(&loss(3)).unwrap_err().to_string().contains("target 3 of sample 3, which has 3"));
        for (text, reason) in [
            ("{\"sample\": 3}", "c.jsonl:1`: missing field"),
            ("{\"sample\": 3, \"classes\": {}}\n{\"sample\": 3, \"classes\": {}}", "c.jsonl:2`: sample 3 is there twice"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
