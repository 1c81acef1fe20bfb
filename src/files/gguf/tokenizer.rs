//! The tokenizer of a GGUF file, as the `tokenizer.json` that a model in Hugging Face's format has in its place.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::file::GgufFile;
use crate::units::{Fault, listed, quoted};

/// How texts are split before byte-level BPE, by `tokenizer.ggml.pre` (llama.cpp, `llama-vocab.cpp`), with the published tokenizers' patterns.
struct PreTokenizer {
    names: &'static [&'static str],
    split: TextSplit,
    /// A part that is a token as a whole is not merged.
    ignores_merges: bool,
    adds_bos: bool,
}

enum TextSplit {
    /// GPT-2's, which is the byte level's own.
    Gpt2,
    /// The same, and each digit by itself.
    Digits,
    Pattern(&'static str),
}

const LLAMA3: TextSplit = TextSplit::Pattern(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const QWEN2: TextSplit = TextSplit::Pattern(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const GPT4O: TextSplit = TextSplit::Pattern(concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
));
const TEKKEN: TextSplit = TextSplit::Pattern(concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
));

const fn pre(names: &'static [&'static str], split: TextSplit) -> PreTokenizer {
    PreTokenizer { names, split, ignores_merges: false, adds_bos: false }
}

const PRE_TOKENIZERS: [PreTokenizer; 7] = [
    pre(&["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4"], TextSplit::Gpt2),
    pre(&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], TextSplit::Digits),
    PreTokenizer {
        ignores_merges: true,
        adds_bos: true,
        ..pre(&["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"], LLAMA3)
    },
    pre(&["dbrx", "smaug-bpe"], LLAMA3),
    pre(&["qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"], QWEN2),
    pre(&["gpt-4o", "llama4"], GPT4O),
    PreTokenizer { ignores_merges: true, adds_bos: true, ..pre(&["tekken"], TEKKEN) },
];

const TOKENS: &str = "tokenizer.ggml.tokens";
/// Kinds of tokens in `tokenizer.ggml.token_type`.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const MARK: &str = "▁";

/// What the file says as a `tokenizer.json` would.
pub(in crate::files) fn tokenizer_json(file: &GgufFile) -> Result<Value, Fault> {
    let model = file.required_text("tokenizer.ggml.model")?;
    let tokens = file.texts(TOKENS)?;
    let added = added_tokens(file, tokens)?;
    let mut json = match model {
        "gpt2" => byte_level(file, tokens)?,
        "llama" => sentence_piece(file, tokens)?,
        other => {
            let reason = format!("`tokenizer.ggml.model` is `{}`, expected `gpt2` or `llama`", quoted(other));
            return Err(file.wrong(&reason).with_hint(BESIDE));
        }
    };
    json["version"] = "1.0".into();
    json["added_tokens"] = added.into();
    Ok(json)
}

const BESIDE: &str = "put the model's `tokenizer.json` beside the file: it is used then";

/// Tokens that are found in a text before anything else.
fn added_tokens(file: &GgufFile, tokens: &[String]) -> Result<Vec<Value>, Fault> {
    const TYPES: &str = "tokenizer.ggml.token_type";
    let types = file.integers(TYPES).unwrap_or_default();
    if !types.is_empty() && types.len() != tokens.len() {
        return Err(file.wrong(&format!("`{TYPES}` has {} entries, `{TOKENS}` has {}", types.len(), tokens.len())));
    }
    let added = types.iter().zip(tokens).enumerate().filter(|(_, (kind, _))| matches!(**kind, CONTROL | USER_DEFINED));
    Ok(added
        .map(|(id, (kind, token))| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": *kind == CONTROL})
        })
        .collect())
}

fn vocabulary(file: &GgufFile, tokens: &[String]) -> Result<Map<String, Value>, Fault> {
    let vocabulary: Map<String, Value> = tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    if vocabulary.len() == tokens.len() {
        return Ok(vocabulary);
    }
    let twice = tokens.iter().enumerate().find(|(id, token)| vocabulary[*token] != *id).map(|(_, token)| quoted(token));
    Err(file.wrong(&format!("`{TOKENS}` has `{}` twice", twice.unwrap_or_default())))
}

