//! A linear of a layer: its weight, what is trained beside it, and how that begins where it is a part of the weight.

use tch::{Device, Kind, Tensor, no_grad};

use super::names::{OUTPUT_MODULE, layer_tensor};
use super::positions::TokenContext;
use super::spec::LinearSpec;
use super::vectors::CopyableVector;
use super::weights::Weights;
use crate::ops::dropout::{DropoutStream, dropout};
use crate::ops::linear::{LowRank, Weight, linear, row_norms};
use crate::units::{Fault, LayerIdx};

/// `x W^T + b`, and what its delta adds.
#[derive(Debug)]
pub(super) struct Linear {
    /// The name in the model, as `model.layers.3.mlp.up_proj`.
    pub(super) name: String,
    weight: Weight,
    /// Where a copy of it is trained, nothing else is.
    pub(super) bias_o: Option<CopyableVector>,
    pub(super) delta: Option<LoraDelta>,
}

impl Linear {
    /// Loads a linear, where `is_wide` in the accumulation kind whatever the model's dtype.
    pub(super) fn load(weights: &Weights, layer: LayerIdx, spec: &LinearSpec, is_wide: bool) -> Result<Self, Fault> {
        let name = layer_tensor(layer.0, &spec.path);
        let load = |name: &str| if is_wide { weights.load_wide(name) } else { weights.load(name) };
        let bias_o = spec.has_bias.then(|| CopyableVector::load(format!("{name}.bias"), load)).transpose()?;
        let weight = format!("{name}.weight");
        let weight = if is_wide { Weight::Plain(load(&weight)?) } else { weights.load_weight(&weight)? };
        Ok(Self { weight, bias_o, delta: None, name })
    }

    /// The output projection, of a weight that may be the embedding too.
    pub(super) fn output(weight: Weight) -> Self {
        Self { name: OUTPUT_MODULE.into(), weight, bias_o: None, delta: None }
    }

    /// Takes another weight in place of its own, unless both are equal.
    pub(super) fn replace_weight(&mut self, weight_oi: &Tensor) {
        let own_oi = self.weight();
        let weight_oi = weight_oi.to_kind(own_oi.kind()).to_device(own_oi.device());
        if !weight_oi.equal(&own_oi) {
            self.weight = Weight::Plain(weight_oi);
        }
    }

    /// The weight as a matrix: the very tensor, unless it is packed.
    pub(super) fn weight(&self) -> Tensor {
        self.weight.matrix()
    }

    /// What some of the input's channels come to, from `start` on, without bias and dropout. `weight_oi` is [`Self::weight`], and
    /// `factor_o` is [`Self::row_factor`]. `(…, k)` in, `(…, out)` out.
    pub(super) fn forward_part(&self, x: &Tensor, start: i64, weight_oi: &Tensor, factor_o: Option<&Tensor>) -> Tensor {
        let part = |matrix: &Tensor| matrix.narrow(1, start, x.size().last().copied().unwrap_or(0)).transpose(0, 1);
        let own = x.matmul(&part(weight_oi));
        let Some(lora) = &self.delta else { return own };
        let low = x.to_kind(lora.a_ri.kind()).matmul(&part(&lora.a_ri));
        let sum = own.to_kind(low.kind()) + low.matmul(&lora.b_or.transpose(0, 1)) * lora.scale;
        factor_o.map_or(sum.shallow_clone(), |factor_o| sum * factor_o)
    }

    /// What the rows of weight and addition are multiplied by, where their lengths are trained.
    pub(super) fn row_factor(&self) -> Option<Tensor> {
        let lora = self.delta.as_ref()?;
        Some(lora.magnitude_o.as_ref()? / row_norms(&self.weight, lora.low_rank(None)))
    }

    /// Where the weight is frozen, autograd keeps no `x` for it: `(B, n, in)` in, `(B, n, out)` out.
    pub(super) fn forward(&self, x_bni: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        let own_o = self.bias_o.as_ref().map(CopyableVector::current);
        let Some(lora) = &self.delta else { return linear(x_bni, &self.weight, own_o.as_ref(), None) };
        let dropped_bni = lora.dropped(x_bni, tokens);
        let bias_o = lora.bias(own_o.as_ref(), x_bni.kind());
        match self.row_factor() {
            None => linear(x_bni, &self.weight, bias_o.as_ref(), Some(lora.low_rank(dropped_bni.as_ref()))),
            Some(factor_o) => {
                let factor_o = factor_o.to_kind(x_bni.kind());
                let scaled = |x: &Tensor| linear(x, &self.weight, None, Some(lora.low_rank(None))) * &factor_o;
                // As in PEFT, what is scaled sees the dropped input, and the weight by itself what was dropped of it.
                match (&dropped_bni, bias_o) {
                    (Some(dropped_bni), bias_o) => {
                        scaled(dropped_bni) + linear(&(x_bni - dropped_bni), &self.weight, bias_o.as_ref(), None)
                    }
                    (None, Some(bias_o)) => scaled(x_bni) + bias_o,
                    (None, None) => scaled(x_bni),
                }
            }
        }
    }

