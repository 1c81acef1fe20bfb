//! A curve in a terminal, in Braille's dots: two across and four down in each character.

use super::ticks::{ends, in_short, share};

/// The curve through `points` in `columns` × `lines` characters beside its axis, with the ends of both axes; nothing where no point is finite.
pub fn in_terminal(points: &[(f64, f64)], columns: usize, lines: usize) -> Option<String> {
    let points: Vec<(f64, f64)> = points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
    let ((left, right), (bottom, top)) = (ends(points.iter().map(|p| p.0)), ends(points.iter().map(|p| p.1)));
    if points.is_empty() || columns == 0 || lines == 0 {
        return None;
    }
    let (width, height) = (2 * columns, 4 * lines);
    let mut dots = vec![0u8; columns * lines];
    let scaled = |v: f64, ends: (f64, f64), size: usize| share(v, ends.0, ends.1) * (size - 1) as f64;
    let place = |&(x, y): &(f64, f64)| (scaled(x, (left, right), width), scaled(y, (bottom, top), height));
    let mut from = place(&points[0]);
    for to in points.iter().map(place) {
        let steps = (to.0 - from.0).abs().max((to.1 - from.1).abs()).ceil().max(1.0) as usize;
        for i in 0..=steps {
            let part = i as f64 / steps as f64;
            let x = (from.0 + part * (to.0 - from.0)).round() as usize;
            let y = height - 1 - (from.1 + part * (to.1 - from.1)).round() as usize;
            // The bits of a cell's dots, column by column; the last row came to Braille later.
            dots[y / 4 * columns + x / 2] |= [[1, 2, 4, 64], [8, 16, 32, 128]][x % 2][y % 4];
        }
        from = to;
    }
    let step = ((top - bottom) / lines as f64).max(1e-4 * top.abs()).max(1e-12);
    let labels = [in_short(top, step), in_short(bottom, step)];
    let margin = labels.iter().map(String::len).max().unwrap_or(0);
    let row = |(line, cells): (usize, &[u8])| {
        let label = match line {
            0 => labels[0].as_str(),
            last if last + 1 == lines => &labels[1],
            _ => "",
        };
        let curve: String = cells.iter().filter_map(|&bits| char::from_u32(0x2800 + u32::from(bits))).collect();
        format!("{label:>margin$} ┤{}\n", curve.trim_end_matches('\u{2800}'))
    };
    let out = dots.chunks(columns).enumerate().map(row).collect::<Vec<_>>().concat();
    let (left, right) = (in_short(left, 1.0), in_short(right, 1.0));
    let room = columns.saturating_sub(left.len());
    Some(format!("{out}{:>margin$} └{}\n{:>margin$}  {left}{right:>room$}", "", "─".repeat(columns), ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_falling_curve_falls() {
        let points: Vec<(f64, f64)> = (0..=40).map(|i| (f64::from(i), f64::from(40 - i) / 10.0)).collect();
        let expected = "4 ┤⠑⢄\n  ┤⠀⠀⠑⢆\n0 ┤⠀⠀⠀⠀⠑⢄\n  └──────\n   0   40";
        let drawn = in_terminal(&points, 6, 3).unwrap();
        assert_eq!(drawn, expected);
    }

    #[test]
    fn one_point_is_a_dot_and_none_is_nothing() {
        assert_eq!(in_terminal(&[], 10, 3), None);
        assert_eq!(in_terminal(&[(1.0, f64::NAN)], 10, 3), None);
        let drawn = in_terminal(&[(1.0, 2.5), (2.0, f64::INFINITY)], 10, 3).unwrap();
        let dots = drawn.chars().filter(|c| ('\u{2801}'..='\u{28ff}').contains(c)).count();
        assert_eq!(dots, 1, "{drawn}");
    }
}
