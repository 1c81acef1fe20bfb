//! Runs of several ranks, which are real processes on the loopback interface: they end as one rank alone, however many there are.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Child;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::workshop::{
    Ended, Left, Workshop, ended, finetune_arguments, finetune_full_arguments, leftovers, send, wait_for_stop,
};

/// What all runs here have: three steps of four micro-batches, and no save but the last.
const SET: &[&str] = &[
    "train.micro_batch_size=1",
    "train.gradient_accumulation_steps=4",
    "train.max_steps=3",
    "checkpoint.save_interval=100",
    "checkpoint.intermediate_save_interval=100",
    "data.order=shuffled",
];

/// Starts as many ranks with the same arguments and more of each; `failpoints` are by rank.
fn start(
    workshop: &Workshop,
    size: usize,
    arguments: &[&str],
    more: &dyn Fn(usize) -> (Vec<&'static str>, &'static str),
) -> Vec<Child> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let rank = |rank: usize| {
        let (set, failpoint) = more(rank);
        let mut command = workshop.command(failpoint, &[arguments, &set].concat());
        let place = [("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string()), ("WORLD_SIZE", size.to_string())];
        command.envs(place).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).spawn().unwrap()
    };
    (0..size).map(rank).collect()
}

fn plain(_: usize) -> (Vec<&'static str>, &'static str) {
    (Vec::new(), "")
}

/// As many ranks to their end.
fn ranks(workshop: &Workshop, size: usize, arguments: &[&str]) -> Vec<Ended> {
    start(workshop, size, arguments, &plain).into_iter().map(ended).collect()
}

/// A run of so many ranks, all of which end well; those that do not write say nothing.
fn finished(workshop: &Workshop, size: usize, run: &str, set: &[&str]) -> Left {
    for (rank, ended) in ranks(workshop, size, &finetune_arguments(run, set)).into_iter().enumerate() {
        let words = ended.with(0);
        assert_eq!(words.is_empty(), rank > 0, "rank {rank} says: {words}");
    }
    workshop.left(run)
}

/// What of a step does not depend on rounding.
fn exact(line: &Value) -> Value {
    json!(["step", "epoch", "learning_rate", "tokens", "targets", "total_tokens", "replay_log"].map(|key| line.get(key)))
}

/// The largest relative difference of a figure over all steps.
fn apart(whole: &Left, found: &Left, key: &str) -> f64 {
    let lines = whole.metrics.iter().zip(&found.metrics);
    let values = lines.filter_map(|(a, b)| Some((a.get(key)?.as_f64()?, b[key].as_f64().unwrap())));
    values.map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max)
}

/// Samples with a class, of 5 to 30 tokens; `odd` is a token of the third alone.
fn classified(workshop: &Workshop, odd: u64) {
    let line = |sample: u64| {
        let ids: Vec<u64> = (0..5 + sample * 7 % 26).map(|at| 1 + (sample * 31 + at * 17) % 200).collect();
        let ids = if sample == 2 { [&ids[..], &[odd]].concat() } else { ids };
        json!({ "input_ids": ids, "label": sample % 3 }).to_string() + "\n"
    };
    fs::write(workshop.path("train.jsonl"), (0..13).map(line).collect::<String>()).unwrap();
    fs::write(workshop.path("validation.jsonl"), (20..25).map(line).collect::<String>()).unwrap();
}

const CLASSES: [&str; 2] = ["head.kind=seq_classification", "head.num_labels=3"];

/// Dropout and sizes of chunks are drawn, samples are ragged, the last step of an epoch has fewer micro-batches than others, and a run that
/// began with four ranks goes on with two, one and three: the samples are the same in the same order, and what differs is the order of sums.
#[test]
fn however_many_they_are_the_run_is_that_of_one() {
    let workshop = Workshop::new(13);
    let more = [
        "train.gradient_accumulation_steps=12",
        "train.max_steps=7",
        "optimizer.name=sgd",
        "kv_cache.randomize_chunk_sizes=true",
    ];
    let set = [SET, &more].concat();
    let whole = workshop.finished("whole", &set);
    let assert_same = |found: &Left, run: &str| {
        assert_eq!(found.metrics.iter().map(exact).collect::<Vec<_>>(), whole.metrics.iter().map(exact).collect::<Vec<_>>());
        for key in ["loss", "grad_norm", "eval_loss"] {
            let apart = apart(&whole, found, key);
            assert!(apart <= 1e-6, "{run}, {key}: {apart:e}");
        }
        let difference = workshop.difference("whole", run);
        assert!(difference <= 1e-6, "{run}: {difference:e}");
        // Before the first step the weights are the same, and the scores to the last bit.
        assert_eq!(whole.metrics[0]["eval_loss"], found.metrics[0]["eval_loss"]);
    };

    let found = finished(&workshop, 2, "two", &set);
    assert_same(&found, "two");
    assert!(found.metrics[1..].iter().all(|line| line["idle"].as_f64().is_some_and(|idle| (0.0..1.0).contains(&idle))));
    assert_eq!(whole.files.keys().collect::<Vec<_>>(), found.files.keys().collect::<Vec<_>>());

    let finetune = finetune_arguments("run", &set);
    for (size, arguments) in [(4, &finetune[..]), (2, &["resume", "run"]), (1, &["resume", "run"])] {
        // The first rank stands still before its second step, while another hears the signal.
        let stopped = |rank: usize| (Vec::new(), if rank == 0 { "run.step=stop:2" } else { "" });
        let children = start(&workshop, size, arguments, &stopped);
        wait_for_stop(&children[0]);
        send(&children[size - 1], Signal::TERM);
        send(&children[0], Signal::CONT);
        for ended in children.into_iter().map(ended) {
            ended.with(143);
        }
    }
    assert!(ranks(&workshop, 3, &["resume", "run"]).remove(0).with(0).contains("resuming after step"));
    assert_same(&workshop.left("run"), "run");
}

