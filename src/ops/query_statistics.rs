//! Statistics of the queries of a layer before RoPE turns them, and how queries to come score keys by them (`TriAttention`, Mao et al. 2026,
//! arXiv 2604.04921): the mean query, and for each pair of channels the length excess `E|q| − |E q|`, the mean length over queries less the
//! length in the mean query.

use tch::{Device, Kind, Tensor};

use super::frequencies::Frequencies;
use super::rope::Rotation;

/// Queries are expected at so many powers of 2 from a token: up to 65 536 tokens away.
const POWERS: i64 = 17;

/// Statistics of the queries of a layer, for the sequences of a batch.
#[derive(Debug)]
pub struct QueryStatistics {
    mean_hd: Tensor,
    length_excess_hf: Tensor,
    frequencies: Option<Frequencies>,
}

impl Clone for QueryStatistics {
    /// They are never written to, so that both may lie in the same memory.
    fn clone(&self) -> Self {
        let (mean_hd, length_excess_hf) = (self.mean_hd.shallow_clone(), self.length_excess_hf.shallow_clone());
        Self { mean_hd, length_excess_hf, frequencies: self.frequencies.clone() }
    }
}

impl QueryStatistics {
    /// Of what [`QuerySums::statistics`] made, for sequences whose keys turn with these frequencies, or not at all.
    pub fn new([mean_hd, length_excess_hf]: [&Tensor; 2], frequencies: Option<Frequencies>) -> Self {
        Self { mean_hd: mean_hd.shallow_clone(), length_excess_hf: length_excess_hf.shallow_clone(), frequencies }
    }

    /// The scores that queries behind `position` can be expected to give each key: those of the mean query of each head, and the length excess
    /// times the lengths of the key's pairs.
    ///
    /// # Shapes
    /// `(B, G, C, D)`, turned to their positions, in; `(B, G, H / G, C)` out, in the kind of the statistics.
    pub fn score(&self, k_bgcd: &Tensor, position: usize) -> Tensor {
        let (kind, device, groups) = (self.mean_hd.kind(), k_bgcd.device(), k_bgcd.size()[1]);
        let k_bgcd = k_bgcd.to_kind(kind);
        let by_group = |x: &Tensor| x.unflatten(1, [groups, -1]);
        let Some(frequencies) = self.frequencies.as_ref().map(|all| all.of_first(k_bgcd.size()[0])) else {
            return by_group(&self.mean_hd.unsqueeze(0)).matmul(&k_bgcd.transpose(-1, -2));
        };
        let at = Tensor::full([1], position as i64, (Kind::Int64, device));
        let alike = self.mean_hd.unsqueeze(0).unsqueeze(2).expand([frequencies.inverse_bf.size()[0], -1, -1, -1], false);
        let mean_bhd = Rotation::at(&at, &frequencies, kind).apply(&alike.contiguous()).squeeze_dim(2);
        let by_mean_bgrc = by_group(&mean_bhd).matmul(&k_bgcd.transpose(-1, -2));
        // The factor on cosines and sines, which keys have already.
        let length_excess_1hf = self.length_excess_hf.unsqueeze(0);
        let factor = frequencies.attention_factor_b.as_ref().map(|of_b| of_b.to_kind(kind).view([-1, 1, 1]));
        let length_excess_bhf = factor.map_or(length_excess_1hf.shallow_clone(), |factor| length_excess_1hf * factor);
        let length_bgcf = pair_lengths(&k_bgcd, self.length_excess_hf.size()[1]);
        by_mean_bgrc + by_group(&length_excess_bhf).matmul(&length_bgcf.transpose(-1, -2))
    }
}

/// The lengths of the pairs of channels that turn, of which a head has so many: `(…, D)` in, `(…, F)` out.
fn pair_lengths(x: &Tensor, pairs: i64) -> Tensor {
    let [low, high] = [0, pairs].map(|start| x.narrow(-1, start, pairs));
    low.hypot(&high)
}

/// Sums over queries before they are turned.
#[derive(Debug, Default)]
pub struct QuerySums {
    count: f64,
    /// Of the queries `(H, D)`, and of the lengths of their pairs `(H, F)`, f64.
    sums: Option<[Tensor; 2]>,
}

impl QuerySums {
    /// Adds the queries `(B, H, n, D)` of some tokens, `pairs` of whose channels turn.
    pub fn add(&mut self, q_bhnd: &Tensor, pairs: i64) {
        let sum = |x: &Tensor| x.sum_dim_intlist(&[0i64, 2][..], false, Kind::Double);
        let more = [sum(q_bhnd), sum(&pair_lengths(&q_bhnd.to_kind(Kind::Double), pairs))];
        self.count += (q_bhnd.size()[0] * q_bhnd.size()[2]) as f64;
        self.sums = Some(match self.sums.take() {
            Some(sums) => [&sums[0] + &more[0], &sums[1] + &more[1]],
            None => more,
        });
    }

