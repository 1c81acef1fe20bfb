//! Vectors in few bits, each with a minimum and a scale of its own: how a cache keeps keys and values, and stores their blocks.
//!
//! Minimum and scale are rounded to their stored 16 bits first, the minimum down and the scale up, and the levels are computed with what is
//! stored: so the range covers any vector, and `|x − x̂| ≤ scale / 2` holds always.

use tch::{Kind, Tensor};

use crate::native::{quantise_on_cpu, restore_on_cpu};
use crate::ops::attention::accumulation_kind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// 256 levels, one in a byte.
    Eight,
    /// 16 levels, two in a byte.
    Four,
    /// 512 levels: their upper eight bits in a byte, the last bits of eight values in another.
    Nine,
    /// 32 levels likewise: the upper four bits of two values in a byte.
    Five,
}

/// Largest f16 that leaves room for rounding up.
const F16_LIMIT: f64 = 60_000.0;
const SIGN: i64 = 1 << 15;

/// A 16-bit float with what rounding to it can cost: half a unit in the last place, relative and near zero.
struct Narrow {
    kind: Kind,
    relative: f64,
    absolute: f64,
}

const F16: Narrow = Narrow { kind: Kind::Half, relative: 1.0 / 2048.0, absolute: 1.0 / (1 << 25) as f64 };
const BF16: Narrow = Narrow { kind: Kind::BFloat16, relative: 1.0 / 256.0, absolute: 1e-37 };
/// The rounding of the arithmetic itself must not undo what is added to be safe.
const SAFE: f64 = 1.01;

impl Narrow {
    /// The bits of a number that is not above `x`.
    fn below(&self, x: &Tensor) -> Tensor {
        self.bits(&(x - x.abs() * (self.relative * SAFE) - self.absolute * SAFE))
    }

    /// The bits of a positive number that is not below `x ≥ 0`.
    fn above(&self, x: &Tensor) -> Tensor {
        self.bits(&(x * (1.0 + self.relative * SAFE) + self.absolute * SAFE))
    }

    fn bits(&self, x: &Tensor) -> Tensor {
        x.to_kind(self.kind).view_dtype(Kind::Int16)
    }

    fn value(&self, bits: &Tensor, kind: Kind) -> Tensor {
        bits.view_dtype(self.kind).to_kind(kind)
    }

    /// Bits of minimum and scale that cover `minimum..=maximum` with so many steps.
    fn cover(&self, minimum: &Tensor, maximum: &Tensor, steps: f64) -> (Tensor, Tensor) {
        let low = self.below(minimum);
        let scale = (maximum - self.value(&low, minimum.kind())) / steps;
        (low, self.above(&scale))
    }
}

impl Bits {
    fn count(self) -> usize {
        match self {
            Self::Eight => 8,
            Self::Four => 4,
            Self::Nine => 9,
            Self::Five => 5,
        }
    }

    fn steps(self) -> f64 {
        f64::from((1 << self.count()) - 1)
    }

    /// Bytes of the levels of a vector of so many values.
    pub fn level_bytes(self, width: i64) -> i64 {
        match self {
            Self::Eight => width,
            Self::Four => ceil(width, 2),
            Self::Nine => Self::Eight.level_bytes(width) + ceil(width, 8),
            Self::Five => Self::Four.level_bytes(width) + ceil(width, 8),
        }
    }

    /// Quantises each vector along the last axis: its levels, and the bits of its minimum and scale. A negative scale says that both are bf16,
    /// else both are f16.
    ///
    /// # Shapes
    /// `x (…, D)`, any float kind; levels `(…, level_bytes)`, u8, and range `(…, 2)`, i16.
    pub fn quantise(self, x: &Tensor) -> [Tensor; 2] {
        quantise_on_cpu(x, self.count()).unwrap_or_else(|| self.quantise_by_operations(x))
    }

    /// Quantises with libtorch's operations, where the CPU kernel does not serve.
    fn quantise_by_operations(self, x: &Tensor) -> [Tensor; 2] {
        let x = x.to_kind(accumulation_kind(x.kind()));
        let (minimum, maximum) = (x.amin([-1i64], true), x.amax([-1i64], true));
        let (low, scale) = F16.cover(&minimum, &maximum, self.steps());
        let (low_wide, scale_wide) = BF16.cover(&minimum, &maximum, self.steps());
        let is_large = minimum.abs().gt(F16_LIMIT).logical_or(&(&maximum - &minimum).gt(F16_LIMIT * self.steps()));
        let scale_wide = (scale_wide.to_kind(Kind::Int) - SIGN).to_kind(Kind::Int16);
        let range = Tensor::cat(&[low_wide.where_self(&is_large, &low), scale_wide.where_self(&is_large, &scale)], -1);
        let (low, scale) = read_range(&range, x.kind());
        let level = ((x - low) / scale).round_().clamp_(0.0, self.steps());
        [self.pack(&level), range]
    }

