//! An adapter: what is trained beside the frozen linears of a model, by which settings, and in which other forms.

use std::collections::BTreeMap;
use std::path::Path;

use tch::{Device, Kind, Tensor, no_grad};

use super::check::{check_dropout, check_io_layers, check_saved, check_settings};
use super::config::ModelConfig;
use super::io_layers::{TrainedCopies, copy_name, is_nameless};
use super::linear::{A, B, B_BIAS, BASE_BIAS, LoraDelta, MAGNITUDE};
use super::names::{EMBEDDING_MODULE, OUTPUT_MODULE, SCORE};
use super::peft::{ModulePatterns, PeftConfig};
use super::random;
use super::targets::{
    LoraTarget, all_names, check_known, check_names, is_of_experts, is_router, lora_tensor, meant, meant_parameters, peft_module,
    peft_settings, targets, with_listed_targets,
};
use crate::ops::attention::accumulation_kind;
use crate::recipe::{InitLora, LoraRecipe, ModuleSet, TrainedBias};
use crate::units::{Fault, abridged};

/// Deltas by linear. A model that trains them takes them into its linears; until then, and for whoever looks at all at once, they stand here.
#[derive(Debug)]
pub struct Adapter {
    /// The targets are names, each once, in the order of the layer.
    pub(super) settings: PeftConfig,
    /// What is trained beside each linear, by its name in the model, bottom to top.
    pub(super) deltas: Vec<(String, LoraDelta)>,
    pub(super) copies: TrainedCopies,
    /// Whether what begins as the model has it has not got these values yet: it gets them when a model takes it.
    pub(super) is_new: bool,
}

impl Adapter {
    /// A new adapter for a model that computes in `kind`. It adds nothing yet: `A` is uniform in ±1/√in, drawn from a stream of
    /// its own for each matrix, and `B` is zero. Where it begins as a part of the weights, it gets that when a model takes it.
    pub fn new(config: &ModelConfig, lora: &LoraRecipe, seed: u64, kind: Kind, device: Device) -> Result<Self, Fault> {
        let settings = peft_settings(config, lora)?;
        check_names(config, &settings, &PeftConfig::default())?;
        check_saved(&settings)?;
        let mut adapter = Self::with_settings(config, settings, seed, kind, device)?;
        adapter.set_dropout(lora.dropout)?;
        Ok(adapter)
    }

