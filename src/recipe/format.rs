//! The formats of data as recipes know them, and what a recipe says of its rows that their format does not have. Which formats there are is for
//! the room that reads them to say. One that is written is asked here when the recipe is read, and one that is told from the rows when they are.

use std::sync::OnceLock;

use super::chat::{Boundary, TrainOn};
use super::data::DataRecipe;
use super::diagnose::listed;
use super::table::RecipeTable;
use crate::metrics::Metric;
use crate::units::{Fault, quoted};

static KNOWN: OnceLock<Vec<&DataFormat>> = OnceLock::new();

/// From now on `data.format` is checked with the other keys of a recipe, so that all errors are told at once.
pub fn know_formats(formats: Vec<&'static DataFormat>) {
    let _ = KNOWN.set(formats);
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
    /// What answers are scored by, unless somebody says; it may ask whether the references are labels of a ranking.
    pub metrics: fn(&DataRecipe, &dyn Fn() -> bool) -> &'static [Metric],
}

impl DataFormat {
    /// Texts, all of which is trained.
    pub const fn of(name: &'static str, fields: &'static str) -> Self {
        let metrics: fn(&DataRecipe, &dyn Fn() -> bool) -> _ = |_, _| &[Metric::ExactMatch, Metric::F1][..];
        Self { name, also: &[], fields, keys: &[], has_texts: true, has_prompt: false, has_messages: false, metrics }
    }

    /// The fields that are read of its rows, whatever head and family.
    pub fn fields(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.fields.split(' ')
    }

    /// The names of all formats, each with what other programs call it.
    pub(super) fn words() -> Vec<(&'static str, &'static [&'static str])> {
        KNOWN.get().into_iter().flatten().map(|format| (format.name, format.also)).collect()
    }

    /// Whether its samples are conversations.
    pub fn is_chat(&self) -> bool {
        self.has_messages && !self.has_prompt
    }
}

impl DataRecipe {
    /// The format that is written, once it is known which there are.
    pub(super) fn known_format(&self) -> Option<&'static DataFormat> {
        KNOWN.get()?.iter().copied().find(|format| self.format.as_deref() == Some(format.name))
    }

    /// The first key that rows of a format contradict, or that goes unheard beside them, and the error.
    pub fn contradiction(&self, format: &DataFormat) -> Option<(String, Fault)> {
        let refuse = |key: &str, message: String, hint: &str| Some((key.to_owned(), Fault::usage(message, hint)));
        let (train_on, name) = (self.chat.train_on, format.name);
        let targets = [("data.train_on_prompt", self.train_on_prompt), ("data.train_on", train_on.is_some())];
        if let Some((key, _)) = targets.into_iter().find(|(_, is_set)| *is_set && !format.has_texts) {
            let message = format!("`{key}` says nothing where `data.format` is `{name}`: the sequences bring their labels");
            return refuse(key, message, "leave it out, and label the tokens in the file");
        }
        if format.is_chat() && train_on == Some(TrainOn::Completion) {
            let message = format!("`data.train_on = \"completion\"` means what follows a prompt, and `{name}` has none");
            return refuse("data.train_on", message, "write `assistant`, `last` or `all`");
        }
        if let Some(train_on) = train_on.filter(|&train_on| !format.has_messages && train_on.is_of_messages()) {
            let message = format!("`data.train_on = \"{train_on}\"` means what an assistant says, and `{name}` has no messages");
            return refuse("data.train_on", message, "leave it out, or write `all`");
        }
        if self.chat.boundary == Boundary::Joined && !format.has_prompt {
            let message = format!("`data.boundary` says nothing where `data.format` is `{name}`: there is no prompt as text");
            return refuse("data.boundary", message, "leave it out");
        }
        if let Some(other) = self.columns.keys().find(|column| !format.fields().any(|field| field == *column)) {
            let message = format!("`data.columns` names the field `{}`, which `{name}` does not have", quoted(other));
            let (known, first) = (listed(format.fields()), format.fields().next().unwrap_or_default());
            let hint = format!("choose {known}, with its column behind it, as in `columns = {{ {first} = \"NAME\" }}`");
            return refuse("data.columns", message, &hint);
        }
        let (written, defaults) = (self.entries(), Self::default().entries());
        let owns = |format: &DataFormat, key: &String| format.keys.contains(&key.as_str());
        let owner = |key| KNOWN.get()?.iter().find(|other| owns(other, key) && !owns(format, key));
        let mut set = written.iter().filter(|entry| !defaults.contains(entry));
        let (key, owner) = set.find_map(|(key, _)| Some((format!("data.{key}"), owner(key)?.name)))?;
        let message = format!("`{key}` says nothing where `data.format` is not `{owner}`");
        refuse(&key, message, &format!("leave it out, or write `format = \"{owner}\"`"))
    }
}

impl TrainOn {
    /// Whether it names messages of an assistant.
    pub fn is_of_messages(self) -> bool {
        matches!(self, Self::Assistant | Self::Last)
    }
}
