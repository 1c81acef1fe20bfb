//! The file that the losses of an evaluation are written to.

use std::path::Path;

use serde_json::json;

use super::table::Evaluated;
use crate::eval::SampleLoss;
use crate::files;
use crate::report::console;
use crate::units::Fault;

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
