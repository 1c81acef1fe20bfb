//! Floating point operations of a step, counted from its shapes: what the gradient needs, and nothing of a policy's scores, of norms
//! or of other work by element.

use serde::Serialize;

use super::{StepSpec, TrainedPart};
use crate::cache::ChunkSpan;
use crate::engine::{ChunkPlan, Schedule};
use crate::model::{AttentionSpec, Projection};

/// Operations of one step; a multiplication with its addition counts as two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Flops {
    /// Operations of the projections and of what an adapter adds to them.
    pub linear: f64,
    /// Operations of attention, over the pairs that are visible.
    pub attention: f64,
    /// Operations of the output projection, where there are targets.
    pub head: f64,
}

impl Flops {
    pub fn total(&self) -> f64 {
        self.linear + self.attention + self.head
    }
}

/// Operations of one layer, or for one token.
#[derive(Clone, Copy, Debug, Default)]
struct ForwardBackward {
    forward: f64,
    backward: f64,
}

impl Flops {
    /// The operations of a step over `plan`, whose batch has so many tokens and targets.
    pub fn of(spec: &StepSpec<'_>, plan: &ChunkPlan, tokens: usize, targets: usize) -> Self {
        let [forward, head, replay, recompute, backward, _] = parts(spec, plan, tokens, targets);
        let sum = |of: fn(&Self) -> f64| [forward, recompute, replay, backward].iter().map(of).sum();
        Self { linear: sum(|f| f.linear), attention: sum(|f| f.attention), head: head.head }
    }

    /// The operations of such a step by part, in the order of [`super::StepPart::ALL`].
    pub fn by_part(spec: &StepSpec<'_>, plan: &ChunkPlan, tokens: usize, targets: usize) -> [f64; 6] {
        parts(spec, plan, tokens, targets).map(|part| part.total())
    }
}

/// In the order of [`super::StepPart::ALL`]: recomputed are cells whose graphs were not kept, replayed are bands below the top one, the head
/// is run once, and the optimiser multiplies no matrices.
fn parts(spec: &StepSpec<'_>, plan: &ChunkPlan, tokens: usize, targets: usize) -> [Flops; 6] {
    let config = spec.config;
    let schedule = Schedule::new(spec.settings, plan, spec.trained.first_layer, spec.layers_wait());
    let [mut forward, mut head, mut replay, mut recompute, mut backward] = [Flops::default(); 5];
    for (layer, slots) in spec.settings.slots(plan).into_iter().enumerate() {
        let linear = projections(spec, layer, |_| true);
        let of_layer = &config.layers[layer].attention;
        let attention = attended(of_layer, visible_pairs(&plan.spans, slots, of_layer.rule.window));
        // Computed again are the columns before the first of which the graph is kept.
        let spans = &plan.spans[..plan.columns[..schedule.columns_again(layer)].last().map_or(0, |column| column.end)];
        // Pads are no work that the gradient needs.
        let real: usize = spans.iter().flat_map(|span| &span.real).sum();
        recompute.linear += real as f64 * linear.forward;
        // Where its outputs wait attention is not run again, neither in cells nor in replays.
        let again = if spec.settings.keeps_attention_outputs() { 0.0 } else { 1.0 };
        recompute.attention += again * attended(of_layer, visible_pairs(spans, slots, of_layer.rule.window)).forward;
        forward.linear += tokens as f64 * linear.forward;
        forward.attention += attention.forward;
        if layer >= schedule.first_layer() {
            backward.linear += tokens as f64 * linear.backward;
            backward.attention += attention.backward;
        }
        // The second forward of all bands but the top one. The uppermost layer of each only writes its keys and values.
        if schedule.replayed_layers().contains(&layer) {
            let attends = !schedule.ends_band(layer);
            let linear = projections(spec, layer, |projection| attends || projection.is_of_attention_input());
            replay.linear += tokens as f64 * linear.forward;
            replay.attention += if attends { again * attention.forward } else { 0.0 };
        }
    }
    let scores = 2.0 * (targets * config.hidden_size * config.num_scores()) as f64;
    // A product forward, one for the input, and of what is trained there one more.
    let matrix = (config.hidden_size * config.num_scores()) as f64;
    head.head = scores * (2.0 + (spec.output_numbers() as f64 / matrix).min(1.0));
    [forward, head, replay, recompute, backward, Flops::default()]
}

/// A token through the projections of a layer that are run.
fn projections(spec: &StepSpec<'_>, layer: usize, is_run: impl Fn(Projection) -> bool) -> ForwardBackward {
    let TrainedPart { r, targets, .. } = spec.trained;
    let trains_weights = spec.trains_weights();
    let mut pass = ForwardBackward::default();
    for projection in Projection::ALL.into_iter().filter(|&projection| is_run(projection)) {
        let [out, inner] = projection.shape(&spec.config.layers[layer], spec.config.hidden_size);
        let weight = 2.0 * (out * inner) as f64;
        // Behind what is frozen nobody asks for the gradient of the lowest trained layer's input.
        let is_first = layer == spec.trained.first_layer && projection.is_of_attention_input();
        let to_input = if is_first && !spec.trains_embedding() { 0.0 } else { 1.0 };
        pass.forward += weight;
        pass.backward += weight * (to_input + f64::from(u8::from(trains_weights)));
        if targets.contains(&projection) {
            let (a, b) = (2.0 * (r * inner) as f64, 2.0 * (r * out) as f64);
            pass.forward += a + b;
            pass.backward += a * (1.0 + to_input) + 2.0 * b;
        }
    }
    pass
}

