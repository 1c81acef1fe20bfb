//! Which linears an adapter means, and what PEFT calls them.

use super::bad_setting;
use std::borrow::Cow;
use std::collections::BTreeSet;

use super::config::{ModelConfig, ModelLinear};
use super::linear::{A, B, B_BIAS, BASE_BIAS, MAGNITUDE};
use super::names::{EMBEDDING_MODULE, FINAL_NORM, INNER, OUTPUT_MODULE, inner_module, layer_tensor, peft_tensor};
use super::peft::{LayerLists, ModulePatterns, PeftConfig};
use super::spec::{LinearSpec, STACKED_DOWN, STACKED_GATE_UP};
use crate::recipe::diagnose::nearest;
use crate::recipe::{LoraRecipe, ModuleSet, TrainedBias, is_named};
use crate::units::{Fault, distinct, quoted};

/// A linear that gets matrices, or the same linear of all experts.
#[derive(Debug)]
pub(super) struct LoraTarget {
    pub(super) linear: ModelLinear,
    /// What names and patterns of PEFT's settings mean it by.
    name: String,
    peft: String,
    /// Whose matrices lie side by side; 1 for a linear that stands alone.
    experts: usize,
    pub(super) r: usize,
    pub(super) scale: f64,
}

impl LoraTarget {
    fn new(settings: &PeftConfig, name: String, linear: ModelLinear, experts: usize) -> Self {
        let (r, scale) = (settings.rank_of(&name), settings.scale_of(&name));
        Self { peft: peft_module(settings, &linear.name), name, linear, experts, r, scale }
    }

    /// What is trained beside it: the ends of names in PEFT's files, and shapes.
    pub(super) fn parts(&self, settings: &PeftConfig) -> Vec<(&'static str, Vec<usize>)> {
        let (LinearSpec { inner, out, has_bias, .. }, rows) = (&self.linear.spec, self.experts * self.r);
        let all = [
            (A, vec![rows, *inner], true),
            (B, vec![*out, rows], true),
            (B_BIAS, vec![*out], settings.lora_bias),
            (MAGNITUDE, vec![*out], settings.use_dora),
            (BASE_BIAS, vec![*out], settings.bias != TrainedBias::None && *has_bias),
        ];
        all.into_iter().filter(|(.., is_trained)| *is_trained).map(|(part, shape, _)| (part, shape)).collect()
    }

    /// The name in PEFT's files of one of its [`Self::parts`].
    pub(super) fn tensor(&self, part: &str) -> String {
        lora_tensor(&self.peft, part)
    }

    pub(super) fn is_embedding(&self) -> bool {
        self.linear.name == EMBEDDING_MODULE
    }

    /// Whether it is the same linear of all experts.
    pub(super) fn is_stacked(&self) -> bool {
        self.experts > 1
    }

    /// Whether PEFT sees it as a parameter of a module, beside which it has plain LoRA only.
    pub(super) fn is_parameter(&self) -> bool {
        is_of_experts(&self.linear.name) || ["mlp.gate", "mlp.router"].iter().any(|router| self.peft.ends_with(router))
    }
}

/// The name in PEFT's files of what is trained beside a linear, by the name of its [`peft_module`].
pub(super) fn lora_tensor(module: &str, part: &str) -> String {
    let is_embedding = module.ends_with("embed_tokens");
    let part = match part {
        A if is_embedding => "lora_embedding_A",
        B if is_embedding => "lora_embedding_B",
        part => part,
    };
    peft_tensor(module, part)
}

/// Whether the tokens of a linear are those that were sent to an expert.
pub(super) fn is_of_experts(linear: &str) -> bool {
    linear.contains(".experts.")
}

/// Whether a linear chooses the experts of a token.
pub(super) fn is_router(linear: &str) -> bool {
    matches!(linear.rsplit('.').next(), Some("gate" | "router"))
}

