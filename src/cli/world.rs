//! `--dist-timeout` and `--backend`: the ranks that a verb works with.

use std::time::{Duration, Instant};

use clap::Args;
use tch::{Device, Kind, Tensor};

use crate::dist::{Launched, ProcessGroup, RankBackend};
use crate::units::{Fault, Seconds};

/// How long the other ranks are waited for, as arguments have it.
fn time(text: &str) -> Result<Duration, &'static str> {
    let expected = "expected seconds, or `90s`, `10m`, `2h`, from 1 s to 7 days";
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let factor = match &text[end..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err(expected),
    };
    let seconds = text[..end].parse().ok().and_then(|count: u64| count.checked_mul(factor));
    seconds.filter(|seconds| (1..=7 * 24 * 3600).contains(seconds)).map(Duration::from_secs).ok_or(expected)
}

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Joining {
    /// Time-out of several ranks: for all of them to start, and for one that hangs or sends no heartbeat.
    #[arg(long, default_value = "10m", value_name = "TIME", value_parser = time)]
    pub(super) dist_timeout: Duration,
    /// Backend of collectives between ranks: `nccl` (GPU to GPU), `gloo` (through the host), or `auto`: `nccl` where it is available.
    #[arg(long, default_value = "auto", value_name = "BACKEND", value_parser = RankBackend::parse)]
    pub(super) backend: RankBackend,
}

/// Which rank this process is, if it is one of several.
pub(super) fn launched() -> Result<Option<Launched>, Fault> {
    Launched::from_environment(|name| std::env::var(name).ok())
}

/// Refuses to do once more what one process does for itself. Rank 0 may: a batch script's own process looks like that.
pub(super) fn refuse_further_ranks(verb: &str) -> Result<(), Fault> {
    launched()?.filter(|launch| launch.rank > 0).map_or(Ok(()), |Launched { rank, size, by, .. }| {
        Err(Fault::usage(
            format!("{}; this process is rank {rank} of {size}, started by {by}", alone(verb)),
            format!("start `kvtune {verb}` once, without what starts several processes"),
        ))
    })
}

/// Why a verb is not for ranks.
pub(super) fn alone(verb: &str) -> String {
    format!("`{verb}` runs in one process: several ranks cannot share it")
}

/// How long ranks take to add up so many bytes of gradients on a device: the middle one of several times.
pub(super) fn time_of_sums(world: &ProcessGroup, bytes: u64, device: Device) -> Result<Seconds, Fault> {
    const TIMES: usize = 5;
    let gradients = Tensor::zeros([bytes.div_ceil(4) as i64], (Kind::Float, device));
    let mut times = Vec::new();
    // The first one finds memory that was never touched.
    for _ in 0..=TIMES {
        world.barrier()?;
        let begin = Instant::now();
        world.sum(&gradients)?;
        times.push(begin.elapsed().as_secs_f64());
    }
    times[1..].sort_by(f64::total_cmp);
    Ok(Seconds(times[1..][TIMES / 2]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_unit() {
        for (text, seconds) in [("1", 1), ("90s", 90), ("10m", 600), ("2h", 7200), ("604800", 604_800)] {
            assert_eq!(time(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "0", "m", "-1", "1d", "1.5m", "10 m", "169h", "99999999999999999999h", "1_0"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}
