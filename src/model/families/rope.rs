//! The rotary position embedding that a `config.json` asks for.

use serde_json::Value;

use crate::model::fields::{ConfigFault, Fields, shown};
use crate::model::spec::RopeSpec;

/// In either spelling: `rope_theta` beside `rope_scaling`, or both in `rope_parameters`.
pub(super) fn rope(fields: Fields<'_>, default_theta: f64) -> Result<RopeSpec, ConfigFault> {
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(value) = fields.get(key) else { continue };
        let unsupported = || ConfigFault::Unsupported { key, found: shown(value), supported: "the type `default`".into() };
        let rope = value.as_object().ok_or_else(unsupported)?;
        let is_default = |name: &str| rope.get(name).is_none_or(|kind| kind.as_str() == Some("default"));
        let is_nested = rope.values().any(Value::is_object);
        if is_nested || !is_default("rope_type") || !is_default("type") {
            return Err(unsupported());
        }
        Fields(rope).only("partial_rotary_factor", 1.0)?;
    }
    Ok(RopeSpec { theta: theta(fields, default_theta)? })
}

/// The base of the frequencies.
fn theta(fields: Fields<'_>, default: f64) -> Result<f64, ConfigFault> {
    let inner = |key| fields.get(key).and_then(Value::as_object).filter(|rope| rope.contains_key("rope_theta"));
    let Some(rope) = inner("rope_parameters").or_else(|| inner("rope_scaling")) else {
        return fields.number_or("rope_theta", default);
    };
    let theta = Fields(rope).number_or("rope_theta", default)?;
    let outer = fields.number_or("rope_theta", theta)?;
    #[expect(clippy::float_cmp, reason = "two spellings of one literal are equal to the bit")]
    if outer != theta {
        return Err(fields.range("rope_theta", format!("{theta} as in `rope_parameters`")));
    }
    Ok(theta)
}
