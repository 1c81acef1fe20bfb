//! Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): the trained addition `alpha/r · B A x` to frozen projections.

use tch::{Device, Kind, Tensor, no_grad};

use super::ModelError;
use super::config::ModelConfig;
use super::linear::Projection;
use super::names::layer_tensor;
use super::random;
use crate::ops::dropout::{DropoutStream, dropout};
use crate::ops::linear::LowRank;
use crate::recipe::{LoraRecipe, TargetModules};
use crate::units::LayerIdx;

/// The matrices that are trained: `lora_A (r, in)` and `lora_B (out, r)` of each target, kept in f32 whatever the model's dtype
/// (in f64 for an f64 model), as leaves that require a gradient.
#[derive(Debug)]
pub struct Adapter {
    r: usize,
    alpha: f64,
    dropout: f64,
    /// Ascending, each once.
    targets: Vec<Projection>,
    /// By layer, then in the order of the targets.
    layers: Vec<Vec<Pair>>,
}

/// The two matrices of one projection.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) a_ri: Tensor,
    pub(super) b_or: Tensor,
}

/// Where tokens stand, for randomness that is the same for every chunking, batching and recomputation.
#[derive(Clone, Copy, Debug, Default)]
pub struct DropoutContext<'a> {
    /// `None` switches dropout off.
    pub dropout: Option<DropoutKey>,
    /// For each sequence of the batch the number of its sample; not looked at without dropout.
    pub samples: &'a [u64],
}

/// What a dropout mask depends on beside sample, layer, projection and position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutKey {
    /// The run's seed.
    pub seed: u64,
    /// The optimiser step.
    pub step: u64,
}

impl Adapter {
    /// A new adapter for a model that computes in `kind`. It adds nothing yet: `A` is uniform in ±1/√in, drawn from a stream of
    /// its own for each matrix, and `B` is zero.
    pub fn new(config: &ModelConfig, lora: &LoraRecipe, seed: u64, kind: Kind, device: Device) -> Result<Self, ModelError> {
        let targets = targets(&lora.target_modules)?;
        let pair = |layer: usize, projection: Projection| {
            let [out, inner] = projection.shape(&config.layers[layer], config.hidden_size).map(|size| size as i64);
            let r = lora.r as i64;
            let a_ri = random::uniform(seed, &matrix_name(layer, projection, "A"), &[r, inner], 1.0 / (inner as f64).sqrt());
            Ok(Pair { a_ri, b_or: Tensor::zeros([out, r], (Kind::Float, Device::Cpu)) })
        };
        Ok(Self::from_pairs(config, lora, targets, pair)?.moved_to(kind, device))
    }

    /// Checks the numbers and collects the matrices, which become leaves.
    pub(super) fn from_pairs(
        config: &ModelConfig,
        lora: &LoraRecipe,
        targets: Vec<Projection>,
        mut pair: impl FnMut(usize, Projection) -> Result<Pair, ModelError>,
    ) -> Result<Self, ModelError> {
        let refuse = |key, found: String, expected| Err(ModelError::Lora { key, found, expected });
        if lora.r == 0 || lora.r > config.hidden_size.max(config.intermediate_size()) {
            return refuse("r", lora.r.to_string(), "a number from 1 to the width of the layers");
        }
        if !(lora.alpha.is_finite() && lora.alpha > 0.0) {
            return refuse("alpha", lora.alpha.to_string(), "a positive number");
        }
        if !(0.0..1.0).contains(&lora.dropout) {
            return refuse("dropout", lora.dropout.to_string(), "a number from 0 to below 1");
        }
        if targets.is_empty() {
            return refuse("target_modules", "empty".into(), "at least one name");
        }
        let mut layer = |l: usize| targets.iter().map(|&target| Ok(pair(l, target)?.into_leaves())).collect();
        let layers = (0..config.num_layers()).map(&mut layer).collect::<Result<Vec<Vec<Pair>>, ModelError>>()?;
        Ok(Self { r: lora.r, alpha: lora.alpha, dropout: lora.dropout, targets, layers })
    }

    /// The inner dimension.
    pub fn r(&self) -> usize {
        self.r
    }

    /// The numerator of the scale `alpha / r`.
    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// The probability with which an input of `A` is dropped in training.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }

    /// Sets the dropout probability, as a recipe may train a loaded adapter with another one.
    pub fn set_dropout(&mut self, probability: f64) {
        self.dropout = probability;
    }

    /// The projections that have matrices.
    pub fn targets(&self) -> &[Projection] {
        &self.targets
    }

    /// Whether a recipe's targets are this adapter's.
    pub fn has_targets(&self, modules: &TargetModules) -> Result<bool, ModelError> {
        Ok(targets(modules)? == self.targets)
    }

