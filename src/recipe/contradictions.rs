//! What the values of a recipe come to together: what contradicts itself, or would go unheard, is refused.

use super::chat::{Boundary, TrainOn};
use super::data::{DataRecipe, HeadRecipe, OnTooLong};
use super::diagnose::one_of;
use super::eval::BestMetric;
use super::format::{DataFormat, KNOWN_FORMATS};
use super::grad::{AttentionOutputs, StoreForm};
use super::kv_cache::{CacheRecipe, Storage};
use super::model::InitLora;
use super::plan::Recipe;
use super::refusals::Refusals;
use super::table::RecipeTable;
use super::training::{LearningRateSchedule, Offload, OptimizerName, OptimizerRecipe};
use super::tree::Document;
use crate::units::{Fault, quoted};

pub(super) fn refuse_contradictions(recipe: &Recipe, document: &Document, refusals: &mut Refusals) {
    let mut found = Contradictions { document, refusals };
    recipe.data.each().for_each(|data| found.of_data(data));
    found.of_adapter(recipe);
    found.of_teacher(recipe);
    found.of_cache(&recipe.kv_cache);
    found.of_gradient(recipe);
    found.of_waiting_weights(recipe);
    found.of_validation(recipe);
    found.of_optimizer(&recipe.optimizer);
}

struct Contradictions<'a> {
    document: &'a Document,
    refusals: &'a mut Refusals,
}

