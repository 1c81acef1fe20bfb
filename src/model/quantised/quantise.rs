//! Plain matrices packed while they are loaded: as bitsandbytes does it (`functional.py`, `quantize_4bit` and `int8_vectorwise_quant`), or in
//! MXFP4 (OCP Microscaling Formats v1.0, 6.3).

use std::sync::Arc;

use tch::{Device, Kind, Tensor, no_grad};

use super::forms::{
    CodedRows, MX_BLOCK, NF4, PER_127, StoredScales, e2m1, fp4, in_blocks, packed_in_bytes, powers_of_two, signed,
};
use crate::model::config::PackedSizes;
use crate::model::layout::{Role, TensorEntry};
use crate::model::names::layer_of;
use crate::ops::linear::PackedWeight;
use crate::recipe::Quantize;
use crate::units::{Fault, quoted};

const BLOCKSIZE: i64 = 64;
/// Scales that share one, where they are quantised themselves.
const OUTER_BLOCKSIZE: i64 = 256;

/// Whether a tensor is packed: the matrices of the layers' linears, but for routers.
pub(in crate::model) fn is_quantised(name: &str) -> bool {
    let module = name.strip_suffix(".weight").and_then(|module| module.rsplit('.').next());
    layer_of(name).is_some() && module.is_some_and(|module| !["gate", "router"].contains(&module))
}

/// What packing takes of the model's matrices.
pub(in crate::model) fn quantised_sizes(to: Quantize, entries: &[TensorEntry]) -> PackedSizes {
    let mut sizes = PackedSizes::default();
    let is_meant = |entry: &&TensorEntry| entry.role == Role::Matrix && entry.shape.len() == 2 && is_quantised(&entry.name);
    for entry in entries.iter().filter(is_meant) {
        let numbers = entry.shape.iter().product::<usize>();
        let bytes = match to {
            Quantize::Int8 => numbers + 4 * entry.shape[0],
            Quantize::Nf4 | Quantize::Fp4 => numbers.div_ceil(2) + 4 * numbers.div_ceil(BLOCKSIZE as usize),
            Quantize::Nf4Double => {
                let blocks = numbers.div_ceil(BLOCKSIZE as usize);
                numbers.div_ceil(2) + blocks + 4 * (blocks.div_ceil(OUTER_BLOCKSIZE as usize) + 256)
            }
            Quantize::Mxfp4 => entry.shape[0] * (entry.shape[1].div_ceil(2) + entry.shape[1].div_ceil(MX_BLOCK as usize)),
        };
        sizes.add(&entry.name, &entry.shape, bytes, to.name());
    }
    sizes
}

/// Numbers that are packed at a time: what is made of them on the way takes several times as much.
pub(super) const AT_ONCE: i64 = 1 << 20;

/// A matrix `(out, in)`, packed by its values in f32; it computes in `kind`.
///
/// # Errors
/// A number is infinite or none.
pub(in crate::model) fn quantised(name: &str, weight_oi: &Tensor, to: Quantize, kind: Kind) -> Result<PackedWeight, Fault> {
    let size = [0, 1].map(|dim| weight_oi.size()[dim]);
    let (parts, form) = no_grad(|| match to {
        Quantize::Nf4 => four_bits(weight_oi, &NF4, false),
        Quantize::Nf4Double => four_bits(weight_oi, &NF4, true),
        Quantize::Fp4 => four_bits(weight_oi, &fp4(), false),
        Quantize::Int8 => {
            let [level, scale_o1] = in_parts(weight_oi, (AT_ONCE / size[1]).max(1), eight_bits);
            let form = CodedRows { factor: PER_127, ..CodedRows::new(size[1], [1, size[1]]) };
            (vec![level, Tensor::from_slice(&signed()), scale_o1], form)
        }
        Quantize::Mxfp4 => {
            let [codes, exponents] = in_parts(weight_oi, (AT_ONCE / size[1]).max(1), micro_floats);
            let form = CodedRows { scales: StoredScales::Powers, ..CodedRows::new(size[1], [1, MX_BLOCK]) };
            (vec![codes, Tensor::from_slice(&e2m1()), exponents], form)
        }
    });
    // A block with a number that is none, or is infinite, has such a scale.
    let is_bad = match to {
        Quantize::Mxfp4 => parts[2].eq(255),
        Quantize::Nf4Double => parts[3].isfinite().logical_not(),
        Quantize::Nf4 | Quantize::Fp4 | Quantize::Int8 => parts[2].isfinite().logical_not(),
    };
    if is_bad.any().int64_value(&[]) != 0 {
        let message = format!("`{}` has a number that is infinite or not a number, and can not be packed", quoted(name));
        return Err(Fault::data(message, "take the model from its source again, or leave `model.quantize` out"));
    }
    Ok(PackedWeight { parts, size, kind, form: Arc::new(form) })
}

