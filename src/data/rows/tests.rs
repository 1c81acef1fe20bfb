//! Every kind of file gives the same rows, and damaged ones their place.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, Int32Array, ListArray, MapBuilder, RecordBatch, StringArray, StringBuilder, StringDictionaryBuilder,
    StringViewArray, StructArray,
};
use arrow::datatypes::{DataType, Field, Int8Type, Int32Type};
use arrow::ipc::CompressionType;
use arrow::ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use parquet::arrow::ArrowWriter;
use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde_json::{Map, Value, json};

use super::*;
use crate::units::Fault;

type Walked = Result<Vec<Result<Map<String, Value>, String>>, String>;

/// Rows and errors of a file in a folder of its own, which errors do not name.
fn walk_with(name: &str, content: &[u8], settings: &DataRecipe) -> Walked {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    fs::write(&path, content).unwrap();
    let words = |error: Fault| {
        assert!(error.hint().is_some());
        error.to_string().replace(&format!("{}/", dir.path().display()), "")
    };
    let mut rows = Vec::new();
    let walk = each(&path, settings, &mut |row| {
        rows.push(row.map(|row| row.fields().clone()).map_err(words));
        Ok::<(), Fault>(())
    });
    walk.map(|()| rows).map_err(words)
}

fn walk(name: &str, content: impl AsRef<[u8]>) -> Walked {
    walk_with(name, content.as_ref(), &DataRecipe::default())
}

/// All that is wrong, in one text.
fn wrong(name: &str, content: impl AsRef<[u8]>) -> String {
    match walk(name, content) {
        Ok(rows) => rows.into_iter().filter_map(Result::err).collect::<Vec<_>>().join("; "),
        Err(error) => error,
    }
}

fn two_rows() -> Value {
    json!([{"prompt": "a \"b\"\r\n", "completion": "é"}, {"prompt": "", "completion": "x,y"}])
}

fn objects(rows: &Value) -> Vec<Result<Map<String, Value>, String>> {
    rows.as_array().unwrap().iter().map(|row| Ok(row.as_object().unwrap().clone())).collect()
}

fn lines(rows: &Value) -> String {
    rows.as_array().unwrap().iter().map(|row| format!("{row}\n")).collect::<Vec<_>>().concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter(columns).unwrap()
}

fn texts() -> RecordBatch {
    let mut prompts = StringDictionaryBuilder::<Int8Type>::new();
    prompts.extend([Some("a \"b\"\r\n"), Some("")]);
    let completions = StringViewArray::from(vec!["é", "x,y"]);
    batch(vec![("prompt", Arc::new(prompts.finish())), ("completion", Arc::new(completions))])
}

fn parquet(batch: &RecordBatch) -> Vec<u8> {
    packed_parquet(batch, Compression::UNCOMPRESSED)
}

fn packed_parquet(batch: &RecordBatch, packing: Compression) -> Vec<u8> {
    let properties = WriterProperties::builder().set_compression(packing).build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.into_inner().unwrap()
}

fn stream(batch: &RecordBatch) -> Vec<u8> {
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(batch).unwrap();
    writer.finish().unwrap();
    writer.into_inner().unwrap()
}

fn packed_arrow(batch: &RecordBatch, packing: Option<CompressionType>) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(packing).unwrap();
    let mut writer = FileWriter::try_new_with_options(Vec::new(), &batch.schema(), options).unwrap();
    writer.write(batch).unwrap();
    writer.finish().unwrap();
    writer.into_inner().unwrap()
}

fn arrow_file(batch: &RecordBatch) -> Vec<u8> {
    packed_arrow(batch, None)
}

/// As polars writes it: what stands before the batches is no message of a stream.
fn arrow_file_of_polars(batch: &RecordBatch, packing: Option<CompressionType>) -> Vec<u8> {
    let mut file = packed_arrow(batch, packing);
    file[8..16].copy_from_slice(&[4, 0, 0, 0, 0xf2, 0xff, 0xff, 0xff]);
    file
}

