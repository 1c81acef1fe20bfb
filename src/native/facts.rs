//! What libtorch says of itself and of the CPU.

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::AsFd;

use rustix::termios::tcgetwinsize;

unsafe extern "C" {
    safe fn kvtune_libtorch_version() -> *const c_char;
    safe fn kvtune_libtorch_config() -> *const c_char;
    safe fn kvtune_cpu_capability() -> *const c_char;
    fn kvtune_cpu_has(feature: *const c_char) -> c_int;
    safe fn kvtune_threads_at_work() -> i64;
}

/// The version of libtorch this program was built for.
pub fn libtorch_version() -> String {
    text(kvtune_libtorch_version()).unwrap_or_default()
}

/// The version of the libtorch that is loaded, as it tells how it was built.
pub fn loaded_libtorch() -> Option<String> {
    version_in(&text(kvtune_libtorch_config())?)
}

/// `2.11.0` of `… TORCH_VERSION=2.11.0, USE_CUDA=ON, …`.
fn version_in(config: &str) -> Option<String> {
    let (_, rest) = config.split_once("TORCH_VERSION=")?;
    Some(rest.split([',', ' ', '\n']).next()?.to_owned())
}

/// The widest vector units that libtorch's own kernels use, as `AVX512`.
pub fn cpu_capability() -> Option<String> {
    text(kvtune_cpu_capability())
}

/// Whether the CPU has what libtorch calls `amx_tile`, `avx512_bf16` and so on.
pub fn cpu_has(feature: &CStr) -> bool {
    // SAFETY: a string that ends with a zero; it is only read.
    unsafe { kvtune_cpu_has(feature.as_ptr()) != 0 }
}

/// Among how many threads the shim's kernels share their work out.
pub fn threads_at_work() -> usize {
    usize::try_from(kvtune_threads_at_work()).unwrap_or(0)
}

/// Columns of the terminal behind a stream; `None` where there is no terminal, or it does not say.
pub fn terminal_width(stream: &impl AsFd) -> Option<usize> {
    tcgetwinsize(stream).ok().map(|size| usize::from(size.ws_col)).filter(|&columns| columns > 0)
}

pub(super) fn text(said: *const c_char) -> Option<String> {
    // SAFETY: null, or a string that ends with a zero and stays until this thread asks again.
    (!said.is_null()).then(|| unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_of_the_version_of_its_headers() {
        assert!(libtorch_version().starts_with("2."), "{}", libtorch_version());
        assert_eq!(loaded_libtorch(), Some(libtorch_version()));
        assert_eq!(version_in("- Build settings: X=1, TORCH_VERSION=2.11.0, USE_CUDA=ON, "), Some("2.11.0".to_owned()));
        assert_eq!(version_in("nothing"), None);
    }

    #[test]
    fn the_cpu_is_named() {
        assert!(cpu_capability().is_some_and(|name| !name.is_empty()));
        assert!(!cpu_has(c"a_feature_that_no_cpu_has"));
        assert!(threads_at_work() >= 1);
    }
}
