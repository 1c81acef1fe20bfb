//! What the cache, the engine and the planner must know of a policy before it scores anything.

use super::Queries;
use crate::ops::attention::ModelFeature;
use crate::recipe::InitialPart;

/// The traits of a policy, with a default for each: `PolicyTraits { sinks: 4, ..PolicyTraits::default() }`. A policy that wraps another
/// one changes what differs: `PolicyTraits { grace: 0, ..inner.traits() }`.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each says yes or no to a question of its own")]
pub struct PolicyTraits<'a> {
    /// Number of youngest tokens that may not leave yet.
    pub grace: usize,
    /// Number of first tokens that never leave.
    pub sinks: usize,
    /// The initial part of a prompt, and how many of its tokens never leave.
    pub initial_part: Option<(&'a InitialPart, usize)>,
    /// The queries of a piece of the prefill span whose attention mass [`Policy::observe`](super::Policy::observe) asks for. It is then
    /// summed while the piece attends, which is faster. A wrong answer costs nothing but time.
    pub prefill_queries: Option<Queries>,
    /// The queries of a chunk after the prefill span that are asked for in this way.
    pub chunk_queries: Option<Queries>,
    /// Whether no entry ever leaves, so that a sequence longer than the cache is an error.
    pub keeps_all: bool,
    /// Whether the choices of one sequence of a batch depend on the others.
    pub couples_sequences: bool,
    /// Whether scores of different heads can be compared when the first entries must leave.
    pub compares_heads: bool,
    /// For a policy that distributes slots over heads by what its scores say.
    pub budgets: Option<BudgetRule>,
    /// How many heads one choice serves at least; the replay log is smaller by as much.
    pub scope: Scope,
    /// The number that the model is to say of each new entry.
    pub model_feature: Option<ModelFeature>,
    /// Whether [`Entries::query_statistics`](super::Entries::query_statistics) is needed, which a model must have.
    pub needs_query_statistics: bool,
    /// Whether the score is about quantisation, so that a plain buffer gives it nothing to go by.
    pub needs_quantised: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BudgetRule {
    /// The part of the cache length that every head keeps.
    pub floor: f64,
    /// Whether the heads of all layers share one budget, rather than those of a layer.
    pub across_layers: bool,
}

impl BudgetRule {
    pub fn least(self, cache_length: usize) -> usize {
        (self.floor * cache_length as f64) as usize
    }
}

/// The heads that one choice serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All sequences and KV heads of a batch.
    Batch,
    /// All KV heads of a sequence.
    Sequence,
    /// One KV head of a sequence.
    #[default]
    Head,
}

impl PolicyTraits<'_> {
    /// The queries whose attention mass is to be summed while a chunk attends. `is_prefill`: the chunk is a piece of the prefill span.
    pub fn required_queries(&self, is_prefill: bool) -> Option<Queries> {
        if is_prefill { self.prefill_queries } else { self.chunk_queries }
    }

    pub fn shares_over_layers(&self) -> bool {
        self.budgets.is_some_and(|rule| rule.across_layers)
    }

    /// The positions, begin and end, that never leave a sequence whose initial part is `initial`.
    pub fn protects(&self, (start, end): (usize, usize)) -> (usize, usize) {
        self.initial_part.map_or((0, 0), |(_, kept)| (start, end.min(start.saturating_add(kept))))
    }

    /// The largest chunk that never evicts itself or a protected token. Where budgets differ by head, the smallest must hold it.
    pub fn max_chunk_size(&self, cache_length: usize) -> usize {
        let slots = self.budgets.map_or(cache_length, |rule| rule.least(cache_length));
        slots.saturating_sub(self.protected())
    }

    /// How many tokens of a sequence may not leave, at most.
    pub fn protected(&self) -> usize {
        let initial_part = self.initial_part.map_or(0, |(_, kept)| kept);
        self.sinks.saturating_add(self.grace).saturating_add(initial_part)
    }
}