    /// A new adapter by the settings of an adapter's file, which may differ from linear to linear.
    pub fn with_settings(
        config: &ModelConfig,
        settings: PeftConfig,
        seed: u64,
        kind: Kind,
        device: Device,
    ) -> Result<Self, Fault> {
        check_io_layers(config, &settings)?;
        let is_gaussian = settings.init == InitLora::Gaussian;
        let draw = |target: &LoraTarget, part: &'static str, shape: &[i64]| match (part, shape) {
            // As in PEFT: of an addition to the embedding B is drawn, and A is zero.
            (B, _) if target.is_embedding() => Ok(random::normal(seed, &target.tensor(B), shape, 1.0)),
            _ if target.is_embedding() => Ok(Tensor::zeros(shape, (Kind::Float, Device::Cpu))),
            (A, _) if is_gaussian => Ok(random::normal(seed, &target.tensor(A), shape, 1.0 / target.r as f64)),
            (A, [_, inner]) => Ok(random::uniform(seed, &target.tensor(A), shape, 1.0 / (*inner as f64).sqrt())),
            _ => Ok(Tensor::zeros(shape, (Kind::Float, Device::Cpu))),
        };
        let draw_copy = |name: &str, shape: &[i64]| match name {
            SCORE => Ok(random::normal(seed, &copy_name(SCORE, false), shape, config.initializer_range)),
            _ => Ok(Tensor::zeros(shape, (Kind::Float, Device::Cpu))),
        };
        let copies = TrainedCopies::new(config, &settings, draw_copy)?;
        let targets = targets(config, &settings)?;
        let adapter = Self::of_targets(config, settings, &targets, copies, draw)?.moved_to(kind, device);
        Ok(Self { is_new: true, ..adapter })
    }

    /// Checks the settings and collects what is trained, which becomes leaves.
    pub(super) fn of_targets(
        config: &ModelConfig,
        settings: PeftConfig,
        targets: &[LoraTarget],
        copies: TrainedCopies,
        mut tensor: impl FnMut(&LoraTarget, &'static str, &[i64]) -> Result<Tensor, Fault>,
    ) -> Result<Self, Fault> {
        let settings = with_listed_targets(config, settings)?;
        check_settings(config, &settings, targets)?;
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
                pissa: None,
                scale: *scale,
                dropout: settings.lora_dropout,
                layer: linear.layer.0 as u64,
                module: linear.number as u64,
            };
            Ok((linear.name.clone(), delta))
        };
        let deltas = targets.iter().map(delta).collect::<Result<_, Fault>>()?;
        Ok(Self { settings, deltas, copies, is_new: false })
    }

    /// Sets the dropout probability. Adapters of experts and of `lm_head` have none: these do not know where a token stands.
    pub fn set_dropout(&mut self, probability: f64) -> Result<(), Fault> {
        check_dropout(probability, self.deltas.iter().map(|(linear, _)| linear.as_str()))?;
        self.settings.lora_dropout = probability;
        self.deltas.iter_mut().for_each(|(_, delta)| delta.dropout = probability);
        Ok(())
    }

    /// The names of the targets, in the order of the layer, or the expression that matches them; behind them the matrices of all experts.
    pub fn targets(&self) -> Vec<String> {
        let modules = match &self.settings.target_modules {
            ModuleSet::Names(names) => names.clone(),
            ModuleSet::Matching(regex) => vec![regex.written().to_owned()],
            ModuleSet::AllLinear => Vec::new(),
        };
        modules.iter().chain(&self.settings.target_parameters).cloned().collect()
    }

    /// Refuses a recipe that says otherwise than this adapter of the model, which lies in `dir`: it brings its own numbers.
    pub fn check_agreement(&self, config: &ModelConfig, lora: &LoraRecipe, dir: &Path) -> Result<(), Fault> {
        let ours = &self.settings;
        // Modules are called as in the adapter's file, of which the recipe takes what it leaves out.
        let theirs = with_listed_targets(config, PeftConfig { is_inner: ours.is_inner, ..peft_settings(config, lora)? })?;
        // What the file names in vain is passed over, as in PEFT; what the recipe does by itself is a mistake.
        if theirs.given != ours.given {
            let (target_modules, target_parameters) = *theirs.given.clone();
            check_known(config, &PeftConfig { target_modules, target_parameters, ..theirs.clone() })?;
        }
        check_names(config, &theirs, ours)?;
        let linears = |settings: &PeftConfig| {
            let modules = meant(config, settings)?.into_iter();
            let parameters = meant_parameters(config, settings).into_iter().map(|(linear, _)| linear);
            Ok::<Vec<_>, Fault>(modules.chain(parameters).map(|linear| linear.name).collect())
        };
        let [alpha, of_adapter] = [theirs.lora_alpha, ours.lora_alpha];
        let numbers_and_targets = [
            ("r", theirs.r != ours.r, theirs.r.to_string(), ours.r.to_string()),
            ("alpha", (alpha - of_adapter).abs() > 0.0, alpha.to_string(), of_adapter.to_string()),
            ("target_modules", linears(&theirs)? != linears(ours)?, lora.target_modules.to_string(), self.targets().join(", ")),
        ];
        let [recipe, adapter] = [&theirs, ours].map(|settings| keys_of_kind(config, settings));
        let others = recipe.into_iter().zip(adapter).map(|((key, recipe, shown), adapter)| {
            // A file may have a single word here, which a recipe can't: then it is left out, and the recipe says nothing.
            let may_be_left_out = key == "exclude_modules" && theirs.exclude_modules == ModuleSet::NONE;
            (key, recipe != adapter.1 && !may_be_left_out, shown, adapter.2)
        });
        let mut all = numbers_and_targets.into_iter().chain(others);
        let Some((key, _, recipe, adapter)) = all.find(|(_, differs, ..)| *differs) else { return Ok(()) };
        let dir = abridged(dir.display());
        if ours.has_unnamed && key == "modules_to_save" {
            let message = format!("the adapter in `{dir}` holds copies of {adapter}, and its settings do not name all of these");
            return Err(Fault::usage(message, format!("`lora.{key} = {adapter}` trains them; it is {recipe} in the recipe")));
        }
        let message = format!("`lora.{key}` is {recipe} in the recipe, but {adapter} in the adapter `{dir}`");
        Err(Fault::usage(message, "make `[lora]` agree with the adapter, or leave `model.adapter` out"))
    }

    /// All that is trained with its names in PEFT's files, the leaves themselves: beside linears by layer from the bottom, and copies.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        let of_layers = self.deltas.iter().flat_map(|(linear, delta)| parameters(&self.settings, linear, delta));
        of_layers.chain(self.copies.parameters()).collect()
    }

    /// Draws every `B`, and what else begins as zero, from a normal distribution: with `B = 0` the gradient of `A` is zero, which proves nothing.
    pub fn set_b_normal(&self, std: f64, seed: u64) {
        let is_zero = |name: &str| name.ends_with("lora_B.weight") || name.ends_with("lora_embedding_A");
        let b_matrices = self.parameters().into_iter().filter(|(name, _)| is_zero(name));
        no_grad(|| b_matrices.for_each(|(name, mut b_or)| b_or.copy_(&random::normal(seed, &name, &b_or.size(), std))));
    }

    /// The adapter for a model that computes in `kind` on `device`; matrices that need no change stay the same tensors.
    pub fn moved_to(self, kind: Kind, device: Device) -> Self {
        let kind = accumulation_kind(kind);
        let moved = |tensor: &Tensor| tensor.to_kind(kind).to_device(device);
        let deltas = no_grad(|| self.deltas.into_iter().map(|(linear, delta)| (linear, delta.map(moved))).collect());
        let copies = no_grad(|| self.copies.map(moved));
        Self { deltas, copies, ..self }
    }
}

