//! The planned peak of a step's tensors against the allocators' count. What the process takes in addition depends on the machine: how near
//! the plan comes to it is measured by `cargo bench --bench planner`, and here only that it is of the right size.

use std::path::Path;

use serde_json::json;

use super::draws::{Draw, Sizes, draws, measure};

/// Small enough for a test; the bench draws larger ones.
const SMALL: Sizes =
    Sizes { layers: &[2, 3, 4], hidden: &[128, 256, 384], slots: &[128, 256, 512], chunks: &[32, 64, 128], caches: &[2, 3] };

#[test]
fn the_planned_peak_of_tensors_is_within_a_tenth_of_what_was_allocated() {
    let home = tempfile::tempdir().unwrap();
    let kvtune = Path::new(env!("CARGO_BIN_EXE_kvtune"));
    for (i, draw) in draws(5, 6, SMALL).iter().enumerate() {
        let peaks = measure(kvtune, &home.path().join(i.to_string()), draw, 1);
        let (process, tensors) = peaks.errors();
        let (planned, measured) = peaks.seconds;
        println!("{:+.1} % {:+.1} %, {planned:.2} s of {measured:.2}  {}", 100.0 * process, 100.0 * tensors, draw.words);
        assert!((-0.5..1.0).contains(&process), "{process:+.3} of the process: {}: {peaks:?}", draw.words);
        assert!(tensors.abs() <= 0.1, "{tensors:+.3} of the tensors: {}: {peaks:?}", draw.words);
    }
}

#[test]
fn the_copies_of_tokens_that_experts_get_are_planned() {
    let home = tempfile::tempdir().unwrap();
    for (kept, r) in [("'none'", 8), ("60", 32)] {
        let config = json!({
            "model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
            "norm_topk_prob": true, "vocab_size": 1000, "max_position_embeddings": 1 << 20, "tie_word_embeddings": false,
        });
        let recipe = format!(
            "model.path = '.'\nlora.r = {r}\ndata = {{ format = 'tokens', train = 'none' }}\n\
             kv_cache = {{ policy = 'h2o', cache_length = 256, chunk_size = 64 }}\ngrad.keep_graph = {kept}\n"
        );
        let draw = Draw { config, recipe, tokens: 1000, words: format!("{kept} kept") };
        let peaks = measure(Path::new(env!("CARGO_BIN_EXE_kvtune")), &home.path().join(r.to_string()), &draw, 1);
        let (_, tensors) = peaks.errors();
        assert!(tensors.abs() <= 0.1, "{tensors:+.3} of the tensors: {}: {peaks:?}", draw.words);
    }
}

#[test]
fn what_the_head_makes_of_logits_is_planned() {
    let home = tempfile::tempdir().unwrap();
    let (plain, low_rank) = ("lora.r = 4", "lora = { r = 4, target_modules = ['q_proj', 'lm_head'] }");
    let (whole, dora) = (
        "lora = { r = 4, modules_to_save = ['lm_head'] }",
        "lora = { r = 4, target_modules = ['q_proj', 'lm_head'], use_dora = true }",
    );
    let (cap, none) = (json!(30.0), json!(null));
    let heads = [
        ("f32", &cap, plain),
        ("bf16", &cap, plain),
        ("f32", &cap, low_rank),
        ("f32", &cap, whole),
        ("f32", &none, low_rank),
        ("f32", &none, dora),
        ("bf16", &none, dora),
    ];
    for (at, (dtype, cap, lora)) in heads.into_iter().enumerate() {
        let config = json!({
            "model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "intermediate_size": 128, "vocab_size": 20000, "max_position_embeddings": 4096, "sliding_window": 4096,
            "query_pre_attn_scalar": 16, "final_logit_softcapping": cap,
        });
        let recipe = format!(
            "model = {{ path = '.', dtype = '{dtype}' }}\n{lora}\ndata = {{ format = 'tokens', train = 'none' }}\n\
             kv_cache = {{ policy = 'keydiff', cache_length = 128, chunk_size = 64 }}\ngrad.keep_graph = 'none'\n"
        );
        let draw = Draw { config, recipe, tokens: 500, words: format!("{dtype}, cap {cap}, {lora}") };
        let peaks = measure(Path::new(env!("CARGO_BIN_EXE_kvtune")), &home.path().join(at.to_string()), &draw, 1);
        let (_, tensors) = peaks.errors();
        println!("{:+.1} %  {}", 100.0 * tensors, draw.words);
        assert!(tensors.abs() <= 0.1, "{tensors:+.3} of the tensors: {}: {peaks:?}", draw.words);
    }
}

#[test]
fn what_an_update_of_all_weights_takes_is_planned() {
    let home = tempfile::tempdir().unwrap();
    let updates = [("adamw", "f32", true), ("adamw_8bit", "f32", true), ("adadelta", "f32", false), ("adamw", "bf16", false)];
    for (at, (optimizer, dtype, is_tied)) in updates.into_iter().enumerate() {
        let config = json!({
            "model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 256, "vocab_size": 20000, "max_position_embeddings": 4096, "tie_word_embeddings": is_tied,
        });
        let recipe = format!(
            "model = {{ path = '.', dtype = '{dtype}' }}\ntrain.weights = 'all'\noptimizer.name = '{optimizer}'\n\
             data = {{ format = 'tokens', train = 'none' }}\nkv_cache = {{ policy = 'h2o', cache_length = 64, chunk_size = 32 }}\n\
             grad = {{ layers_per_cell = 1, keep_graph = 'none' }}\n"
        );
        let draw = Draw { config, recipe, tokens: 200, words: format!("{optimizer}, {dtype}, tied: {is_tied}") };
        let peaks = measure(Path::new(env!("CARGO_BIN_EXE_kvtune")), &home.path().join(at.to_string()), &draw, 1);
        let (_, tensors) = peaks.errors();
        println!("{:+.1} %  {}", 100.0 * tensors, draw.words);
        assert!(tensors.abs() <= 0.02, "{tensors:+.3} of the tensors: {}: {peaks:?}", draw.words);
    }
}

#[test]
fn what_is_trained_from_some_layer_on_is_planned() {
    let home = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
    });
    let cells = [
        "layers_per_cell = 1, keep_graph = 'none'",
        "layers_per_cell = 6, keep_graph = 'none'",
        "layers_per_cell = 4, keep_graph = 'all'",
        "layers_per_cell = 2, keep_graph = 'none', attention_outputs = 'keep'",
    ];
    for (at, grad) in cells.into_iter().enumerate() {
        let recipe = format!(
            "model.path = '.'\nlora = {{ r = 4, layers_to_transform = [3, 4, 5] }}\ndata = {{ format = 'tokens', train = 'none' }}\n\
             kv_cache = {{ policy = 'h2o', cache_length = 256, chunk_size = 64 }}\ngrad = {{ {grad} }}\n"
        );
        let draw = Draw { config: config.clone(), recipe, tokens: 1500, words: grad.to_owned() };
        let peaks = measure(Path::new(env!("CARGO_BIN_EXE_kvtune")), &home.path().join(at.to_string()), &draw, 1);
        let (_, tensors) = peaks.errors();
        println!("{:+.1} %  {}", 100.0 * tensors, draw.words);
        assert!(tensors.abs() <= 0.05, "{tensors:+.3} of the tensors: {}: {peaks:?}", draw.words);
    }
}
