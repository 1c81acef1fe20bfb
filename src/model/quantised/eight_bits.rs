//! Frozen weights in 8 bits a number, each row with a minimum and a scale of its own, as caches keep keys and values.

use std::ops::Range;
use std::sync::Arc;

use tch::{Kind, Tensor, no_grad};

use crate::ops::linear::{PackedForm, PackedWeight};
use crate::store::{Bits, Quantised};

/// A matrix in 8 bits a number.
pub(in crate::model) fn packed_in_8_bits(weight_oi: &Tensor) -> PackedWeight {
    let Quantised { level, range } = no_grad(|| Bits::Eight.quantise(&weight_oi.detach()));
    let size = [0, 1].map(|dim| weight_oi.size()[dim]);
    PackedWeight { parts: vec![level, range], size, kind: weight_oi.kind(), form: Arc::new(EightBits { width: size[1] }) }
}

#[derive(Debug)]
struct EightBits {
    width: i64,
}

impl PackedForm for EightBits {
    fn unpack(&self, parts: &[Tensor], rows: &Range<i64>, kind: Kind) -> Tensor {
        let [level, range] = [0, 1].map(|part: usize| parts[part].narrow(0, rows.start, rows.end - rows.start));
        Bits::Eight.restore(&level, &range, self.width, kind)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tch::Device;

    use super::*;
    use crate::model::small::{config, recipe, run};
    use crate::model::{Adapter, Model};
    use crate::recipe::{Dtype, LoraRecipe};

    fn model(dtype: Dtype, lora: &LoraRecipe) -> Model {
        let mut model = Model::random(config(), dtype, Device::Cpu, 1).unwrap();
        model.pack_weights().unwrap();
        let adapter = Adapter::new(model.config(), lora, 1, model.kind(), Device::Cpu).unwrap();
        adapter.set_b_normal(0.5, 2);
        model.with_adapter(adapter)
    }

    /// Last hidden states, and the gradients of all that is trained.
    fn pass(model: &Model) -> (Tensor, Vec<Tensor>) {
        let hidden = run(model, &[0, 1], &[4, 11], None);
        hidden.square().sum(None::<Kind>).backward();
        let leaves = model.parameters().into_iter();
        (hidden, leaves.map(|(name, leaf)| if leaf.grad().defined() { leaf.grad() } else { panic!("{name}") }).collect())
    }

    #[test]
    fn outputs_and_gradients_are_those_of_the_matrices_that_are_unpacked() {
        for dtype in [Dtype::F64, Dtype::F32, Dtype::Bf16] {
            for lora in [recipe(&["v_proj", "down_proj"]), LoraRecipe { use_dora: true, ..recipe(&["o_proj", "up_proj"]) }] {
                let (packed, mut plain) = (model(dtype, &lora), model(dtype, &lora));
                plain.linears_mut().for_each(crate::model::linear::Linear::unpack);
                assert!(packed.weight_bytes() < plain.weight_bytes());
                assert_eq!(pass(&packed), pass(&plain), "{dtype}, {lora:?}");
                let without = Model::random(config(), dtype, Device::Cpu, 1).unwrap();
                assert_ne!(run(&packed, &[0], &[4], None), run(&without, &[0], &[4], None));
            }
        }
    }

    #[test]
    fn packed_weights_are_near_their_own_and_take_a_quarter() {
        let weight_oi = Tensor::randn([33, 200], (Kind::Float, Device::Cpu)) * 0.02;
        let packed = packed_in_8_bits(&weight_oi);
        let bytes: usize = packed.parts.iter().map(|part| part.numel() * part.kind().elt_size_in_bytes()).sum();
        assert_eq!(bytes, 33 * (200 + 4));
        let spread = (weight_oi.amax([1i64], true) - weight_oi.amin([1i64], true)) / 255.0;
        let error = (packed.form.unpack(&packed.parts, &(0..33), Kind::Float) - &weight_oi).abs();
        assert!(error.le_tensor(&(spread * 0.51)).all().int64_value(&[]) == 1);
    }

    #[test]
    fn what_is_trained_beside_packed_weights_is_merged_into_the_models_own() {
        let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        let dir = tempfile::tempdir().unwrap();
        let merged = |name: &str, packs: bool| {
            let mut model = Model::load(&base, Dtype::F32, Device::Cpu).unwrap();
            if packs {
                model.pack_weights().unwrap();
            }
            let adapter = Adapter::new(model.config(), &recipe(&["q_proj"]), 1, Kind::Float, Device::Cpu).unwrap();
            adapter.set_b_normal(0.5, 2);
            let saved = dir.path().join(format!("adapter-{name}"));
            std::fs::create_dir(&saved).unwrap();
            let model = model.with_adapter(adapter);
            model.save_trained(&saved, "base").unwrap();
            let adapter = Adapter::load_peft(&saved, model.config(), Kind::Float, Device::Cpu).unwrap();
            let out = dir.path().join(name);
            crate::model::MergedModel::open(&base, Some(adapter)).unwrap().write(&out, &|| true).unwrap();
            std::fs::read(out.join("model.safetensors")).unwrap()
        };
        assert!(merged("packed", true) == merged("plain", false));
        let mut trained = Model::load_to_train(&base, Dtype::F32, Device::Cpu).unwrap();
        let refused = trained.pack_weights().unwrap_err();
        assert!(refused.to_string().contains("can not be kept in 8 bits"), "{refused}");
    }
}
