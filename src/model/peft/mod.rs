//! PEFT's files: the settings of an adapter, and which modules they mean.

mod config;
#[cfg(test)]
mod config_tests;
mod files;
mod modules;

pub use config::PeftConfig;
pub(super) use config::refused_settings;
pub use files::{ADAPTER_TENSORS, PeftFiles, read_peft};
pub(super) use files::{write_extra, write_peft};
pub use modules::{LayerLists, ModulePatterns};

pub use crate::recipe::{ADAPTER_CONFIG, EXTRA_TENSORS};
