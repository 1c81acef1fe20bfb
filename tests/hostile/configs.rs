//! Configurations with impossible numbers and wrong types, for every key that decides a size, and configurations that are none.

use super::case::{Case, hold};
use super::ground::Ground;

const CONFIG: &str = "model/config.json";

/// A key of the configuration with a value, which is refused with both names.
fn key(key: &'static str, value: &'static str) -> Case {
    let make = move |ground: &Ground| ground.set_json(CONFIG, key, value);
    Case::new(format!("{key} = {value}"), make).says(&["config.json", key])
}

/// Numbers that make products overflow, divisions by zero and loops without end.
#[test]
fn sizes() {
    let counts =
        ["num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "head_dim", "intermediate_size"];
    // Each has every other one of the values.
    for (first, value) in ["0", "-1", "9223372036854775808", "1e300"].into_iter().enumerate() {
        hold(counts.iter().skip(first % 2).step_by(2).map(|name| key(name, value)));
    }
    for value in ["0", "9223372036854775807", "\"512\"", "[512]", "1.5"] {
        hold([key("vocab_size", value), key("max_position_embeddings", value)]);
    }
}

#[test]
fn numbers() {
    for value in ["0", "-1e-6", "1e39", "\"small\"", "{}"] {
        hold([key("rms_norm_eps", value)]);
    }
    hold(["-1", "0", "true"].map(|value| key("sliding_window", value)).into_iter().map(|case| {
        let slides = |ground: &Ground| ground.set_json(CONFIG, "use_sliding_window", "true");
        case.also(slides)
    }));
    let rope = |value: &'static str, word: &'static str| {
        let make = move |ground: &Ground| ground.set_json(CONFIG, "rope_parameters", value);
        Case::new(format!("rope_parameters = {value}"), make).says(&["config.json", word])
    };
    hold([
        rope("{\"rope_theta\": 0, \"rope_type\": \"default\"}", "rope_theta"),
        rope("{\"rope_theta\": -10000.0, \"rope_type\": \"default\"}", "rope_theta"),
        rope("{\"rope_theta\": \"x\", \"rope_type\": \"default\"}", "rope_theta"),
        rope("{\"rope_theta\": 10000.0, \"rope_type\": \"linear\", \"factor\": 0}", "factor"),
        rope("{\"rope_theta\": 10000.0, \"rope_type\": \"unheard\"}", "unheard"),
        rope("{\"rope_theta\": 10000.0, \"rope_type\": \"longrope\", \"long_factor\": [], \"short_factor\": []}", "factor"),
        rope("[1, 2]", "rope_parameters"),
        rope("7", "rope_parameters"),
    ]);
}

#[test]
fn other_values() {
    hold([
        key("hidden_act", "\"unheard\""),
        key("hidden_act", "7"),
        key("tie_word_embeddings", "\"yes\""),
        key("use_sliding_window", "1"),
        key("model_type", "\"unheard\""),
        key("model_type", "null"),
        key("model_type", "[\"qwen2\"]"),
        key("layer_types", "[\"full_attention\"]"),
        key("layer_types", "\"full_attention\""),
        key("layer_types", "[1, 2, 3]"),
        key("quantization_config", "{\"bits\": 4}"),
        key("num_hidden_layers", "1000000"),
    ]);
    // An end that no tokenizer can have made, where texts are tokenised.
    for value in ["4294967295", "-1", "512", "[0, 100000]"] {
        let make = move |ground: &Ground| {
            ground.with_texts();
            ground.set_json(CONFIG, "eos_token_id", value);
            ground.set_json("model/generation_config.json", "eos_token_id", value);
            ground.set_json("model/tokenizer_config.json", "eos_token", "null");
        };
        hold([Case::new(format!("eos_token_id = {value}"), make).says(&["eos_token"])]);
    }
}

#[test]
fn files_that_are_none() {
    let file = |name: &str, bytes: Vec<u8>| {
        let make = move |ground: &Ground| ground.write(CONFIG, &bytes);
        Case::new(name, make).says(&["config.json"])
    };
    let twice = "{\"model_type\": \"qwen2\", \"model_type\": \"llama\"}";
    let mut bom = vec![0xef, 0xbb, 0xbf];
    bom.extend(b"[]");
    hold([
        file("nothing", Vec::new()),
        file("zeros", vec![0; 4096]),
        file("no JSON", b"model_type: qwen2".to_vec()),
        file("half of it", b"{\"model_type\": \"qwen2\", \"hidden".to_vec()),
        file("an array", b"[]".to_vec()),
        file("a number", b"7".to_vec()),
        file("null", b"null".to_vec()),
        file("an empty object", b"{}".to_vec()),
        file("a mark of byte order", bom),
        file("UTF-16", "{}".encode_utf16().flat_map(u16::to_le_bytes).collect()),
        file("no UTF-8", b"{\"model_type\": \"qwen\xff\"}".to_vec()),
        file("NaN", b"{\"rms_norm_eps\": NaN}".to_vec()),
        file("a key twice", twice.into()),
        file("half a surrogate", b"{\"model_type\": \"\\ud800\"}".to_vec()),
        file("more behind it", b"{\"model_type\": \"qwen2\"} {}".to_vec()),
    ]);
}
