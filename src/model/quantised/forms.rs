//! Packed matrices as checkpoints in safetensors have them, unpacked by libtorch's operations on a CPU. Codes and scales are widened to f32 exactly,
//! and each product and sum rounds once, in the order of each format's definition.

use std::ops::Range;

use tch::{Kind, Tensor};

use crate::ops::linear::PackedForm;

/// Blocks of 4-bit codes over the flattened matrix, the first of two in the upper half of a byte (bitsandbytes).
#[derive(Debug)]
pub(super) struct FourBits {
    pub(super) width: i64,
    /// The two numbers that each byte stands for.
    pub(super) table: Vec<f32>,
    pub(super) blocksize: i64,
    pub(super) nested: Option<Nested>,
}

/// Blocks' scales which are quantised themselves: parts 2 and 3 are their scales and the 256 values of their codes.
#[derive(Debug)]
pub(super) struct Nested {
    pub(super) blocksize: i64,
    pub(super) offset: f64,
}

/// Whole numbers of some bits, the first in the lowest, with a scale and a zero for each group of columns of a row: GPTQ, AWQ and
/// compressed-tensors. Parts: codes `(out, bytes)`, scales `(out, G)`, zeros `(out, G)` u8, and the groups of columns.
#[derive(Debug)]
pub(super) struct GroupedInts {
    pub(super) bits: i64,
    pub(super) group_size: i64,
    pub(super) width: i64,
    /// The zero of all, where there are none of groups.
    pub(super) zero: Option<f64>,
}

/// Bytes that stand for f32 values, with scales by blocks of rows and columns. Parts: codes `(out, in)`, scales.
#[derive(Debug)]
pub(super) struct ScaledBytes {
    /// What each byte stands for.
    pub(super) table: Vec<f32>,
    /// Rows and columns of a block.
    pub(super) block: [i64; 2],
    /// A further factor, by which the product is multiplied.
    pub(super) factor: Option<f64>,
}

/// Blocks of 32 4-bit floats of a row, the first of two in the lower half of a byte, with a power of 2 (OCP MX). Parts: codes
/// `(out, in / 2)`, exponents `(out, in / 32)`.
#[derive(Debug)]
pub(super) struct MicroFloats {
    /// The two numbers that each byte stands for.
    pub(super) table: Vec<f32>,
    /// What each exponent stands for.
    pub(super) powers: Vec<f32>,
}

/// What the bytes of a tensor stand for: one number or several each, one after the other.
fn looked_up(table: &[f32], bytes: &Tensor) -> Tensor {
    let table = Tensor::from_slice(table).view([256, -1]);
    table.index_select(0, &bytes.reshape([-1]).to_kind(Kind::Int)).reshape([-1])
}

fn len(range: &Range<i64>) -> i64 {
    range.end - range.start
}

/// Some rows of a tensor.
fn rows_of(x: &Tensor, rows: &Range<i64>) -> Tensor {
    x.narrow(0, rows.start, len(rows))
}

impl FourBits {
    /// The scales of some blocks, f32.
    fn scales(&self, parts: &[Tensor], blocks: &Range<i64>) -> Tensor {
        let own = rows_of(&parts[1], blocks);
        let Some(nested) = &self.nested else { return own };
        let group = Tensor::arange_start(blocks.start, blocks.end, (Kind::Int64, own.device()));
        let outer = parts[2].index_select(0, &group.divide_scalar_mode(nested.blocksize, "floor"));
        let values = parts[3].index_select(0, &own.to_kind(Kind::Int));
        values * outer + nested.offset
    }
}

impl PackedForm for FourBits {
    fn unpack(&self, parts: &[Tensor], rows: &Range<i64>, kind: Kind) -> Tensor {
        let numbers = rows.start * self.width..rows.end * self.width;
        let bytes = numbers.start / 2..(numbers.end + 1) / 2;
        let value = looked_up(&self.table, &rows_of(&parts[0], &bytes));
        let value = value.narrow(0, numbers.start - 2 * bytes.start, len(&numbers));
        let blocks = numbers.start / self.blocksize..(numbers.end + self.blocksize - 1) / self.blocksize;
        let scales = self.scales(parts, &blocks);
        let first = blocks.start * self.blocksize;
        let scaled = if first == numbers.start && first + len(&blocks) * self.blocksize == numbers.end {
            value.view([-1, self.blocksize]) * scales.unsqueeze(1)
        } else {
            let all = scales.repeat_interleave_self_int(self.blocksize, 0, None);
            value * all.narrow(0, numbers.start - first, len(&numbers))
        };
        scaled.view([len(rows), self.width]).to_kind(kind)
    }
}

