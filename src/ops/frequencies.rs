//! How fast the pairs of channels of a rotary position embedding turn, and how that is changed for long sequences.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::attention::accumulation_kind;
use crate::native::cuda::upload;

/// The longest sequence in tokens of which a model's files may speak.
pub const MAX_SEQUENCE_LENGTH: usize = 1 << 31;

/// A rotary position embedding (Su et al. 2021, arXiv 2104.09864) of the heads of a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    /// The base of the frequencies.
    pub theta: f64,
    /// 2F: so many first channels of a head are turned, in pairs; the others stay as they are.
    pub rotary_dim: usize,
    /// How the frequencies are changed for sequences longer than those that the model was first trained on.
    pub scaling: RopeScaling,
}

/// How the frequencies of a rotary position embedding are changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RopeScaling {
    Unscaled,
    /// All are divided by a factor: positions are interpolated (Chen et al. 2023, arXiv 2306.15595).
    Linear {
        factor: f64,
    },
    /// The base grows with the length of the whole sequence ("dynamic NTK", as described in arXiv 2309.00071, section 3.3).
    Dynamic {
        factor: f64,
        /// Tokens up to which nothing changes.
        max_positions: usize,
    },
    /// Slow pairs are interpolated and fast ones are not (Peng et al. 2023, arXiv 2309.00071).
    Yarn(YarnScaling),
    /// `YaRN` with a factor that follows from the length of each sequence. Depends on the length of the whole sequence.
    DynamicYarn(DynamicYarnScaling),
    /// Pairs of long wavelengths are interpolated and short ones are not, as Llama 3.1 was published (arXiv 2407.21783).
    Llama3(Llama3Scaling),
    /// Each pair has a factor of its own, from one of two lists by the length of the whole sequence (Ding et al. 2024, arXiv 2402.13753).
    LongRope(LongRopeScaling),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct YarnScaling {
    /// The frequencies of slow pairs are divided by it.
    pub factor: f64,
    /// Tokens of the sequences that the model was first trained on.
    pub original: usize,
    /// Pairs that turn more often than this over the original length are kept.
    pub beta_fast: f64,
    /// Pairs that turn less often than this are divided.
    pub beta_slow: f64,
    /// The border pairs are whole numbers.
    pub truncates: bool,
    /// Cosines and sines are multiplied by it.
    pub attention_factor: f64,
}

