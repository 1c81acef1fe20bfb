//! The kernels of selection on the simulated GPU: beside a plain sort, and beside what the cache has chosen for every policy.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::process::Output;

use kvtune::cache::{
    ChunkAttention, Entries, EvictionOrder, HeadBudgets, LayerCache, NewEntries, Observed, Policy, PolicyTraits, Victims,
};
use kvtune::recipe::{BufferKind, Storage};
use kvtune::units::LayerIdx;
use tch::{Device, Kind, Tensor};

use super::{faults_are_seen, play, said, source};
use crate::policy_contract::content::Content;
use crate::policy_contract::scene::Scene;
use crate::policy_contract::scenes::{policies, scenes};
use crate::policy_contract::synthetic_attention::SyntheticAttention;

fn selection(text: &Path, arguments: &[&Path]) -> Output {
    play("selection", text, &[], arguments)
}

#[test]
fn what_leaves_and_moves_is_what_a_plain_sort_says() {
    let output = selection(&source("selection"), &[]);
    assert!(output.status.success() && said(&output) == "20 cases", "{}", said(&output));
}

#[test]
fn faults_in_the_text_of_selection_are_seen() {
    let faults = [
        ("  __syncthreads();\n  return from;", "  return from;"),
        ("  unsigned before = up_to - sum;", "  unsigned before = up_to;"),
        ("    __syncwarp();\n    if (bin != NONE && is_first(same)) *first", "    if (bin != NONE && is_first(same)) *first"),
        ("shift > 0 && inside != left", "shift > 32 && inside != left"),
        ("if (at < static_cast<unsigned>(p.taken)) ", ""),
        ("if (bits == 0x80000000u) bits = 0;", ""),
        ("position >= 0 && position < p.sinks", "position < p.sinks"),
        ("^ 0x8000000000000000ULL", ""),
    ];
    faults_are_seen("selection", &faults, |broken| selection(broken, &[]));
}

#[test]
fn every_policys_choice_is_that_of_the_cache() {
    tch::set_num_threads(1);
    let mut file = Vec::new();
    let mut count = 0;
    for (p, &policy) in policies().iter().enumerate().filter(|(_, (policy, _))| *policy != "dense") {
        let mut choices = Vec::new();
        // Chunks of some tokens, and the largest.
        for scene in &scenes((p, policy), (BufferKind::Int4, false), Storage::Preallocated)[1..] {
            choices.extend(choices_of(scene));
        }
        assert!(!choices.is_empty(), "{policy:?} never chose");
        // Of the cache's ways from the first choice to the last, one in the middle.
        file.extend(choices.swap_remove(choices.len() / 2));
        count += 1;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("choices");
    fs::write(&path, file).unwrap();
    let output = selection(&source("selection"), &[&path]);
    assert!(output.status.success() && said(&output).starts_with(&format!("{count} choices of ")), "{}", said(&output));
}

/// A policy, and what it said of which entries when it was asked last.
#[derive(Debug)]
struct Watched {
    policy: Box<dyn Policy>,
    seen: RefCell<Option<Seen>>,
}

#[derive(Debug)]
struct Seen {
    score: EvictionOrder,
    position_bgc: Tensor,
    num_evicted: usize,
    next_position: usize,
}

impl Policy for Watched {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        let score = self.policy.score(entries);
        let copy = match &score {
            EvictionOrder::ByPosition { keep_first } => EvictionOrder::ByPosition { keep_first: *keep_first },
            EvictionOrder::ByEntry(score_bgc) => EvictionOrder::ByEntry(score_bgc.copy()),
        };
        let position_bgc = entries.position_bgc.copy();
        let (num_evicted, next_position) = (entries.num_evicted, entries.next_position);
        *self.seen.borrow_mut() = Some(Seen { score: copy, position_bgc, num_evicted, next_position });
        score
    }

    fn traits(&self) -> PolicyTraits<'_> {
        self.policy.traits()
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        self.policy.describe(new)
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        self.policy.observe(seen)
    }
}

