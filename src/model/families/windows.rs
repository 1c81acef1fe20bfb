//! Sliding windows as several families say them.

use super::family::SlidingLayers;
use crate::model::fields::Fields;
use crate::units::Fault;

/// The widest window: no position is larger.
const MAX_WINDOW: usize = 1 << 31;

/// `sliding_window`: a null is no window, where a missing key is the default.
pub(super) fn width(fields: Fields<'_>, default: Option<usize>) -> Result<Option<usize>, Fault> {
    const KEY: &str = "sliding_window";
    if fields.get(KEY).is_none() {
        return Ok(default.filter(|_| !fields.is_null(KEY)));
    }
    fields.count(KEY, MAX_WINDOW).map(Some)
}

/// Every layer has the same window, or none.
pub(super) fn every_layer(fields: Fields<'_>, num_layers: usize, default: Option<usize>) -> Result<SlidingLayers, Fault> {
    Ok(SlidingLayers { window: width(fields, default)?, slides: vec![true; num_layers] })
}

/// All but each `pattern`-th layer slide.
pub(super) fn but_each(pattern: usize, num_layers: usize, window: Option<usize>) -> SlidingLayers {
    SlidingLayers { window, slides: (1..=num_layers).map(|layer| !layer.is_multiple_of(pattern)).collect() }
}

/// The upper layers slide, from `max_window_layers` on; both numbers mean nothing unless `use_sliding_window` is set.
pub(super) fn upper_layers(fields: Fields<'_>, num_layers: usize) -> Result<SlidingLayers, Fault> {
    if !fields.flag_or("use_sliding_window", false)? {
        return Ok(SlidingLayers::none(num_layers));
    }
    let Some(window) = width(fields, Some(4096))? else { return Ok(SlidingLayers::none(num_layers)) };
    let first = fields.count_from_zero_or("max_window_layers", 28)?;
    Ok(SlidingLayers { window: Some(window), slides: (0..num_layers).map(|layer| layer >= first).collect() })
}
