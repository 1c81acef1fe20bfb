//! From a recipe to what a run, an evaluation or a proof works with: model, what of it is trained, data and engine.

use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor, no_grad};

use super::other_model;
use crate::cache;
use crate::checkpoint::FINAL;
use crate::data::{self, ChatTemplates, DataRequest, ModelLimits, Splits, Tokenizer};
use crate::engine::{Engine, Settings};
use crate::export::PolicyFile;
use crate::head::Head;
use crate::model::{Adapter, CHAT_TEMPLATE, Gates, Model, ModelConfig, ModelPlacement, ModelSource, Preference, companions};
use crate::native::cuda::Numerics;
use crate::ops::attention::ModelFeature;
use crate::recipe::{GradRecipe, HeadRecipe, LongBenchPrompt, LoraRecipe, Offload, Recipe, RopeScalingRecipe, TemplateChoice};
use crate::report::console;
use crate::report::progress::Tokenising;
use crate::units::{Fault, FaultKind, abridged};

pub fn limits(config: &ModelConfig) -> ModelLimits {
    let (trained_positions, computable_positions) = (config.trained_positions(), config.computable_positions());
    ModelLimits { vocab_size: config.vocab_size, trained_positions, computable_positions, pad: config.pad_token_id }
}

/// Refuses what of `[data]` no run begins with: prompts that ask for thoughts, and longer samples than the model computes. What began
/// earlier has had them cut to its positions.
pub fn check_data(recipe: &Recipe, config: &ModelConfig) -> Result<(), Fault> {
    if recipe.data.each().any(|data| data.prompt == Some(LongBenchPrompt::UpstreamCot)) {
        return Err(Fault::usage(
            "`data.prompt = \"upstream-cot\"` asks for thoughts, and the data have none to train on",
            "train with `data.prompt = \"upstream\"`, and evaluate with this one",
        ));
    }
    let positions = config.computable_positions();
    let Some(tokens) = recipe.data.max_seq_length.filter(|&tokens| tokens > positions) else { return Ok(()) };
    let scale = RopeScalingRecipe::hint(tokens, positions);
    let hint = format!("lower `data.max_seq_length` or leave it out, {scale}, or take a model with more positions");
    Err(Fault::usage(format!("`data.max_seq_length` is {tokens}, and the model has {positions} positions"), hint))
}

/// The chat template that a recipe has in place of the model's own, where there is one.
pub fn chosen_template(recipe: &Recipe) -> Option<String> {
    let TemplateChoice(choice) = recipe.data.chat.chat_template.as_ref()?;
    // One that can't be read is of no use to the data either, which say so.
    ChatTemplates::find(&recipe.model.path, Some(choice), None).ok()??.source().map(str::to_owned)
}

/// What lies beside an adapter at the end of its run: tokenizer and chat template. All weights have them already.
pub(super) fn companions_of_end(recipe: &Recipe) -> Result<Vec<(String, Vec<u8>)>, Fault> {
    let mut found = Vec::new();
    let of_model = recipe.lora.iter().flat_map(|_| companions(&recipe.model.path));
    for (name, bytes) in of_model {
        match bytes {
            Ok(bytes) => found.push((name.to_owned(), bytes)),
            Err(error) if error.kind() == FaultKind::ForeignLink => {
                console::warning(&format!("`{FINAL}` will lack `{name}`: {error}"));
            }
            Err(error) => return Err(error),
        }
    }
    if let Some(template) = chosen_template(recipe) {
        found.retain(|(name, _)| name != CHAT_TEMPLATE);
        found.push((CHAT_TEMPLATE.to_owned(), template.into_bytes()));
    }
    Ok(found)
}

pub fn open_data(recipe: &Recipe, config: &ModelConfig, tokenizer: Option<&Tokenizer>) -> Result<Splits, Fault> {
    let limits = limits(config);
    let initial = cache::initial_part(&recipe.kv_cache.policy)?;
    let mut progress = Tokenising::begin();
    let (head, seed) = (&recipe.head, recipe.train.seed);
    let request = DataRequest { recipe: &recipe.data, head, tokenizer, limits, initial: initial.as_ref(), seed };
    data::open(&request, &mut |path, samples, tokens| progress.at(path, samples, tokens))
}

