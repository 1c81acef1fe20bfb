//! HTML pages to plain text: tags go, paragraphs and code lines stay.

/// Elements whose content is not part of the text.
const SKIPPED: [&str; 6] = ["script", "style", "nav", "head", "svg", "button"];

/// Elements that begin a new paragraph.
const BLOCKS: [&str; 17] = [
    "p",
    "div",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "pre",
    "ul",
    "ol",
    "table",
    "section",
    "details",
    "dl",
    "blockquote",
    "main",
    "article",
];

/// Elements that begin a new line.
const LINES: [&str; 5] = ["li", "br", "tr", "dt", "dd"];

/// The text of a page.
pub(super) fn to_text(page: &str) -> String {
    let mut out = String::with_capacity(page.len() / 4);
    let mut rest = page;
    while let Some(open) = rest.find('<') {
        push_unescaped(&rest[..open], &mut out);
        rest = &rest[open + 1..];
        if let Some(comment) = rest.strip_prefix("!--") {
            rest = comment.find("-->").map_or("", |end| &comment[end + 3..]);
            continue;
        }
        let Some(close) = rest.find('>') else { return out };
        let tag = &rest[..close];
        rest = &rest[close + 1..];
        let name: String = tag.trim_start_matches('/').chars().take_while(char::is_ascii_alphanumeric).collect();
        let name = name.to_ascii_lowercase();
        if !tag.starts_with('/') && !tag.ends_with('/') && SKIPPED.contains(&name.as_str()) {
            rest = rest.find(&format!("</{name}")).map_or("", |end| &rest[end..]);
        } else if BLOCKS.contains(&name.as_str()) {
            out.push_str("\n\n");
        } else if LINES.contains(&name.as_str()) {
            out.push('\n');
        }
    }
    push_unescaped(rest, &mut out);
    out
}

fn push_unescaped(text: &str, out: &mut String) {
    let mut rest = text;
    while let Some(start) = rest.find('&') {
        out.push_str(&rest[..start]);
        rest = &rest[start + 1..];
        match rest.bytes().take(10).position(|b| b == b';').map(|end| (entity(&rest[..end]), end)) {
            Some((Some(c), end)) => {
                out.push(c);
                rest = &rest[end + 1..];
            }
            _ => out.push('&'),
        }
    }
    out.push_str(rest);
}

fn entity(name: &str) -> Option<char> {
    match name {
        "lt" => Some('<'),
        "gt" => Some('>'),
        "amp" => Some('&'),
        "quot" => Some('"'),
        "nbsp" => Some(' '),
        _ => {
            let code = name.strip_prefix('#')?;
            let code = code.strip_prefix('x').map_or_else(|| code.parse().ok(), |hex| u32::from_str_radix(hex, 16).ok())?;
            char::from_u32(code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_text() {
        let page = "<html><head><title>T</title></head><body><nav>menu</nav><main><h1>Vec</h1><!-- no --><p>A &lt;T&gt; &amp; more&#39;s<br>line \
            &unknown; & x</p><script>let a = 1 < 2;</script><svg/><pre>let v;\n    v</pre></main>";
        let text = to_text(page);
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        assert_eq!(lines, ["Vec", "A <T> & more's", "line &unknown; & x", "let v;", "    v"]);
        for broken in ["<", "<p", "&", "&;", "<!--", "<script>", "a&#xfffffff;", "&é;"] {
            to_text(broken);
        }
    }
}
