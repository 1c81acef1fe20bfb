//! A chat template in the dialect of Transformers: Jinja, of which minijinja does most. What cannot be done alike is refused.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use chrono::NaiveDateTime;
use serde_json::Value as Json;

use super::super::guard::WorkLimits;
use super::conversation::Conversation;
use super::jinja::{CompiledTemplate, Rendering, TemplateText};
use super::markers::{Markers, taken_out};
use super::renderer::Renderers;
use crate::metrics::is_space;
use crate::units::{Fault, abridged};

/// A chat template. It is compiled when it is first used: a process is started for that. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct ChatTemplate {
    text: Arc<TemplateText>,
    execution: Arc<OnceLock<Result<Execution, String>>>,
    place: String,
}

#[derive(Debug)]
enum Execution {
    /// In child processes, as a template can ask for more stack, memory or time than its process has.
    Children { renderers: Renderers, has_generation: bool },
    /// In this process, which is not the program that children are made of: within limits of memory and time, beyond which it ends.
    Here(Box<CompiledTemplate>, WorkLimits),
}

/// What is written behind a message that is to be continued.
const CONTINUED: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

impl ChatTemplate {
    /// A template from its text. `place` is what errors call it; `now` what it takes for the time, instead of the local one.
    pub(super) fn new(source: &str, tokens: Vec<(String, String)>, place: String, now: Option<NaiveDateTime>) -> Self {
        Self { text: Arc::new(TemplateText::new(source, tokens, now)), execution: Arc::default(), place }
    }

    fn execution(&self) -> Result<&Execution, Fault> {
        let compile = || {
            if let Some(renderers) = Renderers::of(&self.text) {
                let has_generation = renderers.compile()?;
                return Ok(Execution::Children { renderers, has_generation });
            }
            let limits = WorkLimits::of("chat template", Path::new(&self.place), 16, 20.0).counting_steps();
            Ok(Execution::Here(Box::new(CompiledTemplate::new(&self.text)?), limits))
        };
        self.execution.get_or_init(compile).as_ref().map_err(|words| self.fault(words.clone()))
    }

    /// Whether it says itself what the assistant writes.
    ///
    /// # Errors
    /// It cannot be compiled.
    pub(super) fn has_generation(&self) -> Result<bool, Fault> {
        Ok(match self.execution()? {
            Execution::Children { has_generation, .. } => *has_generation,
            Execution::Here(compiled, _) => compiled.has_generation,
        })
    }

    /// The text of a rendering. Most templates take the arguments of calls as objects; those that join them to text refuse these, and get
    /// what was written.
    fn rendered(&self, rendering: &Rendering<'_>, of: &Conversation) -> Result<String, Fault> {
        let text = self.rendered_once(rendering, of);
        let written = if text.is_err() { of.as_written(&rendering.messages) } else { None };
        let Some(written) = written else { return text };
        self.rendered_once(&Rendering { messages: written.into(), ..rendering.clone() }, of).or(text)
    }

    /// Within bounds for a conversation of this size.
    fn rendered_once(&self, rendering: &Rendering<'_>, of: &Conversation) -> Result<String, Fault> {
        let text = match self.execution()? {
            Execution::Children { renderers, .. } => renderers.render(rendering, of.size()),
            Execution::Here(compiled, limits) => limits.within(of.size(), || compiled.render(rendering)),
        };
        text.map_err(|words| self.fault(words))
    }

    pub(super) fn tokens(&self) -> &[(String, String)] {
        &self.text.tokens
    }

    pub(super) fn source(&self) -> &str {
        &self.text.source
    }

    /// The text of a conversation, and behind it, where `adds_generation_prompt`, what the assistant's next message begins with.
    pub(super) fn render(&self, conversation: &Conversation, adds_generation_prompt: bool) -> Result<String, Fault> {
        self.render_messages(conversation, &conversation.messages, adds_generation_prompt)
    }

    pub(super) fn render_messages(
        &self,
        conversation: &Conversation,
        messages: &[Json],
        adds_generation_prompt: bool,
    ) -> Result<String, Fault> {
        self.rendered(&rendering(conversation, messages, adds_generation_prompt), conversation)
    }

