//! Encoded samples in an Arrow file: written batch by batch, read where they lie, mapped or in memory.

use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayBuilder, ArrayRef, AsArray, LargeBinaryBuilder, LargeListBuilder, RecordBatch, UInt32Builder, UInt64Builder,
};
use arrow::buffer::Buffer;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, ToByteSlice, UInt32Type, UInt64Type};
use arrow::error::ArrowError;
use arrow::ipc::reader::FileDecoder;
use arrow::ipc::writer::FileWriter;
use serde::{Deserialize, Serialize};

use super::arrow_file::{footer, part};
use super::encoded_sample::{Aim, EncodedSample};
use super::example::{Content, Example};
use super::guard::guarded;
use super::on_too_long::Length;
use super::question::{FollowUp, SampleGroups};
use super::sample_place::LineOrRecord;

/// Tokens of a record batch: few enough for any memory, many enough to cost nothing each.
const BATCH_TOKENS: usize = 1 << 20;

/// The key of the footer's metadata under which a file says what it was made of.
const RECORD: &str = "kvtune";

/// What a sample has beside its tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct About {
    pub(super) file: usize,
    pub(super) at: LineOrRecord,
    /// The right answers as texts, where the file gives them so.
    pub(super) references: Option<Vec<String>>,
    pub(super) groups: Option<SampleGroups>,
    pub(super) border: Option<String>,
    pub(super) follow_up: Option<FollowUp>,
}

impl About {
    pub(super) fn of(example: Example, file: usize, at: LineOrRecord, border: Option<String>) -> Self {
        let Example { content, groups, references, follow_up } = example;
        let references = match content {
            _ if !references.is_empty() => Some(references),
            // Without a prompt it is no question, and a text need not be kept twice.
            Content::Text { prompt, completion } if !prompt.is_empty() => Some(vec![completion]),
            _ => None,
        };
        Self { file, at, references, groups, border, follow_up }
    }
}

fn schema() -> SchemaRef {
    let list = || DataType::new_large_list(DataType::UInt32, true);
    Arc::new(Schema::new(vec![
        Field::new("ids", list(), false),
        // Where runs of tokens that are targets begin and end, in turn; empty with a class.
        Field::new("trained", list(), false),
        Field::new("class", DataType::UInt32, true),
        // Leading tokens that may be cut.
        Field::new("prompt", DataType::UInt64, false),
        // Where the initial part begins and ends; empty where nobody asked.
        Field::new("initial", list(), false),
        // What [`About`] says, as JSON.
        Field::new("about", DataType::LargeBinary, false),
        // A hash of the ids: tells samples apart, and finds damage.
        Field::new("fingerprint", DataType::UInt64, false),
    ]))
}

pub(super) fn fingerprint(ids: &[u32]) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&blake3::hash(ids.to_byte_slice()).as_bytes()[..8]);
    u64::from_le_bytes(first)
}

fn push_list(lists: &mut LargeListBuilder<UInt32Builder>, values: &[u32]) {
    lists.values().append_slice(values);
    lists.append(true);
}

pub(super) struct TokenWriter<W: Write> {
    file: FileWriter<W>,
    ids: LargeListBuilder<UInt32Builder>,
    trained: LargeListBuilder<UInt32Builder>,
    initial: LargeListBuilder<UInt32Builder>,
    classes: UInt32Builder,
    prompts: UInt64Builder,
    about: LargeBinaryBuilder,
    fingerprints: UInt64Builder,
}

impl<W: Write> TokenWriter<W> {
    pub(super) fn new(out: W) -> io::Result<Self> {
        Ok(Self {
            file: FileWriter::try_new(out, &schema()).map_err(into_io)?,
            ids: LargeListBuilder::default(),
            trained: LargeListBuilder::default(),
            initial: LargeListBuilder::default(),
            classes: UInt32Builder::new(),
            prompts: UInt64Builder::new(),
            about: LargeBinaryBuilder::new(),
            fingerprints: UInt64Builder::new(),
        })
    }

