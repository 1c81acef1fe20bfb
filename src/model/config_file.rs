//! `config.json`, checked: sizes within bounds before anything is allocated, and nothing ignored that would change the numbers.

use std::io;
use std::path::Path;

use serde_json::{Map, Value};
use tch::Kind;

use super::config::{ModelConfig, PackedSizes};
use super::families::{self, Family, MAX_HIDDEN, dropouts, is_wrapped, layers, max_positions, unwrapped};
use super::fields::{Fields, unknown_name};
use super::quantised::Quantisation;
use crate::files::{hub_name, read_json};
use crate::units::{Fault, abridged, quoted};

const MAX_VOCAB: usize = 1 << 22;
/// 2^43 weights are 16 TiB in bf16.
const MAX_WEIGHTS: usize = 1 << 43;

impl ModelConfig {
    /// Reads a `config.json`, whatever its name.
    pub fn load_file(path: &Path) -> Result<Self, Fault> {
        let object: Map<String, Value> = read_json(path).map_err(|fault| with_hub_name(fault, path))?;
        Self::of_file(path, &object)
    }

    /// Checks the keys of the `config.json` at `path`, which errors name.
    pub(super) fn of_file(path: &Path, object: &Map<String, Value>) -> Result<Self, Fault> {
        Self::from_object(object).map_err(|fault| fault.map_message(|said| format!("`{}`: {said}", abridged(path.display()))))
    }

    /// Checks the keys of a `config.json`; those it doesn't know are left alone.
    pub fn from_object(object: &Map<String, Value>) -> Result<Self, Fault> {
        // Of a model inside another one it belongs to the whole.
        Quantisation::of(object)?;
        let (is_inner, num_classes) = (is_wrapped(object), num_classes(object)?);
        let object = unwrapped(object);
        let fields = Fields::new(&object);
        let family = family(fields)?;
        let scales = (family.scales)(fields)?;
        let config = Self {
            model_type: family.model_type,
            hidden_size: fields.count("hidden_size", MAX_HIDDEN)?,
            layers: layers(fields, family)?,
            is_inner,
            further_layers: (family.further_layers)(fields)?,
            vocab_size: fields.count("vocab_size", MAX_VOCAB)?,
            embedding_scale: scales.embedding,
            logits_divisor: scales.logits_divisor,
            max_position_embeddings: max_positions(fields)?,
            rms_norm_eps: fields.at_most_one_or("rms_norm_eps", family.default_norm_eps)?,
            norms_add_one: family.norms_add_one,
            logit_soft_cap: (family.logit_soft_cap)(fields)?,
            tie_word_embeddings: fields.flag_or("tie_word_embeddings", family.tied_by_default)?,
            num_classes,
            has_score: num_classes.is_some(),
            pad_token_id: pad_token_id(fields, family),
            initializer_range: fields.number_or("initializer_range", 0.02)?,
            weight_kind: weight_kind(fields)?,
            dropouts: dropouts(fields, family)?,
            packed: PackedSizes::default(),
        };
        if config.num_parameters() > MAX_WEIGHTS {
            return Err(fields.range("num_hidden_layers", "fewer than 2^43 weights altogether".into()));
        }
        Ok(config)
    }
}

