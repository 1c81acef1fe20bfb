//! Whatever is wrong with a recipe is said at once, and nothing that only follows from it.

use std::time::{Duration, Instant};

use kvtune::units::Fault;

use super::{SMALL, Told, parse_with, refused};

/// The lines and the first words of all errors.
fn told(error: &Fault) -> Vec<(Option<usize>, String)> {
    let all = [error].into_iter().chain(error.further());
    all.map(|error| (error.line(), error.message().split(':').next().unwrap_or_default().to_owned())).collect()
}

#[test]
fn independent_errors_are_told_in_the_order_of_their_lines() {
    let text = format!(
        "bf16 = \"maybe\"\n{SMALL}split_overlap = 3\n[lora]\nrnk = 4\nalpha = 0\n[kv_cache]\nchunk_size = \"x\"\n[optimizer]\n\
         warmup_steps = 1\nwarmup_ratio = 0.1\nname = \"sgd\"\neps = 1.0\n[eval]\ngenerate = {{ metrics = [\"f2\"], samples = \"y\", foo = 1 }}\n"
    );
    let error = parse_with(&text, &["log.interval=0", "train", "checkpoint.foo=1"]).map(drop).unwrap_err();
    let expected = [
        (Some(1), "unknown value `\"maybe\"` for `bf16`"),
        (Some(7), "`data.split_overlap` is set, and `data.on_too_long` is `error`"),
        (Some(9), "unknown key `rnk` in `[lora]`"),
        (Some(10), "`lora.alpha` must be more than 0, and finite, found 0.0"),
        (Some(12), "`kv_cache.chunk_size` must be a whole number, 0 or more, found the string \"x\""),
        (Some(15), "`optimizer.warmup_steps` and `optimizer.warmup_ratio` contradict each other"),
        (Some(17), "`optimizer.eps` is set, and `sgd` has no such thing"),
        (Some(19), "unknown value `f2` for `eval.generate.metrics`"),
        (Some(19), "`eval.generate.samples` must be a whole number, 0 or more, found the string \"y\""),
        (Some(19), "unknown key `foo` in `[eval.generate]`"),
        (None, "`log.interval` must be at least 1, found 0"),
        (None, "the override `train` has no `=`"),
        (None, "unknown key `foo` in `[checkpoint]`"),
    ];
    assert_eq!(told(&error), expected.map(|(line, words)| (line, words.to_owned())));
    assert!([&error].into_iter().chain(error.further()).all(|error| error.hint().is_some()));
}

#[test]
fn what_follows_from_an_error_is_no_second_one() {
    for text in [
        // The path is there, by another name; so are the classes, the head and the optimiser that a contradiction would be about.
        SMALL.replace("path", "pth"),
        SMALL.replace("[model]", "[modle]"),
        SMALL.replace("\"model\"", "3"),
        format!("{SMALL}[head]\nkidn = \"seq_classification\"\nlabels = [\"a\", \"b\"]\n[eval]\nmetric = \"accuracy\"\n"),
        format!("{SMALL}[haed]\nkind = \"seq_classification\"\nlabels = [\"a\", \"b\"]\n[eval]\nmetric = \"accuracy\"\n"),
        format!("{SMALL}[train]\noptimiser = \"sgd\"\n[optimizer]\nmomentum = 0.9\n"),
        format!("{SMALL}[kv_cache.cache_length]\npyramid = {{ mean = 8, tip = 4 }}\n"),
        format!("{SMALL}[optimizer]\nbetas = [0.9, \"x\"]\n"),
        format!("fp16 = true\n{SMALL}"),
        SMALL.replace("[data]", "dtype = \"f16\"\n[data]"),
    ] {
        let error = refused(&text);
        assert_eq!(error.further().len(), 0, "{text}: {:?}", told(&error));
    }
    assert_eq!(told(&refused("")).len(), 2, "model and data are both missing");
}

#[test]
fn many_errors_are_some_of_them() {
    let lines: String = (0..20_000).map(|key| format!("k{key} = 1\n")).collect::<Vec<_>>().concat();
    let error = refused(&format!("{SMALL}[lora]\n{lines}"));
    assert_eq!(error.further().len(), 20);
    assert_eq!(error.further()[19].message(), "only the first 20 errors are shown");
}

#[test]
fn nesting_and_long_lists_take_no_time() {
    let paths: String = (0..40_000).map(|file| format!("\"{file}\",")).collect::<Vec<_>>().concat();
    let deep = |open: &str, close: &str| format!("{SMALL}x = {}1{}", open.repeat(100_000), close.repeat(100_000));
    for (text, message) in [
        (deep("{a=", "}"), "nested too deeply"),
        (deep("[", "]"), "nested too deeply"),
        (SMALL.replace("\"t.jsonl\"", &format!("[{paths} \"0\"]")), "lists \"0\" twice"),
    ] {
        let begun = Instant::now();
        let error = refused(&text);
        assert!(error.to_string().contains(message), "{}", error.message());
        assert!(begun.elapsed() < Duration::from_secs(5), "{message}: {:?}", begun.elapsed());
    }
}

#[test]
fn yaml_is_told_to_be_yaml() {
    let error = refused("# axolotl\nbase_model: m\ndatasets:\n  - path: d\n");
    assert_eq!(error.to_string(), "this is YAML, and kvtune reads TOML\n  --> /nowhere/a.toml");
    assert_eq!(error.hint().unwrap(), "`kvtune init --from /nowhere/a.toml` writes a recipe in TOML");
}
