//! Which linears an adapter means, and what PEFT calls them.

use super::ModelError;
use super::config::{ModelConfig, ModelLinear};
use super::names::{layer_tensor, peft_tensor};
use super::spec::{LinearSpec, STACKED_DOWN, STACKED_GATE_UP};
use crate::files::{PeftConfig, PeftTargets, is_named};
use crate::recipe::TargetModules;
use crate::units::LayerIdx;

/// A linear that gets matrices, or the same linear of all experts.
#[derive(Debug)]
pub(super) struct LoraTarget {
    pub(super) linear: ModelLinear,
    /// What PEFT calls it.
    peft: String,
    /// Whose matrices lie side by side; 1 for a linear that stands alone.
    experts: usize,
    pub(super) r: usize,
    pub(super) scale: f64,
}

impl LoraTarget {
    fn new(settings: &PeftConfig, linear: ModelLinear, experts: usize) -> Self {
        let (r, scale) = (settings.rank_of(&linear.name), settings.scale_of(&linear.name));
        Self { peft: peft_module(settings, &linear.name), linear, experts, r, scale }
    }

    /// Names in PEFT's files and shapes of A and of B.
    pub(super) fn matrices(&self) -> [(String, [usize; 2]); 2] {
        let (LinearSpec { inner, out, .. }, rows) = (&self.linear.spec, self.experts * self.r);
        [("lora_A.weight", [rows, *inner]), ("lora_B.weight", [*out, rows])]
            .map(|(part, shape)| (peft_tensor(&self.peft, part), shape))
    }

    /// Whether its tokens are those that were sent to an expert.
    pub(super) fn is_of_experts(&self) -> bool {
        self.linear.name.contains(".experts.")
    }
}

/// The linears of a model to which the settings of an adapter give matrices, bottom to top.
pub(super) fn targets(config: &ModelConfig, settings: &PeftConfig) -> Result<Vec<LoraTarget>, ModelError> {
    let excludes = |linear: &ModelLinear| settings.exclude_modules.as_ref().is_some_and(|all| all.contains(&linear.name));
    let modules = meant(config, &settings.target_modules)?.into_iter().map(|linear| (linear, 1));
    let all = modules.chain(meant_parameters(config, settings)?).filter(|(linear, _)| !excludes(linear));
    let mut all: Vec<LoraTarget> = all.map(|(linear, experts)| LoraTarget::new(settings, linear, experts)).collect();
    all.sort_by_key(|target| (target.linear.layer.0, target.linear.number));
    Ok(all)
}

/// The linears that a recipe's names mean, bottom to top.
pub fn targeted(config: &ModelConfig, modules: &TargetModules) -> Result<Vec<ModelLinear>, ModelError> {
    meant(config, &peft_targets(modules))
}

/// The settings with all targets as names, each once, in the order of the layer.
pub(super) fn listed(config: &ModelConfig, settings: PeftConfig) -> Result<PeftConfig, ModelError> {
    let parameters = names_of(meant_parameters(config, &settings)?.iter().map(|(linear, _)| parameter_name(linear)));
    let modules = names_of(meant(config, &settings.target_modules)?.iter().map(|linear| linear.spec.name().to_owned()));
    Ok(PeftConfig { target_modules: PeftTargets::Names(modules), target_parameters: parameters, ..settings })
}

/// The linears that a list of names means, those that are excluded among them. All linears are, with experts, those of attention: the
/// experts are all targeted at once then ([`meant_parameters`]), and the router is not.
fn meant(config: &ModelConfig, targets: &PeftTargets) -> Result<Vec<ModelLinear>, ModelError> {
    let mut linears = config.linears();
    let PeftTargets::Names(names) = targets else {
        linears
            .retain(|linear| config.layers[linear.layer.0].feed_forward.experts().is_none() || linear.spec.path.contains("attn"));
        return Ok(linears);
    };
    let is_meant = |linear: &ModelLinear, name: &String| is_named(&linear.spec.path, name);
    if let Some(unknown) = names.iter().find(|&name| !linears.iter().any(|linear| is_meant(linear, name))) {
        let known = names_of(linears.iter().map(|linear| linear.spec.name().to_owned()));
        return Err(unknown_target("target_modules", unknown, &known));
    }
    linears.retain(|linear| names.iter().any(|name| is_meant(linear, name)));
    Ok(linears)
}

/// The linears that PEFT sees as parameters of a module: those of all experts side by side, with their number, and routers.
fn meant_parameters(config: &ModelConfig, settings: &PeftConfig) -> Result<Vec<(ModelLinear, usize)>, ModelError> {
    let known = parameters(config);
    if settings.target_modules == PeftTargets::AllLinear && settings.target_parameters.is_empty() {
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
        _ => ROUTER.to_owned(),
    }
}

const ROUTER: &str = "mlp.gate.weight";

/// What PEFT calls the module beside whose linear something is trained. The experts' two matrices are parameters of one module, which it
/// wraps once for each: the inner one is that of gate and up, where both are targets.
pub(super) fn peft_module(settings: &PeftConfig, linear: &str) -> String {
    let targets = |parameter: &str| settings.target_parameters.iter().any(|name| is_named(parameter, name));
    // With all linears as targets both are, whether or not they are listed yet.
    let has_down = targets(STACKED_DOWN) || settings.target_modules == PeftTargets::AllLinear;
    if let Some(module) = linear.strip_suffix(STACKED_GATE_UP) {
        return format!("{module}mlp.experts{}", if has_down { ".base_layer" } else { "" });
    }
    if let Some(module) = linear.strip_suffix(STACKED_DOWN) {
        return format!("{module}mlp.experts");
    }
    match linear.strip_suffix("block_sparse_moe.gate") {
        Some(module) if targets(ROUTER) => format!("{module}mlp.gate"),
        _ => linear.to_owned(),
    }
}

fn unknown_target(key: &'static str, name: &str, known: &[String]) -> ModelError {
    let known = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    ModelError::UnknownTarget { key, name: name.to_owned(), known: if known.is_empty() { "none".into() } else { known } }
}

/// Each name once.
fn names_of(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut names = Vec::new();
    for name in all {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

pub(super) fn peft_targets(modules: &TargetModules) -> PeftTargets {
    match modules {
        TargetModules::AllLinear => PeftTargets::AllLinear,
        TargetModules::Names(names) => PeftTargets::Names(names.clone()),
    }
}
