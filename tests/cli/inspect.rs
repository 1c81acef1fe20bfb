//! `inspect`: runs and checkpoints as they lie there, whole or not, and what the caches of a replay log kept.

use std::fs;

use insta::assert_snapshot;
use serde_json::Value;

use super::place::{NUM_ROWS, Place, ROW_LEN, Said};

/// With a run of three steps.
fn trained() -> Place {
    let place = Place::new();
    place.finetune(&[]).done();
    place
}

fn json(place: &Place, what: &str) -> Value {
    serde_json::from_str(&place.run(&["inspect", what, "--format", "json"]).done().out).unwrap()
}

fn replace_metrics(place: &Place, change: impl Fn(&str) -> String) {
    let text = String::from_utf8(place.read("run/metrics.jsonl")).unwrap();
    place.write("run/metrics.jsonl", change(&text));
}

#[test]
fn a_run_and_a_checkpoint_of_it() {
    let place = trained();
    let found = json(&place, "run");
    let tokens = 3 * 2 * (ROW_LEN - 1);
    assert_eq!(
        (&found["state"], &found["figures"]["steps"], &found["figures"]["tokens"]),
        (&"finished".into(), &3.into(), &tokens.into())
    );
    assert_eq!((&found["settings"]["kv_cache.policy"], &found["latest"]), (&"\"h2o\"".into(), &"final".into()));
    assert_eq!(found["figures"]["samples"]["train"], NUM_ROWS);
    let names: Vec<&str> = found["checkpoints"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["step-000001", "step-000002", "step-000003", "final"]);
    let size: u64 = place.names("run/final").iter().map(|name| place.read(&format!("run/final/{name}")).len() as u64).sum();
    assert!(found["checkpoints"][3]["bytes"] == size && found["checkpoints"][3]["damage"].is_null(), "{found}");

    let said = place.run(&["inspect", "run"]).done().out;
    for words in [
        "run: finished\n",
        "| kv_cache.cache_length   | 32",
        "| final       | 3    |",
        "whole, the newest",
        "training loss by step\n",
    ] {
        assert!(said.contains(words), "{words} in\n{said}");
    }
    let own = json(&place, "run/step-000002");
    assert_eq!((&own["state"], &own["figures"]["steps"]), (&"a checkpoint after step 2".into(), &2.into()));
    assert_eq!(own["figures"]["loss"]["first"], found["figures"]["loss"]["first"]);
    assert_eq!(own["checkpoints"].as_array().unwrap().len(), 1);
    let alone = place.run(&["inspect", "adapter"]).done().out;
    assert!(alone.contains("no recipe beside it") && alone.contains("no loss to be drawn"), "{alone}");
}

