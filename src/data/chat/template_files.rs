//! Which chat template counts: the one that is asked for, or that of the model's directory, found where Transformers looks.

use std::collections::BTreeMap;
use std::path::Path;

use chrono::NaiveDateTime;
use serde_json::{Map, Value as Json, json};

use super::conversation::Conversation;
use super::jinja::STRFTIME;
use super::template::{ChatTemplate, TemplateFault};
use crate::data::tokenizer::{TOKENIZER_CONFIG, tokenizer_config};
use crate::files::{self, FileKind, read_text};
use crate::units::{Fault, listed, quoted};

/// The templates of a model by their names; never none.
#[derive(Clone, Debug)]
pub struct ChatTemplates(Vec<(String, ChatTemplate)>);

const TEMPLATE: &str = "chat_template.jinja";
const DEFAULT: &str = "default";
/// The template for conversations with tools, where there is one of its own.
const TOOL_USE: &str = "tool_use";

impl ChatTemplates {
    /// The templates of a model directory as [`find`](Self::find) has them, compiled, so that a broken one is refused at once.
    pub fn load(dir: &Path, wanted: Option<&str>, now: Option<NaiveDateTime>) -> Result<Option<Self>, Fault> {
        let found = Self::find(dir, wanted, now)?;
        found.as_ref().map_or(Ok(()), Self::compile)?;
        Ok(found)
    }

    /// The templates of a model directory, which are compiled when they are first used; `None` where there are none.
    ///
    /// `wanted` is a template's text, or the path of its file, or its name where the model has several. In the directory
    /// `chat_template.jinja` and `additional_chat_templates/NAME.jinja` count, else `chat_template` in `tokenizer_config.json`: a text,
    /// or a list of `name` and `template`. `now` is what a template takes for the time, instead of the local one.
    pub fn find(dir: &Path, wanted: Option<&str>, now: Option<NaiveDateTime>) -> Result<Option<Self>, Fault> {
        let config = tokenizer_config(dir)?;
        let tokens = named_tokens(&config);
        let template = |text: &str, place: String| ChatTemplate::new(text, tokens.clone(), place, now);
        let of_file = |path: &Path| Ok(template(&read_text(path, FileKind::Template)?, path.display().to_string()));
        let alone = |template: ChatTemplate| Ok(Some(Self(vec![(DEFAULT.to_owned(), template)])));
        if let Some(text) = wanted.filter(|wanted| wanted.contains(['{', '\n'])) {
            return alone(template(text, "data.chat_template".to_owned()));
        }
        if let Some(path) = wanted.map(Path::new).filter(|path| path.exists() && !path.is_dir()) {
            return alone(of_file(path)?);
        }
        let mut all = of_directory(dir, &of_file)?;
        if all.is_empty() {
            let place = dir.join(TOKENIZER_CONFIG).display().to_string();
            all = of_config(&config, &|text| template(text, place.clone()));
        }
        let all = Self(all);
        if let Some(name) = wanted {
            let unknown = || {
                let (wanted, names) = (quoted(name), listed(all.names()));
                let of_model = if names.is_empty() { "the model has none".to_owned() } else { format!("the model has {names}") };
                let message = format!("there is no chat template `{wanted}`: no such file, and {of_model}");
                Fault::data(message, "name a file, or a template that the model has")
            };
            return alone(all.named(name).cloned().ok_or_else(unknown)?);
        }
        Ok((!all.0.is_empty()).then_some(all))
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| &name[..])
    }

    fn named(&self, name: &str) -> Option<&ChatTemplate> {
        self.0.iter().find(|(other, _)| other == name).map(|(_, template)| template)
    }

    /// The templates that conversations can be rendered by.
    fn used(&self) -> impl Iterator<Item = &ChatTemplate> {
        [DEFAULT, TOOL_USE].into_iter().filter_map(|name| self.named(name))
    }

    pub(super) fn compile(&self) -> Result<(), Fault> {
        self.used().try_for_each(|template| template.has_generation().map(drop))
    }

    pub(super) fn of(&self, conversation: &Conversation) -> Result<&ChatTemplate, Fault> {
        let for_tools = self.named(TOOL_USE).filter(|_| conversation.tools.is_some());
        for_tools.or_else(|| self.named(DEFAULT)).ok_or_else(|| {
            let message = format!("there is none named `{DEFAULT}`, but {}", self.names().collect::<Vec<_>>().join(", "));
            TemplateFault { place: self.0[0].1.place.clone(), message }.into()
        })
    }

    pub(super) fn identity(&self) -> Json {
        let of = |template: &ChatTemplate| json!({ "source": template.text.source, "tokens": template.text.tokens });
        json!([DEFAULT, TOOL_USE].map(|name| self.named(name).map(of)))
    }

    pub(super) fn origins(&self) -> BTreeMap<&'static str, String> {
        let tokens = self.used().flat_map(|template| &template.text.tokens).flat_map(|(name, token)| [name, token]);
        BTreeMap::from([
            ("the chat template", files::hash_parts(self.used().map(|template| &template.text.source))),
            ("the special tokens of `tokenizer_config.json`", files::hash_parts(tokens)),
        ])
    }

    /// Whether a text of one of them depends on the time.
    pub(super) fn print_dates(&self) -> bool {
        self.used().any(|template| template.text.source.contains(STRFTIME))
    }

    pub(super) fn bos(&self) -> Option<&str> {
        let template = self.used().next()?;
        template.text.tokens.iter().find(|(name, _)| name == "bos_token").map(|(_, token)| &token[..])
    }

    pub fn source(&self) -> Option<&str> {
        self.named(DEFAULT).map(|template| &template.text.source[..])
    }

    /// The text of a conversation, and behind it, where `adds_generation_prompt`, what the assistant's next message begins with.
    pub fn render(&self, conversation: &Conversation, adds_generation_prompt: bool) -> Result<String, Fault> {
        self.of(conversation)?.render(conversation, adds_generation_prompt)
    }
}