    /// Computes as [`Self::forward`] without dropout, with matrices of low rank that lie elsewhere, or else its own: `(N, in)` in, `(N, out)` out.
    pub(super) fn forward_added(&self, x_ni: &Tensor, elsewhere: Option<LowRank<'_>>) -> Tensor {
        let own = || self.delta.as_ref().map(|lora| lora.low_rank(None));
        let bias_o = self.bias_o.as_ref().map(CopyableVector::current);
        linear(x_ni, &self.weight, bias_o.as_ref(), elsewhere.or_else(own))
    }

    /// Sets how the adapter beside it has begun: from now on the weight lacks that part, and no longer what it lacked, but for rounding.
    pub(super) fn set_pissa(&mut self, pissa: Option<PissaInit>) {
        let Some(lora) = &mut self.delta else { return };
        let is_same = match (&lora.pissa, &pissa) {
            (Some(before), Some(now)) => before.is(now),
            (before, now) => before.is_none() && now.is_none(),
        };
        if is_same {
            return;
        }
        let (kind, own_oi) = (lora.a_ri.kind(), self.weight.matrix());
        let moved_oi = no_grad(|| {
            let part = |of: &PissaInit| of.product(own_oi.device()).to_kind(kind) * lora.scale;
            let back = lora.pissa.as_ref().map(part);
            let out = pissa.as_ref().map(|now| -part(now));
            // Never in place: it may be somebody else's tensor.
            back.into_iter().chain(out).fold(own_oi.to_kind(kind), |weight_oi, part_oi| weight_oi + part_oi)
        });
        self.weight = Weight::Plain(moved_oi.to_kind(own_oi.kind()));
        lora.pissa = pissa;
    }

    /// Lets the adapter beside it begin as the largest part of the weight.
    pub(super) fn init_pissa(&mut self) {
        let Some(lora) = &self.delta else { return };
        let weight_oi = self.weight().detach().to_kind(lora.a_ri.kind());
        let pissa = no_grad(|| PissaInit::of(&weight_oi, lora.a_ri.size()[0], lora.scale));
        no_grad(|| {
            lora.a_ri.shallow_clone().copy_(&pissa.a_ri);
            lora.b_or.shallow_clone().copy_(&pissa.b_or);
        });
        self.set_pissa(Some(pissa));
    }

    /// Gives what is trained beside it, and begins as the linear itself has it, its values.
    pub(super) fn init_delta(&self) {
        let Some(lora) = &self.delta else { return };
        if let Some(magnitude_o) = &lora.magnitude_o {
            no_grad(|| magnitude_o.shallow_clone().copy_(&row_norms(&self.weight, lora.low_rank(None))));
        }
        if let Some((leaf, vector)) = lora.base_bias_o.as_ref().zip(self.bias_o.as_ref()) {
            no_grad(|| leaf.shallow_clone().copy_(&vector.own));
        }
    }

    /// Takes off what is trained beside it, which what is returned puts back: until then it is as the model has it.
    pub(super) fn detach(&mut self) -> impl FnOnce(&mut Self) + use<> {
        let pissa = self.delta.as_ref().and_then(|lora| lora.pissa.clone());
        // The weight that goes with it, where that is another.
        let weight = pissa.as_ref().map(|_| Weight::Plain(self.weight()));
        self.set_pissa(None);
        let delta = self.delta.take().map(|lora| LoraDelta { pissa, ..lora });
        |linear| {
            linear.delta = delta;
            if let Some(weight) = weight {
                linear.weight = weight;
            }
        }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.weight.tensors().iter().chain(self.bias_o.iter().map(|vector| &vector.own))
    }
}

/// Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): `scale · B A x`. The matrices are leaves that require a gradient, and kept in f32
/// (in f64 for an f64 model), as small updates would be rounded away in 16 bits.
#[derive(Debug)]
pub(super) struct LoraDelta {
    pub(super) a_ri: Tensor,
    pub(super) b_or: Tensor,
    /// `(out)`, added to what B makes.
    pub(super) b_bias_o: Option<Tensor>,
    /// `(out)`, the lengths of the rows of weight and addition together (`DoRA`, Liu et al. 2024, arXiv 2402.09353).
    pub(super) magnitude_o: Option<Tensor>,
    /// `(out)`, the linear's bias where it is trained.
    pub(super) base_bias_o: Option<Tensor>,
    /// How both matrices began, if as a part of the weight.
    pub(super) pissa: Option<PissaInit>,
    /// With rsLoRA and with patterns every linear may have another one.
    pub(super) scale: f64,
    /// The probability with which an input of `A` is dropped in training.
    pub(super) dropout: f64,
    /// What of the dropout mask depends on where the linear is; seed and step come with each use.
    pub(super) layer: u64,
    pub(super) module: u64,
}

/// The end of the name of A in PEFT's files.
pub(super) const A: &str = "lora_A.weight";
pub(super) const B: &str = "lora_B.weight";
pub(super) const B_BIAS: &str = "lora_B.bias";
/// That of the lengths of rows.
pub(super) const MAGNITUDE: &str = "lora_magnitude_vector";
/// That of the linear's own bias.
pub(super) const BASE_BIAS: &str = "base_layer.bias";

impl LoraDelta {
    /// The trained tensors, by the ends of their names in PEFT's files.
    pub(super) fn parameters(&self) -> Vec<(&'static str, &Tensor)> {
        let optional = [(B_BIAS, &self.b_bias_o), (MAGNITUDE, &self.magnitude_o), (BASE_BIAS, &self.base_bias_o)];
        let optional = optional.into_iter().filter_map(|(part, tensor)| Some((part, tensor.as_ref()?)));
        [(A, &self.a_ri), (B, &self.b_or)].into_iter().chain(optional).collect()
    }

    /// A delta with other tensors, which become leaves.
    pub(super) fn map(&self, tensor: impl Fn(&Tensor) -> Tensor) -> Self {
        let leaf = |of: &Tensor| tensor(of).set_requires_grad(true);
        Self {
            a_ri: leaf(&self.a_ri),
            b_or: leaf(&self.b_or),
            b_bias_o: self.b_bias_o.as_ref().map(leaf),
            magnitude_o: self.magnitude_o.as_ref().map(leaf),
            base_bias_o: self.base_bias_o.as_ref().map(leaf),
            pissa: self.pissa.clone(),
            ..*self
        }
    }

    /// Plain LoRA of each of the experts whose matrices lie side by side in these: A `(X·r, in)`, expert by expert, and B `(out, r·X)`, whose
    /// columns of one expert are X apart, as PEFT keeps them.
    pub(super) fn by_expert(&self, num_experts: usize) -> Vec<Self> {
        let (experts, inner, out) = (num_experts as i64, self.a_ri.size()[1], self.b_or.size()[0]);
        let a = self.a_ri.view([experts, -1, inner]).unbind(0);
        // Products want each expert's columns side by side.
        let b = self.b_or.view([out, -1, experts]).permute([2, 0, 1]).contiguous().unbind(0);
        a.into_iter().zip(b).map(|(a_ri, b_or)| self.plain(a_ri, b_or)).collect()
    }

    /// With the rows `start .. start + len` of B alone.
    pub(super) fn rows(&self, start: i64, len: i64) -> Self {
        self.plain(self.a_ri.shallow_clone(), self.b_or.narrow(0, start, len))
    }

    /// Plain LoRA of other matrices at the same scale.
    fn plain(&self, a_ri: Tensor, b_or: Tensor) -> Self {
        Self { a_ri, b_or, b_bias_o: None, magnitude_o: None, base_bias_o: None, pissa: None, ..*self }
    }

    /// The input of `A` where dropout makes it another than the linear's: `(B, n, in)` in and out.
    pub(super) fn dropped(&self, x_bni: &Tensor, tokens: &TokenContext<'_>) -> Option<Tensor> {
        let key = tokens.dropout.dropout.filter(|_| self.dropout > 0.0)?;
        let stream = DropoutStream { seed: key.seed, step: key.step, layer: self.layer, module: self.module };
        Some(dropout(x_bni, self.dropout, stream, tokens.dropout.samples, tokens.position_bn))
    }

    /// What is added to every output of the linear, whose own bias is `frozen_o`, in the dtype in which it computes: `(out)` in and out.
    pub(super) fn bias(&self, frozen_o: Option<&Tensor>, kind: Kind) -> Option<Tensor> {
        let own = self.base_bias_o.as_ref().or(frozen_o).map(|bias_o| bias_o.to_kind(kind));
        let Some(b_bias_o) = &self.b_bias_o else { return own };
        let added = (b_bias_o * self.scale).to_kind(kind);
        Some(own.map_or_else(|| added.shallow_clone(), |own| own + &added))
    }

