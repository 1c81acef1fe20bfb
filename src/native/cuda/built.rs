//! Kernels for CUDA: compiled when they are first asked for, once for each device and setting, and what became of each.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;

use tch::Kind;

use super::disk_cache;
use super::driver::{Context, Module};
use super::nvrtc::Nvrtc;
use crate::native::locked;

/// The text of some kernels that are compiled together.
#[derive(Debug)]
pub(super) struct KernelSource {
    /// What it is called in messages and on disk.
    pub(super) name: &'static str,
    /// CUDA C++ that includes nothing.
    pub(super) text: &'static str,
    pub(super) kernels: &'static [&'static str],
}

/// A macro that a text is compiled with, and its value.
pub(super) type Setting = (&'static str, usize);

/// The text, device and settings that a module is built of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Which {
    device: usize,
    name: &'static str,
    settings: Vec<Setting>,
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` (cuda:{}", self.name, self.device)?;
        self.settings.iter().try_for_each(|(name, value)| write!(f, ", {name} {value}"))?;
        f.write_str(")")
    }
}

/// Kernels that serve, and reasons why others do not; with a reason, whether it has been told.
type States = BTreeMap<Which, (Result<&'static Module, String>, bool)>;

static STATES: Mutex<States> = Mutex::new(States::new());

/// The kernels for CUDA that were asked for so far, and why one does not serve, so that libtorch's operations do its work; `None` where it
/// serves.
pub fn kernel_states() -> Vec<(String, Option<String>)> {
    locked(&STATES).iter().map(|(which, (built, _))| (which.to_string(), built.as_ref().err().cloned())).collect()
}

/// One line for each kernel that does not serve, so that something slower does its work; every line is given once.
pub fn missing_kernels() -> Vec<String> {
    let mut lines = Vec::new();
    // Whoever is still compiling, or hangs in the driver, is not waited for.
    let Ok(mut states) = STATES.try_lock() else { return lines };
    for (which, (built, is_told)) in states.iter_mut() {
        if let (Err(reason), false) = (built, *is_told) {
            lines.push(format!("without the kernel {which}, which libtorch's own operations replace: {reason}"));
            *is_told = true;
        }
    }
    lines
}

/// What `work` makes with the kernels; `None` where they do not serve. What has failed to start is not asked for again.
pub(super) fn with<T>(
    device: usize,
    source: &'static KernelSource,
    settings: &[Setting],
    work: impl FnOnce(&'static Module) -> Result<T, String>,
) -> Option<T> {
    let which = Which { device, name: source.name, settings: settings.to_vec() };
    // Nobody else may build the same meanwhile.
    let built =
        locked(&STATES).entry(which.clone()).or_insert_with(|| (build(device, source, settings), false)).0.as_ref().ok().copied();
    work(built?).map_err(|reason| locked(&STATES).insert(which, (Err(reason), false))).ok()
}

/// How kernels for bf16 and f16 are told which of the two they are for; `None` for other kinds.
pub(super) fn of_half(kind: Kind) -> Option<Setting> {
    match kind {
        Kind::BFloat16 => Some(("KVTUNE_F16", 0)),
        Kind::Half => Some(("KVTUNE_F16", 1)),
        _ => None,
    }
}

fn build(device: usize, source: &KernelSource, settings: &[Setting]) -> Result<&'static Module, String> {
    let (context, nvrtc) = (Context::of(device)?, Nvrtc::get()?);
    let options = options(context.architecture, settings);
    let parts: Vec<&str> = [source.text, &nvrtc.release].into_iter().chain(options.iter().map(String::as_str)).collect();
    let load = |cubin: &[u8]| Module::load(context, cubin, source.kernels);
    let module = if let Some(module) = disk_cache::recall(source.name, &parts).and_then(|cubin| load(&cubin).ok()) {
        module
    } else {
        let (cubin, _) = nvrtc.compile(source.name, source.text, &options)?;
        load(&cubin).inspect(|_| disk_cache::keep(source.name, &parts, &cubin))?
    };
    Ok(Box::leak(Box::new(module)))
}

pub(super) fn options(architecture: usize, settings: &[Setting]) -> Vec<String> {
    let target = [format!("--gpu-architecture=sm_{architecture}"), "--std=c++17".to_owned()];
    target.into_iter().chain(settings.iter().map(|(name, value)| format!("--define-macro={name}={value}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    static NOTHING: KernelSource = KernelSource { name: "nothing", text: "", kernels: &[] };

    #[test]
    fn a_kernel_that_cannot_be_had_is_told_of_once() {
        // No machine has so many devices.
        assert!(with(4095, &NOTHING, &[("KVTUNE_WIDTH", 64)], |_| Ok(())).is_none());
        let ours = |kernel: &str| kernel == "`nothing` (cuda:4095, KVTUNE_WIDTH 64)";
        assert!(kernel_states().iter().any(|(kernel, why)| ours(kernel) && why.as_ref().is_some_and(|why| !why.is_empty())));
        let told = || missing_kernels().into_iter().filter(|line| line.contains("cuda:4095")).count();
        assert_eq!([told(), told()], [1, 0]);
        let which = Which { device: 4095, name: "nothing", settings: vec![("KVTUNE_WIDTH", 64)] };
        locked(&STATES).insert(which, (Err("it did not start".to_owned()), false));
        assert!(with(4095, &NOTHING, &[("KVTUNE_WIDTH", 64)], |_| Ok(())).is_none());
        assert!(missing_kernels().iter().any(|line| line.ends_with("replace: it did not start")));
    }
}