/// Where the scratch files of a run are: where the recipe says, or in the run's directory.
pub(super) fn scratch_dir(recipe: &Recipe, run: Option<&Path>) -> Option<PathBuf> {
    let set = recipe.grad.scratch_dir.as_deref();
    set.or(run).or(recipe.output_dir.as_deref()).map(Path::to_owned)
}

/// [`scratch_dir`], or a temporary directory where neither the recipe nor a run names one.
pub(super) fn scratch_dir_or_temporary(recipe: &Recipe, run: Option<&Path>) -> PathBuf {
    scratch_dir(recipe, run).unwrap_or_else(std::env::temp_dir)
}

/// What a recipe says of the gradient, with a place for scratch files.
pub(super) fn grad_of_run(recipe: &Recipe, run: Option<&Path>) -> GradRecipe {
    GradRecipe { scratch_dir: Some(scratch_dir_or_temporary(recipe, run)), ..recipe.grad.clone() }
}

pub fn engine(recipe: &Recipe, config: &ModelConfig, tokenizer: Option<&Tokenizer>, run: Option<&Path>) -> Result<Engine, Fault> {
    check_routers(recipe, config)?;
    let head = match &recipe.head {
        HeadRecipe::NextToken => match &recipe.distill {
            Some(distill) => Head::Distilled { weight: distill.weight, temperature: distill.temperature },
            None => Head::NextToken,
        },
        HeadRecipe::SeqClassificationOnLogits(labels) => Head::on_logits(&data::label_tokens(labels, tokenizer)?),
        HeadRecipe::SeqClassification(_) => Head::ClassScores,
    };
    Ok(Engine::new(Settings::new(config, &recipe.kv_cache, &grad_of_run(recipe, run))?, head))
}

/// Refuses a load-balance loss where it means nothing.
fn check_routers(recipe: &Recipe, config: &ModelConfig) -> Result<(), Fault> {
    if recipe.train.router_aux_loss_coef <= 0.0 {
        return Ok(());
    }
    let (is_set, model) = ("`train.router_aux_loss_coef` is set", abridged(recipe.model.path.display()));
    let mut preferences = config.layers.iter().filter_map(|layer| Some(layer.feed_forward.experts()?.preference)).peekable();
    if preferences.peek().is_none() {
        let hint = "leave the key out: it balances the experts of such models as Mixtral";
        return Err(Fault::usage(format!("{is_set}, and the model `{model}` has no experts"), hint));
    }
    if preferences.any(|preference| preference != Preference::Softmax) {
        let message = format!("{is_set}, and the routers of `{model}` are balanced by a correction of their own");
        return Err(Fault::usage(message, "leave the key out: this loss is of routers with a softmax over all experts"));
    }
    Ok(())
}

/// Has a GPU compute as the recipe wants it, with TF32 or without, and the same bits every time or not. To be called before it computes.
pub fn set_numerics(recipe: &Recipe, device: Device) {
    if device.is_cuda() {
        Numerics { allows_tf32: recipe.model.allow_tf32, is_deterministic: recipe.train.deterministic }.set();
    }
}

/// What a recipe's head makes of its model: it has classes, or predicts tokens.
pub fn as_headed(recipe: &Recipe, config: ModelConfig) -> Result<ModelConfig, Fault> {
    let num_classes = recipe.head.num_classes();
    if config.has_score && config.num_classes != num_classes {
        let found = config.num_classes.unwrap_or(0);
        let asked = num_classes.map_or_else(|| "none".to_owned(), |count| format!("{count} classes"));
        let model = abridged(recipe.model.path.display());
        let message = format!("the model `{model}` is a classifier of {found} classes, and `[head]` asks for {asked}");
        let hint = "let `head.kind` be `seq_classification`, with as many classes as the model has";
        return Err(Fault::usage(message, hint));
    }
    if recipe.lora.is_none() && num_classes.is_some() && !config.has_score {
        return Err(no_score(recipe));
    }
    Ok(config.with_classes(num_classes))
}

