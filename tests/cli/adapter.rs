//! Adapters that don't fit the recipe or the model.

use insta::assert_snapshot;
use kvtune::files::TensorFile;
use kvtune::store::{load_tensors, pt_metadata, save_tensors};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::place::Place;

#[test]
fn other_numbers_than_the_recipe() {
    let place = Place::new();
    place.check(&["model.adapter=adapter"]).done();
    assert_snapshot!(place.check(&["model.adapter=adapter", "lora.r=8"]).refused(2), @r"
    error: `lora.r` is 8 in the recipe, but 4 in the adapter `<dir>/adapter`

    hint: make `[lora]` agree with the adapter, or leave `model.adapter` out
    ");
    assert_snapshot!(place.check(&["model.adapter=adapter", "lora.alpha=16"]).refused(2), @r"
    error: `lora.alpha` is 16 in the recipe, but 8 in the adapter `<dir>/adapter`

    hint: make `[lora]` agree with the adapter, or leave `model.adapter` out
    ");
    assert_snapshot!(place.check(&["model.adapter=adapter", "lora.target_modules=[\"q_proj\"]"]).refused(2), @r"
    error: `lora.target_modules` is q_proj in the recipe, but q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj in the adapter `<dir>/adapter`

    hint: make `[lora]` agree with the adapter, or leave `model.adapter` out
    ");
    let error = place.finetune(&["model.adapter=adapter", "lora.r=8"]).refused(2);
    assert!(error.contains("`lora.r` is 8 in the recipe") && !place.path("run").exists());
}

/// What PEFT saves with `save_embedding_layers`.
#[test]
fn copies_that_the_settings_do_not_name() {
    let place = Place::new();
    let path = place.path("adapter/adapter_model.safetensors");
    let mut tensors = load_tensors(&TensorFile::open(&path).unwrap()).unwrap();
    let whole = |module| (format!("base_model.model.{module}.weight"), Tensor::ones([512, 64], (Kind::Float, Device::Cpu)));
    tensors.extend(["model.embed_tokens", "lm_head"].map(whole));
    save_tensors(&path, &tensors, &pt_metadata()).unwrap();
    assert_snapshot!(place.check(&["model.adapter=adapter"]).refused(2), @r#"
    error: the adapter in `<dir>/adapter` holds copies of ["embed_tokens", "lm_head"], and its settings do not name all of these

    hint: `lora.modules_to_save = ["embed_tokens", "lm_head"]` trains them; it is [] in the recipe
    "#);
    place.check(&["model.adapter=adapter", "lora.modules_to_save=[\"embed_tokens\", \"lm_head\"]"]).done();
}

/// What a recipe leaves out is the adapter's, for the plan and in the run's own recipe, too.
#[test]
fn numbers_that_the_recipe_leaves_out() {
    let place = Place::new();
    place.edit_recipe("[lora]\nr = 4\nalpha = 8\n", "");
    let words = place.check(&["model.adapter=adapter"]).done();
    place.finetune(&["model.adapter=adapter"]).done();
    let resolved = String::from_utf8(place.read("run/recipe.resolved.toml")).unwrap();
    assert!(resolved.contains("[lora]\nr = 4\nalpha = 8.0\n"), "{resolved}");
    place.write("recipe.toml", format!("{}\n[lora]\nr = 4\nalpha = 8\n", String::from_utf8(place.read("recipe.toml")).unwrap()));
    assert!(words.out.contains("LoRA r 4 alpha 8, o_proj") && words.out.contains("LoRA 14016"), "{}", words.out);
    assert!(place.check(&["model.adapter=adapter"]).done().out.contains("LoRA r 4 alpha 8, o_proj"));
    assert!(place.check(&["model.adapter=adapter", "lora.r=8"]).refused(2).contains("`lora.r` is 8 in the recipe"));
}

/// PEFT passes over entries of a file that mean nothing in the model; in a recipe they are mistakes.
#[test]
fn names_that_mean_nothing() {
    let place = Place::new();
    let idle = json!({
        "exclude_modules": r".*\.(wq|lm_head)", "rank_pattern": {"q_proj": 4, "wq": 3}, "alpha_pattern": {"wo": 7}, "lora_dropout": 0.5,
    });
    place.edit_json("adapter/adapter_config.json", idle);
    place.finetune(&["model.adapter=adapter"]).done();
    let resolved = String::from_utf8(place.read("run/recipe.resolved.toml")).unwrap();
    assert!(resolved.contains(r"exclude_modules = '.*\.(wq|lm_head)'") && resolved.contains("wo = 7.0"), "{resolved}");
    for (set, key) in [
        ("exclude_modules='.*[.]wk'", "exclude_modules"),
        ("exclude_modules=[\"wk\"]", "exclude_modules"),
        ("rank_pattern={wk=3}", "rank_pattern"),
    ] {
        let said = place.check(&["model.adapter=adapter", &format!("lora.{set}")]).refused(2);
        assert!(said.contains("error: unknown name `") && said.contains(&format!("wk` in `{key}`")), "{said}");
    }
    let error = place.check(&["lora.exclude_modules=all-linear"]).refused(2);
    assert!(error.starts_with("error: `lora.exclude_modules` is all of `target_modules`"), "{error}");
    assert_snapshot!(place.check(&["lora.exclude_modules='.*[.](q'"]).refused(2), @r"
    error: `lora.exclude_modules`: expected a regular expression, found `.*[.](q`: unclosed group
      --> --set lora.exclude_modules='.*[.](q'

    hint: correct `lora.exclude_modules`
    ");
    place.check(&["lora.exclude_modules='.*[.](q|k)_proj'"]).done();
}

#[test]
fn other_matrices_than_its_configuration() {
    let place = Place::new();
    place.edit_json("adapter/adapter_config.json", json!({"r": 8}));
    assert_snapshot!(place.check(&["model.adapter=adapter", "lora.r=8"]).refused(3), @r"
    error: `<dir>/adapter/adapter_model.safetensors` does not fit the model:
      shape of `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`: expected [8, 64], found [4, 64]
      shape of `base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight`: expected [64, 8], found [64, 4]
      shape of `base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight`: expected [8, 64], found [4, 64]
      shape of `base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight`: expected [32, 8], found [32, 4]
      shape of `base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight`: expected [8, 64], found [4, 64]
      shape of `base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight`: expected [32, 8], found [32, 4]
      shape of `base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight`: expected [8, 64], found [4, 64]
      shape of `base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight`: expected [64, 8], found [64, 4]
      shape of `base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight`: expected [8, 64], found [4, 64]
      shape of `base_model.model.model.layers.0.mlp.gate_proj.lora_B.weight`: expected [176, 8], found [176, 4]
      shape of `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`: expected [8, 64], found [4, 64]
      shape of `base_model.model.model.layers.0.mlp.up_proj.lora_B.weight`: expected [176, 8], found [176, 4]
      shape of `base_model.model.model.layers.0.mlp.down_proj.lora_A.weight`: expected [8, 176], found [4, 176]
      shape of `base_model.model.model.layers.0.mlp.down_proj.lora_B.weight`: expected [64, 8], found [64, 4]
      shape of `base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight`: expected [8, 64], found [4, 64]
      shape of `base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight`: expected [64, 8], found [64, 4]
      shape of `base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight`: expected [8, 64], found [4, 64]
      shape of `base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight`: expected [32, 8], found [32, 4]
      shape of `base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight`: expected [8, 64], found [4, 64]
      shape of `base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight`: expected [32, 8], found [32, 4]
      … and 22 more

    hint: check that the adapter was trained for this model
    ");
}

#[test]
fn features_that_are_not_built() {
    let place = Place::new();
    place.edit_json("adapter/adapter_config.json", json!({"use_qalora": true}));
    assert_snapshot!(place.check(&["model.adapter=adapter"]).refused(3), @r#"
    error: `<dir>/adapter/adapter_config.json` asks for what is not supported: `use_qalora = true`

    hint: supported are LoRA and DoRA, with rsLoRA, patterns, chosen layers, `lora_bias` and `bias = "lora_only"`
    "#);
}

#[test]
fn kinds_that_contradict_the_recipe_or_each_other() {
    let place = Place::new();
    assert_snapshot!(place.check(&["model.adapter=adapter", "lora.use_dora=true"]).refused(2), @r"
    error: `lora.use_dora` is true in the recipe, but false in the adapter `<dir>/adapter`

    hint: make `[lora]` agree with the adapter, or leave `model.adapter` out
    ");
    // What stands at its default is said, too.
    place.edit_json("adapter/adapter_config.json", json!({"use_rslora": true, "rank_pattern": {"q_proj": 4}}));
    place.check(&["model.adapter=adapter"]).done();
    for (key, set, of_adapter) in [("use_rslora", "false", "true"), ("rank_pattern", "{}", "{\"q_proj\": 4}")] {
        let said = place.check(&["model.adapter=adapter", &format!("lora.{key}={set}")]).refused(2);
        assert!(said.contains(&format!("`lora.{key}` is {set} in the recipe, but {of_adapter} in the adapter")), "{said}");
    }
    assert_snapshot!(place.check(&["lora.use_dora=true", "lora.lora_bias=true"]).refused(2), @r"
    error: `lora.lora_bias` is true, expected false with `use_dora`, as PEFT has it

    hint: correct `lora.lora_bias` in the recipe
    ");
    assert_snapshot!(place.check(&["lora.layers_to_transform=[1, 30]"]).refused(2), @r"
    error: `lora.layers_to_transform` is [1, 30], expected layers of the model, counted from 0

    hint: correct `lora.layers_to_transform` in the recipe
    ");
    assert_snapshot!(place.check(&["lora.target_modules='.*[.]wq'"]).refused(2), @r"
    error: `lora.target_modules` is `.*[.]wq`, expected an expression that matches whole names of linears in the layers, as `model.layers.0.self_attn.q_proj`, or `model.embed_tokens`, or `lm_head`, only

    hint: correct `lora.target_modules` in the recipe
    ");
}

#[test]
fn what_can_not_be_beside_the_output_projection() {
    let (place, output) = (Place::new(), "lora.target_modules=[\"q_proj\", \"lm_head\"]");
    for (key, set, expected) in [
        ("modules_to_save", "[\"lm_head\"]", "[\"lm_head\"], expected no `lm_head` where `target_modules` has it"),
        ("lora_bias", "true", "true, expected false where `lm_head` is a target"),
        ("dropout", "0.1", "0.1, expected 0 where `lm_head` is a target"),
        (
            "init_lora_weights",
            "pissa",
            "pissa, expected `uniform` where experts, routers, `embed_tokens` or `lm_head` are targets",
        ),
    ] {
        let said = place.check(&[output, &format!("lora.{key}={set}")]).refused(2);
        assert!(said.contains(&format!("error: `lora.{key}` is {expected}")), "{said}");
    }
    let classes = place.check(&[output, "head.kind=seq_classification", "head.num_labels=3"]).refused(2);
    assert!(classes.contains("unknown name `lm_head` in `target_modules`"), "{classes}");
}

#[test]
fn none_there() {
    assert_snapshot!(Place::new().check(&["model.adapter=nowhere"]).refused(3), @r"
    error: `<dir>/nowhere` holds no PEFT adapter: `adapter_config.json` is missing

    hint: give the directory that holds `adapter_config.json` and `adapter_model.safetensors`; pickled `.bin` adapters are not read: load and save them once with a current `peft`
    ");
}

#[test]
fn a_target_that_no_layer_has() {
    assert_snapshot!(Place::new().check(&["lora.target_modules=[\"q_pro\"]"]).refused(2), @r#"
    error: unknown name `q_pro` in `target_modules`: the layers have `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`

    hint: did you mean `q_proj`?
    "#);
}

#[test]
fn names_that_mean_no_target() {
    let place = Place::new();
    assert_snapshot!(place.check(&["lora.exclude_modules=[\"down_prj\"]"]).refused(2), @r"
    error: unknown name `down_prj` in `exclude_modules`: the targets are `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`

    hint: did you mean `down_proj`?
    ");
    assert_snapshot!(place.check(&["lora.target_modules=[\"q_proj\", \"v_proj\"]", "lora.rank_pattern={ o_proj = 2 }"]).refused(2), @r"
    error: unknown name `o_proj` in `rank_pattern`: the targets are `q_proj`, `v_proj`

    hint: did you mean `q_proj`?
    ");
    assert_snapshot!(place.check(&["lora.alpha_pattern={ '.*wq' = 2.0 }"]).refused(2), @r"
    error: unknown name `.*wq` in `alpha_pattern`: the targets are `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`

    hint: use names from that list in `lora.alpha_pattern`, or leave the name out
    ");
    assert_snapshot!(place.check(&["lora.target_modules=[\"q_proj\", \"embed_tokens\"]", "lora.layers_to_transform=[0]"]).refused(2), @r"
    error: `lora.layers_to_transform` is [0], expected `[]` where `embed_tokens` is a target: it is of no layer; or name it whole, `model.embed_tokens`

    hint: correct `lora.layers_to_transform` in the recipe
    ");
}

#[test]
fn a_beginning_that_can_not_be() {
    let place = Place::new();
    let pissa = "lora.init_lora_weights=pissa";
    assert_snapshot!(place.check(&[pissa, "lora.lora_bias=true"]).refused(2), @r"
    error: `lora.init_lora_weights` is pissa, expected `uniform` with `lora_bias`, as PEFT has it

    hint: correct `lora.init_lora_weights` in the recipe
    ");
    assert_snapshot!(place.check(&[pissa, "lora.r=17"]).refused(2), @r"
    error: `lora.init_lora_weights` is pissa, expected `uniform` where `r` is more than half of a target's inputs or outputs

    hint: correct `lora.init_lora_weights` in the recipe
    ");
    assert_snapshot!(place.check(&[pissa, "lora.target_modules=[\"q_proj\", \"embed_tokens\"]"]).refused(2), @r"
    error: `lora.init_lora_weights` is pissa, expected `uniform` where experts, routers, `embed_tokens` or `lm_head` are targets

    hint: correct `lora.init_lora_weights` in the recipe
    ");
    assert_snapshot!(place.check(&[pissa, "model.adapter=adapter"]).refused(2), @r"
    error: `lora.init_lora_weights` has no effect on `model.adapter`, which is not new
      --> --set lora.init_lora_weights=pissa

    hint: leave it out, or begin without an adapter
    ");
}
