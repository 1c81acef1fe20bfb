//! TensorBoard events, written by a thread of its own: if it dies, training goes on with one warning.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use tensorboard_rs::summary_writer::SummaryWriter;

use super::console;
use super::metrics::StepMetrics;

/// The sender's side. Each start of a run begins a new event file.
#[derive(Debug)]
pub struct TensorBoard {
    sender: Option<Sender<StepMetrics>>,
    thread: Option<JoinHandle<()>>,
}

impl TensorBoard {
    /// Starts the thread that writes into `dir`.
    pub fn start(dir: &Path) -> Self {
        let (sender, receiver) = channel::<StepMetrics>();
        let dir = dir.to_owned();
        let write = move || {
            let mut writer = SummaryWriter::new(&dir);
            while let Ok(metrics) = receiver.recv() {
                write_step(&mut writer, &metrics);
                writer.flush();
            }
        };
        let thread = std::thread::Builder::new().name("tensorboard".into()).spawn(write);
        if let Err(error) = &thread {
            console::warning(&format!("no TensorBoard events: {error}"));
        }
        Self { sender: thread.is_ok().then_some(sender), thread: thread.ok() }
    }

    /// Hands one step over.
    pub fn send(&mut self, metrics: &StepMetrics) {
        let Some(sender) = &self.sender else { return };
        if sender.send(metrics.clone()).is_err() {
            console::warning("the TensorBoard writer died: no more events, training goes on");
            // Told once: its end is not looked at again.
            (self.sender, self.thread) = (None, None);
        }
    }
}

impl Drop for TensorBoard {
    fn drop(&mut self) {
        self.sender = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            console::warning("the TensorBoard writer died: some events are missing");
        }
    }
}

/// HF's tag names, so that curves of different tools lie in the same plots.
fn write_step(writer: &mut SummaryWriter, m: &StepMetrics) {
    let scalars = [
        ("train/loss", m.loss),
        ("train/accuracy", m.accuracy),
        ("train/grad_norm", m.grad_norm),
        ("train/learning_rate", m.learning_rate),
        ("train/epoch", m.loss.map(|_| m.epoch as f64)),
        ("eval/loss", m.eval_loss),
        ("eval/accuracy", m.eval_accuracy),
        ("perf/tokens_per_second", m.loss.map(|_| m.tokens_per_second)),
        ("perf/step_time", m.loss.map(|_| m.seconds)),
        ("memory/peak_gib", Some(m.peak_memory as f64 / f64::from(1u32 << 30))),
    ];
    for (tag, value) in scalars {
        if let Some(value) = value {
            writer.add_scalar(tag, value as f32, m.step as usize);
        }
    }
}

/// Where the events of a run lie.
pub fn dir_of(run: &Path) -> PathBuf {
    run.join("tensorboard")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_reach_the_disk_with_the_tags_of_hf() {
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::start(&dir_of(dir.path()));
        board.send(&StepMetrics { step: 1, loss: Some(2.5), ..StepMetrics::default() });
        drop(board);
        let file = std::fs::read_dir(dir_of(dir.path())).unwrap().next().unwrap().unwrap().path();
        let bytes = std::fs::read(file).unwrap();
        assert!(bytes.windows(10).any(|w| w == b"train/loss"));
    }
}
