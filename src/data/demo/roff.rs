//! Manual pages to plain text: enough of roff's macros and escapes to read the words, not a formatter.

/// Requests whose block, up to its end, holds no running text.
const SKIPPED_BLOCKS: [(&str, &str); 5] = [("de", ".."), ("de1", ".."), ("ig", ".."), ("TS", ".TE"), ("EQ", ".EN")];

/// The text of a manual page's source.
pub(super) fn to_text(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        let Some(request) = line.strip_prefix(['.', '\'']) else {
            out.push_str(&unescape(line));
            out.push('\n');
            continue;
        };
        let request = request.trim_start();
        let (name, rest) = request.split_once([' ', '\t']).unwrap_or((request, ""));
        if let Some((_, end)) = SKIPPED_BLOCKS.iter().find(|(begin, _)| *begin == name) {
            lines.by_ref().find(|line| line.trim_end() == *end);
        } else if matches!(name, "if" | "ie" | "el" | "while") {
            skip_conditional(rest, &mut lines);
        } else {
            request_to_text(name, rest, &mut out);
        }
    }
    out
}

/// Nothing of a condition is kept: its branches set up macros far more often than they hold text.
fn skip_conditional<'a>(rest: &str, lines: &mut impl Iterator<Item = &'a str>) {
    let depth_change = |line: &str| line.matches("\\{").count() as isize - line.matches("\\}").count() as isize;
    let mut depth = depth_change(rest);
    while depth > 0 {
        let Some(line) = lines.next() else { break };
        depth += depth_change(line);
    }
}

fn request_to_text(name: &str, rest: &str, out: &mut String) {
    let words = arguments(rest);
    let word = |index: usize| words.get(index).map_or("", String::as_str);
    let text = match name {
        "SH" | "SS" | "Sh" | "Ss" => format!("\n{}\n\n", words.join(" ")),
        "PP" | "P" | "LP" | "sp" | "TP" | "HP" | "Pp" | "br" => "\n".to_owned(),
        "IP" | "It" => format!("\n{}\n", word(0)),
        "BR" | "IR" | "BI" | "IB" | "RB" | "RI" => words.concat() + "\n",
        "Fl" => format!("-{}\n", words.join(" ")),
        "Xr" => format!("{}({})\n", word(0), word(1)),
        "B" | "I" | "SM" | "SB" | "Nm" | "Ar" | "Cm" | "Dq" | "Em" | "Ev" | "Ic" | "Li" | "Nd" | "Op" | "Pa" | "Ql" | "Sq"
        | "Sy" | "Va" => words.join(" ") + "\n",
        _ => return,
    };
    out.push_str(&text);
}

/// A request's arguments: parted by blanks, kept together by double quotes.
fn arguments(rest: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = rest.trim_start();
    while !rest.is_empty() && !rest.starts_with("\\\"") {
        let (word, after) = if let Some(quoted) = rest.strip_prefix('"') {
            quoted.split_once('"').unwrap_or((quoted, ""))
        } else {
            // A backslash before a blank keeps the word going.
            let bytes = rest.as_bytes();
            let end = (0..bytes.len()).find(|&i| matches!(bytes[i], b' ' | b'\t') && (i == 0 || bytes[i - 1] != b'\\'));
            rest.split_at(end.unwrap_or(rest.len()))
        };
        words.push(unescape(word));
        rest = after.trim_start();
    }
    words
}

/// Replaces escapes by what they print; fonts, sizes, motions and registers print nothing.
fn unescape(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('-') => out.push('-'),
            Some('e' | '\\') => out.push('\\'),
            Some(' ' | '~' | '0') => out.push(' '),
            Some('\'') => out.push('\''),
            Some('`') => out.push('`'),
            Some('"' | '#') | None => break,
            Some('(') => out.push_str(glyph(&take(&mut chars, 2))),
            Some('[') => out.push_str(glyph(&until(&mut chars, ']'))),
            Some('*') => {
                let name = name(&mut chars);
                out.push_str(if matches!(name.as_str(), "L\"" | "R\"" | "C`" | "C'") { "\"" } else { "" });
            }
            Some('f' | 'n' | 'm' | 'M' | 'F' | 'g' | 'k' | 'V' | 'Y') => drop(name(&mut chars)),
            Some('s') => {
                let rest = chars.as_str();
                chars = rest.trim_start_matches(['+', '-']).trim_start_matches(|c: char| c.is_ascii_digit()).chars();
            }
            Some('h' | 'v' | 'w' | 'l' | 'L' | 'o' | 'b' | 'x' | 'X' | 'D' | 'N' | 'A' | 'Z') => {
                if let Some(quote) = chars.next() {
                    until(&mut chars, quote);
                }
            }
            Some(_) => {}
        }
    }
    out
}

fn take(chars: &mut std::str::Chars<'_>, count: usize) -> String {
    chars.by_ref().take(count).collect()
}

fn until(chars: &mut std::str::Chars<'_>, end: char) -> String {
    chars.by_ref().take_while(|&c| c != end).collect()
}

/// The name behind an escape: `x`, `(xx` or `[any]`.
fn name(chars: &mut std::str::Chars<'_>) -> String {
    match chars.next() {
        Some('(') => take(chars, 2),
        Some('[') => until(chars, ']'),
        Some(c) => c.to_string(),
        None => String::new(),
    }
}

fn glyph(name: &str) -> &'static str {
    match name {
        "co" => "©",
        "rg" => "®",
        "bu" => "*",
        "em" => "--",
        "en" | "hy" | "mi" => "-",
        "aq" | "cq" | "oq" => "'",
        "dq" | "lq" | "rq" => "\"",
        "rs" => "\\",
        "ti" => "~",
        "ha" => "^",
        "ga" => "`",
        "at" => "@",
        "->" => "->",
        "<-" => "<-",
        ">=" => ">=",
        "<=" => "<=",
        "+-" => "+-",
        "mu" => "x",
        "bv" | "ba" | "or" => "|",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_words_and_drops_the_macros() {
        let source = ".\\\" a comment\n.TH LS 1 \"2022\" \"GNU\"\n.de XX\nnever\n..\n.SH NAME\nls \\- list \\fIdirectory\\fP contents\n\
            .SH \"SEE ALSO\"\n.PP\n.BR find (1),\n.IR \"two words\" \\-x\n.if n never\n.ie \\n(zZ \\{\\\nnever\n.\\}\n.TS\nl l.\nnever\n.TE\n\
            \\(co 2022 \\*(L\"Free\\*(R\" \\s-1GNU\\s0\\h'2n' a\\eb\\&.\n";
        let text = to_text(source);
        let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
        let expected =
            ["NAME", "ls - list directory contents", "SEE ALSO", "find(1),", "two words-x", "© 2022 \"Free\" GNU a\\b."];
        assert_eq!(lines, expected);
    }

    #[test]
    fn survives_broken_sources() {
        for source in ["", ".", "'", ".SH", "\\", "\\(", "\\f[", "\\h'", ".B \"open", ".if x \\{", ".de", "\\*", "é\\(é"] {
            to_text(source);
        }
    }
}