/// What is made of so many rows at a time, in f32, put together.
fn in_parts(x: &Tensor, rows: i64, make: impl Fn(&Tensor) -> [Tensor; 2]) -> [Tensor; 2] {
    let made: Vec<_> = x.split(rows, 0).iter().map(|part| make(&part.to_kind(Kind::Float))).collect();
    [0, 1].map(|at: usize| Tensor::cat(&made.iter().map(|of_part| &of_part[at]).collect::<Vec<_>>(), 0))
}

fn eight_bits(weight_oi: &Tensor) -> [Tensor; 2] {
    let scale_o1 = weight_oi.abs().amax([1i64], true);
    let level = (weight_oi * (scale_o1.reciprocal() * 127.0).nan_to_num(0.0, 0.0, 0.0)).round();
    [level.to_kind(Kind::Int8).view_dtype(Kind::Uint8), scale_o1]
}

/// Codes and exponents; the exponent of a block with a number that is none, or is infinite, is 255.
fn micro_floats(weight_oi: &Tensor) -> [Tensor; 2] {
    let size = [0, 1].map(|dim| weight_oi.size()[dim]);
    let blocks = (size[1] + MX_BLOCK - 1) / MX_BLOCK;
    let value = weight_oi.constant_pad_nd([0, blocks * MX_BLOCK - size[1]]).view([size[0], blocks, MX_BLOCK]);
    let largest: Tensor = value.abs().amax([2i64], true).view_dtype(Kind::Int).bitwise_right_shift_tensor_scalar(23);
    // The largest is from 4 to below 8, where the largest code is 6.
    let exponent = largest.where_self(&largest.eq(255), &(&largest - 2).clamp_min(0));
    let scaled = value / powers_of_two(&exponent);
    let bounds = Tensor::from_slice(&[0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]);
    let [down, up] = [false, true].map(|right| scaled.abs().bucketize(&bounds, true, right));
    // What is as near to two has the even code.
    let code = down.where_self(&down.remainder(2).eq(0), &up) + scaled.signbit() * 8;
    let codes = code.to_kind(Kind::Uint8).view([size[0], -1]).narrow(1, 0, size[1]);
    [packed_in_bytes(&codes, 4), exponent.squeeze_dim(2).to_kind(Kind::Uint8)]
}

fn four_bits(weight_oi: &Tensor, table: &[f32], is_double: bool) -> (Vec<Tensor>, CodedRows) {
    let mut order: Vec<usize> = (0..16).collect();
    order.sort_by(|&a, &b| table[a].total_cmp(&table[b]).then(a.cmp(&b)));
    let sorted: Vec<f32> = order.iter().map(|&code| table[code]).collect();
    let bounds: Vec<f32> = sorted.windows(2).map(|pair| f32::midpoint(pair[0], pair[1])).collect();
    let (bounds, codes) = (Tensor::from_slice(&bounds), order.iter().map(|&code| code as u8).collect::<Vec<_>>());
    let codes = Tensor::from_slice(&codes);
    let make = |numbers: &Tensor| {
        let (scaled, absmax) = in_units_of_blocks(numbers, BLOCKSIZE);
        // How many bounds are smaller.
        let code = codes.index_select(0, &scaled.bucketize(&bounds, true, false));
        let count = numbers.size()[0];
        let code = code.narrow(0, 0, count + count % 2).view([-1, 2]);
        let upper: Tensor = code.select(1, 0).bitwise_left_shift_tensor_scalar(4);
        [upper.bitwise_or_tensor(&code.select(1, 1)), absmax]
    };
    let [packed, absmax] = in_parts(&weight_oi.reshape([-1]), AT_ONCE, make);
    let width = weight_oi.size()[1];
    let table = Tensor::from_slice(table);
    if !is_double {
        return in_blocks([packed, table, absmax], width, BLOCKSIZE, StoredScales::Numbers, Vec::new());
    }
    let offset = absmax.mean(Kind::Float).double_value(&[]);
    let (scaled, outer) = in_units_of_blocks(&(&absmax - offset), OUTER_BLOCKSIZE);
    let values = dynamic_map();
    let bounds = (values.narrow(0, 0, 255) + values.narrow(0, 1, 255)) * 0.5;
    let codes = scaled.bucketize(&bounds, true, false).to_kind(Kind::Uint8).narrow(0, 0, absmax.size()[0]);
    let scales = StoredScales::Nested { blocksize: OUTER_BLOCKSIZE, offset };
    in_blocks([packed, table, codes], width, BLOCKSIZE, scales, vec![outer, values])
}

