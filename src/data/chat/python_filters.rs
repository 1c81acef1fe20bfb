//! Filters and tests that are otherwise in minijinja than in Jinja2.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, Output, State, Value, escape_formatter, filters};

use super::python_methods::{fault, named, strip};
use super::python_values::{MAX_INDENT, text_of, tojson};
use super::scan::WALKED;

pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_filter("tojson", tojson);
    environment.add_filter("indent", indent);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("trim", |value: &Value, chars: Option<&str>| strip(&text_of(value), chars, true, true).to_owned());
    environment.add_filter("string", |value: &Value| text_of(value));
    environment.add_filter("wordcount", |value: &Value| {
        text_of(value).split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty()).count()
    });
    environment.add_filter("center", |state: &mut State, text: &Value, width: Option<usize>| {
        super::python_methods::call(state, text, "center", &[Value::from(width.unwrap_or(80))])
    });
    environment.add_filter("truncate", truncate);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_filter("dictsort", |value: &Value, args: Rest<ValueOrKwargs>| {
        let options = named(&["case_sensitive", "by", "reverse"], args)?;
        if options.get::<Option<&str>>("by")?.is_some_and(|by| !["key", "value"].contains(&by)) {
            return Err(fault("dictsort: `by` is `key` or `value`"));
        }
        filters::dictsort(value, options)
    });
    environment.add_filter("sort", |state: &State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>| {
        filters::sort(state, value, named(&["reverse", "case_sensitive", "attribute"], args)?)
    });
    environment.add_filter("unique", |state: &State<'_, '_>, value: Value, args: Rest<ValueOrKwargs>| {
        filters::unique(state, value, named(&["case_sensitive", "attribute"], args)?)
    });
    environment.add_filter(WALKED, walked);
    // Jinja2's read no keys of dictionaries, and break no short lists.
    environment.remove_filter("attr");
    environment.remove_filter("pprint");
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
    });
    environment.set_formatter(|out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value| match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map => out.write_str(&text_of(value)).map_err(Error::from),
        _ => escape_formatter(out, state, value),
    });
}

/// The list of a loop, which must be one.
fn walked(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::None => Err(fault("'NoneType' object is not iterable")),
        ValueKind::Bool | ValueKind::Number => Err(fault(format!("{value} is not iterable"))),
        _ => Ok(value),
    }
}

fn default(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let options = named(&["default_value", "boolean"], args)?;
    let other = if options.has("default_value") { options.get("default_value")? } else { Value::from("") };
    let is_lax = options.get::<Option<Value>>("boolean")?.is_some_and(|lax| lax.is_true());
    Ok(if value.is_undefined() || (is_lax && !value.is_true()) { other } else { value.clone() })
}

/// Quotes become numbers, and a slash stays.
fn escape(value: &Value) -> Value {
    if value.is_safe() {
        return value.clone();
    }
    let pairs = [('&', "&amp;"), ('<', "&lt;"), ('>', "&gt;"), ('"', "&#34;"), ('\'', "&#39;")];
    Value::from_safe_string(pairs.into_iter().fold(text_of(value), |text, (sign, name)| text.replace(sign, name)))
}

/// Jinja2's `indent`: the last line keeps what follows it, and lines of nothing stay so unless `blank` is set.
fn indent(text: &str, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let options = named(&["width", "first", "blank"], args)?;
    let width = options.get::<Option<Value>>("width")?.unwrap_or(Value::from(4));
    let first = options.get::<Option<bool>>("first")?.unwrap_or(false);
    let blank = options.get::<Option<bool>>("blank")?.unwrap_or(false);
    let indentation = match width.as_usize() {
        Some(width) if width <= MAX_INDENT => " ".repeat(width),
        Some(width) => return Err(fault(format!("indent: a width of {width} is more than {MAX_INDENT}"))),
        None => width.as_str().ok_or_else(|| fault("indent: the width must be a number or a text"))?.to_owned(),
    };
    // One more line end, as Jinja2 adds one before it splits the text into lines.
    let text = format!("{text}\n");
    let lines: Vec<&str> = text.split_inclusive('\n').map(|line| line.trim_end_matches(['\n', '\r'])).collect();
    let between = |line: &&str| if blank || !line.is_empty() { format!("\n{indentation}{line}") } else { format!("\n{line}") };
    let rest: String = lines.iter().skip(1).map(between).collect();
    Ok(format!("{}{}{rest}", if first { &indentation } else { "" }, lines.first().unwrap_or(&"")))
}

