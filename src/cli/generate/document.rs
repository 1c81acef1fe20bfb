//! `--save-session` and `--session`: a document is read once, and asked many times.

use std::path::Path;

use super::LoadedModel;
use crate::cli::used_model::identity;
use crate::files;
use crate::generation::{Request, SavedSession, rotates_by_length};
use crate::report::console;
use crate::units::Fault;

/// Reads the only prompt, and keeps what has been read.
pub(super) fn save(used: &LoadedModel, path: &Path, prompts: &[Vec<u32>]) -> Result<(), Fault> {
    let [prompt] = prompts else {
        let message = format!("`--save-session` takes one prompt, found {}", prompts.len());
        return Err(Fault::usage(message, "give one `--prompt`, `--prompt-file` or `--prompt-tokens`"));
    };
    // What keeps it from being saved shall not come to light behind hours of reading.
    let identity = identity(&used.recipe, used.adapter.as_deref())?;
    files::check_writable(&files::behind_links(path)?)?;
    let session = used.generator(1).read(prompt)?;
    SavedSession::write(path, &session, prompt, &identity)?;
    console::note(&format!("{} tokens read; the session is in `{}`", prompt.len(), path.display()));
    Ok(())
}

/// What has been read before all prompts.
pub(super) fn open(used: &LoadedModel, path: &Path) -> Result<SavedSession, Fault> {
    let longest = used.generator(1).longest_kept().ok_or_else(rotates_by_length)?;
    let identity = identity(&used.recipe, used.adapter.as_deref())?;
    let saved = SavedSession::read(path, &used.engine, &used.model, &identity, longest)?;
    if !saved.is_checked {
        console::note(&format!(
            "an earlier version saved the session `{}`: whether it is as it was written can't be checked",
            path.display()
        ));
    }
    Ok(saved)
}

/// Gives a request what has been read before its prompt, and a copy of its session where the request begins.
pub(super) fn go_on(saved: &SavedSession, request: &mut Request, begins: bool) -> Result<(), Fault> {
    request.prompt.splice(0..0, saved.ids.iter().copied());
    request.session = begins.then(|| saved.session.fork()).transpose()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::super::write::{Shown, WrittenTexts};
    use super::*;
    use crate::generation::{GenerationRules, Generator};
    use crate::recipe::Recipe;
    use crate::train;

    #[test]
    fn what_does_not_begin_gets_no_copy_of_the_session() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        let mut recipe = Recipe::of_model(&path, &[]).unwrap().recipe;
        recipe.grad = recipe.grad.closed();
        let model = train::base_model(&recipe, None, Device::Cpu).unwrap();
        let engine = train::engine(&recipe, model.config(), None, None).unwrap();
        let session = Generator::new(&engine, &model, None, 1).read(&[5, 6]).unwrap();
        let saved = SavedSession { session, ids: vec![5, 6], is_checked: true };
        for begins in [true, false] {
            let mut request = Request::new(vec![7], GenerationRules::default());
            go_on(&saved, &mut request, begins).unwrap();
            assert_eq!((&request.prompt[..], request.session.is_some()), (&[5, 6, 7][..], begins));
            // What can not begin leaves the next one its turn.
            let mut texts = WrittenTexts::new(Shown::Streamed, false);
            let mut generator = Generator::new(&engine, &model, None, 1);
            texts.submit(&mut generator, request, Some(Fault::failed("no memory")));
            assert_eq!((texts.failed.is_some(), generator.is_idle()), (true, true));
        }
    }
}
