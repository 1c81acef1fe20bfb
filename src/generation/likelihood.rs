//! How likely tokens are by the model itself, before any rule of sampling.

use tch::{Kind, Tensor, no_grad};

use crate::model::Model;

/// How likely a token is.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLikelihood {
    pub id: u32,
    /// The logarithm of its probability.
    pub log_probability: f32,
    /// The most likely tokens with their log-probabilities, descending.
    pub most_likely: Vec<(u32, f32)>,
}

/// Tokens whose logits are held at a time.
const BLOCK: i64 = 128;

/// How likely the tokens `ids` are, from the hidden states that they follow; each with the `top` most likely tokens at its place.
///
/// # Shapes
/// `hidden_ne (n, E)` before the final norm, of as many tokens.
pub(super) fn likelihoods(model: &Model, hidden_ne: &Tensor, ids: &[u32], top: usize) -> Vec<TokenLikelihood> {
    let blocks = hidden_ne.split(BLOCK, 0).into_iter().zip(ids.chunks(BLOCK as usize));
    blocks.flat_map(|(block, ids)| of_logits(&next_logits(model, &block), ids, top)).collect()
}

/// The logits of the tokens that follow hidden states.
///
/// # Shapes
/// `(n, E)` in, before the final norm; `(n, V)` f32 on the host out.
pub(super) fn next_logits(model: &Model, hidden_ne: &Tensor) -> Tensor {
    no_grad(|| model.logits(&model.final_norm(hidden_ne)).to_kind(Kind::Float).to_device(tch::Device::Cpu))
}

/// Likelihoods from logits `(n, V)`; see [`likelihoods`].
pub(super) fn of_logits(logits_nv: &Tensor, ids: &[u32], top: usize) -> Vec<TokenLikelihood> {
    let log_nv = logits_nv.log_softmax(-1, Kind::Float);
    let top = top.min(log_nv.size()[1] as usize);
    let (value_nk, id_nk) = log_nv.topk(top as i64, -1, true, true);
    let of_row = |(row, &id): (usize, &u32)| {
        let row = row as i64;
        let values: Vec<f32> = Vec::try_from(value_nk.get(row)).unwrap_or_default();
        let tokens: Vec<i64> = Vec::try_from(id_nk.get(row)).unwrap_or_default();
        let most_likely = tokens.into_iter().map(|token| token as u32).zip(values).collect();
        TokenLikelihood { id, log_probability: log_nv.double_value(&[row, i64::from(id)]) as f32, most_likely }
    };
    ids.iter().enumerate().map(of_row).collect()
}
