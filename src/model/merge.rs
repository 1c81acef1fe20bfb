//! A model with what was trained beside its weights added into them: written tensor by tensor, in the files that its base has.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor, no_grad};

use super::adapter::Adapter;
use super::all_weights::COMPANIONS;
use super::causal_lm::Model;
use super::config::ModelConfig;
use super::families::{own_name, unwrapped};
use super::io_layers::TrainedCopies;
use super::layout::{self, TensorEntry};
use super::linear::LoraDelta;
use super::names::{EMBEDDING, EMBEDDING_MODULE, OUTPUT, OUTPUT_MODULE, SCORE, layer_tensor};
use super::quantised::QUANTISATION;
use super::source::ModelSource;
use super::spec::{LinearSpec, STACKED_DOWN, STACKED_GATE_UP};
use super::weights::{INDEX, MODEL_TENSORS, Weights};
use crate::files::{self, Dtype, FileKind, GgufDtype, TensorFile, TensorHead};
use crate::ops::attention::accumulation_kind;
use crate::store::{content_of, load_tensor, pt_metadata, tensor_heads};
use crate::units::{Bytes, Fault, FaultKind, quoted};

/// What a model that sees has beside [`COMPANIONS`].
const OF_WRAPPERS: [&str; 3] = ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"];

/// A model directory and what is added into its weights. Nothing of the weights is in memory before it is written.
#[derive(Debug)]
pub struct MergedModel {
    dir: PathBuf,
    weights: Weights,
    /// The tensors of packed weights, which are written unpacked in f32.
    unpacked: Option<Vec<TensorHead>>,
    /// Whether the files have the names of a language model inside another one.
    is_inner: bool,
    /// In place of the base's, where that would mean another model.
    config: Option<Map<String, Value>>,
    /// What is trained beside linears, by their names; where the file has the linears of all experts in one tensor, by the name of that.
    deltas: BTreeMap<String, LoraDelta>,
    /// Trained in full, by their names in the model.
    saved: BTreeMap<String, Tensor>,
}

struct Shard<'a> {
    name: String,
    /// Where its tensors lie as they are; `None` where they are unpacked.
    file: Option<&'a TensorFile>,
    heads: Vec<TensorHead>,
}

