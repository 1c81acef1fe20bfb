//! Rows of data that no program should write, in each of the formats and kinds of files.

use super::case::{Case, hold};
use super::ground::Ground;

fn rows(name: &str, format: &'static str, bytes: impl AsRef<[u8]> + 'static) -> Case {
    Case::new(name, move |ground: &Ground| ground.with_rows(format, bytes.as_ref())).says(&["train.jsonl"])
}

/// Beside those that the formats' own tests have.
#[test]
fn tokens() {
    let row = |name: &str, text: &'static str| rows(name, "tokens", text).says(&["train.jsonl:1"]);
    hold([
        row("an id of 2^32", "{\"input_ids\": [1, 4294967296, 3], \"labels\": [1, 4294967296, 3]}"),
        row("an id of 2^64", "{\"input_ids\": [1, 18446744073709551616], \"labels\": [1, 2]}"),
        row("ids within ids", "{\"input_ids\": [[1, 2, 3]], \"labels\": [[1, 2, 3]]}"),
        row("nothing", "{\"input_ids\": [], \"labels\": []}"),
        row("null", "{\"input_ids\": null, \"labels\": null}"),
        row("a key twice", "{\"input_ids\": [1, 2, 3], \"labels\": [1, 2, 3], \"labels\": [1, -100, 3]}"),
        rows("an array", "tokens", "[1, 2, 3]"),
        row("a number", "7"),
        row("half a row", "{\"input_ids\": [1, 2"),
        row("NaN", "{\"input_ids\": [1, NaN], \"labels\": [1, 2]}"),
    ]);
}

#[test]
fn files_of_lines() {
    hold([
        rows("nothing", "tokens", ""),
        rows("empty lines", "tokens", "\n\n\n"),
        rows("zeros", "tokens", [0u8; 4096]),
        rows("no UTF-8", "text", b"{\"text\": \"\xff\xfe\"}\n"),
        rows("UTF-16", "text", "{\"text\": \"a\"}".encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>()),
        rows("an executable", "text", b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0"),
        rows("a page", "text", "<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n"),
    ]);
}

#[test]
fn texts_and_prompts() {
    let row = |name: &str, format, text: &'static str| rows(name, format, text).says(&["train.jsonl:1"]);
    hold([
        row("a number for a text", "text", "{\"text\": 7}"),
        row("no text", "text", "{\"words\": \"a\"}"),
        row("half a surrogate", "text", "{\"text\": \"\\ud800\"}"),
        row("a prompt alone", "prompt-completion", "{\"prompt\": \"a\"}"),
        row("a prompt of numbers", "prompt-completion", "{\"prompt\": [1, 2], \"completion\": \"b\"}"),
        row("messages that are text", "messages", "{\"messages\": \"hello\"}"),
        row("no messages", "messages", "{\"messages\": []}"),
        row("a message without a role", "messages", "{\"messages\": [{\"content\": \"a\"}]}"),
        row("a role that is a number", "messages", "{\"messages\": [{\"role\": 7, \"content\": \"a\"}]}"),
        row("turns without tags", "sharegpt", "{\"conversations\": [{\"value\": \"a\"}]}"),
        row("an unknown tag", "sharegpt", "{\"conversations\": [{\"from\": \"oracle\", \"value\": \"a\"}]}"),
        row("no output", "alpaca", "{\"instruction\": \"a\"}"),
        row("a history of numbers", "alpaca", "{\"instruction\": \"a\", \"output\": \"b\", \"history\": [1]}"),
    ]);
}

/// A file by another name, which the recipe names.
fn file(name: &'static str, bytes: impl AsRef<[u8]> + 'static) -> Case {
    let make = move |ground: &Ground| {
        ground.write(name, bytes.as_ref());
        ground.edit_recipe("train = \"train.jsonl\"", &format!("train = {name:?}"));
    };
    Case::new(format!("{name} that is none"), make).says(&[name])
}

#[test]
fn files_of_other_kinds() {
    let zip = b"PK\x03\x04\x14\0\0\0\x08\0";
    hold([
        file("a.parquet", b"PAR1"),
        file("b.parquet", b"PAR1\xff\xff\xff\x7fPAR1"),
        file("c.parquet", b"PAR1\xff\xff\xff\xffPAR1"),
        file("d.parquet", [b"PAR1".to_vec(), vec![0; 64], b"\x40\0\0\0PAR1".to_vec()].concat()),
        file("a.arrow", b"ARROW1\0\0"),
        file("b.arrow", b"ARROW1\0\0\xff\xff\xff\xff\xff\xff\xff\x7f"),
        file("c.arrow", [0xff; 64]),
        file("a.jsonl.gz", b"\x1f\x8b\x08\0\0\0\0\0"),
        file("b.jsonl.gz", b"no gzip"),
        file("a.jsonl.zst", b"\x28\xb5\x2f\xfd"),
        file("b.jsonl.zst", b"\x28\xb5\x2f\xfd\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
        file("a.json", b"[{\"input_ids\": [1, 2], \"labels\": [1, 2]}"),
        file("b.json", b"[[[["),
        file("a.csv", b"\"input_ids"),
        file("a.csv.gz", zip),
    ]);
}
