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

fn batch(lengths: &[usize], head: &HeadRecipe) -> Batch {
    let row = |(sample, &tokens): (usize, &usize)| {
        let inputs = (0..tokens).map(|t| ((t * 31 + sample * 7) % 90) as u32).collect();
        let targets = match head {
            HeadRecipe::NextToken => {
                Targets::NextToken((0..tokens).map(|t| if t < 40 { -100 } else { (t % 90) as i64 }).collect())
            }
            HeadRecipe::SeqClassificationOnLogits(_) => Targets::Class(sample % 2),
        };
        Row { sample: sample as u64, inputs, targets, initial: None }
    };
    Batch { rows: lengths.iter().enumerate().map(row).collect() }
}

/// What is planned, and what the engine says in the second step.
fn both(words: &[&str], lengths: &[usize]) -> (Vec<Moment>, Vec<(Part, MemoryByPart)>) {
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
    let batch = batch(lengths, &recipe.head);
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

/// Of rows of the same length.
fn check(words: &[&str]) {
    check_rows(words, &vec![TOKENS; recipe(words).train.micro_batch_size]);
}

fn check_rows(words: &[&str], lengths: &[usize]) {
    let (planned, told) = both(words, lengths);
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

#[test]
fn rows_of_different_lengths_hold_what_is_planned() {
    for lengths in [&[90, TOKENS, 20][..], &[1, 150], &[60, 50]] {
        check_rows(&["kv_cache.policy=h2o", "grad.layers_per_cell=2"], lengths);
        check_rows(&["kv_cache.policy=lastrec", "grad.chunks_per_cell=3", "grad.undo_log=int8"], lengths);
        check_rows(&["kv_cache.buffer=int8", "grad.chunks_per_cell=2"], lengths);
    }
    check_rows(&["kv_cache.policy=dense", "kv_cache.storage=growing"], &[90, TOKENS, 20]);
}

/// Compares event by event; `rough` takes out of both, planned and told, what is foretold only as the most, and has looked at it.
fn check_rough(words: &[&str], rough: &dyn Fn(&mut MemoryByPart, &mut MemoryByPart)) {
    let (planned, told) = both(words, &[TOKENS; 2]);
    assert_eq!(planned.len(), told.len() + 2, "{words:?}");
    for (i, (planned, (part, memory))) in planned.iter().zip(&told).enumerate() {
        let (mut held, mut memory) = (planned.held, *memory);
        rough(&mut held, &mut memory);
        assert_eq!((planned.part, certain(held)), (*part, certain(memory)), "{words:?}, event {i}");
    }
}

/// Takes a part out of both, of which the plan is `more` too high at most.
fn at_most(planned: &mut Bytes, told: &mut Bytes, more: u64) {
    assert!(*planned >= *told && planned.0 <= told.0 + more, "{planned} planned, {told} told");
    (*planned, *told) = (Bytes(0), Bytes(0));
}

/// Three layers are planned to be on the device at every moment; between two turns there are fewer.
#[test]
fn caches_that_wait_on_the_host_hold_at_most_what_is_planned() {
    for tiling in [["grad.layers_per_cell=1", "grad.chunks_per_cell=1"], ["grad.layers_per_cell=3", "grad.chunks_per_cell=3"]] {
        for more in ["kv_cache.policy=h2o", "kv_cache.buffer=int8"] {
            check_rough(&["kv_cache.cpu_offload=true", tiling[0], tiling[1], more], &|planned, told| {
                let all = planned.waiting_caches.0;
                at_most(&mut planned.caches, &mut told.caches, all);
            });
        }
    }
}

/// Heads' shares are known when the choices are, and lie between the cache length and what is planned, here one and a half times that.
#[test]
fn adakv_holds_at_most_what_is_planned() {
    check_rough(&["kv_cache.policy.adakv={ policy = 'keydiff', floor = 0.5 }", "grad.layers_per_cell=2"], &|planned, told| {
        for (planned, told) in
            [(&mut planned.caches, &mut told.caches), (&mut planned.cache_gradients, &mut told.cache_gradients)]
        {
            let half = told.0.div_ceil(2);
            at_most(planned, told, half);
        }
    });
}
