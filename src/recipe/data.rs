//! What a recipe says of the examples, and of the loss on them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::chat::ChatRecipe;
pub use super::data_paths::DataPaths;
use super::distill::DistillRecipe;
use super::format::{DataFormat, HelmetFamily};
use super::table::{either, table};
use super::value::{COUNT, KeyRule, PART};
use super::words::words;

/// A sequence has a token, and one that follows it.
const LENGTH: KeyRule = at_least_two("write 2 or more tokens; to allow as many as the model has positions, leave the key out");
/// With one class there is nothing to tell apart.
const CLASSES: KeyRule = at_least_two("write how many classes there are, or their names as `labels`");

const fn at_least_two(hint: &'static str) -> KeyRule {
    KeyRule { takes: "integer ≥ 2", expected: "at least 2", hint, is_fine: |number| number >= 2.0 }
}

table! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct DataRecipe in "data" {
        /// The format of the rows in the files.
        #[also("data.type", "data.format_type")]
        #[all_words(DataFormat::words)]
        #[default("detected from the fields of the first rows")]
        pub format: Option<String> = None,
        /// Training samples: a file (`.jsonl`, `.json`, `.csv`, `.parquet`, `.arrow`, `.txt`; texts also as `.gz` or `.zst`), a folder of
        /// files or shards, one saved by `datasets`, a pattern as `data/*.jsonl`, or several of these.
        #[also("data.path", "data.train_file")]
        #[default("required")]
        pub train: DataPaths = DataPaths::default(),
        /// Several data sets in place of `train` and `validation`. Each is a table `[[data.sets]]` with `path`, optionally `name`, `weight`,
        /// `validation` or `validation_fraction`, and other keys of `[data]`, which override those of `[data]` itself.
        pub sets: Vec<DataSet> = Vec::new(),
        /// Where the validation samples come from.
        pub validation: ValidationSource = ValidationSource::Fraction(0.1),
        /// Tokens of the longest sequence.
        #[also(
            "data.max_seq_len", "data.max_length", "data.sequence_len", "data.cutoff_len", "max_seq_length", "max_seq_len",
            "sequence_len", "cutoff_len", "tokenizer.max_seq_len", "train.max_seq_length",
        )]
        #[rule(LENGTH)]
        #[default("the model's positions")]
        pub max_seq_length: Option<usize> = None,
        /// What happens to a longer sequence: `drop` leaves it out, `truncate` cuts the middle of its prompt, `split` makes windows of it,
        /// `error` stops the run.
        #[also("data.excess_length_strategy", "excess_length_strategy")]
        pub on_too_long: OnTooLong = OnTooLong::Error,
        /// Tokens that a window repeats from the window before it, as context and not as targets. Only with
        /// `on_too_long = "split"`.
        #[also("data.window_overlap", "data.chunk_overlap")]
        pub split_overlap: usize = 0,
        /// Order of an epoch's batches. A batch holds sequences of similar length in any case.
        pub order: BatchOrder = BatchOrder::Shuffled,
        /// The tokens of the prompt are targets too. Not with `tokens`.
        #[also("data.train_on_inputs", "data.train_on_input", "train_on_inputs", "train_on_prompt")]
        pub train_on_prompt: bool = false,
        /// Prompt template of `longbench-v2`, by the program that it comes from. A classification head uses its own, after `keys-values`.
        #[default("`upstream`")]
        pub prompt: Option<LongBenchPrompt> = None,
        /// Tokens of the longest prompt of `longbench-v2`. The middle of a longer one is cut out before the chat template is applied, as
        /// upstream does (with 120000 for most models). Then `on_too_long` applies.
        #[rule(COUNT)]
        #[default("no such limit")]
        pub max_prompt_tokens: Option<usize> = None,
        /// Which rows of HELMET the files hold.
        #[default("detected from the fields; `icl` and the families of long texts must be named")]
        pub family: Option<HelmetFamily> = None,
        /// The columns that hold the fields of the format, where they have other names: `columns = { prompt = "question" }`.
        #[also("data.column_map", "data.column_mapping")]
        pub columns: BTreeMap<String, String> = BTreeMap::new(),
        /// What happens to a row that cannot be read or is no sample of the format: `error` stops the run, `drop` leaves it out and counts it.
        /// A damaged file always stops the run.
        pub on_bad_row: OnBadRow = OnBadRow::Error,
        /// Bytes of the longest line, or of the longest record of another text file. A longer one is a bad row, and is not read to its end. A
        /// JSON row may have one value for every 16 of these bytes, and always 65536.
        #[rule(COUNT)]
        pub max_line_bytes: usize = 64 << 20,
        /// How conversations become text, and which part of a sample is trained.
        pub chat: ChatRecipe = ChatRecipe::default(),
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct DataSet {
    /// What counts, metrics and warnings call it.
    pub name: String,
    /// How often an epoch has each of its samples.
    pub weight: f64,
    /// What is said of it, with the defaults of the table.
    pub data: DataRecipe,
    /// The keys of the table that are its own.
    pub(super) own: BTreeSet<String>,
}

