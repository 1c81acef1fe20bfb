//! Ranks as processes of this program: where one is killed or stopped, all others end, and say which it was.

mod launch;

use std::env;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvtune::dist::{Launched, ProcessGroup};
use rustix::process::{Pid, Signal, kill_process};
use tch::{Device, Kind, Tensor};

/// Makes of a test a rank.
const ROLE: &str = "KVTUNE_TEST_RANK";
/// Long enough for four processes to begin on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How a rank ends that has lost another.
const LOST: i32 = 7;

/// Not a test by itself: what the processes of the tests below do. They add up until they can't.
#[test]
fn as_a_rank() {
    if env::var_os(ROLE).is_none() {
        return;
    }
    let launch = Launched::from_environment(|name| env::var(name).ok()).unwrap().unwrap();
    let world = ProcessGroup::join(&launch, TIMEOUT).unwrap();
    println!("joined");
    let gradients = Tensor::ones([100_000], (Kind::Float, Device::Cpu));
    loop {
        if let Err(error) = world.sum(&gradients) {
            println!("{error}");
            drop(world);
            std::process::exit(LOST);
        }
    }
}

struct Rank {
    process: Child,
    lines: BufReader<ChildStdout>,
}

impl Rank {
    fn line_with(&mut self, words: &str) -> String {
        let mut line = String::new();
        while !line.contains(words) {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "no line with `{words}`");
        }
        line
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Four ranks at work.
fn ranks() -> Vec<Rank> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["dist::as_a_rank", "--exact", "--nocapture"]).env(ROLE, "yes").env("OMP_NUM_THREADS", "1");
        command.envs([("RANK", rank.to_string()), ("WORLD_SIZE", "4".into()), ("MASTER_PORT", port.to_string())]);
        command.env("MASTER_ADDR", "127.0.0.1").stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap());
        Rank { process, lines }
    };
    let mut ranks: Vec<_> = (0..4).map(start).collect();
    for rank in &mut ranks {
        rank.line_with("joined");
    }
    ranks
}

/// All but `gone` end soon with an error that names it.
fn all_miss(ranks: &mut [Rank], gone: usize) {
    let begin = Instant::now();
    for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != gone) {
        let said = process.line_with(&format!("while rank {rank} waits"));
        assert!(said.starts_with(&format!("rank {gone} on `")) && said.contains("is lost"), "{said}");
        assert_eq!(process.process.wait().unwrap().code(), Some(LOST));
    }
    assert!(begin.elapsed() < TIMEOUT + Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[test]
fn a_rank_that_is_killed_ends_all() {
    let mut ranks = ranks();
    ranks[2].send(Signal::KILL);
    all_miss(&mut ranks, 2);
}

#[test]
fn the_rank_with_the_store_is_killed_and_ends_all() {
    let mut ranks = ranks();
    ranks[0].send(Signal::KILL);
    all_miss(&mut ranks, 0);
}

#[test]
fn a_rank_that_is_stopped_ends_all() {
    let mut ranks = ranks();
    ranks[1].send(Signal::STOP);
    all_miss(&mut ranks, 1);
    // It finds nobody when it goes on.
    ranks[1].send(Signal::CONT);
    assert_eq!(ranks[1].process.wait().unwrap().code(), Some(LOST));
}
