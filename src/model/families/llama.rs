//! Llama, and what differs from it by little: Granite, Seed-OSS and `SmolLM3`.

use serde_json::Value;

use super::family::{Biases, Family, RopeRules, Scales, SlidingLayers};
use crate::model::fields::Fields;
use crate::units::Fault;

/// No bias unless `config.json` says so.
pub(super) const LLAMA: Family = Family { model_type: "llama", architecture: "LlamaForCausalLM", biases, ..Family::USUAL };

/// `mlp_bias` gives the MLP's three projections a bias.
fn biases(fields: Fields<'_>) -> Result<Biases, Fault> {
    let of_attention = Biases::of_attention(fields, false)?;
    Ok(Biases { mlp: fields.flag_or("mlp_bias", false)?, ..of_attention })
}

/// A Llama with constant factors on embeddings, scores, branches and logits.
pub(super) const GRANITE: Family =
    Family { model_type: "granite", architecture: "GraniteForCausalLM", biases, scales: granite_scales, ..Family::USUAL };

/// The factor on scores is `attention_multiplier` itself, which replaces the root of a head's width.
fn granite_scales(fields: Fields<'_>) -> Result<Scales, Fault> {
    Ok(Scales {
        embedding: fields.number_or("embedding_multiplier", 1.0)?,
        scores: Some(fields.number_or("attention_multiplier", 1.0)?),
        residual: fields.number_or("residual_multiplier", 1.0)?,
        logits_divisor: fields.number_or("logits_scaling", 1.0)?,
    })
}

/// Biases on queries, keys and values unless `config.json` says otherwise.
pub(super) const SEED_OSS: Family = Family {
    model_type: "seed_oss",
    architecture: "SeedOssForCausalLM",
    class_sizes: [4096, 27_648, 64, 80, 155_136, 524_288],
    default_pad: Some(1),
    default_kv_heads: Some(8),
    default_head_dim: Some(128),
    dropouts: &[("attention_dropout", 0.1), ("residual_dropout", 0.1)],
    biases: seed_oss_biases,
    ..Family::USUAL
};

fn seed_oss_biases(fields: Fields<'_>) -> Result<Biases, Fault> {
    Ok(Biases {
        qkv: fields.flag_or("attention_bias", true)?,
        output: fields.flag_or("attention_out_bias", false)?,
        mlp: fields.flag_or("mlp_bias", false)?,
    })
}

/// Some layers know no position.
pub(super) const SMOLLM3: Family = Family {
    model_type: "smollm3",
    architecture: "SmolLM3ForCausalLM",
    class_sizes: [2048, 11_008, 36, 16, 128_256, 32_768],
    default_pad: Some(128_004),
    tied_by_default: true,
    rope: RopeRules::of_theta(2_000_000.0),
    default_kv_heads: Some(4),
    biases,
    has_layer_types: true,
    windows: smollm3_windows,
    rotates: smollm3_rotates,
    ..Family::USUAL
};

/// In `no_rope_layers` a 1 is a layer with a rotation, whatever its name says; without the list each fourth layer has none.
fn smollm3_rotates(fields: Fields<'_>, num_layers: usize) -> Result<Vec<bool>, Fault> {
    const KEY: &str = "no_rope_layers";
    let Some(value) = fields.get(KEY) else {
        let interval = fields.count_or("no_rope_layer_interval", 4, usize::MAX)?;
        return Ok((0..num_layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
    };
    let flag = |value: &Value| value.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1);
    let flags: Option<Vec<bool>> = value.as_array().and_then(|list| list.iter().map(flag).collect());
    let expected =
        || fields.range(KEY, format!("a list of {num_layers} numbers, 1 for a layer with a rotation and 0 for one without"));
    flags.filter(|flags| flags.len() == num_layers).ok_or_else(expected)
}

/// Layers without a rotation slide where `use_sliding_window` is set.
fn smollm3_windows(fields: Fields<'_>, num_layers: usize) -> Result<SlidingLayers, Fault> {
    if !fields.flag_or("use_sliding_window", false)? {
        return Ok(SlidingLayers::none(num_layers));
    }
    let slides = smollm3_rotates(fields, num_layers)?.into_iter().map(|rotates| !rotates).collect();
    Ok(SlidingLayers { window: SlidingLayers::window(fields, None)?, slides })
}
