//! `bench`: what it needs, what its lines hold, and what it refuses.

use std::fs;
use std::time::Instant;

use insta::assert_snapshot;
use serde_json::Value;

use super::place::{Place, Said};

/// A recipe whose data are not there, and whose model is a `config.json`.
fn bare() -> Place {
    let place = Place::new();
    fs::remove_file(place.path("train.jsonl")).unwrap();
    for name in place.names("model").into_iter().filter(|name| name != "config.json") {
        fs::remove_file(place.path("model").join(name)).unwrap();
    }
    place
}

fn bench(place: &Place, more: &[&str]) -> Said {
    let words = ["bench", "--device", "cpu", "--recipe", "recipe.toml", "--steps", "2"];
    place.run(&[&words[..], more].concat())
}

/// The lines of a bench in JSON.
fn lines(place: &Place, more: &[&str]) -> Vec<Value> {
    let said = bench(place, &[&["--random-weights", "--format", "json"][..], more].concat()).done();
    said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("`{key}` in {line}"))
}

fn keys(line: &Value) -> String {
    let mut keys: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys.join(" ")
}

/// Two ranks make a step of twice the tokens, and one of them speaks.
#[test]
fn ranks_make_steps_together() {
    let place = bare();
    let words = [
        "launch",
        "--nproc",
        "2",
        "--device",
        "cpu",
        "--",
        "bench",
        "--device",
        "cpu",
        "--recipe",
        "recipe.toml",
        "--steps",
        "2",
    ];
    let more = ["--random-weights", "--tokens", "90"];
    // What is said to `launch` is said to all ranks.
    let said = place.run(&[&["--format", "json"], &words[..], &more].concat()).done();
    let lines: Vec<Value> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["ranks"], 2);
    let steps: Vec<&Value> = lines.iter().filter(|line| line["kind"] == "step").collect();
    assert_eq!(steps.len(), 3);
    for step in steps {
        let rate = number(step, "tokens") / number(step, "step_seconds");
        assert!((number(step, "tokens_per_second") / rate - 1.0).abs() < 1e-9 && number(step, "tokens") as u64 == 2 * 2 * 90);
        assert!((0.0..1.0).contains(&number(step, "idle")) && number(step, "tokens_run") >= number(step, "tokens"));
    }
    place.edit_recipe("[lora]\nr = 4\nalpha = 8\n", "");
    let said = place.run(&[&words[..], &more, &["--full"]].concat()).done();
    for words in ["each of 2 ranks: 2 sequences of 90 tokens", " idle "] {
        assert!(said.out.contains(words), "{words}: {}", said.out);
    }
}