/// What an adapter says under keys of `[lora]`: as it is compared, and as it is shown.
fn keys_of_kind(config: &ModelConfig, settings: &PeftConfig) -> Vec<(&'static str, String, String)> {
    let modules = all_names(config, settings);
    // What they say of each linear counts, not the order in which they say it.
    let by_module = |get: &dyn Fn(&str) -> Option<f64>| {
        let all: Vec<_> = modules.iter().map(|module| get(module)).collect();
        format!("{all:?}")
    };
    let ranks = by_module(&|module| settings.rank_pattern.get(module).map(|r| r as f64));
    let alphas = by_module(&|module| settings.alpha_pattern.get(module));
    let mut saved = settings.modules_to_save.clone();
    saved.sort();
    let said = |key, shown: String| (key, shown.clone(), shown);
    vec![
        said("use_rslora", settings.use_rslora.to_string()),
        said("use_dora", settings.use_dora.to_string()),
        said("lora_bias", settings.lora_bias.to_string()),
        said("bias", settings.bias.to_string()),
        said("layers_to_transform", format!("{:?}", settings.layers_to_transform)),
        said("layers_pattern", format!("{:?}", settings.layers_pattern.names())),
        ("rank_pattern", ranks, settings.rank_pattern.to_string()),
        ("alpha_pattern", alphas, settings.alpha_pattern.to_string()),
        said("modules_to_save", format!("{saved:?}")),
        said("exclude_modules", settings.exclude_modules.to_string()),
    ]
}

/// What is trained beside a linear, by its names in PEFT's files.
pub(super) fn parameters(settings: &PeftConfig, linear: &str, delta: &LoraDelta) -> Vec<(String, Tensor)> {
    let module = peft_module(settings, linear);
    delta.parameters().into_iter().map(|(part, tensor)| (lora_tensor(&module, part), tensor.shallow_clone())).collect()
}