    pub(super) fn push(&mut self, sample: &EncodedSample, about: &About) -> io::Result<()> {
        let number = |at: usize| u32::try_from(at).map_err(|_| io::Error::other("a sample of more than 2^32 tokens"));
        number(sample.ids.len())?;
        push_list(&mut self.ids, &sample.ids);
        let (runs, class) = match &sample.aim {
            Aim::Class(class) => (Vec::new(), Some(number(*class)?)),
            Aim::Tokens(is_trained) => (borders(is_trained), None),
        };
        push_list(&mut self.trained, &runs);
        let initial = sample.initial.as_ref().map(|range| [range.start as u32, range.end as u32]);
        push_list(&mut self.initial, initial.as_ref().map_or(&[], |ends| ends));
        self.classes.append_option(class);
        self.prompts.append_value(sample.prompt as u64);
        self.about.append_value(serde_json::to_vec(about)?);
        self.fingerprints.append_value(fingerprint(&sample.ids));
        if self.ids.values().len() >= BATCH_TOKENS { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        let columns: Vec<ArrayRef> = vec![
            Arc::new(self.ids.finish()),
            Arc::new(self.trained.finish()),
            Arc::new(self.classes.finish()),
            Arc::new(self.prompts.finish()),
            Arc::new(self.initial.finish()),
            Arc::new(self.about.finish()),
            Arc::new(self.fingerprints.finish()),
        ];
        let batch = RecordBatch::try_new(schema(), columns).map_err(into_io)?;
        self.file.write(&batch).map_err(into_io)
    }

    /// Ends the file; `record` says what it was made of.
    pub(super) fn finish(mut self, record: &impl Serialize) -> io::Result<()> {
        self.flush()?;
        self.file.write_metadata(RECORD, serde_json::to_string(record)?);
        self.file.finish().map_err(into_io)
    }
}

/// Where runs of what is true begin and end, in turn.
fn borders(is_true: &[bool]) -> Vec<u32> {
    let mut borders = Vec::new();
    let mut before = false;
    for (index, &now) in is_true.iter().chain([&false]).enumerate() {
        if now != before {
            borders.push(index as u32);
        }
        before = now;
    }
    borders
}

fn into_io(error: ArrowError) -> io::Error {
    match error {
        ArrowError::IoError(_, error) => error,
        other => io::Error::other(other.to_string()),
    }
}

pub(super) struct TokenFile {
    batches: Vec<RecordBatch>,
    firsts: Vec<usize>,
    pub(super) len: usize,
}

impl TokenFile {
    /// Reads the footer of a file and checks the shape of all in it but the tokens, which wait; beside it what `finish` was given.
    pub(super) fn read<R: for<'de> Deserialize<'de>>(buffer: &Buffer) -> Result<(Self, R), String> {
        let (batches, record) = guarded(|| read_batches(buffer))?;
        let record = serde_json::from_str(&record).map_err(|error| error.to_string())?;
        let mut firsts = Vec::with_capacity(batches.len());
        let mut len = 0;
        for batch in &batches {
            firsts.push(len);
            len += batch.num_rows();
        }
        let file = Self { batches, firsts, len };
        match (0..len).find(|&sample| !file.is_sound(sample)) {
            Some(sample) => Err(format!("sample {sample} is damaged")),
            None => Ok((file, record)),
        }
    }

    pub(super) fn ids(&self, sample: usize) -> &[u32] {
        self.list(sample, "ids")
    }

    pub(super) fn length(&self, sample: usize) -> Length {
        let (batch, row) = self.place(sample);
        let (prompt, total) = (batch["prompt"].as_primitive::<UInt64Type>().value(row), self.ids(sample).len());
        // All are targets, but perhaps the first, which nothing predicts.
        let is_plain_text = matches!(self.list(sample, "trained"), [0 | 1, end] if *end as usize == total);
        Length { total, prompt: prompt as usize, is_plain_text }
    }

    pub(super) fn class(&self, sample: usize) -> Option<usize> {
        let (batch, row) = self.place(sample);
        let classes = batch["class"].as_primitive::<UInt32Type>();
        classes.is_valid(row).then(|| classes.value(row) as usize)
    }

    pub(super) fn fingerprint(&self, sample: usize) -> u64 {
        let (batch, row) = self.place(sample);
        batch["fingerprint"].as_primitive::<UInt64Type>().value(row)
    }

    pub(super) fn about(&self, sample: usize) -> Result<About, String> {
        let (batch, row) = self.place(sample);
        serde_json::from_slice(batch["about"].as_binary::<i64>().value(row)).map_err(|error| error.to_string())
    }

    /// A part of a sample, as it was encoded; what lies outside the part counts nowhere.
    pub(super) fn part(&self, sample: usize, part: Range<usize>) -> EncodedSample {
        let Length { prompt, .. } = self.length(sample);
        let within = |at: u32| (at as usize).clamp(part.start, part.end) - part.start;
        let aim = if let Some(class) = self.class(sample) {
            Aim::Class(class)
        } else {
            let mut is_trained = vec![false; part.len()];
            for run in self.list(sample, "trained").chunks_exact(2) {
                is_trained[within(run[0])..within(run[1])].fill(true);
            }
            Aim::Tokens(is_trained)
        };
        let initial = match self.list(sample, "initial") {
            [start, end] => Some(within(*start)..within(*end)),
            _ => None,
        };
        let ids = self.ids(sample)[part.clone()].to_vec();
        EncodedSample { ids, prompt: prompt.clamp(part.start, part.end) - part.start, aim, initial, border: None }
    }

    fn place(&self, sample: usize) -> (&RecordBatch, usize) {
        let batch = self.firsts.partition_point(|&first| first <= sample) - 1;
        (&self.batches[batch], sample - self.firsts[batch])
    }

    fn list(&self, sample: usize, column: &str) -> &[u32] {
        let (batch, row) = self.place(sample);
        let lists = batch[column].as_list::<i64>();
        let (start, end) = (lists.value_offsets()[row] as usize, lists.value_offsets()[row + 1] as usize);
        &lists.values().as_primitive::<UInt32Type>().values()[start..end]
    }

