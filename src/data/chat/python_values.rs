//! Values as Python writes them: numbers as `repr`, and `json.dumps` with the options that templates use.

use std::fmt::Write;

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Error, Value};
use serde_json::Value as Json;

use super::python_methods::{fault, named};

/// Blanks of an indentation at most.
pub(super) const MAX_INDENT: usize = 256;

const MAX_DEPTH: usize = 256;

const MAX_TEXT: usize = 32 << 20;

struct JsonStyle {
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

/// The filter `tojson` of Transformers: `json.dumps(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let options = named(&["ensure_ascii", "indent", "separators", "sort_keys"], args)?;
    let flag = |name| Ok::<_, Error>(options.get::<Option<bool>>(name)?.unwrap_or(false));
    let (ensure_ascii, sort_keys) = (flag("ensure_ascii")?, flag("sort_keys")?);
    let [indent, separators] = [options.get::<Option<Value>>("indent")?, options.get("separators")?];
    let indent = indent.map(|indent| indentation(&indent)).transpose()?;
    let (item, key) = match separators {
        Some(pair) => pair_of(&pair)?,
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let mut out = String::new();
    JsonStyle { ensure_ascii, indent, item, key, sort_keys }.write(value, 0, &mut out)?;
    Ok(Value::from(out))
}

pub(super) fn float_text(number: f64) -> String {
    if !number.is_finite() {
        return format!("{number:?}").to_lowercase();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{number:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

pub(super) fn as_float(value: &Value) -> Option<f64> {
    (value.is_number() && !value.is_integer()).then(|| f64::try_from(value.clone()).ok()).flatten()
}

pub(super) fn text_of(value: &Value) -> String {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map if !value.is_kwargs() => repr(value, 0),
        _ => value.to_string(),
    }
}

fn repr(value: &Value, depth: usize) -> String {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        _ if depth > MAX_DEPTH => "...".to_owned(),
        ValueKind::Number => as_float(value).map_or_else(|| value.to_string(), float_text),
        ValueKind::String => text_repr(value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let items: Vec<String> = items().map(|item| repr(&item, depth + 1)).collect();
            match &items[..] {
                [alone] if value.is_tuple() => format!("({alone},)"),
                _ if value.is_tuple() => format!("({})", items.join(", ")),
                _ => format!("[{}]", items.join(", ")),
            }
        }
        ValueKind::Map => {
            let of_key = |key: &Value| repr(&value.get_item(key).unwrap_or_default(), depth + 1);
            let pairs: Vec<String> = items().map(|key| format!("{}: {}", repr(&key, depth + 1), of_key(&key))).collect();
            format!("{{{}}}", pairs.join(", "))
        }
        _ => value.to_string(),
    }
}

/// In single quotes, unless only they occur in it; what cannot be seen is escaped.
fn text_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => {
                let code = u32::from(c);
                let _ = match code {
                    ..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
    out
}

/// What Python shows as it is. Rust shows the same characters, but for those that join what stands before them, alone.
fn is_printable(c: char) -> bool {
    let mut behind = [b'a'; 5];
    let end = 1 + c.encode_utf8(&mut behind[1..]).len();
    matches!(c, '\'' | '"') || std::str::from_utf8(&behind[..end]).is_ok_and(|text| text.escape_debug().count() == 2)
}

fn indentation(indent: &Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str() {
        return Ok(text.to_owned());
    }
    let width = indent.as_i64().ok_or_else(|| fault("tojson: `indent` must be a number or a text"))?;
    if width > MAX_INDENT as i64 {
        return Err(fault(format!("tojson: `indent` of {width} is more than {MAX_INDENT}")));
    }
    Ok(" ".repeat(width.max(0) as usize))
}

fn pair_of(separators: &Value) -> Result<(String, String), Error> {
    let all: Vec<Value> = separators.try_iter()?.collect();
    match &all[..] {
        [item, key] => item.as_str().zip(key.as_str()).map(|(item, key)| (item.to_owned(), key.to_owned())),
        _ => None,
    }
    .ok_or_else(|| fault("tojson: `separators` must be two texts"))
}

impl JsonStyle {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(fault(format!("tojson: more than {MAX_DEPTH} lists within lists")));
        }
        if out.len() > MAX_TEXT {
            return Err(fault(format!("tojson: the text is longer than {MAX_TEXT} bytes")));
        }
        let items = match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                value.try_iter()?.checked().map(|item| Ok((None, item?))).collect::<Result<Vec<_>, Error>>()?
            }
            ValueKind::Map => self.pairs(value)?,
            _ => {
                out.push_str(&self.scalar(value)?);
                return Ok(());
            }
        };
        let [open, close] = if value.kind() == ValueKind::Map { ['{', '}'] } else { ['[', ']'] };
        out.push(open);
        for (index, (key, item)) in items.iter().enumerate() {
            out.push_str(if index > 0 { &self.item } else { "" });
            self.new_line(depth + 1, out);
            if let Some(key) = key {
                out.extend([&self.text(key)[..], &self.key]);
            }
            self.write(item, depth + 1, out)?;
        }
        if !items.is_empty() {
            self.new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn scalar(&self, value: &Value) -> Result<String, Error> {
        match value.kind() {
            ValueKind::None => Ok("null".to_owned()),
            ValueKind::Bool => Ok(value.is_true().to_string()),
            ValueKind::Number => Ok(number(value)),
            ValueKind::String => Ok(self.text(value.as_str().unwrap_or_default())),
            ValueKind::Undefined => Err(fault("Object of type Undefined is not JSON serializable")),
            other => Err(fault(format!("Object of type {other} is not JSON serializable"))),
        }
    }

    fn pairs(&self, map: &Value) -> Result<Vec<(Option<String>, Value)>, Error> {
        let keys: Vec<Value> = map.try_iter()?.checked().collect::<Result<_, _>>()?;
        let mut pairs = Vec::with_capacity(keys.len());
        for key in &keys {
            let name = match key.kind() {
                ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                ValueKind::Number | ValueKind::Bool | ValueKind::None => self.scalar(key)?,
                other => return Err(fault(format!("keys must be str, int, float, bool or None, not {other}"))),
            };
            pairs.push((Some(name), map.get_item(key)?));
        }
        if self.sort_keys {
            if keys.iter().any(|key| key.kind() != ValueKind::String) {
                return Err(fault("tojson: `sort_keys` sorts texts alone"));
            }
            pairs.sort_by(|a, b| a.0.cmp(&b.0));
        }
        Ok(pairs)
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(&indent[..], depth));
        }
    }

    fn text(&self, text: &str) -> String {
        // What JSON must escape Python writes alike.
        let json = Json::from(text).to_string();
        if !self.ensure_ascii {
            return json;
        }
        let mut ascii = String::with_capacity(json.len());
        for c in json.chars() {
            if (' '..='~').contains(&c) {
                ascii.push(c);
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(ascii, "\\u{unit:04x}");
                }
            }
        }
        ascii
    }
}

