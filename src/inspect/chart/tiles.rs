//! Coloured rectangles side by side: one path for each colour.

use std::collections::BTreeMap;
use std::fmt::Write;

pub type Rgb = [u8; 3];

/// Rectangles of whole pixels, by their colours.
#[derive(Default)]
pub(super) struct Tiles {
    pub(super) paths: BTreeMap<Rgb, String>,
}

impl Tiles {
    pub(super) fn fill(&mut self, x: usize, y: usize, width: usize, height: usize, colour: Rgb) {
        let _ = write!(self.paths.entry(colour).or_default(), "M{x} {y}h{width}v{height}h-{width}z");
    }
}
