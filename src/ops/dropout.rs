//! Dropout without state: whether an element is kept is a hash of where it stands, so every chunking, batching, device and
//! recomputation draws the same mask.
//!
//! With `mix` the 64-bit finaliser of `SplitMix64` and all arithmetic modulo 2^64:
//!
//! ```text
//! stream  = mix(mix(mix(mix(seed) + step) + layer) + module)
//! sequence     = mix(stream + sample)
//! token   = mix(sequence + (position + 1) * GAMMA)
//! element = mix(token + (channel + 1) * GAMMA)
//! kept    ⇔ (element mod 2^53) < round((1 - p) * 2^53)
//! ```

use tch::{Kind, Tensor};

/// 2^64 divided by the golden ratio: consecutive multiples are spread evenly.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
const MULTIPLIERS: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];
const DRAW_BITS: u32 = 53;

/// One stream of draws: what the mask depends on beside the place of an element in its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutStream {
    pub seed: u64,
    pub step: u64,
    /// The index of the layer, from 0.
    pub layer: u64,
    /// The projection inside the layer, from 0.
    pub module: u64,
}

impl DropoutStream {
    fn key(self) -> u64 {
        [self.seed, self.step, self.layer, self.module].iter().fold(0, |key: u64, &part| mix(key.wrapping_add(part)))
    }
}

/// Zeroes elements of `x` with probability `p` and scales the others by `1 / (1 - p)`; differentiable.
///
/// # Shapes
/// `x_bne (B, n, E)`; `samples` has B entries (the sequences' indices in the global batch); `position_bn (B, n)`, `(1, n)` or `(n)`, int64.
pub fn dropout(x_bne: &Tensor, p: f64, stream: DropoutStream, samples: &[u64], position_bn: &Tensor) -> Tensor {
    let channels = x_bne.size()[2] as usize;
    let kept = keep_mask(p, stream, samples, position_bn, channels);
    x_bne * (kept.to_kind(x_bne.kind()) * (1.0 / (1.0 - p)))
}

/// Which elements are kept: `(B, n, channels)` of booleans, by what [`dropout`] takes.
pub fn keep_mask(p: f64, stream: DropoutStream, samples: &[u64], position_bn: &Tensor, channels: usize) -> Tensor {
    let device = position_bn.device();
    let key = stream.key();
    // Filled one by one, sequences have no memory of the host to come from, which a captured graph would read again.
    let sequence = |&sample: &u64| Tensor::full([1, 1], mix(key.wrapping_add(sample)).cast_signed(), (Kind::Int64, device));
    let row_b1 = match samples {
        [sample] => sequence(sample),
        samples => Tensor::cat(&samples.iter().map(sequence).collect::<Vec<_>>(), 0),
    };
    // (B, 1) + (n), (B, 1) + (1, n) and (B, 1) + (B, n) are all (B, n).
    let token_bn = mix_tensor(row_b1 + spread(position_bn));
    let channel_e = spread(&Tensor::arange(channels as i64, (Kind::Int64, device)));
    let element_bne = mix_tensor(token_bn.unsqueeze(-1) + channel_e);
    let bound = ((1.0 - p) * (1u64 << DRAW_BITS) as f64).round() as i64;
    element_bne.bitwise_and((1i64 << DRAW_BITS) - 1).lt(bound)
}

/// `(i + 1) · GAMMA`; int64 products wrap on every device.
fn spread(index: &Tensor) -> Tensor {
    (index + 1) * GAMMA.cast_signed()
}

fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(GAMMA);
    z = (z ^ (z >> 30)).wrapping_mul(MULTIPLIERS[0]);
    z = (z ^ (z >> 27)).wrapping_mul(MULTIPLIERS[1]);
    z ^ (z >> 31)
}

