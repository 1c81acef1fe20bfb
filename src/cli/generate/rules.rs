//! How `kvtune generate` is told to sample: over what `generation_config.json` says.

use clap::Args;
use serde_json::{Value, json};

use crate::generation::GenerationRules;
use crate::units::Fault;

#[derive(Debug, Default, PartialEq, Args)]
pub(in crate::cli) struct RuleArguments {
    /// Maximum number of new tokens.
    #[arg(long, visible_alias = "max-tokens", value_name = "N")]
    max_new_tokens: Option<usize>,
    /// Greedy decoding: take the most likely token each time.
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p", "seed"])]
    greedy: bool,
    /// Sample, with this temperature.
    #[arg(long, visible_alias = "temp", value_name = "T")]
    temperature: Option<f64>,
    /// Sample from the K most likely tokens; 0 for all.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the smallest set of tokens whose probabilities add up to P (nucleus sampling).
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Sample from tokens with at least P times the probability of the most likely one.
    #[arg(long, value_name = "P")]
    min_p: Option<f64>,
    /// Penalty on tokens that have occurred; 1 is none.
    #[arg(long, value_name = "X")]
    repetition_penalty: Option<f64>,
    /// Let no n-gram of N tokens occur twice.
    #[arg(long, value_name = "N")]
    no_repeat_ngram_size: Option<usize>,
    /// Minimum number of new tokens before an end token.
    #[arg(long, value_name = "N")]
    min_new_tokens: Option<usize>,
    /// Stop string: the text ends before it; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Id of the end token (EOS), in place of the model's own; may be given several times.
    #[arg(long, value_name = "ID")]
    eos: Vec<u32>,
    /// Ignore end tokens (EOS).
    #[arg(long, conflicts_with = "eos")]
    ignore_eos: bool,
    /// Seed of sampling: the same seed gives the same texts, whatever else is generated.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl RuleArguments {
    /// The rules with those of the arguments in place of the model's own.
    pub(in crate::cli) fn over(&self, mut rules: GenerationRules) -> Result<GenerationRules, Fault> {
        let draws = self.temperature.is_some() || self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        let draws = draws || self.seed.is_some();
        let set = [
            ("do_sample", (draws || self.greedy).then(|| json!(draws))),
            ("max_new_tokens", self.max_new_tokens.map(Value::from)),
            ("temperature", self.temperature.map(Value::from)),
            ("top_k", self.top_k.map(Value::from)),
            ("top_p", self.top_p.map(Value::from)),
            ("min_p", self.min_p.map(Value::from)),
            ("repetition_penalty", self.repetition_penalty.map(Value::from)),
            ("no_repeat_ngram_size", self.no_repeat_ngram_size.map(Value::from)),
            ("min_new_tokens", self.min_new_tokens.map(Value::from)),
            ("stop", (!self.stop.is_empty()).then(|| json!(self.stop))),
            ("eos_token_id", (self.ignore_eos || !self.eos.is_empty()).then(|| json!(self.eos))),
            ("seed", self.seed.map(Value::from)),
        ];
        for (key, value) in set {
            let Some(value) = value else { continue };
            rules.set(key, &value).map_err(|message| {
                let hint =
                    if key == "temperature" { "take the most likely token with `--greedy`" } else { "correct the argument" };
                Fault::usage(message, hint)
            })?;
        }
        Ok(rules)
    }
}
