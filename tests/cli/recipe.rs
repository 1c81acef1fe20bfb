//! Recipes that are refused, with file, line and caret.

use std::fs;
use std::os::unix::fs::symlink;

use insta::assert_snapshot;

use super::place::Place;

/// The error when a line of the recipe is another.
fn refused(line: &str, new: &str) -> String {
    let place = Place::new();
    place.edit_recipe(line, new);
    place.check(&[]).refused(2)
}

#[test]
fn unknown_keys() {
    assert_snapshot!(refused("chunk_size = 8", "chunk_sise = 8"), @r"
    error: unknown key `chunk_sise` in `[kv_cache]`
      --> recipe.toml:13:1
       |
    13 | chunk_sise = 8
       | ^^^^^^^^^^

    hint: did you mean `chunk_size`?
    ");
    assert_snapshot!(refused("[lora]", "[loar]"), @r"
    error: unknown key `loar` at the top level
     --> recipe.toml:3:2
      |
    3 | [loar]
      |  ^^^^

    hint: did you mean `lora`?
    ");
    assert_snapshot!(refused("[model]", "colour = 3\n[model]"), @r"
    error: unknown key `colour` at the top level
     --> recipe.toml:1:1
      |
    1 | colour = 3
      | ^^^^^^

    hint: choose `model`, `lora`, `data`, `head`, `kv_cache`, `grad`, `train`, `optimizer`, `eval`, `checkpoint`, `log`, `report` or `output_dir`
    ");
}

#[test]
fn values_of_another_kind() {
    assert_snapshot!(refused("chunk_size = 8", "chunk_size = \"eight\""), @r#"
    error: `kv_cache.chunk_size` must be a whole number, 0 or more, found the string "eight"
      --> recipe.toml:13:14
       |
    13 | chunk_size = "eight"
       |              ^^^^^^^

    hint: write a whole number, 0 or more
    "#);
    assert_snapshot!(refused("chunk_size = 8", "chunk_size = 0"), @r"
    error: `kv_cache.chunk_size` must be at least 1, found 0
      --> recipe.toml:13:1
       |
    13 | chunk_size = 0
       | ^^^^^^^^^^

    hint: write 1 or more; to have the default, leave the key out
    ");
    assert_snapshot!(refused("format = \"tokens\"", "format = \"parquet\""), @r#"
    error: unknown value `parquet` for `data.format`
     --> recipe.toml:7:10
      |
    7 | format = "parquet"
      |          ^^^^^^^^^

    hint: choose `longbench-v2`, `prompt-completion`, `messages`, `sharegpt`, `alpaca`, `tokens`, `text`, `ruler` or `helmet`
    "#);
}

#[test]
fn keys_that_are_left_open() {
    assert_snapshot!(refused("[train]", "[grad]\nlayers_per_cell = \"automatic\"\n[train]"), @r#"
    error: `grad.layers_per_cell` must be a whole number, 0 or more, or `"auto"`, found the string "automatic"
      --> recipe.toml:15:19
       |
    15 | layers_per_cell = "automatic"
       |                   ^^^^^^^^^^^

    hint: write a whole number, 0 or more, or `"auto"`
    "#);
    assert_snapshot!(refused("[train]", "[grad]\nlayer_checkpoints = \"none\"\n[train]"), @r#"
    error: unknown value `none` for `grad.layer_checkpoints`
      --> recipe.toml:15:21
       |
    15 | layer_checkpoints = "none"
       |                     ^^^^^^

    hint: choose `plain`, `int8`, `int4` or `auto`
    "#);
}

#[test]
fn contradictions() {
    assert_snapshot!(refused("[train]", "[eval]\nmetric = \"accuracy\"\n[train]"), @r#"
    error: `eval.metric = "accuracy"` contradicts the head `next_token`, which has no classes
      --> recipe.toml:15:1
       |
    15 | metric = "accuracy"
       | ^^^^^^

    hint: write `metric = "loss"`, or choose `head.kind = "seq_classification_on_logits"`
    "#);
    assert_snapshot!(refused("format = \"tokens\"", "format = \"tokens\"\ntrain_on_prompt = true"), @r"
    error: `data.train_on_prompt` says nothing where `data.format` is `tokens`: the sequences bring their labels
     --> recipe.toml:8:1
      |
    8 | train_on_prompt = true
      | ^^^^^^^^^^^^^^^

    hint: leave it out, and label the tokens in the file
    ");
}

#[test]
fn half_precision() {
    assert_snapshot!(refused("path = \"model\"", "path = \"model\"\ndtype = \"f16\""), @r#"
    error: `model.dtype = "f16"` cannot be trained in: gradients fall below its smallest number
     --> recipe.toml:3:1
      |
    3 | dtype = "f16"
      | ^^^^^

    hint: use `bf16` or `f32`; weights stored in f16 load as either
    "#);
}

#[test]
fn no_toml() {
    assert_snapshot!(refused("[model]", "[model"), @r"
    error: this is not valid TOML: unclosed table, expected `]`
     --> recipe.toml:1:7
      |
    1 | [model
      |       ^

    hint: strings stand in quotes, tables begin with `[name]`, and each key stands once, on a line of its own
    ");
}

#[test]
fn missing_keys() {
    assert_snapshot!(refused("train = \"train.jsonl\"", ""), @r"
    error: `data.train` is missing: the file of training examples
     --> recipe.toml:6:2
      |
    6 | [data]
      |  ^^^^

    hint: add `data.train`, or give `--set data.train=…`
    ");
}

#[test]
fn no_recipe() {
    let place = Place::new();
    assert_snapshot!(place.run(&["check", "--recipe", "nowhere.toml"]).refused(2), @r"
    error: the recipe cannot be read: No such file or directory (os error 2)
      --> nowhere.toml

    hint: name a recipe in TOML, as `recipes/quickstart.toml`
    ");
    assert_snapshot!(place.run(&["check", "--recipe", "model"]).refused(2), @r"
    error: the recipe cannot be read: `model` is a directory: expected a recipe
      --> model

    hint: name a recipe in TOML, as `recipes/quickstart.toml`
    ");
    place.write("binary.toml", b"a = \xff");
    assert_snapshot!(place.run(&["check", "--recipe", "binary.toml"]).refused(2), @r"
    error: the recipe cannot be read: `binary.toml` is not UTF-8: byte 5 is 0xff
      --> binary.toml

    hint: save it as text in UTF-8
    ");
}

#[test]
fn overrides() {
    let place = Place::new();
    assert_snapshot!(place.check(&["lora.rnak=4"]).refused(2), @r"
    error: unknown key `rnak` in `[lora]`
      --> --set lora.rnak=4

    hint: did you mean `rank`?
    ");
    assert_snapshot!(place.check(&["lora.r"]).refused(2), @r"
    error: the override `lora.r` has no `=`
      --> --set lora.r

    hint: write `--set table.key=value`, as `--set kv_cache.chunk_size=8`
    ");
    assert_snapshot!(place.check(&["optimizer.learning_rate=nan"]).refused(2), @r"
    error: `optimizer.learning_rate` must be more than 0, and finite, found NaN
      --> --set optimizer.learning_rate=nan

    hint: usual values for LoRA are 5e-5 to 5e-4, for all weights a tenth of that
    ");
}

/// Each as it would be alone, with a line between.
#[test]
fn several_errors() {
    let place = Place::new();
    place.edit_recipe("chunk_size = 8", "chunk_sise = 8");
    assert_snapshot!(place.check(&["data.output_dir=run", "lora.r=0", "kv_cache.policy=h3o", "lora.alpha=-1"]).refused(2), @r"
    error: unknown key `chunk_sise` in `[kv_cache]`
      --> recipe.toml:13:1
       |
    13 | chunk_sise = 8
       | ^^^^^^^^^^

    hint: did you mean `chunk_size`?

    error: unknown key `output_dir` in `[data]`
      --> --set data.output_dir=run

    hint: `output_dir` belongs at the top of the file

    error: `lora.r` must be at least 1, found 0
      --> --set lora.r=0

    hint: write 1 or more; to have the default, leave the key out

    error: unknown value `h3o` for `kv_cache.policy`
      --> --set kv_cache.policy=h3o

    hint: did you mean `h2o`?

    error: `lora.alpha` must be more than 0, and finite, found -1.0
      --> --set lora.alpha=-1

    hint: usual values are `r` to twice `r`
    ");
}

#[test]
fn numbers_that_no_machine_can_hold_overflow_nowhere() {
    let huge = "9223372036854775807";
    let all = ["epochs", "gradient_accumulation_steps", "micro_batch_size"].map(|key| format!("train.{key}={huge}"));
    Place::new().check(&all.each_ref().map(String::as_str)).done();
    let error = Place::new().check(&[&format!("lora.r={huge}")]).refused(2);
    assert!(error.starts_with("error: `lora.r` is 9223372036854775807, expected a number from 1"), "{error}");
}

#[test]
fn graphs_are_said_to_serve_generation_alone() {
    let told = |more: &[&str]| Place::new().check(more).done().err;
    assert!(
        told(&["grad.cuda_graphs=true"]).contains("`grad.cuda_graphs`: graphs are captured where texts are generated on a GPU")
    );
    assert!(!told(&[]).contains("cuda_graphs"));
}

#[test]
fn what_a_gpu_may_do_with_numbers_is_told() {
    let place = Place::new();
    let told = |overrides: &[&str]| {
        let out = place.check(overrides).done().out;
        let row = out.lines().find(|line| line.starts_with("| numerics ")).unwrap_or_else(|| panic!("{out}")).to_owned();
        row.split('|').nth(2).unwrap().trim().to_owned()
    };
    assert_eq!(told(&[]), "f32, no TF32, the same bits every time on a CPU");
    let free = ["model.dtype=bf16", "model.allow_tf32=true", "train.deterministic=true"];
    assert_eq!(told(&free), "bf16, TF32 allowed on a GPU, the same bits every time");
}

fn set(key: &str) -> Vec<&str> {
    [&["--device", "cpu", "--recipe", "recipe.toml", "--set"][..], &[key]].concat()
}

/// A cache as `hf download` makes it: the files of a snapshot are links to blobs.
#[test]
fn a_model_of_the_hugging_face_cache() {
    let place = Place::new();
    let (commit, newer) = ("0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef");
    let folder = place.path("hub/models--Owner--Tiny-1.5");
    for part in ["blobs", "refs", &format!("snapshots/{commit}")] {
        fs::create_dir_all(folder.join(part)).unwrap();
    }
    for (at, name) in place.names("model").iter().enumerate() {
        fs::copy(place.path("model").join(name), folder.join(format!("blobs/{at}"))).unwrap();
        symlink(format!("../../blobs/{at}"), folder.join("snapshots").join(commit).join(name)).unwrap();
    }
    fs::write(folder.join("refs/main"), commit).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = place.command(arguments);
        place.hear(command.env("HF_HUB_CACHE", place.path("hub")).env_remove("HF_HOME"))
    };
    place.edit_recipe("path = \"model\"", "path = \"Owner/Tiny-1.5\"");
    run(&[&["finetune-lora", "--out", "run"], &set("train.max_steps=1")[..]].concat()).done();
    let snapshot = folder.join("snapshots").join(commit).display().to_string();
    let resolved = String::from_utf8(place.read("run/recipe.resolved.toml")).unwrap();
    assert!(resolved.contains(&format!("path = \"{snapshot}\"")), "{resolved}");
    // By its commit, and by its name on the command line.
    run(&[&["check"], &set(&format!("model.revision={commit}"))[..]].concat()).done();
    run(&["generate", "Owner/Tiny-1.5", "--device", "cpu", "--prompt-tokens", "1,2", "--max-new-tokens", "1"]).done();
    run(&["evaluate", "--base", "Owner/Tiny-1.5", "--recipe", "recipe.toml", "--device", "cpu", "--split", "train"]).done();
    run(&["export", "run", "--for", "merged", "--base", "Owner/Tiny-1.5", "--out", "merged"]).done();
    // The cache's place by its older name, and in the user's directory.
    for (name, value) in [("HUGGINGFACE_HUB_CACHE", place.path("hub")), ("HF_HOME", "~".into())] {
        let mut command = place.command(&["generate", "Owner/Tiny-1.5", "--prompt-tokens", "1", "--max-new-tokens", "1"]);
        let command = command.env_remove("HF_HUB_CACHE").env_remove("HF_HOME").env("HOME", place.path(""));
        place.hear(command.env(name, value)).done();
    }
    // Another branch is asked for by `--set`, and by the settings of a PEFT adapter.
    fs::write(folder.join("refs/dev"), commit).unwrap();
    fs::write(folder.join("refs/main"), newer).unwrap();
    let write = ["generate", "Owner/Tiny-1.5", "--device", "cpu", "--prompt-tokens", "1,2", "--max-new-tokens", "1"];
    run(&write).refused(2);
    run(&[&write[..], &["--set", "model.revision=dev"]].concat()).done();
    let refused = run(&[&write[..], &["--set", "revision=gone"]].concat()).refused(3);
    assert!(refused.contains("has no revision `gone` of `Owner/Tiny-1.5`"), "{refused}");
    let evaluate = ["evaluate", "--base", "Owner/Tiny-1.5", "--recipe", "recipe.toml", "--device", "cpu", "--split", "train"];
    run(&[&evaluate[..], &["--set", "model.revision=dev"]].concat()).done();
    place.edit_recipe("path = \"Owner/Tiny-1.5\"", "path = \"Owner/Tiny-1.5\"\nrevision = \"dev\"");
    run(&evaluate).done();
    place.edit_recipe("\nrevision = \"dev\"", "");
    run(&["export", "run", "--for", "peft", "--out", "peft"]).done();
    let mut settings: serde_json::Value = serde_json::from_slice(&place.read("peft/adapter_config.json")).unwrap();
    (settings["base_model_name_or_path"], settings["revision"]) = ("Owner/Tiny-1.5".into(), "dev".into());
    place.write("peft/adapter_config.json", settings.to_string());
    run(&[&write[..], &["--adapter", "peft"]].concat()).done();
    run(&["export", "peft", "--for", "merged", "--out", "of-dev"]).done();
    assert!(place.read("of-dev/model.safetensors") == place.read("merged/model.safetensors"));
    fs::write(folder.join("refs/main"), commit).unwrap();
    // A later download is another model, and the run goes on with its own.
    fs::create_dir(folder.join("snapshots").join(newer)).unwrap();
    fs::write(folder.join("snapshots").join(newer).join("config.json"), "{}").unwrap();
    fs::write(folder.join("refs/main"), newer).unwrap();
    run(&["resume", "run", "--device", "cpu", "--set", "train.max_steps=2"]).done();
    let refused = run(&[&["check"], &set("model.path=Owner/Other")[..]].concat()).refused(3);
    assert!(refused.contains("`hf download Owner/Other` fetches a model of that name"), "{refused}");
    let refused = run(&[&["check"], &set("model.revision=v2")[..]].concat()).refused(3);
    assert!(refused.contains("`hf download Owner/Tiny-1.5`"), "{refused}");
    let refused = run(&["generate", "Owner/Other", "--prompt-tokens", "1"]).refused(2);
    assert!(refused.contains("`hf download Owner/Other`"), "{refused}");
}
