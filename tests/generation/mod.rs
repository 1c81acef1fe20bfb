//! Texts that are generated: as Transformers generates them where nothing is evicted, and the same alone as among others where it is.

mod rules;
mod sessions;

use std::path::PathBuf;

use kvtune::data::{InitialPartFinder, Tokenizer};
use kvtune::engine::{Engine, Session, SessionSpec, decode_step};
use kvtune::generation::{Finish, GenerationEvent, GenerationRules, Generator, LikelihoodsOf, Request, TokenLikelihood};
use kvtune::model::{CapturedLayers, Model};
use kvtune::recipe::Recipe;
use kvtune::train;
use serde_json::{Map, Value};
use tch::{Device, Tensor, no_grad};

use crate::support;

/// A model that is ready for use.
pub(crate) struct Used {
    pub(crate) model: Model,
    pub(crate) engine: Engine,
    pub(crate) tokenizer: Option<Tokenizer>,
    initial_parts: Option<InitialPartFinder>,
}

impl Used {
    /// Of a model among the fixtures, with keys of the recipe, and an adapter among the fixtures.
    pub(crate) fn new(model: &str, set: &[&str], adapter: Option<&str>) -> Self {
        support::on_one_thread();
        let path = fixture(model);
        let set: Vec<String> = set.iter().map(|key| (*key).to_owned()).collect();
        let mut recipe = Recipe::of_model(&path, &set).unwrap().recipe;
        recipe.grad = recipe.grad.closed();
        let mut model = train::base_model(&recipe, None, Device::Cpu).unwrap();
        if let Some(adapter) = adapter {
            train::load_adapter(&mut model, &fixture(adapter)).unwrap();
        }
        let tokenizer = Tokenizer::load_if_present(&path).unwrap();
        let engine = train::engine(&recipe, model.config(), tokenizer.as_ref(), None).unwrap();
        let rule = kvtune::cache::initial_part(&recipe.kv_cache.policy).unwrap();
        let initial_parts = rule.map(|rule| InitialPartFinder::new(&rule, tokenizer.as_ref()).unwrap());
        Self { model, engine, tokenizer, initial_parts }
    }

    pub(crate) fn generator(&self, width: usize) -> Generator<'_> {
        Generator::new(&self.engine, &self.model, self.tokenizer.as_ref(), width).finding(self.initial_parts.as_ref())
    }
}

/// A text that was written.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Text {
    pub(crate) ids: Vec<u32>,
    pub(crate) words: String,
    pub(crate) finish: Option<Finish>,
    pub(crate) likelihoods: Vec<TokenLikelihood>,
}

