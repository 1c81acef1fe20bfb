//! The ranks that this process works with, where it is one of several: whether they meet, and how fast they add up.

use std::time::Instant;

use tch::{Cuda, Device};

use super::check::DoctorCheck;
use crate::cli::device::Wanted;
use crate::cli::world::{Joining, launched, time_of_sums};
use crate::dist::ProcessGroup;
use crate::units::{Bytes, Fault, Seconds, abridged};

/// Bytes that are added up: as many as the gradients of a large adapter.
const SUMMED: u64 = 100_000_000;

pub(super) fn examine(joining: Joining, wanted: Wanted) -> Vec<DoctorCheck> {
    match meet(joining, wanted) {
        Ok(checks) => checks,
        Err(error) => {
            let hint = error.hint().map_or_else(String::new, |hint| format!("; {hint}"));
            vec![DoctorCheck::failed(
                "ranks",
                format!("{error}{hint}"),
                "start the ranks by `torchrun --no-python`, `srun` or `kvtune launch`",
            )]
        }
    }
}

fn meet(joining: Joining, wanted: Wanted) -> Result<Vec<DoctorCheck>, Fault> {
    let Some(launch) = launched()?.filter(|launch| launch.size > 1) else {
        return Ok(Vec::new());
    };
    let begin = Instant::now();
    let mut world = ProcessGroup::join(&launch, joining.dist_timeout)?;
    let met = Seconds(begin.elapsed().as_secs_f64());
    let by_gloo = time_of_sums(&world, SUMMED, Device::Cpu)?;
    let has_gpu = wanted != Wanted::Cpu && Cuda::is_available();
    let gpu = if has_gpu { Device::Cuda(wanted.gpu(launch.local_rank)) } else { Device::Cpu };
    let chosen = world.choose_backend(joining.backend, gpu)?;
    let by_nccl = if world.has_nccl() { Some(time_of_sums(&world, SUMMED, gpu)?) } else { None };
    world.leave(None)?;
    let hosts: Vec<_> = world.peers().iter().take(8).map(|peer| format!("{} on `{}`", peer.rank, abridged(&peer.host))).collect();
    let more = if launch.size > hosts.len() { ", …" } else { "" };
    let place = format!("rank {} of {} by {}: {}{more}", launch.rank, launch.size, launch.by, hosts.join(", "));
    let summed =
        |seconds: Seconds| format!("{} added up in {seconds}, {:.2} GB/s", Bytes(SUMMED), SUMMED as f64 / seconds.0 / 1e9);
    let nccl = match by_nccl {
        Some(seconds) => DoctorCheck::ok("NCCL of ranks", summed(seconds)),
        None => DoctorCheck::missing("NCCL of ranks", chosen.unwrap_or_else(|| "no rank has a GPU".to_owned())),
    };
    Ok(vec![
        DoctorCheck::ok("ranks", place),
        DoctorCheck::ok("TCPStore", format!("{}:{}, all met in {met}", abridged(&launch.address), launch.port)),
        DoctorCheck::ok("Gloo", summed(by_gloo)),
        nccl,
    ])
}
