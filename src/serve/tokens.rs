//! Prompts become tokens, and tokens become what replies show of them.

use serde_json::{Map, Value, json};

use super::ApiError;
use super::fields::BodyFields;
use crate::data::{ChatTemplate, Message, Tokenizer};
use crate::generation::TokenLikelihood;

/// What reads and writes text, where the model has it.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    pub(super) tokenizer: Option<Tokenizer>,
    pub(super) template: Option<ChatTemplate>,
    /// By their names, as `bos_token`.
    pub(super) special_tokens: Vec<(String, String)>,
}

impl Reader {
    fn tokenizer(&self) -> Result<&Tokenizer, ApiError> {
        self.tokenizer.as_ref().ok_or_else(|| ApiError::bad("this model has no tokenizer: send token ids"))
    }

    /// The prompts of `prompt`: a text, texts, ids or lists of ids.
    pub(super) fn prompts(&self, value: &Value, adds_special: bool) -> Result<Vec<Vec<u32>>, ApiError> {
        let wrong =
            || ApiError::field("prompt", "`prompt` must be a text, a list of texts, a list of token ids or a list of such lists");
        match value {
            Value::String(text) => Ok(vec![self.encode(text, adds_special)?]),
            Value::Array(all) if all.is_empty() => Err(wrong()),
            Value::Array(all) if all.iter().all(Value::is_string) => {
                all.iter().filter_map(Value::as_str).map(|text| self.encode(text, adds_special)).collect()
            }
            Value::Array(all) if all.iter().all(Value::is_array) => all.iter().map(|ids| ids_of(ids).ok_or_else(wrong)).collect(),
            _ => Ok(vec![ids_of(value).ok_or_else(wrong)?]),
        }
    }

    pub(super) fn encode(&self, text: &str, adds_special: bool) -> Result<Vec<u32>, ApiError> {
        let tokenizer = self.tokenizer()?;
        let ids = if adds_special { tokenizer.encode_prompt(text) } else { tokenizer.encode(text) };
        ids.map_err(|error| ApiError::bad(error.to_string()))
    }

    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, ApiError> {
        self.tokenizer()?.decode(ids).map_err(|error| ApiError::bad(error.to_string()))
    }

    /// The tokens of a conversation by the chat template.
    pub(super) fn conversation(&self, fields: &mut BodyFields) -> Result<Vec<u32>, ApiError> {
        let template = self.template.as_ref();
        let template = template.ok_or_else(|| ApiError::bad("this model has no chat template: use /v1/completions"))?;
        let messages = fields.take("messages").unwrap_or_default();
        let wrong = || ApiError::field("messages", "`messages` must be a list of objects with `role` and `content`");
        let messages: Vec<Message> = messages.as_array().ok_or_else(wrong)?.iter().map(message).collect::<Result<_, _>>()?;
        if messages.is_empty() {
            return Err(wrong());
        }
        let adds_prompt = fields.flag("add_generation_prompt", true)?;
        let text = template.render(&messages, adds_prompt).map_err(|error| ApiError::field("messages", error.to_string()))?;
        // The template writes all special tokens itself.
        self.encode(&text, false)
    }

    /// The text of one token; its id where there is no text.
    pub(super) fn token(&self, id: u32) -> String {
        let text = self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.token_text(id).ok());
        text.unwrap_or_else(|| format!("token_id:{id}"))
    }

    /// The most likely tokens by their text.
    pub(super) fn most_likely(&self, likelihood: &TokenLikelihood, count: usize) -> Map<String, Value> {
        let own = (likelihood.id, likelihood.log_probability);
        let mut all = Map::new();
        // Tokens may have the same text: the most likely of them counts.
        for (id, log_probability) in likelihood.most_likely.iter().take(count).copied().chain([own]) {
            all.entry(self.token(id)).or_insert_with(|| json!(log_probability));
        }
        all
    }
}

/// A message, whose content is a text or a list of parts that are texts.
fn message(value: &Value) -> Result<Message, ApiError> {
    let wrong = |what: &str| ApiError::field("messages", format!("a message {what}"));
    let fields = value.as_object().ok_or_else(|| wrong("must be an object"))?;
    if let Some(other) =
        fields.iter().find(|(name, value)| !["role", "content", "name", "type"].contains(&&name[..]) && !value.is_null())
    {
        return Err(wrong(&format!("has `{}`, which is not supported", other.0)));
    }
    // Some harnesses say what kind of content a message has.
    if fields.get("type").is_some_and(|kind| kind != "text") {
        return Err(wrong("has a `type` that is not `text`"));
    }
    let name = fields.get("name").and_then(Value::as_str).map(str::to_owned);
    let role = fields.get("role").and_then(Value::as_str).ok_or_else(|| wrong("needs `role`, a text"))?;
    let content = match fields.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let text =
                |part: &Value| part.get("text").and_then(Value::as_str).filter(|_| part["type"] == "text").map(str::to_owned);
            parts.iter().map(text).collect::<Option<Vec<_>>>().ok_or_else(|| wrong("has a part that is no text"))?.concat()
        }
        _ => return Err(wrong("needs `content`, a text")),
    };
    Ok(Message { name, ..Message::new(role, &content) })
}

fn ids_of(value: &Value) -> Option<Vec<u32>> {
    let ids = value.as_array().filter(|ids| !ids.is_empty())?;
    ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}
