//! The gate of one layer: a small function of attention's input that scores every new entry, for the policy `learned`. `KVzap` (Jegou and
//! Jeblick 2026, arXiv 2601.07891) has a linear layer, or one hidden layer with a GELU between two. `Fast KVzip` (Kim et al. 2026, arXiv
//! 2601.17668) has attention of a token to itself beside learned keys.

use tch::Tensor;

use super::config::ModelConfig;
use crate::ops::rms_norm::rms_norm;
use crate::units::Fault;

/// The tensors of a `Fast KVzip` gate, in the order of [`Gate::SelfAttention`].
const SELF_ATTENTION: [&str; 7] =
    ["q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight", "k_base", "b"];

/// What its norms add to the mean square.
const EPS: f64 = 1e-6;

/// A gate, in the kind of what is trained.
#[derive(Debug)]
pub(super) enum Gate {
    Linear {
        /// Weight `(m, E)` and bias `(m)` of the hidden layer, where there is one.
        hidden: Option<[Tensor; 2]>,
        /// Weight `(G, E)` or `(G, m)`, and bias `(G)`.
        output: [Tensor; 2],
    },
    /// Of R queries for each KV head: their weight `(G · R · d, E)` and bias, the weight of keys `(G · d, E)`, of the norms of both `(d)`, the
    /// keys beside them `(G, 1, s, d)`, and what is added to the scores `(G, 1, R)`.
    SelfAttention([Tensor; 7]),
}

impl Gate {
    /// What an entry is worth, as a logarithm.
    ///
    /// # Shapes
    /// `(B, n, E)` in, `(B, G, n, 1)` out, in the gate's kind.
    pub(super) fn score(&self, x_bne: &Tensor) -> Tensor {
        let score_bng = match self {
            Self::Linear { hidden, output: [weight, bias] } => {
                let x_bne = x_bne.to_kind(weight.kind());
                let hidden = hidden.as_ref().map(|[weight, bias]| x_bne.linear(weight, Some(bias)).gelu("none"));
                hidden.as_ref().unwrap_or(&x_bne).linear(weight, Some(bias))
            }
            Self::SelfAttention(tensors) => self_attention(x_bne, tensors),
        };
        score_bng.transpose(1, 2).unsqueeze(-1)
    }

    /// Its tensors by the ends of their names in files.
    pub(super) fn named(&self) -> Vec<(&'static str, &Tensor)> {
        match self {
            Self::Linear { hidden, output } => {
                let [weight, bias] = if hidden.is_some() { ["2.weight", "2.bias"] } else { ["weight", "bias"] };
                let hidden = hidden.iter().flat_map(|pair| ["0.weight", "0.bias"].into_iter().zip(pair));
                hidden.chain([weight, bias].into_iter().zip(output)).collect()
            }
            Self::SelfAttention(tensors) => SELF_ATTENTION.into_iter().zip(tensors).collect(),
        }
    }

    /// The gate of a layer, whose tensors are asked for by the ends of their names.
    pub(super) fn read(
        config: &ModelConfig,
        layer: usize,
        has: impl Fn(&str) -> bool,
        load: impl Fn(&str) -> Result<Tensor, Fault>,
    ) -> Result<Self, Fault> {
        let both = |part: &str| Ok::<_, Fault>([load(&format!("{part}weight"))?, load(&format!("{part}bias"))?]);
        let gate = if has("k_base") {
            let mut tensors = SELF_ATTENTION.map(|_| Tensor::new());
            for (tensor, name) in tensors.iter_mut().zip(SELF_ATTENTION) {
                *tensor = load(name)?;
            }
            Self::SelfAttention(tensors)
        } else if has("weight") {
            Self::Linear { hidden: None, output: both("")? }
        } else {
            Self::Linear { hidden: Some(both("0.")?), output: both("2.")? }
        };
        gate.check(config, layer)?;
        Ok(gate)
    }

    /// The sizes that its tensors must have, in the order of their names, by those that a gate may choose: `None` where one of these is 0, or
    /// more than a file holds.
    fn expected_sizes(&self, width: i64, heads: i64) -> Option<Vec<Vec<i64>>> {
        let chosen = |tensor: &Tensor, dim: usize| tensor.size().get(dim).copied().filter(|size| (1..1 << 32).contains(size));
        Some(match self {
            Self::Linear { hidden: None, .. } => vec![vec![heads, width], vec![heads]],
            Self::Linear { hidden: Some([weight, _]), .. } => {
                let inner = chosen(weight, 0)?;
                vec![vec![inner, width], vec![inner], vec![heads, inner], vec![heads]]
            }
            Self::SelfAttention([.., key_norm, base, offset]) => {
                let (d, queries, others) = (chosen(key_norm, 0)?, chosen(offset, 2)?, chosen(base, 2)?);
                let all = (heads * queries).checked_mul(d)?;
                let of_keys = [vec![heads * d, width], vec![d], vec![d], vec![heads, 1, others, d], vec![heads, 1, queries]];
                [vec![all, width], vec![all]].into_iter().chain(of_keys).collect()
            }
        })
    }