/// The 256 values of 8 bits that bitsandbytes has for scales: of one sign and each power of 10 from 1e-6 to 1 twice as many as of the one
/// below (`create_dynamic_map`; Dettmers 2016, arXiv 1511.04561).
fn dynamic_map() -> Tensor {
    let of_power = |power: i64| {
        let bounds = Tensor::linspace(0.1, 1.0, (1 << power) + 1, (Kind::Float, Device::Cpu));
        let means = (bounds.narrow(0, 0, 1 << power) + bounds.narrow(0, 1, 1 << power)) / 2.0;
        means * 10f64.powi(power as i32 - 6)
    };
    let positive: Vec<Tensor> = (0..7).map(of_power).collect();
    let negative = positive.iter().map(|values| -values).collect::<Vec<_>>();
    let ends = Tensor::from_slice(&[0f32, 1.0]);
    Tensor::cat(&positive.iter().chain(&negative).chain([&ends]).collect::<Vec<_>>(), 0).sort(0, false).0
}

/// Numbers divided by what is largest in their block, and these, which is 0 of a block of zeros: `(n)` in; `(blocks · blocksize)` and `(blocks)` out.
fn in_units_of_blocks(numbers: &Tensor, blocksize: i64) -> (Tensor, Tensor) {
    let count = numbers.size()[0];
    let blocks = (count + blocksize - 1) / blocksize;
    let value = numbers.constant_pad_nd([0, blocks * blocksize - count]).view([blocks, blocksize]);
    let absmax = value.abs().amax([1i64], false);
    // The library divides in the last block alone, where that is a short one.
    let mut scaled = &value * absmax.reciprocal().unsqueeze(1);
    if count % blocksize != 0 {
        scaled.get(blocks - 1).copy_(&(value.get(blocks - 1) / absmax.get(blocks - 1)));
    }
    (scaled.nan_to_num_(0.0, 0.0, 0.0).clamp_(-1.0, 1.0).reshape([-1]), absmax)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::files::TensorFile;
    use crate::store::load_tensor;

    #[test]
    fn codes_and_scales_are_those_of_bitsandbytes() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised/bnb-quantise.safetensors");
        let file = TensorFile::open(&path).unwrap();
        for (case, to) in ["a", "b", "c"].iter().flat_map(|case| [(case, Quantize::Nf4), (case, Quantize::Fp4)]) {
            for dtype in ["float32", "float16", "bfloat16"] {
                let get = |end: &str| load_tensor(&file, &format!("{case}.{dtype}.{}.64.{end}", to.name())).unwrap();
                let weight_oi = get("input").to_kind(Kind::Float);
                let packed = quantised("w", &weight_oi, to, Kind::Float).unwrap();
                if to == Quantize::Nf4 {
                    let expected = get("packed").reshape([-1]);
                    assert_eq!(packed.parts[0].reshape([-1]).narrow(0, 0, expected.numel() as i64), expected, "{case} {dtype}");
                }
                assert_eq!(packed.parts[2].reshape([-1]), get("absmax"), "{case} {dtype} {}", to.name());
                let whole = packed.form.unpack(&packed.parts, &(0..packed.size[0]), Kind::Float);
                assert_eq!(whole, get("dequantised"), "{case} {dtype} {}", to.name());
            }
        }
    }

    #[test]
    fn scales_of_scales_are_those_of_bitsandbytes() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
        let saved = TensorFile::open(&folder.join("model-bnb-nf4-dq/model.safetensors")).unwrap();
        let map = load_tensor(&saved, "model.layers.0.mlp.up_proj.weight.nested_quant_map").unwrap();
        assert_eq!(dynamic_map(), map);
        let file = TensorFile::open(&folder.join("bnb-quantise.safetensors")).unwrap();
        for case in ["a", "b", "c"] {
            let get = |end: &str| load_tensor(&file, &format!("{case}.float32.nf4.64.{end}")).unwrap();
            let weight_oi = load_tensor(&file, &format!("{case}.float32.nf4.64.input")).unwrap();
            let packed = quantised("w", &weight_oi, Quantize::Nf4Double, Kind::Float).unwrap();
            let [codes, expected] = [packed.parts[2].reshape([-1]), get("dq.absmax")].map(|codes| codes.to_kind(Kind::Int));
            assert!((codes - expected).abs().max().int64_value(&[]) <= 1, "{case}");
            assert!(packed.parts[3].allclose(&get("dq.nested_absmax"), 1e-6, 0.0, false), "{case}");
            let plain = quantised("w", &weight_oi, Quantize::Nf4, Kind::Float).unwrap();
            let [found, exact] =
                [&packed, &plain].map(|packed| packed.form.unpack(&packed.parts, &(0..packed.size[0]), Kind::Float));
            assert!((found - &exact).abs().max().double_value(&[]) <= 0.02 * exact.abs().max().double_value(&[]), "{case}");
        }
    }

    #[test]
    fn eight_bits_are_near_and_zeros_stay() {
        let weight_oi =
            Tensor::cat(&[Tensor::randn([7, 40], tch::kind::FLOAT_CPU), Tensor::zeros([1, 40], tch::kind::FLOAT_CPU)], 0);
        let packed = quantised("w", &weight_oi, Quantize::Int8, Kind::Float).unwrap();
        let error = (packed.form.unpack(&packed.parts, &(0..8), Kind::Float) - &weight_oi).abs().amax([1i64], true);
        assert!(error.le_tensor(&(&packed.parts[2] * (0.51 / 127.0))).all().int64_value(&[]) == 1);
    }

    #[test]
    fn numbers_that_are_none_are_refused() {
        for (value, to) in Quantize::ALL.iter().flat_map(|to| [f64::NAN, f64::INFINITY].map(|value| (value, *to))) {
            let weight_oi = Tensor::ones([5, 70], tch::kind::FLOAT_CPU);
            let _ = weight_oi.get(3).get(69).fill_(value);
            let refused = quantised("w", &weight_oi, to, Kind::Float).unwrap_err();
            assert!(refused.to_string().contains("`w` has a number"), "{refused}");
        }
    }

    #[test]
    fn micro_floats_are_the_nearest_and_what_they_hold_stays() {
        let unpacked = |packed: &PackedWeight| packed.form.unpack(&packed.parts, &(0..packed.size[0]), Kind::Float);
        // A short last block, halves between two codes, what is cut off, zeros and what is subnormal.
        let held = [0.0, -0.5, 1.0, 1.5, 2.0, -3.0, 4.0, 6.0];
        let pairs =
            [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (-3.5, -4.0), (5.0, 4.0), (7.9, 6.0), (0.3, 0.5)];
        for power in [1.0f32, 2f32.powi(-9), 2f32.powi(100), 2f32.powi(-125)] {
            for (first, second) in held.map(|x| (x, x)).into_iter().chain(pairs) {
                let row = |x: f32| {
                    Tensor::from_slice(&[&[4.0, x, 0.0][..], &[0.0; 29], &[0.0, 0.0, x, 4.0]].concat()) * f64::from(power)
                };
                let packed = quantised("w", &row(first).view([1, -1]), Quantize::Mxfp4, Kind::Float).unwrap();
                assert_eq!(unpacked(&packed), row(second).view([1, -1]), "{first} · {power}");
            }
        }
        let drawn = Tensor::randn([9, 64], tch::kind::FLOAT_CPU);
        let once = unpacked(&quantised("w", &drawn, Quantize::Mxfp4, Kind::Float).unwrap());
        let twice = unpacked(&quantised("w", &once, Quantize::Mxfp4, Kind::Float).unwrap());
        assert_eq!(once, twice);
        // A code is at most an eighth of the block's largest away, or what is cut off of it a quarter.
        let largest = drawn.view([9, 2, 32]).abs().amax([2i64], true);
        assert!(((&drawn - once).view([9, 2, 32]).abs() / largest).max().double_value(&[]) <= 0.25);
    }
}
