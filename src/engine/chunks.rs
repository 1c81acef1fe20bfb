//! The order of a step: the prefill span in pieces, then chunks; and the cells that they form with the layers.

use std::ops::Range;

use super::RandomSizes;
use crate::cache::ChunkSpan;

/// Chunks of a batch, and their grouping into columns of cells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    /// In the order of writing.
    pub spans: Vec<ChunkSpan>,
    pub columns: Vec<Range<usize>>,
    /// Tokens of the prefill span.
    pub prefill: usize,
    /// How the tokens are cut that come after `spans`.
    cuts: Cuts,
    /// From this position on, tokens are run as they are in decoding.
    singles_from: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ColumnWidth {
    /// At most so many tokens, and at least one chunk.
    Tokens(usize),
    Chunks(usize),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cuts {
    /// Longest prefill span: the slots of the smallest cache.
    pub span: usize,
    /// Tokens of a piece of the prefill span, and of a chunk whose size is not drawn.
    pub chunk_size: usize,
    /// Sizes of the chunks behind the prefill span, where they are drawn.
    pub sizes: Option<RandomSizes>,
    /// Positions at which a layer's cache becomes full, ascending, to which chunks are bent: none goes beyond one, or ends just before.
    pub full_at: Vec<usize>,
    /// From this position on, tokens are run as they are in decoding.
    pub singles_from: Option<usize>,
    /// Tokens of a chunk in decoding; 0 counts as 1.
    pub block: usize,
    /// The slots of the caches, where they share one budget: the first chunk that goes beyond them begins a column.
    pub shared_budget: Option<usize>,
}

/// A chunk that would end so many tokens before a cache is full, or less, ends where it is full.
pub(super) const BENT_BY: usize = 4;

impl Cuts {
    /// Where the chunk that begins at `start`, and has the number `chunk`, ends; `end` is where the last one does.
    pub(super) fn end(&self, start: usize, chunk: usize, end: usize) -> usize {
        let size = self.sizes.as_ref().map_or(self.chunk_size, |sizes| sizes.of_chunk(chunk));
        let straight = start + size.min(end - start);
        let next = self.full_at.iter().copied().find(|&full| full > start && full <= end);
        next.filter(|&full| straight + BENT_BY >= full).unwrap_or(straight)
    }
}

impl ChunkPlan {
    /// Plans sequences of `lengths` tokens. The prefill span, the first `span` tokens, evicts nothing and is chunk 0 whatever its
    /// pieces; after it come chunks of `chunk_size`, and what remains.
    pub fn new(lengths: &[usize], span: usize, chunk_size: usize, width: ColumnWidth) -> Self {
        Self::cut(lengths, &Cuts { span, chunk_size, ..Cuts::default() }, width)
    }

    pub fn cut(lengths: &[usize], cuts: &Cuts, width: ColumnWidth) -> Self {
        let total = lengths.iter().copied().max().unwrap_or(0);
        let mut plan = Self::begun(cuts.clone(), total);
        while let Some(next) = plan.peek(total) {
            // Ended sequences leave; they are the last rows where the longest sequence comes first.
            let active = lengths.iter().rposition(|&t| t > next.start).map_or(0, |last| last + 1);
            let real = lengths[..active].iter().map(|&t| t.saturating_sub(next.start).min(next.len)).collect();
            let (span, at) = (ChunkSpan { real, ..next }, plan.spans.len());
            let is_joined = plan.columns.last().is_some_and(|last| plan.continues(last.start, &span, width));
            match plan.columns.last_mut() {
                Some(last) if is_joined => last.end += 1,
                _ => plan.columns.push(at..at + 1),
            }
            plan.spans.push(span);
        }
        plan
    }

    /// Whether `next` comes into the column that begins with chunk `first`: within its width, with the same sequences, and not as the first chunk
    /// that evicts from caches that share one budget.
    fn continues(&self, first: usize, next: &ChunkSpan, width: ColumnWidth) -> bool {
        let (begin, end) = (&self.spans[first], next.start + next.len);
        let fits = match width {
            ColumnWidth::Tokens(limit) => end - begin.start <= limit,
            ColumnWidth::Chunks(limit) => self.spans.len() - first < limit,
        };
        let is_budget_due = self.cuts.shared_budget.is_some_and(|slots| (next.start..end).contains(&slots));
        fits && begin.num_sequences() == next.num_sequences() && !is_budget_due
    }

    /// The plan of sequences of unknown length, of which nothing has come.
    pub(super) fn arriving(cuts: Cuts) -> Self {
        Self::begun(cuts, usize::MAX)
    }

    /// The plan of sequences of `total` tokens, of which nothing is cut yet.
    fn begun(cuts: Cuts, total: usize) -> Self {
        // The first token has nothing before it: one by one or not, it is a prefill span.
        let singles_from = cuts.singles_from.map_or(total, |from| from.clamp(1, total.max(1)));
        Self { spans: Vec::new(), columns: Vec::new(), prefill: cuts.span.min(singles_from), cuts, singles_from }
    }

    /// Adds the next column of such a width, of the `tokens` further tokens of each of some sequences; as a range of `spans`.
    pub(super) fn extend(&mut self, num_sequences: usize, tokens: usize, width: ColumnWidth) -> Range<usize> {
        let (first, end) = (self.spans.len(), self.len() + tokens);
        while let Some(next) = self.peek(end) {
            let span = ChunkSpan { real: vec![next.len; num_sequences], ..next };
            if self.spans.len() > first && !self.continues(first, &span, width) {
                break;
            }
            self.spans.push(span);
        }
        self.columns.push(first..self.spans.len());
        first..self.spans.len()
    }

    /// Adds a column of the chunk whose tokens come one by one from now on.
    pub(super) fn extend_by_block(&mut self, num_sequences: usize) {
        let next = self.block();
        self.columns.push(self.spans.len()..self.spans.len() + 1);
        self.spans.push(ChunkSpan { real: vec![next.len; num_sequences], ..next });
    }

    /// The plan of sequences that have come as far as `last`.
    pub(super) fn behind(cuts: Cuts, last: ChunkSpan) -> Self {
        Self { spans: vec![last], ..Self::arriving(cuts) }
    }

    /// Forgets the chunks that have come, but for how far they reach.
    pub(super) fn forget(&mut self) {
        self.columns.clear();
        self.spans.drain(..self.spans.len().saturating_sub(1));
    }

    /// The next chunk of the tokens before `end`, before it is known whose tokens are in it; `None` where all are cut.
    fn peek(&self, end: usize) -> Option<ChunkSpan> {
        let next = self.next(0);
        let start = next.start;
        let stop = match start {
            _ if start >= end => return None,
            _ if start < self.prefill => start + self.cuts.chunk_size.min(self.prefill.min(end) - start),
            _ if start < self.singles_from => self.cuts.end(start, next.chunk, self.singles_from.min(end)),
            _ => return Some(self.block()),
        };
        Some(ChunkSpan { len: stop - start, ..next })
    }

    /// The next chunk where tokens come one by one: of how many is known, how many of them will come is not.
    fn block(&self) -> ChunkSpan {
        let (left, block) = (self.prefill.saturating_sub(self.len()), self.cuts.block.max(1));
        let len = if left > 0 { block.min(left) } else { block };
        ChunkSpan { is_block: len > 1, ..self.next(len) }
    }

    /// A chunk of `len` tokens behind all others.
    fn next(&self, len: usize) -> ChunkSpan {
        let (start, last) = (self.len(), self.spans.last());
        let chunk = if start < self.prefill { 0 } else { last.map_or(0, |last| last.chunk) + 1 };
        let index = last.map_or(0, |last| last.index + 1);
        ChunkSpan { index, chunk, start, len, real: Vec::new(), is_block: false }
    }

    /// Tokens of a column: its first position and its length.
    pub fn tokens(&self, column: &Range<usize>) -> (usize, usize) {
        let spans = &self.spans[column.clone()];
        (spans[0].start, spans.iter().map(|s| s.len).sum())
    }

    /// Sequences that are under way in a column.
    pub fn sequences(&self, column: &Range<usize>) -> usize {
        self.spans[column.start].num_sequences()
    }

    /// Tokens that are run, pads among them: those of all sequences, and of each that is not the longest at most the rest of the chunk
    /// in which it ends, where the longest sequences come first.
    pub fn num_tokens_run(&self) -> usize {
        self.spans.iter().map(|span| span.num_sequences() * span.len).sum()
    }

    pub fn num_sequences(&self) -> usize {
        self.spans.first().map_or(0, ChunkSpan::num_sequences)
    }

    pub fn longest_chunk(&self) -> usize {
        self.spans.iter().map(|span| span.len).max().unwrap_or(1)
    }

    /// Number of tokens of the longest sequence; where its last tokens are a block of decoding, with the pads behind them.
    pub fn len(&self) -> usize {
        self.spans.last().map_or(0, |s| s.start + s.len)
    }

    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }
}

