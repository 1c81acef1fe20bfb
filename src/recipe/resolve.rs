//! From the schema to the recipe: defaults, and what contradicts itself or cannot be.

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use super::alias::DEFAULT_POLICY;
use super::cache_length::{CacheLength, Pyramid};
use super::choice::PolicyRecipe;
use super::diagnose::{RecipeError, listed};
use super::kv_cache::{BufferKind, CacheRecipe, Chunking, Storage};
use super::overrides::settle;
use super::plan::{
    BatchOrder, CheckpointRecipe, DataFormat, DataRecipe, Dtype, EvalRecipe, HeadRecipe, Labels, LogRecipe, LoraRecipe, Metric,
    Mode, ModelRecipe, OnTooLong, OptimizerRecipe, Recipe, Schedule, TargetModules, TrainRecipe, ValidationSource, Warmup,
    Weights,
};
use super::read::read;
use super::schema::{self, HeadKind, Schema};
use super::tree::Document;

pub(super) type Checked<T> = Result<T, RecipeError>;

/// Checks a document whose spellings are kvtune's own.
pub(super) fn resolve(document: &mut Document, weights: Option<Weights>) -> Checked<Recipe> {
    settle(document, "data.validation", "data.validation_fraction", "the validation examples come from one of them")?;
    settle(document, "head.label_tokens", "head.labels", "they are two ways to name the same classes")?;
    settle(document, "optimizer.warmup_steps", "optimizer.warmup_ratio", "they are two ways to say how long the warm-up is")?;
    refuse_f16(document)?;
    let schema: Schema = read(&document.root, "", &document.source)?;
    let at = Resolver { document, folder: folder_of(&document.source.path) };
    let data = at.data(schema.data)?;
    let head = at.head(schema.head, &data)?;
    Ok(Recipe {
        model: at.model(schema.model)?,
        lora: at.trained(schema.train.weights, weights, schema.lora)?,
        kv_cache: at.kv_cache(&schema.kv_cache)?,
        grad: at.grad(schema.grad, schema.kv_cache.buffer, &head)?,
        train: at.train(&schema.train)?,
        optimizer: at.optimizer(&schema.optimizer)?,
        eval: at.eval(&schema.eval, &head)?,
        checkpoint: at.checkpoint(&schema.checkpoint)?,
        log: LogRecipe { interval: at.count("log.interval", schema.log.interval.unwrap_or(1))? },
        output_dir: schema.output_dir.map(|path| at.path("output_dir", &path)).transpose()?,
        data,
        head,
    })
}

fn refuse_f16(document: &Document) -> Checked<()> {
    let Some(dtype) = document.root.entry("model.dtype").and_then(|entry| entry.node.as_str()) else { return Ok(()) };
    if ["f16", "float16", "fp16", "half", "16-true", "16-mixed"].contains(&dtype) {
        let message = format!("`model.dtype = \"{dtype}\"` cannot be trained in: gradients fall below its smallest number");
        return Err(document.reject("model.dtype", message, "use `bf16` or `f32`; weights stored in f16 load as either"));
    }
    Ok(())
}

/// The recipe's folder, without symbolic links where it exists.
fn folder_of(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    folder.canonicalize().or_else(|_| std::path::absolute(folder)).unwrap_or_else(|_| folder.to_owned())
}

/// The way out of a wrong list of classes.
const DISTINCT: &str = "list two classes or more, and give each a token of its own";

/// The checks, with the document that their errors point into.
pub(super) struct Resolver<'a> {
    document: &'a Document,
    folder: PathBuf,
}

