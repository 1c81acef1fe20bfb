//! Runs that were tampered with: what a checkpoint holds is checked by its manifest, and by what its numbers may be.

use super::case::{Case, hold};
use super::ground::Ground;

const LAST: &str = "run/step-000002";
const FROM: &[&str] = &["resume", "run", "--from", "step-000002"];

fn tampered(name: &str, make: impl Fn(&Ground) + 'static) -> Case {
    let with_run = move |ground: &Ground| {
        ground.with_unfinished_run();
        make(ground);
    };
    Case::new(name, with_run).run(FROM)
}

/// The state with another value, and the manifest beside it made to agree, as somebody would who wants to be believed.
fn state(key: &'static str, value: &'static str) -> Case {
    let make = move |ground: &Ground| {
        let name = format!("{LAST}/state.json");
        ground.set_json(&name, key, value);
        agree(ground, "state.json");
    };
    tampered(&format!("state {key} = {value}"), make).says(&["state.json"])
}

/// Writes a file's size and hash into the manifest.
fn agree(ground: &Ground, file: &str) {
    let name = format!("{LAST}/MANIFEST.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&ground.read(&name)).unwrap();
    let bytes = ground.read(&format!("{LAST}/{file}"));
    let entry = serde_json::json!({ "size": bytes.len(), "blake3": blake3::hash(&bytes).to_hex().as_str() });
    manifest["files"][file] = entry;
    ground.write(&name, manifest.to_string());
}

#[test]
fn states() {
    hold([
        state("step", "9223372036854775808"),
        state("step", "18446744073709551616"),
        state("step", "-1"),
        state("step", "999999"),
        state("step", "\"2\""),
        state("seed", "8").instead_of("state.json", "train.seed"),
        state("format_version", "null"),
        state("kind", "\"unheard\""),
    ]);
}

#[test]
fn manifests() {
    let manifest = |name: &str, text: &'static str| {
        tampered(name, move |ground| ground.write(&format!("{LAST}/MANIFEST.json"), text)).says(&["MANIFEST.json"])
    };
    hold([
        manifest("an empty manifest", "{}"),
        manifest("a manifest of no files", "{\"files\": {}}"),
        manifest("a manifest of no bytes", ""),
        manifest("a name with NUL", "{\"files\": {\"state.json\\u0000\": {\"size\": 1, \"blake3\": \"00\"}}}"),
        manifest("a path upwards", "{\"files\": {\"../../x\": {\"size\": 1, \"blake3\": \"00\"}}}"),
        manifest("a file of 2^64 bytes", "{\"files\": {\"state.json\": {\"size\": 18446744073709551616, \"blake3\": \"00\"}}}"),
        tampered("no manifest", |ground| ground.remove(&format!("{LAST}/MANIFEST.json"))).says(&["step-000002"]),
    ]);
}

#[test]
fn tensors() {
    let with_nan = |ground: &Ground| {
        let name = format!("{LAST}/optimizer.safetensors");
        let mut bytes = ground.read(&name);
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for at in (8 + length..bytes.len() - 3).step_by(4).take(64) {
            bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        ground.write(&name, bytes);
        agree(ground, "optimizer.safetensors");
    };
    let without_tensors = |ground: &Ground| {
        ground.write(&format!("{LAST}/optimizer.safetensors"), b"\x02\0\0\0\0\0\0\0{}");
        agree(ground, "optimizer.safetensors");
    };
    let no_adapter = |ground: &Ground| {
        ground.write(&format!("{LAST}/adapter_model.safetensors"), b"\x02\0\0\0\0\0\0\0{}");
        agree(ground, "adapter_model.safetensors");
    };
    hold([
        tampered("an optimiser of NaN", with_nan).says(&["step-000002"]),
        tampered("an optimiser without tensors", without_tensors).says(&["lacks", "exp_avg"]),
        tampered("an adapter without tensors", no_adapter).says(&["step-000002"]),
    ]);
}
