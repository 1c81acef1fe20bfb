//! An adapter: what is trained beside the frozen linears of a model, and by which settings.

use tch::{Device, Kind, Tensor, no_grad};

use super::ModelError;
use super::config::ModelConfig;
use super::delta::{Delta, LoraDelta, ModuleStream, master_kind};
use super::names::peft_tensor;
use super::random;
use super::targets::{LoraTarget, listed, peft_module, peft_targets, targets};
use crate::files::{PeftConfig, PeftTargets};
use crate::recipe::LoraRecipe;

/// Deltas by linear. A model that trains them takes them into its linears; until then, and for whoever looks at all of them at once, they
/// stand here.
#[derive(Debug)]
pub struct Adapter {
    /// The targets are names, each once, in the order of the layer.
    settings: PeftConfig,
    /// By the names of linears in the model, bottom to top.
    deltas: Vec<(String, Delta)>,
}

impl Adapter {
    /// A new adapter for a model that computes in `kind`. It adds nothing yet: `A` is uniform in ±1/√in, drawn from a stream of
    /// its own for each matrix, and `B` is zero.
    pub fn new(config: &ModelConfig, lora: &LoraRecipe, seed: u64, kind: Kind, device: Device) -> Result<Self, ModelError> {
        let plain = PeftConfig::plain(lora.r, lora.alpha, lora.dropout, peft_targets(&lora.target_modules));
        let settings = PeftConfig { target_parameters: lora.target_parameters.clone(), ..plain };
        Self::with_settings(config, settings, seed, kind, device)
    }

    /// As [`Self::new`], by the settings of an adapter's file, which may differ from linear to linear.
    pub fn with_settings(
        config: &ModelConfig,
        settings: PeftConfig,
        seed: u64,
        kind: Kind,
        device: Device,
    ) -> Result<Self, ModelError> {
        let draw = |target: &LoraTarget| {
            let [(a, [rows, inner]), (_, [out, columns])] = target.matrices();
            let a_ri = random::uniform(seed, &a, &[rows as i64, inner as i64], 1.0 / (inner as f64).sqrt());
            Ok([a_ri, Tensor::zeros([out as i64, columns as i64], (Kind::Float, Device::Cpu))])
        };
        let targets = targets(config, &settings)?;
        Ok(Self::of_targets(config, settings, &targets, draw)?.moved_to(kind, device))
    }

    /// Checks the numbers and collects the matrices A and B, which become leaves.
    pub(super) fn of_targets(
        config: &ModelConfig,
        settings: PeftConfig,
        targets: &[LoraTarget],
        mut matrices: impl FnMut(&LoraTarget) -> Result<[Tensor; 2], ModelError>,
    ) -> Result<Self, ModelError> {
        let settings = listed(config, settings)?;
        check_numbers(config, &settings, targets)?;
        let delta = |target: &LoraTarget| {
            let LoraTarget { linear, scale, .. } = target;
            let stream = ModuleStream { layer: linear.layer.0 as u64, module: linear.number as u64 };
            let [a_ri, b_or] = matrices(target)?.map(|matrix| matrix.set_requires_grad(true));
            let delta = LoraDelta { a_ri, b_or, scale: *scale, dropout: settings.lora_dropout, stream };
            Ok((linear.name.clone(), Delta::Lora(delta)))
        };
        let deltas = targets.iter().map(delta).collect::<Result<_, ModelError>>()?;
        Ok(Self { settings, deltas })
    }

