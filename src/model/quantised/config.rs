//! What `quantization_config` in a `config.json` says: how matrices are packed, and which.

use regex::Regex;
use serde_json::{Map, Value};

use crate::model::fields::{Fields, unsupported};
use crate::units::{Fault, quoted};

pub(in crate::model) const QUANTISATION: &str = "quantization_config";

/// How the matrices of a checkpoint are packed, those that are.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::model) enum Quantisation {
    /// bitsandbytes in 4 bits; each tensor says its type itself, which must be this one where it is named.
    Bnb4bit {
        quant_type: Option<String>,
    },
    /// bitsandbytes in 8 bits, with a scale for each row.
    Bnb8bit,
    /// The experts of gpt-oss, in blocks of 32 columns.
    Mxfp4,
    /// E4M3 with a factor for each block of so many rows and columns, or for the whole matrix.
    Fp8 {
        block: Option<[usize; 2]>,
    },
    Gptq {
        ints: Ints,
        is_v1: bool,
    },
    Awq {
        ints: Ints,
    },
    /// `pack-quantized` of compressed-tensors: of how many bits, by groups or rows, or as a whole.
    CompressedInts {
        ints: Ints,
        is_symmetric: bool,
    },
    /// `float-quantized` of compressed-tensors, by blocks of this size, or by rows or as a whole.
    CompressedFloats {
        block: Option<[usize; 2]>,
    },
    /// `int-quantized` of compressed-tensors, in 8 bits, by rows or as a whole.
    CompressedBytes {
        is_symmetric: bool,
    },
}

/// Whole numbers with a scale for each group of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct Ints {
    pub(super) bits: usize,
    /// `None`: one group for all columns.
    pub(super) group_size: Option<usize>,
}

/// No matrix has more rows or columns.
const MAX_SIZE: i64 = (1 << 31) - 1;

const METHODS: &str = "`bitsandbytes`, `mxfp4`, `fp8`, `gptq`, `awq`, `auto-round` or `compressed-tensors`";

impl Quantisation {
    /// Reads it in a whole `config.json`; `None` where nothing is packed.
    pub(in crate::model) fn of(object: &Map<String, Value>) -> Result<Option<Self>, Fault> {
        let Some(table) = object.get(QUANTISATION).filter(|value| !value.is_null()) else { return Ok(None) };
        let Some(table) = table.as_object() else { return Err(Fields::new(object).unsupported(QUANTISATION, "a table".into())) };
        let table = QuantisationTable::new(table);
        let in_bits = ["load_in_4bit", "load_in_8bit"].map(|key| table.flag_or(key, false));
        // Old files of bitsandbytes name no method.
        let method = match table.text("quant_method") {
            Some("auto-round") => Some(table.packing()?),
            None if in_bits.contains(&true) => Some("bitsandbytes"),
            named => named,
        };
        match method {
            Some("bitsandbytes") => match in_bits {
                [true, false] => Ok(Some(Self::Bnb4bit { quant_type: table.text("bnb_4bit_quant_type").map(str::to_owned) })),
                [false, true] => Ok(Some(Self::Bnb8bit)),
                _ => Err(table.wrong("load_in_4bit", "one of `load_in_4bit` and `load_in_8bit`")),
            },
            Some("mxfp4") => Ok(Some(Self::Mxfp4)),
            // Without the key it is a scale for each matrix, as AutoFP8 writes and vLLM reads it.
            Some("fp8") => Ok(Some(Self::Fp8 { block: table.block("weight_block_size")? })),
            Some("gptq") => {
                let format = table.text("checkpoint_format").or(table.text("format")).unwrap_or("gptq");
                if !["gptq", "gptq_v2"].contains(&format) {
                    return Err(table.wrong("checkpoint_format", "`gptq` or `gptq_v2`"));
                }
                if table.text("pack_dtype").is_some_and(|dtype| dtype != "int32") {
                    return Err(table.wrong("pack_dtype", "`int32`"));
                }
                let ints = table.grouped_ints(&[2, 3, 4, 8])?;
                table.same_for_all_modules()?;
                Ok(Some(Self::Gptq { ints, is_v1: format == "gptq" }))
            }
            Some("awq") => {
                if table.text("version").is_some_and(|version| !version.eq_ignore_ascii_case("gemm")) {
                    return Err(table.wrong("version", "`gemm`"));
                }
                Ok(Some(Self::Awq { ints: table.grouped_ints(&[4])? }))
            }
            Some("compressed-tensors") => compressed(&table).map(Some),
            _ => Err(table.wrong("quant_method", METHODS)),
        }
    }
}

/// `quantization_config` or a table in it.
struct QuantisationTable<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

/// Columns of a group in files of GPTQ and AWQ that do not say.
const DEFAULT_GROUP: usize = 128;

