//! A model's own tokenizer: text to token ids, and which id ends a sequence.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value};

use super::faults;
use super::guard::{WorkLimits, guarded};
use super::tokenizer_size::check_size;
use crate::files::{FileKind, has_of_model, object_of_model, read_bytes, read_of_model};
use crate::units::{Fault, abridged};

/// Which part of a text, in bytes, each of its tokens stands for.
pub(super) type Offsets = Vec<(usize, usize)>;

/// The `tokenizer.json` of a model directory, or what a GGUF file has in its place. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    encoder: Arc<tokenizers::Tokenizer>,
    without_post_processor: Arc<OnceLock<tokenizers::Tokenizer>>,
    limits: WorkLimits,
    path: PathBuf,
    hash: String,
    /// What ends a sequence: the first is written, the others may be said.
    pub(super) ends: Vec<u32>,
    /// The one token that the post-processor puts before a text.
    bos: Option<u32>,
    /// Special tokens which the post-processor puts behind a text (some tokenizers end every text with EOS).
    num_appended: usize,
}

impl Tokenizer {
    /// Loads `tokenizer.json` from a model directory, and the EOS id from the files beside it; or both from a GGUF file.
    ///
    /// The first of these that names one counts: `generation_config.json`, `config.json` (ids), `tokenizer_config.json` (a token).
    pub fn load(dir: &Path) -> Result<Self, Fault> {
        let path = dir.join("tokenizer.json");
        let bytes = match read_of_model(dir, "tokenizer.json", FileKind::Tokenizer)? {
            Some(bytes) => bytes,
            None => read_bytes(&path, FileKind::Tokenizer)?,
        };
        let fail = |message: String| faults::bad_tokenizer(&path, &message);
        check_size(&bytes).map_err(fail)?;
        let limits = WorkLimits::of("tokenizer", &path, 32, 0.3);
        let mut encoder = limits.guarded(bytes.len(), || tokenizers::Tokenizer::from_bytes(&bytes)).map_err(fail)?;
        // One that leaves merges out by chance gives other tokens each time.
        if let tokenizers::ModelWrapper::BPE(model) = encoder.get_model()
            && let Some(dropout) = model.dropout.filter(|dropout| *dropout != 0.0)
        {
            let message = format!("`model.dropout` is {dropout}, expected none: the same text must give the same tokens");
            return Err(fail(message));
        }
        // What a file carries over from its last use would shorten or pad samples without a word.
        guarded(|| encoder.with_truncation(None).map(|_| ())).map_err(fail)?;
        encoder.with_padding(None);
        let ends = end_ids(dir, &encoder)?;
        let (bos, num_appended) = limits.guarded(0, || added_around(&encoder)).map_err(fail)?;
        Ok(Self {
            encoder: Arc::new(encoder),
            without_post_processor: Arc::default(),
            limits: WorkLimits::of("tokenizer", &path, 1024, 20.0),
            hash: blake3::hash(&bytes).to_hex().to_string(),
            path,
            ends,
            bos,
            num_appended,
        })
    }

    /// Like [`Tokenizer::load`], but `None` where the directory has no `tokenizer.json`: pre-tokenised data needs none.
    pub fn load_if_present(dir: &Path) -> Result<Option<Self>, Fault> {
        if has_of_model(dir, "tokenizer.json") { Self::load(dir).map(Some) } else { Ok(None) }
    }