impl Resolver<'_> {
    pub(super) fn refuse<T>(&self, key: &str, message: String, hint: &str) -> Checked<T> {
        Err(self.document.reject(key, message, hint))
    }

    /// Passes `value` on if `is_fine`.
    pub(super) fn check<T: Debug>(&self, key: &str, value: T, is_fine: bool, expected: &str, hint: &str) -> Checked<T> {
        if is_fine {
            return Ok(value);
        }
        self.refuse(key, format!("`{key}` must be {expected}, found {value:?}"), hint)
    }

    /// A number of things of which there is at least one.
    pub(super) fn count<T: Debug + Copy + PartialOrd + From<u8>>(&self, key: &str, value: T) -> Checked<T> {
        self.check(key, value, value >= T::from(1), "at least 1", "write 1 or more; to have the default, leave the key out")
    }

    pub(super) fn optional_count<T: Debug + Copy + PartialOrd + From<u8>>(
        &self,
        key: &str,
        value: Option<T>,
    ) -> Checked<Option<T>> {
        value.map(|value| self.count(key, value)).transpose()
    }

    /// Resolver least 0 and less than 1.
    fn part(&self, key: &str, value: f64) -> Checked<f64> {
        self.check(
            key,
            value,
            (0.0..1.0).contains(&value),
            "at least 0 and less than 1",
            "write a part of the whole, as 0.1 for 10%",
        )
    }

    fn positive(&self, key: &str, value: f64, hint: &str) -> Checked<f64> {
        self.check(key, value, value > 0.0 && value.is_finite(), "more than 0, and finite", hint)
    }

    /// Relative paths begin at the recipe's folder.
    pub(super) fn path(&self, key: &str, written: &str) -> Checked<PathBuf> {
        let path = self.check(key, written, !written.is_empty(), "a path", "write a path, relative to the recipe's folder")?;
        let mut folder = self.folder.as_path();
        let mut rest = Path::new(path);
        // The folder has no symbolic links, so that its own name and `..` cancel out.
        while let Ok(shorter) = rest.strip_prefix("..") {
            (folder, rest) = (folder.parent().unwrap_or(folder), shorter);
        }
        let path = folder.join(rest);
        if path.to_str().is_none() {
            return self.refuse(key, format!("`{key}` leads to a path that is not UTF-8"), "move the recipe into another folder");
        }
        Ok(path)
    }

    fn needed<T>(&self, key: &str, value: Option<T>, what: &str) -> Checked<T> {
        match value {
            Some(value) => Ok(value),
            None => self.refuse(key, format!("`{key}` is missing: {what}"), &format!("add `{key}`, or give `--set {key}=…`")),
        }
    }

    fn model(&self, schema: schema::ModelTable) -> Checked<ModelRecipe> {
        let path = self.needed("model.path", schema.path, "the directory of the model")?;
        Ok(ModelRecipe {
            path: self.path("model.path", &path)?,
            adapter: schema.adapter.map(|path| self.path("model.adapter", &path)).transpose()?,
            dtype: schema.dtype.unwrap_or(Dtype::F32),
            allow_tf32: schema.allow_tf32.unwrap_or(false),
        })
    }

    /// The adapter, if one is trained: as the recipe has it `written`, or as the verb has `asked`.
    fn trained(&self, written: Option<Weights>, asked: Option<Weights>, lora: schema::LoraTable) -> Checked<Option<LoraRecipe>> {
        let key = "train.weights";
        if let (Some(written), Some(asked)) = (written, asked)
            && written != asked
        {
            let message = format!("`{key} = \"{written}\"` contradicts the command, which trains `{asked}`");
            return self.refuse(key, message, "remove the key, or use the other of `finetune-lora` and `finetune-full`; `check` and `verify` say it with `--full`");
        }
        if written.or(asked).unwrap_or(Weights::Adapter) == Weights::Adapter {
            return self.lora(lora).map(Some);
        }
        for (key, shown) in [("lora", "`[lora]`"), ("model.adapter", "`model.adapter`")] {
            if self.document.root.entry(key).is_some() {
                let message = format!("{shown} says nothing where all weights are trained: there is no adapter");
                return self.refuse(key, message, "remove it, or train the adapter with `kvtune finetune-lora`");
            }
        }
        Ok(None)
    }

    fn lora(&self, schema: schema::LoraTable) -> Checked<LoraRecipe> {
        let target_modules = schema.target_modules.unwrap_or(TargetModules::AllLinear);
        if let TargetModules::Names(names) = &target_modules {
            let hint = "write `\"all-linear\"`, or names as `[\"q_proj\", \"v_proj\"]`";
            self.distinct("lora.target_modules", names, 1, hint)?;
        }
        Ok(LoraRecipe {
            r: self.count("lora.r", schema.r.unwrap_or(8))?,
            alpha: self.positive("lora.alpha", schema.alpha.unwrap_or(16.0), "usual values are `r` to twice `r`")?,
            dropout: self.part("lora.dropout", schema.dropout.unwrap_or(0.0))?,
            target_modules,
        })
    }

    /// Resolver least so many, and none twice.
    fn distinct<T: Debug + PartialEq>(&self, key: &str, items: &[T], at_least: usize, hint: &str) -> Checked<()> {
        if items.len() < at_least {
            return self.refuse(key, format!("`{key}` must list at least {at_least}, found {}", items.len()), hint);
        }
        match items.iter().enumerate().find(|(i, item)| items[..*i].contains(item)) {
            Some((_, item)) => self.refuse(key, format!("`{key}` lists {item:?} twice"), hint),
            None => Ok(()),
        }
    }

    fn data(&self, schema: schema::DataTable) -> Checked<DataRecipe> {
        let all = listed(DataFormat::ALL.iter().map(|format| format.name()));
        let format = self.needed("data.format", schema.format, &format!("it is {all}"))?;
        let train = self.needed("data.train", schema.train, "the file of training examples")?;
        let train_on_prompt = schema.train_on_prompt.unwrap_or(false);
        if train_on_prompt && format == DataFormat::Tokens {
            let message = "`data.train_on_prompt` says nothing where `data.format` is `tokens`: the sequences bring their labels"
                .to_owned();
            return self.refuse("data.train_on_prompt", message, "leave it out, and label the tokens in the file");
        }
        let validation = match schema.validation {
            Some(path) => ValidationSource::File(self.path("data.validation", &path)?),
            None => ValidationSource::Fraction(self.part("data.validation_fraction", schema.validation_fraction.unwrap_or(0.1))?),
        };
        Ok(DataRecipe {
            format,
            train: self.path("data.train", &train)?,
            validation,
            max_seq_length: self.optional_length(schema.max_seq_length)?,
            on_too_long: schema.on_too_long.unwrap_or(OnTooLong::Error),
            order: schema.order.unwrap_or(BatchOrder::Shuffled),
            train_on_prompt,
        })
    }

    fn optional_length(&self, length: Option<usize>) -> Checked<Option<usize>> {
        let key = "data.max_seq_length";
        let hint = "write 2 or more tokens; to allow as many as the model has positions, leave the key out";
        length.map(|length| self.check(key, length, length >= 2, "at least 2", hint)).transpose()
    }

    fn head(&self, schema: schema::HeadTable, data: &DataRecipe) -> Checked<HeadRecipe> {
        let hint = "write `labels = [\"A\", \"B\", \"C\", \"D\"]`, or `label_tokens = […]`";
        match (schema.kind.unwrap_or(HeadKind::NextToken), schema.label_tokens, schema.labels) {
            (HeadKind::NextToken, None, None) => Ok(HeadRecipe::NextToken),
            (HeadKind::NextToken, tokens, _) => {
                let key = if tokens.is_some() { "head.label_tokens" } else { "head.labels" };
                let message = format!("`{key}` says nothing where `head.kind` is `next_token`");
                self.refuse(key, message, "remove it, or write `kind = \"seq_classification_on_logits\"`")
            }
            (HeadKind::SeqClassificationOnLogits, ..) if data.train_on_prompt => {
                let message = "`data.train_on_prompt` contradicts `head.kind = \"seq_classification_on_logits\"`".to_owned();
                self.refuse("data.train_on_prompt", message, "remove it: the only target is the class at the last token")
            }
            (HeadKind::SeqClassificationOnLogits, Some(tokens), _) => {
                self.distinct("head.label_tokens", &tokens, 2, DISTINCT)?;
                Ok(HeadRecipe::SeqClassificationOnLogits(Labels::Tokens(tokens)))
            }
            (HeadKind::SeqClassificationOnLogits, None, Some(texts)) => {
                self.distinct("head.labels", &texts, 2, DISTINCT)?;
                Ok(HeadRecipe::SeqClassificationOnLogits(Labels::Texts(texts)))
            }
            (HeadKind::SeqClassificationOnLogits, None, None) => {
                self.refuse("head.kind", "`head.kind = \"seq_classification_on_logits\"` needs classes".to_owned(), hint)
            }
        }
    }

    fn kv_cache(&self, schema: &schema::KvCacheTable) -> Checked<CacheRecipe> {
        let policy = PolicyRecipe::read(self.document, "kv_cache.policy", DEFAULT_POLICY)?;
        let cache_length = schema.cache_length.clone().unwrap_or(CacheLength::Uniform(16384));
        let key = "kv_cache.cache_length";
        match &cache_length {
            CacheLength::Uniform(slots) => drop(self.count(key, *slots)?),
            CacheLength::PerLayer(slots) if slots.is_empty() || slots.contains(&0) => {
                let hint = "write one number for all layers, or one per layer";
                return self.refuse(key, format!("`{key}` must be at least 1 in every layer, found {slots:?}"), hint);
            }
            CacheLength::Pyramid(pyramid) => self.pyramid(*pyramid)?,
            CacheLength::PerLayer(_) => {}
        }
        let storage = schema.storage.unwrap_or(Storage::Preallocated);
        if storage != Storage::Preallocated && policy.name != "dense" {
            let message = format!(
                "`kv_cache.storage = \"{storage}\"` contradicts the policy `{}`, which has a fixed number of slots",
                policy.name
            );
            return self.refuse("kv_cache.storage", message, "write `storage = \"preallocated\"`, or `policy = \"dense\"`");
        }
        Ok(CacheRecipe {
            policy,
            buffer: schema.buffer.unwrap_or(BufferKind::Plain),
            cache_length,
            chunk_size: self.count("kv_cache.chunk_size", schema.chunk_size.unwrap_or(1024))?,
            chunking: schema.chunking.unwrap_or(Chunking::Plain),
            randomize_chunk_sizes: schema.randomize_chunk_sizes.unwrap_or(false),
            storage,
            cpu_offload: schema.cpu_offload.unwrap_or(false),
        })
    }

    fn pyramid(&self, Pyramid { mean, top }: Pyramid) -> Checked<()> {
        let key = "kv_cache.cache_length.pyramid.top";
        self.count("kv_cache.cache_length.pyramid.mean", mean)?;
        self.count(key, top)?;
        if top > mean {
            let message = format!("`{key}` must be at most the mean, {mean}, found {top}");
            return self.refuse(
                key,
                message,
                "a pyramid grows narrower towards the top: write less, or list one length per layer",
            );
        }
        Ok(())
    }

    fn train(&self, schema: &schema::TrainTable) -> Checked<TrainRecipe> {
        let norm = schema.max_grad_norm.unwrap_or(1.0);
        let accumulation = schema.gradient_accumulation_steps.unwrap_or(1);
        Ok(TrainRecipe {
            micro_batch_size: self.count("train.micro_batch_size", schema.micro_batch_size.unwrap_or(1))?,
            gradient_accumulation_steps: self.count("train.gradient_accumulation_steps", accumulation)?,
            max_steps: self.optional_count("train.max_steps", schema.max_steps)?,
            epochs: self.count("train.epochs", schema.epochs.unwrap_or(1))?,
            max_grad_norm: self.check("train.max_grad_norm", norm, norm > 0.0, "more than 0", "to clip nothing, write `inf`")?,
            seed: schema.seed.unwrap_or(1),
            deterministic: schema.deterministic.unwrap_or(false),
        })
    }

    fn optimizer(&self, schema: &schema::OptimizerTable) -> Checked<OptimizerRecipe> {
        let (beta1, beta2) = schema.betas.unwrap_or((0.9, 0.999));
        let decay = schema.weight_decay.unwrap_or(0.01);
        let is_decay = decay >= 0.0 && decay.is_finite();
        let warmup = match schema.warmup_steps {
            Some(steps) => Warmup::Steps(steps),
            None => Warmup::Ratio(self.part("optimizer.warmup_ratio", schema.warmup_ratio.unwrap_or(0.05))?),
        };
        let rate = schema.learning_rate.unwrap_or(2e-4);
        Ok(OptimizerRecipe {
            learning_rate: self.positive(
                "optimizer.learning_rate",
                rate,
                "usual values for LoRA are 5e-5 to 5e-4, for all weights a tenth of that",
            )?,
            weight_decay: self.check(
                "optimizer.weight_decay",
                decay,
                is_decay,
                "0 or more, and finite",
                "to have none, write 0",
            )?,
            betas: (self.part("optimizer.betas", beta1)?, self.part("optimizer.betas", beta2)?),
            eps: self.positive("optimizer.eps", schema.eps.unwrap_or(1e-8), "the usual value is 1e-8")?,
            schedule: schema.schedule.unwrap_or(Schedule::Cosine),
            warmup,
        })
    }

    fn eval(&self, schema: &schema::EvalTable, head: &HeadRecipe) -> Checked<EvalRecipe> {
        let metric = schema.metric.unwrap_or(Metric::Loss);
        if metric == Metric::Accuracy && *head == HeadRecipe::NextToken {
            let message = "`eval.metric = \"accuracy\"` contradicts the head `next_token`, which has no classes".to_owned();
            return self.refuse(
                "eval.metric",
                message,
                "write `metric = \"loss\"`, or choose `head.kind = \"seq_classification_on_logits\"`",
            );
        }
        let natural = if metric == Metric::Loss { Mode::Min } else { Mode::Max };
        Ok(EvalRecipe {
            interval: self.count("eval.interval", schema.interval.unwrap_or(100))?,
            initial: schema.initial.unwrap_or(false),
            metric,
            mode: schema.mode.unwrap_or(natural),
            micro_batch_size: self.optional_count("eval.micro_batch_size", schema.micro_batch_size)?,
            max_batches: self.optional_count("eval.max_batches", schema.max_batches)?,
        })
    }

    fn checkpoint(&self, schema: &schema::CheckpointTable) -> Checked<CheckpointRecipe> {
        let intermediate = schema.intermediate_save_interval;
        let keep = schema.intermediate_save_keep.unwrap_or(2);
        Ok(CheckpointRecipe {
            save_interval: self.count("checkpoint.save_interval", schema.save_interval.unwrap_or(50))?,
            intermediate_save_interval: self.optional_count("checkpoint.intermediate_save_interval", intermediate)?,
            intermediate_save_keep: self.count("checkpoint.intermediate_save_keep", keep)?,
        })
    }
}
