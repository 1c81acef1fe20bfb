//! Which linears an adapter means, and what PEFT calls them.

use super::bad_setting;
use std::borrow::Cow;

use super::config::{ModelConfig, ModelLinear};
use super::delta::{A, B, B_BIAS, BASE_BIAS, MAGNITUDE};
use super::names::{EMBEDDING_MODULE, FINAL_NORM, INNER, OUTPUT_MODULE, inner_module, layer_tensor, peft_tensor};
use super::peft::{LayerLists, ModulePatterns, ModuleSet, PeftConfig, is_named};
use super::spec::{LinearSpec, STACKED_DOWN, STACKED_GATE_UP};
use crate::recipe::diagnose::nearest;
use crate::recipe::{LoraRecipe, TargetModules, TrainedBias};
use crate::units::{Fault, LayerIdx, quoted};

/// A linear that gets matrices, or the same linear of all experts.
#[derive(Debug)]
pub(super) struct LoraTarget {
    pub(super) linear: ModelLinear,
    peft: String,
    /// Whose matrices lie side by side; 1 for a linear that stands alone.
    experts: usize,
    pub(super) r: usize,
    pub(super) scale: f64,
}

impl LoraTarget {
    fn new(settings: &PeftConfig, linear: ModelLinear, experts: usize) -> Self {
        let module = module(settings, &linear.name);
        let (r, scale) = (settings.rank_of(&module), settings.scale_of(&module));
        Self { peft: peft_module(settings, &linear.name), linear, experts, r, scale }
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
        peft_tensor(&self.peft, part)
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
    let excludes = |linear: &ModelLinear| settings.exclude_modules.names(&module(settings, &linear.name));
    let layers = &settings.layers_to_transform;
    let modules = meant(config, settings)?.into_iter();
    // As in PEFT, the output projection is meant whatever the layers.
    let is_of_layers = |linear: &ModelLinear| {
        layers.is_empty()
            || linear.name == OUTPUT_MODULE
            || settings.layers_pattern.contain(layers, &module(settings, &linear.name), linear.layer.0)
    };
    let modules = modules.filter(is_of_layers).map(|linear| (linear, 1));
    let all = modules.chain(meant_parameters(config, settings)?).filter(|(linear, _)| !excludes(linear));
    let mut all: Vec<LoraTarget> = all.map(|(linear, experts)| LoraTarget::new(settings, linear, experts)).collect();
    all.sort_by_key(|target| (target.linear.layer.0, target.linear.number));
    Ok(all)
}

/// Refuses names in a recipe that mean nothing in the model, though PEFT would pass over them without a word.
pub(super) fn check_names(config: &ModelConfig, settings: &PeftConfig) -> Result<(), Fault> {
    let layers = &settings.layers_to_transform;
    if means_embedding(settings) && !layers.is_empty() {
        let expected = "`[]` where `embed_tokens` is a target: it is of no layer";
        return Err(bad_setting("layers_to_transform", &format!("{layers:?}"), expected));
    }
    let without = PeftConfig { exclude_modules: ModuleSet::default(), ..settings.clone() };
    let modules = |settings: &PeftConfig| {
        let linears = targets(config, settings)?.into_iter().map(|target| module(settings, &target.linear.name).into_owned());
        let embedding = targets_embedding(settings).then(|| module(settings, EMBEDDING_MODULE).into_owned());
        Ok::<Vec<String>, Fault>(linears.chain(embedding).collect())
    };
    let (meant, left) = (modules(&without)?, modules(settings)?);
    let is_idle = |name: &&String| !meant.iter().any(|module| is_named(module, name));
    let excluded = if let ModuleSet::Names(names) = &settings.exclude_modules { &names[..] } else { &[] };
    let idle = [
        ("exclude_modules", excluded.iter().find(is_idle).map(String::as_str), &meant),
        ("rank_pattern", settings.rank_pattern.idle(&left), &left),
        ("alpha_pattern", settings.alpha_pattern.idle(&left), &left),
    ];
    match idle.into_iter().find_map(|(key, idle, modules)| Some((key, idle?, modules))) {
        Some((key, idle, modules)) => {
            let last = |module: &String| module.rsplit('.').next().unwrap_or_default().to_owned();
            Err(unknown_target(key, idle, &names_of(modules.iter().map(last))))
        }
        None => Ok(()),
    }
}

/// Whether the embedding gets matrices of low rank.
pub(super) fn targets_embedding(settings: &PeftConfig) -> bool {
    // It is of no layer.
    means_embedding(settings) && settings.layers_to_transform.is_empty()
}

/// Whether the output projection does.
pub(super) fn targets_output(config: &ModelConfig, settings: &PeftConfig) -> Result<bool, Fault> {
    Ok(targets(config, settings)?.iter().any(|target| target.linear.name == OUTPUT_MODULE))
}

fn means_embedding(settings: &PeftConfig) -> bool {
    let module = module(settings, EMBEDDING_MODULE);
    let is_meant = match &settings.target_modules {
        // A list names it as a language model by itself does.
        ModuleSet::Names(_) => settings.target_modules.names(EMBEDDING_MODULE),
        targets => targets.names(&module),
    };
    is_meant && !settings.exclude_modules.names(&module)
}

/// The paths of the linears that a recipe gives matrices in some layer, and the largest rank among them.
pub fn targeted(config: &ModelConfig, lora: &LoraRecipe) -> Result<(Vec<String>, usize), Fault> {
    let targets = targets(config, &peft_settings(config, lora)?)?;
    let r = targets.iter().map(|target| target.r).max().unwrap_or(lora.r);
    Ok((names_of(targets.iter().map(|target| target.linear.spec.path.to_string())), r))
}

/// The settings of an adapter that a recipe describes.
pub(super) fn peft_settings(config: &ModelConfig, lora: &LoraRecipe) -> Result<PeftConfig, Fault> {
    let pattern = |key| move |found: String| bad_setting(key, &found, "regular expressions that can be read");
    let lora = lora.clone();
    Ok(PeftConfig {
        target_parameters: lora.target_parameters,
        modules_to_save: lora.modules_to_save,
        is_classifier: config.num_classes.is_some(),
        exclude_modules: ModuleSet::Names(lora.exclude_modules),
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
        ..PeftConfig::plain(lora.r, lora.alpha, lora.dropout, module_set(lora.target_modules)?)
    })
}

/// The settings with all targets as names, each once, in the order of the layer; an expression stays as it is.
pub(super) fn listed(config: &ModelConfig, settings: PeftConfig) -> Result<PeftConfig, Fault> {
    let parameters = names_of(meant_parameters(config, &settings)?.iter().map(|(linear, _)| parameter_name(linear)));
    let linears = meant(config, &settings)?;
    // The last part of a path, where it means no other linear.
    let is_meant = |other: &ModelLinear| linears.iter().any(|linear| linear.name == other.name);
    let others: Vec<ModelLinear> = config.linears().into_iter().filter(|linear| !is_meant(linear)).collect();
    let name = |linear: &ModelLinear| {
        let is_shared = others.iter().any(|other| other.spec.name() == linear.spec.name());
        if is_shared { linear.spec.path.to_string() } else { linear.spec.name().to_owned() }
    };
    let embedding = targets_embedding(&settings).then(|| "embed_tokens".to_owned());
    let names = || ModuleSet::Names(names_of(linears.iter().map(name).chain(embedding)));
    let is_expression = matches!(settings.target_modules, ModuleSet::Matching(_));
    let target_modules = if is_expression { settings.target_modules.clone() } else { names() };
    Ok(PeftConfig { target_modules, target_parameters: parameters, ..settings })
}

/// The linears that a list of names means, those that are excluded among them. All linears are those of the layers, and with experts those
/// of attention: the experts are all targeted at once then ([`meant_parameters`]), and the router is not.
pub(super) fn meant(config: &ModelConfig, settings: &PeftConfig) -> Result<Vec<ModelLinear>, Fault> {
    let of_layers = config.linears();
    let mut linears: Vec<ModelLinear> = of_layers.iter().cloned().chain(config.output()).collect();
    let names = match &settings.target_modules {
        ModuleSet::Names(names) => names,
        ModuleSet::Matching(regex) => {
            linears.retain(|linear| regex.is_match(&module(settings, &linear.name)));
            let matches_nothing = linears.is_empty() && !targets_embedding(settings);
            let expected = "an expression that matches whole names of linears in the layers, as `model.layers.0.self_attn.q_proj`, or \
                            `model.embed_tokens`, or `lm_head`, only";
            let found = format!("`{}`", regex.written());
            let refused = bad_setting("target_modules", &found, expected);
            // PEFT knows no matrices beside a norm.
            let matches_norm = regex.is_match(FINAL_NORM.trim_end_matches(".weight"));
            return if matches_nothing || matches_norm { Err(refused) } else { Ok(linears) };
        }
        ModuleSet::AllLinear => {
            // PEFT takes the MLP of a layer without experts, and a shared one, for experts: it could not read them.
            let has_experts = config.layers.iter().any(|layer| layer.feed_forward.experts().is_some());
            let is_meant = |linear: &ModelLinear| !has_experts || linear.spec.path.contains("attn");
            return Ok(of_layers.into_iter().filter(is_meant).collect());
        }
    };
    let is_meant = |linear: &ModelLinear, name: &String| is_named(&linear.spec.path, name);
    let is_known = |name: &&String| is_named(EMBEDDING_MODULE, name) || linears.iter().any(|linear| is_meant(linear, name));
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        let known = names_of(of_layers.iter().map(|linear| linear.spec.name().to_owned()));
        return Err(unknown_target("target_modules", unknown, &known));
    }
    linears.retain(|linear| names.iter().any(|name| is_meant(linear, name)));
    Ok(linears)
}