    fn check(&self, config: &ModelConfig, layer: usize) -> Result<(), Fault> {
        let (width, heads) = (config.hidden_size as i64, config.layers[layer].attention.num_kv_heads as i64);
        let sizes: Vec<Vec<i64>> = self.named().into_iter().map(|(_, tensor)| tensor.size()).collect();
        if Some(&sizes) == self.expected_sizes(width, heads).as_ref() {
            return Ok(());
        }
        let found = sizes.iter().map(|size| format!("{size:?}")).collect::<Vec<_>>().join(", ");
        let message =
            format!("the gate of layer {layer} has tensors of {found}; the model has {width} channels and {heads} KV heads");
        Err(Fault::data(message, "take gates that were trained for this model"))
    }
}

/// The logarithm of the attention that a token's query pays to its own key beside the learned ones, the mean over the queries of a KV head.
///
/// # Shapes
/// `(B, n, E)` in, `(B, n, G)` out.
fn self_attention(x_bne: &Tensor, tensors: &[Tensor; 7]) -> Tensor {
    let [query, query_bias, key, query_norm, key_norm, base, offset] = tensors;
    let (groups, d) = (base.size()[0], base.size()[3]);
    let (x_bne, scale) = (x_bne.to_kind(query.kind()), 1.0 / (d as f64).sqrt());
    let heads = |x: &Tensor, weight: &Tensor| rms_norm(&x.unflatten(-1, [groups, -1, d]), weight, EPS);
    let q_bngrd = heads(&x_bne.linear(query, Some(query_bias)), query_norm);
    let k_bng1d = heads(&x_bne.linear(key, None::<&Tensor>), key_norm);
    let own_bngr1 = (&q_bngrd * &k_bng1d).sum_dim_intlist(&[-1i64][..], true, q_bngrd.kind()) * scale + offset.transpose(1, 2);
    // Groups in front, so that the learned keys are not copied for each token.
    let size = q_bngrd.size();
    let others_gms = q_bngrd.permute([2, 0, 1, 3, 4]).flatten(1, 3).bmm(&base.squeeze_dim(1).transpose(-1, -2)) * scale;
    let others_bngrs = others_gms.unflatten(1, [size[0], size[1], size[3]]).permute([1, 2, 0, 3, 4]);
    let all = Tensor::cat(&[&own_bngr1, &others_bngrs], -1);
    let log_bngr = own_bngr1.squeeze_dim(-1) - all.logsumexp([-1i64], false);
    let queries = log_bngr.size()[3] as f64;
    log_bngr.logsumexp([-1i64], false) - queries.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f64], size: &[i64]) -> Tensor {
        Tensor::from_slice(values).view(size)
    }

    /// PyTorch's `Linear` and `GELU`, on one token.
    #[test]
    fn a_hidden_layer_has_a_gelu_behind_it() {
        let hidden = [of(&[1.0, 2.0, -1.0, 0.5], &[2, 2]), of(&[0.5, 0.0], &[2])];
        let gate = Gate::Linear { hidden: Some(hidden), output: [of(&[1.0, -2.0], &[1, 2]), of(&[0.25], &[1])] };
        let gelu = |x: f64| x * 0.5 * (1.0 + libm_erf(x / std::f64::consts::SQRT_2));
        let expected = gelu(1.0 + 4.0 + 0.5) - 2.0 * gelu(-1.0 + 1.0) + 0.25;
        let found = gate.score(&of(&[1.0, 2.0], &[1, 1, 2]));
        assert_eq!(found.size(), [1, 1, 1, 1]);
        assert!((found.double_value(&[0, 0, 0, 0]) - expected).abs() < 1e-6);
    }

    fn libm_erf(x: f64) -> f64 {
        Tensor::from(x).erf().double_value(&[])
    }

    /// The published formula `mean over queries of 1 / (1 + Σ exp(base·q − (k·q + b)))`, on one token with two queries and two learned keys.
    #[test]
    fn a_token_attends_to_itself_beside_learned_keys() {
        let tensors = [
            of(&[1.0, 0.5, -1.0, 2.0], &[4, 1]),
            of(&[0.5, 0.0, 0.25, -0.5], &[4]),
            of(&[0.5, -2.0], &[2, 1]),
            of(&[1.0, 2.0], &[2]),
            of(&[0.5, 1.5], &[2]),
            of(&[0.3, -0.2, 0.7, 0.1], &[1, 1, 2, 2]),
            of(&[0.1, -0.3], &[1, 1, 2]),
        ];
        let x = 1.5;
        let normed = |v: [f64; 2], w: [f64; 2]| {
            let rms = (f64::midpoint(v[0] * v[0], v[1] * v[1]) + EPS).sqrt();
            [v[0] / rms * w[0], v[1] / rms * w[1]]
        };
        let dot = |a: [f64; 2], b: [f64; 2]| (a[0] * b[0] + a[1] * b[1]) / 2f64.sqrt();
        let k = normed([0.5 * x, -2.0 * x], [0.5, 1.5]);
        let one = |q: [f64; 2], b: f64| {
            let q = normed(q, [1.0, 2.0]);
            let others = [[0.3, -0.2], [0.7, 0.1]].map(|base| (dot(base, q) - (dot(k, q) + b)).exp());
            1.0 / (1.0 + others[0] + others[1])
        };
        let expected = f64::midpoint(one([x + 0.5, 0.5 * x], 0.1), one([-x + 0.25, 2.0 * x - 0.5], -0.3)).ln();
        let found = Gate::SelfAttention(tensors).score(&of(&[x], &[1, 1, 1]));
        assert_eq!(found.size(), [1, 1, 1, 1]);
        assert!((found.double_value(&[0, 0, 0, 0]) - expected).abs() < 1e-12);
    }
}