/// `YaRN` whose factor is how many times longer a sequence is than those of the first training; up to that length nothing changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicYarnScaling {
    /// Tokens of the sequences that the model was first trained on.
    pub original: usize,
    /// Pairs that turn more often than this over the original length are kept.
    pub beta_fast: f64,
    /// Pairs that turn less often than this are divided by the factor. In between, the share that is kept grows with the number of turns.
    pub beta_slow: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Llama3Scaling {
    /// The frequencies of pairs with long wavelengths are divided by it.
    pub factor: f64,
    /// Wavelengths above the original length divided by this are long.
    pub low: f64,
    /// Wavelengths below the original length divided by this are kept.
    pub high: f64,
    /// Tokens of the sequences that the model was first trained on.
    pub original: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LongRopeScaling {
    /// F factors of sequences up to the original length.
    pub short: Vec<f64>,
    /// F factors of longer ones, from their first token on.
    pub long: Vec<f64>,
    /// Tokens of the sequences that the model was first trained on.
    pub original: usize,
    /// Cosines and sines are multiplied by it, at any length.
    pub attention_factor: f64,
}

/// The frequencies of a rotary position embedding for the sequences of a batch.
#[derive(Debug)]
pub struct Frequencies {
    /// Angles by which pairs turn from one position to the next: `(B, F)`, or `(1, F)` where they do not depend on a sequence's length.
    pub inverse_bf: Tensor,
    /// Cosines and sines are multiplied by it: `(B)`, or `(1)` where it does not depend on the length of a sequence; `None` is 1.
    pub attention_factor_b: Option<Tensor>,
}

impl Clone for Frequencies {
    /// They are never written to, so that both may lie in the same memory.
    fn clone(&self) -> Self {
        let attention_factor_b = self.attention_factor_b.as_ref().map(Tensor::shallow_clone);
        Self { inverse_bf: self.inverse_bf.shallow_clone(), attention_factor_b }
    }
}

impl Frequencies {
    /// Concatenates the frequencies of several batches.
    pub fn joined(all: &[&Self]) -> Self {
        let inverse: Vec<&Tensor> = all.iter().map(|of| &of.inverse_bf).collect();
        let factor = |of: &&Self| {
            let ones = || Tensor::ones([of.inverse_bf.size()[0]], (of.inverse_bf.kind(), of.inverse_bf.device()));
            of.attention_factor_b.as_ref().map_or_else(ones, Tensor::shallow_clone)
        };
        let is_plain = all.iter().all(|of| of.attention_factor_b.is_none());
        let attention_factor_b = (!is_plain).then(|| Tensor::cat(&all.iter().map(factor).collect::<Vec<_>>(), 0));
        Self { inverse_bf: Tensor::cat(&inverse, 0), attention_factor_b }
    }

    pub fn of_first(&self, sequences: i64) -> Self {
        let first = |of: &Tensor| of.narrow(0, 0, sequences.min(of.size()[0]));
        Self { inverse_bf: first(&self.inverse_bf), attention_factor_b: self.attention_factor_b.as_ref().map(first) }
    }
}

impl RopeSpec {
    /// The length that a sequence counts as while it grows token by token: rotated keys stay as they are. Where the base grows with the
    /// length it is that of the end, `at_most`; where there are two lists of factors a sequence of `so_far` tokens has that of its length,
    /// and is computed anew when it passes the border.
    pub fn length_under_way(&self, so_far: usize, at_most: usize) -> usize {
        match &self.scaling {
            RopeScaling::LongRope(LongRopeScaling { original, .. }) => so_far.min(original + 1).max(*original),
            _ => at_most,
        }
    }

    /// Rotates all channels of a head, with unscaled frequencies.
    pub fn plain(theta: f64, head_dim: usize) -> Self {
        Self { theta, rotary_dim: head_dim, scaling: RopeScaling::Unscaled }
    }

    /// Whether sequences of different lengths have different frequencies.
    pub fn depends_on_length(&self) -> bool {
        matches!(self.scaling, RopeScaling::Dynamic { .. } | RopeScaling::DynamicYarn(_) | RopeScaling::LongRope(_))
    }

    /// The longest sequence in tokens that it is made for, in a model whose `config.json` speaks of `max_positions`. Where a kind
    /// stretches that very number, the file keeps it as it was, and the factor tells by how much.
    pub fn reach(&self, max_positions: usize) -> usize {
        let times = |tokens: usize, factor: f64| (tokens as f64 * factor) as usize;
        match &self.scaling {
            RopeScaling::Unscaled | RopeScaling::LongRope(_) => max_positions,
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor, .. } => times(max_positions, *factor),
            RopeScaling::Yarn(yarn) => times(yarn.original, yarn.factor).max(max_positions),
            RopeScaling::DynamicYarn(_) => MAX_SEQUENCE_LENGTH,
            RopeScaling::Llama3(llama3) => times(llama3.original, llama3.factor).max(max_positions),
        }
    }

    /// The longest sequence in tokens that it turns at all: the base of `dynamic` goes on growing behind the reach.
    pub fn end(&self, max_positions: usize) -> usize {
        if matches!(self.scaling, RopeScaling::Dynamic { .. }) { MAX_SEQUENCE_LENGTH } else { self.reach(max_positions) }
    }

    /// The frequencies for sequences of these lengths in tokens, in f32 (f64 for `kind` f64).
    ///
    /// The operations, and the dtype in which they are made, are those of the other programs that run such models: at position 100 000
    /// one rounding of a frequency would already turn a vector by another 0.006. So they are made on the host for every device, whose powers
    /// may be rounded otherwise.
    ///
    /// # Shapes
    /// `(B, F)` for B lengths, or `(1, F)` where they do not matter.
    pub fn frequencies(&self, lengths: &[usize], kind: Kind, device: Device) -> Frequencies {
        let wide = accumulation_kind(kind);
        let inverse_bf = if self.depends_on_length() {
            Tensor::stack(&lengths.iter().map(|&length| self.inverse(length, wide)).collect::<Vec<_>>(), 0)
        } else {
            self.inverse(0, wide).unsqueeze(0)
        };
        let factors = match &self.scaling {
            RopeScaling::Yarn(yarn) => vec![yarn.attention_factor],
            RopeScaling::LongRope(longrope) => vec![longrope.attention_factor],
            RopeScaling::DynamicYarn(yarn) => lengths.iter().map(|&length| 0.1 * yarn.factor(length).ln() + 1.0).collect(),
            _ => Vec::new(),
        };
        let is_plain = factors.iter().all(|factor| (factor - 1.0).abs() == 0.0);
        let attention_factor_b = (!is_plain).then(|| upload(&Tensor::from_slice(&factors).to_kind(wide), device));
        Frequencies { inverse_bf: upload(&inverse_bf, device), attention_factor_b }
    }

    /// The frequencies of a sequence of so many tokens `(F)`.
    fn inverse(&self, length: usize, wide: Kind) -> Tensor {
        match &self.scaling {
            RopeScaling::Unscaled => self.powers(self.theta, wide).reciprocal(),
            RopeScaling::Linear { factor } => self.powers(self.theta, wide).reciprocal() / *factor,
            RopeScaling::Dynamic { factor, max_positions } => {
                self.powers(self.grown_base(*factor, length, *max_positions, wide), wide).reciprocal()
            }
            RopeScaling::Yarn(yarn) => self.of_yarn(yarn, wide),
            RopeScaling::DynamicYarn(yarn) => yarn.changed(&self.powers(self.theta, wide).reciprocal(), yarn.factor(length)),
            RopeScaling::Llama3(llama3) => llama3.changed(&self.powers(self.theta, wide).reciprocal()),
            RopeScaling::LongRope(longrope) => {
                let factors = if length > longrope.original { &longrope.long } else { &longrope.short };
                let factors = Tensor::from_slice(factors).to_kind(wide);
                (factors * self.powers(self.theta, wide)).reciprocal()
            }
        }
    }

    /// `base^(i/F)` for `i = 0 .. F`.
    fn powers(&self, base: f64, kind: Kind) -> Tensor {
        let width = self.rotary_dim as i64;
        let exponent = Tensor::arange_start_step(0, width, 2, (Kind::Int64, Device::Cpu)).to_kind(kind) / width as f64;
        Tensor::pow_scalar(base, &exponent)
    }

    /// The base of [`RopeScaling::Dynamic`] for a sequence, rounded where other programs round it.
    fn grown_base(&self, factor: f64, length: usize, max_positions: usize, kind: Kind) -> f64 {
        if length <= max_positions {
            return self.theta;
        }
        let width = self.rotary_dim as f64;
        let length = Tensor::from(length as f64).to_kind(kind);
        let stretched = length * factor / max_positions as f64 - (factor - 1.0);
        (stretched.pow_tensor_scalar(width / (width - 2.0)) * self.theta).double_value(&[])
    }

    fn of_yarn(&self, yarn: &YarnScaling, wide: Kind) -> Tensor {
        let width = self.rotary_dim as f64;
        // The pair that turns so often over the original length.
        let pair = |turns: f64| width * (yarn.original as f64 / (turns * TAU)).ln() / (2.0 * self.theta.ln());
        let (first, last) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
        let (first, last) = if yarn.truncates { (first.floor(), last.ceil()) } else { (first, last) };
        let (first, last) = (first.max(0.0), last.min(width - 1.0));
        // A ramp of no width is a step.
        let rise = if last - first == 0.0 { 0.001 } else { last - first };
        let ramp = ((Tensor::arange(self.rotary_dim as i64 / 2, (wide, Device::Cpu)) - first) / rise).clamp(0.0, 1.0);
        let kept = 1.0 - ramp;
        let powers = self.powers(self.theta, wide);
        let (exact, divided) = (powers.reciprocal(), (powers * yarn.factor).reciprocal());
        divided * (1.0 - &kept) + exact * kept
    }
}