fn int(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let options = named(&["default", "base"], args)?;
    let default = if options.has("default") { options.get("default")? } else { Value::from(0) };
    let base = options.get::<Option<u32>>("base")?.unwrap_or(10);
    if !(2..=36).contains(&base) {
        return Err(fault(format!("int: a base of {base}")));
    }
    if value.is_integer() {
        return Ok(value.clone());
    }
    if value.kind() == ValueKind::Bool {
        return Ok(Value::from(i64::from(value.is_true())));
    }
    let text = value.as_str().map(|text| strip(text, None, true, true).replace('_', ""));
    let digits = text.as_deref().map(|text| match base {
        16 => text.trim_start_matches("0x"),
        8 => text.trim_start_matches("0o"),
        2 => text.trim_start_matches("0b"),
        _ => text,
    });
    let number = digits.and_then(|digits| i128::from_str_radix(digits, base).ok()).map(Value::from);
    let float = || as_number(value).filter(|number| number.is_finite()).map(|number| Value::from(number.trunc() as i128));
    Ok(number.or_else(float).unwrap_or(default))
}

fn float(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let options = named(&["default"], args)?;
    let default = if options.has("default") { options.get("default")? } else { Value::from(0.0) };
    Ok(as_number(value).map_or(default, Value::from))
}

fn as_number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some(text) => strip(text, None, true, true).parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => value.is_number().then(|| f64::try_from(value.clone()).ok()).flatten(),
    }
}

/// Jinja2's `truncate`: a text that is too long by `leeway` at most stays whole.
fn truncate(text: &str, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let options = named(&["length", "killwords", "end", "leeway"], args)?;
    let length = options.get::<Option<usize>>("length")?.unwrap_or(255);
    let kill = options.get::<Option<bool>>("killwords")?.unwrap_or(false);
    let end = options.get::<Option<String>>("end")?.unwrap_or_else(|| "...".to_owned());
    let leeway = options.get::<Option<usize>>("leeway")?.unwrap_or(5);
    let width = end.chars().count();
    if length < width {
        return Err(fault(format!("truncate: expected length >= {width}, got {length}")));
    }
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let cut: String = text.chars().take(length - width).collect();
    let cut = if kill { &cut } else { cut.rsplit_once(' ').map_or(&cut[..], |(words, _)| words) };
    Ok(format!("{cut}{end}"))
}

#[cfg(test)]
mod tests {
    use super::super::template_tests::rendered;

    #[test]
    fn filters_and_tests_are_those_of_jinja2() {
        let known = [
            ("'a\\nb\\n\\nc\\n'|indent(2)", "a\n  b\n\n  c\n"),
            ("'a\\n\\nb'|indent('> ', first=true, blank=true)", "> a\n> \n> b"),
            ("'x'|int(5) ~ '3.7'|int ~ '0x1f'|int(base=16) ~ true|int ~ none|int", "533110"),
            ("'x'|float ~ '|' ~ '1e3'|float ~ '|' ~ 2|float", "0.0|1000.0|2.0"),
            ("'\\x1c a '|trim ~ 'xxa'|trim('x')", "aa"),
            ("none is iterable", "False"),
            ("nope is iterable", "True"),
            ("'a' is sequence", "True"),
            ("1e-7", "1e-07"),
            ("'ab cd ef gh'|truncate(5)", "ab..."),
            ("'a-b c'|wordcount", "3"),
        ];
        for (expression, text) in known {
            assert_eq!(rendered(&format!("{{{{ {expression} }}}}")).unwrap(), text, "{expression}");
        }
        for refused in [
            "'a'|indent(999)",
            "[1]|tojson(indent=999)",
            "nope|tojson",
            "'a'|int(base=99)",
            "m|attr('z')",
            "[1]|pprint",
            "''|d('a', default_value='b')",
        ] {
            assert!(rendered(&format!("{{{{ {refused} }}}}")).is_err(), "{refused}");
        }
        assert!(rendered("{% for x in none %}{% endfor %}").unwrap_err().contains("'NoneType' object is not iterable"));
    }
}
