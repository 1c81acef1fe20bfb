//! Rewrites what Transformers' templates have and minijinja has not: `{% generation %}`, and loops over nothing, which Python refuses.

use std::sync::LazyLock;

use regex::Regex;

/// The filter around what an assistant writes, and the variable that says whether it sets marks around that.
pub(super) const GENERATION: &str = "__generation";
pub(super) const IS_MARKED: &str = "__is_marked";

/// The filter that refuses to walk over what is no list.
pub(super) const WALKED: &str = "__walked";

static END_OF_RAW: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\{%[-+]?\s*endraw\s*[-+]?%\}").ok());

#[derive(Default)]
pub(super) struct Rewritten {
    pub(super) text: String,
    pub(super) has_generation: bool,
}

/// Rewrites a template. What stands in comments, in raw blocks and in strings stays as it is.
pub(super) fn rewrite(source: &str) -> Rewritten {
    let mut out = Rewritten::default();
    let mut rest = source;
    while let Some((start, _)) = rest.match_indices('{').find(|&(at, _)| rest[at + 1..].starts_with(['{', '%', '#'])) {
        let (text, tag) = rest.split_at(start);
        out.text.push_str(text);
        let end = match &tag[..2] {
            "{#" => tag.find("#}").map(|end| end + 2),
            "{{" => closing(tag, "}}"),
            _ => closing(tag, "%}"),
        };
        // What is never closed is minijinja's to refuse.
        let Some(end) = end else {
            rest = tag;
            break;
        };
        let (tag, behind) = tag.split_at(end);
        rest = behind;
        if !tag.starts_with("{%") {
            out.text.push_str(tag);
            continue;
        }
        out.block(tag);
        if word(inside(tag)).0 == "raw" {
            let end = END_OF_RAW.as_ref().and_then(|end| end.find(rest)).map_or(rest.len(), |found| found.end());
            out.text.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out.text.push_str(rest);
    out
}

impl Rewritten {
    fn block(&mut self, tag: &str) {
        let (name, arguments) = word(inside(tag));
        let (open, close) = signs(tag);
        let rewritten = match name {
            // The scope is that of Transformers: what is set inside stays inside, but for a namespace. A macro knows only variables that are
            // mentioned in it, which in the arguments of a filter does not count.
            "generation" if arguments.trim().is_empty() => {
                self.has_generation = true;
                Some(format!("{{%{open} with __marks = {IS_MARKED} %}}{{% filter {GENERATION}(__marks) {close}%}}"))
            }
            "endgeneration" if arguments.trim().is_empty() => Some(format!("{{%{open} endfilter %}}{{% endwith {close}%}}")),
            "for" => walked(arguments)
                .map(|(targets, list, condition)| format!("{{%{open} for{targets}in ({list})|{WALKED} {condition} {close}%}}")),
            // All values are those outside of the block.
            "with" => assigned(arguments).map(|(targets, values)| format!("{{%{open} with ({targets}) = ({values}) {close}%}}")),
            // A macro of minijinja's does not see a namespace that it only assigns to: it is mentioned.
            "set" => arguments.split_once('=').and_then(|(target, value)| {
                let (namespace, value) = (target.split_once('.')?.0.trim(), value.trim());
                Some(format!("{{%{open} set{target}= (({value}), {namespace})[0] {close}%}}"))
            }),
            _ => None,
        };
        self.text.push_str(rewritten.as_deref().unwrap_or(tag));
    }
}

/// The length of a tag up to its end, over strings and braces.
fn closing(tag: &str, end: &str) -> Option<usize> {
    let mut outermost = outside_strings(&tag[2..]).filter(|&(.., depth)| depth == 0);
    outermost.find(|&(at, ..)| tag[at + 2..].starts_with(end)).map(|(at, ..)| at + 4)
}

/// The ASCII characters of an expression that are in no string, each with the brackets that are open before it.
fn outside_strings(text: &str) -> impl Iterator<Item = (usize, u8, usize)> + '_ {
    let (mut quote, mut escaped, mut depth) = (None, false, 0usize);
    let outside = text.bytes().enumerate().filter(move |&(_, byte)| {
        let is_outside = quote.is_none();
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if byte == b'\\' => escaped = true,
            Some(open) if byte == open => quote = None,
            None if byte == b'"' || byte == b'\'' => quote = Some(byte),
            _ => {}
        }
        is_outside && quote.is_none() && byte.is_ascii()
    });
    outside.map(move |(at, byte)| {
        let before = depth;
        match byte {
            b'{' | b'[' | b'(' => depth += 1,
            b'}' | b']' | b')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        (at, byte, before)
    })
}

fn signs(tag: &str) -> (&str, &str) {
    let sign = |at: usize| if matches!(tag.as_bytes()[at], b'-' | b'+') { &tag[at..=at] } else { "" };
    if tag.len() < 5 { ("", "") } else { (sign(2), sign(tag.len() - 3)) }
}

/// What stands between the delimiters and the signs of a tag.
fn inside(tag: &str) -> &str {
    let (open, close) = signs(tag);
    tag.get(2 + open.len()..tag.len() - 2 - close.len()).unwrap_or_default()
}

fn word(text: &str) -> (&str, &str) {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    text.split_at(end)
}

/// The targets of `with a = 1, b = 2`, and their values; `None` where there is one.
fn assigned(arguments: &str) -> Option<(String, String)> {
    let (mut start, mut parts) = (0, Vec::new());
    for (at, ..) in outside_strings(arguments).filter(|&(_, byte, depth)| byte == b',' && depth == 0) {
        parts.push(&arguments[start..at]);
        start = at + 1;
    }
    parts.push(&arguments[start..]);
    let pairs: Vec<(&str, &str)> = parts.into_iter().map(|part| part.split_once('=')).collect::<Option<_>>()?;
    let join = |of: fn(&(&str, &str)) -> String| pairs.iter().map(of).collect::<Vec<_>>().join(", ");
    (pairs.len() > 1).then(|| (join(|pair| pair.0.trim().to_owned()), join(|pair| format!("({})", pair.1.trim()))))
}

/// The parts of `for TARGETS in LIST [if …] [recursive]`.
fn walked(arguments: &str) -> Option<(&str, &str, &str)> {
    let (mut list, mut end) = (None, arguments.len());
    let bytes = arguments.as_bytes();
    let is_name = |at: usize| bytes.get(at).is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_' || !byte.is_ascii());
    for (at, _, depth) in outside_strings(arguments) {
        if depth > 0 || !is_name(at) || (at > 0 && (is_name(at - 1) || bytes[at - 1] == b'.')) {
            continue;
        }
        match (word(&arguments[at..]).0, list) {
            ("in", None) => list = Some(at),
            ("if" | "recursive", Some(_)) => {
                end = at;
                break;
            }
            _ => {}
        }
    }
    let list = list?;
    Some((&arguments[..list], arguments[list + 2..end].trim(), arguments[end..].trim()))
}
