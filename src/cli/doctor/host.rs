//! What is looked at on every machine: libtorch, the CPU, a product of matrices, the memory and the disk.

use std::path::Path;

use tch::{Device, Kind, TchError, Tensor, no_grad};

use super::check::DoctorCheck;
use crate::files::free_space;
use crate::native::cuda::libtorch_folder;
use crate::native::{attainable_memory, cpu_capability, cpu_has, libtorch_version, loaded_libtorch, threads_at_work};
use crate::ops::attention::Backend;
use crate::units::Bytes;

/// Side of the matrices that are multiplied.
const SIDE: i64 = 512;
/// The largest relative errors: of f32 in full, which TF32 would not keep, and of narrow factors summed in f32.
const TOLERANCES: [(Kind, &str, f64); 2] = [(Kind::Float, "f32", 1e-5), (Kind::BFloat16, "bf16", 1e-2)];

/// All of it; scratch files would be in `scratch`.
pub(super) fn examine(scratch: &Path) -> Vec<DoctorCheck> {
    let kernels = TOLERANCES.map(|(kind, dtype, _)| format!("{} in {dtype}", Backend::preferred(Device::Cpu, kind, 128)));
    let memory = match attainable_memory().map(Bytes) {
        Some(bytes) => DoctorCheck::ok("host memory", format!("{bytes} for this process")),
        None => DoctorCheck::missing("host memory", "the system does not tell"),
    };
    vec![
        libtorch(&libtorch_version(), loaded_libtorch().as_deref()),
        cpu(),
        product("CPU product", Device::Cpu),
        DoctorCheck::ok("CPU attention", kernels.join(", ")),
        memory,
        disk(scratch),
    ]
}

fn libtorch(built_for: &str, loaded: Option<&str>) -> DoctorCheck {
    let folder = libtorch_folder().map_or_else(|why| why, |folder| format!("`{}`", folder.display()));
    match loaded {
        Some(loaded) if loaded == built_for => DoctorCheck::ok("libtorch", format!("{loaded}, {folder}")),
        found => DoctorCheck::failed(
            "libtorch",
            format!("{}, {folder}; kvtune was built for {built_for}", found.unwrap_or("of no known version")),
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
    let hint = "the system gives fewer threads than are asked for: ask for fewer with `--threads`";
    DoctorCheck::judged("CPU", found, at_work == threads, hint)
}

/// Products on a device, against the same in f64 on the CPU.
pub(super) fn product(name: &str, device: Device) -> DoctorCheck {
    let errors: Result<Vec<f64>, TchError> = TOLERANCES.iter().map(|&(kind, ..)| error_of_product(device, kind)).collect();
    told(name, errors.map_err(|error| error.to_string().lines().next().unwrap_or_default().to_owned()))
}

fn told(name: &str, errors: Result<Vec<f64>, String>) -> DoctorCheck {
    let hint = "the device or its libraries compute wrongly: look at the driver's version and for errors in `dmesg`";
    let errors = match errors {
        Ok(errors) => errors,
        Err(why) => return DoctorCheck::failed(name, why, hint),
    };
    let all = || errors.iter().zip(TOLERANCES);
    let found: Vec<String> = all().map(|(error, (_, dtype, _))| format!("{dtype}: error {error:.0e}")).collect();
    DoctorCheck::judged(name, found.join("; "), all().all(|(error, (.., most))| *error <= most), hint)
}

fn error_of_product(device: Device, kind: Kind) -> Result<f64, TchError> {
    no_grad(|| {
        let drawn = || Tensor::f_randn([SIDE, SIDE], (Kind::Float, Device::Cpu))?.f_to_kind(kind);
        let (x, w) = (drawn()?, drawn()?);
        let expected = x.f_to_kind(Kind::Double)?.f_matmul(&w.f_to_kind(Kind::Double)?)?;
        let found = x.f_to_device(device)?.f_matmul(&w.f_to_device(device)?)?.f_to_device(Device::Cpu)?;
        f64::try_from((found.f_to_kind(Kind::Double)? - &expected).f_norm()? / expected.f_norm()?)
    })
}

fn disk(scratch: &Path) -> DoctorCheck {
    const NAME: &str = "scratch space";
    match free_space(scratch) {
        Ok(bytes) => DoctorCheck::ok(NAME, format!("{bytes} free in `{}`", scratch.display())),
        Err(error) => DoctorCheck::failed(NAME, error.to_string(), "name a directory that exists with `--scratch-dir`"),
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
    fn an_error_of_tf32_is_a_failure() {
        assert_eq!(told("x", Ok(vec![3e-7, 2e-3])).found, "f32: error 3e-7; bf16: error 2e-3");
        assert_eq!(told("x", Ok(vec![3e-7, 2e-3])).state, State::Ok);
        assert_eq!(told("x", Ok(vec![3e-4, 2e-3])).state, State::Failed);
        assert_eq!(told("x", Ok(vec![f64::NAN, 2e-3])).state, State::Failed);
        assert_eq!(told("x", Err("CUDA error: no kernel image".to_owned())).state, State::Failed);
    }
}