/// Tables with all packings, by the names of their files.
fn packed_tables(batch: &RecordBatch) -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("a.parquet", parquet(batch)),
        ("snappy.parquet", packed_parquet(batch, Compression::SNAPPY)),
        ("gzip.parquet", packed_parquet(batch, Compression::GZIP(GzipLevel::default()))),
        ("brotli.parquet", packed_parquet(batch, Compression::BROTLI(BrotliLevel::default()))),
        ("lz4.parquet", packed_parquet(batch, Compression::LZ4)),
        ("lz4-raw.parquet", packed_parquet(batch, Compression::LZ4_RAW)),
        ("zstd.parquet", packed_parquet(batch, Compression::ZSTD(ZstdLevel::default()))),
        ("plain.arrow", arrow_file_of_polars(batch, None)),
        ("lz4.feather", packed_arrow(batch, Some(CompressionType::LZ4_FRAME))),
        ("zstd.arrow", arrow_file_of_polars(batch, Some(CompressionType::ZSTD))),
    ]
}

#[test]
fn all_kinds_give_the_same_rows() {
    let rows = two_rows();
    let plain = lines(&rows);
    let (first, second) = plain.split_at(plain.find('\n').unwrap() + 1);
    let zstd = |text: &str| zstd::encode_all(text.as_bytes(), 0).unwrap();
    let csv = "prompt,completion\r\n\"a \"\"b\"\"\r\n\",é\r\n\r\n\"\",\"x,y\"";
    for (name, content) in [
        ("a.jsonl", plain.clone().into_bytes()),
        ("a.json", format!("\u{feff} {rows:#}\n").into_bytes()),
        ("bom.jsonl", format!("\u{feff}\n \t\r\n{plain}\n\n").into_bytes()),
        ("no-end", plain.trim_end().as_bytes().to_vec()),
        ("a.jsonl.gz", [gzip(first.as_bytes()), gzip(second.as_bytes())].concat()),
        ("a.json.zst", [zstd(&rows.to_string()[..9]), zstd(&rows.to_string()[9..])].concat()),
        ("a.csv", csv.as_bytes().to_vec()),
        ("a.csv.gz", gzip(csv.as_bytes())),
        ("a.tsv", csv.replace("prompt,", "prompt\t").replace(",é", "\té").replace("\"\",", "\"\"\t").into_bytes()),
        ("semicolons.csv", csv.replace("prompt,", "prompt;").replace(",é", ";é").replace("\"\",", "\"\";").into_bytes()),
        ("a.arrow", stream(&texts())),
        ("a.ipc", arrow_file(&texts())),
    ]
    .into_iter()
    .chain(packed_tables(&texts()))
    {
        assert_eq!(walk(name, content), Ok(objects(&rows)), "{name}");
    }
    assert_eq!(walk("a.txt", "\u{feff}one\n\ntwo"), Ok(objects(&json!([{"text": "one\n\ntwo"}]))));
}

#[test]
fn nested_columns_become_values_without_what_a_row_does_not_have() {
    let roles: ArrayRef = Arc::new(StringArray::from(vec![Some("user"), Some("tool"), Some("user")]));
    let names: ArrayRef = Arc::new(StringArray::from(vec![None, Some("f"), None]));
    let structs = StructArray::try_from(vec![("role", roles), ("name", names.clone()), ("default", names)]).unwrap();
    let field = Arc::new(Field::new("item", structs.data_type().clone(), true));
    let offsets = arrow::buffer::OffsetBuffer::new(vec![0, 2, 2].into());
    let messages = ListArray::new(field, offsets, Arc::new(structs.slice(0, 2)), None);
    let ids = ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(7), Some(-1)]), None]);
    let mut map = MapBuilder::new(None, StringBuilder::new(), StringBuilder::new());
    map.keys().append_value("k");
    map.values().append_null();
    map.append(true).unwrap();
    map.append(false).unwrap();
    let hidden = arrow::array::TimestampSecondArray::from(vec![1, 2]);
    let columns: Vec<(&str, ArrayRef)> =
        vec![("messages", Arc::new(messages)), ("ids", Arc::new(ids)), ("map", Arc::new(map.finish())), ("at", Arc::new(hidden))];
    let numbers = MapBuilder::new(None, arrow::array::Int32Builder::new(), StringBuilder::new());
    let batch = batch([columns, vec![("numbers", no_entries(numbers))]].concat());
    let expected = json!([
        {
            "messages": [{"role": "user", "default": null}, {"role": "tool", "name": "f", "default": "f"}], "ids": [7, -1],
            "map": {"k": null},
        },
        {"messages": [], "ids": null, "map": null},
    ]);
    for (name, content) in [("a.parquet", parquet(&batch)), ("a.arrow", stream(&batch))] {
        assert_eq!(walk(name, &content), Ok(objects(&expected)), "{name}");
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(name), content).unwrap();
        each(&dir.path().join(name), &DataRecipe::default(), &mut |row| {
            let error = row?.text("at").unwrap_err().to_string();
            assert!(error.ends_with("field `at`: expected a string, found a value in a column of Timestamp(s)"), "{error}");
            Ok::<(), Fault>(())
        })
        .unwrap();
    }
}

