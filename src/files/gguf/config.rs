//! The keys of a GGUF file as the `config.json` that they stand for (llama.cpp, `convert_hf_to_gguf.py`, read backwards).

use serde_json::{Value, json};

use super::file::GgufFile;
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

/// The key that names an architecture.
pub(super) const ARCHITECTURE: &str = "general.architecture";

/// llama.cpp's name of the architecture of a family, where its tensors are known by name.
pub fn architecture_of(model_type: &str) -> Option<&'static str> {
    FAMILIES.iter().find(|(_, family, _)| *family == model_type).map(|(architecture, ..)| *architecture)
}

/// A file's keys under the name of its architecture.
struct Keys<'a> {
    file: &'a GgufFile,
    architecture: &'a str,
}

impl Keys<'_> {
    fn named(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn required(&self, key: &str) -> Result<usize, Fault> {
        self.file.required(&self.named(key))
    }

    fn count(&self, key: &str) -> Result<Option<usize>, Fault> {
        self.file.count(&self.named(key))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, Fault> {
        self.file.number(&self.named(key))
    }

    fn missing(&self, key: &str) -> Fault {
        self.file.missing(&self.named(key))
    }

    fn text(&self, key: &str) -> Result<Option<&str>, Fault> {
        self.file.text(&self.named(key))
    }
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
    let keys = Keys { file, architecture };
    let window = keys.count("attention.sliding_window")?.filter(|&window| window > 0);
    let num_experts = keys.count("expert_count")?.unwrap_or(0);
    let model_type = match *family {
        "llama" if num_experts > 0 => "mixtral",
        "llama" if window.is_some() => "mistral",
        family => family,
    };
    let class = FAMILIES.iter().find(|(_, family, _)| *family == model_type).map_or("", |(.., class)| class);
    let mut config = shape(&keys)?;
    config["model_type"] = model_type.into();
    config["architectures"] = json!([format!("{class}ForCausalLM")]);
    if model_type != "qwen2" {
        config["attention_bias"] = file.get("blk.0.attn_q.bias").is_some().into();
    }
    if matches!(model_type, "mistral" | "mixtral" | "phi3" | "gpt_oss" | "gemma2" | "gemma3_text") {
        config["sliding_window"] = window.into();
    }
    for (key, stored) in [("bos_token_id", "bos"), ("eos_token_id", "eos")] {
        if let Some(id) = file.count(&format!("tokenizer.ggml.{stored}_token_id"))? {
            config[key] = id.into();
        }
    }
    set_experts(&mut config, &keys, num_experts)?;
    if model_type.starts_with("gemma") {
        set_gemma(&mut config, &keys)?;
    }
    let rope = rope(&keys, model_type)?;
    let local = || json!({"rope_type": "default", "rope_theta": 10_000.0});
    let rope = if model_type == "gemma3_text" { json!({"full_attention": rope, "sliding_attention": local()}) } else { rope };
    config["rope_parameters"] = rope;
    Ok(config)
}

/// The keys that a `config.json` of any family has.
fn shape(keys: &Keys<'_>) -> Result<Value, Fault> {
    let (heads, eps) = (keys.required("attention.head_count")?, "attention.layer_norm_rms_epsilon");
    // What a model of experts alone has no need of, a `config.json` still has.
    let width = keys.count("feed_forward_length")?.or(keys.count("expert_feed_forward_length")?);
    Ok(json!({
        "hidden_size": keys.required("embedding_length")?,
        "num_hidden_layers": keys.required("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count_of_layers("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim(keys)?,
        "intermediate_size": width.ok_or_else(|| keys.missing("feed_forward_length"))?,
        "max_position_embeddings": keys.required("context_length")?,
        "vocab_size": vocab_size(keys)?,
        "tie_word_embeddings": keys.file.get("output.weight").is_none(),
        "rms_norm_eps": keys.number(eps)?.ok_or_else(|| keys.missing(eps))?,
    }))
}

fn set_experts(config: &mut Value, keys: &Keys<'_>, num_experts: usize) -> Result<(), Fault> {
    let used = || keys.required("expert_used_count");
    let width = || keys.required("expert_feed_forward_length");
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
            let key = keys.named("expert_count");
            return Err(keys.file.wrong(&format!("`{key}` is {num_experts}: experts of this architecture are not known")));
        }
        _ => {}
    }
    Ok(())
}

