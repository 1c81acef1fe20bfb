//! Methods of Python's texts, lists and dictionaries that minijinja's own collection lacks or has otherwise.

use std::sync::LazyLock;

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;
use regex::Regex;

use crate::metrics::is_space;

/// Columns of a padded text at most.
const MAX_COLUMNS: usize = 1 << 16;

pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match value.kind() {
        ValueKind::String => text_method(value.as_str().unwrap_or_default(), method, args)?,
        ValueKind::Seq if method == "index" => Some(index_in_list(value, args)?),
        ValueKind::Map if method == "copy" => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        _ => None,
    };
    own.map_or_else(|| pycompat::unknown_method_callback(state, value, method, args), Ok)
}

/// `strip`, also as the filter `trim`.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    let goes = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(goes) } else { text };
    if end { text.trim_end_matches(goes) } else { text }
}

pub(super) fn fault(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

static DECIMALS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"^\p{Nd}+$").ok());

/// What a filter is given, by the names that Jinja2 has for it, in the order of its places.
pub(super) fn named(names: &[&str], args: Rest<ValueOrKwargs>) -> Result<Kwargs, Error> {
    let mut args = args.into_values();
    let by_name = args.pop_if(|last| last.is_kwargs()).map(Kwargs::try_from).transpose()?;
    if args.len() > names.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut all: Vec<(&str, Value)> = names.iter().copied().zip(args).collect();
    for (name, options) in by_name.iter().flat_map(|options| options.args().map(move |name| (name, options))) {
        if !names.contains(&name) {
            return Err(Error::new(ErrorKind::TooManyArguments, format!("unknown keyword argument '{name}'")));
        }
        if all.iter().any(|(given, _)| *given == name) {
            return Err(fault(format!("got multiple values for argument '{name}'")));
        }
        all.push((name, options.get(name)?));
    }
    Ok(all.into_iter().collect())
}

fn text_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => split(text, args, method == "rsplit")?,
        "splitlines" => {
            let (keep, options): (Option<bool>, Kwargs) = from_args(args)?;
            let keep = keep.or(options.get("keepends")?).unwrap_or(false);
            options.assert_all_used()?;
            split_lines(text, keep)
        }
        "partition" | "rpartition" => {
            let (border,): (&str,) = from_args(args)?;
            if border.is_empty() {
                return Err(fault("empty separator"));
            }
            let parts = if method == "partition" {
                text.split_once(border).map_or([text, "", ""], |(before, after)| [before, border, after])
            } else {
                text.rsplit_once(border).map_or(["", "", text], |(before, after)| [before, border, after])
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith" => searched(text, method, args)?,
        "removeprefix" | "removesuffix" => {
            let (part,): (&str,) = from_args(args)?;
            let rest = if method == "removeprefix" { text.strip_prefix(part) } else { text.strip_suffix(part) };
            Value::from(rest.unwrap_or(text))
        }
        "zfill" | "ljust" | "rjust" | "center" => Value::from(padded(text, method, args)?),
        "swapcase" | "casefold" | "isdecimal" | "isspace" | "title" => {
            let () = from_args(args)?;
            match method {
                "swapcase" => Value::from(text.chars().map(swapped).collect::<String>()),
                "casefold" => Value::from(text.to_lowercase().replace('ß', "ss").replace('ς', "σ")),
                "isdecimal" => Value::from(DECIMALS.as_ref().is_some_and(|digits| digits.is_match(text))),
                "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
                _ => Value::from(title(text)),
            }
        }
        _ => return Ok(None),
    }))
}

