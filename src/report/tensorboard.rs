//! TensorBoard events. Where a file cannot be written there is one warning, and the run goes on.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use tensorboard_rs::record_writer::RecordWriter;

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
    /// Begins a file in `dir`. What an earlier start has written from `first_step` on, which is this one's first, is no longer shown.
    pub fn start(dir: &Path, first_step: u64) -> Self {
        let mut board = Self { file: begin(dir).map_err(|error| warn(&error)).ok() };
        let version = Message::default().bytes(FILE_VERSION, b"brain.Event:2");
        let session =
            Message::default().varint(STEP, first_step).message(SESSION_LOG, &Message::default().varint(1, SESSION_START));
        board.append(vec![version, session]);
        board
    }

    pub fn send(&mut self, metrics: &StepMetrics) {
        let event = |summary| of_step(metrics.step, summary);
        self.append(summaries(metrics).iter().map(event).collect());
    }

    pub fn send_text(&mut self, step: u64, text: &str) {
        self.append(vec![of_step(step, &in_text("eval/answers", text))]);
    }

    fn append(&mut self, events: Vec<Message>) {
        let Some(file) = &mut self.file else { return };
        let events: Vec<Message> = events.into_iter().map(|event| event.double(WALL_TIME, now())).collect();
        if let Err(error) = records(&events).and_then(|bytes| file.write_all(&bytes)) {
            warn(&error);
            self.file = None;
        }
    }
}

fn warn(error: &io::Error) {
    console::warning(&format!("no more TensorBoard events, the run goes on: {error}"));
}

// Fields of `Event`, of `Summary.Value`, and words of `SessionLog` and `TensorProto`, by their numbers in TensorBoard's protocol.
const WALL_TIME: u64 = 1;
const STEP: u64 = 2;
const FILE_VERSION: u64 = 3;
const SUMMARY: u64 = 5;
const SESSION_LOG: u64 = 7;
const SESSION_START: u64 = 1;
const TAG: u64 = 1;
const SIMPLE_VALUE: u64 = 2;
const TENSOR: u64 = 8;
const METADATA: u64 = 9;
const STRING: u64 = 7;

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

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

fn of_step(step: u64, value: &Message) -> Message {
    Message::default().varint(STEP, step).message(SUMMARY, &Message::default().message(1, value))
}

fn scalar(tag: &str, value: f32) -> Message {
    Message::default().bytes(TAG, tag.as_bytes()).float(SIMPLE_VALUE, value)
}

/// HF's tag names, so that curves of different tools lie in the same plots.
fn summaries(m: &StepMetrics) -> Vec<Message> {
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

/// A text, as TensorBoard's plugin for texts reads it: a tensor of one string.
fn in_text(tag: &str, text: &str) -> Message {
    let plugin = Message::default().bytes(1, b"text");
    let shape = Message::default().message(2, &Message::default().varint(1, 1));
    let tensor = Message::default().varint(1, STRING).message(2, &shape).bytes(8, text.as_bytes());
    Message::default()
        .bytes(TAG, tag.as_bytes())
        .message(METADATA, &Message::default().message(1, &plugin))
        .message(TENSOR, &tensor)
}

pub fn dir_of(run: &Path) -> PathBuf {
    run.join("tensorboard")
}

/// A message of Protocol Buffers, field after field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(self, field: u64, value: u64) -> Self {
        self.number(field << 3).number(value)
    }

    fn double(self, field: u64, value: f64) -> Self {
        self.number(field << 3 | 1).raw(&value.to_le_bytes())
    }

    fn bytes(self, field: u64, bytes: &[u8]) -> Self {
        self.number(field << 3 | 2).number(bytes.len() as u64).raw(bytes)
    }

    fn message(self, field: u64, inner: &Self) -> Self {
        self.bytes(field, &inner.0)
    }

    fn float(self, field: u64, value: f32) -> Self {
        self.number(field << 3 | 5).raw(&value.to_le_bytes())
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// Seven bits in each byte, the lowest first.
    fn number(mut self, mut value: u64) -> Self {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }
}

/// Messages as they stand in a file, each with its length and checksums.
fn records(messages: &[Message]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut writer = RecordWriter::new(&mut bytes);
    messages.iter().try_for_each(|message| writer.write(&message.0))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use protobuf::Message as _;
    use tensorboard_proto::event::{Event, SessionLog_SessionStatus};

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
        board.send_text(7, "an answer");
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

    #[test]
    fn a_record_has_its_length_and_checksums() {
        // The first record of each file that TensorFlow writes.
        let version = Message::default().double(1, 0.0).bytes(3, b"brain.Event:2");
        let record = records(&[version]).unwrap();
        assert_eq!((record.len(), &record[..12]), (40, &[24, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22][..]));
    }
}
