//! Hidden states and the like in few bits: blocks of channels are quantised as vectors are, and channels far larger than the rest
//! are kept apart.
//!
//! Real models have channels a thousand times larger than the others. One such channel in a block would leave its neighbours a
//! single level, so channels above 16 times the median channel are stored in 16 bits, scaled by their largest value.

use tch::{Kind, Tensor};

use super::vectors::Bits;

/// At most so many channels share a minimum and a scale.
const BLOCK: i64 = 64;
/// A channel is an outlier above so many times the median channel.
const OUTLIER: f64 = 16.0;

/// How a row of `width` channels is cut into blocks: as many as it takes, all of one length. Example: 100 channels are two blocks
/// of 50, not one of 64 and another that is half empty.
#[derive(Clone, Copy, Debug)]
struct Cut {
    width: i64,
    blocks: i64,
    block: i64,
}

impl Cut {
    fn of(size: &[i64]) -> Self {
        let width = size.last().copied().unwrap_or(1).max(1);
        let blocks = (width as u64).div_ceil(BLOCK as u64) as i64;
        Self { width, blocks, block: (width as u64).div_ceil(blocks as u64) as i64 }
    }

    /// `(N, blocks, block)`. The last value is repeated to fill the last block: a zero might widen its range.
    fn apart(self, flat: &Tensor) -> Tensor {
        let missing = self.blocks * self.block - self.width;
        let rows = flat.size()[0];
        if missing == 0 {
            return flat.view([rows, self.blocks, self.block]);
        }
        let last = flat.narrow(1, self.width - 1, 1).expand([rows, missing], false);
        Tensor::cat(&[flat, &last], 1).view([rows, self.blocks, self.block])
    }

    fn together(self, blocks: &Tensor) -> Tensor {
        blocks.view([-1, self.blocks * self.block]).narrow(1, 0, self.width)
    }
}

/// Bytes of levels and ranges of [`encode`].
pub(super) fn bytes(size: &[i64], bits: Bits) -> [u64; 2] {
    let cut = Cut::of(size);
    let blocks = (size.iter().product::<i64>() / cut.width * cut.blocks) as u64;
    [blocks * bits.level_bytes(cut.block) as u64, blocks * 4]
}

/// The tensors that stand for `x`: levels and ranges of its blocks, then channel, scale and value of the outliers, where there are
/// any.
///
/// # Shapes
/// `x (…, E)`, not empty, any float kind. Out: as [`Bits::quantise`] gives them, with `(N, blocks)` in front; `(K)`, `(K)`, `(N, K)`.
pub(super) fn encode(x: &Tensor, bits: Bits) -> Vec<Tensor> {
    let cut = Cut::of(&x.size());
    let flat = x.reshape([-1, cut.width]);
    let apart = outliers(&flat);
    let rest = apart.first().map_or_else(|| flat.shallow_clone(), |channel| flat.index_fill(1, channel, 0.0));
    bits.quantise(&cut.apart(&rest)).into_iter().chain(apart).collect()
}

/// What [`encode`] stands for, in the size and kind of what was encoded.
pub(super) fn decode(parts: &[Tensor], bits: Bits, size: &[i64], kind: Kind) -> Tensor {
    let cut = Cut::of(size);
    let flat = cut.together(&bits.restore(&parts[0], &parts[1], cut.block, kind));
    if let [_, _, channel, scale, value] = parts {
        let loud = (value.to_kind(scale.kind()) * scale).to_kind(kind);
        let _ = flat.shallow_clone().index_copy_(1, channel, &loud);
    }
    flat.reshape(size)
}

