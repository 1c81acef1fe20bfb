//! By what tensors go from rank to rank: NCCL from GPU to GPU, or Gloo by way of the host. What is small goes by Gloo in any case.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tch::Device;

use super::ProcessGroup;
use super::process_group::{Joined, LOOK};
use crate::native::cuda::{Nccl, NcclGroup, NcclId, place_of_gpu};
use crate::units::{Fault, Seconds};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RankBackend {
    #[default]
    Auto,
    Gloo,
    Nccl,
}

impl RankBackend {
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        serde_json::from_value(text.into()).map_err(|_| "expected `auto`, `gloo` or `nccl`")
    }
}

impl fmt::Display for RankBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Means {
    wanted: RankBackend,
    /// What tells its GPU from others of its machine; none on a CPU.
    gpu: Option<String>,
    /// The version of its library, or why it has none.
    nccl: Result<String, String>,
}

impl ProcessGroup {
    /// Decides by what tensors on `device` go from now on, the same on all ranks, which all call it. Returns what is to be said of it: nothing
    /// where there is no GPU, and nobody asks for one.
    pub fn choose_backend(&mut self, wanted: RankBackend, device: Device) -> Result<Option<String>, Fault> {
        self.choose_of(None, wanted, device)
    }

    /// [`Self::choose_backend`] with the library of this path, where there is one; a test's takes the host's memory for a GPU's.
    pub(super) fn choose_of(
        &mut self,
        library: Option<&Path>,
        wanted: RankBackend,
        device: Device,
    ) -> Result<Option<String>, Fault> {
        if self.size() == 1 {
            return Ok(None);
        }
        let gpu = match device {
            Device::Cuda(index) => Some(place_of_gpu(index).unwrap_or_else(|why| format!("{device:?} ({why})"))),
            _ => library.map(|_| format!("of rank {}", self.rank())),
        };
        let is_asked = wanted != RankBackend::Gloo && gpu.is_some();
        let nccl = if is_asked { Nccl::open(library) } else { Err("it was not looked for".to_owned()) };
        let own = Means { wanted, gpu, nccl: nccl.as_ref().map(|nccl| nccl.version.clone()).map_err(Clone::clone) };
        let all = self.agree::<Means>("choosing a backend", Ok(own))?;
        if let Some(rank) = all.iter().position(|other| other.wanted != all[0].wanted) {
            let message = format!("rank {rank} has `--backend {}`, and rank 0 `{}`", all[rank].wanted, all[0].wanted);
            return Err(Fault::usage(message, "give all ranks the same"));
        }
        if wanted == RankBackend::Gloo || (wanted == RankBackend::Auto && all.iter().all(|rank| rank.gpu.is_none())) {
            return Ok(None);
        }
        let hosts: Vec<&str> = self.peers().iter().map(|peer| &peer.host[..]).collect();
        let started = match (hindrance(&all, &hosts), nccl) {
            (None, Ok(nccl)) => self.start(&nccl, device)?.map(|()| nccl.version.clone()),
            (hindrance, _) => Err(hindrance.unwrap_or_default()),
        };
        match started {
            Ok(version) => Ok(Some(format!("ranks add up from GPU to GPU, by NCCL {version}"))),
            Err(reason) if wanted == RankBackend::Auto => {
                Ok(Some(format!("ranks add up by way of the host, as NCCL can't be had: {reason}")))
            }
            Err(reason) => {
                let hint = "give each rank a GPU of its own, and all of them the same `libnccl.so.2`, which comes with libtorch's CUDA wheels \
                            (`KVTUNE_NCCL` names another); `--backend auto` does without";
                Err(Fault::usage(format!("`--backend nccl` can't be had: {reason}"), hint))
            }
        }
    }

    /// Connects the GPUs, so that tensors of theirs go by NCCL from now on; the inner error says on all ranks why one has failed.
    fn start(&mut self, nccl: &Arc<Nccl>, device: Device) -> Result<Result<(), String>, Fault> {
        let Some(joined) = &self.joined else { return Ok(Ok(())) };
        let made = self.is_first().then(|| nccl.new_id());
        let bytes: Vec<u8> = made.iter().flatten().flat_map(|id| id.0).collect();
        let group = match (self.of_first("about to start NCCL", || Ok(bytes))?.try_into(), made) {
            (Ok(id), _) => joined.connect(nccl.clone(), NcclId(id), device)?,
            (Err(_), Some(Err(why))) => Err(why),
            (Err(_), _) => Err("rank 0 has no id".to_owned()),
        };
        let own = group.as_ref().err().cloned();
        let all = self.agree::<Option<String>>("starting NCCL", Ok(own))?;
        let failed = all.into_iter().enumerate().find_map(|(rank, why)| Some(format!("rank {rank}: {}", why?)));
        if let (Some(_), Ok(group)) = (&failed, &group) {
            group.close(false);
        }
        if let (None, Some(joined)) = (&failed, &mut self.joined) {
            joined.nccl = group.ok();
        }
        Ok(failed.map_or(Ok(()), Err))
    }
}