fn set_gemma(config: &mut Value, keys: &Keys<'_>) -> Result<(), Fault> {
    // The 27B models divide the width among the heads, whatever a head's own is.
    let num_layers = keys.required("block_count")?;
    let is_27b = [("gemma2", 46), ("gemma3_text", 62)].iter().any(|one| config["model_type"] == one.0 && num_layers == one.1);
    let heads = keys.required("attention.head_count")?.max(1);
    let scale = if is_27b { keys.required("embedding_length")? / heads } else { head_dim(keys)? };
    config["hidden_activation"] = "gelu_pytorch_tanh".into();
    config["query_pre_attn_scalar"] = scale.into();
    for cap in ["attn_logit_softcapping", "final_logit_softcapping"] {
        config[cap] = keys.number(cap)?.into();
    }
    Ok(())
}

impl Keys<'_> {
    /// A number of all layers, or a list of one for each, which must be the same.
    fn count_of_layers(&self, key: &str) -> Result<Option<usize>, Fault> {
        let name = self.named(key);
        let Some(list) = self.file.integers(&name) else { return self.count(key) };
        match list {
            [first, others @ ..] if *first > 0 && others.iter().all(|other| other == first) => Ok(Some(*first as usize)),
            _ => Err(self.file.wrong(&format!("`{name}` differs from layer to layer, expected one number"))),
        }
    }
}

fn head_dim(keys: &Keys<'_>) -> Result<usize, Fault> {
    let (hidden, heads) = (keys.required("embedding_length")?, keys.required("attention.head_count")?);
    let of = |key| keys.count(key).map(|found| found.unwrap_or(hidden / heads.max(1)));
    let (key, value) = (of("attention.key_length")?, of("attention.value_length")?);
    if key == value {
        return Ok(key);
    }
    let (of_key, of_value) = (keys.named("attention.key_length"), keys.named("attention.value_length"));
    Err(keys.file.wrong(&format!("`{of_key}` is {key}, `{of_value}` is {value}, expected the same")))
}

fn vocab_size(keys: &Keys<'_>) -> Result<usize, Fault> {
    // The matrix decides: some files pad it, and keep the number of what is used.
    match keys.file.get("token_embd.weight") {
        Some(embedding) => Ok(embedding.shape[0]),
        None => keys.required("vocab_size"),
    }
}

/// The table of the rotary embedding.
fn rope(keys: &Keys<'_>, model_type: &str) -> Result<Value, Fault> {
    let head_dim = head_dim(keys)?;
    let mut table = json!({ "rope_theta": keys.number("rope.freq_base")?.unwrap_or(10_000.0) });
    let rotary = keys.count("rope.dimension_count")?.unwrap_or(head_dim);
    if rotary < head_dim {
        table["partial_rotary_factor"] = (rotary as f64 / head_dim as f64).into();
    }
    let original = keys.count("rope.scaling.original_context_length")?;
    let factors = |name: &str| keys.file.floats(name, rotary / 2);
    if let (Some(long), Some(short)) = (factors("rope_factors_long.weight")?, factors("rope_factors_short.weight")?) {
        table["rope_type"] = "longrope".into();
        table["long_factor"] = long.into();
        table["short_factor"] = short.into();
        table["original_max_position_embeddings"] = original.into();
        if let Some(factor) = keys.number("rope.scaling.attn_factor")? {
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
        table["original_max_position_embeddings"] = keys.required("context_length")?.into();
        return Ok(table);
    }
    let factor = keys.number("rope.scaling.factor")?;
    match keys.text("rope.scaling.type")? {
        None | Some("none") => table["rope_type"] = "default".into(),
        Some("linear") => {
            table["rope_type"] = "linear".into();
            table["factor"] = factor.into();
        }
        Some("yarn") => {
            table["rope_type"] = "yarn".into();
            table["factor"] = factor.into();
            if let Some(original) = original {
                table["original_max_position_embeddings"] = original.into();
            }
            let numbers = [("attention_factor", "attn_factor"), ("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")];
            for (key, stored) in numbers {
                if let Some(value) = keys.number(&format!("rope.scaling.{stored}"))? {
                    table[key] = value.into();
                }
            }
            // As the published configuration of gpt-oss says it, though llama.cpp rounds the range.
            if model_type == "gpt_oss" {
                table["truncate"] = false.into();
            }
        }
        Some(kind) => {
            let (key, kind) = (keys.named("rope.scaling.type"), quoted(kind));
            return Err(keys
                .file
                .wrong(&format!("`{key}` is `{kind}`, expected `none`, `linear` or `yarn`, or `longrope` with its lists")));
        }
    }
    Ok(table)
}
