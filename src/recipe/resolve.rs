//! From the document to the recipe: what is not of its type, what is missing, and what contradicts itself is refused.

use super::chat::TrainOn;
use super::check_keys::{check_keys, require};
use super::data::{ClassList, DataRecipe, HeadKind, HeadRecipe, HeadTable, Labels, LongBenchPrompt, OnTooLong};
use super::diagnose::Checked;
use super::eval::{EvalRecipe, Figure};
use super::grad::{AttentionOutputs, GradRecipe, OpenKey, StoreForm};
use super::kv_cache::{CacheRecipe, Storage};
use super::model::{InitLora, LoraRecipe, ModelRecipe};
use super::of_format::FormatContradiction;
use super::overrides::settle;
use super::plan::Recipe;
use super::read::AUTO;
use super::refusals::Refusals;
use super::table::{RecipeTable, dotted};
use super::training::{
    CheckpointRecipe, LogRecipe, Offload, OptimizerName, OptimizerRecipe, ReportRecipe, Schedule, TopOfFile, TrainRecipe, Weights,
};
use super::tree::Document;
use super::value::RecipeReader;

/// Keys that exclude each other, and why.
const EXCLUSIVE: &[(&str, &str, &str)] = &[
    ("data.validation", "data.validation_fraction", "the validation examples come from one of them"),
    ("head.label_tokens", "head.labels", "they are two ways to name the same classes"),
    ("head.num_labels", "head.labels", "the names say how many classes there are"),
    ("train.max_tokens_per_batch", "train.micro_batch_size", "they are two ways to say how much runs together"),
    ("optimizer.warmup_steps", "optimizer.warmup_ratio", "they are two ways to say how long the warm-up is"),
];

/// Checks a document whose spellings are kvtune's own. `asked` is what the command trains, if it says so. What is refused stands in
/// `refusals`, and a default in its place.
pub(super) fn resolve(document: &mut Document, asked: Option<Weights>, refusals: &mut Refusals) -> Checked<Recipe> {
    for (one, other, why) in EXCLUSIVE {
        refusals.catch(&[], settle(document, one, other, why));
    }
    if refusals.catch(&["model"], refuse_f16(document)).is_none() {
        document.root.take("model.dtype");
    }
    check_keys(document, refusals);
    require::<ModelRecipe>(document, "path", refusals);
    require::<DataRecipe>(document, "train", refusals);
    let (decided, open) = without_open_keys(document);
    let reader = RecipeReader::new(&decided);
    let data = DataRecipe::read(&reader)?;
    for data in data.each() {
        refusals.weigh(&["data"], refuse_prompt_as_target(&reader, data));
        refusals.weigh(&["data"], refuse_overlap(&reader, data));
    }
    // Each set has to have what the head asks for; what they all have in common decides what it is.
    let heads = data.each().chain([&data]).map(|data| head(&reader, HeadTable::read(&reader)?, data));
    let head = refusals.weigh(&["data", "head"], heads.collect::<Checked<Vec<_>>>()).and_then(|mut heads| heads.pop());
    let head = head.unwrap_or_else(|| {
        refusals.doubt("head");
        HeadRecipe::NextToken
    });
    let model = ModelRecipe::read(&reader)?.located(&reader);
    let mut train = TrainRecipe::read(&reader)?;
    train.weights = refusals.weigh(&["train"], weights(&reader, train.weights, asked)).unwrap_or(Weights::Adapter);
    let lora = (train.weights == Weights::Adapter).then(|| LoraRecipe::of(&reader, model.adapter.as_deref())).transpose()?;
    refusals.weigh(&["model", "lora", "train", "optimizer"], refuse_idle_adapter_keys(&reader, &model, lora.as_ref()));
    let kv_cache = CacheRecipe::read(&reader)?;
    refusals.weigh(&["kv_cache"], refuse_storage(&reader, &kv_cache));
    refusals.weigh(&["kv_cache"], refuse_long_blocks(&reader, &kv_cache));
    refusals.weigh(&["kv_cache"], refuse_static_growth(&reader, &kv_cache));
    let grad = GradRecipe { open, ..GradRecipe::read(&reader)? };
    refusals.weigh(&["grad", "head"], refuse_single_tokens(&reader, &grad, &head));
    refusals.weigh(&["grad", "kv_cache"], refuse_undo_log(&reader, &grad, &kv_cache));
    refusals.weigh(&["grad"], refuse_outputs_beside_rounding(&reader, &grad));
    refusals.weigh(&["grad", "train"], refuse_graphs_over_waiting_weights(&reader, &grad, &train));
    let eval = EvalRecipe::read(&reader)?;
    refusals.weigh(&["eval", "head"], refuse_figure(&reader, &eval, &head));
    let optimizer = OptimizerRecipe::read(&reader)?;
    refusals.weigh(&["optimizer"], refuse_idle_optimizer_keys(&reader, &optimizer));
    Ok(Recipe {
        optimizer,
        checkpoint: CheckpointRecipe::read(&reader)?,
        log: LogRecipe::read(&reader)?,
        report: ReportRecipe::read(&reader)?,
        output_dir: TopOfFile::read(&reader)?.output_dir,
        model,
        lora,
        data,
        head,
        kv_cache,
        grad,
        train,
        eval,
    })
}

