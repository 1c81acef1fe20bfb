//! Connects the engine's events and the loop's figures to what people read.

use std::path::PathBuf;
use std::time::Instant;

use serde_json::json;

use super::answers::Validation;
use super::{Interrupt, Trainer};
use crate::engine::{Event, MemoryByPart, Observer};
use crate::eval::{ANSWERS, AnswerFile, ScoredAnswer};
use crate::files;
use crate::native::cuda::{missing_kernels, why_not_pinned};
use crate::native::peak_resident;
use crate::recipe::OnSigterm;
use crate::report::console::{self, not_pinned, planned_and_measured};
use crate::report::metrics::{Evicted, METRICS, Metrics, StepMetrics};
use crate::report::program::MetricsProgram;
use crate::report::progress::Progress;
use crate::report::summary::{RunSummary, SUMMARY};
use crate::report::tensorboard::{self, TensorBoard};
use crate::units::{Bytes, Fault, quoted};

/// The reports of one start of a run; the losses are those of the whole run, first and last.
pub(super) struct RunCallback {
    progress: Progress,
    /// What is written; the first rank writes for all.
    files: Option<RunFiles>,
    /// The program that also gets the lines; only the first rank has it.
    program: Option<MetricsProgram>,
    began: Instant,
    /// Losses and evictions so far.
    summary: RunSummary,
    /// Tokens of the steps, and their seconds.
    speed: (f64, f64),
    said_not_pinned: bool,
    /// Why standard output did not take a line, the first time.
    pub(super) output_fault: Option<Fault>,
    /// The line of a step that was made, and whose validation is still to be made.
    pub(super) unvalidated: Option<StepMetrics>,
    interrupt: Interrupt,
    gives_up: bool,
}

struct RunFiles {
    metrics: Metrics,
    board: TensorBoard,
    answers: PathBuf,
}

impl RunCallback {
    /// Tells the run that begins or goes on, and opens its metrics and events.
    pub(super) fn begin(trainer: &mut Trainer, is_resumed: bool, interrupt: &Interrupt) -> Result<Self, Fault> {
        let mut callback = Self::open(trainer, is_resumed, interrupt)?;
        let command = trainer.recipe.report.command.as_deref().filter(|_| callback.files.is_some());
        callback.program = command.and_then(MetricsProgram::start);
        callback.progress.note(&trainer.data.to_string());
        callback.progress.note(&format!("steps: {}", trainer.schedule));
        if let Some(expected) = trainer.expected_evictions() {
            callback.progress.note(&format!("evictions: {expected}"));
            expected.warning().iter().for_each(|warning| callback.progress.warning(warning));
        }
        if trainer.ranks.are_several() {
            let (ranks, all) = (trainer.ranks.world.size(), trainer.recipe.train.gradient_accumulation_steps);
            let peak = trainer.planned.host;
            let each = format!("each with a planned peak of {peak} of its host's memory");
            callback.progress.note(&format!("ranks: {ranks}, which share a step's {all} micro-batches, {each}"));
        }
        Ok(callback)
    }

    fn open(trainer: &mut Trainer, is_resumed: bool, interrupt: &Interrupt) -> Result<Self, Fault> {
        let path = trainer.dir.join(METRICS);
        let step = trainer.step();
        let kept = is_resumed.then(|| trainer.kept_metrics()).transpose()?;
        // All ranks have read before the first takes back what came later.
        trainer.ranks.listen()?;
        trainer.state.owes_validation = false;
        trainer.state.unchecked_metrics = Some(kept.as_ref().map_or(0, |kept| kept.unchecked));
        let metrics = || Metrics::open(&path, kept.as_ref());
        let metrics = trainer.ranks.world.is_first().then(metrics).transpose()?;
        let (before, unvalidated) = kept.map(|kept| (kept.lines, kept.owed)).unwrap_or_default();
        let progress = Progress::new(trainer.schedule.num_steps(), step, trainer.recipe.log.interval);
        // What is to be written anew is shown anew.
        let first_step = if step > 0 && unvalidated.is_none() { step + 1 } else { step };
        let board = || TensorBoard::start(&tensorboard::dir_of(&trainer.dir), first_step);
        let files = metrics.map(|metrics| RunFiles { metrics, board: board(), answers: trainer.dir.join(ANSWERS) });
        let mut callback = Self {
            progress,
            files,
            program: None,
            began: Instant::now(),
            summary: RunSummary::default(),
            speed: (0.0, 0.0),
            said_not_pinned: false,
            output_fault: None,
            unvalidated,
            interrupt: interrupt.clone(),
            gives_up: trainer.recipe.checkpoint.on_sigterm == OnSigterm::AbandonStep,
        };
        for line in &before {
            callback.count(line);
        }
        Ok(callback)
    }

    /// The run is back at an earlier step: what came after it is taken back.
    pub(super) fn gone_back(&mut self, trainer: &mut Trainer, why: &str) -> Result<(), Fault> {
        self.progress.note(why);
        let (began, said_not_pinned) = (self.began, self.said_not_pinned);
        let (program, output_fault) = (self.program.take(), self.output_fault.take());
        *self = Self { program, began, said_not_pinned, output_fault, ..Self::open(trainer, true, &self.interrupt)? };
        Ok(())
    }

