//! A `config.json` that asks for what isn't there.

use insta::assert_snapshot;
use serde_json::{Value, json};

use super::place::Place;

fn refused(mut changes: Value) -> String {
    let place = Place::new();
    if changes.get("model_type").is_some() {
        // Not all families know it.
        changes["layer_types"] = Value::Null;
    }
    place.edit_json("model/config.json", changes);
    let said = place.check(&[]).refused(3);
    // Which families there are is the README's to say.
    let families =
        said.split("expected one of ").nth(1).and_then(|rest| rest.lines().next()).filter(|list| list.contains("`qwen2`"));
    families.map_or(said.clone(), |list| said.replace(list, "<families>"))
}

#[test]
fn a_quantisation_that_is_not_read_is_named() {
    let of = |quantised: Value| refused(json!({"model_type": "gpt_oss", "quantization_config": quantised}));
    assert_snapshot!(of(json!({"quant_method": "hqq"})), @r#"
    error: `<dir>/model/config.json`: `quantization_config.quant_method` is "hqq", which is not supported: expected `bitsandbytes`, `mxfp4`, `fp8`, `gptq`, `awq`, `auto-round` or `compressed-tensors`

    hint: use a model without this, or correct `quantization_config.quant_method` if the model doesn't need it
    "#);
    assert_snapshot!(of(json!({"quant_method": "awq", "bits": 4, "version": "gemv"})), @r#"
    error: `<dir>/model/config.json`: `quantization_config.version` is "gemv", which is not supported: expected `gemm`

    hint: use a model without this, or correct `quantization_config.version` if the model doesn't need it
    "#);
}

#[test]
fn a_model_with_experts_says_what_they_add() {
    let place = Place::new();
    let family = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/model-glm4-moe");
    for file in ["config.json", "model.safetensors"] {
        place.write(&format!("model/{file}"), std::fs::read(family.join(file)).unwrap());
    }
    let said = place.check(&["kv_cache.policy=\"dense\"", "kv_cache.cache_length=40"]).done();
    let of_experts = "2 of 8 experts of width 24 and a shared one of 24 in 1 of 2 layers";
    let log = "nothing is evicted; 2 bytes per token for its experts, 80 B for the longest sample";
    assert!(said.out.contains(of_experts) && said.out.contains(log), "{}", said.out);
    let balance = place.finetune(&["train.router_aux_loss_coef=0.1"]).refused(2);
    assert!(balance.contains("are balanced by a correction of their own"), "{balance}");
}

#[test]
fn experts_that_cannot_be() {
    let mixtral = |more: Value| {
        let mut all = json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        refused(all)
    };
    let qwen3 = |more: Value| {
        let mut all = json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        refused(all)
    };
    for (said, expected) in [
        (
            mixtral(json!({"num_experts_per_tok": 5})),
            "`num_experts_per_tok` is 5, expected a whole number from 1 to the 4 experts",
        ),
        (mixtral(json!({"num_experts": 8})), "`num_experts` is 8, expected 4 as in `num_local_experts`"),
        (mixtral(json!({"router_jitter_noise": 0.1})), "`router_jitter_noise` is 0.1, which is not supported"),
        (qwen3(json!({"num_experts": 0})), "`num_experts` is 0, expected a whole number from 1 to 4096"),
        (qwen3(json!({"moe_intermediate_size": null})), "`moe_intermediate_size` is missing, expected a whole number"),
        (qwen3(json!({"mlp_only_layers": "all"})), "`mlp_only_layers` is \"all\", expected a list of layers"),
    ] {
        assert!(said.starts_with("error: `<dir>/model/config.json`: ") && said.contains(expected), "{said}");
    }
    // The file has no experts, and names each tensor that it lacks.
    let said = mixtral(json!({}));
    assert!(said.contains("`model.layers.0.block_sparse_moe.experts.0.w1.weight`"), "{said}");
}

#[test]
fn model_types() {
    assert_snapshot!(refused(json!({"model_type": null})), @r"
    error: `<dir>/model/config.json`: no `model_type`, expected one of <families>

    hint: use a model of a known `model_type`
    ");
    assert_snapshot!(refused(json!({"model_type": "mamba"})), @r"
    error: `<dir>/model/config.json`: unknown `model_type` `mamba`, expected one of <families>

    hint: use a model of a known `model_type`
    ");
    assert_snapshot!(refused(json!({"model_type": "lama"})), @r"
    error: `<dir>/model/config.json`: unknown `model_type` `lama`, expected one of <families>

    hint: did you mean `llama`?
    ");
}

#[test]
fn a_dropout_of_the_model_is_named() {
    let place = Place::new();
    place.edit_json("model/config.json", json!({"attention_dropout": 0.1}));
    let said = place.check(&[]);
    assert!(said.out.contains("attention_dropout 0.1: left out"), "{}{}", said.out, said.err);
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
fn rotary_embeddings_that_are_not_known() {
    let yarn = json!({"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "beta_fats": 32});
    assert_snapshot!(refused(json!({"rope_parameters": yarn})), @r"
    error: `<dir>/model/config.json`: unknown key `rope_parameters.beta_fats`, expected one of `rope_type`, `type`, `rope_theta`, `partial_rotary_factor`, `original_max_position_embeddings`, `factor`, `attention_factor`, `mscale`, `mscale_all_dim`, `beta_fast`, `beta_slow`, `truncate`, `finetuned`

    hint: did you mean `beta_fast`?
    ");
    let linear = json!({"type": "lineal", "factor": 2.0});
    assert_snapshot!(refused(json!({"rope_parameters": null, "rope_theta": 1e6, "rope_scaling": linear})), @r"
    error: `<dir>/model/config.json`: unknown `rope_scaling.type` `lineal`, expected one of `default`, `linear`, `dynamic`, `yarn`, `dynamic_yarn`, `llama3`, `longrope`

    hint: did you mean `linear`?
    ");
    let layers = json!({"full_attention": {"rope_type": "default"}});
    assert_snapshot!(refused(json!({"rope_parameters": layers})), @r#"
    error: `<dir>/model/config.json`: `rope_parameters` is {"full_attention":{"rope_type":"default"}}, which is not supported: expected one rotary embedding for all layers

    hint: use a model without this, or correct `rope_parameters` if the model doesn't need it
    "#);
}

#[test]
fn windows_and_heads_that_are_none() {
    assert_snapshot!(refused(json!({"model_type": "mistral", "sliding_window": 0})), @r"
    error: `<dir>/model/config.json`: `sliding_window` is 0, expected a whole number from 1 to 2147483648

    hint: take `config.json` from the model's source again
    ");
    assert_snapshot!(refused(json!({"head_dim": 17})), @r"
    error: `<dir>/model/config.json`: `head_dim` is 17, expected an even `head_dim`, whose halves are rotated against each other

    hint: take `config.json` from the model's source again
    ");
    assert_snapshot!(refused(json!({"rope_parameters": {"rope_type": "linear"}})), @r"
    error: `<dir>/model/config.json`: `rope_parameters.factor` is missing, expected a positive number

    hint: take `config.json` from the model's source again
    ");
}

/// The row of `kvtune check` that says what a model is.
fn family(changes: Value) -> String {
    let place = Place::new();
    place.edit_json("model/config.json", changes);
    let said = place.check(&[]).done().out;
    let row = said.lines().find_map(|line| line.strip_prefix("| family"));
    row.unwrap_or_else(|| panic!("{said}")).trim_matches(['|', ' ']).to_owned()
}

#[test]
fn the_check_says_what_a_model_is() {
    assert_snapshot!(family(json!({})), @"qwen2, RoPE on 16 channels of a head, theta 1000000, biases on q_proj k_proj v_proj");
    let windows = json!({"use_sliding_window": true, "sliding_window": 24, "max_window_layers": 1, "layer_types": null});
    assert_snapshot!(family(windows), @"qwen2, RoPE on 16 channels of a head, theta 1000000, a window of 24 in 2 of 3 layers, biases on q_proj k_proj v_proj");
    let yarn = json!({"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192});
    assert_snapshot!(family(json!({"rope_parameters": yarn})), @"qwen2, RoPE yarn × 4 over 8192 tokens on 16 channels of a head, theta 10000, biases on q_proj k_proj v_proj");
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
