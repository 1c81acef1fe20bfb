//! Ranks that torchrun starts, and starts again: they end as those of `kvtune launch`. Skipped where no torchrun is on the `PATH`.

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::workshop::{Left, Workshop, ended, finetune_arguments};

/// Every step is saved.
const SET: &[&str] = &["train.micro_batch_size=1", "train.gradient_accumulation_steps=4", "train.max_steps=4", "eval.interval=3"];

/// Rank 1 kills itself before the third step of a process.
const KILLED: &str = r#"if [ "$RANK" = 1 ]; then export KVTUNE_FAILPOINT=run.step=kill:3; fi; exec "$0" "$@""#;

fn torchrun() -> Option<PathBuf> {
    let found = env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join("torchrun")).find(|path| path.is_file());
    if found.is_none() {
        // Past the test program, which would keep it to itself.
        let _ = writeln!(std::io::stderr(), "skipped: there is no torchrun on the PATH");
    }
    found
}

/// `torchrun --no-python` with the arguments of the binary; `inside` stands before it.
fn started(workshop: &Workshop, torchrun: &Path, options: &[&str], inside: &[&str], arguments: &[&str]) -> Command {
    let binary = workshop.command("", arguments);
    let mut command = Command::new(torchrun);
    command.args(options).arg("--no-python").args(inside).arg(binary.get_program()).args(binary.get_args());
    command.envs(binary.get_envs().filter_map(|(name, value)| Some((name, value?))));
    // torchrun has a libtorch of its own.
    command.env_remove("LD_LIBRARY_PATH").current_dir(workshop.path("")).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Without how long ranks have waited.
fn repeated(mut left: Left) -> Left {
    left.metrics.iter_mut().filter_map(Value::as_object_mut).for_each(|line| drop(line.remove("idle")));
    left
}

#[test]
fn torchrun_starts_ranks_as_launch_does() {
    let Some(torchrun) = torchrun() else { return };
    let workshop = Workshop::new(13);
    let arguments = |run| finetune_arguments(run, SET);
    for (ranks, launched, by_torch) in [("1", "launch-1", "torchrun-1"), ("2", "launch-2", "torchrun-2")] {
        let launch = ["launch", "--nproc", ranks, "--"];
        workshop.kvtune("", &[&launch[..], &arguments(launched)].concat()).with(0);
        let options = ["--standalone", "--nproc-per-node", ranks];
        ended(started(&workshop, &torchrun, &options, &[], &arguments(by_torch)).spawn().unwrap()).with(0);
        assert!(repeated(workshop.left(by_torch)) == repeated(workshop.left(launched)), "{ranks} ranks");
    }
    // Rank 1 is killed, torchrun starts both anew, and they go on behind what was saved.
    let options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"];
    let more = ["--resume-if-possible", "--dist-timeout", "30s"];
    let arguments = [&arguments("restarted")[..], &more].concat();
    let words = ended(started(&workshop, &torchrun, &options, &["sh", "-c", KILLED], &arguments).spawn().unwrap()).with(0);
    assert!(words.contains("resuming after step 2"), "{words}");
    assert!(repeated(workshop.left("restarted")) == repeated(workshop.left("launch-2")));
}
