//! GGUF files that are written: like the one that a model came from, with other numbers; and adapters, which llama.cpp loads beside their base.

use std::collections::BTreeMap;
use std::path::Path;

use tch::{Kind, TchError, Tensor, no_grad};

use super::gguf::{GgufWeights, OF_CONFIG, Stored};
use super::quantise::AT_ONCE;
use crate::files::{GgufDtype, GgufKeys, TensorHead, architecture_of, write_gguf};
use crate::model::adapter::Adapter;
use crate::model::config::ModelConfig;
use crate::model::names::OUTPUT;
use crate::store::content_of;
use crate::units::{Fault, quoted};

impl GgufWeights {
    /// Writes a file with the keys of this one, but for its chat template where another is given. Its matrices are in the type `dtype`,
    /// those that no blocks fit in F16, and routers, biases and vectors in F32. `merged` makes the tensors `names` of a checkpoint, in f32.
    ///
    /// # Errors
    /// A number is none, or has no place in its type; what `merged` says; the disk.
    pub(in crate::model) fn write(
        &self,
        path: &Path,
        dtype: GgufDtype,
        template: Option<&str>,
        names: &[String],
        merged: impl Fn(&str) -> Result<Tensor, Fault>,
    ) -> Result<(), Fault> {
        // For each tensor of the file: the tensors of the checkpoint that it is made of, and the part of each.
        let mut sources: BTreeMap<&str, Vec<(&str, &Stored, usize)>> = BTreeMap::new();
        let stored: Vec<(&String, Stored)> = names
            .iter()
            .map(|name| Ok((name, self.stored(name).ok_or_else(|| self.missing(name))?)))
            .collect::<Result<_, Fault>>()?;
        for (name, stored) in &stored {
            for (part, to) in stored.names().iter().enumerate() {
                sources.entry(to).or_default().push((name, stored, part));
            }
        }
        let has_new_output = names.iter().any(|name| name == OUTPUT) && self.file.get("output.weight").is_none();
        if has_new_output && self.config.model_type.starts_with("gemma") {
            let message = "the output projection was trained, and llama.cpp knows none of its own for this family".to_owned();
            return Err(Fault::usage(message, "use `--for merged`"));
        }
        // A model without an output projection of its own has the embedding's form.
        let embedding = &stored[0].1.names()[0];
        let head = |name: &&str| {
            let view = self.view(if self.file.get(name).is_some() { name } else { embedding })?;
            let is_wide = view.shape.len() < 2 || WIDE.iter().any(|part| name.contains(part));
            let packed = if view.shape.last().is_some_and(|width| width % dtype.block == 0) { dtype } else { GgufDtype::F16 };
            let dtype = if is_wide { GgufDtype::F32 } else { packed };
            Ok(TensorHead { name: (*name).to_owned(), dtype, shape: view.shape.to_vec() })
        };
        let kept = OF_CONFIG.iter().filter_map(|name| {
            let view = self.file.get(name)?;
            Some(TensorHead { name: (*name).to_owned(), dtype: view.dtype, shape: view.shape.to_vec() })
        });
        let heads: Vec<TensorHead<GgufDtype>> = sources.keys().map(head).chain(kept.map(Ok)).collect::<Result<_, Fault>>()?;
        write_gguf(path, &self.file.keys_in(dtype, template)?, &heads, |head| {
            let Some(sources) = sources.get(&*head.name) else { return Ok(self.view(&head.name)?.bytes.to_vec()) };
            let part = |(name, stored, part): &(&str, &Stored, usize)| Ok(stored.as_in_file(*part, &merged(name)?));
            let parts = sources.iter().map(part).collect::<Result<Vec<_>, Fault>>()?;
            let whole = if parts.len() == 1 { parts[0].shallow_clone() } else { Tensor::stack(&parts, 0) };
            let parts = whole.reshape([-1]).split(AT_ONCE, 0);
            let bytes = parts.iter().map(|part| encoded(part, head.dtype)).collect::<Result<Option<Vec<_>>, _>>()?;
            bytes.map(|bytes| bytes.concat()).ok_or_else(|| without_place(head))
        })
    }
}

