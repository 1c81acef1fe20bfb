//! Masked dense attention over the whole sequence, by plain autograd.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor, no_grad, with_grad};

use super::departures;
use crate::cache::{self, ReplayLog};
use crate::data::Batch;
use crate::engine::{Engine, MicroBatchContext, sequence_weights, soft_rows, soft_targets, target_positions};
use crate::head::{ColumnTargets, Losses, SequenceLoss, TargetPosition, column_loss};
use crate::model::{Attend, DropoutContext, Model, Qkv, Routed};
use crate::native::{attach_backward, gradients_of, run_backward, take_gradient};
use crate::ops::attention::{ScoreRule, accumulation_kind};
use crate::recipe::{BufferKind, LossMean};
use crate::units::{Fault, LayerIdx};

/// Queries whose scores are held at a time; longer sequences recompute each block in the backward.
const BLOCK: i64 = 512;

/// Losses and gradients of masked dense autograd for one batch and the choices made on it. Cells and stores play no part in it, so that one
/// reference serves every tiling.
#[derive(Debug)]
pub struct Reference {
    pub sequences: Vec<SequenceLoss>,
    /// By the names of the model's parameters.
    pub gradients: BTreeMap<String, Tensor>,
}

impl Reference {
    /// Loss by sequence, and gradients by name, of the network in which a query sees a token until the chunk that evicts it by `log`.
    /// The engine is asked for the head and for how entries are stored.
    pub fn new(
        engine: &Engine,
        model: &Model,
        batch: &Batch,
        log: &ReplayLog,
        context: MicroBatchContext,
    ) -> Result<Self, Fault> {
        let groups = model.config().num_kv_heads();
        // One layer at a time: what each slot held after each chunk is far larger than when each token left.
        let gone = |layer| departures(log, layer, groups[layer]).map(|gone| gone_tensor(&gone, model.device()));
        let mut attend = MaskedDense {
            gone: (0..model.config().num_layers()).map(gone).collect::<Result<_, _>>()?,
            chunk_t: chunks(log, model.device()),
            buffer: engine.settings().kv_cache().buffer,
            routing: (0..model.config().num_layers()).map(|l| log.routing(l, batch.sequences.len(), model.device())).collect(),
            routers: Vec::new(),
        };
        let hidden = with_grad(|| forward(model, batch, context, &mut attend))?;

        let router_loss = with_grad(|| attend.router_loss(batch, context.router_weight));
        let one = router_loss.as_ref().map(Tensor::ones_like);
        let target_positions = target_positions(engine.head(), batch)?;
        let soft = soft_rows(&soft_targets(batch), &target_positions, model.device());
        let sequence_weights = (context.loss_mean == LossMean::Sequences).then(|| sequence_weights(&target_positions));
        let places = ColumnTargets {
            start: 0,
            target_positions: &target_positions,
            sequence_weights: sequence_weights.as_deref(),
            soft: soft.as_ref(),
        };
        // A frozen head is differentiated in blocks: a vocabulary may be large.
        let losses = if model.head_parameters().is_empty() {
            let (losses, gradient) = column_loss(engine.head(), &hidden.detach(), places, model, Some(context.weight), &mut [])?;
            let of_hidden = gradient.iter().map(|gradient| (&hidden, gradient));
            let of_routers = router_loss.iter().zip(&one);
            let (roots, seeds): (Vec<_>, Vec<_>) = of_hidden.chain(of_routers).filter(|(root, _)| root.requires_grad()).unzip();
            if !roots.is_empty() {
                run_backward(&roots, &seeds)?;
            }
            losses.iter().map(Losses::read).collect::<Result<Vec<_>, _>>()?.concat()
        } else {
            through_the_head(engine, model, &hidden, places, router_loss.as_ref(), context.weight)?
        };
        let mut sequences = vec![SequenceLoss::default(); batch.sequences.len()];
        for (pick, value, correct) in losses {
            let sequence = &mut sequences[pick.sequence];
            (sequence.loss_sum, sequence.targets, sequence.correct) =
                (sequence.loss_sum + value, sequence.targets + 1, sequence.correct + usize::from(correct));
        }
        let mut gradients = BTreeMap::new();
        for (name, parameter) in model.parameters() {
            gradients.insert(name, take_gradient(&parameter)?.unwrap_or_else(|| parameter.zeros_like()).detach());
        }
        Ok(Self { sequences, gradients })
    }
}

