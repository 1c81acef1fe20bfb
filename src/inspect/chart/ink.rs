//! What lines and texts of a picture look like.

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
    pub(super) is_bold: bool,
}

impl Words {
    /// Plain words from their start on.
    pub(super) fn new(size: f64, ink: Ink) -> Self {
        Self { size, ink, anchor: "start", is_bold: false }
    }

    pub(super) fn centred(self) -> Self {
        Self { anchor: "middle", ..self }
    }

    pub(super) fn at_end(self) -> Self {
        Self { anchor: "end", ..self }
    }

    pub(super) fn bold(self) -> Self {
        Self { is_bold: true, ..self }
    }
}