/// Parts of names of what llama.cpp has in f32, whatever a file is packed as.
const WIDE: [&str; 2] = ["ffn_gate_inp", ".bias"];

impl Stored {
    /// Undoes what is done to a tensor of the file as it is loaded; of several that it becomes, one `part`.
    fn as_in_file(&self, part: usize, tensor: &Tensor) -> Tensor {
        match self {
            Self::Whole(_) | Self::Expert(..) => tensor.shallow_clone(),
            Self::PlusOne(_) => tensor + 1.0,
            Self::Alternating(_, heads) => {
                let (size, heads) = (tensor.size(), *heads as i64);
                let by_half = [&[heads, 2, size[0] / heads / 2], &size[1..]].concat();
                tensor.reshape(&by_half[..]).transpose(1, 2).reshape(&size[..])
            }
            Self::Transposed(_) => tensor.transpose(1, 2),
            Self::GateUp(_) => {
                let tensor = if tensor.dim() == 3 { tensor.transpose(1, 2) } else { tensor.shallow_clone() };
                let size = tensor.size();
                tensor.reshape([&[size[0], size[1] / 2, 2], &size[2..]].concat()).select(2, part as i64)
            }
        }
    }
}

/// The error where a number of a tensor has no place in its type.
fn without_place(head: &TensorHead<GgufDtype>) -> Fault {
    let (name, kind) = (quoted(&head.name), head.dtype.name);
    let hint = if head.dtype == GgufDtype::F32 {
        "export an earlier checkpoint: such numbers are the training's"
    } else {
        "take `--quantize q8_0`, which holds larger ones, or `--for merged`; numbers that are none are the training's"
    };
    Fault::data(format!("`{name}` has a number that is infinite, not a number, or too large for {kind}"), hint)
}

/// The bytes of numbers in f32, as ggml packs them (`quantize_row_q8_0_ref`); `None` where one is not finite in this type.
fn encoded(numbers: &Tensor, dtype: GgufDtype) -> Result<Option<Vec<u8>>, TchError> {
    let is_finite = |x: &Tensor| x.isfinite().all().int64_value(&[]) != 0;
    let numbers = numbers.to_kind(Kind::Float).contiguous();
    no_grad(|| match dtype {
        GgufDtype::F32 => is_finite(&numbers).then(|| content_of(&numbers)).transpose(),
        GgufDtype::Q8_0 => {
            let value = numbers.view([-1, dtype.block as i64]);
            let scale = value.abs().amax([1i64], true) / 127.0;
            let level = &value * scale.reciprocal().nan_to_num(0.0, 0.0, 0.0);
            // To the nearest, of two equally near ones to the one that is farther from zero.
            let level = level.sign() * (level.to_kind(Kind::Double).abs() + 0.5).floor();
            let scale = scale.to_kind(Kind::Half);
            let both = [scale.view_dtype(Kind::Uint8), level.to_kind(Kind::Int8).view_dtype(Kind::Uint8)];
            is_finite(&scale).then(|| content_of(&Tensor::cat(&both, 1))).transpose()
        }
        _ => {
            let half = numbers.to_kind(Kind::Half);
            is_finite(&half).then(|| content_of(&half)).transpose()
        }
    })
}

