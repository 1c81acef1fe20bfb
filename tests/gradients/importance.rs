//! What a calibration learns of entries: least squares on the squared gradients of attention scores, as plain autograd has them.

use kvtune::data::IGNORE;
use kvtune::engine::{
    Calibration, Event, FittedGate, MemoryByPart, MemoryPart, MemoryPlace, MicroBatchContext, NoObserver, Observer,
};
use kvtune::model::{Attend, DropoutContext, Model, Qkv};
use kvtune::recipe::{AttentionOutputs, LossMean, Storage};
use kvtune::units::{Bytes, Fault, LayerIdx};
use tch::{Device, Kind, Tensor};

use crate::support::case::{Case, PLAIN, TargetsAt, Width};
use crate::support::{F64, NUM_LAYERS, batch, engine, model};

/// Two sequences, of which the shorter ends inside of a chunk.
const CASE: Case =
    Case { policy: "dense", lengths: &[600, 530], chunk: 50, cache: &[600], heads: (4, 2), width: Width::Chunks(2), ..PLAIN };

/// Of `engine::importance`.
const MIN_DISTANCE: i64 = 192;
const MIN_QUERIES: i64 = 256;
const SINKS: i64 = 4;

/// Dense causal attention whose scores are leaves to differentiate by.
#[derive(Default)]
struct Listening {
    /// Zeros that are added to scores, by layer `(B, H, T, T)`.
    leaves: Vec<Tensor>,
    /// Attention's inputs `(B, T, E)`.
    inputs: Vec<Tensor>,
    /// Queries before they are turned `(B, H, T, D)`.
    queries: Vec<Tensor>,
}

impl Attend for Listening {
    fn see_input(&mut self, _: LayerIdx, x_bne: &Tensor, queries: &dyn Fn() -> Tensor) {
        self.inputs.push(x_bne.detach());
        self.queries.push(queries().detach());
    }

