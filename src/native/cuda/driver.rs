//! The door to CUDA's driver: contexts, compiled kernels, launches. It is opened at run time, where there is one.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::{from_ref, null, null_mut};
use std::sync::OnceLock;

use libloading::os::unix::RTLD_LOCAL;

use super::load::{functions, open_library};
use crate::native::autograd::written;

unsafe extern "C" {
    fn kvtune_launch_stream(index: c_int, stream: *mut *mut c_void) -> c_int;
}

type Handle = *mut c_void;

functions! {
    /// What is asked of the driver. All return 0, or the number of an error.
    pub(super) struct Calls {
        initialise = c"cuInit": unsafe extern "C" fn(c_uint) -> c_int,
        error_string = c"cuGetErrorString": unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
        version = c"cuDriverGetVersion": unsafe extern "C" fn(*mut c_int) -> c_int,
        count = c"cuDeviceGetCount": unsafe extern "C" fn(*mut c_int) -> c_int,
        device = c"cuDeviceGet": unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
        name = c"cuDeviceGetName": unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
        memory = c"cuDeviceTotalMem_v2": unsafe extern "C" fn(*mut usize, c_int) -> c_int,
        free_memory = c"cuMemGetInfo_v2": unsafe extern "C" fn(*mut usize, *mut usize) -> c_int,
        attribute = c"cuDeviceGetAttribute": unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
        retain_context = c"cuDevicePrimaryCtxRetain": unsafe extern "C" fn(*mut Handle, c_int) -> c_int,
        push_context = c"cuCtxPushCurrent_v2": unsafe extern "C" fn(Handle) -> c_int,
        pop_context = c"cuCtxPopCurrent_v2": unsafe extern "C" fn(*mut Handle) -> c_int,
        load_module = c"cuModuleLoadData": unsafe extern "C" fn(*mut Handle, *const c_void) -> c_int,
        function = c"cuModuleGetFunction": unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int,
        launch = c"cuLaunchKernel": unsafe extern "C" fn(
            Handle,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            Handle,
            *mut *mut c_void,
            *mut *mut c_void,
        ) -> c_int,
    }
}

pub(super) const MULTIPROCESSORS: c_int = 16;
const PCI_BUS: c_int = 33;
const PCI_DEVICE: c_int = 34;
const PCI_DOMAIN: c_int = 50;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

impl Calls {
    fn load() -> Result<Self, String> {
        // SAFETY: the types are those of cuda.h; names with `_v2` are what its macros call.
        let calls = unsafe { Self::find(open_library(Path::new("libcuda.so.1"), RTLD_LOCAL)?)? };
        // SAFETY: there are no flags.
        calls.check("cuInit", unsafe { (calls.initialise)(0) })?;
        Ok(calls)
    }

    /// The driver of this machine; the reason where none answers.
    pub(super) fn get() -> Result<&'static Self, String> {
        static CALLS: OnceLock<Result<Calls, String>> = OnceLock::new();
        CALLS.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn check(&self, what: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut text = null();
        // SAFETY: the pointer may be written; what it is set to lives as long as the driver.
        let known = unsafe { (self.error_string)(code, &raw mut text) } == 0 && !text.is_null();
        // SAFETY: the driver's strings end with a zero.
        let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "nothing more".into() };
        Err(format!("`{what}` says {text} (error {code})"))
    }

    /// What a call writes in the place of `value`.
    fn written<T>(&self, what: &str, mut value: T, call: impl FnOnce(*mut T) -> c_int) -> Result<T, String> {
        self.check(what, call(&raw mut value)).map(|()| value)
    }

    /// The newest CUDA that the driver serves, as CUDA numbers its versions.
    pub(super) fn version(&self) -> Result<c_int, String> {
        // SAFETY: the number may be written.
        self.written("cuDriverGetVersion", 0, |number| unsafe { (self.version)(number) })
    }

    pub(super) fn count(&self) -> Result<c_int, String> {
        // SAFETY: the number may be written.
        self.written("cuDeviceGetCount", 0, |number| unsafe { (self.count)(number) })
    }

    pub(super) fn device(&self, index: usize) -> Result<c_int, String> {
        let index = c_int::try_from(index).map_err(|_| format!("there is no CUDA device {index}"))?;
        // SAFETY: the handle may be written.
        self.written("cuDeviceGet", 0, |handle| unsafe { (self.device)(handle, index) })
    }

    pub(super) fn name(&self, device: c_int) -> Result<String, String> {
        // SAFETY: there is room for as many letters as are announced.
        let name = self.written("cuDeviceGetName", [0; 256], |name| unsafe { (self.name)(name.cast(), 255, device) })?;
        // SAFETY: the last byte was left zero.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    pub(super) fn memory(&self, device: c_int) -> Result<u64, String> {
        // SAFETY: the number may be written.
        self.written("cuDeviceTotalMem", 0, |bytes| unsafe { (self.memory)(bytes, device) }).map(|bytes| bytes as u64)
    }

    pub(super) fn capability(&self, device: c_int) -> Result<(u32, u32), String> {
        Ok((self.attribute(CAPABILITY_MAJOR, device)?, self.attribute(CAPABILITY_MINOR, device)?))
    }

    pub(super) fn attribute(&self, which: c_int, device: c_int) -> Result<u32, String> {
        // SAFETY: the number may be written.
        let value = self.written("cuDeviceGetAttribute", 0, |number| unsafe { (self.attribute)(number, which, device) })?;
        u32::try_from(value).map_err(|_| format!("`cuDeviceGetAttribute` gives {value} for {which}"))
    }
}

