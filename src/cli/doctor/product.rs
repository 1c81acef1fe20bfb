//! A product of matrices on a device beside the same in f64 on the CPU, and how fast larger ones are.

use std::time::{Duration, Instant};

use tch::{Device, Kind, TchError, Tensor, no_grad};

use super::check::DoctorCheck;
use crate::native::cuda;

/// Side of the matrices that are compared.
const COMPARED: i64 = 512;
/// Timed for so long, at least.
const TIME: Duration = Duration::from_millis(100);
/// Side of the matrices that are timed.
const SIDE_CPU: i64 = 512;
const SIDE_CUDA: i64 = 4096;
/// The largest relative error: of f32 in full, which TF32 would not keep, and of narrow factors summed in f32.
const TOLERANCE_F32: f64 = 1e-5;
const TOLERANCE_BF16: f64 = 1e-2;

/// What a product in `kind` came to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) kind: Kind,
    /// Of the whole matrix.
    pub(super) relative_error: f64,
    pub(super) flops_per_second: f64,
}

/// Products in each of `kinds`.
pub(super) fn check(name: &str, device: Device, kinds: &[Kind]) -> DoctorCheck {
    let all: Result<Vec<Product>, TchError> = kinds.iter().map(|&kind| measured(device, kind)).collect();
    told(name, all.map_err(|error| first_line(&error)))
}

fn told(name: &str, all: Result<Vec<Product>, String>) -> DoctorCheck {
    let hint = "the device or its libraries compute wrongly: look at the driver's version and for errors in `dmesg`";
    let all = match all {
        Ok(all) => all,
        Err(why) => return DoctorCheck::failed(name, why, hint),
    };
    let words =
        |p: &Product| format!("{}: error {:.0e}, {:.3} TFLOP/s", name_of(p.kind), p.relative_error, p.flops_per_second / 1e12);
    let found: Vec<String> = all.iter().map(words).collect();
    let is_right = all.iter().all(|p| p.relative_error <= if p.kind == Kind::Float { TOLERANCE_F32 } else { TOLERANCE_BF16 });
    let check =
        if is_right { DoctorCheck::ok(name, found.join("; ")) } else { DoctorCheck::failed(name, found.join("; "), hint) };
    let figures = all.iter().flat_map(|p| match p.kind {
        Kind::Float => [("f32_relative_error", p.relative_error), ("f32_flops_per_second", p.flops_per_second)],
        _ => [("bf16_relative_error", p.relative_error), ("bf16_flops_per_second", p.flops_per_second)],
    });
    check.with(&figures.collect::<Vec<_>>())
}

fn name_of(kind: Kind) -> &'static str {
    if kind == Kind::Float { "f32" } else { "bf16" }
}

/// The first line of what libtorch says: the others are where in its code.
pub(super) fn first_line(error: &TchError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

fn measured(device: Device, kind: Kind) -> Result<Product, TchError> {
    no_grad(|| {
        let narrow = |x: Tensor| x.f_to_kind(kind);
        let (x, w) = (narrow(drawn(COMPARED))?, narrow(drawn(COMPARED))?);
        let expected = x.f_to_kind(Kind::Double)?.f_matmul(&w.f_to_kind(Kind::Double)?)?;
        let found =
            x.f_to_device(device)?.f_matmul(&w.f_to_device(device)?)?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
        let error = f64::try_from((found - &expected).f_norm()? / expected.f_norm()?)?;
        Ok(Product { kind, relative_error: error, flops_per_second: rate(device, kind)? })
    })
}

fn rate(device: Device, kind: Kind) -> Result<f64, TchError> {
    let side = if device.is_cuda() { SIDE_CUDA } else { SIDE_CPU };
    // Drawn: a GPU multiplies ones faster than other numbers.
    let [x, w] = [(); 2].map(|()| Tensor::f_randn([side, side], (kind, device)));
    let (x, w) = (x?, w?);
    let once = || -> Result<Instant, TchError> {
        drop(x.f_matmul(&w)?);
        cuda::wait(device);
        Ok(Instant::now())
    };
    let begun = once()?;
    let mut count = 0_i64;
    loop {
        let now = once()?;
        count += 1;
        if now - begun >= TIME {
            return Ok(2.0 * (count * side * side * side) as f64 / (now - begun).as_secs_f64());
        }
    }
}

/// A tensor of `side` rows and columns, drawn on the CPU.
///
/// # Shapes
/// `(side, side)`, f32.
fn drawn(side: i64) -> Tensor {
    Tensor::randn([side, side], (Kind::Float, Device::Cpu))
}

#[cfg(test)]
mod tests {
    use super::super::check::State;
    use super::*;

    #[test]
    fn products_on_the_cpu_are_right() {
        let check = check("CPU product", Device::Cpu, &[Kind::Float, Kind::BFloat16]);
        assert_eq!(check.state, State::Ok, "{check:?}");
        assert_eq!(check.figures.len(), 4);
        assert!(check.figures.iter().all(|(_, number)| *number > 0.0), "{check:?}");
    }

    #[test]
    fn an_error_of_tf32_is_a_failure() {
        let product = |relative_error| Product { kind: Kind::Float, relative_error, flops_per_second: 5e13 };
        assert_eq!(told("x", Ok(vec![product(3e-7)])).found, "f32: error 3e-7, 50.000 TFLOP/s");
        assert_eq!(told("x", Ok(vec![product(3e-4)])).state, State::Failed);
        assert_eq!(told("x", Ok(vec![product(f64::NAN)])).state, State::Failed);
        assert_eq!(told("x", Err("CUDA error: no kernel image".to_owned())).found, "CUDA error: no kernel image");
    }
}
