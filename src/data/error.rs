//! What can be wrong with data and tokenizers, and the way out of each case.

use std::path::PathBuf;

use super::sample_place::{LineOrRecord, SamplePlace};
use crate::files::FilesError;
use crate::recipe::DataFormat;
use crate::units::{Exit, Failure};

/// What asks for a tokenizer even where sequences are token ids already.
pub(super) const INITIAL_PART: &str = "the initial part of a prompt";

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
    #[error("cannot read `{}`", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of samples could not be written.
    #[error("cannot write `{}`", path.display())]
    Dump {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A data file without a single sample.
    #[error("`{}` holds no samples, expected at least 1", path.display())]
    Empty {
        /// The data file.
        path: PathBuf,
    },
    /// A file of answers that cannot be scored.
    #[error(transparent)]
    Answer(Box<DataError>),
    /// No sample is left after those that are too long were dropped.
    #[error("none of the {read} samples of `{}` fits into {limit} tokens, the shortest has {shortest}", path.display())]
    NothingFits {
        /// The data file.
        path: PathBuf,
        /// Samples in the file.
        read: usize,
        /// Tokens that a sample may have.
        limit: usize,
        /// Tokens of the shortest sample.
        shortest: usize,
    },
    /// A line or a file that is not JSON.
    #[error("{place} is not JSON: {message}")]
    NotJson {
        /// The line, or the file.
        place: SamplePlace,
        /// What the parser said.
        message: String,
    },
    /// A JSON value of another shape than the format asks for.
    #[error("{place}: expected {expected}, found {found}")]
    Shape {
        /// Where it stands.
        place: SamplePlace,
        /// What the format asks for.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A sample lacks a field.
    #[error("{place}: field `{field}` is missing{}", if others.is_empty() { String::new() } else { format!(", others are {others}") })]
    MissingField {
        /// The sample.
        place: SamplePlace,
        /// The field.
        field: String,
        /// The other fields, in words.
        others: String,
    },
    /// A field holds something that the format does not allow.
    #[error("{place}: field `{field}`: expected {expected}, found {found}")]
    BadField {
        /// The sample.
        place: SamplePlace,
        /// The field.
        field: String,
        /// What the format asks for.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A line or row that is none.
    #[error("{place}: {message}")]
    BadRow {
        /// Where it stands.
        place: SamplePlace,
        /// What is wrong.
        message: String,
    },
    /// Several rows that cannot be read.
    #[error("{count} of {read} rows of the data files cannot be read{}", listed(first, *count))]
    BadRows {
        /// What is wrong with the first of them.
        first: Vec<DataError>,
        /// How many there are.
        count: usize,
        /// Rows in the files.
        read: usize,
    },
    /// A row that is of no known format, or of another one than those before it.
    #[error("{place}: which `data.format` it is cannot be told: found {found}")]
    UnknownFormat {
        /// Where it stands.
        place: SamplePlace,
        /// What it looks like.
        found: String,
    },
    /// A folder or a pattern without the files that are looked for.
    #[error("`{}`: {message}", path.display())]
    BadSource {
        /// What the recipe names.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A file that is damaged, cut off, or not of its kind.
    #[error("cannot read `{}` as {as_what}: {message}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Its kind.
        as_what: &'static str,
        /// What is wrong.
        message: String,
    },
    /// A tokenizer that cannot be loaded, or that failed on a text.
    #[error("tokenizer `{}`: {message}", path.display())]
    Tokenizer {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A model directory that names no end-of-sequence token.
    #[error("no `eos_token_id` in generation_config.json or config.json and no known `eos_token` in tokenizer_config.json of `{}`", dir.display())]
    NoEos {
        /// The model directory.
        dir: PathBuf,
    },
    /// A chat template can not be read, or refuses a conversation.
    #[error("the chat template of `{place}`: {message}")]
    ChatTemplate {
        /// The file.
        place: String,
        /// In the template's own words, where it refuses.
        message: String,
    },
    /// A sample without a text that could be an answer.
    #[error("{place} has a class, and no answer in words")]
    NoQuestion {
        /// The sample.
        place: SamplePlace,
    },
    /// A sample all of which is a target.
    #[error("{place} has no prompt: its first token is a target already")]
    NoPrompt {
        /// The sample.
        place: SamplePlace,
    },
    /// Text data and no tokenizer to read it with.
    #[error("{what} needs a tokenizer, found none")]
    NoTokenizer {
        /// What asked for one.
        what: &'static str,
    },
    /// A token id that the model has no embedding for.
    #[error("{what}: token id {id} is not below the model's `vocab_size` {vocab_size}")]
    OutOfVocabulary {
        /// Where the id comes from.
        what: String,
        /// The id.
        id: u64,
        /// Sequences of the model's embedding.
        vocab_size: usize,
    },
    /// A head with classes, and rows that have none.
    #[error("`data.format = \"{format}\"` has no classes, which the head asks for")]
    NoClasses {
        /// The format.
        format: DataFormat,
    },
    /// A sample longer than allowed, where the recipe says that this is an error.
    #[error("{place}: {length} tokens, expected at most {limit}")]
    TooLong {
        /// The sample.
        place: SamplePlace,
        /// Its tokens.
        length: usize,
        /// Tokens that a sample may have.
        limit: usize,
    },
    /// A sample with no token to predict.
    #[error("{place}: {length} tokens and none to predict, expected at least 1 target")]
    NoTarget {
        /// The sample.
        place: SamplePlace,
        /// Its tokens.
        length: usize,
    },
    /// A label that is not exactly one token.
    #[error("label `{label}` is {} tokens {tokens:?}, expected exactly 1", tokens.len())]
    LabelTokens {
        /// The label.
        label: String,
        /// Its tokens.
        tokens: Vec<u32>,
    },
    /// Two labels that are the same token.
    #[error("labels {first} and {second} are both token {token}, expected distinct tokens")]
    DuplicateLabel {
        /// Index of the first.
        first: usize,
        /// Index of the second.
        second: usize,
        /// The token.
        token: u32,
    },
    /// Too few labels to classify.
    #[error("{found} labels, expected {expected}")]
    LabelCount {
        /// What the head or the format asks for.
        expected: &'static str,
        /// How many there are.
        found: usize,
    },
    /// A batch of no samples, or an index beyond the data set.
    #[error("a batch of {found}, expected sample indices below {len}")]
    BadBatch {
        /// What was asked for.
        found: String,
        /// Samples in the data set.
        len: usize,
    },
    /// A sample's length differs from the recorded one.
    #[error("{place}: {found} tokens, but {recorded} were recorded when the data was opened")]
    LengthChanged {
        /// The sample.
        place: SamplePlace,
        /// Tokens now.
        found: usize,
        /// Tokens recorded.
        recorded: usize,
    },
    /// Texts too small for a vocabulary of the wanted size.
    #[error("the texts give a vocabulary of {found} tokens, expected {expected}")]
    Vocabulary {
        /// The wanted size.
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

    /// JSON that is none, in a file that is no data.
    pub(super) fn not_json(path: &std::path::Path, error: &serde_json::Error) -> Self {
        let place = SamplePlace { path: path.into(), at: LineOrRecord::Whole };
        Self::NotJson { place, message: error.to_string() }
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

impl Failure for DataError {
    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Files(_) | Self::Dump { .. } => "check that the folder exists, is writable and has space left",
            Self::Read { .. } => "check the path; paths in a recipe are relative to the recipe's folder",
            Self::Empty { .. } => "put at least one sample into the file, or name another file",
            Self::Answer(_) => {
                "each line is a JSON object with `prediction`, a text, `references`, a list of texts, and the fields that `--by` names"
            }
            Self::NothingFits { .. } => {
                "raise `data.max_seq_length` as far as the model allows, or set `data.on_too_long = \"truncate\"`"
            }
            Self::NotJson { .. } => "repair it; a file of texts holds a JSON object a line, or one JSON array of objects",
            Self::Shape { .. } => "check `data.format` against what the file holds",
            Self::MissingField { .. } => {
                "check `data.format` against what the file holds; a column of another name is named as in `data.columns = { prompt = \"question\" }`"
            }
            Self::BadField { .. } => "correct the field, or remove the sample",
            // Where none can be read, something is wrong with all of them.
            Self::BadRows { first, count, read } if count == read => return first.first().and_then(Self::hint),
            Self::BadRow { .. } | Self::BadRows { .. } => {
                "repair them, or leave them out with `data.on_bad_row = \"drop\"`, which counts them"
            }
            Self::UnknownFormat { .. } => {
                "set `data.format`, and where fields have other names `data.columns = { prompt = \"question\" }`"
            }
            Self::BadSource { .. } => {
                "name a file, a folder of files (train, validation, test), a folder saved by `datasets`, or a pattern such as `data/*.jsonl`"
            }
            Self::Unreadable { as_what: "JSON", .. } => {
                "write an array of records, or an object a line in a file called `.jsonl`"
            }
            Self::Unreadable { .. } => "fetch or write the file again; nothing of it is used",
            Self::Tokenizer { .. } => "fetch `tokenizer.json` again, or save it anew with the `tokenizers` library",
            Self::ChatTemplate { .. } => "change the messages, or name another template with `--chat-template FILE`",
            Self::NoEos { .. } => "add `\"eos_token_id\": N` to the model's generation_config.json",
            Self::NoTokenizer { what: ANSWER } => "put `tokenizer.json` into the model directory: answers are compared as texts",
            Self::NoQuestion { .. } => "answer in words with `head.kind = \"next_token\"`",
            Self::NoPrompt { .. } => "label the tokens of the prompt with -100, or leave the sample out",
            Self::NoTokenizer { what: INITIAL_PART } => {
                "put `tokenizer.json` into the model directory, or choose a policy that does not look for an initial part"
            }
            Self::NoTokenizer { .. } => {
                "put `tokenizer.json` into the model directory, or use `data.format = \"tokens\"` with `head.label_tokens`"
            }
            Self::OutOfVocabulary { .. } => "use token ids of the model's own tokenizer",
            Self::TooLong { .. } => {
                "set `data.on_too_long` to \"drop\" or \"truncate\", or raise `data.max_seq_length` as far as the model's \
                 `max_position_embeddings` allows"
            }
            Self::NoTarget { .. } => "remove the sample, or give it a label that is not -100 behind its first token",
            Self::LabelTokens { .. } => "choose labels that are one token each, or give token ids in `head.label_tokens`",
            Self::DuplicateLabel { .. } => "give each class a token of its own",
            Self::NoClasses { .. } => "use `head.kind = \"next_token\"`, or rows with `prompt` and `label`",
            Self::LabelCount { .. } => "list one entry per class in `head.labels` or `head.label_tokens`",
            Self::BadBatch { .. } => "ask for at least one sample, each within the data set",
            Self::LengthChanged { .. } => {
                "the file changed while it was in use, or its `.lengths.json` is stale: start again without it"
            }
            Self::Vocabulary { .. } => "give more text, or ask for a smaller vocabulary (at least 260)",
        };
        Some(hint.to_owned())
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Files(e) => e.exit(),
            _ => Exit::Data,
        }
    }
}