impl<'a> QuantisationTable<'a> {
    fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, path: QUANTISATION.to_owned() }
    }

    fn inner(&self, key: &str) -> Option<Self> {
        let map = self.map.get(key)?.as_object()?;
        Some(Self { map, path: format!("{}.{key}", self.path) })
    }

    /// The only table in a table.
    fn group(&self, key: &str) -> Option<Self> {
        let groups = self.inner(key)?;
        let mut keys = groups.map.keys();
        if let (Some(key), None) = (keys.next(), keys.next()) { groups.inner(key) } else { None }
    }

    /// A list of names; empty where there is none.
    fn names(&self, key: &str) -> Result<Vec<&'a str>, Fault> {
        let Some(value) = self.map.get(key).filter(|value| !value.is_null()) else { return Ok(Vec::new()) };
        let names = value.as_array().and_then(|names| names.iter().map(Value::as_str).collect());
        names.ok_or_else(|| self.wrong(key, "a list of names"))
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.map.get(key).and_then(Value::as_str)
    }

    fn flag_or(&self, key: &str, default: bool) -> bool {
        self.map.get(key).and_then(Value::as_bool).unwrap_or(default)
    }

    /// The method whose layout a file of `AutoRound` has.
    fn packing(&self) -> Result<&str, Fault> {
        if self.text("data_type").is_some_and(|kind| kind != "int") {
            return Err(self.wrong("data_type", "`int`"));
        }
        match self.text("packing_format") {
            Some("auto_round:auto_gptq") => Ok("gptq"),
            Some("auto_round:auto_awq") => Ok("awq"),
            _ => Err(self.wrong("packing_format", "`auto_round:auto_gptq` or `auto_round:auto_awq`")),
        }
    }

    fn wrong(&self, key: &str, expected: &str) -> Fault {
        let found = self.map.get(key).map_or_else(|| "missing".to_owned(), quoted);
        unsupported(&format!("{}.{key}", self.path), &found, expected)
    }

    /// Refuses other bits or groups for some modules.
    fn same_for_all_modules(&self) -> Result<(), Fault> {
        let dynamic = self.map.get("dynamic").and_then(Value::as_object).into_iter().flatten();
        let own = |key: &str| self.map.get(key).cloned().or((key == "group_size").then(|| DEFAULT_GROUP.into()));
        let is_other =
            |of: &Value| ["bits", "group_size"].iter().any(|key| of.get(key).is_some_and(|it| own(key).as_ref() != Some(it)));
        let mut others = dynamic.filter(|(pattern, of)| !pattern.starts_with("-:") && is_other(of));
        if others.next().is_none() {
            Ok(())
        } else {
            Err(self.wrong("dynamic", "the same `bits` and `group_size` for all modules"))
        }
    }

    fn block(&self, key: &str) -> Result<Option<[usize; 2]>, Fault> {
        let Some(value) = self.map.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        let sizes: Vec<Option<i64>> = match value {
            Value::Array(sizes) => sizes.iter().map(Value::as_i64).collect(),
            Value::String(text) => text.split('x').map(|size| size.parse().ok()).collect(),
            _ => Vec::new(),
        };
        match sizes[..] {
            [Some(rows @ 1..=MAX_SIZE), Some(columns @ 1..=MAX_SIZE)] => Ok(Some([rows as usize, columns as usize])),
            _ => Err(self.wrong(key, "two sizes")),
        }
    }

    /// As GPTQ and AWQ write them, whose groups may be left out.
    fn grouped_ints(&self, known: &[usize]) -> Result<Ints, Fault> {
        let ints = self.ints("bits", known)?;
        let group_size = if self.map.contains_key("group_size") { ints.group_size } else { Some(DEFAULT_GROUP) };
        Ok(Ints { group_size, ..ints })
    }

    fn ints(&self, bits_key: &str, known: &[usize]) -> Result<Ints, Fault> {
        let bits = self.map.get(bits_key).and_then(Value::as_u64).map(|bits| bits as usize);
        let bits = bits.filter(|bits| known.contains(bits));
        let bits = bits.ok_or_else(|| self.wrong(bits_key, &format!("one of {known:?}")))?;
        let group_size = match self.map.get("group_size").filter(|size| !size.is_null()).map(Value::as_i64) {
            None | Some(Some(-1)) => None,
            Some(Some(size @ 1..=MAX_SIZE)) => Some(size as usize),
            Some(_) => return Err(self.wrong("group_size", "a whole number, or -1")),
        };
        Ok(Ints { bits, group_size })
    }
}

