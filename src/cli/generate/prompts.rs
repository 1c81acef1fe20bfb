//! The prompts of `kvtune generate`: as text, as tokens, or as conversations, which become text by the chat template.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Map, Value};

use super::LoadedModel;
use crate::data::{ChatPrompt, ChatTemplates, Conversation, Tokenizer, tools_of};
use crate::files::{self, FileKind};
use crate::units::{Fault, abridged};

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(super) struct Prompts {
    /// Chat in the terminal: each line is answered, and the conversation is kept.
    #[arg(long, group = "conversations", conflicts_with_all = ["prompt", "prompt_file", "prompt_tokens", "messages", "n", "save_session", "session"])]
    pub(super) chat: bool,
    /// A text to go on from; may be given several times.
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// A file whose text is a prompt, `-` for standard input; may be given several times.
    #[arg(long, value_name = "FILE")]
    prompt_file: Vec<PathBuf>,
    /// Token ids to go on from, for models without a tokenizer, too; may be given several times.
    #[arg(long, value_name = "1,2,3")]
    prompt_tokens: Vec<String>,
    /// A file with a conversation to be answered, by the chat template: a JSON list of messages, or an object with `messages`, `tools`
    /// and `chat_template_kwargs`; may be given several times.
    #[arg(long, value_name = "FILE", group = "conversations", conflicts_with = "session")]
    messages: Vec<PathBuf>,
}

impl Prompts {
    /// The tokens of texts, then files, then tokens, then conversations. At its beginning a sequence has the tokens that a tokenizer puts there.
    pub(super) fn read(
        &self,
        used: &LoadedModel,
        template: &TemplateArguments,
        is_beginning: bool,
    ) -> Result<Vec<Vec<u32>>, Fault> {
        let tokenizer = used.tokenizer.as_ref();
        let mut texts = self.prompt.clone();
        for path in &self.prompt_file {
            texts.push(text_of(path)?);
        }
        let mut all = Vec::new();
        for text in texts {
            let tokenizer = tokenizer.ok_or_else(|| {
                Fault::usage(
                    "the model has no `tokenizer.json`, so that it reads no text",
                    "give token ids with `--prompt-tokens 1,2,3`",
                )
            })?;
            all.push(if is_beginning { tokenizer.encode_prompt(&text)? } else { tokenizer.encode(&text)? });
        }
        for list in &self.prompt_tokens {
            all.push(tokens_of(list)?);
        }
        if !self.messages.is_empty() {
            let reader = template.reader(used)?;
            for path in &self.messages {
                all.push(reader.read(path)?);
            }
        }
        Ok(all)
    }
}

fn text_of(path: &Path) -> Result<String, Fault> {
    let read = if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text).map_err(|error| error.to_string())
    } else {
        let read = files::read_text(path, FileKind::Prompt);
        read.map_err(|error| error.io().map_or_else(|| error.to_string(), ToString::to_string))
    };
    read.map_err(|error| {
        Fault::usage(
            format!("the prompt in `{}` cannot be read: {error}", abridged(path.display())),
            "name a file of UTF-8 text, or `-` for standard input",
        )
    })
}

fn tokens_of(list: &str) -> Result<Vec<u32>, Fault> {
    let ids = list.split(',').map(|id| id.trim().parse::<u32>()).collect::<Result<Vec<u32>, _>>();
    ids.map_err(|_| {
        Fault::usage(
            format!("`--prompt-tokens` takes token ids with commas between them, found `{list}`"),
            "write, for instance, `--prompt-tokens 15,7,201`",
        )
    })
}

#[derive(Debug, Args)]
pub(super) struct TemplateArguments {
    /// The chat template, in place of the model's own: a file, a text, or the name of one of several that the model has.
    #[arg(long, value_name = "FILE", requires = "conversations")]
    chat_template: Option<String>,
    /// What the chat template is told beside the messages, as `{"enable_thinking": false}`.
    #[arg(long, value_name = "JSON", requires = "conversations")]
    chat_template_kwargs: Option<String>,
    /// A file with the functions that the assistant may call, a JSON list.
    #[arg(long, value_name = "FILE", requires = "conversations")]
    tools: Option<PathBuf>,
}

/// Turns conversations into text, and text into tokens.
pub(super) struct ConversationReader<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: ChatTemplates,
    /// What the template is told beside the messages, of which it has none.
    pub(super) told: Conversation,
}

impl TemplateArguments {
    pub(super) fn reader<'a>(&self, used: &'a LoadedModel) -> Result<ConversationReader<'a>, Fault> {
        let missing = |what: &str, hint: &str| Fault::usage(format!("the model has no {what}"), hint);
        let hint = "put `tokenizer.json` into the model directory, or generate from `--prompt-tokens`";
        let tokenizer = used.tokenizer.as_ref().ok_or_else(|| missing("`tokenizer.json`, so that it reads no text", hint))?;
        let found = used.templates(self.chat_template.as_deref())?;
        let template =
            found.ok_or_else(|| missing("chat template", "name one with `--chat-template FILE`, or use `--prompt`"))?;
        let mut variables = used.recipe.data.chat.variables()?;
        match self.chat_template_kwargs.as_deref().map(serde_json::from_str) {
            None => {}
            Some(Ok(Value::Object(own))) => variables.extend(own),
            Some(_) => {
                let message = "`--chat-template-kwargs` takes a JSON object".to_owned();
                return Err(Fault::usage(message, "write, for instance, '{\"enable_thinking\": false}'"));
            }
        }
        let tools =
            self.tools.as_deref().map(|path| tools_of(json_in(path)?).map_err(|fault| wrong(path, &fault))).transpose()?;
        let told = Conversation { tools: tools.flatten(), variables, ..Conversation::default() };
        Ok(ConversationReader { tokenizer, template, told })
    }
}

impl ConversationReader<'_> {
    /// The tokens of a conversation in a file: a list of messages, or an object with `messages` and what else [`ChatPrompt`] knows.
    pub(super) fn read(&self, path: &Path) -> Result<Vec<u32>, Fault> {
        let mut fields = match json_in(path)? {
            Value::Object(fields) => fields,
            messages => Map::from_iter([("messages".to_owned(), messages)]),
        };
        let messages = fields.remove("messages").unwrap_or_default();
        let prompt = ChatPrompt::from_fields("messages", messages, self.told.clone(), |field| fields.remove(field));
        let prompt = prompt.map_err(|(_, message)| wrong(path, &message))?;
        if let Some(other) = fields.keys().next() {
            return Err(wrong(path, &format!("there is no field `{other}`")));
        }
        // The template writes all special tokens itself.
        self.tokenizer.encode(&prompt.render(&self.template)?)
    }
}

fn json_in(path: &Path) -> Result<Value, Fault> {
    let text = files::read_text(path, FileKind::Prompt)?;
    serde_json::from_str(&text).map_err(|error| wrong(path, &format!("it is not JSON: {error}")))
}

fn wrong(path: &Path, fault: &str) -> Fault {
    let message = format!("`{}`: {fault}", path.display());
    Fault::usage(message, "write a JSON list of messages with `role` and `content`, or an object with `messages`")
}