/// The linears of a model to which the settings of an adapter give matrices, bottom to top.
pub(super) fn targets(config: &ModelConfig, settings: &PeftConfig) -> Result<Vec<LoraTarget>, Fault> {
    let modules = meant(config, settings)?.into_iter().filter(|linear| is_of_layers(settings, linear));
    let modules = modules.map(|linear| LoraTarget::new(settings, module(settings, &linear.name).into_owned(), linear, 1));
    // As in PEFT, parameters are never excluded.
    let modules = modules.filter(|target| !settings.exclude_modules.names(&target.name));
    let parameter = |(linear, experts)| LoraTarget::new(settings, parameter_name(settings, &linear), linear, experts);
    let mut all: Vec<LoraTarget> = modules.chain(meant_parameters(config, settings).into_iter().map(parameter)).collect();
    all.sort_by_key(|target| (target.linear.layer.0, target.linear.number));
    Ok(all)
}

/// Whether a linear that is meant is in a layer that is. As in PEFT, what is named whole is, whatever the layers.
fn is_of_layers(settings: &PeftConfig, linear: &ModelLinear) -> bool {
    let (layers, module) = (&settings.layers_to_transform, module(settings, &linear.name));
    layers.is_empty() || names_whole(settings, &module) || settings.layers_pattern.contain(layers, &module, linear.layer.0)
}

fn names_whole(settings: &PeftConfig, module: &str) -> bool {
    matches!(&settings.target_modules, ModuleSet::Names(names) if names.iter().any(|name| name == module))
}

/// Refuses a target that the model does not have. PEFT passes over it without a word, as long as there is another.
pub(super) fn check_known(config: &ModelConfig, settings: &PeftConfig) -> Result<(), Fault> {
    let names = if let ModuleSet::Names(names) = &settings.target_modules { &names[..] } else { &[] };
    let modules = modules(config, settings);
    if let Some(unknown) = names.iter().find(|name| !modules.iter().any(|module| is_named(module, name))) {
        let known = distinct(config.linears().iter().map(|linear| linear.spec.name().to_owned()));
        return Err(unknown_target("target_modules", unknown, &known));
    }
    let known = parameters(config);
    let is_known = |name: &String| known.iter().any(|(linear, _)| is_named(&parameter_name(settings, linear), name));
    let Some(unknown) = settings.target_parameters.iter().find(|name| !is_known(name)) else { return Ok(()) };
    let known = distinct(known.iter().map(|(linear, _)| parameter_path(linear)));
    Err(unknown_target("target_parameters", unknown, &known))
}

/// Refuses names in a recipe that mean nothing in the model, but for those that the `file` of an adapter has: PEFT passes over them all.
pub(super) fn check_names(config: &ModelConfig, settings: &PeftConfig, file: &PeftConfig) -> Result<(), Fault> {
    check_known(config, settings)?;
    let (whole, meant) = (module(settings, EMBEDDING_MODULE), meant(config, settings)?);
    let is_left_out = |linear: &ModelLinear| linear.name == EMBEDDING_MODULE && !is_of_layers(settings, linear);
    if meant.iter().any(is_left_out) && !settings.exclude_modules.names(&whole) {
        let expected = format!("`[]` where `embed_tokens` is a target: it is of no layer; or name it whole, `{whole}`");
        return Err(bad_setting("layers_to_transform", &format!("{:?}", settings.layers_to_transform), &expected));
    }
    let meant = meant.into_iter().filter(|linear| is_of_layers(settings, linear));
    let meant: Vec<String> = meant.map(|linear| module(settings, &linear.name).into_owned()).collect();
    let left: Vec<String> = targets(config, settings)?.into_iter().map(|target| target.name).collect();
    let passed = file.exclude_modules.entries();
    let mut excluded = settings.exclude_modules.entries().into_iter();
    let idle = excluded.find(|entry| !passed.contains(entry) && !meant.iter().any(|module| entry.names(module)));
    let idle = idle.map(|entry| entry.to_string());
    let idle = [
        ("exclude_modules", idle.as_deref(), &meant),
        ("rank_pattern", settings.rank_pattern.idle(&left, &file.rank_pattern), &left),
        ("alpha_pattern", settings.alpha_pattern.idle(&left, &file.alpha_pattern), &left),
    ];
    let found = idle.into_iter().find_map(|(key, idle, modules)| Some((key, idle?, modules)));
    let Some((key, idle, modules)) = found else { return Ok(()) };
    let last = |name: &String| {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        name[module.rfind('.').map_or(0, |dot| dot + 1)..].to_owned()
    };
    Err(unknown_target(key, idle, &distinct(modules.iter().map(last))))
}

