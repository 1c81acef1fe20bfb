//! Where Transformers' `AutoTokenizer` (5.3) splits texts otherwise than the model's `tokenizer.json`, which kvtune follows.

use std::path::Path;

use serde_json::Value;

use super::tokenizer::{Tokenizer, json_field};
use crate::units::Fault;

/// A class that takes vocabulary and merges from `tokenizer.json` and makes its pre-tokenizers itself.
struct Rebuilding {
    class: &'static str,
    pre_tokenizers: &'static [&'static str],
    /// Model types whose class it is. Where another is named for them, `AutoTokenizer` follows the file.
    model_types: &'static [&'static str],
}

const REBUILDING: &[Rebuilding] = &[
    Rebuilding { class: "GPT2Tokenizer", pre_tokenizers: &["ByteLevel"], model_types: &["granite"] },
    Rebuilding { class: "GPTNeoXTokenizer", pre_tokenizers: &["ByteLevel"], model_types: &["olmo2"] },
    Rebuilding {
        class: "Qwen2Tokenizer",
        pre_tokenizers: &["Split", "ByteLevel"],
        model_types: &["qwen2", "qwen3", "qwen3_moe"],
    },
    Rebuilding { class: "CohereTokenizer", pre_tokenizers: &["Digits", "ByteLevel"], model_types: &[] },
    Rebuilding { class: "LlamaTokenizer", pre_tokenizers: &["Metaspace"], model_types: &[] },
    Rebuilding { class: "GemmaTokenizer", pre_tokenizers: &["Split"], model_types: &["gemma2", "gemma3", "gemma3_text"] },
];

/// Model types without a class of their own: that of `tokenizer_config.json` counts.
const OF_ANY_CLASS: [&str; 4] = ["llama", "gpt_oss", "seed_oss", "smollm3"];

/// What to tell of the model in `dir` whose `AutoTokenizer` gives other tokens than its `tokenizer.json`.
pub fn auto_tokenizer_differs(dir: &Path, tokenizer: &Tokenizer) -> Result<Option<String>, Fault> {
    let text =
        |file: &str, field| Ok::<_, Fault>(json_field(dir, file, field)?.and_then(|value| Some(value.as_str()?.to_owned())));
    let Some(model_type) = text("config.json", "model_type")? else { return Ok(None) };
    let named = text("tokenizer_config.json", "tokenizer_class")?.map(|class| class.replace("Fast", ""));
    let counts = |one: &Rebuilding| {
        let is_own = one.model_types.contains(&&*model_type);
        let is_named = named.as_ref().is_some_and(|class| class == one.class);
        if OF_ANY_CLASS.contains(&&*model_type) { is_named } else { is_own && (is_named || named.is_none()) }
    };
    let Some(Rebuilding { class, pre_tokenizers, .. }) = REBUILDING.iter().find(|one| counts(one)) else { return Ok(None) };
    let of_file = kinds(&tokenizer.pre_tokenizer());
    // SentencePiece's blanks are as often written as a normalizer, which comes to the same.
    let is_same = of_file == *pre_tokenizers || of_file.is_empty() && matches!(*class, "LlamaTokenizer" | "GemmaTokenizer");
    Ok((!is_same).then(|| {
        let of_file = if of_file.is_empty() { "nothing".to_owned() } else { of_file.join(" and ") };
        format!(
            "Transformers' `AutoTokenizer` makes other token ids: `tokenizer.json` splits texts by {of_file}, and the class `{class}` by {}. \
             kvtune follows `tokenizer.json`, as `PreTrainedTokenizerFast` of Transformers does",
            pre_tokenizers.join(" and ")
        )
    }))
}

/// The kinds of pre-tokenizers, one after the other.
fn kinds(pre_tokenizer: &Value) -> Vec<String> {
    match pre_tokenizer["pretokenizers"].as_array() {
        Some(parts) => parts.iter().flat_map(kinds).collect(),
        None => pre_tokenizer["type"].as_str().map(str::to_owned).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    #[test]
    fn classes_that_leave_the_files_pre_tokenizers_are_told() {
        let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2/tokenizer.json");
        let mut file: Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut told = |model_type: &str, class: Option<&str>, kinds: &[&str]| {
            let byte_level = |kind: &&str| match *kind {
                "ByteLevel" => json!({"type": kind, "add_prefix_space": false, "trim_offsets": true, "use_regex": true}),
                "Metaspace" => json!({"type": kind, "replacement": "▁", "prepend_scheme": "first", "split": false}),
                "Split" => json!({"type": kind, "pattern": {"String": " "}, "behavior": "Isolated", "invert": false}),
                _ => json!({"type": kind, "individual_digits": true}),
            };
            let parts: Vec<Value> = kinds.iter().map(byte_level).collect();
            file["pre_tokenizer"] =
                if parts.is_empty() { Value::Null } else { json!({"type": "Sequence", "pretokenizers": parts}) };
            let write = |name: &str, value: &Value| std::fs::write(dir.path().join(name), value.to_string()).unwrap();
            write("tokenizer.json", &file);
            write("config.json", &json!({ "model_type": model_type }));
            write("tokenizer_config.json", &class.map_or_else(|| json!({}), |class| json!({ "tokenizer_class": class })));
            auto_tokenizer_differs(dir.path(), &Tokenizer::load(dir.path()).unwrap()).unwrap()
        };
        let digits = ["Digits", "ByteLevel"];
        insta::assert_snapshot!(
            told("llama", Some("GPT2TokenizerFast"), &digits).unwrap(),
            @"Transformers' `AutoTokenizer` makes other token ids: `tokenizer.json` splits texts by Digits and ByteLevel, and the class `GPT2Tokenizer` by ByteLevel. kvtune follows `tokenizer.json`, as `PreTrainedTokenizerFast` of Transformers does"
        );
        assert!(told("granite", Some("GPT2Tokenizer"), &digits).is_some() && told("granite", None, &digits).is_some());
        assert!(told("llama", Some("LlamaTokenizerFast"), &digits).is_some());
        assert!(told("qwen2", Some("Qwen2Tokenizer"), &digits).is_some());
        // Transformers follows the file.
        for class in ["PreTrainedTokenizerFast", "TokenizersBackend", "CohereTokenizer"] {
            assert_eq!(told("llama", Some(class), &digits), None, "{class}");
        }
        assert_eq!((told("olmo2", Some("GPT2Tokenizer"), &digits), told("llama", None, &digits)), (None, None));
        assert_eq!(told("mistral", Some("LlamaTokenizer"), &digits), None);
        // The class makes what the file has.
        assert_eq!(told("llama", Some("GPT2Tokenizer"), &["ByteLevel"]), None);
        assert_eq!(told("qwen3", Some("Qwen2TokenizerFast"), &["Split", "ByteLevel"]), None);
        assert_eq!((told("llama", Some("LlamaTokenizer"), &[]), told("gemma2", None, &["Split"])), (None, None));
    }
}
