//! Which samples a run trains on and which it validates with, kept in its directory: a resumed run must find the same.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::saving::other_data;
use crate::data::{Dataset, Splits};
use crate::files::{self, FileKind};
use crate::units::{Fault, abridged};

pub(super) const SPLIT: &str = "split.json";

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedSplit {
    train: SavedSamples,
    validation: Option<SavedSamples>,
    /// The files of the model's folder that decide the tokens of texts: name and hash. Earlier versions did not write it.
    #[serde(default)]
    origins: Option<BTreeMap<String, String>>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedSamples {
    file: String,
    hash: String,
    /// Indices from 0, in order: the first of a run of neighbours and the one behind its last.
    samples: Vec<(usize, usize)>,
}

impl SavedSamples {
    fn of(data: &Dataset) -> Self {
        let samples = data.samples();
        let neighbours = samples.chunk_by(|a, b| a + 1 == *b).map(|run| (run[0], run[0] + run.len()));
        Self { file: data.path().display().to_string(), hash: data.hash(), samples: neighbours.collect() }
    }

    /// Fails where the content of the file, or what is made of it, is another.
    fn check(&self, data: &Dataset, split: &Path) -> Result<(), Fault> {
        let found = Self::of(data);
        if found.hash != self.hash {
            return Err(other_data(data.path()));
        }
        if found.samples != self.samples {
            return Err(other_split(data.path(), split));
        }
        Ok(())
    }
}

impl SavedSplit {
    pub(super) fn write(data: &Splits, dir: &Path) -> Result<(), Fault> {
        let (train, validation) = (SavedSamples::of(&data.train), data.validation.as_ref().map(SavedSamples::of));
        let split = Self { train, validation, origins: Some(data.origins.clone()) };
        files::write_atomic(&dir.join(SPLIT), &files::to_json(&split))
    }

    /// Fails where the data are not those that the run in `dir` began with; false where an earlier version, cut short, has not noted them.
    pub(super) fn check(data: &Splits, dir: &Path, model: &Path) -> Result<bool, Fault> {
        let path = dir.join(SPLIT);
        let Some(bytes) = files::read_if_there(&path, FileKind::Record)? else { return Ok(false) };
        let split: Self = files::parse_json(&path, &bytes, FileKind::Record)?;
        let saved = split.origins.as_ref().unwrap_or(&data.origins);
        let names: BTreeSet<&String> = saved.keys().chain(data.origins.keys()).collect();
        let changed: Vec<&str> =
            names.into_iter().filter(|name| saved.get(*name) != data.origins.get(*name)).map(String::as_str).collect();
        if !changed.is_empty() {
            let (model, changed) = (model.display(), changed.join(", "));
            let message =
                format!("texts of the model `{model}` become other tokens than when the run began: changed are {changed}");
            return Err(Fault::data(message, "resume with the model and the settings that the run began with"));
        }
        split.train.check(&data.train, &path)?;
        match (&split.validation, &data.validation) {
            (Some(saved), Some(data)) => saved.check(data, &path).map(|()| true),
            (None, None) => Ok(true),
            _ => Err(other_split(data.train.path(), &path)),
        }
    }
}

/// Data that are divided into training and validation in another way than the run has written down.
fn other_split(path: &Path, split: &Path) -> Fault {
    let [path, split] = [path, split].map(|path| abridged(path.display()));
    Fault::data(
        format!("the samples of `{path}` are not divided as `{split}` has them"),
        "begin a new run: with this version, what the run has not seen so far would be other samples",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{DataRequest, ModelLimits, Tokenizer};
    use crate::recipe::{DataRecipe, HeadRecipe};

    #[test]
    fn other_texts_are_refused_with_what_has_changed() {
        let dir = tempfile::tempdir().unwrap();
        let (model, run) = (dir.path().join("model"), dir.path());
        std::fs::create_dir(&model).unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        for name in ["tokenizer.json", "config.json"] {
            std::fs::copy(fixtures.join(name), model.join(name)).unwrap();
        }
        let write = |name: &str, text: &str| std::fs::write(model.join(name), text).unwrap();
        let template = "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}";
        write("chat_template.jinja", template);
        write("tokenizer_config.json", r#"{"bos_token": "<|im_start|>"}"#);
        let rows = dir.path().join("rows.jsonl");
        let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
        std::fs::write(&rows, row).unwrap();
        let open = || {
            let tokenizer = Tokenizer::load(&model).unwrap();
            let limits = ModelLimits { vocab_size: 512, trained_positions: 512, computable_positions: 512, pad: None };
            let (recipe, head) = (&DataRecipe::of(rows.clone().into()), &HeadRecipe::NextToken);
            let request = DataRequest { recipe, head, tokenizer: Some(&tokenizer), limits, initial: None, seed: 1 };
            crate::data::open(&request, &mut |_, _, _| {}).unwrap()
        };
        SavedSplit::write(&open(), run).unwrap();
        let changed = || match SavedSplit::check(&open(), run, &model) {
            Ok(_) => String::new(),
            Err(error) => error.to_string().split_once("changed are ").unwrap().1.to_owned(),
        };
        assert_eq!(changed(), "");
        write("chat_template.jinja", &template.replace("m.role", "'x'"));
        assert_eq!(changed(), "the chat template");
        write("chat_template.jinja", template);
        write("tokenizer_config.json", r#"{"bos_token": "<|im_end|>"}"#);
        assert_eq!(changed(), "the special tokens of `tokenizer_config.json`");
        write("tokenizer.json", &(std::fs::read_to_string(model.join("tokenizer.json")).unwrap() + " "));
        assert_eq!(changed(), "`tokenizer.json`, the special tokens of `tokenizer_config.json`");
        // A run of an earlier version has not written it down, and goes on.
        let saved = std::fs::read_to_string(run.join(SPLIT)).unwrap();
        let mut saved: serde_json::Value = serde_json::from_str(&saved).unwrap();
        saved.as_object_mut().unwrap().remove("origins");
        std::fs::write(run.join(SPLIT), saved.to_string()).unwrap();
        assert_eq!(changed(), "");
    }
}
