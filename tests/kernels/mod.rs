//! The kernels for CUDA on a GPU that is simulated on the CPU: the very text that a device would run, compiled by the host's compiler.
//! `gpu.h` says what the simulated GPU is stricter about.

mod selection;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvtune::store::Bits;
use tch::{Device, Kind, Tensor};

fn source(kernel: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/native/cuda/kernels").join(format!("{kernel}.cu"))
}

/// Compiles `tests/kernels/NAME.cpp` with a kernel's text in it, and runs it.
fn play(name: &str, text: &Path, settings: &[String], arguments: &[&Path]) -> Output {
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
    Command::new(program).args(arguments).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn head(width: usize, is_f16: bool) -> [String; 2] {
    [format!("-DKVTUNE_WIDTH={width}"), format!("-DKVTUNE_F16={}", u8::from(is_f16))]
}

#[test]
fn attention_mass_is_the_plain_sum_for_every_width_and_kind() {
    for (width, is_f16) in [(16, true), (64, false), (80, true), (128, false), (256, false)] {
        let output = play("attention_mass", &source("attention_mass"), &head(width, is_f16), &[]);
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

#[test]
fn faults_in_the_text_of_attention_mass_are_seen() {
    let text = fs::read_to_string(source("attention_mass")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (right, wrong) in FAULTS {
        assert!(text.contains(right), "`{right}` is not in the kernel any more");
        let broken = folder.path().join("broken.cu");
        fs::write(&broken, text.replace(right, wrong)).unwrap();
        let output = play("attention_mass", &broken, &head(32, false), &[]);
        assert!(!output.status.success() && said(&output).starts_with("error: "), "`{right}` → `{wrong}`: {}", said(&output));
    }
}

/// Vectors and what libtorch's operations on the CPU make of them, as the simulated kernels read them.
fn quantised_on_the_cpu(bits: Bits, kind: Kind) -> Vec<u8> {
    let raw = |x: &Tensor| Vec::<u8>::try_from(x.contiguous().view([-1]).view_dtype(Kind::Uint8)).unwrap();
    let mut file = Vec::new();
    tch::manual_seed(7);
    for width in [1, 2, 7, 8, 31, 33, 50, 64, 100, 128, 255, 256] {
        let cpu = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        // Around zero, far from it, constant, all sizes, and beyond what f16 holds.
        let far = cpu([6, width]) + cpu([6, 1]) * 500.0;
        let powers = Tensor::arange_start(-5, 4, (Kind::Float, Device::Cpu)).view([9, 1]) * 10f64.ln();
        let sizes = cpu([9, width]) * powers.exp();
        let large = cpu([4, width]) * if kind == Kind::Half { 1e4 } else { 1e9 };
        let x = Tensor::cat(&[cpu([8, width]), far, cpu([3, 1]).expand([3, width], false), sizes, large], 0).to_kind(kind);
        let q = bits.quantise(&x);
        let restored = bits.restore(&q.level, &q.range, width, kind);
        let header = [width, x.size()[0], bits.level_bytes(width)].map(|size| i32::try_from(size).unwrap().to_ne_bytes());
        file.extend(header.into_iter().flatten());
        for plane in [&x, &q.level, &q.range, &restored] {
            file.extend(raw(plane));
        }
    }
    file
}

/// What the program says of the vectors that differ.
fn quantiser(text: &Path, bits: Bits, kind: Kind) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let cases = folder.path().join("cases");
    fs::write(&cases, quantised_on_the_cpu(bits, kind)).unwrap();
    let bits = match bits {
        Bits::Four => 4,
        Bits::Five => 5,
        Bits::Eight => 8,
        Bits::Nine => 9,
    };
    let kind = [Kind::Float, Kind::BFloat16, Kind::Half].iter().position(|other| *other == kind).unwrap();
    play("quantiser", text, &[format!("-DKVTUNE_KIND={kind}"), format!("-DKVTUNE_BITS={bits}")], &[&cases])
}

#[test]
fn the_quantiser_gives_the_bits_that_libtorch_gives() {
    for (bits, kind) in
        [(Bits::Nine, Kind::Float), (Bits::Five, Kind::BFloat16), (Bits::Four, Kind::Half), (Bits::Eight, Kind::BFloat16)]
    {
        let output = quantiser(&source("quantiser"), bits, kind);
        let said = said(&output);
        assert!(output.status.success(), "{bits:?}, {kind:?}: {said}");
        // A GPU multiplies with the reciprocal of the number of steps, where the CPU divides: a scale may be its neighbour.
        let different: usize = said.split(' ').next().unwrap().parse().unwrap();
        assert!(different <= 2 && said.ends_with(" of 360 vectors differ"), "{bits:?}, {kind:?}: {said}");
    }
}

#[test]
fn faults_in_the_text_of_the_quantiser_are_seen() {
    let text = fs::read_to_string(source("quantiser")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (right, wrong) in [
        ("  __syncthreads();\n", ""),
        ("rintf(", "floorf("),
        ("first << 4 | second", "second << 4 | first"),
        ("(7 - at / eighth)", "(at / eighth)"),
        ("bits = bits << 1 |", "bits = bits |"),
    ] {
        assert!(text.contains(right), "`{right}` is not in the kernel any more");
        let broken = folder.path().join("broken.cu");
        fs::write(&broken, text.replace(right, wrong)).unwrap();
        let said = said(&quantiser(&broken, Bits::Five, Kind::Float));
        assert!(!said.starts_with("0 of ") && !said.starts_with("1 of "), "`{right}` → `{wrong}`: {said}");
    }
}
