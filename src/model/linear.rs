//! A linear of a layer: its weight, and what is trained beside it.

use tch::{Tensor, no_grad};

use super::copyable::CopyableVector;
use super::delta::LoraDelta;
use super::names::{OUTPUT_MODULE, layer_tensor};
use super::pissa::PissaInit;
use super::positions::TokenContext;
use super::spec::LinearSpec;
use super::weights::Weights;
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
    /// `factor_o` is [`Self::row_factor`].
    ///
    /// # Shapes
    /// `(…, k)` in, `(…, out)` out.
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
        Some(lora.magnitude_o.as_ref()? / self.row_norms(lora))
    }

    /// Where the weight is frozen, autograd keeps no `x` for it.
    ///
    /// # Shapes
    /// `(B, n, in)` in, `(B, n, out)` out.
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

    /// The lengths of the rows of weight and addition together: a constant in the backward pass, as `DoRA` has it.
    fn row_norms(&self, lora: &LoraDelta) -> Tensor {
        row_norms(&self.weight, lora.low_rank(None))
    }

    /// Computes as [`Self::forward`] without dropout, with matrices of low rank that lie elsewhere, or else its own.
    ///
    /// # Shapes
    /// `(N, in)` in, `(N, out)` out.
    pub(super) fn forward_added(&self, x_ni: &Tensor, elsewhere: Option<LowRank<'_>>) -> Tensor {
        let own = || self.delta.as_ref().map(|lora| lora.low_rank(None));
        let bias_o = self.bias_o.as_ref().map(CopyableVector::current);
        linear(x_ni, &self.weight, bias_o.as_ref(), elsewhere.or_else(own))
    }

    /// Sets how the adapter beside it has begun: the weight lacks that part from now on, and has again what it lacked before, but for
    /// rounding.
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
            no_grad(|| magnitude_o.shallow_clone().copy_(&self.row_norms(lora)));
        }
        if let Some((leaf, own)) = lora.base_bias_o.as_ref().zip(self.bias_o.as_ref()) {
            no_grad(|| leaf.shallow_clone().copy_(own.tensor()));
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
        self.weight.tensors().iter().chain(self.bias_o.iter().map(CopyableVector::tensor))
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
