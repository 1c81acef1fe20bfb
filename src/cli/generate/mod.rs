//! `kvtune generate`: texts from a model, through the cache that it was trained with.

mod chat;
mod document;
mod prompts;
mod rules;
mod write;

use std::path::PathBuf;

use clap::Args;
use tch::Device;

use super::finetune::code_of_signal;
use super::used_model::{LoadedModel, ModelArgs, own_rules};
use crate::generation::Request;
use crate::report::console;
use crate::train::Interrupt;
use crate::units::Fault;
use chat::Chat;
use prompts::{Prompts, TemplateArguments};
pub(super) use rules::RuleArguments;
use write::{Shown, WrittenTexts};

/// Generate text with a run, a checkpoint or a model, through the cache that it was trained with.
#[derive(Debug, Args)]
pub(super) struct Generate {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompts: Prompts,
    #[command(flatten)]
    rules: RuleArguments,
    /// Number of texts per prompt; the prompt is read once.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    n: u16,
    /// Maximum number of sequences generated at once.
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Save the cache of the prompt to this file, for `--session`; nothing is generated.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["n", "batch", "RuleArguments"])]
    save_session: Option<PathBuf>,
    /// Load the cache that `--save-session` has saved; the prompt continues it.
    #[arg(long, value_name = "FILE", conflicts_with = "save_session")]
    session: Option<PathBuf>,
    /// System prompt of the conversation.
    // What excludes `--chat` would waive that this requires it.
    #[arg(long, value_name = "TEXT", requires = "chat", conflicts_with_all = ["prompt", "prompt_file", "prompt_tokens", "messages"])]
    system_prompt: Option<String>,
    #[command(flatten)]
    template: TemplateArguments,
}

impl Generate {
    pub(super) fn run(&self, device: Device) -> Result<i32, Fault> {
        let used = self.model.load(device)?;
        // After loading: a signal that comes before ends the process at once.
        let interrupt = if self.prompts.chat { Interrupt::install_for_ctrl_c() } else { Interrupt::install() }?;
        let rules = self.rules.over(own_rules(&used.recipe.model.path)?)?;
        if self.prompts.chat {
            return Chat::new(&used, rules, &self.template, self.system_prompt.as_deref())?.run(&interrupt).map(|()| 0);
        }
        let prompts = self.prompts.read(&used, &self.template, self.session.is_none())?;
        if let Some(path) = &self.save_session {
            return document::save(&used, path, &prompts).map(|()| 0);
        }
        let document = self.session.as_deref().map(|path| document::open(&used, path)).transpose()?;
        let (samples, num_texts) = (usize::from(self.n), prompts.len() * usize::from(self.n));
        let requests = prompts.into_iter().map(|prompt| {
            let mut request = Request { samples, ..Request::new(prompt, rules.clone()) };
            // What a signal keeps from being begun needs no copy of what has been read.
            let begins = interrupt.signal().is_none();
            let failed = document.as_ref().and_then(|saved| document::go_on(saved, &mut request, begins).err());
            (request, failed)
        });
        let generator = used.generator(usize::from(self.batch).min(num_texts));
        let has_text = used.tokenizer.is_some();
        let shown = match (console::speech().is_json, num_texts) {
            (true, _) => Shown::Json,
            (false, 1) if has_text => Shown::Streamed,
            (false, _) => Shown::Texts,
        };
        WrittenTexts::new(shown, has_text).all(generator, requests, &interrupt)
    }
}