impl DynamicYarnScaling {
    /// The factor that divides the frequencies of a sequence's slow pairs.
    fn factor(&self, length: usize) -> f64 {
        (length as f64 / self.original as f64).max(1.0)
    }

    /// What becomes of plain frequencies `(F)`.
    fn changed(&self, inverse_f: &Tensor, factor: f64) -> Tensor {
        let turns = inverse_f * (self.original as f64 / TAU);
        let kept = ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(0.0, 1.0);
        (1.0 - &kept) * inverse_f / factor + kept * inverse_f
    }
}

impl Llama3Scaling {
    /// What becomes of plain frequencies `(F)`.
    fn changed(&self, inverse_f: &Tensor) -> Tensor {
        let original = self.original as f64;
        let wavelength = inverse_f.reciprocal() * TAU;
        let smooth = (wavelength.reciprocal() * original - self.low) / (self.high - self.low);
        let blended = (1.0 - &smooth) * inverse_f / self.factor + &smooth * inverse_f;
        let is_long = wavelength.gt(original / self.low);
        let is_short = wavelength.lt(original / self.high);
        let divided = inverse_f / self.factor;
        inverse_f.where_self(&is_short, &divided.where_self(&is_long, &blended))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: Device = Device::Cpu;

    fn spec(scaling: RopeScaling) -> RopeSpec {
        RopeSpec { scaling, ..RopeSpec::plain(1e4, 16) }
    }

    fn row(spec: &RopeSpec, length: usize) -> Vec<f64> {
        Vec::try_from(spec.frequencies(&[length], Kind::Double, CPU).inverse_bf.get(0)).unwrap()
    }

    fn near(found: &[f64], expected: &[f64]) -> bool {
        found.len() == expected.len() && found.iter().zip(expected).all(|(f, e)| (f / e - 1.0).abs() < 1e-13)
    }

    fn plain() -> Vec<f64> {
        (0..8).map(|i| 1e4f64.powf(-f64::from(i) / 8.0)).collect()
    }

    #[test]
    fn what_is_divided_is_divided_and_what_is_kept_is_kept() {
        assert!(near(&row(&RopeSpec::plain(1e4, 16), 7), &plain()));
        let linear: Vec<f64> = plain().iter().map(|f| f / 4.0).collect();
        assert!(near(&row(&spec(RopeScaling::Linear { factor: 4.0 }), 7), &linear));
        let llama3 = Llama3Scaling { factor: 8.0, low: 1.0, high: 4.0, original: 48 };
        let found = row(&spec(RopeScaling::Llama3(llama3)), 7);
        for (found, plain) in found.iter().zip(plain()) {
            let wavelength = TAU / plain;
            let share = ((48.0 / wavelength - 1.0) / 3.0).clamp(0.0, 1.0);
            assert!((found / (share * plain + (1.0 - share) * plain / 8.0) - 1.0).abs() < 1e-13);
        }
    }

    #[test]
    fn yarn_divides_slow_pairs_and_keeps_fast_ones() {
        let yarn =
            YarnScaling { factor: 4.0, original: 256, beta_fast: 32.0, beta_slow: 1.0, truncates: true, attention_factor: 1.1 };
        let found = row(&spec(RopeScaling::Yarn(yarn.clone())), 7);
        // 32 turns over 256 tokens are made by pair 0.2, and 1 turn by pair 3.2.
        for (i, (found, plain)) in found.iter().zip(plain()).enumerate() {
            let divided = (i as f64 / 4.0).min(1.0);
            assert!((found / (plain * (1.0 - divided) + plain / 4.0 * divided) - 1.0).abs() < 1e-13, "{i}");
        }
        let step = YarnScaling { beta_fast: 4.0, beta_slow: 4.0, truncates: false, ..yarn };
        let found = row(&spec(RopeScaling::Yarn(step)), 7);
        assert!(
            near(&found[..3], &plain()[..3])
                && near(&found[3..], &plain().split_off(3).iter().map(|f| f / 4.0).collect::<Vec<_>>())
        );
    }

    /// The formula by hand: `(1 − g) θ / s + g θ`, where g is the share of pairs that turn often, and scores times `(0.1 ln s + 1)²`.
    #[test]
    fn yarn_by_the_length_of_a_sequence_is_its_formula() {
        let (original, beta_fast, beta_slow) = (256, 32.0, 1.0);
        let yarn = spec(RopeScaling::DynamicYarn(DynamicYarnScaling { original, beta_fast, beta_slow }));
        let expected = |length: f64| -> Vec<f64> {
            let scale = (length / 256.0).max(1.0);
            let share = |theta: f64| ((256.0 * theta / TAU - 1.0) / 31.0).clamp(0.0, 1.0);
            plain().into_iter().map(|theta| (1.0 - share(theta)) * theta / scale + share(theta) * theta).collect()
        };
        let found = yarn.frequencies(&[40, 256, 300, 2560], Kind::Double, CPU);
        for (i, length) in [40.0, 256.0, 300.0, 2560.0].into_iter().enumerate() {
            assert!(near(&Vec::<f64>::try_from(found.inverse_bf.get(i as i64)).unwrap(), &expected(length)), "{length}");
        }
        assert!(near(&row(&yarn, 256), &plain()) && !near(&row(&yarn, 257), &plain()));
        let factors = Vec::<f64>::try_from(found.attention_factor_b.unwrap()).unwrap();
        assert!(near(&factors, &[1.0, 1.0, 0.1 * (300.0f64 / 256.0).ln() + 1.0, 0.1 * 10.0f64.ln() + 1.0]), "{factors:?}");
        // Of sequences within the original length nothing is scaled.
        assert!(yarn.frequencies(&[40, 256], Kind::Double, CPU).attention_factor_b.is_none());
        assert_eq!(yarn.reach(256), MAX_SEQUENCE_LENGTH);
    }

    #[test]
    fn those_that_depend_on_the_length_have_a_row_for_each_sequence() {
        let dynamic = spec(RopeScaling::Dynamic { factor: 2.0, max_positions: 32 });
        assert!(near(&row(&dynamic, 32), &plain()));
        let base = 1e4 * (2.0f64 * 96.0 / 32.0 - 1.0).powf(16.0 / 14.0);
        let grown: Vec<f64> = (0..8).map(|i| base.powf(-f64::from(i) / 8.0)).collect();
        assert!(near(&row(&dynamic, 96), &grown));
        let (short, long) = (vec![1.0; 8], vec![2.0; 8]);
        let longrope = LongRopeScaling { short, long, original: 32, attention_factor: 1.2 };
        let longrope = spec(RopeScaling::LongRope(longrope));
        assert!(near(&row(&longrope, 32), &plain()));
        assert!(near(&row(&longrope, 33), &plain().iter().map(|f| f / 2.0).collect::<Vec<_>>()));
        for spec in [dynamic, longrope] {
            let both = spec.frequencies(&[20, 96], Kind::Float, CPU).inverse_bf;
            for (i, length) in [20, 96].into_iter().enumerate() {
                assert!(both.get(i as i64).equal(&spec.frequencies(&[length], Kind::Float, CPU).inverse_bf.get(0)));
            }
        }
    }
}
