//! Figures as pictures: curves, and maps of coloured cells, as SVG; curves in a terminal. It knows no run and no cache.

mod colour_map;
mod curve;
mod svg;
mod terminal;
mod ticks;

pub use colour_map::{ColourMap, ColourRow, ColourScale, MAX_CELLS};
pub(crate) use curve::{Curve, CurveChart, legend_mark};
pub use svg::Rgb;
pub(crate) use svg::escape;
pub use terminal::in_terminal;
