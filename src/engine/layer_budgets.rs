//! One budget of slots over the heads of all layers. A column goes through one layer after the other, so nobody sees two layers at once, but
//! between two columns all caches stand after the same chunk: the first chunk that evicts begins a column, and before it the entries of
//! all layers are compared.

use super::layer_state::SharedLayer;
use crate::cache::{ChunkSpan, HeadBudgets, Policy};
use crate::native::locked;

/// Writes the budgets of every layer's heads into its log, where policies share one over all layers and `span`, which begins a column, is
/// the first chunk that evicts.
pub(super) fn allocate_across_layers(layers: &[SharedLayer], policies: &[Box<dyn Policy>], span: &ChunkSpan) {
    let (mut due, mut keys, mut common) = (Vec::new(), Vec::new(), None);
    for (layer, policy) in layers.iter().zip(policies) {
        let Some(rule) = policy.traits().budgets.filter(|rule| rule.across_layers) else { continue };
        let mut state = locked(layer);
        if !state.cache.is_budget_due(span) {
            continue;
        }
        state.cache.prefetch();
        state.cache.enter(span);
        keys.push(state.cache.budget_keys(&**policy, span).to_device(tch::Device::Cpu));
        due.push(layer);
        common = Some((state.cache.shape().cache_length, rule.floor));
        state.cache.offload();
    }
    let Some((cache_length, floor)) = common else { return };
    for (layer, budgets) in due.into_iter().zip(HeadBudgets::across_layers(&keys, span, cache_length, floor)) {
        locked(layer).log.record_budgets(budgets);
    }
}
