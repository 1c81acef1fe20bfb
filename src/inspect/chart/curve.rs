//! Curves over the steps of a run, as SVG.

use super::svg::{Ink, Svg, Words};
use super::ticks::{ends, in_short, range, share, ticks};

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Curve {
    pub(crate) name: String,
    /// In the order of x. Where y is not finite the curve has a gap.
    pub(crate) points: Vec<(f64, f64)>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CurveChart {
    /// What y is, with its unit.
    pub(crate) title: String,
    pub(crate) curves: Vec<Curve>,
    /// Whether y begins at zero, as amounts do.
    pub(crate) is_from_zero: bool,
    /// Whether each point counts for itself, and is drawn as one.
    pub(crate) has_marks: bool,
}

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 52.0;
const TOP: f64 = 40.0;
const RIGHT: f64 = 464.0;
const BOTTOM: f64 = 216.0;
/// Colours of the curves on paper, told apart by who sees few colours too; classes `curve0` and on have others on dark pages.
const COLOURS: [&str; 6] = ["#0969da", "#bc4c00", "#1a7f37", "#8250df", "#9a6700", "#bf3989"];
/// And for each turn through the colours another line.
const DASHES: [&str; 4] = ["", "7 4", "2 4", "9 3 2 3"];
/// A curve of more points than this is drawn thin, and its mean over neighbours over it.
const MANY: usize = 150;
/// Columns of the picture in which a curve of many more points is drawn by its largest and smallest.
const COLUMNS: usize = 400;

impl CurveChart {
    pub(crate) fn to_svg(&self, id: &str) -> String {
        let mut svg = Svg::new(WIDTH, HEIGHT, id, &self.title, &self.in_words());
        svg.text(LEFT - 38.0, 20.0, &self.title, Words::new(14.0, Ink::TEXT));
        let all = || self.curves.iter().flat_map(|curve| &curve.points);
        let points = || all().filter(|p| p.0.is_finite() && p.1.is_finite());
        let Some(y_ends) = range(points().map(|p| p.1), self.is_from_zero) else {
            svg.line(LEFT, BOTTOM, RIGHT, BOTTOM, Ink::GRID);
            svg.text(LEFT.midpoint(RIGHT), TOP.midpoint(BOTTOM), "no figures", Words::new(13.0, Ink::MUTED).centred());
            return svg.finish();
        };
        let x_ends = ends(points().map(|p| p.0));
        let frame = Frame { x_ends, y_ends };
        frame.axes(&mut svg);
        for (index, curve) in self.curves.iter().enumerate() {
            self.draw(&mut svg, &frame, index, &curve.points);
        }
        let gaps = all().filter(|p| !p.1.is_finite()).count();
        if gaps > 0 {
            svg.text(RIGHT, 20.0, &format!("{gaps} not finite"), Words::new(11.0, Ink::MUTED).at_end());
        }
        svg.finish()
    }

    /// What the picture shows, for whoever does not see it.
    fn in_words(&self) -> String {
        let of_curve = |curve: &Curve| {
            let finite = || curve.points.iter().filter(|p| p.1.is_finite());
            let (Some(first), Some(last)) = (finite().next(), finite().next_back()) else {
                return format!("{}: no figures", curve.name);
            };
            let (low, high) = ends(finite().map(|p| p.1));
            let [first_y, last_y, low, high] = [first.1, last.1, low, high].map(|v| in_short(v, (v.abs() * 1e-3).max(1e-9)));
            let (from, to) = (first.0, last.0);
            format!("{}: {first_y} at step {from}, {last_y} at {to}, between {low} and {high}", curve.name)
        };
        self.curves.iter().map(of_curve).collect::<Vec<_>>().join("; ")
    }

    fn draw(&self, svg: &mut Svg, frame: &Frame, index: usize, points: &[(f64, f64)]) {
        let count = points.len();
        for run in points.split(|p| !p.1.is_finite()).filter(|run| !run.is_empty()) {
            if count > MANY {
                frame.path(svg, index, "thin", &thinned(run));
                frame.path(svg, index, "curve", &smoothed(run, (count / 40).max(3)));
            } else {
                frame.path(svg, index, "curve", run);
            }
        }
        // A point alone has no line.
        let marked = |run: &&[(f64, f64)]| (self.has_marks && count <= 60) || run.len() == 1;
        for &(x, y) in points.split(|p| !p.1.is_finite()).filter(marked).flatten() {
            let (x, y) = frame.place(x, y);
            let colour = COLOURS[index % COLOURS.len()];
            svg.element("circle", &format!("cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\" class=\"mark{}\"", index % 6));
        }
    }
}

/// Where numbers are on the picture.
struct Frame {
    x_ends: (f64, f64),
    y_ends: (f64, f64),
}

impl Frame {
    fn place(&self, x: f64, y: f64) -> (f64, f64) {
        (
            LEFT + (RIGHT - LEFT) * share(x, self.x_ends.0, self.x_ends.1),
            BOTTOM - (BOTTOM - TOP) * share(y, self.y_ends.0, self.y_ends.1),
        )
    }

    fn axes(&self, svg: &mut Svg) {
        let rows = ticks(self.y_ends.0, self.y_ends.1, 4);
        let step = rows.windows(2).next().map_or(0.0, |pair| pair[1] - pair[0]);
        for &value in &rows {
            let y = self.place(self.x_ends.0, value).1;
            svg.line(LEFT, y, RIGHT, y, Ink::GRID);
            svg.text(LEFT - 7.0, y + 4.0, &in_short(value, step), Words::new(11.0, Ink::MUTED).at_end());
        }
        let mut columns = ticks(self.x_ends.0, self.x_ends.1, 5);
        // Steps are counted: there are none between them.
        columns.retain(|value| (value - value.round()).abs() < 1e-9);
        if columns.is_empty() {
            columns.push(self.x_ends.0);
        }
        let step = columns.windows(2).next().map_or(1.0, |pair| pair[1] - pair[0]);
        for &value in &columns {
            let x = self.place(value, self.y_ends.0).0;
            svg.line(x, BOTTOM, x, BOTTOM + 4.0, Ink::BORDER);
            svg.text(x, BOTTOM + 17.0, &in_short(value, step), Words::new(11.0, Ink::MUTED).centred());
        }
        svg.line(LEFT, BOTTOM, RIGHT, BOTTOM, Ink::BORDER);
        svg.text(LEFT.midpoint(RIGHT), HEIGHT - 9.0, "step", Words::new(11.0, Ink::MUTED).centred());
    }

    fn path(&self, svg: &mut Svg, index: usize, class: &str, points: &[(f64, f64)]) {
        let at = |&(x, y): &(f64, f64)| {
            let (x, y) = self.place(x, y);
            format!("{x:.1} {y:.1}")
        };
        let path = points.iter().map(at).collect::<Vec<_>>().join("L");
        let width = if class == "thin" { "1\" stroke-opacity=\"0.35" } else { "2" };
        svg.element(
            "path",
            &format!("d=\"M{path}\" fill=\"none\" stroke-width=\"{width}\" stroke-linejoin=\"round\" {}", line(index)),
        );
    }
}

/// The attributes by which a curve is known.
fn line(index: usize) -> String {
    let (colour, dash) = (COLOURS[index % COLOURS.len()], DASHES[index % DASHES.len()]);
    let dash = if dash.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dash}\"") };
    format!("stroke=\"{colour}\" class=\"curve{}\"{dash}", index % COLOURS.len())
}

