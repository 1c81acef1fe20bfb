//! What a recipe says of the run: its lengths, the optimiser, validation, saving and logging.

use std::path::PathBuf;

use super::table::{either, table};
use super::value::{COUNT, KeyRule, PART, not_negative, positive};
use super::words::words;

/// A norm that no gradient is longer than is infinite.
const NORM: KeyRule = KeyRule {
    takes: "number > 0, or `inf`",
    expected: "more than 0",
    hint: "to clip nothing, write `inf`",
    is_fine: |norm| norm > 0.0,
};

table! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct TrainRecipe in "train" {
        /// How many sequences or tokens run together.
        pub batch_size: BatchSize = BatchSize::Sequences(1),
        /// Micro-batches of a step over all ranks together (in Transformers: per rank). The ranks must be able to share them evenly.
        #[also(
            "train.accumulation", "train.accumulation_steps", "train.gradient_accumulation", "train.grad_accumulation_steps",
            "gradient_accumulation_steps",
        )]
        #[rule(COUNT)]
        pub gradient_accumulation_steps: usize = 1,
        /// Largest number of optimiser steps, if it is less than `epochs` gives.
        #[also("max_steps")]
        #[rule(COUNT)]
        pub max_steps: Option<u64> = None,
        /// Passes over the training samples. `0.5` is half of the steps of one, rounded up.
        #[also("train.num_epochs", "train.num_train_epochs", "epochs", "num_epochs", "num_train_epochs")]
        #[rule(positive("write how often the samples are passed over, as 3 or 0.5"))]
        pub epochs: f64 = 1.0,
        /// The gradient is clipped to this norm. `inf` clips nothing.
        #[also(
            "train.clip_grad_norm", "train.max_norm", "optimizer.max_grad_norm", "optimizer.clip_grad_norm", "max_grad_norm",
            "clip_grad_norm",
        )]
        #[rule(NORM)]
        pub max_grad_norm: f64 = 1.0,
        /// `tokens`: the loss of a step is the mean over all its targets. `sequences`: it is the mean over its sequences, each by the mean of its
        /// own targets. The validation loss is always the mean over targets.
        #[also("train.average_loss_per_batch", "average_loss_per_batch")]
        pub loss_mean: LossMean = LossMean::Tokens,
        /// Weight of the load-balance loss of the routers, which is computed for each micro-batch and averaged over a step. 0 adds none,
        /// whatever the model's `config.json` says.
        #[also("train.router_aux_loss", "train.aux_loss_coef", "router_aux_loss_coef", "aux_loss_coef", "moe_aux_loss_coeff")]
        #[rule(not_negative("usual values are 0.001 to 0.02; 0 adds nothing"))]
        pub router_aux_loss_coef: f64 = 0.0,
        /// Seed of everything that is random.
        #[also("seed", "random_seed", "train.random_seed", "data.seed")]
        pub seed: u64 = 1,
        /// Runs on a GPU repeat bit for bit. Runs on a CPU always do.
        #[also("train.full_determinism", "deterministic", "full_determinism")]
        pub deterministic: bool = false,
        /// What is kept in host memory instead of on the GPU; on a CPU all is there already. `weights` excludes `grad.cuda_graphs`, and keeps
        /// no graphs (`grad.keep_graph`), on a CPU too.
        #[also("train.cpu_offload", "train.offloading", "train.offload_optimizer", "offload")]
        pub offload: Offload = Offload::None,
        /// What happens if the loss, gradient or update of a step is not finite, or its loss is above `max_loss`: `stop` the run, `skip` the
        /// step, or `rollback` to the last checkpoint and skip it from there. `skip` ends the run at a non-finite update.
        #[also("train.nan_policy", "train.on_nan", "on_non_finite")]
        pub on_non_finite: OnNonFinite = OnNonFinite::Stop,
        /// Largest number of steps in a row that `on_non_finite` may skip; one more ends the run.
        #[rule(COUNT)]
        pub max_skipped_steps: usize = 5,
        /// A loss above this counts as not finite.
        #[also("train.loss_watchdog_threshold", "loss_watchdog_threshold")]
        #[rule(positive("a model that knows nothing has the logarithm of its vocabulary's size, 10 to 12"))]
        #[default("none")]
        pub max_loss: Option<f64> = None,
        /// What is trained. `all` excludes `[lora]` and `model.adapter`.
        #[default("by the command")]
        pub weights: TrainedWeights = TrainedWeights::Adapter,
    }
}

either! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum BatchSize {
        /// Sequences that run together. Excludes `max_tokens_per_batch`.
        #[also(
            "train.batch_size", "train.per_device_train_batch_size", "micro_batch_size", "batch_size",
            "per_device_train_batch_size",
        )]
        #[rule(COUNT)]
        Sequences(usize) in "micro_batch_size",
        /// Largest number of tokens that run together, so that a batch holds few long or many short sequences. A longer sequence runs alone.
        #[also("train.tokens_per_batch", "train.batch_tokens", "max_tokens_per_batch", "tokens_per_batch")]
        #[rule(COUNT)]
        Tokens(usize) in "max_tokens_per_batch",
    }
}

