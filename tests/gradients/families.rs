//! The crown, over families: their norms, biases and windows, and every kind of rotary embedding.

use kvtune::engine::NoObserver;

use super::{KINDS, whole};
use crate::support::case::{Case, HeadKind, PLAIN, Trains, Width, prove};
use crate::support::{batch, context, engine, model, single};

const BIASED_LLAMA: &str = r#"{"model_type": "llama", "attention_bias": true, "mlp_bias": true}"#;
const LLAMA_31: &str = r#"{"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 24}}"#;
const LINEAR: &str = r#"{"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}}"#;
const PARTIAL: &str = r#"{"model_type": "llama", "partial_rotary_factor": 0.5}"#;
/// Of the three sequences two are stretched, each by its own length.
const DYNAMIC: &str =
    r#"{"model_type": "llama", "max_position_embeddings": 20, "rope_scaling": {"type": "dynamic", "factor": 2.0}}"#;
/// Of the three sequences two have the long list.
const LONGROPE: &str = r#"{"model_type": "llama", "max_position_embeddings": 80, "rope_scaling": {"type": "longrope",
    "original_max_position_embeddings": 20, "short_factor": [1, 1.1, 1.2, 1.3], "long_factor": [1.2, 2, 4, 6]}}"#;
/// Two are stretched, each by its own length.
const DYNAMIC_YARN: &str =
    r#"{"rope_scaling": {"type": "dynamic_yarn", "original_max_position_embeddings": 20, "beta_fast": 4.0}}"#;
const YARN: &str = r#"{"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}"#;
const QWEN3: &str = r#"{"model_type": "qwen3"}"#;
const MISTRAL: &str = r#"{"model_type": "mistral"}"#;
const SMOLLM3: &str = r#"{"model_type": "smollm3", "no_rope_layers": [1, 0, 1]}"#;
/// With the dropout that its files ask for.
const SEED_OSS: &str = r#"{"model_type": "seed_oss"}"#;
const GRANITE: &str = r#"{"model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
    "residual_multiplier": 0.44, "logits_scaling": 1.7}"#;
const OLMO2: &str = r#"{"model_type": "olmo2"}"#;
/// Two layers slide, whose rotation is another one.
const OLMO3: &str = r#"{"model_type": "olmo3",
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}"#;
const PHI3: &str = r#"{"model_type": "phi3", "partial_rotary_factor": 0.5, "max_position_embeddings": 80,
    "original_max_position_embeddings": 20, "rope_scaling": {"type": "su", "short_factor": [1, 1.1], "long_factor": [1.5, 3]}}"#;
/// The three sequences have three, three and one of its steps.
const MINISTRAL3: &str = r#"{"model_type": "ministral3", "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4}}"#;
/// What the adapters of a model with fused projections are beside.
const FUSED: &[&str] = &["qkv_proj", "o_proj", "gate_up_proj", "down_proj"];

/// Caps near the scores, so that they bend them.
const GEMMA2: &str = r#"{"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}"#;
const GEMMA3: &str = r#"{"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12, "rope_theta": 1e6,
    "rope_scaling": {"type": "linear", "factor": 8.0}}"#;

pub(super) const MIXTRAL: &str = r#"{"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}"#;
const QWEN3_MOE: &str = r#"{"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
    "norm_topk_prob": true, "mlp_only_layers": [1]}"#;

/// A token's experts are those of one of two groups, half of the channels are not rotated, and the lowest layer is dense.
const GLM4_MOE: &str = r#"{"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 12, "routed_scaling_factor": 1.7, "use_qk_norm": true, "attention_bias": true}"#;
const GPT_OSS: &str = r#"{"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": false}}"#;

pub(super) const FAMILIES: [(&str, &str); 23] = [
    ("llama with biases", BIASED_LLAMA),
    ("llama 3.1", LLAMA_31),
    ("linear", LINEAR),
    ("the first channels", PARTIAL),
    ("dynamic", DYNAMIC),
    ("longrope", LONGROPE),
    ("yarn", YARN),
    ("yarn by length", DYNAMIC_YARN),
    ("qwen3", QWEN3),
    ("mistral", MISTRAL),
    ("smollm3", SMOLLM3),
    ("seed_oss", SEED_OSS),
    ("mixtral", MIXTRAL),
    ("qwen3_moe", QWEN3_MOE),
    ("granite", GRANITE),
    ("olmo2", OLMO2),
    ("olmo3", OLMO3),
    ("phi3", PHI3),
    ("ministral3", MINISTRAL3),
    ("gemma2", GEMMA2),
    ("gemma3", GEMMA3),
    ("glm4_moe", GLM4_MOE),
    ("gpt_oss", GPT_OSS),
];

/// A case with a family in place of its own.
pub(super) fn of_family((name, config): (&'static str, &'static str), case: &Case) -> Case {
    let sliding_layers: &[usize] = match config {
        MISTRAL => &[0, 1, 2],
        OLMO3 => &[0, 1],
        GEMMA2 | GEMMA3 | GPT_OSS => &[0, 2],
        _ => &[],
    };
    Case { name, config, sliding_layers, lora: if config == PHI3 { FUSED } else { case.lora }, ..*case }
}

