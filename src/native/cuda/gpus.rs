//! NVIDIA's driver, asked without libtorch: what it is, and which GPUs it shows.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};
use std::fs;

use libloading::os::unix::Library;

use super::load::said;

/// What the driver says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The newest CUDA that it serves, as `(13, 0)`.
    pub cuda: (u32, u32),
    /// Its own version, as `580.95.05`, where the system tells.
    pub release: Option<String>,
    /// The GPUs in their order, as `CUDA_VISIBLE_DEVICES` leaves them.
    pub gpus: Vec<Gpu>,
}

/// A GPU as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// `NVIDIA H200`.
    pub name: String,
    /// Compute capability, as `(9, 0)`.
    pub capability: (c_int, c_int),
    /// Streaming multiprocessors.
    pub multiprocessors: c_int,
    /// Bytes of its memory.
    pub memory: u64,
}

const LIBRARY: &str = "libcuda.so.1";
const MULTIPROCESSORS: c_int = 16;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

type Status = c_int;
type Init = unsafe extern "C" fn(u32) -> Status;
type AskNumber = unsafe extern "C" fn(*mut c_int) -> Status;
type GetDevice = unsafe extern "C" fn(*mut c_int, c_int) -> Status;
type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Status;
type GetMemory = unsafe extern "C" fn(*mut usize, c_int) -> Status;
type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Status;
type GetText = unsafe extern "C" fn(Status, *mut *const c_char) -> Status;

impl Driver {
    /// Opens the driver's library and asks it; `Err` says why there is no answer.
    pub fn ask() -> Result<Self, String> {
        // SAFETY: the driver's own library; its initialisers are made to run in any process.
        let library =
            unsafe { Library::new(LIBRARY) }.map_err(|error| format!("`{LIBRARY}` cannot be opened: {}", said(&error)))?;
        let calls = Calls(library);
        // SAFETY: a function of CUDA's driver by its documented type.
        calls.checked("cuInit", unsafe { calls.get::<Init>("cuInit")?(0) })?;
        let served = calls.number("cuDriverGetVersion")?;
        let gpus = (0..calls.number("cuDeviceGetCount")?).map(|index| calls.gpu(index)).collect::<Result<_, _>>()?;
        let driver = Self { cuda: version(served), release: release(), gpus };
        // Never closed: it is in use for the life of the process as soon as libtorch's CUDA half is.
        std::mem::forget(calls);
        Ok(driver)
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

/// The library with the functions in it.
struct Calls(Library);

impl Calls {
    fn get<T>(&self, name: &str) -> Result<libloading::os::unix::Symbol<T>, String> {
        // SAFETY: each caller names a function together with its documented type.
        unsafe { self.0.get(name) }.map_err(|error| format!("`{LIBRARY}` has no `{name}`: {}", said(&error)))
    }

    fn number(&self, name: &str) -> Result<c_int, String> {
        let mut number = 0;
        // SAFETY: `name` takes a pointer to one number that is written.
        self.checked(name, unsafe { self.get::<AskNumber>(name)?(&raw mut number) })?;
        Ok(number)
    }

    fn gpu(&self, index: c_int) -> Result<Gpu, String> {
        let (mut device, mut name, mut memory) = (0, [0 as c_char; 256], 0);
        // SAFETY: pointers to numbers, and to text of the length that is given beside it, which are written.
        unsafe {
            self.checked("cuDeviceGet", self.get::<GetDevice>("cuDeviceGet")?(&raw mut device, index))?;
            self.checked("cuDeviceGetName", self.get::<GetName>("cuDeviceGetName")?(name.as_mut_ptr(), 255, device))?;
            self.checked("cuDeviceTotalMem", self.get::<GetMemory>("cuDeviceTotalMem_v2")?(&raw mut memory, device))?;
        }
        // SAFETY: the last byte was left zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let capability = (self.attribute(CAPABILITY_MAJOR, device)?, self.attribute(CAPABILITY_MINOR, device)?);
        Ok(Gpu { name, capability, multiprocessors: self.attribute(MULTIPROCESSORS, device)?, memory: memory as u64 })
    }

    fn attribute(&self, which: c_int, device: c_int) -> Result<c_int, String> {
        let name = "cuDeviceGetAttribute";
        let mut value = 0;
        // SAFETY: a pointer to one number that is written.
        self.checked(name, unsafe { self.get::<GetAttribute>(name)?(&raw mut value, which, device) })?;
        Ok(value)
    }

    fn checked(&self, name: &str, status: Status) -> Result<(), String> {
        if status == 0 { Ok(()) } else { Err(format!("`{name}` says {}", self.text(status))) }
    }

    /// `no CUDA-capable device is detected (error 100)`.
    fn text(&self, status: Status) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: a pointer to text that lives as long as the library, or null, is written.
        let known = self.get::<GetText>("cuGetErrorString").is_ok_and(|get| unsafe { get(status, &raw mut text) } == 0);
        if !known || text.is_null() {
            return format!("error {status}");
        }
        // SAFETY: not null, as was just seen, and it ends with a zero.
        format!("{} (error {status})", unsafe { CStr::from_ptr(text) }.to_string_lossy())
    }
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