/// Refuses windows that share what they cannot, or an overlap of no windows.
fn refuse_overlap(reader: &RecipeReader<'_>, data: &DataRecipe) -> Checked<()> {
    let (overlap, key) = (data.split_overlap, "data.split_overlap");
    if overlap > 0 && data.on_too_long != OnTooLong::Split {
        let message = format!("`{key}` is set, and `data.on_too_long` is `{}`: there are no windows", data.on_too_long);
        return reader.refuse(key, message, "leave it out, or write `on_too_long = \"split\"`");
    }
    if data.on_too_long == OnTooLong::Split && !data.chat.train_on_end_of_turn {
        let key = "data.train_on_end_of_turn";
        let message = format!(
            "`{key} = false` contradicts `data.on_too_long = \"split\"`: in windows all of a text is trained, its end too"
        );
        return reader.refuse(key, message, "leave it out, or write `on_too_long = \"drop\"`");
    }
    match data.max_seq_length.filter(|&length| data.on_too_long == OnTooLong::Split && overlap.saturating_add(2) > length) {
        Some(length) => {
            let message = format!("windows of `data.max_seq_length = {length}` cannot share {overlap} tokens: none would go on");
            reader.refuse(key, message, "share at most 2 tokens fewer than a window has")
        }
        None => Ok(()),
    }
}

/// Refuses what is said of an adapter's beginning or of its matrices, and would go unheard.
fn refuse_idle_adapter_keys(reader: &RecipeReader<'_>, model: &ModelRecipe, lora: Option<&LoraRecipe>) -> Checked<()> {
    if model.adapter.is_some() && lora.is_some_and(|lora| lora.init_lora_weights != InitLora::Uniform) {
        let message = "`lora.init_lora_weights` has no effect on `model.adapter`, which is not new".to_owned();
        return reader.refuse("lora.init_lora_weights", message, "leave it out, or begin without an adapter");
    }
    let ratio = OptimizerRecipe::read(reader)?.loraplus_lr_ratio;
    if lora.is_none() && (ratio - 1.0).abs() > 0.0 {
        let message = "`optimizer.loraplus_lr_ratio` is set, and without an adapter there are no matrices B".to_owned();
        return reader.refuse("optimizer.loraplus_lr_ratio", message, "leave it out");
    }
    Ok(())
}

/// Refuses values that the optimiser has no use for: whoever sets one means another.
fn refuse_idle_optimizer_keys(reader: &RecipeReader<'_>, recipe: &OptimizerRecipe) -> Checked<()> {
    use OptimizerName::{Adadelta, Adam, AdamW, AdamW8bit, Adamax, RmsProp, Sgd};
    let is_set = [
        ("optimizer.betas", recipe.betas != (0.9, 0.999), &[AdamW, AdamW8bit, Adam, Adamax][..]),
        ("optimizer.eps", recipe.eps.is_some(), &[AdamW, AdamW8bit, Adam, Adamax, RmsProp, Adadelta]),
        ("optimizer.momentum", recipe.momentum > 0.0, &[Sgd, RmsProp]),
        ("optimizer.nesterov", recipe.nesterov, &[Sgd]),
        ("optimizer.smoothing", recipe.smoothing.is_some(), &[RmsProp, Adadelta]),
    ];
    if let Some((key, _, owners)) = is_set.into_iter().find(|(_, is_set, owners)| *is_set && !owners.contains(&recipe.name)) {
        let owners = owners.iter().map(|owner| format!("`{}`", owner.name())).collect::<Vec<_>>().join(", ");
        let message = format!("`{key}` is set, and `{}` has no such thing: {owners} have", recipe.name.name());
        return reader.refuse(key, message, "leave it out, or write `optimizer.name`");
    }
    if recipe.nesterov && recipe.momentum == 0.0 {
        let message = "`optimizer.nesterov = true` without `optimizer.momentum`: there is nothing to look ahead with".to_owned();
        return reader.refuse("optimizer.nesterov", message, "set a momentum, as 0.9");
    }
    if recipe.min_lr_ratio > 0.0 && recipe.schedule == Schedule::Constant {
        let message = "`optimizer.min_lr_ratio` is set, and a `constant` schedule never falls".to_owned();
        return reader.refuse("optimizer.min_lr_ratio", message, "leave it out, or choose `schedule = \"cosine\"`");
    }
    Ok(())
}

