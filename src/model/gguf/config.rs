//! The keys of a GGUF file as the `config.json` that they stand for (llama.cpp, `convert_hf_to_gguf.py`, read backwards).

use serde_json::{Map, Value, json};

use crate::files::GgufFile;
use crate::units::{Fault, listed, quoted};

/// llama.cpp's name of an architecture, and Transformers' of the family.
const ARCHITECTURES: [(&str, &str); 9] = [
    ("llama", "llama"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("qwen3moe", "qwen3_moe"),
    ("gemma", "gemma"),
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3_text"),
    ("phi3", "phi3"),
    ("gpt-oss", "gpt_oss"),
];

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

    fn text(&self, key: &str) -> Result<Option<&str>, Fault> {
        self.file.text(&self.named(key))
    }
}

/// What the file says as a `config.json` would.
pub(in crate::model) fn config_of(file: &GgufFile) -> Result<Map<String, Value>, Fault> {
    let architecture = file.required_text("general.architecture")?;
    let Some((_, family)) = ARCHITECTURES.iter().find(|(name, _)| *name == architecture) else {
        let known: Vec<&str> = ARCHITECTURES.iter().map(|(name, _)| *name).collect();
        let message = format!("`general.architecture` is `{}`, expected one of {}", quoted(architecture), listed(&known));
        return Err(file
            .wrong(&message)
            .with_hint("take the model in Hugging Face's format, if its family is among those of models.md"));
    };
    let keys = Keys { file, architecture };
    let mut config = Map::new();
    let mut set = |key: &str, value: Value| _ = config.insert(key.to_owned(), value);
    let (hidden, heads, layers) =
        (keys.required("embedding_length")?, keys.required("attention.head_count")?, keys.required("block_count")?);
    let head_dim = head_dim(&keys, hidden, heads)?;
    set("hidden_size", hidden.into());
    set("num_hidden_layers", layers.into());
    set("num_attention_heads", heads.into());
    set("num_key_value_heads", keys.count_of_layers("attention.head_count_kv")?.unwrap_or(heads).into());
    set("head_dim", head_dim.into());
    set("max_position_embeddings", keys.required("context_length")?.into());
    set("vocab_size", vocab_size(&keys)?.into());
    set("tie_word_embeddings", file.get("output.weight").is_none().into());
    let eps = "attention.layer_norm_rms_epsilon";
    set("rms_norm_eps", keys.number(eps)?.ok_or_else(|| file.missing(&keys.named(eps)))?.into());
    let has_bias = file.get("blk.0.attn_q.bias").is_some();
    if *family != "qwen2" {
        set("attention_bias", has_bias.into());
    }
    let num_experts = keys.count("expert_count")?.unwrap_or(0);
    let window = keys.count("attention.sliding_window")?.filter(|&window| window > 0);
    let model_type = match *family {
        "llama" if num_experts > 0 => "mixtral",
        "llama" if window.is_some() => "mistral",
        family => family,
    };
    set("model_type", model_type.into());
    // What a model of experts alone has no need of, other readers of a `config.json` still ask for.
    let expert_width = keys.count("expert_feed_forward_length")?;
    let width = keys.count("feed_forward_length")?.or(expert_width);
    set("intermediate_size", width.ok_or_else(|| file.missing(&keys.named("feed_forward_length")))?.into());
    match model_type {
        "mixtral" => {
            set("num_local_experts", num_experts.into());
            set("num_experts_per_tok", keys.required("expert_used_count")?.into());
        }
        "gpt_oss" => {
            set("num_local_experts", num_experts.into());
            set("num_experts_per_tok", keys.required("expert_used_count")?.into());
            set("intermediate_size", keys.required("expert_feed_forward_length")?.into());
        }
        "qwen3_moe" => {
            set("num_experts", num_experts.into());
            set("num_experts_per_tok", keys.required("expert_used_count")?.into());
            set("moe_intermediate_size", keys.required("expert_feed_forward_length")?.into());
            set("norm_topk_prob", true.into());
        }
        _ if num_experts > 0 => {
            return Err(file.wrong(&format!("`{}` has no experts that are known", keys.named("expert_count"))));
        }
        _ => {}
    }
    if matches!(model_type, "mistral" | "mixtral" | "phi3" | "gpt_oss" | "gemma2" | "gemma3_text") {
        set("sliding_window", window.map_or(Value::Null, Value::from));
    }
    if model_type.starts_with("gemma") {
        set("hidden_activation", "gelu_pytorch_tanh".into());
        // The 27B models divide the width among the heads, whatever a head's own is.
        let is_27b = (model_type, layers) == ("gemma2", 46) || (model_type, layers) == ("gemma3_text", 62);
        set("query_pre_attn_scalar", if is_27b { hidden / heads } else { head_dim }.into());
        for (key, stored) in
            [("attn_logit_softcapping", "attn_logit_softcapping"), ("final_logit_softcapping", "final_logit_softcapping")]
        {
            set(key, keys.number(stored)?.map_or(Value::Null, Value::from));
        }
    }
    let rope = rope(&keys, head_dim, model_type)?;
    if model_type == "gemma3_text" {
        let local = json!({"rope_type": "default", "rope_theta": 10_000.0});
        set("rope_parameters", json!({"full_attention": rope, "sliding_attention": local}));
    } else {
        set("rope_parameters", rope);
    }
    for (key, stored) in [("bos_token_id", "bos"), ("eos_token_id", "eos")] {
        if let Some(id) = file.count(&format!("tokenizer.ggml.{stored}_token_id"))? {
            set(key, id.into());
        }
    }
    Ok(config)
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

fn head_dim(keys: &Keys<'_>, hidden: usize, heads: usize) -> Result<usize, Fault> {
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
fn rope(keys: &Keys<'_>, head_dim: usize, model_type: &str) -> Result<Value, Fault> {
    let mut table = Map::new();
    let mut set = |key: &str, value: Value| _ = table.insert(key.to_owned(), value);
    set("rope_theta", keys.number("rope.freq_base")?.unwrap_or(10_000.0).into());
    let rotary = keys.count("rope.dimension_count")?.unwrap_or(head_dim);
    if rotary < head_dim {
        set("partial_rotary_factor", (rotary as f64 / head_dim as f64).into());
    }
    let original = keys.count("rope.scaling.original_context_length")?;
    let factors = |name: &str| keys.file.floats(name, rotary / 2);
    if let (Some(long), Some(short)) = (factors("rope_factors_long.weight")?, factors("rope_factors_short.weight")?) {
        set("rope_type", "longrope".into());
        (set("long_factor", long.into()), set("short_factor", short.into()));
        set("original_max_position_embeddings", original.map_or(Value::Null, Value::from));
        if let Some(factor) = keys.number("rope.scaling.attn_factor")? {
            set("attention_factor", factor.into());
        }
        return Ok(table.into());
    }
    // What Llama 3.1's rule makes of the frequencies stands in the file itself, for sequences of any length.
    if let Some(divisors) = factors("rope_freqs.weight")? {
        set("rope_type", "longrope".into());
        (set("long_factor", divisors.clone().into()), set("short_factor", divisors.into()));
        set("attention_factor", 1.0.into());
        set("original_max_position_embeddings", keys.required("context_length")?.into());
        return Ok(table.into());
    }
    let factor = keys.number("rope.scaling.factor")?;
    match keys.text("rope.scaling.type")? {
        None | Some("none") => set("rope_type", "default".into()),
        Some("linear") => {
            set("rope_type", "linear".into());
            set("factor", factor.map_or(Value::Null, Value::from));
        }
        Some("yarn") => {
            set("rope_type", "yarn".into());
            set("factor", factor.map_or(Value::Null, Value::from));
            if let Some(original) = original {
                set("original_max_position_embeddings", original.into());
            }
            let numbers = [("attention_factor", "attn_factor"), ("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")];
            for (key, stored) in numbers {
                if let Some(value) = keys.number(&format!("rope.scaling.{stored}"))? {
                    set(key, value.into());
                }
            }
            // As the published configuration of gpt-oss says it, though llama.cpp rounds the range.
            if model_type == "gpt_oss" {
                set("truncate", false.into());
            }
        }
        Some(kind) => {
            let (key, kind) = (keys.named("rope.scaling.type"), quoted(kind));
            return Err(keys
                .file
                .wrong(&format!("`{key}` is `{kind}`, expected `none`, `linear` or `yarn`, or `longrope` with its lists")));
        }
    }
    Ok(table.into())
}
