//! The kinds of scaled rotary embeddings, by the names and keys that they have in `config.json`.

use super::family::RopeRules;
use crate::model::fields::{Fields, unknown_name, unsupported};
use crate::model::spec::{DynamicYarnScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling};
use crate::ops::frequencies::MAX_SEQUENCE_LENGTH;
use crate::units::{Fault, quoted};

/// What a kind depends on beside its own table.
pub(super) struct RopeContext<'a> {
    pub(super) rules: &'a RopeRules,
    pub(super) head_dim: usize,
    pub(super) rotary_dim: usize,
    /// What the file says as `max_position_embeddings`.
    pub(super) max_positions: usize,
    /// What it says as `original_max_position_embeddings`, wherever that stands.
    pub(super) original: Option<usize>,
}

struct RopeKind {
    /// What it is called; the first name is the usual one.
    names: &'static [&'static str],
    /// The keys of a table of this kind, beside [`SHARED_KEYS`].
    keys: &'static [&'static str],
    read: fn(Fields<'_>, &RopeContext<'_>) -> Result<RopeScaling, Fault>,
}

const KINDS: &[RopeKind] = &[
    RopeKind { names: &["default"], keys: &[], read: |_, _| Ok(RopeScaling::Unscaled) },
    RopeKind { names: &["linear"], keys: &["factor"], read: |table, _| Ok(RopeScaling::Linear { factor: factor(table)? }) },
    RopeKind { names: &["dynamic"], keys: &["factor"], read: dynamic },
    RopeKind {
        names: &["yarn"],
        // The last one says that a model was trained with this: nothing is computed with it.
        keys: &["factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate", "finetuned"],
        read: yarn,
    },
    RopeKind { names: &["dynamic_yarn"], keys: &["beta_fast", "beta_slow"], read: dynamic_yarn },
    RopeKind { names: &["llama3"], keys: &["factor", "low_freq_factor", "high_freq_factor"], read: llama3 },
    RopeKind { names: &["longrope", "su"], keys: &["short_factor", "long_factor", "factor", "attention_factor"], read: longrope },
];

/// Keys that any table may have.
const SHARED_KEYS: [&str; 5] = ["rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"];

/// Whether a kind of this name has its length in `max_position_embeddings`.
pub(in crate::model) fn is_longrope(name: &str) -> bool {
    KINDS.iter().any(|kind| kind.names.contains(&name) && kind.names.contains(&"longrope"))
}

/// What a table asks for.
pub(super) fn scaling(table: Fields<'_>, context: &RopeContext<'_>) -> Result<RopeScaling, Fault> {
    let kind = |key| kind(table, key, context.rules.aliases);
    let kind = match (kind("rope_type")?, kind("type")?) {
        (Some(kind), Some(other)) if kind.names != other.names => {
            return Err(table.range("type", format!("`{}` as in `{}`", kind.names[0], table.named("rope_type"))));
        }
        (Some(kind), _) | (None, Some(kind)) => kind,
        (None, None) => &KINDS[0],
    };
    table.only_keys(&[&SHARED_KEYS, kind.keys, context.rules.further_keys].concat())?;
    (kind.read)(table, context)
}

fn kind(table: Fields<'_>, key: &'static str, aliases: &[(&str, &str)]) -> Result<Option<&'static RopeKind>, Fault> {
    let Some(value) = table.get(key) else { return Ok(None) };
    let name = value.as_str();
    let name = aliases.iter().find(|(alias, _)| name == Some(*alias)).map_or(name, |(_, meant)| Some(*meant));
    let found = KINDS.iter().find(|kind| name.is_some_and(|name| kind.names.contains(&name)));
    let known = || KINDS.iter().map(|kind| kind.names[0]).collect::<Vec<_>>();
    let name = value.as_str().map_or_else(|| quoted(value), str::to_owned);
    found.map(Some).ok_or_else(|| unknown_name(&table.named(key), Some(&name), &known()))
}

/// The factor by which sequences are longer.
fn factor(table: Fields<'_>) -> Result<f64, Fault> {
    let factor = table.number("factor")?;
    if factor < 1.0 { Err(table.range("factor", "a number of at least 1".into())) } else { Ok(factor) }
}

