//! Which tensors of a checkpoint a packed matrix consists of: names, dtypes and shapes, all of which follow from its rows and columns.

use super::config::{Ints, Quantisation};
use crate::files::Dtype;

/// A tensor that a packed matrix consists of.
#[derive(Clone, Debug)]
pub(in crate::model) struct WeightPart {
    pub(in crate::model) name: String,
    pub(in crate::model) dtypes: &'static [Dtype],
    /// Where several are allowed, the first is named.
    pub(in crate::model) shapes: Vec<Vec<usize>>,
    pub(in crate::model) is_optional: bool,
}

const SCALES: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];
/// Scales of 8-bit floats may also be powers of 2.
const POWERS: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F8_E8M0];
const BYTES: &[Dtype] = &[Dtype::U8];
const WORDS: &[Dtype] = &[Dtype::I32];
/// How names end of scales with which a server keeps keys and values in 8 bits: no weight is made of them.
pub(super) const KV_CACHE_SCALES: [&str; 5] = [".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale"];
/// `bnb_4bit_quant_storage` names the dtype under which the same bytes are stored.
const STORAGE: &[Dtype] = &[Dtype::U8, Dtype::BF16, Dtype::F16, Dtype::F32];

fn part(name: String, dtypes: &'static [Dtype], shape: &[usize]) -> WeightPart {
    of_shapes(name, dtypes, vec![shape.to_vec()])
}

fn of_shapes(name: String, dtypes: &'static [Dtype], shapes: Vec<Vec<usize>>) -> WeightPart {
    WeightPart { name, dtypes, shapes, is_optional: false }
}

fn optional(part: WeightPart) -> WeightPart {
    WeightPart { is_optional: true, ..part }
}

impl Quantisation {
    /// What must be there for a matrix to be a packed one: the part by which it is known.
    pub(in crate::model) fn mark(&self, weight: &str) -> Vec<String> {
        let module = weight.strip_suffix(".weight").unwrap_or(weight);
        match self {
            Self::Bnb4bit { .. } => [".absmax", ".quant_map"].map(|end| format!("{weight}{end}")).into(),
            Self::Bnb8bit => vec![format!("{module}.SCB")],
            Self::Mxfp4 => vec![format!("{weight}_blocks"), format!("{weight}_scales")],
            Self::Fp8 { .. } => vec![format!("{module}.weight_scale_inv")],
            Self::Gptq { .. } | Self::Awq { .. } => ["qweight", "qzeros", "scales"].map(|end| format!("{module}.{end}")).into(),
            Self::CompressedInts { .. } => vec![format!("{module}.weight_packed")],
            Self::CompressedFloats { .. } | Self::CompressedBytes { .. } => vec![format!("{module}.weight_scale")],
        }
    }

    /// How the name of a tensor begins that says how the packed matrix `weight` is to be read.
    pub(in crate::model) fn state(&self, weight: &str) -> Option<String> {
        matches!(self, Self::Bnb4bit { .. }).then(|| format!("{weight}{STATE}"))
    }

    /// The bias of a packed matrix, which is written as zeros for a model that has none.
    pub(in crate::model) fn bias(&self, weight: &str) -> Option<String> {
        let module = weight.strip_suffix(".weight")?;
        matches!(self, Self::Gptq { .. } | Self::Awq { .. }).then(|| format!("{module}.bias"))
    }

    /// Whether codes lie in memory in another order than in the file.
    pub(in crate::model) fn reorders_codes(&self) -> bool {
        matches!(self, Self::Gptq { .. } | Self::Awq { .. } | Self::CompressedInts { .. })
    }

