//! Plain matrices packed while they are loaded, as bitsandbytes does it (`functional.py`, `quantize_4bit` and `int8_vectorwise_quant`).

use std::sync::Arc;

use tch::{Kind, Tensor, no_grad};

use super::forms::{FourBits, ScaledBytes};
use super::load::{PER_127, fp4, nf4, pairs, signed};
use crate::model::config::PackedSizes;
use crate::model::layout::{Role, TensorEntry};
use crate::model::names::layer_of;
use crate::ops::linear::{PackedForm, PackedWeight};
use crate::recipe::Quantize;
use crate::units::{Fault, quoted};

const BLOCKSIZE: i64 = 64;

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
        };
        sizes.add(&entry.name, &entry.shape, bytes, to.name());
    }
    sizes
}

/// A matrix `(out, in)` of f32, packed; it computes in `kind`.
///
/// # Errors
/// A number is infinite or none.
pub(in crate::model) fn quantised(name: &str, weight_oi: &Tensor, to: Quantize, kind: Kind) -> Result<PackedWeight, Fault> {
    let size = [0, 1].map(|dim| weight_oi.size()[dim]);
    if weight_oi.isfinite().all().int64_value(&[]) == 0 {
        let message = format!("`{}` has a number that is infinite or not a number, and can not be packed", quoted(name));
        return Err(Fault::data(message, "take the model from its source again, or leave `model.quantize` out"));
    }
    let (parts, form): (Vec<Tensor>, Arc<dyn PackedForm>) = no_grad(|| match to {
        Quantize::Nf4 => four_bits(weight_oi, &nf4()),
        Quantize::Fp4 => four_bits(weight_oi, &fp4()),
        Quantize::Int8 => {
            let scale_o1 = weight_oi.abs().amax([1i64], true);
            let level = (weight_oi * (scale_o1.reciprocal() * 127.0).nan_to_num(0.0, 0.0, 0.0)).round();
            let parts = vec![level.to_kind(Kind::Int8).view_dtype(Kind::Uint8), scale_o1];
            (parts, Arc::new(ScaledBytes { table: signed(), block: [1, size[1]], factor: Some(PER_127) }) as _)
        }
    });
    Ok(PackedWeight { parts, size, kind, form })
}

fn four_bits(weight_oi: &Tensor, table: &[f32]) -> (Vec<Tensor>, Arc<dyn PackedForm>) {
    let (width, numbers) = (weight_oi.size()[1], weight_oi.numel() as i64);
    let blocks = (numbers + BLOCKSIZE - 1) / BLOCKSIZE;
    let value = weight_oi.reshape([-1]).constant_pad_nd([0, blocks * BLOCKSIZE - numbers]).view([blocks, BLOCKSIZE]);
    let absmax = value.abs().amax([1i64], false);
    // The library divides in the last block alone, where that is a short one.
    let mut scaled = &value * absmax.reciprocal().unsqueeze(1);
    if numbers % BLOCKSIZE != 0 {
        scaled.get(blocks - 1).copy_(&(value.get(blocks - 1) / absmax.get(blocks - 1)));
    }
    let scaled = scaled.nan_to_num_(0.0, 0.0, 0.0).clamp(-1.0, 1.0).reshape([-1]);
    let mut order: Vec<usize> = (0..16).collect();
    order.sort_by(|&a, &b| table[a].total_cmp(&table[b]).then(a.cmp(&b)));
    let sorted: Vec<f32> = order.iter().map(|&code| table[code]).collect();
    let bounds: Vec<f32> = sorted.windows(2).map(|pair| f32::midpoint(pair[0], pair[1])).collect();
    // How many bounds are smaller.
    let place = scaled.bucketize(&Tensor::from_slice(&bounds), true, false);
    let codes: Vec<u8> = order.iter().map(|&code| code as u8).collect();
    let code = Tensor::from_slice(&codes).index_select(0, &place);
    let code = code.narrow(0, 0, numbers + numbers % 2).view([-1, 2]);
    let upper: Tensor = code.select(1, 0).bitwise_left_shift_tensor_scalar(4);
    let packed = upper.bitwise_or_tensor(&code.select(1, 1));
    let form = FourBits { width, table: pairs(table, true), blocksize: BLOCKSIZE, nested: None };
    (vec![packed, absmax], Arc::new(form))
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
                    assert_eq!(packed.parts[0], get("packed").reshape([-1]), "{case} {dtype}");
                }
                assert_eq!(packed.parts[1], get("absmax"), "{case} {dtype} {}", to.name());
                let whole = packed.form.unpack(&packed.parts, &(0..packed.size[0]), Kind::Float);
                assert_eq!(whole, get("dequantised"), "{case} {dtype} {}", to.name());
            }
        }
    }

    #[test]
    fn eight_bits_are_near_and_zeros_stay() {
        let weight_oi =
            Tensor::cat(&[Tensor::randn([7, 40], tch::kind::FLOAT_CPU), Tensor::zeros([1, 40], tch::kind::FLOAT_CPU)], 0);
        let packed = quantised("w", &weight_oi, Quantize::Int8, Kind::Float).unwrap();
        let error = (packed.form.unpack(&packed.parts, &(0..8), Kind::Float) - &weight_oi).abs().amax([1i64], true);
        assert!(error.le_tensor(&(&packed.parts[1] * (0.51 / 127.0))).all().int64_value(&[]) == 1);
        let none = Tensor::full([1, 2], f64::NAN, tch::kind::FLOAT_CPU);
        assert!(quantised("w", &none, Quantize::Nf4, Kind::Float).unwrap_err().to_string().contains("`w` has a number"));
    }
}
