//! A template's text, compiled by minijinja with what Transformers gives to templates, and what it makes of a conversation.

use std::fmt::Write as _;
use std::io::{self, Write};

use chrono::NaiveDateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};

use super::conversation::Conversation;
use super::marks::{CLOSE, OPEN};
use super::python_methods::fault;
use super::scan::{GENERATION, IS_MARKED, rewrite};
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

impl TemplateText {
    /// What the template sees of some messages of a conversation: the caller's own variables win. `is_marked`: with marks around the text of
    /// generation tags.
    pub(super) fn context(
        &self,
        of: &Conversation,
        messages: &[Json],
        adds_generation_prompt: bool,
        is_marked: bool,
    ) -> Map<String, Json> {
        let known = [
            ("messages", json!(messages)),
            ("tools", json!(of.tools)),
            ("documents", json!(of.documents)),
            ("add_generation_prompt", json!(adds_generation_prompt)),
        ];
        let known = known.into_iter().map(|(name, value)| (name.to_owned(), value));
        let tokens = self.tokens.iter().map(|(name, token)| (name.clone(), json!(token)));
        // No caller's variable can set marks.
        known.chain(tokens).chain(of.variables.clone()).chain([(IS_MARKED.to_owned(), json!(is_marked))]).collect()
    }
}

#[derive(Debug)]
pub(super) struct CompiledTemplate(Environment<'static>);

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
        let mut environment = environment(text.now.as_ref().and_then(|now| now.parse().ok()));
        environment.add_template_owned(NAME, rewrite(&text.source).text).map_err(|error| error.to_string())?;
        let template = environment.get_template(NAME).map_err(|error| error.to_string())?;
        let undeclared = template.undeclared_variables(false);
        if let Some(unknown) = UNKNOWN.iter().find(|name| undeclared.contains(**name)) {
            return Err(format!("it uses `{unknown}`, which is not supported"));
        }
        Ok(Self(environment))
    }

    pub(super) fn render(&self, context: Value) -> Result<String, String> {
        let mut out = Limited(Vec::new());
        let template = self.0.get_template(NAME);
        let done = template.and_then(|template| template.render_captured_to(context, &mut out).map(|_| ()));
        done.map_err(|error| words(&error))?;
        String::from_utf8(out.0).map_err(|error| error.to_string())
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
    environment.add_filter(
        GENERATION,
        |text: String, is_marked: bool| {
            if is_marked { [OPEN, &text, CLOSE].concat() } else { text }
        },
    );
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
