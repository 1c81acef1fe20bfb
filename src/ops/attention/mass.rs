//! The attention mass to each slot: by the CPU's kernel, or in blocks of queries by tensor operations on any device.

use std::f64::consts::LOG2_E;

use tch::{Kind, Tensor};

use super::backend::{Backend, all_parts};
use super::blocks::{block_scores, hidden};
use super::choice::backend_for;
use super::chunk::{KvBlock, Qkv, Queries, ScoreRule};
use crate::native;

/// The attention mass to each slot by some queries of a chunk: `(1/R) Σ_heads Σ_i exp(s_ic − lse_i)`, where s are the scores by the
/// chunk's rule; past slots first, then the chunk's own. Queries are taken in blocks, so that no `(n × slots)` matrix is kept.
///
/// # Shapes
/// `lse_bhn (B, H, n)`, `+inf` for a query that does not count; result `(B, G, P + n)` in f32 (f64 for f64 inputs).
pub fn attention_mass(chunk: &Qkv, past: &[KvBlock], lse_bhn: &Tensor, queries: Queries) -> Tensor {
    if backend_for(chunk, past) == Backend::Own {
        let parts = all_parts(chunk, past);
        let first = queries.first(chunk.num_tokens());
        return native::attention_mass(&chunk.q_bhnd, &parts, lse_bhn, chunk.rule, first) / chunk.per_group();
    }
    mass_by_cuda(chunk, past, lse_bhn, queries).unwrap_or_else(|| mass_in_blocks(chunk, past, lse_bhn, queries))
}

/// The attention weights of some queries of a chunk, by query head: `exp(s_ic − lse_i)`, over past slots first, then the chunk's own. For few
/// queries, as the whole matrix is made.
///
/// # Shapes
/// `lse_bhn (B, H, n)`, `+inf` for a query that does not count; result `(B, H, w, P + n)` for w queries, in the kind of `lse_bhn`.
pub fn attention_weights(chunk: &Qkv, past: &[KvBlock], lse_bhn: &Tensor, queries: Queries) -> Tensor {
    let (b, h, n, _) = chunk.q_bhnd.size4().unwrap_or_default();
    let first = queries.first(n);
    let [q, lse] = [&chunk.q_bhnd, &lse_bhn.unsqueeze(-1)].map(|x| x.narrow(2, first, n - first));
    let part = |part: &KvBlock, is_own: bool| {
        let scores = hidden(block_scores(&q, &part.k, chunk.rule), first, part, is_own);
        (scores.view([b, h, n - first, part.slots()]) - &lse).exp()
    };
    Tensor::cat(&past.iter().map(|past| part(past, false)).chain([part(&chunk.own, true)]).collect::<Vec<_>>(), -1)
}

fn mass_by_cuda(chunk: &Qkv, past: &[KvBlock], lse_bhn: &Tensor, queries: Queries) -> Option<Tensor> {
    let (q, parts) = (&chunk.q_bhnd, all_parts(chunk, past));
    let rule = chunk.rule;
    if rule.soft_cap.is_some() || parts.iter().any(|part| part.visible_until.is_some()) {
        return None;
    }
    let mass = native::cuda::attention_mass(q, &parts, lse_bhn, rule.scale, queries.first(q.size()[2]));
    mass.map(|mass| mass / chunk.per_group())
}

pub(super) fn mass_in_blocks(chunk: &Qkv, past: &[KvBlock], lse_bhn: &Tensor, queries: Queries) -> Tensor {
    let given_by = MassQueries::new(chunk, lse_bhn, queries);
    // A slot that is not in use gets nothing, whatever stands in it.
    let to_part = |part: &KvBlock, is_own: bool| {
        let mass = given_by.mass(part, is_own);
        let Some(valid) = &part.valid else { return mass };
        mass.masked_fill(&valid.logical_not().view(&mass.size()[..]), 0.0)
    };
    let parts: Vec<Tensor> = past.iter().map(|past| to_part(past, false)).chain([to_part(&chunk.own, true)]).collect();
    let mass = Tensor::cat(&parts, 1) / chunk.per_group();
    mass.view([-1, chunk.num_kv_heads(), mass.size()[1]])
}

/// Scores per block of [`MassQueries::mass`], which should stay in a core's cache between the product, the power and the sum.
const BLOCK_SCORES: i64 = 1 << 18;
/// Queries per block, at least and at most: fewer make the product slow, and more waste it above the diagonal.
const BLOCK_QUERIES: (i64, i64) = (16, 64);

