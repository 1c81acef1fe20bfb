//! How likely tokens are by the model itself, before any rule of sampling.

use tch::{Device, Kind, Tensor, no_grad};

use crate::model::Model;
use crate::native::cuda::on_device;

#[derive(Clone, Debug, PartialEq)]
pub struct TokenLikelihood {
    pub id: u32,
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
/// `(n, E)` in, before the final norm; `(n, V)` f32 out.
pub(super) fn next_logits(model: &Model, hidden_ne: &Tensor) -> Tensor {
    no_grad(|| model.logits(&model.final_norm(hidden_ne)).to_kind(Kind::Float))
}

/// Likelihoods from logits `(n, V)`; see [`likelihoods`].
pub(super) fn of_logits(logits_nv: &Tensor, ids: &[u32], top: usize) -> Vec<TokenLikelihood> {
    let log_nv = logits_nv.log_softmax(-1, Kind::Float);
    let top = top.min(log_nv.size()[1] as usize);
    let (value_nk, id_nk) = log_nv.topk(top as i64, -1, true, true);
    let own: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
    let own_n1 = log_nv.gather(1, &on_device(&own, log_nv.device()).unsqueeze(1), false);
    // The host gets no more than what is told.
    let [own, values] =
        [own_n1, value_nk].map(|x| Vec::<f32>::try_from(x.to_device(Device::Cpu).reshape([-1])).unwrap_or_default());
    let tokens: Vec<i64> = Vec::try_from(id_nk.to_device(Device::Cpu).reshape([-1])).unwrap_or_default();
    let mut most_likely = tokens.into_iter().map(|token| token as u32).zip(values);
    let of_token = |(&id, log_probability): (&u32, f32)| TokenLikelihood {
        id,
        log_probability,
        most_likely: most_likely.by_ref().take(top).collect(),
    };
    ids.iter().zip(own).map(of_token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_has_the_most_likely_ones_of_its_place() {
        let logits = Tensor::from_slice(&[1.0f32, 3.0, 2.0, 5.0, 4.0, 6.0]).view([2, 3]);
        let expected = logits.log_softmax(-1, Kind::Float);
        let at = |row: i64, id: u32| expected.double_value(&[row, i64::from(id)]) as f32;
        for top in [0, 2, 9] {
            let of_row = |row: i64, id: u32, order: [u32; 3]| TokenLikelihood {
                id,
                log_probability: at(row, id),
                most_likely: order.into_iter().take(top).map(|token| (token, at(row, token))).collect(),
            };
            assert_eq!(of_logits(&logits, &[0, 2], top), [of_row(0, 0, [1, 2, 0]), of_row(1, 2, [2, 0, 1])]);
        }
    }
}
