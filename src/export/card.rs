//! The model card: `README.md` of what is exported, from the recipe and the figures of its run.

use std::fmt::Write;
use std::path::PathBuf;

use super::trained::{ExportTarget, Trained};
use crate::recipe::{LoraRecipe, Recipe, ValidationSource};
use crate::report::evicted::Evicted;
use crate::report::metrics::StepMetrics;
use crate::report::table::Table;

/// The card's text.
pub(super) fn card(trained: &Trained<'_>, target: ExportTarget, base_model: &str, hash: &str) -> String {
    let is_model = target == ExportTarget::Merged;
    let adapter = trained.recipe.and_then(|recipe| recipe.lora.as_ref()).map_or("LoRA", LoraRecipe::kind);
    let (library, kind) =
        if is_model { ("transformers", "A model".to_owned()) } else { ("peft", format!("A {adapter} adapter")) };
    let mut text = format!("---\nlibrary_name: {library}\nbase_model: {base_model:?}\ntags:\n- kvtune\n");
    text.push_str(if is_model { "---\n" } else { "- lora\n---\n" });
    let what = if is_model { "made from" } else { "for" };
    let version = env!("CARGO_PKG_VERSION");
    // Writing to a text cannot fail.
    let _ = write!(
        text,
        "\n# {name}\n\n{kind} {what} `{base_model}`, trained with kvtune {version} through a KV cache of fixed size. It expects the cache \
         that it was trained with: other policies and lengths work, with other results.\n\n{}\n## Use\n\n{}\n",
        figures(trained, base_model, hash),
        usage(target, base_model),
        name = trained.name(),
    );
    if let Some(recipe) = trained.recipe {
        let _ = write!(text, "\n## Recipe\n\n```toml\n{}```\n", without_places(recipe, base_model).to_toml());
    }
    text
}

/// A recipe as others may read it: its files by their names, without where on a machine they are.
fn without_places(recipe: &Recipe, base_model: &str) -> Recipe {
    let name = |path: &PathBuf| path.file_name().map_or_else(|| path.clone(), PathBuf::from);
    let mut shown = recipe.clone();
    shown.model.path = base_model.into();
    shown.model.adapter = shown.model.adapter.as_ref().map(name);
    shown.data.change(&|data| {
        data.train = data.train.named_by(name);
        if let ValidationSource::File(paths) = &data.validation {
            data.validation = ValidationSource::File(paths.named_by(name));
        }
    });
    (shown.output_dir, shown.grad.scratch_dir) = (None, None);
    shown
}

fn figures(trained: &Trained<'_>, base_model: &str, hash: &str) -> Table {
    let mut table = Table::new(&["figure", "value"]);
    table.row(&["base", &format!("`{base_model}`")]);
    table.row(&["hash of the base", &format!("`{hash}`")]);
    if let Some(state) = &trained.state {
        table.row(&["steps", &state.step.to_string()]);
        table.row(&["tokens trained on", &state.total_tokens.to_string()]);
        if let Some(samples) = &state.samples {
            table.row(&["samples trained on, held out", &format!("{}, {}", samples.train, samples.validation)]);
        }
    }
    if let Some(recipe) = trained.recipe {
        of_recipe(&mut table, recipe);
    }
    if let Some(evicted) = Evicted::over(&trained.metrics).words() {
        table.row(&["entries evicted in training", &evicted]);
    }
    scores(&mut table, trained);
    table
}

fn of_recipe(table: &mut Table, recipe: &Recipe) {
    if let Some(lora) = &recipe.lora {
        table.row(&["adapter", lora.kind()]);
    }
    table.row(&["data", &format!("`{}`", recipe.data.train)]);
    table.row(&["policy of the cache", &recipe.kv_cache.policy.name]);
    table.row(&["cache length", &recipe.kv_cache.cache_length.to_string()]);
    table.row(&["chunk size", &recipe.kv_cache.wanted_chunk_size().to_string()]);
    table.row(&["buffer of the cache", recipe.kv_cache.buffer.name()]);
}

fn scores(table: &mut Table, trained: &Trained<'_>) {
    let last = |value: fn(&StepMetrics) -> Option<f64>| trained.metrics.iter().rev().find_map(value);
    for (name, value) in [
        ("training loss, last step", last(|line| line.loss)),
        ("validation loss", last(|line| line.eval_loss)),
        ("validation accuracy", last(|line| line.eval_accuracy)),
    ] {
        if let Some(value) = value {
            table.row(&[name, &format!("{value:.4}")]);
        }
    }
    if let Some(best) = trained.state.as_ref().and_then(|state| state.best.as_ref()) {
        table.row(&[&format!("best validation {}", best.metric), &format!("{:.4} (step {})", best.value, best.step)]);
    }
}

fn usage(target: ExportTarget, base_model: &str) -> String {
    match target {
        ExportTarget::Peft => format!(
            "```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n\
             model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base_model:?}), \".\")\n```"
        ),
        ExportTarget::Vllm => format!("```sh\nvllm serve {base_model:?} --enable-lora --lora-modules adapter=.\n```"),
        ExportTarget::LlamaCpp => format!("```sh\npython convert_lora_to_gguf.py --base {base_model:?} .\n```"),
        ExportTarget::Merged => {
            "```python\nfrom transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained(\".\")\n```"
                .into()
        }
    }
}