impl DataRecipe {
    /// All of these files to train on, and the other keys left out.
    pub fn of(train: DataPaths) -> Self {
        Self { train, validation: ValidationSource::Fraction(0.0), ..Self::default() }
    }

    /// What is said of each data set; itself, where there are no several.
    pub fn each(&self) -> impl Iterator<Item = &Self> {
        let itself = self.sets.is_empty().then_some(self);
        itself.into_iter().chain(self.sets.iter().map(|set| &set.data))
    }

    /// Changes what is said of all data sets.
    pub fn change(&mut self, change: &dyn Fn(&mut Self)) {
        change(self);
        self.sets.iter_mut().for_each(|set| change(&mut set.data));
    }
}

words! {
    /// Whose wording a prompt of LongBench v2 has.
    pub enum LongBenchPrompt {
        /// Upstream's for direct answers, as a message of the user where the model has a chat template. The reply is `The correct answer is (X)`.
        Upstream = "upstream",
        /// Upstream's in two steps, to be evaluated only: first the model thinks, then it is asked for the answer, without the text.
        UpstreamCot = "upstream-cot",
        /// Upstream's wording without the text.
        UpstreamNoContext = "upstream-no-context",
        /// That of `keys_values`: ends in `Answer:` and the beginning of the reply, which is the letter alone.
        KeysValues = "keys-values",
        /// That of lm-evaluation-harness: ends in `Answer:`, and the reply is the letter.
        LmEval = "lm-eval",
    }
}

either! {
    #[derive(Clone, Debug, PartialEq)]
    pub enum ValidationSource {
        /// Validation samples, in the same format. Excludes `validation_fraction`.
        #[also("data.validation_file")]
        File(DataPaths) in "validation",
        /// Part of the training samples that validates, drawn by the seed. 0 is none.
        #[also("data.val_split_fraction", "data.val_fraction", "val_set_size", "val_size")]
        #[rule(PART)]
        Fraction(f64) in "validation_fraction",
    }
}

words! {
    pub enum OnTooLong {
        Drop = "drop",
        Truncate = "truncate",
        /// The sample becomes windows; each of its tokens is a target in one of them. Of plain text only, all of which is trained.
        Split = "split",
        Error = "error" | "raise",
    }
}

words! {
    pub enum OnBadRow {
        /// The run does not start; the first ten bad rows are listed.
        Error = "error",
        Drop = "drop",
    }
}

words! {
    pub enum BatchOrder {
        /// Shuffled anew for each epoch.
        Shuffled = "shuffled",
        /// The longest first, so that memory is known at the first step.
        LongestFirst = "longest_first" | "longest-first",
        ShortestFirst = "shortest_first" | "shortest-first",
        /// Shuffled, and batches are drawn anew for each epoch from sequences whose lengths differ by at most a quarter: a sequence has other
        /// company each time.
        LengthBuckets = "length_buckets" | "length-buckets" | "group_by_length",
    }
}

