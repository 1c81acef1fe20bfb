//! `--save-session` and `--session`: a document is read once, and asked many times.

use std::path::Path;

use super::prompts::Prompt;
use super::{Ending, LoadedModel};
use crate::error::Error;
use crate::generation::{Request, SavedSession};
use crate::report::console;

/// Reads the only prompt, and keeps what has been read.
pub(super) fn save(used: &LoadedModel, path: &Path, prompts: &[Prompt]) -> Result<Ending, Error> {
    let [prompt] = prompts else {
        let message = format!("`--save-session` takes one prompt, found {}", prompts.len());
        return Err(Error::Usage { message, hint: "give one `--prompt`, `--prompt-file` or `--prompt-tokens`".into() });
    };
    let session = used.generator(1).read(&prompt.ids)?;
    SavedSession::write(path, &session, &prompt.ids, &used.identity()?)?;
    console::note(&format!("{} tokens read; the session is in `{}`", prompt.ids.len(), path.display()));
    Ok(Ending::Done)
}

/// The request with what has been read before its prompt.
pub(super) fn go_on(used: &LoadedModel, path: &Path, mut request: Request) -> Result<Request, Error> {
    let longest = used.model.config().longest_sequence();
    let saved = SavedSession::read(path, (&used.engine, &used.model), &used.identity()?, longest)?;
    request.prompt.splice(0..0, saved.ids);
    request.session = Some(saved.session);
    Ok(request)
}