/// Those whose layers are built otherwise, with all weights trained: scaled, normed behind their branches, of fused linears, with attention sinks,
/// with experts side by side, with a shared one.
#[test]
fn all_weights_of_every_build() {
    let cases = [("granite", GRANITE), ("olmo2", OLMO2), ("olmo3", OLMO3), ("phi3", PHI3), ("ministral3", MINISTRAL3)];
    let cases = [&cases[..], &[("glm4_moe", GLM4_MOE), ("gpt_oss", GPT_OSS)]].concat();
    let trained = |family| {
        let case = Case { trains: Trains::All, ..of_family(family, &PLAIN) };
        [Case { lora: &[], ..case }, Case { lora: &[], policy: "dense", cache: &[50], trains: Trains::AllTied, ..whole(&case) }]
    };
    prove("all weights of families", &cases.into_iter().flat_map(trained).collect::<Vec<_>>());
}

/// Bases whose matrices stay packed: linears, embedding and output projection, and experts side by side.
#[test]
fn packed_weights() {
    let models = [
        ("llama in Q4_0", "model-gguf-llama-q4_0", PLAIN.config, &[][..]),
        ("qwen2 in Q4_K and Q6_K", "model-gguf-qwen2-q4_k_m", PLAIN.config, &[]),
        ("gemma2 in Q5_0", "model-gguf-gemma2-q5_0", GEMMA2, &[0]),
        ("gpt-oss in MXFP4", "model-gguf-gpt-oss-mxfp4", GPT_OSS, &[0]),
        ("gpt-oss in MXFP4, as published", "model-mxfp4", GPT_OSS, &[0]),
        ("NF4", "model-bnb-nf4", PLAIN.config, &[]),
        ("NF4 with nested scales", "model-bnb-nf4-dq", PLAIN.config, &[]),
        ("8 bits", "model-bnb-int8", PLAIN.config, &[]),
        ("FP8", "model-fp8-block", PLAIN.config, &[]),
        ("GPTQ", "model-gptq", PLAIN.config, &[]),
        ("AWQ", "model-awq", PLAIN.config, &[]),
        ("compressed-tensors", "model-ct-int4", PLAIN.config, &[]),
    ];
    let of = |(name, model, config, sliding_layers): (&'static str, &'static str, &'static str, &'static [usize])| {
        KINDS.map(|case| Case { name, config, sliding_layers, quantised: Some(model), ..case })
    };
    prove("packed weights", &models.into_iter().flat_map(of).collect::<Vec<_>>());
}

/// They are named by no module, and are leaves beside the adapter's.
#[test]
fn attention_sinks_beside_an_adapter() {
    let case = Case { saved: &["sinks"], ..of_family(("gpt_oss with trained sinks", GPT_OSS), &PLAIN) };
    prove("attention sinks beside an adapter", &[case, Case { policy: "dense", cache: &[50], ..whole(&case) }]);
}

#[test]
fn every_family_with_every_kind_of_policy() {
    // In turn, so that each family meets each kind once, and both meet each tiling; token by token two sequences are stretched, too.
    let by_token = |case| Case { layers_per_cell: 2, width: Width::Chunks(1), chunk: 1, lengths: &[26, 22, 9], ..case };
    let tilings: [fn(Case) -> Case; 3] = [|case| case, |case| whole(&case), by_token];
    let of = |(at, family)| {
        let kinds = KINDS.into_iter().zip(tilings.into_iter().cycle().skip(at % 3));
        kinds.map(move |(case, tiled)| tiled(of_family(family, &case)))
    };
    prove("families", &FAMILIES.into_iter().enumerate().flat_map(of).collect::<Vec<_>>());
}

/// Every weight of the families whose norms, embeddings and logits are not the usual ones, the embedding twice where it is tied.
#[test]
fn all_weights_of_families_with_scales_and_caps() {
    let of = |(name, config): (&'static str, &'static str)| {
        let case = Case { name, config, sliding_layers: &[0, 2], chunk: 3, ..PLAIN };
        [
            Case { trains: Trains::All, ..case },
            Case { trains: Trains::AllTied, layers_per_cell: 2, ..case },
            Case { trains: Trains::AllTied, head: HeadKind::Classify, ..whole(&case) },
        ]
    };
    prove("all weights of families", &[("gemma2", GEMMA2), ("gemma3", GEMMA3)].map(of).concat());
}

/// The length that a rotation depends on is a sequence's own, not that of its batch, nor of a chunk.
#[test]
fn a_sequence_beside_longer_ones_is_what_it_is_alone() {
    for (name, config) in [("dynamic", DYNAMIC), ("longrope", LONGROPE)] {
        // What stays of a sequence depends on it alone.
        let case = Case { name, config, policy: "lastrec", ..PLAIN };
        let model = model(&case);
        let engine = engine(&case, &model);
        let together = engine.losses(&model, &batch(&case), &mut NoObserver).unwrap();
        for (i, together) in together.iter().enumerate() {
            let alone = engine.losses(&model, &single(&case, i), &mut NoObserver).unwrap();
            assert!((together.loss_sum - alone[0].loss_sum).abs() < 1e-11, "{name}, sequence {i}");
        }
        let gradients = engine.gradients(&model, &batch(&case), context(&case), &mut NoObserver).unwrap();
        assert!(gradients.losses.iter().zip(&together).all(|(a, b)| (a.loss_sum - b.loss_sum).abs() < 1e-11), "{name}");
    }
}
