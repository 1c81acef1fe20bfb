//! TensorBoard events, written by a thread of its own: if it dies, training goes on with one warning.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use tensorboard_proto::summary::{Summary, Summary_Value};
use tensorboard_proto::types::DataType;
use tensorboard_rs::summary::scalar;
use tensorboard_rs::summary_writer::FileWriter;

use super::console;
use super::metrics::StepMetrics;

/// What the thread writes.
enum Entry {
    Step(Box<StepMetrics>),
    Answers { step: u64, text: String },
}

/// The sender's side. Each start of a run begins a new event file.
#[derive(Debug)]
pub struct TensorBoard {
    sender: Option<Sender<Entry>>,
    thread: Option<JoinHandle<()>>,
}

impl TensorBoard {
    /// Starts the thread that writes into `dir`.
    pub fn start(dir: &Path) -> Self {
        let (sender, receiver) = channel::<Entry>();
        let dir = dir.to_owned();
        let write = move || {
            let mut writer = FileWriter::new(&dir);
            while let Ok(entry) = receiver.recv() {
                match entry {
                    Entry::Step(metrics) => write_step(&mut writer, &metrics),
                    Entry::Answers { step, text } => writer.add_summary(in_text("eval/answers", text), step as usize),
                }
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
        self.hand_over(Entry::Step(Box::new(metrics.clone())));
    }

    /// Hands a few answers of a validation over.
    pub fn send_text(&mut self, step: u64, text: String) {
        self.hand_over(Entry::Answers { step, text });
    }

    fn hand_over(&mut self, entry: Entry) {
        let Some(sender) = &self.sender else { return };
        if sender.send(entry).is_err() {
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
fn write_step(writer: &mut FileWriter, m: &StepMetrics) {
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
            writer.add_summary(scalar(tag, value as f32), m.step as usize);
        }
    }
    for (metric, mean) in &m.eval_answers {
        writer.add_summary(scalar(&format!("eval/{metric}"), *mean as f32), m.step as usize);
    }
}

/// A text, as TensorBoard's plugin for texts reads it.
fn in_text(tag: &str, text: String) -> Summary {
    let mut value = Summary_Value::new();
    value.set_tag(tag.to_owned());
    value.mut_metadata().mut_plugin_data().set_plugin_name("text".to_owned());
    let tensor = value.mut_tensor();
    tensor.set_dtype(DataType::DT_STRING);
    tensor.mut_tensor_shape().mut_dim().push_default().set_size(1);
    tensor.mut_string_val().push(text.into_bytes());
    let mut summary = Summary::new();
    summary.mut_value().push(value);
    summary
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
        board.send_text(1, "an answer".into());
        drop(board);
        let file = std::fs::read_dir(dir_of(dir.path())).unwrap().next().unwrap().unwrap().path();
        let bytes = std::fs::read(file).unwrap();
        for part in [&b"train/loss"[..], b"eval/answers", b"an answer"] {
            assert!(bytes.windows(part.len()).any(|w| w == part));
        }
    }
}
