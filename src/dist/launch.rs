//! Which rank this process is, as whoever started it says by variables of the environment.

use crate::units::{Fault, quoted};

/// Ranks that a run may have at most: more are a mistake.
const MAX_RANKS: usize = 65_536;

/// The place of this process among those that were started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The number of this rank, from 0.
    pub rank: usize,
    pub size: usize,
    /// The number among the ranks of its machine, from 0; it chooses the GPU.
    pub local_rank: usize,
    /// A name or address of the machine of rank 0.
    pub address: String,
    /// The port of the store there.
    pub port: u16,
    /// What tells this run from others.
    pub run_id: String,
    /// Whether the store is served by who started the ranks, and not by rank 0.
    pub is_served: bool,
    /// Who started it, in words.
    pub by: &'static str,
}

/// The variables of one way to start several processes.
struct Launcher {
    by: &'static str,
    rank: &'static str,
    /// What says how many there are: the first that is set.
    size: &'static [&'static str],
    local_rank: &'static str,
    /// What tells its runs apart: all that are set, one after the other.
    run_id: &'static [&'static str],
}

/// In the order in which they are asked: who starts ranks by PyTorch's variables inside another's job means those.
const LAUNCHERS: [Launcher; 2] = [
    Launcher {
        by: "torchrun's variables",
        rank: "RANK",
        size: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        run_id: &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
    },
    Launcher {
        by: "srun",
        rank: "SLURM_PROCID",
        // A step may have fewer tasks than its job.
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: "SLURM_LOCALID",
        run_id: &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
    },
];

/// Others, and the variables by which they say how many processes there are: each would take itself for the only one.
const UNREAD: [(&str, &str); 3] = [("Open MPI", "OMPI_COMM_WORLD_SIZE"), ("MPI", "PMI_SIZE"), ("Kubeflow Trainer", "PET_NNODES")];

impl Launched {
    /// Reads the environment by `variable`; `None` where the process stands alone.
    pub fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, Fault> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let launcher = LAUNCHERS.iter().find(|launcher| variable(launcher.rank).is_some());
        if launcher.is_none_or(|launcher| launcher.rank != "RANK") {
            // SLURM's own plugin for MPI says how many there are, too, but no rank on the machine.
            let is_slurm = launcher.is_some() && variable("MPI_LOCALRANKID").is_none();
            for (by, name) in UNREAD.into_iter().filter(|(_, name)| !is_slurm || *name != "PMI_SIZE") {
                if let Some(size) = number(&variable, name)?.filter(|size| *size > 1) {
                    return Err(Fault::usage(
                        format!("{by} has started {size} processes (`{name}`), whose ranks are not read"),
                        "start them by `torchrun --no-python`, `srun` or `kvtune launch`",
                    ));
                }
            }
        }
        let Some(launcher) = launcher else {
            // A size of 1 says nothing: platforms set it for whatever runs there.
            return match number(&variable, "WORLD_SIZE")? {
                Some(size) if size > 1 => Err(missing("RANK", &format!("WORLD_SIZE={size}"))),
                _ => Ok(None),
            };
        };
        let launch = launcher.read(&variable)?;
        Ok((launch.size > 1 || launcher.rank == "RANK").then_some(launch))
    }
}

