//! Losses of an evaluation: whether there are any, for which classes of tokens, and the file that they are written to.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use super::table::Evaluated;
use crate::eval::{SampleLoss, TokenClasses};
use crate::files;
use crate::report::console;
use crate::units::Fault;

// No documentation of its own: clap would take it for that of the verb.
#[derive(Debug, Args)]
pub(super) struct LossArguments {
    /// Write the losses of each sample and target to this JSONL file. Where answers are generated, losses are computed only with it or
    /// with `--token-classes`.
    #[arg(long = "losses", value_name = "FILE")]
    pub(super) file: Option<PathBuf>,
    /// Report losses by classes of tokens, too, which this file names: JSON lines `{"sample": 3, "classes": {"far": [0, 17]}}`, targets
    /// being counted from 0.
    #[arg(long, value_name = "FILE")]
    token_classes: Option<PathBuf>,
}

impl LossArguments {
    /// The classes that losses are wanted for beside those of all targets; `None` where no losses are wanted.
    pub(super) fn wanted(&self, wants_answers: bool) -> Result<Option<TokenClasses>, Fault> {
        if let Some(folder) = self.file.as_deref().and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty()) {
            files::make_dir(folder)?;
        }
        match &self.token_classes {
            Some(path) => TokenClasses::read(path).map(Some),
            None => Ok((self.file.is_some() || !wants_answers).then(TokenClasses::default)),
        }
    }

    pub(super) fn keep_targets(&self) -> bool {
        self.file.is_some() || self.token_classes.is_some()
    }
}

/// Writes a line for each evaluation and sample.
pub(super) fn write(path: &Path, results: &[Evaluated]) -> Result<(), Fault> {
    let mut lines = String::new();
    for Evaluated { name, policy, slots, losses, .. } in results {
        for SampleLoss { sample, tokens, loss, by_target, .. } in losses {
            let line = json!({
                "evaluated": name, "policy": policy.name, "cache_length": slots, "sample": sample, "tokens": tokens,
                "targets": loss.targets, "loss": loss.loss_sum / loss.targets.max(1) as f64, "correct": loss.correct, "losses": by_target,
            });
            lines += &line.to_string();
            lines.push('\n');
        }
    }
    files::write_named(path, |file| file.write_all(lines.as_bytes()))?;
    console::note(&format!("wrote the losses of {} samples to `{}`", lines.lines().count(), path.display()));
    Ok(())
}
