//! What differs between model families, and only that: those that descend from one another in one file, each with a line in [`FAMILIES`].

mod family;
mod gemma;
mod glm4_moe;
mod gpt_oss;
mod layers;
mod llama;
mod mistral;
mod olmo;
mod phi3;
mod qwen;
mod rope;
mod wrapper;

pub(super) use family::Family;
pub(super) use layers::{MAX_HIDDEN, dropouts, layers};
pub(super) use rope::{FULL, ORIGINAL, SLIDING, TABLES, is_longrope, max_positions};
pub(super) use wrapper::{is_wrapped, own_name, unwrapped};

pub(super) const FAMILIES: &[&Family] = &[
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &glm4_moe::FAMILY,
    &gpt_oss::FAMILY,
    &llama::GRANITE,
    &llama::LLAMA,
    &mistral::MINISTRAL3,
    &mistral::MISTRAL,
    &mistral::MIXTRAL,
    &olmo::OLMO2,
    &olmo::OLMO3,
    &phi3::FAMILY,
    &qwen::QWEN2,
    &qwen::QWEN3,
    &qwen::QWEN3_MOE,
    &llama::SEED_OSS,
    &llama::SMOLLM3,
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