impl Contradictions<'_> {
    /// Refuses a key, unless one of the tables is in doubt.
    fn refuse(&mut self, tables: &[&str], key: &str, message: impl Into<String>, hint: &str) {
        self.refusals.weigh(tables, self.document.refuse::<()>(key, message.into(), hint));
    }

    fn of_data(&mut self, data: &DataRecipe) {
        // The rows tell what a format that is not written contradicts.
        if let Some((key, error)) = data.known_format().and_then(|format| data.contradiction(format)) {
            self.refuse(&["data"], &key, error.to_string(), &error.hint().unwrap_or_default());
        } else if let Some(train_on) = data.chat.train_on.filter(|&train_on| data.train_on_prompt && train_on != TrainOn::All) {
            let message = format!("`data.train_on_prompt = true` contradicts `data.train_on = \"{train_on}\"`");
            self.refuse(&["data"], "data.train_on_prompt", message, "leave it out");
        }
        let (overlap, key) = (data.split_overlap, "data.split_overlap");
        if data.on_too_long != OnTooLong::Split {
            if overlap > 0 {
                let message = format!("`{key}` is set, and `data.on_too_long` is `{}`: there are no windows", data.on_too_long);
                self.refuse(&["data"], key, message, "leave it out, or write `on_too_long = \"split\"`");
            }
        } else if !data.chat.train_on_end_of_turn {
            let key = "data.train_on_end_of_turn";
            let message = format!(
                "`{key} = false` contradicts `data.on_too_long = \"split\"`: in windows all of a text is trained, its end too"
            );
            self.refuse(&["data"], key, message, "leave it out, or write `on_too_long = \"drop\"`");
        } else if let Some(length) = data.max_seq_length.filter(|&length| overlap.saturating_add(2) > length) {
            let message = format!("windows of `data.max_seq_length = {length}` cannot share {overlap} tokens: none would go on");
            self.refuse(&["data"], key, message, "share at most 2 tokens fewer than a window has");
        }
    }

    /// Refuses what is said of an adapter's beginning or of its matrices, and would go unheard.
    fn of_adapter(&mut self, recipe: &Recipe) {
        let tables = ["model", "lora", "train", "optimizer"];
        let is_begun = |init| init != InitLora::Uniform;
        if recipe.model.adapter.is_some() && recipe.lora.as_ref().is_some_and(|lora| is_begun(lora.init_lora_weights)) {
            let message = "`lora.init_lora_weights` has no effect on `model.adapter`, which is not new";
            self.refuse(&tables, "lora.init_lora_weights", message, "leave it out, or begin without an adapter");
        }
        if recipe.lora.is_none() && (recipe.optimizer.loraplus_lr_ratio - 1.0).abs() > 0.0 {
            let message = "`optimizer.loraplus_lr_ratio` is set, and without an adapter there are no matrices B";
            self.refuse(&tables, "optimizer.loraplus_lr_ratio", message, "leave it out");
        }
    }

    fn of_teacher(&mut self, recipe: &Recipe) {
        let (key, tables) = ("head.distill", ["head", "lora", "train"]);
        if recipe.distill.is_some() && recipe.head != HeadRecipe::NextToken {
            let message = format!("`{key}` contradicts the head, which predicts no tokens");
            self.refuse(&tables, key, message, "remove it, or write `head.kind = \"next_token\"`");
        } else if recipe.distill.is_some() && recipe.lora.is_none() {
            let message = format!("`{key}` is set, and without an adapter there is no model that stays as it was");
            self.refuse(&tables, key, message, "leave it out, or train an adapter with `kvtune finetune-lora`");
        }
    }

    fn of_cache(&mut self, kv: &CacheRecipe) {
        let (storage, policy) = (kv.storage, &kv.policy.name);
        if storage != Storage::Preallocated && !kv.policy.is_dense() {
            let message = format!(
                "`kv_cache.storage = \"{storage}\"` contradicts the policy `{policy}`, which has a fixed number of slots"
            );
            let hint = "write `storage = \"preallocated\"`, or `policy = \"dense\"`";
            self.refuse(&["kv_cache"], "kv_cache.storage", message, hint);
        }
        // A block is a chunk.
        let (decode_block, chunk_size) = (kv.decode_block, kv.wanted_chunk_size());
        if decode_block > chunk_size {
            let message =
                format!("`kv_cache.decode_block` is {decode_block}, more than `kv_cache.chunk_size`, which is {chunk_size}");
            let hint = "lower `kv_cache.decode_block`, or raise `kv_cache.chunk_size`";
            self.refuse(&["kv_cache"], "kv_cache.decode_block", message, hint);
        }
        if kv.r#static && storage != Storage::Preallocated {
            let message =
                format!("`kv_cache.static` contradicts `kv_cache.storage = \"{storage}\"`: a cache that grows has no fixed size");
            let hint = "name a length with `kv_cache.cache_length`, and write `storage = \"preallocated\"`";
            self.refuse(&["kv_cache"], "kv_cache.static", message, hint);
        }
    }

    fn of_gradient(&mut self, recipe: &Recipe) {
        let (grad, buffer) = (&recipe.grad, recipe.kv_cache.buffer);
        if grad.single_tokens_for_targets && recipe.head != HeadRecipe::NextToken {
            let key = "grad.single_tokens_for_targets";
            let message = format!("`{key}` contradicts the head, which has one target per sequence, and no token behind it");
            self.refuse(&["grad", "head"], key, message, "remove it, or write `head.kind = \"next_token\"`");
        }
        // The undo log of a quantised cache holds the cache's own few bits, to the bit. An open form is no contradiction: there is one
        // left to choose.
        let form = grad.undo_log.form;
        if form != StoreForm::Plain && !buffer.undo_log_may_round() {
            let message = format!(
                "`grad.undo_log = \"{form}\"` contradicts `kv_cache.buffer = \"{buffer}\"`: what is overwritten is kept in the few \
                 bits that the cache has for it"
            );
            let hint = "remove it, or write `undo_log = \"plain\"`: it is small already, and stays exact";
            self.refuse(&["grad", "kv_cache"], "grad.undo_log", message, hint);
        }
        // Attention's output belongs to the very keys that it was computed from: beside rounded ones its weights would not sum to one.
        if grad.attention_outputs != AttentionOutputs::Recompute && grad.rounds() {
            let message = "`grad.attention_outputs = \"keep\"` contradicts a store that rounds: a cell would see other keys than those \
                           that its outputs come from";
            let hint = "write `plain` for `layer_checkpoints` and `undo_log`, or leave it out";
            self.refuse(&["grad"], "grad.attention_outputs", message, hint);
        }
    }

    fn of_waiting_weights(&mut self, recipe: &Recipe) {
        if recipe.train.offload != Offload::Weights {
            return;
        }
        if recipe.grad.cuda_graphs {
            let message = "`train.offload = \"weights\"` contradicts `grad.cuda_graphs = true`: a graph is captured over weights that \
                           stay where they are";
            let hint = "write `grad.cuda_graphs = false`, or `train.offload = \"optimizer\"`";
            self.refuse(&["grad", "train"], "train.offload", message, hint);
        } else if recipe.grad.keep_graph.cells() > 0 {
            let message =
                "`train.offload = \"weights\"` contradicts `grad.keep_graph`: a graph keeps the weights that it will need";
            let hint = "leave it out: with waiting weights no graph is kept";
            self.refuse(&["grad", "train"], "grad.keep_graph", message, hint);
        }
    }

    /// Refuses figures that no validation computes.
    fn of_validation(&mut self, recipe: &Recipe) {
        let (eval, tables) = (&recipe.eval, ["eval", "head"]);
        let predicts_tokens = recipe.head == HeadRecipe::NextToken;
        if eval.generate.is_some() && !predicts_tokens {
            let message = "`eval.generate` contradicts the head, which reads a class and generates no answers";
            return self.refuse(&tables, "eval.generate", message, "remove it, or write `head.kind = \"next_token\"`");
        }
        let computes = |metric| eval.generate.as_ref().is_some_and(|generate| generate.metrics.contains(metric));
        match &eval.metric {
            BestMetric::Answers(metric) if !computes(metric) => {
                let message = format!("`eval.metric = \"{metric}\"` is not among the metrics of `eval.generate`");
                let hint = format!("write `generate = {{ metrics = [\"{metric}\"] }}` below `[eval]`");
                self.refuse(&tables, "eval.metric", message, &hint);
            }
            BestMetric::Accuracy if predicts_tokens => {
                let message = "`eval.metric = \"accuracy\"` contradicts the head `next_token`, which has no classes";
                let hint = "write `metric = \"loss\"`, or choose `head.kind = \"seq_classification_on_logits\"`";
                self.refuse(&tables, "eval.metric", message, hint);
            }
            _ => {}
        }
    }

    /// Refuses values that the optimiser has no use for: whoever sets one means another.
    fn of_optimizer(&mut self, recipe: &OptimizerRecipe) {
        use OptimizerName::{Adadelta, Adam, AdamW, AdamW8bit, Adamax, RmsProp, Sgd};
        let is_set = [
            ("optimizer.betas", recipe.betas != (0.9, 0.999), &[AdamW, AdamW8bit, Adam, Adamax][..]),
            ("optimizer.eps", recipe.eps.is_some(), &[AdamW, AdamW8bit, Adam, Adamax, RmsProp, Adadelta]),
            ("optimizer.momentum", recipe.momentum > 0.0, &[Sgd, RmsProp]),
            ("optimizer.dampening", recipe.dampening > 0.0, &[Sgd]),
            ("optimizer.nesterov", recipe.nesterov, &[Sgd]),
            ("optimizer.smoothing", recipe.smoothing.is_some(), &[RmsProp, Adadelta]),
        ];
        if let Some((key, _, owners)) = is_set.into_iter().find(|(_, is_set, owners)| *is_set && !owners.contains(&recipe.name)) {
            let owners = owners.iter().map(|owner| format!("`{}`", owner.name())).collect::<Vec<_>>().join(", ");
            let message = format!("`{key}` is set, and `{}` has no such thing: {owners} have", recipe.name.name());
            self.refuse(&["optimizer"], key, message, "leave it out, or write `optimizer.name`");
        } else if recipe.nesterov && recipe.momentum == 0.0 {
            let message = "`optimizer.nesterov = true` without `optimizer.momentum`: there is nothing to look ahead with";
            self.refuse(&["optimizer"], "optimizer.nesterov", message, "set a momentum, as 0.9");
        } else if recipe.dampening > 0.0 && (recipe.nesterov || recipe.momentum == 0.0) {
            let message = "`optimizer.dampening` needs a momentum that does not look ahead";
            let hint = "set `optimizer.momentum`, leave out `optimizer.nesterov`";
            self.refuse(&["optimizer"], "optimizer.dampening", message, hint);
        } else if recipe.min_lr_ratio > 0.0 && recipe.schedule == LearningRateSchedule::Constant {
            let message = "`optimizer.min_lr_ratio` is set, and a `constant` schedule never falls";
            self.refuse(&["optimizer"], "optimizer.min_lr_ratio", message, "leave it out, or choose `schedule = \"cosine\"`");
        }
    }
}

