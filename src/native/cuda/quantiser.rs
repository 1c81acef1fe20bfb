//! The kernels of the quantiser: vectors in few bits and back, in one pass each. `store` has the rule, in libtorch's operations.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use tch::{Device, Kind, Tensor};

use super::built::{self, KernelSource, Setting, Which};
use super::driver::{Module, launch_stream};

pub(super) static SOURCE: KernelSource =
    KernelSource { name: "quantiser", text: include_str!("kernels/quantiser.cu"), kernels: &["quantise", "restore"] };

/// Threads of a block, and vectors that it takes, one to a warp.
const THREADS: usize = 256;
const VECTORS: usize = THREADS / 32;
/// The longest vector that the kernels take.
const WIDEST: i64 = 256;

/// The parameter of both kernels, as their text has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Planes {
    x: *mut c_void,
    level: *mut c_void,
    range: *mut c_void,
    vectors: i64,
    width: c_int,
    level_bytes: c_int,
}

// The kernels' text asserts the same.
const _: () = assert!(size_of::<Planes>() == 40);

/// How levels lie in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// Bits of a level: 4, 5, 8 or 9.
    pub bits: usize,
    /// Values of a vector.
    pub width: i64,
    /// Bytes of its levels.
    pub bytes: i64,
}

fn settings(kind: Kind, levels: Levels) -> Option<[Setting; 2]> {
    let kind = match kind {
        Kind::Float => 0,
        Kind::BFloat16 => 1,
        Kind::Half => 2,
        _ => return None,
    };
    (1..=WIDEST).contains(&levels.width).then_some([("KVTUNE_KIND", kind), ("KVTUNE_BITS", levels.bits)])
}

/// The kernels for a kind and levels on a device, and its number.
fn module(device: Device, kind: Kind, levels: Levels) -> Option<(&'static Module, Which, usize)> {
    let (Device::Cuda(device), Some(settings)) = (device, settings(kind, levels)) else { return None };
    built::module(device, &SOURCE, &settings).map(|(module, which)| (module, which, device))
}

/// Quantises each vector along the last axis; `None` where the kernels do not serve, and libtorch's operations must.
///
/// # Shapes
/// `x (…, D)`, f32, bf16 or f16; levels `(…, bytes)`, u8, and range `(…, 2)`, i16.
pub fn quantise(x: &Tensor, levels: Levels) -> Option<(Tensor, Tensor)> {
    let (module, which, device) = module(x.device(), x.kind(), levels)?;
    let x = x.contiguous();
    let of_size = |last: i64, kind: Kind| {
        let mut size = x.size();
        size.pop();
        size.push(last);
        Tensor::empty(size, (kind, x.device()))
    };
    let (level, range) = (of_size(levels.bytes, Kind::Uint8), of_size(2, Kind::Int16));
    let done = launch(module, device, "quantise", [&x, &level, &range], levels);
    done.map_err(|reason| built::give_up(which, reason)).ok().map(|()| (level, range))
}

/// The vectors that quantised ones stand for; `None` where the kernels do not serve.
///
/// # Shapes
/// As in [`quantise`]; `(…, D)` out, in `kind`.
pub fn restore(level: &Tensor, range: &Tensor, levels: Levels, kind: Kind) -> Option<Tensor> {
    let (module, which, device) = module(level.device(), kind, levels)?;
    let (level, range) = (level.contiguous(), range.contiguous());
    let mut size = level.size();
    size.pop();
    size.push(levels.width);
    let x = Tensor::empty(size, (kind, level.device()));
    let done = launch(module, device, "restore", [&x, &level, &range], levels);
    done.map_err(|reason| built::give_up(which, reason)).ok().map(|()| x)
}

fn launch(module: &Module, device: usize, kernel: &str, planes: [&Tensor; 3], levels: Levels) -> Result<(), String> {
    let [x, level, range] = planes;
    let vectors = x.numel() / levels.width.max(1) as usize;
    if vectors == 0 {
        return Ok(());
    }
    let params = Planes {
        x: x.data_ptr(),
        level: level.data_ptr(),
        range: range.data_ptr(),
        vectors: vectors as i64,
        width: levels.width as c_int,
        level_bytes: levels.bytes as c_int,
    };
    let stream = launch_stream(device)?;
    // SAFETY: the parameter is the kernels'; the tensors are contiguous, of this device and of these sizes. Those that are dropped before
    // the kernel has run give their memory to operations behind it in the same stream.
    unsafe { module.launch(kernel, [vectors.div_ceil(VECTORS), 1, 1], THREADS, &params, stream) }
}

#[cfg(test)]
mod tests {
    use super::super::nvrtc::tests::spills_nothing;
    use super::*;

    const NINE: Levels = Levels { bits: 9, width: 64, bytes: 72 };

    #[test]
    fn other_places_kinds_and_widths_are_left_to_others() {
        let x = Tensor::zeros([3, 64], (Kind::Float, Device::Cpu));
        assert!(quantise(&x, NINE).is_none());
        assert!(settings(Kind::Double, NINE).is_none() && settings(Kind::Half, Levels { width: 257, ..NINE }).is_none());
        assert_eq!(settings(Kind::Half, NINE), Some([("KVTUNE_KIND", 2), ("KVTUNE_BITS", 9)]));
    }

    #[test]
    fn they_compile_for_ampere_hopper_and_blackwell_and_spill_no_register() {
        for line in ["constexpr int THREADS = 256;", "constexpr int WIDEST = 256;", "VECTORS = THREADS / LANES;"] {
            assert!(SOURCE.text.contains(line), "{line}");
        }
        let all = [(Kind::Float, 9), (Kind::BFloat16, 5), (Kind::Half, 4), (Kind::BFloat16, 8)];
        spills_nothing(&SOURCE, &all.map(|(kind, bits)| settings(kind, Levels { bits, ..NINE }).unwrap()));
    }
}
