//! A walk over the replay log with plain vectors: which position each slot holds after each chunk, and when each token leaves.

use tch::TchError;

use crate::cache::{ChunkSpan, HeadBudgets, ReplayLog};
use crate::units::Fault;

const STAYS: i64 = i64::MAX;

/// Walks over the choices of one layer with `groups` KV heads. `[event][sequence][head]`: the position in each filled slot after each cache
/// event (the prefill span is event 0), −1 where a sequence has none; of a sequence that has left, what it held in the end.
pub fn walk(log: &ReplayLog, layer: usize, groups: usize) -> Result<Vec<Vec<Vec<Vec<i64>>>>, Fault> {
    let mut held: Vec<Vec<Vec<Vec<i64>>>> = Vec::new();
    follow(log, layer, groups, |span, slots| {
        held.truncate(span.chunk);
        held.push(slots.to_vec());
    })?;
    Ok(held)
}

/// `[sequence][head][position]`: the first query that does not see the token any more. What is held in between would fill the memory.
pub fn departures(log: &ReplayLog, layer: usize, groups: usize) -> Result<Vec<Vec<Vec<i64>>>, Fault> {
    follow(log, layer, groups, |_, _| {})
}

/// How many further tokens each token of a head was kept for, from the first query that does not see it; `None` where it is kept to the end.
pub fn stays(gone: &[i64]) -> impl Iterator<Item = Option<usize>> + '_ {
    let until = |&until: &i64| usize::try_from(until).ok().filter(|&until| until < gone.len());
    gone.iter().enumerate().map(move |(at, query)| Some(until(query)? - at))
}

/// Walks, and shows what each sequence and head holds after each chunk.
fn follow(
    log: &ReplayLog,
    layer: usize,
    groups: usize,
    mut show: impl FnMut(&ChunkSpan, &[Vec<Vec<i64>>]),
) -> Result<Vec<Vec<Vec<i64>>>, Fault> {
    let (mut capacity, batch) = (log.cache_lengths[layer], log.spans.first().map_or(0, ChunkSpan::num_sequences));
    let tokens = log.spans.last().map_or(0, |s| s.start + s.len);
    let mut slots = vec![vec![Vec::<i64>::new(); groups]; batch];
    let mut gone = vec![vec![vec![STAYS; tokens]; groups]; batch];
    for span in &log.spans {
        let victims = log.layers[layer].victims(span.index);
        if let Some(budgets) = log.layers[layer].budgets.as_ref().filter(|budgets| budgets.index == span.index) {
            divide(&mut slots, &mut gone, budgets, span.start);
            capacity = budgets.slots;
        }
        // A choice that no cache could make.
        let impossible =
            |what: String| Fault::defect(format!("layer {layer}, chunk {}: the replay log evicts {what}", span.index));
        // Nobody asks any more what one that has left would hold.
        for b in 0..span.num_sequences() {
            for g in 0..groups {
                let leaving = victims.map_or(Ok(Vec::new()), |victims| victims.of_head(b, g));
                let leaving = leaving.map_err(|e: TchError| impossible(e.to_string()))?;
                step(&mut slots[b][g], &mut gone[b][g], span, b, capacity, &leaving).map_err(impossible)?;
            }
        }
        show(span, &slots);
    }
    Ok(gone)
}

/// Slots are shared out: what exceeds a head's share leaves, and all heads get as many slots as the largest share.
fn divide(slots: &mut [Vec<Vec<i64>>], gone: &mut [Vec<Vec<i64>>], budgets: &HeadBudgets, start: usize) {
    for (b, sequence) in slots.iter_mut().enumerate().take(budgets.shares.len()) {
        for (g, head) in sequence.iter_mut().enumerate() {
            let of_head = head.len() * (b * budgets.shares[b].len() + g);
            let leaving = &budgets.leaving[of_head..];
            for (position, _) in head.iter_mut().zip(leaving).filter(|(position, leaves)| **leaves && **position >= 0) {
                gone[b][g][*position as usize] = start as i64;
                *position = -1;
            }
            head.resize(budgets.slots, -1);
        }
    }
}

/// One chunk, one sequence, one head: its own victims leave, the region's survivors fill the holes, what it keeps stands before its new tokens.
fn step(
    slots: &mut Vec<i64>,
    gone: &mut [i64],
    span: &ChunkSpan,
    sequence: usize,
    capacity: usize,
    leaving: &[i64],
) -> Result<(), String> {
    let filled = slots.len();
    let top = capacity.min(filled + span.len);
    let region = top - span.len;
    let mut sorted = leaving.to_vec();
    sorted.sort_unstable();
    if let Some(slot) = sorted.iter().find(|&&slot| slot < 0 || slot as usize >= filled) {
        return Err(format!("slot {slot} of {filled}"));
    }
    if let Some([slot, _]) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("slot {slot} twice"));
    }
    // A sequence in a block gives up its slots for all of the block, unless it has ended before.
    let taken = if span.is_block && span.real_of(sequence) > 0 { span.len } else { span.real_of(sequence) };
    let needed = (filled + taken).saturating_sub(capacity);
    let positions: Vec<i64> = leaving.iter().map(|&s| slots[s as usize]).collect();
    for &position in &positions[..needed.min(positions.len())] {
        if position >= 0 {
            gone[position as usize] = span.start as i64;
        }
    }
    let holes: Vec<usize> = sorted.iter().map(|&s| s as usize).filter(|&s| s < region).collect();
    let survivors = (region.min(filled)..filled).filter(|&s| sorted.binary_search(&(s as i64)).is_err());
    for (hole, survivor) in holes.into_iter().zip(survivors) {
        slots[hole] = slots[survivor];
    }
    slots.truncate(region);
    slots.extend(&positions[needed.min(positions.len())..]);
    slots.extend((span.start..span.start + span.real_of(sequence)).map(|p| p as i64));
    slots.resize(top, -1);
    Ok(())
}
