//! How `adakv` shares out a sequence's slots, written once more with lists: the better half of what all heads hold decides.

use kvtune::cache::ChunkSpan;

use super::slow_policies::SlowPolicy;

/// An entry in the order of a sequence.
#[derive(Clone, Copy)]
struct Held {
    head: usize,
    position: usize,
    score: f32,
    /// Whether it is no candidate: too young, among the first that stay, or protected.
    stays: bool,
}

impl SlowPolicy<'_> {
    /// The shares of a sequence's heads, where there are any and they can be foreseen.
    pub(crate) fn shares(&self, sequence: usize) -> Option<&Vec<usize>> {
        self.shares[sequence].as_ref().filter(|_| !self.unclear[sequence])
    }

    /// Shares out the slots of the sequences that must lose something for the first time, and takes from each head what exceeds its share.
    pub(super) fn share_out(&mut self, span: &ChunkSpan) {
        let Some(floor) = self.floor else { return };
        let heads = self.scene.groups as usize;
        for sequence in 0..self.notes.len() {
            if self.shares[sequence].is_some() || self.excess([sequence, 0], span) == 0 {
                continue;
            }
            let shares = self.by_better_half(sequence, span.start, floor);
            let leaving: Vec<Vec<usize>> = (0..heads)
                .map(|head| {
                    self.lowest([sequence, head], span.start, self.notes[sequence][head].len().saturating_sub(shares[head]))
                })
                .collect();
            for (notes, leaving) in self.notes[sequence].iter_mut().zip(leaving) {
                notes.retain(|p, _| !leaving.contains(p));
            }
            self.shares[sequence] = Some(shares);
        }
    }

    /// `floor` of the capacity for each head; the rest in proportion to its part of the better half.
    fn by_better_half(&mut self, sequence: usize, next: usize, floor: f64) -> Vec<usize> {
        let (heads, capacity) = (self.scene.groups as usize, self.scene.capacity);
        let mut best = self.best_first(sequence, next);
        let better = best.len() - best.len() / 2;
        if let (Some(last), Some(out)) = (best.get(better - 1), best.get(better)) {
            self.unclear[sequence] |= !last.stays && self.is_close(out.score, last.score);
        }
        best.truncate(better);
        let least = (floor * capacity as f64) as usize;
        let rest = heads * (capacity - least);
        let parts: Vec<usize> = (0..heads).map(|head| best.iter().filter(|entry| entry.head == head).count() * rest).collect();
        let mut shares: Vec<usize> = parts.iter().map(|part| least + part / better).collect();
        // What rounding leaves goes to those who lost most by it.
        let mut losers: Vec<usize> = (0..heads).collect();
        losers.sort_by_key(|&head| (better - parts[head] % better, head));
        let left = heads * capacity - shares.iter().sum::<usize>();
        losers.into_iter().take(left).for_each(|head| shares[head] += 1);
        shares
    }

    /// All entries of a sequence: those that stay anyway, the oldest first; then by score, of equal ones the younger first. What all heads
    /// hold alike they give in turn.
    fn best_first(&self, sequence: usize, next: usize) -> Vec<Held> {
        let mut all: Vec<Held> = Vec::new();
        for (head, notes) in self.notes[sequence].iter().enumerate() {
            let candidates = self.candidates([sequence, head], next);
            let scores = self.scores([sequence, head], next).expect("slots are shared out by scores");
            let held = |&position: &usize| Held {
                head,
                position,
                score: scores[&position] + 0.0,
                stays: !candidates.contains(&position),
            };
            all.extend(notes.keys().map(held));
        }
        let (mut staying, mut others): (Vec<Held>, Vec<Held>) = all.into_iter().partition(|entry| entry.stays);
        staying.sort_by_key(|entry| (entry.position, entry.head));
        others.sort_by(|a, b| b.score.total_cmp(&a.score).then(b.position.cmp(&a.position)).then(a.head.cmp(&b.head)));
        staying.extend(others);
        staying
    }
}
