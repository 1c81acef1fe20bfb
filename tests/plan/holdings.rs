//! What the planner says that the engine holds, against what the engine says, event by event and to the byte.

use std::path::Path;

use kvtune::data::{Batch, Row, Targets};
use kvtune::engine::{Engine, Event, MemoryByPart, Observer, Settings, StepContext};
use kvtune::head::{ClassifyOnLogits, Head, NextToken};
use kvtune::model::{Adapter, Model, ModelConfig, kind_of};
use kvtune::plan::{Forecast, Moment, Part, Subject, Trained};
use kvtune::recipe::{HeadRecipe, Recipe};
use kvtune::units::Bytes;
use serde_json::json;
use tch::Device;

const TOKENS: usize = 203;

/// Collects what the engine holds.
#[derive(Default)]
struct Recorder(Vec<(Part, MemoryByPart)>);

impl Observer for Recorder {
    fn observe(&mut self, _: Event) {}

    fn weigh(&mut self, event: Event, memory: &dyn Fn() -> MemoryByPart) {
        self.0.push((event.into(), memory()));
    }
}

fn recipe(words: &[&str]) -> Recipe {
    let text =
        "model.path = '.'\ndata = { format = 'tokens', train = 'none' }\nkv_cache = { cache_length = 64, chunk_size = 16 }";
    let home = std::env::temp_dir().join("recipe.toml");
    let set: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    Recipe::parse(text.to_owned(), Path::new(&home), &set).unwrap().recipe
}

fn batch(rows: usize, head: &HeadRecipe) -> Batch {
    let row = |sample: usize| {
        let inputs = (0..TOKENS).map(|t| ((t * 31 + sample * 7) % 90) as u32).collect();
        let targets = match head {
            HeadRecipe::NextToken => {
                Targets::NextToken((0..TOKENS).map(|t| if t < 40 { -100 } else { (t % 90) as i64 }).collect())
            }
            HeadRecipe::SeqClassificationOnLogits(_) => Targets::Class(sample % 2),
        };
        Row { sample: sample as u64, inputs, targets, initial: None }
    };
    Batch { rows: (0..rows).map(row).collect() }
}

/// What is planned, and what the engine says in the second step.
fn both(words: &[&str]) -> (Vec<Moment>, Vec<(Part, MemoryByPart)>) {
    let recipe = recipe(words);
    let tied = !words.contains(&"train.weights=all");
    let config = json!({
        "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 90, "max_position_embeddings": 4096, "tie_word_embeddings": tied,
    });
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("config.json"), config.to_string()).unwrap();
    let config = ModelConfig::load(home.path()).unwrap();
    let model = match &recipe.lora {
        Some(lora) => {
            let adapter = Adapter::new(&config, lora, 1, kind_of(recipe.model.dtype), Device::Cpu).unwrap();
            Model::drawn(home.path(), recipe.model.dtype, Device::Cpu).unwrap().with_adapter(adapter)
        }
        None => Model::drawn_to_train(home.path(), recipe.model.dtype, Device::Cpu).unwrap(),
    };
    let head: Box<dyn Head> = match &recipe.head {
        HeadRecipe::NextToken => Box::new(NextToken),
        HeadRecipe::SeqClassificationOnLogits(_) => Box::new(ClassifyOnLogits::new(&[3, 5])),
    };
    let mut grad = recipe.grad.clone();
    grad.scratch_dir = Some(home.path().join("scratch"));
    let engine = Engine::new(Settings::new(&config, &recipe.kv_cache, &grad).unwrap(), head);
    let batch = batch(recipe.train.micro_batch_size, &recipe.head);
    let context = StepContext { weight: 0.01, dropout: None, chunk_sizes: None };
    let mut recorder = Recorder::default();
    for _ in 0..2 {
        recorder.0.clear();
        engine.gradients(&model, &batch, context, &mut recorder).unwrap();
    }
    let trained = Trained::of(recipe.lora.as_ref()).unwrap();
    let subject = Subject {
        config: &config,
        settings: engine.settings(),
        trained: &trained,
        kind: model.kind(),
        device: Device::Cpu,
        threads: 1,
        accumulates: false,
    };
    let plan = engine.settings().plan(&batch, None).unwrap();
    (Forecast::moments(&subject, &plan, &batch), recorder.0)
}

