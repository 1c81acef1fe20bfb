//! CUDA's run-time compiler, from where libtorch's own CUDA libraries are: no toolkit has to be installed.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL};

use super::load::{functions, libtorch_folder, open_library};
use crate::native::at_end::AtEnd;

type Program = *mut std::ffi::c_void;

functions! {
    /// The compiler's calls, which return 0 or the number of an error.
    struct NvrtcCalls {
        version = c"nvrtcVersion": unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
        create = c"nvrtcCreateProgram": unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int,
        compile = c"nvrtcCompileProgram": unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
        destroy = c"nvrtcDestroyProgram": unsafe extern "C" fn(*mut Program) -> c_int,
        error_string = c"nvrtcGetErrorString": unsafe extern "C" fn(c_int) -> *const c_char,
        log_size = c"nvrtcGetProgramLogSize": unsafe extern "C" fn(Program, *mut usize) -> c_int,
        log = c"nvrtcGetProgramLog": unsafe extern "C" fn(Program, *mut c_char) -> c_int,
        cubin_size = c"nvrtcGetCUBINSize": unsafe extern "C" fn(Program, *mut usize) -> c_int,
        cubin = c"nvrtcGetCUBIN": unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    }
}

pub(super) struct Nvrtc {
    /// The release of this compiler, as 13.0.
    pub(super) release: String,
    calls: NvrtcCalls,
}

impl Nvrtc {
    /// The compiler of this process; the reason where there is none.
    pub(super) fn get() -> Result<&'static Self, String> {
        static NVRTC: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        NVRTC.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    /// From the folders of libtorch as it is mapped, else from wherever the system's loader looks.
    fn open() -> Result<Self, String> {
        let folders = libtorch_folder().map(|lib| folders_beside(&lib)).unwrap_or_default();
        if let Some((builtins, compiler)) = folders.iter().find_map(|folder| libraries_in(folder)) {
            // By its path, before the compiler asks for it by its name: the loader's own search would not come here. It stays.
            let _handle = open_library(&builtins, RTLD_GLOBAL)?.into_raw();
            return Self::of(open_library(&compiler, RTLD_GLOBAL)?);
        }
        let library =
            ["libnvrtc.so.13", "libnvrtc.so.12"].iter().find_map(|name| open_library(Path::new(name), RTLD_GLOBAL).ok());
        let folders = folders.iter().map(|folder| format!("`{}`", folder.display())).collect::<Vec<_>>().join(", ");
        Self::of(library.ok_or_else(|| {
            format!("CUDA's run-time compiler `libnvrtc.so` is neither in {folders} nor where the loader looks: install `nvidia-cuda-nvrtc`")
        })?)
    }

    fn of(library: Library) -> Result<Self, String> {
        // SAFETY: the types are those of nvrtc.h.
        let calls = unsafe { NvrtcCalls::find(library)? };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both numbers may be written.
        if unsafe { (calls.version)(&raw mut major, &raw mut minor) } != 0 {
            return Err("CUDA's run-time compiler does not tell its version".to_owned());
        }
        Ok(Self { release: format!("{major}.{minor}"), calls })
    }