fn byte_level(file: &GgufFile, tokens: &[String]) -> Result<Value, Fault> {
    const MERGES: &str = "tokenizer.ggml.merges";
    let name = file.text("tokenizer.ggml.pre")?.unwrap_or("default");
    let Some(pre) = PRE_TOKENIZERS.iter().find(|pre| pre.names.contains(&name)) else {
        let known: Vec<&str> = PRE_TOKENIZERS.iter().flat_map(|pre| pre.names.iter().copied()).collect();
        let reason = format!("`tokenizer.ggml.pre` is `{}`, expected one of {}", quoted(name), listed(&known));
        return Err(file.wrong(&reason).with_hint(BESIDE));
    };
    let vocabulary = vocabulary(file, tokens)?;
    let merges = file.texts(MERGES)?;
    for merge in merges {
        // A token may begin with a blank only as its mark of two bytes.
        let is_sound = merge.split_once(' ').is_some_and(|(left, right)| {
            [left, right].iter().all(|part| vocabulary.contains_key(*part)) && vocabulary.contains_key(&format!("{left}{right}"))
        });
        if !is_sound {
            return Err(file.wrong(&format!("`{MERGES}` has `{}`, which joins no two tokens to a third", quoted(merge))));
        }
    }
    let bytes =
        |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let sequence = |parts: Value| json!({"type": "Sequence", "pretokenizers": parts});
    let pre_tokenizer = match pre.split {
        TextSplit::Gpt2 => bytes(true),
        TextSplit::Digits => sequence(json!([{"type": "Digits", "individual_digits": true}, bytes(true)])),
        TextSplit::Pattern(pattern) => {
            let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
            sequence(json!([split, bytes(false)]))
        }
    };
    // As the published tokenizers of these models have it.
    let composes = matches!(name, "qwen2" | "deepseek-r1-qwen");
    Ok(json!({
        "normalizer": if composes { json!({"type": "NFC"}) } else { Value::Null },
        "pre_tokenizer": pre_tokenizer,
        "post_processor": around(file, tokens, pre.adds_bos)?.unwrap_or_else(|| bytes(false)),
        "decoder": bytes(true),
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": pre.ignores_merges},
    }))
}

fn sentence_piece(file: &GgufFile, tokens: &[String]) -> Result<Value, Fault> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = file.list_of_floats(SCORES).unwrap_or_default();
    if scores.len() != tokens.len() {
        return Err(file.wrong(&format!("`{SCORES}` has {} numbers, `{TOKENS}` has {}", scores.len(), tokens.len())));
    }
    let unknown = file.count("tokenizer.ggml.unknown_token_id")?.and_then(|id| tokens.get(id));
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": MARK});
    let prefixes = file.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let prepend = json!({"type": "Prepend", "prepend": MARK});
    let normalizers = if prefixes { json!([prepend, replace]) } else { json!([replace]) };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": MARK}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    decoders.extend(prefixes.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})));
    Ok(json!({
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": around(file, tokens, true)?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "vocab": vocabulary(file, tokens)?, "merges": merges_of(tokens, scores), "unk_token": unknown,
            "byte_fallback": true, "fuse_unk": true},
    }))
}

/// The merges that `SentencePiece`'s scores stand for: the pair that makes the piece with the highest score comes first.
fn merges_of(tokens: &[String], scores: &[f32]) -> Vec<Value> {
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
    let mut merges: Vec<(f32, usize, usize, usize)> = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        merges.extend(cuts.filter_map(|(left, right)| Some((scores[id], id, *ids.get(left)?, *ids.get(right)?))));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    merges.into_iter().map(|(_, _, left, right)| json!([tokens[left], tokens[right]])).collect()
}

/// What puts BOS before a text and EOS behind it; `None` where neither is put.
fn around(file: &GgufFile, tokens: &[String], bos_by_default: bool) -> Result<Option<Value>, Fault> {
    let token = |name: &str, by_default: bool| {
        let adds = file.flag(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(by_default);
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = file.count(&key)?.filter(|_| adds) else { return Ok(None) };
        let outside = || file.wrong(&format!("`{key}` is {id}, `{TOKENS}` has {}", tokens.len()));
        Ok::<_, Fault>(Some((id, tokens.get(id).ok_or_else(outside)?)))
    };
    let (bos, eos) = (token("bos", bos_by_default)?, token("eos", false)?);
    if bos.is_none() && eos.is_none() {
        return Ok(None);
    }
    let special = |found: Option<(usize, &String)>| found.map(|(_, token)| json!({"SpecialToken": {"id": token, "type_id": 0}}));
    let part = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
    let around = |parts: Vec<Value>| special(bos).into_iter().chain(parts).chain(special(eos)).collect::<Vec<_>>();
    let named = bos.into_iter().chain(eos);
    let named: Map<String, Value> =
        named.map(|(id, token)| (token.clone(), json!({"id": token, "ids": [id], "tokens": [token]}))).collect();
    Ok(Some(json!({"type": "TemplateProcessing", "single": around(vec![part("A")]), "pair": around(vec![part("A"), part("B")]),
        "special_tokens": named})))
}

/// What the file says as a `tokenizer_config.json` would: special tokens and chat templates.
pub(in crate::files) fn tokenizer_config(file: &GgufFile) -> Result<Value, Fault> {
    let tokens = file.texts(TOKENS)?;
    let mut config = json!({});
    for (name, stored) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
        if let Some(token) = file.count(&format!("tokenizer.ggml.{stored}_token_id"))?.and_then(|id| tokens.get(id)) {
            config[format!("{name}_token")] = token.clone().into();
        }
    }
    let default = file.text("tokenizer.chat_template")?;
    let names = file.texts("tokenizer.chat_templates").unwrap_or_default();
    let named = names.iter().filter_map(|name| {
        let text = file.text(&format!("tokenizer.chat_template.{name}")).ok()??;
        Some(json!({"name": name, "template": text}))
    });
    let all: Vec<Value> = default.map(|text| json!({"name": "default", "template": text})).into_iter().chain(named).collect();
    match (default, &all[..]) {
        (_, []) => {}
        (Some(text), [_]) => config["chat_template"] = text.into(),
        _ => config["chat_template"] = all.into(),
    }
    Ok(config)
}
