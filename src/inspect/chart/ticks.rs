//! Round numbers on an axis, and how they are written.

/// About `wanted` multiples of 1, 2 or 5 times a power of ten, from `low` to `high`; none where these are not finite or the wrong way round.
pub(super) fn ticks(low: f64, high: f64, wanted: usize) -> Vec<f64> {
    let span = high - low;
    if !span.is_finite() || span <= 0.0 {
        return Vec::new();
    }
    let rough = span / wanted.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|part| part * power).find(|step| *step >= rough).unwrap_or(rough);
    let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    // Where numbers are so large that their steps are lost in rounding, no more than were asked for.
    (0..=((last - first) as usize).min(4 * wanted)).map(|i| (first + i as f64) * step).collect()
}

/// The lowest and the highest of `values`; infinities, the lower one above, where there are none.
pub(super) fn ends(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
}

/// The ends of an axis that shows all of `values`, which are finite: half a tenth beyond them, or from zero; `None` where there are none.
pub(super) fn range(values: impl Iterator<Item = f64>, is_from_zero: bool) -> Option<(f64, f64)> {
    let (low, high) = ends(values);
    if low > high {
        return None;
    }
    let (low, high) = if is_from_zero { (low.min(0.0), high) } else { (low, high) };
    // Of a constant the axis shows a little on both sides. By halves: the span of the largest numbers is no number.
    let half = high / 2.0 - low / 2.0;
    let half = if half > f64::EPSILON * high.abs() { half } else { (0.05 * high.abs()).max(5e-10) };
    let margin = 0.1 * half;
    let below = if is_from_zero && low >= 0.0 { 0.0 } else { (low - margin).max(f64::MIN) };
    Some((below, (high + margin).min(f64::MAX)))
}

/// Where `value` lies between the ends of an axis, from 0 to 1; in the middle of one that has no length.
pub(super) fn share(value: f64, low: f64, high: f64) -> f64 {
    if high > low { (value / 2.0 - low / 2.0) / (high / 2.0 - low / 2.0) } else { 0.5 }
}

/// A number as short as it can be told from its neighbours `step` away: `2.5`, `12k`, `3e-5`.
pub(super) fn in_short(value: f64, step: f64) -> String {
    let (size, step) = (value.abs(), step.abs());
    if value == 0.0 {
        return "0".to_owned();
    }
    if step < 1e-3 || size >= 1e12 {
        // As many digits as the step has more of.
        let digits = (size.log10().floor() - step.log10().floor()).clamp(0.0, 6.0) as usize;
        return format!("{value:.digits$e}");
    }
    for (unit, name) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if size >= 10.0 * unit || (size >= unit && (step >= unit || unit > 1e3)) {
            return format!("{}{name}", plain(value / unit, step / unit));
        }
    }
    plain(value, step)
}

fn plain(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).clamp(0.0, 6.0) as usize;
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers() {
        assert_eq!(ticks(0.0, 10.0, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(7.67, 8.4, 4), [7.8, 8.0, 8.2, 8.4].map(|v: f64| (v * 5.0).round() * 0.2));
        assert!(ticks(1.0, 1.0, 4).is_empty() && ticks(f64::NAN, 1.0, 4).is_empty());
        assert!(ticks(1e17, 1e17 + 32.0, 4).len() < 20);
        assert_eq!(range([2.0, 4.0].into_iter(), false), Some((1.9, 4.1)));
        assert_eq!(range([2.0, 4.0].into_iter(), true), Some((0.0, 4.2)));
        assert_eq!(range([].into_iter(), true), None);
        let (low, high) = range([3.0].into_iter(), false).unwrap();
        assert!(low < 3.0 && high > 3.0);
        let widest = range([f64::MIN, f64::MAX].into_iter(), false).unwrap();
        assert_eq!([f64::MIN, 0.0, f64::MAX].map(|value| (2.0 * share(value, widest.0, widest.1)).round() as i64), [0, 1, 2]);
    }

    #[test]
    fn numbers_are_short() {
        let written =
            [(0.0, 1.0), (8.0, 0.2), (0.0005, 0.0005), (2400.0, 200.0), (12_000.0, 2000.0), (2e6, 5e5), (1500.0, 500.0)];
        let written: Vec<String> = written.into_iter().map(|(value, step)| in_short(value, step)).collect();
        assert_eq!(written, ["0", "8.0", "5e-4", "2400", "12k", "2.0M", "1500"]);
    }
}