/// Whether the targets mean a module, by its name in the model. As in PEFT, what is saved whole gets no matrices.
fn means(settings: &PeftConfig, name: &str) -> bool {
    settings.target_modules.names(&module(settings, name)) && !settings.saves(name)
}

/// The settings of an adapter that a recipe describes.
pub(super) fn peft_settings(config: &ModelConfig, lora: &LoraRecipe) -> Result<PeftConfig, Fault> {
    let pattern = |key| move |found: String| bad_setting(key, &found, "regular expressions that can be read");
    let lora = lora.clone();
    Ok(PeftConfig {
        target_parameters: lora.target_parameters,
        modules_to_save: lora.modules_to_save,
        is_classifier: config.num_classes.is_some(),
        exclude_modules: lora.exclude_modules,
        layers_to_transform: lora.layers_to_transform,
        layers_pattern: LayerLists::new(lora.layers_pattern).map_err(pattern("layers_pattern"))?,
        rank_pattern: ModulePatterns::new(lora.rank_pattern).map_err(pattern("rank_pattern"))?,
        alpha_pattern: ModulePatterns::new(lora.alpha_pattern).map_err(pattern("alpha_pattern"))?,
        use_rslora: lora.use_rslora,
        lora_bias: lora.lora_bias,
        bias: lora.bias,
        use_dora: lora.use_dora,
        init: lora.init_lora_weights,
        is_inner: config.is_inner,
        ..PeftConfig::plain(lora.r, lora.alpha, lora.dropout, lora.target_modules)
    })
}

/// The settings with all targets as names, each once, in the order of the layer; an expression stays as it is.
pub(super) fn with_listed_targets(config: &ModelConfig, settings: PeftConfig) -> Result<PeftConfig, Fault> {
    let linears = meant(config, &settings)?;
    let names: BTreeSet<&str> = linears.iter().map(|linear| &*linear.name).collect();
    let others: Vec<ModelLinear> = config.linears().into_iter().filter(|linear| !names.contains(&*linear.name)).collect();
    let paths: BTreeSet<&str> = others.iter().map(|other| &*other.spec.path).collect();
    let ends: BTreeSet<&str> = others.iter().map(|other| other.spec.name()).collect();
    let has_layers = !settings.layers_to_transform.is_empty();
    // The last part of a path, or the path, where it means no other linear.
    let name = |linear: &ModelLinear| {
        let whole = module(&settings, &linear.name);
        match () {
            () if paths.contains(&*linear.spec.path) || has_layers && names_whole(&settings, &whole) => whole.into_owned(),
            () if ends.contains(linear.spec.name()) => linear.spec.path.to_string(),
            () => linear.spec.name().to_owned(),
        }
    };
    let names = linears.iter().filter(|linear| is_of_layers(&settings, linear)).map(name);
    let is_expression = matches!(settings.target_modules, ModuleSet::Matching(_));
    let target_modules = if is_expression { settings.target_modules.clone() } else { ModuleSet::Names(distinct(names)) };
    let target_parameters = listed_parameters(config, &settings);
    let given = Box::new((settings.target_modules, settings.target_parameters));
    Ok(PeftConfig { target_modules, target_parameters, given, ..settings })
}

fn listed_parameters(config: &ModelConfig, settings: &PeftConfig) -> Vec<String> {
    let meant = meant_parameters(config, settings);
    let is_meant = |other: &ModelLinear| meant.iter().any(|(linear, _)| linear.name == other.name);
    let others = parameters(config).into_iter().filter(|(linear, _)| !is_meant(linear));
    let others: BTreeSet<String> = others.map(|(linear, _)| parameter_path(&linear)).collect();
    let name = |linear: &ModelLinear| {
        let path = parameter_path(linear);
        if others.contains(&path) { parameter_name(settings, linear) } else { path }
    };
    distinct(meant.iter().map(|(linear, _)| name(linear)))
}

