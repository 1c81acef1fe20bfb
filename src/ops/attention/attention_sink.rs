//! The sink logit of a head: one more score in its softmax, which is learned and has no value, so that a query may give weight to nothing
//! (Miller 2023, "Attention is off by one"; gpt-oss, arXiv 2508.10925, section 2.2, calls it a sink).
//!
//! Whatever the kernel, it takes a share of what was attended without it. The backward of all other scores is that of the kernel, given the
//! output and the log-sum-exp that the sink logit is part of.

use tch::{Kind, Tensor};

use super::chunk::{Attended, accumulation_kind};

/// The sink logit of each head, shaped like the log-sum-exp of its queries.
fn beside(sink_logit_h: &Tensor, kind: Kind) -> Tensor {
    sink_logit_h.to_kind(kind).view([1, -1, 1])
}

/// What was attended without an attention sink, with it.
///
/// # Shapes
/// `sink_logit_h (H)`.
pub(super) fn with_sink(attended: Attended, sink_logit_h: &Tensor) -> Attended {
    let lse_bhn = attended.lse_bhn.logaddexp(&beside(sink_logit_h, attended.lse_bhn.kind()));
    let kept_bhn = (attended.lse_bhn - &lse_bhn).exp_();
    let mut out_bhnd = attended.out_bhnd;
    Attended { out_bhnd: out_bhnd.g_mul_(&kept_bhn.unsqueeze(-1)), lse_bhn }
}

/// The gradient of the sink logit, given what was attended with it.
///
/// # Shapes
/// `dout_bhnd (B, H, n, D)`, `sink_logit_h (H)`; result `(H)` in the accumulation kind.
pub fn sink_logit_backward(dout_bhnd: &Tensor, attended: &Attended, sink_logit_h: &Tensor) -> Tensor {
    let kind = accumulation_kind(dout_bhnd.kind());
    let weight_bhn = (beside(sink_logit_h, kind) - &attended.lse_bhn).exp_();
    let given_bhn = (dout_bhnd.to_kind(kind) * &attended.out_bhnd).sum_dim_intlist(&[-1i64][..], false, kind);
    -(weight_bhn * given_bhn).sum_dim_intlist(&[0i64, 2][..], false, kind)
}