/// The stream on which libtorch's next operation on a device will run: what is launched there waits for what came before.
pub(super) fn launch_stream(device: usize) -> Result<*mut c_void, String> {
    // SAFETY: the handle may be written.
    written(null_mut(), |stream| unsafe { kvtune_launch_stream(device as c_int, stream) }).map_err(|error| error.to_string())
}

/// The context of a CUDA device in which libtorch works.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context {
    handle: Handle,
    pub(super) multiprocessors: usize,
    /// The compute capability: 90 for 9.0.
    pub(super) architecture: usize,
}

impl Context {
    /// The context of the device that libtorch gives this number.
    pub(super) fn of(index: usize) -> Result<Self, String> {
        let calls = Calls::get()?;
        let device = calls.device(index)?;
        // SAFETY: the handle may be written. A primary context that is retained stays; libtorch uses the same.
        let retain = |handle: *mut Handle| unsafe { (calls.retain_context)(handle, device) };
        let handle = calls.written("cuDevicePrimaryCtxRetain", null_mut(), retain)?;
        let (major, minor) = calls.capability(device)?;
        let multiprocessors = calls.attribute(MULTIPROCESSORS, device)? as usize;
        Ok(Self { handle, multiprocessors, architecture: (major * 10 + minor) as usize })
    }

    fn inside<T>(&self, calls: &Calls, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        // SAFETY: the context is alive; what is pushed here is popped below, whatever comes of the work.
        calls.check("cuCtxPushCurrent", unsafe { (calls.push_context)(self.handle) })?;
        let done = work();
        // SAFETY: the handle may be written.
        calls.written("cuCtxPopCurrent", null_mut(), |popped| unsafe { (calls.pop_context)(popped) })?;
        done
    }
}

/// Bytes that a CUDA device has free, as the driver says; `None` without one.
pub fn free_device_memory(index: usize) -> Option<u64> {
    let (calls, context) = (Calls::get().ok()?, Context::of(index).ok()?);
    let mut total = 0;
    // SAFETY: both numbers may be written.
    let ask = || calls.written("cuMemGetInfo", 0, |free| unsafe { (calls.free_memory)(free, &raw mut total) });
    context.inside(calls, ask).ok().map(|free| free as u64)
}

/// What tells a GPU from the others of its machine, whatever number it has here: its place on the PCI bus.
pub fn place_of_gpu(index: usize) -> Result<String, String> {
    let calls = Calls::get()?;
    let device = calls.device(index)?;
    let of = |which| calls.attribute(which, device);
    Ok(format!("{:04x}:{:02x}:{:02x}", of(PCI_DOMAIN)?, of(PCI_BUS)?, of(PCI_DEVICE)?))
}

/// Compiled kernels on a device. They stay there as long as the process lives.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) context: Context,
    functions: BTreeMap<&'static str, Handle>,
}

// SAFETY: nothing in it changes; the driver lets any thread launch a function and make a context its own, and neither is ever released.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a CUBIN and finds the kernels of these names in it.
    pub(super) fn load(context: Context, cubin: &[u8], names: &[&'static str]) -> Result<Self, String> {
        let calls = Calls::get()?;
        context.inside(calls, || {
            let cubin = cubin.as_ptr().cast();
            // SAFETY: a CUBIN says itself how long it is; it is read before the call returns.
            let module = calls.written("cuModuleLoadData", null_mut(), |module| unsafe { (calls.load_module)(module, cubin) })?;
            let find = |name: &'static str| {
                let symbol = CString::new(name).map_err(|error| error.to_string())?;
                // SAFETY: the module is loaded, the name ends with a zero, the handle may be written.
                let find = |function: *mut Handle| unsafe { (calls.function)(function, module, symbol.as_ptr()) };
                calls.written(name, null_mut(), find).map(|function| (name, function))
            };
            Ok(Self { context, functions: names.iter().copied().map(find).collect::<Result<_, String>>()? })
        })
    }

    /// Starts a kernel on a stream, and does not wait for it.
    ///
    /// # Safety
    /// `P` must be the kernel's one parameter, laid out as in C; what it points to must be on this device, as large as the kernel takes
    /// it to be, and stay until the stream has passed.
    pub(super) unsafe fn launch<P: Copy>(
        &self,
        name: &str,
        grid: [usize; 3],
        threads: usize,
        params: &P,
        stream: *mut c_void,
    ) -> Result<(), String> {
        let calls = Calls::get()?;
        let function = *self.functions.get(name).ok_or_else(|| format!("there is no kernel `{name}`"))?;
        let size =
            |count: usize| c_uint::try_from(count).map_err(|_| format!("`{name}`: a grid of {grid:?} blocks is too large"));
        let [x, y, z] = [size(grid[0])?, size(grid[1])?, size(grid[2])?];
        let threads = size(threads)?;
        let mut arguments = [from_ref(params).cast_mut().cast::<c_void>()];
        self.context.inside(calls, || {
            // SAFETY: the caller's promises; the parameter is copied before the call returns.
            calls.check(name, unsafe {
                (calls.launch)(function, x, y, z, threads, 1, 1, 0, stream, arguments.as_mut_ptr(), null_mut())
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_a_reason_and_no_panic() {
        for index in [4095, usize::MAX] {
            assert!(Context::of(index).is_err_and(|reason| !reason.is_empty()), "{index}");
        }
    }
}