fn forward(model: &Model, batch: &Batch, context: MicroBatchContext, attend: &mut MaskedDense) -> Result<Tensor, Fault> {
    let total = batch.max_len();
    let ids = Tensor::from_slice(&batch.padded_inputs(total))
        .view([batch.sequences.len() as i64, total as i64])
        .to_device(model.device());
    let samples: Vec<u64> = batch.sequences.iter().map(|r| r.sample).collect();
    let dropout = DropoutContext { dropout: context.dropout, samples: &samples };
    // A rotation that depends on the length of its sequence does so without pads.
    let lengths: Vec<usize> = batch.sequences.iter().map(|sequence| sequence.inputs.len()).collect();
    let position = Tensor::arange(total as i64, (Kind::Int64, model.device()));
    let positions = model.positions(position.view([1, -1]), &model.frequencies(&lengths));
    let mut hidden = model.embed(&ids);
    // Plain autograd keeps them all.
    model.bring_layers(0..model.config().num_layers(), None);
    for layer in 0..model.config().num_layers() {
        hidden = model.layer(LayerIdx(layer), &hidden, &positions, &dropout, attend)?;
    }
    Ok(hidden)
}

/// Losses at the target positions, and backward from their weighted sum through the whole model at once: blocks would be the engine's road.
fn through_the_head(
    engine: &Engine,
    model: &Model,
    hidden_bte: &Tensor,
    places: ColumnTargets<'_>,
    router_loss: Option<&Tensor>,
    weight: f64,
) -> Result<Vec<(TargetPosition, f64, bool)>, Fault> {
    let (_, total, e) = hidden_bte.size3().unwrap_or_default();
    let (target_positions, device) = (places.target_positions, hidden_bte.device());
    let column = |value: &dyn Fn(&TargetPosition) -> i64| {
        Tensor::from_slice(&target_positions.iter().map(value).collect::<Vec<_>>()).to_device(device)
    };
    let (place_n, target_n) = (column(&|p| p.sequence as i64 * total + p.position as i64), column(&|p| p.target));
    let score_nk = with_grad(|| {
        let hidden_ne = hidden_bte.reshape([-1, e]).index_select(0, &place_n);
        let score_nk = engine.head().choices(&model.logits(&model.final_norm(&hidden_ne)));
        score_nk.to_kind(accumulation_kind(score_nk.kind()))
    });
    let weight_n = places
        .sequence_weights
        .map_or_else(|| Tensor::ones([target_positions.len() as i64], (Kind::Double, Device::Cpu)), Tensor::from_slice);
    let weight_n = weight_n.to_device(device).to_kind(score_nk.kind());
    let (loss_n, correct_n, root, seed) = if let Some(soft) = places.soft {
        // The divergence has a textbook of its own, in its test.
        let found = engine.head().losses(&score_nk.detach(), &target_n, Some(soft), Some(weight));
        let [loss_n, correct_n] = [0, 1].map(|row| found.loss_and_correct_2n.get(row));
        let gradient_nk = found.gradient_nk.unwrap_or_else(|| score_nk.zeros_like());
        (loss_n, correct_n, score_nk.shallow_clone(), gradient_nk * weight_n.unsqueeze(1))
    } else {
        let loss_n = with_grad(|| -score_nk.log_softmax(-1, None).gather(1, &target_n.unsqueeze(1), false).squeeze_dim(1));
        let (correct_n, seed) = (score_nk.detach().argmax(-1, false).eq_tensor(&target_n), weight_n * weight);
        (loss_n.detach(), correct_n, loss_n, seed)
    };
    let one = router_loss.map(Tensor::ones_like);
    let (roots, seeds): (Vec<_>, Vec<_>) = [(&root, &seed)].into_iter().chain(router_loss.zip(one.as_ref())).unzip();
    run_backward(&roots, &seeds)?;
    let losses = Vec::<f64>::try_from(loss_n.to_device(Device::Cpu).to_kind(Kind::Double))?;
    let correct = Vec::<f64>::try_from(correct_n.to_device(Device::Cpu).to_kind(Kind::Double))?;
    let figures = target_positions.iter().zip(losses).zip(correct);
    Ok(figures.map(|((&pick, loss), correct)| (pick, loss, correct > 0.0)).collect())
}

