//! Numbers in 8 bits each: the block-wise dynamic quantisation of Dettmers et al. 2022 (arXiv 2110.02861), as bitsandbytes has it.

use tch::{Kind, Tensor};

/// Numbers that share a scale, which is the largest magnitude of them.
const BLOCK: i64 = 256;
/// Powers of ten that the map spans below 1.
const EXPONENTS: i32 = 7;

/// The 256 numbers from -1 to 1, or from 0 to 1, that codes stand for: the fewer bits an exponent takes, the more its fraction has.
#[derive(Debug)]
pub(super) struct DynamicMap {
    /// The numbers in ascending order `(256)`, f64.
    values: Tensor,
    /// What lies between two neighbours `(255)`, f64.
    borders: Tensor,
    /// Nothing but zero itself is coded as zero: a denominator must not vanish (Li et al. 2023, arXiv 2309.01507).
    keeps_above_zero: bool,
}

impl DynamicMap {
    pub(super) fn new(is_signed: bool) -> Self {
        let mut values = vec![0.0, 1.0];
        for exponent in 0..EXPONENTS {
            // The sign costs a bit of the fraction.
            let count = 1 << (exponent + i32::from(!is_signed));
            let of_fraction =
                |i: i32| (0.1 + 0.9 * (f64::from(i) + 0.5) / f64::from(count)) * 10f64.powi(exponent + 1 - EXPONENTS);
            values.extend((0..count).map(of_fraction));
            values.extend((0..count).filter(|_| is_signed).map(|i| -of_fraction(i)));
        }
        values.sort_by(f64::total_cmp);
        let borders: Vec<f64> = values.windows(2).map(|pair| f64::midpoint(pair[0], pair[1])).collect();
        Self { values: Tensor::from_slice(&values), borders: Tensor::from_slice(&borders), keeps_above_zero: !is_signed }
    }

    /// Codes, and a scale for each block.
    ///
    /// # Shapes
    /// `(…)` of a float kind; `(…)` u8 and `(blocks)` of that kind out.
    pub(super) fn encode(&self, x: &Tensor) -> [Tensor; 2] {
        let blocks = by_block(x);
        let scale = blocks.abs().amax([1i64], true);
        // A block of zeros is divided by one.
        let relative = &blocks / scale.where_self(&scale.gt(0.0), &scale.ones_like());
        let mut codes = relative.bucketize(&like(&self.borders, x), true, false);
        if self.keeps_above_zero {
            codes = codes.maximum(&relative.gt(0.0).to_kind(Kind::Int));
        }
        [codes.to_kind(Kind::Uint8).flatten(0, 1).narrow(0, 0, x.numel() as i64).copy().view(&x.size()[..]), scale.flatten(0, 1)]
    }

    /// The numbers that codes stand for.
    ///
    /// # Shapes
    /// Those of [`Self::encode`], the other way.
    pub(super) fn decode(&self, codes: &Tensor, scale: &Tensor) -> Tensor {
        let values = like(&self.values, scale).index_select(0, &codes.flatten(0, -1).to_kind(Kind::Int));
        let whole = by_block(&values) * scale.unsqueeze(1);
        whole.flatten(0, 1).narrow(0, 0, codes.numel() as i64).view(&codes.size()[..])
    }
}

fn like(map: &Tensor, x: &Tensor) -> Tensor {
    map.to_device(x.device()).to_kind(x.kind())
}

/// Rows of a block each, the last one filled up with zeros.
fn by_block(x: &Tensor) -> Tensor {
    let flat = x.reshape([-1]);
    let missing = -flat.size()[0] & (BLOCK - 1);
    flat.constant_pad_nd([0, missing]).view([-1, BLOCK])
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn the_maps_have_the_ends_and_steps_of_the_paper() {
        for (map, least, most_negative) in
            [(DynamicMap::new(true), 5.5e-7, -0.992_968_75), (DynamicMap::new(false), 3.25e-7, 0.0)]
        {
            let values = Vec::<f64>::try_from(&map.values).unwrap();
            assert_eq!((values.len(), values[255]), (256, 1.0));
            assert!((values[0] - most_negative).abs() < 1e-12, "{}", values[0]);
            let smallest = values.iter().copied().find(|&value| value > 0.0).unwrap();
            assert!((smallest - least).abs() < 1e-18, "{smallest}");
            assert!(values.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }

    #[test]
    fn numbers_come_back_by_block_and_zero_alone_is_zero() {
        let x = Tensor::randn([3, 211], (Kind::Float, Device::Cpu));
        let map = DynamicMap::new(true);
        let [codes, scale] = map.encode(&x);
        assert_eq!((codes.size(), codes.kind(), scale.size()), (vec![3, 211], Kind::Uint8, vec![3]));
        let error = (map.decode(&codes, &scale) - &x).abs().max().double_value(&[]);
        // Half of the widest step, 0.9 / 64, of the largest magnitude.
        assert!(error > 0.0 && error <= 0.5 * 0.9 / 64.0 * x.abs().max().double_value(&[]) * 1.001, "{error}");
        let tiny = Tensor::from_slice(&[0.0f32, 1e-20, 1.0]);
        let [codes, scale] = DynamicMap::new(false).encode(&tiny);
        assert_eq!(Vec::<u8>::try_from(codes).unwrap(), [0, 1, 255]);
        assert_eq!(Vec::<f32>::try_from(scale).unwrap(), [1.0]);
        let [codes, scale] = map.encode(&Tensor::zeros([2], (Kind::Float, Device::Cpu)));
        assert_eq!(Vec::<f32>::try_from(map.decode(&codes, &scale)).unwrap(), [0.0, 0.0]);
    }
}
