//! What a row says in each format: from rows to examples.

mod alpaca;
mod columns;
mod detect;
mod format;
mod helmet;
mod longbench_v2;
#[cfg(test)]
mod malformed_tests;
mod messages;
mod prompt_completion;
#[cfg(test)]
mod registry_tests;
mod ruler;
mod sharegpt;
#[cfg(test)]
mod tests;
mod text;
mod tokens;

use crate::recipe::DataFormat;
use crate::units::Fault;

pub(super) use detect::detect;
pub(super) use format::{ExampleReader, RowFormat};

const FORMATS: &[&RowFormat] = &[
    &longbench_v2::FORMAT,
    &prompt_completion::FORMAT,
    &messages::FORMAT,
    &sharegpt::FORMAT,
    &alpaca::FORMAT,
    &tokens::FORMAT,
    &text::FORMAT,
    &ruler::FORMAT,
    &helmet::FORMAT,
];

pub(super) fn registered(name: &str) -> Result<&'static RowFormat, Fault> {
    let format = FORMATS.iter().copied().find(|format| format.facts.name == name);
    format.ok_or_else(|| Fault::usage(format!("there is no `data.format = \"{name}\"`"), "leave it out: rows tell it"))
}

pub fn formats() -> Vec<&'static DataFormat> {
    FORMATS.iter().map(|format| &format.facts).collect()
}