/// The linears that a list of names means, those that are excluded among them. All linears are those of the layers, and with experts those
/// of attention: the experts are all targeted at once then ([`meant_parameters`]), and the router is not.
pub(super) fn meant(config: &ModelConfig, settings: &PeftConfig) -> Result<Vec<ModelLinear>, Fault> {
    if settings.target_modules == ModuleSet::AllLinear {
        // PEFT takes the MLP of a layer without experts, and a shared one, for experts: it could not read them.
        let has_experts = config.has_experts();
        let is_meant = |linear: &ModelLinear| !has_experts || linear.spec.path.contains("attn");
        return Ok(config.linears().into_iter().filter(is_meant).collect());
    }
    let is_meant = |linear: &ModelLinear| means(settings, &linear.name);
    let linears: Vec<ModelLinear> = config.linears().into_iter().chain(config.ends()).filter(is_meant).collect();
    if let ModuleSet::Matching(regex) = &settings.target_modules {
        // PEFT knows no matrices beside a norm.
        if linears.is_empty() || means(settings, FINAL_NORM.trim_end_matches(".weight")) {
            let expected = "an expression that matches whole names of linears in the layers, as `model.layers.0.self_attn.q_proj`, or \
                            `model.embed_tokens`, or `lm_head`, only";
            return Err(bad_setting("target_modules", &format!("`{}`", regex.written()), expected));
        }
    }
    Ok(linears)
}

/// The linears that PEFT sees as parameters of a module: those of all experts side by side, with their number, and routers.
pub(super) fn meant_parameters(config: &ModelConfig, settings: &PeftConfig) -> Vec<(ModelLinear, usize)> {
    let known = parameters(config).into_iter();
    if settings.target_modules == ModuleSet::AllLinear && settings.target_parameters.is_empty() {
        return known.filter(|(_, experts)| *experts > 1).collect();
    }
    known.filter(|(linear, _)| targets_parameter(settings, &parameter_name(settings, linear))).collect()
}

fn targets_parameter(settings: &PeftConfig, parameter: &str) -> bool {
    settings.target_parameters.iter().any(|name| is_named(parameter, name))
}

/// What PEFT calls all that may have matrices, by whole names.
pub(super) fn all_names(config: &ModelConfig, settings: &PeftConfig) -> Vec<String> {
    let parameters = parameters(config);
    let parameters = parameters.iter().map(|(linear, _)| parameter_name(settings, linear));
    modules(config, settings).into_iter().chain(parameters).collect()
}

fn modules(config: &ModelConfig, settings: &PeftConfig) -> Vec<String> {
    let linears = config.linears().into_iter().chain(config.ends());
    linears.map(|linear| module(settings, &linear.name).into_owned()).collect()
}

/// All linears that PEFT sees as parameters, bottom to top, and how many experts' lie side by side in each.
fn parameters(config: &ModelConfig) -> Vec<(ModelLinear, usize)> {
    let of_layer = |(layer, spec): (usize, &super::LayerSpec)| {
        let Some(experts) = spec.feed_forward.experts() else { return Vec::new() };
        let behind = spec.linears(config.hidden_size).len();
        let number = spec.attention.linears(config.hidden_size).len();
        let router = ModelLinear::new(layer, number, experts.router(config.hidden_size));
        let stacked = (behind..).zip(experts.stacked(config.hidden_size));
        let stacked = stacked.map(|(number, spec)| (ModelLinear::new(layer, number, spec), experts.num_experts));
        stacked.chain([(router, 1)]).collect()
    };
    config.layers.iter().enumerate().flat_map(of_layer).collect()
}

/// What PEFT calls a linear as a parameter, whole: `model.layers.3.mlp.experts.down_proj`, `model.layers.3.mlp.gate.weight`.
fn parameter_name(settings: &PeftConfig, linear: &ModelLinear) -> String {
    module(settings, &layer_tensor(linear.layer.0, &parameter_path(linear))).into_owned()
}

/// What that is inside its layer: `mlp.experts.down_proj`.
fn parameter_path(linear: &ModelLinear) -> String {
    match &*linear.spec.path {
        stacked @ (STACKED_GATE_UP | STACKED_DOWN) => stacked.to_owned(),
        router => format!("mlp.{}.weight", router.rsplit('.').next().unwrap_or_default()),
    }
}