    /// The ids of `text` alone, without any special token around it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Fault> {
        self.run(text, false)
    }

    /// The ids of `text` at the beginning of a sequence: with BOS where the tokenizer's post-processor puts one, without
    /// what it puts behind a text. A text that brings its BOS has no second one.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, Fault> {
        let mut ids = self.run(text, true)?;
        ids.truncate(ids.len().saturating_sub(self.num_appended));
        if self.bos.is_some_and(|bos| ids.starts_with(&[bos, bos])) {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// Cuts a prompt like `LongBench`: the first and the last of its tokens, as text again; which it does before the chat template.
    pub(super) fn cut_as_upstream(&self, prompt: String, most: usize) -> Result<String, Fault> {
        let ids = self.run(&prompt, true)?;
        if ids.len() <= most {
            return Ok(prompt);
        }
        let front = most / 2;
        self.decode(&[&ids[..front], &ids[ids.len() - (most - front)..]].concat())
    }

    /// The ids of `text` alone and which part of it each stands for, in bytes; of a character that is split over tokens each has all.
    pub(super) fn encode_with_offsets(&self, text: &str) -> Result<(Vec<u32>, Offsets), Fault> {
        // Some post-processors take spaces away from the tokens' ends.
        let plain = self.without_post_processor.get_or_init(|| {
            let mut plain = tokenizers::Tokenizer::clone(&self.encoder);
            plain.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
            plain
        });
        let encoding = self.limits.guarded(text.len(), || plain.encode(text, false)).map_err(|message| self.error(&message))?;
        Ok((encoding.get_ids().to_vec(), encoding.get_offsets().to_vec()))
    }

    pub fn decode(&self, ids: &[u32]) -> Result<String, Fault> {
        self.bounded(ids, true)
    }

    /// The text of one token, special or not, as it stands behind others; a part of a character becomes a replacement character.
    pub fn token_text(&self, id: u32) -> Result<String, Fault> {
        let alone = self.bounded(&[id], false)?;
        // Some decoders take a space away where a text begins, so that two tokens would look the same.
        let twice = self.bounded(&[id, id], false)?;
        Ok(twice.strip_prefix(&alone).filter(|behind| behind.ends_with(&alone)).map(str::to_owned).unwrap_or(alone))
    }

    /// The bytes of one token, special or not, which may be a part of a character.
    pub fn token_bytes(&self, id: u32) -> Result<Vec<u8>, Fault> {
        let text = self.token_text(id)?;
        let entry = self.encoder.id_to_token(id).filter(|_| text.contains(char::REPLACEMENT_CHARACTER));
        // A wrong guess of how the entry stands for bytes has another text.
        let bytes = entry.and_then(|entry| bytes_of(&entry)).filter(|bytes| String::from_utf8_lossy(bytes) == text);
        Ok(bytes.unwrap_or_else(|| text.into_bytes()))
    }

    /// The text of `ids` with the special tokens in it; parts of characters become replacement characters.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String, Fault> {
        self.bounded(ids, false)
    }

    /// Whether a token was added to the vocabulary whole, as special tokens are.
    pub(super) fn is_added(&self, id: u32) -> bool {
        self.encoder.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id)
    }

    pub(super) fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    pub fn eos(&self) -> Result<u32, Fault> {
        self.ends.first().copied().ok_or_else(|| {
            let (files, dir) = ("generation_config.json or config.json", abridged(self.dir().display()));
            let message = format!("no `eos_token_id` in {files} and no known `eos_token` in tokenizer_config.json of `{dir}`");
            Fault::data(message, "add `\"eos_token_id\": N` to the model's generation_config.json")
        })
    }

    /// Bytes of the longest entry of the vocabulary. An entry is written with at least as many bytes as it stands for.
    pub fn longest_entry(&self) -> usize {
        self.encoder.get_vocab(true).keys().map(String::len).max().unwrap_or_default()
    }

    /// How a text is split before its tokens are found, as `tokenizer.json` says it.
    pub(super) fn pre_tokenizer(&self) -> Value {
        serde_json::to_value(self.encoder.get_pre_tokenizer()).unwrap_or_default()
    }

    pub fn hash(&self) -> &str {
        &self.hash
    }

    fn run(&self, text: &str, with_special_tokens: bool) -> Result<Vec<u32>, Fault> {
        let encode = || self.encoder.encode_fast(text, with_special_tokens);
        let encoding = self.limits.guarded(text.len(), encode);
        Ok(encoding.map_err(|message| self.error(&message))?.get_ids().to_vec())
    }

    fn bounded(&self, ids: &[u32], skips_special_tokens: bool) -> Result<String, Fault> {
        // A token may stand for many bytes.
        let text = self.limits.guarded(64 * ids.len(), || self.encoder.decode(ids, skips_special_tokens));
        text.map_err(|message| self.error(&message))
    }

    pub(super) fn error(&self, message: &str) -> Fault {
        faults::bad_tokenizer(&self.path, message)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).field("ends", &self.ends).finish_non_exhaustive()
    }
}

