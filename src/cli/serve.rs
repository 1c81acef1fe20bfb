//! `kvtune serve`: OpenAI's protocol over a model and the cache that it was trained with.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tch::Device;

use super::used_model::{ModelArgs, own_rules};
use crate::data::{self, TemplateFault};
use crate::files::{self, FileKind};
use crate::recipe::Storage;
use crate::report::console;
use crate::serve::{self, PromptEncoder, ServeOptions};
use crate::train::Interrupt;
use crate::units::Fault;

/// A year: a longer time could overflow a deadline.
const MAX_SECONDS: u64 = 365 * 24 * 3600;

/// Serve a run, a checkpoint or a model over HTTP with an OpenAI-compatible API.
#[derive(Debug, Args)]
pub(super) struct Serve {
    #[command(flatten)]
    model: ModelArgs,
    /// The address to listen on; `0.0.0.0` for all of this machine.
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: String,
    /// The port to listen on; 0 for a free one, which is printed.
    #[arg(long, default_value_t = 8000, value_name = "PORT")]
    port: u16,
    /// A file with the key that clients must send.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// What clients call the model; if left out, the name of its directory.
    #[arg(long, value_name = "NAME")]
    served_name: Option<String>,
    /// The chat template, in place of the model's own: a file, a text, or the name of one of several that the model has.
    #[arg(long, value_name = "FILE")]
    chat_template: Option<String>,
    /// Maximum number of sequences generated at once.
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    batch: u16,
    /// Maximum length of the request queue; further prompts are refused.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    queue: u16,
    /// Maximum number of sessions kept for prompts that begin with what they have read; 0 for none.
    #[arg(long, default_value_t = 2, value_name = "N")]
    keep: u16,
    /// Maximum time of a request, in seconds.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=MAX_SECONDS))]
    timeout: u64,
    /// Maximum time for the head of a request, in seconds; then the connection is closed.
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=MAX_SECONDS))]
    header_timeout: u64,
    /// Maximum size of the body of a request, in bytes.
    #[arg(long, default_value_t = 32 << 20, value_name = "BYTES")]
    max_body: usize,
    /// Maximum number of tokens of a prompt; if left out, as many as the model has positions.
    #[arg(long, value_name = "N")]
    max_prompt: Option<usize>,
    /// A further name or address by which the server may be asked (the `Host` of a request), without a port; may be given several times.
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Pages of this origin, as `https://example.org`, may ask from a browser; `*` for all. May be given several times.
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// Write no line for each request.
    #[arg(long)]
    no_access_log: bool,
}

impl Serve {
    pub(super) fn run(&self, device: Device) -> Result<(), Fault> {
        let api_key = self.api_key_file.as_deref().map(key_in).transpose()?;
        if api_key.is_none() && !is_loopback(&self.host) {
            let others = "others than this machine may reach it, and no key is asked of them: see `--api-key-file`";
            console::warning(&format!("the server listens on `{}`: {others}", self.host));
        }
        let used = self.model.load(device)?;
        // After loading: a signal that comes before ends the process at once.
        let interrupt = Interrupt::install()?;
        let path = &used.recipe.model.path;
        let rules = own_rules(path)?;
        let template = match used.templates(self.chat_template.as_deref()) {
            // Without it all but the chat can be served.
            Err(error) if self.chat_template.is_none() && error.payload::<TemplateFault>().is_some() => {
                console::warning(&format!("{error}; conversations are refused"));
                None
            }
            template => template?,
        };
        let cache = &used.recipe.kv_cache;
        let slots = match cache.storage {
            Storage::Preallocated => json!(used.model.config().cache_lengths(&cache.cache_length)),
            Storage::Growing | Storage::Paged => json!("all"),
        };
        let generator = used.generator(self.batch.into());
        let max_prompt = self.max_prompt.unwrap_or_else(|| used.model.config().trained_positions());
        let encoder = PromptEncoder::new(
            used.tokenizer.clone(),
            template,
            used.recipe.data.chat.variables()?,
            data::special_tokens(path)?,
            max_prompt.min(generator.limits.most),
        );
        let options = ServeOptions {
            name: self.served_name.clone().or_else(|| self.model.name()).unwrap_or_else(|| "model".to_owned()),
            path: path.display().to_string(),
            cache: json!({ "policy": cache.policy.name, "cache_length": slots, "chunk_size": cache.chunk_size }),
            host: self.host.clone(),
            port: self.port,
            api_key: api_key.map(|key| blake3::hash(key.as_bytes())),
            queue: self.queue.into(),
            keep: self.keep.into(),
            timeout: Duration::from_secs(self.timeout),
            header_timeout: Duration::from_secs(self.header_timeout),
            max_body: self.max_body,
            max_prompt,
            allow_hosts: self.allow_host.clone(),
            allow_origins: self.allow_origin.clone(),
            access_log: !self.no_access_log,
        };
        serve::serve(generator, encoder, rules, options, move || interrupt.signal().is_some())?;
        console::note("all requests are answered");
        Ok(())
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn key_in(path: &std::path::Path) -> Result<String, Fault> {
    let refuse = |message: String| Fault::usage(message, "write the key into the file, alone on its line");
    let text = files::read_text(path, FileKind::Note)?;
    let key = text.trim().to_owned();
    match key.lines().count() {
        0 => Err(refuse(format!("`{}` holds no API key", path.display()))),
        1 => Ok(key),
        lines => Err(refuse(format!("`{}` holds {lines} lines: expected one API key", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_holds_one_key() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (text, expected) in
            [("\n secret \n\n", Ok("secret")), ("\n", Err("holds no API key")), ("a\nb\n", Err("holds 2 lines"))]
        {
            std::fs::write(file.path(), text).unwrap();
            match (key_in(file.path()), expected) {
                (Ok(key), Ok(expected)) => assert_eq!(key, expected),
                (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
                (found, _) => panic!("{text:?}: {found:?}"),
            }
        }
    }
}
