//! NVIDIA's driver, asked without libtorch: what it is, and which GPUs it shows.

use std::ffi::c_int;
use std::fs;

use super::driver::{Calls, MULTIPROCESSORS};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The newest CUDA that it serves, as `(13, 0)`.
    pub cuda: (u32, u32),
    /// The driver's own version, as `580.95.05`, where the system tells.
    pub release: Option<String>,
    /// The GPUs in their order, as `CUDA_VISIBLE_DEVICES` leaves them.
    pub gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The product's name, as `NVIDIA H200`.
    pub name: String,
    /// Compute capability, as `(9, 0)`.
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    pub memory: u64,
}

impl Driver {
    /// Asks the driver; `Err` says why there is no answer.
    pub fn ask() -> Result<Self, String> {
        let calls = Calls::get()?;
        let gpus = (0..calls.count()? as usize).map(Gpu::at).collect::<Result<_, _>>()?;
        Ok(Self { cuda: version(calls.version()?), release: release(), gpus })
    }
}

impl Gpu {
    /// The GPU that libtorch gives this number; `Err` says why it does not answer.
    pub fn at(index: usize) -> Result<Self, String> {
        let calls = Calls::get()?;
        let device = calls.device(index)?;
        Ok(Self {
            name: calls.name(device)?,
            capability: calls.capability(device)?,
            multiprocessors: calls.attribute(MULTIPROCESSORS, device)?,
            memory: calls.memory(device)?,
        })
    }
}

/// `(13, 0)` of 13000, as CUDA numbers its versions.
pub(super) fn version(number: c_int) -> (u32, u32) {
    let number = u32::try_from(number).unwrap_or(0);
    (number / 1000, number % 1000 / 10)
}

/// The driver's own version, of `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  …`, or of the module.
fn release() -> Option<String> {
    let told = fs::read_to_string("/proc/driver/nvidia/version").ok().and_then(|text| release_in(&text));
    told.or_else(|| Some(fs::read_to_string("/sys/module/nvidia/version").ok()?.trim().to_owned()))
}

fn release_in(text: &str) -> Option<String> {
    let is_release = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_release).map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!((version(13000), version(12080)), ((13, 0), (12, 8)));
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\nGCC version: 12";
        assert_eq!(release_in(text).as_deref(), Some("580.95.05"));
        assert_eq!(release_in(""), None);
    }

    #[test]
    fn the_driver_answers_or_says_why_not() {
        match Driver::ask() {
            Ok(driver) => assert!(driver.cuda.0 >= 1, "{driver:?}"),
            Err(why) => assert!(why.starts_with('`'), "{why}"),
        }
    }
}
