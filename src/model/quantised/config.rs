//! What `quantization_config` in a `config.json` says.

use serde_json::{Map, Value};

use crate::model::fields::{Fields, unsupported};
use crate::units::Fault;

pub(in crate::model) const QUANTISATION: &str = "quantization_config";

/// How the matrices of a checkpoint are packed, those that are.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::model) enum Quantisation {
    /// bitsandbytes in 4 bits; each tensor says its type itself.
    FourBits,
    /// bitsandbytes in 8 bits, with a scale for each row.
    EightBits,
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
    Compressed {
        weights: Compressed,
    },
}

/// Whole numbers with a scale for each group of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct Ints {
    pub(super) bits: usize,
    /// `None`: one group for all columns.
    pub(super) group_size: Option<usize>,
}

/// What a group of compressed-tensors says of its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum Compressed {
    /// `pack-quantized`: of how many bits, by groups or rows, or as a whole.
    Packed { ints: Ints, is_symmetric: bool },
    /// `float-quantized`, by blocks of this size, or by rows or as a whole.
    Float { block: Option<[usize; 2]> },
    /// `int-quantized`, in 8 bits, by rows or as a whole.
    Int { is_symmetric: bool },
}

/// No matrix has more rows or columns.
const MAX_SIZE: u64 = i32::MAX as u64;

/// Methods that are read.
const METHODS: &str = "`bitsandbytes`, `mxfp4`, `fp8`, `gptq`, `awq` or `compressed-tensors`";

impl Quantisation {
    /// Reads it in a whole `config.json`; `None` where nothing is packed.
    pub(in crate::model) fn of(object: &Map<String, Value>) -> Result<Option<Self>, Fault> {
        let Some(table) = object.get(QUANTISATION).filter(|value| !value.is_null()) else { return Ok(None) };
        let Some(table) = table.as_object() else { return Err(Fields::new(object).unsupported(QUANTISATION, "a table".into())) };
        let table = QuantisationTable(table);
        match table.text("quant_method") {
            Some("bitsandbytes") => match (table.flag("load_in_4bit"), table.flag("load_in_8bit")) {
                (true, false) => Ok(Some(Self::FourBits)),
                (false, true) => Ok(Some(Self::EightBits)),
                _ => Err(table.wrong("load_in_4bit", "one of `load_in_4bit` and `load_in_8bit`")),
            },
            Some("mxfp4") => Ok(Some(Self::Mxfp4)),
            Some("fp8") => Ok(Some(Self::Fp8 { block: table.block("weight_block_size")? })),
            Some("gptq") => {
                let format = table.text("checkpoint_format").or(table.text("format")).unwrap_or("gptq");
                if !["gptq", "gptq_v2"].contains(&format) {
                    return Err(table.wrong("checkpoint_format", "`gptq` or `gptq_v2`"));
                }
                let ints = table.ints("bits", &[2, 3, 4, 8])?;
                Ok(Some(Self::Gptq { ints, is_v1: format == "gptq" }))
            }
            Some("awq") => {
                if table.text("version").is_some_and(|version| !version.eq_ignore_ascii_case("gemm")) {
                    return Err(table.wrong("version", "`gemm`"));
                }
                Ok(Some(Self::Awq { ints: table.ints("bits", &[4])? }))
            }
            Some("compressed-tensors") => Ok(Some(Self::Compressed { weights: compressed(&table)? })),
            _ => Err(table.wrong("quant_method", METHODS)),
        }
    }
}

/// `quantization_config` or a table in it.
struct QuantisationTable<'a>(&'a Map<String, Value>);

impl QuantisationTable<'_> {
    fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(Value::as_str)
    }

    fn flag(&self, key: &str) -> bool {
        self.0.get(key).and_then(Value::as_bool).unwrap_or(false)
    }

    fn wrong(&self, key: &str, expected: &str) -> Fault {
        let found = self.0.get(key).map_or_else(|| "missing".to_owned(), crate::model::fields::shown);
        unsupported(&format!("{QUANTISATION}.{key}"), &found, expected)
    }

    fn block(&self, key: &str) -> Result<Option<[usize; 2]>, Fault> {
        let Some(value) = self.0.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        let sizes: Option<Vec<usize>> = value
            .as_array()
            .map(|all| all.iter().filter_map(Value::as_u64).filter(|&size| size <= MAX_SIZE).map(|size| size as usize).collect());
        match sizes.as_deref() {
            Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok(Some([rows, columns])),
            _ => Err(self.wrong(key, "two sizes")),
        }
    }

    fn ints(&self, bits_key: &str, known: &[usize]) -> Result<Ints, Fault> {
        let bits = self.0.get(bits_key).and_then(Value::as_u64).map(|bits| bits as usize);
        let bits = bits.filter(|bits| known.contains(bits));
        let bits = bits.ok_or_else(|| self.wrong(bits_key, &format!("one of {known:?}")))?;
        let group_size = match self.0.get("group_size") {
            None | Some(Value::Null) => None,
            Some(size) if size.as_i64() == Some(-1) => None,
            Some(size) if size.as_u64().is_some_and(|size| (1..=MAX_SIZE).contains(&size)) => {
                size.as_u64().map(|size| size as usize)
            }
            Some(_) => return Err(self.wrong("group_size", "a whole number, or -1")),
        };
        Ok(Ints { bits, group_size })
    }
}

/// The one group of weights that a checkpoint has.
fn compressed(table: &QuantisationTable<'_>) -> Result<Compressed, Fault> {
    let groups = table.0.get("config_groups").and_then(Value::as_object);
    let mut groups = groups.into_iter().flatten().filter_map(|(_, group)| group.as_object());
    let (Some(group), None) = (groups.next(), groups.next()) else {
        return Err(table.wrong("config_groups", "one group"));
    };
    let group = QuantisationTable(group);
    let format = if group.text("format").is_some() { group.text("format") } else { table.text("format") };
    let status = table.text("quantization_status");
    if status.is_some_and(|status| status != "compressed") {
        return Err(table.wrong("quantization_status", "`compressed`"));
    }
    if table.0.get("sparsity_config").is_some_and(|config| config.as_object().is_some_and(|config| !config.is_empty())) {
        return Err(table.wrong("sparsity_config", "none"));
    }
    let Some(weights) = group.0.get("weights").and_then(Value::as_object).map(QuantisationTable) else {
        return Err(group.wrong("weights", "a table"));
    };
    let (strategy, is_symmetric) = (weights.text("strategy").unwrap_or("tensor"), weights.flag("symmetric"));
    let kind = weights.text("type").unwrap_or("int");
    match format {
        Some("pack-quantized") => {
            let ints = weights.ints("num_bits", &[1, 2, 3, 4, 5, 6, 7, 8])?;
            match strategy {
                "group" | "channel" | "tensor" => Ok(Compressed::Packed { ints, is_symmetric }),
                _ => Err(weights.wrong("strategy", "`group`, `channel` or `tensor`")),
            }
        }
        Some("float-quantized" | "naive-quantized") if kind == "float" => {
            Ok(Compressed::Float { block: weights.block("block_structure")? })
        }
        Some("int-quantized" | "naive-quantized") if kind == "int" => Ok(Compressed::Int { is_symmetric }),
        _ => Err(table.wrong("format", "`pack-quantized`, `float-quantized`, `int-quantized` or `naive-quantized`")),
    }
}