/// The rest of a chunk is all that a sequence costs which has ended.
#[test]
fn sequences_that_have_ended_cost_nothing() {
    let sequences = ["--set", "train.micro_batch_size=3", "--set", "kv_cache.chunk_size=8", "--set", "kv_cache.cache_length=32"];
    let lines = lines(&bare(), &[&["--tokens", "30,100,50"][..], &sequences].concat());
    // 100 tokens; 50 and their chunk to its end, 56; 30 and their piece of the prefill span, 32.
    assert_eq!((number(&lines[1], "tokens"), number(&lines[1], "tokens_run")), (180.0, 188.0));
    let said = bench(&bare(), &[&["--random-weights", "--tokens", "30,100"][..], &sequences].concat());
    assert_snapshot!(said.refused(2), @r"
    error: `--tokens` has 2 lengths: the recipe has 3 sequences in a micro-batch

    hint: give one length for all sequences or one for each, or set `train.micro_batch_size`
    ");
}

const PARTS: [&str; 6] = ["forward", "head", "replay", "recompute", "backward", "optimizer"];

#[test]
fn a_config_is_enough_and_the_keys_stay() {
    let lines = lines(&bare(), &["--tokens", "90"]);
    let kinds: Vec<&str> = lines.iter().map(|line| line["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["setup", "step", "step", "step", "summary", "forecast"]);
    let warm_up: Vec<bool> = lines[1..4].iter().map(|line| line["is_warm_up"].as_bool().unwrap()).collect();
    assert_eq!(warm_up, [true, false, false]);
    assert_snapshot!(keys(&lines[0]), @"attention device dtype kind libtorch parameters ranks sequences threads tokens_per_sequence trained_parameters version");
    assert_snapshot!(keys(&lines[1]), @"backward_cpu_seconds backward_seconds flops flops_attention flops_head flops_linear flops_per_cpu_second flops_per_second forward_cpu_seconds forward_seconds gemm_cpu_share gemm_share gemm_square_flops_per_cpu_second gemm_square_flops_per_second head_cpu_seconds head_seconds is_warm_up kind loss optimizer_cpu_seconds optimizer_seconds peak_is_of_step peak_resident_bytes recompute_cpu_seconds recompute_seconds replay_cpu_seconds replay_seconds step step_cpu_seconds step_seconds store_copy_seconds store_copy_share tokens tokens_per_second tokens_run");
    let figures = lines[1].as_object().unwrap().keys();
    let only_of_steps = [
        "flops",
        "flops_attention",
        "flops_head",
        "flops_linear",
        "is_warm_up",
        "loss",
        "peak_is_of_step",
        "step",
        "tokens",
        "tokens_run",
    ];
    for key in figures.filter(|key| *key != "kind" && !only_of_steps.contains(&key.as_str())) {
        let spread = &lines[4][key];
        let [least, median, most] = ["min", "median", "max"].map(|word| number(spread, word));
        assert!(least <= median && median <= most, "{key}: {spread}");
        assert!(lines[2..4].iter().any(|step| number(step, key).to_bits() == most.to_bits()), "{key}: {spread}");
    }
}

#[test]
fn the_parts_are_the_whole() {
    // Three layers in bands of one are run forward twice but for the top one; in one band none is.
    for (layers, replays) in [("grad.layers_per_cell=1", true), ("grad.layers_per_cell=3", false)] {
        let began = Instant::now();
        let lines = lines(&bare(), &["--tokens", "200", "--set", layers, "--set", "grad.keep_graph=none"]);
        let elapsed = began.elapsed().as_secs_f64();
        let steps = || lines.iter().filter(|line| line["kind"] == "step");
        let sum = |key: &str| steps().map(|step| number(step, key)).sum::<f64>();
        assert!(sum("step_seconds") < elapsed, "by a clock outside");
        // A replay of single layers makes keys and values alone.
        let (replay, forward) = (sum("replay_cpu_seconds"), sum("forward_cpu_seconds"));
        assert!(2.0 * replay < forward, "{replay} beside {forward}");
        for step in steps() {
            for clock in ["seconds", "cpu_seconds"] {
                let sum: f64 = PARTS.iter().map(|part| number(step, &format!("{part}_{clock}"))).sum();
                let whole = number(step, &format!("step_{clock}"));
                assert!((sum / whole - 1.0).abs() <= 1e-6, "{clock}: {sum} of {whole}");
            }
            assert_eq!(number(step, "replay_seconds") > 0.0, replays, "{layers}");
            let of = ["flops_linear", "flops_attention", "flops_head"].iter().map(|key| number(step, key)).sum::<f64>();
            assert_eq!((number(step, "flops").to_bits(), number(step, "tokens") as u64), (of.to_bits(), 2 * 200));
        }
    }
}

/// Steps differ in their columns where sizes of chunks are drawn: a plan that keeps all graphs means those of any step.
#[test]
fn steps_of_random_chunk_sizes_keep_all_graphs() {
    let sets = ["--set", "kv_cache.randomize_chunk_sizes=true", "--set", "grad.chunks_per_cell=1"];
    let lines = lines(&bare(), &[&["--tokens", "200"][..], &sets].concat());
    for step in lines.iter().filter(|line| line["kind"] == "step") {
        assert!(["replay_seconds", "recompute_seconds"].iter().all(|key| number(step, key) <= 0.0), "{step}");
    }
}

#[test]
fn the_share_of_copies_is_a_part_of_the_step() {
    for step in lines(&bare(), &["--tokens", "100", "--set", "grad.keep_graph=none"]).iter().filter(|line| line["kind"] == "step")
    {
        let share = number(step, "store_copy_share");
        assert!((share - number(step, "store_copy_seconds") / number(step, "step_seconds")).abs() < 1e-9);
        assert!(share > 0.0 && share < 1.0, "{share}");
    }
}

#[test]
fn memory_by_part_is_the_peak() {
    for (layers, kept) in [("1", "none"), ("3", "none"), ("1", "1"), ("3", "2")] {
        let sets = [format!("grad.layers_per_cell={layers}"), format!("grad.keep_graph={kept}")];
        let lines = lines(&bare(), &["--tokens", "100", "--profile-memory", "--set", &sets[0], "--set", &sets[1]]);
        let memory = lines.last().unwrap();
        assert_eq!(keys(memory), "kind measured_peak_bytes memory parts peak_in tensor_peak_bytes_by_part");
        assert_eq!((memory["kind"].as_str(), memory["memory"].as_str()), (Some("memory"), Some("process")));
        let rows: Vec<(&str, i64)> = memory["parts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| (row["part"].as_str().unwrap(), row["bytes"].as_i64().unwrap()))
            .collect();
        let of = |name: &str| rows.iter().find(|(part, _)| *part == name).unwrap_or_else(|| panic!("{name} in {rows:?}")).1;
        assert_eq!(rows.iter().map(|(_, bytes)| bytes).sum::<i64>(), memory["measured_peak_bytes"].as_i64().unwrap());
        // 3 layers, 2 sequences, 2 KV heads and 32 slots: keys and values of 16 numbers and a position. Scores too, but not any more in a
        // layer that has begun to unwind; and for layers of the current band dK and dV.
        let slots = 3 * 2 * 2 * 32;
        assert!((slots * (2 * 16 * 4 + 8)..=slots * (2 * 2 * 16 * 4 + 8 + 4)).contains(&of("KV cache")), "{rows:?}");
        assert_eq!(of("layer checkpoints") > 0, layers == "1", "{rows:?}");
        assert!(of("activations") > 0, "{rows:?}");
        let most = PARTS.iter().map(|part| memory["tensor_peak_bytes_by_part"][*part].as_i64().unwrap()).max().unwrap();
        assert_eq!(most + of("process"), memory["measured_peak_bytes"].as_i64().unwrap());
    }
}

#[test]
fn a_table_of_steps_and_of_memory() {
    let place = Place::new();
    fs::remove_file(place.path("train.jsonl")).unwrap();
    let said = bench(&place, &["--tokens", "50", "--warmup", "0", "--profile-memory"]).done();
    let names: Vec<&str> =
        said.out.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next()).map(str::trim).collect();
    assert_eq!(names[..6], ["step", "1", "2", "median", "least", "most"]);
    assert_eq!((names[6], *names.last().unwrap()), ("memory at the peak", "measured peak"));
    assert!(said.out.starts_with("2 sequences of 50 tokens; "), "{}", said.out);
}

#[test]
fn other_heads_and_all_weights() {
    let place = bare();
    let classes = ["--set", "head.kind=seq_classification_on_logits", "--set", "head.labels=[\"yes\", \"no\"]"];
    let lines_of = |more: &[&str]| lines(&place, &[&["--tokens", "64"][..], more].concat());
    // Two sequences have two targets: 3 · 2 · vocabulary · width each.
    assert!((number(&lines_of(&classes)[1], "flops_head") - 2.0 * 4.0 * 512.0 * 64.0).abs() < 1.0);
    place.edit_recipe("[lora]\nr = 4\nalpha = 8\n", "");
    let setup = &lines_of(&["--full"])[0];
    assert_eq!(setup["trained_parameters"], setup["parameters"]);
}

#[test]
fn what_a_bench_refuses() {
    let place = bare();
    assert!(bench(&place, &["--tokens", "0"]).misused().contains("0 is not in 1.."));
    assert_snapshot!(bench(&place, &["--tokens", "8"]).refused(3), @r"
    error: no weights in `<dir>/model`

    hint: give `--random-weights` to draw them, or name a model in safetensors
    ");
    assert_snapshot!(bench(&place, &["--tokens", "40000", "--random-weights"]).refused(2), @r#"
    error: `--tokens 40000`: the model has 32768 positions

    hint: ask for fewer tokens, or scale the rotary embeddings with `model.rope_scaling = { rope_type = "yarn", factor = 2.0, original_max_position_embeddings = 32768 }`
    "#);
    let dense = ["--tokens", "33", "--random-weights", "--set", "kv_cache.policy=dense"];
    assert_snapshot!(bench(&place, &dense).refused(2), @r#"
    error: a sequence of 33 tokens does not fit the dense cache of layer 0: `kv_cache.cache_length` = 32

    hint: set `kv_cache.storage = "growing"`, or `kv_cache.cache_length = 33`, or a policy that evicts such as "h2o"
    "#);
    fs::remove_file(place.path("model/config.json")).unwrap();
    assert_snapshot!(bench(&place, &["--tokens", "8", "--random-weights"]).refused(3), @r"
    error: cannot read `<dir>/model/config.json`
    cause: No such file or directory (os error 2)

    hint: check the path: in a recipe it is relative to the recipe's folder, on the command line to the working directory
    ");
}
