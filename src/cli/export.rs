//! `kvtune export`: what was trained, for another program.

use std::path::{Path, PathBuf};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::finetune::code_of_signal;
use super::used_model::identity;
use crate::checkpoint;
use crate::eval::AnswerScores;
use crate::export::{CacheResult, ExportTarget, Trained, export};
use crate::files::GgufDtype;
use crate::inspect::{AnswerListing, kept_answers, read_scores};
use crate::recipe::{Recipe, TrainedWeights};
use crate::report::{console, metrics};
use crate::train::{self, FoundCheckpoint, Interrupt};
use crate::units::{Fault, FaultKind};

/// Export a trained adapter or model for PEFT, Transformers, vLLM, llama.cpp or Ollama.
#[derive(Debug, Args)]
pub(super) struct Export {
    /// A run (its `final`, else its newest checkpoint), a checkpoint, or an adapter that PEFT has saved.
    #[arg(value_name = "RUN|CHECKPOINT")]
    checkpoint: PathBuf,
    /// The program that will load it.
    #[arg(long = "for", value_name = "PROGRAM", value_enum)]
    program: Loader,
    /// With `--for gguf` or `--for ollama`, of a base that is a GGUF file: write the whole model, with matrices in this type.
    #[arg(long, value_name = "TYPE", value_parser = gguf_dtype())]
    quantize: Option<GgufDtype>,
    /// Directory to write; must be empty or not exist. Default: `export-PROGRAM` beside the checkpoint.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Base model of the adapter. Default: the one that the run used.
    #[arg(long, value_name = "MODEL")]
    base: Option<PathBuf>,
    /// Add the scores of this file, printed by `kvtune evaluate --format json`, to the model card; may be given several times.
    #[arg(long, value_name = "FILE")]
    scores: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Loader {
    /// The adapter as PEFT writes it
    Peft,
    /// The adapter, padded to a rank that vLLM supports
    Vllm,
    /// A whole model, as Transformers loads it
    Merged,
    /// The adapter as a GGUF file, which llama.cpp loads together with one of its base; with `--quantize` the whole model
    #[value(alias = "llama.cpp")]
    Gguf,
    /// As `gguf`, and a `Modelfile` for Ollama
    Ollama,
}

fn gguf_dtype() -> impl TypedValueParser<Value = GgufDtype> {
    let f16 = PossibleValue::new("f16").help("16 bits a number");
    let q8 = PossibleValue::new("q8_0").help("8.5 bits a number, in blocks of 32");
    PossibleValuesParser::new([f16, q8]).map(|name| if name == "f16" { GgufDtype::F16 } else { GgufDtype::Q8_0 })
}

impl Export {
    pub(super) fn run(&self) -> Result<i32, Fault> {
        let found = train::find_checkpoint(&self.checkpoint)?;
        // An adapter that lies by itself has none.
        let recipe = train::resolved_recipe_path(&found.run).ok().map(|path| Recipe::load(&path, &[])).transpose()?;
        let recipe = recipe.map(|resolved| resolved.recipe);
        let state = checkpoint::state_of(&found.dir)?;
        let step = state.as_ref().map_or(0, |state| state.step);
        let trained = Trained {
            checkpoint: &found.dir,
            holds: found.holds,
            base: self.base.as_deref(),
            recipe: recipe.as_ref().filter(|_| state.is_some()),
            metrics: if state.is_some() { metrics::read(&found.run.join(metrics::METRICS), step)? } else { Vec::new() },
            results: self.results(&found, recipe.as_ref())?,
            chat_template: recipe.as_ref().and_then(train::chosen_template),
            state,
        };
        let (target, name) = self.target()?;
        let beside = || found.dir.parent().unwrap_or(Path::new("")).join(name);
        let out = self.out.clone().unwrap_or_else(beside);
        let interrupt = Interrupt::install()?;
        match export(&trained, target, &out, &|| interrupt.signal().is_none()) {
            Ok((notes, usage)) => {
                for note in &notes {
                    console::note(note);
                }
                let text = format!("exported: {}\n{}", out.display(), usage.trim_end());
                console::outcome(&text, &json!({ "exported": out, "usage": usage.trim_end() }))?;
            }
            Err(error) if error.kind() == FaultKind::Interrupted => {
                console::note(&error.to_string());
                return Ok(code_of_signal(interrupt.signal().unwrap_or_default()));
            }
            Err(error) => return Err(error),
        }
        Ok(0)
    }

    /// The target, and the name of a directory for it.
    fn target(&self) -> Result<(ExportTarget, String), Fault> {
        let (target, name) = match self.program {
            Loader::Gguf => (ExportTarget::Gguf { whole: self.quantize, for_ollama: false }, "export-gguf"),
            Loader::Ollama => (ExportTarget::Gguf { whole: self.quantize, for_ollama: true }, "export-ollama"),
            _ if self.quantize.is_some() => {
                let message = "`--quantize` is for GGUF files, and none is written here";
                return Err(Fault::usage(message, "use it with `--for gguf` or `--for ollama`"));
            }
            Loader::Peft => (ExportTarget::Peft, "export-peft"),
            Loader::Vllm => (ExportTarget::Vllm, "export-vllm"),
            Loader::Merged => (ExportTarget::Merged, "export-merged"),
        };
        Ok((target, name.to_owned() + if self.quantize.is_some() { "-model" } else { "" }))
    }

    /// What is known of evaluations of the checkpoint: by the answers that its run keeps, and by the files of scores.
    fn results(&self, found: &FoundCheckpoint, recipe: Option<&Recipe>) -> Result<Vec<CacheResult>, Fault> {
        let mut kept = kept_answers(&found.run, &found.dir)?;
        if let Some(recipe) = recipe.filter(|_| found.holds == TrainedWeights::All && !kept.is_empty()) {
            // What `evaluate` notes of a checkpoint that is a whole model: one of the same name may have had other weights.
            let mut own = recipe.clone();
            own.model.path.clone_from(&found.dir);
            own.kv_cache.gates = None;
            let model = identity(&own, None)?.model;
            kept.retain(|file| file.settings["model"] == model.as_str());
        }
        let mut results: Vec<CacheResult> = kept.iter().map(of_answers).collect();
        let place = found.dir.canonicalize().ok();
        for path in &self.scores {
            let own = read_scores(path)?.into_iter().filter(|line| Path::new(&line.evaluated).canonicalize().ok() == place);
            results.extend(own.map(|line| CacheResult {
                figures: line.figures(),
                split: line.split,
                policy: line.policy,
                cache_length: line.cache_length,
            }));
        }
        Ok(results)
    }
}

fn of_answers(file: &AnswerListing) -> CacheResult {
    let text = |value: &Value| value.as_str().unwrap_or_default().trim_matches('"').to_owned();
    let cache = &file.settings["cache"];
    let AnswerScores { samples, means, .. } = AnswerScores::of(&file.answers);
    let figures = means.into_iter().map(|(name, value)| (name, value, Some(samples))).collect();
    let (policy, cache_length) = (text(&cache["kv_cache.policy"]), text(&cache["kv_cache.cache_length"]));
    CacheResult { figures, ..CacheResult::of_recipe(text(&file.settings["split"]), &policy, cache_length) }
}
