//! What is looked at on every machine: libtorch, the CPU, the memory and the disk.

use std::path::Path;

use tch::{Device, Kind};

use super::check::DoctorCheck;
use super::product;
use crate::files::free_space;
use crate::native::cuda::libtorch_folder;
use crate::native::{cpu_capability, cpu_has, libtorch_version, loaded_libtorch, threads_at_work};
use crate::ops::attention;
use crate::report::memory::attainable;
use crate::units::Bytes;

/// All of it; scratch files would be in `scratch`.
pub(super) fn examine(scratch: &Path, mut say: impl FnMut(DoctorCheck)) {
    say(libtorch(&libtorch_version(), loaded_libtorch().as_deref()));
    say(cpu());
    say(product::check("CPU product", Device::Cpu, &[Kind::Float, Kind::BFloat16]));
    say(kernels());
    say(memory(attainable()));
    say(disk(scratch));
}

fn libtorch(built_for: &str, loaded: Option<&str>) -> DoctorCheck {
    let place = libtorch_folder().map_or_else(|why| why, |folder| format!("`{}`", folder.display()));
    match loaded {
        Some(loaded) if loaded == built_for => DoctorCheck::ok("libtorch", format!("{loaded}, {place}")),
        found => DoctorCheck::failed(
            "libtorch",
            format!("{}, {place}; kvtune was built for {built_for}", found.unwrap_or("of no known version")),
            "install torch 2.11 and point `LD_LIBRARY_PATH` at its `torch/lib`",
        ),
    }
}

fn cpu() -> DoctorCheck {
    let (threads, at_work) = (usize::try_from(tch::get_num_threads()).unwrap_or(1), threads_at_work());
    let features = [(c"amx_tile", "AMX"), (c"avx512_bf16", "bf16 products"), (c"avx512_fp16", "f16 products")];
    let mut units = vec![cpu_capability().unwrap_or_else(|| "no vector units known".to_owned())];
    units.extend(features.iter().filter(|(feature, _)| cpu_has(feature)).map(|(_, name)| (*name).to_owned()));
    let found = format!("{}; {at_work} of {threads} threads at work", units.join(", "));
    let check = if at_work == threads {
        DoctorCheck::ok("CPU", found)
    } else {
        DoctorCheck::failed("CPU", found, "the system gives fewer threads than are asked for: ask for fewer with `--threads`")
    };
    check.with(&[("threads", threads as f64), ("threads_at_work", at_work as f64)])
}

/// Which kernels attend on the CPU, by dtype.
fn kernels() -> DoctorCheck {
    let device = Device::Cpu;
    let of = |(kind, dtype)| format!("{} in {dtype}", attention::in_words(device, kind));
    let found: Vec<String> = [(Kind::Float, "f32"), (Kind::BFloat16, "bf16")].into_iter().map(of).collect();
    DoctorCheck::ok("CPU attention", found.join(", "))
}

fn memory(attainable: Option<Bytes>) -> DoctorCheck {
    match attainable {
        Some(bytes) => {
            DoctorCheck::ok("host memory", format!("{bytes} for this process")).with(&[("attainable_bytes", bytes.0 as f64)])
        }
        None => DoctorCheck::lacking("host memory", "the system does not tell", "", super::check::Promise::Cpu),
    }
}

fn disk(scratch: &Path) -> DoctorCheck {
    match free_space(scratch) {
        Ok(bytes) => DoctorCheck::ok("scratch space", format!("{bytes} free in `{}`", scratch.display()))
            .with(&[("free_bytes", bytes.0 as f64)]),
        Err(error) => {
            DoctorCheck::failed("scratch space", error.to_string(), "name a directory that exists with `--scratch-dir`")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::State;
    use super::*;

    #[test]
    fn another_libtorch_is_a_failure() {
        assert_eq!(libtorch("2.11.0", Some("2.11.0")).state, State::Ok);
        let other = libtorch("2.11.0", Some("2.12.0"));
        assert_eq!(other.state, State::Failed);
        assert!(other.found.starts_with("2.12.0, ") && other.found.ends_with("; kvtune was built for 2.11.0"), "{}", other.found);
        assert_eq!(libtorch("2.11.0", None).state, State::Failed);
    }

    #[test]
    fn a_place_that_is_not_there_has_no_room() {
        assert_eq!(disk(Path::new("/no/such/place")).state, State::Failed);
        assert_eq!(disk(Path::new("/")).state, State::Ok);
    }

    #[test]
    fn memory_that_nobody_knows_is_no_failure() {
        assert_eq!(memory(None).state, State::Missing);
        assert_eq!(memory(Some(Bytes(1 << 30))).found, "1.0 GiB for this process");
    }
}
