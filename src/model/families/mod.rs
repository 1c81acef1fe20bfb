//! What differs between model families, and only that: one small file each, and one line in [`FAMILIES`].

mod family;
mod layers;
mod qwen2;
mod rope;

pub(super) use family::Family;
pub(super) use layers::{MAX_HIDDEN, layers};

/// The known families.
pub(super) const FAMILIES: &[&Family] = &[&qwen2::FAMILY];

/// Finds a family by its `model_type`.
pub(super) fn find(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.model_type == model_type)
}

/// The `model_type`s that are known.
pub(super) fn known() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.model_type).collect()
}