    /// The vectors that quantised ones stand for.
    ///
    /// # Shapes
    /// Levels and range as [`Self::quantise`] gives them; `(…, width)` out, in `kind`.
    pub fn restore(self, level: &Tensor, range: &Tensor, width: i64, kind: Kind) -> Tensor {
        let made = restore_on_cpu(level, range, self.count(), width, kind);
        made.unwrap_or_else(|| self.restore_by_operations(level, range, width, kind))
    }

    /// Restores with libtorch's operations, where the CPU kernel does not serve.
    fn restore_by_operations(self, level: &Tensor, range: &Tensor, width: i64, kind: Kind) -> Tensor {
        let (low, scale) = read_range(range, accumulation_kind(kind));
        self.unpack(level, width, accumulation_kind(kind)).g_mul_(&scale).g_add_(&low).to_kind(kind)
    }

    /// The step from one level to the next, `(…, 1)`.
    #[cfg(test)]
    pub(super) fn scale(range: &Tensor, kind: Kind) -> Tensor {
        read_range(range, accumulation_kind(kind)).1
    }

    /// Levels in bytes, `(…, level_bytes)`, from levels `(…, D)` of any kind that holds them.
    fn pack(self, level: &Tensor) -> Tensor {
        match self {
            Self::Eight => level.to_kind(Kind::Uint8),
            Self::Four => spread(&level.to_kind(Kind::Uint8), 2),
            Self::Nine | Self::Five => {
                let whole = level.to_kind(Kind::Int16);
                let upper = whole.bitwise_right_shift_tensor_scalar(1);
                let last = whole.bitwise_and(1).to_kind(Kind::Uint8);
                let upper = if self == Self::Nine { Self::Eight.pack(&upper) } else { Self::Four.pack(&upper) };
                Tensor::cat(&[upper, spread(&last, 8)], -1)
            }
        }
    }

    fn unpack(self, level: &Tensor, width: i64, kind: Kind) -> Tensor {
        let upper = match self {
            Self::Eight => return level.to_kind(kind),
            Self::Four => return gathered(level, 2, width).to_kind(kind),
            Self::Nine => Self::Eight,
            Self::Five => Self::Four,
        };
        let bytes = upper.level_bytes(width);
        let last = gathered(&level.narrow(-1, bytes, ceil(width, 8)), 8, width);
        upper.unpack(&level.narrow(-1, 0, bytes), width, kind).g_mul_scalar_(2.0).g_add_(&last)
    }
}

fn ceil(width: i64, parts: i64) -> i64 {
    (width + parts - 1) / parts
}

/// So many values in a byte: those of the first part of a vector in the upper bits, and so on. Example: of six values in two parts
/// the first and the fourth share a byte. `(…, D)` in, `(…, ⌈D/parts⌉)` out, u8.
fn spread(values: &Tensor, parts: i64) -> Tensor {
    let width = values.size().last().copied().unwrap_or(0);
    let part = ceil(width, parts);
    let values = values.constant_pad_nd([0, part * parts - width]);
    let factor = 1i64 << (8 / parts);
    let first = values.narrow(-1, 0, part).contiguous();
    (1..parts).fold(first, |mut bytes, i| bytes.g_mul_scalar_(factor).g_add_(&values.narrow(-1, i * part, part)))
}

/// The inverse of [`spread`], at `width` values.
fn gathered(bytes: &Tensor, parts: i64, width: i64) -> Tensor {
    let bits = 8 / parts;
    let part = |i: i64| bytes.bitwise_right_shift_tensor_scalar(bits * (parts - 1 - i)).bitwise_and((1i64 << bits) - 1);
    Tensor::cat(&(0..parts).map(part).collect::<Vec<_>>(), -1).narrow(-1, 0, width)
}