/// As whoever has one machine starts them.
#[test]
fn launched_ranks_train_as_one() {
    let workshop = Workshop::new(13);
    // AdamW makes a whole step of what rounding leaves of a gradient near zero.
    let set = [SET, &["optimizer.name=sgd"]].concat();
    let whole = workshop.finished("whole", &set);
    for size in ["1", "2", "4"] {
        let run = format!("launched-{size}");
        let launch = ["launch", "--nproc", size, "--"];
        workshop.kvtune("", &[&launch[..], &finetune_arguments(&run, &set)].concat()).with(0);
        let found = workshop.left(&run);
        assert_eq!(found.metrics.iter().map(exact).collect::<Vec<_>>(), whole.metrics.iter().map(exact).collect::<Vec<_>>());
        let difference = workshop.difference("whole", &run);
        assert!(if size == "1" { found.files == whole.files } else { difference <= 1e-6 }, "{size} ranks: {difference:e}");
    }
}

/// Each rank keeps a part of the optimiser's state, of which nothing is seen on disk.
#[test]
fn all_weights_go_on_with_more_or_fewer_ranks() {
    let workshop = Workshop::new(13).without_adapter();
    let set =
        ["train.gradient_accumulation_steps=6", "checkpoint.save_interval=1", "optimizer.name=sgd", "optimizer.momentum=0.9"];
    let set = [SET, &set].concat();
    workshop.finetune_full("whole", &set).with(0);
    let whole = workshop.left("whole");
    let finetune = finetune_full_arguments("run", &set);
    let resume = |step| ["resume", "run", "--from", step];
    let layout = |left: &Left| {
        let length = |(name, bytes): (&String, &Vec<u8>)| (name.clone(), name.ends_with(".safetensors").then_some(bytes.len()));
        left.files.iter().map(length).collect::<Vec<_>>()
    };
    for (size, arguments) in [(2, &finetune[..]), (3, &resume("step-000001")), (1, &resume("step-000002"))] {
        for ended in ranks(&workshop, size, arguments) {
            ended.with(0);
        }
        let found = workshop.left("run");
        assert_eq!(found.metrics.iter().map(exact).collect::<Vec<_>>(), whole.metrics.iter().map(exact).collect::<Vec<_>>());
        assert_eq!(layout(&found), layout(&whole));
        let difference = workshop.difference("whole", "run");
        assert!(difference <= 1e-6, "{size}: {difference:e}");
    }
}

#[test]
fn a_rank_that_dies_before_its_part_of_the_state_is_saved_takes_no_checkpoint_along() {
    let workshop = Workshop::new(13).without_adapter();
    let set = [SET, &["checkpoint.save_interval=1"]].concat();
    // The first rank stands still in its second save, before it asks the other for its part.
    let stopped = |rank: usize| (Vec::new(), if rank == 0 { "checkpoint.make_dir=stop:2" } else { "" });
    let mut children = start(&workshop, 2, &finetune_full_arguments("run", &set), &stopped);
    wait_for_stop(&children[0]);
    children[1].kill().unwrap();
    children[1].wait().unwrap();
    send(&children[0], Signal::CONT);
    let words = ended(children.swap_remove(0)).with(1);
    assert!(words.contains("the optimiser's state can't be gathered: rank 1 on "), "{words}");
    assert_eq!((workshop.checkpoints("run"), leftovers(&workshop.path("run"))), (vec!["step-000001".to_owned()], Vec::new()));
}