/// The special tokens of the tokenizer in a model directory by their names, as `bos_token`.
pub fn special_tokens(dir: &Path) -> Result<Vec<(String, String)>, Fault> {
    Ok(named_tokens(&tokenizer_config(dir)?))
}

fn of_directory(
    dir: &Path,
    of_file: &dyn Fn(&Path) -> Result<ChatTemplate, Fault>,
) -> Result<Vec<(String, ChatTemplate)>, Fault> {
    let mut all = Vec::new();
    if files::lies_in(dir, TEMPLATE) {
        all.push((DEFAULT.to_owned(), of_file(&dir.join(TEMPLATE))?));
    }
    for path in files::further_templates(dir)?.iter().map(|name| dir.join(name)) {
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        all.push((name, of_file(&path)?));
    }
    Ok(all)
}

fn of_config(config: &Map<String, Json>, template: &dyn Fn(&str) -> ChatTemplate) -> Vec<(String, ChatTemplate)> {
    match config.get("chat_template") {
        Some(Json::String(text)) => vec![(DEFAULT.to_owned(), template(text))],
        Some(Json::Array(all)) => {
            let named =
                |entry: &Json| Some((entry.get("name")?.as_str()?.to_owned(), template(entry.get("template")?.as_str()?)));
            all.iter().filter_map(named).collect()
        }
        _ => Vec::new(),
    }
}

/// The special tokens of a `tokenizer_config.json`, those of the model's own among them: each a text, or a table whose `content` is.
fn named_tokens(config: &Map<String, Json>) -> Vec<(String, String)> {
    let text = |value: &Json| value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned);
    let own = ["extra_special_tokens", "model_specific_special_tokens"];
    let own = own.into_iter().filter_map(|key| config.get(key)?.as_object()).flatten();
    let entries = config.iter().chain(own).filter(|(name, _)| name.ends_with("_token"));
    entries.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect()
}

#[cfg(test)]
mod tests {

    use super::*;

    fn load(dir: &Path, wanted: Option<&str>) -> Result<Option<ChatTemplates>, Fault> {
        ChatTemplates::load(dir, wanted, None)
    }

    #[test]
    fn the_template_of_a_directory_is_found_where_transformers_looks() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert!(load(dir, None).unwrap().is_none());
        let found = |wanted: Option<&str>, has_tools: bool| {
            let conversation = Conversation { tools: has_tools.then(|| json!([{}])), ..Conversation::default() };
            load(dir, wanted).and_then(|all| all.unwrap().render(&conversation, false)).map_err(|error| error.to_string())
        };
        let write = |config: &Json| std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
        write(&json!({"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}config"}));
        assert_eq!((found(None, false).unwrap(), found(None, true).unwrap()), ("<s>config".into(), "<s>config".into()));
        write(&json!({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}));
        assert_eq!((found(None, false).unwrap(), found(None, true).unwrap()), ("a".into(), "b".into()));
        assert_eq!(found(Some("tool_use"), false).unwrap(), "b");
        assert_eq!(found(Some("{{ 1 }}"), true).unwrap(), "1");
        assert_eq!(
            found(Some("nosuch"), false).unwrap_err(),
            "there is no chat template `nosuch`: no such file, and the model has default, tool_use"
        );
        std::fs::write(dir.join("special_tokens_map.json"), r#"{"bos_token": "<b>", "eos_token": {"content": "</s>"}}"#).unwrap();
        let tokens = "{{ bos_token }}{{ eos_token }}{{ image_token }}";
        write(&json!({"bos_token": "<s>", "chat_template": tokens, "extra_special_tokens": {"image_token": "<i>"}}));
        assert_eq!(found(None, false).unwrap(), "<b></s><i>");
        write(&json!({"bos_token": "<s>", "chat_template": tokens, "added_tokens_decoder": {}}));
        assert_eq!(found(None, false).unwrap(), "<s>");
        write(&json!({"chat_template": [{"name": "rag", "template": "a"}]}));
        let error = found(None, false).unwrap_err();
        assert!(error.ends_with("there is none named `default`, but rag"), "{error}");
        // One that is not used is not compiled.
        write(&json!({"chat_template": "{% if %}"}));
        assert!(ChatTemplates::find(dir, None, None).unwrap().unwrap().compile().is_err() && load(dir, None).is_err());
        std::fs::write(dir.join("chat_template.jinja"), "file").unwrap();
        std::fs::create_dir(dir.join("additional_chat_templates")).unwrap();
        std::fs::write(dir.join("additional_chat_templates/tool_use.jinja"), "tools").unwrap();
        assert_eq!((found(None, false).unwrap(), found(None, true).unwrap()), ("file".into(), "tools".into()));
        let path = dir.join("chat_template.jinja");
        assert_eq!(found(path.to_str(), true).unwrap(), "file");
    }
}