/// Fails where the recipe's head needs what scores classes, and neither model nor adapter has it.
pub fn check_head(recipe: &Recipe, model: &Model) -> Result<(), Fault> {
    let is_missing = recipe.head.num_classes().is_some() && !model.has_score();
    if is_missing { Err(no_score(recipe)) } else { Ok(()) }
}

fn no_score(recipe: &Recipe) -> Fault {
    let model = abridged(recipe.model.path.display());
    Fault::usage(
        format!("`head.kind` is `seq_classification`, and the model `{model}` has no matrix that scores classes"),
        "train one with an adapter (`kvtune finetune-lora`), or begin with a model that was saved as a classifier of sequences",
    )
}

/// The file of the gates of the recipe's model with an adapter: what is beside either, or what the recipe names.
pub fn gates_of(recipe: &Recipe, adapter: Option<&Path>) -> Option<PathBuf> {
    let beside = adapter.into_iter().chain([&*recipe.model.path]).find(|dir| Gates::are_in(dir));
    beside.or(recipe.kv_cache.gates.as_deref()).map(Gates::file)
}

/// The model with the recipe's head, and with its gates if it gets this adapter.
fn headed(recipe: &Recipe, adapter: Option<&Path>, model: Model) -> Result<Model, Fault> {
    as_headed(recipe, model.config().clone())?;
    let mut model = model.with_classes(recipe.head.num_classes());
    if let Some(gates) = gates(recipe, adapter, model.config(), model.kind(), model.device())? {
        model.set_gates(gates);
    }
    Ok(model)
}

/// The gates of the recipe's model with an adapter; refuses what lacks those that the policy needs.
fn gates(
    recipe: &Recipe,
    adapter: Option<&Path>,
    config: &ModelConfig,
    kind: Kind,
    device: Device,
) -> Result<Option<Gates>, Fault> {
    let file = gates_of(recipe, adapter);
    let gates = file.as_ref().map(|file| Gates::read(file, config, kind, device)).transpose()?;
    let policy = cache::of_any_length(&recipe.kv_cache.policy)?;
    if policy.traits().model_feature == Some(ModelFeature::Gate) && gates.is_none() {
        return Err(Gates::missing());
    }
    let has_statistics = gates.as_ref().is_some_and(Gates::have_query_statistics);
    if policy.traits().needs_query_statistics && !has_statistics {
        return Err(Gates::without_query_statistics(file.as_deref()));
    }
    Ok(gates)
}

/// The recipe's model, of which nothing is trained, with the gates that go with an adapter.
pub fn base_model(recipe: &Recipe, adapter: Option<&Path>, device: Device) -> Result<Model, Fault> {
    headed(recipe, adapter, Model::load(&recipe.model, recipe.model.dtype, placement(recipe, device))?)
}

/// Where the recipe's weights are, of a model that computes on `device`.
fn placement(recipe: &Recipe, device: Device) -> ModelPlacement {
    ModelPlacement { device, keeps_layers_on_host: recipe.train.offload == Offload::Weights }
}

/// The recipe's model with its adapter, or all weights of which are trained. With `draws_weights` only the `config.json` in its directory is
/// read, and the weights are drawn on the device.
pub fn model(recipe: &Recipe, device: Device, draws_weights: bool) -> Result<Model, Fault> {
    let (source, dtype, at) = (ModelSource::from(&recipe.model), recipe.model.dtype, placement(recipe, device));
    let source = if draws_weights { source.drawn() } else { source };
    let Some(lora) = &recipe.lora else { return headed(recipe, None, Model::load_to_train(source, dtype, at)?) };
    let adapter_dir = recipe.model.adapter.as_deref().filter(|_| !draws_weights);
    let mut model = headed(recipe, adapter_dir, Model::load(source, dtype, at)?)?;
    let lora = if draws_weights { lora.clone().for_drawn_weights() } else { lora.clone() };
    model.set_adapter(adapter(recipe, &lora, model.config(), model.kind(), device)?);
    Ok(model)
}

