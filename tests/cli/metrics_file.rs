//! `metrics.jsonl`: every line is as its schema and its page say, on standard output and for a program of the user's, too.

use serde_json::Value;

use kvtune::report::metrics::StepMetrics;

use super::place::Place;

const PAGE: &str = include_str!("../../docs/reference/metrics-jsonl.md");

fn schema() -> Value {
    serde_json::from_str(include_str!("../../docs/reference/metrics.schema.json")).unwrap()
}

/// Whether a value is of a type of the schema, or of one of several.
fn is_of(value: &Value, schema: &Value) -> bool {
    let is = |kind: &Value| match kind.as_str().unwrap() {
        "integer" => value.is_u64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        "string" => value.is_string(),
        "array" => value.as_array().is_some_and(|all| all.iter().all(|one| is_of(one, &schema["items"]))),
        "object" => value.as_object().is_some_and(|all| all.values().all(|one| is_of(one, &schema["additionalProperties"]))),
        other => panic!("{other}"),
    };
    schema["type"].as_array().map_or_else(|| is(&schema["type"]), |kinds| kinds.iter().any(is))
}

fn check(line: &Value) {
    let schema = schema();
    let fields = line.as_object().unwrap();
    for (name, value) in fields {
        assert!(is_of(value, &schema["properties"][name]), "`{name}` of {line}");
    }
    for name in schema["required"].as_array().unwrap() {
        assert!(fields.contains_key(name.as_str().unwrap()), "{name} in {line}");
    }
}

#[test]
fn schema_page_and_program_have_the_same_fields() {
    let full = StepMetrics {
        loss: Some(f64::NAN),
        router_loss: Some(1.0),
        accuracy: Some(0.5),
        grad_norm: Some(1.0),
        learning_rate: Some(1e-3),
        eval_loss: Some(1.0),
        eval_accuracy: Some(0.5),
        eval_loss_by_set: [("books".to_owned(), f64::NAN)].into(),
        eval_answers: [("f1".to_owned(), 0.5)].into(),
        replay_log: Some("hash".to_owned()),
        evicted: Some(0.5),
        mean_stay: Some(3.0),
        evicted_by_layer: vec![0.5],
        mean_stay_by_layer: vec![Some(3.0), None],
        skipped: Some("why".to_owned()),
        idle: Some(0.1),
        ..StepMetrics::default()
    };
    let mut line = serde_json::to_value(&full).unwrap();
    line["check"] = "hash".into();
    check(&line);
    let schema = schema();
    let fields: Vec<&String> = line.as_object().unwrap().keys().collect();
    assert_eq!(fields, schema["properties"].as_object().unwrap().keys().collect::<Vec<_>>());
    let rows = PAGE.split("\n\nWith `--format json`").next().unwrap().lines().filter_map(|row| row.strip_prefix("| `"));
    assert_eq!(fields, rows.map(|row| row.split('`').next().unwrap()).collect::<Vec<_>>());
    let read: StepMetrics = serde_json::from_value(serde_json::to_value(&full).unwrap()).unwrap();
    assert!(read.eval_loss_by_set["books"].is_nan());
    assert!(!is_of(&"text".into(), &schema["properties"]["loss"]) && !is_of(&(-1).into(), &schema["properties"]["step"]));
}

#[test]
fn lines_go_to_the_file_to_standard_output_and_to_a_program_alike() {
    let place = Place::new();
    let mut run = place.command(&["finetune-lora", "--device", "cpu", "--recipe", "recipe.toml", "--out", "run", "-q"]);
    run.args(["--format", "json", "--set", "data.validation_fraction=0.4", "--set", "eval.initial=true"]);
    let said = place.hear(run.args(["--set", "report.command=tee lines | sed 's/^/seen /'"])).done();
    let file = String::from_utf8(place.read("run/metrics.jsonl")).unwrap();
    let (lines, end) = said.out.trim_end().rsplit_once('\n').unwrap();
    assert_eq!((file.trim_end(), file.lines().count()), (lines, 3));
    assert_eq!(String::from_utf8(place.read("lines")).unwrap(), file);
    assert!(said.err.lines().all(|line| line.starts_with("seen {")) && said.err.lines().count() == 3, "{}", said.err);
    file.lines().for_each(|line| check(&serde_json::from_str(line).unwrap()));
    let end: Value = serde_json::from_str(end).unwrap();
    assert_eq!((&end["state"], &end["step"], &end["final"]), (&"finished".into(), &2.into(), &"run/final".into()));

    let failing = place.run(&["resume", "run", "--device", "cpu", "--set", "report.command=exit 3", "--set", "train.epochs=9"]);
    failing.done();
    let check = place.run(&["check", "--recipe", "recipe.toml", "--format", "json"]).done();
    let objects: Vec<Value> = check.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&objects[0]["train"], &objects[1]["KV cache"]), (&6.into(), &"h2o, 32 slots, chunks of 8".into()));
}

#[test]
fn the_end_of_a_run_says_how_it_went_and_what_comes_next() {
    let place = Place::new();
    let said = place.finetune(&["data.validation_fraction=0.4"]).done();
    for words in
        ["2 of 2 steps in ", " · loss ", " · best loss ", " tok/s · entries evicted 20.0 %", "next: kvtune evaluate run\n"]
    {
        assert!(said.err.contains(words), "{words} in {}", said.err);
    }
    let next = ["evaluate", "run", "--device", "cpu", "--policy", "h2o", "--cache-length", "16,24,32"];
    let said = place.run(&next).done();
    assert_eq!(said.err.matches("train.jsonl`: 6 rows").count(), 1, "{}", said.err);
    assert_eq!(place.run(&[&next[..], &["-v"]].concat()).done().err.matches("train.jsonl`: 6 rows").count(), 3);
    assert_eq!(place.run(&[&next[..], &["-q"]].concat()).done().err, "");
}