impl Launcher {
    /// Reads its variables, of which that of the rank is set.
    fn read(&self, variable: &dyn Fn(&str) -> Option<String>) -> Result<Launched, Fault> {
        let Self { by, rank: rank_name, local_rank, run_id, .. } = *self;
        let rank = number(variable, rank_name)?.unwrap_or(0);
        let given = format!("{rank_name}={rank}");
        let size_name = *self.size.iter().find(|name| variable(name).is_some()).unwrap_or(&self.size[0]);
        let size = number(variable, size_name)?.ok_or_else(|| missing(size_name, &given))?;
        if size == 0 || size > MAX_RANKS || rank >= size {
            let expected = if size == 0 || size > MAX_RANKS {
                format!("`{size_name}` from 1 to {MAX_RANKS}")
            } else {
                format!("`{rank_name}` from 0 to {}", size - 1)
            };
            let message = format!("`{given}` is no rank of a world of `{size_name}={size}`: expected {expected}");
            return Err(Fault::usage(message, format!("these variables come from {by}: see how it is started")));
        }
        let local_rank = number(variable, local_rank)?.unwrap_or(0);
        let (address, port) = match size {
            1 => ("127.0.0.1".to_owned(), 0),
            _ => self.meeting_point(variable, &format!("{given}` and `{size_name}={size}"))?,
        };
        let parts: Vec<_> = run_id.iter().filter_map(|name| variable(name)).collect();
        let is_served = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|word| word.eq_ignore_ascii_case("true"));
        Ok(Launched {
            rank,
            size,
            local_rank,
            address,
            port,
            run_id: parts.join("."),
            is_served: is_served && rank_name == "RANK",
            by,
        })
    }

    /// Where the ranks meet: as the environment says, else as can be told from SLURM's own variables.
    fn meeting_point(&self, variable: &dyn Fn(&str) -> Option<String>, given: &str) -> Result<(String, u16), Fault> {
        let (address, port) = ("MASTER_ADDR", "MASTER_PORT");
        let of_slurm = |name: &str| variable(name).filter(|_| self.rank == "SLURM_PROCID");
        // The machine of rank 0 is the first of SLURM's job.
        let first = || first_host(&of_slurm("SLURM_STEP_NODELIST").or_else(|| of_slurm("SLURM_JOB_NODELIST"))?);
        let address = variable(address).or_else(first).ok_or_else(|| missing(address, given))?;
        let port = match number(variable, port)? {
            Some(number) => u16::try_from(number).ok().filter(|port| *port != 0).ok_or_else(|| {
                Fault::usage(
                    format!("`{port}={number}` is no port: expected 1 to 65535"),
                    "choose a port that is free on rank 0's machine",
                )
            })?,
            None => port_of_job(of_slurm).ok_or_else(|| missing(port, given))?,
        };
        Ok((address, port))
    }
}

/// A port that all ranks of SLURM's job choose alike, and jobs side by side mostly not.
fn port_of_job(variable: impl Fn(&str) -> Option<String>) -> Option<u16> {
    let job: u64 = variable("SLURM_JOB_ID")?.parse().ok()?;
    let step: u64 = variable("SLURM_STEP_ID").and_then(|step| step.parse().ok()).unwrap_or(0);
    u16::try_from(15_000 + (job.wrapping_mul(31).wrapping_add(step)) % 15_000).ok()
}

/// The first host of SLURM's list: `node003` of `node[003-007,9],login1`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let Some(inside) = rest.strip_prefix('[') else { return (!name.is_empty()).then(|| name.to_owned()) };
    let (numbers, after) = inside.split_once(']')?;
    let first = numbers.split([',', '-']).next().filter(|first| !first.is_empty())?;
    // Some names go on behind the number: `rack[1-2]node`.
    let tail: &str = after.split(',').next().unwrap_or_default();
    if tail.contains('[') { first_host(&format!("{name}{first}{after}")) } else { Some(format!("{name}{first}{tail}")) }
}

fn number(variable: &dyn Fn(&str) -> Option<String>, name: &str) -> Result<Option<usize>, Fault> {
    let Some(value) = variable(name) else { return Ok(None) };
    value.trim().parse().map(Some).map_err(|_| {
        Fault::usage(
            format!("`{name}={}` is no whole number", quoted(&value)),
            "it says which of several processes this is: unset it, or see how they are started",
        )
    })
}

