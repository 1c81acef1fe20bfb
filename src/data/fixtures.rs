//! What the tests of this room share: a tokenizer, a recipe to vary, files in a temporary folder.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use super::{DataRequest, ModelLimits, Splits, Tokenizer, formats, open};
use crate::recipe::{ClassList, DataRecipe, HeadRecipe, OnTooLong, know_formats};
use crate::units::Fault;

pub(super) const LIMITS: ModelLimits =
    ModelLimits { vocab_size: 512, trained_positions: 32_768, computable_positions: 32_768, pad: None };

static TOKENIZER: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2")).unwrap());

pub(super) fn tokenizer() -> Tokenizer {
    TOKENIZER.clone()
}

pub(super) fn letters() -> HeadRecipe {
    HeadRecipe::SeqClassificationOnLogits(ClassList::Named(["A", "B", "C", "D"].map(str::to_owned).to_vec()))
}

/// A data file in a folder of its own, and a recipe that reads it whole.
pub(super) struct Fixture {
    pub(super) dir: tempfile::TempDir,
    pub(super) recipe: DataRecipe,
    pub(super) head: HeadRecipe,
}

impl Fixture {
    pub(super) fn new(format: &str, content: impl AsRef<[u8]>) -> Self {
        know_formats(formats());
        let dir = tempfile::tempdir().unwrap();
        let train = dir.path().join("train.jsonl");
        std::fs::write(&train, content).unwrap();
        let recipe = DataRecipe { format: Some(format.to_owned()), ..DataRecipe::of(train.into()) };
        Self { dir, recipe, head: HeadRecipe::NextToken }
    }

    pub(super) fn classify(mut self) -> Self {
        self.head = letters();
        self
    }

    pub(super) fn limit(mut self, length: usize, on_too_long: OnTooLong) -> Self {
        self.recipe.max_seq_length = Some(length);
        self.recipe.on_too_long = on_too_long;
        self
    }

    pub(super) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    pub(super) fn request<'a>(&'a self, tokenizer: Option<&'a Tokenizer>) -> DataRequest<'a> {
        DataRequest { recipe: &self.recipe, head: &self.head, tokenizer, limits: LIMITS, initial: None, seed: 1 }
    }

    pub(super) fn open(&self) -> Result<Splits, Fault> {
        open(&self.request(Some(&tokenizer())), &mut |_, _, _| {})
    }

    /// The error's text, the folder left out; every error that data can cause has a hint.
    pub(super) fn error(&self) -> String {
        let error = self.open().unwrap_err();
        assert!(error.hint().is_some_and(|hint| !hint.is_empty()));
        error.to_string().replace(&format!("{}/", self.dir.path().display()), "")
    }
}
