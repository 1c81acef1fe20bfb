//! How good an answer is: metrics of texts by their original formulas, as pure functions of a prediction and its references.
//!
//! A [`Metric`] parses from its name and scores one row. Benchmarks that sum up in a way of their own have it beside their rule:
//! [`LongBenchV2`]. Texts are handled as Python handles them, in which all the originals are written.

mod bags;
mod difflib;
mod infinitebench;
mod lcs;
mod longbench_v1;
mod longbench_v2;
mod metric;
mod porter;
mod python;
mod ranking;
mod rouge;
mod ruler;

pub use bags::{after_cue, normalize};
pub use longbench_v2::{Group, LongBenchV2, extract_choice};
pub use metric::{Metric, MetricError};
pub use porter::stem;
pub use python::{is_space, strip};
pub use ranking::{ndcg, parse_ranking};
pub use rouge::{RougeFigure, RougeKind, RougeMeasure};