/// [`mix`] for each element of an int64 tensor, in place.
fn mix_tensor(mut z: Tensor) -> Tensor {
    let _ = z.g_add_scalar_(GAMMA.cast_signed());
    let mut fold = |shift: i64, multiplier: Option<u64>| {
        // The shift of signed numbers copies the sign bit; the mask takes the copies away again.
        let mut shifted = z.bitwise_right_shift_tensor_scalar(shift);
        let _ = shifted.bitwise_and_((1i64 << (64 - shift)) - 1);
        let _ = z.bitwise_xor_tensor_(&shifted);
        if let Some(multiplier) = multiplier {
            let _ = z.g_mul_scalar_(multiplier.cast_signed());
        }
    };
    fold(30, Some(MULTIPLIERS[0]));
    fold(27, Some(MULTIPLIERS[1]));
    fold(31, None);
    z
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    const STREAM: DropoutStream = DropoutStream { seed: 7, step: 3, layer: 1, module: 2 };

    fn positions(start: i64, end: i64) -> Tensor {
        Tensor::arange_start(start, end, (Kind::Int64, Device::Cpu))
    }

    fn correlation(a: &Tensor, b: &Tensor) -> f64 {
        let center = |t: &Tensor| t.to_kind(Kind::Double) - t.to_kind(Kind::Double).mean(None);
        let (a, b) = (center(a), center(b));
        let norm = |t: &Tensor| f64::try_from(t.norm()).unwrap();
        f64::try_from((&a * &b).sum(None)).unwrap() / (norm(&a) * norm(&b))
    }

    #[test]
    fn tensors_and_numbers_are_mixed_alike() {
        let numbers = [0u64, 1, 42, u64::MAX, 1 << 63, GAMMA];
        let signed: Vec<i64> = numbers.iter().map(|n| n.cast_signed()).collect();
        let mixed = Vec::<i64>::try_from(mix_tensor(Tensor::from_slice(&signed))).unwrap();
        let expected: Vec<i64> = numbers.iter().map(|&n| mix(n).cast_signed()).collect();
        assert_eq!(mixed, expected);
        // The first output of SplitMix64 seeded with 0, from its reference implementation.
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
    }

    #[test]
    fn one_piece_and_pieces_and_single_rows_draw_the_same_mask() {
        let whole = keep_mask(0.3, STREAM, &[5, 9], &positions(0, 16), 33);
        let pieces = [(0, 5), (5, 6), (6, 16)].map(|(a, b)| keep_mask(0.3, STREAM, &[5, 9], &positions(a, b), 33));
        assert_eq!(whole, Tensor::cat(&pieces, 1));
        let sequence = keep_mask(0.3, STREAM, &[9], &positions(0, 16).unsqueeze(0), 33);
        assert_eq!(whole.narrow(0, 1, 1), sequence);
    }

    #[test]
    fn the_share_kept_is_the_probability() {
        for p in [0.05, 0.1, 0.5] {
            let kept = keep_mask(p, STREAM, &[0, 1, 2, 3], &positions(0, 256), 512);
            let share = f64::try_from(kept.to_kind(Kind::Double).mean(None)).unwrap();
            // Five standard deviations of 2^19 draws.
            assert!((share - (1.0 - p)).abs() < 5.0 * (p * (1.0 - p) / 524_288.0).sqrt(), "p {p}: kept {share}");
        }
    }

    #[test]
    fn layers_modules_steps_samples_and_neighbours_are_uncorrelated() {
        let mask = |stream, samples: &[u64]| keep_mask(0.5, stream, samples, &positions(0, 128), 256);
        let base = mask(STREAM, &[0]);
        for other in [
            mask(DropoutStream { layer: 2, ..STREAM }, &[0]),
            mask(DropoutStream { module: 3, ..STREAM }, &[0]),
            mask(DropoutStream { step: 4, ..STREAM }, &[0]),
            mask(DropoutStream { seed: 8, ..STREAM }, &[0]),
            mask(STREAM, &[1]),
            base.roll([1].as_slice(), [1].as_slice()),
            base.roll([1].as_slice(), [2].as_slice()),
        ] {
            // Five standard deviations of 2^15 pairs.
            assert!(correlation(&base, &other).abs() < 5.0 / 32_768f64.sqrt());
        }
    }

    #[test]
    fn the_expectation_is_the_input() {
        let x = Tensor::ones([1, 256, 256], (Kind::Float, Device::Cpu));
        let dropped = dropout(&x, 0.25, STREAM, &[0], &positions(0, 256));
        assert!((f64::try_from(dropped.mean(None)).unwrap() - 1.0).abs() < 0.01);
        assert!((f64::try_from(dropped.max()).unwrap() - 4.0 / 3.0).abs() < 1e-6);
    }
}
