//! The kernel for the attention mass per slot: when it serves, and how its work is divided among blocks.

use std::f64::consts::LOG2_E;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use tch::{Device, Kind, Tensor};

use super::built::{self, KernelSource, Setting};
use super::driver::{Module, launch_stream};
use crate::native::KvBlock;

pub(super) static SOURCE: KernelSource = KernelSource {
    name: "attention_mass",
    text: include_str!("kernels/attention_mass.cu"),
    kernels: &["attention_mass", "sum_attention_mass"],
};

/// Threads of a block, and keys that it takes.
const THREADS: usize = 256;
const KEYS: usize = 256;
/// Rows of queries that are worth a block of their own: its keys are loaded for them.
const ROWS_OF_A_SPLIT: usize = 512;
/// Blocks for each multiprocessor, two of which are at work at once: with fewer, the last ones keep too few of them busy.
const BLOCKS_EACH: usize = 8;
/// Sizes above which the kernel's own numbers would not hold an index.
const INDEX_LIMIT: i64 = 1 << 30;
const MAX_GRID: usize = 65_535;

/// The parameter of `attention_mass`, as the kernel's text has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct MassParams {
    /// q, k, level, `in_use`, which may be null, and out.
    tensors: [*mut c_void; 5],
    q_strides: [i64; 3],
    k_strides: [i64; 3],
    out_split: i64,
    out_row: i64,
    groups: c_int,
    per_group: c_int,
    tokens: c_int,
    slots: c_int,
    first: c_int,
    causal: c_int,
    rows_per_split: c_int,
    factor: f32,
}

/// The parameter of `sum_attention_mass`, as the kernel's text has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SplitSumParams {
    part: *const c_void,
    out: *mut c_void,
    out_row: i64,
    count: c_int,
    slots: c_int,
}

// The kernel's text asserts the same.
const _: () = assert!(size_of::<MassParams>() == 136 && size_of::<SplitSumParams>() == 32);

fn settings(kind: Kind, width: i64) -> Option<[Setting; 2]> {
    (width % 16 == 0 && (16..=256).contains(&width)).then_some([("KVTUNE_WIDTH", width as usize), built::of_half(kind)?])
}

/// The attention mass to each key by the queries from token `first` on, summed over them and over the heads of a group; nothing to a slot
/// that does not count. The last part is the chunk's own, and seen causally. `None` where the kernel is not for tensors of this place,
/// kind and width of a head, or does not serve, as [`super::kernel_states`] says.
///
/// # Shapes
/// `q_bhnd (B, H, n, D)`, `lse_bhn (B, H, n)`, `+inf` for a query that does not count; result `(B, G, all keys)`, f32.
pub fn attention_mass(q_bhnd: &Tensor, parts: &[&KvBlock], lse_bhn: &Tensor, scale: f64, first: i64) -> Option<Tensor> {
    let (Device::Cuda(device), Some(settings)) = (q_bhnd.device(), settings(q_bhnd.kind(), q_bhnd.size()[3])) else {
        return None;
    };
    let is_alike = |part: &&KvBlock| part.k.kind() == q_bhnd.kind() && part.k.device() == q_bhnd.device();
    let (batch, heads, tokens, _) = q_bhnd.size4().ok()?;
    let groups = parts.last()?.k.size()[1];
    let slots: i64 = parts.iter().map(|part| part.slots()).sum();
    let fits = [batch * heads * tokens, slots + KEYS as i64].iter().all(|size| *size < INDEX_LIMIT);
    if !parts.iter().all(is_alike) || !fits || (batch * groups) as usize > MAX_GRID {
        return None;
    }
    let (q, per_group) = (aligned(q_bhnd), heads / groups);
    built::with(device, &SOURCE, &settings, |module| {
        Launch { module, device, q, batch, groups, per_group, tokens, first, slots, scale }.run(lse_bhn, parts)
    })
}

