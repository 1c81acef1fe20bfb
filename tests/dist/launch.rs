//! `kvtune launch`: what its ranks say and end with, signals, and that none of them stays.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::binary::kvtune;
use crate::cli::place::Place;

#[test]
fn lines_and_exit_codes_are_the_ranks() {
    let place = Place::new();
    let said = place.run(&["launch", "--nproc", "2", "--", "doctor", "--device", "cpu", "--dist-timeout", "60s"]);
    assert_eq!((said.code, said.err.as_str()), (0, ""), "{}", said.out);
    for words in
        ["[rank 0] | ranks ", "[rank 1] | ranks ", "rank 1 of 2", "| Gloo ", "| NCCL of ranks | missing | no rank has a GPU"]
    {
        assert!(said.out.contains(words), "{words}: {}", said.out);
    }
    assert!(said.out.lines().all(|line| line.starts_with("[rank ")), "{}", said.out);
    let two = "train.gradient_accumulation_steps=2";
    let check = ["check", "--recipe", "recipe.toml", "--device", "cpu", "--set", two, "--set", "data.train=\"nothing.jsonl\""];
    let said = place.run(&[&["launch", "--nproc", "2", "--"][..], &check].concat());
    assert_eq!((said.code, said.out.as_str()), (3, ""), "{}", said.err);
    assert!(said.err.contains("] error: ") && said.err.contains("was the first to fail, with exit code 3"), "{}", said.err);
}

#[test]
fn what_a_rank_has_of_the_machine_is_planned_for() {
    let place = Place::new();
    let of_recipe = ["--recipe", "recipe.toml", "--device", "cpu"];
    let launched = |verb, more: &[&str]| place.run(&[&["launch", "--nproc", "2", "--", verb][..], &of_recipe, more].concat());
    let said = launched("check", &["--set", "train.gradient_accumulation_steps=2"]).done();
    assert!(said.out.contains("| 2, 2 of them on this machine, each of which may take "), "{}", said.out);
    assert!(said.out.contains(" of gradients are added up in ") && !said.out.contains("[rank 1]"), "{}", said.out);
    for verb in ["check", "plan"] {
        let said = launched(verb, &["--set", "train.gradient_accumulation_steps=3"]);
        assert_eq!(said.code, 2, "{}", said.err);
        assert!(said.err.contains("`train.gradient_accumulation_steps` is 3, which 2 ranks can't share evenly"), "{}", said.err);
    }
    let said = launched("plan", &["--tokens", "64", "--set", "train.gradient_accumulation_steps=2"]).done();
    assert!(said.err.contains("for one of 2 ranks, 2 of which share this machine's memory and disk"), "{}", said.err);
}

/// Each rank has a clock of its own; the directory is the first one's.
#[test]
fn ranks_agree_on_the_directory_that_nobody_names() {
    let place = Place::new();
    let two = "train.gradient_accumulation_steps=2";
    place.run(&["launch", "--nproc", "2", "--", "train", "recipe.toml", "--device", "cpu", "--set", two]).done();
    let runs = place.names("runs");
    assert!(matches!(&runs[..], [run] if place.path("runs").join(run).join("final").is_dir()), "{runs:?}");
}

