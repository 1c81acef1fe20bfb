//! Masked dense attention over the whole sequence, by plain autograd.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor, no_grad, with_grad};

use super::{VerifyError, walk};
use crate::cache::ReplayLog;
use crate::data::{Batch, Targets};
use crate::engine::{Engine, StepContext};
use crate::head::{Logits, Pick, RowLoss, RowTargets, column_loss};
use crate::model::{Attend, AttendError, Model, Place, Qkv};
use crate::native::{attach_backward, gradients_of, run_backward};
use crate::units::LayerIdx;

/// Queries whose scores are held at a time; longer sequences recompute each block in the backward.
const BLOCK: i64 = 512;

/// Loss by row, and gradients by name, of the network in which a query sees a token until the chunk that evicts it.
pub fn reference_gradients(
    engine: &Engine,
    model: &Model,
    batch: &Batch,
    log: &ReplayLog,
    context: StepContext,
) -> Result<(Vec<RowLoss>, BTreeMap<String, Tensor>), VerifyError> {
    let groups = model.config().num_kv_heads;
    // One layer at a time: what each slot held after each chunk is far larger than when each token left.
    let gone = |layer| walk(log, layer, groups).map(|w| gone_tensor(&w.gone, model.device()));
    let mut attend = MaskedDense { gone: (0..model.config().num_layers).map(gone).collect::<Result<_, _>>()? };
    let hidden = with_grad(|| forward(model, batch, context, &mut attend))?;

    let mut picks: Vec<Pick> = Vec::new();
    for (index, row) in batch.rows.iter().enumerate() {
        let targets = match &row.targets {
            Targets::NextToken(labels) => RowTargets::Tokens(labels),
            Targets::Class(class) => RowTargets::Class { len: row.inputs.len(), class: *class },
        };
        picks.extend(engine.head().picks(index, targets)?);
    }
    let logits = (&WholeHead(model) as &dyn Logits, model.config().vocab_size);
    let loss = column_loss(engine.head(), &hidden.detach(), 0, &picks, logits, Some(context.weight))?;
    let mut rows = vec![RowLoss::default(); batch.rows.len()];
    for (pick, value, correct) in loss.picks {
        let row = &mut rows[pick.row];
        (row.loss_sum, row.targets, row.correct) = (row.loss_sum + value, row.targets + 1, row.correct + usize::from(correct));
    }
    if let (Some(gradient), true) = (&loss.hidden_gradient, hidden.requires_grad()) {
        run_backward(&[&hidden], &[gradient])?;
    }
    let mut gradients = BTreeMap::new();
    for (name, mut parameter) in model.adapter().map(crate::model::Adapter::parameters).unwrap_or_default() {
        let grad = parameter.grad();
        gradients.insert(name, if grad.defined() { grad.copy() } else { parameter.zeros_like() }.detach());
        parameter.zero_grad();
    }
    Ok((rows, gradients))
}

fn forward(model: &Model, batch: &Batch, context: StepContext, attend: &mut MaskedDense) -> Result<Tensor, VerifyError> {
    let total = batch.max_len();
    let padded = |row: &crate::data::Row| {
        row.inputs.iter().map(|&id| i64::from(id)).chain(std::iter::repeat(0)).take(total).collect::<Vec<_>>()
    };
    let ids: Vec<i64> = batch.rows.iter().flat_map(padded).collect();
    let ids = Tensor::from_slice(&ids).view([batch.rows.len() as i64, total as i64]).to_device(model.device());
    let samples: Vec<u64> = batch.rows.iter().map(|r| r.sample).collect();
    let place = Place { dropout: context.dropout, samples: &samples };
    let positions = Tensor::arange(total as i64, (Kind::Int64, model.device())).view([1, -1]);
    let mut hidden = model.embed(&ids);
    for layer in 0..model.config().num_layers {
        hidden = model.layer(LayerIdx(layer), &hidden, &positions, &place, attend)?;
    }
    Ok(hidden)
}

struct WholeHead<'a>(&'a Model);