fn dynamic(table: Fields<'_>, context: &RopeContext<'_>) -> Result<RopeScaling, Fault> {
    let &RopeContext { rotary_dim, max_positions, original, .. } = context;
    if original.is_some_and(|original| original != max_positions) {
        let expected = format!("{max_positions} as `max_position_embeddings`, from where on the base grows");
        let found = original.unwrap_or_default().to_string();
        return Err(unsupported("original_max_position_embeddings", &found, &expected));
    }
    if rotary_dim < 4 {
        return Err(table.unsupported("rope_type", "another one for heads of two channels".into()));
    }
    Ok(RopeScaling::Dynamic { factor: factor(table)?, max_positions })
}

fn yarn(table: Fields<'_>, context: &RopeContext<'_>) -> Result<RopeScaling, Fault> {
    let original = context.original.unwrap_or(context.max_positions);
    let factor = match context.max_positions as f64 / original as f64 {
        // As in Transformers.
        ratio if table.is_null("factor") && ratio > 1.0 => ratio,
        _ => factor(table)?,
    };
    // YaRN, section 3.4: by how much attention is sharpened at a length that many times the original.
    let mscale = |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
    let by_default = match (table.number_but_zero("mscale")?, table.number_but_zero("mscale_all_dim")?) {
        (Some(scale), Some(of_all)) => mscale(scale) / mscale(of_all),
        _ => mscale(1.0),
    };
    Ok(RopeScaling::Yarn(YarnScaling {
        factor,
        original,
        beta_fast: table.number_or("beta_fast", 32.0)?,
        beta_slow: table.number_or("beta_slow", 1.0)?,
        truncates: table.flag_or("truncate", true)?,
        attention_factor: table.number_or("attention_factor", by_default)?,
    }))
}

fn dynamic_yarn(table: Fields<'_>, context: &RopeContext<'_>) -> Result<RopeScaling, Fault> {
    // It is the scores that are sharpened, of which channels that are not rotated are a part, too.
    if context.rotary_dim < context.head_dim {
        return Err(table.unsupported("rope_type", "another one where only the first channels of a head are rotated".into()));
    }
    let (beta_fast, beta_slow) = (table.number_or("beta_fast", 32.0)?, table.number_or("beta_slow", 1.0)?);
    if beta_fast <= beta_slow {
        return Err(table.range("beta_fast", format!("more than `beta_slow` = {beta_slow}")));
    }
    let original_key = "original_max_position_embeddings";
    let own = table.get(original_key).map(|_| table.count(original_key, MAX_SEQUENCE_LENGTH)).transpose()?;
    let original = own.or(context.original).unwrap_or(context.max_positions);
    Ok(RopeScaling::DynamicYarn(DynamicYarnScaling { original, beta_fast, beta_slow }))
}

fn llama3(table: Fields<'_>, context: &RopeContext<'_>) -> Result<RopeScaling, Fault> {
    let (low, high) = (table.number("low_freq_factor")?, table.number("high_freq_factor")?);
    if high <= low {
        return Err(table.range("high_freq_factor", format!("more than `low_freq_factor` = {low}")));
    }
    let original = context.original.unwrap_or(context.max_positions);
    Ok(RopeScaling::Llama3(Llama3Scaling { factor: factor(table)?, low, high, original }))
}

fn longrope(table: Fields<'_>, context: &RopeContext<'_>) -> Result<RopeScaling, Fault> {
    let pairs = context.rotary_dim / 2;
    let original = context.original.unwrap_or(context.max_positions);
    let ratio = table.number_or("factor", context.max_positions as f64 / original as f64)?;
    // Section 3.3 of the paper.
    let by_default = if ratio > 1.0 { (1.0 + ratio.ln() / (original as f64).ln()).sqrt() } else { 1.0 };
    Ok(RopeScaling::LongRope(LongRopeScaling {
        short: table.numbers("short_factor", pairs)?,
        long: table.numbers("long_factor", pairs)?,
        original,
        attention_factor: table.number_or("attention_factor", by_default)?,
    }))
}
