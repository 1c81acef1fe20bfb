//! The keys of a GGUF file as the `config.json` that they stand for (llama.cpp, `convert_hf_to_gguf.py`, read backwards).

use serde_json::{Value, json};

use super::file::GgufFile;
use super::header::ARCHITECTURE;
use crate::units::{Fault, listed, quoted};

/// llama.cpp's name of an architecture, Transformers' of the family, and of its class without the ending.
const FAMILIES: [(&str, &str, &str); 11] = [
    ("llama", "llama", "Llama"),
    ("llama", "mistral", "Mistral"),
    ("llama", "mixtral", "Mixtral"),
    ("qwen2", "qwen2", "Qwen2"),
    ("qwen3", "qwen3", "Qwen3"),
    ("qwen3moe", "qwen3_moe", "Qwen3Moe"),
    ("gemma", "gemma", "Gemma"),
    ("gemma2", "gemma2", "Gemma2"),
    ("gemma3", "gemma3_text", "Gemma3"),
    ("phi3", "phi3", "Phi3"),
    ("gpt-oss", "gpt_oss", "GptOss"),
];

const ORIGINAL: &str = "original_max_position_embeddings";
/// Which layers slide, and the base of their rotations.
const PATTERN: &str = ".attention.sliding_window_pattern";
const BASE_OF_SLIDING: &str = ".rope.freq_base_swa";

/// llama.cpp's name of the architecture of a family, where its tensors are known by name.
pub fn architecture_of(model_type: &str) -> Option<&'static str> {
    FAMILIES.iter().find(|(_, family, _)| *family == model_type).map(|(architecture, ..)| *architecture)
}