fn refuse_graphs_over_waiting_weights(reader: &RecipeReader<'_>, grad: &GradRecipe, train: &TrainRecipe) -> Checked<()> {
    if grad.cuda_graphs && train.offload == Offload::Weights {
        let message = "`train.offload = \"weights\"` contradicts `grad.cuda_graphs = true`: a graph is captured over weights that stay where \
                       they are"
            .to_owned();
        return reader.refuse("train.offload", message, "write `grad.cuda_graphs = false`, or `train.offload = \"optimizer\"`");
    }
    if grad.keep_graph.cells() > 0 && train.offload == Offload::Weights {
        let message =
            "`train.offload = \"weights\"` contradicts `grad.keep_graph`: a graph keeps the weights that it will need".to_owned();
        return reader.refuse("grad.keep_graph", message, "leave it out: with waiting weights no graph is kept");
    }
    Ok(())
}

/// The document without the keys that are left to the planner, which have their defaults meanwhile; and these keys.
fn without_open_keys(document: &Document) -> (Document, Vec<OpenKey>) {
    let mut decided = document.clone();
    let mut take = |key: OpenKey| {
        let key = dotted(GradRecipe::NAME, key.name());
        let is_open = decided.root.entry(&key).is_some_and(|entry| entry.node.as_str() == Some(AUTO));
        is_open && decided.root.take(&key).is_some()
    };
    let open = OpenKey::ALL.iter().copied().filter(|&key| take(key)).collect();
    (decided, open)
}

fn refuse_f16(document: &Document) -> Checked<()> {
    let Some(dtype) = document.root.entry("model.dtype").and_then(|entry| entry.node.as_str()) else { return Ok(()) };
    if ["f16", "float16", "fp16", "half", "16-true", "16-mixed"].contains(&dtype) {
        let message = format!("`model.dtype = \"{dtype}\"` cannot be trained in: gradients fall below its smallest number");
        return Err(document.reject("model.dtype", message, "use `bf16` or `f32`; weights stored in f16 load as either"));
    }
    Ok(())
}

fn refuse_prompt_as_target(reader: &RecipeReader<'_>, data: &DataRecipe) -> Checked<()> {
    // Of a format that is not written the rows tell.
    if let Some(FormatContradiction { key, message, hint }) = data.format.and_then(|format| data.contradiction(format)) {
        return reader.refuse(key, message, &hint);
    }
    match data.chat.train_on.filter(|&train_on| data.train_on_prompt && train_on != TrainOn::All) {
        Some(train_on) => {
            let message = format!("`data.train_on_prompt = true` contradicts `data.train_on = \"{train_on}\"`");
            reader.refuse("data.train_on_prompt", message, "leave it out")
        }
        None => Ok(()),
    }
}

