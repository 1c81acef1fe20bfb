//! The prompts of `kvtune generate`, as text or as tokens.

use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;

use super::LoadedModel;
use super::template::TemplateArguments;
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
    /// The tokens of all prompts: texts, then files, then tokens, then conversations. At the beginning of a sequence a text has the tokens that a
    /// tokenizer puts there.
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
