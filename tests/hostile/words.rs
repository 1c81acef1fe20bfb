//! Names and values that would flood a terminal or drive it: what is quoted from a file is escaped and cut.

use super::case::{Case, hold};
use super::ground::Ground;

const CONFIG: &str = "model/config.json";

fn config(name: &str, key: &'static str, value: impl Fn() -> String + 'static) -> Case {
    Case::new(name, move |ground: &Ground| ground.set_json(CONFIG, key, &value())).says(&["config.json"])
}

fn header(name: &str, header: impl Fn() -> String + 'static) -> Case {
    let make = move |ground: &Ground| {
        let header = header();
        ground.write("model/model.safetensors", [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat());
    };
    Case::new(name, make).says(&["model"])
}

#[test]
fn values_of_a_megabyte() {
    let long = || format!("\"{}\"", "x".repeat(1 << 20));
    hold([
        config("a long model_type", "model_type", long),
        config("a long hidden_act", "hidden_act", long),
        config("a long value for a number", "hidden_size", long),
        config("a long list of layer types", "layer_types", || format!("[{}\"x\"]", "\"full_attention\",".repeat(60_000))),
        config("a long key of rope_parameters", "rope_parameters", || {
            format!("{{\"rope_theta\": 1e4, \"rope_type\": \"linear\", \"factor\": 2, \"{}\": 1}}", "k".repeat(60_000))
        }),
        header("a tensor with a name of 1 MB", || {
            format!("{{\"{}\": {{\"dtype\": \"F32\", \"shape\": [0], \"data_offsets\": [0, 0]}}}}", "n".repeat(1 << 20))
        }),
        header("a shape of 100 000 axes", || {
            let axes = vec!["1"; 100_000].join(",");
            format!("{{\"model.norm.weight\": {{\"dtype\": \"F32\", \"shape\": [0,{axes}], \"data_offsets\": [0, 0]}}}}")
        }),
        header("10 000 tensors that are not the model's", || {
            let of = |n: usize| format!("\"t{n}\": {{\"dtype\": \"F32\", \"shape\": [0], \"data_offsets\": [0, 0]}}");
            format!("{{{}}}", (0..10_000).map(of).collect::<Vec<_>>().join(","))
        }),
        header("an unknown dtype of 1 MB", || {
            format!("{{\"a\": {{\"dtype\": \"{}\", \"shape\": [0], \"data_offsets\": [0, 0]}}}}", "F".repeat(1 << 20))
        }),
        Case::new("a row with a key of 1 MB", |ground: &Ground| {
            ground.write("train.jsonl", format!("{{\"{}\": 1}}\n", "k".repeat(1 << 20)));
        })
        .says(&["train.jsonl"]),
        Case::new("a row with 50 000 keys", |ground: &Ground| {
            let keys: Vec<String> = (0..50_000).map(|n| format!("\"k{n}\": 1")).collect();
            ground.write("train.jsonl", format!("{{{}}}\n", keys.join(",")));
        })
        .says(&["train.jsonl"]),
        Case::new("20 000 bad rows", |ground: &Ground| ground.write("train.jsonl", "{}\n".repeat(20_000))).says(&["train.jsonl"]),
        Case::new("a role of 1 MB", |ground: &Ground| {
            let role = "r".repeat(1 << 20);
            ground.write("model/chat_template.jinja", "{{ messages }}");
            ground.with_rows("messages", format!("{{\"messages\": [{{\"role\": \"{role}\", \"content\": \"a\"}}]}}\n"));
        })
        .says(&["train.jsonl"]),
        Case::new("target modules of 1 MB", |ground: &Ground| {
            ground.with_adapter();
            ground.set_json("adapter/adapter_config.json", "target_modules", &format!("[\"{}\"]", "t".repeat(1 << 20)));
        })
        .says(&["adapter_config.json"]),
    ]);
}

/// Escapes that would colour, move the cursor, set the title or clear the screen; and characters that turn the direction of writing.
#[test]
fn escapes() {
    const ESCAPES: &str = "\\u001b[31m\\u001b]0;title\\u0007\\u001b[2J\\u0000\\u0008\\u009b1m\\u202e";
    let text = || format!("\"{ESCAPES}\"");
    let raw = "\u{1b}[31m\u{1b}]0;title\u{7}\u{9b}";
    hold([
        config("escapes in model_type", "model_type", text),
        config("escapes in hidden_act", "hidden_act", text),
        config("escapes in layer_types", "layer_types", || format!("[\"{ESCAPES}\", \"a\", \"b\"]")),
        config("escapes in a number", "vocab_size", text),
        header("escapes in a tensor's name", || {
            format!("{{\"{ESCAPES}\": {{\"dtype\": \"F32\", \"shape\": [0], \"data_offsets\": [0, 0]}}}}")
        }),
        header("escapes in a dtype", || {
            format!("{{\"a\": {{\"dtype\": \"{ESCAPES}\", \"shape\": [0], \"data_offsets\": [0, 0]}}}}")
        }),
        Case::new("escapes in a row's key", |ground: &Ground| ground.write("train.jsonl", format!("{{\"{ESCAPES}\": 1}}\n")))
            .says(&["train.jsonl"]),
        Case::new("escapes in a role", |ground: &Ground| {
            ground.write("model/chat_template.jinja", "{{ messages }}");
            ground.with_rows("messages", format!("{{\"messages\": [{{\"role\": \"{ESCAPES}\", \"content\": \"a\"}}]}}\n"));
        })
        .says(&["train.jsonl"]),
        Case::new("escapes in an index", |ground: &Ground| {
            ground.remove("model/model.safetensors");
            ground.write("model/model.safetensors.index.json", format!("{{\"weight_map\": {{\"{ESCAPES}\": \"{ESCAPES}\"}}}}"));
        })
        .says(&["index.json"]),
        Case::new("escapes in target modules", |ground: &Ground| {
            ground.with_adapter();
            ground.set_json("adapter/adapter_config.json", "target_modules", &format!("[\"{ESCAPES}\"]"));
        })
        .says(&["adapter_config.json"]),
        Case::new("escapes in the name of a model", |ground: &Ground| {
            ground.edit_recipe("path = \"model\"", "path = \"\\u001b[31mmodel\\u0007\"");
        }),
        Case::new("escapes in a key of the recipe", |ground: &Ground| {
            ground.edit_recipe("save_interval", "\"\\u001b[31m\\u0007\"");
        })
        .code(2),
        Case::new("raw escapes in the recipe", move |ground: &Ground| ground.edit_recipe("[train]", &format!("[train]{raw}")))
            .code(2),
        Case::new("escapes in an argument", |_: &Ground| ()).run(&["check", "--recipe", "\u{1b}[31m.toml"]).code(2),
    ]);
}
