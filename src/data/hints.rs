//! The way out of what can be wrong with data, and how the program ends with it.

use super::error::{ANSWER, DataError, IN_LABELS, IN_MESSAGES, INITIAL_PART, TEXT_ALONE};
use crate::files::hint_of_io;
use crate::recipe::RopeScalingRecipe;
use crate::units::{Exit, Failure};

impl Failure for DataError {
    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Files(error) => return error.hint(),
            Self::Read { source, .. } if hint_of_io(source).is_some() => hint_of_io(source)?,
            Self::Dump { .. } => "check that the folder exists, is writable and has space left",
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
            Self::BadField { expected, .. } if expected == TEXT_ALONE => {
                "where the text is enough without it, write the files without this column; such rows alone are left out with \
                 `data.on_bad_row = \"drop\"`"
            }
            Self::BadField { .. } => "correct the field, or remove the sample",
            // Where none can be read, something is wrong with all of them.
            Self::BadRows { first, count, read } if count == read => return first.first().and_then(Self::hint),
            Self::BadRow { .. } | Self::BadRows { .. } => {
                "repair them, or leave them out with `data.on_bad_row = \"drop\"`, which counts them"
            }
            Self::UnknownFormat { table: Some(table), .. } => {
                return Some(format!("if these columns hold all that is trained, write\n{table}\nor name others in it"));
            }
            Self::UnknownFormat { .. } => {
                "set `data.format`, and where fields have other names `data.columns = { prompt = \"question\" }`; files of several formats \
                 are several data sets, each a table `[[data.sets]]` with a `path`"
            }
            Self::BadSource { .. } => {
                "name a file, a folder of files (train, validation, test), a folder saved by `datasets`, or a pattern such as `data/*.jsonl`"
            }
            Self::Unreadable { as_what: "JSON", .. } => {
                "write an array of records, or an object a line in a file called `.jsonl`; `jq -c '.data[]' IN > OUT.jsonl` takes the \
                 records out of a field `data`"
            }
            Self::Unreadable { as_what: "UTF-8", .. } => {
                "convert it with `iconv -f ENCODING -t UTF-8 IN > OUT`, or save it anew, in a spreadsheet as \"CSV UTF-8\""
            }
            Self::Unreadable { .. } => "fetch or write the file again; nothing of it is used",
            Self::Tokenizer { .. } => "fetch `tokenizer.json` again, or save it anew with the `tokenizers` library",
            Self::ChatTemplate { .. } => "change the messages, or name another template with `--chat-template FILE`",
            Self::NoTemplate { .. } => "name one in `data.chat_template`: a file, or its text",
            Self::NoSuchTemplate { .. } => "name a file, relative to the recipe's folder, or a template of the model",
            Self::Messages { .. } => {
                "correct the messages, check `data.format` and `data.roles`, or leave such rows out with `data.on_bad_row = \"drop\"`"
            }
            Self::Conversation { message, .. } if message.starts_with("message ") => {
                "train on the last answer with `data.train_on = \"last\"`, or name a template with `{% generation %}` tags in `data.chat_template`"
            }
            Self::Conversation { .. } => "correct the messages, or name another template in `data.chat_template`",
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
            Self::TooManyPositions { tokens, positions } => {
                let scale = RopeScalingRecipe::hint(*tokens, *positions);
                return Some(format!(
                    "lower `data.max_seq_length` or leave it out, {scale}, or take a model with more positions"
                ));
            }
            Self::TooLong { .. } => {
                "set `data.on_too_long` to \"drop\" or \"truncate\", raise `data.max_seq_length` as far as the model's positions allow, or \
                 have more positions with `model.rope_scaling`"
            }
            Self::NoTarget { why: IN_LABELS, .. } => {
                "remove the sample, or label the tokens to train with their own ids in `labels`, at least one behind the first"
            }
            Self::NoTarget { why: IN_MESSAGES, .. } => {
                "end the conversation with a message of the assistant, check `train` and `weight` of its messages, set `data.train_on`, or \
                 leave such rows out with `data.on_bad_row = \"drop\"`"
            }
            Self::NoTarget { .. } => {
                "write what shall be learned as the completion, or leave such rows out with `data.on_bad_row = \"drop\"`"
            }
            Self::LabelTokens { .. } => "choose labels that are one token each, or give token ids in `head.label_tokens`",
            Self::DuplicateLabel { .. } => "give each class a token of its own",
            Self::NoClasses { .. } => "use `head.kind = \"next_token\"`, or rows with `prompt` and `label`",
            Self::Contradiction(contradiction) => &contradiction.hint,
            Self::LabelCount { .. } => "list one entry per class in `head.labels` or `head.label_tokens`",
            Self::BadBatch { .. } => "ask for at least one sample, each within the data set",
            Self::DamagedTokens { .. } => {
                "remove the folder `NAME.tokens` beside the data file or kvtune's `tokens` in the user's cache folder, and start again"
            }
            Self::Changed { .. } => "start again when nobody writes to it",
            Self::NotKept { .. } => {
                "free some disk space beside the data file or for temporary files, or use a machine with more memory"
            }
            Self::NoPlainText { .. } => "set `data.on_too_long` to \"drop\" or \"truncate\", or raise `data.max_seq_length`",
            Self::Overlap { .. } => "lower `data.split_overlap`, or raise `data.max_seq_length`",
            Self::Vocabulary { .. } => "give more text, or ask for a smaller vocabulary (at least 260)",
        };
        Some(hint.to_owned())
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Files(e) => e.exit(),
            Self::TooManyPositions { .. } => Exit::Usage,
            _ => Exit::Data,
        }
    }
}
