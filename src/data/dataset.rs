//! The samples of a split: their lengths at once, their tokens when a batch asks for them.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::batch::{Batch, Sequence};
use super::chat::ChatNotes;
use super::encode::Encoder;
use super::encoded_sample::{Aim, EncodedSample};
use super::faults;
use super::on_too_long::LengthOutcome;
use super::question::{Question, SampleGroups};
use super::sample_place::{LineOrRecord, SamplePlace};
use super::source::DataSource;
use super::token_cache::Tokens;
use super::token_file::{About, fingerprint};
use crate::files;
use crate::recipe::DataFormat;
use crate::units::{Fault, quoted};

/// Samples to train on or to validate with, in file order.
#[derive(Clone)]
pub struct Dataset {
    sets: Vec<SetSamples>,
    /// What is run, one by one: samples of this split, or parts of them, each with the number of its set.
    pieces: Vec<(usize, Piece)>,
    lengths: Vec<usize>,
}

#[derive(Clone)]
struct SetSamples {
    name: Option<String>,
    samples: Arc<Samples>,
    /// The number of its first sample among those of all sets.
    first: usize,
}

/// All samples of some files: two splits can share them.
pub(super) struct Samples {
    pub(super) source: DataSource,
    pub(super) tokens: Tokens,
    pub(super) encoder: Encoder,
    /// Whether the tokens of each sample have been found to be those that were written.
    pub(super) are_checked: Vec<AtomicBool>,
}

/// A sample, or what of it is run at once.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) sample: usize,
    /// The part of it that is run, of which the first `context` tokens are no targets: they are in the window before.
    tokens: Range<usize>,
    context: usize,
    /// What is cut out; empty where nothing is.
    without: Range<usize>,
}

impl Piece {
    fn whole(sample: usize, total: usize) -> Self {
        Self { sample, tokens: 0..total, context: 0, without: 0..0 }
    }

    /// The pieces that a sample becomes; none where it is left out.
    pub(super) fn of(sample: usize, outcome: &LengthOutcome, total: usize) -> Vec<Self> {
        let whole = Self::whole(sample, total);
        match outcome {
            LengthOutcome::Whole => vec![whole],
            LengthOutcome::Cut(range) => vec![Self { without: range.clone(), ..whole }],
            LengthOutcome::Split(windows) => {
                windows.iter().cloned().map(|(tokens, context)| Self { tokens, context, ..whole.clone() }).collect()
            }
            LengthOutcome::Dropped | LengthOutcome::NothingToCut => Vec::new(),
        }
    }
}

impl Dataset {
    pub(super) fn new(samples: Arc<Samples>, pieces: Vec<Piece>) -> Self {
        // The last token is only ever a target, but where a class is read at it.
        let unread = |piece: &Piece| usize::from(samples.tokens.file.class(piece.sample).is_none());
        let lengths = pieces.iter().map(|piece| piece.tokens.len() - piece.without.len() - unread(piece)).collect();
        let sets = vec![SetSamples { name: None, samples, first: 0 }];
        Self { sets, pieces: pieces.into_iter().map(|piece| (0, piece)).collect(), lengths }
    }

    /// Data sets by their names, one behind the other; `None` of none.
    pub(super) fn joined(named: impl Iterator<Item = (String, Self)>) -> Option<Self> {
        let mut all = Self { sets: Vec::new(), pieces: Vec::new(), lengths: Vec::new() };
        let mut first = 0;
        for (number, (name, one)) in named.enumerate() {
            for SetSamples { samples, .. } in one.sets {
                let count = samples.tokens.file.len;
                all.sets.push(SetSamples { name: Some(name.clone()), samples, first });
                first += count;
            }
            all.pieces.extend(one.pieces.into_iter().map(|(_, piece)| (number, piece)));
            all.lengths.extend(one.lengths);
        }
        (!all.is_empty()).then_some(all)
    }

    /// Each sample `copies` times, and those that are drawn, in order, once more.
    pub(super) fn repeated(mut self, copies: usize, drawn: &[usize]) -> Self {
        let pieces = std::mem::take(&mut self.pieces).into_iter().zip(std::mem::take(&mut self.lengths)).collect::<Vec<_>>();
        for windows in pieces.chunk_by(|((_, a), _), ((_, b), _)| a.sample == b.sample) {
            let copies = copies + usize::from(drawn.binary_search(&windows[0].0.1.sample).is_ok());
            let (pieces, lengths): (Vec<_>, Vec<_>) = std::iter::repeat_n(windows, copies).flatten().cloned().unzip();
            self.pieces.extend(pieces);
            self.lengths.extend(lengths);
        }
        self
    }

