//! The layers of a model, read from the keys of `config.json` that most families share; and experts, as several say them.

use serde_json::Value;

use super::family::{Biases, Family, Scales, SlidingLayers};
use super::rope::{FULL, SLIDING, rope};
use crate::model::fields::{Fields, unknown_key, unsupported};
use crate::model::spec::{
    Activation, AttentionSpec, ExpertNames, ExpertsSpec, FeedForwardSpec, LayerSpec, Preference, ScoreRule,
};
use crate::units::{Fault, quoted};

pub(in crate::model) const MAX_HIDDEN: usize = 1 << 16;
pub(super) const MAX_INTERMEDIATE: usize = 1 << 20;
const MAX_LAYERS: usize = 1 << 10;
const MAX_HEADS: usize = 1 << 10;
const MAX_HEAD_DIM: usize = 1 << 12;
const WIDTH: &str = "intermediate_size";
const LAYER_TYPES: &str = "layer_types";

/// The layers of a model of a family, bottom to top.
pub(in crate::model) fn layers(fields: Fields<'_>, family: &Family) -> Result<Vec<LayerSpec>, Fault> {
    let biases = (family.biases)(fields)?;
    let scales = (family.scales)(fields)?;
    let attention = attention(fields, family, biases, scales)?;
    let num_layers = fields.count("num_hidden_layers", MAX_LAYERS)?;
    if fields.get(LAYER_TYPES).is_some() && !family.has_layer_types {
        return Err(unknown_key(LAYER_TYPES, &[]));
    }
    let windows = windows_by_layer(fields, (family.windows)(fields, num_layers)?)?;
    let rotates = (family.rotates)(fields, num_layers)?;
    let experts = (family.experts)(fields, num_layers)?;
    // Where all layers have experts, nothing is of this width, and files may leave it out.
    let is_unused = experts.iter().all(Option::is_some) && fields.get(WIDTH).is_none();
    let intermediate_size = if is_unused { 0 } else { fields.count(WIDTH, MAX_INTERMEDIATE)? };
    let activation = (family.activation)(fields)?;
    let sliding_rope = attention.rope.clone().map(|rope| (family.sliding_rope)(fields, rope, attention.head_dim)).transpose()?;
    let layer = |((window, rotates), experts): (_, Option<ExpertsSpec>)| {
        let rule = ScoreRule { window, ..attention.rule };
        let rope = if window.is_some() { sliding_rope.clone() } else { attention.rope.clone() }.filter(|_| rotates);
        let dense = FeedForwardSpec::Dense { intermediate_size, has_bias: biases.mlp, is_fused: family.is_fused, activation };
        LayerSpec {
            attention: AttentionSpec { rule, rope, ..attention.clone() },
            feed_forward: experts.map_or(dense, FeedForwardSpec::Experts),
            norms: family.norms,
            residual_scale: scales.residual,
        }
    };
    Ok(windows.into_iter().zip(rotates).zip(experts).map(layer).collect())
}

pub(in crate::model) fn dropouts(fields: Fields<'_>, family: &Family) -> Result<Vec<(&'static str, f64)>, Fault> {
    let mut all = Vec::new();
    for &(key, default) in family.dropouts {
        let probability = fields.get(key).map_or(Some(default), Value::as_f64);
        let probability = probability.filter(|probability| (0.0..1.0).contains(probability));
        all.push((key, probability.ok_or_else(|| fields.range(key, "a probability from 0 to less than 1".into()))?));
    }
    all.retain(|(_, probability)| *probability > 0.0);
    Ok(all)
}

/// The attention of a layer without a window.
fn attention(fields: Fields<'_>, family: &Family, biases: Biases, scales: Scales) -> Result<AttentionSpec, Fault> {
    let hidden_size = fields.count("hidden_size", MAX_HIDDEN)?;
    let num_heads = fields.count("num_attention_heads", MAX_HEADS)?;
    // A null is as many as there are query heads, or a head's share, where a missing key is the family's default.
    let default = |key, of_family: Option<usize>| of_family.filter(|_| !fields.is_null(key));
    let kv_heads = default("num_key_value_heads", family.default_kv_heads);
    let num_kv_heads = fields.count_or("num_key_value_heads", kv_heads.unwrap_or(num_heads), num_heads)?;
    let default_head_dim = default("head_dim", family.default_head_dim);
    let head_dim = fields.count_or("head_dim", default_head_dim.unwrap_or(hidden_size / num_heads), MAX_HEAD_DIM)?;
    let is_share = fields.get("head_dim").is_none() && default_head_dim.is_none();
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(fields.range("num_key_value_heads", format!("a divisor of `num_attention_heads` = {num_heads}")));
    }
    if is_share && !hidden_size.is_multiple_of(num_heads) {
        let expected = format!("a multiple of `num_attention_heads` = {num_heads}, or a `head_dim`");
        return Err(fields.range("hidden_size", expected));
    }
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        let key = if is_share { "hidden_size" } else { "head_dim" };
        return Err(fields.range(key, "an even `head_dim`, whose halves are rotated against each other".into()));
    }
    let scale = scales.scores.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt());
    Ok(AttentionSpec {
        num_heads,
        num_kv_heads,
        head_dim,
        rule: ScoreRule { soft_cap: (family.score_soft_cap)(fields)?, ..ScoreRule::scaled(scale) },
        rope: Some(rope(fields, family, head_dim)?),
        qk_norm: (family.qk_norm)(fields)?,
        query_growth: (family.query_growth)(fields)?,
        is_fused: family.is_fused,
        has_qkv_bias: biases.qkv,
        has_output_bias: biases.output,
        has_sinks: family.has_sinks,
    })
}

/// The window of each layer: `layer_types`, where it is given, says which layers slide.
fn windows_by_layer(fields: Fields<'_>, sliding: SlidingLayers) -> Result<Vec<Option<usize>>, Fault> {
    let num_layers = sliding.slides.len();
    let slides = match fields.get(LAYER_TYPES) {
        None => sliding.slides,
        Some(Value::Array(types)) if types.len() == num_layers => {
            types.iter().map(|layer_type| slides(layer_type, sliding.window.is_some())).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(fields.range(LAYER_TYPES, format!("a list of {num_layers} names, one for each layer"))),
    };
    Ok(slides.into_iter().map(|slides| sliding.window.filter(|_| slides)).collect())
}

/// Whether a layer of this type has a sliding window, in a model whose layers may have one or not.
fn slides(layer_type: &Value, has_window: bool) -> Result<bool, Fault> {
    let supported = if has_window { "`full_attention` or `sliding_attention`" } else { "`full_attention` in every layer" };
    match layer_type.as_str() {
        Some(FULL) => Ok(false),
        Some(SLIDING) if has_window => Ok(true),
        _ => Err(unsupported(LAYER_TYPES, &quoted(layer_type), supported)),
    }
}

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
    let intermediate_size = fields.count(keys.width, MAX_INTERMEDIATE)?;
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