impl MergedModel {
    /// Opens a model to add `adapter` into it. What it has trained in full takes the place of the model's own, or comes on top.
    pub fn open<'a>(source: impl Into<ModelSource<'a>>, adapter: Option<Adapter>) -> Result<Self, Fault> {
        let source = source.into();
        let ((config, weights), mut object) = (Model::open(source, Kind::Float, Device::Cpu.into())?, source.object()?);
        let is_packed = weights.gguf().is_some() || !config.packed.forms.is_empty();
        if is_packed {
            // What is unpacked is the language model alone, where it was inside another one.
            object = unwrapped(&object).into_owned();
            object.remove(QUANTISATION);
            object.remove("torch_dtype");
            object.insert("dtype".into(), json!("float32"));
        }
        let (deltas, copies) = adapter.map(|adapter| (adapter.deltas, adapter.copies)).unwrap_or_default();
        let mut deltas: BTreeMap<_, _> = deltas.into_iter().collect();
        let ends = [OUTPUT_MODULE, EMBEDDING_MODULE].map(|end| deltas.remove(end));
        let head = |entry: TensorEntry| TensorHead { name: entry.name, dtype: Dtype::F32, shape: entry.shape };
        let mut merged = Self {
            dir: source.dir.to_owned(),
            weights,
            unpacked: is_packed.then(|| layout::entries(&config).into_iter().map(head).collect()),
            is_inner: config.is_inner && !is_packed,
            config: None,
            deltas: BTreeMap::new(),
            saved: BTreeMap::new(),
        };
        let mut saved = merged_io_layers(&config, &copies, ends.each_ref().map(Option::as_ref), |name| merged.stored(name))?;
        for (name, leaf) in &copies.tensors {
            saved.entry(name.clone()).or_insert_with(|| leaf.detach());
        }
        let changes_config = change_config(&mut object, &config, &saved)? || is_packed;
        for linear in config.linears().iter().filter(|linear| !linear.spec.has_bias) {
            if deltas.get(&linear.name).is_some_and(|lora| lora.b_bias_o.is_some()) {
                return Err(not_mergeable(&linear.name, "B has a bias, and the linear has none to add it to"));
            }
        }
        add_experts(&mut deltas, &config);
        merged.config = (changes_config || source.rope_scaling.is_some()).then_some(object);
        (merged.deltas, merged.saved) = (deltas, saved);
        Ok(merged)
    }

    /// The same classifier, whose classes other programs show by these names.
    pub fn with_class_names(mut self, names: &[String]) -> Result<Self, Fault> {
        let mut config = self.config.take().map_or_else(|| ModelSource::from(&self.dir).object(), Ok)?;
        name_classes(&mut config, names);
        self.config = Some(config);
        Ok(self)
    }

    /// Writes a model directory that loads as its base does: the same files of weights in the same dtypes, its configuration, tokenizer,
    /// templates and settings of generation. `dir` is made. Sums are made in f32 (in f64 for f64 weights) and rounded once; at any time one
    /// tensor is in memory. Where `should_continue` says no, it ends with an error.
    pub fn write(&self, dir: &Path, should_continue: &dyn Fn() -> bool) -> Result<(), Fault> {
        let shards = self.shards()?;
        let bytes: usize = shards.iter().flat_map(|shard| &shard.heads).map(TensorHead::num_bytes).sum();
        let home = dir.parent().filter(|home| !home.as_os_str().is_empty()).unwrap_or(Path::new("."));
        files::require_space(home, Bytes((bytes + bytes / 100) as u64 + (1 << 20)))?;
        files::make_dir(dir)?;
        for shard in &shards {
            let mut before: Option<&str> = None;
            files::write_tensors_streamed(&dir.join(&shard.name), &shard.heads, &pt_metadata(), |index| {
                // What the one before was read from need not stay in memory.
                if let (Some(name), Some(file)) = (before.replace(&shard.heads[index].name), shard.file) {
                    file.release(name);
                }
                if should_continue() { self.bytes(shard, &shard.heads[index]) } else { Err(stopped()) }
            })?;
        }
        if shards.len() > 1 {
            let map: BTreeMap<&str, &str> =
                shards.iter().flat_map(|shard| shard.heads.iter().map(|head| (&*head.name, &*shard.name))).collect();
            let index = json!({ "metadata": { "total_size": bytes }, "weight_map": map });
            files::write_atomic(&dir.join(INDEX), &files::to_json(&index))?;
        }
        let config = match &self.config {
            Some(config) => files::to_json(config),
            None => files::read_bytes(&self.dir.join("config.json"), FileKind::Settings)?,
        };
        files::write_atomic(&dir.join("config.json"), &config)?;
        copy_companions(&self.dir, dir)
    }

    /// Writes a GGUF file like the base's, which is one, with matrices in the type `dtype`, and maybe with another chat template.
    ///
    /// # Errors
    /// As of [`Self::write`]; what was trained has no place in such a file.
    pub fn write_gguf(
        &self,
        path: &Path,
        dtype: GgufDtype,
        template: Option<&str>,
        should_continue: &dyn Fn() -> bool,
    ) -> Result<(), Fault> {
        let Some((gguf, heads)) = self.weights.gguf().zip(self.unpacked.as_ref()) else {
            return Err(Fault::defect(format!("`{}` is no GGUF file", self.dir.display())));
        };
        if self.saved.contains_key(SCORE) {
            return Err(not_mergeable(SCORE, "a GGUF file has no place for a classifier's scores"));
        }
        let mut names: Vec<String> = heads.iter().map(|head| head.name.clone()).collect();
        names.extend(self.saved.keys().filter(|name| !heads.iter().any(|head| head.name == **name)).cloned());
        gguf.write(path, dtype, template, &names, |name| {
            if !should_continue() {
                return Err(stopped());
            }
            let load = || self.weights.load(name);
            let merged = || no_grad(|| self.merged(name, load))?.map_or_else(load, Ok);
            self.saved.get(name).map_or_else(merged, |saved| Ok(saved.shallow_clone()))
        })
    }

    /// What is written: the files of the base; what it has no place for goes into the last.
    fn shards(&self) -> Result<Vec<Shard<'_>>, Fault> {
        // A classifier has no output projection.
        let is_classifier = self.saved.contains_key(SCORE);
        let is_left = |head: &TensorHead| !is_classifier || own_name(&head.name, self.is_inner).as_deref() != Some(OUTPUT);
        let mut shards = self.shards_of_base(is_left)?;
        let mut new: BTreeMap<&str, &Tensor> = self.saved.iter().map(|(name, tensor)| (&**name, tensor)).collect();
        for head in shards.iter().flat_map(|shard| &shard.heads) {
            if let Some(saved) = own_name(&head.name, self.is_inner).as_deref().and_then(|own| new.remove(own)) {
                let found: Vec<usize> = saved.size().into_iter().map(|size| size as usize).collect();
                if found != head.shape {
                    let reason = format!("expected the shape {:?} of `{}`, found {found:?}", head.shape, self.dir.display());
                    return Err(not_mergeable(&head.name, &reason));
                }
            }
        }
        if let Some(last) = shards.last_mut() {
            let new = new.into_iter().map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone())).collect::<Vec<_>>();
            last.heads.extend(tensor_heads(&self.dir, &new)?);
        }
        Ok(shards)
    }

    /// A tensor by its name in the model.
    fn stored(&self, name: &str) -> Result<Option<Tensor>, Fault> {
        match (&self.unpacked, self.weights.files()) {
            (None, Some(files)) => files.raw(name),
            (heads, _) => {
                let is_there = heads.iter().flatten().any(|head| head.name == name);
                is_there.then(|| self.weights.load(name)).transpose()
            }
        }
    }

    /// The files of the base, under names that count them, with their tensors.
    fn shards_of_base(&self, is_left: impl Fn(&TensorHead) -> bool) -> Result<Vec<Shard<'_>>, Fault> {
        if let Some(heads) = &self.unpacked {
            let heads = heads.iter().filter(|head| is_left(head)).cloned().collect();
            return Ok(vec![Shard { name: MODEL_TENSORS.to_owned(), file: None, heads }]);
        }
        let files = self.weights.files().map_or(&[][..], |files| &files.opened);
        let head = |file: &TensorFile, name: String| {
            let view = file.get(&name)?;
            Ok(TensorHead { dtype: view.dtype, shape: view.shape.to_vec(), name })
        };
        let shard = |file| {
            let mut heads =
                TensorFile::names(file).into_iter().map(|name| head(file, name)).collect::<Result<Vec<_>, Fault>>()?;
            heads.retain(&is_left);
            Ok(Shard { name: MODEL_TENSORS.to_owned(), file: Some(file), heads })
        };
        let mut shards = files.iter().map(shard).collect::<Result<Vec<_>, Fault>>()?;
        shards.retain(|shard| !shard.heads.is_empty());
        let count = shards.len();
        for (index, shard) in shards.iter_mut().enumerate().filter(|_| count > 1) {
            shard.name = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
        }
        Ok(shards)
    }

    /// A tensor's bytes: those of the file where nothing is added.
    fn bytes<'a>(&self, shard: &Shard<'a>, head: &TensorHead) -> Result<Cow<'a, [u8]>, Fault> {
        let own = own_name(&head.name, self.is_inner).unwrap_or_default();
        let load = || shard.file.map_or_else(|| self.weights.load(&head.name), |file| load_tensor(file, &head.name));
        let tensor = match (self.saved.get(&own), shard.file) {
            (Some(saved), _) => {
                let stored = self.stored(&own)?;
                stored.map_or_else(|| saved.shallow_clone(), |stored| saved.to_kind(stored.kind()))
            }
            (None, file) => match (no_grad(|| self.merged(&own, load))?, file) {
                (Some(merged), _) => merged,
                (None, Some(file)) => return Ok(Cow::Borrowed(file.get(&head.name)?.bytes)),
                (None, None) => load()?,
            },
        };
        Ok(content_of(&tensor)?.into())
    }

    /// The weight or bias of a linear with what is added to it, in its own dtype; `None` where that is nothing.
    fn merged(&self, own: &str, load: impl Fn() -> Result<Tensor, Fault>) -> Result<Option<Tensor>, Fault> {
        if let Some(lora) = own.strip_suffix(".bias").and_then(|linear| self.deltas.get(linear)) {
            let stored_o = load()?;
            let merged = lora.bias(Some(&stored_o), accumulation_kind(stored_o.kind()));
            return Ok(merged.map(|bias_o| bias_o.to_kind(stored_o.kind())));
        }
        let in_wide = |stored: &Tensor, add: &dyn Fn(&Tensor) -> Tensor| {
            add(&stored.to_kind(accumulation_kind(stored.kind()))).to_kind(stored.kind())
        };
        if let Some(lora) = self.deltas.get(own) {
            return Ok(Some(in_wide(&load()?, &|stored_xio| sum_of_all(stored_xio, lora))));
        }
        let Some(lora) = own.strip_suffix(".weight").and_then(|linear| self.deltas.get(linear)) else { return Ok(None) };
        Ok(Some(in_wide(&load()?, &|stored_oi| sum(stored_oi, lora))))
    }
}

