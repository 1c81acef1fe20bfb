//! What queries are expected to attend to, by what the queries of a layer are like before they are turned to their positions (`TriAttention`,
//! Mao et al. 2026, arXiv 2604.04921).

use tch::{Kind, Tensor};

use super::frequencies::Frequencies;
use super::rope::Rotation;

/// Queries are expected at so many powers of 2 from a token: up to 65 536 tokens away.
const POWERS: i64 = 17;

/// Statistics of the queries of a layer, and how these turn.
#[derive(Debug)]
pub struct ExpectedQueries {
    /// The mean query of each head at the position 0, turned on by the distances to the queries to come, the mean over these `(H, D)`.
    pub mean_hd: Tensor,
    /// By how much the pairs of channels that turn are longer in a query than in the mean query `(H, F)`.
    pub spread_hf: Tensor,
    /// `None` where nothing turns.
    pub frequencies: Option<Frequencies>,
}

impl Clone for ExpectedQueries {
    /// They are never written to, so that both may lie in the same memory.
    fn clone(&self) -> Self {
        let (mean_hd, spread_hf) = (self.mean_hd.shallow_clone(), self.spread_hf.shallow_clone());
        Self { mean_hd, spread_hf, frequencies: self.frequencies.clone() }
    }
}

impl ExpectedQueries {
    /// From the mean of queries before they are turned, and the mean length of each pair of their channels.
    ///
    /// # Shapes
    /// `mean (H, D)`, `length (H, F)`; the frequencies are those of one sequence.
    pub fn of_queries(mean_hd: &Tensor, length_hf: &Tensor, frequencies: Option<Frequencies>) -> Self {
        let Some(turning) = &frequencies else {
            return Self { mean_hd: mean_hd.shallow_clone(), spread_hf: length_hf.shallow_clone(), frequencies };
        };
        let (kind, device) = (mean_hd.kind(), mean_hd.device());
        let distances = Tensor::arange(POWERS, (Kind::Double, device)).exp2();
        // A factor on all cosines and sines is that of the turn to the position, and not of this one.
        let plain = Frequencies { attention_factor_b: None, ..turning.of_first(1) };
        let rotation = Rotation::at(&distances, &plain, kind);
        let turned_1hnd = rotation.apply(&mean_hd.unsqueeze(0).unsqueeze(2).expand([-1, -1, POWERS, -1], false).contiguous());
        let longer_hf = length_hf - pair_lengths(mean_hd, length_hf.size()[1]);
        Self {
            mean_hd: turned_1hnd.mean_dim(&[2i64][..], false, kind).squeeze_dim(0),
            spread_hf: turning.attention_factor_b.as_ref().map_or(longer_hf.shallow_clone(), |of_b| &longer_hf * of_b.get(0)),
            frequencies,
        }
    }

    /// What the mean query of each head, as of `position`, and the spread around it give each key.
    ///
    /// # Shapes
    /// `(B, G, C, D)`, turned to their positions, in; `(B, G, H / G, C)` out, in the kind of the statistics.
    pub fn score(&self, k_bgcd: &Tensor, position: usize) -> Tensor {
        let (kind, batch, groups) = (self.mean_hd.kind(), k_bgcd.size()[0], k_bgcd.size()[1]);
        let k_bgcd = k_bgcd.to_kind(kind);
        let mean_1h1d = self.mean_hd.unsqueeze(0).unsqueeze(2);
        let by_group = |x_bh1d: &Tensor| x_bh1d.squeeze_dim(2).unflatten(1, [groups, -1]);
        let Some(frequencies) = &self.frequencies else { return by_group(&mean_1h1d).matmul(&k_bgcd.transpose(-1, -2)) };
        let frequencies = frequencies.of_first(batch);
        let rotation = Rotation::at(&Tensor::full([1], position as i64, (Kind::Int64, k_bgcd.device())), &frequencies, kind);
        let alike = mean_1h1d.expand([frequencies.inverse_bf.size()[0], -1, -1, -1], false).contiguous();
        let by_mean_bgrc = by_group(&rotation.apply(&alike)).matmul(&k_bgcd.transpose(-1, -2));
        let length_bgcf = pair_lengths(&k_bgcd, self.spread_hf.size()[1]);
        by_mean_bgrc + self.spread_hf.unflatten(0, [groups, -1]).matmul(&length_bgcf.transpose(-1, -2))
    }
}

/// The lengths of the pairs of channels that turn, of which a head has so many.
///
/// # Shapes
/// `(…, D)` in, `(…, F)` out.
pub fn pair_lengths(x: &Tensor, pairs: i64) -> Tensor {
    let [low, high] = [0, pairs].map(|start| x.narrow(-1, start, pairs));
    low.hypot(&high)
}

/// Sums over queries, of which statistics are made.
#[derive(Debug, Default)]
pub struct QuerySums {
    count: f64,
    /// Of queries before they are turned `(H, D)`, and of the lengths of their pairs `(H, F)`, f64.
    sums: Option<[Tensor; 2]>,
}

impl QuerySums {
    /// Adds the queries of some tokens, `pairs` of whose channels turn.
    ///
    /// # Shapes
    /// `(B, H, n, D)`.
    pub fn add(&mut self, q_bhnd: &Tensor, pairs: i64) {
        let sum = |x: &Tensor| x.sum_dim_intlist(&[0i64, 2][..], false, Kind::Double);
        let q_bhnd = q_bhnd.detach();
        let more = [sum(&q_bhnd), sum(&pair_lengths(&q_bhnd.to_kind(Kind::Double), pairs))];
        self.count += (q_bhnd.size()[0] * q_bhnd.size()[2]) as f64;
        self.sums = Some(match self.sums.take() {
            Some(sums) => [&sums[0] + &more[0], &sums[1] + &more[1]],
            None => more,
        });
    }

    /// The mean query `(H, D)` and the mean lengths of its pairs `(H, F)`, f64; `None` of no queries.
    pub fn means(&self) -> Option<[Tensor; 2]> {
        self.sums.as_ref().map(|sums| sums.each_ref().map(|sum| sum / self.count))
    }
}
