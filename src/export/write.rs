//! The directory that is written: what goes into it, whether it may, and that it is whole.

use std::path::{Path, PathBuf};

use serde_json::json;
use tch::{Device, Kind};

use super::card::card;
use super::gguf::{CONVERT, GGUF_ADAPTER, GGUF_MODEL, GgufUsage, MODELFILE};
use super::policy_file::{KV_POLICY, PolicyFile};
use super::servers::{LLAMA_CPP, Server, VLLM, VLLM_DEFAULT_RANK};
use super::trained::{ExportTarget, Trained};
use super::usage::Usage;
use crate::checkpoint::CARD;
use crate::files::{self, TensorFile};
use crate::model::{
    self, Adapter, CHAT_TEMPLATE, EXTRA_TENSORS, GATE_TENSORS, Gates, MergedModel, ModelConfig, ModelSource, companions,
    fingerprint, has_fingerprint,
};
use crate::recipe::{ClassList, HeadRecipe, RopeScalingRecipe, TrainedWeights};
use crate::store::{load_tensors, pt_metadata, save_tensors};
use crate::units::{Fault, abridged};

/// Writes an export into `out`, which is empty or not there. A write that fails, or for which `should_continue` says no, leaves nothing; what one that
/// was killed has left is removed by the next. Returns notes of what differs from what was trained, and the lines that load it.
pub fn export(
    trained: &Trained<'_>,
    target: ExportTarget,
    out: &Path,
    should_continue: &dyn Fn() -> bool,
) -> Result<(Vec<String>, String), Fault> {
    files::refuse_symlink(out)?;
    files::require_unused(out)?;
    let parts = parts(trained, target)?;
    let base_model = parts.base.display().to_string();
    files::put_new_dir(out, |staged| {
        match &parts.weights {
            ExportedWeights::Adapter(adapter) => {
                adapter.save_peft(staged, &base_model)?;
                for (name, bytes) in companions(&parts.base) {
                    files::write_atomic(&staged.join(name), &bytes?)?;
                }
            }
            ExportedWeights::GgufAdapter(adapter, config) => adapter.save_gguf(config, &staged.join(GGUF_ADAPTER))?,
            ExportedWeights::Model(model) => match target {
                ExportTarget::Gguf { whole: Some(dtype), .. } => {
                    model.write_gguf(&staged.join(GGUF_MODEL), dtype, trained.chat_template.as_deref(), should_continue)?;
                }
                _ => model.write(staged, should_continue)?,
            },
        }
        // A whole GGUF model has it inside.
        let is_inside = matches!(target, ExportTarget::Gguf { whole: Some(_), .. });
        let template = trained.chat_template.clone().filter(|_| !is_inside);
        let modelfile = parts.usage.gguf.as_ref().and_then(GgufUsage::modelfile);
        let card = card(trained, &parts.usage, &parts.base, &parts.hash);
        for (name, text) in [(CHAT_TEMPLATE, template), (MODELFILE, modelfile), (CARD, Some(card))] {
            text.map_or(Ok(()), |text| files::write_atomic(&staged.join(name), text.as_bytes()))?;
        }
        if let Some(policy) = &parts.policy {
            files::write_atomic(&staged.join(KV_POLICY), &files::to_json(policy))?;
        }
        if Gates::are_in(trained.checkpoint) {
            let gates = load_tensors(&TensorFile::open(&trained.checkpoint.join(GATE_TENSORS))?)?;
            save_tensors(&staged.join(GATE_TENSORS), &gates, &pt_metadata())?;
        }
        Ok(())
    })?;
    let lines = parts.usage.lines(&base_model, &out.display().to_string()).into_iter();
    let usage = lines.map(|(_, lines)| format!("\n{lines}\n")).collect::<Vec<_>>().concat();
    Ok((parts.notes, usage))
}

struct Parts {
    weights: ExportedWeights,
    base: PathBuf,
    hash: String,
    policy: Option<PolicyFile>,
    usage: Usage,
    notes: Vec<String>,
}

enum ExportedWeights {
    Adapter(Adapter),
    GgufAdapter(Adapter, Box<ModelConfig>),
    Model(MergedModel),
}

