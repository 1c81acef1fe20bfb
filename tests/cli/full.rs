//! Training all weights: what would run, what contradicts it, and what is evaluated.

use insta::assert_snapshot;

use super::place::{Place, Said};

/// With a recipe that has no `[lora]`.
fn place() -> Place {
    let place = Place::new();
    place.edit_recipe("[lora]\nr = 4\nalpha = 8\n", "");
    place
}

fn run(place: &Place, verb: &str, arguments: &[&str]) -> Said {
    place.run(&[&[verb, "--device", "cpu", "--recipe", "recipe.toml"][..], arguments].concat())
}

fn finetune(place: &Place, overrides: &[&str]) -> Said {
    let overrides: Vec<&str> = overrides.iter().flat_map(|o| ["--set", o]).collect();
    run(place, "finetune-full", &[&["--out", "run"][..], &overrides].concat())
}

#[test]
fn what_would_run() {
    let said = run(&place(), "check", &["--full"]).done();
    assert!(said.out.contains("all 171840 are trained"), "{}", said.out);
    assert!(!said.out.contains("LoRA"), "{}", said.out);
}

#[test]
fn the_proof() {
    let said = run(&place(), "verify", &["--full"]).done();
    assert!(
        said.out.contains("model.embed_tokens.weight") && said.out.contains("model.layers.2.mlp.down_proj.weight"),
        "{}",
        said.out
    );
    assert!(said.out.trim_end().ends_with("proved"), "{}", said.out);
}

#[test]
fn an_adapter_in_the_recipe() {
    let place = Place::new();
    assert_snapshot!(finetune(&place, &[]).refused(2), @r"
    error: `[lora]` says nothing where all weights are trained: there is no adapter
     --> recipe.toml:3:2
      |
    3 | [lora]
      |  ^^^^

    hint: remove it, or train the adapter with `kvtune finetune-lora`
    ");
    assert_snapshot!(run(&self::place(), "check", &["--full", "--set", "model.adapter=adapter"]).refused(2), @r"
    error: `model.adapter` says nothing where all weights are trained: there is no adapter
      --> --set model.adapter=adapter

    hint: remove it, or train the adapter with `kvtune finetune-lora`
    ");
    assert!(!place.path("run").exists());
}

#[test]
fn the_other_verb() {
    let place = place();
    place.edit_recipe("[train]\n", "[train]\nweights = \"all\"\n");
    assert_snapshot!(place.finetune(&[]).refused(2), @r#"
    error: `train.weights = "all"` contradicts the command, which trains `adapter`
      --> recipe.toml:12:1
       |
    12 | weights = "all"
       | ^^^^^^^

    hint: remove the key, or use the other of `finetune-lora` and `finetune-full`; `check` and `verify` say it with `--full`
    "#);
    assert!(!place.path("run").exists());
    run(&place, "check", &[]).done();
}

#[test]
fn weights_that_wait_on_the_host() {
    let place = place();
    let check = |more: &[&str]| {
        let set = ["--full", "--set", "model.dtype=bf16", "--set", "train.offload=weights"];
        run(&place, "check", &[&set[..], more].concat())
    };
    let told = check(&["--set", "grad.layers_per_cell=1"]).done().out;
    assert!(told.contains("of which a GPU holds two layer bands at a time"), "{told}");
    assert!(check(&["--set", "grad.layers_per_cell=9"]).done().out.contains("a single layer band holds all layers"));
    let refused = check(&["--set", "grad.cuda_graphs=true"]).refused(2);
    assert!(refused.contains("`train.offload = \"weights\"` contradicts `grad.cuda_graphs = true`"), "{refused}");
}

#[test]
fn a_checkpoint_is_a_model_of_its_own() {
    let place = place();
    finetune(&place, &[]).done();
    let evaluate =
        |arguments: &[&str]| place.run(&[&["evaluate", "--device", "cpu", "--split", "train"][..], arguments].concat());
    evaluate(&["run"]).done();
    evaluate(&["run/step-000002", "--set", "model.dtype=bf16"]).done();
    assert_snapshot!(evaluate(&["run", "--set", "model.path=adapter"]).refused(2), @r"
    error: `model.path` is set, but the checkpoint `run/final` holds a whole model

    hint: leave it out, or evaluate that model with `--base`
    ");
    let refused = place.run(&["export", "run", "--for", "gguf", "--quantize", "f16"]).refused(2);
    assert!(refused.contains("a whole model in Hugging Face's format") && refused.contains("`--for merged`"), "{refused}");
    let mut bytes = place.read("run/final/model.safetensors");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    place.write("run/final/model.safetensors", bytes);
    let damaged = evaluate(&["run/final"]).refused(3);
    assert!(damaged.starts_with("error: `run/final/model.safetensors` is damaged"), "{damaged}");
    assert!(evaluate(&["run"]).done().err.contains("warning: skipped `run/final`"));
}
