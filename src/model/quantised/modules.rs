//! Which modules are packed by what `quantization_config` says.

use regex::Regex;
use serde_json::{Map, Value};

use super::config::{QUANTISATION, QuantisationTable};
use crate::units::Fault;

/// What `quantization_config` says of modules: a file that does not agree is refused.
#[derive(Debug, Default)]
pub(in crate::model) struct QuantisedModules {
    excluded: Vec<ModulePattern>,
    /// `None`: what is not excluded may be packed or not.
    targets: Option<Vec<ModulePattern>>,
}

#[derive(Debug)]
enum ModulePattern {
    /// A whole name, or some of its parts between dots.
    Parts(String),
    Whole(String),
    Matching(Regex),
    AllLinear,
}

impl ModulePattern {
    fn is_match(&self, module: &str) -> bool {
        match self {
            Self::Parts(parts) => format!(".{module}.").contains(&format!(".{parts}.")),
            Self::Whole(name) => name == module,
            Self::Matching(regex) => regex.is_match(module),
            Self::AllLinear => true,
        }
    }

    /// What an expression of Python matches from the start; `None` if only Python can tell.
    fn matching(expression: &str) -> Option<Self> {
        Regex::new(&format!("^(?:{expression})")).ok().map(Self::Matching)
    }

    /// As compressed-tensors has it: an expression, a class or a whole name.
    fn compressed(written: &str) -> Option<Self> {
        match written.strip_prefix("re:") {
            Some(expression) => Self::matching(expression),
            None if written == "Linear" => Some(Self::AllLinear),
            None => Some(Self::Whole(written.to_owned())),
        }
    }
}

impl QuantisedModules {
    /// Reads them in a whole `config.json`. Expressions that only Python can read say nothing.
    pub(in crate::model) fn of(object: &Map<String, Value>) -> Result<Self, Fault> {
        let Some(table) = object.get(QUANTISATION).and_then(Value::as_object) else { return Ok(Self::default()) };
        let table = QuantisationTable::new(table);
        let mut excluded = Vec::new();
        for key in ["llm_int8_skip_modules", "modules_to_not_convert", "ignored_layers"] {
            excluded.extend(table.names(key)?.into_iter().map(|name| ModulePattern::Parts(name.to_owned())));
        }
        let ignored: Vec<_> = table.names("ignore")?.into_iter().map(ModulePattern::compressed).collect();
        let is_readable = ignored.iter().all(Option::is_some);
        excluded.extend(ignored.into_iter().flatten());
        // The first pattern that matches counts; behind one that does not leave modules out, nothing is sure.
        let dynamic = table.map.get("dynamic").and_then(Value::as_object).into_iter().flatten();
        let left_out = dynamic.map_while(|(pattern, _)| pattern.strip_prefix("-:"));
        excluded.extend(left_out.filter_map(ModulePattern::matching));
        let group = table.group("config_groups");
        let targets = group.map(|group| group.names("targets")).transpose()?.filter(|targets| !targets.is_empty());
        // Expressions of Python may mean any module.
        let targets = targets.filter(|_| is_readable);
        let targets = targets.and_then(|targets| targets.into_iter().map(ModulePattern::compressed).collect());
        Ok(Self { excluded, targets })
    }

    /// Whether a module must be packed, or must not be, by any of its names; `None` if both are right.
    pub(super) fn must_be_packed(&self, names: &[&str]) -> Option<bool> {
        let is_any = |patterns: &[ModulePattern]| patterns.iter().any(|pattern| names.iter().any(|name| pattern.is_match(name)));
        if is_any(&self.excluded) { Some(false) } else { self.targets.as_deref().map(is_any) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn modules_are_meant_by_the_rules_of_each_library() {
        let of = |table: Value| QuantisedModules::of(json!({ QUANTISATION: table }).as_object().unwrap()).unwrap();
        let group = |targets: Value, ignore: Value| json!({"config_groups": {"g": {"targets": targets}}, "ignore": ignore});
        let up = "model.layers.1.mlp.up_proj";
        for (table, expected) in [
            (json!({}), None),
            (json!({"llm_int8_skip_modules": null}), None),
            (json!({"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]}), Some(false)),
            (json!({"modules_to_not_convert": ["up_proj"]}), Some(false)),
            (json!({"modules_to_not_convert": ["up", "mlp.up", "model.layers.*.mlp"]}), None),
            (json!({"ignored_layers": ["mlp.up_proj"]}), Some(false)),
            (json!({"dynamic": {"-:.*\\.1\\.mlp": {}}}), Some(false)),
            (json!({"dynamic": {"-:mlp": {}, "+:.*\\.mlp": {}}}), None),
            (json!({"dynamic": {"+:.*\\.1\\.mlp": {}, "-:.*\\.mlp": {}}}), None),
            (group(json!(["Linear"]), json!(["lm_head", "up_proj", "re:mlp"])), Some(true)),
            (group(json!(["Linear"]), json!(["re:.*mlp"])), Some(false)),
            (group(json!([up]), json!([])), Some(true)),
            (group(json!(["re:.*self_attn"]), json!([])), Some(false)),
            (group(json!(["re:^(?!lm_head).*$"]), json!(["re:(?!x).*"])), None),
            (group(json!(["Linear"]), json!(["re:(?!x).*"])), None),
            (group(json!([]), Value::Null), None),
        ] {
            assert_eq!(of(table.clone()).must_be_packed(&[up]), expected, "{table}");
        }
        let outer = of(json!({"ignore": ["language_model.model.layers.1.mlp.up_proj"]}));
        assert_eq!(outer.must_be_packed(&[up, "language_model.model.layers.1.mlp.up_proj"]), Some(false));
        let refused = QuantisedModules::of(json!({ QUANTISATION: {"ignore": "lm_head"} }).as_object().unwrap());
        let refused = refused.err().unwrap().to_string();
        assert!(
            refused.contains("`quantization_config.ignore` is \"lm_head\", which is not supported: expected a list of names"),
            "{refused}"
        );
    }
}
