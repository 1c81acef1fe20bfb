//! One line of a proof's table: everything that a loss and its gradient may depend on.

use kvtune::cache;
use kvtune::data::Batch;
use kvtune::engine::{Engine, MicroBatchContext, NoObserver};
use kvtune::model::Model;
use kvtune::recipe::{AttentionOutputs, BufferKind, Chunking, PolicyRecipe, Storage, StoreForm, StorePlace, StoreRecipe};
use kvtune::units::Fault;
use kvtune::verify::{Comparison, Reference, check_finite};
use tch::{Device, Kind, Tensor};

use super::policies::registered;
use super::{ALL_LINEAR, batch, context, engine, model};

/// A model, a batch, a cache and a tiling.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of its own, and a case names those that it turns")]
pub struct Case {
    /// What fails is named by it.
    pub name: &'static str,
    /// Recipe name of the policy.
    pub policy: &'static str,
    /// Its parameters, as TOML.
    pub params: &'static str,
    /// Keys of its `config.json` that are not as in other cases: another family, another rotary embedding. As JSON.
    pub config: &'static str,
    /// A model of the fixtures of quantised weights, in place of drawn ones; `config` and layers are its own.
    pub quantised: Option<&'static str>,
    /// Query heads and KV heads.
    pub heads: (usize, usize),
    /// The window of the layers that slide.
    pub window: usize,
    /// Those layers, ascending.
    pub sliding_layers: &'static [usize],
    /// Tokens by sequence.
    pub lengths: &'static [usize],
    /// Slots: one number for all layers, or one per layer.
    pub cache: &'static [usize],
    /// Columns of a chunk.
    pub chunk: usize,
    /// Where chunks end.
    pub chunking: Chunking,
    /// Whether their sizes are drawn.
    pub is_randomized: bool,
    /// How tokens from the first target on are run.
    pub tail: Tail,
    /// Begin and end of each sequence's initial part, where it has one.
    pub initial: &'static [(usize, usize)],
    /// Of a dense cache.
    pub storage: Storage,
    /// How an entry is stored.
    pub buffer: BufferKind,
    /// Whether entries wait on the host between their uses.
    pub is_offloaded: bool,
    /// Layers of a cell.
    pub layers_per_cell: usize,
    /// Chunks of a cell.
    pub width: Width,
    /// Linear layers with an adapter.
    pub lora: &'static [&'static str],
    /// Of the adapter.
    pub dropout: f64,
    /// Whether its scale is by the root of the rank.
    pub is_rslora: bool,
    /// Ranks of linear layers that have another than the rest, by PEFT's patterns.
    pub ranks: &'static [(&'static str, usize)],
    /// Alphas of such layers.
    pub alphas: &'static [(&'static str, f64)],
    /// Names of those that have no adapter though they are among `lora`.
    pub excluded: &'static [&'static str],
    /// The layers that have one; empty: all.
    pub layers: &'static [usize],
    /// In place of `lora` and `layers`, an expression that matches whole names.
    pub matching: Option<&'static str>,
    /// What is trained beside A and B.
    pub beside: Beside,
    /// Modules of which whole copies are trained.
    pub saved: &'static [&'static str],
    /// What is trained.
    pub trains: Trains,
    /// Where the losses are.
    pub targets: TargetsAt,
    /// What they are.
    pub head: HeadKind,
    /// How layer checkpoints wait, and where.
    pub layer_checkpoints: StoreRecipe,
    /// How the undo log waits, and where.
    pub undo_log: StoreRecipe,
    /// Cells whose graphs the forward phase keeps.
    pub kept: usize,
    /// What becomes of attention's outputs of the forward phase.
    pub outputs: AttentionOutputs,
    /// Whether a GPU captures what columns of equal shape have in common.
    pub has_cuda_graphs: bool,
    /// Whether sessions have fixed widths.
    pub is_static: bool,
    /// One residual channel is 1000 times the others.
    pub has_loud_channel: bool,
    /// Whether the layers' weights wait on the host, where that is another memory.
    pub has_waiting_weights: bool,
    /// dtype of the model.
    pub kind: Kind,
    /// Where it computes.
    pub device: Device,
    /// How many matrices have no gradient, by the nature of the case.
    pub untested: usize,
}

