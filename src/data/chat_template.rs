//! A model's chat template: messages become the text that it was trained on.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};

use super::error::DataError;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
    /// Who says it, where several have the same role.
    pub name: Option<String>,
}

impl Message {
    /// A message of a role.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.to_owned(), name: None }
    }
}

/// A chat template, in the dialect of Transformers: Jinja, of which minijinja does most. What it can not do is refused.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The special tokens by their names, as `bos_token`.
    tokens: Vec<(String, String)>,
    source: String,
    place: String,
}

/// Steps of a rendering, after which it is given up.
const FUEL: u64 = 50_000_000;
const NAME: &str = "chat_template";

impl ChatTemplate {
    /// The template of a model directory, or of a file that the caller names; `None` where there is none.
    ///
    /// Of the directory it is `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`: a text, or a list of which the one
    /// counts that is named `default`.
    pub fn load(dir: &Path, file: Option<&Path>) -> Result<Option<Self>, DataError> {
        let read = |path: &Path| std::fs::read_to_string(path).map_err(DataError::read(path));
        let (config, config_path) = tokenizer_config(dir)?;
        let beside = dir.join("chat_template.jinja");
        let (source, place) = match file {
            Some(file) => (Some(read(file)?), file.to_owned()),
            None if beside.exists() => (Some(read(&beside)?), beside),
            None => (of_config(&config), config_path),
        };
        let tokens = named_tokens(&config);
        source.map(|source| Self::new(&source, tokens, place.display().to_string())).transpose()
    }

    fn new(source: &str, tokens: Vec<(String, String)>, place: String) -> Result<Self, DataError> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default());
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: &str| -> Result<String, Error> {
            let mut date = String::new();
            let unknown = |_| Error::new(ErrorKind::InvalidOperation, format!("`{format}` is no format of a date"));
            write!(date, "{}", chrono::Local::now().format(format)).map_err(unknown)?;
            Ok(date)
        });
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let fault = |error: Error| DataError::ChatTemplate { place: place.clone(), message: error.to_string() };
        environment.add_template_owned(NAME, source.clone()).map_err(fault)?;
        Ok(Self { environment, tokens, source, place })
    }

    /// What is wrong with what it makes of a conversation.
    pub(super) fn refused(&self, message: &str) -> DataError {
        DataError::ChatTemplate { place: self.place.clone(), message: message.to_owned() }
    }

    /// The template itself.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a conversation, and behind it, where `adds_generation_prompt`, what the assistant's next message begins with.
    pub fn render(&self, messages: &[Message], adds_generation_prompt: bool) -> Result<String, DataError> {
        let fault = |error: Error| DataError::ChatTemplate { place: self.place.clone(), message: words(&error) };
        let template = self.environment.get_template(NAME).map_err(fault)?;
        let tokens = Value::from_pairs(self.tokens.iter().map(|(name, token)| (name.clone(), Value::from(token.clone()))));
        let message = |message: &Message| {
            let name = message.name.as_ref().map(|name| ("name", &name[..]));
            Value::from_pairs([("role", &message.role[..]), ("content", &message.content)].into_iter().chain(name))
        };
        let own = context! {
            messages => messages.iter().map(message).collect::<Vec<_>>(),
            tools => Value::from(()),
            documents => Value::from(()),
            add_generation_prompt => adds_generation_prompt,
        };
        template.render(context! { ..own, ..tokens }).map_err(fault)
    }
}

/// The special tokens of the tokenizer in a model directory by their names, as `bos_token`.
pub fn special_tokens(dir: &Path) -> Result<Vec<(String, String)>, DataError> {
    Ok(named_tokens(&tokenizer_config(dir)?.0))
}

/// `tokenizer_config.json` and its path; nothing where there is none.
fn tokenizer_config(dir: &Path) -> Result<(serde_json::Value, PathBuf), DataError> {
    let path = dir.join("tokenizer_config.json");
    if !path.exists() {
        return Ok((serde_json::Value::Null, path));
    }
    let bytes = std::fs::read(&path).map_err(DataError::read(&path))?;
    let not_json = |error: serde_json::Error| DataError::not_json(&path, &error);
    Ok((serde_json::from_slice(&bytes).map_err(not_json)?, path))
}

/// What an error says: what the template itself raises, as it is.
fn words(error: &Error) -> String {
    match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        _ => error.to_string(),
    }
}

fn of_config(config: &serde_json::Value) -> Option<String> {
    let template = config.get(NAME)?;
    let named = |entry: &serde_json::Value| {
        let is_default = entry.get("name").and_then(serde_json::Value::as_str) == Some("default");
        is_default.then(|| entry.get("template")?.as_str().map(str::to_owned)).flatten()
    };
    template.as_str().map(str::to_owned).or_else(|| template.as_array()?.iter().find_map(named))
}

/// The special tokens of a `tokenizer_config.json`: each a text, or a table whose `content` is.
fn named_tokens(config: &serde_json::Value) -> Vec<(String, String)> {
    let text = |value: &serde_json::Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned);
    let entries = config.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
    entries.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEMPLATE: &str = "{%- for message in messages %}\r\n{%- if message.role not in ['system', 'user', 'assistant'] %}\
        {{- raise_exception('no role ' + message['role']) }}{% endif %}\
        {{- '<' + message['role'].upper() + '>' + message.content.strip() + eos_token }}{%- endfor %}\
        {%- if add_generation_prompt %}{{ '<ASSISTANT>' }}{% endif %}";

    fn template(source: &str) -> Result<ChatTemplate, DataError> {
        ChatTemplate::new(source, vec![("eos_token".to_owned(), "</s>".to_owned())], "t.jinja".to_owned())
    }

    #[test]
    fn a_conversation_becomes_text_as_in_transformers() {
        let messages = [Message::new("system", " Be <brief>.\n"), Message::new("user", "Hi")];
        let text = template(TEMPLATE).unwrap().render(&messages, true).unwrap();
        assert_eq!(text, "<SYSTEM>Be <brief>.</s><USER>Hi</s><ASSISTANT>");
    }

    #[test]
    fn what_the_template_refuses_and_what_can_not_be_done_is_said() {
        let error = template(TEMPLATE).unwrap().render(&[Message::new("critic", "Odd.")], false).unwrap_err();
        assert_eq!(error.to_string(), "the chat template of `t.jinja`: no role critic");
        let error = template("{% generation %}x{% endgeneration %}").unwrap_err().to_string();
        assert!(error.contains("unknown statement generation"), "{error}");
        let error = template("{{ messages | tojson }}").and_then(|t| t.render(&[], false)).unwrap_err().to_string();
        assert!(error.contains("tojson"), "{error}");
    }

    #[test]
    fn the_template_of_a_directory_is_found_where_transformers_looks() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ChatTemplate::load(dir.path(), None).unwrap().is_none());
        let config =
            r#"{"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": "{{ bos_token }}config"}]}"#;
        std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
        let found = || ChatTemplate::load(dir.path(), None).unwrap().unwrap().render(&[], false).unwrap();
        assert_eq!(found(), "<s>config");
        std::fs::write(dir.path().join("chat_template.jinja"), "{{ bos_token }}file").unwrap();
        assert_eq!(found(), "<s>file");
    }
}
