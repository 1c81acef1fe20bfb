//! Each optimiser against the numbers of `torch.optim`.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::{Optimizer, build};
use crate::recipe::{Offload, OptimizerRecipe, Recipe};
use crate::store::{WaitFault, with_delayed_copies};

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

fn of(recipe: &OptimizerRecipe, parameters: &[(String, Tensor)]) -> Optimizer {
    build(recipe, Offload::None, parameters, Device::Cpu)
}

#[test]
fn twenty_steps_end_where_those_of_torch_do_and_survive_saving() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/optimizers.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(fixture).unwrap()).unwrap();
    let rate = fixture["learning_rate"].as_f64().unwrap();
    for case in fixture["cases"].as_array().unwrap() {
        let recipe = recipe(case["name"].as_str().unwrap(), &case["settings"]);
        let parameters = named(&fixture["begin"]);
        let mut optimizer = of(&recipe, &parameters);
        for (step, gradient) in fixture["gradients"].as_array().unwrap().iter().enumerate() {
            if step == 7 {
                let mut other = of(&recipe, &parameters);
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
    of(&recipe, &parameters).step(&parameters, &named(-1.0), 0.5);
    let found: Vec<f64> = parameters.iter().map(|(_, of)| of.double_value(&[0])).collect();
    assert_eq!(found, [0.5, 2.0, 2.0]);
}

#[test]
fn foreign_state_is_refused() {
    let (one, two) = (serde_json::json!([1.0]), serde_json::json!([1.0, 2.0]));
    let recipe = recipe("adamw", &serde_json::json!({}));
    let (mut optimizer, other) = (of(&recipe, &named(&one)), of(&recipe, &named(&two)));
    assert!(optimizer.load_state(&other.state()).unwrap_err().to_string().contains("expected [1] Double, found [2] Double"));
    assert!(optimizer.load_state(&other.state()[..2]).is_err());
}

/// Two parameters of `kind`, one of them of more than a block, and steps of gradients that vary; stopped and resumed in the middle.
fn trained(name: &str, kind: Kind, offload: Offload, steps: i64, rate: f64) -> (Vec<Tensor>, Optimizer) {
    let recipe = recipe(name, &serde_json::json!({"weight_decay": 0.0}));
    let begin =
        |name: &str, len: i64| (name.to_owned(), (Tensor::arange(len, (Kind::Float, Device::Cpu)) * 0.01 + 1.0).to_kind(kind));
    let parameters = vec![begin("a", 700), begin("b", 3)];
    let build = || build(&recipe, offload, &parameters, Device::Cpu);
    let mut optimizer = build();
    for step in 0..steps {
        if step == steps / 2 {
            let mut other = build();
            other.load_state(&optimizer.state()).unwrap();
            optimizer = other;
        }
        let wave = |len: i64| (Tensor::arange(len, (Kind::Float, Device::Cpu)) * 12.9898 + step as f64 * 78.233).sin();
        let gradients: Vec<_> = parameters.iter().map(|(name, p)| (name.clone(), wave(p.size()[0]) * 0.1 + 0.3)).collect();
        optimizer.step(&parameters, &gradients, rate);
    }
    (parameters.into_iter().map(|(_, parameter)| parameter).collect(), optimizer)
}

#[test]
fn state_in_8_bits_goes_nearly_where_f32_goes_in_a_quarter_of_the_memory() {
    let ((wide, f32_state), (narrow, state)) =
        (trained("adamw", Kind::Float, Offload::None, 40, 0.01), trained("adamw_8bit", Kind::Float, Offload::None, 40, 0.01));
    for (wide, narrow) in wide.iter().zip(&narrow) {
        let (error, moved) = ((wide - narrow).abs().max().double_value(&[]), 40.0 * 0.01);
        assert!(error > 0.0 && error < 0.03 * moved, "{error}");
    }
    // A scale for each block of codes: three of 700 numbers, one of 3.
    assert_eq!((f32_state.bytes().0, state.bytes().0), (2 * 4 * 703, 2 * (703 + 4 * 4)));
}

#[test]
fn state_on_the_host_gives_the_very_bits() {
    for (name, kind) in [("adamw", Kind::Float), ("adamw_8bit", Kind::Float), ("adamw", Kind::BFloat16), ("sgd", Kind::Float)] {
        let (expected, _) = trained(name, kind, Offload::None, 6, 0.01);
        let run = |waits| with_delayed_copies(waits, || trained(name, kind, Offload::Optimizer, 6, 0.01).0);
        assert_eq!(run(WaitFault::Kept), expected, "{name} {kind:?}");
        // What has not come is noticed; without moments there is nothing to come.
        assert_eq!(run(WaitFault::Lost) == expected, name == "sgd", "{name} {kind:?}");
    }
}

#[test]
fn updates_below_the_resolution_of_bf16_add_up() {
    let ((masters, _), (rounded, state)) =
        (trained("adamw", Kind::Float, Offload::None, 50, 1e-4), trained("adamw", Kind::BFloat16, Offload::None, 50, 1e-4));
    for (name, (master, rounded)) in ["a", "b"].into_iter().zip(masters.iter().zip(&rounded)) {
        let state = state.state();
        let own = state.iter().find(|(key, _)| *key == format!("{name}.master")).map(|(_, own)| own).unwrap();
        assert_eq!(*rounded, own.to_kind(Kind::BFloat16));
        // Each update is 1e-4, and bf16's next number below 1 is 4e-3 away.
        assert!((master.double_value(&[0]) - 0.995).abs() < 1e-3);
        assert!(((own - master).abs().max().double_value(&[])) < 0.02);
        assert!(rounded.double_value(&[0]) < 0.997, "{}", rounded.double_value(&[0]));
    }
}
