//! Vectors in 8 or 4 bits, each with a minimum and a scale of its own: how a cache keeps keys and values.
//!
//! Minimum and scale are rounded to their stored 16 bits first, the minimum down and the scale up, and the levels are computed
//! with what is stored. So the range covers the vector whatever it is, and `|x − x̂| ≤ scale / 2` holds always: for vectors that do
//! not contain zero, for constants, and for numbers that f16 cannot hold.

use tch::{Kind, Tensor};

/// Bits of a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// 256 levels.
    Eight,
    /// 16 levels, two in a byte.
    Four,
}

/// Quantised vectors.
#[derive(Debug)]
pub struct Quantised {
    /// `(…, D)`, or `(…, ⌈D/2⌉)` for 4 bits, u8.
    pub level: Tensor,
    /// `(…, 2)`, i16: the bits of minimum and scale. A negative scale says that both are bf16, else both are f16.
    pub range: Tensor,
}

/// Largest f16 that leaves room for rounding up.
const F16_LIMIT: f64 = 60_000.0;
/// The sign bit of 16 bits.
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
    /// Steps from the lowest level to the highest.
    fn steps(self) -> f64 {
        match self {
            Self::Eight => 255.0,
            Self::Four => 15.0,
        }
    }

    /// Bytes of the levels of a vector of so many values.
    pub fn level_bytes(self, width: i64) -> i64 {
        match self {
            Self::Eight => width,
            Self::Four => (width + 1) / 2,
        }
    }

    /// Quantises each vector along the last axis.
    ///
    /// # Shapes
    /// `x (…, D)`, any float kind.
    pub fn quantise(self, x: &Tensor) -> Quantised {
        let x = x.to_kind(wide(x.kind()));
        let (minimum, maximum) = (x.amin([-1i64], true), x.amax([-1i64], true));
        let (low, scale) = F16.cover(&minimum, &maximum, self.steps());
        let (low_wide, scale_wide) = BF16.cover(&minimum, &maximum, self.steps());
        let is_large = minimum.abs().gt(F16_LIMIT).logical_or(&(&maximum - &minimum).gt(F16_LIMIT * self.steps()));
        let scale_wide = (scale_wide.to_kind(Kind::Int) - SIGN).to_kind(Kind::Int16);
        let range = Tensor::cat(&[low_wide.where_self(&is_large, &low), scale_wide.where_self(&is_large, &scale)], -1);
        let (low, scale) = read_range(&range, x.kind());
        let level = ((x - low) / scale).round().clamp_(0.0, self.steps()).to_kind(Kind::Uint8);
        Quantised { level: self.pack(level), range }
    }

    /// The vectors that quantised ones stand for.
    ///
    /// # Shapes
    /// Planes as in [`Quantised`]; `(…, width)` out, in `kind`.
    pub fn restore(self, level: &Tensor, range: &Tensor, width: i64, kind: Kind) -> Tensor {
        let (low, scale) = read_range(range, wide(kind));
        self.unpack(level, width).to_kind(wide(kind)).g_mul_(&scale).g_add_(&low).to_kind(kind)
    }

    fn pack(self, level: Tensor) -> Tensor {
        if self == Self::Eight {
            return level;
        }
        let width = level.size().last().copied().unwrap_or(0);
        let level = level.constant_pad_nd([0, width % 2]);
        let half = (width + 1) / 2;
        level.narrow(-1, 0, half) * 16 + level.narrow(-1, half, half)
    }

    fn unpack(self, level: &Tensor, width: i64) -> Tensor {
        if self == Self::Eight {
            return level.shallow_clone();
        }
        Tensor::cat(&[level.bitwise_right_shift_tensor_scalar(4), level.bitwise_and(15)], -1).narrow(-1, 0, width)
    }
}

/// Minimum and scale, `(…, 1)` each.
fn read_range(range: &Tensor, kind: Kind) -> (Tensor, Tensor) {
    let (low, scale) = (range.narrow(-1, 0, 1).contiguous(), range.narrow(-1, 1, 1).contiguous());
    let is_wide = scale.lt(0);
    let scale = scale.bitwise_and(SIGN - 1);
    let of = |bits: &Tensor| BF16.value(bits, kind).where_self(&is_wide, &F16.value(bits, kind));
    (of(&low), of(&scale))
}

/// The kind that levels are computed in.
fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tch::Device;

    use super::*;

    /// The largest error in units of its vector's scale.
    fn worst(x: &Tensor, bits: Bits) -> f64 {
        let q = bits.quantise(x);
        let restored = bits.restore(&q.level, &q.range, x.size()[1], Kind::Double);
        let (_, scale) = read_range(&q.range, Kind::Double);
        ((restored - x).abs() / scale).max().double_value(&[])
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
            for bits in [Bits::Eight, Bits::Four] {
                prop_assert!(worst(&x, bits) <= 0.5 + 1e-9, "{bits:?}: {}", worst(&x, bits));
            }
        }
    }

    #[test]
    fn vectors_far_from_zero_and_constants_survive() {
        for bits in [Bits::Eight, Bits::Four] {
            let narrow = Tensor::rand([40, 64], (Kind::Double, Device::Cpu)) + 500.0;
            let q = bits.quantise(&narrow);
            let error = (bits.restore(&q.level, &q.range, 64, Kind::Double) - &narrow).abs().max().double_value(&[]);
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
        let q = Bits::Four.quantise(&x);
        assert_eq!((q.level.size(), q.range.size()), (vec![3, 4], vec![3, 2]));
        assert_eq!(Bits::Four.level_bytes(7), 4);
        let restored = Bits::Four.restore(&q.level, &q.range, 7, Kind::Float);
        assert_eq!(restored.size(), [3, 7]);
        assert!((restored - x).abs().max().double_value(&[]) < 0.4);
    }
}