/// Without what depends on chance: the room that stores keep on where pieces happened to lie, the log on which heads agreed.
fn certain(memory: MemoryByPart) -> MemoryByPart {
    MemoryByPart { free_room: Bytes(0), untouched: Bytes(0), replay_log: Bytes(0), ..memory }
}

fn check(words: &[&str]) {
    let (planned, told) = both(words);
    assert_eq!(planned.len(), told.len() + 2, "{words:?}");
    for (i, (planned, (part, memory))) in planned.iter().zip(&told).enumerate() {
        assert_eq!((planned.part, certain(planned.held)), (*part, certain(*memory)), "{words:?}, event {i}");
        assert!(planned.held.replay_log >= memory.replay_log, "{words:?}, event {i}");
        let apart = planned.held.free_room.0.abs_diff(memory.free_room.0);
        assert!(apart <= 64 << 10, "{words:?}, event {i}: {} planned, {} told", planned.held.free_room, memory.free_room);
    }
}

#[test]
fn every_policy_holds_what_is_planned() {
    for policy in ["h2o", "h2o-vlen", "lastrec", "keydiff", "knorm", "snapkv", "tova", "streaming-llm", "expected-attention"] {
        let policy = format!("kv_cache.policy={policy}");
        check(&[&policy, "grad.layers_per_cell=2"]);
        check(&[&policy, "grad.layers_per_cell=3", "grad.chunks_per_cell=2", "train.micro_batch_size=2"]);
    }
}

#[test]
fn every_tiling_and_store_holds_what_is_planned() {
    for layers in ["grad.layers_per_cell=1", "grad.layers_per_cell=2", "grad.layers_per_cell=3"] {
        for chunks in ["grad.chunks_per_cell=1", "grad.chunks_per_cell=3", "grad.chunks_per_cell=100"] {
            for stores in [
                ["grad.layer_checkpoints=plain", "grad.undo_log=plain"],
                ["grad.layer_checkpoints=int8", "grad.undo_log=int4"],
                ["grad.layer_checkpoints_place=file", "grad.undo_log=int8"],
                ["grad.layer_checkpoints=int4", "grad.undo_log_place=file"],
            ] {
                check(&[layers, chunks, stores[0], stores[1]]);
            }
        }
    }
}

#[test]
fn other_caches_kinds_heads_and_full_training_hold_what_is_planned() {
    check(&["kv_cache.buffer=int8", "grad.layers_per_cell=2"]);
    check(&["kv_cache.buffer=int8", "kv_cache.policy=qh2o", "grad.layers_per_cell=2"]);
    check(&["kv_cache.buffer=int4", "train.micro_batch_size=2"]);
    check(&["kv_cache.cache_length=[80, 64, 48]", "grad.chunks_per_cell=2"]);
    check(&["kv_cache.cache_length=400"]);
    check(&["kv_cache.policy=dense", "kv_cache.storage=growing", "grad.layers_per_cell=2"]);
    check(&["kv_cache.policy=dense", "kv_cache.storage=paged", "train.micro_batch_size=2"]);
    check(&["model.dtype=bf16", "grad.layers_per_cell=2"]);
    check(&["model.dtype=f64", "grad.chunks_per_cell=2"]);
    check(&["train.weights=all", "grad.layers_per_cell=2"]);
    check(&["head.kind=seq_classification_on_logits", "head.label_tokens=[3, 5]", "grad.layers_per_cell=1"]);
    check(&["lora.target_modules=[\"down_proj\", \"v_proj\"]", "lora.r=3"]);
}