/// What the table `[head]` says.
fn head(reader: &RecipeReader<'_>, table: HeadTable, data: &DataRecipe) -> Checked<HeadRecipe> {
    let kind = table.kind;
    if let Some(format) = data.format.filter(|format| format.is_chat() && kind != HeadKind::NextToken) {
        let message = format!("`data.format = \"{format}\"` contradicts `head.kind = \"{kind}\"`: a conversation has no class");
        return reader.refuse("data.format", message, "train on what the assistant says with `head.kind = \"next_token\"`");
    }
    if kind != HeadKind::NextToken && data.chat.train_on.is_some() {
        let message = format!("`data.train_on` contradicts `head.kind = \"{kind}\"`");
        return reader.refuse("data.train_on", message, "remove it: the only target is the class at the last token");
    }
    if kind != HeadKind::NextToken && data.train_on_prompt {
        let message = format!("`data.train_on_prompt` contradicts `head.kind = \"{kind}\"`");
        return reader.refuse("data.train_on_prompt", message, "remove it: the only target is the class at the last token");
    }
    // The wording of classes is that of `keys-values`.
    let other = data.prompt.filter(|&wording| wording != LongBenchPrompt::KeysValues);
    if let (true, Some(wording)) = (kind != HeadKind::NextToken, other) {
        let message = format!("`data.prompt = \"{wording}\"` contradicts `head.kind = \"{kind}\"`");
        return reader.refuse("data.prompt", message, "remove it: a class is read behind the wording of `keys-values`");
    }
    let owners = [
        ("head.label_tokens", table.label_tokens.is_some(), &[HeadKind::SeqClassificationOnLogits][..]),
        ("head.num_labels", table.num_labels.is_some(), &[HeadKind::SeqClassification]),
        ("head.labels", table.labels.is_some(), &[HeadKind::SeqClassificationOnLogits, HeadKind::SeqClassification]),
    ];
    let idle = owners.into_iter().find(|(_, is_set, owners)| *is_set && !owners.contains(&kind));
    if let Some((key, _, [owner, ..])) = idle {
        let message = format!("`{key}` says nothing where `head.kind` is `{kind}`");
        return reader.refuse(key, message, &format!("remove it, or write `kind = \"{owner}\"`"));
    }
    let distinct = "list two classes or more, and give each a token of its own";
    let named = "list two classes or more, each once";
    let hint = match kind {
        HeadKind::SeqClassification => "write `labels = [\"yes\", \"no\"]`, or `num_labels = 2`",
        _ => "write `labels = [\"A\", \"B\", \"C\", \"D\"]`, or `label_tokens = […]`",
    };
    match (kind, table.label_tokens, table.labels, table.num_labels) {
        (HeadKind::NextToken, ..) => Ok(HeadRecipe::NextToken),
        (HeadKind::SeqClassificationOnLogits, Some(tokens), ..) => {
            reader.distinct("head.label_tokens", &tokens, 2, distinct)?;
            Ok(HeadRecipe::SeqClassificationOnLogits(Labels::Tokens(tokens)))
        }
        (HeadKind::SeqClassificationOnLogits, None, Some(texts), _) => {
            reader.distinct("head.labels", &texts, 2, distinct)?;
            Ok(HeadRecipe::SeqClassificationOnLogits(Labels::Texts(texts)))
        }
        (HeadKind::SeqClassification, _, Some(names), _) => {
            reader.distinct("head.labels", &names, 2, named)?;
            Ok(HeadRecipe::SeqClassification(ClassList::Named(names)))
        }
        (HeadKind::SeqClassification, _, None, Some(count)) => Ok(HeadRecipe::SeqClassification(ClassList::Count(count))),
        (_, _, None, _) => reader.refuse("head.kind", format!("`head.kind = \"{kind}\"` needs classes"), hint),
    }
}

/// Which weights are trained: as the recipe has it `written`, else as the command has `asked`.
fn weights(reader: &RecipeReader<'_>, written: Weights, asked: Option<Weights>) -> Checked<Weights> {
    let key = "train.weights";
    let weights = if reader.has(key) { written } else { asked.unwrap_or(written) };
    if let Some(asked) = asked.filter(|&asked| asked != weights) {
        let message = format!("`{key} = \"{weights}\"` contradicts the command, which trains `{asked}`");
        let hint =
            "remove the key, or use the other of `finetune-lora` and `finetune-full`; `check` and `verify` say it with `--full`";
        return reader.refuse(key, message, hint);
    }
    for (key, shown) in [("lora", "`[lora]`"), ("model.adapter", "`model.adapter`")] {
        if weights == Weights::All && reader.has(key) {
            let message = format!("{shown} says nothing where all weights are trained: there is no adapter");
            return reader.refuse(key, message, "remove it, or train the adapter with `kvtune finetune-lora`");
        }
    }
    Ok(weights)
}

fn refuse_storage(reader: &RecipeReader<'_>, CacheRecipe { storage, policy, .. }: &CacheRecipe) -> Checked<()> {
    if *storage == Storage::Preallocated || policy.name == "dense" {
        return Ok(());
    }
    let policy = &policy.name;
    let message =
        format!("`kv_cache.storage = \"{storage}\"` contradicts the policy `{policy}`, which has a fixed number of slots");
    reader.refuse("kv_cache.storage", message, "write `storage = \"preallocated\"`, or `policy = \"dense\"`")
}

