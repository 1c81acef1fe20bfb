//! Packed matrices of a checkpoint, with their values checked: what stays in memory, and how it is unpacked.

use std::sync::Arc;

use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use super::config::{Ints, Quantisation};
use super::files::STATE;
use super::forms::{
    CodedRows, MX_BLOCK, NF4, PER_127, StoredScales, e2m1, e4m3, fp4, in_blocks, packed_in_bytes, signed, unpacked_words,
};
use crate::model::weights::Files;
use crate::ops::linear::{PackedForm, PackedWeight};
use crate::units::{Fault, quoted};

/// A packed matrix where it is stored.
struct StoredMatrix<'a> {
    files: &'a Files,
    /// The name that it has as a plain one.
    weight: &'a str,
    /// `(out, in)`.
    size: [i64; 2],
}

/// What bitsandbytes says of a tensor.
#[derive(Deserialize)]
struct QuantState {
    quant_type: String,
    blocksize: i64,
    shape: Vec<i64>,
    nested_blocksize: Option<i64>,
    nested_offset: Option<f64>,
}

fn number(x: &Tensor) -> f64 {
    x.to_kind(Kind::Double).double_value(&[])
}

impl Files {
    fn required(&self, name: &str) -> Result<Tensor, Fault> {
        self.raw(name)?.ok_or_else(|| self.wrong(name, "it is missing"))
    }

    /// A tensor all of whose numbers are finite.
    fn finite(&self, name: &str) -> Result<Tensor, Fault> {
        let tensor = self.required(name)?;
        // An exponent, where it is a byte.
        let is_byte = tensor.kind() == Kind::Uint8;
        let is_bad = if is_byte { tensor.eq(255) } else { tensor.isfinite().logical_not() }.reshape([-1]);
        if is_bad.any().int64_value(&[]) == 0 {
            return Ok(tensor);
        }
        let at = is_bad.to_kind(Kind::Int).argmax(None, false).int64_value(&[]);
        let reason = if is_byte { "is 255, which is no number (NaN)" } else { "is infinite or not a number" };
        Err(self.wrong(name, &format!("number {at} {reason}")))
    }

    /// Refuses a vector of another length.
    fn sized(&self, name: &str, vector: &Tensor, count: i64) -> Result<(), Fault> {
        let wrong = || self.wrong(name, &format!("its shape is {:?}, expected [{count}]", vector.size()));
        if vector.size() == [count] { Ok(()) } else { Err(wrong()) }
    }
}

impl Quantisation {
    /// The matrix `weight` `(out, in)`, packed as it is stored but for the order of its codes.
    pub(in crate::model) fn load(&self, files: &Files, weight: &str, size: [i64; 2], kind: Kind) -> Result<PackedWeight, Fault> {
        let stored = StoredMatrix { files, weight, size };
        let block_or = |block: Option<[usize; 2]>, all: [i64; 2]| block.map_or(all, |block| block.map(|size| size as i64));
        let (parts, form) = match self {
            Self::Bnb4bit { quant_type } => stored.four_bits(quant_type.as_deref())?,
            Self::Bnb8bit => stored.eight_bits()?,
            Self::Fp8 { block } => stored.floats("weight_scale_inv", block_or(*block, size))?,
            Self::Gptq { ints, is_v1 } => stored.gptq(*ints, *is_v1)?,
            Self::Awq { ints } => stored.awq(*ints)?,
            Self::CompressedInts { ints, is_symmetric } => stored.compressed_ints(*ints, *is_symmetric)?,
            Self::CompressedFloats { block } => stored.floats("weight_scale", block_or(*block, [1, size[1]]))?,
            Self::CompressedBytes { is_symmetric } => stored.compressed_bytes(*is_symmetric)?,
            Self::Mxfp4 => return Err(files.wrong(weight, "only experts are in MXFP4")),
        };
        Ok(PackedWeight { parts, size, kind, form: Arc::new(form) })
    }

