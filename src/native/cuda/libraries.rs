//! The libraries of CUDA that come with libtorch: whether they can be opened, and of which version they are.

use std::ffi::{CStr, c_int};
use std::fs;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL};

use super::gpus::version;
use super::load::{libtorch_folder, open_library, symbol};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Companion {
    Runtime,
    /// Convolutions and attention; libtorch's CUDA half needs it to start.
    Cudnn,
    /// Sums over several GPUs; libtorch's CUDA half needs it to start.
    Nccl,
}

impl Companion {
    pub fn file_name(self) -> &'static str {
        match self {
            Self::Runtime => "libcudart.so.13",
            Self::Cudnn => "libcudnn.so.9",
            Self::Nccl => "libnccl.so.2",
        }
    }

    /// Opens it, beside libtorch or else where the loader looks, and asks for its version; `Err` says why that cannot be done. With the version
    /// comes the library's file, or the name by which the system's loader found it.
    pub fn open(self) -> Result<(String, PathBuf), String> {
        let path = self.path()?;
        let library = open_library(&path, RTLD_LOCAL)?;
        let version = self.version(&library).ok_or_else(|| format!("`{}` does not tell its version", path.display()))?;
        // Never closed: whoever uses it opens it again, and finds it loaded.
        let _handle = library.into_raw();
        Ok((version, path))
    }

    /// The library's file, or the name by which the system's loader may find it.
    pub(super) fn path(self) -> Result<PathBuf, String> {
        if let Some(path) = std::env::var_os("KVTUNE_NCCL").filter(|path| self == Self::Nccl && !path.is_empty()) {
            return Ok(path.into());
        }
        Ok(beside(&libtorch_folder()?, self.file_name()).unwrap_or_else(|| self.file_name().into()))
    }

    fn version(self, library: &Library) -> Option<String> {
        let number = |name: &CStr| {
            let mut number = 0;
            // SAFETY: a function of the library, which by its documented type writes a number.
            let status = unsafe { symbol::<unsafe extern "C" fn(*mut c_int) -> c_int>(library, name).ok()?(&raw mut number) };
            (status == 0).then_some(number)
        };
        Some(match self {
            Self::Runtime => {
                let (major, minor) = version(number(c"cudaRuntimeGetVersion")?);
                format!("{major}.{minor}")
            }
            // SAFETY: by its documented type it returns a number.
            Self::Cudnn => dotted(unsafe { symbol::<unsafe extern "C" fn() -> usize>(library, c"cudnnGetVersion").ok()?() }),
            Self::Nccl => dotted(usize::try_from(number(c"ncclGetVersion")?).unwrap_or(0)),
        })
    }
}

/// Writes 91900 as `9.19.0`, as NVIDIA numbers its versions.
pub(super) fn dotted(number: usize) -> String {
    format!("{}.{}.{}", number / 10_000, number % 10_000 / 100, number % 100)
}

/// A library of the wheels that libtorch's folder, `site-packages/torch/lib`, stands beside: `site-packages/nvidia/*/lib/NAME`; or one in
/// that folder itself.
fn beside(folder: &Path, name: &str) -> Option<PathBuf> {
    let wheels = folder.parent().and_then(Path::parent).map(|site| site.join("nvidia"));
    let entries = wheels.and_then(|wheels| fs::read_dir(wheels).ok());
    let mut folders: Vec<PathBuf> = entries.into_iter().flatten().flatten().map(|entry| entry.path().join("lib")).collect();
    folders.sort();
    folders.push(folder.to_owned());
    folders.into_iter().map(|folder| folder.join(name)).find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_found_in_the_wheels_beside_libtorch() {
        let site = tempfile::tempdir().unwrap();
        let lib = site.path().join("torch/lib");
        for folder in [&lib, &site.path().join("nvidia/cu13/lib"), &site.path().join("nvidia/nccl/lib")] {
            fs::create_dir_all(folder).unwrap();
        }
        assert_eq!(beside(&lib, "libnccl.so.2"), None);
        fs::write(lib.join("libnccl.so.2"), "").unwrap();
        assert_eq!(beside(&lib, "libnccl.so.2"), Some(lib.join("libnccl.so.2")));
        fs::write(site.path().join("nvidia/nccl/lib/libnccl.so.2"), "").unwrap();
        assert!(beside(&lib, "libnccl.so.2").unwrap().ends_with("nvidia/nccl/lib/libnccl.so.2"));
    }

    #[test]
    fn each_is_opened_or_says_why_not() {
        // A call that needs libtorch, so that the linker keeps it.
        let _one = tch::Tensor::from(1_i64);
        for companion in [Companion::Runtime, Companion::Cudnn, Companion::Nccl] {
            match companion.open() {
                Ok((version, _)) => assert!(version.contains('.') && !version.starts_with("0."), "{version}"),
                Err(why) => assert!(why.contains(companion.file_name()), "{why}"),
            }
        }
        assert_eq!((dotted(91900), dotted(22809)), ("9.19.0".to_owned(), "2.28.9".to_owned()));
    }
}