    pub(in crate::model) fn name(&self) -> &'static str {
        match self {
            Self::Bnb4bit { .. } => "4 bits of bitsandbytes",
            Self::Bnb8bit => "8 bits of bitsandbytes",
            Self::Mxfp4 => "MXFP4",
            Self::Fp8 { .. } => "FP8",
            Self::Gptq { .. } => "GPTQ",
            Self::Awq { .. } => "AWQ",
            Self::CompressedInts { .. } | Self::CompressedFloats { .. } | Self::CompressedBytes { .. } => "compressed-tensors",
        }
    }

    /// The tensors of a packed matrix of this shape, `(out, in)`, or of those of all experts, `(X, in, out)`.
    pub(in crate::model) fn parts(&self, weight: &str, shape: &[usize]) -> Vec<WeightPart> {
        let module = weight.strip_suffix(".weight").unwrap_or(weight);
        let own = |end: &str| format!("{module}.{end}");
        if let (Self::Mxfp4, &[experts, inner, out]) = (self, shape) {
            let blocks = [experts, out, inner.div_ceil(32), 16];
            return vec![part(format!("{weight}_blocks"), BYTES, &blocks), part(format!("{weight}_scales"), BYTES, &blocks[..3])];
        }
        let &[out, inner] = shape else { return Vec::new() };
        match self {
            Self::Mxfp4 => Vec::new(),
            Self::Bnb4bit { .. } => four_bits(weight, out * inner),
            Self::Bnb8bit => vec![
                part(weight.to_owned(), &[Dtype::I8], shape),
                part(own("SCB"), &[Dtype::F32], &[out]),
                optional(part(own("weight_format"), BYTES, &[])),
            ],
            Self::Fp8 { block } => {
                let one = || vec![vec![], vec![1]];
                let scales = block.map_or_else(one, |block| by_blocks([out, inner], block));
                vec![
                    part(weight.to_owned(), &[Dtype::F8_E4M3], shape),
                    of_shapes(own("weight_scale_inv"), POWERS, scales),
                    optional(of_shapes(own("activation_scale"), SCALES, one())),
                ]
            }
            Self::Gptq { ints, .. } => {
                let (groups, bits) = (groups(ints, inner), ints.bits);
                vec![
                    part(own("qweight"), WORDS, &[(inner * bits).div_ceil(32), out]),
                    part(own("qzeros"), WORDS, &[groups, (out * bits).div_ceil(32)]),
                    part(own("scales"), SCALES, &[groups, out]),
                    optional(part(own("g_idx"), WORDS, &[inner])),
                ]
            }
            Self::Awq { ints } => {
                let groups = groups(ints, inner);
                vec![
                    part(own("qweight"), WORDS, &[inner, out.div_ceil(8)]),
                    part(own("qzeros"), WORDS, &[groups, out.div_ceil(8)]),
                    part(own("scales"), SCALES, &[groups, out]),
                ]
            }
            Self::CompressedInts { ints, is_symmetric } => compressed_ints(own, [out, inner], ints, *is_symmetric),
            Self::CompressedFloats { block } => {
                let scales = block.map_or_else(|| by_rows(out), |block| by_blocks([out, inner], block));
                vec![
                    part(own("weight"), &[Dtype::F8_E4M3], shape),
                    of_shapes(own("weight_scale"), SCALES, scales),
                    of_activations(own("input_scale")),
                ]
            }
            Self::CompressedBytes { is_symmetric } => {
                let zero = of_shapes(own("weight_zero_point"), &[Dtype::I8], by_rows(out));
                vec![
                    part(own("weight"), &[Dtype::I8], shape),
                    of_shapes(own("weight_scale"), SCALES, by_rows(out)),
                    if *is_symmetric { optional(zero) } else { zero },
                    of_activations(own("input_scale")),
                ]
            }
        }
    }
}

fn compressed_ints(own: impl Fn(&str) -> String, [out, inner]: [usize; 2], ints: &Ints, is_symmetric: bool) -> Vec<WeightPart> {
    let (groups, words) = (groups(ints, inner), (out * ints.bits).div_ceil(32));
    let of_tensor = ints.group_size.is_none() && is_symmetric;
    let scales = [vec![out, groups], vec![1]].into_iter().take(if of_tensor { 2 } else { 1 }).collect();
    let zero = part(own("weight_zero_point"), WORDS, &[words, groups]);
    vec![
        part(own("weight_packed"), WORDS, &[out, (inner * ints.bits).div_ceil(32)]),
        of_shapes(own("weight_scale"), SCALES, scales),
        part(own("weight_shape"), &[Dtype::I64], &[2]),
        if is_symmetric { optional(zero) } else { zero },
        optional(part(own("weight_g_idx"), WORDS, &[inner])),
        of_activations(own("input_scale")),
    ]
}

/// A scale for each block of so many rows and columns.
fn by_blocks([out, inner]: [usize; 2], [rows, columns]: [usize; 2]) -> Vec<Vec<usize>> {
    vec![vec![out.div_ceil(rows), inner.div_ceil(columns)]]
}

/// A scale for each row, or one for all.
fn by_rows(out: usize) -> Vec<Vec<usize>> {
    vec![vec![out, 1], vec![1], vec![]]
}

/// The scale of what a server multiplies with the weight.
fn of_activations(name: String) -> WeightPart {
    optional(of_shapes(name, SCALES, vec![vec![1], vec![]]))
}

/// What stands between a weight's name and its 4-bit type in the name of its quantisation state.
pub(super) const STATE: &str = ".quant_state.bitsandbytes__";

fn groups(ints: &Ints, inner: usize) -> usize {
    ints.group_size.map_or(1, |size| inner.div_ceil(size))
}

/// The shape of codes depends on their dtype, those of scales on what the state says: they are checked when they are read.
fn four_bits(weight: &str, numbers: usize) -> Vec<WeightPart> {
    let bytes = numbers.div_ceil(2);
    let shapes = [1, 2, 4].iter().filter(|size| bytes.is_multiple_of(**size)).map(|size| vec![bytes / size, 1]);
    let any = |end: &str, dtypes| of_shapes(format!("{weight}{end}"), dtypes, Vec::new());
    vec![
        of_shapes(weight.to_owned(), STORAGE, shapes.collect()),
        any(".absmax", &[Dtype::F32, Dtype::U8]),
        part(format!("{weight}.quant_map"), &[Dtype::F32], &[16]),
        optional(any(".nested_absmax", &[Dtype::F32])),
        optional(any(".nested_quant_map", &[Dtype::F32])),
    ]
}
