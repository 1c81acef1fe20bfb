//! What differs between model families, and only that: one small file each, and one line in [`FAMILIES`].

mod experts;
mod family;
mod gemma2;
mod gemma3;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod layers;
mod llama;
mod ministral3;
mod mistral;
mod mixtral;
mod olmo2;
mod olmo3;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rope;
mod rope_kinds;
mod seed_oss;
mod smollm3;
mod windows;
mod wrapper;

pub(super) use family::Family;
pub(super) use layers::{MAX_HIDDEN, dropouts, layers};
pub(super) use rope::{TABLES, max_positions};
pub(super) use rope_kinds::is_longrope;
pub(super) use wrapper::{is_wrapped, own_name, unwrapped};

pub(super) const FAMILIES: &[&Family] = &[
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &glm4_moe::FAMILY,
    &gpt_oss::FAMILY,
    &granite::FAMILY,
    &llama::FAMILY,
    &ministral3::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &olmo2::FAMILY,
    &olmo3::FAMILY,
    &phi3::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
    &seed_oss::FAMILY,
    &smollm3::FAMILY,
];

pub(super) fn find(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.model_type == model_type)
}

/// The `model_type`s that are known.
pub(super) fn known() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.model_type).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of `docs/reference/models.md`, whose second column is the `model_type`.
    #[test]
    fn the_page_names_each_family_once_and_no_other() {
        let page = include_str!("../../../docs/reference/models.md");
        let (_, table) = page.split_once("| family | `model_type` |").unwrap();
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let mut named: Vec<&str> = rows.map(|row| row.split('|').nth(2).unwrap().trim().trim_matches('`')).collect();
        let mut known = known();
        named.sort_unstable();
        known.sort_unstable();
        assert_eq!(named, known);
    }
}
