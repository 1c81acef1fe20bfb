//! Each optimiser against the numbers of `torch.optim`.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;
use tch::Tensor;

use super::build;
use crate::recipe::{OptimizerRecipe, Recipe};

fn recipe(name: &str, settings: &Value) -> OptimizerRecipe {
    let mut text = format!(
        "model.path = '.'\nlora.r = 1\ndata = {{format = 'tokens', train = 'none'}}\nkv_cache = {{policy = 'lastrec', cache_length = 8, \
         chunk_size = 4}}\n[optimizer]\nname = '{name}'\n"
    );
    for (key, value) in settings.as_object().unwrap() {
        writeln!(text, "{key} = {value}").unwrap();
    }
    Recipe::parse(text, Path::new("recipe.toml"), &[]).unwrap().recipe.optimizer
}

fn named(values: &Value) -> Vec<(String, Tensor)> {
    let values: Vec<f64> = serde_json::from_value(values.clone()).unwrap();
    vec![("w".to_owned(), Tensor::from_slice(&values))]
}

#[test]
fn twenty_steps_end_where_those_of_torch_do_and_survive_saving() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/optimizers.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(fixture).unwrap()).unwrap();
    let rate = fixture["learning_rate"].as_f64().unwrap();
    for case in fixture["cases"].as_array().unwrap() {
        let recipe = recipe(case["name"].as_str().unwrap(), &case["settings"]);
        let parameters = named(&fixture["begin"]);
        let mut optimizer = build(&recipe, &parameters);
        for (step, gradient) in fixture["gradients"].as_array().unwrap().iter().enumerate() {
            if step == 7 {
                let mut other = build(&recipe, &parameters);
                other.load_state(&optimizer.state()).unwrap();
                optimizer = other;
            }
            optimizer.step(&parameters, &named(gradient), rate);
        }
        let error = f64::try_from((&parameters[0].1 - &named(&case["end"])[0].1).abs().max()).unwrap();
        assert!(error < 1e-14, "{case}: {error:e}");
    }
}

#[test]
fn the_matrices_b_of_an_adapter_learn_faster_where_asked_to() {
    let recipe = recipe("sgd", &serde_json::json!({"loraplus_lr_ratio": 4.0}));
    let names = ["m.q_proj.lora_A.weight", "m.q_proj.lora_B.weight", "m.embed_tokens.lora_embedding_B"];
    let named = |value: f64| Vec::from(names.map(|name| (name.to_owned(), Tensor::from_slice(&[value]))));
    let parameters = named(0.0);
    build(&recipe, &parameters).step(&parameters, &named(-1.0), 0.5);
    let found: Vec<f64> = parameters.iter().map(|(_, of)| of.double_value(&[0])).collect();
    assert_eq!(found, [0.5, 2.0, 2.0]);
}

#[test]
fn foreign_state_is_refused() {
    let (one, two) = (serde_json::json!([1.0]), serde_json::json!([1.0, 2.0]));
    let recipe = recipe("adamw", &serde_json::json!({}));
    let (mut optimizer, other) = (build(&recipe, &named(&one)), build(&recipe, &named(&two)));
    assert!(optimizer.load_state(&other.state()).unwrap_err().to_string().contains("expected [1], found [2]"));
    assert!(optimizer.load_state(&other.state()[..2]).is_err());
}