/// Fails where [`model`] would, but for the weights, which are not read.
pub fn check_trained(recipe: &Recipe, config: &ModelConfig) -> Result<(), Fault> {
    check_routers(recipe, config)?;
    let adapter_dir = recipe.lora.as_ref().and(recipe.model.adapter.as_deref());
    gates(recipe, adapter_dir, config, Kind::Float, Device::Cpu)?;
    recipe.lora.as_ref().map_or(Ok(()), |lora| adapter(recipe, lora, config, Kind::Float, Device::Cpu).map(drop))
}

/// The adapter that the recipe starts from, or a new one, for a model that computes in `kind`.
fn adapter(recipe: &Recipe, lora: &LoraRecipe, config: &ModelConfig, kind: Kind, device: Device) -> Result<Adapter, Fault> {
    let Some(path) = &recipe.model.adapter else {
        return Adapter::new(config, lora, recipe.train.seed, kind, device);
    };
    let mut adapter = Adapter::load_peft(path, config, kind, device)?;
    check_positions(config, path)?;
    adapter.check_agreement(config, lora, path)?;
    adapter.set_dropout(lora.dropout)?;
    Ok(adapter)
}

pub fn load_adapter(model: &mut Model, dir: &Path) -> Result<(), Fault> {
    let adapter = Adapter::load_peft(dir, model.config(), model.kind(), model.device())?;
    check_positions(model.config(), dir)?;
    model.set_adapter(adapter);
    Ok(())
}

/// Spread of the B matrices of a new adapter in trials: at zero, half of the gradients would be zero.
const B_SPREAD: f64 = 0.02;

/// Draws the B matrices of the model's adapter, if it has a new one.
pub fn draw_new_b(recipe: &Recipe, model: &Model) {
    if let (None, Some(adapter)) = (&recipe.model.adapter, model.adapter()) {
        adapter.set_b_normal(B_SPREAD, recipe.train.seed);
    }
}

/// Puts the gates into the model that were saved in `dir`, beside an adapter or a model, if any were.
pub fn load_gates(model: &mut Model, dir: &Path) -> Result<(), Fault> {
    if Gates::are_in(dir) {
        model.set_gates(Gates::read(dir, model.config(), model.kind(), model.device())?);
    }
    Ok(())
}

/// Copies saved parameters over the model's, which must be the same by name and shape.
pub(super) fn take_parameters(model: &Model, saved: &[(String, Tensor)], dir: &Path) -> Result<(), Fault> {
    let own = model.parameters();
    let other = |difference: String| other_model(dir, &difference);
    if own.len() != saved.len() {
        return Err(other(format!("the run trains {} tensors, the checkpoint holds {}", own.len(), saved.len())));
    }
    for (name, mut tensor) in own {
        let Some((_, values)) = saved.iter().find(|(n, _)| *n == name) else {
            return Err(other(format!("`{name}` is missing")));
        };
        if values.size() != tensor.size() {
            return Err(other(format!("`{name}`: expected {:?}, found {:?}", tensor.size(), values.size())));
        }
        no_grad(|| tensor.copy_(values));
    }
    Ok(())
}

/// An adapter was trained with certain positions: with others it is another function.
fn check_positions(config: &ModelConfig, path: &Path) -> Result<(), Fault> {
    let Some(file) = PolicyFile::find(path)? else { return Ok(()) };
    let ropes = config.layers.iter().map(|layer| layer.attention.rope.as_ref());
    if file.rope.iter().map(Option::as_ref).eq(ropes) {
        return Ok(());
    }
    let scaling = file.rope_scaling.map_or_else(|| "without `model.rope_scaling`".to_owned(), |table| format!("with {table}"));
    let message = format!("the adapter in `{}` was trained with other positions: {scaling}", abridged(path.display()));
    let hint = "make `model.rope_scaling` in the recipe the same, and take the model it was trained on";
    Err(Fault::usage(message, hint))
}