/// The linears that PEFT sees as parameters of a module: those of all experts side by side, with their number, and routers.
pub(super) fn meant_parameters(config: &ModelConfig, settings: &PeftConfig) -> Result<Vec<(ModelLinear, usize)>, Fault> {
    let known = parameters(config);
    if settings.target_modules == ModuleSet::AllLinear && settings.target_parameters.is_empty() {
        return Ok(known.into_iter().filter(|(_, experts)| *experts > 1).collect());
    }
    let is_meant = |linear: &ModelLinear, name: &String| is_named(&parameter_name(linear), name);
    let unknown = settings.target_parameters.iter().find(|&name| !known.iter().any(|(linear, _)| is_meant(linear, name)));
    if let Some(unknown) = unknown {
        let known = names_of(known.iter().map(|(linear, _)| parameter_name(linear)));
        return Err(unknown_target("target_parameters", unknown, &known));
    }
    let names = &settings.target_parameters;
    Ok(known.into_iter().filter(|(linear, _)| names.iter().any(|name| is_meant(linear, name))).collect())
}

/// All linears that PEFT sees as parameters, bottom to top, and how many experts' lie side by side in each.
fn parameters(config: &ModelConfig) -> Vec<(ModelLinear, usize)> {
    let of_layer = |(layer, spec): (usize, &super::LayerSpec)| {
        let Some(experts) = spec.feed_forward.experts() else { return Vec::new() };
        let behind = spec.linears(config.hidden_size).len();
        let linear = |number, spec: LinearSpec| ModelLinear {
            layer: LayerIdx(layer),
            number,
            name: layer_tensor(layer, &spec.path),
            spec,
        };
        let router = linear(spec.attention.linears(config.hidden_size).len(), experts.router(config.hidden_size));
        let stacked = experts.stacked(config.hidden_size).into_iter().enumerate();
        let stacked = stacked.map(|(index, spec)| (linear(behind + index, spec), experts.num_experts));
        stacked.chain([(router, 1)]).collect()
    };
    config.layers.iter().enumerate().flat_map(of_layer).collect()
}

