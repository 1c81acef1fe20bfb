//! The longest common subsequence of two sequences of words.

pub(super) fn lcs_length<T: Eq>(rows: &[T], columns: &[T]) -> usize {
    walk(rows, columns, |_, _, _| ())
}

/// Which of the `rows` belong to one of them, the last first; `goes_up` chooses it, from the lengths without the last row and without the
/// last column. In memory for one bit per pair of words.
pub(super) fn lcs_indices<T: Eq>(rows: &[T], columns: &[T], goes_up: fn(usize, usize) -> bool) -> Vec<usize> {
    let mut ups = vec![0_u8; (rows.len() * columns.len()).div_ceil(8)];
    walk(rows, columns, |cell, up, left| ups[cell / 8] |= u8::from(goes_up(up, left)) << (cell % 8));
    let (mut i, mut j) = (rows.len(), columns.len());
    let mut indices = Vec::new();
    while i > 0 && j > 0 {
        let cell = (i - 1) * columns.len() + j - 1;
        if rows[i - 1] == columns[j - 1] {
            (i, j) = (i - 1, j - 1);
            indices.push(i);
        } else if ups[cell / 8] >> (cell % 8) & 1 == 1 {
            i -= 1;
        } else {
            j -= 1;
        }
    }
    indices
}

/// Goes through all pairs, row by row, with the lengths without the last row and without the last column; returns the whole length.
fn walk<T: Eq>(rows: &[T], columns: &[T], mut visit: impl FnMut(usize, usize, usize)) -> usize {
    let mut lengths = vec![0; columns.len() + 1];
    for (i, row) in rows.iter().enumerate() {
        let mut diagonal = 0;
        for (j, column) in columns.iter().enumerate() {
            let (up, left) = (lengths[j + 1], lengths[j]);
            visit(i * columns.len() + j, up, left);
            lengths[j + 1] = if row == column { diagonal + 1 } else { up.max(left) };
            diagonal = up;
        }
    }
    lengths[columns.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_one_it_is_is_chosen() {
        let (rows, columns) = ([1, 2], [2, 1]);
        assert_eq!(lcs_indices(&rows, &columns, |up, left| up >= left), [0]);
        assert_eq!(lcs_indices(&rows, &columns, |up, left| up > left), [1]);
        let (rows, columns) = ([1, 2, 3, 2, 4, 1, 2], [2, 4, 3, 1, 2, 1]);
        assert_eq!((lcs_length(&rows, &columns), lcs_indices(&rows, &columns, |up, left| up > left).len()), (4, 4));
        assert_eq!(lcs_length(&rows, &[]), 0);
    }
}
