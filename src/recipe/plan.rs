//! What a checked recipe says: plain values with every default filled in, one struct per table.

use std::path::PathBuf;

use super::grad::GradRecipe;
use super::kv_cache::CacheRecipe;
use super::words::words;

/// A recipe: checked, complete, with absolute paths.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// The model that is trained.
    pub model: ModelRecipe,
    /// The adapter; `None` where all weights are trained.
    pub lora: Option<LoraRecipe>,
    /// The examples.
    pub data: DataRecipe,
    /// What the loss is.
    pub head: HeadRecipe,
    /// How the past is kept.
    pub kv_cache: CacheRecipe,
    /// How the gradient is tiled.
    pub grad: GradRecipe,
    /// Lengths and sizes of the run.
    pub train: TrainRecipe,
    /// The optimiser and its schedule.
    pub optimizer: OptimizerRecipe,
    /// Validation.
    pub eval: EvalRecipe,
    /// Saving.
    pub checkpoint: CheckpointRecipe,
    /// Logging.
    pub log: LogRecipe,
    /// Where the run is written; the command line may say it instead.
    pub output_dir: Option<PathBuf>,
}

impl Recipe {
    /// Which weights are trained.
    pub fn weights(&self) -> Weights {
        if self.lora.is_some() { Weights::Adapter } else { Weights::All }
    }
}

words! {
    /// The element type of weights and activations.
    Dtype {
        /// 32-bit floats.
        F32 = "f32",
        /// Brain floats.
        Bf16 = "bf16",
        /// 64-bit floats, for checks.
        F64 = "f64",
    }
}

words! {
    /// Which weights are trained.
    Weights {
        /// Those of an adapter, which is LoRA.
        Adapter = "adapter",
        /// All of the model's.
        All = "all",
    }
}

/// `[model]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelRecipe {
    /// A model directory.
    pub path: PathBuf,
    /// A PEFT adapter to start from.
    pub adapter: Option<PathBuf>,
    /// Default `f32`.
    pub dtype: Dtype,
    /// Whether a GPU may round the factors of f32 products to 10 bits of mantissa, default false.
    pub allow_tf32: bool,
}

/// `[lora]`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraRecipe {
    /// Rows of `lora_A`, default 8.
    pub r: usize,
    /// The update is scaled by `alpha / r`, default 16.
    pub alpha: f64,
    /// Of the adapter's input, default 0.
    pub dropout: f64,
    /// Default `"all-linear"`.
    pub target_modules: TargetModules,
}

/// The modules that get an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetModules {
    /// Every linear module of the decoder layers.
    AllLinear,
    /// By PEFT's names, as `q_proj`.
    Names(Vec<String>),
}

words! {
    /// What the data files hold.
    DataFormat {
        /// LongBench v2: a JSON array, JSON lines, or Parquet.
        LongBenchV2 = "longbench-v2",
        /// JSON lines with `prompt` and `completion`.
        PromptCompletion = "prompt-completion",
        /// JSON lines with `input_ids`, and `labels` or `label`.
        Tokens = "tokens",
    }
}

words! {
    /// What happens to a sequence that is too long.
    OnTooLong {
        /// It is left out, and counted.
        Drop = "drop",
        /// The middle of its prompt is cut out, and it is counted.
        Truncate = "truncate",
        /// The run does not start.
        Error = "error",
    }
}

words! {
    /// The order of the batches of an epoch; a batch holds sequences of similar length in any case.
    BatchOrder {
        /// Shuffled anew for each epoch.
        Shuffled = "shuffled",
        /// The longest first, so that memory is known at the first step.
        LongestFirst = "longest_first",
        /// The shortest first.
        ShortestFirst = "shortest_first",
    }
}

/// Where the validation examples come from.
#[derive(Clone, Debug, PartialEq)]
pub enum ValidationSource {
    /// A file of the same format.
    File(PathBuf),
    /// A part of the training examples, drawn by the seed; 0 is none.
    Fraction(f64),
}

