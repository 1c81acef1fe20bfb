//! Packed matrices of safetensors. Codes and scales are widened to f32 exactly, and each operation rounds once, in the order of each format.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::native::{Codes, CodesLayout};
use crate::ops::linear::PackedForm;

/// Codes of 1, 2, 3, 4 or 8 bits that stand for the values of a table: `(value − zero) · scale · factor`.
///
/// Parts: codes `(out, bytes)`, u8; the table, f32; scales `(R, C)`; then zeros `(R, C)`, in bytes of 1 or 2, and the groups of columns `(in)`, int64, as far
/// as there are some; of nested scales their own scales, and the 256 values of their codes.
#[derive(Clone, Copy, Debug)]
pub(super) struct CodedRows {
    /// Numbers of a row of codes.
    pub(super) width: i64,
    /// Numbers of a row of the matrix: as many, but where blocks over the flattened matrix make no rows. Then each block is a row of codes.
    pub(super) matrix_width: i64,
    /// Rows and columns that share a scale.
    pub(super) block: [i64; 2],
    pub(super) is_high_nibble_first: bool,
    pub(super) factor: f32,
    /// Bits of a zero, 4 or 8, where there are some.
    pub(super) zero_bits: Option<i64>,
    pub(super) scales: StoredScales,
}

/// What is stored of scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum StoredScales {
    Numbers,
    /// Exponents e of 2^(e − 127), u8.
    Powers,
    /// Codes, u8, whose values are scaled by blocks of so many.
    Nested {
        blocksize: i64,
        offset: f64,
    },
}

/// 2^(e − 127), f32, of whole numbers e from 0 to 254.
pub(super) fn powers_of_two(exponent: &Tensor) -> Tensor {
    let bits: Tensor = exponent.bitwise_left_shift_tensor_scalar(23);
    // What is smaller than all normal numbers has a bit of the fraction.
    bits.clamp_min(1 << 22).view_dtype(Kind::Float)
}

fn len(range: &Range<i64>) -> i64 {
    range.end - range.start
}

fn rows_of(x: &Tensor, rows: &Range<i64>) -> Tensor {
    x.narrow(0, rows.start, len(rows))
}

impl CodedRows {
    /// Codes with stored scales and nothing else, the first of a byte in its lower bits.
    pub(super) fn new(width: i64, block: [i64; 2]) -> Self {
        Self {
            width,
            matrix_width: width,
            block,
            is_high_nibble_first: false,
            factor: 1.0,
            zero_bits: None,
            scales: StoredScales::Numbers,
        }
    }

    /// The scales of a range of their rows, f32.
    fn scales(&self, parts: &[Tensor], rows: &Range<i64>) -> Tensor {
        let own = rows_of(&parts[2], rows);
        match self.scales {
            StoredScales::Numbers => own.to_kind(Kind::Float),
            StoredScales::Powers => powers_of_two(&own.to_kind(Kind::Int)),
            StoredScales::Nested { blocksize, offset } => {
                let columns = own.size()[1];
                let block = Tensor::arange_start(rows.start * columns, rows.end * columns, (Kind::Int64, own.device()));
                let outer = parts[3].index_select(0, &block.divide_scalar_mode(blocksize, "floor"));
                let values = parts[4].index_select(0, &own.reshape([-1]).to_kind(Kind::Int));
                (values * outer + offset).view_as(&own)
            }
        }
    }

