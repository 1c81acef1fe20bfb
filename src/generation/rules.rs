//! How texts are generated: what `generation_config.json` says, and who asks.

use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::SamplingRules;
use crate::files::object_of_model;
use crate::units::{Fault, abridged};

/// New tokens where nobody says how many.
const MAX_NEW_TOKENS: usize = 256;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GenerationRules {
    pub sampling: SamplingRules,
    /// New tokens at most; `None` where nobody says.
    pub max_new_tokens: Option<usize>,
    /// New tokens where nobody says how many, in place of 256.
    #[serde(skip)]
    pub usual_new_tokens: Option<usize>,
    /// Tokens at most, with the prompt's; counts where nobody says how many new ones.
    pub max_length: Option<usize>,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// A text ends before the first of these.
    pub stop: Vec<String>,
    pub seed: u64,
    /// Whether nobody has named the seed, so that each prompt of a request gets another one.
    #[serde(skip)]
    pub is_seed_drawn: bool,
}

const GENERATION: &str = "generation_config.json";
const CONFIG: &str = "config.json";

/// Keys of `generation_config.json` that say nothing about the text.
const HARMLESS: &[&str] = &[
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "transformers_version",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "renormalize_logits",
    "num_return_sequences",
    "remove_invalid_values",
    "early_stopping",
    "length_penalty",
    "disable_compile",
    "low_memory",
    "prefill_chunk_size",
    "chat_format",
    "max_window_size",
    "trust_remote_code",
];

/// Keys that would change the text in ways that are not built, and the values with which they do not.
const NEUTRAL: &[(&str, &[f64])] = &[
    ("num_beams", &[1.0]),
    ("num_beam_groups", &[1.0]),
    ("guidance_scale", &[1.0]),
    ("penalty_alpha", &[0.0]),
    ("diversity_penalty", &[0.0]),
    ("encoder_repetition_penalty", &[1.0]),
    ("encoder_no_repeat_ngram_size", &[0.0]),
    ("min_length", &[0.0]),
    ("bad_words_ids", &[]),
    ("force_words_ids", &[]),
    ("constraints", &[]),
    ("forced_bos_token_id", &[]),
    ("forced_eos_token_id", &[]),
    ("begin_suppress_tokens", &[]),
    ("sequence_bias", &[]),
    ("exponential_decay_length_penalty", &[]),
    ("watermarking_config", &[]),
    ("dola_layers", &[]),
    ("top_h", &[]),
    ("max_time", &[]),
    ("token_healing", &[]),
];

impl GenerationRules {
    /// The rules of the model in `dir`: of its `generation_config.json`, and the end tokens of its `config.json` where that names none.
    /// Besides, the names of keys that nobody knows.
    pub fn of_model(dir: &Path) -> Result<(Self, Vec<String>), Fault> {
        let (mut rules, mut unknown) = (Self::default(), Vec::new());
        let mut said = object_of_model(dir, GENERATION)?.unwrap_or_default();
        // Where no token is drawn, this is how some write it.
        if said.get("do_sample") != Some(&Value::Bool(true)) && said.get("temperature").is_some_and(|t| t.as_f64() == Some(0.0)) {
            said.remove("temperature");
        }
        for (key, value) in &said {
            let is_private = key.starts_with('_') || HARMLESS.contains(&key.as_str());
            if !is_private && !value.is_null() && !rules.set(key, value).map_err(|what| wrong_in(&dir.join(GENERATION), &what))? {
                unknown.push(key.clone());
            }
        }
        if rules.eos.is_empty() {
            let value = object_of_model(dir, CONFIG)?.and_then(|mut all| all.remove("eos_token_id"));
            if let Some(value) = value.filter(|value| !value.is_null()) {
                rules.set("eos_token_id", &value).map_err(|what| wrong_in(&dir.join(CONFIG), &what))?;
            }
        }
        Ok((rules, unknown))
    }