impl PackedForm for GroupedInts {
    fn unpack(&self, parts: &[Tensor], rows: &Range<i64>, kind: Kind) -> Tensor {
        let codes = rows_of(&parts[0], rows);
        let each = 8 / self.bits;
        let shifted = |place: i64| {
            let shifted: Tensor = codes.bitwise_right_shift_tensor_scalar(place * self.bits);
            shifted.bitwise_and((1 << self.bits) - 1)
        };
        let code = if each == 1 { codes.shallow_clone() } else { Tensor::stack(&(0..each).map(shifted).collect::<Vec<_>>(), 2) };
        let code = code.reshape([len(rows), -1]).narrow(1, 0, self.width).to_kind(Kind::Float);
        let groups = parts[1].size()[1];
        let is_even = parts.len() < 4 && groups * self.group_size == self.width;
        // One number for each column, or one that all of a group share.
        let spread = |part: &Tensor| {
            let part = rows_of(part, rows).to_kind(Kind::Float);
            match parts.get(3) {
                _ if is_even => part.unsqueeze(2),
                Some(index) => part.index_select(1, index),
                None => part.repeat_interleave_self_int(self.group_size, 1, None).narrow(1, 0, self.width),
            }
        };
        let code = if is_even { code.view([len(rows), groups, self.group_size]) } else { code };
        let above = match self.zero {
            Some(zero) => code - zero,
            None => code - spread(&parts[2]),
        };
        (above * spread(&parts[1])).view([len(rows), self.width]).to_kind(kind)
    }
}

impl PackedForm for ScaledBytes {
    fn unpack(&self, parts: &[Tensor], rows: &Range<i64>, kind: Kind) -> Tensor {
        let codes = rows_of(&parts[0], rows);
        let size = codes.size();
        let value = looked_up(&self.table, &codes).view(&size[..]);
        let scale = parts[1].to_kind(Kind::Float);
        let scaled = if scale.numel() == 1 {
            value * scale.reshape([1, 1])
        } else {
            let place = Tensor::arange_start(rows.start, rows.end, (Kind::Int64, codes.device()));
            let by_row = scale.index_select(0, &place.divide_scalar_mode(self.block[0], "floor"));
            let by_column = if by_row.size()[1] == 1 {
                by_row
            } else {
                by_row.repeat_interleave_self_int(self.block[1], 1, None).narrow(1, 0, size[1])
            };
            value * by_column
        };
        self.factor.map_or_else(|| scaled.shallow_clone(), |factor| &scaled * factor).to_kind(kind)
    }
}

impl PackedForm for MicroFloats {
    fn unpack(&self, parts: &[Tensor], rows: &Range<i64>, kind: Kind) -> Tensor {
        let (codes, exponents) = (rows_of(&parts[0], rows), rows_of(&parts[1], rows));
        let value = looked_up(&self.table, &codes).view([len(rows), -1, 32]);
        let power = looked_up(&self.powers, &exponents).view([len(rows), -1, 1]);
        (value * power).view([len(rows), -1]).to_kind(kind)
    }
}

/// Values of some bits each, which lie in 32-bit words along the last axis, the first in the lowest bits; they may cross words.
///
/// # Shapes
/// `(…, words)`, int32; `(…, count)`, u8 out.
pub(super) fn unpacked_words(words: &Tensor, bits: i64, count: i64) -> Tensor {
    let common = if bits % 2 == 1 { 1 } else { bits & bits.wrapping_neg() };
    let (each, values) = (bits / common, 32 / common);
    let size = words.size();
    let (outer, length) = size.split_at(size.len() - 1);
    // The last words may be fewer than repeat.
    let missing = (each - length[0] % each) % each;
    let words = words.constant_pad_nd([0, missing]).reshape([outer, &[-1, each]].concat());
    let last = words.dim() as i64 - 1;
    let value = |at: i64| {
        let (word, low) = (at * bits / 32, at * bits % 32);
        let here = (32 - low).min(bits);
        let first: Tensor = words.select(last, word).bitwise_right_shift_tensor_scalar(low);
        let first = first.bitwise_and((1 << here) - 1);
        if here == bits {
            return first;
        }
        let second = words.select(last, word + 1).bitwise_and((1 << (bits - here)) - 1);
        first.bitwise_or_tensor(&second.bitwise_left_shift_tensor_scalar(here))
    };
    let all: Vec<Tensor> = (0..values).map(value).collect();
    let flat = Tensor::stack(&all, last).reshape([outer, &[-1]].concat());
    flat.narrow(outer.len() as i64, 0, count).to_kind(Kind::Uint8)
}

/// Values of some bits a byte's part each, the first in the lowest.
///
/// # Shapes
/// `(rows, count)`, u8 in; `(rows, bytes)`, u8 out.
pub(super) fn packed_in_bytes(values: &Tensor, bits: i64) -> Tensor {
    let each = 8 / bits;
    let size = values.size();
    let padded = values.constant_pad_nd([0, (each - size[1] % each) % each]).view([size[0], -1, each]);
    let shifted = |place: i64| -> Tensor { padded.select(2, place).bitwise_left_shift_tensor_scalar(place * bits) };
    (0..each).map(shifted).reduce(|all, part| all.bitwise_or_tensor(&part)).unwrap_or_default().contiguous()
}
