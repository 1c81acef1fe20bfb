//! The door to CUDA's driver: contexts, compiled kernels, launches. It is opened at run time, where there is one.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::native::autograd::check;

unsafe extern "C" {
    fn kvtune_launch_stream(device: i64, stream: *mut *mut c_void) -> c_int;
}

/// A handle of the driver's.
type Handle = *mut c_void;

/// What is asked of the driver. All return 0, or the number of an error.
struct Calls {
    error_string: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    retain_context: unsafe extern "C" fn(*mut Handle, c_int) -> c_int,
    push_context: unsafe extern "C" fn(Handle) -> c_int,
    pop_context: unsafe extern "C" fn(*mut Handle) -> c_int,
    load_module: unsafe extern "C" fn(*mut Handle, *const c_void) -> c_int,
    function: unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int,
    launch: unsafe extern "C" fn(
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

const MULTIPROCESSORS: c_int = 16;
const MAJOR: c_int = 75;
const MINOR: c_int = 76;

/// A symbol of a library, of the type that the caller knows it to have.
///
/// # Safety
/// `T` must be the type of the function of that name.
pub(super) unsafe fn symbol<T: Copy>(library: &Library, name: &CStr) -> Result<T, String> {
    // SAFETY: the caller's.
    let found = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
    found.map(|symbol| *symbol).map_err(|error| format!("`{}` is missing: {error}", name.to_string_lossy()))
}

impl Calls {
    fn load() -> Result<Self, String> {
        // SAFETY: the driver's own initialisers; libtorch's CUDA half has loaded the same library.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| format!("CUDA's driver cannot be loaded: {error}"))?;
        // SAFETY: the types are those of cuda.h; names with `_v2` are what its macros call.
        let calls = unsafe {
            let initialise: unsafe extern "C" fn(c_uint) -> c_int = symbol(&library, c"cuInit")?;
            let calls = Self {
                error_string: symbol(&library, c"cuGetErrorString")?,
                device: symbol(&library, c"cuDeviceGet")?,
                attribute: symbol(&library, c"cuDeviceGetAttribute")?,
                retain_context: symbol(&library, c"cuDevicePrimaryCtxRetain")?,
                push_context: symbol(&library, c"cuCtxPushCurrent_v2")?,
                pop_context: symbol(&library, c"cuCtxPopCurrent_v2")?,
                load_module: symbol(&library, c"cuModuleLoadData")?,
                function: symbol(&library, c"cuModuleGetFunction")?,
                launch: symbol(&library, c"cuLaunchKernel")?,
            };
            calls.check("cuInit", initialise(0))?;
            calls
        };
        // Never unloaded: contexts live as long as the process.
        let _handle = library.into_raw();
        Ok(calls)
    }

    fn get() -> Result<&'static Self, String> {
        static CALLS: OnceLock<Result<Calls, String>> = OnceLock::new();
        CALLS.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn check(&self, what: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: the pointer may be written; what it is set to lives as long as the driver.
        let known = unsafe { (self.error_string)(code, &raw mut text) } == 0 && !text.is_null();
        // SAFETY: the driver's strings end with a zero.
        let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "unknown".into() };
        Err(format!("{what}: {text} ({code})"))
    }
}

/// The stream on which libtorch's next operation on a device will run: what is launched there waits for what came before.
pub(super) fn launch_stream(device: usize) -> Result<*mut c_void, String> {
    let mut stream = ptr::null_mut();
    // SAFETY: the handle may be written.
    check(unsafe { kvtune_launch_stream(device as i64, &raw mut stream) }).map_err(|error| error.to_string())?;
    Ok(stream)
}

/// A CUDA device as the driver knows it, with the context in which libtorch works.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gpu {
    context: Handle,
    /// How many multiprocessors it has.
    pub(super) multiprocessors: usize,
    /// Its compute capability: 90 for 9.0.
    pub(super) architecture: usize,
}

// SAFETY: a primary context may be used from any thread, and is never released here.
unsafe impl Send for Gpu {}