    pub fn set_of(&self, sample: usize) -> Option<&str> {
        self.sets[self.pieces.get(sample)?.0].name.as_deref()
    }

    /// How many samples have the tokens of one of another data set.
    pub(super) fn shared_with(&self, other: &Self) -> usize {
        let of = |data: &Self| {
            let own = data.pieces.iter().map(|(set, piece)| (*set, piece.sample)).collect::<BTreeSet<_>>();
            let fingerprint = |(set, sample): (usize, usize)| data.sets[set].samples.tokens.file.fingerprint(sample);
            own.into_iter().map(fingerprint).collect::<Vec<u64>>()
        };
        let others: HashSet<u64> = of(other).into_iter().collect();
        of(self).iter().filter(|fingerprint| others.contains(fingerprint)).count()
    }

    /// The index of a sample in the files, which windows of one text share.
    pub fn index_of(&self, sample: usize) -> Option<u64> {
        self.pieces.get(sample).map(|(set, piece)| (self.sets[*set].first + piece.sample) as u64)
    }

    /// Number of samples, at least one; windows of a sample count one by one.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Never true for an opened data set; here because `len` is.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Tokens that are run, per sample.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The tokens of these samples (indices from 0 to `len` - 1), cut where they are too long; sequence `i` is `samples[i]`.
    pub fn batch(&self, samples: &[usize]) -> Result<Batch, Fault> {
        if samples.is_empty() {
            return Err(self.bad_batch(&"no samples"));
        }
        let sequence = |&sample: &usize| {
            let (set, piece) = self.piece(sample)?;
            Ok(set.samples.encoded(piece)?.into_sequence(set.first + piece.sample))
        };
        Ok(Batch { sequences: samples.iter().map(sequence).collect::<Result<Vec<Sequence>, Fault>>()? })
    }

    pub fn question(&self, sample: usize) -> Result<Question, Fault> {
        let (set, piece) = self.piece(sample)?;
        let question = set.samples.question(piece)?;
        Ok(Question { sample: question.sample + set.first as u64, ..question })
    }

    /// The question that follows the thoughts which were the reply to one; `None` where the reply was the answer.
    pub fn following(&self, question: &Question, thoughts: &str) -> Result<Option<Question>, Fault> {
        let Some(follow_up) = &question.follow_up else { return Ok(None) };
        let number = question.sample as usize;
        let Some(set) = self.sets.iter().rfind(|set| set.first <= number) else { return Ok(None) };
        let encoder = &set.samples.encoder;
        let prompt = encoder.follow_up(follow_up, thoughts)?;
        let initial = encoder.initial.as_ref().map(|finder| finder.of(&prompt)).transpose()?;
        let initial = initial.map(|range| (range.start, range.end));
        Ok(Some(Question { prompt, initial, follow_up: None, ..question.clone() }))
    }

    /// What a sample is reported under, where its file says.
    pub fn groups(&self, sample: usize) -> Result<Option<SampleGroups>, Fault> {
        let (SetSamples { samples, .. }, piece) = self.piece(sample)?;
        Ok(samples.about(piece.sample)?.groups)
    }

    /// The first samples alone, in file order; all, where there are not as many.
    pub fn first(mut self, count: usize) -> Self {
        self.pieces.truncate(count);
        self.lengths.truncate(count);
        self
    }

    /// The samples by their indices in the files, in order; a sample in windows, or with a weight, stands there once.
    pub fn samples(&self) -> Vec<usize> {
        let mut samples: Vec<usize> = self.pieces.iter().map(|(set, piece)| self.sets[*set].first + piece.sample).collect();
        samples.dedup();
        samples
    }

    /// The file which the samples come from, the first of several.
    pub fn path(&self) -> &Path {
        self.sets.first().map_or(Path::new(""), |set| set.samples.source.first())
    }

