//! What a process takes before a step's tensors: the program, libtorch, and what both read and keep when they first compute.

use serde_json::{Map, json};
use tch::Device;

use crate::data::{Batch, Sequence, Targets};
use crate::engine::{Engine, MicroBatchContext, NoObserver, Settings};
use crate::head::Head;
use crate::model::{Adapter, Model, ModelConfig, kind_of};
use crate::native::{give_free_memory_back, resident_memory};
use crate::ops::attention::accumulation_kind;
use crate::recipe::{Dtype, LossMean, Recipe};
use crate::units::Bytes;

/// The resident size of a process that has computed, but holds no tensors to speak of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessBaseline {
    /// What is resident by now.
    pub resident: Bytes,
    /// What libraries are expected to add, because they make kernels for the shapes that they meet, and keep them.
    pub kernels: Bytes,
    /// Freed memory that is expected to wait in its allocator, whatever the step's tensors.
    pub freed: Bytes,
}

const RECIPE: &str = "model.path = '.'\ndata = { format = 'tokens', train = 'none' }\nlora.r = 4\n\
                      kv_cache = { policy = 'h2o', cache_length = 128, chunk_size = 64 }";
const TOKENS: usize = 224;

/// What the process takes in addition to its baseline and its tensors while it computes: freed memory that waits in its allocator. So many
/// numbers of the kind that is computed in, and a part of the tensors, as `kvtune bench --profile-memory` shows them over drawn recipes.
const FREED_NUMBERS: u64 = 10 << 18;
const FREED_SHARE: f64 = 0.025;

impl ProcessBaseline {
    /// The size of the process, with the kernels that are still to come.
    pub fn bytes(self) -> Bytes {
        Bytes(self.resident.0 + self.kernels.0)
    }

    /// The process with so many bytes of tensors on the host.
    pub fn with(self, tensors: Bytes) -> Bytes {
        Bytes(self.bytes().0 + tensors.0 + (tensors.0 as f64 * FREED_SHARE) as u64 + self.freed.0)
    }

    /// Makes steps of two small models in the dtype of the run, so that the libraries' code is in memory, and looks at what is resident; zero
    /// where the system does not tell. Libraries make kernels for the shapes that they meet, and keep them: of how many bytes depends on
    /// dtype and processor. What the second model adds to the first one's is what the run's own shapes will add.
    pub fn rehearsed(dtype: Dtype, device: Device) -> Self {
        // Where it fails the step itself will say why.
        let [first, both] = WIDTHS.map(|widths| {
            let _ = rehearse(widths, dtype, device);
            resident_now()
        });
        let freed = Bytes(FREED_NUMBERS * accumulation_kind(kind_of(dtype)).elt_size_in_bytes() as u64);
        // A quarter more is still to come for shapes that neither model has, as seen over drawn recipes.
        let kernels = both.saturating_sub(first);
        Self { resident: Bytes(both), kernels: Bytes(kernels + kernels / 4), freed }
    }
}

/// Widths of the hidden states and inside the MLP, for each of the two models.
const WIDTHS: [[usize; 2]; 2] = [[64, 160], [192, 480]];

fn rehearse([hidden, inner]: [usize; 2], dtype: Dtype, device: Device) -> Option<()> {
    let config = json!({
        "model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": inner, "vocab_size": 256, "max_position_embeddings": 2 * TOKENS,
    });
    let recipe = Recipe::parse(RECIPE.to_owned(), std::path::Path::new("rehearsal.toml"), &[]).ok()?.recipe;
    let config = ModelConfig::from_object(config.as_object().unwrap_or(&Map::new())).ok()?;
    let adapter = Adapter::new(&config, recipe.lora.as_ref()?, 1, kind_of(dtype), device).ok()?;
    let model = Model::drawn_of(config, dtype, device).ok()?.with_adapter(adapter);
    let engine = Engine::new(Settings::new(model.config(), &recipe.kv_cache, &recipe.grad).ok()?, Head::NextToken);
    let ids = |from: usize| (from..from + TOKENS).map(|id| (id * 7 % 256) as u32);
    let targets = Targets::NextToken(ids(1).map(i64::from).collect());
    let batch = Batch { sequences: vec![Sequence { sample: 0, inputs: ids(0).collect(), targets, initial: None }] };
    let context =
        MicroBatchContext { weight: 1.0, loss_mean: LossMean::Tokens, router_weight: 0.0, dropout: None, chunk_sizes: None };
    engine.gradients(&model, &batch, context, &mut NoObserver).ok().map(drop)
}

/// What is resident, without free memory that the allocator keeps.
pub(super) fn resident_now() -> u64 {
    give_free_memory_back();
    resident_memory().unwrap_or(0)
}