impl Gpu {
    /// The device that libtorch gives this number.
    pub(super) fn of(index: usize) -> Result<Self, String> {
        let calls = Calls::get()?;
        let (mut device, mut context) = (0, ptr::null_mut());
        let ordinal = c_int::try_from(index).map_err(|_| format!("there is no CUDA device {index}"))?;
        // SAFETY: what is pointed to may be written. A primary context that is retained stays; libtorch uses the same.
        unsafe {
            calls.check("cuDeviceGet", (calls.device)(&raw mut device, ordinal))?;
            calls.check("cuDevicePrimaryCtxRetain", (calls.retain_context)(&raw mut context, device))?;
        }
        let attribute = |number| {
            let mut value = 0;
            // SAFETY: the value may be written.
            calls.check("cuDeviceGetAttribute", unsafe { (calls.attribute)(&raw mut value, number, device) })?;
            usize::try_from(value).map_err(|_| format!("attribute {number} of CUDA device {index} is {value}"))
        };
        let architecture = attribute(MAJOR)? * 10 + attribute(MINOR)?;
        Ok(Self { context, multiprocessors: attribute(MULTIPROCESSORS)?, architecture })
    }

    /// Does something while its context is the current one.
    fn inside<T>(&self, calls: &Calls, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        // SAFETY: the context is alive; what is pushed here is popped below, whatever comes of the work.
        calls.check("cuCtxPushCurrent", unsafe { (calls.push_context)(self.context) })?;
        let done = work();
        let mut popped = ptr::null_mut();
        // SAFETY: the handle may be written.
        calls.check("cuCtxPopCurrent", unsafe { (calls.pop_context)(&raw mut popped) })?;
        done
    }
}

/// What tells GPUs apart of which one is as fast as the other: architecture and number of multiprocessors.
pub fn kind_of_gpu(index: usize) -> Option<String> {
    let gpu = Gpu::of(index).ok()?;
    Some(format!("sm_{} × {}", gpu.architecture, gpu.multiprocessors))
}

/// Compiled kernels on a device. They stay there as long as the process lives.
#[derive(Debug)]
pub(super) struct Module {
    gpu: Gpu,
    functions: BTreeMap<&'static str, Handle>,
}

// SAFETY: the driver lets any thread launch a function.
unsafe impl Send for Module {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a CUBIN and finds the kernels of these names in it.
    pub(super) fn load(gpu: Gpu, cubin: &[u8], names: &[&'static str]) -> Result<Self, String> {
        let calls = Calls::get()?;
        gpu.inside(calls, || {
            let mut module = ptr::null_mut();
            // SAFETY: a CUBIN says itself how long it is; it is read before the call returns.
            calls.check("cuModuleLoadData", unsafe { (calls.load_module)(&raw mut module, cubin.as_ptr().cast()) })?;
            let find = |name: &'static str| {
                let mut function = ptr::null_mut();
                let symbol = CString::new(name).map_err(|error| error.to_string())?;
                // SAFETY: the module is loaded, the name ends with a zero, the handle may be written.
                calls.check(name, unsafe { (calls.function)(&raw mut function, module, symbol.as_ptr()) })?;
                Ok((name, function))
            };
            Ok(Self { gpu, functions: names.iter().copied().map(find).collect::<Result<_, String>>()? })
        })
    }

    /// The device it is on.
    pub(super) fn gpu(&self) -> Gpu {
        self.gpu
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
        let mut arguments = [ptr::from_ref(params).cast_mut().cast::<c_void>()];
        self.gpu.inside(calls, || {
            // SAFETY: the caller's promises; the parameter is copied before the call returns.
            calls.check(name, unsafe {
                (calls.launch)(function, x, y, z, threads, 1, 1, 0, stream, arguments.as_mut_ptr(), ptr::null_mut())
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
            assert!(Gpu::of(index).is_err_and(|reason| !reason.is_empty()), "{index}");
        }
    }
}
