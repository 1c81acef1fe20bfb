//! What a policy gets to see of a layer's cache, and what it says: shares, victims, statistics.

use tch::{Kind, Tensor};

use super::layer::LayerCache;
use super::policy::{Agreement, ChunkAttention, NewEntries, Observed};
use super::{ChunkSpan, Entries, HeadBudgets, Policy, Victims, victims};
use crate::ops::attention::KvBlock;

impl LayerCache {
    /// The budgets that `policy` gives the layer's heads before the next chunk, if it does so by layer and the time has come.
    pub fn allocate(&self, policy: &dyn Policy, span: &ChunkSpan) -> Option<HeadBudgets> {
        let rule = policy.traits().budgets.filter(|rule| !rule.across_layers && self.is_budget_due(span))?;
        Some(HeadBudgets::new(&self.budget_keys(policy, span), span, self.shape.cache_length, rule.floor))
    }

    /// Whether `span` is the first chunk that evicts, before which the heads get their budgets.
    pub fn is_budget_due(&self, span: &ChunkSpan) -> bool {
        self.budget.is_none() && span.evictions(self.filled, self.shape.cache_length) > 0
    }

    /// The order of the entries, which decides the budgets of their heads.
    ///
    /// # Shapes
    /// `(B, G, filled)`, i64.
    pub fn budget_keys(&self, policy: &dyn Policy, span: &ChunkSpan) -> Tensor {
        // Each head has an order of its own, also while all hold the same.
        self.show(span, &Agreement::Nothing, |entries| victims::keys(policy, entries, &policy.score(entries)))
    }

    /// What `policy` evicts for the next chunk; `None` where everything fits.
    pub fn choose_victims(&self, policy: &dyn Policy, span: &ChunkSpan) -> Option<Victims> {
        let is_full = span.evictions(self.filled, self.capacity()) > 0;
        is_full.then(|| self.show(span, &self.agreement, |entries| victims::choose_victims(policy, entries)))
    }

    /// Shows the entries to `look` as they are before `span`.
    fn show<T>(&self, span: &ChunkSpan, agreement: &Agreement, look: impl FnOnce(&Entries<'_>) -> T) -> T {
        let filled = self.filled as i64;
        let (observed_bgc, features_bgcf) = (self.observed(), self.stats.features(self.active, filled));
        look(&Entries {
            capacity: self.capacity(),
            num_evicted: span.evictions(self.filled, self.capacity()),
            prefill: self.prefill,
            next_position: span.start,
            position_bgc: &self.positions(),
            observed_bgc: observed_bgc.as_ref(),
            features_bgcf: features_bgcf.as_ref(),
            query_statistics: self.query_statistics.as_ref(),
            keys: &|| self.keys(),
            agreement,
            initial_parts: &self.initial_parts[..self.initial_parts.len().min(self.active as usize)],
            budget: self.budget.as_ref(),
        })
    }

    /// Lets the policy describe the entries of the chunk written last, and observe its attention.
    ///
    /// # Shapes
    /// By slot of the region, as in [`super::Written`].
    pub fn note(&mut self, policy: &dyn Policy, span: &ChunkSpan, own: &KvBlock, attention: &dyn ChunkAttention) {
        let (region, len) = (self.region(span), span.len as i64);
        let size = self.position_bgc.size();
        let stored = || {
            let KvBlock { k, v, .. } = self.read(region, len);
            (k, v)
        };
        let numbers = own.further.last().filter(|_| policy.traits().model_feature.is_some());
        let model_feature_bgn = numbers.map(|number| number.squeeze_dim(-1).to_kind(Kind::Float));
        let features = policy.describe(&NewEntries { k_bgnd: &own.k, v_bgnd: &own.v, model_feature_bgn, stored: &stored });
        self.stats.set_features(&size, region, &features);
        let filled = self.filled as i64;
        let (previous_bgc, features_bgcf) = (self.observed(), self.stats.features(self.active, filled));
        let observed = policy.observe(&Observed {
            attention,
            position_bgc: &self.positions(),
            previous_bgc: previous_bgc.as_ref(),
            features_bgcf: features_bgcf.as_ref(),
            num_queries: span.len,
            next_position: span.start + span.len,
            is_prefill: span.is_prefill(),
        });
        if let Some(observed) = observed {
            self.stats.set_observed(&size, &observed);
        }
    }
}