    /// Runs `run` with what some rows are made of.
    fn with<T>(&self, parts: &[Tensor], rows: &Range<i64>, run: impl FnOnce(Codes<'_>) -> T) -> T {
        let of_scales = rows.start / self.block[0]..(rows.end + self.block[0] - 1) / self.block[0];
        let (codes, scales) = (rows_of(&parts[0], rows), self.scales(parts, &of_scales));
        let rest = if matches!(self.scales, StoredScales::Nested { .. }) { &[] } else { &parts[3..] };
        let (zeros, columns) = rest.split_at(usize::from(self.zero_bits.is_some()));
        let zeros = zeros.first().map(|zeros| rows_of(zeros, &of_scales));
        let [block_rows, block_columns] = self.block;
        let CodedRows { width, factor, is_high_nibble_first, .. } = *self;
        let (first_row, zero_bits) = (rows.start % block_rows, self.zero_bits.unwrap_or(8));
        let layout = CodesLayout { width, block_rows, block_columns, first_row, zero_bits, factor, is_high_nibble_first };
        let columns = columns.first();
        run(Codes { codes: &codes, table: &parts[1], scales: &scales, zeros: zeros.as_ref(), columns, layout })
    }
}

/// Codes of some bits that lie in bytes one behind the other, the first in the lowest bits; eight of 3, 5, 6 or 7 bits in as many bytes:
/// `(rows, bytes)`, u8; `(rows, codes)` out, with those that fill the last bytes.
fn codes_in(bytes: &Tensor, bits: i64, is_high_nibble_first: bool) -> Tensor {
    let rows = bytes.size()[0];
    let (words, each) = match bits {
        8 => return bytes.shallow_clone(),
        3 | 5..=7 => {
            let parts = bytes.view([rows, -1, bits]).to_kind(if bits == 3 { Kind::Int } else { Kind::Int64 });
            let part = |at: i64| -> Tensor { parts.select(2, at).bitwise_left_shift_tensor_scalar(8 * at) };
            ((0..bits).map(part).reduce(|all, part| all + part).unwrap_or_default(), 8)
        }
        _ => (bytes.shallow_clone(), 8 / bits),
    };
    let code = |at: i64| -> Tensor {
        let place = if is_high_nibble_first { each - 1 - at } else { at };
        let shifted: Tensor = words.bitwise_right_shift_tensor_scalar(place * bits);
        shifted.bitwise_and((1 << bits) - 1)
    };
    Tensor::stack(&(0..each).map(code).collect::<Vec<_>>(), 2).view([rows, -1])
}

/// As [`Codes::unpack`], by libtorch's operations, wherever the tensors are.
fn by_operations(of: &Codes<'_>, kind: Kind) -> Tensor {
    let CodesLayout { width, block_rows, block_columns, first_row, zero_bits, factor, is_high_nibble_first } = of.layout;
    let (rows, device) = (of.codes.size()[0], of.codes.device());
    let value = {
        let code = codes_in(of.codes, i64::from(of.table.numel().ilog2()), is_high_nibble_first);
        of.table.index_select(0, &code.reshape([-1]).to_kind(Kind::Int)).view([rows, -1]).narrow(1, 0, width)
    };
    let of_row = Tensor::arange_start(first_row, first_row + rows, (Kind::Int64, device)).divide_scalar_mode(block_rows, "floor");
    let of_column = of.columns.map_or_else(
        || Tensor::arange(width, (Kind::Int64, device)).divide_scalar_mode(block_columns, "floor"),
        Tensor::shallow_clone,
    );
    let spread = |x: &Tensor| x.index_select(0, &of_row).index_select(1, &of_column);
    let value = if let Some(zeros) = of.zeros { value - spread(&codes_in(zeros, zero_bits, false)) } else { value };
    (value * spread(of.scales)).g_mul_scalar_(f64::from(factor)).to_kind(kind)
}

impl PackedForm for CodedRows {
    fn unpack(&self, parts: &[Tensor], rows: &Range<i64>, kind: Kind) -> Tensor {
        let is_here = parts[0].device() == Device::Cpu;
        let unpack = |codes: Codes<'_>| if is_here { codes.unpack(kind) } else { by_operations(&codes, kind) };
        if self.width == self.matrix_width {
            return self.with(parts, rows, unpack);
        }
        let numbers = rows.start * self.matrix_width..rows.end * self.matrix_width;
        let blocks = numbers.start / self.width..(numbers.end + self.width - 1) / self.width;
        let all = self.with(parts, &blocks, unpack).view([-1]);
        all.narrow(0, numbers.start - blocks.start * self.width, len(&numbers)).view([len(rows), self.matrix_width])
    }