    /// That of a model whose linears have these deltas.
    pub(super) fn of_deltas<'a>(settings: PeftConfig, deltas: impl Iterator<Item = (&'a str, &'a Delta)>) -> Self {
        let alias = |(linear, delta): (&str, &Delta)| (linear.to_owned(), delta.map(Tensor::shallow_clone));
        Self { settings, deltas: deltas.map(alias).collect() }
    }

    /// Its settings, and the deltas by the names of linears.
    pub(super) fn into_parts(self) -> (PeftConfig, Vec<(String, Delta)>) {
        (self.settings, self.deltas)
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

    /// Sets the dropout probability, as a recipe may train a loaded adapter with another one.
    pub fn set_dropout(&mut self, probability: f64) {
        self.settings.lora_dropout = probability;
        self.deltas.iter_mut().for_each(|(_, delta)| delta.set_dropout(probability));
    }

    /// The names of the linears that are targets, in the order of the layer; those of the experts' matrices side by side behind them.
    pub fn targets(&self) -> Vec<String> {
        let PeftTargets::Names(names) = &self.settings.target_modules else { return Vec::new() };
        names.iter().chain(&self.settings.target_parameters).cloned().collect()
    }

    /// Whether a recipe's targets are this adapter's, in a model.
    pub fn has_targets(&self, config: &ModelConfig, lora: &LoraRecipe) -> Result<bool, ModelError> {
        let named = PeftConfig::plain(lora.r, lora.alpha, lora.dropout, peft_targets(&lora.target_modules));
        let named = listed(config, PeftConfig { target_parameters: lora.target_parameters.clone(), ..named })?;
        Ok((named.target_modules, named.target_parameters)
            == (self.settings.target_modules.clone(), self.settings.target_parameters.clone()))
    }

    /// All matrices with their names in PEFT's files, by layer from the bottom; the tensors are the leaves themselves.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        self.deltas.iter().flat_map(|(linear, delta)| parameters(&self.settings, linear, delta)).collect()
    }

    /// Draws every `B` from a normal distribution: with `B = 0` the gradient of `A` is zero and would prove nothing.
    pub fn set_b_normal(&self, std: f64, seed: u64) {
        let b_matrices = self.parameters().into_iter().filter(|(name, _)| name.ends_with("lora_B.weight"));
        no_grad(|| b_matrices.for_each(|(name, mut b_or)| b_or.copy_(&random::normal(seed, &name, &b_or.size(), std))));
    }

    /// The adapter for a model that computes in `kind` on `device`; matrices that need no change stay the same tensors.
    pub fn moved_to(self, kind: Kind, device: Device) -> Self {
        let kind = master_kind(kind);
        let moved = |delta: Delta| delta.map(|matrix| matrix.to_kind(kind).to_device(device));
        let deltas = no_grad(|| self.deltas.into_iter().map(|(linear, delta)| (linear, moved(delta))).collect());
        Self { deltas, ..self }
    }
}

/// What is trained beside a linear, by its names in PEFT's files.
pub(super) fn parameters(settings: &PeftConfig, linear: &str, delta: &Delta) -> [(String, Tensor); 2] {
    let module = peft_module(settings, linear);
    delta.parameters().map(|(part, matrix)| (peft_tensor(&module, part), matrix.shallow_clone()))
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
    if settings.names_nothing() {
        return refuse("target_modules", "empty".into(), "at least one name");
    }
    if targets.is_empty() {
        return refuse("exclude_modules", "all of `target_modules`".into(), "names that leave one of them");
    }
    if settings.lora_dropout > 0.0 && targets.iter().any(LoraTarget::is_of_experts) {
        // Each expert sees its tokens sorted; PEFT has none for parameters either.
        return refuse("dropout", settings.lora_dropout.to_string(), "0 where experts are targets");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{ExcludedModules, ModulePatterns};
    use crate::model::{Attend, AttendError, DropoutContext, DropoutKey, Model, Qkv};
    use crate::recipe::{Dtype, TargetModules};
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
        LoraRecipe { r: 2, alpha: 4.0, dropout: 0.0, target_modules, target_parameters: Vec::new() }
    }

    fn adapter(lora: &LoraRecipe, seed: u64) -> Adapter {
        Adapter::new(&config(), lora, seed, Kind::Double, Device::Cpu).unwrap()
    }

    /// Every token sees its own value only, so that sequences and chunks don't matter.
    struct Alone;

    impl Attend for Alone {
        fn attend(&mut self, _: LayerIdx, qkv: Qkv<'_>) -> Result<Tensor, AttendError> {
            Ok(qkv.v_bgnd.expand_as(qkv.q_bhnd))
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
        assert!(adapter(&recipe(&["q_proj"]), 1).has_targets(&config(), &recipe(&["q_proj"])).unwrap());
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
        assert!(error(PeftConfig { exclude_modules: excluded, ..plain }).contains("`lora.exclude_modules` is all of"));
    }
}
