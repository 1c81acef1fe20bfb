//! The packed matrices among the tensors of safetensors files.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use tch::{Kind, Tensor};

use super::config::{Ints, Quantisation};
use super::quantise::is_quantised;
use crate::files::{Dtype, TensorFile, TensorView};
use crate::model::config::PackedSizes;
use crate::model::layout::TensorEntry;
use crate::model::tensor_problems::TensorProblem;
use crate::model::weights::Files;
use crate::native::tensor_over;
use crate::ops::linear::PackedWeight;
use crate::store::load_tensor;
use crate::units::{Fault, FaultKind, abridged, quoted};

impl Files {
    /// Whether a tensor of the model is there in parts.
    pub(in crate::model) fn is_packed(&self, name: &str) -> bool {
        let has_mark = |quantisation: &Quantisation| quantisation.mark(name).iter().any(|mark| self.places.contains_key(mark));
        self.quantisation.as_ref().is_some_and(has_mark)
    }

    /// Takes the parts of packed tensors, and what no weight is made of, out of `found`: their names, and what is wrong with them.
    pub(in crate::model) fn take_packed(
        &self,
        entries: &[TensorEntry],
        found: &mut BTreeMap<&str, TensorView<'_>>,
    ) -> (BTreeSet<String>, Vec<TensorProblem>) {
        let (mut names, mut problems) = (BTreeSet::new(), Vec::new());
        let Some(quantisation) = &self.quantisation else { return (names, problems) };
        let known: BTreeSet<&str> = entries.iter().map(|entry| &*entry.name).collect();
        let is_zero = |name: &str| {
            let found = self.raw(name).ok().flatten();
            found.is_some_and(|tensor| tensor.eq(0).all().int64_value(&[]) != 0)
        };
        for entry in entries.iter().filter(|entry| self.is_packed(&entry.name)) {
            names.insert(entry.name.clone());
            for part in quantisation.parts(&entry.name, &entry.shape) {
                let name = &part.name;
                problems.extend(match found.remove(name.as_str()) {
                    None => (!part.is_optional).then(|| TensorProblem::missing(name)),
                    Some(found) if !part.dtypes.contains(&found.dtype) => Some(TensorProblem::dtype(name, found.dtype)),
                    Some(found) if !part.shapes.is_empty() && !part.shapes.iter().any(|expected| expected == found.shape) => {
                        Some(TensorProblem::shape(name, &part.shapes[0], found.shape))
                    }
                    Some(_) => None,
                });
            }
            let states = quantisation.state(&entry.name).into_iter().flat_map(|prefix| self.names_with(&prefix));
            let bias = quantisation.bias(&entry.name).filter(|bias| !known.contains(&**bias) && is_zero(bias));
            for name in states.chain(bias) {
                found.remove(&*name);
            }
        }
        problems.extend(entries.iter().filter_map(|entry| self.contradiction(quantisation, entry)));
        found.retain(|name, _| !(name.contains(".self_attn.") && KV_CACHE_SCALES.iter().any(|end| name.ends_with(end))));
        (names, problems)
    }

    /// What `quantization_config` says otherwise of a matrix.
    fn contradiction(&self, quantisation: &Quantisation, entry: &TensorEntry) -> Option<TensorProblem> {
        let (name, is_packed) = (&*entry.name, self.is_packed(&entry.name));
        let is_linear = entry.shape.len() == 2 && is_quantised(name) && self.places.contains_key(name);
        let module = name.strip_suffix(".weight").filter(|_| is_packed || is_linear)?;
        let part = quantisation.mark(name).into_iter().chain([name.to_owned()]).find(|part| self.places.contains_key(part))?;
        let stored = self.places[&part].1.strip_suffix(&part[module.len()..]).unwrap_or(module);
        let must_be = self.quantised_modules.must_be_packed(&[module, stored]);
        must_be.is_some_and(|must_be| must_be != is_packed).then(|| TensorProblem::contradicted(name, is_packed))
    }

