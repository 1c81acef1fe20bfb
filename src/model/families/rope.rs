//! The rotary position embedding that a `config.json` asks for, in either spelling: `rope_theta` beside `rope_scaling`, or both in
//! `rope_parameters`.

use serde_json::{Map, Value};

use super::family::{Family, RopeRules};
use super::rope_kinds::{RopeContext, scaling};
use crate::model::fields::{Fields, missing};
use crate::model::spec::{RopeScaling, RopeSpec};
use crate::ops::frequencies::MAX_SEQUENCE_LENGTH;
use crate::units::Fault;

/// The tables that may hold it.
pub(in crate::model) const TABLES: [&str; 2] = ["rope_parameters", "rope_scaling"];
pub(super) const MAX_POSITIONS: usize = MAX_SEQUENCE_LENGTH;

/// The longest sequence that a model was made for.
pub(in crate::model) fn max_positions(fields: Fields<'_>) -> Result<usize, Fault> {
    fields.count("max_position_embeddings", MAX_POSITIONS)
}

/// The table that holds it, if there is one.
pub(super) fn table(fields: Fields<'_>) -> Result<Option<Fields<'_>>, Fault> {
    Ok(fields.table(TABLES[0])?.or(fields.table(TABLES[1])?))
}

/// The types of layers that may have a table each, as `layer_types` calls them, within a table.
const BY_TYPE: [&str; 2] = ["full_attention", "sliding_attention"];

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
    table.only_keys(&[BY_TYPE[0], BY_TYPE[1], "rope_type"])?;
    table.only("rope_type", "default")?;
    Ok(Some([table.table(BY_TYPE[0])?, table.table(BY_TYPE[1])?]))
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
    let original_key = "original_max_position_embeddings";
    let original = agreed(&places, original_key, |place| place.count(original_key, MAX_POSITIONS))?;
    let original = original.or(rules.default_original);
    let context = RopeContext { rules, head_dim, rotary_dim, max_positions, original };
    let mut scalings = Vec::new();
    for table in tables {
        scalings.push(scaling(*table, &context)?);
    }
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