    /// Sets a rule by the name that Transformers has for it; false where there is none of this name. The error says what is wrong with the
    /// value.
    pub fn set(&mut self, key: &str, value: &Value) -> Result<bool, String> {
        let fault = |expected| refusal(key, value, expected);
        let number = |fine: fn(f64) -> bool, expected| value.as_f64().filter(|&x| fine(x)).ok_or_else(|| fault(expected));
        let count = || value.as_u64().map(|n| n as usize).ok_or_else(|| fault("a whole number of at least 0"));
        let at_least_one = || count().ok().filter(|&n| n > 0).ok_or_else(|| fault("a whole number of at least 1"));
        let share = || number(|p| (0.0..=1.0).contains(&p), "a number from 0 to 1");
        let penalty = || number(|p| (-2.0..=2.0).contains(&p), "a number from -2 to 2");
        let rules = &mut self.sampling;
        match key {
            "do_sample" => rules.do_sample = value.as_bool().ok_or_else(|| fault("`true` or `false`"))?,
            "temperature" => {
                rules.temperature = number(|t| t > 0.0, "a number above 0; without `do_sample` the most likely token is taken")?;
            }
            // Other programs write −1 for all.
            "top_k" => rules.top_k = if value.as_i64() == Some(-1) { 0 } else { count()? },
            "top_p" => rules.top_p = share()?,
            "min_p" => rules.min_p = share()?,
            "typical_p" => rules.typical_p = number(|p| p > 0.0 && p <= 1.0, "a number above 0, at most 1")?,
            "epsilon_cutoff" => rules.epsilon_cutoff = number(|p| (0.0..1.0).contains(&p), "a number of at least 0, below 1")?,
            "eta_cutoff" => rules.eta_cutoff = number(|p| (0.0..1.0).contains(&p), "a number of at least 0, below 1")?,
            "repetition_penalty" => {
                rules.repetition_penalty = number(|p| p as f32 > 0.0 && (p as f32).is_finite(), "a number above 0")?;
            }
            "presence_penalty" => rules.presence_penalty = penalty()?,
            "frequency_penalty" => rules.frequency_penalty = penalty()?,
            "no_repeat_ngram_size" => rules.no_repeat_ngram_size = count()?,
            "min_new_tokens" | "min_tokens" => rules.min_new_tokens = count()?,
            "suppress_tokens" => rules.suppress_tokens = tokens(value).ok_or_else(|| fault("a list of token ids"))?,
            "max_new_tokens" | "max_tokens" | "max_completion_tokens" => self.max_new_tokens = Some(at_least_one()?),
            "max_length" => self.max_length = Some(at_least_one()?),
            "eos_token_id" => self.eos = tokens(value).ok_or_else(|| fault("a token id, or a list of them"))?,
            "stop_token_ids" => self.eos.extend(tokens(value).ok_or_else(|| fault("a list of token ids"))?),
            "stop" | "stop_strings" => {
                self.stop = texts(value).ok_or_else(|| fault("a text that is not empty, or a list of them"))?;
            }
            // OpenAI's seeds may be negative.
            "seed" => {
                let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
                (self.seed, self.is_seed_drawn) = (seed.ok_or_else(|| fault("a whole number"))?, false);
            }
            _ => return refuse_others(key, value),
        }
        Ok(true)
    }

    /// New tokens at most, behind a prompt of so many.
    pub fn new_tokens(&self, num_prompt: usize) -> usize {
        let within_length = || self.max_length.map(|length| length.saturating_sub(num_prompt));
        self.max_new_tokens.or_else(within_length).or(self.usual_new_tokens).unwrap_or(MAX_NEW_TOKENS)
    }
}

/// Refuses what would change the text, and is not built.
fn refuse_others(key: &str, value: &Value) -> Result<bool, String> {
    let Some((_, neutral)) = NEUTRAL.iter().find(|(name, _)| *name == key) else { return Ok(false) };
    let is_neutral = value == false && neutral.is_empty()
        || value.as_f64().is_some_and(|x| neutral.iter().any(|n| (x - n).abs() < f64::EPSILON));
    if is_neutral { Ok(true) } else { Err(refusal(key, value, "nothing, as this is not supported")) }
}

/// What is said of a rule that cannot be followed.
fn refusal(key: &str, value: &Value, expected: &str) -> String {
    format!("`{key}` is {value}, expected {expected}")
}

fn wrong_in(path: &Path, what: &str) -> Fault {
    let message = format!("`{}`: {}", abridged(path.display()), abridged(what));
    Fault::data(message, "correct the file, or ask for `--greedy` with a copy of the model without it")
}

fn tokens(value: &Value) -> Option<Vec<u32>> {
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    value.as_array().map_or_else(|| one(value).map(|id| vec![id]), |all| all.iter().map(one).collect())
}

/// One text or several, none of them empty.
fn texts(value: &Value) -> Option<Vec<String>> {
    let one = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    value.as_array().map_or_else(|| one(value).map(|text| vec![text]), |all| all.iter().map(one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_no_token_is_drawn_the_temperature_may_be_0() {
        let dir = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
            GenerationRules::of_model(dir.path()).map(|(rules, _)| rules.sampling.temperature)
        };
        let plain = GenerationRules::default().sampling.temperature;
        for text in [r#"{"do_sample": false, "temperature": 0.0}"#, r#"{"temperature": 0}"#] {
            assert_eq!(read(text).unwrap().to_bits(), plain.to_bits(), "{text}");
        }
        assert!(read(r#"{"do_sample": true, "temperature": 0.0}"#).unwrap_err().to_string().contains("`temperature` is 0.0"));
    }
}