/// What an adapter has trained of embedding and output projection, by names in the model. Of two that were one matrix both are there.
fn merged_io_layers(
    config: &ModelConfig,
    copies: &TrainedCopies,
    [output, input]: [Option<&LoraDelta>; 2],
    stored: impl Fn(&str) -> Result<Option<Tensor>, Fault>,
) -> Result<BTreeMap<String, Tensor>, Fault> {
    let mut saved = BTreeMap::new();
    for name in [EMBEDDING, OUTPUT, SCORE] {
        saved.extend(copies.get(name).map(|tensor| (name.to_owned(), tensor.detach())));
    }
    let leaves_output = config.tie_word_embeddings
        && (input.is_some() || saved.contains_key(EMBEDDING))
        && !saved.contains_key(OUTPUT)
        && !saved.contains_key(SCORE)
        && !config.has_score
        && output.is_none();
    if output.is_none() && input.is_none() && !leaves_output && saved.is_empty() {
        return Ok(saved);
    }
    let Some(stored_ve) = stored(EMBEDDING)? else { return Ok(saved) };
    let base = |layer, stored: &Tensor| copies.bases.get(layer).unwrap_or(stored).shallow_clone();
    let base_ve = base(EMBEDDING_MODULE, &stored_ve);
    if let Some(lora) = input {
        let base_ev = base_ve.to_kind(accumulation_kind(stored_ve.kind())).tr();
        saved.insert(EMBEDDING.into(), no_grad(|| sum(&base_ev, lora).tr().contiguous()));
    }
    if let Some(lora) = output {
        let own_ve = if config.tie_word_embeddings { None } else { stored(OUTPUT)? };
        let output_ve = base(OUTPUT_MODULE, own_ve.as_ref().unwrap_or(&base_ve));
        saved.insert(OUTPUT.into(), no_grad(|| sum(&output_ve.to_kind(accumulation_kind(stored_ve.kind())), lora)));
    }
    if leaves_output {
        saved.insert(OUTPUT.into(), base_ve);
    }
    // What comes on top is in the dtype of what there is.
    Ok(saved.into_iter().map(|(name, tensor)| (name, tensor.to_kind(stored_ve.kind()))).collect())
}

