//! How many slots the cache of each layer has, and which chunks it can take.

use std::collections::{BTreeMap, BTreeSet};

use super::chunks::BENT_BY;
use super::{Cuts, RandomSizes};
use crate::cache::{Policy, PolicyTraits};
use crate::recipe::Chunking;
use crate::units::Fault;

#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) sequences: usize,
    pub(super) tokens: usize,
    pub(super) longest_chunk: usize,
}

/// Attention runs once for each page, so that pages should not be small.
const CHUNKS_OF_A_PAGE: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slots {
    /// A fixed number, under the recipe's policy.
    Fixed(usize),
    /// One slot for each token of the sequence.
    Growing,
    /// The cache of a sliding window of so many tokens: slots for what the first query of a chunk sees, and for the chunk.
    Window(usize),
}

impl Slots {
    /// How many there are for a sequence of `tokens` in chunks of at most `longest_chunk`.
    pub(super) fn count(self, tokens: usize, longest_chunk: usize) -> usize {
        match self {
            Self::Fixed(slots) => slots.min(tokens),
            Self::Growing => tokens,
            #[cfg(test)]
            Self::Window(window) if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::WindowForgets) => {
                tokens.min(window + longest_chunk - 2)
            }
            Self::Window(window) => tokens.min(window.saturating_add(longest_chunk) - 1),
        }
    }

    /// How many of them are allocated at once: by pages, by chunks, or all.
    pub(super) fn allocated_at_once(self, tokens: usize, longest_chunk: usize, is_paged: bool) -> usize {
        match self {
            Self::Growing => tokens.min(if is_paged { longest_chunk.saturating_mul(CHUNKS_OF_A_PAGE) } else { longest_chunk }),
            _ => self.count(tokens, longest_chunk),
        }
    }

    /// The number of slots where it does not depend on the sequence.
    pub(super) fn fixed(self) -> Option<usize> {
        if let Self::Fixed(slots) = self { Some(slots) } else { None }
    }
}

/// The caches of fixed size, from the bottom: those that policies and chunks must get along with.
#[derive(Debug)]
pub(super) struct FixedCaches<'a> {
    /// Slots of each layer's cache.
    lengths: BTreeMap<usize, usize>,
    policies: &'a [Box<dyn Policy>],
    is_uniform: bool,
    chunking: Chunking,
    randomizes: bool,
}

impl<'a> FixedCaches<'a> {
    pub(super) fn of(slots: &[Slots], policies: &'a [Box<dyn Policy>], chunking: Chunking, randomizes: bool) -> Self {
        let fixed = |(layer, slots): (usize, &Slots)| Some((layer, slots.fixed()?));
        let lengths: BTreeMap<usize, usize> = slots.iter().enumerate().filter_map(fixed).collect();
        let is_uniform = lengths.values().min() == lengths.values().max();
        Self { lengths, policies, is_uniform, chunking, randomizes }
    }

    /// The smallest; `None` where no cache has a fixed size.
    pub(super) fn smallest(&self) -> Option<usize> {
        self.lengths.values().copied().min()
    }