fn gone_tensor(gone: &[Vec<Vec<i64>>], device: Device) -> Tensor {
    let (b, g, t) = (gone.len(), gone[0].len(), gone[0][0].len());
    let flat: Vec<i64> = gone.iter().flatten().flatten().copied().collect();
    Tensor::from_slice(&flat).view([b as i64, g as i64, t as i64]).to_device(device)
}

fn chunks(log: &ReplayLog, device: Device) -> Tensor {
    let of_tokens: Vec<i64> = log.spans.iter().flat_map(|span| vec![span.index as i64; span.len]).collect();
    Tensor::from_slice(&of_tokens).to_device(device)
}

/// Dense attention of the whole sequence, in which query `i` sees token `j ≤ i` as long as `i < gone[j]`: exactly in its own chunk, and
/// as the buffer stores it later.
struct MaskedDense {
    /// The first query that no longer sees each token `(B, G, T)`, by layer.
    gone: Vec<Tensor>,
    chunk_t: Tensor,
    buffer: BufferKind,
    /// Experts `(B, T, k)` that the engine's tokens went to, by layer; `None` where the layer has none.
    routing: Vec<Option<Tensor>>,
    /// Router probabilities `(B, T, X)` and chosen experts of each layer that has some.
    routers: Vec<(Tensor, Tensor)>,
}

impl MaskedDense {
    /// `weight` times the routers' load-balance loss, as a textbook has it; `None` where it has no weight or there are no routers.
    fn router_loss(&self, batch: &Batch, weight: f64) -> Option<Tensor> {
        if weight == 0.0 || self.routers.is_empty() {
            return None;
        }
        let real = |of: &Tensor| {
            let of_sequence =
                |(i, sequence): (usize, &crate::data::Sequence)| of.get(i as i64).narrow(0, 0, sequence.inputs.len() as i64);
            Tensor::cat(&batch.sequences.iter().enumerate().map(of_sequence).collect::<Vec<_>>(), 0)
        };
        let all = |part: fn(&(Tensor, Tensor)) -> &Tensor| {
            Tensor::cat(&self.routers.iter().map(|layer| real(part(layer))).collect::<Vec<_>>(), 0)
        };
        let (probability_nx, chosen_nk) = (all(|layer| &layer.0), all(|layer| &layer.1));
        let experts = probability_nx.size()[1];
        let tokens = probability_nx.size()[0] as f64;
        let share_x = chosen_nk.reshape([-1]).bincount::<Tensor>(None, experts).to_kind(probability_nx.kind()) / tokens;
        let mean_x = probability_nx.sum_dim_intlist(&[0i64][..], false, probability_nx.kind()) / tokens;
        Some((share_x * mean_x).sum(None) * (weight * experts as f64))
    }
}

impl Attend for MaskedDense {
    fn route(&mut self, layer: LayerIdx, routed: Routed<'_>, choose: &dyn Fn() -> Tensor) -> Result<Tensor, Fault> {
        let chosen_btk = self.routing[layer.0].as_ref().map_or_else(choose, Tensor::shallow_clone);
        self.routers.push((routed.probability_bnx.shallow_clone(), chosen_btk.shallow_clone()));
        Ok(chosen_btk)
    }