    pub(super) fn low_rank<'a>(&'a self, x_bni: Option<&'a Tensor>) -> LowRank<'a> {
        LowRank { a_ri: &self.a_ri, b_or: &self.b_or, scale: self.scale, x_bni }
    }
}

/// How an adapter began that is at first the largest part of each weight (`PiSSA`, Meng et al. 2024, arXiv 2404.02948): its matrices, on the host.
/// The weight lacks their product, so that both together are the model's own.
#[derive(Debug)]
pub(super) struct PissaInit {
    pub(super) a_ri: Tensor,
    pub(super) b_or: Tensor,
}

impl PissaInit {
    /// The `r` largest singular values of a weight with their vectors, shared evenly between both matrices, as PEFT has them:
    /// `scale · B A` is the nearest to the weight of all matrices of rank r. A weight that is not finite has none, and gets what is not
    /// finite either: the first step says so. `(out, in)` in, of f32 or f64.
    fn of(weight_oi: &Tensor, r: i64, scale: f64) -> Self {
        let parts = weight_oi.f_svd(true, true).map(|(u_ok, s_k, v_ik)| {
            let root_r = (s_k.narrow(0, 0, r) / scale).sqrt();
            (v_ik.narrow(1, 0, r).transpose(0, 1) * root_r.unsqueeze(1), u_ok.narrow(1, 0, r) * root_r)
        });
        let [out, inner] = [0, 1].map(|dim| weight_oi.size()[dim]);
        let none = |shape: [i64; 2]| weight_oi.new_full(shape, f64::NAN, (weight_oi.kind(), weight_oi.device()));
        let (a_ri, b_or) = parts.unwrap_or_else(|_| (none([r, inner]), none([out, r])));
        Self { a_ri: a_ri.contiguous().to_device(Device::Cpu), b_or: b_or.contiguous().to_device(Device::Cpu) }
    }

    /// `B A` on a device: `(out, in)` out.
    fn product(&self, device: Device) -> Tensor {
        self.b_or.to_device(device).matmul(&self.a_ri.to_device(device))
    }

    /// Where a saved adapter began: its matrices hold that behind what was trained (`[A; A₀]`, `[B, −B₀]`). `(2r, in)` and `(out, 2r)` in.
    pub(super) fn of_saved(a_ri: &Tensor, b_or: &Tensor) -> Self {
        let r = b_or.size()[1] / 2;
        Self { a_ri: a_ri.narrow(0, r, r).contiguous(), b_or: -b_or.narrow(1, r, r).contiguous() }
    }

    fn is(&self, other: &Self) -> bool {
        self.a_ri.equal(&other.a_ri) && self.b_or.equal(&other.b_or)
    }
}

impl Clone for PissaInit {
    fn clone(&self) -> Self {
        Self { a_ri: self.a_ri.shallow_clone(), b_or: self.b_or.shallow_clone() }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::model::DropoutContext;

    #[test]
    fn parts_of_the_input_sum_to_the_whole() {
        tch::manual_seed(1);
        let drawn = |size: &[i64]| Tensor::randn(size, (Kind::Double, Device::Cpu));
        for magnitude_o in [None, Some(drawn(&[5]))] {
            let delta = LoraDelta {
                a_ri: drawn(&[2, 4]),
                b_or: drawn(&[5, 2]),
                b_bias_o: None,
                magnitude_o,
                base_bias_o: None,
                pissa: None,
                scale: 1.5,
                dropout: 0.0,
                layer: 0,
                module: 0,
            };
            let linear = Linear { name: "any".into(), weight: Weight::Plain(drawn(&[5, 4])), bias_o: None, delta: Some(delta) };
            let context = TokenContext { position_bn: &Tensor::new(), dropout: &DropoutContext::default() };
            let x_bni = drawn(&[1, 3, 4]);
            let (weight_oi, factor_o) = (linear.weight(), linear.row_factor());
            let part = |start: i64, len| linear.forward_part(&x_bni.narrow(-1, start, len), start, &weight_oi, factor_o.as_ref());
            let apart = (linear.forward(&x_bni, &context) - part(0, 1) - part(1, 3)).abs().max().double_value(&[]);
            assert!(apart < 1e-12, "{apart} {linear:?}");
        }
    }
}
