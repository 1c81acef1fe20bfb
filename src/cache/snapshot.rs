//! What a cache holds, as tensors and metadata: to go on from it twice, or on another day.

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::LayerCache;
use super::budget::BudgetState;
use super::buffer::StoredEntries;
use super::policy::Agreement;
use crate::units::{Fault, quoted};

/// What one layer's cache holds; its tensors may lie in the cache's own memory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheSnapshot {
    /// Tensors by name: stored entries `(B, G, filled, width)`, positions and statistics. They are written in a file of their own.
    #[serde(skip)]
    pub tensors: Vec<(String, Tensor)>,
    filled: usize,
    #[serde(rename = "stands")]
    num_chunks: usize,
    prefill: usize,
    agreement: Agreement,
    #[serde(rename = "protected")]
    initial_parts: Vec<(usize, usize)>,
    budget: Option<BudgetState>,
}

const POSITIONS: &str = "positions";
const OBSERVED: &str = "observed";
const FEATURES: &str = "features";
const BEFORE: &str = "positions_before_budget";

impl LayerCache {
    pub fn snapshot(&self) -> CacheSnapshot {
        let (entries, filled) = (self.buffer.stored(self.filled as i64), self.filled as i64);
        let names = self.shape.planes().into_iter().map(|(name, ..)| name);
        let mut tensors: Vec<(String, Tensor)> = names.zip(entries.0).collect();
        let sequences = self.shape.batch;
        let beside = [
            (POSITIONS, Some(self.position_bgc.narrow(2, 0, filled))),
            (OBSERVED, self.stats.observed(sequences, filled)),
            (FEATURES, self.stats.features(sequences, filled)),
            (BEFORE, self.budget.as_ref().map(|budget| budget.before_bgc.shallow_clone())),
        ];
        tensors.extend(beside.into_iter().filter_map(|(name, tensor)| Some((name.to_owned(), tensor?))));
        CacheSnapshot {
            tensors,
            filled: self.filled,
            num_chunks: self.num_chunks,
            prefill: self.prefill,
            agreement: self.agreement.clone(),
            initial_parts: self.initial_parts.iter().map(|part| (part.start, part.end)).collect(),
            budget: self.budget.as_ref().map(|budget| budget.with_positions(budget.before_bgc.shallow_clone())),
        }
    }

    /// Fills an empty cache with copies of what another one holds, of as many sequences, heads and channels, in the same stored form.
    pub fn fill(&mut self, snapshot: &CacheSnapshot) -> Result<(), Fault> {
        let CacheSnapshot { filled, num_chunks, prefill, ref agreement, ref initial_parts, ref budget, .. } = *snapshot;
        self.check_snapshot(snapshot)?;
        let device = self.shape.device;
        let get = |name: &str| snapshot.tensors.iter().find(|(n, _)| n == name).map(|(_, tensor)| tensor.to_device(device));
        let entries = StoredEntries(self.shape.planes().iter().filter_map(|(name, ..)| get(name)).collect());
        self.budget = budget.as_ref().zip(get(BEFORE)).map(|(budget, before)| budget.with_positions(before.copy()));
        self.reserve(filled as i64);
        self.buffer.write(0, &entries);
        if let Some(positions) = get(POSITIONS) {
            self.position_bgc.narrow(2, 0, filled as i64).copy_(&positions);
        }
        let size = &[self.shape.batch, self.shape.groups, self.buffer.slots()];
        if let Some(observed) = get(OBSERVED) {
            self.stats.set_observed(size, &observed);
        }
        if let Some(features) = get(FEATURES) {
            self.stats.set_features(size, 0, &features.unbind(-1));
        }
        self.agreement = match agreement {
            Agreement::All(_) => {
                let first = self.position_bgc.narrow(2, 0, filled as i64).select(0, 0).select(0, 0);
                Agreement::All(Vec::try_from(first).unwrap_or_default())
            }
            other => other.clone(),
        };
        (self.filled, self.num_chunks, self.prefill) = (filled, num_chunks, prefill);
        self.initial_parts = initial_parts.iter().map(|&(start, end)| start..end).collect();
        self.offload();
        Ok(())
    }