/// A block is a chunk.
fn refuse_long_blocks(reader: &RecipeReader<'_>, kv: &CacheRecipe) -> Checked<()> {
    let (decode_block, chunk_size) = (kv.decode_block, kv.wanted_chunk_size());
    if decode_block <= chunk_size {
        return Ok(());
    }
    let message = format!("`kv_cache.decode_block` is {decode_block}, more than `kv_cache.chunk_size`, which is {chunk_size}");
    reader.refuse("kv_cache.decode_block", message, "a chunk of decoding is no longer than one of a prompt")
}

fn refuse_static_growth(reader: &RecipeReader<'_>, kv: &CacheRecipe) -> Checked<()> {
    if !kv.r#static || kv.storage == Storage::Preallocated {
        return Ok(());
    }
    let message =
        format!("`kv_cache.static` contradicts `kv_cache.storage = \"{}\"`: a cache that grows has no fixed size", kv.storage);
    reader.refuse(
        "kv_cache.static",
        message,
        "name a length with `kv_cache.cache_length`, and write `storage = \"preallocated\"`",
    )
}

fn refuse_single_tokens(reader: &RecipeReader<'_>, grad: &GradRecipe, head: &HeadRecipe) -> Checked<()> {
    if grad.single_tokens_for_targets && *head != HeadRecipe::NextToken {
        let key = "grad.single_tokens_for_targets";
        let message = format!("`{key}` contradicts the head, which has one target per sequence, and no token behind it");
        return reader.refuse(key, message, "remove it, or write `head.kind = \"next_token\"`");
    }
    Ok(())
}

/// The undo log of a quantised cache holds the cache's own few bits, to the bit. An open form is no contradiction: there is one left to
/// choose.
fn refuse_undo_log(reader: &RecipeReader<'_>, grad: &GradRecipe, CacheRecipe { buffer, .. }: &CacheRecipe) -> Checked<()> {
    let form = grad.undo_log.form;
    if form == StoreForm::Plain || buffer.undo_log_may_round() {
        return Ok(());
    }
    let message = format!(
        "`grad.undo_log = \"{form}\"` contradicts `kv_cache.buffer = \"{buffer}\"`: what is overwritten is kept in the few bits \
         that the cache has for it"
    );
    reader.refuse("grad.undo_log", message, "remove it, or write `undo_log = \"plain\"`: it is small already, and stays exact")
}

/// Attention's output belongs to the very keys that it was computed from: beside rounded ones its weights would not sum to one.
fn refuse_outputs_beside_rounding(reader: &RecipeReader<'_>, grad: &GradRecipe) -> Checked<()> {
    if grad.attention_outputs == AttentionOutputs::Recompute || !grad.rounds() {
        return Ok(());
    }
    let message =
        "`grad.attention_outputs = \"keep\"` contradicts a store that rounds: a cell would see other keys than those that its \
                   outputs come from"
            .to_owned();
    reader.refuse("grad.attention_outputs", message, "write `plain` for `layer_checkpoints` and `undo_log`, or leave it out")
}

/// Refuses figures that no validation computes.
fn refuse_figure(reader: &RecipeReader<'_>, eval: &EvalRecipe, head: &HeadRecipe) -> Checked<()> {
    if eval.generate.is_some() && *head != HeadRecipe::NextToken {
        let message = "`eval.generate` contradicts the head, which reads a class and generates no answers".to_owned();
        return reader.refuse("eval.generate", message, "remove it, or write `head.kind = \"next_token\"`");
    }
    if let Figure::Answers(metric) = eval.metric
        && !eval.generate.as_ref().is_some_and(|generate| generate.metrics.contains(&metric))
    {
        let message = format!("`eval.metric = \"{metric}\"` is not among the metrics of `eval.generate`");
        return reader.refuse(
            "eval.metric",
            message,
            &format!("write `generate = {{ metrics = [\"{metric}\"] }}` below `[eval]`"),
        );
    }
    if eval.metric == Figure::Accuracy && *head == HeadRecipe::NextToken {
        let message = "`eval.metric = \"accuracy\"` contradicts the head `next_token`, which has no classes".to_owned();
        let hint = "write `metric = \"loss\"`, or choose `head.kind = \"seq_classification_on_logits\"`";
        return reader.refuse("eval.metric", message, hint);
    }
    Ok(())
}
