//! The attention mass to each slot: by the CPU's kernel, or in blocks of queries by tensor operations on any device.

use std::ops::Range;

use tch::Tensor;

use super::backend::{Backend, all_parts};
use super::blocks::{block_scores, hidden};
use super::chunk::{KvBlock, Qkv, Queries};
use super::selector::backend_for;
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
    let part = |part: &KvBlock, is_own| weights(chunk, lse_bhn, first..n, part, is_own).view([b, h, n - first, part.slots()]);
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

/// Scores of a block of queries in [`mass_in_blocks`], and its queries, at least and at most.
const BLOCK_SCORES: i64 = 1 << 22;
const BLOCK_QUERIES: (i64, i64) = (16, 512);

pub(super) fn mass_in_blocks(chunk: &Qkv, past: &[KvBlock], lse_bhn: &Tensor, queries: Queries) -> Tensor {
    let (b, h, n, _) = chunk.q_bhnd.size4().unwrap_or_default();
    let kind = lse_bhn.kind();
    let to_part = |part: &KvBlock, is_own: bool| {
        let part = KvBlock { k: part.k.to_kind(kind), ..part.clone() };
        let block = (BLOCK_SCORES / (b * h * part.slots()).max(1)).clamp(BLOCK_QUERIES.0, BLOCK_QUERIES.1);
        let blocks = (queries.first(n)..n).step_by(block as usize).map(|start| {
            let weight_bgrmc = weights(chunk, lse_bhn, start..n.min(start + block), &part, is_own);
            weight_bgrmc.sum_dim_intlist(&[2i64, 3][..], false, kind)
        });
        let mass_bgc = blocks.reduce(|total, block| total + block).unwrap_or_else(|| part.k.select(3, 0).zeros_like());
        // A slot that is not in use gets nothing, whatever stands in it.
        part.valid.map_or(mass_bgc.shallow_clone(), |valid| mass_bgc.masked_fill(&valid.logical_not(), 0.0))
    };
    let parts: Vec<Tensor> = past.iter().map(|past| to_part(past, false)).chain([to_part(&chunk.own, true)]).collect();
    Tensor::cat(&parts, 2) / chunk.per_group()
}

/// The weights `exp(s_ic − lse_i)` of some queries of a chunk on a part of the keys, by group: `(B, G, R, m, C)`.
fn weights(chunk: &Qkv, lse_bhn: &Tensor, queries: Range<i64>, part: &KvBlock, is_own: bool) -> Tensor {
    let [q, lse] = [&chunk.q_bhnd, lse_bhn].map(|x| x.narrow(2, queries.start, queries.end - queries.start));
    let mut scores = hidden(block_scores(&q, &part.k, chunk.rule), queries.start, part, is_own);
    let mut size = scores.size();
    size[4] = 1;
    scores.g_sub_(&lse.reshape(&size[..])).exp_()
}
