//! What can be wrong with data and tokenizers, and the way out of each case.

use std::path::PathBuf;

use super::sample_place::SamplePlace;
use crate::files::FilesError;
use crate::recipe::{DataFormat, FormatContradiction};
use crate::units::{self, abridged, quoted};

/// What asks for a tokenizer even where sequences are token ids already.
pub(super) const INITIAL_PART: &str = "the initial part of a prompt";

/// What a column of pictures, sound or video should have been.
pub(super) const TEXT_ALONE: &str = "no pictures, sound or video, as models are run on text alone";

/// Where no token to predict was found: in the labels of token ids,
pub(super) const IN_LABELS: &str = "`labels` is -100 behind the first token";
pub(super) const IN_MESSAGES: &str = "no message of the assistant is trained";
pub(super) const IN_COMPLETION: &str = "nothing follows the prompt";

/// What asks for a tokenizer where answers are compared.
pub(super) const ANSWER: &str = "the text of an answer";

/// What can be wrong with data files, tokenizers and labels.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file could not be written or hashed.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A file or folder could not be read.
    #[error("cannot read `{}`", abridged(path.display()))]
    Read { path: PathBuf, source: std::io::Error },
    /// A file of samples could not be written.
    #[error("cannot write `{}`", abridged(path.display()))]
    Dump { path: PathBuf, source: std::io::Error },
    /// A data file without a single sample.
    #[error("`{}` holds no samples, expected at least 1", abridged(path.display()))]
    Empty { path: PathBuf },
    /// A file of answers that cannot be scored.
    #[error(transparent)]
    Answer(Box<DataError>),
    /// No sample is left after those that are too long were dropped.
    #[error("none of the {read} samples of `{}` fits into {limit} tokens, the shortest has {shortest}", abridged(path.display()))]
    NothingFits {
        path: PathBuf,
        read: usize,
        /// Tokens that a sample may have.
        limit: usize,
        /// Tokens of the shortest sample.
        shortest: usize,
    },
    /// A line or a file that is not JSON.
    #[error("{place} is not JSON: {message}", message = abridged(message))]
    NotJson {
        /// The line, or the file.
        place: SamplePlace,
        message: String,
    },
    /// A JSON value of another shape than the format asks for.
    #[error("{place}: expected {expected}, found {found}", found = quoted(found))]
    Shape {
        place: SamplePlace,
        /// What the format asks for.
        expected: &'static str,
        found: String,
    },
    /// A sample lacks a field.
    #[error("{place}: field `{field}` is missing{}", if others.is_empty() { String::new() } else { format!(", others are {others}") }, field = quoted(field))]
    MissingField {
        place: SamplePlace,
        field: String,
        /// The other fields, in words.
        others: String,
    },
    /// A field holds something that the format does not allow.
    #[error("{place}: field `{field}`: expected {expected}, found {found}", field = quoted(field), found = quoted(found))]
    BadField {
        place: SamplePlace,
        field: String,
        /// What the format asks for.
        expected: String,
        found: String,
    },
    /// A line or row that is none.
    #[error("{place}: {message}", message = abridged(message))]
    BadRow { place: SamplePlace, message: String },
    /// Several rows that cannot be read.
    #[error("{count} of {read} rows of the data files cannot be read{}", listed(first, *count))]
    BadRows {
        /// What is wrong with the first of them.
        first: Vec<DataError>,
        count: usize,
        read: usize,
    },
    /// A row that is of no known format, or of another one than those before it.
    #[error("{place}: cannot detect `data.format`: found {found}", found = quoted(found))]
    UnknownFormat {
        place: SamplePlace,
        found: String,
        /// The table `[data]` that may be meant, in TOML.
        table: Option<String>,
    },
    /// A folder or a pattern without the files that are looked for.
    #[error("`{}`: {message}", abridged(path.display()), message = abridged(message))]
    BadSource { path: PathBuf, message: String },
    /// A file that is damaged, cut off, or not of its kind.
    #[error("cannot read `{}` as {as_what}: {message}", abridged(path.display()), message = abridged(message))]
    Unreadable { path: PathBuf, as_what: &'static str, message: String },
    /// A tokenizer that cannot be loaded, or that failed on a text.
    #[error("tokenizer `{}`: {message}", abridged(path.display()), message = abridged(message))]
    Tokenizer { path: PathBuf, message: String },
    /// A model directory that names no end-of-sequence token.
    #[error("no `eos_token_id` in generation_config.json or config.json and no known `eos_token` in tokenizer_config.json of `{}`", abridged(dir.display()))]
    NoEos { dir: PathBuf },
    /// A chat template can not be read, or refuses a conversation.
    #[error("the chat template of `{}`: {message}", abridged(place), message = abridged(message))]
    ChatTemplate {
        place: String,
        /// In the template's own words, where it refuses.
        message: String,
    },
    /// A field whose messages, or whose tools, are not what they must be.
    #[error("{place}: field `{field}`: {fault}", field = quoted(field), fault = abridged(fault))]
    Messages {
        place: SamplePlace,
        field: &'static str,
        /// What is wrong with which message.
        fault: String,
    },
    /// No chat template where one is needed.
    #[error("conversations need a chat template: {why}", why = abridged(why))]
    NoTemplate { why: String },
    /// A chat template that is asked for and not there.
    #[error("there is no chat template `{wanted}`: neither a file, nor among {}", units::listed(names), wanted = quoted(wanted))]
    NoSuchTemplate {
        wanted: String,
        /// The names of the model's templates.
        names: Vec<String>,
    },
    /// A conversation that its template refuses, or of which nobody can say what the assistant writes.
    #[error("{place}: the chat template of `{template}`: {message}", template = quoted(template), message = abridged(message))]
    Conversation {
        place: SamplePlace,
        template: String,
        /// In the template's own words, where it refuses.
        message: String,
    },
    /// A sample without a text that could be an answer.
    #[error("{place} has a class, and no answer in words")]
    NoQuestion { place: SamplePlace },
    /// A sample all of which is a target.
    #[error("{place} has no prompt: its first token is a target already")]
    NoPrompt { place: SamplePlace },
    /// Text data and no tokenizer to read it with.
    #[error("{what} needs a tokenizer, found none")]
    NoTokenizer { what: &'static str },
    /// A token id that the model has no embedding for.
    #[error("{what}: token id {id} is not below the model's `vocab_size` {vocab_size}")]
    OutOfVocabulary {
        /// Where the id comes from.
        what: String,
        id: u64,
        /// Sequences of the model's embedding.
        vocab_size: usize,
    },
    /// A head with classes, and rows that have none.
    #[error("`data.format = \"{format}\"` has no classes, which the head asks for")]
    NoClasses { format: DataFormat },
    /// What the recipe says contradicts the format that the rows turn out to have.
    #[error("{}", .0.message)]
    Contradiction(FormatContradiction),
    /// The recipe asks for longer sequences than the model computes.
    #[error("`data.max_seq_length` is {tokens}, and the model has {positions} positions")]
    TooManyPositions {
        /// `data.max_seq_length`.
        tokens: usize,
        /// With the scaling that is asked for.
        positions: usize,
    },
    /// A sample longer than allowed, where the recipe says that this is an error.
    #[error("{place}: {length} tokens, expected at most {limit}")]
    TooLong {
        place: SamplePlace,
        length: usize,
        /// Tokens that a sample may have.
        limit: usize,
    },
    /// A sample with no token to predict.
    #[error("{place}: {} and none to predict: {why}", units::counted(*length, "token"))]
    NoTarget {
        place: SamplePlace,
        length: usize,
        /// Where a target was looked for.
        why: &'static str,
    },
    /// A label that is not exactly one token.
    #[error("label `{label}` is {} tokens {tokens:?}, expected exactly 1", tokens.len(), label = quoted(label))]
    LabelTokens { label: String, tokens: Vec<u32> },
    /// Two labels that are the same token.
    #[error("labels {first} and {second} are both token {token}, expected distinct tokens")]
    DuplicateLabel { first: usize, second: usize, token: u32 },
    /// Too few labels to classify.
    #[error("{found} labels, expected {expected}")]
    LabelCount {
        /// What the head or the format asks for.
        expected: &'static str,
        found: usize,
    },
    /// A batch of no samples, or an index beyond the data set.
    #[error("a batch of {found}, expected sample indices below {len}", found = quoted(found))]
    BadBatch {
        found: String,
        /// Samples in the data set.
        len: usize,
    },
    /// A sample's tokens are not those that were written.
    #[error("{place}: its tokens in the cache are damaged")]
    DamagedTokens { place: SamplePlace },
    /// A file that was written to while it was read.
    #[error("`{}` has changed while it was read", abridged(path.display()))]
    Changed { path: PathBuf },
    /// There is no place for the tokens of the data.
    #[error("the tokens of the data cannot be kept: {message}", message = abridged(message))]
    NotKept {
        /// What is wrong with the last place.
        message: String,
    },
    /// A sample that is too long, and cannot become windows.
    #[error("{place}: {length} tokens, expected at most {limit}, or a text all of whose tokens are targets, which can be split")]
    NoPlainText {
        place: SamplePlace,
        length: usize,
        /// Tokens that it may have.
        limit: usize,
    },
    /// Windows that share so much that none goes on.
    #[error("windows of {limit} tokens cannot share {overlap}: expected at most {}", limit.saturating_sub(2))]
    Overlap { limit: usize, overlap: usize },
    /// Texts too small for a vocabulary of the wanted size.
    #[error("the texts give a vocabulary of {found} tokens, expected {expected}")]
    Vocabulary {
        expected: usize,
        /// The size that could be reached, or the smallest that is possible.
        found: usize,
    },
}

/// What is wrong, a line each.
fn listed(errors: &[DataError], count: usize) -> String {
    let lines: Vec<String> = errors.iter().map(|error| format!("\n  {error}")).collect();
    let lines = lines.concat();
    if count > errors.len() { format!("; the first {} are{lines}", errors.len()) } else { format!(":{lines}") }
}

impl DataError {
    /// The row that is bad, where it is one.
    pub(super) fn place(&self) -> Option<&SamplePlace> {
        match self {
            Self::NotJson { place, .. }
            | Self::BadRow { place, .. }
            | Self::Shape { place, .. }
            | Self::MissingField { place, .. }
            | Self::BadField { place, .. } => Some(place),
            _ => None,
        }
    }

    /// A source that lacks what is looked for.
    pub(super) fn bad_source(path: &std::path::Path, message: String) -> Self {
        Self::BadSource { path: path.to_path_buf(), message }
    }

    /// For `map_err`: a failed read of `path`.
    pub(super) fn read(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Read { path, source }
    }
}
