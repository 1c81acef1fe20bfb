//! An adapter: what is trained beside the frozen linears of a model, and by which settings.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor, no_grad};

use super::ModelError;
use super::config::ModelConfig;
use super::delta::{A, B, B_BIAS, BASE_BIAS, Delta, LoraDelta, MAGNITUDE, ModuleStream, master_kind};
use super::ends::{AdapterEnds, EndPart};
use super::names::{EMBEDDING_MODULE, OUTPUT_MODULE, peft_tensor};
use super::random;
use super::targets::{
    LoraTarget, check_layers, check_names, is_of_experts, listed, meant, meant_parameters, peft_module, peft_settings, targets,
    targets_embedding,
};
use crate::files::{ExcludedModules, ModulePatterns, PeftConfig, PeftTargets};
use crate::recipe::LoraRecipe;

/// Deltas by linear. A model that trains them takes them into its linears; until then, and for whoever looks at all of them at once, they
/// stand here.
#[derive(Debug)]
pub struct Adapter {
    /// The targets are names, each once, in the order of the layer.
    settings: PeftConfig,
    /// By the names of linears in the model, bottom to top.
    deltas: Vec<(String, Delta)>,
    /// What is trained outside the layers.
    ends: AdapterEnds,
    /// Whether what begins as the model has it has not got these values yet.
    is_new: bool,
}

impl Adapter {
    /// A new adapter for a model that computes in `kind`. It adds nothing yet: `A` is uniform in ±1/√in, drawn from a stream of
    /// its own for each matrix, and `B` is zero. Where it begins as a part of the weights, it gets that when a model takes it.
    pub fn new(config: &ModelConfig, lora: &LoraRecipe, seed: u64, kind: Kind, device: Device) -> Result<Self, ModelError> {
        let settings = peft_settings(config, lora)?;
        let mut adapter = Self::with_settings(config, settings.clone(), seed, kind, device)?;
        check_names(config, lora, &settings)?;
        adapter.set_dropout(lora.dropout)?;
        Ok(adapter)
    }