impl DataRecipe {
    /// The format that is written, once it is known which there are.
    pub(super) fn known_format(&self) -> Option<&'static DataFormat> {
        KNOWN_FORMATS.get()?.iter().copied().find(|format| self.format.as_deref() == Some(format.name))
    }

    /// The first key that rows of a format contradict, or that goes unheard beside them, and the error.
    pub fn contradiction(&self, format: &DataFormat) -> Option<(String, Fault)> {
        let refuse = |key: &str, message: String, hint: &str| Some((key.to_owned(), Fault::usage(message, hint)));
        let (train_on, name) = (self.chat.train_on, format.name);
        let targets = [("data.train_on_prompt", self.train_on_prompt), ("data.train_on", train_on.is_some())];
        if let Some((key, _)) = targets.into_iter().find(|(_, is_set)| *is_set && !format.has_texts) {
            let message = format!("`{key}` says nothing where `data.format` is `{name}`: the sequences bring their labels");
            return refuse(key, message, "leave it out, and label the tokens in the file");
        }
        if format.is_chat() && train_on == Some(TrainOn::Completion) {
            let message = format!("`data.train_on = \"completion\"` means what follows a prompt, and `{name}` has none");
            return refuse("data.train_on", message, "write `assistant`, `last` or `all`");
        }
        if let Some(train_on) = train_on.filter(|&train_on| !format.has_messages && train_on.is_of_messages()) {
            let message = format!("`data.train_on = \"{train_on}\"` means what an assistant says, and `{name}` has no messages");
            return refuse("data.train_on", message, "leave it out, or write `all`");
        }
        if self.chat.boundary == Boundary::Joined && !format.has_prompt {
            let message = format!("`data.boundary` says nothing where `data.format` is `{name}`: there is no prompt as text");
            return refuse("data.boundary", message, "leave it out");
        }
        if let Some(other) = self.columns.keys().find(|column| !format.fields().any(|field| field == *column)) {
            let message = format!("`data.columns` names the field `{}`, which `{name}` does not have", quoted(other));
            let (known, first) = (one_of(format.fields()), format.fields().next().unwrap_or_default());
            let hint = format!("choose {known}, with its column behind it, as in `columns = {{ {first} = \"NAME\" }}`");
            return refuse("data.columns", message, &hint);
        }
        let (written, defaults) = (self.entries(), Self::default().entries());
        let owns = |format: &DataFormat, key: &String| format.keys.contains(&key.as_str());
        let owner = |key| KNOWN_FORMATS.get()?.iter().find(|other| owns(other, key) && !owns(format, key));
        let mut set = written.iter().filter(|entry| !defaults.contains(entry));
        let (key, owner) = set.find_map(|(key, _)| Some((format!("data.{key}"), owner(key)?.name)))?;
        let message = format!("`{key}` says nothing where `data.format` is not `{owner}`");
        refuse(&key, message, &format!("leave it out, or write `format = \"{owner}\"`"))
    }
}
