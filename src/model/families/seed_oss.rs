//! Seed-OSS: biases on queries, keys and values unless `config.json` says otherwise.

use super::family::{Biases, Family};
use crate::model::fields::Fields;
use crate::units::Fault;

pub(super) const FAMILY: Family = Family {
    model_type: "seed_oss",
    architecture: "SeedOssForCausalLM",
    class_sizes: [4096, 27_648, 64, 80, 155_136, 524_288],
    default_pad: Some(1),
    default_kv_heads: Some(8),
    default_head_dim: Some(128),
    dropouts: &[("attention_dropout", 0.1), ("residual_dropout", 0.1)],
    biases,
    ..Family::USUAL
};

fn biases(fields: Fields<'_>) -> Result<Biases, Fault> {
    Ok(Biases {
        qkv: fields.flag_or("attention_bias", true)?,
        output: fields.flag_or("attention_out_bias", false)?,
        mlp: fields.flag_or("mlp_bias", false)?,
    })
}
