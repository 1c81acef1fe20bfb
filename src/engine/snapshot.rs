//! What a session holds, as tensors and numbers: a long document is read once, and asked on another day.

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::session::{Session, SessionSpec};
use super::{ChunkPlan, Engine, guarded};
use crate::cache::{CacheSnapshot, ChunkSpan};
use crate::model::Model;
use crate::native::locked;
use crate::units::Fault;

/// What a session holds. Its choices are not among it.
#[derive(Debug)]
pub struct SessionSnapshot {
    /// The tensors of each layer's cache, `layers.3.keys.0`.
    pub tensors: Vec<(String, Tensor)>,
    pub numbers: SessionNumbers,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionNumbers {
    num_sequences: usize,
    num_tokens: usize,
    /// Rotary embeddings that depend on the length of a sequence are those of this length.
    rope_length: usize,
    initial: Vec<(usize, usize)>,
    prefill: usize,
    last_chunk: LastChunk,
    caches: Vec<CacheSnapshot>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct LastChunk {
    index: usize,
    number: usize,
    start: usize,
}

impl Session {
    /// What the session holds; `None` of one that has got no tokens, or stands within a block of decoding.
    pub fn snapshot(&self) -> Option<SessionSnapshot> {
        let last = self.plan.spans.last().filter(|_| self.missing == 0)?;
        let mut tensors = Vec::new();
        let caches = self.layers.iter().enumerate().map(|(layer, state)| {
            let mut cache = locked(state).cache.snapshot();
            let own = std::mem::take(&mut cache.tensors).into_iter();
            tensors.extend(own.map(|(name, tensor)| (format!("layers.{layer}.{name}"), tensor)));
            cache
        });
        let numbers = SessionNumbers {
            num_sequences: last.num_sequences(),
            num_tokens: self.num_tokens(),
            rope_length: self.spec.rope_length,
            initial: self.spec.initial.clone(),
            prefill: self.plan.prefill,
            last_chunk: LastChunk { index: last.index, number: last.chunk, start: last.start },
            caches: caches.collect(),
        };
        Some(SessionSnapshot { tensors, numbers })
    }

    /// A session that goes on from a snapshot: made for what `spec` says, but for the prompt, which has been read, and the length of the
    /// rotary embeddings. Model and settings must be those of the snapshot; what does not fit the caches is refused.
    pub fn restored(engine: &Engine, model: &Model, spec: &SessionSpec, snapshot: SessionSnapshot) -> Result<Self, Fault> {
        let SessionSnapshot { tensors, numbers } = snapshot;
        let LastChunk { index, number, start } = numbers.last_chunk;
        let layers = model.config().num_layers();
        let is_whole = numbers.caches.len() == layers && numbers.num_sequences == spec.num_sequences;
        if !is_whole || start >= numbers.num_tokens {
            let found = format!("{} sequences in {} layers", numbers.num_sequences, numbers.caches.len());
            let expected = format!("{} sequences in {layers} layers", spec.num_sequences);
            let message = format!("the saved session does not fit: expected {expected}, found {found}");
            return Err(Fault::data(message, "read the document again with this model"));
        }
        let spec = SessionSpec {
            prompt: Some(numbers.prefill),
            rope_length: numbers.rope_length,
            initial: numbers.initial,
            ..spec.clone()
        };
        let mut session = Self::new(engine, model, &spec)?;
        session.check_room(numbers.num_tokens)?;
        guarded(|| {
            let len = numbers.num_tokens - start;
            let last = ChunkSpan { index, chunk: number, start, len, real: vec![len; numbers.num_sequences], is_block: false };
            session.plan = ChunkPlan::behind(engine.settings().cuts_of(&spec), last);
            for (layer, (state, mut cache)) in session.layers.iter().zip(numbers.caches).enumerate() {
                let prefix = format!("layers.{layer}.");
                let own =
                    |(name, tensor): &(String, Tensor)| Some((name.strip_prefix(&prefix)?.to_owned(), tensor.shallow_clone()));
                cache.tensors = tensors.iter().filter_map(own).collect();
                locked(state).fill(&cache)?;
            }
            Ok(session)
        })
    }
}