impl Joined {
    /// Connects this rank's GPU with those of all, on a thread of its own, which is left alone where a rank is gone meanwhile.
    fn connect(&self, nccl: Arc<Nccl>, id: NcclId, device: Device) -> Result<Result<NcclGroup, String>, Fault> {
        let (done, connected) = mpsc::channel();
        let (rank, size) = (self.monitor.rank, self.monitor.peers.len());
        let connect = move || drop(done.send(nccl.join(id, rank, size, device)));
        if let Err(error) = thread::Builder::new().name("start of NCCL".to_owned()).spawn(connect) {
            return Ok(Err(error.to_string()));
        }
        let mut waited = Duration::ZERO;
        loop {
            match connected.recv_timeout(LOOK) {
                Ok(made) => return Ok(made),
                Err(RecvTimeoutError::Disconnected) => return Ok(Err("its thread has ended".to_owned())),
                Err(RecvTimeoutError::Timeout) => waited += LOOK,
            }
            if let Some(error) = self.monitor.who_is_gone("starting NCCL", self.monitor.timeout, Duration::ZERO) {
                return Err(error);
            }
            if waited >= self.monitor.timeout {
                return Ok(Err(format!("it has not started for {}", Seconds(waited.as_secs_f64()))));
            }
        }
    }
}