/// Channel, scale and value of the channels that are too large for a block; nothing where there are none.
fn outliers(flat: &Tensor) -> Vec<Tensor> {
    let largest = flat.abs().amax([0i64], false);
    let limit = largest.median() * OUTLIER;
    let channel = largest.gt_tensor(&limit).nonzero().view([-1]);
    if channel.size()[0] == 0 {
        return Vec::new();
    }
    let scale = largest.index_select(0, &channel).to_kind(Kind::Float);
    let value = (flat.index_select(1, &channel).to_kind(Kind::Float) / &scale).to_kind(Kind::Half);
    vec![channel, scale, value]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tch::Device;

    use super::*;

    const ALL: [Bits; 4] = [Bits::Eight, Bits::Four, Bits::Nine, Bits::Five];

    fn restored(x: &Tensor, bits: Bits) -> Tensor {
        decode(&encode(x, bits), bits, &x.size(), x.kind())
    }

    /// The largest error in units of its block's scale, outliers aside, which must be `channels`.
    fn worst(x: &Tensor, bits: Bits, channels: &[i64]) -> f64 {
        let parts = encode(x, bits);
        let found: Vec<i64> = parts.get(2).map_or_else(Vec::new, |channel| Vec::try_from(channel).unwrap());
        assert_eq!(found, channels);
        let cut = Cut::of(&x.size());
        let error = (decode(&parts, bits, &x.size(), x.kind()) - x).abs().reshape([-1, cut.width]);
        let error = if channels.is_empty() { error } else { error.index_fill(1, &Tensor::from_slice(channels), 0.0) };
        (cut.apart(&error) / Bits::scale(&parts[1], x.kind())).max().double_value(&[])
    }

    /// Of everything, in one number.
    fn relative(x: &Tensor, bits: Bits) -> f64 {
        let norm = |x: &Tensor| x.square().sum(Kind::Double).sqrt().double_value(&[]);
        norm(&(restored(x, bits) - x)) / norm(x)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn the_error_is_at_most_half_a_step(
            values in prop::collection::vec(-3.0f64..3.0, 1..150), rows in 1i64..4, offset in -500.0f64..500.0, shifted: bool,
            magnitude in -9i32..9,
        ) {
            let offset = if shifted { offset } else { 0.0 };
            let values: Vec<f64> = values.iter().map(|v| (v + offset) * 10f64.powi(magnitude)).collect();
            let one = Tensor::from_slice(&values).view([1, -1]);
            let x = Tensor::cat(&(0..rows).map(|i| &one * (1.0 + i as f64)).collect::<Vec<_>>(), 0);
            for bits in ALL {
                // Whatever is an outlier by chance is not what this is about.
                let channels: Vec<i64> = encode(&x, bits).get(2).map_or_else(Vec::new, |c| Vec::try_from(c).unwrap());
                prop_assert!(worst(&x, bits, &channels) <= 0.5 + 1e-9, "{bits:?}: {}", worst(&x, bits, &channels));
            }
        }
    }

    #[test]
    fn normal_values_in_blocks_of_64_lose_what_the_forms_promise() {
        let x = Tensor::randn([500, 512], (Kind::Double, Device::Cpu));
        for (bits, least, most) in
            [(Bits::Nine, 0.0025, 0.0028), (Bits::Five, 0.041, 0.046), (Bits::Eight, 0.005, 0.006), (Bits::Four, 0.085, 0.095)]
        {
            let found = relative(&x, bits);
            assert!((least..most).contains(&found), "{bits:?}: {found}");
        }
    }

    #[test]
    fn constants_and_narrow_ranges_far_from_zero_survive() {
        for bits in ALL {
            for constant in [0.0, 7.25, -3e4] {
                let x = Tensor::full([3, 100], constant, (Kind::Double, Device::Cpu));
                assert!(worst(&x, bits, &[]) <= 0.5 + 1e-9, "{bits:?}, {constant}");
                assert!((restored(&x, bits) - &x).abs().max().double_value(&[]) <= constant.abs() / 500.0, "{bits:?}");
            }
            let narrow = Tensor::rand([4, 130], (Kind::Double, Device::Cpu)) + 500.0;
            assert!(worst(&narrow, bits, &[]) <= 0.5 + 1e-9, "{bits:?}");
        }
    }

    #[test]
    fn channels_a_thousand_times_larger_cost_the_others_nothing() {
        for bits in ALL {
            let x = Tensor::randn([32, 100], (Kind::Double, Device::Cpu));
            let alone = (restored(&x, bits) - &x).abs().max().double_value(&[]);
            for channel in [17, 63] {
                let _ = x.narrow(1, channel, 1).g_mul_scalar_(1000.0);
            }
            assert!(worst(&x, bits, &[17, 63]) <= 0.5 + 1e-9);
            let error = (restored(&x, bits) - &x).abs();
            let loud = Tensor::from_slice(&[17i64, 63]);
            let others = error.index_fill(1, &loud, 0.0).max().double_value(&[]);
            // A zero in the place of the loud channel lies in the range of the others.
            assert!(others <= alone * 1.2, "{bits:?}: {others} after {alone}");
            let largest = x.abs().amax([0i64], false).index_select(0, &loud);
            let apart = (error.index_select(1, &loud) / largest).max().double_value(&[]);
            assert!(apart > 0.0 && apart <= 1.0 / 2048.0, "{bits:?}: {apart}");
        }
    }
}
