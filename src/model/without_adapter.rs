//! The model without its adapter for a while, as who compares both has it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::causal_lm::{Model, Trainable};
use super::linear::Linear;

impl Model {
    /// What `work` makes of the model without its adapter, which is on again behind it: with the logits of the base model to the bit; with one
    /// that began as a part of the weights (`PiSSA`), but for the rounding of that part.
    pub fn without_adapter<T>(&mut self, work: impl FnOnce(&Self) -> T) -> T {
        let attach = matches!(self.trained, Trainable::Adapter(_)).then(|| self.detach_adapter());
        let done = catch_unwind(AssertUnwindSafe(|| work(self)));
        if let Some(attach) = attach {
            attach(self);
        }
        done.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Takes off all that an adapter trains; what is returned puts it back.
    fn detach_adapter(&mut self) -> impl FnOnce(&mut Self) + use<> {
        self.release_layers();
        let linears: Vec<_> = self.linears_mut().map(Linear::detach).collect();
        let (output, input) = (self.embedding.output.detach(), self.embedding.delta.take());
        let stacked: Vec<_> = self.stacked_mut().map(|(_, delta)| delta.take()).collect();
        let copies: Vec<_> = self.copyable_mut().map(|vector| vector.trained.take()).collect();
        self.let_linears_wait();
        let (embedding, trained) =
            (std::mem::take(&mut self.embedding.trained), std::mem::replace(&mut self.trained, Trainable::Nothing));
        move |model| {
            model.release_layers();
            model.stacked_mut().zip(stacked).for_each(|((_, delta), before)| *delta = before);
            model.linears_mut().zip(linears).for_each(|(linear, attach)| attach(linear));
            output(&mut model.embedding.output);
            model.embedding.delta = input;
            model.copyable_mut().zip(copies).for_each(|(vector, copy)| vector.trained = copy);
            model.let_linears_wait();
            model.embedding.train(embedding, false);
            model.trained = trained;
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Tensor, no_grad};

    use super::*;
    use crate::model::small::{adapter, config, recipe, run};
    use crate::recipe::{Dtype, InitLora, LoraRecipe, TrainedBias};

    fn logits(model: &Model) -> Tensor {
        no_grad(|| model.logits(&model.final_norm(&run(model, &[0, 1], &[4, 11], None))))
    }

    /// With everything that an adapter may train moved from where it began.
    fn trained(lora: &LoraRecipe) -> Model {
        let model = Model::random(config(), Dtype::F32, Device::Cpu, 1).unwrap().with_adapter(adapter(lora, 1));
        no_grad(|| model.parameters().into_iter().for_each(|(_, leaf)| drop(leaf.shallow_clone().g_add_scalar_(0.1))));
        model
    }

    #[test]
    fn logits_are_the_base_models_to_the_bit_and_then_the_adapters_again() {
        let base = logits(&Model::random(config(), Dtype::F32, Device::Cpu, 1).unwrap());
        let saved = ["embed_tokens", "lm_head", "norm"].map(String::from).to_vec();
        let plain = || recipe(&["q_proj", "v_proj", "down_proj"]);
        for lora in [
            plain(),
            LoraRecipe { use_dora: true, bias: TrainedBias::All, ..plain() },
            LoraRecipe { modules_to_save: saved, lora_bias: true, ..plain() },
            recipe(&["embed_tokens", "lm_head"]),
            LoraRecipe { init_lora_weights: InitLora::Pissa, ..plain() },
        ] {
            let mut model = trained(&lora);
            let (before, leaves) = (logits(&model), model.parameters());
            for _ in 0..2 {
                model.without_adapter(|without| {
                    let found = logits(without);
                    let is_pissa = lora.init_lora_weights == InitLora::Pissa;
                    assert!(if is_pissa { found.allclose(&base, 1e-4, 1e-5, false) } else { found == base }, "{lora:?}");
                    assert!(without.parameters().is_empty() && without.adapter().is_none());
                });
                assert_eq!(logits(&model), before, "{lora:?}");
            }
            for ((name, leaf), (same, other)) in leaves.iter().zip(model.parameters()) {
                assert!(*name == same && leaf.data_ptr() == other.data_ptr() && other.requires_grad(), "{name}");
            }
        }
    }

    #[test]
    fn a_model_whose_weights_are_trained_stays_as_it_is() {
        let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        let mut model = Model::load_to_train(&fixture, Dtype::F32, Device::Cpu).unwrap();
        let count = model.parameters().len();
        assert_eq!(model.without_adapter(|model| model.parameters().len()), count);
    }
}
