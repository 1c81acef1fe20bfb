//! An SVG picture, element by element. Colours are attributes and classes: alone it has those of paper; a page's style may have others.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::units::is_unprintable;

/// A text as it stands in HTML, SVG or an attribute of either. Control characters, which XML knows no way to write, become visible.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            // What turns the direction of what follows would reach beyond the text, and XML has no way to write U+FFFE and U+FFFF.
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c if is_unprintable(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// A colour on white paper, and the class by which a page may give it another one.
#[derive(Clone, Copy)]
pub(super) struct Ink {
    colour: &'static str,
    class: &'static str,
}

impl Ink {
    pub(super) const TEXT: Self = Self { colour: "#1f2328", class: "ink" };
    pub(super) const MUTED: Self = Self { colour: "#59636e", class: "muted" };
    pub(super) const GRID: Self = Self { colour: "#e4e8ec", class: "grid" };
    pub(super) const PAPER: Self = Self { colour: "#ffffff", class: "paper" };
    pub(super) const BORDER: Self = Self { colour: "#d1d9e0", class: "border" };

    /// The attributes of SVG; `paint` is what gets the colour.
    pub(super) fn attributes(self, paint: &str) -> String {
        let Self { colour, class } = self;
        format!("{paint}=\"{colour}\" class=\"{class}\"")
    }
}

#[derive(Clone, Copy)]
pub(super) struct Words {
    pub(super) size: f64,
    pub(super) ink: Ink,
    /// Where the text lies beside its point, as SVG's `text-anchor`.
    pub(super) anchor: &'static str,
}

impl Words {
    pub(super) fn new(size: f64, ink: Ink) -> Self {
        Self { size, ink, anchor: "start" }
    }

    pub(super) fn centred(self) -> Self {
        Self { anchor: "middle", ..self }
    }

    pub(super) fn at_end(self) -> Self {
        Self { anchor: "end", ..self }
    }
}

/// A colour: red, green and blue.
pub type Rgb = [u8; 3];

/// Adds a coloured rectangle of whole pixels to others: one path for each colour.
pub(super) fn fill(tiles: &mut BTreeMap<Rgb, String>, x: usize, y: usize, width: usize, height: usize, colour: Rgb) {
    let _ = write!(tiles.entry(colour).or_default(), "M{x} {y}h{width}v{height}h-{width}z");
}

pub(super) struct Svg {
    body: String,
}

impl Svg {
    /// An empty one, to be closed by [`Self::finish`]. `id` is what its parts are called by, once in a page.
    pub(super) fn new(width: f64, height: f64, id: &str, title: &str, description: &str) -> Self {
        let (id, title, description) = (escape(id), escape(title), escape(description));
        let body = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
             role=\"img\" aria-labelledby=\"{id}-title {id}-desc\" \
             font-family=\"-apple-system, Segoe UI, Helvetica, Arial, sans-serif\">\n\
             <title id=\"{id}-title\">{title}</title>\n<desc id=\"{id}-desc\">{description}</desc>\n"
        );
        Self { body }
    }

    /// An element without content, from its name and attributes, of which texts are escaped.
    pub(super) fn element(&mut self, name: &str, attributes: &str) {
        let _ = writeln!(self.body, "<{name} {attributes}/>");
    }

    pub(super) fn paper(&mut self, width: f64, height: f64) {
        let ink = Ink::PAPER.attributes("fill");
        self.element("rect", &format!("x=\"0.0\" y=\"0.0\" width=\"{width:.1}\" height=\"{height:.1}\" {ink}"));
    }

    pub(super) fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64, ink: Ink) {
        let ink = ink.attributes("stroke");
        self.element("line", &format!("x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" {ink}"));
    }

    pub(super) fn text(&mut self, x: f64, y: f64, words: &str, Words { size, ink, anchor }: Words) {
        // The largest are headings.
        let weight = if size >= 14.0 { " font-weight=\"600\"" } else { "" };
        let (ink, words) = (ink.attributes("fill"), escape(words));
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\"{weight} {ink}>{words}</text>"
        );
    }

    /// Rectangles from a corner on, without seams where a page scales them.
    pub(super) fn tiles(&mut self, x: f64, y: f64, tiles: &BTreeMap<Rgb, String>) {
        for ([r, g, b], path) in tiles {
            let at = format!("transform=\"translate({x:.1} {y:.1})\" shape-rendering=\"crispEdges\"");
            self.element("path", &format!("{at} fill=\"#{r:02x}{g:02x}{b:02x}\" d=\"{path}\""));
        }
    }

    pub(super) fn finish(self) -> String {
        format!("{}</svg>\n", self.body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_ends_its_element_or_attribute() {
        let escaped = escape("</svg><script>\"'&\u{0}\u{1b}[31m\u{202e}\n");
        assert_eq!(escaped, "&lt;/svg&gt;&lt;script&gt;&quot;&#39;&amp;\u{fffd}\u{fffd}[31m\u{fffd}\n");
    }
}