    /// The matrices of all experts, each `(out, in)` with this number of inputs.
    pub(in crate::model) fn load_experts(files: &Files, path: &str, inner: i64, kind: Kind) -> Result<Vec<PackedWeight>, Fault> {
        let (codes, exponents) = (files.required(&format!("{path}_blocks"))?, files.finite(&format!("{path}_scales"))?);
        let form = CodedRows { scales: StoredScales::Powers, ..CodedRows::new(inner, [1, MX_BLOCK]) };
        let (form, table): (Arc<dyn PackedForm>, _) = (Arc::new(form), Tensor::from_slice(&e2m1()));
        let size = codes.size();
        let of = |expert: i64| {
            let parts = vec![codes.get(expert).view([size[1], -1]), table.shallow_clone(), exponents.get(expert)];
            PackedWeight { parts, size: [size[1], inner], kind, form: Arc::clone(&form) }
        };
        Ok((0..size[0]).map(of).collect())
    }
}

/// Codes `(out, in)` with scales, zeros and groups, all by row.
fn grouped(codes: &Tensor, scale: &Tensor, zero: Option<Tensor>, ints: Ints, groups: Option<Tensor>) -> (Vec<Tensor>, CodedRows) {
    let width = codes.size()[1];
    // Numbers of 5 to 7 bits stay in a byte each.
    let bits = if ints.bits <= 4 { ints.bits as i64 } else { 8 };
    let group_size = ints.group_size.map_or(width, |size| size as i64);
    // A zero that all share is in the table.
    let shared = if zero.is_some() { 0 } else { 1 << (ints.bits - 1) };
    let table: Vec<f32> = (0..1 << bits).map(|code| (code - shared) as f32).collect();
    let zero_bits = if bits == 8 { 8 } else { 4 };
    let zero = zero.map(|zero| packed_in_bytes(&zero, zero_bits));
    let form = CodedRows { zero_bits: zero.as_ref().map(|_| zero_bits), ..CodedRows::new(width, [1, group_size]) };
    let parts = [packed_in_bytes(codes, bits), Tensor::from_slice(&table), scale.contiguous()];
    (parts.into_iter().chain(zero).chain(groups).collect(), form)
}

