//! GLM-4.5 (arXiv 2508.06471): above some dense layers, experts that a router with sigmoids prefers one by one, with a shared one beside
//! them; queries and keys are rotated in half of their channels.

use super::family::{Biases, Family, RopeRules};
use super::layers::{ExpertKeys, MAX_EXPERTS, MAX_INTERMEDIATE, experts};
use super::qwen;
use crate::model::fields::Fields;
use crate::model::spec::{ExpertsSpec, Preference, QkNorm};
use crate::units::Fault;

const KEYS: ExpertKeys = ExpertKeys { num_experts: &["n_routed_experts", "num_local_experts"], ..qwen::KEYS };

pub(super) const FAMILY: Family = Family {
    model_type: "glm4_moe",
    architecture: "Glm4MoeForCausalLM",
    class_sizes: [4096, 10_944, 46, 96, 151_552, 131_072],
    rope: RopeRules { default_share: 0.5, ..RopeRules::USUAL },
    default_norm_eps: 1e-5,
    default_kv_heads: Some(8),
    qk_norm: |fields| Ok(fields.flag_or("use_qk_norm", false)?.then_some(QkNorm::PerHead)),
    biases: |fields| Ok(Biases { qkv: fields.flag_or("attention_bias", false)?, ..Biases::default() }),
    experts: upper_layers,
    // Published files have one, and not all say so.
    further_layers: |fields| fields.count_from_zero_or("num_nextn_predict_layers", 1),
    ..Family::USUAL
};

/// Layers have experts from `first_k_dense_replace` on.
fn upper_layers(fields: Fields<'_>, num_layers: usize) -> Result<Vec<Option<ExpertsSpec>>, Fault> {
    let spec = experts(fields, &KEYS, &qwen::NAMES)?;
    let shared = fields.count_from_zero_or("n_shared_experts", 1)?;
    if shared.saturating_mul(spec.intermediate_size) > MAX_INTERMEDIATE {
        return Err(fields.range("n_shared_experts", format!("altogether no wider than {MAX_INTERMEDIATE}")));
    }
    let spec = ExpertsSpec {
        preference: preference(fields, &spec)?,
        is_renormalised: fields.flag_or("norm_topk_prob", true)?,
        weight_scale: fields.number_or("routed_scaling_factor", 1.0)?,
        shared_size: (shared > 0).then(|| shared * spec.intermediate_size),
        ..spec
    };
    let first = fields.count_from_zero_or("first_k_dense_replace", 1)?;
    Ok((0..num_layers).map(|layer| (layer >= first).then(|| spec.clone())).collect())
}

/// Groups hold enough experts for what decides between them, and those that are kept for all of a token's.
fn preference(fields: Fields<'_>, spec: &ExpertsSpec) -> Result<Preference, Fault> {
    let (experts, groups) = (spec.num_experts, fields.count_or("n_group", 1, MAX_EXPERTS)?);
    let kept = fields.count_or("topk_group", 1, groups)?;
    if !experts.is_multiple_of(groups) || (groups > 1 && experts / groups < 2) {
        return Err(fields.range("n_group", format!("groups of at least two of the {experts} experts, of equal size")));
    }
    if kept * (experts / groups) < spec.top_k {
        let expected = format!("enough groups of {} experts for the {} of a token", experts / groups, spec.top_k);
        return Err(fields.range("topk_group", expected));
    }
    Ok(Preference::Sigmoid { groups, kept })
}
