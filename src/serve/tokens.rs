//! Prompts become tokens, and tokens become what replies show of them.

use serde_json::{Map, Value, json};

use super::ApiError;
use super::fields::BodyFields;
use crate::data::{ChatPrompt, ChatTemplates, Conversation, Tokenizer};
use crate::generation::TokenLikelihood;

/// What reads and writes text, where the model has it.
#[derive(Clone, Debug)]
pub struct PromptEncoder {
    pub(super) tokenizer: Option<Tokenizer>,
    pub(super) template: Option<ChatTemplates>,
    /// What the template is told where a request does not say otherwise.
    pub(super) variables: Map<String, Value>,
    /// Special tokens by their names, as `bos_token`.
    pub(super) special_tokens: Vec<(String, String)>,
    /// Bytes of a prompt: more are certainly more tokens than are taken.
    pub(super) max_bytes: usize,
}

impl PromptEncoder {
    /// For prompts of so many tokens at most.
    pub fn new(
        tokenizer: Option<Tokenizer>,
        template: Option<ChatTemplates>,
        variables: Map<String, Value>,
        special_tokens: Vec<(String, String)>,
        most_tokens: usize,
    ) -> Self {
        /// What a token may stand for that is longer than its entry: spaces that are left out, a word that is unknown.
        const MIN_TOKEN_BYTES: usize = 64;
        let longest = tokenizer.as_ref().map_or(0, Tokenizer::longest_entry).max(MIN_TOKEN_BYTES);
        Self { tokenizer, template, variables, special_tokens, max_bytes: most_tokens.saturating_mul(longest) }
    }

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
        let (bytes, most) = (text.len(), self.max_bytes);
        // Its tokens take many times as much memory.
        if bytes > most {
            let message = format!("a prompt has {bytes} bytes; this server takes {most}, as the longest prompt has no more");
            return Err(ApiError::field("prompt", message).with_code("context_length_exceeded"));
        }
        let ids = if adds_special { tokenizer.encode_prompt(text) } else { tokenizer.encode(text) };
        ids.map_err(|error| ApiError::bad(error.to_string()))
    }

    /// The text of tokens with the special ones among them.
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, ApiError> {
        self.tokenizer()?.decode_with_special(ids).map_err(|error| ApiError::bad(error.to_string()))
    }

    /// The texts of the prompts of `prompt`, as they were sent; empty where tokens were, and there is no tokenizer.
    pub(super) fn echoed(&self, value: &Value, prompts: &[Vec<u32>]) -> Vec<String> {
        let text = |(at, ids): (usize, &Vec<u32>)| match value.as_str().or_else(|| value.get(at)?.as_str()) {
            Some(text) => text.to_owned(),
            None => self.decode(ids).unwrap_or_default(),
        };
        prompts.iter().enumerate().map(text).collect()
    }

    pub(super) fn conversation(&self, fields: &mut BodyFields) -> Result<Vec<u32>, ApiError> {
        let mut messages = fields.take("messages").unwrap_or_default();
        messages.as_array_mut().into_iter().flatten().try_for_each(plain_content)?;
        self.rendered(messages, "messages", fields)
    }

    /// The tokens of messages that a request has in the field `name`, with what else its template is told.
    pub(super) fn rendered(&self, messages: Value, name: &str, fields: &mut BodyFields) -> Result<Vec<u32>, ApiError> {
        let template = self.template.as_ref();
        let template = template.ok_or_else(|| ApiError::bad("this model has no chat template: use /v1/completions"))?;
        let told = Conversation { variables: self.variables.clone(), ..Conversation::default() };
        let prompt = ChatPrompt::from_fields(name, messages, told, |field| fields.take(field));
        let prompt = prompt.map_err(|(field, message)| ApiError::field(&field, message))?;
        // The template writes all special tokens itself.
        self.encode(&prompt.render(template).map_err(|error| ApiError::field(name, error.to_string()))?, false)
            .map_err(|error| error.about(name))
    }

    /// The text of one token; its id where there is no text.
    pub(super) fn token(&self, id: u32) -> String {
        let text = self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.token_text(id).ok());
        text.unwrap_or_else(|| format!("token_id:{id}"))
    }

    /// The bytes of one token, which may be a part of a character; none where there is no text.
    pub(super) fn bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.token_bytes(id).ok())
    }

    /// Whether a text of this token alone is empty, as that of a special token is.
    pub(super) fn is_left_out(&self, id: u32) -> bool {
        self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(&[id]).ok()).is_some_and(|text| text.is_empty())
    }

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

/// A message whose content is parts that are all texts has them as one text: not every template reads parts.
fn plain_content(message: &mut Value) -> Result<(), ApiError> {
    let wrong = |what: &str| ApiError::field("messages", format!("a message {what}"));
    let Some(fields) = message.as_object_mut() else { return Ok(()) };
    // Some harnesses say what kind of content a message has.
    if fields.remove("type").is_some_and(|kind| kind != "text") {
        return Err(wrong("has a `type` that is not `text`"));
    }
    if let Some(Value::Array(parts)) = fields.get("content") {
        let text = text_of(parts, &["text"]).ok_or_else(|| wrong("has a part that is no text"))?;
        fields.insert("content".to_owned(), Value::from(text));
    }
    Ok(())
}

/// The text of parts that are all of these kinds, and texts.
pub(super) fn text_of(parts: &[Value], kinds: &[&str]) -> Option<String> {
    let is_known = |part: &&Value| part["type"].as_str().is_some_and(|kind| kinds.contains(&kind));
    parts.iter().map(|part| Some(part).filter(is_known)?.get("text")?.as_str()).collect()
}

fn ids_of(value: &Value) -> Option<Vec<u32>> {
    let ids = value.as_array().filter(|ids| !ids.is_empty())?;
    ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_tells_the_template_wins_over_what_the_run_has_told_it() {
        let model = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        let template = "{{ note }} {{ kept }} {{ messages[0].content }}";
        let encoder = PromptEncoder {
            tokenizer: Some(Tokenizer::load(&model).unwrap()),
            template: ChatTemplates::load(&model, Some(template), None).unwrap(),
            variables: Map::from_iter([("note".to_owned(), json!("N")), ("kept".to_owned(), json!("K"))]),
            special_tokens: Vec::new(),
            max_bytes: usize::MAX,
        };
        let text = |own: Value| {
            let body = json!({ "messages": [{ "role": "user", "content": "Hi" }], "chat_template_kwargs": own });
            let mut fields = BodyFields::read(body.to_string().as_bytes()).ok().unwrap();
            encoder.decode(&encoder.conversation(&mut fields).ok().unwrap()).ok().unwrap()
        };
        assert_eq!((text(Value::Null), text(json!({ "note": "M" }))), ("N K Hi".to_owned(), "M K Hi".to_owned()));
    }
}