/// The bytes that an entry of a vocabulary stands for: one as `<0xE2>`, or each as a character of GPT-2's alphabet, where those that can't be
/// printed follow each other from 256 on.
fn bytes_of(entry: &str) -> Option<Vec<u8>> {
    if let Some(digits) = entry.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')) {
        return u8::from_str_radix(digits, 16).ok().map(|byte| vec![byte]);
    }
    let byte = |c: char| match u32::from(c) {
        c @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(c as u8),
        c @ 0x100..=0x120 => Some((c - 0x100) as u8),
        c @ 0x121..=0x142 => Some((c - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    };
    entry.chars().map(byte).collect()
}

/// Compares a text with and without special tokens: `[bos] + text + [eos]` against `text` has one before it and leaves one behind it.
fn added_around(encoder: &tokenizers::Tokenizer) -> tokenizers::Result<(Option<u32>, usize)> {
    let plain = encoder.encode_fast("a", false)?;
    let full = encoder.encode_fast("a", true)?;
    let (plain, full) = (plain.get_ids(), full.get_ids());
    let start = if plain.is_empty() { None } else { full.windows(plain.len()).position(|window| window == plain) };
    let bos = start.filter(|&start| start == 1).map(|_| full[0]);
    Ok((bos, start.map_or(0, |start| full.len() - start - plain.len())))
}

fn end_ids(dir: &Path, encoder: &tokenizers::Tokenizer) -> Result<Vec<u32>, Fault> {
    for name in ["generation_config.json", "config.json"] {
        let ids = match json_field(dir, name, "eos_token_id")? {
            Some(Value::Array(ids)) => ids,
            other => other.into_iter().collect(),
        };
        let id = |value: &Value| value.as_u64().map(|id| u32::try_from(id).unwrap_or(u32::MAX));
        let ids: Vec<u32> = ids.iter().filter_map(id).collect();
        if !ids.is_empty() {
            return Ok(ids);
        }
    }
    let config = tokenizer_config(dir)?;
    let token = config.get("eos_token");
    // Either the token itself or an object that describes it.
    let text = token.and_then(|token| token.as_str().or_else(|| token.get("content").and_then(Value::as_str)));
    Ok(text.and_then(|text| encoder.token_to_id(text)).into_iter().collect())
}

pub(super) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// `tokenizer_config.json`, or what a GGUF file has in its place; nothing where there is none. Over one that does not list the added tokens
/// goes `special_tokens_map.json`, which older versions of Transformers wrote.
pub(super) fn tokenizer_config(dir: &Path) -> Result<Map<String, Value>, Fault> {
    let mut config = object_of_model(dir, TOKENIZER_CONFIG)?.unwrap_or_default();
    if !config.contains_key("added_tokens_decoder") {
        config.extend(object_of_model(dir, "special_tokens_map.json")?.into_iter().flatten());
    }
    Ok(config)
}

/// A top-level field of a JSON file of a model; `None` where the file or the field is missing.
pub(super) fn json_field(dir: &Path, name: &str, field: &str) -> Result<Option<Value>, Fault> {
    Ok(object_of_model(dir, name)?.and_then(|mut object| object.remove(field)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2")
    }

    /// The golden tokenizer with another post-processor, and these further files.
    fn dir_with(processor: &Value, files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let mut json: Value = serde_json::from_slice(&std::fs::read(golden().join("tokenizer.json")).unwrap()).unwrap();
        json["post_processor"] = processor.clone();
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        dir
    }

    #[test]
    fn a_token_has_its_space_where_the_decoder_takes_the_first_away() {
        let dir = tempfile::tempdir().unwrap();
        let mut json: Value = serde_json::from_slice(&std::fs::read(golden().join("tokenizer.json")).unwrap()).unwrap();
        let space = serde_json::json!({"type": "Replace", "pattern": {"String": "Ġ"}, "content": " "});
        let strip = serde_json::json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        json["decoder"] = serde_json::json!({"type": "Sequence", "decoders": [space, {"type": "Fuse"}, strip]});
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let ids = tokenizer.encode("a a aa").unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), "a a aa");
        assert_eq!(ids.iter().map(|&id| tokenizer.token_text(id).unwrap()).collect::<String>(), "a a aa");
    }

    #[test]
    fn parts_of_a_character_have_their_bytes() {
        let tokenizer = Tokenizer::load(&golden()).unwrap();
        let text = "€ é \u{ad}\u{a0}😀 <|endoftext|>\u{fffd}";
        let bytes = tokenizer.encode(text).unwrap().into_iter().map(|id| tokenizer.token_bytes(id).unwrap());
        assert_eq!(bytes.flatten().collect::<Vec<_>>(), text.as_bytes());
        assert_eq!(bytes_of("<0xE2>"), Some(vec![0xe2]));
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let mut all: Vec<u8> = alphabet.iter().map(|c| bytes_of(&c.to_string()).unwrap()[0]).collect();
        all.sort_unstable();
        assert_eq!(all, (0..=255).collect::<Vec<u8>>());
    }

    /// Byte-level BPE and `SentencePiece`, as llama.cpp turns texts into ids.
    #[test]
    fn ids_are_those_of_llama_cpp() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
        let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("gguf-tokens.json")).unwrap()).unwrap();
        let texts = cases["texts"].as_array().unwrap();
        for kind in ["bpe", "spm"] {
            let tokenizer = Tokenizer::load(&folder.join(cases[kind]["file"].as_str().unwrap())).unwrap();
            for (text, ids) in texts.iter().zip(cases[kind]["ids"].as_array().unwrap()) {
                let found = tokenizer.encode_prompt(text.as_str().unwrap()).unwrap();
                assert_eq!(Value::from(found), *ids, "{kind}: {text}");
            }
        }
    }

    #[test]
    fn encodes_and_decodes() {
        let tokenizer = Tokenizer::load(&golden()).unwrap();
        let text = "the policy of a cache\n\n  é";
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(tokenizer.encode_prompt(text).unwrap(), ids);
        assert_eq!(tokenizer.eos().unwrap(), 0);
        assert_eq!(tokenizer.hash().len(), 64);
    }

    #[test]
    fn knows_where_tokens_begin_even_if_the_post_processor_takes_their_spaces_away() {
        let trimming =
            serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let dir = dir_with(&trimming, &[]);
        let text = "the cache  of\n\n 日本 é";
        for tokenizer in [Tokenizer::load(&golden()).unwrap(), Tokenizer::load(dir.path()).unwrap()] {
            let (ids, offsets) = tokenizer.encode_with_offsets(text).unwrap();
            let starts: Vec<usize> = offsets.iter().map(|&(start, _)| start).collect();
            assert_eq!(ids, tokenizer.encode(text).unwrap());
            assert!(ids.len() == starts.len() && starts.is_sorted() && starts[0] == 0);
            for (count, &start) in starts.iter().enumerate().filter(|(_, start)| !text[**start..].starts_with(['日', '本', 'é']))
            {
                assert_eq!(tokenizer.decode(&ids[..count]).unwrap(), text[..start]);
            }
        }
    }

    #[test]
    fn keeps_the_post_processors_bos_but_not_its_eos() {
        let special = |token: &str, id: u32| serde_json::json!({"id": token, "ids": [id], "tokens": [token]});
        let template = serde_json::json!({
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|im_start|>": special("<|im_start|>", 1), "<|endoftext|>": special("<|endoftext|>", 0)}
        });
        let dir = dir_with(&template, &[("config.json", r#"{"eos_token_id": 0}"#)]);
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let plain = tokenizer.encode("some text").unwrap();
        let prompt = tokenizer.encode_prompt("some text").unwrap();
        assert_eq!(prompt, [vec![1], plain].concat());
        assert_eq!(tokenizer.encode_prompt("").unwrap(), [1]);
        assert_eq!(tokenizer.encode_prompt("<|im_start|>some text").unwrap(), prompt, "the text brings its own");
    }

    #[test]
    fn eos_comes_from_the_first_file_that_names_it() {
        let generation = ("generation_config.json", r#"{"eos_token_id": [2, 0]}"#);
        let config = ("config.json", r#"{"eos_token_id": 3}"#);
        let object = ("tokenizer_config.json", r#"{"eos_token": {"content": "<|im_end|>", "special": true}}"#);
        let eos = |files: &[(&str, &str)]| Tokenizer::load(dir_with(&Value::Null, files).path()).unwrap().eos();
        assert_eq!(eos(&[generation, config, object]).unwrap(), 2);
        assert_eq!(eos(&[("generation_config.json", "{}"), config, object]).unwrap(), 3);
        assert_eq!(eos(&[("config.json", r#"{"eos_token_id": null}"#), object]).unwrap(), 2);
        assert_eq!(eos(&[("tokenizer_config.json", r#"{"eos_token": "<|endoftext|>"}"#)]).unwrap(), 0);
        let error = eos(&[]).unwrap_err();
        assert!(error.to_string().contains("no `eos_token_id`"), "{error}");
        assert!(error.hint().unwrap().contains("eos_token_id"));
    }

    #[test]
    fn a_file_that_makes_the_crate_panic_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let crafted = r###"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
            "pre_tokenizer":null,"post_processor":null,"decoder":null,"model":{"type":"BPE","dropout":null,"unk_token":null,
            "continuing_subword_prefix":"##","end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,
            "vocab":{"a":0,"b":1},"merges":["a b"]}}"###;
        std::fs::write(dir.path().join("tokenizer.json"), crafted).unwrap();
        let error = Tokenizer::load(dir.path()).unwrap_err();
        assert!(error.to_string().contains("tokenizer.json`: its reader broke down"), "{error}");
        assert!(error.hint().is_some());
        std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        assert!(Tokenizer::load(dir.path()).unwrap_err().to_string().starts_with("tokenizer `"));
        std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
        assert!(Tokenizer::load(dir.path()).unwrap_err().io().is_some());
        assert!(Tokenizer::load_if_present(dir.path()).unwrap().is_none());
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let mut json: Value = serde_json::from_slice(&std::fs::read(golden().join("tokenizer.json")).unwrap()).unwrap();
        json["truncation"] = serde_json::json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = serde_json::json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 3, "pad_type_id": 0, "pad_token": "<|pad|>"});
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let text = "a text of more than three tokens";
        let expected = Tokenizer::load(&golden()).unwrap().encode(text).unwrap();
        assert_eq!(Tokenizer::load(dir.path()).unwrap().encode(text).unwrap(), expected);
    }
}
