//! How near to the exact gradient one must come whose stores round; and whether f64 is to be had.

use crate::data::Batch;
use crate::engine::Settings;
use crate::model::Model;
use crate::recipe::StoreForm;
use crate::report::memory::available;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ErrorBound {
    /// The least cosine with the exact gradient.
    pub smallest_cosine: f64,
    /// The greatest distance from the exact gradient, relative to its norm.
    pub largest_error: f64,
}

impl ErrorBound {
    pub fn of(form: StoreForm) -> Self {
        match form {
            StoreForm::Plain => Self { smallest_cosine: 1.0, largest_error: 0.0 },
            StoreForm::Int8 => Self { smallest_cosine: 0.9999, largest_error: 0.005 },
            StoreForm::Int4 => Self { smallest_cosine: 0.995, largest_error: 0.1 },
        }
    }

    /// The bounds of an engine's stores together, of a model that is trained from a layer on; `None` where its gradient is exact. The coarsest
    /// form decides: beside layer checkpoints an undo log of the same form adds little, as it rounds keys and values that are gone for most
    /// queries.
    pub fn of_stores(settings: &Settings, first_trained: usize) -> Option<Self> {
        let each = settings.inexact_stores(first_trained).into_iter().map(|(_, form)| Self::of(form));
        each.reduce(|a, b| Self {
            smallest_cosine: a.smallest_cosine.min(b.smallest_cosine),
            largest_error: a.largest_error.max(b.largest_error),
        })
    }
}

/// Whether weights and the reference's activations in f64 take at most half of the memory that is available.
pub fn fits_in_f64(model: &Model, batch: &Batch) -> bool {
    let config = model.config();
    let tokens = batch.sequences.len() * batch.max_len();
    // Per layer autograd keeps about a dozen tensors of the hidden width, six of the MLP's, and the attention's.
    let per_token = config.num_layers()
        * (14 * config.hidden_size
            + 6 * config.intermediate_size()
            + 6 * config.layers[0].attention.num_heads * config.layers[0].attention.head_dim);
    let layer = 4 * config.hidden_size * config.hidden_size + 3 * config.hidden_size * config.intermediate_size();
    let weights = config.num_layers() * layer + 2 * config.vocab_size * config.hidden_size;
    // A block of 512 queries against all keys, a few times over.
    let scores = 4 * batch.sequences.len() * config.layers[0].attention.num_heads * batch.max_len().min(512) * batch.max_len();
    // Where all weights are trained: their gradients by either road, and logits that are differentiated as a whole.
    let is_full = !model.head_parameters().is_empty();
    let trained = if is_full { 2 * weights + 4 * batch.num_targets() * config.vocab_size } else { 0 };
    let needed = 8 * (tokens * per_token + weights + scores + trained);
    available().is_none_or(|available| needed as u64 <= available.0 / 2)
}
