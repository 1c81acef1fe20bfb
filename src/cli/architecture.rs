//! What a model is, in words: family, positions, windows, caps, experts, biases.

use crate::model::{ExpertsSpec, LinearSpec, ModelConfig, Preference, RopeScaling, RopeSpec};

pub(super) fn experts(config: &ModelConfig) -> impl Iterator<Item = &ExpertsSpec> {
    config.layers.iter().filter_map(|layer| layer.feed_forward.experts())
}

/// How many layers have a window, and the widest of them.
pub(super) fn windows(config: &ModelConfig) -> Option<(usize, usize)> {
    let windows = || config.layers.iter().filter_map(|layer| layer.attention.rule.window);
    Some((windows().count(), windows().max()?))
}

pub(super) fn architecture(config: &ModelConfig) -> String {
    let mut words = vec![config.model_type.to_owned()];
    words.extend(config.rotations().into_iter().map(rotary));
    let count = config.num_layers();
    let without = config.layers.iter().filter(|layer| layer.attention.rope.is_none()).count();
    if without > 0 {
        words.push(format!("no positions in {without} of {count} layers"));
    }
    if let Some((layers, widest)) = windows(config) {
        words.push(format!("a window of {widest} in {layers} of {count} layers"));
    }
    let attention = &config.layers[0].attention;
    if attention.qk_norm.is_some() {
        words.push("normalised queries and keys".to_owned());
    }
    if attention.has_sinks {
        words.push("heads with attention sinks".to_owned());
    }
    let experts: Vec<&ExpertsSpec> = experts(config).collect();
    if let [ExpertsSpec { num_experts, top_k, intermediate_size, shared_size, preference, .. }, ..] = experts[..] {
        let groups = match preference {
            Preference::Sigmoid { groups, kept } if kept < groups => format!(" from {kept} of {groups} groups"),
            _ => String::new(),
        };
        let shared = shared_size.map(|width| format!(" and a shared one of {width}")).unwrap_or_default();
        let experts = experts.len();
        words.push(format!(
            "{top_k} of {num_experts} experts of width {intermediate_size}{groups}{shared} in {experts} of {count} layers"
        ));
    }
    if let Some(growth) = attention.query_growth {
        words.push(format!("queries that grow every {} tokens", growth.original));
    }
    if let Some(cap) = attention.rule.soft_cap {
        words.push(format!("scores capped at {cap}"));
    }
    if let Some(cap) = config.logit_soft_cap {
        words.push(format!("logits capped at {cap}"));
    }
    let linears = config.layers[0].linears(config.hidden_size);
    let biased: Vec<&str> = linears.iter().filter(|linear| linear.has_bias).map(LinearSpec::name).collect();
    if !biased.is_empty() {
        words.push(format!("biases on {}", biased.join(" ")));
    }
    words.join(", ")
}

fn rotary(rope: &RopeSpec) -> String {
    let kind = match &rope.scaling {
        RopeScaling::Unscaled => String::new(),
        RopeScaling::Linear { factor } => format!(" linear × {factor}"),
        RopeScaling::Dynamic { factor, max_positions } => format!(" dynamic × {factor} beyond {max_positions} tokens"),
        RopeScaling::Yarn(yarn) => format!(" yarn × {} over {} tokens", yarn.factor, yarn.original),
        RopeScaling::DynamicYarn(yarn) => format!(" yarn by the length of a sequence beyond {} tokens", yarn.original),
        RopeScaling::Llama3(llama3) => format!(" llama3 × {} over {} tokens", llama3.factor, llama3.original),
        RopeScaling::LongRope(longrope) => format!(" longrope beyond {} tokens", longrope.original),
    };
    format!("RoPE{kind} on {} channels of a head, theta {}", rope.rotary_dim, rope.theta)
}
