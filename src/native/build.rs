//! Builds the C++ shim and tells every binary of the package where libtorch lies.

use std::env;
use std::error::Error;
use std::fs;
use std::io::Write as _;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

const SHIM: &str = "src/native/shim";
/// A part that tests alone call. It is compiled with the others, so that libtorch's headers are not read once more for it.
const OF_TESTS: &str = "tests/support/waits.cpp";
/// Files of the shim that compute.
const KERNELS: [&str; 4] = ["attention.cpp", "pointwise.cpp", "rows.cpp", "softmax.cpp"];
/// Files whose operations round one by one, as libtorch's and ggml's do.
const UNFUSED: [&str; 3] = ["codes.cpp", "quantiser.cpp", "unpack.cpp"];

fn main() -> Result<(), Box<dyn Error>> {
    let lib = env::var("DEP_TCH_LIBTORCH_LIB").map_err(|_| "torch-sys did not say where libtorch is: run `make setup`")?;
    // Absolute, but with its links kept: third_party/torch is one, and `make setup` may point it elsewhere later.
    let lib = std::path::absolute(lib)?;
    if !lib.join("libtorch_cpu.so").exists() {
        return Err(format!("no `libtorch_cpu.so` in `{}`: run `make setup`", lib.display()).into());
    }
    let root = lib.parent().ok_or("libtorch's lib folder has no parent")?;

    compile_shim(root)?;
    println!("cargo:rustc-link-search=native={}", lib.display());
    for library in ["torch_cpu", "c10"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }

    // A libtorch shipped beside the binary comes first, then the one of this build. They end up as DT_RUNPATH, so
    // LD_LIBRARY_PATH wins over both. Flags of the package only: in RUSTFLAGS a new path would rebuild torch-sys.
    println!("cargo:rustc-link-arg=-Wl,-rpath,$ORIGIN/torch/lib:$ORIGIN/../lib/torch/lib");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    Ok(())
}

/// Compiles whatever lies in the shim's folders, and the tests' part of it, into static libraries.
fn compile_shim(libtorch: &Path) -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={SHIM}");
    let in_shim = |names: &[&str]| names.iter().map(|name| Path::new(SHIM).join(name)).collect::<Vec<_>>();
    let (kernels, unfused) = (in_shim(&KERNELS), in_shim(&UNFUSED));
    let mut doors = Vec::new();
    // A source package may lack the tests.
    if Path::new(OF_TESTS).exists() {
        println!("cargo:rerun-if-changed={OF_TESTS}");
        doors.push(PathBuf::from(OF_TESTS));
    }
    for folder in [SHIM.to_owned(), format!("{SHIM}/cuda")] {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "cpp")
                && !kernels.contains(&path)
                && !unfused.contains(&path)
            {
                doors.push(path);
            }
        }
    }
    doors.sort();
    // What only passes tensors on gains nothing from more optimisation, and would take twice as long to compile.
    let (doors, kernels, unfused) = (
        compiler(libtorch).opt_level(1).file(in_one(&doors)?).clone(),
        of_kernels(libtorch).files(&kernels).clone(),
        of_kernels(libtorch).flag("-ffp-contract=off").files(&unfused).clone(),
    );
    thread::scope(|scope| {
        let doors = scope.spawn(|| doors.try_compile("kvtune_shim"));
        kernels.try_compile("kvtune_kernels")?;
        unfused.try_compile("kvtune_unfused")?;
        doors.join().unwrap_or_else(|panic| resume_unwind(panic))
    })?;
    Ok(())
}

/// Writes a source that includes all `files`: libtorch's headers, which take longer to compile than what uses them, are read once.
fn in_one(files: &[PathBuf]) -> Result<PathBuf, Box<dyn Error>> {
    let path = Path::new(&env::var("OUT_DIR")?).join("doors.cpp");
    let mut all = fs::File::create(&path)?;
    for file in files {
        writeln!(all, "#include \"{}\"", std::path::absolute(file)?.display())?;
    }
    Ok(path)
}

fn of_kernels(libtorch: &Path) -> cc::Build {
    let mut build = compiler(libtorch);
    // Loops are vectorised where they say so; sums of floats are not reordered anywhere else.
    // How vectors are passed matters between binaries only, and these keep theirs to themselves: no notes on it.
    for flag in ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"] {
        build.flag_if_supported(flag);
    }
    build.opt_level(3);
    build
}

fn compiler(libtorch: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").pic(true).debug(false).define("_GLIBCXX_USE_CXX11_ABI", "1");
    // As libtorch itself was built: some of its classes have further members without it.
    build.define("NDEBUG", None);
    // The warnings would be libtorch's headers', not ours.
    build.warnings(false).include(SHIM);
    build.include(libtorch.join("include")).include(libtorch.join("include/torch/csrc/api/include"));
    // c10d's headers hide without them what the library has; behind libtorch's own come those that its wheels lack.
    build.define("USE_DISTRIBUTED", None).define("USE_C10D_GLOO", None).include(format!("{SHIM}/stubs"));
    build
}