struct Launch {
    module: &'static Module,
    device: usize,
    q: Tensor,
    batch: i64,
    groups: i64,
    per_group: i64,
    tokens: i64,
    first: i64,
    slots: i64,
    scale: f64,
}

impl Launch {
    fn run(&self, lse_bhn: &Tensor, parts: &[&KvBlock]) -> Result<Tensor, String> {
        let stream = launch_stream(self.device)?;
        let options = (Kind::Float, self.q.device());
        let level = (lse_bhn.to_kind(Kind::Float) * LOG2_E).contiguous();
        let out = Tensor::empty([self.batch, self.groups, self.slots], options);
        let mut start = 0;
        for (i, part) in parts.iter().enumerate() {
            let slots = part.slots();
            if slots > 0 {
                let causal = i + 1 == parts.len();
                self.sum_part(part, &level, &out.narrow(2, start, slots), causal, stream)?;
            }
            start += slots;
        }
        Ok(out)
    }

    /// Sums up what one part receives; `out` is its range of the result `(B, G, P)`.
    fn sum_part(&self, part: &KvBlock, level: &Tensor, out: &Tensor, causal: bool, stream: *mut c_void) -> Result<(), String> {
        let k = aligned(&part.k);
        let in_use = part.valid.as_ref().map(|in_use| in_use.to_kind(Kind::Bool).contiguous());
        let (slots, rows) = (out.size()[2] as usize, (self.batch * self.groups) as usize);
        let tiles = slots.div_ceil(KEYS);
        let queries = ((self.tokens - self.first) * self.per_group) as usize;
        let (splits, rows_per_split) = divided(queries, tiles * rows, self.module.context.multiprocessors);
        let in_parts =
            (splits > 1).then(|| Tensor::empty([splits as i64, rows as i64, slots as i64], (Kind::Float, out.device())));
        let params = MassParams {
            tensors: [Some(&self.q), Some(&k), Some(level), in_use.as_ref(), Some(in_parts.as_ref().unwrap_or(out))]
                .map(|tensor| tensor.map_or(null_mut(), Tensor::data_ptr)),
            q_strides: strides(&self.q),
            k_strides: strides(&k),
            out_split: (rows * slots) as i64,
            out_row: if splits > 1 { slots as i64 } else { self.slots },
            groups: self.groups as c_int,
            per_group: self.per_group as c_int,
            tokens: self.tokens as c_int,
            slots: slots as c_int,
            first: self.first as c_int,
            causal: c_int::from(causal),
            rows_per_split: rows_per_split as c_int,
            factor: (self.scale * LOG2_E) as f32,
        };
        // SAFETY: the parameter is the kernel's; what it points to are tensors of this device and of these sizes. Those that are dropped
        // before the kernel has run give their memory to operations behind it in the same stream.
        unsafe { self.module.launch("attention_mass", [tiles, rows, splits], THREADS, &params, stream)? };
        let Some(in_parts) = in_parts else { return Ok(()) };
        let params = SplitSumParams {
            part: in_parts.data_ptr(),
            out: out.data_ptr(),
            out_row: self.slots,
            count: splits as c_int,
            slots: slots as c_int,
        };
        // SAFETY: as above.
        unsafe { self.module.launch("sum_attention_mass", [slots.div_ceil(THREADS), rows, 1], THREADS, &params, stream) }
    }
}

/// Into how many splits the rows of queries are cut, and how long each is, where there would be so many blocks without.
fn divided(rows: usize, blocks: usize, multiprocessors: usize) -> (usize, usize) {
    let wanted = (BLOCKS_EACH * multiprocessors).div_ceil(blocks.max(1));
    let length = rows.div_ceil(wanted.min(MAX_GRID)).max(ROWS_OF_A_SPLIT).next_multiple_of(64).max(1);
    (rows.div_ceil(length).max(1), length)
}