impl BatchSize {
    /// Sequences, where they are counted; else 1, which no number of tokens forbids.
    pub fn sequences(self) -> usize {
        if let Self::Sequences(count) = self { count } else { 1 }
    }
}

words! {
    pub enum LossMean {
        Tokens = "tokens" | "true",
        Sequences = "sequences" | "false",
    }
}

words! {
    pub enum OnNonFinite {
        Stop = "stop",
        /// The step is counted and changes nothing.
        Skip = "skip",
        Rollback = "rollback",
    }
}

words! {
    pub enum TrainedWeights {
        Adapter = "adapter",
        All = "all",
    }
}

words! {
    pub enum Offload {
        None = "none" | "false",
        /// The optimiser's state, which passes through the GPU tensor by tensor in the update.
        Optimizer = "optimizer" | "true",
        /// The weights of all layers but those of two layer bands at a time, and the optimiser's state; where all weights are trained the
        /// layers' gradients, too.
        Weights = "weights",
    }
}

table! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct OptimizerRecipe in "optimizer" {
        /// The optimiser, as in `torch.optim`; `adamw_8bit` keeps its moments in 8 bits.
        #[also("optimizer.kind", "optimizer.type", "optimizer.optimizer", "train.optimizer", "train.optim", "optim")]
        pub name: OptimizerName = OptimizerName::AdamW,
        /// Peak of the learning rate.
        #[also("optimizer.lr", "train.learning_rate", "train.lr", "learning_rate", "lr")]
        #[rule(positive("usual values for LoRA are 5e-5 to 5e-4, for all weights a tenth of that"))]
        pub learning_rate: f64 = 2e-4,
        /// Learning rate of an adapter's B matrices, relative to that of A (LoRA+, Hayou et al. 2024, arXiv 2402.12354).
        #[also("lora.loraplus_lr_ratio", "train.loraplus_lr_ratio", "loraplus_lr_ratio")]
        #[rule(positive("usual values are 1 to 16"))]
        pub loraplus_lr_ratio: f64 = 1.0,
        /// Weight decay: decoupled with `adamw` and `adamw_8bit`, else added to the gradient.
        #[also("train.weight_decay", "weight_decay")]
        #[rule(not_negative("to have none, write 0"))]
        #[default("0.01 for `adamw` and `adamw_8bit`, else 0")]
        pub weight_decay: Option<f64> = None,
        /// Decay of the two moments, for `adamw`, `adamw_8bit`, `adam` and `adamax`.
        #[also("optimizer.adam_betas")]
        #[rule(PART)]
        pub betas: (f64, f64) = (0.9, 0.999),
        /// Added to the denominator; `sgd` has none.
        #[also("optimizer.adam_epsilon", "adam_epsilon")]
        #[rule(positive("the usual value is 1e-8"))]
        #[default("1e-6 for `adadelta`, else 1e-8")]
        pub eps: Option<f64> = None,
        /// Momentum, for `sgd` and `rmsprop`.
        #[rule(PART)]
        pub momentum: f64 = 0.0,
        /// Dampening of the momentum, for `sgd`.
        #[rule(PART)]
        pub dampening: f64 = 0.0,
        /// Nesterov momentum, for `sgd`.
        pub nesterov: bool = false,
        /// Decay of the mean square of gradients: `alpha` of `rmsprop`, `rho` of `adadelta` in `torch.optim`.
        #[also(
            "optimizer.alpha", "optimizer.rho", "optimizer.rmsprop_alpha", "optimizer.rmspprop_alpha", "optimizer.adadelta_rho",
        )]
        #[rule(PART)]
        #[default("0.99 for `rmsprop`, 0.9 for `adadelta`")]
        pub smoothing: Option<f64> = None,
        /// Course of the learning rate after the warm-up. `cosine` and `linear` end at `min_lr_ratio` of the peak.
        #[also(
            "optimizer.scheduler", "optimizer.lr_scheduler", "optimizer.lr_scheduler_type", "scheduler.name", "lr_scheduler",
            "lr_scheduler_type",
        )]
        pub schedule: LearningRateSchedule = LearningRateSchedule::Cosine,
        /// The learning rate at the end of a `cosine` or `linear` schedule, as a part of the peak.
        #[also("optimizer.min_lr_rate", "optimizer.min_lr_factor", "train.min_lr_ratio", "min_lr_ratio", "cosine_min_lr_ratio")]
        #[rule(PART)]
        pub min_lr_ratio: f64 = 0.0,
        /// How long the learning rate rises from 0.
        pub warmup: Warmup = Warmup::Ratio(0.05),
    }
}

impl OptimizerRecipe {
    /// The factor of the weights in their decay.
    pub fn decay(&self) -> f64 {
        self.weight_decay.unwrap_or(if self.decays_apart() { 0.01 } else { 0.0 })
    }