#[test]
fn what_is_damaged_missing_or_not_finite_is_told() {
    let place = trained();
    let weights = place.read("run/final/adapter_model.safetensors");
    place.write("run/final/adapter_model.safetensors", &weights[..weights.len() - 1]);
    fs::remove_file(place.path("run/step-000002/MANIFEST.json")).unwrap();
    replace_metrics(&place, |text| {
        let lines: Vec<&str> = text.lines().collect();
        let mut odd: Value = serde_json::from_str(lines[1]).unwrap();
        odd["loss"] = Value::Null;
        odd["skipped"] = "<its loss> was lost".into();
        format!("{}\n{odd}\n{}", lines[0], &lines[2][..20])
    });
    let found = json(&place, "run");
    let damage = |index: usize| found["checkpoints"][index]["damage"].as_str().unwrap_or("none").to_owned();
    assert!(damage(0) == "none" && damage(1).contains("no `MANIFEST.json`") && damage(3).contains("expected"), "{found}");
    assert_eq!((&found["state"], &found["figures"]["not_finite"]), (&"not finished".into(), &1.into()));
    assert_eq!((&found["figures"]["steps"], &found["metrics_cut_short"]), (&2.into(), &true.into()));
    let said = place.run(&["inspect", "run"]).done().out;
    assert_eq!(found["figures"]["skipped"], 1);
    assert!(said.contains("| 2             | <its loss> was lost"), "{said}");
    place.run(&["report", "run"]).done();
    let page = String::from_utf8(place.read("run/report.html")).unwrap();
    assert!(page.contains("&lt;its loss&gt; was lost"), "{page}");
    place.run(&["report", "run/step-000001"]).done();
    assert!(place.path("run/report-step-000001.html").exists() && !place.path("run/step-000001/report.html").exists());
    assert!(said.contains("steps that are not finite") && said.ends_with("was cut short, and is left out\n"), "{said}");

    fs::remove_file(place.path("run/metrics.jsonl")).unwrap();
    assert!(place.run(&["inspect", "run"]).done().out.contains("no loss to be drawn"));
    place.write("run/metrics.jsonl", "nonsense\n{}\n");
    assert_snapshot!(place.run(&["inspect", "run"]).refused(3), @r"
    error: `run/metrics.jsonl`, line 1: not a line of metrics

    hint: restore the file, or remove it to begin a new one
    ");
}

#[test]
fn what_is_no_run() {
    let place = Place::new();
    assert_snapshot!(place.run(&["inspect", "model"]).refused(2), @r"
    error: `model` is not the directory of a run: it has no `recipe.resolved.toml`

    hint: name the directory of a run, which `kvtune finetune-lora` or `finetune-full` has written
    ");
    assert!(place.run(&["inspect", "nowhere"]).refused(2).contains("`nowhere` is not the directory of a run"));
    assert!(place.run(&["inspect"]).misused().contains("--evictions"));
    assert!(place.run(&["inspect", "run", "--evictions", "log"]).misused().contains("cannot be used with"));
}

/// The longest sample's log, with another setting.
fn logged(set: &str) -> Place {
    let place = Place::new();
    let common = ["evaluate", "model", "--recipe", "recipe.toml", "--split", "train", "--device", "cpu"];
    place.run(&[&common[..], &["--set", set, "--set", "kv_cache.chunk_size=4", "--replay-log", "log"]].concat()).done();
    place
}

fn drawn(place: &Place, more: &[&str]) -> Said {
    place.run(&[&["inspect", "--evictions", "log"][..], more].concat())
}

#[test]
fn what_each_layer_and_head_kept() {
    let cases = [("kv_cache.policy=h2o", "by the policy", 2), ("kv_cache.policy.lastrec.init_grace_tokens=0", "oldest first", 1)];
    for (set, order, heads) in cases {
        let place = logged(set);
        let said = drawn(&place, &["--out", "map.svg"]).done();
        assert_eq!(said.out.matches(order).count(), 3 * heads, "{}", said.out);
        let found: Value = serde_json::from_str(&drawn(&place, &["--format", "json"]).done().out).unwrap();
        let tokens = ROW_LEN - 1;
        assert_eq!(found["tokens"], tokens);
        for layer in found["layers"].as_array().unwrap() {
            assert_eq!(layer["heads"].as_array().unwrap().len(), heads);
            for head in layer["heads"].as_array().unwrap() {
                assert_eq!((&head["evicted"], &head["kept"]), (&(tokens - 32).into(), &32.into()), "{layer}");
            }
        }
        let svg = String::from_utf8(place.read("map.svg")).unwrap();
        assert_eq!(svg.contains("layer 2 rolling"), order == "oldest first");
        for words in ["<title", "<desc", ">position of the token<", "kept at the end"] {
            assert!(svg.contains(words), "{words}");
        }
        // Eight of forty tokens have left, whichever: the others have the colour of what is kept.
        let path = svg.split_once("fill=\"#d94f0b\" d=\"M").unwrap().1.split('"').next().unwrap();
        let numbers = |tile: &str| tile.split([' ', 'h', 'v']).map(|number| number.parse().unwrap_or(0)).collect::<Vec<usize>>();
        let first_row = path.split('M').map(numbers).filter(|tile| tile[1] == 0);
        assert_eq!(first_row.map(|tile| tile[2]).sum::<usize>(), 32 * (960 / tokens), "{set}");
    }
}

#[test]
fn a_log_or_a_picture_that_cannot_be() {
    let place = logged("kv_cache.policy=h2o");
    assert_snapshot!(drawn(&place, &["--out", "map.gif"]).refused(2), @r"
    error: `--out map.gif` names no SVG

    hint: let its name end in `.svg`
    ");
    assert_snapshot!(drawn(&place, &["--sequence", "1"]).refused(2), @r"
    error: the log has no sequence 1: it has 1, counted from 0

    hint: choose another with `--sequence`
    ");
    assert!(drawn(&place, &["--out", "nowhere/map.svg"]).refused(1).contains("`nowhere"));
    let mut bytes = place.read("log");
    let at = bytes.windows(13).position(|w| w == b"\"version\":\"1\"").unwrap();
    bytes[at + 11] = b'2';
    place.write("log", &bytes);
    assert!(drawn(&place, &[]).refused(3).contains("does not say `kvtune replay log`, version 1"));
    place.write("log", "{}");
    drawn(&place, &[]).refused(3);
    let several =
        ["evaluate", "model", "--recipe", "recipe.toml", "--split", "train", "--policy", "h2o,dense", "--replay-log", "log"];
    assert_snapshot!(place.run(&several).refused(2), @r"
    error: `--replay-log` names one file, and 2 models and caches are evaluated

    hint: evaluate one model with one policy and one cache length at a time
    ");
}