    /// Where chunks are bent to: the lengths at which caches become full.
    pub(super) fn full_at(&self) -> Vec<usize> {
        if self.chunking == Chunking::Plain {
            return Vec::new();
        }
        self.lengths.values().copied().collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The longest chunk that reaches a cache of `slots` while it is full.
    pub(super) fn longest_chunk(&self, chunk_size: usize, slots: usize) -> usize {
        let cuts = Cuts { chunk_size, full_at: self.full_at(), ..Cuts::default() };
        let smallest = self.smallest().unwrap_or(usize::MAX);
        let largest = cuts.full_at.last().copied().unwrap_or(0);
        if self.randomizes {
            let drawn = chunk_size.max(*RandomSizes::range(chunk_size, smallest).end());
            // Where the last cache is full nothing is bent any more, and the first chunk stands before all that are.
            let bent = if slots < largest { (drawn + BENT_BY).min(largest - smallest) } else { 0 };
            return drawn.max(bent);
        }
        let (mut start, mut longest) = (smallest, chunk_size);
        while start < largest {
            // Chunks far from the next full cache have `chunk_size` tokens.
            let full = cuts.full_at.iter().find(|&&full| full > start).map_or(start, |&full| full);
            start += full.saturating_sub(start + chunk_size + BENT_BY + 1) / chunk_size * chunk_size;
            let end = cuts.end(start, 1, usize::MAX);
            if start >= slots {
                longest = longest.max(end - start);
            }
            start = end;
        }
        longest
    }

    /// No chunk may evict itself or a protected token.
    pub(super) fn check(&self, chunk_size: usize) -> Result<(), Fault> {
        if !self.is_uniform && self.lengths.keys().any(|&layer| self.policies[layer].traits().shares_over_layers()) {
            let hint = "give one `kv_cache.cache_length` for all layers, or leave `across_layers` out";
            return Err(Fault::usage("`across_layers` needs caches of one length, and the layers' lengths differ", hint));
        }
        self.check_chunk_size(chunk_size)?;
        self.check_longest_chunk(chunk_size)
    }

    fn evicting(&self) -> impl Iterator<Item = usize> {
        self.lengths.keys().copied().filter(|&layer| !self.policies[layer].traits().keeps_all)
    }

    /// The largest chunk that a layer's cache takes.
    fn allowed(&self, layer: usize) -> usize {
        self.policies[layer].traits().max_chunk_size(self.lengths[&layer])
    }

    fn check_chunk_size(&self, chunk_size: usize) -> Result<(), Fault> {
        let Some(layer) = self.evicting().min_by_key(|&layer| self.allowed(layer)) else { return Ok(()) };
        let (largest, cache_length) = (self.allowed(layer), self.lengths[&layer]);
        if chunk_size <= largest {
            return Ok(());
        }
        let PolicyTraits { sinks, grace, budgets, initial_part, .. } = self.policies[layer].traits();
        let layer = if self.is_uniform { "every layer".to_owned() } else { format!("layer {layer}") };
        let share = budgets.map_or_else(String::new, |rule| format!("a smallest share of {}, ", rule.least(cache_length)));
        let initial = initial_part.filter(|(_, kept)| *kept > 0);
        let initial = initial.map_or_else(String::new, |(_, kept)| format!("{kept} tokens of an initial part, "));
        let floor = if budgets.is_some() { " or the policy's `floor`" } else { "" };
        let hint = match largest {
            0 => format!("raise `kv_cache.cache_length`{floor}, or protect fewer tokens"),
            _ => format!("set `kv_cache.chunk_size = {largest}`, or raise `kv_cache.cache_length`{floor}"),
        };
        let message = format!(
            "`kv_cache.chunk_size` = {chunk_size} is too large for {layer}: with `cache_length` = {cache_length}, {share}{initial}{sinks} \
             first and {grace} youngest tokens that are never evicted, the largest that works is {largest}"
        );
        Err(Fault::usage(message, hint))
    }

    /// Whether chunks of this size, which can be longer than `chunk_size` where they are drawn or bent, fit a layer's cache.
    fn fits(&self, chunk_size: usize, layer: usize) -> bool {
        self.longest_chunk(chunk_size, self.lengths[&layer]) <= self.allowed(layer)
    }

    /// The largest `chunk_size` of at most `most` that fits all caches; 0 where none does.
    fn largest_chunk_size(&self, most: usize) -> usize {
        let most = self.evicting().map(|layer| self.allowed(layer)).fold(most, usize::min);
        let fits = |chunk_size: usize| self.evicting().all(|layer| self.fits(chunk_size, layer));
        (1..=most).rev().find(|&size| fits(size)).unwrap_or(0)
    }

    /// The chunk size for a recipe that has none: the `wanted` one, or where it does not fit about half of what does, so that a chunk
    /// leaves slots to the past.
    pub(super) fn fitting_chunk_size(&self, wanted: usize) -> usize {
        match self.largest_chunk_size(wanted) {
            largest if largest == wanted => largest,
            largest => self.largest_chunk_size(largest.div_ceil(2)).max(1),
        }
    }

    fn check_longest_chunk(&self, chunk_size: usize) -> Result<(), Fault> {
        let Some(layer) = self.evicting().find(|&layer| !self.fits(chunk_size, layer)) else { return Ok(()) };
        let (cache_length, allowed) = (self.lengths[&layer], self.allowed(layer));
        let longest = self.longest_chunk(chunk_size, cache_length);
        let message = format!(
            "`kv_cache.chunk_size` = {chunk_size} makes chunks of up to {longest} tokens, as their sizes vary; layer {layer} with \
             `cache_length` = {cache_length} takes at most {allowed}"
        );
        let hint = match self.largest_chunk_size(chunk_size) {
            0 => "raise `kv_cache.cache_length`, or set `randomize_chunk_sizes = false` and `chunking = \"plain\"`".to_owned(),
            largest => format!("set `kv_cache.chunk_size = {largest}`, or raise `kv_cache.cache_length`"),
        };
        Err(Fault::usage(message, hint))
    }
}

/// The fault of a sequence that is longer than a cache which evicts nothing.
pub(super) fn too_long(tokens: usize, layer: usize, cache_length: usize) -> Fault {
    let cache = format!("the dense cache of layer {layer}: `kv_cache.cache_length` = {cache_length}");
    let hint = format!(
        "set `kv_cache.storage = \"growing\"`, or `kv_cache.cache_length = {tokens}`, or a policy that evicts such as \"h2o\""
    );
    Fault::usage(format!("a sequence of {tokens} tokens does not fit {cache}"), hint)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cache::rolling;
    use crate::engine::{ChunkPlan, ColumnWidth};
    use crate::units::StepKey;

    proptest! {
        /// The bound holds for every plan, and is reached where no size is drawn.
        #[test]
        fn no_chunk_that_reaches_a_full_cache_is_longer_than_was_checked(
            lengths in prop::collection::vec(1usize..60, 1..4), chunk_size in 1usize..20, total in 1usize..120,
            (is_bent, is_drawn, seed) in (any::<bool>(), any::<bool>(), any::<u64>()),
        ) {
            let chunking = if is_bent { Chunking::Reference } else { Chunking::Plain };
            let policies: Vec<Box<dyn Policy>> = lengths.iter().map(|_| rolling()).collect();
            let slots: Vec<Slots> = lengths.iter().map(|&length| Slots::Fixed(length)).collect();
            let caches = FixedCaches::of(&slots, &policies, chunking, is_drawn);
            let span = *lengths.iter().min().unwrap();
            let sizes = is_drawn.then(|| RandomSizes::new(StepKey { seed, step: 1 }, chunk_size, span));
            let cuts = Cuts { span, chunk_size, sizes, full_at: caches.full_at(), ..Cuts::default() };
            let longest_of = |total: usize, cache_length: usize| {
                let spans = ChunkPlan::cut(&[total], &cuts, ColumnWidth::Chunks(1)).spans.into_iter();
                spans.filter(|s| s.start >= cache_length).map(|s| s.len).max().unwrap_or(0)
            };
            for &cache_length in &lengths {
                let longest = caches.longest_chunk(chunk_size, cache_length);
                prop_assert!(longest >= chunk_size && longest_of(total, cache_length) <= longest);
                prop_assert!(is_drawn || longest_of(200, cache_length) == longest);
            }
        }
    }

    #[test]
    fn chunks_of_a_cache_of_any_length_are_not_looked_at_one_by_one() {
        let policies: Vec<Box<dyn Policy>> = (0..2).map(|_| rolling()).collect();
        let slots = [Slots::Fixed(40), Slots::Fixed((1 << 60) + 1)];
        let caches = FixedCaches::of(&slots, &policies, Chunking::Reference, false);
        assert!((8..=8 + BENT_BY).contains(&caches.longest_chunk(8, 40)));
    }
}
