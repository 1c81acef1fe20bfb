//! Whether the reference fits into memory in f64.

use crate::data::Batch;
use crate::model::Model;
use crate::report::memory::available;

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
