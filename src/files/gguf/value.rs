//! Values of a GGUF file's keys, and what is wrong with a file.

use std::path::Path;

use crate::units::{Fault, FaultKind, abridged, quoted};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum GgufValue {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    Integers(Vec<i64>),
    Floats(Vec<f32>),
    Bools(Vec<bool>),
    Texts(Vec<String>),
}

impl GgufValue {
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Integer(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::Text(text) => format!("`{}`", quoted(text)),
            Self::Integers(_) | Self::Floats(_) | Self::Bools(_) | Self::Texts(_) => "a list".to_owned(),
        }
    }
}

pub(super) fn wrong(path: &Path, reason: &str) -> Fault {
    let message = format!("`{}` is not a GGUF file that can be read: {reason}", abridged(path.display()));
    Fault::data(message, "fetch the file again, or take another one of the model").of_kind(FaultKind::Damaged)
}
