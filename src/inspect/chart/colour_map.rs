//! A map of coloured cells: a row for each of several things, in groups, over a common axis, as SVG.

use std::collections::BTreeMap;

use super::svg::{Ink, Rgb, Svg, Words, fill};
use super::ticks::{in_short, ticks};

#[derive(Clone, Debug, PartialEq)]
pub struct ColourRow {
    /// What stands beside the rows of a group: neighbours with the same words.
    pub group: String,
    pub name: String,
    /// Every row has as many; `None` where there is nothing.
    pub cells: Vec<Option<Rgb>>,
}

/// Colours of the legend, and what stands beside them.
#[derive(Clone, Debug, PartialEq)]
pub struct ColourScale {
    /// One colour, or those from one end of a scale to the other.
    pub colours: Vec<Rgb>,
    pub words: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ColourMap {
    pub title: String,
    pub notes: Vec<String>,
    /// What x is, and where it ends; it begins at 0.
    pub x: (String, usize),
    pub rows: Vec<ColourRow>,
    pub scales: Vec<ColourScale>,
}

/// The widest plot, in pixels; a map has no more cells in a row.
pub const MAX_CELLS: usize = 960;
const MIN_PLOT_WIDTH: usize = 480;
const LEFT: f64 = 190.0;
/// Neighbouring labels stand so far apart at least.
const LABEL_GAP: usize = 14;

struct MapLayout {
    cell: usize,
    row: usize,
    tops: Vec<usize>,
    /// Width of all cells of a row, and height of all rows.
    plot: (usize, usize),
    top: f64,
    size: (f64, f64),
}

impl ColourMap {
    /// Draws it as SVG; `id` is its own within a page.
    pub fn to_svg(&self, id: &str) -> String {
        let layout = self.layout();
        let (width, height) = layout.size;
        let mut svg = Svg::new(width, height, id, &self.title, &self.in_words());
        svg.paper(width, height);
        svg.text(18.0, 28.0, &self.title, Words::new(16.0, Ink::TEXT));
        for (index, note) in self.notes.iter().enumerate() {
            svg.text(18.0, 48.0 + 17.0 * index as f64, note, Words::new(12.0, Ink::MUTED));
        }
        svg.tiles(LEFT, layout.top, &self.tiles(&layout));
        self.label_rows(&mut svg, &layout);
        self.label_axis(&mut svg, &layout);
        let mut y = layout.top + layout.plot.1 as f64 + 66.0;
        for scale in &self.scales {
            let each = if scale.colours.len() > 1 { (160 / scale.colours.len()).max(1) } else { 24 };
            let mut swatch = BTreeMap::new();
            for (index, &colour) in scale.colours.iter().enumerate() {
                fill(&mut swatch, index * each, 0, each, 12, colour);
            }
            svg.tiles(LEFT, y - 10.0, &swatch);
            let end = LEFT + (each * scale.colours.len()) as f64;
            svg.text(end + 10.0, y, &scale.words, Words::new(12.0, Ink::TEXT));
            y += 22.0;
        }
        svg.finish()
    }

    fn in_words(&self) -> String {
        let (notes, rows, groups, (name, end)) = (self.notes.join("; "), self.rows.len(), self.groups().count(), &self.x);
        let meanings: Vec<&str> = self.scales.iter().map(|scale| scale.words.as_str()).collect();
        format!("{notes}; {rows} rows in {groups} groups over {end} of {name}; {}", meanings.join("; "))
    }

    fn layout(&self) -> MapLayout {
        let cells = self.rows.iter().map(|row| row.cells.len()).max().unwrap_or(0).max(1);
        let (cell, count, groups) = ((MAX_CELLS / cells).max(1), self.rows.len().max(1), self.groups().count());
        let row = (560 / count).clamp(2, 20);
        let gap = if groups == count { 0 } else { (row / 3).clamp(1, 4) };
        let (mut tops, mut y) = (Vec::with_capacity(count), 0);
        for (index, own) in self.rows.iter().enumerate() {
            y += if index > 0 && self.rows[index - 1].group != own.group { gap } else { 0 };
            tops.push(y);
            y += row;
        }
        let (plot, top) = ((cell * cells, y.max(row)), 52.0 + 17.0 * self.notes.len() as f64);
        let width = LEFT + plot.0.max(MIN_PLOT_WIDTH) as f64 + 28.0;
        let height = top + plot.1 as f64 + 66.0 + 22.0 * self.scales.len() as f64;
        MapLayout { cell, row, tops, plot, top, size: (width, height) }
    }