    /// Where they lie.
    pub fn device(&self) -> Device {
        self.sums.as_ref().map_or(Device::Cpu, |sums| sums[0].device())
    }

    /// The mean query of each head, turned on by the distances to queries to come, the mean over these `(H, D)`; and the length excess of its
    /// pairs of channels `(H, F)`. F64; `None` of no queries.
    pub fn statistics(&self, frequencies: Option<&Frequencies>) -> Option<[Tensor; 2]> {
        let [mean_hd, length_hf] = self.sums.as_ref()?.each_ref().map(|sum| sum / self.count);
        let length_excess_hf = &length_hf - pair_lengths(&mean_hd, length_hf.size()[1]);
        let Some(frequencies) = frequencies else { return Some([mean_hd, length_excess_hf]) };
        let distances = Tensor::arange(POWERS, (Kind::Double, mean_hd.device())).exp2();
        // The factor on cosines and sines comes with the turn to a position.
        let plain = Frequencies { attention_factor_b: None, ..frequencies.of_first(1) };
        let alike = mean_hd.unsqueeze(0).unsqueeze(2).expand([-1, -1, POWERS, -1], false).contiguous();
        let turned_1hnd = Rotation::at(&distances, &plain, Kind::Double).apply(&alike);
        Some([turned_1hnd.mean_dim(&[2i64][..], false, Kind::Double).squeeze_dim(0), length_excess_hf])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

    /// Two sequences of which the second has a factor; two of three pairs turn, or none.
    #[test]
    fn keys_are_scored_as_the_sum_over_distances_says() {
        tch::manual_seed(1);
        let (q_bhnd, k_bgcd) = (Tensor::randn([1, 4, 50, 6], F64), Tensor::randn([2, 2, 7, 6], F64));
        let factors = Tensor::from_slice(&[1.0, 1.3]);
        let inverse_bf = Tensor::from_slice(&[0.9, 0.03]).view([1, 2]).expand([2, -1], false);
        let turning = Frequencies { inverse_bf, attention_factor_b: Some(factors.shallow_clone()) };
        for frequencies in [Some(turning), None] {
            let (mut sums, pairs) = (QuerySums::default(), if frequencies.is_some() { 2 } else { 0 });
            sums.add(&q_bhnd.narrow(2, 0, 20), pairs);
            sums.add(&q_bhnd.narrow(2, 20, 30), pairs);
            let turned = |x: &Tensor, at: &Tensor| match &frequencies {
                Some(turning) => Rotation::at(at, turning, Kind::Double).apply(x),
                None => x.shallow_clone(),
            };
            let k_bgcd = turned(&k_bgcd, &Tensor::arange(7, (Kind::Int64, Device::Cpu)));
            let [mean_hd, length_excess_hf] = sums.statistics(frequencies.as_ref()).unwrap();
            let statistics = QueryStatistics::new([&mean_hd, &length_excess_hf], frequencies.clone());
            let found = statistics.score(&k_bgcd, 40);
            let (key, mean) = (k_bgcd.repeat_interleave_self_int(2, 1, None), q_bhnd.mean_dim(&[2i64][..], true, Kind::Double));
            let mut expected = Tensor::zeros([2, 4, 7], F64);
            for distance in (0..17).map(|power| 1i64 << power) {
                let query = turned(&mean.expand([2, -1, -1, -1], false).contiguous(), &Tensor::from_slice(&[40 + distance]));
                expected += (query * &key).sum_dim_intlist(&[-1i64][..], false, None) / 17.0;
            }
            for pair in 0..pairs {
                let length = |x: &Tensor| (x.select(-1, pair).square() + x.select(-1, pair + 2).square()).sqrt();
                let longer = length(&q_bhnd).mean_dim(&[2i64][..], true, Kind::Double) - length(&mean);
                expected += longer * factors.view([2, 1, 1]) * length(&key);
            }
            let apart = (found.flatten(1, 2) - expected).abs().max().double_value(&[]);
            assert!(apart < 1e-12, "{pairs} pairs: {apart}");
            // The first sequence is given the same when the second has ended.
            let alone = statistics.score(&k_bgcd.narrow(0, 0, 1), 40);
            assert!(alone.allclose(&found.narrow(0, 0, 1), 0.0, 1e-12, false));
        }
    }
}
