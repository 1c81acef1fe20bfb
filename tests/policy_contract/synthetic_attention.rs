//! Attention as a scene has it, made up from positions instead of queries and keys.

use std::cell::{Cell, RefCell};

use kvtune::cache::{ChunkAttention, ChunkSpan, LayerCache, Queries};
use tch::{Kind, Tensor};

use super::content::{Content, HEAD_DIM, PER_GROUP, SCALE, query};
use super::scene::Scene;
use crate::support::CPU;

/// The attention of the chunk that a cache took last.
pub(crate) struct SyntheticAttention<'a> {
    pub(crate) scene: &'a Scene,
    pub(crate) content: &'a Content,
    pub(crate) span: &'a ChunkSpan,
    pub(crate) position_bgc: Tensor,
    /// How often a policy has asked.
    pub(crate) asked: Cell<usize>,
    /// Whose payments.
    pub(crate) paid_for: RefCell<Vec<Queries>>,
}

impl<'a> SyntheticAttention<'a> {
    pub(crate) fn new(scene: &'a Scene, content: &'a Content, span: &'a ChunkSpan, cache: &LayerCache) -> Self {
        Self { scene, content, span, position_bgc: cache.positions(), asked: Cell::new(0), paid_for: RefCell::default() }
    }

    /// One value per slot, from sequence, head and position; `default` where a sequence has no token there.
    fn by_slot<T: Clone>(&self, default: &T, of: impl Fn([usize; 2], usize) -> T) -> Vec<T> {
        self.asked.set(self.asked.get() + 1);
        by_head(&self.position_bgc)
            .into_iter()
            .flat_map(|(sequence, head, positions)| {
                let of = &of;
                positions
                    .into_iter()
                    .map(move |p| usize::try_from(p).map_or_else(|_| default.clone(), |p| of([sequence, head], p)))
            })
            .collect()
    }
}

impl ChunkAttention for SyntheticAttention<'_> {
    fn mass(&self, queries: Queries) -> Tensor {
        self.paid_for.borrow_mut().push(queries);
        let last = if let Queries::Last(count) = queries { Some(count) } else { None };
        let mass = self.by_slot(&0.0, |head, position| self.scene.paid_at(head, self.span, last, position));
        Tensor::from_slice(&mass).view(&self.position_bgc.size()[..])
    }

    fn weights(&self, last: usize) -> Tensor {
        let ((k_bgcd, _), (q_bhnd, scale)) = (self.entries(), self.queries());
        let wide = |x: &Tensor| x.repeat_interleave_self_int(PER_GROUP as i64, 1, None);
        let first = self.span.len.saturating_sub(last);
        let query =
            Tensor::arange_start((self.span.start + first) as i64, (self.span.start + self.span.len) as i64, (Kind::Int64, CPU));
        let position = wide(&self.position_bgc).unsqueeze(2);
        let unseen = position.gt_tensor(&query.unsqueeze(-1)).logical_or(&position.lt(0));
        let scores = q_bhnd.slice(2, first as i64, None, 1).matmul(&wide(&k_bgcd).transpose(-1, -2)) * scale;
        let real: Vec<i64> = self.span.real.iter().map(|&real| (self.span.start + real) as i64).collect();
        let is_real = query.lt_tensor(&Tensor::from_slice(&real).unsqueeze(-1)).view([-1, 1, query.size()[0], 1]);
        scores.masked_fill(&unseen, f64::NEG_INFINITY).softmax(-1, None).where_scalarother(&is_real, 0.0)
    }

    fn queries(&self) -> (Tensor, f64) {
        let heads = self.scene.groups as usize * PER_GROUP;
        let mut all = Vec::new();
        for sequence in 0..self.span.num_sequences() {
            for head in 0..heads {
                all.extend((self.span.start..self.span.start + self.span.len).flat_map(|p| query([sequence, head, p])));
            }
        }
        let size = [self.span.num_sequences() as i64, heads as i64, self.span.len as i64, HEAD_DIM as i64];
        (Tensor::from_slice(&all).view(size), SCALE)
    }

    fn entries(&self) -> (Tensor, Tensor) {
        let seen = |[sequence, head]: [usize; 2], position: usize| {
            let (k, v) = self.content.seen([sequence, head, position], self.span.start);
            (*k, *v)
        };
        let entries = self.by_slot(&([0.0; HEAD_DIM], [0.0; HEAD_DIM]), seen);
        let size = [self.position_bgc.size(), vec![HEAD_DIM as i64]].concat();
        let (k, v): (Vec<_>, Vec<_>) = entries.into_iter().unzip();
        (Tensor::from_slice(&k.concat()).view(&size[..]), Tensor::from_slice(&v.concat()).view(&size[..]))
    }
}

/// The positions of the filled slots by sequence and head.
pub(crate) fn by_head(position_bgc: &Tensor) -> Vec<(usize, usize, Vec<i64>)> {
    let size = position_bgc.size();
    let flat = Vec::<i64>::try_from(position_bgc.contiguous().view(-1)).unwrap();
    let of = |(i, head): (usize, &[i64])| (i / size[1] as usize, i % size[1] as usize, head.to_vec());
    if flat.is_empty() { Vec::new() } else { flat.chunks(size[2] as usize).enumerate().map(of).collect() }
}