    /// The text of a conversation, and in bytes where the template says that the assistant writes.
    pub(super) fn render_with_spans(&self, conversation: &Conversation) -> Result<(String, Vec<Range<usize>>), Fault> {
        let text = self.render(conversation, false)?;
        let Markers { open, close } = self.text.markers;
        let markers = if conversation.contains(open) || conversation.contains(close) {
            Markers::absent_from(&|marker| self.source().contains(marker) || conversation.contains(marker))
        } else {
            self.text.markers
        };
        let plain = rendering(conversation, &conversation.messages, false);
        let marked = self.rendered(&Rendering { markers: Some(markers), ..plain }, conversation)?;
        match taken_out(&marked, markers) {
            Some((same, spans)) if same == text => Ok((text, spans)),
            _ => Err(self.fault(
                "it changes text around its generation tags, so that nobody can say where the assistant's ends".to_owned(),
            )),
        }
    }

    /// The text of a conversation up to the end of what its last message says, so that the model goes on with that message.
    pub(super) fn render_to_continue(&self, conversation: &Conversation) -> Result<String, Fault> {
        let mut messages = conversation.messages.clone();
        let nothing = || self.fault("the last message has no text that could be continued".to_owned());
        let content = messages.last_mut().and_then(|last| last.get_mut("content"));
        let text = match content {
            Some(Json::Array(parts)) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
            content => content,
        };
        let Some(Json::String(text)) = text else { return Err(nothing()) };
        let said = text.trim().to_owned();
        text.push_str(CONTINUED);
        let rendered = self.render_messages(conversation, &messages, false)?;
        let at = rendered.rfind(CONTINUED.trim_end()).filter(|_| rendered.contains(&said)).ok_or_else(nothing)?;
        let cut = &rendered[..at];
        Ok(if rendered[at..].starts_with(CONTINUED) { cut.to_owned() } else { cut.trim_end_matches(is_space).to_owned() })
    }

    pub(super) fn fault(&self, message: String) -> Fault {
        TemplateFault { place: self.place.clone(), message }.into()
    }
}

/// A chat template can not be read, or refuses a conversation.
#[derive(Debug)]
pub struct TemplateFault {
    pub(super) place: String,
    /// In the template's own words, where it refuses.
    pub(super) message: String,
}

impl From<TemplateFault> for Fault {
    fn from(template: TemplateFault) -> Self {
        let TemplateFault { place, message } = &template;
        let text = format!("the chat template of `{}`: {}", abridged(place), abridged(message));
        Self::data(text, "change the messages, or name another template with `--chat-template FILE`").carrying(template)
    }
}