    fn attend(&mut self, layer: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault> {
        let total = qkv.q_bhnd.size()[2];
        // What storing changes is a constant: quantisation is differentiated as the identity.
        let change = |x: &Tensor| no_grad(|| cache::as_stored(self.buffer, &x.detach()) - x.detach());
        let changes = (self.buffer != BufferKind::Plain).then(|| (change(&qkv.own.k), change(&qkv.own.v)));
        let mut outs = Vec::new();
        for start in (0..total).step_by(BLOCK as usize) {
            let len = BLOCK.min(total - start);
            let q = qkv.q_bhnd.narrow(2, start, len);
            let before = |x: &Tensor| x.narrow(2, 0, start + len);
            let (k, v) = (before(&qkv.own.k), before(&qkv.own.v));
            let view = View {
                gone_bgt: before(&self.gone[layer.0]),
                chunk_t: self.chunk_t.narrow(0, 0, start + len),
                changes: changes.as_ref().map(|(k, v)| (before(k), before(v))),
                start,
                rule: qkv.rule,
            };
            let sink_logit = qkv.sink_logit_h.as_ref();
            outs.push(if total <= BLOCK {
                view.attend(&q, &k, &v, sink_logit)
            } else {
                recomputed([q, k, v], sink_logit, view)?
            });
        }
        Ok(Tensor::cat(&outs, 2))
    }
}

/// What the queries from position `start` on see.
struct View {
    gone_bgt: Tensor,
    chunk_t: Tensor,
    /// What storing adds to keys and values `(B, G, T, D)`, where entries are quantised.
    changes: Option<(Tensor, Tensor)>,
    start: i64,
    rule: ScoreRule,
}

impl View {
    /// Softmax attention, as in a textbook; a sink logit is one more score, whose weight is left out.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, sink_logit_h: Option<&Tensor>) -> Tensor {
        let (repeat, len, total) = (q.size()[1] / k.size()[1], q.size()[2], k.size()[2]);
        let wide = |x: &Tensor| x.repeat_interleave_self_int(repeat, 1, None);
        let scaled = |k: &Tensor| q.matmul(&wide(k).transpose(-1, -2)) * self.rule.scale;
        let products = |k: &Tensor| match self.rule.soft_cap {
            Some(cap) => (scaled(k) / cap).tanh() * cap,
            None => scaled(k),
        };
        let query = Tensor::arange_start(self.start, self.start + len, (Kind::Int64, q.device())).view([1, 1, -1, 1]);
        let key = Tensor::arange(total, (Kind::Int64, q.device())).view([1, 1, 1, -1]);
        let end = match self.rule.window {
            // Of the window alone: a cache that keeps less is noticed.
            Some(window) => &key + window as i64,
            None => wide(&self.gone_bgt).unsqueeze(2),
        };
        let seen = key.le_tensor(&query).logical_and(&query.lt_tensor(&end));
        let hide = |scores: Tensor| scores.masked_fill(&seen.logical_not(), f64::NEG_INFINITY);
        let weights = |scores: Tensor| {
            let Some(sink_logit_h) = sink_logit_h else { return scores.softmax(-1, None) };
            let sink_logits = sink_logit_h.view([1, -1, 1, 1]).expand([scores.size()[0], -1, len, 1], false);
            Tensor::cat(&[scores, sink_logits], -1).softmax(-1, None).narrow(-1, 0, total)
        };
        let Some((change_k, change_v)) = &self.changes else {
            return weights(hide(products(k))).matmul(&wide(v));
        };
        let own = self.chunk_t.narrow(0, self.start, len).unsqueeze(1).eq_tensor(&self.chunk_t.unsqueeze(0));
        let weights = weights(hide(products(k).where_self(&own, &products(&(k + change_k)))));
        let (exact, stored) = (&weights * own.to_kind(q.kind()), &weights * own.logical_not().to_kind(q.kind()));
        exact.matmul(&wide(v)) + stored.matmul(&wide(&(v + change_v)))
    }
}

/// The same, with the scores recomputed in the backward instead of kept.
fn recomputed([q, k, v]: [Tensor; 3], sink_logit_h: Option<&Tensor>, view: View) -> Result<Tensor, Fault> {
    let inputs: Vec<&Tensor> = [&q, &k, &v].into_iter().chain(sink_logit_h).collect();
    let needs: Vec<bool> = inputs.iter().map(|input| input.requires_grad()).collect();
    let detached: Vec<Tensor> = inputs.iter().map(|input| input.detach()).collect();
    let attend = move |x: &[Tensor]| view.attend(&x[0], &x[1], &x[2], x.get(3));
    let out = no_grad(|| attend(&detached));
    if !needs.contains(&true) {
        return Ok(out);
    }
    let backward = move |grads: Vec<Option<Tensor>>| {
        let Some(seed) = grads.into_iter().next().flatten() else { return Ok(needs.iter().map(|_| None).collect()) };
        let leaves: Vec<Tensor> = detached.into_iter().map(|x| x.set_requires_grad(true)).collect();
        let out = with_grad(|| attend(&leaves));
        gradients_of(&[&out], &[&seed], &leaves.iter().collect::<Vec<_>>())
            .map(|grads| grads.into_iter().zip(needs).map(|(g, needed)| g.filter(|_| needed)).collect())
            .map_err(|e| e.to_string())
    };
    attach_backward(&inputs, &[&out], backward)?;
    Ok(out)
}
