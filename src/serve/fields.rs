//! The fields of a request's body: each is read once, and what nobody reads is refused.

use rand::TryRng;
use rand::rngs::SysRng;
use serde_json::{Map, Value};

use super::ApiError;
use crate::generation::GenerationRules;

pub(super) struct BodyFields(Map<String, Value>);

/// Texts of a prompt, and most likely tokens, at most.
pub(super) const MAX_COUNT: usize = 64;

/// Fields that say nothing about the text, or are about things that are not here.
const HARMLESS: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "max_tool_calls",
    "verbosity",
];

/// Fields that must be left at what changes nothing: their name and that value.
const NEUTRAL: &[(&str, &[&str])] = &[
    ("logit_bias", &["{}"]),
    ("suffix", &["\"\""]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    ("functions", &["[]"]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("modalities", &["[\"text\"]"]),
    ("background", &["false"]),
    ("include", &["[]"]),
    ("reasoning", &["{}"]),
    ("truncation", &["\"disabled\""]),
    ("top_logprobs", &["0"]),
    ("skip_special_tokens", &["true"]),
    ("include_stop_str_in_output", &["false"]),
    ("use_beam_search", &["false"]),
    ("best_of", &["1"]),
    ("return_token_ids", &["true", "false"]),
    ("return_token_strs", &["false"]),
];

/// Names of the most new tokens.
pub(super) const LENGTHS: &[&str] = &["max_tokens", "max_completion_tokens", "max_new_tokens"];

/// Fields that mean the same, by all of their names.
const SAME: &[&[&str]] = &[LENGTHS, &["min_tokens", "min_new_tokens"], &["stop", "stop_strings"]];

impl BodyFields {
    pub(super) fn read(body: &[u8]) -> Result<Self, ApiError> {
        let value: Value =
            serde_json::from_slice(body).map_err(|error| ApiError::bad(format!("the body is no JSON: {error}")))?;
        match value {
            Value::Object(fields) => Ok(Self(fields)),
            _ => Err(ApiError::bad("the body must be a JSON object")),
        }
    }

    /// A field, if it is there and not null.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let text = value.as_str().map(str::to_owned);
        text.map(Some).ok_or_else(|| ApiError::field(name, format!("`{name}` must be a text")))
    }

    pub(super) fn flag(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        let Some(value) = self.take(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| ApiError::field(name, format!("`{name}` must be true or false")))
    }

    pub(super) fn count(&mut self, name: &str, bounds: std::ops::RangeInclusive<usize>) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let count = value.as_u64().map(|n| n as usize).filter(|n| bounds.contains(n));
        let message = || format!("`{name}` must be a whole number from {} to {}", bounds.start(), bounds.end());
        count.map(Some).ok_or_else(|| ApiError::field(name, message()))
    }

    /// Whether the end of a stream tells what was used.
    pub(super) fn tells_usage(&mut self) -> Result<bool, ApiError> {
        let wrong = |message: String| ApiError::field("stream_options", message);
        let Some(options) = self.take("stream_options") else { return Ok(false) };
        let mut options = options.as_object().cloned().ok_or_else(|| wrong("`stream_options` must be an object".to_owned()))?;
        // Padding of events is not made here, and nobody needs it.
        options.remove("include_obfuscation");
        let tells = options.remove("include_usage").unwrap_or(Value::Bool(false));
        match (options.keys().next(), tells.as_bool()) {
            (Some(name), _) => Err(wrong(format!("there is no field `stream_options.{name}`"))),
            (None, None) => Err(wrong("`stream_options.include_usage` must be true or false".to_owned())),
            (None, Some(tells)) => Ok(tells),
        }
    }

    /// Whether `max_tokens`, by any of its names, is 0, as who has a prompt scored says it. The engine writes one all the same.
    pub(super) fn wants_no_tokens(&mut self) -> bool {
        let is_said = |name: &&&str| self.0.get(**name).is_some_and(|most| !most.is_null());
        let said: Vec<&str> = LENGTHS.iter().filter(is_said).copied().collect();
        // Another length beside it contradicts it, as `rules` finds.
        let wants_none = !said.is_empty() && said.iter().all(|name| self.0[*name] == 0);
        if wants_none {
            self.0.extend(said.into_iter().map(|name| (name.to_owned(), 1.into())));
        }
        wants_none
    }

    /// The rules of the text, over those of the model, from all fields that are left: OpenAI's defaults are not Transformers'.
    pub(super) fn rules(mut self, model: &GenerationRules) -> Result<GenerationRules, ApiError> {
        let mut rules = GenerationRules { eos: model.eos.clone(), ..GenerationRules::default() };
        rules.sampling.suppress_tokens.clone_from(&model.sampling.suppress_tokens);
        (rules.sampling.top_k, rules.sampling.do_sample) = (0, true);
        // A text of its own for whoever names no seed.
        (rules.seed, rules.is_seed_drawn) = (SysRng.try_next_u64().unwrap_or_default(), true);
        for names in SAME {
            let mut said = names.iter().filter_map(|name| Some((name, self.0.get(*name).filter(|value| !value.is_null())?)));
            if let Some((first, value)) = said.next()
                && let Some((other, _)) = said.find(|(_, other)| !are_same(value, other))
            {
                return Err(ApiError::field(other, format!("`{first}` and `{other}` contradict each other")));
            }
        }
        // Before `stop_token_ids`, which adds to them.
        if let Some(eos) = self.take("eos_token_id") {
            set(&mut rules, "eos_token_id", &eos)?;
        }
        if self.flag("ignore_eos", false)? {
            rules.eos.clear();
        }
        if let Some(temperature) = self.take("temperature") {
            // Here 0 means the most likely token.
            match temperature.as_f64() {
                Some(..0.0) => return Err(ApiError::field("temperature", "`temperature` must be 0 or more")),
                Some(0.0) => rules.sampling.do_sample = false,
                _ => drop(set(&mut rules, "temperature", &temperature)?),
            }
        }
        // vLLM's way to name no seed.
        self.0.retain(|name, value| name != "seed" || *value != -1);
        for (name, value) in self.0 {
            // Here `temperature` says whether the likeliest token is taken.
            if !changes_nothing(&name, &value)? && (name == "do_sample" || !set(&mut rules, &name, &value)?) {
                return Err(unknown(&name));
            }
        }
        Ok(rules)
    }

    /// Refuses fields that nobody has read.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        for (name, value) in self.0 {
            if !changes_nothing(&name, &value)? {
                return Err(unknown(&name));
            }
        }
        Ok(())
    }
}

