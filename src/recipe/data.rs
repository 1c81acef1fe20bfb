//! What a recipe says of the examples, and of the loss on them.

use std::fmt;
use std::path::PathBuf;

use super::table::{either, table};
use super::value::{KeyRule, PART, RecipeValue};
use super::words::words;

/// A sequence has a token, and one that follows it.
const LENGTH: KeyRule = KeyRule {
    takes: "integer ≥ 2",
    expected: "at least 2",
    hint: "write 2 or more tokens; to allow as many as the model has positions, leave the key out",
    is_fine: |tokens| tokens >= 2.0,
};

table! {
    /// The table `[data]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct DataRecipe in "data" {
        /// What the files hold.
        #[also("data.type", "data.format_type")]
        #[word("longbench-v2", "longbench_v2", "longbenchv2", "LongBenchV2", "LongBench-v2")]
        #[word("prompt-completion", "prompt_completion")]
        #[required(format!("it is {}", DataFormat::takes(None)))]
        pub format: DataFormat,
        /// Training samples.
        #[also("data.path", "data.train_file")]
        #[required("the file of training examples")]
        pub train: PathBuf,
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
        /// A longer sequence is left out, loses the middle of its prompt, or stops the run.
        #[also("data.excess_length_strategy", "excess_length_strategy")]
        #[word("error", "raise")]
        pub on_too_long: OnTooLong = OnTooLong::Error,
        /// Order of an epoch's batches. A batch holds sequences of similar length in any case.
        #[word("longest_first", "longest-first")]
        #[word("shortest_first", "shortest-first")]
        pub order: BatchOrder = BatchOrder::Shuffled,
        /// The tokens of the prompt are targets too. Not with `tokens`.
        #[also("data.train_on_inputs", "data.train_on_input", "train_on_inputs", "train_on_prompt")]
        pub train_on_prompt: bool = false,
    }
}

words! {
    /// What the data files hold.
    pub enum DataFormat {
        /// LongBench v2: a JSON array, JSON lines, or Parquet.
        LongBenchV2 = "longbench-v2",
        /// JSON lines with `prompt` and `completion`.
        PromptCompletion = "prompt-completion",
        /// JSON lines with `input_ids`, and `labels` or `label`.
        Tokens = "tokens",
    }
}

either! {
    /// Where the validation samples come from.
    #[derive(Clone, Debug, PartialEq)]
    pub enum ValidationSource {
        /// Validation samples, in the same format. Excludes `validation_fraction`.
        #[also("data.validation_file")]
        File(PathBuf) in "validation",
        /// Part of the training samples that validates, drawn by the seed. 0 is none.
        #[also("data.val_split_fraction", "data.val_fraction")]
        #[rule(PART)]
        Fraction(f64) in "validation_fraction",
    }
}

words! {
    /// What happens to a sequence that is too long.
    pub enum OnTooLong {
        /// It is left out, and counted.
        Drop = "drop",
        /// The middle of its prompt is cut out, and it is counted.
        Truncate = "truncate",
        /// The run does not start.
        Error = "error",
    }
}

words! {
    /// The order of the batches of an epoch; a batch holds sequences of similar length in any case.
    pub enum BatchOrder {
        /// Shuffled anew for each epoch.
        Shuffled = "shuffled",
        /// The longest first, so that memory is known at the first step.
        LongestFirst = "longest_first",
        /// The shortest first.
        ShortestFirst = "shortest_first",
    }
}

table! {
    /// The table `[head]` as it is written; [`HeadRecipe`] is what it says.
    pub(super) struct HeadTable in "head" {
        /// The loss: every labelled token, or one class per sequence from the logits at its last token.
        #[word("next_token", "next-token", "next_token_prediction")]
        #[word("seq_classification_on_logits", "seq-classification-on-logits")]
        pub(super) kind: HeadKind = HeadKind::NextToken,
        /// Classes by text. Each must be one token.
        pub(super) labels: Option<Vec<String>> = None,
        /// Classes by token id. Excludes `labels`.
        pub(super) label_tokens: Option<Vec<u32>> = None,
    }
}

words! {
    /// Which loss there is.
    pub(super) enum HeadKind {
        /// That of each next token.
        NextToken = "next_token",
        /// That of one class per sequence.
        SeqClassificationOnLogits = "seq_classification_on_logits",
    }
}

/// What the loss is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeadRecipe {
    /// Every target is the next token.
    NextToken,
    /// One class per sequence, read from the logits of a few tokens at the last position.
    SeqClassificationOnLogits(Labels),
}

impl HeadRecipe {
    /// As a recipe would have it.
    pub(super) fn to_table(&self) -> HeadTable {
        let (kind, labels, label_tokens) = match self.clone() {
            Self::NextToken => (HeadKind::NextToken, None, None),
            Self::SeqClassificationOnLogits(Labels::Texts(texts)) => (HeadKind::SeqClassificationOnLogits, Some(texts), None),
            Self::SeqClassificationOnLogits(Labels::Tokens(ids)) => (HeadKind::SeqClassificationOnLogits, None, Some(ids)),
        };
        HeadTable { kind, labels, label_tokens }
    }
}

/// The classes of a classification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Labels {
    /// By token.
    Tokens(Vec<u32>),
    /// By a text that is one token.
    Texts(Vec<String>),
}

impl Labels {
    /// Number of classes.
    pub fn len(&self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Texts(texts) => texts.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// `A, B, C, D`, or `tokens 32, 33`.
impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tokens(tokens) => {
                let numbers: Vec<String> = tokens.iter().map(ToString::to_string).collect();
                write!(f, "tokens {}", numbers.join(", "))
            }
            Self::Texts(texts) => f.write_str(&texts.join(", ")),
        }
    }
}
