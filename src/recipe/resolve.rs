//! From the document to the recipe: a key that does not exist, a value that is not of its type or breaks its rule, what is missing, and what
//! contradicts itself is refused.

use super::contradictions::refuse_contradictions;
use super::data::{ClassList, DataRecipe, HeadKind, HeadRecipe, HeadTable, LongBenchPrompt};
use super::diagnose::{Checked, spot_of};
use super::eval::EvalRecipe;
use super::format::DataFormat;
use super::grad::{GradRecipe, OpenKey};
use super::kv_cache::{CacheRecipe, Storage};
use super::model::{LoraRecipe, ModelRecipe};
use super::overrides::{EXCLUSIVE, prefer_override};
use super::plan::{Recipe, TABLES};
use super::read::AUTO;
use super::refusals::Refusals;
use super::table::{RecipeKey, RecipeTable, dotted, table_of};
use super::training::{CheckpointRecipe, LogRecipe, OptimizerRecipe, ReportRecipe, TopOfFile, TrainRecipe, TrainedWeights};
use super::tree::{Document, Node, Spot};

/// Checks a document whose spellings are kvtune's own. `asked` is what the command trains, if it says so. What is refused stands in
/// `refusals`, and a default in its place.
pub(super) fn resolve(document: &mut Document, asked: Option<TrainedWeights>, refusals: &mut Refusals) -> Checked<Recipe> {
    for (one, other, why) in EXCLUSIVE {
        refusals.catch(&[], prefer_override(document, one, other, why));
    }
    if refusals.catch(&["model"], refuse_f16(document)).is_none() {
        document.root.take("model.dtype");
    }
    check_keys(document, refusals);
    require(document, "model.path", "the directory of the model", refusals);
    require(document, "data.train", "the file of training examples", refusals);
    let open = take_open_keys(document);
    let document = &*document;
    let data = DataRecipe::read(document)?;
    // Each set has to have what the head asks for; what they all have in common decides what it is.
    let table = HeadTable::read(document)?;
    let heads = data.each().chain([&data]).map(|data| head(document, table.clone(), data));
    let head = refusals.weigh(&["data", "head"], heads.collect::<Checked<Vec<_>>>()).and_then(|mut heads| heads.pop());
    let head = head.unwrap_or_else(|| {
        refusals.doubt("head");
        HeadRecipe::NextToken
    });
    let model = ModelRecipe::read(document)?.located(document);
    let mut train = TrainRecipe::read(document)?;
    train.weights = refusals.weigh(&["train"], weights(document, train.weights, asked)).unwrap_or(TrainedWeights::Adapter);
    let lora =
        (train.weights == TrainedWeights::Adapter).then(|| LoraRecipe::of(document, model.adapter.as_deref())).transpose()?;
    let recipe = Recipe {
        kv_cache: cache(document)?,
        grad: GradRecipe { open, ..GradRecipe::read(document)? },
        eval: EvalRecipe::read(document)?,
        optimizer: OptimizerRecipe::read(document)?,
        checkpoint: CheckpointRecipe::read(document)?,
        log: LogRecipe::read(document)?,
        report: ReportRecipe::read(document)?,
        output_dir: TopOfFile::read(document)?.output_dir,
        model,
        lora,
        data,
        head,
        distill: table.distill,
        train,
    };
    refuse_contradictions(&recipe, document, refusals);
    Ok(recipe)
}

/// Refuses keys that do not exist, and values that are wrong by themselves; these are taken out.
fn check_keys(document: &mut Document, refusals: &mut Refusals) {
    for (table, keys) in TABLES.iter() {
        if !table.is_empty()
            && let Err(error) = document.value::<toml::Table>(table)
        {
            refusals.add(&[table], error);
            document.root.take(table);
            continue;
        }
        for key in keys {
            check_value(document, table, key, refusals);
        }
        let inner = if table.is_empty() { Some(&document.root) } else { document.root.entry(table).map(|entry| &entry.node) };
        let beside = TABLES.iter().map(|(other, _)| *other).filter(|other| table.is_empty() && !other.is_empty());
        let known: Vec<&str> = beside.chain(keys.iter().map(|key| key.name.as_str())).collect();
        for entry in inner.into_iter().flat_map(Node::entries).filter(|entry| !known.contains(&entry.key.as_str())) {
            refusals.unknown(table, document.source.unknown_key(entry.spot, table, &entry.key, &known));
            if refusals.are_many() {
                return;
            }
        }
    }
}