/// What an adapter has beside A and B of linears that stand alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterFeature {
    /// The lengths of rows are trained.
    Magnitudes,
    BiasOfB,
    /// The biases of the targets are trained.
    BaseBiases,
    Experts,
    Routers,
    /// The embedding has matrices of low rank.
    Embedding,
    Output,
    /// Whole copies of modules are trained.
    SavedModules,
    /// Classes are scored by a matrix of its own.
    Classes,
}

impl Adapter {
    /// All that it has of these, each once.
    pub fn features(&self) -> Vec<AdapterFeature> {
        let settings = &self.settings;
        let of_linears = |is: fn(&str) -> bool| self.deltas.iter().any(|(linear, _)| is(linear));
        [
            (AdapterFeature::Magnitudes, settings.use_dora),
            (AdapterFeature::BiasOfB, settings.lora_bias),
            (AdapterFeature::BaseBiases, settings.bias != TrainedBias::None),
            (AdapterFeature::Experts, of_linears(is_of_experts)),
            (AdapterFeature::Routers, of_linears(is_router)),
            (AdapterFeature::Embedding, of_linears(|linear| linear == EMBEDDING_MODULE)),
            (AdapterFeature::Output, of_linears(|linear| linear == OUTPUT_MODULE)),
            (AdapterFeature::SavedModules, !settings.modules_to_save.is_empty()),
            (AdapterFeature::Classes, settings.is_classifier),
        ]
        .into_iter()
        .filter_map(|(feature, has)| has.then_some(feature))
        .collect()
    }

    /// Whether something is trained that PEFT's files have no names for.
    pub fn has_extra_tensors(&self) -> bool {
        self.copies.tensors.iter().any(|(tensor, _)| is_nameless(tensor))
    }

    pub fn largest_rank(&self) -> usize {
        self.deltas.iter().map(|(_, lora)| lora.a_ri.size()[0] as usize).max().unwrap_or(self.settings.r)
    }

    /// LoRA beside the weights as they were before `PiSSA` took a part of them: `B A − B₀ A₀`, of twice the rank at the same scale.
    pub(super) fn without_pissa(&self) -> Self {
        let joined = |delta: &LoraDelta| {
            let mut joined = delta.map(Tensor::shallow_clone);
            if let Some(began) = joined.pissa.take() {
                let device = joined.a_ri.device();
                joined.a_ri = Tensor::cat(&[&joined.a_ri, &began.a_ri.to_device(device)], 0);
                joined.b_or = Tensor::cat(&[&joined.b_or, &-began.b_or.to_device(device)], 1);
            }
            joined
        };
        let deltas = no_grad(|| self.deltas.iter().map(|(linear, delta)| (linear.clone(), joined(delta))).collect());
        let settings = &self.settings;
        let factor = if settings.use_rslora { 2f64.sqrt() } else { 2.0 };
        let settings = PeftConfig {
            r: 2 * settings.r,
            lora_alpha: factor * settings.lora_alpha,
            rank_pattern: settings.rank_pattern.map(|r| 2 * r),
            alpha_pattern: settings.alpha_pattern.map(|alpha| factor * alpha),
            init: InitLora::Uniform,
            ..settings.clone()
        };
        Self { settings, deltas, copies: self.copies.map(Tensor::shallow_clone), is_new: false }
    }

