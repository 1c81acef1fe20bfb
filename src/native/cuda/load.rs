//! Finds CUDA at run time: the binary links only libtorch's CPU half, so that it starts on any machine.

use std::error::Error;
use std::ffi::{CStr, c_int};
use std::fs;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaSupport {
    /// libtorch's CUDA half is loaded; whether a device answers is for `tch::Cuda` to say.
    Loaded,
    /// The machine shows no NVIDIA device, so nothing was loaded.
    NoDevice,
    /// There is a device, but libtorch's CUDA half could not be loaded, for this reason.
    Unavailable(String),
}

/// Loads libtorch's CUDA half where there is a device for it. Must run before any other call into libtorch: the first question about CUDA
/// caches "there is none", and a library loaded after that is never looked at.
pub fn load_cuda() -> CudaSupport {
    if device_nodes().is_empty() {
        return CudaSupport::NoDevice;
    }
    let opened = libtorch_folder().and_then(|folder| match folder.join("libtorch_cuda.so") {
        path if path.exists() => open_library(&path, RTLD_GLOBAL),
        path => Err(format!("libtorch is installed without CUDA: `{}` does not exist", path.display())),
    });
    match opened {
        Ok(library) => {
            // Never unloaded: its initialisers have registered kernels with libtorch_cpu for the life of the process.
            let _handle = library.into_raw();
            CudaSupport::Loaded
        }
        Err(reason) => CudaSupport::Unavailable(reason),
    }
}

/// Opens a library of CUDA or of libtorch's CUDA half, by its path or where the system's loader finds its name.
pub(super) fn open_library(path: &Path, visibility: c_int) -> Result<Library, String> {
    // SAFETY: opening runs the library's initialisers. They are NVIDIA's, made to run in any process, or libtorch's own, of the same release
    // as the half that is mapped already.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | visibility) };
    library.map_err(|error| format!("`{}` cannot be opened: {}", path.display(), said(&error)))
}

/// A table of functions, each with its name in a library, which `find` keeps for ever; it is unsafe, as the types must be right.
macro_rules! functions {
    ($(#[$attribute:meta])* $visibility:vis struct $table:ident { $($field:ident = $name:literal: $kind:ty,)* }) => {
        $(#[$attribute])*
        $visibility struct $table { $($field: $kind,)* }

        impl $table {
            unsafe fn find(library: libloading::os::unix::Library) -> Result<Self, String> {
                // SAFETY: the caller's promise.
                let found = unsafe { Self { $($field: $crate::native::cuda::load::symbol(&library, $name)?,)* } };
                let _handle = library.into_raw();
                Ok(found)
            }
        }
    };
}
pub(super) use functions;

/// A symbol of a library, of the type that the caller knows it to have.
///
/// # Safety
/// `T` must be the type of the function of that name.
pub(super) unsafe fn symbol<T: Copy>(library: &Library, name: &CStr) -> Result<T, String> {
    // SAFETY: the caller's.
    let found = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
    found.map(|symbol| *symbol).map_err(|error| format!("`{}` is missing: {}", name.to_string_lossy(), said(&error)))
}

fn said(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// The device nodes that NVIDIA's driver has made: `nvidia0`, `nvidiactl`, …, or `dxg` under WSL.
pub fn device_nodes() -> Vec<String> {
    nodes_in(Path::new("/dev"))
}

fn nodes_in(dev: &Path) -> Vec<String> {
    let names = fs::read_dir(dev).into_iter().flatten().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut nodes: Vec<String> = names.filter(|name| name.starts_with("nvidia") || name == "dxg").collect();
    nodes.sort();
    nodes
}

/// The folder that `libtorch_cpu.so` was mapped from, or why it is not known. CUDA's libraries must be of the same installation.
pub fn libtorch_folder() -> Result<PathBuf, String> {
    let maps = fs::read_to_string("/proc/self/maps").map_err(|error| format!("`/proc/self/maps` cannot be read: {error}"))?;
    folder_in(&maps).ok_or_else(|| "`libtorch_cpu.so` is not mapped into this process".to_owned())
}

fn folder_in(maps: &str) -> Option<PathBuf> {
    // 7f3a0000-7f3b0000 r--p 00000000 fe:00 1234    /opt/my torch/lib/libtorch_cpu.so
    let path =
        maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])).find(|path| path.ends_with("/libtorch_cpu.so"))?;
    Path::new(path).parent().map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_read_from_the_memory_map() {
        let maps = "55d0-55d1 r-xp 00000000 fe:00 77   /usr/bin/kvtune\n7f00-7f01 rw-p 00000000 00:00 0 \n\
                    7f3a-7f3b r--p 00000000 fe:00 12   /opt/my torch/lib/libtorch_cpu.so\n";
        assert_eq!(folder_in(maps), Some(PathBuf::from("/opt/my torch/lib")));
        assert_eq!(folder_in("7f00-7f01 rw-p 00000000 00:00 0 [heap]\n"), None);
    }

    #[test]
    fn a_device_is_a_node_of_the_driver() {
        let dev = tempfile::tempdir().unwrap();
        fs::write(dev.path().join("null"), "").unwrap();
        assert!(nodes_in(dev.path()).is_empty());
        fs::write(dev.path().join("nvidiactl"), "").unwrap();
        fs::write(dev.path().join("nvidia0"), "").unwrap();
        assert_eq!(nodes_in(dev.path()), ["nvidia0", "nvidiactl"]);
        assert!(nodes_in(&dev.path().join("missing")).is_empty());
    }

    #[test]
    fn this_process_has_libtorch_mapped() {
        // A call that needs libtorch, so that the linker keeps it.
        let _one = tch::Tensor::from(1_i64);
        assert!(libtorch_folder().is_ok_and(|folder| folder.join("libtorch_cpu.so").exists()));
    }
}
