//! Safetensors that are missing, damaged or hostile.

use std::fs;

use insta::assert_snapshot;
use serde_json::json;

use super::place::Place;

const FILE: &str = "model/model.safetensors";

/// Header and body of a safetensors file.
fn halves(bytes: &[u8]) -> (String, Vec<u8>) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (String::from_utf8(bytes[8..8 + length].to_vec()).unwrap(), bytes[8 + length..].to_vec())
}

fn with_header(place: &Place, change: impl FnOnce(String) -> String) {
    let (header, body) = halves(&place.read(FILE));
    let header = change(header);
    let length = (header.len() as u64).to_le_bytes();
    place.write(FILE, [&length[..], header.as_bytes(), &body].concat());
}

#[test]
fn missing() {
    let place = Place::new();
    fs::remove_file(place.path(FILE)).unwrap();
    assert_snapshot!(place.finetune(&[]).refused(3), @r"
    error: no `model.safetensors` and no `model.safetensors.index.json` in `<dir>/model`

    hint: only safetensors are read: convert `.bin` or `.pt` weights to them first
    ");
    assert!(!place.path("run").exists());
}

#[test]
fn truncated() {
    let place = Place::new();
    let bytes = place.read(FILE);
    place.write(FILE, &bytes[..bytes.len() / 2]);
    assert_snapshot!(place.finetune(&[]).refused(3), @r"
    error: `<dir>/model/model.safetensors` is truncated: expected 691248 bytes, found 345624

    hint: name a safetensors file; if this is one, its copy is damaged: fetch it again
    ");
    place.write(FILE, b"abc");
    assert_snapshot!(place.check(&[]).refused(3), @r"
    error: `<dir>/model/model.safetensors` is truncated: expected 8 bytes, found 3

    hint: name a safetensors file; if this is one, its copy is damaged: fetch it again
    ");
    assert!(!place.path("run").exists());
}

#[test]
fn duplicate_header_keys() {
    let place = Place::new();
    with_header(&place, |header| {
        let start = header.find("\"model.norm.weight\"").unwrap();
        let end = start + header[start..].find('}').unwrap() + 1;
        format!("{{{},{}", &header[start..end], &header[1..])
    });
    assert_snapshot!(place.check(&[]).refused(3), @r"
    error: `<dir>/model/model.safetensors` is not a valid safetensors file: header: the key `model.norm.weight` stands twice at line 1 column 3896

    hint: name a safetensors file; if this is one, its copy is damaged: fetch it again
    ");
}

#[test]
fn a_header_larger_than_memory() {
    let place = Place::new();
    place.write(FILE, [&(1u64 << 60).to_le_bytes()[..], b"{}"].concat());
    assert_snapshot!(place.check(&[]).refused(3), @r"
    error: `<dir>/model/model.safetensors` is not a valid safetensors file: its header claims 1152921504606846976 bytes, expected at most 100000000

    hint: name a safetensors file; if this is one, its copy is damaged: fetch it again
    ");
}

#[test]
fn an_index_that_points_outside_the_directory() {
    let place = Place::new();
    fs::rename(place.path(FILE), place.path("elsewhere.safetensors")).unwrap();
    for outside in ["../elsewhere.safetensors", "/etc/passwd", "shards/../../elsewhere.safetensors"] {
        let index = json!({"metadata": {}, "weight_map": {"model.norm.weight": outside}});
        place.write("model/model.safetensors.index.json", index.to_string());
        let error = place.check(&[]).refused(3);
        assert!(
            error.contains("model.safetensors.index.json` puts `model.norm.weight` into") && error.contains(outside),
            "{error}"
        );
    }
    assert_snapshot!(place.check(&[]).refused(3), @r"
    error: `<dir>/model/model.safetensors.index.json` puts `model.norm.weight` into `shards/../../elsewhere.safetensors`: expected a plain file name that ends in `.safetensors`

    hint: the index may be damaged or hostile: take the model from its source again
    ");
}

#[test]
fn tensors_that_do_not_fit_the_configuration_are_all_listed() {
    let place = Place::new();
    with_header(&place, |header| header.replace("\"model.norm.weight\"", "\"model.morn.weight\""));
    assert_snapshot!(place.check(&[]).refused(3), @r"
    error: the tensors in `<dir>/model` don't fit its `config.json`: 1 missing (`model.norm.weight`); 1 extra (`model.morn.weight`)

    hint: check that weights and configuration belong together and that all files are complete
    ");
    place.edit_json("model/config.json", json!({"vocab_size": 500}));
    let error = place.check(&[]).refused(3);
    assert!(
        error.contains("1 missing")
            && error.contains("1 wrong shape (`model.embed_tokens.weight` expected [500, 64], found [512, 64])")
    );
}

#[test]
fn no_model_at_all() {
    let place = Place::new();
    assert_snapshot!(place.check(&["model.path=nowhere"]).refused(3), @r"
    error: cannot read `<dir>/nowhere/config.json`
    cause: No such file or directory (os error 2)

    hint: check the path: it begins at the recipe's folder, on the command line at the shell's; `hf download nowhere` fetches a model of that name from the Hugging Face Hub
    ");
}
