//! What a policy is: a score for every entry; the lowest leave the cache.

use std::fmt::Debug;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::Queries;
use super::budget::BudgetState;
use crate::ops::attention::ModelFeature;
use crate::ops::query_statistics::QueryStatistics;
use crate::recipe::InitialPart;

/// Which slots hold the same position.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Agreement {
    /// All sequences and heads agree, and the host knows which positions they hold. They are not written: a saved cache has them as a tensor.
    All(#[serde(skip)] Vec<i64>),
    Heads,
    Nothing,
}

/// What a policy may look at when it scores the entries of one layer.
pub struct Entries<'a> {
    /// Slots of a head's buffer: the cache length, or the largest share once budgets are in force.
    pub capacity: usize,
    pub num_evicted: usize,
    /// Tokens of the prefill span.
    pub prefill: usize,
    /// Position of the next token, which is the number of tokens seen.
    pub next_position: usize,
    /// Position of each entry `(B, G, filled)`, i64; −1 where a sequence has none.
    pub position_bgc: &'a Tensor,
    /// What [`Policy::observe`] made of the attention so far `(B, G, filled)`, f32; `None` until it has made something.
    pub observed_bgc: Option<&'a Tensor>,
    /// What [`Policy::describe`] said of each entry `(B, G, filled, F)`, f32.
    pub features_bgcf: Option<&'a Tensor>,
    /// Statistics of the layer's queries, where [`PolicyTraits::needs_query_statistics`] asks for it.
    pub query_statistics: Option<&'a QueryStatistics>,
    pub(super) keys: &'a dyn Fn() -> Tensor,
    pub(super) agreement: &'a Agreement,
    /// The positions of each sequence's initial part that stay, or nothing.
    pub(super) initial_parts: &'a [Range<usize>],
    pub(super) budget: Option<&'a BudgetState>,
}

impl Entries<'_> {
    /// The keys as later chunks see them `(B, G, filled, D)`: turned to their positions, and restored where the buffer is quantised.
    pub fn keys(&self) -> Tensor {
        (self.keys)()
    }

    /// Feature `index` of each entry `(B, G, filled)`.
    pub fn feature(&self, index: i64) -> Option<Tensor> {
        self.features_bgcf.map(|f| f.select(3, index))
    }
}

#[derive(Debug)]
pub enum EvictionOrder {
    /// Smallest positions first, the same for all sequences and heads. The `keep_first` first tokens follow last, from the youngest of
    /// them down. It is an order, not a set: a sequence that ends in the chunk evicts fewer, and must lose what it would lose alone.
    ByPosition {
        /// Tokens at the start of the sequence that stay as long as others can leave.
        keep_first: usize,
    },
    /// Lowest score first, ties by smaller position; `(B, G, filled)` in f32, or `(B, 1, filled)` for all heads of a layer. NaN
    /// ranks as the largest.
    ByEntry(Tensor),
}

impl EvictionOrder {
    /// Orders by a score, or by position while there is none.
    pub fn by_score(score: Option<Tensor>) -> Self {
        score.map_or(Self::ByPosition { keep_first: 0 }, Self::ByEntry)
    }
}

/// The entries that a chunk just wrote, as a policy may describe them.
pub struct NewEntries<'a> {
    /// Keys `(B, G, n, D)`, exact.
    pub k_bgnd: &'a Tensor,
    /// Values `(B, G, n, D)`, exact.
    pub v_bgnd: &'a Tensor,
    /// What the model says of them `(B, G, n)`, f32, where [`PolicyTraits::model_feature`] asks for it.
    pub model_feature_bgn: Option<Tensor>,
    pub(super) stored: &'a dyn Fn() -> (Tensor, Tensor),
}

impl NewEntries<'_> {
    /// Keys and values as later chunks will see them: restored where the buffer is quantised.
    pub fn stored(&self) -> (Tensor, Tensor) {
        (self.stored)()
    }
}

/// The attention of the chunk that was written last. Nothing is computed until a policy asks, except the attention mass of the queries
/// that [`PolicyTraits::required_queries`] names.
pub trait ChunkAttention {
    /// The attention mass that each entry `(B, G, filled)` has received from queries of the chunk: the sum of their attention
    /// probabilities, as the mean over the query heads of a KV head. The queries of pads do not count.
    fn mass(&self, queries: Queries) -> Tensor;

    /// The attention weights of the chunk's last `w` queries, `(B, H, w, filled)`, by query head and query; zero for pads. The whole matrix is
    /// made: for few queries.
    fn weights(&self, last: usize) -> Tensor;

    /// The chunk's queries `(B, H, n, D)`, turned to their positions, and the factor on `q · k`. A layer may cap its scores softly: who
    /// makes scores from these makes them without that, which leaves the order of one query's keys as it is.
    fn queries(&self) -> (Tensor, f64);

    /// Keys and values of all entries `(B, G, filled, D)`, as the chunk saw them.
    fn entries(&self) -> (Tensor, Tensor);
}

/// What a policy may look at when a chunk has attended.
pub struct Observed<'a> {
    pub attention: &'a dyn ChunkAttention,
    /// Position of each entry `(B, G, filled)`, i64; −1 where a sequence has none.
    pub position_bgc: &'a Tensor,
    /// What earlier observations made `(B, G, filled)`, f32; zero for new entries.
    pub previous_bgc: Option<&'a Tensor>,
    /// What [`Policy::describe`] said of each entry `(B, G, filled, F)`, f32.
    pub features_bgcf: Option<&'a Tensor>,
    pub num_queries: usize,
    /// Position of the next token, which is the number of tokens seen, those of the chunk among them.
    pub next_position: usize,
    pub is_prefill: bool,
}

impl Observed<'_> {
    /// Feature `index` of each entry `(B, G, filled)`.
    pub fn feature(&self, index: i64) -> Option<Tensor> {
        self.features_bgcf.map(|f| f.select(3, index))
    }

    pub fn plus(&self, more: Tensor) -> Tensor {
        if let Some(previous) = self.previous_bgc { previous + more } else { more }
    }
}

/// Orders the entries, of which the cache picks those that leave. A further policy is one file with this trait, and a line in the registry.
///
/// All it knows of an entry lies in the cache and moves with it: a policy has parameters, and no state.
pub trait Policy: Debug + Send {
    /// The order in which the entries of a layer leave; by default, what [`Self::observe`] has made of the attention is the score.
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        EvictionOrder::by_score(entries.observed_bgc.map(Tensor::shallow_clone))
    }

    /// What must be known of the policy before it scores anything.
    fn traits(&self) -> PolicyTraits<'_>;

    /// Numbers that stay with each entry of a chunk from its writing on: one tensor `(B, G, n)` per feature. By default, what the model says.
    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        new.model_feature_bgn.iter().map(Tensor::shallow_clone).collect()
    }

    /// What is to be remembered after a chunk has attended, `(B, G, filled)`; `None` leaves what was.
    fn observe(&self, _seen: &Observed<'_>) -> Option<Tensor> {
        None
    }
}

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
    /// The queries of a piece of the prefill span whose attention mass [`Policy::observe`] asks for. It is then
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
    /// Whether [`Entries::query_statistics`] is needed, which a model must have.
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

    /// The positions of a sequence's initial part that never leave.
    pub fn kept_of(&self, part: Range<usize>) -> Range<usize> {
        self.initial_part.map_or(0..0, |(_, kept)| part.start..part.end.min(part.start.saturating_add(kept)))
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
