//! What is trained beside the weight of a linear.

use tch::{Kind, Tensor};

use super::pissa::PissaInit;
use super::positions::TokenContext;
use crate::ops::dropout::{DropoutStream, dropout};
use crate::ops::linear::LowRank;

/// What is trained beside a linear, which owns it. Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): `scale · B A x`. The matrices are kept in f32 whatever the model's dtype (in
/// f64 for an f64 model), as leaves that require a gradient.
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

    /// The input of `A` where dropout makes it another than the linear's.
    ///
    /// # Shapes
    /// `(B, n, in)` in and out.
    pub(super) fn dropped(&self, x_bni: &Tensor, tokens: &TokenContext<'_>) -> Option<Tensor> {
        let key = tokens.dropout.dropout.filter(|_| self.dropout > 0.0)?;
        let stream = DropoutStream { seed: key.seed, step: key.step, layer: self.layer, module: self.module };
        Some(dropout(x_bni, self.dropout, stream, tokens.dropout.samples, tokens.position_bn))
    }

    /// What is added to every output of the linear, whose own bias is `frozen_o`, in the dtype in which it computes.
    ///
    /// # Shapes
    /// `(out)` in and out.
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

/// The dtype of trained matrices: f32 even where the model computes in 16 bits, as small updates would be rounded away.
pub(super) fn master_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