impl Logits for WholeHead<'_> {
    fn logits(&self, hidden_ne: &Tensor) -> Tensor {
        self.0.logits(&self.0.final_norm(hidden_ne))
    }
}

fn gone_tensor(gone: &[Vec<Vec<i64>>], device: Device) -> Tensor {
    let (b, g, t) = (gone.len(), gone[0].len(), gone[0][0].len());
    let flat: Vec<i64> = gone.iter().flatten().flatten().copied().collect();
    Tensor::from_slice(&flat).view([b as i64, g as i64, t as i64]).to_device(device)
}

/// Dense attention of the whole sequence, in which query `i` sees token `j ≤ i` as long as `i < gone[j]`.
struct MaskedDense {
    /// By layer `(B, G, T)`.
    gone: Vec<Tensor>,
}

impl Attend for MaskedDense {
    fn attend(&mut self, layer: LayerIdx, qkv: Qkv<'_>) -> Result<Tensor, AttendError> {
        let total = qkv.q_bhnd.size()[2];
        let mut outs = Vec::new();
        for start in (0..total).step_by(BLOCK as usize) {
            let len = BLOCK.min(total - start);
            let q = qkv.q_bhnd.narrow(2, start, len);
            let (k, v) = (qkv.k_bgnd.narrow(2, 0, start + len), qkv.v_bgnd.narrow(2, 0, start + len));
            let gone = self.gone[layer.0].narrow(2, 0, start + len);
            outs.push(if total <= BLOCK {
                masked(&q, &k, &v, &gone, start, qkv.scale)
            } else {
                recomputed([q, k, v], gone, start, qkv.scale)?
            });
        }
        Ok(Tensor::cat(&outs, 2))
    }
}

/// Softmax attention of the queries from position `start` on, as in a textbook.
fn masked(q: &Tensor, k: &Tensor, v: &Tensor, gone_bgt: &Tensor, start: i64, scale: f64) -> Tensor {
    let (repeat, len, total) = (q.size()[1] / k.size()[1], q.size()[2], k.size()[2]);
    let wide = |x: &Tensor| x.repeat_interleave_self_int(repeat, 1, None);
    let query = Tensor::arange_start(start, start + len, (Kind::Int64, q.device())).view([1, 1, -1, 1]);
    let key = Tensor::arange(total, (Kind::Int64, q.device())).view([1, 1, 1, -1]);
    let seen = key.le_tensor(&query).logical_and(&query.lt_tensor(&wide(gone_bgt).unsqueeze(2)));
    let scores = (q.matmul(&wide(k).transpose(-1, -2)) * scale).masked_fill(&seen.logical_not(), f64::NEG_INFINITY);
    scores.softmax(-1, None).matmul(&wide(v))
}

/// The same, with the scores recomputed in the backward instead of kept.
fn recomputed([q, k, v]: [Tensor; 3], gone: Tensor, start: i64, scale: f64) -> Result<Tensor, AttendError> {
    let needs = [&q, &k, &v].map(Tensor::requires_grad);
    let detached = [&q, &k, &v].map(Tensor::detach);
    let out = no_grad(|| masked(&detached[0], &detached[1], &detached[2], &gone, start, scale));
    if !needs.contains(&true) {
        return Ok(out);
    }
    let backward = move |grads: Vec<Option<Tensor>>| {
        let Some(seed) = grads.into_iter().next().flatten() else { return Ok(vec![None, None, None]) };
        let leaves = detached.map(|x| x.set_requires_grad(true));
        let out = with_grad(|| masked(&leaves[0], &leaves[1], &leaves[2], &gone, start, scale));
        gradients_of(&[&out], &[&seed], &[&leaves[0], &leaves[1], &leaves[2]])
            .map(|grads| grads.into_iter().zip(needs).map(|(g, needed)| g.filter(|_| needed)).collect())
            .map_err(|e| e.to_string())
    };
    attach_backward(&[&q, &k, &v], &[&out], backward).map_err(|e| AttendError::new(e.to_string()))?;
    Ok(out)
}