/// One token of one sample is no number, which one rank alone meets.
#[test]
fn what_is_not_finite_on_one_is_left_out_by_all() {
    const ODD: u64 = 250;
    let workshop = Workshop::new(1);
    classified(&workshop, ODD);
    super::workshop::copy_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2"), &workshop.path("model"));
    let path = workshop.path("model/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let embedding = &header["model.embed_tokens.weight"];
    let (begin, width) = (embedding["data_offsets"][0].as_u64().unwrap(), embedding["shape"][1].as_u64().unwrap());
    let place = 8 + length + (begin + ODD * width * 4) as usize;
    bytes[place..place + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();

    let set = [SET, &CLASSES, &["model.path=model", "train.max_steps=4"]].concat();
    let said =
        ranks(&workshop, 2, &finetune_arguments("stopped", &set)).into_iter().map(|ended| ended.with(5)).collect::<Vec<_>>();
    assert!(said.iter().all(|words| words.contains("is not finite, in sample 2 (counted from 0)")), "{said:?}");
    let set = [&set[..], &["train.on_non_finite=skip"]].concat();
    let whole = workshop.finished("whole", &set);
    let found = finished(&workshop, 2, "run", &set);
    let skipped = |left: &Left| left.metrics.iter().filter_map(|line| line.get("skipped").cloned()).collect::<Vec<_>>();
    assert_eq!((skipped(&found), skipped(&whole).len()), (skipped(&whole), 1));
    assert!(workshop.difference("whole", "run") <= 1e-5);
}

#[test]
fn ranks_that_do_not_fit_together_are_refused() {
    let workshop = Workshop::new(13);
    let arguments = finetune_arguments("run", SET);
    let other = |rank| (if rank == 1 { vec!["--set", "optimizer.learning_rate=1e-3"] } else { Vec::new() }, "");
    for ended in start(&workshop, 2, &arguments, &other).into_iter().map(ended) {
        let words = ended.with(3);
        assert!(words.contains("rank 1 differs from rank 0"), "{words}");
        assert!(words.contains("`optimizer.learning_rate`: 0.01 on rank 0, 0.001 on rank 1"), "{words}");
    }
    let uneven = [&arguments[..], &["--set", "train.gradient_accumulation_steps=3"]].concat();
    for ended in ranks(&workshop, 2, &uneven) {
        let words = ended.with(2);
        assert!(words.contains("`train.gradient_accumulation_steps` is 3, which 2 ranks can't share evenly"), "{words}");
    }
    let other = |rank| (if rank == 1 { vec!["--backend", "gloo"] } else { Vec::new() }, "");
    for ended in start(&workshop, 2, &arguments, &other).into_iter().map(ended) {
        assert!(ended.with(2).contains("rank 1 has `--backend gloo`, and rank 0 `auto`"));
    }
    for ended in ranks(&workshop, 2, &[&arguments[..], &["--backend", "nccl"]].concat()) {
        assert!(ended.with(2).contains("`--backend nccl` can't be had: rank 0 computes on the CPU"));
    }
    assert!(!workshop.path("run").exists());
    // A save that was asked of one is made by the first.
    let arguments = finetune_arguments("run", SET);
    let stopped = |rank: usize| (Vec::new(), if rank == 0 { "run.step=stop:2" } else { "" });
    let children = start(&workshop, 2, &arguments, &stopped);
    wait_for_stop(&children[0]);
    send(&children[1], Signal::USR1);
    send(&children[0], Signal::CONT);
    for ended in children.into_iter().map(ended) {
        ended.with(0);
    }
    assert_eq!(workshop.checkpoints("run"), ["best", "final", "step-000002", "step-000003"]);
    let words = ranks(&workshop, 3, &["resume", "run"]).remove(2).with(2);
    assert!(words.contains("`train.gradient_accumulation_steps` is 4, which 3 ranks can't share evenly"), "{words}");
}

/// Rank 0 is killed within a save, for which the other waits: nobody stays, no checkpoint is cut, and two go on as if nothing had happened, to
/// the bit.
#[test]
fn a_rank_that_is_killed_ends_all_and_costs_what_was_not_saved() {
    let workshop = Workshop::new(8);
    let set = [SET, &["checkpoint.intermediate_save_interval=1", "checkpoint.intermediate_save_keep=9"]].concat();
    let whole = finished(&workshop, 2, "whole", &set);
    let arguments = [finetune_arguments("run", &set), vec!["--dist-timeout", "20s"]].concat();
    let killed = |rank: usize| (Vec::new(), if rank == 0 { "checkpoint.verify=kill:2" } else { "" });
    let mut ranks_ended: Vec<Ended> = start(&workshop, 2, &arguments, &killed).into_iter().map(ended).collect();
    let words = ranks_ended.remove(1).with(1);
    assert!(words.contains("error: rank 0 on `") && words.contains("is lost"), "{words}");
    assert_eq!(ranks_ended.remove(0).code, Err(9));
    for name in workshop.checkpoints("run") {
        super::workshop::assert_valid(&workshop.path("run").join(name));
    }
    assert!(ranks(&workshop, 2, &["resume", "run"]).remove(0).with(0).contains("resuming after step"));
    let (found, steps) = (workshop.left("run"), |left: &Left| left.metrics.iter().map(exact).collect::<Vec<_>>());
    assert_eq!(steps(&found), steps(&whole));
    assert!(found.files == whole.files);
}