/// The token that pads; some files have null or -1 for none.
fn pad_token_id(fields: Fields<'_>, family: &Family) -> Option<u32> {
    const KEY: &str = "pad_token_id";
    let default = family.default_pad.filter(|_| !fields.is_null(KEY));
    fields.get(KEY).map_or(default, |id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
}

fn family(fields: Fields<'_>) -> Result<&'static Family, Fault> {
    let found = fields.get("model_type").map(|value| value.as_str().map_or_else(|| quoted(value), str::to_owned));
    let family = found.as_deref().and_then(families::find);
    family.ok_or_else(|| unknown_name("model_type", found.as_deref(), &families::known()))
}

/// How many classes a classifier of sequences scores. Transformers says so by their names, and leaves out two that have none.
fn num_classes(object: &Map<String, Value>) -> Result<Option<usize>, Fault> {
    let fields = Fields::new(object);
    let architectures = fields.get("architectures").and_then(Value::as_array);
    let mut names = architectures.into_iter().flatten().filter_map(Value::as_str);
    if !names.any(|name| name.ends_with("ForSequenceClassification")) {
        return Ok(None);
    }
    if is_wrapped(object) {
        return Err(fields.unsupported("architectures", "a classifier by a language model alone".into()));
    }
    match fields.get("id2label").and_then(Value::as_object) {
        Some(names) if names.len() < 2 => Err(fields.range("id2label", "the names of at least two classes".into())),
        Some(names) => Ok(Some(names.len())),
        None => Ok(Some(fields.count_or("num_labels", 2, MAX_VOCAB)?)),
    }
}

fn weight_kind(fields: Fields<'_>) -> Result<Option<Kind>, Fault> {
    let Some((key, value)) = ["dtype", "torch_dtype"].into_iter().find_map(|key| Some((key, fields.get(key)?))) else {
        return Ok(None);
    };
    match value.as_str().map(|name| name.strip_prefix("torch.").unwrap_or(name)) {
        Some("float32") => Ok(Some(Kind::Float)),
        Some("bfloat16") => Ok(Some(Kind::BFloat16)),
        Some("float16") => Ok(Some(Kind::Half)),
        Some("float64") => Ok(Some(Kind::Double)),
        Some("auto") => Ok(None),
        _ => Err(fields.range(key, "`float32`, `bfloat16`, `float16` or `float64`".into())),
    }
}

/// Says how to fetch the model, where its folder is not there and may be named as on the Hub.
fn with_hub_name(fault: Fault, path: &Path) -> Fault {
    let is_missing = fault.io().is_some_and(|error| error.kind() == io::ErrorKind::NotFound);
    let Some(name) = path.parent().filter(|_| is_missing).and_then(hub_name) else { return fault };
    fault.with_hint(format!(
        "check the path: it begins at the recipe's folder, on the command line at the shell's; `hf download {name}` fetches a model \
         of that name from the Hugging Face Hub"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::{
        Activation, AttentionSpec, FeedForwardSpec, LayerNorms, LayerSpec, Preference, QkNorm, QueryGrowth, RopeScaling,
        RopeSpec, ScoreRule, YarnScaling,
    };
    use serde_json::json;

    fn config(changes: &Value) -> Result<ModelConfig, Fault> {
        let mut object = json!({
            "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 176, "vocab_size": 512, "max_position_embeddings": 32768, "rope_theta": 1e6, "hidden_act": "silu",
        });
        let target = object.as_object_mut().unwrap();
        for (key, value) in changes.as_object().unwrap() {
            target.insert(key.clone(), value.clone());
        }
        ModelConfig::from_object(target)
    }

    #[test]
    fn both_spellings_of_one_model_are_equal() {
        let old = config(&json!({"rope_scaling": null, "torch_dtype": "bfloat16", "attention_dropout": 0.0})).unwrap();
        let new = config(&json!({
            "rope_theta": null, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}, "dtype": "bfloat16",
            "layer_types": ["full_attention", "full_attention", "full_attention"], "attention_dropout": 0,
        }));
        assert_eq!(old, new.unwrap());
        let attention = AttentionSpec {
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 16,
            rule: ScoreRule::scaled(0.25),
            rope: Some(RopeSpec::plain(1e6, 16)),
            qk_norm: None,
            query_growth: None,
            is_fused: false,
            has_qkv_bias: true,
            has_output_bias: false,
            has_sinks: false,
        };
        let layer = LayerSpec {
            attention,
            feed_forward: FeedForwardSpec::Dense {
                intermediate_size: 176,
                has_bias: false,
                is_fused: false,
                activation: Activation::Silu,
            },
            norms: LayerNorms::BEFORE,
            residual_scale: 1.0,
        };
        assert_eq!((old.layers, old.weight_kind), (vec![layer; 3], Some(Kind::BFloat16)));
    }

    #[test]
    fn layers_slide_as_their_types_say_or_from_a_number_on() {
        let windows = |changes: &Value| {
            let layers = config(changes).unwrap().layers;
            layers.iter().map(|layer| layer.attention.rule.window).collect::<Vec<_>>()
        };
        let (on, off) = (json!({"use_sliding_window": true, "sliding_window": 24}), json!({"sliding_window": 24}));
        let with = |base: &Value, more: &Value| {
            let mut all = base.clone();
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            windows(&all)
        };
        assert_eq!(with(&off, &json!({"max_window_layers": 0})), [None; 3]);
        assert_eq!(with(&on, &json!({})), [None; 3], "the default of `max_window_layers` is 28");
        assert_eq!(with(&on, &json!({"max_window_layers": 1})), [None, Some(24), Some(24)]);
        let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
        assert_eq!(with(&on, &json!({"layer_types": types, "max_window_layers": 1})), [Some(24), None, Some(24)]);
        assert_eq!(windows(&json!({"use_sliding_window": true, "max_window_layers": 0})), [Some(4096); 3]);
        let null = json!({"use_sliding_window": true, "max_window_layers": 0, "sliding_window": null});
        assert_eq!(windows(&null), [None; 3]);
    }

    #[test]
    fn an_unknown_family_is_named_with_those_that_are_known() {
        let fault = config(&json!({"model_type": "mamba"})).unwrap_err();
        let known = format!("expected one of `{}`", families::known().join("`, `"));
        assert_eq!(fault.to_string(), format!("unknown `model_type` `mamba`, {known}"));
        let fault = config(&json!({"model_type": null})).unwrap_err();
        assert_eq!(fault.to_string(), format!("no `model_type`, {known}"));
        let fault = config(&json!({"model_type": "mistrall"})).unwrap_err();
        assert_eq!(fault.hint().unwrap(), "did you mean `mistral`?");
    }

    #[test]
    fn what_is_not_built_is_refused() {
        const ORIGINAL: &str = "original_max_position_embeddings";
        for (changes, key) in [
            (json!({"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}}), ORIGINAL),
            (json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}), "rope_parameters"),
            (json!({"hidden_act": "gelu"}), "hidden_act"),
            (json!({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}), "layer_types"),
            (json!({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}), "layer_types"),
            (json!({"model_type": "gemma2"}), "hidden_act"),
            (gemma("gemma2", &json!({"hidden_activation": "gelu"})), "hidden_activation"),
            (gemma("gemma3_text", &json!({"use_bidirectional_attention": true})), "use_bidirectional_attention"),
            (gemma("gemma2", &json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}})), "rope_parameters"),
            (json!({"quantization_config": {"bits": 4}}), "quantization_config.quant_method"),
            (gpt_oss(&json!({"quantization_config": {"quant_method": "hqq"}})), "quantization_config.quant_method"),
            (gpt_oss(&json!({"swiglu_limit": 5.0})), "swiglu_limit"),
            (gpt_oss(&json!({"swiglu_alpha": 1.5})), "swiglu_alpha"),
        ] {
            let fault = config(&changes).unwrap_err();
            assert!(
                fault.to_string().starts_with(&format!("`{key}` is ")) && fault.to_string().contains("not supported"),
                "{key}: {fault}"
            );
            assert!(fault.hint().is_some());
        }
    }

    #[test]
    fn sizes_out_of_bounds_are_refused_before_anything_is_allocated() {
        for (changes, key) in [
            (json!({"hidden_size": 1_000_000}), "hidden_size"),
            (json!({"hidden_size": -64}), "hidden_size"),
            (json!({"hidden_size": "64"}), "hidden_size"),
            (json!({"num_hidden_layers": 0}), "num_hidden_layers"),
            (json!({"vocab_size": 5_000_000}), "vocab_size"),
            (json!({"vocab_size": 18_446_744_073_709_551_615_u64}), "vocab_size"),
            (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
            (json!({"hidden_size": 66}), "hidden_size"),
            (json!({"head_dim": 15}), "head_dim"),
            (json!({"layer_types": ["full_attention"]}), "layer_types"),
            (json!({"use_sliding_window": true, "sliding_window": 0}), "sliding_window"),
            (json!({"use_sliding_window": true, "max_window_layers": -1}), "max_window_layers"),
            (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
            (json!({"rope_parameters": {"rope_theta": 1e4}}), "rope_theta"),
            (json!({"rope_parameters": []}), "rope_parameters"),
            (json!({"rope_scaling": {"type": "linear", "factor": 0.5}}), "rope_scaling.factor"),
            (json!({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {}}), "rope_scaling"),
            (json!({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}), "rope_scaling.type"),
            (json!({"rope_scaling": {"type": "su", "short_factor": [1, 1], "long_factor": [2]}}), "rope_scaling.short_factor"),
            (json!({"partial_rotary_factor": 0.1}), "partial_rotary_factor"),
            (json!({"partial_rotary_factor": 0.5, "rope_scaling": {"partial_rotary_factor": 0.75}}), "partial_rotary_factor"),
            (json!({"rope_scaling": {"partial_rotary_factor": 1.5}}), "rope_scaling.partial_rotary_factor"),
            (json!({"attention_dropout": 1.5}), "attention_dropout"),
            (json!({"torch_dtype": "int4"}), "torch_dtype"),
        ] {
            assert_out_of_range(&changes, key);
        }
        let fault = config(&json!({"vocab_size": null})).unwrap_err();
        assert_eq!(fault.to_string(), "`vocab_size` is missing, expected a whole number");
    }

    fn assert_out_of_range(changes: &Value, key: &str) {
        let fault = config(changes).unwrap_err();
        assert!(
            fault.to_string().starts_with(&format!("`{key}` is ")) && !fault.to_string().contains("not supported"),
            "{key}: {fault}"
        );
    }

    #[test]
    fn a_width_that_no_layer_has_may_be_left_out() {
        let of = |dense: Value| {
            config(&json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                "intermediate_size": null, "mlp_only_layers": dense}))
        };
        assert_eq!(of(json!([])).unwrap().intermediate_size(), 2 * 8);
        assert!(of(json!([1])).unwrap_err().to_string().contains("`intermediate_size` is missing"));
    }

    fn gpt_oss(changes: &Value) -> Value {
        let mut object = json!({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": {"rope_theta": 1e6}});
        object.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        object
    }

    fn glm4_moe(changes: &Value) -> Value {
        let mut object = json!({"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 8, "rope_parameters": {"rope_theta": 1e6}});
        object.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        object
    }

    #[test]
    fn routers_of_glm_may_lack_what_they_have_by_default() {
        let experts = |changes: &Value| config(&glm4_moe(changes)).unwrap().layers.into_iter().map(|layer| layer.feed_forward);
        let mut layers = experts(&json!({"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}));
        assert!(matches!(layers.next(), Some(FeedForwardSpec::Dense { intermediate_size: 176, .. })));
        let of_layer = layers.next().unwrap();
        let spec = of_layer.experts().unwrap();
        assert_eq!(spec.preference, Preference::Sigmoid { groups: 4, kept: 2 });
        assert_eq!((spec.shared_size, spec.is_renormalised, spec.weight_scale.to_string()), (Some(8), true, "2.5".into()));
        assert_eq!(of_layer.intermediate_size(), 3 * 8 + 8);
        let bare = experts(&json!({"n_shared_experts": 0, "first_k_dense_replace": 0, "norm_topk_prob": false}));
        assert!(bare.into_iter().all(|of| of.experts().is_some_and(|spec| spec.shared_size.is_none() && !spec.is_renormalised)));
        let attention = config(&glm4_moe(&json!({}))).unwrap().layers.remove(0).attention;
        assert_eq!((attention.rope.unwrap().rotary_dim, attention.qk_norm), (8, None));
    }

    #[test]
    fn numbers_of_a_family_that_cannot_be_are_refused() {
        for (changes, key) in [
            (json!({"model_type": "qwen3", "head_dim": 15}), "head_dim"),
            (json!({"model_type": "mistral", "sliding_window": 0}), "sliding_window"),
            (gpt_oss(&json!({"num_experts_per_tok": 5})), "num_experts_per_tok"),
            (glm4_moe(&json!({"num_experts_per_tok": 9})), "num_experts_per_tok"),
            (glm4_moe(&json!({"n_group": 3})), "n_group"),
            (glm4_moe(&json!({"n_group": 8, "topk_group": 4})), "n_group"),
            (glm4_moe(&json!({"n_group": 4, "topk_group": 5})), "topk_group"),
            (glm4_moe(&json!({"n_group": 4, "topk_group": 1})), "topk_group"),
            (glm4_moe(&json!({"routed_scaling_factor": 0})), "routed_scaling_factor"),
            (glm4_moe(&json!({"n_shared_experts": 1_u64 << 63})), "n_shared_experts"),
            (json!({"model_type": "smollm3", "no_rope_layers": [1, 0]}), "no_rope_layers"),
            (json!({"model_type": "granite", "residual_multiplier": 0}), "residual_multiplier"),
            (json!({"model_type": "granite", "logits_scaling": "8"}), "logits_scaling"),
            (json!({"model_type": "olmo2", "attention_bias": 1}), "attention_bias"),
            (json!({"model_type": "olmo3", "sliding_window": -1}), "sliding_window"),
            (json!({"model_type": "phi3", "partial_rotary_factor": 0.1}), "partial_rotary_factor"),
            (json!({"model_type": "phi3", "resid_pdrop": 1}), "resid_pdrop"),
            (
                json!({"model_type": "ministral3", "rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": "a",
                "original_max_position_embeddings": 64}}),
                "rope_parameters.llama_4_scaling_beta",
            ),
            (gemma("gemma2", &json!({"attn_logit_softcapping": 0.0})), "attn_logit_softcapping"),
            (gemma("gemma2", &json!({"final_logit_softcapping": -1})), "final_logit_softcapping"),
            (gemma("gemma2", &json!({"query_pre_attn_scalar": "24"})), "query_pre_attn_scalar"),
            (gemma("gemma3_text", &json!({"sliding_window_pattern": 0})), "sliding_window_pattern"),
            (
                gemma("gemma3_text", &json!({"sliding_window_pattern": 2, "_sliding_window_pattern": 3})),
                "_sliding_window_pattern",
            ),
            (gemma("gemma3_text", &json!({"rope_local_base_freq": -1.0})), "rope_local_base_freq"),
            (
                gemma(
                    "gemma3_text",
                    &json!({"rope_local_base_freq": 2.0, "rope_parameters": {"sliding_attention": {"rope_theta": 3.0}}}),
                ),
                "rope_local_base_freq",
            ),
        ] {
            assert_out_of_range(&changes, key);
        }
    }

    #[test]
    fn a_table_of_a_rotary_embedding_holds_what_its_kind_knows() {
        for (table, fault, hint) in [
            (
                json!({"rope_type": "yarm"}),
                "unknown `rope_scaling.rope_type` `yarm`, expected one of `default`, `linear`, `dynamic`, `yarn`, `dynamic_yarn`, `llama3`, `longrope`",
                "did you mean `yarn`?",
            ),
            (
                json!({"rope_type": "linear", "facter": 2.0}),
                "unknown key `rope_scaling.facter`, expected one of `rope_type`, `type`, `rope_theta`, `partial_rotary_factor`, \
                 `original_max_position_embeddings`, `factor`",
                "did you mean `factor`?",
            ),
            (
                json!({"type": "yarn"}),
                "`rope_scaling.factor` is missing, expected a positive number",
                "take `config.json` from the model's source again",
            ),
        ] {
            let found = config(&json!({"rope_scaling": table})).unwrap_err();
            assert_eq!((found.to_string().as_str(), found.hint().unwrap().as_str()), (fault, hint));
        }
    }

    fn rope(changes: &Value) -> RopeSpec {
        config(changes).unwrap().layers[0].attention.rope.clone().unwrap()
    }

    #[test]
    fn scaled_rotary_embeddings_are_the_same_in_both_spellings() {
        let old = rope(&json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}));
        let new = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4, "original_max_position_embeddings": 8192});
        assert_eq!(old, rope(&json!({"rope_theta": null, "rope_parameters": new, "rope_scaling": new})));
        let attention_factor = 0.1 * 4.0f64.ln() + 1.0;
        let expected =
            YarnScaling { factor: 4.0, original: 8192, beta_fast: 32.0, beta_slow: 1.0, truncates: true, attention_factor };
        assert_eq!(old.scaling, RopeScaling::Yarn(expected.clone()));
        let yarn = |more: &Value| {
            let mut table = json!({"type": "yarn", "factor": 4.0});
            table.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let RopeScaling::Yarn(yarn) = rope(&json!({"rope_scaling": table})).scaling else { panic!("no YaRN") };
            yarn
        };
        assert_eq!(yarn(&json!({})).original, 32768, "`max_position_embeddings`");
        assert_eq!(yarn(&json!({"factor": null, "original_max_position_embeddings": 8192})), expected);
        assert!(
            (yarn(&json!({"mscale": 1.0})).attention_factor - attention_factor).abs() < 1e-15,
            "one of the two counts for nothing"
        );
        assert_eq!(yarn(&json!({"mscale": 2.0, "mscale_all_dim": 0})), yarn(&json!({})), "nor does a 0");
        let both = yarn(&json!({"mscale": 2.0, "mscale_all_dim": 1.0})).attention_factor;
        assert!((both - (0.2 * 4.0f64.ln() + 1.0) / attention_factor).abs() < 1e-15);
        let given = yarn(&json!({"mscale": 2.0, "mscale_all_dim": 1.0, "attention_factor": 1.5, "truncate": false}));
        assert_eq!((given.attention_factor, given.truncates), (1.5, false));
    }

    #[test]
    fn a_scaled_rotary_embedding_reaches_further_than_the_file_says() {
        let reach = |rope: &Value| {
            let config = config(&json!({"max_position_embeddings": 4096, "rope_scaling": rope})).unwrap();
            config.trained_positions()
        };
        assert_eq!(reach(&json!(null)), 4096);
        assert_eq!(reach(&json!({"type": "linear", "factor": 4.0})), 16384);
        assert_eq!(reach(&json!({"type": "dynamic", "factor": 2.0})), 8192);
        assert_eq!(reach(&json!({"type": "yarn", "factor": 4.0})), 16384);
        assert_eq!(reach(&json!({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024})), 4096);
    }

    #[test]
    fn the_first_channels_alone_are_rotated_and_longrope_has_a_factor_for_each_pair() {
        let lists = json!({"type": "su", "short_factor": [1, 1.5], "long_factor": [2, 3], "partial_rotary_factor": 0.25});
        let found = rope(&json!({"rope_scaling": lists, "original_max_position_embeddings": 4096}));
        let RopeScaling::LongRope(longrope) = &found.scaling else { panic!("{found:?}") };
        assert_eq!((found.rotary_dim, &longrope.long, longrope.original), (4, &vec![2.0, 3.0], 4096));
        assert!((longrope.attention_factor - (1.0 + 8.0f64.ln() / 4096.0f64.ln()).sqrt()).abs() < 1e-15);
    }

    #[test]
    fn each_family_has_its_own_defaults() {
        let first = |changes: &Value| config(changes).unwrap().layers[0].clone();
        let biases = |changes: &Value| {
            let linears = first(changes).linears(64);
            linears.iter().filter(|linear| linear.has_bias).map(|linear| linear.name().to_owned()).collect::<Vec<_>>().join(" ")
        };
        let (attention, mlp) = ("q_proj k_proj v_proj o_proj", "gate_proj up_proj down_proj");
        let all = |model_type: &str| json!({"model_type": model_type, "attention_bias": true, "mlp_bias": true});
        assert_eq!(biases(&json!({"model_type": "llama"})), "");
        assert_eq!(biases(&all("llama")), format!("{attention} {mlp}"));
        assert_eq!(biases(&all("qwen3")), attention);
        assert_eq!(biases(&all("mistral")), "");
        assert_eq!(biases(&json!({"model_type": "seed_oss"})), "q_proj k_proj v_proj");
        assert_eq!(biases(&all("granite")), format!("{attention} {mlp}"));
        assert_eq!(biases(&all("olmo2")), attention);
        assert_eq!(biases(&all("phi3")), "");
        let qwen3 = first(&json!({"model_type": "qwen3"})).attention;
        assert_eq!((qwen3.head_dim, qwen3.qk_norm), (128, Some(QkNorm::PerHead)));
        assert_eq!(first(&json!({"model_type": "qwen3", "head_dim": null})).attention.head_dim, 16);
        let window = |changes: &Value| first(changes).attention.rule.window;
        assert_eq!(window(&json!({"model_type": "mistral"})), Some(4096));
        assert_eq!(window(&json!({"model_type": "mistral", "sliding_window": null})), None);
        assert_eq!(window(&json!({"model_type": "mistral", "sliding_window": 24})), Some(24));
        let types = json!({"model_type": "mistral", "layer_types": ["full_attention"]});
        assert!(config(&types).is_err_and(|fault| fault.to_string().starts_with("unknown key `layer_types`")));
        let heads = json!({"model_type": "mistral", "num_key_value_heads": null});
        assert_eq!(first(&heads).attention.num_kv_heads, 4);
        let by_default = json!({"model_type": "mistral", "num_attention_heads": 16});
        let mut object = json!({"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8,
            "max_position_embeddings": 64});
        object.as_object_mut().unwrap().extend(by_default.as_object().unwrap().clone());
        let mistral = ModelConfig::from_object(object.as_object().unwrap()).unwrap();
        assert_eq!(mistral.layers[0].attention.num_kv_heads, 8);
        let rotates = |changes: &Value| {
            let layers = config(changes).unwrap().layers;
            layers.iter().map(|layer| layer.attention.rope.is_some()).collect::<Vec<_>>()
        };
        assert_eq!(rotates(&json!({"model_type": "smollm3", "no_rope_layers": [1, 0, 1]})), [true, false, true]);
        assert_eq!(rotates(&json!({"model_type": "smollm3", "no_rope_layer_interval": 3})), [true, true, false]);
        assert!(config(&json!({"model_type": "smollm3"})).unwrap().tie_word_embeddings);
    }

    /// Keys of a Gemma, which the other keys of these tests would have another activation.
    fn gemma(model_type: &str, more: &Value) -> Value {
        let mut keys = json!({"model_type": model_type, "hidden_act": null, "rope_theta": null});
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        keys
    }

    #[test]
    fn gemmas_have_caps_and_scales_of_their_own() {
        let of = |model_type: &str, more: &Value| config(&gemma(model_type, more)).unwrap();
        let (second, third) = (of("gemma2", &json!({})), of("gemma3_text", &json!({"sliding_window_pattern": 3})));
        let caps = |config: &ModelConfig| (config.layers[0].attention.rule.soft_cap, config.logit_soft_cap);
        assert_eq!((caps(&second), caps(&third)), ((Some(50.0), Some(30.0)), (None, None)));
        let none = json!({"attn_logit_softcapping": null, "final_logit_softcapping": null, "query_pre_attn_scalar": 64});
        assert_eq!(caps(&of("gemma2", &none)), (None, None));
        let given = json!({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0});
        assert_eq!(caps(&of("gemma3_text", &given)), (None, Some(30.0)));
        let scale = |config: &ModelConfig| config.layers[0].attention.rule.scale;
        assert_eq!((scale(&second), scale(&of("gemma2", &none))), (1.0 / 16.0, 1.0 / 8.0));
        for config in [&second, &third] {
            let attention = &config.layers[0].attention;
            let kv_heads = families::find(config.model_type).unwrap().default_kv_heads;
            assert_eq!((attention.head_dim, kv_heads, config.embedding_scale), (256, Some(4), 8.0));
            assert!(config.tie_word_embeddings && config.norms_add_one);
            assert_eq!(config.layers[0].norms, LayerNorms::AROUND);
        }
        let windows = |config: &ModelConfig| config.layers.iter().map(|layer| layer.attention.rule.window).collect::<Vec<_>>();
        assert_eq!(windows(&second), [Some(4096), None, Some(4096)]);
        assert_eq!(windows(&third), [Some(4096), Some(4096), None]);
        assert_eq!(windows(&of("gemma3_text", &json!({"_sliding_window_pattern": 2}))), [Some(4096), None, Some(4096)]);
        assert_eq!(windows(&of("gemma3_text", &json!({}))), [Some(4096); 3]);
    }

    #[test]
    fn layers_that_slide_may_have_a_rotation_of_their_own_in_both_spellings() {
        let ropes = |more: &Value| {
            let config = config(&gemma("gemma3_text", more)).unwrap();
            let of = |layer: usize| config.layers[layer].attention.rope.clone().unwrap();
            [of(0), of(2)]
        };
        let pattern = json!({"sliding_window_pattern": 3});
        assert_eq!(ropes(&pattern), [RopeSpec::plain(1e4, 256), RopeSpec::plain(1e6, 256)]);
        let old = json!({"sliding_window_pattern": 3, "rope_theta": 5e5, "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}});
        let new = json!({"sliding_window_pattern": 3, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}});
        assert_eq!(ropes(&old), ropes(&new));
        let scaled = RopeSpec { scaling: RopeScaling::Linear { factor: 8.0 }, ..RopeSpec::plain(5e5, 256) };
        assert_eq!(ropes(&old), [RopeSpec::plain(2e4, 256), scaled]);
        let nulls = json!({"rope_parameters": {"full_attention": {}, "sliding_atention": {}}});
        let fault = config(&gemma("gemma3_text", &nulls)).unwrap_err();
        assert_eq!(fault.hint().unwrap(), "did you mean `sliding_attention`?");
    }

    #[test]
    fn a_dropout_of_the_model_is_known_and_left_out() {
        let dropouts = |changes: &Value| config(changes).unwrap().dropouts;
        assert_eq!(dropouts(&json!({})), []);
        let seed = [("attention_dropout", 0.1), ("residual_dropout", 0.1)];
        assert_eq!(dropouts(&json!({"model_type": "seed_oss"})), seed);
        assert_eq!(dropouts(&json!({"model_type": "seed_oss", "attention_dropout": 0})), seed[1..]);
        assert_eq!(dropouts(&json!({"attention_dropout": 0.25})), [("attention_dropout", 0.25)]);
    }

    #[test]
    fn granite_has_four_factors_which_are_1_by_default() {
        let scales = |changes: &Value| {
            let config = config(changes).unwrap();
            let layer = &config.layers[0];
            let all = [config.embedding_scale, layer.attention.rule.scale, layer.residual_scale, config.logits_divisor];
            all.map(|scale| scale.to_string())
        };
        assert_eq!(scales(&json!({})), ["1", "0.25", "1", "1"]);
        assert_eq!(scales(&json!({"model_type": "granite"})), ["1"; 4]);
        let multipliers = json!({"model_type": "granite", "embedding_multiplier": 12, "attention_multiplier": 0.125,
            "residual_multiplier": 0.22, "logits_scaling": 8.0});
        assert_eq!(scales(&multipliers), ["12", "0.125", "0.22", "8"]);
    }

    #[test]
    fn olmo_3_scales_the_rotation_of_layers_that_do_not_slide_alone() {
        let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192});
        let olmo3 = config(&json!({"model_type": "olmo3", "num_hidden_layers": 5, "rope_scaling": yarn})).unwrap();
        let windows: Vec<_> = olmo3.layers.iter().map(|layer| layer.attention.rule.window).collect();
        assert_eq!(windows, [Some(4096), Some(4096), Some(4096), None, Some(4096)]);
        for LayerSpec { attention, norms, .. } in &olmo3.layers {
            let is_plain = attention.rope == Some(RopeSpec::plain(1e6, 16));
            assert_eq!((is_plain, attention.qk_norm), (attention.rule.window.is_some(), Some(QkNorm::FullWidth)));
            assert_eq!(*norms, LayerNorms::BEHIND);
        }
        assert_eq!((olmo3.rotations().len(), olmo3.rms_norm_eps), (2, 1e-5));
        // As Transformers 5.24 writes it.
        let by_type = json!({"full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 8192},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e6}});
        assert_eq!(config(&json!({"model_type": "olmo3", "num_hidden_layers": 5, "rope_parameters": by_type})).unwrap(), olmo3);
    }

    #[test]
    fn phi_3_reads_the_original_length_beside_the_table_and_the_share_in_either() {
        let of = |pairs: usize, more: &Value| {
            let mut table = json!({"type": "su", "short_factor": vec![1.0; pairs], "long_factor": vec![2.0; pairs],
                "original_max_position_embeddings": 64});
            let mut all = json!({"model_type": "phi3"});
            for (key, value) in more.as_object().unwrap() {
                let place = if key == "type" { &mut table } else { &mut all };
                place[key.as_str()] = value.clone();
            }
            all["rope_scaling"] = table;
            let found = rope(&all);
            let RopeScaling::LongRope(longrope) = found.scaling else { panic!("{:?}", found.scaling) };
            (found.rotary_dim, longrope.original)
        };
        assert_eq!(of(8, &json!({})), (16, 4096));
        assert_eq!(of(6, &json!({"partial_rotary_factor": 0.75, "original_max_position_embeddings": 128})), (12, 128));
        assert_eq!(of(8, &json!({"type": "yarn"})), (16, 4096));
        assert_eq!(of(8, &json!({"type": "longrope"})), (16, 4096));
        // As Transformers 5.24 writes it.
        let table = json!({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5});
        assert_eq!(rope(&json!({"model_type": "phi3", "rope_parameters": table})).rotary_dim, 8);
    }

    #[test]
    fn ministral_3_grows_its_queries_by_numbers_of_the_rotation() {
        let table = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1,
            "max_position_embeddings": 262_144, "original_max_position_embeddings": 16384});
        let ministral = |table: &Value| config(&json!({"model_type": "ministral3", "rope_parameters": table}));
        let attention = ministral(&table).unwrap().layers[0].attention.clone();
        assert_eq!(attention.query_growth, Some(QueryGrowth { beta: 0.1, original: 16384 }));
        assert_eq!((attention.head_dim, attention.rule.window), (128, None));
        let mut still = table.clone();
        still["llama_4_scaling_beta"] = json!(0);
        assert_eq!(ministral(&still).unwrap().layers[0].attention.query_growth, None);
        assert!(ministral(&json!(null)).is_err_and(|fault| fault.to_string().contains("is missing")));
        let fault = config(&json!({"rope_theta": null, "rope_parameters": table})).unwrap_err();
        assert!(fault.to_string().starts_with("unknown key"), "of no other family: {fault}");
    }

    #[test]
    fn a_language_model_inside_another_one_is_read_from_its_own_object() {
        let inner = config(&json!({})).unwrap();
        let mut object = json!({"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 512, "max_position_embeddings": 32768, "rope_theta": 1e6});
        // Of the output projection the whole model has the last word.
        object["tie_word_embeddings"] = json!(false);
        let mut outer = json!({"model_type": "mistral3", "text_config": object, "vision_config": {"hidden_size": 8},
            "tie_word_embeddings": true, "torch_dtype": "bfloat16"});
        let found = ModelConfig::from_object(outer.as_object().unwrap()).unwrap();
        let expected = ModelConfig { is_inner: true, tie_word_embeddings: true, weight_kind: Some(Kind::BFloat16), ..inner };
        assert_eq!(found, expected);
        outer["quantization_config"] = json!({"bits": 8});
        let fault = ModelConfig::from_object(outer.as_object().unwrap()).unwrap_err();
        assert!(fault.to_string().starts_with("`quantization_config.quant_method` is missing"), "{fault}");
    }

    /// As `google/gemma-3-4b-it` and `llava-hf/llava-1.5-7b-hf` are published.
    #[test]
    fn a_language_model_inside_another_one_leaves_out_what_its_class_has_by_itself() {
        let read = |inner: Value| ModelConfig::from_object(json!({"text_config": inner}).as_object().unwrap()).unwrap();
        let gemma = read(json!({"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}));
        let attention = &gemma.layers[5].attention;
        assert_eq!((attention.num_heads, attention.num_kv_heads, attention.head_dim), (8, 4, 256));
        assert_eq!((gemma.hidden_size, gemma.num_layers(), gemma.intermediate_size()), (2560, 34, 10240));
        assert_eq!((gemma.vocab_size, gemma.max_position_embeddings), (262_208, 131_072));
        let llama =
            read(json!({"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}));
        assert_eq!((llama.hidden_size, llama.num_layers(), llama.intermediate_size()), (4096, 32, 11008));
        assert_eq!((llama.vocab_size, llama.max_position_embeddings, llama.layers[0].attention.num_heads), (32064, 4096, 32));
    }

    #[test]
    fn what_a_file_leaves_out_is_as_transformers_has_it() {
        let table = |more: &Value| {
            let mut table = json!({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
            table.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"rope_scaling": table})
        };
        assert_eq!(rope(&table(&json!({}))), rope(&table(&json!({"original_max_position_embeddings": 32768}))));
        assert_eq!(config(&json!({"hidden_act": "swish"})).unwrap(), config(&json!({})).unwrap());
        let theta = |changes: &Value| rope(changes).theta.to_string();
        assert_eq!(theta(&json!({"model_type": "olmo3", "rope_theta": null})), "500000");
        let smollm = config(&json!({"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "use_sliding_window": true,
            "sliding_window": 8}));
        let windows = smollm.unwrap().layers.into_iter().map(|layer| layer.attention.rule.window).collect::<Vec<_>>();
        assert_eq!(windows, [None, Some(8), None]);
        let pad = |changes: &Value| config(changes).unwrap().pad_token_id;
        for (key, expected) in [(json!(3), Some(3)), (json!(-1), None), (json!(null), None)] {
            assert_eq!(pad(&json!({"model_type": "olmo2", "pad_token_id": key})), expected);
        }
        assert_eq!((pad(&json!({"model_type": "olmo2"})), pad(&json!({}))), (Some(1), None));
    }

    #[test]
    fn unknown_keys_are_left_alone() {
        assert!(config(&json!({"some_future_key": {"a": 1}})).is_ok());
    }
}
