//! A template's text, compiled by minijinja with what Transformers gives to templates, and what it makes of a conversation.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

use chrono::NaiveDateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use super::markers::Markers;
use super::python_methods::fault;
use super::scan::{GENERATION, rewrite};
use super::{python_filters, python_methods};

/// All that decides what a template makes of a conversation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TemplateText {
    pub(super) source: String,
    /// The special tokens by their names, as `bos_token`.
    pub(super) tokens: Vec<(String, String)>,
    /// What it takes for the time, instead of the local one, as ISO 8601 has it.
    pub(super) now: Option<String>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Rendering<'a> {
    /// What stands around the text of generation tags, which leave no trace without it.
    pub(super) markers: Option<Markers>,
    pub(super) messages: Cow<'a, [Json]>,
    pub(super) tools: Cow<'a, Option<Json>>,
    pub(super) documents: Cow<'a, Option<Json>>,
    pub(super) variables: Cow<'a, Map<String, Json>>,
    pub(super) adds_generation_prompt: bool,
}

#[derive(Debug)]
pub(super) struct CompiledTemplate {
    environment: Environment<'static>,
    tokens: Vec<(String, String)>,
    pub(super) has_generation: bool,
}

/// Steps of a rendering, after which it is given up.
const FUEL: u64 = 50_000_000;
const RECURSION: usize = 200;
/// Bytes of a rendering at most.
pub(super) const MAX_RENDERING: usize = 64 << 20;
pub(super) const STRFTIME: &str = "strftime_now";
const NAME: &str = "chat_template";
/// What Jinja2 knows everywhere, and minijinja does not.
const UNKNOWN: [&str; 5] = ["varargs", "kwargs", "cycler", "joiner", "lipsum"];

impl CompiledTemplate {
    pub(super) fn new(text: &TemplateText) -> Result<Self, String> {
        let rewritten = rewrite(&text.source);
        let mut environment = environment(text.now.as_ref().and_then(|now| now.parse().ok()));
        environment.add_filter(GENERATION, |text: String| text);
        environment.add_template_owned(NAME, rewritten.text).map_err(|error| error.to_string())?;
        let template = environment.get_template(NAME).map_err(|error| error.to_string())?;
        let undeclared = template.undeclared_variables(false);
        if let Some(unknown) = UNKNOWN.iter().find(|name| undeclared.contains(**name)) {
            return Err(format!("it uses `{unknown}`, which is not supported"));
        }
        Ok(Self { environment, tokens: text.tokens.clone(), has_generation: rewritten.has_generation })
    }

    pub(super) fn render(&self, rendering: &Rendering<'_>) -> Result<String, String> {
        let mut environment = Cow::Borrowed(&self.environment);
        if let Some(Markers { open, close }) = rendering.markers {
            environment.to_mut().add_filter(GENERATION, move |text: String| format!("{open}{text}{close}"));
        }
        let mut out = Limited(Vec::new());
        let template = environment.get_template(NAME);
        let done = template.and_then(|template| template.render_captured_to(self.context(rendering), &mut out).map(|_| ()));
        done.map_err(|error| words(&error))?;
        String::from_utf8(out.0).map_err(|error| error.to_string())
    }

    /// What the template sees: the caller's own variables come last, and win.
    fn context(&self, rendering: &Rendering<'_>) -> Value {
        let optional = |value: &Option<Json>| value.as_ref().map_or(Value::from(()), value_of);
        let known = [
            ("messages", rendering.messages.iter().map(value_of).collect::<Value>()),
            ("tools", optional(&rendering.tools)),
            ("documents", optional(&rendering.documents)),
            ("add_generation_prompt", Value::from(rendering.adds_generation_prompt)),
        ];
        let known = known.into_iter().map(|(name, value)| (name.to_owned(), value));
        let tokens = self.tokens.iter().map(|(name, token)| (name.clone(), Value::from(&token[..])));
        let own = rendering.variables.iter().map(|(name, value)| (name.clone(), value_of(value)));
        Value::from_pairs(known.chain(tokens).chain(own))
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
    environment.add_function("raise_exception", |message: Value| Err::<Value, Error>(fault(message.to_string())));
    environment.add_function(STRFTIME, move |format: &str| -> Result<String, Error> {
        let mut date = String::new();
        let now = now.unwrap_or_else(|| chrono::Local::now().naive_local());
        let written = write!(date, "{}", now.format(&of_python(format)));
        written.map(|()| date).map_err(|_| fault(format!("`{format}` is no format of a date")))
    });
    environment
}

/// A format as chrono has it: Python's fractions of a second have six digits, and its local time no zone.
fn of_python(format: &str) -> String {
    let (mut out, mut signs) = (String::new(), format.chars());
    while let Some(sign) = signs.next() {
        match (sign, if sign == '%' { signs.next() } else { None }) {
            ('%', Some('f')) => out.push_str("%6f"),
            ('%', Some('z' | 'Z')) => {}
            (sign, behind) => out.extend([Some(sign), behind].into_iter().flatten()),
        }
    }
    out
}

struct Limited(Vec<u8>);

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_RENDERING {
            return Err(io::Error::other(format!("the text grows beyond {} MiB", MAX_RENDERING >> 20)));
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
