//! Which positions each layer and KV head kept, and how long, from a replay log.

use serde::Serialize;

use super::chart::{ColourMap, ColourRow, ColourScale, MAX_CELLS, Rgb};
use crate::cache::ReplayLog;
use crate::units::Fault;
use crate::verify::{departures, stays};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeadEvictions {
    pub evicted: usize,
    pub kept: usize,
    /// Mean number of tokens that came before an evicted one left.
    pub mean_stay: Option<f64>,
    /// How long the tokens of neighbouring positions were kept.
    #[serde(skip)]
    cells: Vec<KeptCell>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct KeptCell {
    /// How long those stayed that left: the mean of the logarithms, from 0 for one token to 1 for all of the sequence.
    stay: f64,
    /// The part that is there at the end.
    kept: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerEvictions {
    pub slots: usize,
    /// Whether tokens left, and always the oldest first: as in the rolling buffer of a sliding window.
    pub is_rolling: bool,
    /// The heads; one where all agreed.
    pub heads: Vec<HeadEvictions>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evictions {
    /// Which sequence of the log, and of how many.
    pub sequence: (usize, usize),
    pub tokens: usize,
    /// Neighbouring positions that are one cell of the map.
    pub tokens_per_cell: usize,
    /// From the bottom of the model.
    pub layers: Vec<LayerEvictions>,
}

const SCALE: [Rgb; 5] = [[0xed, 0xf4, 0xc2], [0x9c, 0xd7, 0xb9], [0x41, 0xab, 0xc4], [0x25, 0x67, 0xad], [0x1b, 0x26, 0x6b]];
const ROLLING_SCALE: [Rgb; 2] = [[0xe6, 0xe9, 0xec], [0x57, 0x60, 0x6a]];
const KEPT: Rgb = [0xd9, 0x4f, 0x0b];

impl Evictions {
    /// Follows the choices of a log for one of its sequences.
    pub fn of(log: &ReplayLog, sequence: usize) -> Result<Self, Fault> {
        let found = log.spans.first().map_or(0, crate::cache::ChunkSpan::num_sequences);
        if sequence >= found {
            let message = format!("the log has no sequence {sequence}: it has {found}, counted from 0");
            return Err(Fault::usage(message, "choose another with `--sequence`"));
        }
        let tokens: usize = log.spans.iter().map(|span| span.real_of(sequence)).sum();
        let tokens_per_cell = tokens.div_ceil(MAX_CELLS).max(1);
        let layer = |(layer, &slots): (usize, &usize)| {
            // Layer by layer: of long sequences all departures at once would be gigabytes.
            let gone = departures(log, layer, log.num_deciders(layer))?.swap_remove(sequence);
            let gone: Vec<&[i64]> = gone.iter().map(|head| &head[..tokens]).collect();
            let is_rolling = gone.iter().all(|head| is_rolling(head, tokens));
            let heads = gone.into_iter().map(|head| HeadEvictions::of(head, tokens_per_cell)).collect();
            Ok(LayerEvictions { slots, is_rolling, heads })
        };
        let layers = log.cache_lengths.iter().enumerate().map(layer).collect::<Result<_, Fault>>()?;
        Ok(Self { sequence: (sequence, found), tokens, tokens_per_cell, layers })
    }

    pub fn map(&self, name: &str) -> ColourMap {
        let (tokens, per_cell) = (self.tokens, self.tokens_per_cell);
        let sequence = format!("{name}, sequence {} of 0 to {}, {tokens} tokens", self.sequence.0, self.sequence.1 - 1);
        let mut notes = vec![if self.sequence.1 > 1 { sequence } else { format!("{name}, {tokens} tokens") }];
        let of_cells = || format!("a cell is {per_cell} neighbouring tokens: the geometric mean of how long they stayed");
        notes.extend((per_cell > 1).then(of_cells));
        let rows = self.layers.iter().enumerate().flat_map(|(index, layer)| layer.rows(index)).collect();
        let scale = |colours: &[Rgb], words: String| ColourScale {
            colours: (0..80).map(|i| mixed(colours, f64::from(i) / 79.0)).collect(),
            words,
        };
        // Where it left would be told mostly by where it stands: how long it stayed is the same fact, and is seen.
        let mut scales =
            vec![scale(&SCALE, format!("left after 1 (left end) to {tokens} (right end) further tokens, logarithmic"))];
        let rolling = "the same in a rolling buffer, which the oldest token always leaves first".to_owned();
        scales.extend(self.layers.iter().any(|layer| layer.is_rolling).then(|| scale(&ROLLING_SCALE, rolling)));
        let part = if per_cell > 1 { ", mixed in by their part of a cell" } else { "" };
        scales.push(ColourScale { colours: vec![KEPT], words: format!("kept at the end{part}") });
        let title = "Which tokens the caches kept, by layer and KV head".to_owned();
        ColourMap { title, notes, x: ("position of the token".to_owned(), tokens), rows, scales }
    }
}

impl LayerEvictions {
    fn rows(&self, index: usize) -> Vec<ColourRow> {
        let group = if self.is_rolling { format!("layer {index} rolling") } else { format!("layer {index}") };
        let scale: &[Rgb] = if self.is_rolling { &ROLLING_SCALE } else { &SCALE };
        // Shades that nobody tells apart are one, so that a picture has few colours.
        let rounded = |part: f64, steps: f64| (part * steps).round() / steps;
        let colour = |cell: &KeptCell| Some(mixed(&[mixed(scale, rounded(cell.stay, 64.0)), KEPT], rounded(cell.kept, 16.0)));
        let row = |(head, own): (usize, &HeadEvictions)| ColourRow {
            group: group.clone(),
            name: if self.heads.len() == 1 { "all".to_owned() } else { format!("head {head}") },
            cells: own.cells.iter().map(colour).collect(),
        };
        self.heads.iter().enumerate().map(row).collect()
    }
}

impl HeadEvictions {
    /// From the first query that does not see each token.
    fn of(gone: &[i64], tokens_per_cell: usize) -> Self {
        let tokens = gone.len();
        let stays: Vec<Option<usize>> = stays(gone).collect();
        let (evicted, sum) = stays.iter().flatten().fold((0, 0), |(count, sum), stay| (count + 1, sum + stay));
        let cell = |own: &[Option<usize>]| {
            let left = own.iter().flatten().count();
            let logarithms: f64 = own.iter().flatten().map(|&stay| (stay.max(1) as f64).ln()).sum();
            let longest = (tokens.max(2) as f64).ln();
            KeptCell { stay: logarithms / left.max(1) as f64 / longest, kept: 1.0 - left as f64 / own.len() as f64 }
        };
        Self {
            evicted,
            kept: tokens - evicted,
            mean_stay: (evicted > 0).then(|| sum as f64 / evicted as f64),
            cells: stays.chunks(tokens_per_cell).map(cell).collect(),
        }
    }
}

/// Whether tokens left, and none before an older one.
fn is_rolling(gone: &[i64], tokens: usize) -> bool {
    gone.first().is_some_and(|&first| first < tokens as i64) && gone.windows(2).all(|pair| pair[0] <= pair[1])
}

fn mixed(scale: &[Rgb], part: f64) -> Rgb {
    let place = part.clamp(0.0, 1.0) * (scale.len() - 1) as f64;
    let below = (place as usize).min(scale.len() - 2);
    let share = place - below as f64;
    std::array::from_fn(|i| (f64::from(scale[below][i]) * (1.0 - share) + f64::from(scale[below + 1][i]) * share).round() as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_summed_up_and_cut_into_cells() {
        let stays = i64::MAX;
        let head = HeadEvictions::of(&[stays, 4, 4, 5, stays, stays], 2);
        assert_eq!((head.evicted, head.kept, head.mean_stay), (3, 3, Some(7.0 / 3.0)));
        let parts: Vec<f64> = head.cells.iter().map(|cell| cell.kept).collect();
        assert_eq!(parts, [0.5, 0.0, 1.0]);
        // One stayed for 3 tokens; two of them, for 2 each, in the next cell.
        let expected = [3f64.ln() / 6f64.ln(), 2f64.ln() / 6f64.ln(), 0.0];
        assert!(head.cells.iter().zip(expected).all(|(cell, expected)| (cell.stay - expected).abs() < 1e-12), "{:?}", head.cells);
        assert!(!is_rolling(&[stays, 4, 4], 6) && is_rolling(&[3, 4, 4, stays], 6) && !is_rolling(&[stays; 3], 3));
    }

    #[test]
    fn a_scale_ends_in_its_ends() {
        assert_eq!((mixed(&SCALE, 0.0), mixed(&SCALE, 1.0), mixed(&SCALE, 2.0)), (SCALE[0], SCALE[4], SCALE[4]));
    }
}
