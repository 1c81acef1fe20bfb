//! A run that is resumed ends as the uninterrupted one, to the bit; what would change it is refused.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::json;

use super::workshop::{Left, Workshop, copy_dir, finetune_arguments, names, tree};

/// 13 samples make 7 micro-batches, the first of one sequence, and 4 steps an epoch, the last of one micro-batch.
fn workshop() -> Workshop {
    Workshop::new(13)
}

fn steps(left: &Left) -> Vec<u64> {
    left.metrics.iter().map(|line| line["step"].as_u64().unwrap()).collect()
}

/// Two small steps, each saved.
fn two_steps() -> Workshop {
    let workshop = Workshop::new(4);
    workshop.finetune("", "run", &["train.max_steps=2", "train.gradient_accumulation_steps=1"]).with(0);
    workshop
}

/// The first step, the last before an epoch's end and its end, those after a validation and between, and the end of the run.
const STEPS_OF_EACH_KIND: [usize; 7] = [1, 3, 4, 5, 6, 11, 12];

#[test]
fn from_steps_of_each_kind_to_the_bit() {
    let workshop = workshop();
    let whole = workshop.finished("whole", &[]);
    assert_eq!(steps(&whole), (0..=12).collect::<Vec<_>>());
    let hashes: BTreeSet<_> = whole.metrics.iter().filter_map(|line| line.get("replay_log")?.as_str()).collect();
    assert!(hashes.len() == 12 && hashes.iter().all(|hash| hash.len() == 16), "each step has choices of its own: {hashes:?}");
    let evaluated = |step: usize| whole.metrics[step].get("eval_loss").is_some();
    assert_eq!((0..=12).filter(|&step| evaluated(step)).collect::<Vec<_>>(), [0, 5, 10, 12]);
    assert!(whole.metrics[12]["loss"].as_f64() < whole.metrics[1]["loss"].as_f64(), "it learns");
    for k in STEPS_OF_EACH_KIND {
        let (run, from) = (format!("from-{k}"), format!("step-{k:06}"));
        workshop.copy("whole", &run);
        let words = workshop.resume("", &run, &["--from", &from]).with(0);
        assert!(words.contains(&format!("resuming after step {k} from")), "{words}");
        workshop.assert_left(&run, &whole);
        let aside = workshop.path(&run).join("abandoned-1");
        assert_eq!(aside.exists(), k < 12, "what came after step {k} is moved out of the way");
        assert_eq!(names(&workshop.path(&run).join("tensorboard")).len(), 2, "a new event file");
    }
}

/// What the teacher has predicted is read again, and predicted again where it is gone.
#[test]
fn with_a_teacher() {
    let workshop = workshop();
    let set = ["train.max_steps=4", "head.distill={ weight = 0.5, temperature = 2.0, top_k = 4 }"];
    let whole = workshop.finished("whole", &set);
    assert!(!names(&workshop.path("whole").join("teacher")).is_empty());
    assert_ne!(whole.metrics[1]["loss"], workshop.finished("plain", &set[..1]).metrics[1]["loss"]);
    assert_eq!(workshop.finetune("run.step=kill:3", "run", &set).code, Err(9));
    let teacher = workshop.path("run").join("teacher");
    fs::remove_dir_all(&teacher).unwrap();
    fs::create_dir(&teacher).unwrap();
    let cut_short = "0a.safetensors.tmp-0123456789abcdef";
    fs::write(teacher.join(cut_short), "").unwrap();
    workshop.resume("", "run", &[]).with(0);
    workshop.assert_left("run", &whole);
    assert!(!names(&teacher).iter().any(|name| name == cut_short));
}