    /// All matrices with their names in PEFT's files, by layer from the bottom; the tensors are the leaves themselves.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        (0..self.layers.len()).flat_map(|layer| self.layer_parameters(LayerIdx(layer))).collect()
    }

    /// The matrices of one layer, as [`Self::parameters`].
    pub fn layer_parameters(&self, layer: LayerIdx) -> Vec<(String, Tensor)> {
        let named = |(&target, pair): (&Projection, &Pair)| {
            [("A", &pair.a_ri), ("B", &pair.b_or)].map(|(ab, tensor)| (matrix_name(layer.0, target, ab), tensor.shallow_clone()))
        };
        self.targets.iter().zip(&self.layers[layer.0]).flat_map(named).collect()
    }

    /// Draws every `B` from a normal distribution: with `B = 0` the gradient of `A` is zero and would prove nothing.
    pub fn set_b_normal(&self, std: f64, seed: u64) {
        let b_matrices = self.parameters().into_iter().filter(|(name, _)| name.ends_with("lora_B.weight"));
        no_grad(|| b_matrices.for_each(|(name, mut b_or)| b_or.copy_(&random::normal(seed, &name, &b_or.size(), std))));
    }

    /// The adapter for a model that computes in `kind` on `device`; matrices that need no change stay the same tensors.
    pub fn moved_to(self, kind: Kind, device: Device) -> Self {
        let kind = master_kind(kind);
        let moved = |pair: Pair| Pair {
            a_ri: pair.a_ri.to_kind(kind).to_device(device),
            b_or: pair.b_or.to_kind(kind).to_device(device),
        };
        let layers = no_grad(|| {
            self.layers.into_iter().map(|pairs| pairs.into_iter().map(|p| moved(p).into_leaves()).collect()).collect()
        });
        Self { layers, ..self }
    }

    /// A second adapter with the same values, whose leaves are its own.
    pub fn duplicate(&self) -> Self {
        let copied = |pair: &Pair| Pair { a_ri: pair.a_ri.detach().copy(), b_or: pair.b_or.detach().copy() }.into_leaves();
        let layers = self.layers.iter().map(|pairs| pairs.iter().map(copied).collect()).collect();
        Self { layers, targets: self.targets.clone(), ..*self }
    }

    fn pair(&self, layer: LayerIdx, projection: Projection) -> Option<&Pair> {
        let target = self.targets.binary_search(&projection).ok()?;
        Some(&self.layers[layer.0][target])
    }
}

impl Pair {
    fn into_leaves(self) -> Self {
        Self { a_ri: self.a_ri.set_requires_grad(true), b_or: self.b_or.set_requires_grad(true) }
    }
}

/// An adapter at one layer and at some places.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerLora<'a> {
    pub(super) adapter: &'a Adapter,
    pub(super) layer: LayerIdx,
    pub(super) position_bn: &'a Tensor,
    pub(super) place: &'a DropoutContext<'a>,
}

impl LayerLora<'_> {
    /// What the adapter adds to a projection's output, from the projection's input; `None` where it isn't trained.
    pub(super) fn pair(&self, projection: Projection) -> Option<LowRank<'_>> {
        let Pair { a_ri, b_or } = self.adapter.pair(self.layer, projection)?;
        Some(LowRank { a_ri, b_or, scale: self.adapter.alpha / self.adapter.r as f64, x_bni: None })
    }

    /// The addition's input where dropout changes it.
    ///
    /// # Shapes
    /// `(B, n, in)` in and out.
    pub(super) fn dropped(&self, projection: Projection, x_bni: &Tensor) -> Option<Tensor> {
        let key = self.place.dropout.filter(|_| self.adapter.dropout > 0.0)?;
        let stream = DropoutStream { seed: key.seed, step: key.step, layer: self.layer.0 as u64, module: projection as u64 };
        Some(dropout(x_bni, self.adapter.dropout, stream, self.place.samples, self.position_bn))
    }
}

/// The dtype of the matrices: f32 even where the model computes in 16 bits, as small updates would be rounded away.
pub(super) fn master_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// The name of a matrix (`A` or `B`) in PEFT's files.
pub(super) fn matrix_name(layer: usize, projection: Projection, matrix: &str) -> String {
    format!("base_model.model.{}", layer_tensor(layer, &format!("{}.lora_{matrix}.weight", projection.path())))
}

/// The projections that a recipe means, ascending and each once.
pub fn targets(modules: &TargetModules) -> Result<Vec<Projection>, ModelError> {
    match modules {
        TargetModules::AllLinear => Ok(Projection::ALL.into()),
        TargetModules::Names(names) => named_targets(names),
    }
}

/// The projections of a list of PEFT names, ascending and each once.
pub(super) fn named_targets(names: &[String]) -> Result<Vec<Projection>, ModelError> {
    let find = |name: &String| {
        Projection::from_name(name).ok_or_else(|| {
            let known = Projection::ALL.map(|projection| format!("`{}`", projection.name())).join(", ");
            ModelError::UnknownTarget { name: name.clone(), known }
        })
    };
    let mut targets = names.iter().map(find).collect::<Result<Vec<_>, _>>()?;
    targets.sort_unstable();
    targets.dedup();
    Ok(targets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Attend, AttendError, Model, Qkv};
    use crate::recipe::Dtype;
    use crate::units::Failure;
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
        LoraRecipe { r: 2, alpha: 4.0, dropout: 0.0, target_modules }
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
            let (mut hidden, positions) = (model.embed(&ids.narrow(1, start, end - start)), model.positions(position));
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
        assert!(adapter(&recipe(&["q_proj"]), 1).has_targets(&TargetModules::Names(vec!["q_proj".into()])).unwrap());
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
    }

    #[test]
    fn a_duplicate_has_the_values_but_not_the_leaves() {
        let first = adapter(&recipe(&["v_proj"]), 1);
        let second = first.duplicate();
        assert_eq!(first.parameters()[0].1, second.parameters()[0].1);
        first.set_b_normal(1.0, 1);
        assert_ne!(first.parameters()[1].1, second.parameters()[1].1);
        assert!(second.parameters().iter().all(|(_, matrix)| matrix.requires_grad() && matrix.is_leaf()));
    }
}