/// What the cache chose in a scene, choice by choice, as the simulated kernels read it.
fn choices_of(scene: &Scene) -> Vec<Vec<u8>> {
    let policy = Watched { policy: scene.build(), seen: RefCell::default() };
    let (plan, shape, content) = (scene.plan(true), scene.shape(true), Content::new(scene));
    let protected = scene.told(&policy);
    let mut cache = LayerCache::new(LayerIdx(0), shape, plan.prefill)
        .protecting(protected.clone())
        .with_query_statistics(scene.query_statistics());
    let (mut quota, mut choices) = (None, Vec::new());
    for span in &plan.spans {
        cache.enter(span);
        if let Some(shares) = cache.allocate(&policy, span) {
            cache.apply_budget(&shares);
            quota = Some(shares);
        }
        let victims = cache.decide(&policy, span);
        if let (Some(victims), Some(seen)) = (&victims, policy.seen.take()) {
            // A row that has ended keeps what it has: any slots will do.
            let rows = (0..span.real.len()).filter(|&row| span.real[row] == span.len);
            choices
                .extend(rows.map(|row| recorded(&policy, &seen, (victims, quota.as_ref()), (row, protected.get(row).copied()))));
        }
        let tokens = content.chunk(span.start, &span.real, span.len);
        let written = cache.write(span, victims.as_ref(), &tokens).unwrap();
        let attention: &dyn ChunkAttention = &SyntheticAttention::new(scene, &content, span, &cache);
        // Positions are the attention's own, so that the cache can be told of it.
        cache.note(&policy, span, &written.own, attention);
    }
    choices
}

/// One row: sizes, first and young tokens, scores, positions, its protected range and the choice.
fn recorded(
    policy: &Watched,
    seen: &Seen,
    (victims, quota): (&Victims, Option<&HeadBudgets>),
    (row, protected): (usize, Option<(usize, usize)>),
) -> Vec<u8> {
    let (batch, groups, slots) = seen.position_bgc.size3().unwrap();
    let young = seen.next_position as i64 - policy.traits().grace as i64;
    let mut positions = numbers(&seen.position_bgc.get(row as i64));
    let (mut scores, sinks): (Vec<f32>, _) = match &seen.score {
        // The kernels get a score, and the first tokens as those that stay longest.
        EvictionOrder::ByPosition { keep_first } => {
            let first = (*keep_first).max(policy.traits().sinks) as i64;
            let leaves_at = |&p: &i64| if (0..first).contains(&p) { 1_000_000 - p } else { p } as f32;
            (positions.iter().map(leaves_at).collect(), 0)
        }
        EvictionOrder::ByEntry(score) => {
            let all = score.to_kind(Kind::Float).expand([batch, groups, slots], false).get(row as i64).contiguous();
            (Vec::try_from(all.view(-1)).unwrap(), policy.traits().sinks as i64)
        }
    };
    if let Some(quota) = quota {
        let rows = positions.chunks_mut(slots as usize).zip(scores.chunks_mut(slots as usize));
        for ((positions, scores), share) in rows.zip(&quota.shares[row]) {
            let held = positions.iter().filter(|&&position| position >= 0).count();
            let taken = share.saturating_sub(held).min(seen.num_evicted);
            for (i, slot) in (0..slots as usize).filter(|&slot| positions[slot] < 0).collect::<Vec<_>>().into_iter().enumerate() {
                // An empty slot that its head may fill is taken before all others; another stays.
                (scores[slot], positions[slot]) = if i < taken { (f32::NEG_INFINITY, -1) } else { (0.0, i64::MAX) };
            }
        }
    }
    let bounds: Vec<i64> = protected.iter().flat_map(|&(start, end)| [start as i64, end as i64]).collect();
    let header = [1, groups, slots, seen.num_evicted as i64, sinks, young, bounds.len() as i64];
    let chosen = numbers(&victims.slots(batch, groups, Device::Cpu).get(row as i64));
    let long = |values: &[i64]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<_>>();
    let scores: Vec<u8> = scores.iter().flat_map(|score| score.to_ne_bytes()).collect();
    [long(&header), scores, long(&positions), long(&bounds), long(&chosen)].concat()
}

fn numbers(x: &Tensor) -> Vec<i64> {
    Vec::try_from(x.contiguous().view(-1)).unwrap()
}