/// One command again and again begins the run, goes on with it, finds nothing to do, and hears what may change and what may not.
#[test]
fn by_the_command_that_began_it() {
    let workshop = workshop();
    let whole = workshop.finished("whole", &["train.max_steps=4"]);
    let again = |failpoint: &str, set: &[&str]| {
        workshop.kvtune(failpoint, &[finetune_arguments("run", set), vec!["--resume-if-possible"]].concat())
    };
    assert_eq!(again("run.step=kill:3", &["train.max_steps=4"]).code, Err(9));
    assert!(again("", &["train.max_steps=4"]).with(0).contains("resuming after step 2"));
    workshop.assert_left("run", &whole);
    assert!(again("", &["train.max_steps=4"]).with(0).contains("nothing to do: 4 steps are made"));
    // What was left to the planner was decided when the run began.
    let longer = ["train.max_steps=5", "grad.layers_per_cell=auto", "grad.chunks_per_cell=auto", "grad.on_out_of_memory=retreat"];
    assert!(again("", &longer).with(0).contains("resuming after step 4"));
    let now = fs::read_to_string(workshop.path("run/recipe.resolved.toml")).unwrap();
    assert!(now.contains("on_out_of_memory = \"retreat\"") && !now.contains("auto"), "{now}");
    let words = again("", &["train.max_steps=5", "optimizer.learning_rate=1e-3"]).with(2);
    assert!(words.contains("`optimizer.learning_rate`"), "{words}");
}

/// The size of chunks, too, was decided when the run began.
#[test]
fn by_a_recipe_without_a_chunk_size() {
    let workshop = workshop();
    let path = workshop.path("recipe.toml");
    let recipe = fs::read_to_string(&path).unwrap();
    fs::write(&path, recipe.replace("chunk_size = 4\n", "")).unwrap();
    for (steps, words) in [("train.max_steps=2", "13 training samples"), ("train.max_steps=4", "resuming after step 2")] {
        let said = workshop.kvtune("", &[finetune_arguments("run", &[steps]), vec!["--resume-if-possible"]].concat()).with(0);
        assert!(said.contains(words), "{said}");
    }
    assert!(!fs::read_to_string(&path).unwrap().contains("chunk_size"));
}

