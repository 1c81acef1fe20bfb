//! The order of a step: the prefill span in pieces, then chunks; and the cells that they form with the layers.

use std::ops::Range;

use crate::cache::ChunkSpan;
use crate::units::ChunkIdx;

/// Chunks of a batch, and their grouping into columns of cells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    /// Chunks in the order of writing.
    pub spans: Vec<ChunkSpan>,
    /// Columns, as ranges of `spans`.
    pub columns: Vec<Range<usize>>,
    /// Length of the prefill span.
    pub prefill: usize,
}

/// How columns are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ColumnWidth {
    /// At most so many tokens, and at least one chunk.
    Tokens(usize),
    /// So many chunks.
    Chunks(usize),
}

impl ChunkPlan {
    /// Plans rows of `lengths` tokens. The prefill span, the first `span` tokens, evicts nothing and is chunk 0 whatever its
    /// pieces; after it come chunks of `chunk_size`, and what remains.
    pub fn new(lengths: &[usize], span: usize, chunk_size: usize, width: ColumnWidth) -> Self {
        let total = lengths.iter().copied().max().unwrap_or(0);
        let prefill = span.min(total);
        let mut spans: Vec<ChunkSpan> = Vec::new();
        let mut start = 0;
        while start < total {
            let border = if start < prefill { prefill } else { total };
            let len = chunk_size.min(border - start);
            let chunk = if start < prefill { ChunkIdx(0) } else { ChunkIdx(spans.last().map_or(0, |s| s.chunk.0) + 1) };
            let real = lengths.iter().map(|&t| t.saturating_sub(start).min(len)).collect();
            spans.push(ChunkSpan { index: spans.len(), chunk, start, len, real });
            start += len;
        }
        let columns = columns(&spans, width);
        Self { spans, columns, prefill }
    }

    /// Tokens of a column: its first position and its length.
    pub fn tokens(&self, column: &Range<usize>) -> (usize, usize) {
        let spans = &self.spans[column.clone()];
        (spans[0].start, spans.iter().map(|s| s.len).sum())
    }

    /// Number of tokens of the longest row.
    pub fn len(&self) -> usize {
        self.spans.last().map_or(0, |s| s.start + s.len)
    }

    /// Whether there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }
}

/// Consecutive chunks are joined as long as the column does not grow past its width.
fn columns(spans: &[ChunkSpan], width: ColumnWidth) -> Vec<Range<usize>> {
    let mut columns: Vec<Range<usize>> = Vec::new();
    let mut tokens = 0;
    for span in spans {
        let fits = columns.last().is_some_and(|c| match width {
            ColumnWidth::Tokens(limit) => tokens + span.len <= limit,
            ColumnWidth::Chunks(limit) => c.len() < limit,
        });
        match columns.last_mut() {
            Some(last) if fits => {
                last.end += 1;
                tokens += span.len;
            }
            _ => {
                columns.push(span.index..span.index + 1);
                tokens = span.len;
            }
        }
    }
    columns
}

/// Rows of cells: groups of `layers_per_cell` consecutive layers, bottom first.
pub(super) fn rows(num_layers: usize, layers_per_cell: usize) -> Vec<Range<usize>> {
    (0..num_layers).step_by(layers_per_cell.max(1)).map(|l| l..(l + layers_per_cell.max(1)).min(num_layers)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_prefill_span_is_one_chunk_in_pieces() {
        let plan = ChunkPlan::new(&[50, 37], 32, 10, ColumnWidth::Chunks(2));
        let cuts: Vec<_> = plan.spans.iter().map(|s| (s.chunk.0, s.start, s.len, s.real[1])).collect();
        assert_eq!(cuts, [(0, 0, 10, 10), (0, 10, 10, 10), (0, 20, 10, 10), (0, 30, 2, 2), (1, 32, 10, 5), (2, 42, 8, 0)]);
        assert_eq!(plan.columns, [0..2, 2..4, 4..6]);
        assert_eq!(plan.tokens(&plan.columns[1]), (20, 12));
        assert_eq!(rows(7, 3), [0..3, 3..6, 6..7]);
    }

    proptest! {
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
                for (row, &length) in lengths.iter().enumerate() {
                    prop_assert_eq!(plan.spans.iter().map(|s| s.real[row]).sum::<usize>(), length);
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
            let flat: Vec<usize> = rows(layers, per_cell).into_iter().flatten().collect();
            prop_assert_eq!(flat, (0..layers).collect::<Vec<_>>());
        }
    }
}
