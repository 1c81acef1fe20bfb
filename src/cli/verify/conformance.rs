//! `kvtune verify --conformance`: whether the cache evicts what was recorded beside a checkpoint or an export.

use std::path::{Path, PathBuf};

use tch::Device;

use serde_json::json;

use crate::cli::used_model::recipe_beside;
use crate::export::PolicyFile;
use crate::files;
use crate::model::{self, Adapter, Model, ModelSource};
use crate::recipe::{Recipe, TrainedWeights};
use crate::report::console;
use crate::train;
use crate::units::Fault;

/// Runs the prompt of the file in `dir` with the model there, or with the adapter there beside its base.
pub(super) fn check(dir: &Path, base: Option<&Path>, device: Device) -> Result<(), Fault> {
    let file = PolicyFile::read(dir)?;
    let of_file = file.to_recipe(dir, Path::new("."), &[])?.model;
    let is_adapter = crate::checkpoint::holds(dir) == Some(TrainedWeights::Adapter);
    let model_dir = if is_adapter { base_of(dir, base)? } else { dir.to_owned() };
    // The choices were recorded with the weights packed as the run's recipe says; another base is as it is.
    let of_run =
        recipe_beside(dir).filter(|_| is_adapter && base.is_none()).map(|recipe| Recipe::load(&recipe, &[])).transpose()?;
    let quantize = of_run.and_then(|resolved| resolved.recipe.model.quantize);
    let source = ModelSource { rope_scaling: of_file.rope_scaling.as_ref(), quantize, ..ModelSource::from(&model_dir) };
    let mut model = Model::load(source, of_file.dtype, device)?;
    if is_adapter {
        file.check_base(dir, &model_dir, model.config())?;
        let classes = Adapter::classes_of(dir, model.config().clone())?.num_classes;
        model = model.with_classes(classes);
        train::load_adapter(&mut model, dir)?;
    }
    train::load_gates(&mut model, dir)?;
    let left = file.check(dir, &model)?;
    let tokens = file.conformance.prompt.len();
    let words = format!("conforms: {left} evictions of a prompt of {tokens} tokens are as recorded, in every layer and head");
    console::outcome(&words, &json!({ "conforms": true, "evictions": left, "tokens": tokens }))
}

/// Where an adapter's base is: as the user says, or as the adapter names it.
fn base_of(dir: &Path, base: Option<&Path>) -> Result<PathBuf, Fault> {
    let config = model::read_peft(dir)?.config;
    if let Some(base) = base {
        return files::model_dir(base, config.revision_of(base).as_deref());
    }
    config.base_dir()?.ok_or_else(|| {
        Fault::usage(
            format!("the adapter in `{}` does not name its base model", dir.display()),
            "say where it is with `--base DIR`",
        )
    })
}