/// An adapter whose linears differ in rank and scale, or have none, is resumed and continued as any other.
#[test]
fn with_an_adapter_that_differs_by_linear_to_the_bit() {
    let workshop = workshop();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let seven = "all-linear";
    for (kind, r, targets) in [
        ("adapter-qwen2-patterns", 4, seven),
        ("adapter-qwen2-rslora", 6, seven),
        ("adapter-qwen2-layers", 4, seven),
        ("adapter-qwen2-regex", 4, r"'.*\.(0|2)\.(self_attn\.(q|v)_proj|mlp\.down_proj)'"),
        ("adapter-qwen2-lorabias", 4, seven),
        ("adapter-qwen2-biasloraonly", 4, r#"["q_proj", "k_proj", "down_proj"]"#),
        ("adapter-qwen2-dora", 4, seven),
    ] {
        let given = fixtures.join("families").join(kind);
        let set = |adapter: &Path| {
            let (model, adapter) = (fixtures.join("model-qwen2").display().to_string(), adapter.display().to_string());
            [
                format!("model.path={model}"),
                format!("model.adapter={adapter}"),
                format!("lora.r={r}"),
                "lora.alpha=8".into(),
                format!("lora.target_modules={targets}"),
                "train.max_steps=2".into(),
            ]
        };
        let finished = |run: &str, adapter: &Path| {
            let set = set(adapter);
            workshop.finished(run, &set.each_ref().map(String::as_str))
        };
        let whole = finished(kind, &given);
        let from = format!("{kind}-from-1");
        workshop.copy(kind, &from);
        workshop.resume("", &from, &["--from", "step-000001"]).with(0);
        workshop.assert_left(&from, &whole);
        let settings = |dir: &Path| fs::read_to_string(dir.join("adapter_config.json")).unwrap();
        let written = settings(&workshop.path(kind).join("final"));
        for key in ["rank_pattern", "alpha_pattern", "use_rslora", "layers_to_transform", "lora_bias", "bias", "use_dora"] {
            // What is not written is `false`.
            let of = |text: &str| {
                let value = serde_json::from_str::<serde_json::Value>(text).unwrap()[key].clone();
                value.as_bool().filter(|is_on| !is_on).map_or(value, |_| serde_json::Value::Null)
            };
            assert_eq!(of(&written), of(&settings(&given)), "{kind}: {key}");
        }
        let next = format!("{kind}-next");
        let continued = finished(&next, &workshop.path(kind).join("final"));
        assert_eq!(settings(&workshop.path(&next).join("final")).replace(&next, kind), written);
        assert!(continued.metrics[0]["eval_loss"] == whole.metrics[2]["eval_loss"], "{kind} begins where it has ended");
    }
}

/// What of a new adapter begins as the model has it, as the lengths of rows, changes nothing, and is trained and resumed as all the rest.
#[test]
fn with_a_new_dora_and_the_biases_of_its_targets_to_the_bit() {
    let workshop = workshop();
    let set = ["lora.use_dora=true", "lora.bias=lora_only", "lora.init_lora_weights=gaussian", "train.max_steps=3"];
    let whole = workshop.finished("whole", &set);
    workshop.copy("whole", "from-1");
    workshop.resume("", "from-1", &["--from", "step-000001"]).with(0);
    workshop.assert_left("from-1", &whole);
    let plain = workshop.finished("plain", &set[3..]);
    let loss = |metrics: &[serde_json::Value], step: usize| metrics[step]["eval_loss"].as_f64().unwrap();
    assert!((loss(&plain.metrics, 0) - loss(&whole.metrics, 0)).abs() < 1e-4);
    assert!((loss(&plain.metrics, 3) - loss(&whole.metrics, 3)).abs() > 1e-6);
}

/// Whole copies of both ends, matrices beside the embedding, classes by a matrix of their own, and an adapter that begins as a part of
/// the weights.
#[test]
fn with_what_else_an_adapter_trains_to_the_bit() {
    let workshop = workshop();
    for file in ["train.jsonl", "validation.jsonl"] {
        let text = fs::read_to_string(workshop.path(file)).unwrap();
        let labelled = |(row, line): (usize, &str)| format!("{}, \"label\": {}}}\n", line.strip_suffix('}').unwrap(), row % 3);
        let lines: String = text.lines().enumerate().map(labelled).collect();
        fs::write(workshop.path(&format!("labelled-{file}")), lines).unwrap();
    }
    let classes = [
        "head.kind=seq_classification",
        "head.num_labels=3",
        "data.train=labelled-train.jsonl",
        "data.validation=labelled-validation.jsonl",
    ];
    for (run, set) in [
        ("copies", &["lora.modules_to_save=[\"embed_tokens\", \"lm_head\", \"norm\"]"][..]),
        ("embedding", &["lora.target_modules=[\"q_proj\", \"embed_tokens\"]"]),
        ("output", &["lora.target_modules=[\"q_proj\", \"lm_head\"]", "lora.use_dora=true", "lora.dropout=0"]),
        ("classes", &classes),
        ("pissa", &["lora.init_lora_weights=pissa", "lora.use_rslora=true", "lora.rank_pattern={ q_proj = 3 }"]),
    ] {
        let whole = workshop.finished(run, &[set, &["train.max_steps=3"]].concat());
        let from = format!("{run}-from-1");
        workshop.copy(run, &from);
        workshop.resume("", &from, &["--from", "step-000001"]).with(0);
        workshop.assert_left(&from, &whole);
        let loss = |step: usize| whole.metrics[step]["eval_loss"].as_f64().unwrap();
        assert!((loss(0) - loss(3)).abs() > 1e-6, "{run} learns");
        let end = format!("{run}/final");
        workshop.kvtune("", &["verify", "--conformance", &end]).with(0);
        workshop.kvtune("", &["evaluate", &end]).with(0);
    }
    // Saved is LoRA of twice the rank beside the model as it is.
    let adapter = format!("model.adapter={}", workshop.path("pissa").join("final").display());
    let alpha = format!("lora.alpha={}", 4.0 * 2f64.sqrt());
    let next = [&adapter, "lora.r=4", &alpha, "lora.use_rslora=true", "lora.rank_pattern={ q_proj = 6 }", "train.max_steps=1"];
    let next = workshop.finished("next", &next);
    let ended = workshop.left("pissa").metrics[3]["eval_loss"].as_f64().unwrap();
    assert!((next.metrics[0]["eval_loss"].as_f64().unwrap() - ended).abs() < 1e-5);
}

/// What an optimiser remembers in few bits is saved as it is.
#[test]
fn with_moments_in_8_bits_to_the_bit() {
    let workshop = workshop();
    let whole = workshop.finished("whole", &["optimizer.name=adamw_8bit", "train.offload=optimizer", "train.max_steps=3"]);
    workshop.copy("whole", "from-1");
    workshop.resume("", "from-1", &["--from", "step-000001"]).with(0);
    workshop.assert_left("from-1", &whole);
}

/// Chunks of 2 to 6 tokens, others in each step.
#[test]
fn with_chunk_sizes_that_are_drawn_to_the_bit() {
    let workshop = workshop();
    let set = ["kv_cache.randomize_chunk_sizes=true", "train.max_steps=5"];
    let whole = workshop.finished("whole", &set);
    for k in [1, 3] {
        let (run, from) = (format!("from-{k}"), format!("step-{k:06}"));
        workshop.copy("whole", &run);
        workshop.resume("", &run, &["--from", &from]).with(0);
        workshop.assert_left(&run, &whole);
    }
    let plain = workshop.finished("plain", &set[1..]);
    assert!(plain.metrics[1]["loss"] != whole.metrics[1]["loss"], "other chunks, other evictions");
    // Before the first step nothing is drawn.
    assert_eq!(plain.metrics[0], whole.metrics[0]);
    let words = workshop.resume("", "plain", &["--set", set[0]]).with(2);
    assert!(words.contains("`kv_cache.randomize_chunk_sizes`: was false, is true"), "{words}");
}

#[test]
fn again_and_again() {
    let workshop = workshop();
    let whole = workshop.finished("run", &[]);
    for (round, from) in ["step-000009", "step-000004", "step-000011"].iter().enumerate() {
        let words = workshop.resume("", "run", &["--from", from]).with(0);
        assert!(words.contains(&format!("abandoned-{}", round + 1)), "{words}");
    }
    workshop.assert_left("run", &whole);
    assert_eq!(steps(&workshop.left("run")), (0..=12).collect::<Vec<_>>());
    assert_eq!(names(&workshop.path("run").join("tensorboard")).len(), 4);
    let gone: Vec<String> = (10..=12).map(|step| format!("step-{step:06}")).collect();
    let aside = names(&workshop.path("run").join("abandoned-1"));
    assert_eq!(aside.into_iter().filter(|name| name.starts_with("step-")).collect::<Vec<_>>(), gone);
    let summary = fs::read_to_string(workshop.path("run").join("summary.md")).unwrap();
    let first_loss = format!("{:.4} →", whole.metrics[1]["loss"].as_f64().unwrap());
    assert!(summary.contains("finished") && summary.contains(&first_loss), "the whole run: {summary}");
}

#[test]
fn a_longer_run_is_the_one_that_was_longer_from_the_start() {
    let workshop = workshop();
    let set =
        |steps| [steps, "optimizer.schedule=constant", "optimizer.warmup_steps=2", "eval.interval=2", "grad.layers_per_cell=2"];
    let long = workshop.finished("long", &set("train.max_steps=6"));
    workshop.finetune("", "run", &set("train.max_steps=4")).with(0);
    // `final` is enough to go on, with what the optimiser held at its step.
    let dir = workshop.path("run");
    for name in names(&dir).iter().filter(|name| name.starts_with("step-") && *name != "step-000004") {
        fs::remove_dir_all(dir.join(name)).unwrap();
    }
    let said = workshop.resume("", "run", &["--set", "train.max_steps=6"]).with(0);
    assert!(!said.contains("schedule"), "a constant rate stays: {said}");
    let found = workshop.left("run");
    assert_eq!(found.metrics, long.metrics);
    for name in found.files.keys() {
        assert!(found.files[name] == long.files[name], "`{name}` differs");
    }
    assert_eq!(workshop.checkpoints("run"), ["best", "final", "step-000004", "step-000005", "step-000006"]);
    // Written down, so that a further resume asks for six steps, too.
    assert!(workshop.resume("", "run", &[]).with(0).contains("the recipe asks for 6"));
}

#[test]
fn a_schedule_that_is_stretched_is_told() {
    let workshop = two_steps();
    workshop.resume("", "run", &["--set", "train.max_steps=4"]).with(0);
    let said = workshop.resume("", "run", &["--set", "train.max_steps=8"]).with(0);
    let told = said.lines().find(|line| line.contains("schedule")).unwrap_or_default();
    assert!(
        told.starts_with("warning: the cosine schedule has 8 steps now, and had 4: the learning rate is 2.5e-3 at step 4 and "),
        "{said}"
    );
    let metrics = workshop.left("run").metrics;
    let rates: Vec<f64> = metrics.iter().filter_map(|line| line["learning_rate"].as_f64()).collect();
    assert!(told.contains(&format!("{:.1e} at step 5", rates[4])), "{told}: {rates:?}");
}

/// Data sets of other weights are mixed, validated by their names, and a resume goes on to the bit.
#[test]
fn several_data_sets_to_the_bit() {
    let workshop = workshop();
    let text = fs::read_to_string(workshop.path("recipe.toml")).unwrap();
    let rows = fs::read_to_string(workshop.path("train.jsonl")).unwrap();
    let (first, second) = rows.split_at(rows.match_indices('\n').nth(2).unwrap().0 + 1);
    fs::write(workshop.path("one.jsonl"), first).unwrap();
    fs::write(workshop.path("two.jsonl"), second).unwrap();
    let text = text.replace("train = \"train.jsonl\"\nvalidation = \"validation.jsonl\"\n", "");
    let sets = "[[data.sets]]\npath = \"one.jsonl\"\nvalidation = \"validation.jsonl\"\nweight = 2.34\n\
                [[data.sets]]\npath = \"two.jsonl\"\nname = \"other\"\nvalidation_fraction = 0.2\nweight = 0.5\n";
    fs::write(workshop.path("recipe.toml"), format!("{text}{sets}")).unwrap();
    let set = ["train.max_steps=6", "eval.interval=2"];
    let whole = workshop.finished("whole", &set);
    workshop.finetune("run.step=kill:4", "run", &set);
    // Where the files lie may change.
    fs::create_dir(workshop.path("moved")).unwrap();
    fs::rename(workshop.path("one.jsonl"), workshop.path("moved/one.jsonl")).unwrap();
    let moved = format!("data.sets.one.path={}", workshop.path("moved/one.jsonl").display());
    workshop.resume("", "run", &["--set", &moved]).with(0);
    let found = workshop.left("run");
    assert_eq!(found.metrics, whole.metrics);
    assert!(found.files.iter().filter(|(name, _)| !name.contains("recipe")).all(|(name, file)| whole.files[name] == *file));
    let by_set = &found.metrics.last().unwrap()["eval_loss_by_set"];
    assert!(by_set["one"].is_f64() && by_set["other"].is_f64(), "{by_set}");
    let summary = fs::read_to_string(workshop.path("run/summary.md")).unwrap();
    assert!(summary.contains("validation loss of one, last") && summary.contains("validation loss of other, last"), "{summary}");
    let card = fs::read_to_string(workshop.path("run/final/README.md")).unwrap();
    assert!(card.contains("\"name\":\"validation.jsonl\"") && card.contains("`one.jsonl`, `two.jsonl`"), "{card}");
    let said = workshop.resume("", "run", &["--set", "data.sets.one.weight=1"]).with(2);
    assert!(said.contains("data.sets.one.weight"), "{said}");
}

#[test]
fn a_finished_run_is_left_alone() {
    let workshop = two_steps();
    let before = tree(&workshop.path("run"));
    let ended = workshop.resume("", "run", &[]);
    assert!(ended.stdout.contains("finished"), "{}", ended.stdout);
    assert!(ended.with(0).contains("nothing to do: 2 steps are made, the recipe asks for 2"));
    assert!(tree(&workshop.path("run")) == before, "not a file is touched");
}

#[test]
fn what_would_change_the_run_is_refused_with_a_diff() {
    let workshop = two_steps();
    let before = tree(&workshop.path("run"));
    let refused = [
        ("optimizer.learning_rate=0.5", "`optimizer.learning_rate`: was 0.01, is 0.5"),
        ("kv_cache.cache_length=20", "`kv_cache.cache_length`: was 16, is 20"),
        ("train.seed=8", "`train.seed`: was 7, is 8"),
        ("lora.dropout=0", "`lora.dropout`: was 0.1, is 0"),
        ("eval.interval=3", "`eval.interval`: was 5, is 3"),
    ];
    for (set, expected) in refused {
        let words = workshop.resume("", "run", &["--set", set]).with(2);
        assert!(words.contains(expected) && words.contains("hint:"), "{words}");
    }
    let words = workshop.resume("", "run", &["--from", "step-000009"]).with(2);
    assert!(words.contains("has no checkpoint `step-000009`"), "{words}");
    let words = workshop.resume("", "run", &["--from", "../run/step-000001"]).with(2);
    assert!(words.contains("has no checkpoint"), "{words}");
    let words = workshop.resume("", ".", &[]).with(2);
    assert!(words.contains("not the directory of a run"), "{words}");
    assert!(tree(&workshop.path("run")) == before, "not a file is touched");
    assert!(!workshop.path(".lock").exists());
}

#[test]
fn changed_data_is_refused() {
    let workshop = two_steps();
    for file in ["train.jsonl", "validation.jsonl"] {
        let path = workshop.path(file);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replacen("[1", "[2", 1) + "\n").unwrap();
        let words = workshop.resume("", "run", &["--from", "step-000001"]).with(3);
        assert!(words.contains(&format!("{file}` has changed since the checkpoint")), "{words}");
        fs::write(&path, text).unwrap();
    }
    // Which samples are trained and which validate is written down, too.
    let split = workshop.path("run/split.json");
    let written = fs::read_to_string(&split).unwrap();
    let held: serde_json::Value = serde_json::from_str(&written).unwrap();
    assert_eq!((&held["train"]["samples"], &held["validation"]["samples"]), (&json!([[0, 4]]), &json!([[0, 2]])));
    fs::write(&split, json!({"train": {"file": "t", "hash": held["train"]["hash"], "samples": [[0, 3]]}}).to_string()).unwrap();
    let words = workshop.resume("", "run", &["--from", "step-000001"]).with(3);
    assert!(words.contains("train.jsonl` are not divided as") && words.contains("hint: begin a new run"), "{words}");
    // A run of an earlier version has none.
    fs::remove_file(&split).unwrap();
    workshop.resume("", "run", &["--from", "step-000001"]).with(0);
}

#[test]
fn another_model_in_the_same_place_is_refused() {
    let workshop = Workshop::new(4);
    copy_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2"), &workshop.path("model"));
    workshop.finetune("", "run", &["train.max_steps=1", "model.path=model"]).with(0);
    let path = workshop.path("model/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let words = workshop.resume("", "run", &["--set", "train.max_steps=2"]).with(3);
    assert!(words.contains("belongs to another model") && words.contains("model` is not as it was"), "{words}");
}

#[test]
fn another_tiling_goes_on_to_rounding() {
    let workshop = workshop();
    let whole = workshop.finished("whole", &["train.max_steps=4"]);
    workshop.copy("whole", "run");
    let tiling = ["--set", "grad.layers_per_cell=3", "--set", "grad.chunks_per_cell=2"];
    workshop.resume("", "run", &[&["--from", "step-000001"], &tiling[..]].concat()).with(0);
    let difference = workshop.difference("whole", "run");
    assert!(difference <= 1e-5, "{difference:e}");
    assert_eq!(steps(&workshop.left("run")), steps(&whole));
}