    /// Compiles a text; one of the options must name a real architecture, as `--gpu-architecture=sm_90`. Machine code, and what was said of it.
    pub(super) fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<(Vec<u8>, String), String> {
        let text = |text: &str| CString::new(text).map_err(|_| format!("`{name}`: a zero in its text or options"));
        let (file, source) = (text(&format!("{name}.cu"))?, text(source)?);
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program: Program = ptr::null_mut();
        let (headers, names) = (ptr::null(), ptr::null());
        // SAFETY: all texts end with a zero and outlive the call; no headers are given.
        let code = unsafe { (self.calls.create)(&raw mut program, source.as_ptr(), file.as_ptr(), 0, headers, names) };
        self.check(code)?;
        let mut own = program;
        let _end = AtEnd(|| {
            // SAFETY: it was created and is destroyed once.
            unsafe { (self.calls.destroy)(&raw mut own) };
        });
        // SAFETY: the program is alive, and all options end with a zero.
        let done = unsafe { (self.calls.compile)(program, pointers.len() as c_int, pointers.as_ptr()) };
        let log = self.bytes(program, self.calls.log_size, self.calls.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
        self.check(done).map_err(|error| format!("`{name}` does not compile: {error}\n{log}"))?;
        Ok((self.bytes(program, self.calls.cubin_size, self.calls.cubin)?, log))
    }

    /// What a pair of calls gives of a program, one for its size and one for itself.
    fn bytes(
        &self,
        program: Program,
        size_of: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, String> {
        let mut size = 0;
        // SAFETY: the program is alive and the size may be written.
        self.check(unsafe { size_of(program, &raw mut size) })?;
        let mut bytes = vec![0u8; size];
        // SAFETY: there is room for as many bytes as were announced.
        self.check(unsafe { fill(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn check(&self, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: for any number it returns a text of its own that ends with a zero.
        let text = unsafe { CStr::from_ptr((self.calls.error_string)(code)) };
        Err(text.to_string_lossy().into_owned())
    }
}

/// The release of the compiler that this process uses, as 13.0; the reason where there is none.
pub fn compiler_release() -> Result<String, String> {
    Nvrtc::get().map(|nvrtc| nvrtc.release.clone())
}

/// Where installations of libtorch keep NVIDIA's libraries: Python wheels for CUDA 13 and 12 in folders of their own, archives beside it.
fn folders_beside(lib: &Path) -> Vec<PathBuf> {
    let site = lib.parent().and_then(Path::parent);
    let wheels = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].iter().filter_map(|folder| site.map(|site| site.join(folder)));
    wheels.chain([lib.to_owned()]).collect()
}

/// The compiler and what it needs beside it, in this folder.
fn libraries_in(folder: &Path) -> Option<(PathBuf, PathBuf)> {
    // libnvrtc.so.13, libnvrtc-builtins.so.13.0, and in archives libnvrtc-1a2b3c.so.13; `.alt.` has fewer architectures.
    let mut found: Vec<PathBuf> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    found.sort();
    let named = |path: &Path, start: &str| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        name.starts_with(start) && name.contains(".so") && !name.contains(".alt.")
    };
    let last = |start: &str, but: &str| found.iter().rfind(|path| named(path, start) && !named(path, but)).cloned();
    Some((last("libnvrtc-builtins", "\0")?, last("libnvrtc", "libnvrtc-builtins")?))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::built::{KernelSource, Setting, options};
    use super::*;

    /// The compiler, or one line that says why a test is left out.
    #[allow(clippy::print_stderr, reason = "a test that is left out says why")]
    fn compiler() -> Option<&'static Nvrtc> {
        // A call that needs libtorch, so that the linker keeps it.
        let _one = tch::Tensor::from(1_i64);
        match Nvrtc::get() {
            Ok(nvrtc) => Some(nvrtc),
            Err(reason) => {
                eprintln!("skipped: {reason}");
                None
            }
        }
    }

    /// Every number that the compiler's assembler gives before these words.
    fn counts(log: &str, words: &str) -> Vec<usize> {
        let before = log.match_indices(words).map(|(at, _)| log[..at].rsplit(' ').next().unwrap_or_default().parse());
        before.collect::<Result<_, _>>().unwrap()
    }

    /// Asserts that a text compiles for Ampere, Hopper and Blackwell, with each of these settings, without a warning, and that none of its
    /// kernels spills a register.
    #[allow(clippy::print_stdout, reason = "how many registers a kernel takes is worth reading")]
    pub(in crate::native::cuda) fn spills_nothing<const N: usize>(source: &KernelSource, settings: &[[Setting; N]]) {
        let Some(nvrtc) = compiler() else { return };
        for architecture in [80, 90, 100] {
            for setting in settings {
                let mut options = options(architecture, setting);
                options.push("--ptxas-options=-v".to_owned());
                let (cubin, log) = nvrtc.compile(source.name, source.text, &options).unwrap();
                assert!(cubin.starts_with(b"\x7fELF"));
                let (registers, spilt) = (counts(&log, " registers"), counts(&log, " bytes spill"));
                println!("`{}` for sm_{architecture}, {setting:?}: registers {registers:?}", source.name);
                // Of each kernel's spills the stores and the loads are told apart.
                let count = source.kernels.len();
                assert_eq!((registers.len(), spilt), (count, vec![0; 2 * count]), "{log}");
                assert!(!log.contains("warning"), "{log}");
            }
        }
    }

    #[test]
    fn libraries_are_found_in_wheels_and_archives() {
        let site = tempfile::tempdir().unwrap();
        let lib = site.path().join("torch/lib");
        let wheel = site.path().join("nvidia/cu13/lib");
        fs::create_dir_all(&lib).unwrap();
        let first = |lib: &Path| folders_beside(lib).iter().find_map(|folder| libraries_in(folder));
        assert_eq!(first(&lib), None);
        let touch = |folder: &Path, name: &str| fs::write(folder.join(name), "").unwrap();
        touch(&lib, "libnvrtc-1a2b3c.so.13");
        assert_eq!(first(&lib), None, "without its other half it cannot compile");
        touch(&lib, "libnvrtc-builtins.so.13.0");
        let name = |found: Option<(PathBuf, PathBuf)>| {
            found.map(|(a, b)| [a, b].map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()))
        };
        assert_eq!(name(first(&lib)), Some(["libnvrtc-builtins.so.13.0".to_owned(), "libnvrtc-1a2b3c.so.13".to_owned()]));
        fs::create_dir_all(&wheel).unwrap();
        for library in ["libnvrtc.so.13", "libnvrtc.alt.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0"] {
            touch(&wheel, library);
        }
        assert_eq!(first(&lib), Some((wheel.join("libnvrtc-builtins.so.13.0"), wheel.join("libnvrtc.so.13"))));
    }

    #[test]
    fn a_text_that_is_wrong_is_an_error_with_its_line() {
        let Some(nvrtc) = compiler() else { return };
        let error =
            nvrtc.compile("wrong", "__global__ void f() { int x = y; }", &["--gpu-architecture=sm_80".into()]).unwrap_err();
        assert!(error.contains("wrong.cu(1)") && error.contains('y'), "{error}");
        let error = nvrtc.compile("none", "", &["--gpu-architecture=sm_1".into()]).unwrap_err();
        assert!(error.contains("--gpu-architecture"), "{error}");
        assert!(nvrtc.compile("zero", "\0", &[]).is_err());
    }
}