fn parts(trained: &Trained<'_>, target: ExportTarget) -> Result<Parts, Fault> {
    let policy = PolicyFile::find(trained.checkpoint)?;
    let scaling = trained.recipe.and_then(|recipe| recipe.model.rope_scaling.as_ref());
    if trained.holds == TrainedWeights::All {
        if target != ExportTarget::Merged {
            let (what, hint) = match target {
                ExportTarget::Gguf { .. } => ("in Hugging Face's format, of which no GGUF file is written here", CONVERT),
                _ => ("and no adapter", "use `--for merged`, which writes it as a model directory"),
            };
            let message = format!("`{}` holds a whole model {what}", abridged(trained.checkpoint.display()));
            return Err(Fault::usage(message, hint));
        }
        let weights = ExportedWeights::Model(named(MergedModel::open(trained.checkpoint, None)?, trained)?);
        let base = trained.recipe.map_or_else(|| trained.checkpoint.to_owned(), |recipe| recipe.model.path.clone());
        let hash = trained.state.as_ref().map_or_else(String::new, |state| state.model_hash.clone());
        let usage = Usage::of(target, trained.recipe.and_then(|recipe| recipe.head.num_classes()), &base);
        return Ok(Parts { weights, base, hash, policy, usage, notes: refuse_or_note(scaling, target)? });
    }
    let base = base(trained)?;
    if let Some(state) = &trained.state
        && !has_fingerprint(&base, &state.model_hash)?
    {
        let [base, checkpoint] = [&*base, trained.checkpoint].map(|path| abridged(path.display()));
        let message = format!("`{base}` is not the model that `{checkpoint}` was trained on");
        return Err(Fault::data(message, "restore the model, or say where the right one is with `--base DIR`"));
    }
    let hash = fingerprint(&base)?;
    let config = Adapter::classes_of(trained.checkpoint, ModelConfig::load(&base)?)?;
    let adapter = Adapter::load_peft(trained.checkpoint, &config, Kind::Float, Device::Cpu)?;
    let mut notes = refuse_or_note(scaling, target)?;
    let mut usage = Usage::of(target, config.num_classes, &base);
    usage.gguf = GgufUsage::of(trained, target, &base, &config)?;
    notes.extend(usage.gguf.as_ref().and_then(GgufUsage::note));
    let source = ModelSource { rope_scaling: scaling, ..ModelSource::from(&base) };
    let weights = match target {
        ExportTarget::Peft => {
            if adapter.has_extra_tensors() {
                notes.push(format!(
                    "PEFT has no names for what is in `{EXTRA_TENSORS}`, and computes without it: `--for merged` has it"
                ));
            }
            ExportedWeights::Adapter(adapter)
        }
        ExportTarget::Vllm => {
            let folded = folded(adapter, &VLLM, "use `--for merged`: the server then loads a model like its base", &mut notes)?;
            usage.max_rank = Some(folded.largest_rank()).filter(|rank| *rank > VLLM_DEFAULT_RANK);
            ExportedWeights::Adapter(folded)
        }
        ExportTarget::Gguf { whole: None, .. } => {
            let instead = usage.gguf.as_ref().map_or(CONVERT, GgufUsage::instead);
            ExportedWeights::GgufAdapter(folded(adapter, &LLAMA_CPP, instead, &mut notes)?, Box::new(config))
        }
        ExportTarget::Merged | ExportTarget::Gguf { .. } => {
            ExportedWeights::Model(named(MergedModel::open(source, Some(adapter))?, trained)?)
        }
    };
    let none = || format!("no `{KV_POLICY}`: the checkpoint has none that says which cache it was trained with");
    notes.extend(if policy.is_none() { Some(none()) } else { packed_note(trained) });
    Ok(Parts { weights, base, hash, policy, usage, notes })
}

/// The model with the names that the recipe has for its classes.
fn named(model: MergedModel, trained: &Trained<'_>) -> Result<MergedModel, Fault> {
    match trained.recipe.map(|recipe| &recipe.head) {
        Some(HeadRecipe::SeqClassification(ClassList::Named(names))) => model.with_class_names(names),
        _ => Ok(model),
    }
}