fn no_entries(mut map: MapBuilder<arrow::array::Int32Builder, StringBuilder>) -> ArrayRef {
    (0..2).for_each(|_| map.append(true).unwrap());
    Arc::new(map.finish())
}

#[test]
fn texts_of_the_json_type_are_what_they_say() {
    let json = Field::new("item", DataType::Utf8, true)
        .with_metadata(HashMap::from([("ARROW:extension:name".to_owned(), "arrow.json".to_owned())]));
    let texts = StringArray::from(vec![Some(r#"{"role": "user", "content": null, "n": [1]}"#), None, Some("\"a\""), Some("{no")]);
    let list = ListArray::new(Arc::new(json), arrow::buffer::OffsetBuffer::new(vec![0, 4].into()), Arc::new(texts), None);
    let batch = batch(vec![("messages", Arc::new(list))]);
    let expected = json!([{"messages": [{"role": "user", "content": null, "n": [1]}, null, "a", "{no"]}]);
    for (name, content) in [("a.parquet", parquet(&batch)), ("a.arrow", stream(&batch))] {
        assert_eq!(walk(name, &content), Ok(objects(&expected)), "{name}");
    }
}

#[test]
fn ten_bad_lines() {
    for (content, expected) in [
        ("{\"a\": 1}\n{\"a\": 1,}\n", "`x.jsonl:2` is not JSON: trailing comma at column 9"),
        ("{\"a\": \"1\n", "`x.jsonl:1` is not JSON: EOF while parsing a string at column 8"),
        ("{\"a\": 1}\n[2]\n{\"b\": 1}", "`x.jsonl:2`: expected a JSON object, found an array"),
        ("\n\nnull", "`x.jsonl:3`: expected a JSON object, found null"),
        ("{\"a\": 1} {\"a\": 2}", "`x.jsonl:1` is not JSON: trailing characters at column 10"),
        ("{\"a\": 1, \"b\": {\"c\": 1, \"c\": 2}}", "`x.jsonl:1` is not JSON: the key `c` stands twice at column 26"),
        ("{\"a\": 1}\r{\"a\": 2}", "`x.jsonl:1` is not JSON: trailing characters"),
        ("{\"a\": NaN}", "`x.jsonl:1` is not JSON: expected value"),
        ("{\"a\": \"\\ud800\"}", "`x.jsonl:1` is not JSON: unexpected end of hex escape"),
        ("{\"a\": 1e999}", "`x.jsonl:1` is not JSON: number out of range"),
    ] {
        let wrong = wrong("x.jsonl", content);
        assert!(wrong.starts_with(expected), "{wrong}");
    }
    assert_eq!(wrong("x.jsonl", b"{}\n{\"a\": \"\xe9\"}"), "`x.jsonl:2`: byte 8 is 0xe9, which is not UTF-8");
    let settings = DataRecipe { max_line_bytes: 12, ..DataRecipe::default() };
    let rows = walk_with("x.jsonl", b"{\"a\": 12345}\n{\"a\": 123456}\n{\"a\": 3}", &settings).unwrap();
    let too_long = "`x.jsonl:2`: more than 12 bytes, which is the most that `data.max_line_bytes` allows".to_owned();
    assert_eq!((rows[1].clone(), rows.len()), (Err(too_long), 3));
}

#[test]
fn ten_bad_arrays() {
    for (content, expected) in [
        ("[{\"a\": 1}, {\"a\"", "record 1 (from 0) of `x.json` is not JSON: EOF while parsing an object at line 1 column 15"),
        ("[{\"a\": 1} {\"a\": 2}]", "record 1 (from 0) of `x.json` is not JSON: expected `,` or `]`"),
        ("[{\"a\": 1},\n 2]", "record 1 (from 0) of `x.json`: expected a JSON object, found a number"),
        ("[{\"a\": 1, \"a\": 1}]", "record 0 (from 0) of `x.json` is not JSON: the key `a` stands twice"),
        ("[{\"a\": 1}] x", "record 1 (from 0) of `x.json` is not JSON: trailing characters"),
        ("[[]]", "record 0 (from 0) of `x.json`: expected a JSON object, found an array"),
        ("{\"a\": 1}", "cannot read `x.json` as JSON: expected an array of records, found one object"),
        ("{\n\"a\": 1}", "cannot read `x.json` as JSON: expected an array of records, found one object"),
        ("[{\"a\": tru}]", "record 0 (from 0) of `x.json` is not JSON: expected ident"),
        ("[", "record 0 (from 0) of `x.json` is not JSON: EOF while parsing a list"),
    ] {
        let wrong = wrong("x.json", content);
        assert!(wrong.starts_with(expected), "{wrong}");
    }
    let settings = DataRecipe { max_line_bytes: 12, ..DataRecipe::default() };
    let long = walk_with("x.json", b"[{\"a\": 1}, {\"a\": 1234567}]", &settings).unwrap_err();
    assert_eq!(long, "record 1 (from 0) of `x.json`: more than 12 bytes, which is the most that `data.max_line_bytes` allows");
}

#[test]
fn an_object_around_the_records_is_named() {
    let found = "cannot read `x.json` as JSON: expected an array of records, found one object";
    for (content, field) in [
        (json!({"data": [{"a": 1}]}).to_string(), "data"),
        (format!("{:#}", json!({"a version": "1 \"b\"", "b": -1.5, "rows": [{"a": 1}]})), "rows"),
    ] {
        assert_eq!(wrong("x.json", &content), format!("{found}, whose field `{field}` is an array"));
    }
    assert_eq!(wrong("x.json", json!({"a": {"b": [1]}}).to_string()), found);
}

#[test]
fn texts_of_another_encoding_are_named() {
    let text = "{\"text\": \"é\"}\n";
    let little: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let big: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
    let wide: Vec<u8> = text.chars().flat_map(|letter| u32::from(letter).to_le_bytes()).collect();
    for (content, encoding) in [
        (little.clone(), "UTF-16LE"),
        ([vec![0xff, 0xfe], little].concat(), "UTF-16LE"),
        (big.clone(), "UTF-16BE"),
        ([vec![0xfe, 0xff], big].concat(), "UTF-16BE"),
        (wide.clone(), "UTF-32LE"),
        ([vec![0xff, 0xfe, 0, 0], wide].concat(), "UTF-32LE"),
    ] {
        for name in ["x.jsonl", "x.json", "x.csv", "x.txt"] {
            assert_eq!(wrong(name, &content), format!("cannot read `{name}` as UTF-8: it is written in {encoding}"));
        }
    }
}

#[test]
fn ten_bad_tables() {
    for (content, expected) in [
        ("a,b\n1,2\n3\n4,5", "`x.csv:3`: expected 2 values, as the first line has names, found 1"),
        ("a,b\n1,2,3\n", "`x.csv:2`: expected 2 values, as the first line has names, found 3"),
        ("a,a\n1,2\n", "`x.csv:1`: two columns are called `a`"),
        ("a,b\n1,2\n\"3,4\n5,6\n", "`x.csv:3`: a quote is opened here and never closed"),
        ("a,b\n1,\"2\n\n", "`x.csv:2`: a quote is opened here and never closed"),
        ("a,b\n\"x\ny\",\"2\n\n", "`x.csv:3`: a quote is opened here and never closed"),
        ("a,\"b", "`x.csv:1`: a quote is opened here and never closed"),
        ("a,b\n\n1\n", "`x.csv:3`: expected 2 values, as the first line has names, found 1"),
        ("a;b\n1,2\n", "`x.csv:2`: expected 2 values, as the first line has names, found 1"),
    ] {
        assert_eq!(wrong("x.csv", content), expected, "{content:?}");
    }
    assert_eq!(wrong("x.csv", b"a,b\n1,2\n3,\xe9\n"), "`x.csv:3`: byte 1 is 0xe9, which is not UTF-8");
    let settings = DataRecipe { max_line_bytes: 9, ..DataRecipe::default() };
    let long = walk_with("x.csv", b"a,b\n1,2\n\"3\n45678901\",2", &settings).unwrap_err();
    assert_eq!(long, "`x.csv:3`: more than 9 bytes, which is the most that `data.max_line_bytes` allows");
    // Quotes within a value are none.
    assert_eq!(walk("x.csv", "a,b\n1\",\"\"\"\"\n").unwrap(), objects(&json!([{"a": "1\"", "b": "\""}])));
}

#[test]
fn what_is_damaged_is_refused_wherever_it_is_cut() {
    let plain = lines(&two_rows());
    for (name, bytes) in [
        ("x.jsonl.gz", gzip(plain.as_bytes())),
        ("x.jsonl.zst", zstd::encode_all(plain.as_bytes(), 0).unwrap()),
        ("x.arrow", stream(&texts())),
        ("y.arrow", arrow_file(&texts())),
    ]
    .into_iter()
    .chain(packed_tables(&texts()))
    {
        for end in (1..bytes.len()).step_by(if bytes.len() > 200 { 41 } else { 9 }).chain([bytes.len() - 1]) {
            let error = walk(name, &bytes[..end]);
            assert!(error.as_ref().is_err_and(|error| error.starts_with("cannot read `")), "{name} {end}: {error:?}");
        }
        // Whatever is changed: an error or other rows, never an abort.
        for at in (0..bytes.len()).step_by(5) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x5a;
            let _ = walk(name, damaged);
        }
    }
    let mut wrong_sum = gzip(plain.as_bytes());
    let at = wrong_sum.len() - 8;
    wrong_sum[at] ^= 1;
    let found = wrong("x.jsonl.gz", wrong_sum);
    assert!(
        found.starts_with("cannot read `x.jsonl.gz` as gzip: corrupt gzip stream does not have a matching checksum"),
        "{found}"
    );
    assert!(wrong("x.jsonl.gz", [gzip(plain.as_bytes()), b"garbage".to_vec()].concat()).contains("as gzip"));
    assert!(wrong("x.jsonl.gz", &plain).contains("as gzip: invalid gzip header"));
    assert!(wrong("x.arrow", "PAR2 and some more words").ends_with("it begins neither as an Arrow file nor as an Arrow stream"));
    assert!(wrong("x.gz", gzip(&parquet(&texts()))).contains("unpack it"));
}

#[test]
fn columns_come_under_the_names_of_fields() {
    let columns = [("prompt", "question"), ("completion", "prompt")];
    let columns = columns.into_iter().map(|(field, column)| (field.to_owned(), column.to_owned())).collect();
    let settings = DataRecipe { columns, ..DataRecipe::default() };
    let rows = walk_with("x.jsonl", b"{\"question\": \"q\", \"prompt\": \"p\"}\n{\"question\": 1}", &settings).unwrap();
    assert_eq!(rows[0].clone().unwrap(), *json!({"prompt": "q", "completion": "p"}).as_object().unwrap());
    assert_eq!(rows[1], Err("`x.jsonl:2`: field `prompt` is missing, others are `question`".to_owned()));
}

#[test]
fn a_number_that_json_has_not_is_null() {
    let numbers = batch(vec![("a", Arc::new(arrow::array::Float32Array::from(vec![f32::NAN, 0.5])))]);
    let rows = walk_with("x.parquet", &parquet(&numbers), &DataRecipe::default()).unwrap();
    let rows: Vec<_> = rows.into_iter().map(Result::unwrap).collect();
    assert_eq!(rows.iter().map(|row| row["a"].clone()).collect::<Vec<_>>(), [json!(null), json!(0.5)]);
}

#[test]
fn a_field_that_json_has_no_value_for_leaves_the_others() {
    use arrow::array::{ArrayRef, StructArray, TimestampSecondArray};
    use arrow::datatypes::{DataType, Field, TimeUnit};
    let field = |name: &str, kind: DataType| Arc::new(Field::new(name, kind, true));
    let message = StructArray::from(vec![
        (field("role", DataType::Int32), Arc::new(Int32Array::from(vec![1])) as ArrayRef),
        (field("at", DataType::Timestamp(TimeUnit::Second, None)), Arc::new(TimestampSecondArray::from(vec![0]))),
    ]);
    let rows = walk_with("x.parquet", &parquet(&batch(vec![("m", Arc::new(message))])), &DataRecipe::default()).unwrap();
    assert_eq!(rows[0].as_ref().unwrap()["m"], json!({"role": 1}));
}

#[test]
fn numbers_of_a_stream_stay_numbers() {
    let numbers = batch(vec![("a", Arc::new(Int32Array::from(vec![1])))]);
    assert_eq!(walk("data-0.arrow", stream(&numbers)), Ok(objects(&json!([{"a": 1}]))));
}
