//! Settings of an adapter that are refused: nothing can be trained with them, or PEFT does not have them, where files would mean nothing.

use std::fmt::Display;

use super::bad_setting;
use super::config::ModelConfig;
use super::io_layers::{copied_vectors, copyable};
use super::names::{EMBEDDING_MODULE, OUTPUT_MODULE};
use super::peft::PeftConfig;
use super::targets::{LoraTarget, is_of_experts, module, targets};
use crate::recipe::{InitLora, ModuleSet, TrainedBias};
use crate::units::Fault;

/// Refuses the value of a key of `[lora]`, where it is wrong.
fn refuse(is_wrong: bool, key: &'static str, found: &dyn Display, expected: &'static str) -> Result<(), Fault> {
    if is_wrong { Err(bad_setting(key, &found.to_string(), expected)) } else { Ok(()) }
}

/// Refuses settings that do not go with the linears that they mean.
pub(super) fn check_settings(config: &ModelConfig, settings: &PeftConfig, targets: &[LoraTarget]) -> Result<(), Fault> {
    let widest = config.hidden_size.max(config.intermediate_size());
    for (key, r) in [("r", settings.r)].into_iter().chain(targets.iter().map(|target| ("rank_pattern", target.r))) {
        refuse(r == 0 || r > widest, key, &r, "a number from 1 to the width of the layers")?;
    }
    check_layers(config, settings, targets)?;
    check_kind(config, settings, targets)?;
    if settings.init == InitLora::Pissa {
        check_pissa(targets)?;
    }
    let is_empty = settings.target_modules == ModuleSet::NONE && settings.target_parameters.is_empty();
    refuse(is_empty, "target_modules", &"empty", "at least one name")?;
    refuse(targets.is_empty(), "exclude_modules", &"all of `target_modules`", "names that leave one of them")
}

/// Refuses dropout where a linear does not know where a token stands: each expert sees its tokens sorted (PEFT has no dropout for parameters
/// either), and the output projection only some.
pub(super) fn check_dropout<'a>(probability: f64, mut linears: impl Iterator<Item = &'a str>) -> Result<(), Fault> {
    let without = linears.find_map(|linear| match linear {
        OUTPUT_MODULE => Some("0 where `lm_head` is a target"),
        _ => is_of_experts(linear).then_some("0 where experts are targets"),
    });
    refuse(probability > 0.0 && without.is_some(), "dropout", &probability, without.unwrap_or_default())
}

fn check_layers(config: &ModelConfig, settings: &PeftConfig, targets: &[LoraTarget]) -> Result<(), Fault> {
    let (layers, lists) = (&settings.layers_to_transform, settings.layers_pattern.names());
    let (has_layers, has_lists) = (!layers.is_empty(), !lists.is_empty());
    let layers_are = |is_wrong, expected| refuse(is_wrong, "layers_to_transform", &format_args!("{layers:?}"), expected);
    let lists_are = |is_wrong, expected| refuse(is_wrong, "layers_pattern", &format_args!("{lists:?}"), expected);
    layers_are(layers.iter().any(|layer| *layer >= config.num_layers()), "layers of the model, counted from 0")?;
    lists_are(has_lists && !has_layers, "`[]` without `layers_to_transform`")?;
    let has_none = targets.iter().all(LoraTarget::is_embedding);
    lists_are(has_lists && has_none, "a name of the list of layers in the names of modules: `layers`")?;
    let is_expression = matches!(settings.target_modules, ModuleSet::Matching(_));
    layers_are(has_layers && is_expression, "`[]` where `target_modules` is an expression: it names layers itself")?;
    let has_parameters = targets.iter().any(LoraTarget::is_parameter);
    layers_are(has_layers && has_parameters, "`[]` where experts are targets: PEFT takes those of all layers")
}

fn check_kind(config: &ModelConfig, settings: &PeftConfig, targets: &[LoraTarget]) -> Result<(), Fault> {
    // PEFT would train or save those of experts and routers, too.
    let mut experts = config.layers.iter().filter_map(|layer| layer.feed_forward.experts());
    let have_biases = experts.any(|experts| experts.is_stacked() || experts.correction().is_some());
    let trains_all = settings.bias == TrainedBias::All;
    refuse(trains_all && have_biases, "bias", &"all", "`lora_only` where experts or routers have biases")?;
    let is_twice = |at: usize| targets[..at].iter().any(|other| other.linear.name == targets[at].linear.name);
    let is_apart = |target: &LoraTarget| is_of_experts(&target.linear.name) && !target.is_stacked();
    let has_both = targets.iter().any(LoraTarget::is_stacked) && targets.iter().any(is_apart);
    let expected = "nothing that `target_modules` has as well: each expert and router once";
    let found = format!("{:?}", settings.target_parameters);
    refuse((0..targets.len()).any(is_twice) || has_both, "target_parameters", &found, expected)?;
    let has_parameters = targets.iter().any(LoraTarget::is_parameter);
    for (key, is_on) in [("use_dora", settings.use_dora), ("lora_bias", settings.lora_bias)] {
        let expected = "false where experts or routers are targets: PEFT has plain LoRA for them";
        refuse(is_on && has_parameters, key, &true, expected)?;
    }
    refuse(settings.lora_bias && settings.use_dora, "lora_bias", &true, "false with `use_dora`, as PEFT has it")?;
    let is_special = settings.lora_bias && settings.init != InitLora::Uniform;
    refuse(is_special, "init_lora_weights", &settings.init, "`uniform` with `lora_bias`, as PEFT has it")
}