    fn attend(&mut self, _: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault> {
        let groups = qkv.q_bhnd.size()[1] / qkv.own.k.size()[1];
        let by_head = |x: &Tensor| x.repeat_interleave_self_int(groups, 1, None);
        let score = qkv.q_bhnd.matmul(&by_head(&qkv.own.k).transpose(2, 3)) * qkv.rule.scale;
        let leaf = score.zeros_like().detach().set_requires_grad(true);
        let total = score.size()[3];
        let later = Tensor::ones([total, total], (Kind::Bool, Device::Cpu)).triu(1);
        let weight = (score + &leaf).masked_fill(&later, f64::NEG_INFINITY).softmax(-1, None);
        self.leaves.push(leaf);
        Ok(weight.matmul(&by_head(&qkv.own.v)))
    }
}

/// Inputs `(B, T, E)` of each layer, and the sum of squared gradients of its entries by query `(B, G, T, T)`.
fn by_autograd(case: &Case, model: &Model) -> Vec<(Tensor, Tensor)> {
    let (attend, loss) = listened(case, model);
    let leaves: Vec<&Tensor> = attend.leaves.iter().collect();
    let gradients = Tensor::run_backward(&[loss], &leaves, false, false);
    let longest = CASE.lengths[0] as i64;
    let by_group = |x: Tensor| x.square().view([2, 2, 2, longest, -1]).sum_dim_intlist(&[2i64][..], false, Kind::Double);
    attend.inputs.into_iter().zip(gradients.into_iter().map(by_group)).collect()
}

/// What dense attention has seen, and the loss of the batch.
fn listened(case: &Case, model: &Model) -> (Listening, Tensor) {
    let (batch, longest) = (batch(case), CASE.lengths[0]);
    let padded = |values: Vec<i64>, pad: i64| values.into_iter().chain(std::iter::repeat(pad)).take(longest).collect::<Vec<_>>();
    let ids: Vec<i64> =
        batch.sequences.iter().flat_map(|s| padded(s.inputs.iter().map(|&id| i64::from(id)).collect(), 0)).collect();
    let labels: Vec<i64> = batch.sequences.iter().flat_map(|s| padded(s.targets.labels().unwrap().to_vec(), IGNORE)).collect();
    let positions = model.positions(Tensor::arange(longest as i64, (Kind::Int64, Device::Cpu)), &model.frequencies(CASE.lengths));
    let mut attend = Listening::default();
    let mut hidden = model.embed(&Tensor::from_slice(&ids).view([2, -1]));
    for layer in 0..NUM_LAYERS {
        hidden = model.layer(LayerIdx(layer), &hidden, &positions, &DropoutContext::default(), &mut attend).unwrap();
    }
    let logits = model.logits(&model.final_norm(&hidden)).flatten(0, 1);
    let loss = logits.cross_entropy_loss::<Tensor>(&Tensor::from_slice(&labels), None, tch::Reduction::Sum, IGNORE, 0.0);
    (attend, loss)
}

/// The fit that the labels of a layer come to, chunk by chunk from the last: weight `(G, E)`, bias `(G)`.
fn least_squares(x_bte: &Tensor, squared_bgtt: &Tensor) -> [Tensor; 2] {
    let (chunk, lengths) = (CASE.chunk as i64, CASE.lengths.iter().map(|&len| len as i64));
    let (mut xs, mut ys, mut sum_g, mut count) = (Vec::new(), Vec::new(), Tensor::zeros([2], F64), 0.0);
    for start in (0..CASE.lengths[0]).step_by(CASE.chunk).rev().map(|start| start as i64) {
        let mut means = Vec::new();
        for (b, len) in lengths.clone().enumerate() {
            for position in (start..(start + chunk).min(len)).filter(|&position| position >= SINKS) {
                // Whole chunks count, from the first that begins far enough behind.
                let first = (position + MIN_DISTANCE + chunk - 1) / chunk * chunk;
                if len - first >= MIN_QUERIES {
                    let of_entry_gt = squared_bgtt.get(b as i64).select(2, position).narrow(1, first, len - first);
                    means.push(of_entry_gt.sum_dim_intlist(&[1i64][..], false, Kind::Double) / (len - first) as f64);
                    xs.push(x_bte.get(b as i64).get(position));
                }
            }
        }
        count += means.len() as f64;
        sum_g = means.iter().fold(sum_g, |sum, mean| sum + mean);
        ys.extend(means.into_iter().map(|mean| (mean + &sum_g / count * 1e-3 + f64::MIN_POSITIVE).log()));
    }
    let (x, y) = (Tensor::stack(&xs, 0), Tensor::stack(&ys, 0));
    let (mean_x, mean_y) = (x.mean_dim(0i64, true, Kind::Double), y.mean_dim(0i64, true, Kind::Double));
    let (around, of) = (&x - &mean_x, &y - &mean_y);
    let covariance = around.transpose(0, 1).matmul(&around);
    let ridge = covariance.diagonal(0, 0, 1).mean(Kind::Double) * 2e-4;
    let ridged = &covariance + Tensor::eye(covariance.size()[0], F64) * ridge;
    let weight = Tensor::linalg_solve(&ridged, &around.transpose(0, 1).matmul(&of), true);
    [weight.transpose(0, 1), (mean_y - mean_x.matmul(&weight)).view(-1)]
}

/// The slots of each layer above one threshold on what its entries are still worth before each chunk of the second half.
fn slots_by_sorting(layers: &[(Tensor, Tensor)], mean: usize) -> Vec<usize> {
    let (mut worth, mut caches) = (Vec::new(), 0.0);
    for (_, squared_bgtt) in layers {
        let mut of_layer = Vec::new();
        caches = 0.0;
        for start in (300..CASE.lengths[0]).step_by(CASE.chunk) {
            for (b, &len) in CASE.lengths.iter().enumerate().filter(|(_, len)| start < **len) {
                caches += 2.0;
                for position in 0..start {
                    let first = (position + MIN_DISTANCE as usize).div_ceil(CASE.chunk) * CASE.chunk;
                    let later = squared_bgtt.get(b as i64).select(2, position as i64);
                    let from = first.max(start).min(len) as i64;
                    let sum_g = later.narrow(1, from, len as i64 - from).sum_dim_intlist(&[1i64][..], false, Kind::Double);
                    of_layer.extend(Vec::<f64>::try_from(sum_g).unwrap());
                }
            }
        }
        of_layer.sort_by(|a: &f64, b| b.total_cmp(a));
        worth.push(of_layer);
    }
    let slots = |threshold: f64| -> Vec<usize> {
        let above = |of_layer: &Vec<f64>| of_layer.partition_point(|worth| *worth > threshold) as f64 / caches;
        worth.iter().map(|of_layer| above(of_layer).max(mean as f64 / 4.0) as usize).collect()
    };
    let mut all: Vec<f64> = worth.concat();
    all.sort_by(|a, b| b.total_cmp(a));
    let fits = all.partition_point(|&threshold| slots(threshold).iter().sum::<usize>() <= mean * NUM_LAYERS);
    slots(all[fits - 1])
}

fn calibrated(case: &Case, model: &Model) -> Calibration {
    calibrated_before(case, model, &mut NoObserver)
}

fn calibrated_before(case: &Case, model: &Model, observer: &mut dyn Observer) -> Calibration {
    let (mut calibration, engine) = (Calibration::new(model.config()), engine(case, model));
    let context =
        MicroBatchContext { weight: 1.0, loss_mean: LossMean::Tokens, router_weight: 0.0, dropout: None, chunk_sizes: None };
    engine.calibrate(model, &batch(case), context, &mut calibration, observer).unwrap();
    calibration
}

/// Returns the least that a gate explains, which is below 0 where labels follow no rule.
fn check_gates(calibration: &Calibration, expected: &[(Tensor, Tensor)]) -> f64 {
    let mut least: f64 = 1.0;
    for (layer, (fit, (x_bte, squared_bgtt))) in calibration.gates().into_iter().zip(expected).enumerate() {
        let FittedGate { output, explained } = fit.unwrap();
        assert!(explained < 1.0, "{explained}");
        least = least.min(explained);
        for (found, expected) in output.iter().zip(least_squares(x_bte, squared_bgtt)) {
            let furthest = f64::try_from((found - &expected).abs().max() / expected.abs().max()).unwrap();
            assert!(furthest < 1e-5, "layer {layer}: {furthest}");
        }
    }
    least
}

/// The most that waits in layer checkpoints and outputs of attention.
#[derive(Default)]
struct MostWaiting(Bytes);

impl Observer for MostWaiting {
    fn observe(&mut self, _: Event, memory: &dyn Fn() -> MemoryByPart) {
        self.0 = self.0.max(memory().get(MemoryPart::LayerCheckpoints, MemoryPlace::Host));
    }
}

#[test]
fn layers_in_which_nothing_is_trained_are_learned_of_and_keep_their_outputs() {
    let most = |outputs, model: &Model, expected: &[(Tensor, Tensor)]| {
        let mut most = MostWaiting::default();
        assert!(check_gates(&calibrated_before(&Case { outputs, ..CASE }, model, &mut most), expected) >= 0.0);
        most.0.0
    };
    let outputs_of_all_layers = |model: &Model| {
        let expected = by_autograd(&CASE, model);
        let [kept, again] = [AttentionOutputs::Keep, AttentionOutputs::Recompute].map(|outputs| most(outputs, model, &expected));
        // In f64 of each query head, with a log-sum-exp.
        let outputs = NUM_LAYERS
            * CASE.lengths.iter().sum::<usize>()
            * CASE.heads.0
            * (model.config().layers[0].attention.head_dim + 1)
            * 8;
        assert!(kept - again >= outputs as u64, "{kept} {again} {outputs}");
    };
    outputs_of_all_layers(&model(&Case { layers: &[2], ..CASE }));
    model(&CASE).without_adapter(outputs_of_all_layers);
}

#[test]
fn gates_are_least_squares_on_what_autograd_says_of_scores() {
    let model = model(&CASE);
    let expected = by_autograd(&CASE, &model);
    let paged = Case { storage: Storage::Paged, layers_per_cell: 2, kept: 5, ..CASE };
    for case in [CASE, paged] {
        let calibration = calibrated(&case, &model);
        assert!(check_gates(&calibration, &expected) >= 0.0);
        let (slots, by_sorting) = (calibration.slots(100, 4, 4).unwrap(), slots_by_sorting(&expected, 100));
        assert_eq!(slots.iter().sum::<usize>(), 100 * NUM_LAYERS, "{slots:?}");
        for (found, expected) in slots.iter().zip(&by_sorting) {
            // Importances are counted in bins, and slots come by fours.
            assert!(found.abs_diff(*expected) <= 6, "{slots:?} {by_sorting:?}");
        }
        assert!(slots.iter().any(|slots| slots.abs_diff(100) > 8), "{slots:?}: layers differ");
    }
}

/// Nothing follows the uppermost layer's attention where there are no targets, and its queries count all the same.
#[test]
fn queries_without_targets_count_in_the_uppermost_layer() {
    for targets in [TargetsAt::Last(60), TargetsAt::First(300)] {
        let case = Case { targets, ..CASE };
        let model = model(&case);
        let expected = by_autograd(&case, &model);
        for width in [Width::Chunks(1), Width::Chunks(2)] {
            let calibration = calibrated(&Case { width, ..case }, &model);
            check_gates(&calibration, &expected);
            assert_eq!(calibration.slots(100, 4, 4).unwrap().iter().sum::<usize>(), 100 * NUM_LAYERS);
        }
    }
}

#[test]
fn queries_count_as_they_are_before_they_are_turned_and_those_of_pads_do_not() {
    let model = model(&CASE);
    let calibration = calibrated(&CASE, &model);
    let queries = listened(&CASE, &model).0.queries;
    for (found, q_bhtd) in calibration.queries().zip(queries) {
        let of_sequence = |(b, &len): (usize, &usize)| q_bhtd.get(b as i64).narrow(1, 0, len as i64);
        let real_htd = Tensor::cat(&CASE.lengths.iter().enumerate().map(of_sequence).collect::<Vec<_>>(), 1);
        let mean = |x: &Tensor| x.mean_dim(&[1i64][..], false, Kind::Double);
        let halves = real_htd.chunk(2, -1);
        let length = (halves[0].square() + halves[1].square()).sqrt();
        let [mean_hd, length_hf] = [mean(&real_htd), mean(&length)];
        let halves = mean_hd.chunk(2, -1);
        let length_excess_hf = length_hf - (halves[0].square() + halves[1].square()).sqrt();
        for (found, expected) in found.unwrap().statistics(None).unwrap().iter().zip([mean_hd, length_excess_hf]) {
            assert!(f64::try_from((found - expected).abs().max()).unwrap() < 1e-12);
        }
    }
}

#[test]
fn layers_with_a_window_have_no_gate_and_the_mean_of_the_slots() {
    let case = Case { window: 300, sliding_layers: &[1], ..CASE };
    let calibration = calibrated(&case, &model(&case));
    assert_eq!(calibration.gates().iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, true]);
    let slots = calibration.slots(80, 8, 8).unwrap();
    assert!(slots[1] == 80 && slots.iter().sum::<usize>() == 240, "{slots:?}");
}