pub(super) fn module<'a>(settings: &PeftConfig, name: &'a str) -> Cow<'a, str> {
    if settings.is_inner { inner_module(name).into() } else { name.into() }
}

/// The settings as they are written: inside a model that sees, a list of names would mean modules of its eyes, too.
pub(super) fn written(settings: &PeftConfig) -> Result<PeftConfig, Fault> {
    let ModuleSet::Names(names) = &settings.target_modules else { return Ok(settings.clone()) };
    if !settings.is_inner || names.is_empty() {
        return Ok(settings.clone());
    }
    let has_output = names.iter().any(|name| name == OUTPUT_MODULE);
    let layers: Vec<String> = settings.layers_to_transform.iter().map(ToString::to_string).collect();
    let layers = if layers.is_empty() { r"\d+".to_owned() } else { format!("(?:{})", layers.join("|")) };
    // Whole names are of one layer, whichever are meant.
    let whole = names.iter().filter_map(|name| name.strip_prefix(INNER)).filter(|name| name.starts_with("layers."));
    let ends: Vec<&str> = names.iter().map(String::as_str).filter(|name| !name.starts_with(INNER)).collect();
    let escaped = |name: &str| name.replace('.', r"\.");
    let of_layers = (!ends.is_empty()).then(|| format!(r"layers\.{layers}\.(?:.*\.)?(?:{})", escaped(&ends.join("|"))));
    let embedding = means(settings, EMBEDDING_MODULE).then(|| "embed_tokens".to_owned());
    let all: Vec<String> = embedding.into_iter().chain(whole.map(escaped)).chain(of_layers).collect();
    let expression = if let [only] = &all[..] { only.clone() } else { format!("(?:{})", all.join("|")) };
    let expression = format!("{}{expression}", escaped(INNER));
    let expression = if has_output { format!("{OUTPUT_MODULE}|{expression}") } else { expression };
    let target_modules = self::expression(&expression)?;
    Ok(PeftConfig { target_modules, layers_to_transform: Vec::new(), layers_pattern: LayerLists::default(), ..settings.clone() })
}

/// What PEFT calls the module beside whose linear something is trained. The experts' two matrices are parameters of one module, which it
/// wraps once for each: the inner one is that of gate and up, where both are targets.
pub(super) fn peft_module(settings: &PeftConfig, linear: &str) -> String {
    let linear = &*module(settings, linear);
    let targets = |parameter: String| targets_parameter(settings, &parameter);
    // With all linears as targets both are, where they are not listed yet.
    let is_open = settings.target_modules == ModuleSet::AllLinear && settings.target_parameters.is_empty();
    if let Some(layer) = linear.strip_suffix(STACKED_GATE_UP) {
        let has_down = is_open || targets(format!("{layer}{STACKED_DOWN}"));
        return format!("{layer}mlp.experts{}", if has_down { ".base_layer" } else { "" });
    }
    if let Some(layer) = linear.strip_suffix(STACKED_DOWN) {
        return format!("{layer}mlp.experts");
    }
    match linear.strip_suffix("block_sparse_moe.gate") {
        Some(layer) if targets(format!("{layer}mlp.gate.weight")) => format!("{layer}mlp.gate"),
        _ => linear.to_owned(),
    }
}

/// The recipe names a target that no layer has, or gives a setting to what is no target.
fn unknown_target(key: &str, name: &str, known: &[String]) -> Fault {
    let near = nearest(name, known.iter().map(String::as_str));
    let listed = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let sets_targets = key.starts_with("target");
    let who = if sets_targets { "the layers have" } else { "the targets are" };
    let message =
        format!("unknown name `{}` in `{key}`: {who} {}", quoted(name), if known.is_empty() { "none" } else { &listed });
    let hint = match near {
        Some(near) => format!("did you mean `{near}`?"),
        None if sets_targets => "use names from that list, or `target_modules = \"all-linear\"`".to_owned(),
        None => format!("use names from that list in `lora.{key}`, or leave the name out"),
    };
    Fault::usage(message, hint)
}

/// An expression of `target_modules` that is made of others.
pub(super) fn expression(written: &str) -> Result<ModuleSet, Fault> {
    ModuleSet::matching(written).map_err(|found| bad_setting("target_modules", &found, "a regular expression that can be read"))
}
