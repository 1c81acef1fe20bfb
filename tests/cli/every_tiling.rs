//! `verify --every-tiling`, and the proof in JSON.

use std::fs;

use insta::assert_snapshot;
use serde_json::Value;

use super::place::{Place, Said};

/// With a model of small random weights, which makes less of what stores round than the other does: none is too coarse for it.
fn calm() -> Place {
    let place = Place::new();
    place.run(&["init-model", "--config", "model/config.json", "--out", "calm"]).done();
    place.edit_recipe("path = \"model\"", "path = \"calm\"");
    fs::create_dir(place.path("temporary")).unwrap();
    place
}

/// `kvtune verify` with further arguments, and a directory of its own for what is temporary.
fn verify(place: &Place, arguments: &[&str]) -> Said {
    let common = ["verify", "--device", "cpu", "--threads", "1", "--recipe", "recipe.toml"];
    let mut command = place.command(&[&common[..], arguments].concat());
    place.hear(command.env("TMPDIR", place.path("temporary")))
}

/// The rows of the table without its header, by cells.
fn rows(said: &Said) -> Vec<Vec<&str>> {
    let rows = said.out.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    rows.skip(1).map(|row| row.split(" | ").map(str::trim).collect()).collect()
}

fn lines(said: &Said) -> Vec<Value> {
    said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn keys(line: &Value) -> String {
    let mut keys: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys.join(" ")
}

/// What a tiling is, without what was measured.
fn described(row: &[&str]) -> String {
    format!("{}: {}", row[..8].join(" | "), row[11])
}

#[test]
fn every_tiling_of_a_small_model() {
    let place = calm();
    let said = verify(&place, &["--every-tiling"]).done();
    // Two rows of 40 tokens are five chunks: four in the prefill span, which is the width of the recipe's cells, and one behind it.
    assert_snapshot!(rows(&said).iter().map(|row| described(row)).collect::<Vec<_>>().join("\n"), @r"
    1 × 4 (the recipe's) | 3 × 2 | 0 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    1 × 1 | 3 × 5 | 0 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    1 × 2 | 3 × 3 | 0 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    1 × 3 | 3 × 2 | 0 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    1 × 5 | 3 × 1 | 0 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    2 × 1 | 2 × 5 | 0 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    2 × 2 | 2 × 3 | 0 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    2 × 3 | 2 × 2 | 0 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    2 × 5 | 2 × 1 | 0 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    3 × 1 | 1 × 5 | 0 | – | plain, memory | recompute | preallocated | cells: proved
    3 × 2 | 1 × 3 | 0 | – | plain, memory | recompute | preallocated | cells: proved
    3 × 3 | 1 × 2 | 0 | – | plain, memory | recompute | preallocated | cells: proved
    3 × 5 | 1 × 1 | 0 | – | plain, memory | recompute | preallocated | cells: proved
    1 × 2 | 3 × 3 | 0 | plain, memory | plain, memory | recompute | preallocated, on the host | forward phase: proved
    3 × 2 | 1 × 3 | 0 | – | plain, memory | recompute | preallocated, on the host | cells: proved
    1 × 2 | 3 × 3 | 0 | plain, file | plain, file | recompute | preallocated | forward phase: proved
    3 × 2 | 1 × 3 | 0 | – | plain, file | recompute | preallocated | cells: proved
    1 × 2 | 3 × 3 | 1 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    1 × 2 | 3 × 3 | 2 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    1 × 2 | 3 × 3 | 3 | plain, memory | plain, memory | recompute | preallocated | forward phase: proved
    1 × 2 | 3 × 3 | 9 | – | – | recompute | preallocated | forward phase: proved
    1 × 2 | 3 × 3 | 0 | plain, memory | plain, memory | keep | preallocated | forward phase: proved
    1 × 2 | 3 × 3 | 1 | plain, memory | plain, memory | keep | preallocated | forward phase: proved
    3 × 2 | 1 × 3 | 1 | – | – | recompute | preallocated | cells: proved
    3 × 2 | 1 × 3 | 2 | – | – | recompute | preallocated | cells: proved
    3 × 2 | 1 × 3 | 3 | – | – | recompute | preallocated | cells: proved
    3 × 2 | 1 × 3 | 0 | – | plain, memory | keep | preallocated | cells: proved
    3 × 2 | 1 × 3 | 1 | – | – | keep | preallocated | cells: proved
    1 × 2 | 3 × 3 | 0 | int8, memory | plain, memory | recompute | preallocated | forward phase: near enough
    1 × 2 | 3 × 3 | 0 | int4, memory | plain, memory | recompute | preallocated | forward phase: near enough
    1 × 2 | 3 × 3 | 0 | plain, memory | int8, memory | recompute | preallocated | forward phase: near enough
    1 × 2 | 3 × 3 | 0 | plain, memory | int4, memory | recompute | preallocated | forward phase: near enough
    1 × 2 | 3 × 3 | 0 | int8, file | int8, file | recompute | preallocated | forward phase: near enough
    1 × 2 | 3 × 3 | 0 | int4, file | int4, file | recompute | preallocated | forward phase: near enough
    3 × 2 | 1 × 3 | 0 | – | int8, memory | recompute | preallocated | forward phase: near enough
    ");
    assert!(
        said.out.contains("\n2 samples, 80 tokens, in f64: loss ")
            && said.out.ends_with("\nproved; near enough where stores round\n"),
        "{}",
        said.out
    );
    assert!(said.out.contains("\n35 tilings, 28 of them exact: worst relative error "), "{}", said.out);
    assert!(said.err.contains("\ntiling 35 of 35: near enough, "), "{}", said.err);
    assert!(place.names("temporary").is_empty(), "{:?}", place.names("temporary"));
}

#[test]
fn a_dense_cache_of_every_storage() {
    let place = calm();
    let dense = ["--set", "kv_cache.policy=dense", "--set", "kv_cache.cache_length=64", "--every-tiling"];
    let said = verify(&place, &dense).done();
    let caches: Vec<&str> =
        rows(&said).iter().filter(|row| row[0] == "3 × 2" && row[2] == "0" && row[5] == "recompute").map(|row| row[6]).collect();
    assert_eq!(
        caches,
        ["preallocated", "preallocated, on the host", "growing", "growing, on the host", "paged", "paged, on the host"]
    );
    assert!(rows(&said).iter().all(|row| row[4] == "–"), "nothing is overwritten: {}", said.out);
}

/// Where 4 bits are too few, all else is still told, and the error says which tiling it was, with the keys to have it alone.
#[test]
fn a_store_that_is_too_coarse_is_named() {
    let place = Place::new();
    fs::create_dir(place.path("temporary")).unwrap();
    let said = verify(&place, &["--every-tiling"]);
    let verdicts: Vec<&str> = rows(&said).iter().map(|row| row[11]).collect();
    assert_eq!(verdicts.iter().filter(|verdict| **verdict == "proved").count(), 28, "{}", said.out);
    assert_eq!(verdicts.iter().filter(|verdict| **verdict == "too coarse").count(), 2, "{}", said.out);
    let words = "error: with `grad.chunks_per_cell = 2`, `grad.layer_checkpoints = \"int4\"` the gradient has the cosine 0.99";
    assert!(said.refused(1).starts_with(words));
    let alone = ["--set", "grad.chunks_per_cell=2", "--set", "grad.layer_checkpoints=int4"];
    assert!(verify(&place, &alone).refused(1).starts_with("error: with `grad.layer_checkpoints = \"int4\"` the gradient has"));
}

/// The recipe's own stores come first, and have a place for their files.
#[test]
fn the_recipes_own_tiling_comes_first() {
    let place = calm();
    let own = [
        "grad.undo_log=int8",
        "grad.undo_log_place=file",
        "grad.scratch_dir=fast",
        "grad.layers_per_cell=2",
        "kv_cache.cpu_offload=true",
    ];
    let set: Vec<&str> = own.iter().flat_map(|set| ["--set", *set]).chain(["--every-tiling"]).collect();
    let said = verify(&place, &set).done();
    assert_eq!(
        described(&rows(&said)[0]),
        "2 × 4 (the recipe's) | 2 × 2 | 0 | plain, memory | int8, file | recompute | preallocated, on the host | forward phase: near enough"
    );
    assert!(!place.path("fast").exists() && place.names("temporary").is_empty());
}

#[test]
fn lines_of_every_tiling() {
    let place = calm();
    let said = verify(&place, &["--every-tiling", "--format", "json", "--dump", "dump", "--samples", "1"]).done();
    let lines = lines(&said);
    assert_snapshot!(keys(&lines[0]), @"attention_outputs chunks_per_cell columns cosine cpu_offload from_first head is_own kept_cells kind layer_bands layer_checkpoints layers_per_cell relative_error storage undo_log verdict");
    assert_snapshot!(keys(lines.last().unwrap()), @"dtype exact from_first kind loss reference_loss relative_error samples tested tilings tokens tolerance untested verdict");
    let (tilings, proof) = (&lines[..lines.len() - 1], lines.last().unwrap());
    assert!(tilings.iter().all(|line| line["kind"] == "tiling") && proof["kind"] == "proof");
    assert_eq!((proof["tilings"].as_u64(), proof["verdict"].as_str()), (Some(tilings.len() as u64), Some("proved")));
    let exact = tilings.iter().filter(|line| line["verdict"] == "proved");
    let worst = exact.filter_map(|line| line["relative_error"].as_f64()).fold(0.0, f64::max);
    assert!(worst > 0.0 && worst <= proof["tolerance"].as_f64().unwrap());
    // All follow one log as they would choose it.
    let log = ["--every-tiling", "--format", "json", "--replay-log", "dump/replay_log.safetensors", "--samples", "1"];
    assert!(verify(&place, &log).done().out == said.out);
}

#[test]
fn a_dump_is_of_one_computation() {
    let place = calm();
    let short = ["--samples", "1", "--set", "kv_cache.cache_length=12", "--set", "kv_cache.chunk_size=4"];
    let dump = |dir: &str, set: &[&str]| verify(&place, &[&["--dump", dir], &short[..], set].concat()).done();
    dump("plain", &[]);
    dump("drawn", &["--set", "kv_cache.randomize_chunk_sizes=true"]);
    for name in ["evictions", "logits"] {
        let of = |dir: &str| place.read(&format!("{dir}/{name}.safetensors"));
        assert!(of("plain") != of("drawn"), "{name}");
    }
}

#[test]
fn lines_of_one_proof() {
    let place = calm();
    let all = lines(&verify(&place, &["--format", "json"]).done());
    assert_snapshot!(keys(&all[0]), @"cosine kind name norm reference_norm relative_error");
    assert_snapshot!(keys(all.last().unwrap()), @"cosine dtype kind loss reference_loss relative_error samples tested tokens tolerance untested verdict");
    let (matrices, proof) = (&all[..all.len() - 1], all.last().unwrap());
    assert!(matrices.iter().all(|line| line["kind"] == "matrix") && proof["verdict"] == "proved");
    assert_eq!(proof["tested"].as_u64(), Some(matrices.len() as u64));
    let coarse = ["--format", "json", "--set", "grad.layer_checkpoints=int8"];
    let all = lines(&verify(&place, &coarse).done());
    assert_eq!(all.last().unwrap()["verdict"], "near enough");
}
