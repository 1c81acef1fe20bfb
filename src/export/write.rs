//! The directory that is written: what goes into it, whether it may, and that it is whole.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use tch::{Device, Kind};

use super::servers::{LLAMA_CPP, Server, VLLM, VLLM_DEFAULT_RANK};
use super::trained::{ExportTarget, Trained};
use super::{ExportError, card};
use crate::conformance::{KV_POLICY, PolicyFile};
use crate::files::{self, FilesError};
use crate::model::{Adapter, MergedModel, ModelConfig, ModelSource, fingerprint, has_fingerprint};
use crate::recipe::{RopeScalingRecipe, Weights};

/// Writes an export into `out`, which is empty or not there. Returns what the user should know. A write that fails, or for which `goes_on`
/// says no, leaves nothing.
pub fn export(
    trained: &Trained<'_>,
    target: ExportTarget,
    out: &Path,
    goes_on: &dyn Fn() -> bool,
) -> Result<Vec<String>, ExportError> {
    require_unused(out)?;
    let parts = parts(trained, target)?;
    if let Some(parent) = out.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        files::make_dir(parent)?;
    }
    let replaced = files::put_dir(out, |staged| {
        match &parts.weights {
            ExportedWeights::Adapter(adapter) => {
                files::make_dir(staged)?;
                adapter.save_peft(staged, &parts.base_model)?;
            }
            ExportedWeights::Model(model) => model.write(staged, goes_on)?,
        }
        if let Some(policy) = &parts.policy {
            files::write_atomic(&staged.join(KV_POLICY), &policy.to_json())?;
        }
        let card = card::card(trained, target, &parts.base_model, &parts.hash);
        files::write_atomic(&staged.join("README.md"), card.as_bytes())?;
        Ok::<_, ExportError>(files::sync_dir(staged)?)
    })?;
    if let Some(empty) = replaced {
        fs::remove_dir(&empty).map_err(FilesError::io("remove", &empty))?;
    }
    Ok(parts.notes)
}

/// What is written, and what is said of it.
struct Parts {
    weights: ExportedWeights,
    base_model: String,
    /// Of the base.
    hash: String,
    policy: Option<PolicyFile>,
    notes: Vec<String>,
}

enum ExportedWeights {
    Adapter(Adapter),
    Model(MergedModel),
}

fn parts(trained: &Trained<'_>, target: ExportTarget) -> Result<Parts, ExportError> {
    let policy = PolicyFile::find(trained.checkpoint)?;
    let scaling = trained.recipe.and_then(|recipe| recipe.model.rope_scaling.as_ref());
    if trained.holds == Weights::All {
        if target != ExportTarget::Merged {
            return Err(ExportError::WholeModel { checkpoint: trained.checkpoint.to_owned() });
        }
        let weights = ExportedWeights::Model(MergedModel::open(trained.checkpoint, None)?);
        let base_model = trained.recipe.map_or_else(|| trained.name(), |recipe| recipe.model.path.display().to_string());
        let hash = trained.state.as_ref().map_or_else(String::new, |state| state.model_hash.clone());
        return Ok(Parts { weights, base_model, hash, policy, notes: refuse_or_note(scaling, target)? });
    }
    let base = base(trained)?;
    if let Some(state) = &trained.state
        && !has_fingerprint(&base, &state.model_hash)?
    {
        return Err(ExportError::OtherBase { base, checkpoint: trained.checkpoint.to_owned() });
    }
    let hash = fingerprint(&base)?;
    let config = Adapter::classes_of(trained.checkpoint, ModelConfig::load(&base)?)?;
    let adapter = Adapter::load_peft(trained.checkpoint, &config, Kind::Float, Device::Cpu)?;
    let mut notes = refuse_or_note(scaling, target)?;
    let source = ModelSource { dir: &base, rope_scaling: scaling };
    let weights = match target {
        ExportTarget::Peft => ExportedWeights::Adapter(adapter),
        ExportTarget::Vllm => ExportedWeights::Adapter(folded(adapter, &VLLM, &mut notes)?),
        ExportTarget::LlamaCpp => ExportedWeights::Adapter(folded(adapter, &LLAMA_CPP, &mut notes)?),
        ExportTarget::Merged => ExportedWeights::Model(MergedModel::open(source, Some(adapter))?),
    };
    if policy.is_none() {
        notes.push(format!("no `{KV_POLICY}`: the checkpoint has none that says which cache it was trained with"));
    }
    Ok(Parts { weights, base_model: base.display().to_string(), hash, policy, notes })
}

