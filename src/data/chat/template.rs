//! A chat template in the dialect of Transformers: Jinja, of which minijinja does most. What cannot be done alike is refused.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use chrono::NaiveDateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde_json::Value as Json;

use super::super::error::DataError;
use super::super::guard::WorkLimits;
use super::conversation::Conversation;
use super::markers::{Markers, taken_out};
use super::scan::{GENERATION, rewrite};
use super::{python_filters, python_methods};

/// A chat template, ready to render conversations. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    markers: Markers,
    has_generation: bool,
    /// The special tokens by their names, as `bos_token`.
    tokens: Vec<(String, String)>,
    source: String,
    place: String,
    /// What a rendering may take.
    limits: WorkLimits,
}

/// Steps of a rendering, after which it is given up.
const FUEL: u64 = 50_000_000;
/// Calls within calls.
const RECURSION: usize = 200;
/// Bytes of a rendering at most.
const MOST_BYTES: usize = 64 << 20;
/// The function that tells the date.
pub(super) const STRFTIME: &str = "strftime_now";
const PLAIN: &str = "chat_template";
const MARKED: &str = "chat_template with its generation tags";
/// What Jinja2 knows everywhere, and minijinja does not.
const UNKNOWN: [&str; 5] = ["varargs", "kwargs", "cycler", "joiner", "lipsum"];
/// What is written behind a message that is to be continued.
const CONTINUED: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

impl ChatTemplate {
    /// A template from its text. `place` is what errors call it; `now` what it takes for the time, instead of the local one.
    pub(super) fn new(
        source: &str,
        tokens: Vec<(String, String)>,
        place: String,
        now: Option<NaiveDateTime>,
    ) -> Result<Self, DataError> {
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let rewritten = rewrite(&source);
        let markers = Markers::absent_from(&|marker| source.contains(marker));
        let fault = |message: String| DataError::ChatTemplate { place: place.clone(), message };
        let mut environment = environment(now);
        environment.add_filter(GENERATION, markers.filter());
        let mut add = |name, text| environment.add_template_owned(name, text).map_err(|error| fault(error.to_string()));
        add(PLAIN, rewritten.plain)?;
        if rewritten.has_generation {
            add(MARKED, rewritten.marked)?;
        }
        let undeclared = environment.get_template(PLAIN).map_err(|error| fault(error.to_string()))?.undeclared_variables(false);
        if let Some(unknown) = UNKNOWN.iter().find(|name| undeclared.contains(**name)) {
            return Err(fault(format!("it uses `{unknown}`, which is not supported")));
        }
        let limits = WorkLimits::of("chat template", Path::new(&place), 16, 20.0).counting_steps();
        Ok(Self { environment, markers, has_generation: rewritten.has_generation, tokens, source, place, limits })
    }

    /// The text of one of the templates, within bounds for a conversation of this size.
    fn rendered(
        &self,
        environment: &Environment<'_>,
        name: &str,
        context: Value,
        of: &Conversation,
    ) -> Result<String, DataError> {
        self.limits.within(of.size(), || render(environment, name, context)).map_err(|error| self.fault(words(&error)))
    }

    /// The special tokens that it is told, by their names.
    pub(super) fn tokens(&self) -> &[(String, String)] {
        &self.tokens
    }

    /// The template itself.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template says itself what the assistant writes.
    pub(super) fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// The text of a conversation, and behind it, where `adds_generation_prompt`, what the assistant's next message begins with.
    pub(super) fn render(&self, conversation: &Conversation, adds_generation_prompt: bool) -> Result<String, DataError> {
        self.render_messages(conversation, &conversation.messages, adds_generation_prompt)
    }

    /// The same of other messages.
    pub(super) fn render_messages(
        &self,
        conversation: &Conversation,
        messages: &[Json],
        adds_generation_prompt: bool,
    ) -> Result<String, DataError> {
        let context = self.context(conversation, messages, adds_generation_prompt);
        self.rendered(&self.environment, PLAIN, context, conversation)
    }