fn missing(name: &str, given: &str) -> Fault {
    Fault::usage(
        format!("the environment says `{given}`, but not `{name}`"),
        format!(
            "set `{name}` for all ranks, or start them by `torchrun --no-python`, `srun` or `kvtune launch`; to run alone, unset `{}`",
            given.split('=').next().unwrap_or_default()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &str) -> Result<Option<Launched>, String> {
        let value = |name: &str| {
            variables
                .split(' ')
                .filter_map(|pair| pair.split_once('='))
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.to_owned())
        };
        Launched::from_environment(value).map_err(|error| error.to_string())
    }

    /// rank, size, local rank, address:port, run.
    fn told(variables: &str) -> String {
        let Launched { rank, size, local_rank, address, port, run_id, is_served, .. } = read(variables).unwrap().unwrap();
        format!("{rank}/{size} {local_rank} {address}:{port} `{run_id}` {is_served}")
    }

    #[test]
    fn each_launcher_is_understood() {
        let torchrun = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=node1 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none";
        for (variables, expected) in [
            (torchrun.to_owned(), "3/4 1 node1:29500 `none` false"),
            (format!("{torchrun} TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_USE_AGENT_STORE=True"), "3/4 1 node1:29500 `none.2` true"),
            (format!("{torchrun} SLURM_PROCID=0 SLURM_NTASKS=2"), "3/4 1 node1:29500 `none` false"),
            ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=pod-0 MASTER_PORT=23456".to_owned(), "1/2 0 pod-0:23456 `` false"),
            (
                "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=1234 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=node[003-004]".to_owned(),
                "5/8 1 node003:23254 `1234.0` false",
            ),
            (
                "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=a MASTER_ADDR=b \
                 MASTER_PORT=9"
                    .to_owned(),
                "1/2 1 b:9 `7` false",
            ),
            (
                "PMI_RANK=3 PMI_SIZE=4 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=a".to_owned(),
                "3/4 1 a:15217 `7` false",
            ),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=9 OMPI_COMM_WORLD_SIZE=2".to_owned(), "0/2 0 a:9 `` false"),
            ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0".to_owned(), "0/1 0 127.0.0.1:0 `` false"),
        ] {
            assert_eq!(told(&variables), expected, "{variables}");
        }
        // One process stands alone, whoever has started it.
        for variables in [
            "",
            "WORLD_SIZE=1",
            "SLURM_PROCID=0 SLURM_NTASKS=1",
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
            "RANK= LOCAL_RANK=0",
        ] {
            assert_eq!(read(variables), Ok(None), "{variables}");
        }
    }

    #[test]
    fn what_contradicts_itself_or_is_missing_is_refused() {
        for (variables, expected) in [
            ("WORLD_SIZE=4", "the environment says `WORLD_SIZE=4`, but not `RANK`"),
            ("RANK=1", "the environment says `RANK=1`, but not `WORLD_SIZE`"),
            ("RANK=1 WORLD_SIZE=4", "the environment says `RANK=1` and `WORLD_SIZE=4`, but not `MASTER_ADDR`"),
            ("RANK=1 WORLD_SIZE=4 MASTER_ADDR=a", "the environment says `RANK=1` and `WORLD_SIZE=4`, but not `MASTER_PORT`"),
            ("RANK=4 WORLD_SIZE=4", "`RANK=4` is no rank of a world of `WORLD_SIZE=4`: expected `RANK` from 0 to 3"),
            ("RANK=0 WORLD_SIZE=0", "`RANK=0` is no rank of a world of `WORLD_SIZE=0`: expected `WORLD_SIZE` from 1 to 65536"),
            ("RANK=-1 WORLD_SIZE=2", "`RANK=-1` is no whole number"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000", "`MASTER_PORT=70000` is no port: expected 1 to 65535"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", "`MASTER_PORT=0` is no port: expected 1 to 65535"),
            (
                "SLURM_PROCID=0 SLURM_NTASKS=2",
                "the environment says `SLURM_PROCID=0` and `SLURM_NTASKS=2`, but not `MASTER_ADDR`",
            ),
            ("OMPI_COMM_WORLD_SIZE=4", "Open MPI has started 4 processes (`OMPI_COMM_WORLD_SIZE`), whose ranks are not read"),
            ("PMI_SIZE=2", "MPI has started 2 processes (`PMI_SIZE`), whose ranks are not read"),
            (
                "PMI_SIZE=2 MPI_LOCALRANKID=0 SLURM_PROCID=0 SLURM_NTASKS=2",
                "MPI has started 2 processes (`PMI_SIZE`), whose ranks are not read",
            ),
            ("PET_NNODES=2", "Kubeflow Trainer has started 2 processes (`PET_NNODES`), whose ranks are not read"),
        ] {
            assert_eq!(read(variables), Err(expected.to_owned()), "{variables}");
        }
    }

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, first) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[003-007,9],login1", "node003"),
            ("gpu[1,4-6]", "gpu1"),
            ("rack[1-2]node[03-04]", "rack1node03"),
            ("rack[1-2]x,y", "rack1x"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        for broken in ["", "a[", "a[]", "[", ","] {
            assert_eq!(first_host(broken), None, "{broken}");
        }
    }
}
