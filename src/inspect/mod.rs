//! What is in a run and how it went; what its caches kept. As words, as JSON, as pictures, and as one page to be read in a browser.

mod chart;
mod contents;
mod evictions;
mod figures;
mod page;
mod scores;

pub use chart::{ColourMap, ColourRow, ColourScale, MAX_CELLS, Rgb, in_terminal};
pub use contents::{AnswerListing, RunContents, kept_answers};
pub use evictions::{Evictions, HeadEvictions, LayerEvictions};
pub use figures::{CurveEnds, RunFigures, figures_in_words};
pub use page::report_page;
pub use scores::{EvaluationLine, read_scores};
