//! Little files that become large, and large ones that become larger: each refused in bounded memory and time.

use std::io::Write;
use std::sync::Arc;

use arrow::array::{ArrayRef, FixedSizeListArray, NullArray, StringArray};
use arrow::datatypes::{DataType, Field};
use arrow::ipc::writer::StreamWriter;
use arrow::record_batch::RecordBatch;
use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression as PageCompression, ZstdLevel};
use parquet::file::properties::{EnabledStatistics, WriterProperties};

use super::case::{Case, hold};
use super::ground::Ground;

const CONFIG: &str = "model/config.json";

#[test]
fn json() {
    let numbers = |name: &'static str, file: &'static str, times: usize| {
        let make = move |ground: &Ground| ground.repeat(file, ("{\"a\": [", "1]}"), b"1,", times);
        Case::new(name, make).says(&[file.rsplit('/').next().unwrap()])
    };
    let deep = |name: &'static str, file: &'static str| {
        let make = move |ground: &Ground| ground.repeat(file, ("{\"a\": ", "}"), b"[", 1_000_000);
        Case::new(name, make).says(&[file.rsplit('/').next().unwrap()])
    };
    hold([
        numbers("a configuration of 200 MB of numbers", CONFIG, 100_000_000),
        numbers("a configuration just below the limit", CONFIG, 8_000_000),
        deep("a configuration of a million brackets", CONFIG),
        Case::new("a configuration of 200 000 keys", |ground: &Ground| {
            let keys = (0..200_000).map(|n| format!("\"{n}\":0,")).collect::<Vec<_>>().concat();
            ground.write(CONFIG, format!("{{{keys}\"model_type\":\"qwen2\"}}"));
        })
        .says(&["config.json"]),
        Case::new("a configuration that says it has 1 TB", |ground: &Ground| ground.sparse(CONFIG, 1 << 40))
            .says(&["config.json"]),
        Case::new("a tokenizer that says it has 1 TB", |ground: &Ground| {
            ground.with_texts();
            ground.sparse("model/tokenizer.json", 1 << 40);
        })
        .says(&["tokenizer.json"]),
        Case::new("a tokenizer of 30 MB of numbers", |ground: &Ground| {
            ground.with_texts();
            ground.repeat("model/tokenizer.json", ("{\"a\": [", "1]}"), b"1,", 15_000_000);
        })
        .says(&["tokenizer.json"]),
        Case::new("a tokenizer of 2 million tokens", |ground: &Ground| {
            ground.with_texts();
            ground.repeat("model/tokenizer.json", ("{\"model\": {\"vocab\": {", "\"b\":0}}}"), b"\"a\":1,", 2_000_000);
        })
        .says(&["tokenizer.json", "2000001"]),
        Case::new("a recipe that says it has 1 TB", |ground: &Ground| ground.sparse("recipe.toml", 1 << 40))
            .code(2)
            .says(&["recipe.toml"]),
    ]);
}

#[test]
fn tensors() {
    let many = |count: usize| {
        let of = |n: usize| format!("\"t{n:07}\":{{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[{},{}]}}", 4 * n, 4 * n + 4);
        let text = format!("{{{}}}", (0..count).map(of).collect::<Vec<_>>().join(","));
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    };
    hold([
        Case::new("a header of 1.4 million tensors", move |ground: &Ground| {
            let (file, count) = ("model/model.safetensors", 1_400_000);
            ground.write(file, many(count));
            let length = ground.path(file).metadata().unwrap().len() + 4 * count as u64;
            std::fs::OpenOptions::new().write(true).open(ground.path(file)).unwrap().set_len(length).unwrap();
        })
        .says(&["model.safetensors"]),
        Case::new("a header of 99 MB of brackets", |ground: &Ground| {
            let length = 99_000_000u64;
            ground.repeat("rest", ("", ""), b"[", length as usize - 1);
            let rest = ground.read("rest");
            ground.write("model/model.safetensors", [&length.to_le_bytes()[..], b"{", &rest].concat());
            ground.remove("rest");
        })
        .says(&["model.safetensors"]),
        Case::new("an index of 300 000 tensors", |ground: &Ground| {
            ground.remove("model/model.safetensors");
            let map = (0..300_000).map(|n| format!("\"t{n}\":\"{n}.safetensors\",")).collect::<Vec<_>>().concat();
            ground.write("model/model.safetensors.index.json", format!("{{\"weight_map\":{{{map}\"z\":\"z.safetensors\"}}}}"));
        })
        .says(&["safetensors"]),
    ]);
}

/// Names a data file in the recipe, of rows of text.
fn named(ground: &Ground, name: &str) {
    ground.with_texts();
    ground.edit_recipe("train = \"train.jsonl\"", &format!("train = {name:?}"));
}

