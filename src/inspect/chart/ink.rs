//! What lines and texts of a picture look like.

use super::tiles::Rgb;

/// A colour by what it is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Ink {
    Text,
    Muted,
    Grid,
    Paper,
    Border,
}

/// Where a text begins from the point that it is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Words {
    pub(super) size: f64,
    pub(super) ink: Ink,
    pub(super) anchor: Anchor,
    pub(super) is_bold: bool,
}

impl Ink {
    /// The colour on white paper.
    fn rgb(self) -> Rgb {
        match self {
            Self::Text => [0x1f, 0x23, 0x28],
            Self::Muted => [0x59, 0x63, 0x6e],
            Self::Grid => [0xe4, 0xe8, 0xec],
            Self::Paper => [0xff; 3],
            Self::Border => [0xd1, 0xd9, 0xe0],
        }
    }

    /// The attribute of SVG, with the class by which a page may give it another colour.
    pub(super) fn attributes(self, paint: &str) -> String {
        let [r, g, b] = self.rgb();
        let class = match self {
            Self::Text => "ink",
            Self::Muted => "muted",
            Self::Grid => "grid",
            Self::Paper => "paper",
            Self::Border => "border",
        };
        format!("{paint}=\"#{r:02x}{g:02x}{b:02x}\" class=\"{class}\"")
    }
}

impl Anchor {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Middle => "middle",
            Self::End => "end",
        }
    }
}

impl Words {
    /// Plain words from their start on.
    pub(super) fn new(size: f64, ink: Ink) -> Self {
        Self { size, ink, anchor: Anchor::Start, is_bold: false }
    }

    pub(super) fn at(self, anchor: Anchor) -> Self {
        Self { anchor, ..self }
    }

    pub(super) fn bold(self) -> Self {
        Self { is_bold: true, ..self }
    }
}
