//! The rotary position embedding of a `config.json`, in either spelling: `rope_theta` beside `rope_scaling`, or both in `rope_parameters`.

use serde_json::{Map, Value};

use super::family::{Family, RopeRules};
use crate::model::fields::{Fields, missing, unknown_name, unsupported};
use crate::model::spec::{DynamicYarnScaling, Llama3Scaling, LongRopeScaling, RopeScaling, RopeSpec, YarnScaling};
use crate::ops::frequencies::MAX_SEQUENCE_LENGTH;
use crate::units::{Fault, quoted};

/// The tables that may hold it.
pub(in crate::model) const TABLES: [&str; 2] = ["rope_parameters", "rope_scaling"];
pub(in crate::model) const ORIGINAL: &str = "original_max_position_embeddings";

/// The longest sequence that a model was made for.
pub(in crate::model) fn max_positions(fields: Fields<'_>) -> Result<usize, Fault> {
    fields.count("max_position_embeddings", MAX_SEQUENCE_LENGTH)
}

/// The table that holds it, if there is one.
pub(super) fn table(fields: Fields<'_>) -> Result<Option<Fields<'_>>, Fault> {
    Ok(fields.table(TABLES[0])?.or(fields.table(TABLES[1])?))
}

/// The types of layers that may have a table each, as `layer_types` calls them, within a table.
pub(in crate::model) const FULL: &str = "full_attention";
pub(in crate::model) const SLIDING: &str = "sliding_attention";

/// That of heads of `head_dim` channels, in layers that do not slide.
pub(super) fn rope(fields: Fields<'_>, family: &Family, head_dim: usize) -> Result<RopeSpec, Fault> {
    let has_several = family.rope.has_table_by_type;
    let mut tables = Vec::new();
    for key in TABLES {
        let Some(table) = fields.table(key)? else { continue };
        match by_type(fields, key)? {
            Some([full, _]) if has_several => tables.extend(full),
            Some(_) => return Err(fields.unsupported(key, "one rotary embedding for all layers".into())),
            None => tables.push(table),
        }
    }
    if family.rope.needs_table && tables.is_empty() {
        return Err(missing(TABLES[0], "the rotary embedding's table"));
    }
    rope_of(fields, max_positions(fields)?, &tables, &family.rope, head_dim)
}

/// That of layers that slide, where the tables have one for them; `theta` is its base if it names none.
pub(super) fn sliding_table(fields: Fields<'_>, theta: f64, head_dim: usize) -> Result<Option<RopeSpec>, Fault> {
    let mut found = None;
    for key in TABLES {
        let Some([_, Some(table)]) = by_type(fields, key)? else { continue };
        let rope = rope_of(table, max_positions(fields)?, &[table], &RopeRules::of_theta(theta), head_dim)?;
        if found.as_ref().is_some_and(|other| *other != rope) {
            return Err(fields.range(TABLES[1], format!("the same as `{}`", TABLES[0])));
        }
        found = Some(rope);
    }
    Ok(found)
}

/// The tables within a table, if it holds some: of layers that do not slide, and of those that do.
fn by_type<'a>(fields: Fields<'a>, key: &'static str) -> Result<Option<[Option<Fields<'a>>; 2]>, Fault> {
    let holds_tables = |object: &Map<String, Value>| object.values().any(Value::is_object);
    if !fields.get(key).and_then(Value::as_object).is_some_and(holds_tables) {
        return Ok(None);
    }
    let Some(table) = fields.table(key)? else { return Ok(None) };
    // Transformers 5.3 writes a kind beside the tables, which says nothing.
    table.only_keys(&[FULL, SLIDING, "rope_type"])?;
    table.only("rope_type", "default")?;
    Ok(Some([table.table(FULL)?, table.table(SLIDING)?]))
}

/// That of some tables, beside which keys may stand in `fields`.
fn rope_of(
    fields: Fields<'_>,
    max_positions: usize,
    tables: &[Fields<'_>],
    rules: &RopeRules,
    head_dim: usize,
) -> Result<RopeSpec, Fault> {
    let places = [tables, &[fields]].concat();
    let theta = agreed(&places, "rope_theta", |place| place.number("rope_theta"))?.unwrap_or(rules.default_theta);
    let rotary_dim = rotary_dim(&places, rules.default_share, head_dim)?;
    let places = if rules.default_original.is_some() { vec![fields] } else { places };
    let original = agreed(&places, ORIGINAL, |place| place.count(ORIGINAL, MAX_SEQUENCE_LENGTH))?;
    let original = original.or(rules.default_original);
    let context = RopeContext { rules, head_dim, rotary_dim, max_positions, original };
    let scalings = tables.iter().map(|table| scaling(*table, &context)).collect::<Result<Vec<_>, _>>()?;
    if let [first, second] = &scalings[..]
        && first != second
    {
        return Err(fields.range(TABLES[1], format!("the same as `{}`", TABLES[0])));
    }
    let scaling = scalings.into_iter().next().unwrap_or(RopeScaling::Unscaled);
    Ok(RopeSpec { theta, rotary_dim, scaling })
}

/// How many channels of a head are rotated: its first ones.
fn rotary_dim(places: &[Fields<'_>], default: f64, head_dim: usize) -> Result<usize, Fault> {
    const KEY: &str = "partial_rotary_factor";
    let factor = agreed(places, KEY, |place| place.number(KEY))?.unwrap_or(default);
    // A share of a head, of which a broken channel is no channel.
    let rotary_dim = (head_dim as f64 * factor) as usize;
    if rotary_dim > head_dim || rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        let place = places.iter().find(|place| place.get(KEY).is_some()).unwrap_or(&places[0]);
        return Err(place.range(KEY, format!("a share of `head_dim` = {head_dim} that is an even number of channels")));
    }
    Ok(rotary_dim)
}

/// What the places that have a key say, which must be the same.
fn agreed<T: Copy + PartialEq + std::fmt::Display>(
    places: &[Fields<'_>],
    key: &'static str,
    read: impl Fn(&Fields<'_>) -> Result<T, Fault>,
) -> Result<Option<T>, Fault> {
    let mut first: Option<(T, &Fields<'_>)> = None;
    for place in places.iter().filter(|place| place.get(key).is_some()) {
        let found = read(place)?;
        match first {
            Some((value, other)) if value != found => {
                return Err(place.range(key, format!("{value} as in `{}`", other.named(key))));
            }
            Some(_) => {}
            None => first = Some((found, place)),
        }
    }
    Ok(first.map(|(value, _)| value))
}

/// What a kind depends on beside its own table.
struct RopeContext<'a> {
    rules: &'a RopeRules,
    head_dim: usize,
    rotary_dim: usize,
    /// What the file says as `max_position_embeddings`.
    max_positions: usize,
    /// What it says as `original_max_position_embeddings`, wherever that stands.
    original: Option<usize>,
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
const SHARED_KEYS: [&str; 5] = ["rope_type", "type", "rope_theta", "partial_rotary_factor", ORIGINAL];

/// Whether a kind of this name has its length in `max_position_embeddings`.
pub(in crate::model) fn is_longrope(name: &str) -> bool {
    KINDS.iter().any(|kind| kind.names.contains(&name) && kind.names.contains(&"longrope"))
}

/// What a table asks for.
fn scaling(table: Fields<'_>, context: &RopeContext<'_>) -> Result<RopeScaling, Fault> {
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
        return Err(unsupported(ORIGINAL, &found, &expected));
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
    let own = table.get(ORIGINAL).map(|_| table.count(ORIGINAL, MAX_SEQUENCE_LENGTH)).transpose()?;
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