table! {
    #[derive(Clone)]
    /// The table `[head]` as it is written; [`HeadRecipe`] is what it says.
    pub(super) struct HeadTable in "head" {
        /// The loss. `next_token`: cross-entropy of every labelled token. `seq_classification_on_logits`: one class per sequence, from the
        /// logits of the class tokens at the last token. `seq_classification`: one class per sequence, from a trained matrix of its own at the
        /// last token that is no padding.
        pub(super) kind: HeadKind = HeadKind::NextToken,
        /// Classes by name; with `seq_classification_on_logits` each must be one token.
        pub(super) labels: Option<Vec<String>> = None,
        /// Number of classes that have no names, for `seq_classification`. Excludes `labels`.
        #[also("model.num_labels", "num_labels")]
        #[rule(CLASSES)]
        pub(super) num_labels: Option<usize> = None,
        /// Classes by token id. Excludes `labels`.
        pub(super) label_tokens: Option<Vec<u32>> = None,
        /// Adds a distillation loss (KL) to that of `next_token`. The teacher is the model without its adapter and with a full cache.
        #[default("cross-entropy alone")]
        pub(super) distill: Option<DistillRecipe> = None,
    }
}

words! {
    pub enum HeadKind {
        NextToken = "next_token" | "next-token" | "next_token_prediction",
        SeqClassificationOnLogits = "seq_classification_on_logits" | "seq-classification-on-logits",
        SeqClassification = "seq_classification" | "seq-classification" | "sequence_classification",
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeadRecipe {
    NextToken,
    /// One class per sequence, read from the logits of a few tokens at the last position.
    SeqClassificationOnLogits(ClassList),
    /// One class per sequence, scored by a matrix of its own in place of the output projection at the last position.
    SeqClassification(ClassList),
}

impl HeadRecipe {
    /// How many classes a matrix of its own scores.
    pub fn num_classes(&self) -> Option<usize> {
        if let Self::SeqClassification(classes) = self { Some(classes.count()) } else { None }
    }

    /// The classes; of the next token there are none.
    pub fn classes(&self) -> Option<&ClassList> {
        match self {
            Self::NextToken => None,
            Self::SeqClassificationOnLogits(classes) | Self::SeqClassification(classes) => Some(classes),
        }
    }

    /// What the recipe calls it.
    pub fn kind(&self) -> HeadKind {
        match self {
            Self::NextToken => HeadKind::NextToken,
            Self::SeqClassificationOnLogits(_) => HeadKind::SeqClassificationOnLogits,
            Self::SeqClassification(_) => HeadKind::SeqClassification,
        }
    }

    pub(super) fn to_table(&self) -> HeadTable {
        let mut table = HeadTable { kind: self.kind(), ..HeadTable::default() };
        match self.classes().cloned() {
            None => {}
            Some(ClassList::Named(names)) => table.labels = Some(names),
            Some(ClassList::Tokens(tokens)) => table.label_tokens = Some(tokens),
            Some(ClassList::Count(count)) => table.num_labels = Some(count),
        }
        table
    }
}

/// The classes of a classification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClassList {
    /// Where the logits of tokens are read, each name is a token.
    Named(Vec<String>),
    /// Only where the logits of tokens are read.
    Tokens(Vec<u32>),
    /// Only where a matrix scores them.
    Count(usize),
}

impl ClassList {
    pub fn count(&self) -> usize {
        match self {
            Self::Named(names) => names.len(),
            Self::Tokens(tokens) => tokens.len(),
            Self::Count(count) => *count,
        }
    }

    /// Without names they are numbers from 0.
    pub fn names(&self) -> Vec<String> {
        if let Self::Named(names) = self { names.clone() } else { (0..self.count()).map(|class| class.to_string()).collect() }
    }
}

/// `A, B, C, D`, `tokens 32, 33`, or `4 classes`.
impl fmt::Display for ClassList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(names) => f.write_str(&names.join(", ")),
            Self::Tokens(tokens) => {
                let numbers: Vec<String> = tokens.iter().map(ToString::to_string).collect();
                write!(f, "tokens {}", numbers.join(", "))
            }
            Self::Count(count) => write!(f, "{count} classes"),
        }
    }
}