/// The texts of requests, each with its samples.
pub(crate) fn texts(generator: &mut Generator<'_>, requests: Vec<Request>) -> Vec<Vec<Text>> {
    let mut all: Vec<Vec<Text>> = requests.iter().map(|request| vec![Text::default(); request.samples]).collect();
    let ids: Vec<_> = requests.into_iter().map(|request| generator.submit(request).unwrap()).collect();
    let at = |request| ids.iter().position(|id| *id == request).unwrap();
    while !generator.is_idle() {
        for (request, event) in generator.step() {
            match event {
                GenerationEvent::Border(_) => {}
                GenerationEvent::Prompt(likelihoods) => all[at(request)][0].likelihoods = likelihoods,
                GenerationEvent::Token { sample, id, text, likelihood } => {
                    let own = &mut all[at(request)][sample];
                    own.ids.push(id);
                    own.words.push_str(&text);
                    own.likelihoods.extend(likelihood);
                }
                GenerationEvent::Finished { sample, text, reason, .. } => {
                    let own = &mut all[at(request)][sample];
                    own.words.push_str(&text);
                    own.finish = Some(reason);
                }
                GenerationEvent::Failed(error) => panic!("{error}"),
            }
        }
    }
    all
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The rows of a file of JSON lines among the fixtures.
pub(crate) fn rows(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(fixture("generation").join(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Numbers of a row.
pub(crate) fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub(crate) fn rules(options: &Map<String, Value>) -> GenerationRules {
    let mut rules = GenerationRules::default();
    for (key, value) in options {
        assert!(rules.set(key, value).unwrap(), "{key}");
    }
    rules
}

fn new_tokens(count: usize) -> GenerationRules {
    GenerationRules { max_new_tokens: Some(count), ..GenerationRules::default() }
}

#[test]
fn greedy_texts_are_those_of_transformers_side_by_side() {
    let used = Used::new("model-qwen2", &[], None);
    let rows = rows("greedy.jsonl");
    let request = |row: &Value| Request::new(numbers(&row["prompt"]), rules(row["options"].as_object().unwrap()));
    let found = texts(&mut used.generator(5), rows.iter().map(request).collect());
    for (row, found) in rows.iter().zip(found) {
        assert_eq!(found[0].ids, numbers(&row["new_tokens"]), "{row}");
        assert!(row.get("text").is_none_or(|text| *text == found[0].words), "{row}: {:?}", found[0].words);
        let finish = found[0].finish.unwrap().name();
        assert!(row.get("finish_reason").is_none_or(|expected| *expected == finish), "{row}");
    }
}

#[test]
fn families_write_what_they_write_elsewhere_with_and_without_adapter() {
    for row in rows("families.jsonl") {
        let arch = row["arch"].as_str().unwrap();
        for (kind, adapter) in [("base", None), ("lora", Some(format!("families/adapter-{arch}")))] {
            let used = Used::new(&format!("families/model-{arch}"), &[], adapter.as_deref());
            let request = Request::new(numbers(&row["prompt"]), new_tokens(24));
            let found = texts(&mut used.generator(1), vec![request]);
            assert_eq!(found[0][0].ids, numbers(&row[kind]), "{arch}, {kind}");
        }
    }
}

/// The logits `(n, V)` of the tokens that follow hidden states `(n, E)`.
fn logits(model: &Model, hidden_ne: &Tensor) -> Tensor {
    no_grad(|| model.logits(&model.final_norm(hidden_ne)))
}

#[test]
fn tokens_one_by_one_behind_a_prompt_are_one_pass_in_every_family() {
    let ids: Vec<u32> = (0..40).map(|i| i * i * 7 % 300 + 5).collect();
    let row = |ids: &[u32]| Tensor::from_slice(&ids.iter().map(|&id| i64::from(id)).collect::<Vec<_>>()).unsqueeze(0);
    let mut worst = Vec::new();
    for entry in std::fs::read_dir(fixture("families")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !name.starts_with("model-") {
            continue;
        }
        let used = Used::new(&format!("families/{name}"), &["model.dtype=f64"], None);
        let (engine, model) = (&used.engine, &used.model);
        let spec = SessionSpec::new(1, ids.len());
        let (mut whole, mut hidden) = (Session::new(engine, model, &spec).unwrap(), Vec::new());
        whole.extend(engine, model, &row(&ids), Some(&mut |_, column| hidden.push(column.squeeze_dim(0)))).unwrap();
        let expected = logits(model, &Tensor::cat(&hidden, 0));
        let mut session = Session::new(engine, model, &spec).unwrap();
        session.extend(engine, model, &row(&ids[..25]), None).unwrap();
        for at in 25..ids.len() {
            let hidden = decode_step(engine, model, &mut CapturedLayers::default(), &mut [&mut session], &ids[at..=at], 1)
                .unwrap()
                .squeeze_dim(1);
            let apart = (logits(model, &hidden).get(0) - expected.get(at as i64)).abs().max().double_value(&[]);
            worst.push((apart, name.clone()));
        }
    }
    let (apart, name) = worst.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
    println!("at most {apart:.1e}, in {name}");
    assert!(apart <= 1e-12, "{name}: {apart:.1e}");
}

#[test]
fn likelihoods_of_a_prompt_are_those_of_transformers() {
    // Small chunks, so that a prompt comes in several columns.
    let used = Used::new("model-qwen2", &["kv_cache.chunk_size=7", "grad.chunks_per_cell=1"], None);
    for row in rows("likelihoods.jsonl") {
        let likelihoods = LikelihoodsOf { new_tokens: Some(1), prompt: Some(1) };
        let request = Request { likelihoods, ..Request::new(numbers(&row["prompt"]), new_tokens(1)) };
        let found = texts(&mut used.generator(1), vec![request]).remove(0).remove(0).likelihoods;
        let (expected, most_likely) = (row["log_probabilities"].as_array().unwrap(), row["most_likely"].as_array().unwrap());
        assert_eq!(found.iter().map(|token| token.id).collect::<Vec<_>>(), numbers(&row["tokens"])[1..]);
        for ((found, expected), most_likely) in found.iter().zip(expected).zip(most_likely) {
            assert!((f64::from(found.log_probability) - expected.as_f64().unwrap()).abs() < 1e-4, "{found:?}: {expected}");
            assert_eq!(u64::from(found.most_likely[0].0), most_likely["token"].as_u64().unwrap());
            assert!((f64::from(found.most_likely[0].1) - most_likely["logprob"].as_f64().unwrap()).abs() < 1e-4);
        }
    }
}
