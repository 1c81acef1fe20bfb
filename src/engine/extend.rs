//! A session that is extended as tokens come: a prompt as a whole, a generated token alone.

use tch::{Tensor, no_grad};

use super::attend::{ColumnAttention, Mode};
use super::layer_state::{lock, new_layer_states};
use super::router_balance::RouterTask;
use super::session::{Pass, Session};
use super::{ChunkPlan, Engine, EngineError, guarded};
use crate::cache::LayerCache;
use crate::model::{CapturedLayers, DropoutContext, Model};
use crate::units::LayerIdx;

impl Session {
    /// A session for sequences of at most `max_tokens` tokens each, with empty caches, whose policies choose. A policy that protects the
    /// initial part of a prompt is told of none. The session's log serves to compare choices; the engine does not follow it, as caches
    /// that depend on the length of a sequence have that of `max_tokens`. So have rotary embeddings that depend on it.
    pub fn new(engine: &Engine, model: &Model, num_sequences: usize, max_tokens: usize) -> Result<Self, EngineError> {
        guarded(|| {
            let (settings, options) = (&engine.0.settings, (model.kind(), model.device()));
            settings.check_fits(max_tokens)?;
            let plan = ChunkPlan::arriving(settings.cuts_as_they_come());
            let shapes = settings.shapes_of(model.config(), (num_sequences, max_tokens), settings.longest_chunk(), options);
            let cache = |(layer, shape)| LayerCache::new(LayerIdx(layer), shape, plan.prefill);
            let caches = shapes.into_iter().enumerate().map(cache).collect();
            Ok(Self { layers: new_layer_states(caches, &engine.0.stores.undo_log), plan, max_tokens })
        })
    }

    /// Runs the next tokens of every sequence, in chunks as long as the settings allow: a prompt as a whole, a generated token alone.
    /// Nothing is kept for a backward phase.
    ///
    /// # Shapes
    /// `(B, n)` int64 in; the last layer's hidden states `(B, n, E)` out, before the final norm.
    pub fn extend(&mut self, engine: &Engine, model: &Model, ids_bn: &Tensor) -> Result<Tensor, EngineError> {
        guarded(|| {
            let (num_sequences, num_tokens) = ids_bn.size2().unwrap_or_default();
            let tokens = self.num_tokens() + num_tokens as usize;
            let num_own = self.layers.first().map_or(num_sequences, |layer| lock(layer).cache.shape().batch);
            if num_tokens == 0 || num_sequences != num_own {
                return Err(EngineError::SessionIds { found: (num_sequences, num_tokens), expected: num_own });
            }
            if tokens > self.max_tokens {
                return Err(EngineError::SessionLength { tokens, max_tokens: self.max_tokens });
            }
            let column = self.plan.extend(num_sequences as usize, num_tokens as usize);
            let mode = Mode::Choose { policies: &engine.0.settings.policies, keeps_undo: 0..0 };
            let frequencies = model.frequencies(&vec![self.max_tokens; num_sequences as usize]);
            let (captured, place) = (&mut CapturedLayers::default(), DropoutContext::default());
            let mut pass = Pass { model, captured, frequencies: &frequencies, place };
            let column = self.column(&self.plan.spans[column], 0..self.layers.len());
            let mut attend = ColumnAttention { column, mode, routers: RouterTask::Leave };
            no_grad(|| pass.run(model.embed(ids_bn), &mut attend, &mut |_, _| Ok(())))
        })
    }
}