/// How tokens from the first target on are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// As those before.
    InChunks,
    /// One by one.
    OneByOne,
    /// In blocks of decoding of so many.
    InBlocks(usize),
}

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trains {
    /// LoRA beside a model whose output projection is its own.
    Adapter,
    /// All weights of such a model.
    All,
    /// All weights of a model whose output projection is the embedding.
    AllTied,
}

/// What an adapter trains beside A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// Nothing.
    Nothing,
    /// A bias of B.
    BiasOfB,
    /// The biases that the linears have.
    BaseBiases,
    /// These of all linears, targets or not.
    AllBiases,
    /// The lengths of the weights' rows.
    Magnitudes,
    /// These and the linears' biases.
    MagnitudesAndBaseBiases,
}

/// How wide a cell is.
#[derive(Clone, Copy, Debug)]
pub enum Width {
    /// So many chunks.
    Chunks(usize),
    /// By the rule of the recipe's multiplier.
    Multiplier(f64),
}

/// Which positions have a target, under the head `next_token`.
#[derive(Clone, Copy, Debug)]
pub enum TargetsAt {
    /// Each.
    All,
    /// So many first ones of every sequence.
    First(usize),
    /// So many last ones of every sequence.
    Last(usize),
    /// One of sequence 0.
    Only(usize),
}

/// The head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadKind {
    /// `next_token`.
    NextToken,
    /// The same, with `head.distill`.
    Distilled,
    /// `seq_classification_on_logits`.
    Classify,
    /// `seq_classification`.
    Score,
}

/// A plain store.
pub const IN_MEMORY: StoreRecipe = StoreRecipe { form: StoreForm::Plain, place: StorePlace::Memory };
/// A plain store in a file.
pub const IN_FILE: StoreRecipe = StoreRecipe { place: StorePlace::File, ..IN_MEMORY };

/// A store that rounds.
pub const INT8: StoreRecipe = StoreRecipe { form: StoreForm::Int8, ..IN_MEMORY };

/// The case that others vary: ragged, with GQA, of several cells each way; its chunks fit no border evenly.
pub const PLAIN: Case = Case {
    name: "plain",
    policy: "h2o",
    params: "",
    config: "{}",
    quantised: None,
    heads: (6, 2),
    window: 7,
    sliding_layers: &[],
    lengths: &[44, 37, 9],
    cache: &[18],
    chunk: 5,
    chunking: Chunking::Plain,
    is_randomized: false,
    tail: Tail::InChunks,
    initial: &[],
    storage: Storage::Preallocated,
    buffer: BufferKind::Plain,
    is_offloaded: false,
    layers_per_cell: 1,
    width: Width::Chunks(3),
    lora: ALL_LINEAR,
    dropout: 0.0,
    is_rslora: false,
    ranks: &[],
    alphas: &[],
    excluded: &[],
    layers: &[],
    matching: None,
    beside: Beside::Nothing,
    saved: &[],
    trains: Trains::Adapter,
    targets: TargetsAt::All,
    head: HeadKind::NextToken,
    layer_checkpoints: IN_MEMORY,
    undo_log: IN_MEMORY,
    kept: 0,
    outputs: AttentionOutputs::Recompute,
    has_cuda_graphs: false,
    is_static: false,
    has_loud_channel: false,
    has_waiting_weights: false,
    kind: Kind::Double,
    device: Device::Cpu,
    untested: 0,
};

impl Case {
    /// Whether its policy, or the one that it wraps, goes by what the model knows of entries or queries beforehand.
    pub fn takes_gates(&self) -> bool {
        ["learned", "triattention"].iter().any(|name| self.policy == *name || self.params.contains(name))
    }
}

