//! A small model with adapters, which the tests of several files run.

use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::{Adapter, Attend, DropoutContext, Model, ModelConfig, Qkv};
use crate::recipe::{LoraRecipe, ModuleSet};
use crate::units::{Fault, LayerIdx, StepKey};

pub(super) fn config() -> ModelConfig {
    let object = json!({
        "model_type": "qwen2", "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
        "intermediate_size": 20, "vocab_size": 11, "max_position_embeddings": 64, "initializer_range": 0.3,
    });
    ModelConfig::from_object(object.as_object().unwrap()).unwrap()
}

pub(super) fn recipe(names: &[&str]) -> LoraRecipe {
    let target_modules = ModuleSet::Names(names.iter().map(|&name| name.into()).collect());
    LoraRecipe::plain(2, 4.0, 0.0, target_modules)
}

pub(super) fn adapter(lora: &LoraRecipe, seed: u64) -> Adapter {
    Adapter::new(&config(), lora, seed, Kind::Double, Device::Cpu).unwrap()
}

/// Every token sees its own value only, so that sequences and chunks don't matter.
struct Alone;

impl Attend for Alone {
    fn attend(&mut self, _: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault> {
        Ok(qkv.own.v.expand_as(&qkv.q_bhnd))
    }
}

/// Hidden states after all layers for two samples, run in pieces that end at `ends`.
pub(super) fn run(model: &Model, sequences: &[i64], ends: &[i64], dropout: Option<StepKey>) -> Tensor {
    let samples: Vec<u64> = sequences.iter().map(|&sequence| 40 + sequence as u64).collect();
    let ids = Tensor::arange(22, (Kind::Int64, Device::Cpu))
        .remainder(11)
        .view([2, 11])
        .index_select(0, &Tensor::from_slice(sequences));
    let mut start = 0;
    let piece = |&end: &i64| {
        let position = Tensor::arange_start(start, end, (Kind::Int64, Device::Cpu)).unsqueeze(0);
        let positions = model.positions(position, &model.frequencies(&[11, 11]));
        let mut hidden = model.embed(&ids.narrow(1, start, end - start));
        let context = DropoutContext { dropout, samples: &samples };
        for layer in 0..2 {
            hidden = model.layer(LayerIdx(layer), &hidden, &positions, &context, &mut Alone).unwrap();
        }
        start = end;
        hidden
    };
    Tensor::cat(&ends.iter().map(piece).collect::<Vec<_>>(), 1)
}
