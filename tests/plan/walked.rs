//! A step as it is planned, and the same step as the engine tells it.

use std::path::Path;

use kvtune::data::{Batch, Sequence, Targets};
use kvtune::engine::{Engine, Event, MemoryByPart, MemoryPart, MemoryPlace, MicroBatchContext, Observer, Settings};
use kvtune::head::{Classify, ClassifyOnLogits, Head, NextToken};
use kvtune::model::{Adapter, Model, ModelConfig, ModelPlacement, kind_of};
use kvtune::plan::{Forecast, Span, StepPart, StepSpec, TrainedPart};
use kvtune::recipe::{HeadRecipe, Offload, Recipe};
use serde_json::json;
use tch::Device;

pub(crate) const TOKENS: usize = 203;

/// Collects what the engine holds.
#[derive(Default)]
struct Recorder(Vec<(StepPart, MemoryByPart)>);

impl Observer for Recorder {
    fn observe(&mut self, _: Event) {}

    fn measure(&mut self, event: Event, memory: &dyn Fn() -> MemoryByPart) {
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
    let sequence = |(sample, &tokens): (usize, &usize)| {
        let inputs = (0..tokens).map(|t| ((t * 31 + sample * 7) % 90) as u32).collect();
        let targets = match head {
            HeadRecipe::NextToken => {
                Targets::NextToken((0..tokens).map(|t| if t < 40 { -100 } else { (t % 90) as i64 }).collect())
            }
            HeadRecipe::SeqClassification(_) | HeadRecipe::SeqClassificationOnLogits(_) => Targets::Class(sample % 2),
        };
        Sequence { sample: sample as u64, inputs, targets, initial: None }
    };
    Batch { sequences: lengths.iter().enumerate().map(sequence).collect() }
}

/// What is planned, and what the engine says in the second step.
pub(crate) fn both(words: &[&str], lengths: &[usize]) -> (Vec<Span>, Vec<(StepPart, MemoryByPart)>) {
    // Such small tensors are computed sooner on one thread, whatever else runs.
    tch::set_num_threads(1);
    let recipe = recipe(words);
    let tied = !words.contains(&"train.weights=all");
    let config = json!({
        "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "vocab_size": 90, "max_position_embeddings": 4096, "tie_word_embeddings": tied,
    });
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("config.json"), config.to_string()).unwrap();
    let classes = if let HeadRecipe::SeqClassification(classes) = &recipe.head { Some(classes.count()) } else { None };
    let config = ModelConfig::load(home.path()).unwrap().with_classes(classes);
    let at = ModelPlacement { device: Device::Cpu, keeps_layers_on_host: recipe.train.offload == Offload::Weights };
    let model = match &recipe.lora {
        Some(lora) => {
            let adapter = Adapter::new(&config, lora, 1, kind_of(recipe.model.dtype), Device::Cpu).unwrap();
            Model::drawn(home.path(), recipe.model.dtype, at).unwrap().with_adapter(adapter)
        }
        None => Model::drawn_to_train(home.path(), recipe.model.dtype, at).unwrap(),
    };
    let head: Box<dyn Head> = match &recipe.head {
        HeadRecipe::NextToken => Box::new(NextToken),
        HeadRecipe::SeqClassification(_) => Box::new(Classify),
        HeadRecipe::SeqClassificationOnLogits(_) => Box::new(ClassifyOnLogits::new(&[3, 5])),
    };
    let mut grad = recipe.grad.clone();
    grad.scratch_dir = Some(home.path().join("scratch"));
    let engine = Engine::new(Settings::new(&config, &recipe.kv_cache, &grad).unwrap(), head);
    let batch = batch(lengths, &recipe.head);
    let context = MicroBatchContext { weight: 0.01, router_weight: 0.0, dropout: None, chunk_sizes: None };
    let mut recorder = Recorder::default();
    for _ in 0..2 {
        recorder.0.clear();
        engine.gradients(&model, &batch, context, &mut recorder).unwrap();
    }
    let trained = TrainedPart::of(&config, recipe.lora.as_ref()).unwrap();
    let spec = StepSpec {
        config: &config,
        settings: engine.settings(),
        trained: &trained,
        optimizer: &recipe.optimizer,
        offload: recipe.train.offload,
        kind: model.kind(),
        device: Device::Cpu,
        threads: 1,
        ranks: 1,
        accumulates: false,
    };
    let plan = engine.settings().plan(&batch, None).unwrap();
    (Forecast::moments(&spec, &plan, &batch), recorder.0)
}

/// Compares what is planned for an event with what the engine has told of it: to the byte but for what depends on chance, the room that
/// stores keep on where pieces happened to lie, and the log on which heads agreed.
pub(crate) fn check_event(planned: &Span, (part, told): (StepPart, MemoryByPart), what: &str) {
    assert_eq!(planned.part, part, "{what}");
    let (held, mut apart) = (planned.held.by_part(), 0);
    for part in [MemoryPart::KvCache, MemoryPart::Gradients, MemoryPart::UndoLog, MemoryPart::LayerCheckpoints] {
        for place in [MemoryPlace::Device, MemoryPlace::Host] {
            let (planned, told) = (held.get(part, place).0 as i64, told.get(part, place).0 as i64);
            let is_store = place == MemoryPlace::Host && [MemoryPart::UndoLog, MemoryPart::LayerCheckpoints].contains(&part);
            assert!(is_store || planned == told, "{what}, {part:?} on {place:?}: {planned} planned, {told} told");
            apart += planned - told;
        }
    }
    let room = planned.held.free_room.0 as i64;
    let most = (64 << 10) + planned.held.replay_log.0 as i64;
    assert!((-(64 << 10)..=most).contains(&(apart + room)), "{what}: stores are {apart} apart, with {room} of room");
}

/// Of sequences of the same length.
pub(crate) fn check(words: &[&str]) {
    check_sequences(words, &vec![TOKENS; recipe(words).train.batch_size.sequences()]);
}

pub(crate) fn check_sequences(words: &[&str], lengths: &[usize]) {
    let (planned, told) = both(words, lengths);
    assert_eq!(planned.len(), told.len() + 2, "{words:?}");
    for (i, (planned, told)) in planned.iter().zip(told).enumerate() {
        check_event(planned, told, &format!("{words:?}, event {i}"));
    }
}
