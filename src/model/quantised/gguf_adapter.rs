//! An adapter as a GGUF file, which llama.cpp loads beside one of its base.

use std::collections::BTreeMap;
use std::path::Path;

use tch::{Tensor, no_grad};

use super::gguf::Stored;
use super::gguf_merged::{encoded, without_place};
use crate::files::{GgufDtype, GgufKeys, TensorHead, architecture_of, write_gguf};
use crate::model::adapter::Adapter;
use crate::model::config::ModelConfig;
use crate::units::Fault;

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
