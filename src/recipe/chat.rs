//! What a recipe says of texts: how conversations become text, and which part of a sample is trained.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value as Json};
use toml::Table;

use super::diagnose::Checked;
use super::table::{RecipeField, RecipeKey, RecipeTable, TableEntries, table};
use super::tree::Document;
use super::value::RecipeValue;
use super::words::{forms, words};
use crate::units::Fault;

table! {
    /// The keys of the table `[data]` that are about texts.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ChatRecipe in "data" {
        /// Targets of a sample: `completion` (what follows the prompt), `assistant` (all messages of the assistant), `last` (its last message)
        /// or `all`. Not with `tokens`.
        #[also("data.masking_strategy", "data.loss_on")]
        #[default("`assistant` with conversations, else `completion`")]
        pub train_on: Option<TrainOn> = None,
        /// The end token of each trained message or text is a target, too. Without it a model does not learn to stop.
        #[also("data.train_on_eot", "data.train_on_eos", "train_on_eot", "train_on_eos")]
        pub train_on_end_of_turn: bool = true,
        /// How prompt and completion are tokenised: `separate` tokenises each alone, as generation does; `joined` tokenises both as one text, as
        /// TRL does.
        pub boundary: Boundary = Boundary::Separate,
        /// The chat template: a file, its text, or the name of one of several that the model has.
        #[also("data.chat_template_path", "data.chat_template_jinja", "chat_template", "chat_template_jinja", "chat_template_path")]
        #[default("the model's own")]
        pub chat_template: Option<TemplateChoice> = None,
        /// Variables of the chat template besides the messages: `chat_template_kwargs = { enable_thinking = false }`. A row's own
        /// `chat_template_kwargs` override them.
        #[also("chat_template_kwargs")]
        pub chat_template_kwargs: Table = Table::new(),
        /// Today's date for templates that print it, such as `2026-11-22` or `2026-11-22 14:05:09`, so that texts are the same every day.
        #[default("the time at which the data is read")]
        pub chat_template_date: Option<TemplateDate> = None,
        /// Roles of `ShareGPT`'s tags beside the known ones: `roles = { bot = "assistant" }`.
        #[also("data.role_mapping")]
        pub roles: BTreeMap<String, String> = BTreeMap::new(),
    }
}

impl ChatRecipe {
    /// The variables of the chat template, as templates have them.
    pub fn variables(&self) -> Result<Map<String, Json>, Fault> {
        let variables = serde_json::to_value(&self.chat_template_kwargs).and_then(serde_json::from_value);
        variables.map_err(|error| {
            let hint = "write texts, numbers, true, false, lists and tables";
            Fault::usage(format!("`data.chat_template_kwargs`: {error}"), hint)
        })
    }
}

/// A part of a table, whose keys stand in that table.
impl RecipeField for ChatRecipe {
    fn keys(_: RecipeKey, _: &dyn Fn(&str) -> String) -> Vec<RecipeKey> {
        <Self as RecipeTable>::keys()
    }

    fn find(document: &Document, _: &str) -> Checked<Option<Self>> {
        <Self as RecipeTable>::read(document).map(Some)
    }

    fn entries(&self, _: &str) -> TableEntries {
        RecipeTable::entries(self)
    }
}

words! {
    pub enum TrainOn {
        Completion = "completion" | "completions" | "response" | "responses",
        Assistant = "assistant" | "assistants" | "train_on_assistant",
        Last = "last" | "train_on_last" | "last_turn",
        All = "all" | "train_on_all" | "everything",
    }
}

words! {
    pub enum Boundary {
        Joined = "joined",
        Separate = "separate",
    }
}

/// A template's text, its file or its name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct TemplateChoice(pub String);

/// A file is found where the recipe stands; what is no file stays a name, or a text.
impl RecipeValue for TemplateChoice {
    fn takes(_: Option<&str>) -> String {
        "path, text or name".to_owned()
    }

    fn checked(self, document: &Document, key: &str) -> Checked<Self> {
        if self.0.trim().is_empty() {
            let hint = "name a file, or leave the key out to have the model's own";
            return document.refuse(key, format!("`{key}` is empty"), hint);
        }
        if self.0.contains(['{', '\n']) {
            return Ok(self);
        }
        let path = std::path::PathBuf::from(&self.0).checked(document, key)?;
        Ok(if path.is_file() { Self(path.to_string_lossy().into_owned()) } else { self })
    }
}

/// A date, and mostly a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateDate(pub chrono::NaiveDateTime);

const DATE: &str = "%Y-%m-%d";
const DATE_AND_TIME: &str = "%Y-%m-%d %H:%M:%S";

forms! {
    TemplateDate: "a string";
    word<E> |text| {
        let text = text.trim().replace('T', " ");
        let date = || chrono::NaiveDate::parse_from_str(&text, DATE).ok()?.and_hms_opt(0, 0, 0);
        let found = chrono::NaiveDateTime::parse_from_str(&text, DATE_AND_TIME).ok().or_else(date);
        found.map(TemplateDate).ok_or_else(|| E::custom("a date is written as 2026-11-22, or 2026-11-22 14:05:09"))
    };
}

impl RecipeValue for TemplateDate {
    fn takes(_: Option<&str>) -> String {
        "date, as a string".to_owned()
    }
}

impl Serialize for TemplateDate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0.format(DATE_AND_TIME))
    }
}

impl TrainOn {
    /// Whether it names messages of an assistant.
    pub fn is_of_messages(self) -> bool {
        matches!(self, Self::Assistant | Self::Last)
    }
}