/// Refuses what is wrong with a value: all of it, where its parts can be looked at alone.
fn check_value(document: &mut Document, table: &str, key: &RecipeKey, refusals: &mut Refusals) {
    let name = dotted(table, &key.name);
    let mut is_first = document.root.entry(&name).is_some();
    while let Err(error) = (key.check)(document, &name, key) {
        let continues = document.root.get_mut(&name).is_some_and(|value| value.remove_at(spot_of(&error)));
        if is_first || continues {
            refusals.add(&[table], error);
        }
        if !continues || refusals.are_many() {
            document.root.take(&name);
            return;
        }
        is_first = false;
    }
}

/// Refuses a recipe without a key that it must have, and puts something in its place.
fn require(document: &mut Document, key: &str, what: &str, refusals: &mut Refusals) {
    if !document.has(key) {
        let hint = format!("add `{key}`, or give `--set {key}=…`");
        refusals.weigh(&[table_of(key)], document.refuse::<()>(key, format!("`{key}` is missing: {what}"), hint));
        document.root.put(key, Spot::Code, Node::string(".", Spot::Code));
    }
}

/// Takes out the keys that are left to the planner, which have their defaults meanwhile.
fn take_open_keys(document: &mut Document) -> Vec<OpenKey> {
    let mut take = |key: OpenKey| {
        let key = dotted(GradRecipe::NAME, key.name());
        let is_open = document.root.entry(&key).is_some_and(|entry| entry.node.as_str() == Some(AUTO));
        is_open && document.root.take(&key).is_some()
    };
    OpenKey::ALL.iter().copied().filter(|&key| take(key)).collect()
}

fn refuse_f16(document: &Document) -> Checked<()> {
    let Some(dtype) = document.root.entry("model.dtype").and_then(|entry| entry.node.as_str()) else { return Ok(()) };
    if ["f16", "float16", "fp16", "half", "16-true", "16-mixed"].contains(&dtype) {
        let message = format!("`model.dtype = \"{dtype}\"` cannot be trained in: gradients fall below its smallest number");
        return document.refuse("model.dtype", message, "use `bf16` or `f32`; weights stored in f16 load as either");
    }
    Ok(())
}

/// The cache, with a storage that follows the policy where none is written for it: a dense cache grows, unless something says how long it is.
fn cache(document: &Document) -> Checked<CacheRecipe> {
    let mut cache = CacheRecipe::read(document)?;
    let (is_written, is_asked) = (|key| document.has(key), |key| document.is_override(key));
    // What the recipe says of storage is for its own policy.
    if !is_asked("kv_cache.storage") && (is_asked("kv_cache.policy") || !is_written("kv_cache.storage")) {
        let grows = cache.policy.is_dense() && !is_written("kv_cache.cache_length") && !cache.r#static;
        cache.storage = if grows { Storage::Growing } else { Storage::Preallocated };
    }
    Ok(cache)
}