/// Where AWQ's kernels have each of eight outputs in a word: in which group of four bits.
const AWQ_ORDER: [i64; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

impl StoredMatrix<'_> {
    /// The name of a tensor beside the weight, in place of `weight`.
    fn own(&self, end: &str) -> String {
        format!("{}.{end}", self.weight.strip_suffix(".weight").unwrap_or(self.weight))
    }

    fn required(&self, end: &str) -> Result<Tensor, Fault> {
        self.files.required(&self.own(end))
    }

    fn finite(&self, end: &str) -> Result<Tensor, Fault> {
        self.files.finite(&self.own(end))
    }

    fn four_bits(&self, of_config: Option<&str>) -> Result<(Vec<Tensor>, CodedRows), Fault> {
        let Self { files, weight, size } = *self;
        let part = |end: &str| format!("{weight}{end}");
        let states = files.names_with(&part(STATE));
        let [name] = &states[..] else {
            return Err(files.wrong(&part(STATE), &format!("expected one such tensor, found {}", states.len())));
        };
        let kind = &name[weight.len() + STATE.len()..];
        let table = match kind {
            "nf4" => NF4,
            "fp4" => fp4(),
            other => {
                return Err(files.wrong(name, &format!("the type `{}` is not known, expected `nf4` or `fp4`", quoted(other))));
            }
        };
        let text = Vec::<u8>::try_from(files.required(name)?).unwrap_or_default();
        let state: QuantState = serde_json::from_slice(&text).map_err(|error| files.wrong(name, &error.to_string()))?;
        if let Some(other) = [Some(&*state.quant_type), of_config].into_iter().flatten().find(|other| *other != kind) {
            let reason = format!("its content or `bnb_4bit_quant_type` says `{}`, its name `{kind}`", quoted(other));
            return Err(files.wrong(name, &reason));
        }
        if state.shape != size {
            return Err(files.wrong(weight, &format!("`quant_state` says {:?}, expected {size:?}", state.shape)));
        }
        if !(32..=4096).contains(&state.blocksize) || state.blocksize.count_ones() != 1 {
            return Err(files.wrong(name, &format!("`blocksize` is {}, expected a power of 2 from 32 to 4096", state.blocksize)));
        }
        let map_name = part(".quant_map");
        let map = Vec::<f32>::try_from(files.finite(&map_name)?.to_kind(Kind::Float)).unwrap_or_default();
        if map.len() != 16 || map.iter().zip(&table).any(|(found, expected)| (found - expected).abs() > 1e-4) {
            return Err(files.wrong(&map_name, &format!("it is not the table of {kind}")));
        }
        let blocks = (size[0] * size[1] + state.blocksize - 1) / state.blocksize;
        let absmax_name = part(".absmax");
        let absmax = files.required(&absmax_name)?;
        let is_nested = absmax.kind() == Kind::Uint8;
        let absmax = if is_nested { absmax } else { files.finite(&absmax_name)? };
        files.sized(&absmax_name, &absmax, blocks)?;
        let codes = files.required(weight)?.reshape([-1]).view_dtype(Kind::Uint8);
        let bytes = (size[0] * size[1] + 1) / 2;
        if codes.size() != [bytes] {
            return Err(files.wrong(weight, &format!("its codes are {} bytes, expected {bytes}", codes.numel())));
        }
        let mut nested = Vec::new();
        let scales = match (state.nested_blocksize, state.nested_offset) {
            (Some(_), _) if !is_nested => return Err(files.wrong(&absmax_name, "nested scales are expected in U8")),
            (Some(blocksize), Some(offset)) if blocksize > 0 && (offset as f32).is_finite() => {
                let (outer, values) = (part(".nested_absmax"), part(".nested_quant_map"));
                nested.extend([files.finite(&outer)?, files.finite(&values)?]);
                files.sized(&outer, &nested[0], (blocks - 1) / blocksize + 1)?;
                files.sized(&values, &nested[1], 256)?;
                // A JSON number is one of f64; the library has it in f32.
                StoredScales::Nested { blocksize, offset: f64::from(offset as f32) }
            }
            _ if is_nested => return Err(files.wrong(name, "it has no `nested_blocksize` above 0, or no finite `nested_offset`")),
            _ => StoredScales::Numbers,
        };
        if let ([], Some(left)) = (&nested[..], files.names_with(&part(".nested_")).first()) {
            return Err(files.wrong(left, "`quant_state` knows of no nested scales"));
        }
        Ok(in_blocks([codes, Tensor::from_slice(&map), absmax], size[1], state.blocksize, scales, nested))
    }

    fn eight_bits(&self) -> Result<(Vec<Tensor>, CodedRows), Fault> {
        let name = self.own("weight_format");
        if let Some(format) = self.files.raw(&name)?.filter(|format| format.int64_value(&[]) != 0) {
            let reason = format!("it is {}, expected 0 (row by row)", format.int64_value(&[]));
            return Err(self.files.wrong(&name, &reason));
        }
        self.bytes(self.finite("SCB")?, None, &signed(), [1, self.size[1]], PER_127)
    }

    /// Codes of a byte each, with their scales by blocks, zeros where there are some, and a further factor.
    fn bytes(
        &self,
        scale: Tensor,
        zero: Option<Tensor>,
        table: &[f32],
        block: [i64; 2],
        factor: f32,
    ) -> Result<(Vec<Tensor>, CodedRows), Fault> {
        let codes = self.files.required(self.weight)?.view_dtype(Kind::Uint8);
        let size = codes.size();
        let scale = if scale.dim() < 2 { scale.reshape([-1, 1]) } else { scale };
        let block = if scale.numel() == 1 { [size[0], size[1]] } else { block };
        let scales = if scale.kind() == Kind::Uint8 { StoredScales::Powers } else { StoredScales::Numbers };
        let form = CodedRows { factor, zero_bits: zero.as_ref().map(|_| 8), scales, ..CodedRows::new(size[1], block) };
        if zero.as_ref().is_some_and(|zero| zero.numel() != scale.numel()) {
            return Err(self.files.wrong(self.weight, "it has other numbers of scales and of zeros"));
        }
        let zero = zero.map(|zero| zero.view_as(&scale));
        Ok(([codes, Tensor::from_slice(table), scale].into_iter().chain(zero).collect(), form))
    }

    fn floats(&self, scale: &str, block: [i64; 2]) -> Result<(Vec<Tensor>, CodedRows), Fault> {
        let is_none = self.files.required(self.weight)?.bitwise_and(127).eq(127);
        if is_none.any().int64_value(&[]) != 0 {
            return Err(self.files.wrong(self.weight, "a code is no number (NaN)"));
        }
        self.bytes(self.finite(scale)?, None, &e4m3(), block, 1.0)
    }

    /// Refuses zero points of a symmetric matrix that are not 0, which may be written in several ways.
    fn check_zero_points(&self, zero: Option<&Tensor>, written: &[i64]) -> Result<(), Fault> {
        let is_written = |value: &i64| zero.is_none_or(|zero| zero.eq(*value).all().int64_value(&[]) != 0);
        let wrong = || self.files.wrong(&self.own("weight_zero_point"), "it is not 0, though the weights are `symmetric`");
        if written.iter().any(is_written) { Ok(()) } else { Err(wrong()) }
    }

    /// Signed whole numbers of a byte each.
    fn compressed_bytes(&self, is_symmetric: bool) -> Result<(Vec<Tensor>, CodedRows), Fault> {
        let (scale, zero) = (self.finite("weight_scale")?, self.files.raw(&self.own("weight_zero_point"))?);
        if is_symmetric {
            self.check_zero_points(zero.as_ref(), &[0])?;
        }
        // With zeros, which are signed too, both are raised by 128.
        let raised = if zero.is_some() { 128.0 } else { 0.0 };
        let table: Vec<f32> = signed().iter().map(|value| value + raised).collect();
        let zero = zero.map(|zero| zero.bitwise_xor(128));
        self.bytes(scale, zero, &table, [1, self.size[1]], 1.0)
    }

    /// The groups of columns that a file gives, where these are not simply one after the other, of `count` that there are.
    fn groups(&self, end: &str, ints: Ints, count: i64) -> Result<Option<Tensor>, Fault> {
        let (name, width) = (self.own(end), self.size[1]);
        let Some(index) = self.files.raw(&name)? else { return Ok(None) };
        if index.eq(-1).all().int64_value(&[]) != 0 {
            return Ok(None);
        }
        let (least, most) = (number(&index.min()) as i64, number(&index.max()) as i64);
        if least < 0 || most >= count {
            let found = if least < 0 { least } else { most };
            return Err(self.files.wrong(&name, &format!("group {found} is none of the {count} that there are")));
        }
        let size = ints.group_size.map_or(width, |size| size as i64);
        let plain = Tensor::arange(width, (Kind::Int64, Device::Cpu)).divide_scalar_mode(size, "floor");
        let index = index.to_kind(Kind::Int64);
        Ok((!index.equal(&plain)).then_some(index))
    }

    fn gptq(&self, ints: Ints, is_v1: bool) -> Result<(Vec<Tensor>, CodedRows), Fault> {
        let ([out, inner], bits) = (self.size, ints.bits as i64);
        let words = self.required("qweight")?.transpose(0, 1).contiguous();
        let codes = unpacked_words(&words, bits, inner);
        let scale = self.finite("scales")?.transpose(0, 1);
        let zero = unpacked_words(&self.required("qzeros")?, bits, out).transpose(0, 1);
        let zero = if is_v1 { (zero + 1).bitwise_and((1 << bits) - 1) } else { zero };
        let groups = self.groups("g_idx", ints, scale.size()[1])?;
        Ok(grouped(&codes, &scale, Some(zero.to_kind(Kind::Uint8).contiguous()), ints, groups))
    }

    fn awq(&self, ints: Ints) -> Result<(Vec<Tensor>, CodedRows), Fault> {
        let ordered = |words: &Tensor| {
            let value = |place: i64| -> Tensor { words.bitwise_right_shift_tensor_scalar(4 * place) };
            let all = Tensor::stack(&AWQ_ORDER.map(value), 2).bitwise_and(15).to_kind(Kind::Uint8);
            all.flatten(1, 2).narrow(1, 0, self.size[0]).transpose(0, 1).contiguous()
        };
        let codes = ordered(&self.required("qweight")?);
        let scale = self.finite("scales")?.transpose(0, 1);
        let zero = ordered(&self.required("qzeros")?);
        Ok(grouped(&codes, &scale, Some(zero), ints, None))
    }

    fn compressed_ints(&self, ints: Ints, is_symmetric: bool) -> Result<(Vec<Tensor>, CodedRows), Fault> {
        let ([out, inner], bits) = (self.size, ints.bits as i64);
        let shape = Vec::<i64>::try_from(self.required("weight_shape")?).unwrap_or_default();
        if shape != self.size {
            return Err(self.files.wrong(&self.own("weight_shape"), &format!("it says {shape:?}, expected {:?}", self.size)));
        }
        let codes = unpacked_words(&self.required("weight_packed")?, bits, inner);
        let scale = self.finite("weight_scale")?;
        let scale = if scale.dim() == 1 { scale.expand([out, 1], false).contiguous() } else { scale };
        let zero = if is_symmetric {
            self.files.raw(&self.own("weight_zero_point"))?
        } else {
            Some(self.required("weight_zero_point")?)
        };
        let zero = zero.map(|words| unpacked_words(&words.transpose(0, 1).contiguous(), bits, out).transpose(0, 1).contiguous());
        if is_symmetric {
            // As it is, or raised like the codes.
            self.check_zero_points(zero.as_ref(), &[0, 1 << (bits - 1)])?;
        }
        let zero = zero.filter(|_| !is_symmetric);
        let groups = self.groups("weight_g_idx", ints, scale.size()[1])?;
        Ok(grouped(&codes, &scale, zero, ints, groups))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weights::MODEL_TENSORS;
    use crate::store::{pt_metadata, save_tensors};

    fn stored(parts: Vec<(&'static str, Tensor)>) -> Files {
        let dir = tempfile::tempdir().unwrap();
        let parts: Vec<_> = parts.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        save_tensors(&dir.path().join(MODEL_TENSORS), &parts, &pt_metadata()).unwrap();
        Files::open(dir.path(), false).unwrap()
    }

    fn unpacked(quantisation: &Quantisation, parts: Vec<(&'static str, Tensor)>, size: [i64; 2]) -> Result<Vec<f32>, Fault> {
        let packed = quantisation.load(&stored(parts), "m.weight", size, Kind::Float)?;
        Ok(Vec::try_from(packed.form.unpack(&packed.parts, &(0..size[0]), Kind::Float).reshape([-1])).unwrap())
    }

    fn bytes_of(values: &[u8], size: [i64; 2]) -> Tensor {
        Tensor::from_slice(values).view(size)
    }

    #[test]
    fn bytes_have_zeros_of_their_own_sign() {
        let int = Quantisation::CompressedBytes { is_symmetric: false };
        let parts = |zero: &[u8], scale: &[f32]| {
            vec![
                ("m.weight", bytes_of(&[3, 128, 127, 0], [2, 2])),
                ("m.weight_scale", Tensor::from_slice(scale)),
                ("m.weight_zero_point", Tensor::from_slice(zero)),
            ]
        };
        // -5 and 100 of rows, and -128 of all.
        assert_eq!(unpacked(&int, parts(&[251, 100], &[0.5, 2.0]), [2, 2]).unwrap(), [4.0, -61.5, 54.0, -200.0]);
        assert_eq!(unpacked(&int, parts(&[128], &[0.5]), [2, 2]).unwrap(), [65.5, 0.0, 127.5, 64.0]);
    }

    #[test]
    fn zero_points_of_symmetric_weights_are_0() {
        let bytes = |zero: u8| {
            let parts = vec![
                ("m.weight", bytes_of(&[3, 128], [1, 2])),
                ("m.weight_scale", Tensor::from_slice(&[0.5f32])),
                ("m.weight_zero_point", Tensor::from_slice(&[zero])),
            ];
            unpacked(&Quantisation::CompressedBytes { is_symmetric: true }, parts, [1, 2])
        };
        let words = |zero: u32| {
            let parts = vec![
                ("m.weight_packed", Tensor::from_slice(&[0x18i32]).view([1, 1])),
                ("m.weight_scale", Tensor::from_slice(&[0.5f32]).view([1, 1])),
                ("m.weight_shape", Tensor::from_slice(&[1i64, 2])),
                ("m.weight_zero_point", Tensor::from_slice(&[zero as i32]).view([1, 1])),
            ];
            let ints = Ints { bits: 4, group_size: None };
            unpacked(&Quantisation::CompressedInts { ints, is_symmetric: true }, parts, [1, 2])
        };
        assert_eq!(bytes(0).unwrap(), [1.5, -64.0]);
        assert_eq!([0, 8, 0x8888_8888].map(|zero| words(zero).unwrap()), [const { [0.0, -3.5] }; 3]);
        for refused in [bytes(1), words(9)] {
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains("weight_zero_point` in ") && refused.contains("it is not 0"), "{refused}");
        }
    }

    #[test]
    fn scales_of_8_bit_floats_may_be_powers_of_2() {
        let fp8 = Quantisation::Fp8 { block: Some([2, 2]) };
        let parts = |scale: [u8; 2]| {
            vec![("m.weight", bytes_of(&[0x38, 0x7e, 0xb8], [1, 3])), ("m.weight_scale_inv", bytes_of(&scale, [1, 2]))]
        };
        assert_eq!(unpacked(&fp8, parts([126, 130]), [1, 3]).unwrap(), [0.5, 224.0, -8.0]);
        let refused = unpacked(&fp8, parts([126, 255]), [1, 3]).unwrap_err().to_string();
        let is_named = refused.starts_with("tensor `m.weight_scale_inv` in ");
        assert!(is_named && refused.contains(": number 1 is 255, which is no number"), "{refused}");
    }

    #[test]
    fn a_packed_matrix_may_have_one_scale() {
        let ints = Ints { bits: 4, group_size: None };
        let packed = Quantisation::CompressedInts { ints, is_symmetric: true };
        let parts = vec![
            ("m.weight_packed", Tensor::from_slice(&[0x18, 0xf]).view([2, 1])),
            ("m.weight_scale", Tensor::from_slice(&[0.5f32])),
            ("m.weight_shape", Tensor::from_slice(&[2i64, 2])),
        ];
        assert_eq!(unpacked(&packed, parts, [2, 2]).unwrap(), [0.0, -3.5, 3.5, -4.0]);
    }

    /// The same bytes may be stored as another dtype, and must be as many.
    #[test]
    fn codes_of_4_bits_are_as_many_as_the_matrix_has_numbers() {
        let four_bits = |of_config: Option<&str>, codes: Tensor| {
            let state = br#"{"quant_type": "nf4", "blocksize": 64, "shape": [3, 5]}"#;
            let parts = vec![
                ("m.weight", codes),
                ("m.weight.absmax", Tensor::from_slice(&[0.5f32])),
                ("m.weight.quant_map", Tensor::from_slice(&NF4)),
                ("m.weight.quant_state.bitsandbytes__nf4", Tensor::from_slice(state)),
            ];
            unpacked(&Quantisation::Bnb4bit { quant_type: of_config.map(str::to_owned) }, parts, [3, 5])
        };
        let bytes = |count: usize| Tensor::from_slice(&vec![0xf0u8; count]);
        let expected: Vec<f32> = (0..15).map(|at| if at % 2 == 0 { 0.5 } else { -0.5 }).collect();
        for codes in [bytes(8), bytes(8).view_dtype(Kind::Half), bytes(8).view([8, 1]).view_dtype(Kind::Uint8)] {
            assert_eq!(four_bits(Some("nf4"), codes).unwrap(), expected);
        }
        for count in [4, 7, 9, 16] {
            let refused = four_bits(None, bytes(count)).unwrap_err().to_string();
            let is_named = refused.starts_with("tensor `m.weight` in ");
            assert!(is_named && refused.contains(&format!(": its codes are {count} bytes, expected 8")), "{refused}");
        }
        let refused = four_bits(Some("fp4"), bytes(8)).unwrap_err().to_string();
        assert!(refused.contains("its content or `bnb_4bit_quant_type` says `fp4`, its name `nf4`"), "{refused}");
    }

    #[test]
    fn nested_scales_that_the_state_lacks_are_refused() {
        let state = br#"{"quant_type": "nf4", "blocksize": 64, "shape": [1, 2]}"#;
        let parts = vec![
            ("m.weight", Tensor::from_slice(&[0xf0u8])),
            ("m.weight.absmax", Tensor::from_slice(&[0.5f32])),
            ("m.weight.nested_quant_map", Tensor::ones([256], (Kind::Float, Device::Cpu))),
            ("m.weight.quant_map", Tensor::from_slice(&NF4)),
            ("m.weight.quant_state.bitsandbytes__nf4", Tensor::from_slice(state)),
        ];
        let refused = unpacked(&Quantisation::Bnb4bit { quant_type: None }, parts, [1, 2]).unwrap_err().to_string();
        assert!(refused.starts_with("tensor `m.weight.nested_quant_map`") && refused.contains("no nested scales"), "{refused}");
    }

    #[test]
    fn nested_scales_are_finite_in_blocks_of_any_size() {
        let scaled = |blocksize: i64, offset: f64| {
            let state = format!(
                r#"{{"quant_type": "nf4", "blocksize": 64, "shape": [1, 2], "nested_blocksize": {blocksize}, "nested_offset": {offset}}}"#
            );
            let parts = vec![
                ("m.weight", Tensor::from_slice(&[0xf0u8])),
                ("m.weight.absmax", Tensor::from_slice(&[7u8])),
                ("m.weight.nested_absmax", Tensor::from_slice(&[0.5f32])),
                ("m.weight.nested_quant_map", Tensor::ones([256], (Kind::Float, Device::Cpu))),
                ("m.weight.quant_map", Tensor::from_slice(&NF4)),
                ("m.weight.quant_state.bitsandbytes__nf4", Tensor::from_slice(state.as_bytes())),
            ];
            unpacked(&Quantisation::Bnb4bit { quant_type: None }, parts, [1, 2])
        };
        for blocksize in [1, 256, i64::MAX] {
            assert_eq!(scaled(blocksize, 0.25).unwrap(), [0.75, -0.75]);
        }
        for (blocksize, offset) in [(0, 0.25), (256, 1e39)] {
            let refused = scaled(blocksize, offset).unwrap_err().to_string();
            assert!(refused.contains("no `nested_blocksize` above 0, or no finite `nested_offset`"), "{refused}");
        }
    }

    /// A last word, or a last block of a row, may be filled in part only.
    #[test]
    fn what_does_not_fill_a_word_or_a_block_is_cut_off() {
        let awq = Quantisation::Awq { ints: Ints { bits: 4, group_size: None } };
        let shape_of = |quantisation: &Quantisation, name: &str, shape: &[usize]| {
            let parts = quantisation.parts(name, shape).into_iter();
            parts.map(|part| part.shapes[0].iter().map(|&size| size as i64).collect()).collect::<Vec<Vec<i64>>>()
        };
        let words = |size: &[i64]| Tensor::ones(size, (Kind::Int, Device::Cpu));
        let [codes, zeros, scales] = &shape_of(&awq, "m.weight", &[12, 3])[..] else { panic!() };
        let parts = vec![
            ("m.qweight", words(codes)),
            ("m.qzeros", words(zeros).zeros_like()),
            ("m.scales", Tensor::ones(&scales[..], (Kind::Half, Device::Cpu))),
        ];
        // The lowest four bits of a word are the first of eight outputs.
        let expected: Vec<f32> = (0..36).map(|at| if at / 3 % 8 == 0 { 1.0 } else { 0.0 }).collect();
        assert_eq!(unpacked(&awq, parts, [12, 3]).unwrap(), expected);

        let [codes, scales] = &shape_of(&Quantisation::Mxfp4, "m", &[2, 48, 5])[..] else { panic!() };
        let bytes = |size: &[i64], value: i64| Tensor::full(size, value, (Kind::Uint8, Device::Cpu));
        let parts = stored(vec![("m_blocks", bytes(codes, 0x24)), ("m_scales", bytes(scales, 128))]);
        let experts = Quantisation::load_experts(&parts, "m", 48, Kind::Float).unwrap();
        assert_eq!(experts.iter().map(|expert| expert.size).collect::<Vec<_>>(), [[5, 48]; 2]);
        let found = experts[1].form.unpack(&experts[1].parts, &(0..5), Kind::Float);
        assert_eq!(found, Tensor::from_slice(&[4.0f32, 2.0]).repeat([24]).expand([5, 48], false));
    }
}
