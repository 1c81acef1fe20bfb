//! The kernels for CUDA on a GPU that is simulated on the CPU: the very text that a device would run, compiled by the host's compiler.
//! `gpu.h` says what the simulated GPU is stricter about.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn source(kernel: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/native/cuda/kernels").join(format!("{kernel}.cu"))
}

/// Compiles `tests/kernels/NAME.cpp` with a kernel's text in it, and runs it.
fn play(name: &str, text: &Path, settings: &[String]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("simulated");
    let test = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels").join(format!("{name}.cpp"));
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    // Fibers leap from stack to stack, which glibc's fortified longjmp takes for a fault; and no sum takes a product in unless it says so.
    let compiled = Command::new(compiler)
        .args([
            "-std=c++17",
            "-O1",
            "-U_FORTIFY_SOURCE",
            "-ffp-contract=off",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unknown-pragmas",
        ])
        .args(settings)
        .arg(format!("-DKVTUNE_KERNEL=\"{}\"", text.display()))
        .args([test.as_path(), Path::new("-o"), program.as_path()])
        .output()
        .expect("a C++ compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Command::new(program).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn head(width: usize, is_f16: bool) -> [String; 2] {
    [format!("-DKVTUNE_WIDTH={width}"), format!("-DKVTUNE_F16={}", u8::from(is_f16))]
}

#[test]
fn attention_mass_is_the_plain_sum_for_every_width_and_kind() {
    for (width, is_f16) in [(16, true), (80, false), (128, true), (256, false)] {
        let output = play("attention_mass", &source("attention_mass"), &head(width, is_f16));
        let said = said(&output);
        assert!(output.status.success(), "{width} channels: {said}");
        // The bound of 1e-5 is the program's own.
        assert!(said.starts_with("14 cases, worst "), "{said}");
    }
}

/// Faults in the kernel's text, each of which must be seen.
const FAULTS: [(&str, &str); 7] = [
    ("    end_copies();\n", ""),
    ("    __syncthreads();\n    if (u + 1", "    if (u + 1"),
    ("tiles.query[u % 2] + i", "tiles.query[0] + i"),
    ("tiles.token[u % 4]", "tiles.token[u % 2]"),
    ("slot < p.slots ? __ldg(from + step * 8) : 0", "__ldg(from + step * 8)"),
    ("< own_key + tile", "<= own_key + tile"),
    ("part[2], part[3]", "part[3], part[2]"),
];

/// Each of `faults`, right and wrong, in the first place where a kernel's text has it is an error of the program.
fn faults_are_seen(kernel: &str, faults: &[(&str, &str)], run: impl Fn(&Path) -> Output) {
    let text = fs::read_to_string(source(kernel)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (right, wrong) in faults {
        assert!(text.contains(right), "`{right}` is not in the kernels any more");
        let broken = folder.path().join("broken.cu");
        fs::write(&broken, text.replacen(right, wrong, 1)).unwrap();
        let output = run(&broken);
        assert!(!output.status.success() && said(&output).starts_with("error: "), "`{right}` → `{wrong}`: {}", said(&output));
    }
}

#[test]
fn faults_in_the_text_of_attention_mass_are_seen() {
    faults_are_seen("attention_mass", &FAULTS, |broken| play("attention_mass", broken, &head(32, false)));
}

fn pointwise(text: &Path, is_f16: bool) -> Output {
    play("pointwise", text, &[format!("-DKVTUNE_F16={}", u8::from(is_f16))])
}

#[test]
fn norms_gates_and_rotations_are_the_plain_formulas() {
    for is_f16 in [false, true] {
        let output = pointwise(&source("pointwise"), is_f16);
        // The bound of one unit in the last place is the program's own.
        assert!(output.status.success() && said(&output).starts_with("13 cases, worst "), "{}", said(&output));
    }
}

#[test]
fn faults_in_the_text_of_norms_gates_and_rotations_are_seen() {
    let faults = [
        ("mask > 0; mask /= 2", "mask > 1; mask /= 2"),
        ("piece = mine + KEPT * THREADS; piece < pieces", "piece = mine + KEPT * THREADS; piece < pieces - 1"),
        ("if (piece >= p.pieces) return;", ""),
        ("open * (1.0f + x * closed)", "open * (1.0f + x)"),
        ("a * c - b * s", "a * c + b * s"),
        ("from + p.half", "from + 1"),
        ("rest % p.heads", "rest % p.tokens"),
    ];
    faults_are_seen("pointwise", &faults, |broken| pointwise(broken, false));
}