fn head(document: &Document, table: HeadTable, data: &DataRecipe) -> Checked<HeadRecipe> {
    let kind = table.kind;
    if let Some(DataFormat { name, .. }) = data.known_format().filter(|format| format.is_chat() && kind != HeadKind::NextToken) {
        let message = format!("`data.format = \"{name}\"` contradicts `head.kind = \"{kind}\"`: a conversation has no class");
        return document.refuse("data.format", message, "train on what the assistant says with `head.kind = \"next_token\"`");
    }
    for (key, is_set) in [("data.train_on", data.chat.train_on.is_some()), ("data.train_on_prompt", data.train_on_prompt)] {
        if kind != HeadKind::NextToken && is_set {
            let message = format!("`{key}` contradicts `head.kind = \"{kind}\"`");
            return document.refuse(key, message, "remove it: the only target is the class at the last token");
        }
    }
    // The wording of classes is that of `keys-values`.
    let other = data.prompt.filter(|&wording| wording != LongBenchPrompt::KeysValues);
    if let (true, Some(wording)) = (kind != HeadKind::NextToken, other) {
        let message = format!("`data.prompt = \"{wording}\"` contradicts `head.kind = \"{kind}\"`");
        return document.refuse("data.prompt", message, "remove it: a class is read behind the wording of `keys-values`");
    }
    let owners = [
        ("head.label_tokens", table.label_tokens.is_some(), &[HeadKind::SeqClassificationOnLogits][..]),
        ("head.num_labels", table.num_labels.is_some(), &[HeadKind::SeqClassification]),
        ("head.labels", table.labels.is_some(), &[HeadKind::SeqClassificationOnLogits, HeadKind::SeqClassification]),
    ];
    let idle = owners.into_iter().find(|(_, is_set, owners)| *is_set && !owners.contains(&kind));
    if let Some((key, _, [owner, ..])) = idle {
        let message = format!("`{key}` says nothing where `head.kind` is `{kind}`");
        return document.refuse(key, message, format!("remove it, or write `kind = \"{owner}\"`"));
    }
    let (distinct, example) = match kind {
        HeadKind::SeqClassification => {
            ("list two classes or more, each once", "write `labels = [\"yes\", \"no\"]`, or `num_labels = 2`")
        }
        _ => (
            "list two classes or more, and give each a token of its own",
            "write `labels = [\"A\", \"B\", \"C\", \"D\"]`, or `label_tokens = […]`",
        ),
    };
    table.label_tokens.iter().try_for_each(|tokens| document.distinct("head.label_tokens", tokens, 2, distinct))?;
    table.labels.iter().try_for_each(|labels| document.distinct("head.labels", labels, 2, distinct))?;
    let without_names = table.label_tokens.map(ClassList::Tokens).or(table.num_labels.map(ClassList::Count));
    match (kind, table.labels.map(ClassList::Named).or(without_names)) {
        (HeadKind::NextToken, _) => Ok(HeadRecipe::NextToken),
        (HeadKind::SeqClassificationOnLogits, Some(classes)) => Ok(HeadRecipe::SeqClassificationOnLogits(classes)),
        (HeadKind::SeqClassification, Some(classes)) => Ok(HeadRecipe::SeqClassification(classes)),
        (_, None) => document.refuse("head.kind", format!("`head.kind = \"{kind}\"` needs classes"), example),
    }
}

/// Which weights are trained: as the recipe has it `written`, else as the command has `asked`.
fn weights(document: &Document, written: TrainedWeights, asked: Option<TrainedWeights>) -> Checked<TrainedWeights> {
    let key = "train.weights";
    let weights = if document.has(key) { written } else { asked.unwrap_or(written) };
    if let Some(asked) = asked.filter(|&asked| asked != weights) {
        let message = format!("`{key} = \"{weights}\"` contradicts the command, which trains `{asked}`");
        let hint =
            "remove the key, or use the other of `finetune-lora` and `finetune-full`; `check` and `verify` say it with `--full`";
        return document.refuse(key, message, hint);
    }
    for (key, shown) in [("lora", "`[lora]`"), ("model.adapter", "`model.adapter`")] {
        if weights == TrainedWeights::All && document.has(key) {
            let message = format!("{shown} says nothing where all weights are trained: there is no adapter");
            return document.refuse(key, message, "remove it, or train the adapter with `kvtune finetune-lora`");
        }
    }
    Ok(weights)
}