/// What other programs need to compute the same positions, if they can.
fn refuse_or_note(scaling: Option<&RopeScalingRecipe>, target: ExportTarget) -> Result<Vec<String>, ExportError> {
    let Some(scaling) = scaling else { return Ok(Vec::new()) };
    let name = scaling.rope_type();
    if name != DYNAMIC_YARN {
        let words =
            "trained with `model.rope_scaling`: the base has to compute the same positions, with this in its `config.json`";
        let note = format!("{words}: \"rope_scaling\": {}", json!(scaling));
        return Ok(if target == ExportTarget::Merged { Vec::new() } else { vec![note] });
    }
    let server = match target {
        ExportTarget::Vllm => VLLM.name,
        ExportTarget::LlamaCpp => LLAMA_CPP.name,
        ExportTarget::Peft => {
            return Ok(vec![format!(
                "trained with `model.rope_scaling` of the kind `{name}`, which PEFT does not have: beyond the original \
                                    length the base computes other positions"
            )]);
        }
        ExportTarget::Merged => {
            return Ok(vec![format!(
                "`config.json` has a rotary embedding of the kind `{name}`, which Transformers refuses; up to the \
                                    original length the model is the same without it"
            )]);
        }
    };
    Err(ExportError::OtherPositions { server, kind: DYNAMIC_YARN })
}

/// The kind of scaling that no other program has: by the length of a sequence.
const DYNAMIC_YARN: &str = "dynamic_yarn";

/// Where the base is: as the user says, as the run had it, or as the adapter names it.
fn base(trained: &Trained<'_>) -> Result<PathBuf, ExportError> {
    let unknown = |why: String| ExportError::NoBase { checkpoint: trained.checkpoint.to_owned(), why };
    let named = || files::read_peft(trained.checkpoint).map(|files| files.config.base_model.map(Into::into));
    let base = match (trained.base, trained.recipe) {
        (Some(base), _) => base.to_owned(),
        (None, Some(recipe)) => recipe.model.path.clone(),
        (None, None) => named()?.ok_or_else(|| unknown("`adapter_config.json` does not name it".into()))?,
    };
    let base = files::model_dir(&base);
    if base.join("config.json").exists() { Ok(base) } else { Err(unknown(format!("there is no model in `{}`", base.display()))) }
}

/// The same function as a server loads it.
fn folded(adapter: Adapter, server: &'static Server, notes: &mut Vec<String>) -> Result<Adapter, ExportError> {
    let mut reasons = server.refusals(&adapter.features());
    let (own, rank) = (adapter.largest_rank(), server.rank(adapter.largest_rank()));
    let Some(rank) = rank.filter(|_| reasons.is_empty()) else {
        if rank.is_none() {
            let most = server.ranks.last().copied().unwrap_or_default();
            reasons.push(format!("its rank {own} is more than {most}, for which the server has room at most"));
        }
        return Err(ExportError::Unloadable { server: server.name, reasons });
    };
    if rank != own {
        notes.push(format!("{} has no room for rank {own} alone: filled up with zeros to rank {rank}", server.name));
    }
    if server.name == VLLM.name && rank > VLLM_DEFAULT_RANK {
        notes.push(format!("start vLLM with `--max-lora-rank {rank}`: it has room for rank {VLLM_DEFAULT_RANK} otherwise"));
    }
    Ok(adapter.folded(rank))
}

fn require_unused(out: &Path) -> Result<(), ExportError> {
    files::refuse_symlink(out)?;
    if out.symlink_metadata().is_err() {
        return Ok(());
    }
    let mut entries = fs::read_dir(out).map_err(FilesError::io("read", out))?;
    if entries.next().is_some() { Err(ExportError::NotEmpty { dir: out.to_owned() }) } else { Ok(()) }
}
