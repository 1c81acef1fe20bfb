//! 8-bit blocks: 64 values along the last axis share a minimum and a scale; channels far larger than the rest are kept apart.
//!
//! Real models have channels a thousand times larger than the others. One such channel in a block would leave its 63 neighbours
//! a single level, so channels above 16 times the median channel are stored in 16 bits, scaled by their largest value.

use tch::{Device, Kind, Tensor};

/// Values that share a minimum and a scale.
const BLOCK: i64 = 64;
/// A channel is an outlier above so many times the median channel.
const OUTLIER: f64 = 16.0;
const LEVELS: f64 = 255.0;

/// A quantised tensor `(…, E)`.
#[derive(Debug)]
pub(super) struct Int8Blocks {
    size: Vec<i64>,
    kind: Kind,
    /// `(N, blocks, 64)`, u8; the last block is padded.
    level: Tensor,
    /// `(N, blocks, 1)`, f32.
    minimum: Tensor,
    scale: Tensor,
    outliers: Option<Outliers>,
}

#[derive(Debug)]
struct Outliers {
    /// Channel indices `(K)`.
    channel: Tensor,
    /// `(K)`, f32.
    scale: Tensor,
    /// `(N, K)`, f16, in units of the scale.
    value: Tensor,
}

impl Int8Blocks {
    pub(super) fn new(x: &Tensor) -> Self {
        let size = x.size();
        let width = size.last().copied().unwrap_or(1);
        let flat = x.reshape([-1, width]).to_kind(Kind::Float);
        let outliers = Outliers::find(&flat);
        let rest = outliers.as_ref().map_or_else(|| flat.shallow_clone(), |o| flat.index_fill(1, &o.channel, 0.0));
        let blocks = rest.constant_pad_nd([0, (BLOCK - width % BLOCK) % BLOCK]).view([flat.size()[0], -1, BLOCK]);
        let minimum = blocks.amin([-1i64], true);
        let range = blocks.amax([-1i64], true) - &minimum;
        // A constant block has range 0: any positive scale reproduces it.
        let scale = (range / LEVELS).clamp_min(f64::from(f32::MIN_POSITIVE));
        let level = ((blocks - &minimum) / &scale).round().clamp(0.0, LEVELS).to_kind(Kind::Uint8);
        Self { size, kind: x.kind(), level, minimum, scale, outliers }
    }

    pub(super) fn restore(&self) -> Tensor {
        let width = self.size.last().copied().unwrap_or(1);
        let flat =
            (self.level.to_kind(Kind::Float) * &self.scale + &self.minimum).view([self.level.size()[0], -1]).narrow(1, 0, width);
        let mut flat = flat.contiguous();
        if let Some(o) = &self.outliers {
            let _ = flat.index_copy_(1, &o.channel, &(o.value.to_kind(Kind::Float) * &o.scale));
        }
        flat.view(&self.size[..]).to_kind(self.kind)
    }

    pub(super) fn to_device(&self, device: Device) -> Self {
        let moved = |t: &Tensor| t.to_device(device);
        Self {
            size: self.size.clone(),
            kind: self.kind,
            level: moved(&self.level),
            minimum: moved(&self.minimum),
            scale: moved(&self.scale),
            outliers: self.outliers.as_ref().map(|o| Outliers {
                channel: moved(&o.channel),
                scale: moved(&o.scale),
                value: moved(&o.value),
            }),
        }
    }

    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let apart = self.outliers.iter().flat_map(|o| [&o.channel, &o.scale, &o.value]);
        [&self.level, &self.minimum, &self.scale].into_iter().chain(apart).collect()
    }
}

impl Outliers {
    fn find(flat: &Tensor) -> Option<Self> {
        let largest = flat.abs().amax([0i64], false);
        let limit = largest.median() * OUTLIER;
        let channel = largest.gt_tensor(&limit).nonzero().view([-1]);
        if channel.size()[0] == 0 {
            return None;
        }
        let scale = largest.index_select(0, &channel);
        let value = (flat.index_select(1, &channel) / &scale).to_kind(Kind::Half);
        Some(Self { channel, scale, value })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn errors(x: &Tensor) -> (f64, f64) {
        let q = Int8Blocks::new(x);
        let half = q.scale.max().double_value(&[]) / 2.0;
        ((q.restore() - x).abs().max().double_value(&[]), half)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_error_is_at_most_half_a_step(values in prop::collection::vec(-3.0f32..3.0, 1..200), offset in -500.0f32..500.0) {
            let shifted: Vec<f32> = values.iter().map(|v| v + offset).collect();
            let x = Tensor::from_slice(&shifted).view([1, -1]);
            let (worst, half) = errors(&x);
            // f32 rounding of values around 500 aside.
            prop_assert!(worst <= half + 1e-4, "{} > {}", worst, half);
        }
    }

    #[test]
    fn constants_and_narrow_ranges_survive() {
        let constant = Tensor::full([3, 64], 7.25, (Kind::Float, Device::Cpu));
        assert!(errors(&constant).0 < 1e-6);
        let narrow = Tensor::rand([4, 128], (Kind::Float, Device::Cpu)) + 500.0;
        assert!(errors(&narrow).0 < 1.0 / 255.0 / 2.0 + 1e-4);
    }

    #[test]
    fn a_channel_a_thousand_times_larger_costs_the_others_nothing() {
        let x = Tensor::randn([32, 100], (Kind::Double, Device::Cpu));
        let plain = Int8Blocks::new(&x).restore() - &x;
        let _ = x.narrow(1, 17, 1).g_mul_scalar_(1000.0);
        let restored = Int8Blocks::new(&x).restore();
        let error = (&restored - &x).abs();
        let others = error.index_fill(1, &Tensor::from_slice(&[17i64]), 0.0);
        assert!(others.max().double_value(&[]) <= plain.abs().max().double_value(&[]) * 1.001);
        assert!(
            (error / x.abs()).narrow(1, 17, 1).max().double_value(&[]) < 1.0 / 1024.0 || others.max().double_value(&[]) > 0.0
        );
        assert_eq!(restored.kind(), Kind::Double);
    }
}