/// Minimum and scale, `(…, 1)` each.
fn read_range(range: &Tensor, kind: Kind) -> (Tensor, Tensor) {
    let (low, scale) = (range.narrow(-1, 0, 1).contiguous(), range.narrow(-1, 1, 1).contiguous());
    let is_wide = scale.lt(0);
    let scale = scale.bitwise_and(SIGN - 1);
    let of = |bits: &Tensor| BF16.value(bits, kind).where_self(&is_wide, &F16.value(bits, kind));
    (of(&low), of(&scale))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tch::Device;

    use super::*;

    const ALL: [Bits; 4] = [Bits::Eight, Bits::Four, Bits::Nine, Bits::Five];

    /// The largest error in units of its vector's scale.
    fn worst(x: &Tensor, bits: Bits) -> f64 {
        let [level, range] = bits.quantise(x);
        let restored = bits.restore(&level, &range, x.size()[1], Kind::Double);
        ((restored - x).abs() / Bits::scale(&range, Kind::Double)).max().double_value(&[])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn the_error_is_at_most_half_a_step(
            values in prop::collection::vec(-1.0f64..1.0, 1..70), magnitude in -12i32..12, offset in -1e6f64..1e6, shifted: bool,
        ) {
            let offset = if shifted { offset } else { 0.0 };
            let values: Vec<f64> = values.iter().map(|v| v * 10f64.powi(magnitude) + offset).collect();
            let x = Tensor::from_slice(&values).view([1, -1]);
            for bits in ALL {
                prop_assert!(worst(&x, bits) <= 0.5 + 1e-9, "{bits:?}: {}", worst(&x, bits));
            }
        }
    }

    #[test]
    fn vectors_far_from_zero_and_constants_survive() {
        for bits in ALL {
            let narrow = Tensor::rand([40, 64], (Kind::Double, Device::Cpu)) + 500.0;
            let [level, range] = bits.quantise(&narrow);
            let error = (bits.restore(&level, &range, 64, Kind::Double) - &narrow).abs().max().double_value(&[]);
            // A minimum in f16 may lie half a unit below 500.
            assert!(error <= 1.6 / bits.steps() / 2.0, "{bits:?}: {error}");
            for constant in [0.0, 7.25, -3e-9, 1e30, -4e5] {
                let x = Tensor::full([2, 5], constant, (Kind::Double, Device::Cpu));
                assert!(worst(&x, bits) <= 0.5 + 1e-9, "{bits:?}, {constant}");
            }
        }
    }

    #[test]
    fn four_bits_take_half_the_bytes_and_odd_widths_come_back() {
        let x = Tensor::randn([3, 7], (Kind::Float, Device::Cpu));
        let [level, range] = Bits::Four.quantise(&x);
        assert_eq!((level.size(), range.size()), (vec![3, 4], vec![3, 2]));
        assert_eq!(Bits::Four.level_bytes(7), 4);
        let restored = Bits::Four.restore(&level, &range, 7, Kind::Float);
        assert_eq!(restored.size(), [3, 7]);
        assert!((restored - x).abs().max().double_value(&[]) < 0.4);
    }

    #[test]
    fn levels_of_every_width_come_back_from_their_bytes() {
        for bits in ALL {
            for width in 1..40 {
                let level = Tensor::randint(bits.steps() as i64 + 1, [3, width], (Kind::Float, Device::Cpu));
                let packed = bits.pack(&level);
                assert_eq!((packed.kind(), packed.size()), (Kind::Uint8, vec![3, bits.level_bytes(width)]));
                assert!(bits.unpack(&packed, width, Kind::Float).equal(&level), "{bits:?}, {width}");
            }
        }
    }

    #[test]
    fn the_cpus_kernels_give_the_bits_of_libtorchs_operations() {
        tch::manual_seed(5);
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            for width in [1, 2, 7, 8, 31, 33, 64, 100, 257] {
                let cpu = |rows: i64| Tensor::randn([2, rows, width], (Kind::Double, Device::Cpu));
                let sizes = (Tensor::arange_start(-9, 12, (Kind::Double, Device::Cpu)) * 10f64.ln()).exp().view([1, 21, 1]);
                let far = cpu(6) + Tensor::randn([2, 6, 1], (Kind::Double, Device::Cpu)) * 500.0;
                let constant = cpu(3).narrow(2, 0, 1).expand([2, 3, width], false);
                let x = Tensor::cat(&[cpu(21) * sizes, far, constant, cpu(1) * 0.0], 1).to_kind(kind);
                for bits in ALL {
                    let (made, slow) = (bits.quantise(&x), bits.quantise_by_operations(&x));
                    assert!(made[0].equal(&slow[0]) && made[1].equal(&slow[1]), "{bits:?}, {kind:?}, {width}");
                    // Of a cache's first slots, too.
                    let (level, range) = (made[0].narrow(1, 2, 20), made[1].narrow(1, 2, 20));
                    let (back, slow) =
                        (bits.restore(&level, &range, width, kind), bits.restore_by_operations(&level, &range, width, kind));
                    assert!(back.equal(&slow), "{bits:?}, {kind:?}, {width}");
                }
            }
        }
        let broken = Tensor::from_slice(&[0.5f32, f32::NAN, 2.0]);
        for bits in ALL {
            let [level, range] = bits.quantise(&broken);
            assert_eq!(bits.restore(&level, &range, 3, Kind::Float).isnan().all().int64_value(&[]), 1, "{bits:?}");
        }
    }
}