    fn check_snapshot(&self, snapshot: &CacheSnapshot) -> Result<(), Fault> {
        let filled = snapshot.filled as i64;
        let (b, g) = (self.shape.batch, self.shape.groups);
        let misfit = |tensor: &str, expected: &str, found: &str| {
            let (layer, tensor, found) = (self.layer, quoted(tensor), quoted(found));
            let what = format!("layer {layer}: `{tensor}` of a saved cache does not fit");
            let hint = "read the document again with this model and these settings of the cache";
            Fault::data(format!("{what}: expected {expected}, found {found}"), hint)
        };
        let mut expected = vec![(POSITIONS.to_owned(), vec![b, g, filled], Kind::Int64)];
        expected.extend(self.shape.planes().into_iter().map(|(name, width, kind)| (name, vec![b, g, filled, width], kind)));
        if let Some(budget) = &snapshot.budget {
            expected.push((BEFORE.to_owned(), vec![b, g, budget.filled_before as i64], Kind::Int64));
        }
        for (name, tensor) in snapshot.tensors.iter().filter(|(name, _)| [OBSERVED, FEATURES].contains(&name.as_str())) {
            let features = (name == FEATURES).then(|| tensor.size().last().copied().unwrap_or_default());
            expected.push((name.clone(), [b, g, filled].into_iter().chain(features).collect(), Kind::Float));
        }
        for (name, size, kind) in expected {
            let found = snapshot.tensors.iter().find(|(n, _)| *n == name).map(|(_, tensor)| (tensor.size(), tensor.kind()));
            if found.as_ref() != Some(&(size.clone(), kind)) {
                let found = found.map_or("nothing".to_owned(), |(size, kind)| format!("{size:?} {kind:?}"));
                let expected = format!("{size:?} {kind:?}");
                return Err(misfit(&name, &expected, &found));
            }
        }
        if snapshot.budget.is_none() && snapshot.filled > self.shape.cache_length {
            let (expected, found) = (format!("at most {} entries", self.shape.cache_length), format!("{filled}"));
            return Err(misfit(POSITIONS, &expected, &found));
        }
        Ok(())
    }

    /// Whether it would stand as if no more than `tokens` tokens had come, were it to forget the others: no entry has left it, and the policy has
    /// not seen what attention they got since.
    pub fn can_crop(&self, tokens: usize) -> bool {
        let written = match &self.agreement {
            Agreement::All(positions) => positions.iter().zip(0..).all(|(&position, slot)| position == slot),
            Agreement::Heads | Agreement::Nothing => false,
        };
        written && tokens <= self.filled && self.budget.is_none() && self.observed().is_none()
    }

    /// Goes back to where it held the entries before position `tokens`, and no others, where it [can](Self::can_crop).
    pub fn crop(&mut self, tokens: usize) {
        self.filled = tokens;
        if let Agreement::All(positions) = &mut self.agreement {
            positions.truncate(tokens);
        }
    }

    /// Another cache that holds the same, in memory of its own.
    pub fn fork(&self) -> Result<Self, Fault> {
        let mut fork = Self::new(self.layer, self.shape, self.prefill);
        fork.query_statistics.clone_from(&self.query_statistics);
        // The next tokens shall not have all copied once more. What has gone back has more room than it needs.
        let next = (self.filled + 1).min(self.capacity()) as i64;
        let [compact, as_here] = [self.filled as i64, self.buffer.slots()].map(|have| self.shape.grown(have, next));
        fork.reserve(compact.min(as_here));
        fork.fill(&self.snapshot())?;
        fork.active = self.active;
        Ok(fork)
    }
}