/// What PEFT calls a linear as a parameter: `mlp.experts.down_proj`, `mlp.gate.weight`.
fn parameter_name(linear: &ModelLinear) -> String {
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
    let [inner, names] = [INNER.to_owned(), names.join("|")].map(|name| name.replace('.', r"\."));
    let of_layers = format!(r"layers\.{layers}\.(?:.*\.)?(?:{names})");
    let expression =
        format!("{inner}{}", if targets_embedding(settings) { format!("(?:embed_tokens|{of_layers})") } else { of_layers });
    let expression = if has_output { format!("{OUTPUT_MODULE}|{expression}") } else { expression };
    let target_modules = module_set(TargetModules::Matching(expression))?;
    Ok(PeftConfig { target_modules, layers_to_transform: Vec::new(), layers_pattern: LayerLists::default(), ..settings.clone() })
}

/// What PEFT calls the module beside whose linear something is trained. The experts' two matrices are parameters of one module, which it
/// wraps once for each: the inner one is that of gate and up, where both are targets.
pub(super) fn peft_module(settings: &PeftConfig, linear: &str) -> String {
    let linear = &*module(settings, linear);
    let targets = |parameter: &str| settings.target_parameters.iter().any(|name| is_named(parameter, name));
    // With all linears as targets both are, where they are not listed yet.
    let is_open = settings.target_modules == ModuleSet::AllLinear && settings.target_parameters.is_empty();
    let has_down = targets(STACKED_DOWN) || is_open;
    if let Some(module) = linear.strip_suffix(STACKED_GATE_UP) {
        return format!("{module}mlp.experts{}", if has_down { ".base_layer" } else { "" });
    }
    if let Some(module) = linear.strip_suffix(STACKED_DOWN) {
        return format!("{module}mlp.experts");
    }
    match linear.strip_suffix("block_sparse_moe.gate") {
        Some(module) if targets("mlp.gate.weight") => format!("{module}mlp.gate"),
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

fn names_of(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut names = Vec::new();
    for name in all {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn module_set(modules: TargetModules) -> Result<ModuleSet, Fault> {
    let unread = |found: String| bad_setting("target_modules", &found, "a regular expression that can be read");
    match modules {
        TargetModules::AllLinear => Ok(ModuleSet::AllLinear),
        TargetModules::Names(names) => Ok(ModuleSet::Names(names)),
        TargetModules::Matching(written) => ModuleSet::matching(&written).map_err(unread),
    }
}