    /// Whether weights decay by themselves, and not through the gradient.
    pub fn decays_apart(&self) -> bool {
        matches!(self.name, OptimizerName::AdamW | OptimizerName::AdamW8bit)
    }

    pub fn epsilon(&self) -> f64 {
        self.eps.unwrap_or(if self.name == OptimizerName::Adadelta { 1e-6 } else { 1e-8 })
    }

    pub fn mean_square_decay(&self) -> f64 {
        self.smoothing.unwrap_or(if self.name == OptimizerName::Adadelta { 0.9 } else { 0.99 })
    }
}

words! {
    pub enum OptimizerName {
        /// Adam with decoupled weight decay (Loshchilov & Hutter 2019).
        AdamW = "adamw" | "AdamW" | "adamw_torch" | "adamw_torch_fused" | "adamw_hf" | "paged_adamw" | "paged_adamw_32bit",
        /// `AdamW` whose moments take 8 bits a number (Dettmers et al. 2022).
        AdamW8bit = "adamw_8bit" | "adamw_bnb_8bit" | "adamw_torch_8bit" | "paged_adamw_8bit",
        /// Adam (Kingma & Ba 2015).
        Adam = "adam" | "Adam",
        /// Stochastic gradient descent, with momentum or without.
        Sgd = "sgd" | "SGD",
        /// `RMSprop` (Hinton 2012, lecture 6e).
        RmsProp = "rmsprop" | "RMSprop",
        /// Adadelta (Zeiler 2012, arXiv 1212.5701).
        Adadelta = "adadelta" | "Adadelta",
        /// Adam with the largest gradient in place of the mean square (Kingma & Ba 2015).
        Adamax = "adamax" | "Adamax",
    }
}

words! {
    pub enum LearningRateSchedule {
        Cosine = "cosine",
        Linear = "linear",
        Constant = "constant" | "constant_with_warmup",
    }
}

either! {
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Warmup {
        /// Steps of linear warm-up; a run of fewer ends at the peak. Excludes `warmup_ratio`.
        #[also(
            "optimizer.num_warmup_steps", "optimizer.lr_warmup_steps", "scheduler.warmup_steps", "scheduler.num_warmup_steps",
            "train.warmup_steps", "train.lr_warmup_steps", "warmup_steps", "lr_warmup_steps",
        )]
        Steps(u64) in "warmup_steps",
        /// Warm-up as a part of all steps.
        #[also(
            "optimizer.warmup_fraction", "optimizer.lr_warmup_fraction", "scheduler.warmup_ratio", "train.warmup_ratio",
            "train.lr_warmup_fraction", "warmup_ratio", "lr_warmup_fraction",
        )]
        #[rule(PART)]
        Ratio(f64) in "warmup_ratio",
    }
}

table! {
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct CheckpointRecipe in "checkpoint" {
        /// Steps from one permanent checkpoint to the next.
        #[also(
            "checkpoint.save_steps", "checkpoint.interval", "checkpoint.steps", "train.save_interval", "train.save_steps",
            "save_interval", "save_steps",
        )]
        #[rule(COUNT)]
        pub save_interval: u64 = 50,
        /// Steps from one intermediate checkpoint to the next.
        #[also("checkpoint.intermediate_interval", "checkpoint.intermed_save_interval", "train.intermed_save_interval")]
        #[rule(COUNT)]
        pub intermediate_save_interval: Option<u64> = None,
        /// Intermediate checkpoints that are kept.
        #[also("checkpoint.intermediate_keep", "checkpoint.intermed_save_num", "train.intermed_save_num")]
        #[rule(COUNT)]
        pub intermediate_save_keep: usize = 2,
        /// What SIGTERM does to the step or validation under way. Ctrl-C lets it end in any case.
        pub on_sigterm: OnSigterm = OnSigterm::AbandonStep,
    }
}

words! {
    /// What SIGTERM does to what is under way; then the run is saved, and ends.
    pub enum OnSigterm {
        /// It is given up at the next column or cell.
        AbandonStep = "abandon_step",
        FinishStep = "finish_step",
    }
}

table! {
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct LogRecipe in "log" {
        /// Steps from one log line to the next.
        #[also(
            "log.steps", "log.logging_steps", "log.log_every_n_steps", "train.log_interval", "log_interval", "logging_steps",
            "log_every_n_steps",
        )]
        #[rule(COUNT)]
        pub interval: u64 = 1,
    }
}

table! {
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct ReportRecipe in "report" {
        /// A command of the shell (`sh -c`) that runs beside the training and gets each line of `metrics.jsonl` on its standard input. Where it
        /// fails or does not read, it gets no more, and the run goes on.
        #[default("none")]
        pub command: Option<String> = None,
    }
}

table! {
    /// What stands at the top of the file, before the first table.
    pub(super) struct TopOfFile in "" {
        /// Directory of the run. `--out` on the command line wins.
        #[also("out_dir", "train.output_dir", "training.output_dir")]
        #[default("`runs/NAME-DATE`")]
        pub(super) output_dir: Option<PathBuf> = None,
    }
}