    /// As [`Self::new`], by the settings of an adapter's file, which may differ from linear to linear.
    pub fn with_settings(
        config: &ModelConfig,
        settings: PeftConfig,
        seed: u64,
        kind: Kind,
        device: Device,
    ) -> Result<Self, ModelError> {
        let PeftConfig { is_gaussian, is_inner, .. } = settings;
        let draw = |target: &LoraTarget, part: &'static str, shape: &[i64]| match (part, shape) {
            (A, _) if is_gaussian => Ok(random::normal(seed, &target.tensor(A), shape, 1.0 / target.r as f64)),
            (A, [_, inner]) => Ok(random::uniform(seed, &target.tensor(A), shape, 1.0 / (*inner as f64).sqrt())),
            _ => Ok(Tensor::zeros(shape, (Kind::Float, Device::Cpu))),
        };
        // As in PEFT: of an addition to the embedding B is drawn, and A is zero.
        let draw_end = |part: EndPart, shape: &[i64]| match part {
            EndPart::LowRankB => Ok(random::normal(seed, &part.name(is_inner), shape, 1.0)),
            EndPart::Score => Ok(random::normal(seed, &part.name(is_inner), shape, config.initializer_range)),
            _ => Ok(Tensor::zeros(shape, (Kind::Float, Device::Cpu))),
        };
        let copy = |_: &str, width| Ok(Tensor::zeros([width], (Kind::Float, Device::Cpu)));
        let ends = AdapterEnds::new(config, &settings, draw_end, copy)?;
        let targets = targets(config, &settings)?;
        let adapter = Self::of_targets(config, settings, &targets, ends, draw)?.moved_to(kind, device);
        Ok(Self { is_new: true, ..adapter })
    }

    /// Checks the numbers and collects what is trained, which becomes leaves.
    pub(super) fn of_targets(
        config: &ModelConfig,
        settings: PeftConfig,
        targets: &[LoraTarget],
        ends: AdapterEnds,
        mut tensor: impl FnMut(&LoraTarget, &'static str, &[i64]) -> Result<Tensor, ModelError>,
    ) -> Result<Self, ModelError> {
        let settings = listed(config, settings)?;
        check_numbers(config, &settings, targets)?;
        let delta = |target: &LoraTarget| {
            let LoraTarget { linear, scale, .. } = target;
            let mut parts = BTreeMap::new();
            for (part, shape) in target.parts(&settings) {
                let shape: Vec<i64> = shape.into_iter().map(|size| size as i64).collect();
                parts.insert(part, tensor(target, part, &shape)?.set_requires_grad(true));
            }
            let mut take = |part| parts.remove(part);
            let delta = LoraDelta {
                // Every target has both.
                a_ri: take(A).unwrap_or_default(),
                b_or: take(B).unwrap_or_default(),
                b_bias_o: take(B_BIAS),
                magnitude_o: take(MAGNITUDE),
                base_bias_o: take(BASE_BIAS),
                beginning: None,
                scale: *scale,
                dropout: settings.lora_dropout,
                stream: ModuleStream { layer: linear.layer.0 as u64, module: linear.number as u64 },
            };
            Ok((linear.name.clone(), Delta::Lora(delta)))
        };
        let deltas = targets.iter().map(delta).collect::<Result<_, ModelError>>()?;
        Ok(Self { settings, deltas, ends, is_new: false })
    }

    /// That of a model whose linears have these deltas.
    pub(super) fn of_deltas<'a>(
        settings: PeftConfig,
        deltas: impl Iterator<Item = (&'a str, &'a Delta)>,
        ends: AdapterEnds,
    ) -> Self {
        let alias = |(linear, delta): (&str, &Delta)| (linear.to_owned(), delta.map(Tensor::shallow_clone));
        Self { settings, deltas: deltas.map(alias).collect(), ends, is_new: false }
    }

    /// By the names of linears in the model, bottom to top.
    pub(super) fn deltas(&self) -> &[(String, Delta)] {
        &self.deltas
    }

    /// One that was trained, of these [`Self::into_parts`].
    pub(super) fn of_parts(settings: PeftConfig, deltas: Vec<(String, Delta)>, ends: AdapterEnds) -> Self {
        Self { settings, deltas, ends, is_new: false }
    }

    /// Its settings, the deltas by the names of linears, and what is trained outside the layers.
    pub(super) fn into_parts(self) -> (PeftConfig, Vec<(String, Delta)>, AdapterEnds) {
        (self.settings, self.deltas, self.ends)
    }

    /// What is trained outside the layers.
    pub(super) fn ends(&self) -> &AdapterEnds {
        &self.ends
    }

    /// Whether what begins as the model has it has not got these values yet: it gets them when a model takes it.
    pub(super) fn is_new(&self) -> bool {
        self.is_new
    }

    /// What a file says of it.
    pub(super) fn settings(&self) -> &PeftConfig {
        &self.settings
    }

    /// The inner dimension, where no linear has another.
    pub fn r(&self) -> usize {
        self.settings.r
    }

    /// The numerator of the scale `alpha / r`, where no linear has another.
    pub fn alpha(&self) -> f64 {
        self.settings.lora_alpha
    }

    /// The probability with which an input of `A` is dropped in training.
    pub fn dropout(&self) -> f64 {
        self.settings.lora_dropout
    }

    /// Sets the dropout probability. Adapters of experts and of `lm_head` have none: these do not know where a token stands.
    pub fn set_dropout(&mut self, probability: f64) -> Result<(), ModelError> {
        refuse_dropout(probability, self.deltas.iter().any(|(linear, _)| is_of_experts(linear)))?;
        if probability > 0.0 && self.deltas.iter().any(|(linear, _)| linear == OUTPUT_MODULE) {
            let (found, expected) = (probability.to_string(), "0 where `lm_head` is a target");
            return Err(ModelError::Lora { key: "dropout", found, expected });
        }
        self.settings.lora_dropout = probability;
        self.deltas.iter_mut().for_each(|(_, delta)| delta.set_dropout(probability));
        Ok(())
    }

    /// The names of the linears that are targets, in the order of the layer, or the expression that matches them; those of the experts'
    /// matrices side by side behind them.
    pub fn targets(&self) -> Vec<String> {
        let modules = match &self.settings.target_modules {
            PeftTargets::Names(names) => names.clone(),
            PeftTargets::Matching(regex) => vec![regex.written().to_owned()],
            PeftTargets::AllLinear => Vec::new(),
        };
        modules.iter().chain(&self.settings.target_parameters).cloned().collect()
    }

    /// The first key of a recipe that says otherwise than this adapter of the model, and what either says. `r`, `alpha` and the targets
    /// are always said; the other keys, where they differ from their defaults.
    pub fn disagreement(&self, config: &ModelConfig, lora: &LoraRecipe) -> Result<Option<Disagreement>, ModelError> {
        let (ours, theirs) = (&self.settings, listed(config, peft_settings(config, lora)?)?);
        check_names(config, lora, &theirs)?;
        let plain = PeftConfig::plain(0, 0.0, 0.0, PeftTargets::AllLinear);
        let linears = |settings: &PeftConfig| {
            let modules = meant(config, settings)?.into_iter();
            let parameters = meant_parameters(config, settings)?.into_iter().map(|(linear, _)| linear);
            let embedding = targets_embedding(settings).then(|| EMBEDDING_MODULE.to_owned());
            Ok::<Vec<_>, ModelError>(modules.chain(parameters).map(|linear| linear.name).chain(embedding).collect())
        };
        let always = [
            ("r", theirs.r != ours.r, theirs.r.to_string(), ours.r.to_string()),
            (
                "alpha",
                (theirs.lora_alpha - ours.lora_alpha).abs() > 0.0,
                theirs.lora_alpha.to_string(),
                ours.lora_alpha.to_string(),
            ),
            ("target_modules", linears(&theirs)? != linears(ours)?, lora.target_modules.to_string(), self.targets().join(", ")),
        ];
        let said = disagreements_of_kind(config, &theirs, ours, &plain);
        let first = always.into_iter().chain(said).find(|(_, differs, ..)| *differs);
        Ok(first.map(|(key, _, recipe, adapter)| Disagreement { key, recipe, adapter }))
    }

    /// All that is trained with its names in PEFT's files, by layer from the bottom, and what is trained outside the layers behind them; the
    /// tensors are the leaves themselves.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        let of_layers = self.deltas.iter().flat_map(|(linear, delta)| parameters(&self.settings, linear, delta));
        of_layers.chain(self.ends.parameters()).collect()
    }

    /// Draws every `B`, and what else begins as zero, from a normal distribution: with `B = 0` the gradient of `A` is zero and would
    /// prove nothing.
    pub fn set_b_normal(&self, std: f64, seed: u64) {
        let is_zero = |name: &str| name.ends_with("lora_B.weight") || name.ends_with("lora_embedding_A");
        let b_matrices = self.parameters().into_iter().filter(|(name, _)| is_zero(name));
        no_grad(|| b_matrices.for_each(|(name, mut b_or)| b_or.copy_(&random::normal(seed, &name, &b_or.size(), std))));
    }

    /// The adapter for a model that computes in `kind` on `device`; matrices that need no change stay the same tensors.
    pub fn moved_to(self, kind: Kind, device: Device) -> Self {
        let kind = master_kind(kind);
        let moved = |delta: Delta| delta.map(|matrix| matrix.to_kind(kind).to_device(device));
        let deltas = no_grad(|| self.deltas.into_iter().map(|(linear, delta)| (linear, moved(delta))).collect());
        let ends = no_grad(|| self.ends.moved_to(kind, device));
        Self { deltas, ends, ..self }
    }
}