fn rendering<'a>(conversation: &'a Conversation, messages: &'a [Json], adds_generation_prompt: bool) -> Rendering<'a> {
    Rendering {
        markers: None,
        messages: Cow::Borrowed(messages),
        tools: Cow::Borrowed(&conversation.tools),
        documents: Cow::Borrowed(&conversation.documents),
        variables: Cow::Borrowed(&conversation.variables),
        adds_generation_prompt,
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// A template from its text, with `</s>` as `eos_token`, at a time of its own.
    pub(in super::super) fn template(source: &str) -> Result<ChatTemplate, Fault> {
        let now = chrono::NaiveDate::from_ymd_opt(2026, 11, 22).unwrap().and_hms_opt(14, 5, 9);
        let template = ChatTemplate::new(source, vec![("eos_token".to_owned(), "</s>".to_owned())], "t.jinja".to_owned(), now);
        template.has_generation()?;
        Ok(template)
    }

    /// What a template without messages makes.
    pub(in super::super) fn rendered(source: &str) -> Result<String, String> {
        template(source).and_then(|template| template.render(&Conversation::default(), false)).map_err(|error| error.to_string())
    }

    #[allow(clippy::needless_pass_by_value)]
    fn conversation(messages: Json) -> Conversation {
        Conversation { messages: messages.as_array().unwrap().clone(), ..Conversation::default() }
    }

    #[test]
    fn arguments_are_objects_unless_the_template_joins_them_to_text() {
        let call = json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\":1}"}}]}]);
        let conversation = Conversation::of(call).unwrap();
        let of = |arguments: &str| {
            let source = format!("{{% set f = messages[0].tool_calls[0].function %}}{{{{ {arguments} }}}}");
            template(&source).unwrap().render(&conversation, false)
        };
        assert_eq!(of("f.arguments | tojson").unwrap(), "{\"a\": 1}");
        assert_eq!(of("'<' + f.arguments + '>'").unwrap(), "<{\"a\":1}>");
        let empty = json!([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": ""}]}]);
        let joins = template("{{ '<' + messages[0].tool_calls[0].arguments + '>' }}").unwrap();
        assert_eq!(joins.render(&Conversation::of(empty).unwrap(), false).unwrap(), "<>");
        assert!(of("raise_exception('no')").unwrap_err().to_string().ends_with("no"));
    }

    #[test]
    fn a_conversation_becomes_text_as_in_transformers() {
        let source = "{%- for message in messages %}\r\n{{- '<' + message['role'].upper() + '>' + message.content.strip() + eos_token }}\
            {%- endfor %}{%- if add_generation_prompt %}{{ '<ASSISTANT>' }}{% endif %}\n";
        let mut conversation =
            conversation(json!([{"role": "system", "content": " Be <brief>.\n"}, {"role": "user", "content": "Hi"}]));
        let text = template(source).unwrap().render(&conversation, true).unwrap();
        assert_eq!(text, "<SYSTEM>Be <brief>.</s><USER>Hi</s><ASSISTANT>");
        // The caller's variables win over those of the tokenizer.
        conversation.variables.insert("eos_token".to_owned(), json!("|"));
        assert_eq!(template(source).unwrap().render(&conversation, false).unwrap(), "<SYSTEM>Be <brief>.|<USER>Hi|");
        assert_eq!(rendered("{{ strftime_now('%-d %b %Y, %H:%M') }}").unwrap(), "22 Nov 2026, 14:05");
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let mut conversation = Conversation::default();
        conversation
            .variables
            .insert("d".to_owned(), json!({"b": [1, 2.0, "é<&>'\""], "a": {}, "big": u64::MAX, "t": true, "n": null}));
        let text = |source: &str| template(source).unwrap().render(&conversation, false).unwrap();
        assert_eq!(
            text("{{ d | tojson }}"),
            r#"{"b": [1, 2.0, "é<&>'\""], "a": {}, "big": 18446744073709551615, "t": true, "n": null}"#
        );
        assert_eq!(text("{{ d.b | tojson(separators=(',', ':')) }}"), r#"[1,2.0,"é<&>'\""]"#);
        assert_eq!(text("{{ d.b | tojson(indent=1, ensure_ascii=true) }}"), "[\n 1,\n 2.0,\n \"\\u00e9<&>'\\\"\"\n]");
        assert_eq!(
            text("{{ {'b': 1e-7, 'a': (1, '\\n\\x7f🍐')} | tojson(sort_keys=true) }}"),
            "{\"a\": [1, \"\\n\u{7f}🍐\"], \"b\": 1e-07}"
        );
        assert_eq!(text("{{ {1: true, none: []} | tojson(indent='\\t') }}"), "{\n\t\"1\": true,\n\t\"null\": []\n}");
    }

    #[test]
    fn what_the_template_refuses_and_what_can_not_be_done_is_said() {
        let error = rendered("{{ raise_exception('no role ' ~ 1) }}").unwrap_err();
        assert_eq!(error, "the chat template of `t.jinja`: no role 1");
        let refused = [
            ("{% macro m() %}{{ varargs }}{% endmacro %}{{ m(1) }}", "`varargs`, which is not supported"),
            ("{{ nope.x }}", "undefined"),
            ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "fuel"),
            ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
            ("{% for i in range(99) %}{{ 'x' * 1000000 }}{% endfor %}", "64 MiB"),
            ("{% include 'x' %}", "x"),
            ("{% nosuch %}", "nosuch"),
            ("{{ 'a' | nosuch }}", "nosuch"),
            ("{{ 'a'.append(1) }}", "append"),
        ];
        for (source, why) in refused {
            let error = rendered(source).unwrap_err();
            assert!(error.starts_with("the chat template of `t.jinja`: ") && error.contains(why), "{source}: {error}");
        }
    }

    #[test]
    fn the_assistants_text_is_found() {
        let spans = |source: &str, messages: Json| template(source).and_then(|t| t.render_with_spans(&conversation(messages)));
        let source = "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}\
            {% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
        let messages = json!([{"role": "user", "content": "é\u{fdd0}"}, {"role": "assistant", "content": "🍐"}]);
        assert_eq!(spans(source, messages).unwrap(), ("ué\u{fdd0}a🍐</s>".to_owned(), vec![7..15]));
        let none = || json!([]);
        assert_eq!(spans("{% generation %}a{% endgeneration %}y", none()).unwrap().1, [0..1]);
        let captured = "x{% set q %}12{% generation %}ab{% endgeneration %}{% endset %}yy{{ q }}";
        assert_eq!(spans(captured, none()).unwrap(), ("xyy12ab".to_owned(), vec![5..7]));
        let scoped = "{% set ns = namespace(a=1) %}{% set b = 1 %}{% generation %}{% set ns.a = 2 %}{% set b = 2 %}{% endgeneration %}{{ ns.a }}{{ b }}";
        assert_eq!(spans(scoped, none()).unwrap(), ("21".to_owned(), vec![]));
        for changed in [
            "{% set q %}{% generation %} a {% endgeneration %}{% endset %}{{ q | trim }}",
            "{% set q %}{% generation %}abc{% endgeneration %}{% endset %}{{ q[:2] }}",
        ] {
            assert!(spans(changed, none()).unwrap_err().to_string().contains("changes text around its generation tags"));
        }
    }

    /// Templates and what Transformers 5.3.0 makes of them: the text, with the assistant's spans in characters, or the error, which is
    /// the template's own where it raises one.
    #[test]
    fn small_templates_are_rendered_as_by_transformers() {
        let of = |name: &str| {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(name);
            std::fs::read_to_string(path).unwrap()
        };
        let mut variables: serde_json::Map<String, Json> = serde_json::from_str(&of("variables.json")).unwrap();
        let messages = variables.remove("messages").unwrap();
        let conversation = Conversation { variables, ..conversation(messages) };
        for row in of("templates.jsonl").lines() {
            let row: Json = serde_json::from_str(row).unwrap();
            let now = chrono::NaiveDate::from_ymd_opt(2026, 11, 22).unwrap().and_hms_opt(14, 5, 9);
            let template = ChatTemplate::new(row["template"].as_str().unwrap(), Vec::new(), "t".to_owned(), now);
            let got = template.has_generation().and_then(|has_generation| match row.get("spans") {
                None => Ok((template.render(&conversation, true)?, Json::Null)),
                Some(_) if !has_generation => Ok((template.render(&conversation, true)?, json!([]))),
                Some(_) => {
                    let (text, spans) = template.render_with_spans(&conversation)?;
                    let spans = spans.iter().map(|span| [span.start, span.end].map(|at| text[..at].chars().count()));
                    let spans = json!(spans.collect::<Vec<_>>());
                    Ok((text, spans))
                }
            });
            match (&got, row["error"].as_str()) {
                (Ok((text, spans)), None) => assert_eq!((&json!(text), spans), (&row["text"], &row["spans"]), "{row}"),
                (Err(_), Some(kind)) if kind.ends_with("Error") => {}
                (Err(error), Some(raised)) => assert!(error.to_string().ends_with(&format!(": {raised}")), "{row}: {error}"),
                _ => panic!("{row}: {got:?}"),
            }
        }
    }

    #[test]
    fn the_last_message_can_be_continued() {
        let ends = |source: &str, content: Json| {
            let conversation = conversation(json!([{"role": "user", "content": content}]));
            template(source).unwrap().render_to_continue(&conversation)
        };
        let each = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
        assert_eq!(ends(each, json!("It is ")).unwrap(), "<It is ");
        assert_eq!(ends("{{ messages[0].content | trim }}</s>", json!("It is ")).unwrap(), "It is");
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(ends("{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}", parts).unwrap(), "<a><b");
        assert!(ends("nothing", json!("It is")).is_err());
        assert!(ends(each, json!(null)).is_err());
    }
}
