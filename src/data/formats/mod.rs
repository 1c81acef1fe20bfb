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
mod reader;
mod ruler;
mod sharegpt;
#[cfg(test)]
mod tests;
mod text;
mod tokens;

pub(super) use detect::detect;
pub(super) use format::ExampleReader;
