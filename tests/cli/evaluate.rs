//! `evaluate` of several models and caches, and of generated answers, which go on where they were interrupted.

use std::fs;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::thread;

use insta::assert_snapshot;
use serde_json::{Value, json};

use super::place::{Place, Said};

const SAMPLES: usize = 7;

/// With prompts of different length, and their completions.
fn place() -> Place {
    let place = Place::new();
    place.edit_recipe("format = \"tokens\"", "format = \"prompt-completion\"");
    let prompt = |index: usize| format!("the policy keeps {} ", "entries of the cache ".repeat(1 + index % 4));
    let row = |index| json!({ "prompt": prompt(index), "completion": format!("number {index}") }).to_string() + "\n";
    place.write("train.jsonl", (0..SAMPLES).map(row).collect::<String>());
    place
}

/// `kvtune evaluate` of `what` on the training file.
fn arguments<'a>(what: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let recipe = ["--recipe", "recipe.toml", "--split", "train", "--device", "cpu"];
    [&["evaluate"], what, &recipe, more].concat()
}

fn evaluate(place: &Place, what: &[&str], more: &[&str]) -> Said {
    place.run(&arguments(what, more))
}

fn lines(said: &Said) -> Vec<Value> {
    said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Records of LongBench v2, of which the easy ones are about law.
fn longbench() -> Place {
    let place = Place::new();
    place.edit_recipe("format = \"tokens\"", "format = \"longbench-v2\"");
    let record = |index: usize| {
        let of = |names: &[&str]| names[index % names.len()].to_owned();
        json!({
            "context": "some text ".repeat(index + 1), "question": "Which?", "choice_A": "1", "choice_B": "2", "choice_C": "3",
            "choice_D": "4", "answer": of(&["A", "B", "C", "D"]), "difficulty": of(&["easy", "hard"]),
            "length": of(&["short", "medium", "long"]), "domain": of(&["Law", "Code"]),
        })
    };
    place.write("train.jsonl", json!((0..6).map(record).collect::<Vec<_>>()).to_string());
    place
}

#[test]
fn models_and_caches_in_one_table() {
    let place = place();
    // Fixed shapes are those of the recipe's own cache: a dense one grows.
    place.edit_recipe("[kv_cache]", "[kv_cache]\nstatic = true");
    let caches = ["--policy", "dense,h2o,lastrec", "--cache-length", "16,24", "--format", "json"];
    // What `--set` says is the recipe's own, and in the table only where it is asked for.
    let caches = [&caches[..], &["--set", "kv_cache.policy=lastrec", "--set", "kv_cache.cache_length=32"]].concat();
    let found = lines(&evaluate(&place, &["model", "adapter"], &caches).done());
    let named = |line: &Value| ["evaluated", "policy", "cache_length"].map(|key| line[key].as_str().unwrap().to_owned());
    let of_model = [("dense", "all"), ("h2o", "16"), ("h2o", "24"), ("lastrec", "16"), ("lastrec", "24")];
    let expected = ["model", "adapter"].iter().flat_map(|of| of_model.map(|(policy, slots)| [*of, policy, slots]));
    assert_eq!(found.iter().map(named).collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    let mut losses: Vec<String> = found.iter().map(|line| line["scores"]["overall"]["loss"].to_string()).collect();
    // Each is what it is alone.
    let alone = ["--format", "json", "--set", "kv_cache.policy=lastrec", "--set", "kv_cache.cache_length=24"];
    assert_eq!(lines(&evaluate(&place, &["adapter"], &alone).done())[0]["scores"], found[9]["scores"]);
    losses.sort();
    losses.dedup();
    assert_eq!(losses.len(), 10, "{losses:?}");
    let table = evaluate(&place, &["model"], &["--base", "model", "--cache-length", "20", "--limit", "4"]).done().out;
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = table.lines().map(cells).filter(|row| row[4] == "all").collect();
    assert_eq!(rows.len(), 2);
    assert!(rows[0] == rows[1] && rows[0][1..6] == ["model", "h2o", "20", "all", "4"], "{table}");
    // What fails takes nothing along of what was done before it.
    place.write("adapter/adapter_model.safetensors", "damaged");
    let said = evaluate(&place, &["model", "adapter"], &["--losses", "losses.jsonl", "--limit", "2"]);
    assert!(said.out.contains("| model "), "{}", said.out);
    assert_eq!(String::from_utf8(place.read("losses.jsonl")).unwrap().lines().count(), 2);
    said.refused(3);
}

/// Losses and answers are those of one, to the last digit, and so is the file of answers, also where it was cut.
#[test]
fn ranks_share_the_samples_and_score_as_one() {
    let place = place();
    // More than are answered between two exchanges.
    let row = |index: usize| {
        json!({ "prompt": format!("entry {index} {}", "of it ".repeat(index % 5)), "completion": "kept" }).to_string() + "\n"
    };
    place.write("train.jsonl", (0..19).map(row).collect::<String>());
    let answers =
        |file| ["--metrics", "f1,rouge_l", "--max-new-tokens", "3", "--batch", "1", "--answers", file, "--format", "json"];
    let one = evaluate(&place, &["adapter"], &answers("one.jsonl")).done();
    let whole = String::from_utf8(place.read("one.jsonl")).unwrap();
    place.write("shared.jsonl", whole.split_inclusive('\n').take(2).collect::<String>() + "{\"cut");
    let launch = ["launch", "--nproc", "2", "--"];
    let said = place.run(&[&launch[..], &arguments(&["adapter"], &answers("shared.jsonl"))].concat()).done();
    assert_eq!(said.out, one.out);
    assert!(place.read("shared.jsonl") == place.read("one.jsonl"));
    assert!(said.err.contains("[rank 0] 19 answers, 2 of which were there already"), "{}", said.err);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let others = |rank: &str| {
        let more: &[&str] = if rank == "1" { &["--limit", "3"] } else { &[] };
        let mut command = place.command(&arguments(&["adapter"], more));
        let variables = [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
        place.hear(command.envs(variables)).refused(3)
    };
    thread::scope(|scope| {
        for words in [scope.spawn(|| others("0")), scope.spawn(|| others("1"))].map(|rank| rank.join().unwrap()) {
            assert!(words.contains("rank 1 differs from rank 0:") && words.contains("`samples`: "), "{words}");
        }
    });
}

#[test]
fn classes_are_reported_as_longbench_v2_reports_them() {
    let place = longbench();
    let head = ["--set", "head.kind=seq_classification_on_logits", "--set", "head.labels=[\"A\",\"B\",\"C\",\"D\"]"];
    let found = lines(&evaluate(&place, &["model"], &[&head[..], &["--format", "json"]].concat()).done()).remove(0);
    let (scores, groups) = (&found["scores"], &found["scores"]["longbench_v2"]);
    let percent = |key: &str| groups[key].as_f64().unwrap();
    let overall = 100.0 * scores["overall"]["accuracy"].as_f64().unwrap();
    for parts in [&["easy", "hard"][..], &["short", "medium", "long"]] {
        let mean = parts.iter().map(|part| percent(part)).sum::<f64>() / parts.len() as f64;
        assert!((mean - overall).abs() < 1e-9 && (percent("overall") - overall).abs() < 1e-9, "{found}");
    }
    assert_eq!([&groups["by_domain"]["Law"], &groups["by_domain"]["Code"]], [&groups["easy"], &groups["hard"]]);
    assert!(overall > 0.0 && overall < 100.0, "{found}");
    let table = evaluate(&place, &["model"], &head).done().out;
    assert!(table.lines().next().unwrap().contains("| Overall | Easy | Hard | Short | Medium | Long |"), "{table}");
    assert!(table.contains("|          Law |"), "{table}");
    assert_snapshot!(evaluate(&place, &["model"], &[&head[..], &["--generate"]].concat()).refused(2), @r"
    error: the recipe's head reads a class, and generates no answers

    hint: leave `--generate` and `--metrics` out, or use `--set head.kind=next_token`
    ");
    // The end of the prompt belongs to the reply.
    let generate = ["--generate", "--max-new-tokens", "3", "--answers", "answers.jsonl", "--format", "json"];
    let found = lines(&evaluate(&place, &["model"], &generate).done()).remove(0);
    assert!(found["answers"]["longbench_v2"]["easy"].is_f64() && found["answers"]["means"]["longbench_v2"].is_f64(), "{found}");
}

#[test]
fn thoughts_come_before_the_answer_and_are_not_thought_twice() {
    let place = longbench();
    let think = ["--set", "data.prompt=upstream-cot", "--set", "kv_cache.cache_length=64", "--generate", "--max-new-tokens", "3"];
    let twice = ["--limit", "2", "--batch", "2", "--answers", "thoughts.jsonl", "--format", "json"];
    let arguments = [&think[..], &twice].concat();
    let scores = lines(&evaluate(&place, &["model"], &arguments).done()).remove(0)["answers"].clone();
    let written = place.read("thoughts.jsonl");
    for line in String::from_utf8(written.clone()).unwrap().lines() {
        let answer: Value = serde_json::from_str(line).unwrap();
        assert!(answer["thoughts"].is_string() && answer["token_ids"].as_array().unwrap().len() <= 3, "{answer}");
    }
    let again = evaluate(&place, &["model"], &arguments).done();
    assert!(again.err.contains("2 answers, 2 of which were there already"), "{}", again.err);
    assert_eq!((&lines(&again)[0]["answers"], place.read("thoughts.jsonl")), (&scores, written));
    let checked = place.check(&["data.prompt=upstream-cot"]).refused(2);
    assert_snapshot!(checked, @r#"
    error: `data.prompt = "upstream-cot"` asks for thoughts, and the data have none to train on

    hint: train with `data.prompt = "upstream"`, and evaluate with this one
    "#);
    assert_eq!(place.run(&["data", "recipe.toml", "--set", "data.prompt=upstream-cot"]).refused(2), checked);
    assert_eq!(place.on_cpu("plan", &["data.prompt=upstream-cot"]).refused(2), checked);
    assert_eq!(place.finetune(&["data.prompt=upstream-cot"]).refused(2), checked);
}

const ANSWERS: &[&str] =
    &["--metrics", "f1,rouge_l", "--max-new-tokens", "6", "--batch", "2", "--answers", "answers.jsonl", "--format", "json"];

#[test]
fn answers_are_those_of_generate_and_scored_as_score_does() {
    let place = place();
    let found = lines(&evaluate(&place, &["adapter"], ANSWERS).done()).remove(0);
    let rows: Vec<Value> =
        String::from_utf8(place.read("answers.jsonl")).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), SAMPLES);
    let prompt = format!("the policy keeps {} ", "entries of the cache ".repeat(4));
    let generate = ["generate", "model", "--adapter", "adapter", "--policy", "h2o", "--cache-length", "32", "--greedy"];
    let rest = ["--prompt", &prompt, "--max-new-tokens", "6", "--set", "kv_cache.chunk_size=8", "--format", "json"];
    let said = place.run(&[&generate[..], &rest, &["--device", "cpu"]].concat()).done();
    let text: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!((&text["token_ids"], &text["text"]), (&rows[3]["token_ids"], &rows[3]["prediction"]));
    assert_eq!(rows[3]["references"], json!(["number 3"]));
    let said = place.run(&["score", "answers.jsonl", "--metrics", "f1,rouge_l", "--format", "json"]).done();
    let scored: Vec<Value> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows.iter().zip(&scored).all(|(row, scored)| row["scores"] == scored["scores"]));
    assert_eq!(scored[SAMPLES]["means"], found["answers"]["means"]);
}

#[test]
fn losses_by_target_and_class_and_differences_from_the_first() {
    let place = place();
    place.write(
        "classes.jsonl",
        "{\"sample\": 1, \"classes\": {\"digits\": [0, 3]}}\n{\"sample\": 5, \"classes\": {\"digits\": [2]}}\n",
    );
    let more =
        ["--losses", "losses.jsonl", "--token-classes", "classes.jsonl", "--policy", "dense,lastrec", "--cache-length", "16"];
    let found = lines(&evaluate(&place, &["model"], &[&more[..], &["--format", "json"]].concat()).done());
    let text = String::from_utf8(place.read("losses.jsonl")).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((found.len(), rows.len()), (2, 2 * SAMPLES));
    let losses = |row: &Value| row["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect::<Vec<_>>();
    let number = |value: &Value| value.as_f64().unwrap();
    for (line, rows) in found.iter().zip(rows.chunks(SAMPLES)) {
        let all: Vec<f64> = rows.iter().flat_map(losses).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        assert!((number(&line["scores"]["overall"]["loss"]) - mean).abs() < 1e-5, "{line}");
        let of = |sample: u64| losses(rows.iter().find(|row| row["sample"] == sample).unwrap());
        let digits = (of(1)[0] + of(1)[3] + of(5)[2]) / 3.0;
        assert!((number(&line["by_class"]["digits"]["loss"]) - digits).abs() < 1e-5, "{line}");
    }
    let (difference, loss) = (&found[1]["differences"]["loss"], |line: &Value| number(&line["scores"]["overall"]["loss"]));
    assert!((number(&difference["difference"]) - (loss(&found[1]) - loss(&found[0]))).abs() < 1e-9, "{difference}");
    assert!(
        number(&difference["low"]) <= number(&difference["difference"])
            && number(&difference["high"]) >= number(&difference["low"])
    );
    assert!(found[0].get("differences").is_none() && found[1]["differences"]["loss of digits"]["samples"] == 2, "{}", found[1]);
    let table = evaluate(&place, &["model"], &more).done().out;
    assert!(table.contains("tokens: digits") && table.contains("| less `model`, dense, all |"), "{table}");

    place.write("classes.jsonl", "{\"sample\": 1, \"classes\": {\"digits\": [900]}}\n");
    let error = evaluate(&place, &["model"], &more).refused(3);
    assert!(error.starts_with("error: the class `digits` has target 900 of sample 1, which has "), "{error}");
    // Answers alone need no losses.
    let alone = lines(&evaluate(&place, &["model"], ANSWERS).done());
    assert!(alone[0].get("scores").is_none() && alone[0]["answers"]["samples"] == SAMPLES, "{}", alone[0]);
}

#[test]
fn an_interrupted_evaluation_ends_with_the_same_file() {
    let place = place();
    let caches = [ANSWERS, &["--policy", "h2o,lastrec"]].concat();
    let whole = evaluate(&place, &["model"], &caches).done();
    let expected = place.read("answers.jsonl");
    let file = place.path("answers.jsonl");
    for (killed_at, lines) in [(1, 0), (4, 3), (SAMPLES + 2, SAMPLES + 1)] {
        fs::remove_file(&file).unwrap();
        let mut command = place.command(&arguments(&["model"], &caches));
        let failed = command.env("KVTUNE_FAILPOINT", format!("answers.write=kill:{killed_at}")).output().unwrap();
        assert_eq!(failed.status.signal(), Some(9));
        let left = fs::read(&file).unwrap();
        assert!(left.split_last().is_some_and(|(last, rest)| *last != b'\n' && expected.starts_with(rest)), "a half line");
        assert_eq!(left.split(|&byte| byte == b'\n').count(), lines + 1);
        let said = evaluate(&place, &["model"], &caches).done();
        assert_eq!((fs::read(&file).unwrap() == expected, &said.out), (true, &whole.out), "killed at {killed_at}");
    }
    let said = evaluate(&place, &["model"], &caches).done();
    assert!(said.err.contains("7 answers, 7 of which were there already, are in `answers.jsonl`"), "{}", said.err);
    // More of the samples, the same settings.
    fs::remove_file(&file).unwrap();
    evaluate(&place, &["model"], &[ANSWERS, &["--limit", "3"]].concat()).done();
    evaluate(&place, &["model"], ANSWERS).done();
    assert!(expected.starts_with(&fs::read(&file).unwrap()));
}

#[test]
fn answers_of_something_else_are_refused() {
    let place = place();
    evaluate(&place, &["model"], ANSWERS).done();
    let before = place.read("answers.jsonl");
    let refused = |what: &str, more: &[&str]| evaluate(&place, &[what], &[ANSWERS, more].concat()).refused(3);
    let cut = |error: String| error.split_once(": expected").map(|(start, _)| start.to_owned()).unwrap_or(error);
    assert_snapshot!(refused("model", &["--limit", "3", "--losses", "losses.jsonl"]), @r"
    error: `answers.jsonl` holds more than the 3 answers that are asked for

    hint: name another file with `--answers`, or remove this one to begin anew
    ");
    assert!(place.path("losses.jsonl").exists(), "they are not lost with it");
    assert_snapshot!(cut(refused("adapter", &[])), @"error: `answers.jsonl`, line 1: an answer with another `adapter`");
    assert_snapshot!(cut(refused("model", &["--stop", "x"])), @"error: `answers.jsonl`, line 1: an answer with another `rules`");
    assert_snapshot!(cut(refused("model", &["--policy", "lastrec"])), @"error: `answers.jsonl`, line 1: an answer with another `cache`");
    assert_eq!(place.read("answers.jsonl"), before);
    place.write("answers.jsonl", [b"{\"sample\": 0}\n", &before[..]].concat());
    assert_snapshot!(refused("model", &[]), @r"
    error: `answers.jsonl`, line 1: not an answer of an evaluation: missing field `settings`

    hint: name another file with `--answers`, or remove this one to begin anew
    ");
}

#[test]
fn answers_that_cannot_be_had() {
    let place = place();
    assert_snapshot!(evaluate(&place, &["model"], &["--generate"]).refused(2), @r"
    error: `model` is not in a run, so its answers have no default place

    hint: name a file with `--answers`
    ");
    assert_snapshot!(evaluate(&place, &["model"], &["--max-new-tokens", "3"]).refused(2), @r"
    error: it is said how answers are generated, and none are asked for

    hint: add `--generate`, or `--metrics` with the metrics to score them by
    ");
    let retrieval = ["--metrics", "retrieval", "--max-new-tokens", "1", "--answers", "a.jsonl"];
    assert_snapshot!(evaluate(&place, &["model"], &retrieval).refused(3), @r"
    error: the answer to sample 0 (counted from 0) can't be scored: its reference is not what the metric needs
    cause: expected `Paragraph N` for `retrieval`, found `number 0`

    hint: leave the metric out, or choose samples that it is made for
    ");
    let tokens = Place::new();
    let generate = ["--generate", "--max-new-tokens", "3", "--answers", "a.jsonl"];
    assert_snapshot!(evaluate(&tokens, &["model"], &generate).refused(3), @r"
    error: `<dir>/train.jsonl:1` has no prompt: its first token is a target already

    hint: label the tokens of the prompt with -100, or leave the sample out
    ");
    // Tokens have the text that the tokenizer gives them.
    let ids: Vec<usize> = (0..30).map(|i| 5 + i * 7).collect();
    let labels: Vec<i64> = ids.iter().map(|&id| if (20..24).contains(&((id - 5) / 7)) { id as i64 } else { -100 }).collect();
    tokens.write("train.jsonl", json!({ "input_ids": ids, "labels": labels }).to_string());
    evaluate(&tokens, &["model"], &generate).done();
    let row: Value = serde_json::from_slice(tokens.read("a.jsonl").trim_ascii()).unwrap();
    let decoded = kvtune::data::Tokenizer::load(&tokens.path("model")).unwrap();
    assert_eq!(row["references"], json!([decoded.decode(&[145, 152, 159, 166]).unwrap()]));
    fs::remove_file(tokens.path("model/tokenizer.json")).unwrap();
    fs::remove_file(tokens.path("a.jsonl")).unwrap();
    assert_snapshot!(evaluate(&tokens, &["model"], &generate).refused(3), @r"
    error: the text of an answer needs a tokenizer, and the model has no `tokenizer.json`

    hint: put `tokenizer.json` into the model directory: answers are compared as texts
    ");
}

#[test]
fn the_rest_is_what_training_has_dropped() {
    let place = place();
    let rest = |set: &[&str]| {
        let sets: Vec<&str> = set.iter().flat_map(|set| ["--set", *set]).collect();
        place.run(&[&["evaluate", "model", "--recipe", "recipe.toml", "--split", "rest", "--format", "json"][..], &sets].concat())
    };
    let drop = ["data.on_too_long=drop", "data.max_seq_length=60"];
    let dropped = lines(&rest(&drop).done()).remove(0)["scores"]["overall"]["samples"].as_u64().unwrap();
    let kept = evaluate(&place, &["model"], &["--format", "json", "--set", drop[0], "--set", drop[1]]).done();
    let kept = lines(&kept).remove(0)["scores"]["overall"]["samples"].as_u64().unwrap();
    assert!(dropped > 0 && kept > 0 && dropped + kept == SAMPLES as u64, "{dropped}, {kept}");
    assert_snapshot!(rest(&[]).refused(2), @r"
    error: no sample is left out: `data.on_too_long` is not `drop`

    hint: use `--set data.on_too_long=drop` with the `data.max_seq_length` of training
    ");
}

#[test]
fn a_run_answers_at_validation_and_its_best_checkpoint_is_chosen_by_the_answers() {
    let place = place();
    // What the base writes is right: nothing can be better than it.
    evaluate(&place, &["model"], ANSWERS).done();
    let text = String::from_utf8(place.read("answers.jsonl")).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let prompts: Vec<Value> =
        place.read("train.jsonl").split(|&b| b == b'\n').filter_map(|l| serde_json::from_slice(l).ok()).collect();
    let right = |(prompt, row): (&Value, &Value)| {
        json!({ "prompt": prompt["prompt"], "completion": row["prediction"].as_str().unwrap().to_owned() + " x" }).to_string()
            + "\n"
    };
    place.write("held-out.jsonl", prompts.iter().zip(&rows).map(right).collect::<String>());
    let generate = "eval.generate={ metrics = [\"rouge_l\", \"f1\"], samples = 4, max_new_tokens = 6 }";
    let set = ["data.validation=held-out.jsonl", "eval.interval=1", "eval.initial=true", "eval.metric=f1", generate];
    let said = place.finetune(&[&set[..], &["optimizer.learning_rate=0.3", "optimizer.schedule=constant"]].concat()).done();
    assert!(said.err.contains("\nsample 2: ") && !said.err.contains("\nsample 3: "), "{}", said.err);
    let metrics = String::from_utf8(place.read("run/metrics.jsonl")).unwrap();
    let f1: Vec<f64> = metrics
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["eval_answers"]["f1"].as_f64().unwrap())
        .collect();
    assert!(f1[0] > 0.5 && f1[3] < f1[0], "{f1:?}");
    let of_steps: Vec<f64> = f1[1..].to_vec();
    let best = of_steps.iter().copied().fold(f64::MIN, f64::max);
    let state: Value = serde_json::from_slice(&place.read("run/best/state.json")).unwrap();
    assert_eq!((state["best"]["metric"].as_str(), state["best"]["value"].as_f64()), (Some("f1"), Some(best)));
    assert_eq!(state["best"]["step"].as_u64(), of_steps.iter().position(|&f1| f1 >= best).map(|at| at as u64 + 1));
    let again = ["evaluate", "run/final", "--limit", "4", "--metrics", "f1", "--max-new-tokens", "6", "--format", "json"];
    let again = lines(&place.run(&again).done()).remove(0);
    assert_eq!(again["answers"]["means"]["f1"].as_f64(), Some(f1[3]));
    // Beside the answers of this evaluation those of each validation.
    let kept = place.names("run/answers");
    assert!(
        kept.len() == 5 && kept[1] == "validation-step-000000.jsonl" && kept[4] == "validation-step-000003.jsonl",
        "{kept:?}"
    );
    let last = String::from_utf8(place.read("run/answers/validation-step-000003.jsonl")).unwrap();
    let scores = last.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["scores"]["f1"].as_f64().unwrap());
    assert!((scores.sum::<f64>() / 4.0 - f1[3]).abs() < 1e-12, "{last}");
    let shown = place.run(&["inspect", "run"]).done().out;
    assert!(shown.contains("| validation-step-000002"), "{shown}");
    fs::remove_dir_all(place.path("run")).unwrap();
    assert_snapshot!(place.finetune(&[generate]).refused(2), @r"
    error: `eval.generate` is set, and no samples are held out for validation

    hint: set `data.validation` or `data.validation_fraction`, or leave `eval.generate` out
    ");
}

#[test]
fn what_is_generated_is_what_the_loss_finds_most_likely_whatever_is_evicted() {
    let place = Place::new();
    let prompt = |index: usize| (0..60 + 7 * index).map(|i| 1 + (i * 7 + i * i * (index + 3)) % 500).collect::<Vec<usize>>();
    let row = |index: usize, answer: &[u64]| {
        let mut ids: Vec<u64> = prompt(index).into_iter().map(|id| id as u64).collect();
        let labels: Vec<i64> = ids.iter().map(|_| -100).chain(answer.iter().map(|&id| id as i64)).collect();
        ids.extend(answer);
        json!({ "input_ids": ids, "labels": labels }).to_string() + "\n"
    };
    let all = |answer: &dyn Fn(usize) -> Vec<u64>| (0..4).map(|index| row(index, &answer(index))).collect::<String>();
    let smart = "kv_cache.policy={ smart-lastrec = { end_initial_regex = \"[a-z]\" } }";
    let mut different = Vec::new();
    for policy in ["kv_cache.policy=h2o", "kv_cache.policy=lastrec", smart] {
        place.write("train.jsonl", all(&|_| vec![1]));
        // Alone, as the sequences of a batch share the borders of their chunks.
        let set = [
            "--set",
            policy,
            "--set",
            "grad.single_tokens_for_targets=true",
            "--set",
            "eval.micro_batch_size=1",
            "--format",
            "json",
        ];
        let generate = ["--generate", "--ignore-eos", "--max-new-tokens", "8", "--answers", "answers.jsonl"];
        evaluate(&place, &["adapter"], &[&set[..], &generate].concat()).done();
        let text = String::from_utf8(place.read("answers.jsonl")).unwrap();
        let ids = |line: &str| serde_json::from_value(serde_json::from_str::<Value>(line).unwrap()["token_ids"].take()).unwrap();
        let answers: Vec<Vec<u64>> = text.lines().map(ids).collect();
        fs::remove_file(place.path("answers.jsonl")).unwrap();
        place.write("train.jsonl", all(&|index| answers[index].clone()));
        let overall = lines(&evaluate(&place, &["adapter"], &set).done()).remove(0)["scores"]["overall"].take();
        assert_eq!((overall["targets"].as_u64(), overall["accuracy"].as_f64()), (Some(32), Some(1.0)), "{policy}: {answers:?}");
        different.push(answers);
    }
    different.sort();
    different.dedup();
    assert_eq!(different.len(), 3, "each policy sees something else");
}

#[test]
fn a_base_that_was_replaced_is_told() {
    let place = Place::new();
    place.finetune(&["train.max_steps=1"]).done();
    let evaluate = || place.run(&["evaluate", "run", "--split", "train", "--device", "cpu"]).done().err;
    assert!(!evaluate().contains("is not the model that"));
    place.edit_json("model/config.json", json!({"rms_norm_eps": 0.5}));
    let words = evaluate();
    assert!(words.contains("warning: `<dir>/model` is not the model that `run/final` was trained on"), "{words}");
}

/// Two that append to one file would each write every answer.
#[test]
fn a_file_of_answers_has_one_writer() {
    let place = place();
    let file = fs::File::create(place.path("answers.jsonl")).unwrap();
    file.lock().unwrap();
    let error = evaluate(&place, &["model"], ANSWERS).refused(1);
    assert!(error.starts_with("error: `answers.jsonl` is in use by another process"), "{error}");
    file.unlock().unwrap();
    evaluate(&place, &["model"], ANSWERS).done();
}
