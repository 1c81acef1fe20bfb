//! Gemma 3, the part that reads text: Gemma 2 with normalised queries and keys in place of caps, and two rotations: one of a large base,
//! which may be scaled, in each sixth layer, and one of a small base in those between, which slide.

use super::family::{Family, RopeRules, SlidingLayers};
use super::{gemma2, rope, windows};
use crate::model::fields::Fields;
use crate::model::spec::{QkNorm, RopeSpec};
use crate::units::Fault;

pub(super) const FAMILY: Family = Family {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    class_sizes: [2304, 9216, 26, 8, 262_208, 131_072],
    rope: RopeRules { has_table_by_type: true, ..RopeRules::of_theta(1_000_000.0) },
    qk_norm: |_| Ok(Some(QkNorm::PerHead)),
    logit_soft_cap: |fields| gemma2::soft_cap(fields, "final_logit_softcapping", None),
    // Transformers reads the key, and does not cap scores by it.
    score_soft_cap: |_| Ok(None),
    sliding_rope,
    windows,
    ..gemma2::FAMILY
};

/// A base of its own, which is not scaled with that of the others.
fn sliding_rope(fields: Fields<'_>, _: RopeSpec, head_dim: usize) -> Result<RopeSpec, Fault> {
    const LOCAL: &str = "rope_local_base_freq";
    let local = fields.number_or(LOCAL, 10_000.0)?;
    let found = rope::sliding_table(fields, local, head_dim)?.unwrap_or_else(|| RopeSpec::plain(local, head_dim));
    if fields.get(LOCAL).is_some() && (found.theta - local).abs() > 0.0 {
        return Err(fields.range(LOCAL, format!("{} as in the table of layers that slide", found.theta)));
    }
    Ok(found)
}

/// `sliding_window_pattern` says which layer is the first that does not slide; Transformers 5 writes it with a line before it.
fn windows(fields: Fields<'_>, num_layers: usize) -> Result<SlidingLayers, Fault> {
    const KEYS: [&str; 2] = ["sliding_window_pattern", "_sliding_window_pattern"];
    let [pattern, other] = [fields.count_or(KEYS[0], 6, usize::MAX)?, fields.count_or(KEYS[1], 6, usize::MAX)?];
    let pattern = if fields.get(KEYS[0]).is_some() { pattern } else { other };
    if fields.get(KEYS[1]).is_some() && other != pattern {
        return Err(fields.range(KEYS[1], format!("{pattern} as in `{}`", KEYS[0])));
    }
    Ok(windows::but_each(pattern, num_layers, windows::width(fields, Some(4096))?))
}
