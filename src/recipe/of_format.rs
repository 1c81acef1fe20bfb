//! What a recipe says of its rows and their format does not have. A format that is written is asked here when the recipe is read, and one
//! that is told from the rows when they are.

use super::chat::{Boundary, TrainOn};
use super::data::{DataFormat, DataRecipe};
use super::diagnose::listed;
use crate::units::{Fault, quoted};

impl DataRecipe {
    /// The first key that rows of a format contradict, or that goes unheard beside them, and the error.
    pub fn contradiction(&self, format: DataFormat) -> Option<(&'static str, Fault)> {
        let refuse = |key, message: String, hint: &str| Some((key, Fault::usage(message, hint)));
        let (train_on, has_prompt) = (self.chat.train_on, !format.is_chat() && format != DataFormat::Text);
        if format == DataFormat::Tokens {
            let keys = [("data.train_on_prompt", self.train_on_prompt), ("data.train_on", train_on.is_some())];
            if let Some((key, _)) = keys.into_iter().find(|(_, is_set)| *is_set) {
                let message = format!("`{key}` says nothing where `data.format` is `tokens`: the sequences bring their labels");
                return refuse(key, message, "leave it out, and label the tokens in the file");
            }
        }
        if format.is_chat() && train_on == Some(TrainOn::Completion) {
            let message = format!("`data.train_on = \"completion\"` means what follows a prompt, and `{format}` has none");
            return refuse("data.train_on", message, "write `assistant`, `last` or `all`");
        }
        if let Some(train_on) = train_on.filter(|&train_on| !format.may_have_messages() && train_on.is_of_messages()) {
            let message =
                format!("`data.train_on = \"{train_on}\"` means what an assistant says, and `{format}` has no messages");
            return refuse("data.train_on", message, "leave it out, or write `all`");
        }
        if self.chat.boundary == Boundary::Joined && (!has_prompt || format == DataFormat::Tokens) {
            let message = format!("`data.boundary` says nothing where `data.format` is `{format}`: there is no prompt as text");
            return refuse("data.boundary", message, "leave it out");
        }
        let fields = format.fields();
        if let Some(other) = self.columns.keys().find(|field| !fields.contains(&field.as_str())) {
            let message = format!("`data.columns` names the field `{}`, which `{format}` does not have", quoted(other));
            let (known, first) = (listed(fields.iter().copied()), fields[0]);
            let hint = format!("choose {known}, with its column behind it, as in `columns = {{ {first} = \"NAME\" }}`");
            return refuse("data.columns", message, &hint);
        }
        let owned = [
            ("data.prompt", self.prompt.is_some(), DataFormat::LongBenchV2),
            ("data.max_prompt_tokens", self.max_prompt_tokens.is_some(), DataFormat::LongBenchV2),
            ("data.family", self.family.is_some(), DataFormat::Helmet),
            ("data.roles", !self.chat.roles.is_empty(), DataFormat::ShareGpt),
        ];
        let (key, _, owner) = owned.into_iter().find(|(_, is_set, owner)| *is_set && *owner != format)?;
        let message = format!("`{key}` says nothing where `data.format` is not `{owner}`");
        refuse(key, message, &format!("leave it out, or write `format = \"{owner}\"`"))
    }
}

impl DataFormat {
    /// The fields that are read of its rows, whatever head and family.
    pub fn fields(self) -> &'static [&'static str] {
        match self {
            Self::LongBenchV2 => &[
                "context",
                "question",
                "choice_A",
                "choice_B",
                "choice_C",
                "choice_D",
                "answer",
                "difficulty",
                "length",
                "domain",
            ],
            Self::PromptCompletion => &["prompt", "completion", "label", "tools", "documents", "chat_template_kwargs"],
            Self::Messages => &["messages", "text", "tools", "documents", "chat_template_kwargs"],
            Self::ShareGpt => &["conversations", "system", "tools", "documents", "chat_template_kwargs"],
            Self::Alpaca => {
                &["instruction", "input", "output", "system", "history", "tools", "documents", "chat_template_kwargs"]
            }
            Self::Tokens => &["input_ids", "labels", "label", "attention_mask", "position_ids"],
            Self::Text => &["text", "label"],
            Self::Ruler => &["input", "answer_prefix", "outputs"],
            Self::Helmet => &[
                "question",
                "answers",
                "ctxs",
                "demos",
                "context",
                "answer",
                "num_kvs",
                "query",
                "qid",
                "type_needle_v",
                "outputs",
                "options",
            ],
        }
    }

    /// Whether its samples are conversations.
    pub fn is_chat(self) -> bool {
        matches!(self, Self::Messages | Self::ShareGpt | Self::Alpaca)
    }

    /// Whether a chat template may make texts of its samples.
    pub fn may_have_messages(self) -> bool {
        self.is_chat() || matches!(self, Self::PromptCompletion | Self::LongBenchV2 | Self::Helmet)
    }
}

impl TrainOn {
    /// Whether it names messages of an assistant.
    pub fn is_of_messages(self) -> bool {
        matches!(self, Self::Assistant | Self::Last)
    }
}