/// Makes a configuration that of the model with what was saved; says whether that changes it.
fn change_config(object: &mut Map<String, Value>, config: &ModelConfig, saved: &BTreeMap<String, Tensor>) -> Result<bool, Fault> {
    let unties = config.tie_word_embeddings && [EMBEDDING, OUTPUT].iter().any(|&name| saved.contains_key(name));
    if unties {
        object.insert("tie_word_embeddings".into(), json!(false));
    }
    let Some(score_ke) = saved.get(SCORE).filter(|_| !config.has_score) else { return Ok(unties) };
    let architecture = object.get("architectures").and_then(|all| all.get(0)?.as_str()?.strip_suffix("ForCausalLM"));
    let Some(architecture) = architecture.map(|family| format!("{family}ForSequenceClassification")) else {
        let reason = "`architectures` in `config.json` names no model `…ForCausalLM`, of which a classifier could be made";
        return Err(not_mergeable(SCORE, reason));
    };
    object.insert("architectures".into(), json!([architecture]));
    name_classes(object, &(0..score_ke.size()[0]).map(|class| format!("LABEL_{class}")).collect::<Vec<_>>());
    Ok(true)
}

fn name_classes(object: &mut Map<String, Value>, names: &[String]) {
    let by_class: BTreeMap<String, &String> = names.iter().enumerate().map(|(class, name)| (class.to_string(), name)).collect();
    let by_name: BTreeMap<&String, usize> = names.iter().enumerate().map(|(class, name)| (name, class)).collect();
    object.insert("id2label".into(), json!(by_class));
    object.insert("label2id".into(), json!(by_name));
}