/// Refuses parts of weights that an adapter can not begin as.
fn check_pissa(targets: &[LoraTarget]) -> Result<(), Fault> {
    let pissa = |is_wrong, expected| refuse(is_wrong, "init_lora_weights", &"pissa", expected);
    let is_special = |target: &LoraTarget| target.is_parameter() || target.is_embedding() || target.linear.name == OUTPUT_MODULE;
    pissa(targets.iter().any(is_special), "`uniform` where experts, routers, `embed_tokens` or `lm_head` are targets")?;
    // What is written has twice the rank.
    let is_narrow = |target: &LoraTarget| 2 * target.r > target.linear.spec.inner.min(target.linear.spec.out);
    pissa(targets.iter().any(is_narrow), "`uniform` where `r` is more than half of a target's inputs or outputs")
}

/// Refuses what a recipe names both as a target and to be saved whole: PEFT gives it no matrices. An expression may mean more than gets some.
pub(super) fn check_saved(settings: &PeftConfig) -> Result<(), Fault> {
    if !matches!(settings.target_modules, ModuleSet::Names(_)) {
        return Ok(());
    }
    let saved = format!("{:?}", settings.modules_to_save);
    for (name, expected) in [
        (EMBEDDING_MODULE, "no `embed_tokens` where `target_modules` has it"),
        (OUTPUT_MODULE, "no `lm_head` where `target_modules` has it"),
    ] {
        let is_both = settings.saves(name) && settings.target_modules.names(&module(settings, name));
        refuse(is_both, "modules_to_save", &saved, expected)?;
    }
    Ok(())
}

/// Refuses what can not be trained in embedding, output projection and norms, or means nothing in PEFT.
pub(super) fn check_io_layers(config: &ModelConfig, settings: &PeftConfig) -> Result<(), Fault> {
    if settings.is_classifier != config.num_classes.is_some() {
        let adapter = if settings.is_classifier { "classes" } else { "next tokens" };
        let message = format!("the adapter was trained to predict {adapter}, and `head.kind` asks for something else");
        let hint =
            "an adapter of classes (`task_type` `SEQ_CLS`) goes with `head.kind = \"seq_classification\"`, any other without it";
        return Err(Fault::usage(message, hint));
    }
    let saved = format!("{:?}", settings.modules_to_save);
    let saved_are = |is_wrong, expected| refuse(is_wrong, "modules_to_save", &saved, expected);
    let mut saveable: Vec<String> = [EMBEDDING_MODULE, OUTPUT_MODULE].map(String::from).into();
    saveable.extend(copyable(config).map(|(name, _)| name.trim_end_matches(".weight").to_owned()));
    let means = |name: &str, modules: &[String]| modules.iter().any(|module| module.ends_with(name));
    let linears: Vec<String> = config.linears().into_iter().map(|linear| linear.name).collect();
    let is_other = |name: &String| !means(name, &saveable) || means(name, &linears);
    saved_are(
        settings.modules_to_save.iter().any(is_other),
        "`embed_tokens`, `lm_head` and ends of names of norms and sinks, as `norm` or `sinks`",
    )?;
    if settings.is_inner && !copied_vectors(config, settings)?.is_empty() {
        let expected = "nothing that PEFT would train in the eyes of a model that sees, too: norms, biases of other linears";
        refuse(settings.bias == TrainedBias::All, "bias", &"all", expected)?;
        saved_are(true, expected)?;
    }
    let expected = "no `lm_head` where the head is `seq_classification`, which has none";
    saved_are(settings.saves(OUTPUT_MODULE) && settings.is_classifier, expected)?;
    let targets = targets(config, settings)?;
    let adds_to = |end| targets.iter().any(|target| target.linear.name == end);
    refuse(settings.lora_bias && adds_to(OUTPUT_MODULE), "lora_bias", &true, "false where `lm_head` is a target")?;
    for (key, is_on) in [("use_dora", settings.use_dora), ("lora_bias", settings.lora_bias)] {
        refuse(is_on && adds_to(EMBEDDING_MODULE), key, &true, "false where `embed_tokens` is a target")?;
    }
    Ok(())
}