/// The one group of weights that a checkpoint has.
fn compressed(table: &QuantisationTable<'_>) -> Result<Quantisation, Fault> {
    let Some(group) = table.group("config_groups") else { return Err(table.wrong("config_groups", "one group")) };
    let format = if group.text("format").is_some() { group.text("format") } else { table.text("format") };
    let status = table.text("quantization_status");
    if status.is_some_and(|status| status != "compressed") {
        return Err(table.wrong("quantization_status", "`compressed`"));
    }
    let is_none = |config: &Value| {
        let is_dense = |table: &Map<String, Value>| table.get("format").is_some_and(|format| format == "dense");
        config.is_null() || config.as_object().is_some_and(|table| table.is_empty() || is_dense(table))
    };
    for key in ["sparsity_config", "transform_config"] {
        if !table.map.get(key).is_none_or(is_none) {
            return Err(table.wrong(key, "none"));
        }
    }
    let Some(weights) = group.inner("weights") else { return Err(group.wrong("weights", "a table")) };
    let (strategy, is_symmetric) = (weights.text("strategy").unwrap_or("tensor"), weights.flag_or("symmetric", true));
    let kind = weights.text("type").unwrap_or("int");
    match format {
        Some("pack-quantized") => {
            let ints = weights.ints("num_bits", &[1, 2, 3, 4, 5, 6, 7, 8])?;
            match strategy {
                "group" | "channel" | "tensor" => Ok(Quantisation::CompressedInts { ints, is_symmetric }),
                _ => Err(weights.wrong("strategy", "`group`, `channel` or `tensor`")),
            }
        }
        Some("float-quantized" | "naive-quantized") if kind == "float" => {
            Ok(Quantisation::CompressedFloats { block: weights.block("block_structure")? })
        }
        Some("int-quantized" | "naive-quantized") if kind == "int" => Ok(Quantisation::CompressedBytes { is_symmetric }),
        _ => Err(table.wrong("format", "`pack-quantized`, `float-quantized`, `int-quantized` or `naive-quantized`")),
    }
}

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

    fn of(table: &Value) -> Result<Option<Quantisation>, Fault> {
        Quantisation::of(json!({ QUANTISATION: table }).as_object().unwrap())
    }

    #[test]
    fn methods_are_read_as_their_libraries_read_them() {
        let ints = Ints { bits: 4, group_size: Some(32) };
        let of_group = |format: &str, weights: Value, further: (&str, Value)| json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"g": {"weights": weights}}, further.0: further.1});
        let packed = |further: (&str, Value)| of_group("pack-quantized", json!({"num_bits": 4, "group_size": 32}), further);
        let auto_round =
            |format: &str| json!({"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": format});
        let gptq_with = |dynamic: Value| json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic});
        let symmetric = Quantisation::CompressedInts { ints, is_symmetric: true };
        let (of_128, whole) = (Ints { group_size: Some(128), ..ints }, Ints { group_size: None, ..ints });
        for (table, expected) in [
            (json!({"quant_method": "awq", "bits": 4}), Quantisation::Awq { ints: of_128 }),
            (json!({"quant_method": "gptq", "bits": 4}), Quantisation::Gptq { ints: of_128, is_v1: true }),
            (
                json!({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*mlp": {"group_size": 128}}}),
                Quantisation::Gptq { ints: of_128, is_v1: true },
            ),
            (json!({"quant_method": "gptq", "bits": 4, "group_size": -1}), Quantisation::Gptq { ints: whole, is_v1: true }),
            (json!({"load_in_4bit": true, "load_in_8bit": false}), Quantisation::Bnb4bit { quant_type: None }),
            (json!({"load_in_8bit": true}), Quantisation::Bnb8bit),
            (auto_round("auto_round:auto_gptq"), Quantisation::Gptq { ints, is_v1: true }),
            (auto_round("auto_round:auto_awq"), Quantisation::Awq { ints }),
            (gptq_with(json!({"-:.*mlp": {"bits": 8}, "lm_head": {"bits": 4}})), Quantisation::Gptq { ints, is_v1: true }),
            (packed(("sparsity_config", json!({"format": "dense"}))), symmetric.clone()),
            (packed(("transform_config", json!({}))), symmetric.clone()),
            (packed(("transform_config", Value::Null)), symmetric),
            (
                of_group("int-quantized", json!({"num_bits": 8}), ("ignore", json!([]))),
                Quantisation::CompressedBytes { is_symmetric: true },
            ),
            (
                of_group("float-quantized", json!({"type": "float", "block_structure": "16x24"}), ("ignore", json!([]))),
                Quantisation::CompressedFloats { block: Some([16, 24]) },
            ),
        ] {
            assert_eq!(of(&table).unwrap(), Some(expected), "{table}");
        }
        for (table, words) in [
            (auto_round("auto_round:llm_compressor"), "quantization_config.packing_format` is "),
            (json!({"quant_method": "auto-round", "data_type": "mx_fp"}), "quantization_config.data_type` is "),
            (packed(("transform_config", json!({"config_groups": {"u": {}}}))), "quantization_config.transform_config` is"),
            (packed(("sparsity_config", json!({"format": "sparse-bitmask"}))), "quantization_config.sparsity_config` is"),
            (json!({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}), "quantization_config.pack_dtype` is "),
            (gptq_with(json!({"+:.*mlp": {"bits": 8}})), "quantization_config.dynamic` is "),
            (
                json!({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": null}}}),
                "`quantization_config.config_groups.g.weights` is null, which",
            ),
            (json!({"quant_method": "fp8", "weight_block_size": "16x"}), "expected two sizes"),
            (json!({"quant_method": "fp8", "weight_block_size": [16, null, 24]}), "expected two sizes"),
            (json!({"load_in_4bit": true, "load_in_8bit": true}), "one of `load_in_4bit` and `load_in_8bit`"),
        ] {
            let refused = of(&table).unwrap_err().to_string();
            assert!(refused.contains(words), "{table}: {refused}");
        }
    }
}

#[cfg(test)]
mod tests_of_modules {
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