/// What is found in the part of a text from one character to another; a negative number counts from the end.
fn searched(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (wanted, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let len = text.chars().count() as i64;
    let place = |at: i64| if at < 0 { (at + len).max(0) } else { at };
    let (start, end) = (place(start.unwrap_or(0)), place(end.unwrap_or(len)).min(len));
    let byte = |at: i64| text.char_indices().nth(at as usize).map_or(text.len(), |(byte, _)| byte);
    let part = (start <= end).then(|| &text[byte(start)..byte(end)]);
    let of_text = |wanted: &Value| {
        wanted.as_str().map(str::to_owned).ok_or_else(|| fault(format!("{method}: expected a text, found {}", wanted.kind())))
    };
    if method == "startswith" || method == "endswith" {
        let any = if wanted.is_tuple() { wanted.try_iter()?.collect() } else { vec![wanted.clone()] };
        let any: Vec<String> = any.iter().map(of_text).collect::<Result<_, Error>>()?;
        let is = |part: &str| {
            any.iter().any(|wanted| if method == "endswith" { part.ends_with(wanted) } else { part.starts_with(wanted) })
        };
        return Ok(Value::from(part.is_some_and(is)));
    }
    let wanted = of_text(wanted)?;
    if method == "count" {
        return Ok(Value::from(part.map_or(0, |part| part.matches(&wanted).count())));
    }
    let found = part.and_then(|part| {
        let at = if method.starts_with('r') { part.rfind(&wanted) } else { part.find(&wanted) };
        at.map(|at| start + part[..at].chars().count() as i64)
    });
    match found {
        None if method.ends_with("index") => Err(fault("substring not found")),
        found => Ok(Value::from(found.unwrap_or(-1))),
    }
}

fn split(text: &str, args: &[Value], from_end: bool) -> Result<Value, Error> {
    let (border, most, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let border = border.or(options.get("sep")?).filter(|border| !border.is_none());
    let most = most.or(options.get("maxsplit")?).unwrap_or(-1);
    options.assert_all_used()?;
    let parts = usize::try_from(most).map_or(usize::MAX, |most| most.saturating_add(1));
    let mut found: Vec<&str> = match &border {
        Some(border) => {
            let border = border.as_str().filter(|border| !border.is_empty());
            let border = border.ok_or_else(|| fault("split: the separator must be a text"))?;
            if from_end { text.rsplitn(parts, border).collect() } else { text.splitn(parts, border).collect() }
        }
        None => split_at_space(text, parts, from_end),
    };
    if from_end {
        found.reverse();
    }
    Ok(found.into_iter().map(Value::from).collect())
}

/// At runs of white space; from the end the parts come in reverse. The last part keeps the space at its far end.
fn split_at_space(text: &str, parts: usize, from_end: bool) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = strip(text, None, !from_end, from_end);
    while !rest.is_empty() {
        let border = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = border.filter(|_| found.len() + 1 < parts) else {
            found.push(rest);
            break;
        };
        let width = rest[at..].chars().next().map_or(1, char::len_utf8);
        let (before, after) = (&rest[..at], &rest[at + width..]);
        found.push(if from_end { after } else { before });
        rest = strip(if from_end { before } else { after }, None, !from_end, from_end);
    }
    found
}

/// At all that Python takes for the end of a line.
fn split_lines(text: &str, keep: bool) -> Value {
    let ends = ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(ends) {
        let width = if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(1, char::len_utf8) };
        lines.push(Value::from(&rest[..if keep { at + width } else { at }]));
        rest = &rest[at + width..];
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    Value::from(lines)
}

fn padded(text: &str, method: &str, args: &[Value]) -> Result<String, Error> {
    let (columns, with): (usize, Option<&str>) = from_args(args)?;
    if columns > MAX_COLUMNS {
        return Err(fault(format!("{method}: {columns} columns are more than {MAX_COLUMNS}")));
    }
    let with = if method == "zfill" { "0" } else { with.unwrap_or(" ") };
    let missing = columns.saturating_sub(text.chars().count());
    let (before, after) = match method {
        "ljust" => (0, missing),
        "center" => (missing / 2 + (missing & columns & 1), missing - missing / 2 - (missing & columns & 1)),
        _ => (missing, 0),
    };
    let sign = usize::from(method == "zfill" && text.starts_with(['+', '-']));
    Ok([&text[..sign], &with.repeat(before), &text[sign..], &with.repeat(after)].concat())
}

fn swapped(c: char) -> String {
    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
}

/// Each run of letters with its first in upper case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut is_inside = false;
    for c in text.chars() {
        if is_inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        is_inside = c.is_alphabetic();
    }
    out
}

fn index_in_list(list: &Value, args: &[Value]) -> Result<Value, Error> {
    let (wanted,): (&Value,) = from_args(args)?;
    let mut items = list.try_iter()?;
    items.position(|item| item == *wanted).map(Value::from).ok_or_else(|| fault(format!("{wanted} is not in list")))
}

#[cfg(test)]
mod tests {
    use super::super::template_tests::rendered;

    #[test]
    fn texts_have_the_methods_of_python() {
        let known = [
            ("' a  b c '.split(none, 1)", "['a', 'b c ']"),
            ("' a  b c '.rsplit(none, 1)", "[' a  b', 'c']"),
            ("' a  b '.split()", "['a', 'b']"),
            ("'a,b,c'.rsplit(',', 1)", "['a,b', 'c']"),
            ("'a,b'.split(sep=',', maxsplit=1)", "['a', 'b']"),
            ("'a=b=c'.partition('=')", "('a', '=', 'b=c')"),
            ("'abc'.rpartition('=')", "('', '', 'abc')"),
            ("'a\\r\\nb\\x0bc\\n'.splitlines()", "['a', 'b', 'c']"),
            ("'a\\nb'.splitlines(true)", "['a\\n', 'b']"),
            ("'-7'.zfill(4)", "-007"),
            ("'ab'.center(5, '*')", "**ab*"),
            ("'abc'.center(6, '*')", "*abc**"),
            ("'ab'.rjust(4) ~ '|' ~ 'ab'.ljust(4) ~ '|'", "  ab|ab  |"),
            ("'héllo'.index('l')", "2"),
            ("'aBß'.swapcase()", "AbSS"),
            ("'Straße'.casefold()", "strasse"),
            ("\"they're bill's\".title()", "They'Re Bill'S"),
            ("'\\x1ca\\u00a0'.strip()|length", "1"),
            ("[1, 2, 3].index(3)", "2"),
            ("{'a': 1}.copy()", "{'a': 1}"),
            ("'abc'.removeprefix('a').removesuffix('c')", "b"),
        ];
        for (expression, text) in known {
            assert_eq!(rendered(&format!("{{{{ {expression} }}}}")).unwrap(), text, "{expression}");
        }
        for refused in
            ["'a'.index('b')", "'a'.partition('')", "[1].index(2)", "'a'.center(99999999)", "'a'.nosuch()", "'a'.split('')"]
        {
            assert!(rendered(&format!("{{{{ {refused} }}}}")).is_err(), "{refused}");
        }
    }
}
