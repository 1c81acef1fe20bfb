//! `kvtune report`: one page about one or several runs.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use crate::cache::ReplayLog;
use crate::checkpoint;
use crate::files;
use crate::inspect::{Evictions, RunContents, read_scores, report_page};
use crate::report::console;
use crate::units::Fault;

/// Write one HTML page about one or several runs: curves, scores, answers, settings that differ.
#[derive(Debug, Args)]
pub(super) struct ReportRuns {
    /// Runs or checkpoints, which are compared.
    #[arg(value_name = "RUN|CHECKPOINT", required = true)]
    paths: Vec<PathBuf>,
    /// The page to write, in HTML [default: `report.html` in the first run, `report-NAME.html` beside a checkpoint].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Also show the scores of this file, printed by `kvtune evaluate --format json`; may be given several times.
    #[arg(long, value_name = "FILE")]
    scores: Vec<PathBuf>,
    /// Draw what the caches of this replay log kept; may be given several times.
    #[arg(long, value_name = "LOG")]
    evictions: Vec<PathBuf>,
}

impl ReportRuns {
    pub(super) fn run(&self) -> Result<(), Fault> {
        let runs = RunContents::read_all(&self.paths)?;
        let mut scores = Vec::new();
        for path in &self.scores {
            scores.extend(read_scores(path)?);
        }
        let map = |path: &PathBuf| Ok::<_, Fault>(Evictions::of(&ReplayLog::load(path)?, 0)?.map(&path.display().to_string()));
        let maps = self.evictions.iter().map(map).collect::<Result<Vec<_>, _>>()?;
        let page = report_page(&runs, &scores, &maps);
        let own = || self.paths.first().zip(runs.first()).map_or_else(PathBuf::new, |(path, run)| own_page(path, run));
        let out = self.out.clone().unwrap_or_else(own);
        match self.out {
            Some(_) => files::write_named(&out, |file| file.write_all(page.as_bytes()))?,
            // A link in a run that came from elsewhere is not what the user has named.
            None => files::write_atomic(&out, page.as_bytes())?,
        }
        console::outcome(&format!("report: {}", out.display()), &json!({ "report": out }))
    }
}

/// Where the page about a run or a checkpoint lies. A checkpoint holds what its manifest names, and nothing else.
fn own_page(path: &Path, contents: &RunContents) -> PathBuf {
    if checkpoint::holds(path).is_none() {
        return path.join("report.html");
    }
    let absolute = files::absolute(path);
    absolute.with_file_name(format!("report-{}.html", contents.name))
}
