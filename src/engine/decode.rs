//! Decoding: one further token of each of several sequences, which are at different positions and come and go as they like.

use tch::{Tensor, no_grad};

use super::attended_chunk::ChunkPart;
use super::extend::other_ids;
use super::layer_state::SharedLayer;
use super::session::{PassOrder, Session};
use super::{Engine, guarded};
use crate::cache::{Policy, Routing};
use crate::model::{Attend, CapturedLayers, DropoutContext, Model, Qkv, Routed};
use crate::native::cuda::on_device;
use crate::native::locked;
use crate::ops::attention::ModelFeature;
use crate::ops::frequencies::Frequencies;
use crate::units::{Fault, LayerIdx};

/// Runs the next token of each session, which has one sequence; the hidden states of the last layer are returned.
///
/// What is no attention is computed for all at once, in `width` rows of which the last may be empty: they mean nothing. With the same width
/// a sequence gets the same bits whatever the others are, where the model has no experts: their products are as large as the tokens that
/// they get. With experts no row is empty, but at fixed widths.
///
/// `layers` are those of [`super::Settings::session_layers`], or none that are captured.
///
/// # Shapes
/// One id for each session in, `(width, 1, E)` out, or as many rows as there are sessions.
pub fn decode_step(
    engine: &Engine,
    model: &Model,
    layers: &mut CapturedLayers,
    sessions: &mut [&mut Session],
    ids: &[u32],
    width: usize,
) -> Result<Tensor, Fault> {
    guarded(|| {
        if ids.len() != sessions.len() {
            return Err(Fault::defect(format!("{} ids for {} sessions", ids.len(), sessions.len())));
        }
        for session in sessions.iter() {
            if session.num_sequences() != 1 {
                return Err(other_ids(session.num_sequences(), &[1, 1]));
            }
            session.check_room(1)?;
        }
        // Empty rows would have weights of experts read that no token needs.
        let fills_up = !model.config().has_experts() || engine.settings.static_width().is_some();
        let rows = if fills_up { width.max(sessions.len()) } else { sessions.len() };
        let mut parts = Vec::with_capacity(sessions.len());
        for session in sessions.iter_mut() {
            parts.extend(session.next_part());
            session.missing -= 1;
        }
        for (session, part) in sessions.iter().zip(&parts).filter(|(_, part)| part.from == 0) {
            let column = session.column(std::slice::from_ref(&part.span), 0..session.layers.len());
            no_grad(|| column.allocate_across_layers(&engine.settings.policies));
        }
        let states = sessions.iter().map(|session| &session.layers[..]).collect();
        let mut attend = DecodeAttention { states, parts: &parts, policies: &engine.settings.policies, rows: rows as i64 };
        let column = |numbers: &mut dyn Iterator<Item = i64>| {
            let mut all: Vec<i64> = numbers.collect();
            all.resize(rows, 0);
            on_device(&all, model.device()).unsqueeze(1)
        };
        let position_b1 = column(&mut parts.iter().map(|part| (part.span.start + part.from) as i64));
        let ids_b1 = column(&mut ids.iter().map(|&id| i64::from(id)));
        let positions = model.positions(position_b1, &frequencies(sessions, rows));
        no_grad(|| {
            let (mut hidden, dropout) = (model.embed(&ids_b1), DropoutContext::default());
            let mut layers = layers.column(model, &dropout, &positions, rows, 1);
            for layer in 0..model.config().num_layers() {
                PassOrder::Up.enter(&engine.settings, model, layer);
                hidden = layers.layer(LayerIdx(layer), &hidden, &mut attend)?;
            }
            Ok(hidden)
        })
    })
}

/// Frequencies of all rows by rotation; an empty row has those of the first session.
fn frequencies(sessions: &[&mut Session], rows: usize) -> Vec<Frequencies> {
    let Some(first) = sessions.first() else { return Vec::new() };
    let of_rotation = |rotation: usize| {
        let of_row = |row: usize| &sessions.get(row).unwrap_or(first).frequencies[rotation];
        Frequencies::joined(&(0..rows).map(of_row).collect::<Vec<_>>())
    };
    (0..first.frequencies.len()).map(of_rotation).collect()
}

struct DecodeAttention<'a> {
    states: Vec<&'a [SharedLayer]>,
    parts: &'a [ChunkPart],
    policies: &'a [Box<dyn Policy>],
    rows: i64,
}

impl Attend for DecodeAttention<'_> {
    fn attend(&mut self, layer: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault> {
        let mut outs = Vec::with_capacity(self.states.len() + 1);
        for (row, (states, part)) in self.states.iter().zip(self.parts).enumerate() {
            let own = |x: &Tensor| x.narrow(0, row as i64, 1);
            let own = Qkv { q_bhnd: own(&qkv.q_bhnd), own: qkv.own.map(own), ..qkv.clone() };
            let mut state = locked(&states[layer.0]);
            state.cache.prefetch();
            outs.push(state.forward_part(&*self.policies[layer.0], part, &own)?);
            state.cache.offload();
        }
        let empty = self.rows - outs.len() as i64;
        if empty > 0 {
            outs.push(outs[0].zeros_like().expand([empty, -1, -1, -1], false));
        }
        Ok(if outs.len() == 1 { outs.remove(0) } else { Tensor::cat(&outs, 0) })
    }

    fn model_feature(&self, layer: LayerIdx) -> Option<ModelFeature> {
        self.policies[layer.0].traits().model_feature
    }

    fn route(&mut self, layer: LayerIdx, routed: Routed<'_>, choose: &dyn Fn() -> Tensor) -> Result<Tensor, Fault> {
        let num_experts = routed.probability_bnx.size()[2] as usize;
        let chosen_bnk = choose();
        for (row, (states, part)) in self.states.iter().zip(self.parts).enumerate() {
            let routing = || Routing::new(&chosen_bnk.narrow(0, row as i64, 1), num_experts);
            locked(&states[layer.0]).log.record_routing(routing, part.from > 0);
        }
        Ok(chosen_bnk)
    }
}