    pub(super) fn stepped(&mut self, mut metrics: StepMetrics, validation: Option<&Validation>) -> Result<(), Fault> {
        metrics.eval_loss = validation.map(|v| v.scores.overall.loss);
        metrics.eval_accuracy = validation.map(|v| v.scores.overall.accuracy);
        let by_set = validation.into_iter().flat_map(|v| &v.scores.by_set);
        metrics.eval_loss_by_set = by_set.map(|(name, score)| (name.clone(), score.loss)).collect();
        let answers = validation.and_then(|v| v.answers.as_ref());
        metrics.eval_answers = answers.map(|(scores, _)| scores.means.clone()).unwrap_or_default();
        self.count(&metrics);
        self.progress.stepped(&metrics);
        let Some(files) = &mut self.files else { return Ok(()) };
        let line = files.metrics.append(&metrics)?;
        if let Some(program) = &mut self.program {
            self.progress.above(|| program.send(&line));
        }
        if console::speech().is_json
            && let Err(error) = self.progress.above(|| console::result(&line))
            && self.output_fault.is_none()
        {
            self.progress.warning(&format!("{error}: the run goes on"));
            let hint = "look at where the output goes, as that disk may be full; the run has ended well, and `metrics.jsonl` has its lines";
            self.output_fault = Some(error.with_hint(hint));
        }
        files.board.send(&metrics);
        if let Some((_, answers)) = answers {
            let file = files.answers.join(format!("validation-step-{:06}.jsonl", metrics.step));
            AnswerFile::write(&file, &json!({ "split": "validation", "step": metrics.step }), answers)?;
            let shown: Vec<String> = answers.iter().take(SHOWN).map(in_words).collect();
            for answer in &shown {
                self.progress.note(answer);
            }
            files.board.send_text(metrics.step, &shown.join("\n\n"));
        }
        // Kernels are built when they are first asked for, which is in the first step.
        for line in missing_kernels() {
            self.progress.note(&line);
        }
        if let Some(why) = why_not_pinned().filter(|_| !self.said_not_pinned) {
            self.progress.note(&not_pinned(&why));
            self.said_not_pinned = true;
        }
        Ok(())
    }

    fn count(&mut self, metrics: &StepMetrics) {
        let first_and = |old: Option<(f64, f64)>, new: Option<f64>| new.map_or(old, |n| Some((old.map_or(n, |o| o.0), n)));
        self.summary.train_loss = first_and(self.summary.train_loss, metrics.loss);
        self.summary.eval_loss = first_and(self.summary.eval_loss, metrics.eval_loss);
        if metrics.eval_loss.is_some() {
            self.summary.eval_loss_by_set.clone_from(&metrics.eval_loss_by_set);
        }
        self.speed = (self.speed.0 + metrics.tokens as f64, self.speed.1 + metrics.seconds);
        self.summary.evicted = self.summary.evicted.plus(Evicted::over([metrics]));
    }

    /// A checkpoint is on disk; the rank that has written it says so.
    pub(super) fn saved(&self, dir: Option<PathBuf>) {
        if let Some(dir) = dir {
            self.progress.note(&format!("saved {}", dir.display()));
        }
    }

    /// The run ends here; the rank that writes says how it went.
    pub(super) fn end(&self, trainer: &Trainer, state: &str) -> Result<Option<RunSummary>, Fault> {
        if self.files.is_none() {
            return Ok(None);
        }
        let summary = RunSummary {
            state: state.to_owned(),
            steps: (trainer.step(), trainer.schedule.num_steps()),
            tokens: trainer.state.total_tokens,
            tokens_per_second: self.speed.0 / self.speed.1.max(f64::MIN_POSITIVE),
            best: trainer.state.best.as_ref().map(|b| (b.metric.clone(), b.value, b.step)),
            seconds: self.began.elapsed().as_secs_f64(),
            peak_memory: peak_resident(),
            planned_memory: trainer.planned.host.0,
            memory_by_part: trainer.memory_by_part(),
            setting: [
                ("model".into(), trainer.recipe.model.path.display().to_string()),
                ("policy".into(), trainer.recipe.kv_cache.policy.to_string()),
                ("cache length".into(), trainer.recipe.kv_cache.cache_length.to_string()),
                ("chunk size".into(), trainer.recipe.kv_cache.wanted_chunk_size().to_string()),
            ]
            .into_iter()
            .chain(trainer.expected_evictions().map(|expected| ("evictions".into(), expected.to_string())))
            .collect(),
            ..self.summary.clone()
        };
        self.progress.note(&planned_and_measured(trainer.planned.host, Bytes(summary.peak_memory)));
        files::write_atomic(&trainer.dir.join(SUMMARY), summary.to_markdown().as_bytes())?;
        Ok(Some(summary))
    }
}

/// Number of answers that are shown for each validation.
const SHOWN: usize = 3;

fn in_words(answer: &ScoredAnswer) -> String {
    let references: Vec<String> = answer.references.iter().map(|text| format!("\"{}\"", quoted(text))).collect();
    format!("sample {}: \"{}\", expected {}", answer.sample, quoted(&answer.prediction), references.join(" or "))
}

impl Observer for RunCallback {
    fn wants_to_stop(&self) -> bool {
        self.gives_up && self.interrupt.is_terminated()
    }

    fn note(&mut self, text: &str) {
        self.progress.note(text);
    }

    fn observe(&mut self, event: Event, _: &dyn Fn() -> MemoryByPart) {
        match event {
            Event::ForwardColumn { column: c, num_columns: n } => {
                self.progress.inside(&format!("forward, column {} of {n}", c + 1));
            }
            // These phases are too short to be shown.
            Event::Head { .. } | Event::CellBackward { .. } => {}
            Event::Replay { band: r, num_bands: n } => self.progress.inside(&format!("replay, band {} of {n}", r + 1)),
            Event::Cell { band: r, num_bands: bands, column: c, num_columns: columns, .. } => {
                self.progress.inside(&format!("backward, band {} of {bands}, cell {} of {columns}", r + 1, columns - c));
            }
        }
    }
}