/// A piece of the line of curve `index`, for a legend in a page.
pub(crate) fn legend_mark(index: usize) -> String {
    let line = line(index);
    format!(
        "<svg width=\"34\" height=\"10\" viewBox=\"0 0 34 10\" aria-hidden=\"true\"><path d=\"M1 5L33 5\" stroke-width=\"2.5\" {line}/></svg>"
    )
}

/// The largest and the smallest of each stretch, where there are many more points than columns.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= 2 * COLUMNS {
        return points.to_vec();
    }
    let mut kept = Vec::with_capacity(2 * COLUMNS + 2);
    for stretch in points.chunks(points.len().div_ceil(COLUMNS)) {
        let by_y = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let mut pair: Vec<(f64, f64)> =
            stretch.iter().min_by(by_y).into_iter().chain(stretch.iter().max_by(by_y)).copied().collect();
        pair.sort_by(|a, b| a.0.total_cmp(&b.0));
        kept.append(&mut pair);
    }
    kept
}

/// Means over `width` neighbours, fewer at the ends, at most one for each column.
fn smoothed(points: &[(f64, f64)], width: usize) -> Vec<(f64, f64)> {
    let mean = |at: usize| {
        // As many on both sides, so that a slope stays where it is.
        let half = (width / 2).min(at).min(points.len() - 1 - at);
        let near = &points[at - half..=at + half];
        (points[at].0, near.iter().map(|p| p.1 / near.len() as f64).sum())
    };
    let stride = points.len().div_ceil(COLUMNS).max(1);
    (0..points.len()).filter(|at| at % stride == 0 || at + 1 == points.len()).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: &[(f64, f64)]) -> CurveChart {
        let curve = Curve { name: "<a>".into(), points: points.to_vec() };
        CurveChart { title: "loss & more".into(), curves: vec![curve], ..CurveChart::default() }
    }

    #[test]
    fn no_point_one_point_and_points_that_are_not_finite_are_drawn_as_they_are() {
        let none = chart(&[]).to_svg("c");
        assert!(none.contains(">no figures</text>") && !none.contains("<path"), "{none}");
        assert!(none.contains("loss &amp; more") && none.contains("&lt;a&gt;: no figures"), "{none}");
        let one = chart(&[(3.0, 2.0)]).to_svg("c");
        assert_eq!(one.matches("<circle").count(), 1, "{one}");
        let gap = chart(&[(1.0, 4.0), (2.0, 3.0), (3.0, f64::NAN), (4.0, 2.0), (5.0, f64::INFINITY)]).to_svg("c");
        assert!(gap.contains("2 not finite") && gap.matches("<circle").count() == 1, "{gap}");
        let widest = chart(&[(1.0, -1e308), (2.0, 1e308)]).to_svg("c");
        for drawn in [none, one, gap, widest] {
            assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        }
    }

    #[test]
    fn many_points_keep_their_extremes_and_their_trend() {
        let points: Vec<(f64, f64)> =
            (0..100_000).map(|i| (f64::from(i), if i == 77_777 { 50.0 } else { f64::from(i % 7) })).collect();
        assert!(thinned(&points).contains(&(77_777.0, 50.0)) && thinned(&points).len() <= 2 * COLUMNS + 2);
        let slope: Vec<(f64, f64)> = (0..200).map(|i| (f64::from(i), f64::from(i))).collect();
        assert!(smoothed(&slope, 21).iter().all(|(x, y)| (x - y).abs() < 1e-9));
        assert!(chart(&points).to_svg("c").len() < 60_000);
    }
}