/// `W + scale · B A`; with magnitudes, its rows in their lengths, as `DoRA` has it: `(out, in)` in and out.
fn sum(weight_oi: &Tensor, lora: &LoraDelta) -> Tensor {
    let kind = weight_oi.kind();
    let sum_oi = weight_oi + lora.b_or.to_kind(kind).matmul(&lora.a_ri.to_kind(kind)) * lora.scale;
    let Some(magnitude_o) = &lora.magnitude_o else { return sum_oi };
    let length_o = sum_oi.norm_scalaropt_dim(2.0, &[1i64][..], false);
    sum_oi * (magnitude_o.to_kind(kind) / length_o).unsqueeze(1)
}

/// The [`sum`] of the matrices of all experts, inputs before outputs: `(experts, in, out)` in and out.
fn sum_of_all(weight_xio: &Tensor, lora: &LoraDelta) -> Tensor {
    let weights = weight_xio.unbind(0);
    let of_experts = lora.by_expert(weights.len());
    let sums = weights.iter().zip(&of_experts).map(|(weight_io, lora)| sum(&weight_io.tr(), lora).tr());
    Tensor::stack(&sums.collect::<Vec<_>>(), 0)
}

/// Puts the parts for each expert's linears in place of what is trained beside those of all experts, where a model has them apart.
fn add_experts(deltas: &mut BTreeMap<String, LoraDelta>, config: &ModelConfig) {
    let (layers, hidden) = (config.layers.iter().enumerate(), config.hidden_size as i64);
    for (layer, experts) in layers.filter_map(|(layer, spec)| Some((layer, spec.feed_forward.experts()?))) {
        let (wide, linears) = (experts.intermediate_size as i64, experts.experts(config.hidden_size));
        if linears.is_empty() {
            continue;
        }
        let mut by_expert =
            |path| deltas.remove(&layer_tensor(layer, path)).map(|all| no_grad(|| all.by_expert(experts.num_experts)));
        let [gate_up, down] = [STACKED_GATE_UP, STACKED_DOWN].map(&mut by_expert).map(Option::unwrap_or_default);
        let mut add = |linear: &LinearSpec, delta| {
            deltas.entry(layer_tensor(layer, &linear.path)).or_insert(delta);
        };
        for ([gate, up, _], delta) in linears.iter().zip(gate_up) {
            add(gate, delta.rows(0, wide));
            add(up, delta.rows(wide, wide));
        }
        for ([.., own], delta) in linears.iter().zip(down) {
            add(own, delta.rows(0, hidden));
        }
    }
}

/// Whatever the base has beside configuration and weights.
fn copy_companions(from: &Path, to: &Path) -> Result<(), Fault> {
    let templates = files::further_templates(from)?;
    if !templates.is_empty() {
        files::make_dir(&to.join(files::TEMPLATE_FOLDER))?;
    }
    let named = COMPANIONS.iter().chain(&OF_WRAPPERS).copied();
    for name in named.chain(templates.iter().map(String::as_str)) {
        if let Some(bytes) = files::read_companion(from, name)? {
            files::write_atomic(&to.join(name), &bytes)?;
        }
    }
    Ok(())
}

/// What was trained has no place in the weights.
fn not_mergeable(linear: &str, reason: &str) -> Fault {
    let message = format!("`{}` can't be merged: {reason}", quoted(linear));
    Fault::data(message, "use the adapter beside its base: `--for peft`")
}

fn stopped() -> Fault {
    let fault = Fault::data("the model is not written: it was interrupted", "start it again: nothing of it was left");
    fault.of_kind(FaultKind::Interrupted)
}
