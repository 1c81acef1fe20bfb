//! What is wrong with a row, and errors of data that are made at several places.

use std::io;
use std::path::Path;

use super::sample_place::SamplePlace;
use crate::files::hint_of_io;
use crate::units::{Fault, abridged, quoted};

/// An error of a single row or sample: others may be sound. Without it an error says that no row can be read or encoded.
#[derive(Debug)]
pub(super) struct RowFault {
    pub(super) place: SamplePlace,
    /// The sample is sound, and longer than `data.on_too_long` lets it be.
    pub(super) is_too_long: bool,
}

impl RowFault {
    /// A row that is no sample: `data.on_bad_row` decides what becomes of it. The message names the place.
    pub(super) fn bad(place: SamplePlace, message: String, hint: impl Into<String>) -> Fault {
        Fault::data(message, hint).carrying(Self { place, is_too_long: false })
    }

    pub(super) fn too_long(place: SamplePlace, message: String, hint: impl Into<String>) -> Fault {
        Fault::data(message, hint).carrying(Self { place, is_too_long: true })
    }

    pub(super) fn unusable(place: SamplePlace, message: &str) -> Fault {
        let message = format!("{place}: {}", abridged(message));
        Self::bad(place, message, LEAVE_OUT)
    }

    pub(super) fn not_json(place: SamplePlace, message: &str) -> Fault {
        let message = format!("{place} is not JSON: {}", abridged(message));
        Self::bad(place, message, "repair it; a file of texts holds a JSON object a line, or one JSON array of objects")
    }

    pub(super) fn no_object(place: SamplePlace, found: &str) -> Fault {
        let message = format!("{place}: expected a JSON object, found {found}");
        Self::bad(place, message, "check `data.format` against what the file holds")
    }

    /// A row that is of no known format, or of another one than those before it.
    pub(super) fn unknown_format(place: SamplePlace, found: &str) -> Fault {
        let message = format!("{place}: cannot detect `data.format`: found {}", quoted(found));
        let hint = "set `data.format`, and where fields have other names `data.columns = { prompt = \"question\" }`; files of several formats \
                    are several data sets, each a table `[[data.sets]]` with a `path`";
        Self::bad(place, message, hint)
    }
}

pub(super) const LEAVE_OUT: &str = "repair them, or leave them out with `data.on_bad_row = \"drop\"`, which counts them";

/// For `map_err`: a file or folder that could not be read.
pub(super) fn read(path: &Path) -> impl FnOnce(io::Error) -> Fault {
    let path = path.to_path_buf();
    move |source| {
        let hint = hint_of_io(&source).unwrap_or(
            "check the path: in a recipe it is relative to the recipe's folder, on the command line to the working directory",
        );
        Fault::data(format!("cannot read `{}`", abridged(path.display())), hint).caused_by(source)
    }
}

/// A file that is damaged, cut off, or not of its kind.
pub(super) fn unreadable(path: &Path, as_what: &str, message: &str) -> Fault {
    let hint = match as_what {
        "JSON" => {
            "write an array of records, or an object a line in a file called `.jsonl`; `jq -c '.data[]' IN > OUT.jsonl` takes the \
             records out of a field `data`"
        }
        "UTF-8" => "convert it with `iconv -f ENCODING -t UTF-8 IN > OUT`, or save it anew, in a spreadsheet as \"CSV UTF-8\"",
        _ => "fetch or write the file again; nothing of it is used",
    };
    Fault::data(format!("cannot read `{}` as {as_what}: {}", abridged(path.display()), abridged(message)), hint)
}

pub(super) fn bad_source(path: &Path, message: &str) -> Fault {
    let hint = "name a file, a folder of files (train, validation, test), a folder saved by `datasets`, or a pattern such as `data/*.jsonl`";
    Fault::data(format!("`{}`: {}", abridged(path.display()), abridged(message)), hint)
}

pub(super) fn empty(path: &Path) -> Fault {
    let message = format!("`{}` holds no samples, expected at least 1", abridged(path.display()));
    Fault::data(message, "put at least one sample into the file, or name another file")
}

/// No sample is left after those that are too long were dropped; `shortest` of them has so many tokens.
pub(super) fn nothing_fits(path: &Path, read: usize, limit: usize, shortest: usize) -> Fault {
    let path = abridged(path.display());
    let message = format!("none of the {read} samples of `{path}` fits into {limit} tokens, the shortest has {shortest}");
    let hint = "raise `data.max_seq_length` as far as the model allows, or set `data.on_too_long`: \"truncate\" shortens prompts, \"split\" cuts plain \
                texts into windows";
    Fault::data(message, hint)
}

pub(super) fn no_tokenizer(what: &str) -> Fault {
    let hint = "put `tokenizer.json` into the model directory; without one train on token ids (`data.format = \"tokens\"`), and name classes by `head.label_tokens`";
    Fault::data(format!("{what} needs a tokenizer, and the model has no `tokenizer.json`"), hint)
}

pub(super) fn bad_tokenizer(path: &Path, message: &str) -> Fault {
    let message = format!("tokenizer `{}`: {}", abridged(path.display()), abridged(message));
    Fault::data(message, "fetch `tokenizer.json` again, or save it anew with the `tokenizers` library")
}

/// For a token id that the model has no embedding for; `what` says where it comes from.
pub(super) fn out_of_vocabulary(what: &str, id: u64, vocab_size: usize) -> String {
    format!("{what}: token id {id} is not below the model's `vocab_size` {vocab_size}")
}

pub(super) const OWN_TOKENIZER: &str = "use token ids of the model's own tokenizer";

pub(super) fn damaged_tokens(place: &SamplePlace) -> Fault {
    let hint =
        "remove the folder `NAME.tokens` beside the data file or kvtune's `tokens` in the user's cache folder, and start again";
    Fault::data(format!("{place}: its tokens in the cache are damaged"), hint)
}
