//! TensorBoard events. The crate makes records in memory, and they are appended here: a file that cannot be written is one warning, and
//! the run goes on.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::Message;
use tensorboard_proto::event::{Event, SessionLog, SessionLog_SessionStatus};
use tensorboard_proto::summary::{Summary, Summary_Value};
use tensorboard_proto::types::DataType;
use tensorboard_rs::record_writer::RecordWriter;
use tensorboard_rs::summary::scalar;

use super::console;
use super::metrics::StepMetrics;
use crate::files::disk::DiskFile;

/// The event file of one start of a run.
#[derive(Debug)]
pub struct TensorBoard {
    /// Gone once it could not be written.
    file: Option<DiskFile>,
}

impl TensorBoard {
    /// Begins a file in `dir`. `first_step` is the first step that this start makes: what an earlier start has written from there on is
    /// no longer shown.
    pub fn start(dir: &Path, first_step: u64) -> Self {
        let mut board = Self { file: None };
        match begin(dir) {
            Ok(file) => board.file = Some(file),
            Err(error) => warn(&error),
        }
        let mut version = Event::new();
        version.set_file_version("brain.Event:2".to_owned());
        let mut session = Event::new();
        session.set_step(first_step as i64);
        let mut log = SessionLog::new();
        log.set_status(SessionLog_SessionStatus::START);
        session.set_session_log(log);
        board.append([version, session].into());
        board
    }

    /// Appends the figures of a step.
    pub fn send(&mut self, metrics: &StepMetrics) {
        let event = |summary| of_step(metrics.step, summary);
        self.append(summaries(metrics).into_iter().map(event).collect());
    }

    /// Appends a few answers of a validation.
    pub fn send_text(&mut self, step: u64, text: String) {
        self.append(vec![of_step(step, in_text("eval/answers", text))]);
    }

    fn append(&mut self, events: Vec<Event>) {
        let Some(file) = &mut self.file else { return };
        if let Err(error) = records(events).and_then(|bytes| file.write_all(&bytes)) {
            warn(&error);
            self.file = None;
        }
    }
}

fn warn(error: &io::Error) {
    console::warning(&format!("no more TensorBoard events, the run goes on: {error}"));
}

/// How the names of event files begin.
const PREFIX: &str = "events.out.tfevents.";

fn begin(dir: &Path) -> io::Result<DiskFile> {
    fs::create_dir_all(dir)?;
    // TensorBoard reads files in the order of their names, which must be that of the starts, whatever the clock says.
    let stamp = |name: &str| name.strip_prefix(PREFIX)?.split('.').next()?.parse::<u64>().ok();
    let stamps = fs::read_dir(dir)?.flatten().filter_map(|entry| stamp(entry.file_name().to_str()?));
    let stamp = stamps.max().map_or(0, |last| last.saturating_add(1)).max(now() as u64);
    let path = dir.join(format!("{PREFIX}{stamp:010}.kvtune.{}.0", std::process::id()));
    DiskFile::open("events", &path, OpenOptions::new().append(true).create(true))
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

fn of_step(step: u64, summary: Summary) -> Event {
    let mut event = Event::new();
    event.set_step(step as i64);
    event.set_summary(summary);
    event
}

/// Events as they stand in a file: lengths and checksums around each.
fn records(events: Vec<Event>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut writer = RecordWriter::new(&mut bytes);
    for mut event in events {
        event.set_wall_time(now());
        writer.write(&event.write_to_bytes().map_err(io::Error::other)?)?;
    }
    Ok(bytes)
}

/// HF's tag names, so that curves of different tools lie in the same plots.
fn summaries(m: &StepMetrics) -> Vec<Summary> {
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
        ("cache/evicted", m.evicted),
        ("cache/mean_stay", m.mean_stay),
        ("memory/peak_gib", Some(m.peak_memory as f64 / f64::from(1u32 << 30))),
    ];
    let known = scalars.into_iter().filter_map(|(tag, value)| Some(scalar(tag, value? as f32)));
    let answers = m.eval_answers.iter().map(|(metric, mean)| scalar(&format!("eval/{metric}"), *mean as f32));
    let by_set = m.eval_loss_by_set.iter().map(|(name, loss)| scalar(&format!("eval/loss/{name}"), *loss as f32));
    known.chain(answers).chain(by_set).collect()
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
    use crate::files::failpoint::tests::with;

    /// The events of the files in a directory, in the order of TensorBoard.
    fn events(dir: &Path) -> Vec<Event> {
        let mut files: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let mut events = Vec::new();
        for bytes in files.iter().map(|file| fs::read(file).unwrap()) {
            let mut rest = &bytes[..];
            while let Some((length, behind)) = rest.split_first_chunk::<8>() {
                let end = 4 + u64::from_le_bytes(*length) as usize;
                events.push(Event::parse_from_bytes(&behind[4..end]).unwrap());
                rest = &behind[end + 4..];
            }
        }
        events
    }

    fn step(step: u64) -> StepMetrics {
        StepMetrics { step, loss: Some(2.5), ..StepMetrics::default() }
    }

    #[test]
    fn events_reach_the_disk_with_the_tags_of_hf_behind_the_mark_of_their_session() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir_of(dir.path());
        let mut board = TensorBoard::start(&dir, 7);
        board.send(&step(7));
        board.send_text(7, "an answer".into());
        let found = events(&dir);
        assert_eq!(found[0].get_file_version(), "brain.Event:2");
        let is_start = found[1].get_session_log().get_status() == SessionLog_SessionStatus::START;
        assert!(is_start && found[1].get_step() == 7, "{:?}", found[1]);
        assert!(found[2..].iter().all(|event| event.get_step() == 7 && event.get_wall_time() > 1e9));
        let tags: Vec<&str> = found[2..].iter().map(|event| event.get_summary().get_value()[0].get_tag()).collect();
        assert!(tags[0] == "train/loss" && tags.last() == Some(&"eval/answers"), "{tags:?}");
        assert_eq!(found.last().unwrap().get_summary().get_value()[0].get_tensor().get_string_val()[0], b"an answer");
    }

    #[test]
    fn a_full_disk_ends_the_events_and_nothing_else() {
        let full = DiskFile::open("events", Path::new("/dev/full"), OpenOptions::new().write(true)).unwrap();
        let mut board = TensorBoard { file: Some(full) };
        board.send(&step(1));
        assert!(board.file.is_none());
        board.send(&step(2));
        let dir = tempfile::tempdir().unwrap();
        for action in ["eio:2", "enospc:1+", "edquot:3"] {
            let (mut board, _) = with(&format!("any={action}"), || {
                let mut board = TensorBoard::start(dir.path(), 0);
                (1..4).for_each(|number| board.send(&step(number)));
                board
            });
            assert!(board.file.is_none());
            board.send(&step(5));
        }
        let other = tempfile::tempdir().unwrap();
        for action in ["eintr", "short"] {
            for n in 1..4 {
                let steps =
                    |dir: &Path| events(dir).iter().map(|event| (event.get_step(), event.has_summary())).collect::<Vec<_>>();
                let (one, two) = (dir.path().join(format!("{action}-{n}")), other.path().join(format!("{action}-{n}")));
                with(&format!("any={action}:{n}"), || TensorBoard::start(&one, 1).send(&step(1)));
                TensorBoard::start(&two, 1).send(&step(1));
                assert_eq!(steps(&one), steps(&two), "{action}, {n}");
            }
        }
        fs::write(dir.path().join("in the way"), "").unwrap();
        assert!(TensorBoard::start(&dir.path().join("in the way"), 0).file.is_none());
    }
}
