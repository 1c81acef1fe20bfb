//! `kvtune init`: a recipe for a model and data that were looked at, or one made of another trainer's configuration.

mod proposal;

use std::path::{Path, PathBuf};

use clap::Args;
use tch::Device;

use crate::files;
use crate::recipe::Recipe;
use crate::report::console;
use crate::units::Fault;
use proposal::proposal;

/// Write a recipe for a model and data, or from another trainer's YAML.
#[derive(Debug, Args)]
pub(super) struct Init {
    /// Model directory; its configuration and tokenizer are read, its weights are not.
    #[arg(long, value_name = "DIR", required_unless_present = "from")]
    model: Option<PathBuf>,
    /// Training data: a file, a folder or a pattern. All samples are tokenised.
    #[arg(long, value_name = "FILE", required_unless_present = "from")]
    data: Option<PathBuf>,
    /// Convert this YAML of Axolotl or LLaMA-Factory; `--model` and `--data` replace the model and the data that it names.
    #[arg(long, value_name = "YAML")]
    from: Option<PathBuf>,
}

impl Init {
    pub(super) fn run(&self, device: Device) -> Result<(), Fault> {
        let [model, data] = [&self.model, &self.data].map(|path| path.as_deref().map(written));
        let text = match (&self.from, model, data) {
            (Some(from), model, data) => {
                let set: Vec<(&str, &Path)> = [("model.path", &model), ("data.train", &data)]
                    .into_iter()
                    .filter_map(|(key, path)| Some((key, path.as_deref()?)))
                    .collect();
                let (text, refused) = Recipe::import(from, &set)?;
                if let Some(error) = refused {
                    console::warning(&format!("the recipe is refused until this is changed: {error}"));
                }
                text
            }
            (None, Some(model), Some(data)) => proposal(&model, &data, device)?,
            // clap lets neither pass.
            (None, _, _) => return Ok(()),
        };
        console::part(&text)
    }
}

/// A path as the recipe has it, wherever that is written; what is not there stays as it is, as a name of the Hub or a pattern.
fn written(path: &Path) -> PathBuf {
    if path.exists() { files::absolute(path) } else { path.to_owned() }
}
