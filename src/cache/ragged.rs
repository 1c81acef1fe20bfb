//! Sequences of different length: where a chunk's tokens stand in its region when some sequences have fewer of them.

use tch::{Device, Kind, Tensor};

use super::ChunkSpan;
use crate::native::cuda::on_device;

/// Moves tokens between their own order (left-aligned, pads on the right) and the slots of the chunk's region (after the entries
/// that the sequence keeps). Without ragged sequences both are the same and nothing is moved.
#[derive(Debug)]
pub struct Placement(Option<RegionSlots>);

#[derive(Debug)]
struct RegionSlots {
    /// `(B, n)`: the token in each slot of the region, and whether there is one.
    token: Tensor,
    has_token: Tensor,
    /// `(B, n)`: the slot of each token, and whether it is real. `None` where no sequence keeps entries, and tokens stand in their order.
    slot: Option<Tensor>,
    is_real: Tensor,
    /// `(B, 1, 1)`: how many old entries stand in front of the tokens.
    kept: Tensor,
}

impl Placement {
    /// The placement of a chunk without pads.
    pub fn whole() -> Self {
        Self(None)
    }

    /// The placement of `span`, whose sequence `b` keeps `retained[b]` old entries in front of its tokens.
    pub fn new(span: &ChunkSpan, retained: &[usize], device: Device) -> Self {
        if !span.is_ragged() {
            return Self(None);
        }
        let (n, batch) = (span.len as i64, span.real.len() as i64);
        let (mut token, mut has_token, mut slot, mut is_real) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (&real, &kept) in span.real.iter().zip(retained) {
            let (real, kept) = (real as i64, kept as i64);
            for c in 0..n {
                has_token.push((kept..kept + real).contains(&c));
                token.push((c - kept).clamp(0, n - 1));
                is_real.push(c < real);
                slot.push((c + kept).clamp(0, n - 1));
            }
        }
        let ints = |values: &[i64]| on_device(values, device).view([batch, n]);
        let bools = |values: &[bool]| on_device(values, device).view([batch, n]);
        let kept: Vec<i64> = retained.iter().map(|&kept| kept as i64).collect();
        Self(Some(RegionSlots {
            token: ints(&token),
            has_token: bools(&has_token),
            slot: retained.iter().any(|&kept| kept > 0).then(|| ints(&slot)),
            is_real: bools(&is_real),
            kept: on_device(&kept, device).view([batch, 1, 1]),
        }))
    }

    /// From tokens in their order to the slots of the region, zero where one has no token.
    ///
    /// # Shapes
    /// `x (B, heads, n, D)` in and out.
    pub fn place(&self, x: &Tensor) -> Tensor {
        match &self.0 {
            None => x.shallow_clone(),
            Some(c) => moved(x, c.slot.as_ref().map(|_| &c.token), &c.has_token),
        }
    }

    /// From the region's slots back to tokens in their order, zero for pads.
    ///
    /// # Shapes
    /// `x (B, heads, n, D)` in and out.
    pub fn unplace(&self, x: &Tensor) -> Tensor {
        match &self.0 {
            None => x.shallow_clone(),
            Some(c) => moved(x, c.slot.as_ref(), &c.is_real),
        }
    }

    /// Positions by slot of the region, −1 where one has no token: `(B, 1, n)`, or `(1, 1, n)` where all sequences agree.
    pub(super) fn positions(&self, span: &ChunkSpan, device: Device) -> Tensor {
        let start = span.start as i64;
        match &self.0 {
            None => Tensor::arange_start(start, start + span.len as i64, (Kind::Int64, device)).view([1, 1, -1]),
            Some(c) => (&c.token + start).where_scalarother(&c.has_token, -1).unsqueeze(1),
        }
    }

    /// How many queries of the region, from its first slot on, see entries through a window of so many positions.
    ///
    /// # Shapes
    /// Positions `(B, G, slots)` in; int64 of the same size out.
    pub fn visible_until(&self, span: &ChunkSpan, position_bgc: &Tensor, window: usize) -> Tensor {
        // Slot c of the region has the token of position start + c − kept, and sees what is less than a window older.
        let until = position_bgc + (window as i64 - span.start as i64);
        let until = if let Some(slots) = &self.0 { until + &slots.kept } else { until };
        #[cfg(test)]
        if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::WindowTooWide) {
            return (until + 1).clamp(0, span.len as i64);
        }
        until.clamp(0, span.len as i64)
    }

    /// Log-sum-exps in which slots without a token count for nothing: `+inf` there.
    ///
    /// # Shapes
    /// `(B, H, n)` in and out.
    pub fn silence(&self, lse_bhn: &Tensor) -> Tensor {
        match &self.0 {
            None => lse_bhn.shallow_clone(),
            Some(c) => lse_bhn.masked_fill(&c.has_token.logical_not().unsqueeze(1), f64::INFINITY),
        }
    }
}

fn moved(x: &Tensor, index_bn: Option<&Tensor>, mask_bn: &Tensor) -> Tensor {
    let (b, h, n, d) = x.size4().unwrap_or_default();
    let gathered = index_bn.map(|index| x.gather(2, &index.view([b, 1, n, 1]).expand([b, h, n, d], false), false));
    // A product with the mask would let a pad's infinity through.
    gathered.as_ref().unwrap_or(x).where_scalarother(&mask_bn.view([b, 1, n, 1]), 0)
}