/// A layer's attention to so many pairs of query and key: two products forward, five backward.
fn attended(attention: &AttentionSpec, pairs: f64) -> ForwardBackward {
    let product = 2.0 * pairs * attention.widths()[0] as f64;
    ForwardBackward { forward: 2.0 * product, backward: 5.0 * product }
}

/// Pairs of query and key that see each other, of all sequences, in a layer of so many slots, or with a sliding window.
fn visible_pairs(spans: &[ChunkSpan], slots: usize, window: Option<usize>) -> f64 {
    let pairs = |span: &ChunkSpan| {
        if let Some(window) = window {
            // Of the first so many tokens: a triangle, then a band.
            let before = |tokens: usize| {
                let ramp = window.min(tokens) as f64;
                ramp * (ramp + 1.0) / 2.0 + tokens.saturating_sub(window) as f64 * window as f64
            };
            return span.real.iter().map(|&n| before(span.start + n) - before(span.start)).sum();
        }
        let top = slots.min(span.start + span.len);
        let of_sequence = |&n: &usize| (n * (top - span.len)) as f64 + (n * (n + 1)) as f64 / 2.0;
        span.real.iter().map(of_sequence).sum::<f64>()
    };
    spans.iter().map(pairs).sum()
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::engine::ColumnWidth;
    use crate::plan::fixtures::with_step;

    /// The operations of 14 tokens with a target each.
    fn counted(words: &str) -> Flops {
        let plan = ChunkPlan::new(&[14], 8, 4, ColumnWidth::Chunks(1));
        with_step(words, (Kind::Float, Device::Cpu), |spec| Flops::of(spec, &plan, 14, 14))
    }

    #[test]
    fn each_pass_counts_what_it_multiplies() {
        let rounded = |flops: Flops| [flops.linear, flops.attention, flops.head].map(|x| x.round() as i64);
        // 120 weights in a layer: q and o 16, k and v 8, and 24 in each matrix of the MLP. Each layer is run forward twice, q, k and v of
        // the lower one once more; backward is one product for the input and one for the weights.
        let linear = 14 * 2 * (120 * (2 + 2 + 2 * 2) + 32);
        // 10 + 26 + 26 + 15 pairs; a product of them is 2 · 4 · 77 operations in each layer; two products forward, five backward.
        let attention = 2 * 4 * 77 * (2 * (2 + 2) + 5 * 2);
        assert_eq!(rounded(counted("train.weights = 'all'")), [linear, attention, 14 * 2 * 40 * 3]);
        // Frozen weights need no gradient, and the lowest q, k and v none of their input. What is added to q has 4 numbers in each
        // matrix: both forward; backward two products each, but for the input of the lowest.
        let frozen = 2 * (120 * (2 + 2) + 32) + 2 * (120 + 120 - 32);
        let added = 2 * (4 + 4) * (3 + 2) + 2 * (4 * 4 + 3 * 4);
        let lora = "lora = {r = 1, target_modules = ['q_proj']}";
        assert_eq!(rounded(counted(lora)), [14 * (frozen + added), attention, 14 * 2 * 40 * 2]);
    }

    #[test]
    fn what_is_visible_is_what_a_cache_holds() {
        // Chunks of 4 and 4 fill 8 slots; then 4 see 4 older ones, and 2 see 6.
        let plan = ChunkPlan::new(&[14], 8, 4, ColumnWidth::Chunks(1));
        let own = |n: usize| n * (n + 1) / 2;
        let (held, all) = (own(4) + (16 + own(4)) + (16 + own(4)) + (12 + own(2)), own(14));
        assert_eq!(visible_pairs(&plan.spans, 8, None) as usize, held);
        // A cache that holds everything: the lower triangle.
        assert_eq!(visible_pairs(&plan.spans, usize::MAX, None) as usize, all);
        assert_eq!(visible_pairs(&plan.spans, 8, Some(usize::MAX >> 1)) as usize, all);
        let total = |sequence: usize| plan.spans.iter().map(|span| span.real_of(sequence)).sum();
        let lengths: Vec<usize> = (0..plan.num_sequences()).map(total).collect();
        let through_3: usize = lengths.iter().map(|&tokens| (0..tokens).map(|position| 3.min(position + 1)).sum::<usize>()).sum();
        assert_eq!(visible_pairs(&plan.spans, 8, Some(3)) as usize, through_3);
    }
}