/// `[data]`.
#[derive(Clone, Debug, PartialEq)]
pub struct DataRecipe {
    /// No default.
    pub format: DataFormat,
    /// The training examples.
    pub train: PathBuf,
    /// Default: a tenth of the training examples.
    pub validation: ValidationSource,
    /// Default: as many as the model has positions.
    pub max_seq_length: Option<usize>,
    /// Default `error`.
    pub on_too_long: OnTooLong,
    /// Default `shuffled`.
    pub order: BatchOrder,
    /// Whether the tokens of the prompt are targets too, default false.
    pub train_on_prompt: bool,
}

/// `[head]`, default `next_token`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeadRecipe {
    /// Every target is the next token.
    NextToken,
    /// One class per sequence, read from the logits of a few tokens at the last position.
    SeqClassificationOnLogits(Labels),
}

/// The classes of a classification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Labels {
    /// By token.
    Tokens(Vec<u32>),
    /// By a text that is one token.
    Texts(Vec<String>),
}

impl Labels {
    /// Number of classes.
    pub fn len(&self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Texts(texts) => texts.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// `[train]`.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainRecipe {
    /// Sequences that are run together, default 1.
    pub micro_batch_size: usize,
    /// Micro-batches of a step, default 1.
    pub gradient_accumulation_steps: usize,
    /// Ends the run before its epochs do.
    pub max_steps: Option<u64>,
    /// Default 1.
    pub epochs: u64,
    /// Longer gradients are shortened to this norm, default 1; `inf` is never.
    pub max_grad_norm: f64,
    /// Of everything random, default 1.
    pub seed: u64,
    /// Whether a GPU must compute the same bits every time, default false; a CPU does so in any case.
    pub deterministic: bool,
}

/// `[optimizer]`: AdamW.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerRecipe {
    /// At its peak, default 2e-4.
    pub learning_rate: f64,
    /// Decoupled, default 0.01.
    pub weight_decay: f64,
    /// Default 0.9 and 0.999.
    pub betas: (f64, f64),
    /// Default 1e-8.
    pub eps: f64,
    /// After the warm-up, default `cosine`.
    pub schedule: Schedule,
    /// Default: the first 5% of the steps.
    pub warmup: Warmup,
}

words! {
    /// The course of the learning rate after the warm-up.
    Schedule {
        /// Half a cosine down to 0.
        Cosine = "cosine",
        /// A line down to 0.
        Linear = "linear",
        /// None.
        Constant = "constant",
    }
}

/// How long the learning rate rises from 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Warmup {
    /// So many steps.
    Steps(u64),
    /// A part of all steps.
    Ratio(f64),
}

/// `[eval]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvalRecipe {
    /// Steps from one validation to the next, default 100.
    pub interval: u64,
    /// Whether to validate before the first step, default false.
    pub initial: bool,
    /// By which the best checkpoint is chosen, default `loss`.
    pub metric: Metric,
    /// Default: as the metric has it.
    pub mode: Mode,
    /// Default: that of training.
    pub micro_batch_size: Option<usize>,
    /// Default: all.
    pub max_batches: Option<usize>,
}

words! {
    /// A figure of validation.
    Metric {
        /// Mean over targets.
        Loss = "loss",
        /// Of classification.
        Accuracy = "accuracy",
    }
}

words! {
    /// Which of two figures is the better.
    Mode {
        /// The smaller.
        Min = "min",
        /// The larger.
        Max = "max",
    }
}

/// `[checkpoint]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointRecipe {
    /// Steps from one checkpoint that stays to the next, default 50.
    pub save_interval: u64,
    /// Steps from one intermediate save to the next.
    pub intermediate_save_interval: Option<u64>,
    /// How many intermediate saves stay, default 2.
    pub intermediate_save_keep: usize,
}

/// `[log]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecipe {
    /// Steps from one line to the next, default 1.
    pub interval: u64,
}