    /// An adapter of equal function with the rank `r` everywhere, at least [`Self::largest_rank`], and the factor 1: every linear's own factor is
    /// multiplied into B, and what its rank lacks is zero. It is for adapters without [`Self::features`].
    pub fn normalized(self, r: usize) -> Self {
        let normalized = |lora: LoraDelta| {
            let lacking = r as i64 - lora.a_ri.size()[0];
            let a_ri = lora.a_ri.constant_pad_nd([0, 0, 0, lacking]);
            let b_or = (&lora.b_or * lora.scale).constant_pad_nd([0, lacking]);
            LoraDelta { a_ri, b_or, scale: 1.0, ..lora }
        };
        let settings = PeftConfig {
            r,
            lora_alpha: r as f64,
            rank_pattern: ModulePatterns::default(),
            alpha_pattern: ModulePatterns::default(),
            use_rslora: false,
            ..self.settings
        };
        let deltas = no_grad(|| self.deltas.into_iter().map(|(linear, delta)| (linear, normalized(delta))).collect());
        Self { settings, deltas, ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::files::TensorFile;
    use crate::model::Model;
    use crate::model::peft::{ADAPTER_TENSORS, ModulePatterns};
    use crate::model::small::{adapter, config, recipe, run};
    use crate::model::targets::is_router;
    use crate::recipe::Dtype;
    use crate::store::load_tensors;
    use crate::units::StepKey;

    #[test]
    fn dropout_is_the_same_for_every_chunking_and_batching() {
        let lora = LoraRecipe { dropout: 0.3, ..recipe(&["q_proj", "v_proj", "down_proj"]) };
        let model = Model::random(config(), Dtype::F64, Device::Cpu, 1).unwrap().with_adapter(adapter(&lora, 1));
        model.adapter().unwrap().set_b_normal(0.5, 2);
        let key = Some(StepKey { seed: 3, step: 4 });
        let near = |a: &Tensor, b: &Tensor| f64::try_from((a - b).abs().max()).unwrap() < 1e-12;
        let whole = run(&model, &[0, 1], &[11], key);
        assert!(near(&whole, &run(&model, &[0, 1], &[4, 5, 11], key)));
        assert!(near(&whole.narrow(0, 1, 1), &run(&model, &[1], &[11], key)));
        assert!(!near(&whole, &run(&model, &[0, 1], &[11], None)));
        assert!(!near(&whole, &run(&model, &[0, 1], &[11], Some(StepKey { seed: 3, step: 5 }))));
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
        let (one, all) = (adapter(&recipe(&["up_proj"]), 5), LoraRecipe { target_modules: ModuleSet::AllLinear, ..recipe(&[]) });
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
        let dir = Path::new("adapter");
        adapter(&recipe(&["q_proj"]), 1).check_agreement(&config(), &recipe(&["self_attn.q_proj"]), dir).unwrap();
        // What means nothing is passed over where the file has it, not where the recipe alone does.
        let settings = PeftConfig::plain(2, 4.0, 0.0, ModuleSet::Names(["q_proj", "wq"].map(String::from).to_vec()));
        let theirs = Adapter::with_settings(&config(), settings, 1, Kind::Double, Device::Cpu).unwrap();
        theirs.check_agreement(&config(), &recipe(&["q_proj", "wq"]), dir).unwrap();
        for typo in
            [recipe(&["q_proj", "v_prj"]), LoraRecipe { target_parameters: vec!["gate.wt".into()], ..recipe(&["q_proj"]) }]
        {
            let error = theirs.check_agreement(&config(), &typo, dir).unwrap_err().to_string();
            assert!(error.starts_with("unknown name `"), "{error}");
        }
    }

    #[test]
    fn an_adapter_of_the_language_model_by_itself_says_what_the_recipe_took_of_it() {
        let inside = ModelConfig { is_inner: true, ..config() };
        let rank_pattern = BTreeMap::from([("model.layers.0.self_attn.q_proj".to_owned(), 3)]);
        let lora = LoraRecipe { rank_pattern, ..recipe(&["q_proj"]) };
        let settings = peft_settings(&config(), &lora).unwrap();
        let adapter = Adapter::with_settings(&inside, settings, 1, Kind::Double, Device::Cpu).unwrap();
        adapter.check_agreement(&inside, &lora, Path::new("adapter")).unwrap();
    }

    /// PEFT 0.21 finds the same modules: it takes whole names and ends of names, passes over names that mean nothing, and counts layers only
    /// where a name is not whole.
    #[test]
    fn names_of_a_file_mean_what_they_mean_in_peft() {
        let whole = |layer, path| format!("model.layers.{layer}.{path}");
        let q = |layer| whole(layer, "self_attn.q_proj");
        let settings = |names: &[String], layers: &[usize]| PeftConfig {
            layers_to_transform: layers.to_vec(),
            ..PeftConfig::plain(2, 4.0, 0.0, ModuleSet::Names(names.to_vec()))
        };
        let [up, v, unknown] = ["up_proj", "v_proj", "qkv_proj"].map(String::from);
        for (names, layers, linears, written) in [
            (vec![whole(1, "mlp.up_proj")], &[][..], vec![whole(1, "mlp.up_proj")], vec![whole(1, "mlp.up_proj")]),
            (vec!["1.mlp.up_proj".into(), unknown], &[], vec![whole(1, "mlp.up_proj")], vec![whole(1, "mlp.up_proj")]),
            (
                vec![whole(0, "mlp.up_proj"), "layers.1.mlp.up_proj".into()],
                &[],
                [0, 1].map(|l| whole(l, "mlp.up_proj")).into(),
                vec![up],
            ),
            (vec![q(0), v.clone()], &[1], vec![q(0), whole(1, "self_attn.v_proj")], vec![q(0), v.clone()]),
            (vec![q(0), q(1)], &[1], vec![q(0), q(1)], vec![q(0), q(1)]),
            (vec!["0.mlp.up_proj".into(), v.clone()], &[1], vec![whole(1, "self_attn.v_proj")], vec![v.clone()]),
            (
                vec!["model.embed_tokens".into(), q(1)],
                &[0],
                vec![q(1), "model.embed_tokens".into()],
                vec![q(1), "model.embed_tokens".into()],
            ),
        ] {
            let begun = settings(&names, layers);
            let adapter = Adapter::with_settings(&config(), begun, 1, Kind::Double, Device::Cpu).unwrap();
            let found: Vec<&String> = adapter.deltas.iter().map(|(linear, _)| linear).collect();
            assert_eq!(found, linears.iter().collect::<Vec<_>>(), "{names:?}");
            assert_eq!(adapter.targets(), written, "{names:?}");
            let dir = tempfile::tempdir().unwrap();
            adapter.save_peft(dir.path(), "model").unwrap();
            let read = Adapter::load_peft(dir.path(), &config(), Kind::Double, Device::Cpu).unwrap();
            assert_eq!(read.parameters(), adapter.parameters(), "{names:?}");
        }
    }

    /// PEFT 0.21 scales and leaves out the same: it knows a router that is a parameter by the parameter's name, and excludes no parameter.
    #[test]
    fn parameters_are_meant_by_their_names_layer_by_layer() {
        let fixture = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families").join(name);
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        for (model, router) in [("model-mixtral", "mlp.gate"), ("model-qwen3-moe", "mlp.gate"), ("model-gpt-oss", "mlp.router")] {
            let config = ModelConfig::load(&fixture(model)).unwrap();
            let parameters = [&*format!("model.layers.0.{router}.weight"), "1.mlp.experts.gate_up_proj", "experts.down_proj"];
            let settings = |pattern: &str| PeftConfig {
                target_parameters: names(&parameters),
                exclude_modules: ModuleSet::Names(names(&["experts", "down_proj", "gate", "router"])),
                alpha_pattern: ModulePatterns::new([(pattern.to_owned(), 32.0)]).unwrap(),
                ..PeftConfig::plain(2, 4.0, 0.0, ModuleSet::Names(names(&["q_proj"])))
            };
            let adapter = |settings| Adapter::with_settings(&config, settings, 1, Kind::Float, Device::Cpu).unwrap();
            for (pattern, scale) in [(format!("{router}.weight"), 16.0), (router.to_owned(), 2.0), (".*weight".to_owned(), 16.0)]
            {
                let adapter = adapter(settings(&pattern));
                let (_, delta) = adapter.deltas.iter().find(|(name, _)| is_router(name)).unwrap();
                assert!((delta.scale - scale).abs() < 1e-12, "{pattern} of {model}");
            }
            let adapter = adapter(settings("q_proj"));
            let parts: Vec<String> =
                adapter.parameters().into_iter().map(|(name, _)| name).filter(|name| !name.contains("attn")).collect();
            let of = |layer, module: &str| format!("base_model.model.model.layers.{layer}.{module}.lora_A.weight");
            let mut expected = vec![of(0, router), of(0, "mlp.experts"), of(1, "mlp.experts.base_layer"), of(1, "mlp.experts")];
            expected.extend((2..config.num_layers()).map(|layer| of(layer, "mlp.experts")));
            assert_eq!(parts.into_iter().filter(|name| name.contains("lora_A")).collect::<Vec<_>>(), expected, "{model}");
            let dir = tempfile::tempdir().unwrap();
            adapter.save_peft(dir.path(), "model").unwrap();
            let read = Adapter::load_peft(dir.path(), &config, Kind::Float, Device::Cpu).unwrap();
            assert_eq!(read.parameters(), adapter.parameters(), "{model}");

            let lora = |pattern: &str| LoraRecipe {
                target_parameters: names(&[&format!("{router}.weight")]),
                alpha_pattern: [(pattern.to_owned(), 32.0)].into_iter().collect(),
                ..recipe(&["q_proj"])
            };
            let new = |lora: &LoraRecipe| Adapter::new(&config, lora, 1, Kind::Float, Device::Cpu);
            let error = new(&lora(router)).unwrap_err().to_string();
            let last = router.trim_start_matches("mlp.");
            assert!(error.ends_with(&format!("in `alpha_pattern`: the targets are `q_proj`, `{last}.weight`")), "{error}");
            let with = new(&lora("weight")).unwrap();
            let other = LoraRecipe { alpha_pattern: [("weight".to_owned(), 8.0)].into_iter().collect(), ..lora("weight") };
            let error = with.check_agreement(&config, &other, Path::new("adapter")).unwrap_err().to_string();
            assert!(error.starts_with("`lora.alpha_pattern` is "), "{error}");
        }
    }

    /// A run that is resumed must draw the masks it drew before: the numbers of linears in their layer are part of the format.
    #[test]
    fn every_linear_keeps_its_number_in_the_masks_of_dropout() {
        let numbers = config().linears().into_iter().map(|linear| (linear.layer.0, linear.number, linear.spec.name().to_owned()));
        let names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        let expected = (0..2).flat_map(|layer| names.iter().enumerate().map(move |(i, name)| (layer, i, (*name).to_owned())));
        assert_eq!(numbers.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        let adapter = adapter(&recipe(&["k_proj", "down_proj"]), 1);
        let streams = adapter.deltas.iter().map(|(_, lora)| (lora.layer, lora.module));
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
        let error = |settings| Adapter::with_settings(&config(), settings, 1, Kind::Float, Device::Cpu).unwrap_err().to_string();
        let plain = PeftConfig::plain(2, 4.0, 0.0, ModuleSet::Names(vec!["q_proj".into()]));
        let ranks = |r| ModulePatterns::new([("q_proj".to_owned(), r)]).unwrap();
        assert!(error(PeftConfig { rank_pattern: ranks(21), ..plain.clone() }).contains("`lora.rank_pattern` is 21"));
        let excluded = ModuleSet::Names(vec!["q_proj".into()]);
        assert!(error(PeftConfig { exclude_modules: excluded, ..plain.clone() }).contains("`lora.exclude_modules` is all of"));
        let plain = || plain.clone();
        assert!(error(PeftConfig { layers_to_transform: vec![2], ..plain() }).contains("`lora.layers_to_transform` is [2]"));
        let matching = |written| ModuleSet::matching(written).unwrap();
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
            error(PeftConfig { init: InitLora::Gaussian, lora_bias: true, ..plain() })
                .contains("`lora.init_lora_weights` is gaussian")
        );
        let pissa = || PeftConfig { init: InitLora::Pissa, ..plain() };
        for wrong in [
            PeftConfig { lora_bias: true, ..pissa() },
            PeftConfig { r: 7, ..pissa() },
            PeftConfig { target_modules: ModuleSet::Names(vec!["q_proj".into(), "embed_tokens".into()]), ..pissa() },
        ] {
            assert!(error(wrong).contains("`lora.init_lora_weights` is pissa, expected `uniform` w"));
        }
    }
}
