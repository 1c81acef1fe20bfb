//! The formats of data as recipes know them. Which formats there are is for the room that reads them to say.

use std::sync::OnceLock;

use super::words::words;
use crate::metrics::Metric;

pub(super) static KNOWN_FORMATS: OnceLock<Vec<&DataFormat>> = OnceLock::new();

/// From now on `data.format` is checked with the other keys of a recipe, so that all errors are told at once.
pub fn know_formats(formats: Vec<&'static DataFormat>) {
    let _ = KNOWN_FORMATS.set(formats);
}

/// What the data files hold.
#[derive(Debug)]
pub struct DataFormat {
    pub name: &'static str,
    /// What other programs call it.
    pub also: &'static [&'static str],
    /// What [`Self::fields`] lists, with blanks between.
    pub fields: &'static str,
    /// Keys of `[data]` that say nothing of other formats.
    pub keys: &'static [&'static str],
    /// Whether its rows are texts, for which a tokenizer is needed; else they are tokens with their labels.
    pub has_texts: bool,
    /// Whether its rows have a prompt as text.
    pub has_prompt: bool,
    /// Whether a chat template may make texts of its samples.
    pub has_messages: bool,
    /// What answers are scored by, unless somebody says. It is told the family, and may ask whether the references are labels of a ranking.
    pub metrics: fn(Option<HelmetFamily>, &dyn Fn() -> bool) -> &'static [Metric],
}

impl DataFormat {
    /// Texts, all of which is trained.
    pub const fn of(name: &'static str, fields: &'static str) -> Self {
        let metrics: fn(Option<HelmetFamily>, &dyn Fn() -> bool) -> _ = |_, _| &[Metric::ExactMatch, Metric::F1][..];
        Self { name, also: &[], fields, keys: &[], has_texts: true, has_prompt: false, has_messages: false, metrics }
    }

    /// The fields that are read of its rows, whatever head and family.
    pub fn fields(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.fields.split(' ')
    }

    /// The names of all formats, each with what other programs call it.
    pub(super) fn words() -> Vec<(&'static str, &'static [&'static str])> {
        KNOWN_FORMATS.get().into_iter().flatten().map(|format| (format.name, format.also)).collect()
    }

    /// Whether its samples are conversations.
    pub fn is_chat(&self) -> bool {
        self.has_messages && !self.has_prompt
    }
}

words! {
    /// The kinds of HELMET's rows.
    pub enum HelmetFamily {
        /// Questions with passages, of which some answer them.
        Kilt = "kilt",
        /// A value by its key.
        JsonKv = "json_kv",
        /// Passages that are to be ranked.
        Msmarco = "msmarco",
        /// RULER's needles in HELMET's wording.
        Niah = "niah",
        /// Labels learned from many examples.
        Icl = "icl",
        /// Questions on stories. HELMET has them judged by a model.
        NarrativeQa = "narrativeqa",
        /// Questions on books without choices.
        InfbenchQa = "infbench_qa",
        /// Questions on books with four choices.
        InfbenchChoice = "infbench_choice",
        /// Summaries of books. HELMET has them judged by a model.
        InfbenchSum = "infbench_sum",
        /// Summaries of lawsuits. HELMET has them judged by a model.
        MultiLexsum = "multi_lexsum",
    }
}

impl HelmetFamily {
    /// Whether its prompts are messages of the user where the model has a chat template.
    pub fn is_message(self) -> bool {
        matches!(self, Self::NarrativeQa | Self::InfbenchQa | Self::InfbenchChoice | Self::InfbenchSum | Self::MultiLexsum)
    }
}
