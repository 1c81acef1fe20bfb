//! `h2o`: heavy hitters stay. The score is the attention paid to an entry so far (Zhang et al. 2023, arXiv 2306.14048), decided
//! per row and KV head; unlike the paper, recent tokens are protected only as far as `grace_period` says.

use serde::Deserialize;
use tch::{Kind, Tensor};

use crate::cache::{CacheError, Entries, Policy, Rank};
use crate::recipe::Choice;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    #[serde(default)]
    grace_period: usize,
    #[serde(default = "default_keep")]
    keep_initial_fraction: f64,
    #[serde(default)]
    normalize_scores: bool,
    #[serde(default)]
    reference_counts: bool,
}

fn default_keep() -> f64 {
    0.05
}

#[derive(Debug)]
struct H2o {
    grace: usize,
    keep_initial: f64,
    normalize: bool,
    /// Count one scoring query too many for tokens of the prefill span, as the reference implementation does.
    reference_counts: bool,
}

pub(super) fn build(choice: &Choice, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let p: Params = choice.params()?;
    if p.grace_period >= cache_length {
        let message = format!("`grace_period` = {} leaves no slot to evict: `cache_length` is {cache_length}", p.grace_period);
        return Err(choice.reject(Some("grace_period"), message, format!("choose less than {cache_length}")).into());
    }
    if !(0.0..=1.0).contains(&p.keep_initial_fraction) {
        let message = format!("`keep_initial_fraction` = {} is not a fraction", p.keep_initial_fraction);
        return Err(choice.reject(Some("keep_initial_fraction"), message, "choose a number from 0 to 1".into()).into());
    }
    Ok(Box::new(H2o {
        grace: p.grace_period,
        keep_initial: p.keep_initial_fraction,
        normalize: p.normalize_scores,
        reference_counts: p.reference_counts,
    }))
}

impl H2o {
    /// Number of queries that have scored each entry: those since it was written, and none in the prefill span.
    fn num_scorers(&self, entries: &Entries<'_>) -> Tensor {
        let first = entries.prefill as i64 - i64::from(self.reference_counts);
        (entries.next_position as i64 - entries.position_bgc.clamp_min(first)).to_kind(Kind::Float)
    }
}

impl Policy for H2o {
    fn rank(&self, entries: &Entries<'_>) -> Rank {
        let Some(score_bgc) = entries.score_bgc else {
            // Nothing has been scored: the first tokens stay, the next oldest leave.
            let keep_first = (self.keep_initial * entries.cache_length as f64) as usize;
            return Rank::ByPosition { keep_first };
        };
        if self.normalize {
            Rank::ByScore(score_bgc / self.num_scorers(entries))
        } else {
            Rank::ByScore(score_bgc.shallow_clone())
        }
    }

    fn grace(&self) -> usize {
        self.grace
    }

    fn needs_attention(&self) -> bool {
        true
    }
}