    /// What the files hold; `None` where the data sets differ in it.
    pub fn format(&self) -> Option<&'static DataFormat> {
        let mut formats = self.sets.iter().map(|set| set.samples.source.format());
        formats.next().filter(|first| formats.all(|other| other.name == first.name))
    }

    /// Hash of the content of its files: a resumed run must find the same.
    pub fn hash(&self) -> String {
        hash_of(&self.sets.iter().map(|set| hash_of(&set.samples.tokens.record.hashes)).collect::<Vec<_>>())
    }

    pub(super) fn notes(&self) -> ChatNotes {
        let mut notes = ChatNotes::default();
        self.sets.iter().for_each(|set| notes.add(set.samples.tokens.record.notes.clone()));
        notes
    }

    fn piece(&self, sample: usize) -> Result<(&SetSamples, &Piece), Fault> {
        let (set, piece) = self.pieces.get(sample).ok_or_else(|| self.bad_batch(&format_args!("sample {sample}")))?;
        Ok((&self.sets[*set], piece))
    }

    fn bad_batch(&self, found: &dyn fmt::Display) -> Fault {
        let message = format!("a batch of {}, expected sample indices below {}", quoted(found), self.len());
        Fault::data(message, "ask for at least one sample, each within the data set")
    }
}

/// One hash for several files; a single one keeps its own.
fn hash_of(hashes: &[String]) -> String {
    if let [hash] = hashes { hash.clone() } else { files::hash_parts(hashes) }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset").field("path", &self.path()).field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Samples {
    /// What a sample has beside its tokens.
    fn about(&self, sample: usize) -> Result<About, Fault> {
        self.tokens.file.about(sample).map_err(|_| {
            faults::damaged_tokens(&SamplePlace { path: self.source.first().into(), at: LineOrRecord::Record(sample) })
        })
    }

    pub(super) fn place(&self, sample: usize) -> Result<SamplePlace, Fault> {
        let About { file, at, .. } = self.about(sample)?;
        Ok(SamplePlace { path: self.source.files.get(file).map_or(Path::new(""), PathBuf::as_path).into(), at })
    }

    /// The samples of which nothing is run, but for those of more than `most` tokens; `pieces` is what is run.
    pub(super) fn dropped(&self, pieces: &[Piece], most: usize) -> Vec<Piece> {
        let is_run = |sample| pieces.binary_search_by_key(&sample, |piece| piece.sample).is_ok();
        let dropped = |sample: usize| {
            let total = self.tokens.file.ids(sample).len();
            (total <= most && !is_run(sample)).then(|| Piece::whole(sample, total))
        };
        (0..self.tokens.file.len).filter_map(dropped).collect()
    }

    fn question(&self, piece: &Piece) -> Result<Question, Fault> {
        let About { groups, border, follow_up, references, .. } = self.about(piece.sample)?;
        let EncodedSample { ids: mut prompt, prompt: length, aim: Aim::Tokens(is_trained), initial, .. } = self.encoded(piece)?
        else {
            let message = format!("{} has a class, and no answer in words", self.place(piece.sample)?);
            return Err(Fault::data(message, "answer in words with `head.kind = \"next_token\"`"));
        };
        // What is answered are the targets that follow without a gap.
        let mut answer = prompt.split_off(length);
        answer.truncate(is_trained[length..].iter().take_while(|&&trained| trained).count());
        let initial = initial.map(|range| (range.start.min(length), range.end.min(length)));
        if prompt.is_empty() {
            let message = format!("{} has no prompt: its first token is a target already", self.place(piece.sample)?);
            return Err(Fault::data(message, "label the tokens of the prompt with -100, or leave the sample out"));
        }
        let references = match references {
            Some(references) => references,
            None => vec![self.encoder.text(&answer)?],
        };
        let reply_prefix = (self.source.format.reply_prefix)(&self.source.rows);
        let (sample, border) = (piece.sample as u64, border.unwrap_or_default());
        Ok(Question { sample, prompt, initial, reply_prefix, border, references, follow_up, groups })
    }

    fn encoded(&self, piece: &Piece) -> Result<EncodedSample, Fault> {
        let Tokens { file, map, .. } = &self.tokens;
        let ids = file.ids(piece.sample);
        if !self.are_checked[piece.sample].load(Ordering::Relaxed) {
            if fingerprint(ids) != file.fingerprint(piece.sample) {
                return Err(faults::damaged_tokens(&self.place(piece.sample)?));
            }
            self.are_checked[piece.sample].store(true, Ordering::Relaxed);
        }
        let mut encoded = file.part(piece.sample, piece.tokens.clone());
        encoded.cut(piece.without.clone());
        encoded.without_targets_before(piece.context);
        if let Some(map) = map {
            // They are looked at once an epoch.
            files::release_mapped(map, ids);
        }
        Ok(encoded)
    }
}