#[test]
fn lines() {
    let line = |name: &'static str,
                file: &'static str,
                (before, after): (&'static str, &'static str),
                bytes: &'static [u8],
                times: usize| {
        let make = move |ground: &Ground| {
            named(ground, file);
            ground.repeat(file, (before, after), bytes, times);
        };
        Case::new(name, make).says(&[file])
    };
    let one_mib = |ground: &Ground| ground.edit_recipe("[data]", "[data]\nmax_line_bytes = 1048576");
    hold([
        line("a line of 100 MB", "long.jsonl", ("{\"text\": \"", "\"}\n"), b"a", 100_000_000),
        line("a line of 100 MB of numbers", "numbers.jsonl", ("{\"text\": [", "1]}\n"), b"1,", 50_000_000),
        line("a line of a million brackets", "deep.jsonl", ("{\"text\": ", "}\n"), b"[", 1_000_000),
        line("an array of a row of 8 MB", "long.json", ("[{\"text\": \"", "\"}]"), b"a", 8_000_000).also(one_mib),
        line("a cell of 100 MB", "long.csv", ("text\n\"", "\"\n"), b"a", 100_000_000),
    ]);
    hold([Case::new("data that say they have 1 TB in one line", |ground: &Ground| {
        named(ground, "empty.jsonl");
        ground.sparse("empty.jsonl", 1 << 40);
    })
    .says(&["empty.jsonl"])]);
}

/// A gigabyte of one letter in a line: members of gzip and frames of zstd may stand one after the other.
#[test]
fn packed() {
    let piece = "a".repeat(4 << 20);
    let mut gz = GzEncoder::new(Vec::new(), Compression::best());
    gz.write_all(piece.as_bytes()).unwrap();
    let gz = gz.finish().unwrap();
    let zst = zstd::encode_all(piece.as_bytes(), 1).unwrap();
    let bomb = |name: &'static str, member: Vec<u8>| {
        let make = move |ground: &Ground| {
            named(ground, name);
            ground.write(name, member.repeat(256));
        };
        Case::new(format!("{name} that unpacks to 1 GB"), make).says(&[name])
    };
    // No content size, a window of 2^31 bytes, and four letters.
    let far = |ground: &Ground| {
        named(ground, "far.jsonl.zst");
        ground.write("far.jsonl.zst", b"\x28\xb5\x2f\xfd\x00\xa8\x21\x00\x00abcd");
    };
    let far = Case::new("zstd that looks back 2 GB", far).says(&["far.jsonl.zst", "memory"]);
    hold([bomb("bomb.jsonl.gz", gz), bomb("bomb.jsonl.zst", zst), far]);
}

/// A Parquet file with these rows of the column `text`.
///
/// With a dictionary, or in pages that hold the rows themselves; without statistics, which nobody reads and which cost as much as the rows.
fn parquet(rows: &[&str], has_dictionary: bool) -> Vec<u8> {
    let column: ArrayRef = Arc::new(StringArray::from(rows.to_vec()));
    let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
    let packed = PageCompression::ZSTD(ZstdLevel::try_new(1).unwrap());
    let properties = WriterProperties::builder().set_compression(packed).set_statistics_enabled(EnabledStatistics::None);
    let properties = properties.set_dictionary_enabled(has_dictionary).set_dictionary_page_size_limit(1 << 30).build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    bytes
}

#[test]
fn pages() {
    let bomb = |name: &'static str, length: usize, count: usize| {
        let make = move |ground: &Ground| {
            named(ground, name);
            let text = "a".repeat(length);
            ground.write(name, parquet(&vec![&*text; count], count > 1));
        };
        Case::new(format!("{name}: {count} rows of {length} bytes from few"), make).says(&[name])
    };
    hold([bomb("page.parquet", 300_000_000, 1), bomb("dictionary.parquet", 96 << 20, 12)]);
}

/// Rows that take no byte of a file, and items of which a row has a thousand million.
#[test]
fn batches() {
    let nothing = |count: usize| -> ArrayRef { Arc::new(NullArray::new(count)) };
    let item = Arc::new(Field::new("item", DataType::Null, true));
    let long: ArrayRef = Arc::new(FixedSizeListArray::new(item, 1 << 30, nothing(1 << 30), None));
    let bomb = |name: &'static str, column: ArrayRef, words: &'static str| {
        let make = move |ground: &Ground| {
            named(ground, name);
            let batch = RecordBatch::try_from_iter([("text", Arc::clone(&column))]).unwrap();
            let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
            writer.write(&batch).unwrap();
            ground.write(name, writer.into_inner().unwrap());
        };
        Case::new(name, make).says(&[name, words])
    };
    hold([bomb("rows.arrow", nothing(1 << 40), "1099511627776 rows"), bomb("items.arrow", long, "memory")]);
}
