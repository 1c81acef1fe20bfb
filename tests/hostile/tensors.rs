//! Malformed safetensors files and indexes.

use super::case::{Case, hold};
use super::ground::Ground;

const FILE: &str = "model/model.safetensors";
const INDEX: &str = "model/model.safetensors.index.json";

/// A file with this header, before `data` bytes.
fn tensors(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}

fn file(name: &str, bytes: Vec<u8>) -> Case {
    Case::new(name, move |ground: &Ground| ground.write(FILE, &bytes)).says(&["model.safetensors"])
}

fn header(name: &str, header: &str, data: usize) -> Case {
    file(name, tensors(header, data))
}

#[test]
fn lengths() {
    let claims = |length: u64| [&length.to_le_bytes()[..], b"{}"].concat();
    hold([
        file("nothing", Vec::new()),
        file("seven bytes", vec![0; 7]),
        file("zeros", vec![0; 4096]),
        file("a header of no bytes", claims(0)),
        file("a header longer than the file", claims(100)),
        file("a header of 2^63 bytes", claims(1 << 63)),
        file("a header of 2^64 - 1 bytes", claims(u64::MAX)),
        file("a header of 200 MB", claims(200_000_000)),
        file("a header that is no JSON", tensors("{\"a\"", 0)),
        file("a header that is an array", tensors("[]", 0)),
        file("a header that is no UTF-8", [&2u64.to_le_bytes()[..], b"{\xff"].concat()),
        file("a pickle", b"\x80\x02}q\x00X\x01\x00\x00\x00".repeat(64)),
        file("an HTML page", b"<!DOCTYPE html><html><body>404</body></html>".to_vec()),
        file("a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 691248\n".to_vec()),
    ]);
}

#[test]
fn offsets_and_shapes() {
    let one = |shape: &str, dtype: &str, offsets: &str| {
        format!("{{\"a\": {{\"dtype\": {dtype}, \"shape\": {shape}, \"data_offsets\": {offsets}}}}}")
    };
    hold([
        header("an offset out of the file", &one("[2]", "\"F32\"", "[0, 8000000]"), 8),
        header("an offset that goes back", &one("[2]", "\"F32\"", "[8, 0]"), 8),
        header("a negative offset", &one("[2]", "\"F32\"", "[-8, 0]"), 8),
        header("offsets of 2^64", &one("[2]", "\"F32\"", "[0, 18446744073709551616]"), 8),
        header("one offset", &one("[2]", "\"F32\"", "[8]"), 8),
        header("an offset in words", &one("[2]", "\"F32\"", "[\"0\", \"8\"]"), 8),
        header("a shape that overflows", &one("[4294967296, 4294967296]", "\"F32\"", "[0, 8]"), 8),
        header("a shape that overflows in bytes", &one("[4611686018427387904]", "\"F32\"", "[0, 8]"), 8),
        header("a negative shape", &one("[-2]", "\"F32\"", "[0, 8]"), 8),
        header("a shape of fractions", &one("[2.0]", "\"F32\"", "[0, 8]"), 8),
        header("a shape of the wrong size", &one("[3]", "\"F32\"", "[0, 8]"), 8),
        header("an unknown dtype", &one("[2]", "\"F33\"", "[0, 8]"), 8),
        header("a dtype that is a number", &one("[2]", "32", "[0, 8]"), 8),
        header("trailing bytes", &one("[2]", "\"F32\"", "[0, 8]"), 12),
        header("a hole", &one("[2]", "\"F32\"", "[4, 12]"), 12),
        header("no shape", "{\"a\": {\"dtype\": \"F32\", \"data_offsets\": [0, 8]}}", 8),
        header("no tensor but a number", "{\"a\": 7}", 0),
        header("metadata that are numbers", "{\"__metadata__\": {\"a\": 7}}", 0),
    ]);
    let two = |second: &str, data: usize| {
        let of = |name: &str, offsets: &str| {
            format!("\"{name}\": {{\"dtype\": \"F32\", \"shape\": [2], \"data_offsets\": {offsets}}}")
        };
        tensors(&format!("{{{}, {}}}", of("a", "[0, 8]"), of(second, "[4, 12]")), data)
    };
    hold([file("offsets that overlap", two("b", 12)), file("a name twice", two("a", 12))]);
}

/// The tensors of the fixture's model in another form.
#[test]
fn tensors_of_a_model() {
    let changed = |name: &str, from: &'static str, to: &'static str, word: &'static str| {
        let make = move |ground: &Ground| {
            let bytes = ground.read(FILE);
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
            assert!(header.contains(from), "{header}");
            let header = header.replacen(from, to, 1);
            ground.write(FILE, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..]].concat());
        };
        Case::new(name, make).says(&[word])
    };
    let norm = "\"model.norm.weight\":";
    hold([
        changed("a tensor of another name", norm, "\"../../etc/passwd\":", "model.norm.weight"),
        changed("a tensor without a name", norm, "\"\":", "model.norm.weight"),
        changed(
            "integers in place of floats",
            "\"model.norm.weight\":{\"dtype\":\"F32\"",
            "\"model.norm.weight\":{\"dtype\":\"I32\"",
            "model.norm.weight",
        ),
        changed("another rank", "\"shape\":[64]", "\"shape\":[8,8]", "8, 8"),
        changed("axes of one", "\"shape\":[64]", "\"shape\":[64,1]", "64, 1"),
    ]);
}

#[test]
fn indexes() {
    let index = |name: &str, text: &str, word: &'static str| {
        let text = text.to_owned();
        let make = move |ground: &Ground| {
            ground.remove(FILE);
            ground.write(INDEX, &text);
        };
        Case::new(name, make).says(&[word])
    };
    let file = |name: &str| format!("{{\"weight_map\": {{\"model.norm.weight\": {name}}}}}");
    hold([
        index("an empty object", "{}", "index.json"),
        index("no map", "{\"weight_map\": []}", "index.json"),
        index("an empty map", "{\"weight_map\": {}}", "model"),
        index("a number for a file", &file("7"), "index.json"),
        index("an absent file", &file("\"absent.safetensors\""), "absent.safetensors"),
        index("a path upwards", &file("\"../../../etc/passwd\""), "index.json"),
        index("a path from the root", &file("\"/etc/passwd\""), "index.json"),
        index("no name", &file("\"\""), "index.json"),
        index("itself", &file("\".\""), "index.json"),
        index("a name with a zero", &file("\"a\\u0000b\""), "index.json"),
        index("a pickle", &file("\"pytorch_model.bin\""), "index.json"),
    ]);
}
