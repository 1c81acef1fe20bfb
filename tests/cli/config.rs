//! A `config.json` that asks for what isn't there.

use insta::assert_snapshot;
use serde_json::{Value, json};

use super::place::Place;

fn refused(changes: Value) -> String {
    let place = Place::new();
    place.edit_json("model/config.json", changes);
    place.check(&[]).refused(3)
}

#[test]
fn model_types() {
    assert_snapshot!(refused(json!({"model_type": null})), @r"
    error: `<dir>/model/config.json`: no `model_type`, expected one of `qwen2`

    hint: use a model of a known family
    ");
    assert_snapshot!(refused(json!({"model_type": "qwen9"})), @r"
    error: `<dir>/model/config.json`: unknown `model_type` `qwen9`, expected one of `qwen2`

    hint: use a model of a known family
    ");
}

#[test]
fn layers_of_another_type() {
    let types = ["full_attention", "chunked_attention", "full_attention"];
    assert_snapshot!(refused(json!({"use_sliding_window": true, "sliding_window": 24, "layer_types": types})), @r#"
    error: `<dir>/model/config.json`: `layer_types` is "chunked_attention", which is not supported: expected `full_attention` or `sliding_attention`

    hint: use a model without this, or correct `layer_types` if the model doesn't need it
    "#);
}

#[test]
fn rope_scaling_in_both_spellings() {
    let yarn = json!({"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0});
    assert_snapshot!(refused(json!({"rope_parameters": yarn})), @r#"
    error: `<dir>/model/config.json`: `rope_parameters` is {"factor":4.0,"rope_theta":1000000.0,"rope_type":"yarn"}, which is not supported: expected the type `default`

    hint: use a model without this, or correct `rope_parameters` if the model doesn't need it
    "#);
    let linear = json!({"type": "linear", "factor": 2.0});
    assert_snapshot!(refused(json!({"rope_parameters": null, "rope_theta": 1e6, "rope_scaling": linear})), @r#"
    error: `<dir>/model/config.json`: `rope_scaling` is {"factor":2.0,"type":"linear"}, which is not supported: expected the type `default`

    hint: use a model without this, or correct `rope_scaling` if the model doesn't need it
    "#);
}

#[test]
fn keys_that_are_missing_or_absurd() {
    assert_snapshot!(refused(json!({"hidden_size": null})), @r"
    error: `<dir>/model/config.json`: `hidden_size` is missing, expected a whole number

    hint: take `config.json` from the model's source again
    ");
    assert_snapshot!(refused(json!({"num_hidden_layers": 1_000_000_000})), @r"
    error: `<dir>/model/config.json`: `num_hidden_layers` is 1000000000, expected a whole number from 1 to 1024

    hint: take `config.json` from the model's source again
    ");
}

#[test]
fn no_json() {
    let place = Place::new();
    place.write("model/config.json", "{\"model_type\": ");
    assert_snapshot!(place.check(&[]).refused(3), @r"
    error: `<dir>/model/config.json` is not valid JSON: EOF while parsing a value at line 1 column 15

    hint: look at the place that the parser names, or fetch the file again
    ");
}