fn number(value: &Value) -> String {
    match as_float(value) {
        Some(number) if number.is_nan() => "NaN".to_owned(),
        Some(number) if number.is_infinite() => if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        Some(number) => float_text(number),
        None => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_written_as_in_python() {
        let of = |value: Value| text_of(&value);
        assert_eq!(
            of(Value::from(vec!["a'b", "\"'", "é\u{301}🍐", "\u{7f}\u{200b}\u{2028}\u{e0001}\\"])),
            concat!(r#"["a'b", '"\''"#, ", 'é\u{301}🍐', ", r"'\x7f\u200b\u2028\U000e0001\\']")
        );
        let tuple = |items: Vec<Value>| Value::from(minijinja::value::Tuple::from(items));
        assert_eq!(of(tuple(vec![Value::from(1e20)])), "(1e+20,)");
        assert_eq!(of(Value::from_pairs([("a", tuple(vec![])), ("b", Value::from(()))])), "{'a': (), 'b': None}");
        assert_eq!(of(Value::from("it's")), "it's");
    }

    #[test]
    fn floats_are_written_as_in_python() {
        let known = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (1e20, "1e+20"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1e-4, "0.0001"),
            (1.5e-7, "1.5e-07"),
            (1e-300, "1e-300"),
            (123_456_789.123, "123456789.123"),
            (f64::NEG_INFINITY, "-inf"),
        ];
        for (number, text) in known {
            assert_eq!(float_text(number), text);
        }
    }
}