/// Why NCCL can't serve ranks with these means, on these hosts, if it can't.
fn hindrance(all: &[Means], hosts: &[&str]) -> Option<String> {
    let mut taken = BTreeMap::new();
    for (rank, means) in all.iter().enumerate() {
        let Some(gpu) = &means.gpu else { return Some(format!("rank {rank} computes on the CPU")) };
        if let Some(other) = taken.insert((hosts[rank], gpu), rank) {
            return Some(format!("ranks {other} and {rank} have the same GPU, {gpu} on `{}`", hosts[rank]));
        }
    }
    for (rank, means) in all.iter().enumerate() {
        match (&means.nccl, &all[0].nccl) {
            (Err(why), _) => return Some(format!("rank {rank}: {why}")),
            (Ok(own), Ok(first)) if own != first => return Some(format!("rank {rank} has NCCL {own}, and rank 0 {first}")),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use tch::{Kind, Tensor};

    use super::super::tests::{as_ranks_within, free_port};
    use super::*;

    /// What stands for NCCL, and fails as it is told to.
    fn library(fails: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let (source, made) =
            (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/nccl.c"), dir.path().join("libnccl.so.2"));
        let status = Command::new("cc").args(["-shared", "-fPIC", "-pthread", "-o"]).args([&made, &source]).status().unwrap();
        assert!(status.success());
        std::fs::write(dir.path().join("libnccl.so.2.fail"), fails).unwrap();
        (dir, made)
    }

    /// What it was called with, whoever came first.
    fn calls(library: &Path) -> Vec<String> {
        let mut lines: Vec<String> =
            std::fs::read_to_string(library.with_extension("2.log")).unwrap().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }

    fn as_two<T: Send>(work: impl Fn(&mut ProcessGroup) -> T + Sync) -> Vec<T> {
        as_ranks_within(Duration::from_secs(3), 2, free_port(), work)
    }

    #[test]
    fn tensors_go_by_nccl_and_what_is_small_by_gloo() {
        let (_dir, library) = library("");
        as_two(|world| {
            let said = world.choose_of(Some(&library), RankBackend::Auto, Device::Cpu).unwrap();
            assert_eq!(said.as_deref(), Some("ranks add up from GPU to GPU, by NCCL 2.28.9"));
            let rank = world.rank() as f64;
            let flat = Tensor::full([1000], rank + 0.5, (Kind::Float, Device::Cpu));
            world.sum(&flat).unwrap();
            // What does not lie in one piece, beside what must stay.
            let wide = Tensor::full([4, 6], rank + 1.0, (Kind::Double, Device::Cpu));
            world.sum(&wide.transpose(0, 1).narrow(0, 1, 3)).unwrap();
            let updated = Tensor::full([3], rank + 7.0, (Kind::BFloat16, Device::Cpu));
            world.overwrite(&updated, 1).unwrap();
            let found =
                (flat.double_value(&[999]), wide.double_value(&[2, 1]), wide.double_value(&[2, 0]), updated.double_value(&[2]));
            assert_eq!(found, (2.0, 3.0, rank + 1.0, 8.0));
            assert_eq!(world.gather(b"small").unwrap().len(), 2);
            world.leave(None).unwrap();
        });
        let of_rank = |rank| {
            [
                format!("ncclAllReduce {rank}: 1000 of type 7, operation 0, without a stream"),
                format!("ncclAllReduce {rank}: 12 of type 8, operation 0, without a stream"),
                format!("ncclBroadcast {rank}: 6 of type 1, from 1, without a stream"),
                format!("ncclCommDestroy {rank}"),
                format!("ncclCommInitRank {rank} of 2"),
            ]
        };
        let mut expected = [of_rank(0), of_rank(1)].concat();
        expected.sort();
        assert_eq!(calls(&library), expected);
    }

    #[test]
    fn what_nccl_refuses_is_said_with_its_words() {
        for (fails, words) in [
            ("ncclGetUniqueId 0", "rank 0: `ncclGetUniqueId` says unhandled system error (error 2)"),
            ("ncclCommInitRank 1", "rank 1: `ncclCommInitRank` says unhandled system error (error 2)"),
        ] {
            let (_dir, library) = library(fails);
            for error in as_two(|world| {
                let note = world.choose_of(Some(&library), RankBackend::Auto, Device::Cpu).unwrap();
                assert_eq!(note, Some(format!("ranks add up by way of the host, as NCCL can't be had: {words}")));
                let one = Tensor::from_slice(&[1.0]);
                world.sum(&one).unwrap();
                assert!((one.double_value(&[0]) - 2.0).abs() < 1e-9);
                let error = world.choose_of(Some(&library), RankBackend::Nccl, Device::Cpu).unwrap_err().to_string();
                world.leave(None).unwrap();
                error
            }) {
                assert_eq!(error, format!("`--backend nccl` can't be had: {words}"));
            }
            let made = std::fs::read_to_string(library.with_extension("2.log")).unwrap_or_default();
            assert_eq!(made.matches("ncclCommAbort 0").count(), if fails.ends_with('1') { 2 } else { 0 }, "{made}");
        }
    }

    #[test]
    fn a_call_that_fails_ends_all_and_leaves_no_gpu_waiting() {
        for (fails, words) in [
            ("ncclAllReduce 1", "`ncclAllReduce` says unhandled system error (error 2): socket closed by peer"),
            ("ncclCommGetAsyncError 1", "`a call under way` says remote process exited (error 6): socket closed by peer"),
        ] {
            let (_dir, library) = library(fails);
            let said = as_two(|world| {
                world.choose_of(Some(&library), RankBackend::Nccl, Device::Cpu).unwrap();
                let first = world.sum(&Tensor::from_slice(&[1.0]));
                first.and_then(|()| world.barrier()).unwrap_err().to_string()
            });
            assert!(said[1].contains(words), "{said:?}");
            assert!(said[0].starts_with("rank 1 on ") && said[0].contains(words), "{said:?}");
            assert!(calls(&library).ends_with(&["ncclCommInitRank 0 of 2".to_owned(), "ncclCommInitRank 1 of 2".to_owned()]));
            assert_eq!(calls(&library).iter().filter(|line| line.starts_with("ncclCommAbort")).count(), 2);
        }
    }

    #[test]
    fn nccl_serves_ranks_with_a_gpu_and_a_library_each() {
        let means = |gpu: Option<&str>, nccl: Result<&str, &str>| Means {
            wanted: RankBackend::Auto,
            gpu: gpu.map(str::to_owned),
            nccl: nccl.map(str::to_owned).map_err(str::to_owned),
        };
        let (one, two) = (means(Some("0:1:0"), Ok("2.28.9")), means(Some("0:2:0"), Ok("2.28.9")));
        assert_eq!(hindrance(&[one.clone(), two.clone()], &["a", "a"]), None);
        assert_eq!(hindrance(&[one.clone(), one.clone()], &["a", "b"]), None);
        for (other, expected) in [
            (one.clone(), "ranks 0 and 1 have the same GPU, 0:1:0 on `a`"),
            (means(None, Err("")), "rank 1 computes on the CPU"),
            (means(Some("0:2:0"), Err("`libnccl.so.2` cannot be opened")), "rank 1: `libnccl.so.2` cannot be opened"),
            (means(Some("0:2:0"), Ok("2.27.3")), "rank 1 has NCCL 2.27.3, and rank 0 2.28.9"),
        ] {
            assert_eq!(hindrance(&[one.clone(), other], &["a", "a"]).as_deref(), Some(expected));
        }
        assert!(["auto", "gloo", "nccl"].iter().all(|name| RankBackend::parse(name).unwrap().to_string() == *name));
        assert!(RankBackend::parse("mpi").is_err());
    }
}
