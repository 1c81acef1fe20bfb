//! Recipes with impossible numbers, wrong types and files that are none.

use super::case::{Case, hold};
use super::ground::Ground;

fn set(key: &'static str, value: &'static str) -> Case {
    let set = format!("{key}={value}");
    Case::new(set.clone(), |_: &Ground| ())
        .run(&["check", "--recipe", "recipe.toml", "--set", &set])
        .code(2)
        .says(&[key.rsplit('.').next().unwrap()])
}

#[test]
fn numbers() {
    const WHOLE: [&str; 9] = [
        "kv_cache.cache_length",
        "kv_cache.chunk_size",
        "grad.layers_per_cell",
        "train.micro_batch_size",
        "train.max_steps",
        "train.epochs",
        "lora.r",
        "data.max_seq_length",
        "checkpoint.save_interval",
    ];
    // Each key has some of the values, and each value some of the keys.
    let meet = |keys: &[&'static str], values: &[&'static str]| {
        let apart = |(at, key): (usize, &&'static str), by: usize| set(key, values[(at + by) % values.len()]);
        hold(keys.iter().enumerate().flat_map(|pair| [0, 3].map(|by| apart(pair, by))).collect::<Vec<_>>());
    };
    meet(&WHOLE, &["0", "-1", "9223372036854775808", "1e400", "nan", "\"many\""]);
    let any = ["optimizer.learning_rate", "lora.alpha", "grad.chunks_per_cell_multiplier"];
    meet(&any, &["nan", "inf", "-1e-4", "\"fast\"", "[1e-4]"]);
}

#[test]
fn other_values() {
    hold([
        set("train.seed", "-1"),
        set("lora.r", "100000000"),
        set("lora.dropout", "1.0"),
        set("optimizer.betas", "[1.0, 2.0]"),
        set("optimizer.betas", "[0.9]"),
        set("optimizer.warmup_ratio", "7"),
        set("data.validation_fraction", "1.0"),
        set("data.max_line_bytes", "0"),
        set("train.max_grad_norm", "-1"),
        set("train.max_loss", "nan"),
        set("kv_cache.policy", "\"unheard\""),
        set("kv_cache.policy", "{}"),
        set("kv_cache.cache_length", "[]"),
        set("kv_cache.cache_length", "9223372036854775807"),
        set("kv_cache.cache_length", "[9223372036854775807, 8]"),
        set("lora.target_modules", "\"(a+\""),
        set("lora.rank_pattern", "{ q_proj = 0 }"),
        set("unheard.key", "1"),
        set("train.unheard", "1"),
        set("eval.generate", "{ metrics = [\"unheard\"] }"),
    ]);
}

#[test]
fn files_that_are_none() {
    let file = |name: &str, bytes: Vec<u8>| {
        let make = move |ground: &Ground| ground.write("recipe.toml", &bytes);
        Case::new(name, make).code(2).says(&["recipe.toml"])
    };
    hold([
        file("nothing", Vec::new()),
        file("zeros", vec![0; 1000]),
        file("no UTF-8", b"[model]\npath = \"\xff\"".to_vec()),
        file("JSON", b"{\"model\": {\"path\": \"model\"}}".to_vec()),
        file("YAML", b"model:\n  path: model\n".to_vec()),
        file("half of it", b"[model]\npath = \"mod".to_vec()),
        file("a key twice", b"[model]\npath = \"a\"\npath = \"b\"".to_vec()),
        file("a table twice", b"[model]\npath = \"a\"\n[model]\n".to_vec()),
        file("deep arrays", format!("a = {}{}", "[".repeat(20_000), "]".repeat(20_000)).into_bytes()),
        file("deep tables", format!("[{}a]\n", "a.".repeat(20_000)).into_bytes()),
        file("a key of 100 kB", format!("{} = 1", "k".repeat(100_000)).into_bytes()),
        file("a value of 1 MB", format!("[model]\npath = {:?}\ndtype = {:?}\n", "model", "d".repeat(1 << 20)).into_bytes()),
        file("100 000 keys", (0..100_000).map(|n| format!("k{n} = 1\n")).collect::<Vec<_>>().concat().into_bytes()),
        file("5 MB", format!("# {}\n", "c".repeat(5 << 20)).into_bytes()),
    ]);
}

#[test]
fn what_is_set_by_arguments() {
    let arguments =
        |name: &str, set: &str| Case::new(name, |_: &Ground| ()).run(&["check", "--recipe", "recipe.toml", "--set", set]).code(2);
    hold([
        arguments("no key", "=1"),
        arguments("no value", "train.seed"),
        arguments("dots", "...=1"),
        arguments("a key of 100 kB", &format!("{}=1", "k".repeat(100_000))),
        arguments("deep", &format!("train.seed={}", "[".repeat(50_000))),
        arguments("an escape", "train.\u{1b}[31mseed=1"),
    ]);
}