    /// Whether a sample can be used without a further look at its numbers.
    fn is_sound(&self, sample: usize) -> bool {
        let Length { total, prompt, .. } = self.length(sample);
        let (trained, initial) = (self.list(sample, "trained"), self.list(sample, "initial"));
        let is_within = |ends: &[u32]| {
            ends.len().is_multiple_of(2) && ends.is_sorted() && ends.last().is_none_or(|&end| end as usize <= total)
        };
        total > 0
            && prompt <= total
            && is_within(trained)
            && is_within(initial)
            && initial.len() <= 2
            && trained.is_empty() == self.class(sample).is_some()
    }
}

fn read_batches(buffer: &Buffer) -> Result<(Vec<RecordBatch>, String), String> {
    let (footer, found) = footer(buffer)?;
    if found.fields() != schema().fields() {
        return Err("it has other columns".to_owned());
    }
    let record = footer.custom_metadata().into_iter().flatten().find(|pair| pair.key() == Some(RECORD));
    let record = record.and_then(|pair| pair.value()).ok_or("it does not say what it was made of")?.to_owned();
    // What is not aligned would be copied into memory.
    let decoder = FileDecoder::new(schema(), footer.version()).with_require_alignment(true);
    let batch = |block| {
        let batch = decoder.read_record_batch(block, &part(buffer, block)?).map_err(|error| error.to_string())?;
        Ok(batch.unwrap_or_else(|| RecordBatch::new_empty(schema())))
    };
    let batches = footer.recordBatches().into_iter().flatten().map(batch).collect::<Result<_, String>>()?;
    Ok((batches, record))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> impl Strategy<Value = EncodedSample> {
        let token = (any::<u32>(), any::<bool>());
        let class = prop::option::of(0_usize..9);
        (prop::collection::vec(token, 1..40), any::<[u8; 3]>(), class, any::<bool>()).prop_map(
            |(tokens, ends, class, is_asked)| {
                let (ids, mut is_trained): (Vec<u32>, Vec<bool>) = tokens.into_iter().unzip();
                is_trained[0] = true;
                let [prompt, start, end] = ends.map(|end| usize::from(end) % (ids.len() + 1));
                let initial = is_asked.then(|| start.min(end)..end.max(start));
                EncodedSample { ids, prompt, aim: class.map_or(Aim::Tokens(is_trained), Aim::Class), initial, border: None }
            },
        )
    }

    fn about(sample: usize) -> About {
        About {
            file: sample % 3,
            at: LineOrRecord::Record(sample),
            references: Some(vec![format!("“{sample}”")]),
            groups: None,
            border: None,
            follow_up: None,
        }
    }

    fn written(samples: &[EncodedSample]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = TokenWriter::new(&mut bytes).unwrap();
        for (index, sample) in samples.iter().enumerate() {
            writer.push(sample, &about(index)).unwrap();
            if index % 4 == 3 {
                writer.flush().unwrap();
            }
        }
        writer.finish(&"a record").unwrap();
        bytes
    }

    proptest! {
        #[test]
        fn what_is_read_is_what_was_written(samples in prop::collection::vec(sample(), 0..12), part in any::<[u8; 2]>()) {
            let bytes = written(&samples);
            let (file, record) = TokenFile::read::<String>(&Buffer::from_vec(bytes.clone())).unwrap();
            prop_assert_eq!((file.len, record.as_str()), (samples.len(), "a record"));
            for (index, sample) in samples.iter().enumerate() {
                let len = sample.ids.len();
                prop_assert_eq!(&file.part(index, 0..len), sample);
                prop_assert_eq!(file.about(index).unwrap(), about(index));
                prop_assert_eq!(file.fingerprint(index), fingerprint(&sample.ids));
                let [a, b] = part.map(|end| usize::from(end) % (len + 1));
                let (start, end) = (a.min(b), a.max(b));
                let found = file.part(index, start..end);
                prop_assert_eq!(&found.ids, &sample.ids[start..end]);
                if let (Aim::Tokens(found), Aim::Tokens(all)) = (&found.aim, &sample.aim) {
                    prop_assert_eq!(&found[..], &all[start..end]);
                }
            }
            // Cut short anywhere, it is refused and nothing worse.
            let short = bytes[..bytes.len() * usize::from(part[0]) / 256].to_vec();
            prop_assert!(TokenFile::read::<String>(&Buffer::from_vec(short)).is_err());
        }

        #[test]
        fn damage_is_an_error_or_changes_numbers(samples in prop::collection::vec(sample(), 1..4), at: u16, bits in 1_u8..=255) {
            let mut bytes = written(&samples);
            let place = usize::from(at) % bytes.len();
            bytes[place] ^= bits;
            if let Ok((file, _)) = TokenFile::read::<String>(&Buffer::from_vec(bytes)) {
                for sample in 0..file.len {
                    drop(file.part(sample, 0..file.ids(sample).len()));
                    let _ = (file.about(sample), file.length(sample));
                }
            }
        }
    }
}