impl Adapter {
    /// Writes an adapter of the model of `config`, whose family [`architecture_of`] knows, that is [`Self::normalized`] and has none of
    /// [`Self::features`]: beside the name of each matrix its A and B in f32, the outputs of B in the order that they have there.
    ///
    /// # Errors
    /// A number is infinite or not a number; the disk.
    pub fn save_gguf(&self, config: &ModelConfig, path: &Path) -> Result<(), Fault> {
        let Some(architecture) = architecture_of(config.model_type) else {
            return Err(Fault::defect(format!("`{}` has no name in llama.cpp", config.model_type)));
        };
        let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
        for (linear, delta) in &self.deltas {
            let stored = Stored::of(config, &format!("{linear}.weight"), |_| false);
            let Some((stored, name)) = stored.as_ref().and_then(|stored| Some((stored, stored.matrix()?.0))) else {
                return Err(Fault::defect(format!("`{linear}` has no matrix in a GGUF file")));
            };
            tensors.insert(format!("{name}.lora_a"), delta.a_ri.shallow_clone());
            tensors.insert(format!("{name}.lora_b"), no_grad(|| stored.as_in_file(0, &delta.b_or)));
        }
        let shape = |tensor: &Tensor| tensor.size().into_iter().map(|size| size as usize).collect();
        let head = |(name, tensor)| TensorHead { name: String::clone(name), dtype: GgufDtype::F32, shape: shape(tensor) };
        let heads: Vec<_> = tensors.iter().map(head).collect();
        write_gguf(path, &GgufKeys::of_lora(architecture, self.settings.lora_alpha as f32), &heads, |head| {
            encoded(&tensors[&head.name], head.dtype)?.ok_or_else(|| without_place(head))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tch::Device;

    use super::*;
    use crate::files::GgufFile;
    use crate::model::{MergedModel, Model, ModelSource, layout};

    #[test]
    fn a_file_that_nothing_is_added_to_has_the_numbers_of_its_base() {
        let quantised = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
        let dir = tempfile::tempdir().unwrap();
        for case in ["gemma2-q5_0", "gpt-oss-mxfp4", "llama-q4_0", "qwen2-q4_k_m", "qwen3-q8_0"] {
            let base = quantised.join(format!("model-gguf-{case}/model.gguf"));
            let open = |path: &Path| Model::open(ModelSource::from(path), Kind::Float, Device::Cpu.into()).unwrap();
            let (config, own) = open(&base);
            for dtype in [GgufDtype::F16, GgufDtype::Q8_0] {
                let path = dir.path().join(format!("{case}-{}.gguf", dtype.name));
                MergedModel::open(&*base, None).unwrap().write_gguf(&path, dtype, Some("{{ 1 }}"), &|| true).unwrap();
                let (found, weights) = open(&path);
                assert_eq!(found.layers, config.layers, "{case}");
                for entry in layout::entries(&config) {
                    let (own, found) = (own.load(&entry.name).unwrap(), weights.load(&entry.name).unwrap());
                    let largest = own.abs().max().double_value(&[]);
                    // A half level of the block's largest, and the scale's own rounding; or that of f16.
                    let bound = if dtype == GgufDtype::Q8_0 { 0.0045 } else { 0.0005 };
                    assert!(found.allclose(&own, 0.0, bound * largest, false), "{case}: {} in {}", entry.name, dtype.name);
                }
                let (base, written) = (GgufFile::open(&base).unwrap(), GgufFile::open(&path).unwrap());
                assert_eq!(written.text("tokenizer.chat_template").unwrap(), Some("{{ 1 }}"));
                assert_eq!(written.count("general.file_type").unwrap(), Some(if dtype == GgufDtype::F16 { 1 } else { 7 }));
                for name in base.names() {
                    let (own, found) = (base.get(name).unwrap(), written.get(name).unwrap());
                    // What was in blocks of 8 bits, or in f32, is the same again.
                    let is_same = own.dtype == found.dtype;
                    assert!(!is_same || own.bytes == found.bytes, "{case}: {name}");
                    assert!(is_same || own.dtype != GgufDtype::F32, "{case}: {name}");
                }
            }
        }
    }

    #[test]
    fn blocks_are_those_of_ggml() {
        let row = |values: &[f32]| Tensor::from_slice(&[values, &vec![0.0; 32 - values.len()]].concat());
        let packed = |values: &[f32]| encoded(&row(values), GgufDtype::Q8_0).unwrap().unwrap();
        // The scale is 1, and halves go away from zero.
        let block = packed(&[127.0, 0.5, -0.5, 1.5, 0.499_999_97, -127.0]);
        assert_eq!((&block[..2], &block[2..8]), (&[0, 0x3c][..], &[127, 1, 255, 2, 0, 129][..]));
        assert_eq!(packed(&[]), [0; 34]);
        for bad in [f32::NAN, f32::INFINITY, 1e10] {
            assert!([GgufDtype::Q8_0, GgufDtype::F16].iter().all(|&dtype| encoded(&row(&[bad]), dtype).unwrap().is_none()));
        }
    }
}

#[cfg(test)]
mod tests_of_adapters {
    use tch::{Device, Kind};

    use super::*;
    use crate::files::GgufFile;
    use crate::model::{MergedModel, ModelSource};
    use crate::recipe::{LoraRecipe, ModuleSet};

    /// What a merged file has beside its base is the product of the adapter's file, in the order of llama.cpp's rows.
    #[test]
    fn an_adapters_file_adds_what_a_merged_file_has() {
        let quantised = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
        let dir = tempfile::tempdir().unwrap();
        for (case, alternates) in [("llama-q4_0", true), ("gemma2-q5_0", false), ("qwen3-q8_0", false)] {
            let base = quantised.join(format!("model-gguf-{case}/model.gguf"));
            let config = ModelConfig::load(ModelSource::from(&*base)).unwrap();
            let lora = LoraRecipe { r: 3, alpha: 6.0, target_modules: ModuleSet::AllLinear, ..LoraRecipe::default() };
            let adapter = || {
                let adapter = Adapter::new(&config, &lora, 1, Kind::Float, Device::Cpu).unwrap();
                adapter.set_b_normal(0.5, 2);
                adapter.normalized(4)
            };
            let [alone, merged, plain] =
                ["adapter", "merged", "plain"].map(|name| dir.path().join(format!("{case}-{name}.gguf")));
            adapter().save_gguf(&config, &alone).unwrap();
            let write = |adapter, path: &Path| {
                MergedModel::open(&*base, adapter).unwrap().write_gguf(path, GgufDtype::F16, None, &|| true).unwrap();
            };
            write(Some(adapter()), &merged);
            write(None, &plain);
            let [alone, merged, plain] = [alone, merged, plain].map(|path| GgufFile::open(&path).unwrap());
            assert_eq!(alone.text("general.architecture").unwrap(), merged.text("general.architecture").unwrap(), "{case}");
            assert_eq!(alone.text("adapter.type").unwrap(), Some("lora"));
            assert_eq!(alone.number("adapter.lora.alpha").unwrap(), Some(4.0));
            let read = |file: &GgufFile, name: &str| {
                let view = file.get(name).unwrap();
                let kind = if view.dtype == GgufDtype::F16 { Kind::Half } else { Kind::Float };
                let shape: Vec<i64> = view.shape.iter().map(|&size| size as i64).collect();
                Tensor::f_from_data_size(view.bytes, &shape, kind).unwrap().to_kind(Kind::Float)
            };
            let names: Vec<&str> = alone.names().filter_map(|name| name.strip_suffix(".lora_a")).collect();
            assert_eq!(names.len(), config.linears().len(), "{case}");
            for name in names {
                let [a_ri, b_or] = ["a", "b"].map(|part| read(&alone, &format!("{name}.lora_{part}")));
                assert_eq!((a_ri.size()[0], b_or.size()[1]), (4, 4));
                let [added, expected] = [read(&merged, name) - read(&plain, name), b_or.matmul(&a_ri)];
                // F16 has the numbers themselves in 11 bits.
                let bound = 0.0006 * read(&merged, name).abs().max().double_value(&[]);
                assert!(added.allclose(&expected, 0.0, bound, false), "{case}: {name}");
                let is_moved = alternates && (name.ends_with("attn_q.weight") || name.ends_with("attn_k.weight"));
                let there = adapter().deltas.iter().any(|(_, delta)| delta.b_or.equal(&b_or));
                assert_eq!(there, !is_moved, "{case}: {name}");
            }
        }
    }
}