/// What differs without the weights that the run has packed.
fn packed_note(trained: &Trained<'_>) -> Option<String> {
    let recipe = trained.recipe.filter(|recipe| !recipe.kv_cache.policy.is_dense())?;
    let form = recipe.model.quantize?;
    Some(format!(
        "trained on weights in {form} (`model.quantize`), which the base does not have: with its own the cache may evict \
         otherwise than `{KV_POLICY}` records"
    ))
}

/// What other programs need to compute the same positions, if they can.
fn refuse_or_note(scaling: Option<&RopeScalingRecipe>, target: ExportTarget) -> Result<Vec<String>, Fault> {
    let Some(scaling) = scaling else { return Ok(Vec::new()) };
    let name = scaling.rope_type();
    Ok(match target {
        ExportTarget::Gguf { .. } => {
            let message = "trained with `model.rope_scaling`, and llama.cpp would compute the positions of the base".to_owned();
            return Err(Fault::usage(message, "use `--for merged`: `config.json` then says which they are"));
        }
        ExportTarget::Merged if name != DYNAMIC_YARN => Vec::new(),
        _ if name != DYNAMIC_YARN => vec![format!(
            "trained with `model.rope_scaling`: the base has to compute the same positions, with this in its `config.json`: \
             \"rope_scaling\": {}",
            json!(scaling)
        )],
        ExportTarget::Vllm => {
            let message = format!("{} has no rotary embeddings of the kind `{name}`, with which this was trained", VLLM.name);
            return Err(Fault::usage(message, "use it with kvtune, or train without `model.rope_scaling`"));
        }
        ExportTarget::Peft => vec![format!(
            "trained with `model.rope_scaling` of the kind `{name}`, which PEFT does not have: beyond the original length the base \
             computes other positions"
        )],
        ExportTarget::Merged => vec![format!(
            "`config.json` has a rotary embedding of the kind `{name}`, which Transformers refuses; up to the original length the model is \
             the same without it"
        )],
    })
}

/// The kind of scaling that no other program has: by the length of a sequence.
const DYNAMIC_YARN: &str = "dynamic_yarn";

/// Where the base is: as the user says, as the run had it, or as the adapter names it.
fn base(trained: &Trained<'_>) -> Result<PathBuf, Fault> {
    let unknown = |why: String| {
        let checkpoint = abridged(trained.checkpoint.display());
        let message = format!("cannot find the base model of `{checkpoint}`: {}", abridged(why));
        Fault::usage(message, "name its directory, which has a `config.json`, with `--base DIR`")
    };
    let named = || model::read_peft(trained.checkpoint)?.config.base_dir();
    let base = match (trained.base, trained.recipe) {
        (Some(base), _) => {
            let of_adapter = model::read_peft(trained.checkpoint).ok().and_then(|files| files.config.revision_of(base));
            files::model_dir(base, of_adapter.as_deref())?
        }
        (None, Some(recipe)) => files::model_dir(&recipe.model.path, recipe.model.revision.as_deref())?,
        (None, None) => named()?.ok_or_else(|| unknown("`adapter_config.json` does not name it".into()))?,
    };
    if files::is_model(&base) { Ok(base) } else { Err(unknown(format!("there is no model in `{}`", base.display()))) }
}

/// The adapter as a server loads it: the same function.
fn folded(adapter: Adapter, server: &Server, hint: &'static str, notes: &mut Vec<String>) -> Result<Adapter, Fault> {
    let mut reasons = server.refusals(&adapter.features());
    let (own, rank) = (adapter.largest_rank(), server.rank(adapter.largest_rank()));
    let Some(rank) = rank.filter(|_| reasons.is_empty()) else {
        if rank.is_none() {
            let most = server.ranks.last().copied().unwrap_or_default();
            reasons.push(format!("its rank {own} is more than {most}, for which the server has room at most"));
        }
        let message = format!("{} can't load this adapter: {}", server.name, reasons.join("; "));
        return Err(Fault::usage(message, hint));
    };
    if rank != own {
        notes.push(format!("{} has no room for rank {own} alone: filled up with zeros to rank {rank}", server.name));
    }
    Ok(adapter.normalized(rank))
}