/// Whether two values say the same: numbers by their value, a text as a list of one.
fn are_same(one: &Value, other: &Value) -> bool {
    let is_list_of = |list: &Value, value: &Value| list.as_array().is_some_and(|all| matches!(&all[..], [only] if only == value));
    one == other || is_list_of(one, other) || is_list_of(other, one) || (one.is_number() && one.as_f64() == other.as_f64())
}

fn set(rules: &mut GenerationRules, name: &str, value: &Value) -> Result<bool, ApiError> {
    rules.set(name, value).map_err(|message| ApiError::field(name, message))
}

fn unknown(name: &str) -> ApiError {
    ApiError::field(name, format!("there is no field `{name}`"))
}

/// Whether a field says nothing here; refused if it would elsewhere, and not here.
fn changes_nothing(name: &str, value: &Value) -> Result<bool, ApiError> {
    let neutral = NEUTRAL.iter().find(|(neutral, _)| *neutral == name);
    match neutral {
        _ if value.is_null() || HARMLESS.contains(&name) => Ok(true),
        Some((_, values)) if values.contains(&&value.to_string()[..]) => Ok(true),
        Some((_, values)) => {
            let expected = values.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(" or ");
            Err(ApiError::field(name, format!("`{name}` is not supported but as {expected}")))
        }
        None => Ok(false),
    }
}
