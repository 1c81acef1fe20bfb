//! `kvtune report`: one page about one or several runs.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::cache::ReplayLog;
use crate::error::Error;
use crate::files;
use crate::inspect::{Evictions, RunContents, read_scores, report_page};
use crate::report::console;

#[derive(Debug, Args)]
pub(super) struct ReportRuns {
    /// Runs or checkpoints, which are compared.
    #[arg(value_name = "RUN|CHECKPOINT", required = true)]
    paths: Vec<PathBuf>,
    /// The page to write, in HTML [default: `report.html` in the first run].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Show these scores too, which `kvtune evaluate --format json` has printed; may be given several times.
    #[arg(long, value_name = "FILE")]
    scores: Vec<PathBuf>,
    /// Draw what the caches of this replay log kept; may be given several times.
    #[arg(long, value_name = "LOG")]
    evictions: Vec<PathBuf>,
}

impl ReportRuns {
    pub(super) fn run(&self) -> Result<(), Error> {
        let runs = RunContents::read_all(&self.paths)?;
        let mut scores = Vec::new();
        for path in &self.scores {
            scores.extend(read_scores(path)?);
        }
        let map = |path: &PathBuf| Ok::<_, Error>(Evictions::of(&ReplayLog::load(path)?, 0)?.map(&path.display().to_string()));
        let maps = self.evictions.iter().map(map).collect::<Result<Vec<_>, _>>()?;
        let first = self.paths.first().map_or(Path::new(""), PathBuf::as_path);
        let out = self.out.clone().unwrap_or_else(|| first.join("report.html"));
        files::write_atomic(&out, report_page(&runs, &scores, &maps).as_bytes())?;
        Ok(console::result(&format!("report: {}", out.display()))?)
    }
}
