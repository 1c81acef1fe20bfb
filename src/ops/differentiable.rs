//! Operations that are computed without autograd, and whose backward is written by hand.

use tch::{Tensor, no_grad};

use crate::native::{self, attach_backward, or_panic};

/// `output`, which was computed from `inputs` without autograd: under autograd if any of them requires a gradient. `backward` gets the
/// output's gradient and which inputs need theirs, and runs without autograd; it keeps what it owns, and nothing else is kept.
///
/// An input that is not defined is none.
pub(super) fn differentiable<const N: usize>(
    inputs: [&Tensor; N],
    output: Tensor,
    backward: impl FnOnce(&Tensor, [bool; N]) -> [Option<Tensor>; N] + Send + 'static,
) -> Tensor {
    let needs = inputs.map(|input| input.defined() && input.requires_grad());
    if needs.contains(&true) {
        or_panic(attach_backward(&inputs, &[&output], move |grads| {
            let Some(dy) = &grads[0] else { return Ok(needs.map(|_| None).into()) };
            Ok(no_grad(|| backward(dy, needs)).into())
        }));
    }
    output
}

/// Whether a kernel of the CPU computes with both tensors, which are then of one dtype.
pub(super) fn is_fused(x: &Tensor, other: &Tensor) -> bool {
    native::computes(x.device(), x.kind()) && other.kind() == x.kind()
}