    /// The matrix of a linear, if it is packed.
    pub(in crate::model) fn packed(&self, name: &str, kind: Kind) -> Result<Option<PackedWeight>, Fault> {
        let Some(quantisation) = self.quantisation.as_ref().filter(|_| self.is_packed(name)) else { return Ok(None) };
        let [out, inner] = self.shape_of(name)?;
        let packed = quantisation.load(self, name, [out as i64, inner as i64], kind)?;
        // What lies in memory in another order is not read from the file again.
        if let Quantisation::Gptq { .. } | Quantisation::Awq { .. } | Quantisation::CompressedInts { .. } = quantisation {
            quantisation.parts(name, &[out, inner]).iter().for_each(|part| self.release(&part.name));
        }
        Ok(Some(packed))
    }

    /// The matrices of all experts, if they are packed.
    pub(in crate::model) fn packed_experts(&self, name: &str, kind: Kind) -> Result<Option<Vec<PackedWeight>>, Fault> {
        if self.quantisation != Some(Quantisation::Mxfp4) || !self.is_packed(name) {
            return Ok(None);
        }
        let [_, inner, _] = self.shape_of(name)?;
        Quantisation::load_experts(self, name, inner as i64, kind).map(Some)
    }

    fn shape_of<const N: usize>(&self, name: &str) -> Result<[usize; N], Fault> {
        let shape = self.shapes.get(name).and_then(|shape| shape.as_slice().try_into().ok());
        shape.ok_or_else(|| Fault::defect(format!("the packed matrix `{name}` is read before it was checked")))
    }

    /// A packed tensor as a plain one has it: of experts, inputs before outputs.
    pub(in crate::model) fn unpacked(&self, name: &str, kind: Kind) -> Result<Tensor, Fault> {
        let whole = |packed: &PackedWeight| packed.form.unpack(&packed.parts, &(0..packed.size[0]), kind);
        if let Some(experts) = self.packed_experts(name, kind)? {
            return Ok(Tensor::stack(&experts.iter().map(|packed| whole(packed).transpose(0, 1)).collect::<Vec<_>>(), 0));
        }
        let packed = self.packed(name, kind)?;
        packed.as_ref().map(whole).ok_or_else(|| self.wrong(name, "it is not packed"))
    }

    /// Sizes of the model's packed matrices.
    pub(in crate::model) fn packed_sizes(&self, entries: &[TensorEntry]) -> PackedSizes {
        let mut sizes = PackedSizes::default();
        let Some(quantisation) = &self.quantisation else { return sizes };
        for entry in entries.iter().filter(|entry| self.is_packed(&entry.name)) {
            let states = quantisation.state(&entry.name).into_iter().flat_map(|prefix| self.names_with(&prefix));
            let parts = quantisation.parts(&entry.name, &entry.shape).into_iter().map(|part| part.name);
            let names: BTreeSet<String> = parts.chain(states).collect();
            let bytes = |name: &String| {
                let (file, stored) = self.places.get(name)?;
                self.opened[*file].get(stored).ok().map(|view| view.bytes.len())
            };
            sizes.add(&entry.name, &entry.shape, names.iter().filter_map(bytes).sum(), quantisation.name());
        }
        sizes
    }

    /// A tensor as it is stored, numbers of 8 bits as their bytes; `None` where it is not there.
    pub(in crate::model) fn raw(&self, name: &str) -> Result<Option<Tensor>, Fault> {
        let Some((file, stored)) = self.places.get(name) else { return Ok(None) };
        let file: &TensorFile = &self.opened[*file];
        let view = file.get(stored)?;
        if ![Dtype::F8_E4M3, Dtype::F8_E8M0, Dtype::I8].contains(&view.dtype) {
            return load_tensor(file, stored).map(Some);
        }
        let size: Vec<i64> = view.shape.iter().map(|&size| size as i64).collect();
        let mapped = tensor_over(view.map, view.offset, &size, Kind::Uint8);
        Ok(Some(mapped.unwrap_or_else(|| Tensor::from_data_size(view.bytes, &size, Kind::Uint8))))
    }

    pub(super) fn names_with(&self, prefix: &str) -> Vec<String> {
        let from = self.places.range::<str, _>((Bound::Included(prefix), Bound::Unbounded)).map(|(name, _)| name);
        from.take_while(|name| name.starts_with(prefix)).cloned().collect()
    }