/// What the file says as a `config.json` would.
pub(in crate::files) fn config_of(file: &GgufFile) -> Result<Value, Fault> {
    let architecture = file.required_text(ARCHITECTURE)?;
    let Some((_, family, _)) = FAMILIES.iter().find(|(name, ..)| *name == architecture) else {
        let mut known: Vec<&str> = FAMILIES.iter().map(|(name, ..)| *name).collect();
        known.dedup();
        let message = format!("`{ARCHITECTURE}` is `{}`, expected one of {}", quoted(architecture), listed(&known));
        return Err(file.wrong(&message).with_hint("take the model in Hugging Face's format, if models.md has its family"));
    };
    let window = file.count(".attention.sliding_window")?.filter(|&window| window > 0);
    let num_experts = file.count(".expert_count")?.unwrap_or(0);
    let model_type = match *family {
        "llama" if num_experts > 0 => "mixtral",
        "llama" if window.is_some() => "mistral",
        family => family,
    };
    let class = FAMILIES.iter().find(|(_, family, _)| *family == model_type).map_or("", |(.., class)| class);
    let mut config = shape(file)?;
    config["model_type"] = model_type.into();
    config["architectures"] = json!([format!("{class}ForCausalLM")]);
    if model_type == "llama" {
        config["mlp_bias"] = file.get("blk.0.ffn_gate.bias").is_some().into();
    }
    if model_type != "qwen2" {
        config["attention_bias"] = file.get("blk.0.attn_q.bias").is_some().into();
    }
    if matches!(model_type, "mistral" | "mixtral" | "phi3" | "gpt_oss" | "gemma2" | "gemma3_text") {
        config["sliding_window"] = window.into();
    }
    for (key, stored) in [("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")] {
        let id = file.count(&format!("tokenizer.ggml.{stored}_token_id"))?;
        // Where it is missing, Transformers has one of the family's, which may lie outside of the vocabulary.
        if id.is_some() || stored == "padding" {
            config[key] = id.into();
        }
    }
    set_experts(&mut config, file, num_experts)?;
    if model_type.starts_with("gemma") {
        set_gemma(&mut config, file)?;
    }
    if matches!(model_type, "gemma2" | "gpt_oss") {
        refuse_other_windows(file)?;
    }
    let rope = rope(file, model_type)?;
    config["rope_parameters"] = match model_type {
        "gemma3_text" => {
            let theta = file.number(BASE_OF_SLIDING)?.unwrap_or(10_000.0);
            json!({"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}})
        }
        _ => rope,
    };
    // Phi-3 has it beside the table, and there alone.
    if let Some(original) =
        config["rope_parameters"].get(ORIGINAL).filter(|found| model_type == "phi3" && found.is_u64()).cloned()
    {
        config[ORIGINAL] = original;
    }
    Ok(config)
}

/// Fails where another program would let other layers slide than every second one, or rotate them otherwise.
fn refuse_other_windows(file: &GgufFile) -> Result<(), Fault> {
    let wrong =
        |key, found: String, expected: String| Err(file.wrong(&format!("`{}` is {found}, expected {expected}", file.named(key))));
    let base = file.number(".rope.freq_base")?.unwrap_or(10_000.0);
    match (file.count(PATTERN)?, file.number(BASE_OF_SLIDING)?) {
        (Some(found), _) if found != 2 => wrong(PATTERN, found.to_string(), "2".into()),
        (_, Some(found)) if (found - base).abs() > 0.0 => wrong(BASE_OF_SLIDING, found.to_string(), base.to_string()),
        _ => Ok(()),
    }
}

/// The keys that a `config.json` of any family has.
fn shape(file: &GgufFile) -> Result<Value, Fault> {
    let (heads, eps) = (file.required(".attention.head_count")?, ".attention.layer_norm_rms_epsilon");
    // What a model of experts alone has no need of, a `config.json` still has.
    let width = file.count(".feed_forward_length")?.or(file.count(".expert_feed_forward_length")?);
    Ok(json!({
        "hidden_size": file.required(".embedding_length")?,
        "num_hidden_layers": file.required(".block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": num_kv_heads(file)?.unwrap_or(heads),
        "head_dim": head_dim(file)?,
        "intermediate_size": width.ok_or_else(|| file.missing(".feed_forward_length"))?,
        "max_position_embeddings": file.required(".context_length")?,
        "vocab_size": vocab_size(file)?,
        "tie_word_embeddings": file.get("output.weight").is_none(),
        "rms_norm_eps": file.number(eps)?.ok_or_else(|| file.missing(eps))?,
    }))
}

/// A number of all layers, or a list of one for each, which must be the same.
fn num_kv_heads(file: &GgufFile) -> Result<Option<usize>, Fault> {
    let key = ".attention.head_count_kv";
    match file.integers(key) {
        None => file.count(key),
        Some([first, others @ ..]) if *first > 0 && others.iter().all(|other| other == first) => Ok(Some(*first as usize)),
        Some(_) => Err(file.wrong(&format!("`{}` differs from layer to layer, expected one number", file.named(key)))),
    }
}

fn set_experts(config: &mut Value, file: &GgufFile, num_experts: usize) -> Result<(), Fault> {
    let used = || file.required(".expert_used_count");
    let width = || file.required(".expert_feed_forward_length");
    let model_type = config["model_type"].as_str().unwrap_or_default().to_owned();
    match &model_type[..] {
        "mixtral" | "gpt_oss" => {
            config["num_local_experts"] = num_experts.into();
            config["num_experts_per_tok"] = used()?.into();
            if model_type == "gpt_oss" {
                config["intermediate_size"] = width()?.into();
            }
        }
        "qwen3_moe" => {
            config["num_experts"] = num_experts.into();
            config["num_experts_per_tok"] = used()?.into();
            config["moe_intermediate_size"] = width()?.into();
            // The files do not say it, and the published models do it.
            config["norm_topk_prob"] = true.into();
        }
        _ if num_experts > 0 => {
            let key = file.named(".expert_count");
            return Err(file.wrong(&format!("`{key}` is {num_experts}: experts of this architecture are not known")));
        }
        _ => {}
    }
    Ok(())
}

fn set_gemma(config: &mut Value, file: &GgufFile) -> Result<(), Fault> {
    // The 27B models divide the width among the heads, whatever a head's own is.
    let num_layers = file.required(".block_count")?;
    let is_27b = [("gemma2", 46), ("gemma3_text", 62)].iter().any(|one| config["model_type"] == one.0 && num_layers == one.1);
    let heads = file.required(".attention.head_count")?.max(1);
    let scale = if is_27b { file.required(".embedding_length")? / heads } else { head_dim(file)? };
    config["hidden_activation"] = "gelu_pytorch_tanh".into();
    config["query_pre_attn_scalar"] = scale.into();
    for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
        config[cap] = file.number(&format!(".{cap}"))?.into();
    }
    if let Some(pattern) = file.count(PATTERN)?.filter(|_| config["model_type"] == "gemma3_text") {
        config["sliding_window_pattern"] = pattern.into();
    }
    Ok(())
}

fn head_dim(file: &GgufFile) -> Result<usize, Fault> {
    let (hidden, heads) = (file.required(".embedding_length")?, file.required(".attention.head_count")?);
    let of = |key| file.count(key).map(|found| found.unwrap_or(hidden / heads.max(1)));
    let (key, value) = (of(".attention.key_length")?, of(".attention.value_length")?);
    if key == value {
        return Ok(key);
    }
    let (of_key, of_value) = (file.named(".attention.key_length"), file.named(".attention.value_length"));
    Err(file.wrong(&format!("`{of_key}` is {key}, `{of_value}` is {value}, expected the same")))
}

fn vocab_size(file: &GgufFile) -> Result<usize, Fault> {
    // The matrix decides: some files pad it, and keep the number of what is used.
    match file.get("token_embd.weight") {
        Some(embedding) => Ok(embedding.shape[0]),
        None => file.required(".vocab_size"),
    }
}

fn rope(file: &GgufFile, model_type: &str) -> Result<Value, Fault> {
    let head_dim = head_dim(file)?;
    let mut table = json!({ "rope_theta": file.number(".rope.freq_base")?.unwrap_or(10_000.0) });
    let rotary = file.count(".rope.dimension_count")?.unwrap_or(head_dim);
    if rotary < head_dim {
        table["partial_rotary_factor"] = (rotary as f64 / head_dim as f64).into();
    }
    let original = file.count(".rope.scaling.original_context_length")?;
    let factors = |name: &str| file.floats(name, rotary / 2);
    if let (Some(long), Some(short)) = (factors("rope_factors_long.weight")?, factors("rope_factors_short.weight")?) {
        table["rope_type"] = "longrope".into();
        table["long_factor"] = long.into();
        table["short_factor"] = short.into();
        table[ORIGINAL] = original.into();
        if let Some(factor) = file.number(".rope.scaling.attn_factor")? {
            table["attention_factor"] = factor.into();
        }
        return Ok(table);
    }
    // What Llama 3.1's rule makes of the frequencies stands in the file itself, for sequences of any length.
    if let Some(divisors) = factors("rope_freqs.weight")? {
        table["rope_type"] = "longrope".into();
        table["long_factor"] = divisors.clone().into();
        table["short_factor"] = divisors.into();
        table["attention_factor"] = 1.0.into();
        table[ORIGINAL] = file.required(".context_length")?.into();
        return Ok(table);
    }
    // Files may name a factor without a kind, the oldest by another key.
    let factor = file.number(".rope.scaling.factor")?.or(file.number(".rope.scale_linear")?).filter(|factor| factor.abs() > 0.0);
    let kind = file.text(".rope.scaling.type")?.or(factor.map(|_| "linear")).unwrap_or("none");
    match kind {
        "none" => table["rope_type"] = "default".into(),
        "linear" if factor.is_none() => table["rope_type"] = "default".into(),
        "linear" | "yarn" => {
            table["rope_type"] = kind.into();
            table["factor"] = factor.into();
        }
        _ => {
            let (key, kind) = (file.named(".rope.scaling.type"), quoted(kind));
            let reason = format!("`{key}` is `{kind}`, expected `none`, `linear` or `yarn`, or `longrope` with its lists");
            return Err(file.wrong(&reason));
        }
    }
    if kind == "yarn" {
        set_yarn(&mut table, file, original)?;
    }
    // As the published configuration of gpt-oss says it, though llama.cpp rounds the range.
    if kind == "yarn" && model_type == "gpt_oss" {
        table["truncate"] = false.into();
    }
    Ok(table)
}

/// What a table of `yarn` has beside its factor, where it is there.
fn set_yarn(table: &mut Value, file: &GgufFile, original: Option<usize>) -> Result<(), Fault> {
    if let Some(original) = original {
        table[ORIGINAL] = original.into();
    }
    // By `attn_factor` llama.cpp multiplies what YaRN gives.
    if let (Some(own), Some(factor)) = (file.number(".rope.scaling.attn_factor")?, table["factor"].as_f64()) {
        table["attention_factor"] = (own * (0.1 * factor.max(1.0).ln() + 1.0)).into();
    }
    // Its converter writes `attention_factor` as it is by the first of these names, which counts where both are there.
    let numbers = [("attention_factor", "yarn_attn_factor"), ("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")];
    for (key, stored) in numbers {
        if let Some(value) = file.number(&format!(".rope.scaling.{stored}"))? {
            table[key] = value.into();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::file::tests::{file, number, opened};
    use super::*;

    fn float(value: f32) -> Vec<u8> {
        [6u32.to_le_bytes(), value.to_le_bytes()].concat()
    }

    fn text(value: &str) -> Vec<u8> {
        [&8u32.to_le_bytes()[..], &(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
    }

    /// That of a file with heads of 8 channels, and with these keys and tensors beside.
    fn config(architecture: &str, further: &[(&str, Vec<u8>)], tensors: &[&str]) -> Value {
        read(architecture, further, tensors).unwrap()
    }

    fn read(architecture: &str, further: &[(&str, Vec<u8>)], tensors: &[&str]) -> Result<Value, Fault> {
        let sizes = [("embedding_length", 16), ("block_count", 2), ("attention.head_count", 2), ("feed_forward_length", 32)];
        let sizes = sizes.iter().chain(&[("context_length", 64), ("vocab_size", 8)]).map(|(key, size)| (*key, number(*size)));
        let own = sizes.chain([("attention.layer_norm_rms_epsilon", float(1e-5))]).chain(further.iter().cloned());
        let own: Vec<_> = own.map(|(key, value)| (format!("{architecture}.{key}"), value)).collect();
        let mut keys = vec![(ARCHITECTURE, text(architecture)), ("tokenizer.ggml.bos_token_id", number(1))];
        keys.extend(own.iter().map(|(key, value)| (&**key, value.clone())));
        config_of(&opened(&file(&keys, tensors)).unwrap())
    }

    #[test]
    fn a_rotation_is_the_one_that_llama_cpp_reads_or_its_converter_was_given() {
        let theta = json!({ "rope_theta": 1e4 });
        let with = |further: Value| {
            let mut table = theta.clone();
            table.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
            table
        };
        let linear = with(json!({"rope_type": "linear", "factor": 4.0}));
        let plain = with(json!({ "rope_type": "default" }));
        let (kind, factor) = ("rope.scaling.type", ("rope.scaling.factor", float(4.0)));
        for (keys, expected) in [
            (vec![factor.clone()], linear.clone()),
            (vec![("rope.scale_linear", float(4.0))], linear.clone()),
            (vec![(kind, text("linear")), factor.clone()], linear),
            (vec![("rope.scale_linear", float(0.0))], plain.clone()),
            (vec![(kind, text("linear"))], plain.clone()),
            (vec![(kind, text("none")), factor.clone()], plain.clone()),
            (vec![], plain),
            (
                vec![(kind, text("yarn")), factor.clone(), ("rope.scaling.yarn_attn_factor", float(1.5))],
                with(json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5})),
            ),
            (
                vec![(kind, text("yarn")), factor, ("rope.scaling.attn_factor", float(1.5))],
                with(json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5 * (0.1 * 4f64.ln() + 1.0)})),
            ),
        ] {
            assert_eq!(config("llama", &keys, &[])["rope_parameters"], expected, "{keys:?}");
        }
    }

    #[test]
    fn what_belongs_to_one_family_stands_where_it_reads_it() {
        let keys = [("rope.freq_base_swa", float(5e4)), ("attention.sliding_window_pattern", number(3))];
        let gemma = config("gemma3", &keys, &[]);
        assert_eq!(gemma["rope_parameters"]["sliding_attention"]["rope_theta"], 5e4);
        assert_eq!(gemma["sliding_window_pattern"], 3);
        let same = [("rope.freq_base_swa", float(1e4)), ("attention.sliding_window_pattern", number(2))];
        assert!(read("gemma2", &same, &[]).is_ok());
        for other in keys {
            let refused = read("gemma2", std::slice::from_ref(&other), &[]).unwrap_err().to_string();
            assert!(refused.contains(&format!("`gemma2.{}` is ", other.0)), "{refused}");
        }
        let lists = ["rope_factors_long.weight", "rope_factors_short.weight"];
        let phi = config("phi3", &[("rope.scaling.original_context_length", number(32))], &lists);
        assert_eq!(
            (&phi["original_max_position_embeddings"], &phi["rope_parameters"]["rope_type"]),
            (&json!(32), &json!("longrope"))
        );
        // In place of a default that may lie outside of the vocabulary.
        assert_eq!(
            (phi.get("pad_token_id"), phi.get("bos_token_id"), phi.get("eos_token_id")),
            (Some(&Value::Null), Some(&json!(1)), None)
        );
        for (tensors, has_bias) in [(&[][..], false), (&["blk.0.ffn_gate.bias"], true)] {
            assert_eq!(config("llama", &[], tensors)["mlp_bias"], has_bias);
        }
    }
}
