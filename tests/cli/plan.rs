//! `plan`, keys that are left open, and the peak that a run is planned to have.

use std::fs;

use serde_json::{Value, json};

use super::place::{Place, Said};

fn plan(place: &Place, more: &[&str]) -> Said {
    place.run(&[&["plan", "--device", "cpu", "--recipe", "recipe.toml"][..], more].concat())
}

fn lines(said: &Said) -> Vec<Value> {
    said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const ALL_OPEN: [&str; 6] = [
    "grad.layers_per_cell=auto",
    "grad.chunks_per_cell=auto",
    "grad.layer_checkpoints=auto",
    "grad.layer_checkpoints_place=auto",
    "grad.undo_log=auto",
    "grad.undo_log_place=auto",
];

fn sets(keys: &[&'static str]) -> Vec<&'static str> {
    keys.iter().flat_map(|key| ["--set", key]).collect()
}

#[test]
fn the_rows_of_a_plan_are_its_peak_and_its_keys_stay() {
    let place = Place::new();
    for more in [&[][..], &["--tokens", "300"]] {
        let lines = lines(&plan(&place, &[more, &["--format", "json"]].concat()).done());
        let kinds: Vec<&str> = lines.iter().map(|line| line["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds[..2], ["machine", "chosen"]);
        assert!(kinds[2..].iter().all(|kind| *kind == "alternative") && kinds.len() > 3, "{kinds:?}");
        let chosen = &lines[1];
        let rows = chosen["tensors"]["parts"].as_array().unwrap().iter();
        let sum: u64 = rows.map(|row| row["bytes"].as_u64().unwrap()).sum();
        assert_eq!(chosen["tensors"]["tensor_bytes"].as_u64(), Some(sum));
        assert!(chosen["process_bytes"].as_u64().unwrap() > sum + lines[0]["baseline_bytes"].as_u64().unwrap());
        assert_eq!((chosen["fits"].as_bool(), chosen["layers_per_cell"].as_u64()), (Some(true), Some(1)));
        assert!(chosen["seconds"].as_object().unwrap().values().all(|seconds| seconds.as_f64().unwrap() >= 0.0));
        assert!(lines[0]["is_timed"].as_bool().unwrap());
    }
    let table = plan(&place, &["--tokens", "300"]).done().out;
    for words in [
        "| weights ",
        "| graph of the cell ",
        "| peak, in ",
        "(chosen)",
        "2 sequences of 300 tokens",
        "grad = { layers_per_cell = 1",
    ] {
        assert!(table.contains(words), "{words}: {table}");
    }
}

#[test]
fn a_gpu_that_is_not_here_has_a_plan_of_its_own() {
    let said =
        plan(&Place::new(), &["--tokens", "300", "--device-memory", "2GB", "--host-memory", "8GiB", "--format", "json"]).done();
    let lines = lines(&said);
    assert_eq!(lines[0]["device"].as_str(), Some("cuda"));
    assert_eq!(lines[0]["device_limit_bytes"].as_u64(), Some(2_000_000_000));
    assert_eq!((lines[0]["host_limit_bytes"].as_u64(), lines[0]["is_timed"].as_bool()), (Some(8 << 30), Some(false)));
    assert!(lines[1]["device_bytes"].as_u64().unwrap() > 0 && lines[1]["host_tensors"].is_object());
}

#[test]
fn a_model_of_7_billion_weights_in_nf4_is_trained_on_a_card_of_12_gigabytes() {
    let place = Place::new();
    let qwen = json!({
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152_064, "max_position_embeddings": 131_072, "tie_word_embeddings": false, "layer_types": null,
        "head_dim": null, "max_window_layers": 28,
    });
    place.edit_json("model/config.json", qwen);
    let sets = [
        "--set",
        "model.dtype=bf16",
        "--set",
        "train.micro_batch_size=1",
        "--set",
        "kv_cache={policy='h2o', cache_length=16384, chunk_size=2048}",
    ];
    let memory = ["--tokens", "131072", "--device-memory", "12GB", "--host-memory", "64GB"];
    let said = plan(&place, &[&memory[..], &sets, &["--set", "grad={}", "--set", "model.quantize=nf4"]].concat()).done();
    assert!(said.out.contains("    grad = { layers_per_cell = "), "{}", said.out);
}

#[test]
fn each_memory_of_a_gpus_plan_has_a_table_and_a_column() {
    let arguments = ["--tokens", "300", "--device-memory", "2GB", "--host-memory", "8GiB", "--set", "grad.keep_graph=none"];
    let said = plan(&Place::new(), &arguments).done();
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let table = |title: &str| {
        let from = said.out.find(&format!("| {title} ")).unwrap_or_else(|| panic!("{title} in {}", said.out));
        said.out[from..].lines().take_while(|line| line.starts_with('|')).map(cells).collect::<Vec<_>>()
    };
    let (device, host) = (table("the device's memory at its peak"), table("the host's memory at its peak"));
    let parts = |table: &[Vec<String>]| table[2..].iter().map(|cells| cells[1].clone()).collect::<Vec<_>>();
    assert!(parts(&device).contains(&"weights".to_owned()) && !parts(&device).contains(&"undo log".to_owned()), "{device:?}");
    assert!(parts(&host).contains(&"undo log".to_owned()) && parts(&host).contains(&"process and libraries".to_owned()));
    let others = table("layers × chunks per cell");
    let column = |name: &str| others[0].iter().position(|cell| cell == name).unwrap_or_else(|| panic!("{name} in {others:?}"));
    for (name, table) in [("device's peak", &device), ("host's peak", &host)] {
        let last = table.last().unwrap();
        assert!(last[1].starts_with("peak, in ") && last[3] == "100.0 %", "{last:?}");
        assert_eq!(others[2][column(name)], last[2], "the chosen one is the first");
    }
}

#[test]
fn what_does_not_fit_is_refused_with_what_would() {
    let place = Place::new();
    let refused = plan(&place, &["--tokens", "3000", "--host-memory", "60MiB"]).refused(4);
    assert!(
        refused.starts_with("error: a step of 3000 tokens does not fit with a margin of 10 %: it takes at least "),
        "{refused}"
    );
    assert!(refused.contains("of which there are 60.0 MiB") && refused.contains("hint: "), "{refused}");
    let refused = plan(&place, &["--tokens", "40000"]).refused(2);
    assert!(refused.contains("`--tokens 40000`: the model has 32768 positions"), "{refused}");
    let refused = plan(&place, &["--host-memory", "60B"]).refused(4);
    assert!(refused.contains("hint: no sequence would"), "{refused}");
}

/// Of what waits in files the room is as short as that of memory.
#[test]
fn files_without_room_are_refused_with_what_would_fit() {
    let place = Place::new();
    let files = ["--tokens", "3000", "--set", "grad.undo_log_place=file", "--set", "grad.keep_graph=none"];
    let refused = plan(&place, &[&files[..], &["--scratch-space", "10KiB"]].concat()).refused(4);
    assert!(refused.contains(" of scratch files, for which 10.0 KiB are free\n\nhint: this would: grad = { "), "{refused}");
    // Nobody knows yet where the run will be, or the disk is large enough.
    let said = plan(&place, &files).done();
    assert!(said.out.contains("\nin files: ") && !said.out.contains("that are free"), "{}", said.out);
    let said = plan(&place, &[&files[..], &["--set", "output_dir=run"]].concat()).done();
    assert!(said.out.contains(" that are free\n") && !place.path("run").exists(), "{}", said.out);
    let said = plan(&place, &[&files[..], &["--scratch-space", "1GB", "--format", "json"]].concat()).done();
    assert_eq!(lines(&said)[0]["scratch_limit_bytes"].as_u64(), Some(1_000_000_000));
}

#[test]
fn a_run_decides_what_is_open_and_says_how_near_its_plan_came() {
    let place = Place::new();
    let said = place.finetune(&ALL_OPEN).done();
    assert!(said.err.contains("planned: grad = { layers_per_cell = 3, "), "{}", said.err);
    assert!(said.err.contains("peak memory of the process: planned "), "{}", said.err);
    let resolved = fs::read_to_string(place.path("run/recipe.resolved.toml")).unwrap();
    assert!(!resolved.contains("auto") && resolved.contains("layers_per_cell = 3"), "{resolved}");
    assert!(fs::read_to_string(place.path("run/summary.md")).unwrap().contains("peak memory, as planned"));
    let decided = fs::read(place.path("run/final/adapter_model.safetensors")).unwrap();
    let resumed = place.run(&["resume", "run", "--device", "cpu", "--set", "train.max_steps=4"]).done();
    assert!(!resumed.err.contains("planned: grad"), "it goes on with what was decided: {}", resumed.err);
    // The same as with what was decided written down.
    let width = resolved.lines().find(|line| line.starts_with("chunks_per_cell =")).unwrap().replace(" = ", "=");
    fs::remove_dir_all(place.path("run")).unwrap();
    place.finetune(&["grad.layers_per_cell=3", &format!("grad.{width}")]).done();
    assert!(fs::read(place.path("run/final/adapter_model.safetensors")).unwrap() == decided);
}

#[test]
fn a_resume_decides_anew_what_it_leaves_open() {
    let place = Place::new();
    place.finetune(&["train.max_steps=2"]).done();
    let resolved = || String::from_utf8(place.read("run/recipe.resolved.toml")).unwrap();
    assert!(resolved().contains("layers_per_cell = 1\n"), "{}", resolved());
    let open = ["--set", "grad.layers_per_cell=auto", "--set", "grad.undo_log_place=auto", "--set", "train.max_steps=3"];
    let said = place.run(&[&["resume", "run", "--device", "cpu"][..], &open].concat()).done();
    assert!(
        said.err.contains("planned: grad = { layers_per_cell = ") && said.err.contains("resuming after step 2"),
        "{}",
        said.err
    );
    assert!(said.err.contains("peak memory of the process: planned "), "{}", said.err);
    assert!(resolved().contains("layers_per_cell = ") && !resolved().contains("auto"), "{}", resolved());
}

#[test]
fn other_verbs_take_a_recipe_with_open_keys() {
    let place = Place::new();
    assert!(place.check(&ALL_OPEN).done().out.contains("| peak memory, planned |"));
    let run = |words: &[&'static str]| {
        place.run(&[words, &["--device", "cpu", "--recipe", "recipe.toml"], &sets(&ALL_OPEN)[..]].concat()).done()
    };
    assert!(run(&["verify"]).out.contains("proved"));
    run(&["bench", "--tokens", "90", "--steps", "1"]);
    run(&["evaluate", "--base", "model", "--split", "train"]);
}

/// oneDNN keeps a primitive for each shape of a bf16 product: without a bound the process came to three times its plan.
#[test]
fn samples_of_many_lengths_in_bf16_take_what_was_planned() {
    let place = Place::new();
    let rows = (0..90).map(|index| {
        let ids: Vec<usize> = (0..400 + 5 * index).map(|i| 1 + (i * 7 + index * 31) % 500).collect();
        format!("{{\"input_ids\": {ids:?}, \"labels\": {ids:?}}}\n")
    });
    place.write("train.jsonl", rows.collect::<String>());
    place.edit_recipe("policy = \"h2o\"\ncache_length = 32\nchunk_size = 8", "policy = \"dense\"\nchunk_size = 1024");
    place.edit_recipe("micro_batch_size = 2\nmax_steps = 3", "micro_batch_size = 1\nmax_steps = 90");
    place.edit_recipe("save_interval = 1", "save_interval = 90");
    let said = place.finetune(&["model.dtype=bf16", "grad.layers_per_cell=auto", "grad.chunks_per_cell=auto"]).done();
    let (_, line) = said.err.split_once("peak memory of the process: planned ").unwrap();
    let mebibytes: Vec<f64> = line.split(" MiB").take(2).map(|part| part.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert!(mebibytes[1] < 1.4 * mebibytes[0], "{mebibytes:?}");
}