/// The tensor itself where the kernel can read it in pieces of 16 bytes, else a copy that it can.
pub(super) fn aligned(x: &Tensor) -> Tensor {
    let is_aligned =
        x.stride()[3] == 1 && strides(x).iter().all(|stride| stride % 8 == 0) && (x.data_ptr() as usize).is_multiple_of(16);
    if is_aligned {
        return x.shallow_clone();
    }
    let mut copy = Tensor::empty(x.size(), (x.kind(), x.device()));
    copy.copy_(x);
    copy
}

pub(super) fn strides(x: &Tensor) -> [i64; 3] {
    let stride = x.stride();
    [stride[0], stride[1], stride[2]]
}

#[cfg(test)]
mod tests {
    use super::super::nvrtc::tests::spills_nothing;
    use super::*;

    #[test]
    fn rows_are_cut_where_blocks_are_few_and_no_row_is_lost() {
        for rows in [0, 1, 7, 511, 512, 513, 7168, 1 << 20] {
            for blocks in [1, 2, 31, 512, 100_000] {
                for multiprocessors in [1, 108, 132] {
                    let (splits, length) = divided(rows, blocks, multiprocessors);
                    assert!(splits * length >= rows && (splits - 1) * length < rows.max(1), "{rows}, {blocks}");
                    assert!(length >= ROWS_OF_A_SPLIT && splits <= MAX_GRID);
                }
            }
        }
        assert_eq!(divided(7168, 4096, 132), (1, 7168));
        assert_eq!(divided(7168, 32, 132), (14, 512));
    }

    #[test]
    fn the_text_has_the_sizes_that_its_grid_is_made_for() {
        for line in ["constexpr int THREADS = 256;", "constexpr int KEYS = THREADS / 32 * KEY_TILES * 16;", "KEY_TILES = 2;"] {
            assert!(SOURCE.text.contains(line), "{line}");
        }
        for kernel in SOURCE.kernels {
            assert!(SOURCE.text.contains(&format!(" {kernel}(const ")), "{kernel}");
        }
    }

    #[test]
    fn what_cannot_be_read_in_pieces_is_copied() {
        let buffer = Tensor::arange(2 * 9 * 3 * 17, (Kind::Float, Device::Cpu)).to_kind(Kind::Half).view([2, 9, 3, 17]);
        let view = buffer.narrow(3, 0, 16).transpose(1, 2);
        let copy = aligned(&view);
        assert!(copy.equal(&view) && strides(&copy) == [432, 144, 16] && (copy.data_ptr() as usize).is_multiple_of(16));
        let buffer = Tensor::zeros([2, 3, 12, 16], (Kind::Half, Device::Cpu));
        let view = buffer.narrow(2, 4, 5);
        assert_eq!(aligned(&view).data_ptr(), view.data_ptr(), "a part of a cache is read where it is");
    }

    #[test]
    fn other_kinds_and_widths_are_left_to_others() {
        let f16 = Some([("KVTUNE_WIDTH", 80), ("KVTUNE_F16", 1)]);
        assert_eq!(settings(Kind::Half, 80), f16);
        for (kind, width) in [(Kind::Float, 64), (Kind::Half, 72), (Kind::BFloat16, 0), (Kind::BFloat16, 272)] {
            assert_eq!(settings(kind, width), None);
        }
        let q = Tensor::zeros([1, 1, 3, 64], (Kind::BFloat16, Device::Cpu));
        let own = KvBlock::new(&q, &q);
        assert!(attention_mass(&q, &[&own], &Tensor::zeros([1, 1, 3], (Kind::Float, Device::Cpu)), 1.0, 0).is_none());
    }

    #[test]
    fn it_compiles_for_ampere_hopper_and_blackwell_and_spills_no_register() {
        let shapes = [(Kind::Half, 32), (Kind::BFloat16, 64), (Kind::Half, 80), (Kind::BFloat16, 128), (Kind::BFloat16, 256)];
        spills_nothing(&SOURCE, &shapes.map(|(kind, width)| settings(kind, width).unwrap()));
    }
}