/// A key of `[lora]` of which a recipe and an adapter say different things.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    pub key: &'static str,
    pub recipe: String,
    pub adapter: String,
}

/// Of the keys that say what kind of adapter it is: whether a recipe says something else than an adapter, and not just the default.
fn disagreements_of_kind(
    config: &ModelConfig,
    recipe: &PeftConfig,
    adapter: &PeftConfig,
    plain: &PeftConfig,
) -> [(&'static str, bool, String, String); 10] {
    fn key<T: PartialEq>(
        name: &'static str,
        [recipe, adapter, plain]: [&T; 3],
        shown: impl Fn(&T) -> String,
    ) -> (&'static str, bool, String, String) {
        (name, recipe != plain && recipe != adapter, shown(recipe), shown(adapter))
    }
    let of = |get: fn(&PeftConfig) -> &bool| [get(recipe), get(adapter), get(plain)];
    let biases = [recipe, adapter, plain].map(|settings| (settings.trains_biases, settings.trains_all_biases));
    let biases = biases.each_ref();
    let bias = |(some, all): &(bool, bool)| {
        if *all {
            "all"
        } else if *some {
            "lora_only"
        } else {
            "none"
        }
        .to_owned()
    };
    let layers = [recipe, adapter, plain].map(|settings| &settings.layers_to_transform);
    let lists = [recipe, adapter, plain].map(|settings| &settings.layers_pattern);
    // What they say of each linear counts, not the order in which they say it.
    let names: Vec<String> = config
        .linears()
        .into_iter()
        .chain(config.output())
        .map(|linear| linear.name)
        .chain([EMBEDDING_MODULE.to_owned()])
        .collect();
    let same = |get: &dyn Fn(&PeftConfig, &str) -> Option<f64>| names.iter().all(|name| get(recipe, name) == get(adapter, name));
    let same_ranks = same(&|settings, name| settings.rank_pattern.get(name).map(|r| r as f64));
    let same_alphas = same(&|settings, name| settings.alpha_pattern.get(name));
    let ranks = [recipe, if same_ranks { recipe } else { adapter }, plain].map(|settings| &settings.rank_pattern);
    let alphas = [recipe, if same_alphas { recipe } else { adapter }, plain].map(|settings| &settings.alpha_pattern);
    let saved = [recipe, adapter, plain].map(|settings| {
        let mut names = settings.modules_to_save.clone();
        names.sort();
        names
    });
    let excluded = [recipe, adapter, plain].map(|settings| &settings.exclude_modules);
    [
        key("use_rslora", of(|settings| &settings.use_rslora), bool::to_string),
        key("use_dora", of(|settings| &settings.use_dora), bool::to_string),
        key("lora_bias", of(|settings| &settings.lora_bias), bool::to_string),
        key("bias", biases, bias),
        key("layers_to_transform", layers, |layers| format!("{layers:?}")),
        key("layers_pattern", lists, |lists| format!("{:?}", lists.names())),
        key("rank_pattern", ranks, ModulePatterns::to_string),
        key("alpha_pattern", alphas, ModulePatterns::to_string),
        key("modules_to_save", saved.each_ref(), |names| format!("{names:?}")),
        key("exclude_modules", excluded, |all| all.as_ref().map_or_else(|| "[]".into(), ExcludedModules::to_string)),
    ]
}

/// What is trained beside a linear, by its names in PEFT's files.
pub(super) fn parameters(settings: &PeftConfig, linear: &str, delta: &Delta) -> Vec<(String, Tensor)> {
    let module = peft_module(settings, linear);
    delta.parameters().into_iter().map(|(part, tensor)| (peft_tensor(&module, part), tensor.shallow_clone())).collect()
}

/// Refuses numbers with which nothing can be trained.
fn check_numbers(config: &ModelConfig, settings: &PeftConfig, targets: &[LoraTarget]) -> Result<(), ModelError> {
    let refuse = |key, found: String, expected| Err(ModelError::Lora { key, found, expected });
    let widest = config.hidden_size.max(config.intermediate_size());
    let ranks = targets.iter().map(|target| ("rank_pattern", target.r));
    let alphas = settings.alpha_pattern.iter().map(|(_, alpha)| ("alpha_pattern", alpha));
    if let Some((key, r)) = [("r", settings.r)].into_iter().chain(ranks).find(|(_, r)| *r == 0 || *r > widest) {
        return refuse(key, r.to_string(), "a number from 1 to the width of the layers");
    }
    let is_alpha = |alpha: f64| alpha.is_finite() && alpha > 0.0;
    if let Some((key, alpha)) = [("alpha", settings.lora_alpha)].into_iter().chain(alphas).find(|(_, alpha)| !is_alpha(*alpha)) {
        return refuse(key, alpha.to_string(), "a positive number");
    }
    if !(0.0..1.0).contains(&settings.lora_dropout) {
        return refuse("dropout", settings.lora_dropout.to_string(), "a number from 0 to below 1");
    }
    check_kind(config, settings, targets)?;
    if settings.is_pissa {
        check_beginning(settings, targets)?;
    }
    if settings.names_nothing() {
        return refuse("target_modules", "empty".into(), "at least one name");
    }
    if targets.is_empty() && !targets_embedding(settings) {
        return refuse("exclude_modules", "all of `target_modules`".into(), "names that leave one of them");
    }
    refuse_dropout(settings.lora_dropout, targets.iter().any(|target| is_of_experts(&target.linear.name)))
}

/// Each expert sees its tokens sorted; PEFT has no dropout for parameters either.
fn refuse_dropout(probability: f64, has_experts: bool) -> Result<(), ModelError> {
    if probability > 0.0 && has_experts {
        let (found, expected) = (probability.to_string(), "0 where experts are targets");
        return Err(ModelError::Lora { key: "dropout", found, expected });
    }
    Ok(())
}

/// Refuses combinations that PEFT does not have: files that hold them would mean nothing there.
fn check_kind(config: &ModelConfig, settings: &PeftConfig, targets: &[LoraTarget]) -> Result<(), ModelError> {
    let refuse = |key, found: String, expected| Err(ModelError::Lora { key, found, expected });
    let has_parameters = targets.iter().any(LoraTarget::is_parameter);
    check_layers(config, settings, targets)?;
    // They have theirs under other names.
    let has_experts = config.layers.iter().any(|layer| layer.feed_forward.experts().is_some());
    if settings.trains_all_biases && has_experts {
        return refuse("bias", "all".into(), "`lora_only` where the model has experts");
    }
    let is_twice = |at: usize| targets[..at].iter().any(|other| other.linear.name == targets[at].linear.name);
    let is_apart = |target: &LoraTarget| is_of_experts(&target.linear.name) && !target.is_stacked();
    if (0..targets.len()).any(is_twice) || targets.iter().any(LoraTarget::is_stacked) && targets.iter().any(is_apart) {
        let found = format!("{:?}", settings.target_parameters);
        return refuse("target_parameters", found, "nothing that `target_modules` has as well: each expert and router once");
    }
    for (key, is_on) in [("use_dora", settings.use_dora), ("lora_bias", settings.lora_bias)] {
        if is_on && has_parameters {
            return refuse(key, "true".into(), "false where experts or routers are targets: PEFT has plain LoRA for them");
        }
    }
    if settings.lora_bias && settings.use_dora {
        return refuse("lora_bias", "true".into(), "false with `use_dora`, as PEFT has it");
    }
    let other = [("gaussian", settings.is_gaussian), ("pissa", settings.is_pissa)].into_iter().find(|(_, is_on)| *is_on);
    if let Some((name, _)) = other.filter(|_| settings.lora_bias) {
        return refuse("init_lora_weights", name.into(), "`uniform` with `lora_bias`, as PEFT has it");
    }
    Ok(())
}

/// Refuses parts of weights that an adapter can not begin as.
fn check_beginning(settings: &PeftConfig, targets: &[LoraTarget]) -> Result<(), ModelError> {
    let refuse = |expected| Err(ModelError::Lora { key: "init_lora_weights", found: "pissa".into(), expected });
    let is_special = |target: &LoraTarget| target.is_parameter() || target.linear.name == OUTPUT_MODULE;
    if targets_embedding(settings) || targets.iter().any(is_special) {
        return refuse("`uniform` where experts, routers, `embed_tokens` or `lm_head` are targets");
    }
    // What is written has twice the rank.
    let is_narrow = |target: &LoraTarget| 2 * target.r > target.linear.spec.inner.min(target.linear.spec.out);
    if targets.iter().any(is_narrow) {
        return refuse("`uniform` where `r` is more than half of a target's inputs or outputs");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{ADAPTER_TENSORS, ModuleRegex, TensorFile};
    use crate::model::{Attend, AttendError, DropoutContext, DropoutKey, Model, Qkv};
    use crate::recipe::{Dtype, InitLora, TargetModules};
    use crate::store::load_tensors;
    use crate::units::{Failure, LayerIdx};
    use serde_json::json;

    fn config() -> ModelConfig {
        let object = json!({
            "model_type": "qwen2", "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
            "intermediate_size": 20, "vocab_size": 11, "max_position_embeddings": 64, "initializer_range": 0.3,
        });
        ModelConfig::from_object(object.as_object().unwrap()).unwrap()
    }

    fn recipe(names: &[&str]) -> LoraRecipe {
        let target_modules = TargetModules::Names(names.iter().map(|&name| name.into()).collect());
        LoraRecipe::plain(2, 4.0, 0.0, target_modules)
    }

    fn adapter(lora: &LoraRecipe, seed: u64) -> Adapter {
        Adapter::new(&config(), lora, seed, Kind::Double, Device::Cpu).unwrap()
    }

    /// Every token sees its own value only, so that sequences and chunks don't matter.
    struct Alone;

    impl Attend for Alone {
        fn attend(&mut self, _: LayerIdx, qkv: Qkv) -> Result<Tensor, AttendError> {
            Ok(qkv.own.v.expand_as(&qkv.q_bhnd))
        }
    }

    /// Hidden states after all layers for two samples, run in pieces that end at `ends`.
    fn run(model: &Model, sequences: &[i64], ends: &[i64], dropout: Option<DropoutKey>) -> Tensor {
        let samples: Vec<u64> = sequences.iter().map(|&sequence| 40 + sequence as u64).collect();
        let ids = Tensor::arange(22, (Kind::Int64, Device::Cpu))
            .remainder(11)
            .view([2, 11])
            .index_select(0, &Tensor::from_slice(sequences));
        let mut start = 0;
        let piece = |&end: &i64| {
            let position = Tensor::arange_start(start, end, (Kind::Int64, Device::Cpu)).unsqueeze(0);
            let positions = model.positions(position, &model.frequencies(&[11, 11]));
            let mut hidden = model.embed(&ids.narrow(1, start, end - start));
            let place = DropoutContext { dropout, samples: &samples };
            for layer in 0..2 {
                hidden = model.layer(LayerIdx(layer), &hidden, &positions, &place, &mut Alone).unwrap();
            }
            start = end;
            hidden
        };
        Tensor::cat(&ends.iter().map(piece).collect::<Vec<_>>(), 1)
    }

    #[test]
    fn dropout_is_the_same_for_every_chunking_and_batching() {
        let lora = LoraRecipe { dropout: 0.3, ..recipe(&["q_proj", "v_proj", "down_proj"]) };
        let model = Model::random(config(), Dtype::F64, Device::Cpu, 1).unwrap().with_adapter(adapter(&lora, 1));
        model.adapter().unwrap().set_b_normal(0.5, 2);
        let key = Some(DropoutKey { seed: 3, step: 4 });
        let near = |a: &Tensor, b: &Tensor| f64::try_from((a - b).abs().max()).unwrap() < 1e-12;
        let whole = run(&model, &[0, 1], &[11], key);
        assert!(near(&whole, &run(&model, &[0, 1], &[4, 5, 11], key)));
        assert!(near(&whole.narrow(0, 1, 1), &run(&model, &[1], &[11], key)));
        assert!(!near(&whole, &run(&model, &[0, 1], &[11], None)));
        assert!(!near(&whole, &run(&model, &[0, 1], &[11], Some(DropoutKey { seed: 3, step: 5 }))));
    }

    #[test]
    fn a_new_adapter_adds_nothing_and_trains_b_first() {
        let lora = recipe(&["o_proj", "up_proj"]);
        let model = Model::random(config(), Dtype::F64, Device::Cpu, 1).unwrap();
        let without = run(&model, &[0, 1], &[11], None);
        let model = model.with_adapter(adapter(&lora, 1));
        let with = run(&model, &[0, 1], &[11], None);
        assert_eq!(without, with);
        with.square().sum(None).backward();
        for (name, matrix) in model.adapter().unwrap().parameters() {
            let size = f64::try_from(matrix.grad().norm()).unwrap();
            assert_eq!(size > 0.0, name.contains("lora_B"), "{name}: {size}");
        }
    }

    #[test]
    fn numbers_depend_on_seed_and_name_but_not_on_the_targets() {
        let find = |adapter: &Adapter, name: &str| adapter.parameters().into_iter().find(|(n, _)| n == name).unwrap().1;
        let name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight";
        let (one, all) =
            (adapter(&recipe(&["up_proj"]), 5), LoraRecipe { target_modules: TargetModules::AllLinear, ..recipe(&[]) });
        assert_eq!(find(&one, name), find(&adapter(&all, 5), name));
        assert_ne!(find(&one, name), find(&adapter(&all, 6), name));
        // In ±1/√in.
        assert!(f64::try_from(find(&one, name).abs().max()).unwrap() <= 1.0 / 12f64.sqrt());
        assert_eq!(adapter(&all, 5).parameters().len(), 2 * 7 * 2);
    }

    #[test]
    fn order_and_spelling_of_targets_do_not_matter() {
        let names = |lora: &LoraRecipe| adapter(lora, 1).parameters().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        let expected = names(&recipe(&["q_proj", "down_proj"]));
        assert_eq!(expected, names(&recipe(&["mlp.down_proj", "q_proj", "self_attn.q_proj"])));
        assert_eq!(expected[0], "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
        assert_eq!(expected[3], "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight");
        let found = adapter(&recipe(&["q_proj"]), 1).disagreement(&config(), &recipe(&["self_attn.q_proj"])).unwrap();
        assert_eq!(found, None);
    }

    /// A run that is resumed must draw the masks it drew before: the numbers of linears in their layer are part of the format.
    #[test]
    fn every_linear_keeps_its_number_in_the_masks_of_dropout() {
        let numbers = config().linears().into_iter().map(|linear| (linear.layer.0, linear.number, linear.spec.name().to_owned()));
        let names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        let expected = (0..2).flat_map(|layer| names.iter().enumerate().map(move |(i, name)| (layer, i, (*name).to_owned())));
        assert_eq!(numbers.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        let adapter = adapter(&recipe(&["k_proj", "down_proj"]), 1);
        let streams = adapter.deltas.iter().map(|(_, Delta::Lora(lora))| (lora.stream.layer, lora.stream.module));
        assert_eq!(streams.collect::<Vec<_>>(), [(0, 1), (0, 6), (1, 1), (1, 6)]);
    }

    /// Both matrices begin as the nearest of their rank to the weight, which keeps the rest; what is saved is for the weights as they were.
    #[test]
    fn an_adapter_that_begins_as_a_part_of_the_weights_is_saved_beside_them() {
        let ranks = [("q_proj".to_owned(), 3)].into_iter().collect();
        let alphas = [("up_proj".to_owned(), 3.0)].into_iter().collect();
        let plain = LoraRecipe { init_lora_weights: InitLora::Pissa, ..recipe(&["q_proj", "up_proj", "down_proj"]) };
        for lora in [
            plain.clone(),
            LoraRecipe { use_rslora: true, rank_pattern: ranks, alpha_pattern: alphas, ..plain.clone() },
            LoraRecipe { use_dora: true, ..plain },
        ] {
            let base = || Model::random(config(), Dtype::F64, Device::Cpu, 1).unwrap();
            let near = |a: &Tensor, b: &Tensor| f64::try_from((a - b).abs().max()).unwrap() < 1e-12;
            let of = |model: &Model| no_grad(|| run(model, &[0, 1], &[11], None));
            let (without, mut model) = (of(&base()), base().with_adapter(adapter(&lora, 1)));
            assert!(near(&of(&model), &without), "{lora:?}");
            // Without its adapter the model is another: the adapter is a part of it.
            let parameters = model.parameters();
            let began: Vec<Tensor> = parameters.iter().map(|(_, leaf)| leaf.detach().copy()).collect();
            no_grad(|| {
                parameters.iter().filter(|(name, _)| name.contains("lora_B")).for_each(|(_, b)| drop(b.shallow_clone().zero_()));
            });
            assert!(!near(&of(&model), &without));
            no_grad(|| {
                parameters.iter().zip(&began).for_each(|((name, leaf), began)| {
                    leaf.shallow_clone().copy_(&(began + random::normal(7, name, &leaf.size(), 0.2)));
                });
            });
            let (trained, dir) = (of(&model), tempfile::tempdir().unwrap());
            model.save_trained(dir.path(), "model").unwrap();
            let read = Adapter::load_peft(dir.path(), &config(), Kind::Double, Device::Cpu).unwrap();
            assert!(near(&of(&base().with_adapter(read)), &trained) && !near(&trained, &without), "{lora:?}");
            // Resumed, also where the singular vectors were saved with other signs.
            let file = TensorFile::open(&dir.path().join(ADAPTER_TENSORS)).unwrap();
            for sign in [1.0, -1.0] {
                let mut resumed = base().with_adapter(adapter(&lora, 1));
                let saved: Vec<_> = load_tensors(&file).unwrap();
                for (name, tensor) in &saved {
                    let dim = i64::from(name.contains("lora_B"));
                    if name.contains("lora_A") || name.contains("lora_B") {
                        let r = tensor.size()[dim as usize] / 2;
                        let _ = tensor.narrow(dim, r, r).g_mul_scalar_(sign);
                    }
                }
                for (name, tensor) in resumed.take_saved(saved) {
                    let (_, leaf) = resumed.parameters().into_iter().find(|(other, _)| *other == name).unwrap();
                    no_grad(|| leaf.shallow_clone().copy_(&tensor));
                }
                let found = of(&resumed);
                assert!(if sign > 0.0 { found == trained } else { near(&found, &trained) }, "{lora:?}");
            }
            let other = LoraRecipe { alpha: 40.0, ..lora };
            model.set_adapter(adapter(&other, 1));
            assert!(near(&of(&model), &without), "another takes its place");
        }
    }

    #[test]
    fn impossible_requests_are_refused() {
        let error = |lora: &LoraRecipe| {
            let error = Adapter::new(&config(), lora, 1, Kind::Float, Device::Cpu).unwrap_err();
            assert!(error.hint().is_some());
            error.to_string()
        };
        assert_eq!(
            error(&recipe(&["q_proj", "query"])),
            "unknown name `query` in `target_modules`: the layers have `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, \
             `up_proj`, `down_proj`"
        );
        assert!(error(&recipe(&[])).contains("`lora.target_modules` is empty"));
        assert!(error(&LoraRecipe { r: 0, ..recipe(&["q_proj"]) }).contains("`lora.r` is 0"));
        assert!(error(&LoraRecipe { alpha: f64::NAN, ..recipe(&["q_proj"]) }).contains("`lora.alpha` is NaN"));
        assert!(error(&LoraRecipe { dropout: 1.0, ..recipe(&["q_proj"]) }).contains("`lora.dropout` is 1"));
        let error = |settings| Adapter::with_settings(&config(), settings, 1, Kind::Float, Device::Cpu).unwrap_err().to_string();
        let plain = PeftConfig::plain(2, 4.0, 0.0, PeftTargets::Names(vec!["q_proj".into()]));
        let ranks = |r| ModulePatterns::new([("q_proj".to_owned(), r)]).unwrap();
        assert!(error(PeftConfig { rank_pattern: ranks(21), ..plain.clone() }).contains("`lora.rank_pattern` is 21"));
        let alphas = ModulePatterns::new([("q_proj".to_owned(), -1.0)]).unwrap();
        assert!(error(PeftConfig { alpha_pattern: alphas, ..plain.clone() }).contains("`lora.alpha_pattern` is -1"));
        let excluded = Some(ExcludedModules::names(vec!["q_proj".into()]));
        assert!(error(PeftConfig { exclude_modules: excluded, ..plain.clone() }).contains("`lora.exclude_modules` is all of"));
        let plain = || plain.clone();
        assert!(error(PeftConfig { layers_to_transform: vec![2], ..plain() }).contains("`lora.layers_to_transform` is [2]"));
        let matching = |written| PeftTargets::Matching(ModuleRegex::whole(written).unwrap());
        let of_layers = PeftConfig { layers_to_transform: vec![1], target_modules: matching(".*q_proj"), ..plain() };
        assert!(error(of_layers).contains("where `target_modules` is an expression"));
        for written in ["q_proj", ".*"] {
            assert!(
                error(PeftConfig { target_modules: matching(written), ..plain() }).contains("matches whole names"),
                "{written}"
            );
        }
        assert!(error(PeftConfig { use_dora: true, lora_bias: true, ..plain() }).contains("`lora.lora_bias` is true"));
        assert!(
            error(PeftConfig { is_gaussian: true, lora_bias: true, ..plain() }).contains("`lora.init_lora_weights` is gaussian")
        );
        let pissa = || PeftConfig { is_pissa: true, ..plain() };
        for wrong in [
            PeftConfig { lora_bias: true, ..pissa() },
            PeftConfig { r: 7, ..pissa() },
            PeftConfig { target_modules: PeftTargets::Names(vec!["q_proj".into(), "embed_tokens".into()]), ..pissa() },
        ] {
            assert!(error(wrong).contains("`lora.init_lora_weights` is pissa, expected `uniform` w"));
        }
    }
}