    /// The text of a conversation, and in bytes where the template says that the assistant writes.
    pub(super) fn render_with_spans(&self, conversation: &Conversation) -> Result<(String, Vec<Range<usize>>), DataError> {
        let text = self.render(conversation, false)?;
        let context = self.context(conversation, &conversation.messages, false);
        let (marked, markers) = if conversation.mentions(self.markers) {
            let markers = Markers::absent_from(&|marker| self.source.contains(marker) || conversation.contains(marker));
            let mut environment = self.environment.clone();
            environment.add_filter(GENERATION, markers.filter());
            (self.rendered(&environment, MARKED, context, conversation)?, markers)
        } else {
            (self.rendered(&self.environment, MARKED, context, conversation)?, self.markers)
        };
        match taken_out(&marked, markers) {
            Some((same, spans)) if same == text => Ok((text, spans)),
            _ => Err(self.fault(
                "it changes text around its generation tags, so that nobody can say where the assistant's ends".to_owned(),
            )),
        }
    }

    /// The text of a conversation up to the end of what its last message says, so that the model goes on with that message.
    pub(super) fn render_to_continue(&self, conversation: &Conversation) -> Result<String, DataError> {
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
        Ok(if rendered[at..].starts_with(CONTINUED) {
            cut.to_owned()
        } else {
            cut.trim_end_matches(python_methods::is_space).to_owned()
        })
    }

    /// What the template sees: the caller's own variables come last, and win.
    fn context(&self, conversation: &Conversation, messages: &[Json], adds_generation_prompt: bool) -> Value {
        let optional = |value: &Option<Json>| value.as_ref().map_or(Value::from(()), value_of);
        let known = [
            ("messages", messages.iter().map(value_of).collect::<Value>()),
            ("tools", optional(&conversation.tools)),
            ("documents", optional(&conversation.documents)),
            ("add_generation_prompt", Value::from(adds_generation_prompt)),
        ];
        let known = known.into_iter().map(|(name, value)| (name.to_owned(), value));
        let tokens = self.tokens.iter().map(|(name, token)| (name.clone(), Value::from(&token[..])));
        let own = conversation.variables.iter().map(|(name, value)| (name.clone(), value_of(value)));
        Value::from_pairs(known.chain(tokens).chain(own))
    }

    pub(super) fn fault(&self, message: String) -> DataError {
        DataError::ChatTemplate { place: self.place.clone(), message }
    }
}

fn environment(now: Option<NaiveDateTime>) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default());
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION);
    environment.set_unknown_method_callback(python_methods::call);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    python_filters::add(&mut environment);
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
    });
    environment.add_function(STRFTIME, move |format: &str| -> Result<String, Error> {
        let mut date = String::new();
        let unknown = |_| Error::new(ErrorKind::InvalidOperation, format!("`{format}` is no format of a date"));
        write!(date, "{}", now.unwrap_or_else(|| chrono::Local::now().naive_local()).format(format)).map_err(unknown)?;
        Ok(date)
    });
    environment
}

fn render(environment: &Environment<'_>, name: &str, context: Value) -> Result<String, Error> {
    let mut out = Limited(Vec::new());
    environment.get_template(name)?.render_captured_to(context, &mut out)?;
    String::from_utf8(out.0).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// Text that may only grow so long.
struct Limited(Vec<u8>);

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MOST_BYTES {
            return Err(io::Error::other(format!("the text grows beyond {} MiB", MOST_BYTES >> 20)));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What an error says: what the template itself raises, as it is.
fn words(error: &Error) -> String {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        _ => format!("{error}{cause}"),
    }
}

/// JSON as the template sees it; the keys of objects stay in their order.
fn value_of(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(yes) => Value::from(*yes),
        Json::Number(number) => number
            .as_i64()
            .map(Value::from)
            .or_else(|| number.as_u64().map(Value::from))
            .unwrap_or_else(|| Value::from(number.as_f64().unwrap_or(f64::NAN))),
        Json::String(text) => Value::from(&text[..]),
        Json::Array(items) => items.iter().map(value_of).collect(),
        Json::Object(fields) => Value::from_pairs(fields.iter().map(|(name, value)| (name.clone(), value_of(value)))),
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// A template from its text, with `</s>` as `eos_token`, at a time of its own.
    pub(in super::super) fn template(source: &str) -> Result<ChatTemplate, DataError> {
        let now = chrono::NaiveDate::from_ymd_opt(2026, 11, 22).unwrap().and_hms_opt(14, 5, 9);
        ChatTemplate::new(source, vec![("eos_token".to_owned(), "</s>".to_owned())], "t.jinja".to_owned(), now)
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
            let got = template.and_then(|template| match row.get("spans") {
                None => Ok((template.render(&conversation, true)?, Json::Null)),
                Some(_) if !template.has_generation() => Ok((template.render(&conversation, true)?, json!([]))),
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
