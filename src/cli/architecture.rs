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
    let (count, attention) = (config.num_layers(), &config.layers[0].attention);
    let without = config.layers.iter().filter(|layer| layer.attention.rope.is_none()).count();
    let linears = config.layers[0].linears(config.hidden_size);
    let biased: Vec<&str> = linears.iter().filter(|linear| linear.has_bias).map(LinearSpec::name).collect();
    let further = [
        (without > 0).then(|| format!("no positions in {without} of {count} layers")),
        windows(config).map(|(layers, widest)| format!("a window of {widest} in {layers} of {count} layers")),
        attention.qk_norm.is_some().then(|| "normalised queries and keys".to_owned()),
        attention.has_sinks.then(|| "heads with attention sinks".to_owned()),
        experts(config).next().map(|first| format!("{} in {} of {count} layers", routed(first), experts(config).count())),
        attention.query_growth.map(|growth| format!("queries that grow every {} tokens", growth.original)),
        attention.rule.soft_cap.map(|cap| format!("scores capped at {cap}")),
        config.logit_soft_cap.map(|cap| format!("logits capped at {cap}")),
        (!biased.is_empty()).then(|| format!("biases on {}", biased.join(" "))),
    ];
    let words = std::iter::once(config.model_type.to_owned()).chain(config.rotations().into_iter().map(rotary));
    words.chain(further.into_iter().flatten()).collect::<Vec<_>>().join(", ")
}

fn routed(experts: &ExpertsSpec) -> String {
    let ExpertsSpec { num_experts, top_k, intermediate_size, shared_size, preference, .. } = experts;
    let groups = match preference {
        Preference::Sigmoid { groups, kept } if kept < groups => format!(" from {kept} of {groups} groups"),
        _ => String::new(),
    };
    let shared = shared_size.map(|width| format!(" and a shared one of {width}")).unwrap_or_default();
    format!("{top_k} of {num_experts} experts of width {intermediate_size}{groups}{shared}")
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