    pub(super) fn wrong(&self, name: &str, reason: &str) -> Fault {
        let message = format!("tensor `{}` in `{}`: {reason}", quoted(name), abridged(self.dir.display()));
        let hint = "check that weights and `quantization_config` belong together and that all files are complete";
        Fault::data(message, hint).of_kind(FaultKind::Damaged)
    }
}

/// A tensor that a packed matrix consists of.
#[derive(Clone, Debug)]
pub(super) struct WeightPart {
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
const KV_CACHE_SCALES: [&str; 5] = [".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale"];
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
    fn mark(&self, weight: &str) -> Vec<String> {
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
    fn state(&self, weight: &str) -> Option<String> {
        matches!(self, Self::Bnb4bit { .. }).then(|| format!("{weight}{STATE}"))
    }

    /// The bias of a packed matrix, which is written as zeros for a model that has none.
    fn bias(&self, weight: &str) -> Option<String> {
        let module = weight.strip_suffix(".weight")?;
        matches!(self, Self::Gptq { .. } | Self::Awq { .. }).then(|| format!("{module}.bias"))
    }

    fn name(&self) -> &'static str {
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
    pub(super) fn parts(&self, weight: &str, shape: &[usize]) -> Vec<WeightPart> {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use serde_json::{Value, json};
    use sha2::{Digest, Sha256};
    use tch::Device;

    use super::*;
    use crate::model::{Model, ModelSource, layout};
    use crate::ops::linear::Weight;
    use crate::store::{load_tensors, save_tensors};

    /// The hashes are of the weights as the formats' own libraries make them, of safetensors and of GGUF files.
    #[test]
    fn every_weight_is_the_library_s_to_the_bit() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let cases = names.filter_map(|name| Some(name.strip_prefix("weights-")?.strip_suffix(".json")?.to_owned()));
        let cases: Vec<String> = cases.collect();
        assert_eq!(cases.len(), 16, "{cases:?}");
        for case in cases {
            let dir = folder.join(format!("model-{case}"));
            let (config, weights) = Model::open(ModelSource::from(&dir), Kind::Float, Device::Cpu.into()).unwrap();
            let hashes = std::fs::read(folder.join(format!("weights-{case}.json"))).unwrap();
            let hashes: serde_json::Map<String, Value> = serde_json::from_slice(&hashes).unwrap();
            let entries = layout::entries(&config);
            assert_eq!(entries.len(), hashes.len(), "{case}");
            let mut kept = 0;
            for entry in &entries {
                let (name, expected) = (&entry.name, &hashes[&entry.name]);
                let found = weights.load(name).unwrap();
                assert_eq!(Value::from(found.size()), expected["shape"], "{case}: {name}");
                let bytes = Vec::<f32>::try_from(found.reshape([-1])).unwrap();
                let hash = format!("{:x}", Sha256::digest(bytes.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>()));
                assert_eq!(Value::from(hash), expected["sha256"], "{case}: {name}");
                let is_matrix = entry.shape.len() == 2 && name.ends_with(".weight");
                let Some(Weight::Packed(packed)) = is_matrix.then(|| weights.load_weight(name).unwrap()) else { continue };
                // But for the table, which is the same for all matrices of a form.
                let own = packed.parts.iter().enumerate().filter(|(at, part)| *at != 1 || part.kind() != Kind::Float);
                kept += own.map(|(_, part)| part.numel() * part.kind().elt_size_in_bytes()).sum::<usize>();
                // A part of the rows is that part of all.
                let rows = packed.size[0] / 3..packed.size[0] - 1;
                let part = packed.form.unpack(&packed.parts, &rows, Kind::Float);
                assert_eq!(part, found.narrow(0, rows.start, rows.end - rows.start), "{case}: {name}");
                let x = Tensor::randn([3, packed.size[1]], (Kind::Float, Device::Cpu));
                if let Some(few) = packed.form.product(&packed.parts, &x) {
                    assert!(few.allclose(&x.matmul(&found.transpose(0, 1)), 1e-5, 1e-5, false), "{case}: {name}");
                }
            }
            let stored = config.packed.all().bytes.0;
            assert!(kept as u64 * 100 <= stored * 102, "{case}: {kept} bytes of {stored}");
            let num_packed = config.packed.forms.values().sum::<usize>();
            assert_eq!(num_packed, hashes.values().filter(|entry| entry["quantised"] == true).count(), "{case}");
        }
    }

    /// What servers keep beside weights is left alone, and a bias that is none.
    #[test]
    fn tensors_that_no_weight_is_made_of_are_left_alone() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised/model-gptq");
        let of_base = load_tensors(&TensorFile::open(&folder.join("model.safetensors")).unwrap()).unwrap();
        let scale = Tensor::from_slice(&[0.5f32]);
        for (name, tensor, is_extra) in [
            ("self_attn.k_scale", &scale, false),
            ("self_attn.v_proj.v_scale", &scale, false),
            ("mlp.k_scale", &scale, true),
            ("mlp.up_proj.bias", &Tensor::zeros([96], (Kind::Half, Device::Cpu)), false),
            ("mlp.up_proj.bias", &Tensor::ones([96], (Kind::Half, Device::Cpu)), true),
            ("mlp.gate.bias", &Tensor::zeros([96], (Kind::Half, Device::Cpu)), true),
        ] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::copy(folder.join("config.json"), dir.path().join("config.json")).unwrap();
            let added = (format!("model.layers.1.{name}"), tensor.shallow_clone());
            let all: Vec<_> =
                of_base.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).chain([added]).collect();
            save_tensors(&dir.path().join("model.safetensors"), &all, &BTreeMap::new()).unwrap();
            let opened = Model::open(ModelSource::from(dir.path()), Kind::Float, Device::Cpu.into());
            let extra = opened.err().map(|error| error.to_string());
            let says = format!("1 extra (`model.layers.1.{name}`)");
            assert!(extra.as_ref().map_or(!is_extra, |extra| is_extra && extra.contains(&says)), "{name}: {extra:?}");
        }
    }

    #[test]
    fn a_configuration_that_says_otherwise_is_refused() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
        let up = "model.layers.0.mlp.up_proj";
        for (case, key, value, is_packed) in [
            ("bnb-nf4", "llm_int8_skip_modules", json!(["layers.0.mlp.up_proj"]), true),
            ("fp8-block", "modules_to_not_convert", json!(["lm_head", "0.mlp.up_proj"]), true),
            ("awq", "modules_to_not_convert", json!([up]), true),
            ("gptq", "dynamic", json!({"-:model.layers.0.mlp.up": {}}), true),
            ("ct-int4", "ignore", json!(["lm_head", up]), true),
            ("bnb-nf4-source", "quantization_config", Value::Null, false),
        ] {
            let (dir, from) = (tempfile::tempdir().unwrap(), folder.join(format!("model-{case}")));
            let mut config: Value = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
            if is_packed {
                config["quantization_config"][key] = value;
            } else {
                let group = json!({"targets": ["re:.*0.mlp.up_proj"], "weights": {"num_bits": 4}});
                config[key] =
                    json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}});
            }
            std::fs::copy(from.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
            std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
            let refused = Model::open(ModelSource::from(dir.path()), Kind::Float, Device::Cpu.into()).unwrap_err().to_string();
            let says = format!("against `quantization_config` (`{up}.weight` is {}packed)", if is_packed { "" } else { "not " });
            assert!(refused.contains(&says), "{case}: {refused}");
        }
    }

    #[test]
    fn what_is_packed_may_stand_in_a_file_beside_the_configuration() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised/model-gptq");
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(folder.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let mut config: serde_json::Map<String, Value> =
            serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        let mut table = config.remove("quantization_config").unwrap();
        table.as_object_mut().unwrap().remove("quant_method");
        for (name, value) in [("config.json", Value::Object(config)), ("quantize_config.json", table)] {
            std::fs::write(dir.path().join(name), value.to_string()).unwrap();
        }
        let open = |dir: &Path| Model::open(ModelSource::from(dir), Kind::Float, Device::Cpu.into()).unwrap();
        let ((apart, weights), (whole, expected)) = (open(dir.path()), open(&folder));
        assert_eq!(apart.packed, whole.packed);
        let name = "model.layers.0.mlp.up_proj.weight";
        assert_eq!(weights.load(name).unwrap(), expected.load(name).unwrap());
    }
}