    fn product(&self, parts: &[Tensor], x: &Tensor) -> Option<Tensor> {
        let is_here = parts[0].device() == Device::Cpu && self.width == self.matrix_width;
        is_here.then(|| self.with(parts, &(0..parts[0].size()[0]), |codes| codes.product(x)))
    }
}

/// Values of some bits each, which lie in 32-bit words one behind the other, the first in the lowest bits; they may cross words: `(rows, words)`,
/// int32, in little-endian memory; `(rows, count)`, u8 out.
pub(super) fn unpacked_words(words: &Tensor, bits: i64, count: i64) -> Tensor {
    let bytes = words.contiguous().view_dtype(Kind::Uint8);
    // The last bytes may be fewer than hold eight.
    let missing = (bits - bytes.size()[1] % bits) % bits;
    codes_in(&bytes.constant_pad_nd([0, missing]), bits, false).narrow(1, 0, count).to_kind(Kind::Uint8).contiguous()
}

/// Values of some bits a byte's part each, the first in the lowest; eight of 3 bits in three bytes: `(rows, count)`, u8 in; `(rows, bytes)`, u8 out.
pub(super) fn packed_in_bytes(values: &Tensor, bits: i64) -> Tensor {
    let size = values.size();
    let each = if bits == 3 { 8 } else { 8 / bits };
    let padded = values.constant_pad_nd([0, (each - size[1] % each) % each]).view([size[0], -1, each]);
    let padded = if bits == 3 { padded.to_kind(Kind::Int) } else { padded };
    let shifted = |place: i64| -> Tensor { padded.select(2, place).bitwise_left_shift_tensor_scalar(place * bits) };
    let words = (0..each).map(shifted).reduce(|all, part| all.bitwise_or_tensor(&part)).unwrap_or_default();
    if bits != 3 {
        return words.contiguous();
    }
    let byte = |at: i64| -> Tensor {
        let shifted: Tensor = words.bitwise_right_shift_tensor_scalar(8 * at);
        shifted.bitwise_and(255).to_kind(Kind::Uint8)
    };
    Tensor::stack(&[byte(0), byte(1), byte(2)], 2).view([size[0], -1])
}

/// The table of NF4 (bitsandbytes, `get_4bit_type`; Dettmers et al. 2023, arXiv 2305.14314).
pub(super) const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Columns of a row that share a power of 2 (OCP MX v1.0).
pub(super) const MX_BLOCK: i64 = 32;

/// 1 / 127, as bitsandbytes has it.
pub(super) const PER_127: f32 = 0.007_874_016;

/// The table of bitsandbytes' FP4.
pub(super) fn fp4() -> [f32; 16] {
    with_signs([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0].map(|twelfths| twelfths / 12.0))
}

/// The table of E2M1 (OCP MX v1.0).
pub(super) fn e2m1() -> [f32; 16] {
    with_signs([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
}

fn with_signs(values: [f32; 8]) -> [f32; 16] {
    std::array::from_fn(|code| if code < 8 { values[code] } else { -values[code - 8] })
}

/// E4M3FN: no infinities, and one code of each sign that is no number.
pub(super) fn e4m3() -> Vec<f32> {
    let of = |byte: u32| {
        let (exponent, fraction) = (byte >> 3 & 15, (byte & 7) as f32);
        let size = if exponent == 0 { fraction * 2f32.powi(-9) } else { (1.0 + fraction / 8.0) * 2f32.powi(exponent as i32 - 7) };
        if byte & 128 == 0 { size } else { -size }
    };
    (0..256).map(of).collect()
}

/// Bytes as signed whole numbers.
pub(super) fn signed() -> Vec<f32> {
    (0..=255u8).map(|byte| f32::from(byte as i8)).collect()
}

/// bitsandbytes' 4-bit codes in blocks over the flattened matrix, the first of two in the upper half of a byte; `rest`: nested scales.
pub(super) fn in_blocks(
    [codes, table, absmax]: [Tensor; 3],
    width: i64,
    blocksize: i64,
    scales: StoredScales,
    rest: Vec<Tensor>,
) -> (Vec<Tensor>, CodedRows) {
    let (blocks, fills_rows) = (absmax.size()[0], width % blocksize == 0);
    let form = CodedRows {
        matrix_width: width,
        is_high_nibble_first: true,
        scales,
        ..CodedRows::new(if fills_rows { width } else { blocksize }, [1, blocksize])
    };
    // A last block may be a short one.
    let missing = blocks * blocksize / 2 - codes.size()[0];
    let codes = if missing > 0 { codes.constant_pad_nd([0, missing]) } else { codes };
    let each = form.width / blocksize;
    let parts = [codes.view([-1, form.width / 2]), table, absmax.view([-1, each])].into_iter().chain(rest).collect();
    (parts, form)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of bits, blocks of rows and columns, zeros and groups out of order; bytes of codes and of zeros count up.
    #[test]
    fn the_kernel_and_the_operations_make_the_same_numbers() {
        let (width, rows) = (45, 12);
        for bits in [1, 2, 3, 4, 8] {
            for (block, zero_bits, has_columns) in
                [([1, 7], None, false), ([5, 45], None, false), ([1, 16], Some(8), false), ([1, 9], Some(4), true)]
            {
                let bytes = if bits == 3 { (width + 7) / 8 * 3 } else { (width * bits + 7) / 8 };
                let of_scales = [(rows + block[0] - 1) / block[0], (width + block[1] - 1) / block[1]];
                let counted = |size: &[i64]| Tensor::arange(size.iter().product::<i64>(), (Kind::Int64, Device::Cpu)) * 7;
                let counted = |size: &[i64]| counted(size).remainder(251).to_kind(Kind::Uint8).view(size);
                let mut parts = vec![
                    counted(&[rows, bytes]),
                    Tensor::randn([1 << bits], tch::kind::FLOAT_CPU),
                    Tensor::randn(of_scales, tch::kind::FLOAT_CPU),
                ];
                parts.extend(zero_bits.map(|bits| counted(&[of_scales[0], (of_scales[1] * bits + 7) / 8])));
                parts.extend(has_columns.then(|| Tensor::arange(width, (Kind::Int64, Device::Cpu)).remainder(of_scales[1])));
                for is_high_nibble_first in
                    [false, true].into_iter().filter(|is_high_nibble_first| bits != 3 || !is_high_nibble_first)
                {
                    let scales = StoredScales::Numbers;
                    let form = CodedRows { is_high_nibble_first, factor: 0.3, zero_bits, scales, ..CodedRows::new(width, block) };
                    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
                        for part in [0..rows, 3..8] {
                            let expected = form.with(&parts, &part, |codes| by_operations(&codes, kind));
                            assert_eq!(form.unpack(&parts, &part, kind), expected, "{bits} bits, {form:?}, {kind:?}");
                        }
                    }
                    let x = Tensor::randn([3, width], tch::kind::FLOAT_CPU);
                    let expected = x.matmul(&form.unpack(&parts, &(0..rows), Kind::Float).transpose(0, 1));
                    let largest = expected.abs().max().double_value(&[]);
                    let found = form.product(&parts, &x).unwrap();
                    assert!(found.allclose(&expected, 0.0, 1e-5 * largest, false), "{bits} bits, {form:?}");
                }
            }
        }
    }

    #[test]
    fn what_is_packed_in_bytes_is_there_again() {
        for bits in [1, 2, 3, 4, 8] {
            let values =
                (Tensor::arange(3 * 21, (Kind::Int64, Device::Cpu)) * 5).remainder(1 << bits).to_kind(Kind::Uint8).view([3, 21]);
            let bytes = packed_in_bytes(&values, bits);
            assert_eq!(bytes.size()[1], if bits == 3 { 9 } else { (21 * bits + 7) / 8 });
            assert_eq!(codes_in(&bytes, bits, false).narrow(1, 0, 21), values, "{bits}");
        }
    }

    #[test]
    fn powers_of_two_are_exact_down_to_the_smallest() {
        let powers = Vec::<f32>::try_from(powers_of_two(&Tensor::arange(255, (Kind::Int, Device::Cpu)))).unwrap();
        assert_eq!(powers, (-127..128).map(|exponent| 2f64.powi(exponent) as f32).collect::<Vec<_>>());
    }
}