#[test]
fn what_would_fail_on_all_ranks_is_refused_once() {
    let place = Place::new();
    for (command, expected) in [
        (vec!["launch", "--nproc", "2", "--", "launch", "--nproc", "2", "--", "doctor"], "a launched rank can't launch ranks"),
        (vec!["launch", "--nproc", "2", "--", "finetune"], "unrecognized subcommand 'finetune'"),
        (vec!["launch", "--nproc", "2", "--", "serve", "model"], "`serve` runs in one process: several ranks cannot share it"),
        (vec!["launch", "--nproc", "2", "--", "export", "run"], "were not provided: --for <PROGRAM>"),
        (vec!["launch", "--nproc", "2", "--", "-q", "export", "run", "--for", "peft"], "`export` runs in one process"),
        (vec!["launch", "--nproc", "2", "--", "score", "a.jsonl", "--metrics", "f1"], "`score` runs in one process"),
        (vec!["launch", "--nproc", "2"], "<COMMAND>"),
        (vec!["launch", "--nproc", "0", "--", "doctor"], "0 is not in 1..=1024"),
    ] {
        let said = place.run(&command);
        assert_eq!(said.code, 2, "{}", said.err);
        assert!(said.err.contains(expected) && !said.err.contains("[rank"), "{}", said.err);
    }
    let mut inside = place.command(&["launch", "--nproc", "2", "--", "doctor"]);
    let said = place.hear(inside.envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")]));
    assert_eq!(said.code, 2, "{}", said.err);
    assert!(said.err.contains("this process is rank 1 of 2 already, started by torchrun's variables"), "{}", said.err);
    for command in [&["generate", "model", "--prompt", "a", "--device", "cpu"][..], &["export", "run", "--for", "peft"]] {
        let mut second = place.command(command);
        let said =
            place.hear(second.envs([("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "9")]));
        assert_eq!(said.code, 2, "{}", said.err);
        assert!(said.err.contains("several ranks cannot share it; this process is rank 1 of 2, started by srun"), "{}", said.err);
    }
}

/// Only the first rank writes; it stays until the other one has heard, and yet it was the first to fail.
#[test]
fn the_rank_whose_error_it_is_is_named() {
    let place = Place::new();
    let finetune = ["finetune-lora", "--recipe", "recipe.toml", "--out", "run", "--device", "cpu"];
    let launch = ["launch", "--nproc", "2", "--"];
    let mut command = place.command(&[&launch[..], &finetune, &["--set", "train.gradient_accumulation_steps=2"]].concat());
    let said = place.hear(command.env("KVTUNE_FAILPOINT", "checkpoint.verify=eio"));
    assert!(said.err.contains("error: rank 0 was the first to fail, with exit code 1"), "{} {}", said.code, said.err);
    assert!(said.err.contains("[rank 1] error: rank 0 on `") && said.err.contains("has failed: "), "{}", said.err);
    // Nobody waits for a rank that can't be reached.
    let said = place.hear(command.env("GLOO_SOCKET_IFNAME", "none0"));
    assert_eq!(said.code, 2, "{}", said.err);
    assert!(said.err.contains("error: `GLOO_SOCKET_IFNAME=none0` is no network interface of this machine"), "{}", said.err);
}

/// A disk that answers no more holds the first rank, which goes on giving signs of life: nobody waits for it longer than for a dead one.
#[test]
fn a_rank_that_hangs_is_ended_with_all() {
    let place = Place::new();
    let finetune = ["finetune-lora", "--recipe", "recipe.toml", "--out", "run", "--device", "cpu", "--dist-timeout", "5s"];
    let launch = ["launch", "--nproc", "2", "--"];
    let mut command = place.command(&[&launch[..], &finetune, &["--set", "train.gradient_accumulation_steps=2"]].concat());
    let begin = Instant::now();
    let said = place.hear(command.env("KVTUNE_FAILPOINT", "checkpoint.verify=hang"));
    assert_eq!(said.code, 1, "{}", said.err);
    assert!(said.err.contains("[rank 1] error: rank 0 on `") && said.err.contains("it hangs: "), "{}", said.err);
    // Ten time-outs are what one that works is waited for.
    assert!(begin.elapsed() < Duration::from_secs(100), "{:?}", begin.elapsed());
}

/// A launcher whose rank 1 is stopped, so that rank 0 waits for it.
fn waiting() -> (Child, Vec<i32>) {
    let mut command = kvtune();
    command.args(["launch", "--nproc", "2", "--", "doctor", "--device", "cpu", "--dist-timeout", "5m"]);
    let launcher = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = launcher.id();
    let ranks = until(|| {
        let ranks = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let ranks: Vec<i32> = ranks.split_whitespace().map(|rank| rank.parse().unwrap()).collect();
        (ranks.len() == 2).then_some(ranks)
    });
    // It has threads as soon as it has begun its work.
    until(|| fs::read_dir(format!("/proc/{}/task", ranks[1])).is_ok_and(|threads| threads.count() > 1).then_some(()));
    send(ranks[1], Signal::STOP);
    (launcher, ranks)
}

fn send(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

fn until<T>(look: impl Fn() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "it does not come");
        sleep(Duration::from_millis(2));
    }
}

/// Whether a process has ended; nobody may have asked for its exit code yet.
fn is_gone(pid: i32) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.trim().is_empty() || rest.trim().starts_with('Z'))
}

#[test]
fn no_rank_outlives_its_launcher() {
    let (mut launcher, ranks) = waiting();
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    until(|| ranks.iter().all(|rank| is_gone(*rank)).then_some(()));
}

#[test]
fn signals_are_passed_on() {
    let (launcher, ranks) = waiting();
    send(launcher.id() as i32, Signal::TERM);
    until(|| is_gone(ranks[0]).then_some(()));
    send(ranks[1], Signal::CONT);
    let said = launcher.wait_with_output().unwrap();
    assert_eq!(said.status.code(), Some(143));
    // Who asked for it knows why.
    assert_eq!(String::from_utf8(said.stderr).unwrap(), "");
    assert!(ranks.into_iter().all(is_gone));
}