/// Layer bands: groups of `layers_per_cell` consecutive layers, bottom first.
pub(super) fn layer_bands(layers: Range<usize>, layers_per_cell: usize) -> Vec<Range<usize>> {
    let end = layers.end;
    layers.step_by(layers_per_cell.max(1)).map(|l| l..l.saturating_add(layers_per_cell.max(1)).min(end)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::StepKey;

    #[test]
    fn the_prefill_span_is_one_chunk_in_pieces() {
        let plan = ChunkPlan::new(&[50, 37], 32, 10, ColumnWidth::Chunks(2));
        let cuts: Vec<_> = plan.spans.iter().map(|s| (s.chunk, s.start, s.len, s.real_of(1))).collect();
        assert_eq!(cuts, [(0, 0, 10, 10), (0, 10, 10, 10), (0, 20, 10, 10), (0, 30, 2, 2), (1, 32, 10, 5), (2, 42, 8, 0)]);
        assert_eq!(plan.columns, [0..2, 2..4, 4..5, 5..6], "who has ended is in no further column");
        assert_eq!(plan.num_tokens_run(), 92);
        assert_eq!(plan.tokens(&plan.columns[1]), (20, 12));
        assert_eq!(layer_bands(0..7, 3), [0..3, 3..6, 6..7]);
    }

    fn lengths_of(cuts: &Cuts, total: usize) -> Vec<usize> {
        ChunkPlan::cut(&[total], cuts, ColumnWidth::Chunks(1)).spans.iter().map(|s| s.len).collect()
    }

    #[test]
    fn a_chunk_is_bent_to_where_a_cache_becomes_full() {
        let cuts = Cuts { span: 24, chunk_size: 8, full_at: vec![24, 32, 44], ..Cuts::default() };
        assert_eq!(lengths_of(&cuts, 60), [8, 8, 8, 8, 12, 8, 8], "44 would have been missed by 4");
        let cuts = Cuts { full_at: vec![24, 45], ..cuts };
        assert_eq!(lengths_of(&cuts, 60), [8, 8, 8, 8, 8, 5, 8, 7]);
        assert_eq!(lengths_of(&cuts, 44), [8, 8, 8, 8, 8, 4], "a cache that does not become full bends nothing");
    }

    #[test]
    fn single_tokens_begin_at_the_first_target() {
        let cuts = Cuts { span: 16, chunk_size: 5, singles_from: Some(24), ..Cuts::default() };
        assert_eq!(lengths_of(&cuts, 27), [5, 5, 5, 1, 5, 3, 1, 1, 1]);
        let plan = ChunkPlan::cut(&[14], &Cuts { singles_from: Some(11), ..cuts.clone() }, ColumnWidth::Chunks(1));
        assert_eq!(
            plan.spans.iter().map(|s| (s.chunk, s.len)).collect::<Vec<_>>(),
            [(0, 5), (0, 5), (0, 1), (1, 1), (2, 1), (3, 1)]
        );
        assert_eq!(plan.prefill, 11, "what is run one by one is scored");
        assert_eq!(lengths_of(&Cuts { singles_from: Some(0), ..cuts }, 3), [1, 1, 1]);
    }

    fn cuts() -> impl Strategy<Value = Cuts> {
        let key = (any::<bool>(), any::<u64>(), 0u64..100)
            .prop_map(|(is_drawn, seed, step)| is_drawn.then_some(StepKey { seed, step }));
        let places = (prop::collection::btree_set(1usize..200, 0..4), proptest::option::of(0usize..300), 0usize..6);
        (1usize..100, 1usize..40, key, places).prop_map(|(span, chunk_size, key, (places, singles_from, block))| {
            let full_at = std::iter::once(span).chain(places.into_iter().map(|more| span + more)).collect();
            let sizes = key.map(|key| RandomSizes::new(key, chunk_size, span));
            Cuts { span, chunk_size, sizes, full_at, singles_from, block, shared_budget: None }
        })
    }

    proptest! {
        #[test]
        fn however_it_is_cut_chunks_cover_the_tokens_once(cuts in cuts(), lengths in prop::collection::vec(1usize..300, 1..4)) {
            let plan = ChunkPlan::cut(&lengths, &cuts, ColumnWidth::Chunks(3));
            let (total, range) = (*lengths.iter().max().unwrap(), RandomSizes::range(cuts.chunk_size, cuts.span));
            let singles_from = cuts.singles_from.map_or(total, |from| from.clamp(1, total));
            let largest = if cuts.sizes.is_some() { *range.end() } else { cuts.chunk_size };
            let mut next = 0;
            for s in &plan.spans {
                let end = s.start + s.len;
                prop_assert!(s.start == next && s.len >= 1);
                next = end;
                prop_assert!((s.chunk == 0) == (s.start < plan.prefill));
                if s.start < plan.prefill {
                    prop_assert!(end <= plan.prefill && s.len <= cuts.chunk_size);
                    continue;
                }
                if s.start >= singles_from {
                    prop_assert_eq!((s.len, s.is_block), (cuts.block.max(1), cuts.block > 1));
                    continue;
                }
                let is_bent = cuts.full_at.contains(&end);
                // No chunk goes beyond the point where a cache is full, or ends just before it, but where another one is full.
                for &full in cuts.full_at.iter().filter(|&&full| full <= singles_from) {
                    prop_assert!(s.start >= full || end <= full, "{:?}: {:?}", cuts, s);
                    prop_assert!(is_bent || end >= full || end + BENT_BY < full, "{:?}: {:?}", cuts, s);
                }
                prop_assert!(s.len <= largest + BENT_BY);
                prop_assert!(is_bent || end == singles_from || s.len <= largest);
                prop_assert!(is_bent || end == singles_from || cuts.sizes.is_none() || range.contains(&s.len));
            }
            prop_assert!(next == total || plan.spans.last().is_some_and(|s| s.is_block && s.start < total && next > total));
            for (sequence, &length) in lengths.iter().enumerate() {
                prop_assert_eq!(plan.spans.iter().map(|s| s.real_of(sequence)).sum::<usize>(), length);
            }
        }

        #[test]
        fn a_batch_costs_its_tokens_and_less_than_a_chunk_for_each_that_ends(
            cuts in cuts(), mut lengths in prop::collection::vec(1usize..300, 1..6),
        ) {
            lengths.sort_unstable_by_key(|&tokens| std::cmp::Reverse(tokens));
            let plan = ChunkPlan::cut(&lengths, &cuts, ColumnWidth::Chunks(3));
            let pads = plan.num_tokens_run() - lengths.iter().sum::<usize>();
            // A block has pads for the longest sequence, too.
            let padded = if plan.spans.last().is_some_and(|s| s.is_block) { lengths.len() } else { lengths.len() - 1 };
            prop_assert!(pads <= padded * (plan.longest_chunk() - 1));
            prop_assert!(plan.columns.iter().all(|c| plan.spans[c.clone()].iter().all(|s| s.num_sequences() == plan.sequences(c))));
        }

        #[test]
        fn a_shorter_row_sees_the_borders_of_a_longer_one(cuts in cuts(), short in 1usize..300, more in 1usize..100) {
            let cuts = Cuts { full_at: Vec::new(), singles_from: None, ..cuts };
            let alone = ChunkPlan::cut(&[short], &cuts, ColumnWidth::Chunks(1));
            let beside = ChunkPlan::cut(&[short, short + more], &cuts, ColumnWidth::Chunks(1));
            // How the prefill span is cut into pieces makes no difference.
            let events = |plan: &ChunkPlan| {
                let behind = plan.spans.iter().filter(|s| s.start >= plan.prefill && s.real[0] > 0);
                behind.map(|s| (s.chunk, s.start, s.real[0])).collect::<Vec<_>>()
            };
            prop_assert_eq!(events(&alone), events(&beside));
        }

        #[test]
        fn chunks_cover_the_tokens_once_and_columns_tile_the_chunks_once(
            lengths in prop::collection::vec(1usize..300, 1..4), span in 1usize..200, chunk in 1usize..40, limit in 1usize..100,
        ) {
            for width in [ColumnWidth::Tokens(limit), ColumnWidth::Chunks(limit)] {
                let plan = ChunkPlan::new(&lengths, span, chunk, width);
                let mut next = 0;
                for s in &plan.spans {
                    prop_assert_eq!(s.start, next);
                    prop_assert!(s.len >= 1 && s.len <= chunk);
                    prop_assert!(s.start >= plan.prefill || s.start + s.len <= plan.prefill);
                    next += s.len;
                }
                prop_assert_eq!(next, *lengths.iter().max().unwrap());
                for (sequence, &length) in lengths.iter().enumerate() {
                    prop_assert_eq!(plan.spans.iter().map(|s| s.real_of(sequence)).sum::<usize>(), length);
                }
                let flat: Vec<usize> = plan.columns.iter().flat_map(Clone::clone).collect();
                prop_assert_eq!(flat, (0..plan.spans.len()).collect::<Vec<_>>());
                if let ColumnWidth::Tokens(limit) = width {
                    prop_assert!(plan.columns.iter().all(|c| c.len() == 1 || plan.tokens(c).1 <= limit));
                }
            }
        }

        #[test]
        fn rows_tile_the_layers_once(layers in 1usize..60, per_cell in 1usize..70) {
            let flat: Vec<usize> = layer_bands(0..layers, per_cell).into_iter().flatten().collect();
            prop_assert_eq!(flat, (0..layers).collect::<Vec<_>>());
        }
    }
}
