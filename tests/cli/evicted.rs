//! What the caches evict: told before a run, in its lines, at its end, and where nothing ever leaves.

use serde_json::Value;

use super::place::{NUM_ROWS, Place, ROW_LEN};

fn text(place: &Place, file: &str) -> String {
    String::from_utf8(place.read(file)).unwrap()
}

fn lines(place: &Place) -> Vec<Value> {
    text(place, "run/metrics.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn how_much_is_evicted_stands_in_check_run_metrics_summary_page_and_card() {
    let place = Place::new();
    // 40 tokens and 32 slots: a fifth leaves.
    let words =
        format!("{NUM_ROWS} of {NUM_ROWS} samples are longer than the cache (32 slots); 20.0 % of their entries are evicted");
    let check = place.check(&[]).done();
    assert!(check.out.contains(&words) && !check.err.contains("warning"), "{}{}", check.out, check.err);
    let run = place.finetune(&[]).done();
    assert!(run.err.contains(&format!("evictions: {words}")), "{}", run.err);
    for line in lines(&place) {
        assert_eq!(line["evicted"], 0.2, "{line}");
        assert_eq!(line["evicted_by_layer"].as_array().unwrap().len(), 3, "{line}");
        let stay = line["mean_stay"].as_f64().unwrap();
        let by_layer = line["mean_stay_by_layer"].as_array().unwrap();
        let mean = by_layer.iter().map(|stay| stay.as_f64().unwrap()).sum::<f64>() / 3.0;
        assert!(stay > 1.0 && stay < (ROW_LEN - 1) as f64 && (stay - mean).abs() < 1e-9, "{line}");
    }
    let summary = text(&place, "run/summary.md");
    assert!(summary.contains(&words) && summary.contains("20.0 %, on average "), "{summary}");
    let inspected = place.run(&["inspect", "run"]).done().out;
    assert!(inspected.contains("| entries evicted") && inspected.contains("| 20.0 %, on average "), "{inspected}");
    place.run(&["report", "run"]).done();
    let page = text(&place, "run/report.html");
    for words in
        ["What each layer evicted in training", "entries evicted, % of the step", "mean stay of evicted entries", ">20.0<"]
    {
        assert!(page.contains(words), "{words}");
    }
    place.run(&["export", "run", "--for", "peft", "--out", "peft"]).done();
    let card = text(&place, "peft/README.md");
    assert!(card.contains("| entries evicted in training") && card.contains(" 20.0 %, on average "), "{card}");
}

#[test]
fn a_policy_that_evicts_nothing_is_a_warning() {
    let place = Place::new();
    let warning = "warning: the policy `h2o` evicts nothing: no sample is longer than the cache (40 tokens at most, 64 slots)";
    let larger = ["kv_cache.cache_length=64"];
    let check = place.check(&larger).done();
    assert!(check.err.contains(warning), "{}", check.err);
    assert!(check.out.contains("0 of 6 samples are longer than the cache (64 slots); nothing is evicted"), "{}", check.out);
    let run = place.finetune(&larger).done();
    assert_eq!(run.err.matches(warning).count(), 1, "{}", run.err);
    assert!(lines(&place).iter().all(|line| line["evicted"] == 0.0 && line.get("mean_stay").is_none()));
    assert!(text(&place, "run/summary.md").contains("none: nothing left the caches"));
    let mixed = place.check(&["kv_cache.cache_length=[32, 40, 64]"]).done();
    assert!(mixed.out.contains("(32 to 64 slots); 6.7 % of their entries are evicted"), "{}", mixed.out);
    let dense = place.check(&["kv_cache.policy=dense", "kv_cache.cache_length=64"]).done();
    assert!(!dense.err.contains("warning") && !dense.out.contains("| evictions"), "{}{}", dense.out, dense.err);
}

#[test]
fn the_figures_of_a_step_are_those_of_its_replay_log() {
    let place = Place::new();
    let first = text(&place, "train.jsonl").lines().next().unwrap().to_owned();
    place.write("train.jsonl", format!("{first}\n"));
    place.finetune(&["train.max_steps=1", "train.micro_batch_size=1"]).done();
    // The adapter of the first step changes nothing yet.
    let evaluate = ["evaluate", "--base", "model", "--recipe", "recipe.toml", "--split", "train", "--replay-log", "log"];
    place.run(&evaluate).done();
    let log = place.run(&["inspect", "--evictions", "log", "--format", "json"]).done().out;
    let log: Value = serde_json::from_str(&log).unwrap();
    let line = &lines(&place)[0];
    for (index, layer) in log["layers"].as_array().unwrap().iter().enumerate() {
        let (mut evicted, mut kept, mut stay) = (0.0, 0.0, 0.0);
        for head in layer["heads"].as_array().unwrap() {
            let number = |name: &str| head[name].as_f64().unwrap();
            (evicted, kept) = (evicted + number("evicted"), kept + number("kept"));
            stay += number("evicted") * number("mean_stay");
        }
        let near = |found: &Value, expected: f64| (found.as_f64().unwrap() - expected).abs() < 1e-9;
        assert!(near(&line["evicted_by_layer"][index], evicted / (evicted + kept)), "{line}");
        assert!(near(&line["mean_stay_by_layer"][index], stay / evicted), "{line}\n{log}");
    }
}