/// The queries that give mass: one product with a key gives `(q · k · scale − lse) log₂ e`, as the query has one more number, −lse, and each
/// key a 1; what is capped is the product alone. Weights are powers of 2: libtorch leaves those of e to a library that is three times slower on some CPUs.
struct MassQueries {
    /// `(B·G, n·R, D + 1)`: a token's heads stand together, so that a block of tokens is a range.
    query: Tensor,
    per_group: i64,
    /// How scores come about, in powers of 2.
    rule: ScoreRule,
    /// Index in the chunk of the first token that gives any, and how many do.
    first: i64,
    count: i64,
}

impl MassQueries {
    fn new(chunk: &Qkv, lse_bhn: &Tensor, queries: Queries) -> Self {
        let (b, h, n, d) = chunk.q_bhnd.size4().unwrap_or_default();
        let (groups, count) = (chunk.num_kv_heads(), n - queries.first(n));
        let per_group = h / groups;
        let rule = chunk.rule;
        let rule = ScoreRule { scale: rule.scale * LOG2_E, soft_cap: rule.soft_cap.map(|cap| cap * LOG2_E), ..rule };
        let q = chunk.q_bhnd.narrow(2, n - count, count).to_kind(lse_bhn.kind()) * rule.scale;
        let minus_lse = lse_bhn.narrow(2, n - count, count).unsqueeze(-1) * -LOG2_E;
        let query = Tensor::cat(&[q, minus_lse], -1).view([b * groups, per_group, count, d + 1]).transpose(1, 2);
        Self { query: query.reshape([b * groups, count * per_group, d + 1]), per_group, rule, first: n - count, count }
    }

    /// Scores of a block without the log-sum-exp, in `room`: `query (B·G, rows, D + 1)`, `keys (B·G, D + 1, slots)`; room and result
    /// `(B·G, rows, slots)`.
    fn scores_less_lse(&self, query: &Tensor, keys: &Tensor, room: &Tensor) -> Tensor {
        if self.rule.soft_cap.is_none() {
            return query.bmm_out(room, keys);
        }
        let d = query.size()[2] - 1;
        self.rule.capped(query.narrow(2, 0, d).bmm_out(room, &keys.narrow(1, 0, d))).g_add_(&query.narrow(2, d, 1))
    }

    /// What they give to a part's keys, the sum over the heads of a group `(B·G, slots)`.
    fn mass(&self, part: &KvBlock, causal: bool) -> Tensor {
        let keys_bgcd = &part.k;
        let (b, g, slots, d) = keys_bgcd.size4().unwrap_or_default();
        let options = (self.query.kind(), self.query.device());
        let keys = Tensor::ones([b, g, slots, d + 1], options);
        keys.narrow(3, 0, d).copy_(keys_bgcd);
        let keys = keys.view([b * g, slots, d + 1]).transpose(-1, -2);
        let rows = b * g * self.per_group;
        let block = (BLOCK_SCORES / (rows * slots).max(1)).clamp(BLOCK_QUERIES.0, BLOCK_QUERIES.1).min(self.count);
        // One buffer for all blocks: new memory from the system would cost as much as the sums.
        let buffer = Tensor::empty([rows * block * slots], options);
        let mass = Tensor::zeros([b * g, slots], options);
        for start in (0..self.count).step_by(block.max(1) as usize) {
            let len = block.min(self.count - start);
            // A causal block sees the keys up to its own last query only.
            let width = if causal { self.first + start + len } else { slots };
            let scores = buffer.narrow(0, 0, rows * len * width).view([b * g, len * self.per_group, width]);
            let query = self.query.narrow(1, start * self.per_group, len * self.per_group);
            let weight = self.scores_less_lse(&query, &keys.narrow(2, 0, width), &scores).exp2_();
            if causal {
                let mut own = weight.narrow(2, width - len, len).view([b * g, len, self.per_group, len]);
                // What a query does not see may be infinitely more than it sees, and no product would make it nothing.
                let later = Tensor::ones([len, len], (Kind::Bool, options.1)).triu(1).unsqueeze(1);
                let _ = own.masked_fill_(&later, 0.0);
            }
            if let Some(visible_until) = &part.visible_until {
                let token = Tensor::arange_start(self.first + start, self.first + start + len, (Kind::Int64, options.1));
                let until = visible_until.view([b * g, 1, 1, slots]).narrow(3, 0, width);
                let unseen = until.le_tensor(&token.view([len, 1, 1]));
                let _ = weight.view([b * g, len, self.per_group, width]).masked_fill_(&unseen, 0.0);
            }
            let _ = mass.narrow(1, 0, width).g_add_(&weight.sum_dim_intlist(&[1i64][..], false, options.0));
        }
        mass
    }
}