    fn groups(&self) -> impl Iterator<Item = &[ColourRow]> {
        self.rows.chunk_by(|a, b| a.group == b.group)
    }

    fn tiles(&self, layout: &MapLayout) -> BTreeMap<Rgb, String> {
        let mut tiles = BTreeMap::new();
        for (row, &top) in self.rows.iter().zip(&layout.tops) {
            // A hair of paper tells rows apart that are high enough.
            let height = if layout.row > 5 { layout.row - 1 } else { layout.row };
            let mut x = 0;
            for run in row.cells.chunk_by(|a, b| a == b) {
                let width = run.len() * layout.cell;
                if let Some(colour) = run[0] {
                    fill(&mut tiles, x, top, width, height, colour);
                }
                x += width;
            }
        }
        tiles
    }

    fn label_rows(&self, svg: &mut Svg, layout: &MapLayout) {
        let names_fit = layout.row >= LABEL_GAP - 2;
        let middle = |top: usize, height: usize| layout.top + top as f64 + height as f64 / 2.0 + 4.0;
        let (mut tops, mut free_from) = (&layout.tops[..], 0);
        for group in self.groups() {
            let (own, others) = tops.split_at(group.len());
            if names_fit {
                for (row, &top) in group.iter().zip(own) {
                    svg.text(LEFT - 8.0, middle(top, layout.row), &row.name, Words::new(11.0, Ink::MUTED).at_end());
                }
            }
            // Groups too low for words of their own leave some out.
            let (top, height) = (own[0], group.len() * layout.row);
            if top + height / 2 >= free_from {
                svg.text(18.0, middle(top, height), &group[0].group, Words::new(11.0, Ink::TEXT));
                free_from = top + height / 2 + LABEL_GAP;
            }
            tops = others;
        }
    }

    fn label_axis(&self, svg: &mut Svg, layout: &MapLayout) {
        let (name, end) = (&self.x.0, self.x.1 as f64);
        let bottom = layout.top + layout.plot.1 as f64 + 4.0;
        let width = layout.plot.0 as f64;
        svg.line(LEFT, bottom, LEFT + width, bottom, Ink::BORDER);
        let columns = ticks(0.0, end, 8);
        let step = columns.windows(2).next().map_or(1.0, |pair| pair[1] - pair[0]);
        for value in columns.into_iter().filter(|value| value.fract() == 0.0) {
            let x = LEFT + width * value / end;
            svg.line(x, bottom, x, bottom + 5.0, Ink::BORDER);
            svg.text(x, bottom + 18.0, &in_short(value, step), Words::new(11.0, Ink::MUTED).centred());
        }
        svg.text(LEFT + width / 2.0, bottom + 34.0, name, Words::new(11.0, Ink::MUTED).centred());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(rows: usize, cells: usize) -> ColourMap {
        let row = |index: usize| ColourRow {
            group: format!("layer {}", index / 2),
            name: format!("head {}", index % 2),
            cells: (0..cells).map(|cell| (cell % 3 > 0).then_some([200, (cell % 256) as u8, 10])).collect(),
        };
        let scales = vec![ColourScale { colours: vec![[1, 2, 3]; 4], words: "short < long".into() }];
        let rows = (0..rows).map(row).collect();
        ColourMap { title: "a & b".into(), notes: vec!["one".into()], x: ("position".into(), cells), rows, scales }
    }

    #[test]
    fn cells_are_tiles_within_the_picture() {
        let map = map(4, 8);
        let (width, height) = map.layout().size;
        // Cell 4 of the first row.
        let tiles = map.tiles(&map.layout());
        assert!(tiles[&[200, 4, 10]].starts_with("M480 0h120v"), "{tiles:?}");
        let svg = map.to_svg("m");
        assert!(svg.contains(&format!("viewBox=\"0 0 {width} {height}\"")), "{}", &svg[..300]);
        assert!(
            svg.contains("a &amp; b") && svg.contains("short &lt; long") && svg.contains("layer 1") && svg.contains("head 1")
        );
        assert!(svg.contains("fill=\"#c8040a\" d=\"M480 0h120v"));
    }

    #[test]
    fn nothing_and_very_much_are_drawn_too() {
        assert!(map(0, 0).to_svg("m").contains("a &amp; b"));
        let large = map(400, MAX_CELLS);
        let (width, height) = large.layout().size;
        assert!(width < 1200.0 && height < 3000.0, "{width} × {height}");
        assert!(large.to_svg("m").matches("<text").count() < 300);
    }
}
