//! The words of the command line: every mistake a person can make gets an error that says what and where, a way out and the
//! right exit code, and loses nothing.

mod adapter;
mod arguments;
mod bench;
mod cache;
mod checkpoint;
mod config;
mod data;
mod data_rows;
mod device_script;
mod doctor;
mod evaluate;
mod every_tiling;
mod evicted;
mod exit_codes;
mod export;
mod full;
mod generate;
mod head;
mod help;
mod hints;
mod inspect;
mod made;
mod metrics_file;
mod not_finite;
mod output;
pub(crate) mod place;
mod plan;
mod profile;
mod recipe;
mod replay_log;
mod report;
mod score;
mod stores;
mod tokenizer;
mod weights;