/// Every policy of the registry with its defaults, on the plain case with what the policy needs: slots for all tokens if nothing ever
/// leaves, a quantised buffer, initial parts.
pub fn registered_policies() -> Vec<Case> {
    let case = |(policy, params): (&'static str, &'static str)| {
        let recipe = PolicyRecipe::with_params(policy, toml::from_str(params).unwrap());
        let built = cache::build(&recipe, PLAIN.cache[0]).unwrap_or_else(|error| {
            panic!("`{policy}` needs parameters: say in `needed` of tests/support/policies.rs which it is tested with ({error})")
        });
        let traits = built.traits();
        Case {
            name: policy,
            policy,
            params,
            cache: if traits.keeps_all { &[50] } else { PLAIN.cache },
            buffer: if traits.needs_quantised { BufferKind::Int8 } else { BufferKind::Plain },
            initial: if traits.initial_part.is_some() { &[(0, 30), (3, 7), (0, 9), (0, 4)] } else { &[] },
            ..PLAIN
        }
    };
    registered().into_iter().map(case).collect()
}

/// The bound of exactness in f64.
pub const EXACT: f64 = 1e-12;
/// The bound of exactness in f32.
pub const EXACT_F32: f64 = 2e-5;

/// Runs a batch on both roads.
pub fn compare(engine: &Engine, model: &Model, batch: &Batch, context: MicroBatchContext) -> Result<Comparison, Fault> {
    let ours = engine.gradients(model, batch, context, &mut NoObserver)?;
    check_finite(batch, &ours.losses)?;
    Ok(Reference::new(engine, model, batch, &ours.log, context)?.compare(&ours))
}

/// Runs a case on both roads.
pub fn run(case: &Case) -> Comparison {
    let model = model(case);
    compare(&engine(case, &model), &model, &batch(case), context(case)).unwrap_or_else(|e| panic!("{case:?}: {e}"))
}

/// Asserts that every case is exact, and that each of its matrices was tested; prints and returns the worst error.
pub fn prove(group: &str, cases: &[Case]) -> f64 {
    let mut worst: f64 = 0.0;
    for case in cases {
        let found = run(case);
        let bound = if case.kind == Kind::Double { EXACT } else { EXACT_F32 };
        assert!(found.worst() <= bound, "{case:?}: worst error {:.2e}\n{found:#?}", found.worst());
        assert_eq!(found.untested().len(), case.untested, "{case:?}: untested {:?}", found.untested());
        worst = worst.max(found.worst());
    }
    println!("{group}: {} cases, worst error {worst:.2e}", cases.len());
    worst
}

/// The smallest cosine that a gradient in bf16 may have with the one in f32.
pub const NEAR_BF16: f64 = 0.999;

/// The cosine of the whole gradient in bf16 with that in f32, of the same choices, which rounding would make differ.
pub fn cosine_of_bf16(case: &Case) -> f64 {
    let of = |kind| Case { kind, ..*case };
    let (full, narrow) = (of(Kind::Float), of(Kind::BFloat16));
    let (model_of_full, model_of_narrow) = (model(&full), model(&narrow));
    let expected = engine(&full, &model_of_full).gradients(&model_of_full, &batch(case), context(case), &mut NoObserver).unwrap();
    let following = engine(&narrow, &model_of_narrow).following(expected.log);
    let found = following.gradients(&model_of_narrow, &batch(case), context(case), &mut NoObserver).unwrap();
    let dot = |x: &Tensor, y: &Tensor| (x.to_kind(Kind::Double) * y.to_kind(Kind::Double)).sum(Kind::Double).double_value(&[]);
    let mut sums = [0.0; 3];
    for (name, full) in &expected.gradients {
        let narrow = &found.gradients[name];
        assert_eq!((full.kind(), narrow.kind()), (Kind::Float, Kind::Float), "{name}: gradients are f32 in either");
        for (sum, (x, y)) in sums.iter_mut().zip([(full, narrow), (full, full), (narrow, narrow)]) {
            *sum += dot(x, y);
        }
    }
    sums[0] / (sums[1] * sums[2]).sqrt()
}
