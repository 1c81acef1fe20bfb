//! Experts as several families say them.

use crate::model::fields::Fields;
use crate::model::spec::{Activation, ExpertNames, ExpertsSpec, Preference};
use crate::units::Fault;

pub(super) const MAX_EXPERTS: usize = 1 << 12;

/// The keys under which a family says how many experts there are, the usual one first, and how wide each is, and its defaults.
pub(super) struct ExpertKeys {
    pub(super) num_experts: &'static [&'static str],
    pub(super) width: &'static str,
    pub(super) default_experts: usize,
    pub(super) default_top_k: usize,
}

pub(super) fn experts(fields: Fields<'_>, keys: &ExpertKeys, names: &'static ExpertNames) -> Result<ExpertsSpec, Fault> {
    // Several keys mean the same; the numbers must then be the same too.
    let written: Vec<&'static str> = keys.num_experts.iter().copied().filter(|key| fields.get(key).is_some()).collect();
    let num_experts = written.first().map_or(Ok(keys.default_experts), |key| fields.count(key, MAX_EXPERTS))?;
    if let Some(other) = written.iter().find(|key| fields.count(key, MAX_EXPERTS).ok() != Some(num_experts)) {
        return Err(fields.range(other, format!("{num_experts} as in `{}`", written[0])));
    }
    let top_k = fields.count_or("num_experts_per_tok", keys.default_top_k, MAX_EXPERTS)?;
    if top_k > num_experts {
        return Err(fields.range("num_experts_per_tok", format!("a whole number from 1 to the {num_experts} experts")));
    }
    let intermediate_size = fields.count(keys.width, super::layers::MAX_INTERMEDIATE)?;
    // Noise in training, which no cache and no other program would repeat.
    fields.only("router_jitter_noise", 0.0)?;
    Ok(ExpertsSpec {
        num_experts,
        top_k,
        intermediate_size,
        preference: Preference::Softmax,
        is_renormalised: true,
        weight_scale: 1.0,
        shared_size: None,
        activation: Activation::Silu,
        names,
    })
}
