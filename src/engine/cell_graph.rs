//! The autograd graph of a cell: recorded when the forward phase runs it, or when the backward phase computes it again, and differentiated.

use tch::{Tensor, no_grad, with_grad};

use super::attend::{Column, ColumnAttention, Mode};
use super::layer_state::link;
use super::router_balance::RouterTask;
use super::session::Pass;
use crate::cache::Policy;
use crate::native::run_backward;
use crate::units::Fault;

/// A column that was carried through a layer band with autograd.
pub(super) struct CellGraph {
    input: Tensor,
    /// Hidden states `(B, n, E)` above the band; where nothing follows its uppermost attention they mean nothing.
    pub(super) output: Tensor,
    chain: Tensor,
    chain_ends: Vec<Tensor>,
    /// Probabilities of routers, and which tokens are real.
    routers: Vec<(Tensor, Tensor)>,
}

impl CellGraph {
    /// Runs a column through the band of `column`. `policies` choose now, in the forward phase; without them recorded choices are followed.
    /// `routers` is a new task, where they have a loss. The input gets a gradient where something in front of it
    /// is trained, the lowest such layer being `first_trained`.
    pub(super) fn record(
        pass: &mut Pass<'_>,
        input: &Tensor,
        column: Column<'_>,
        policies: Option<&[Box<dyn Policy>]>,
        routers: Option<RouterTask<'_>>,
        first_trained: usize,
    ) -> Result<Self, Fault> {
        let wants_gradient = column.first > first_trained || !pass.model.embedding_parameters().is_empty();
        let input = input.detach().set_requires_grad(wants_gradient);
        // Requires grad, whatever is trained.
        let chain = link(&input).set_requires_grad(true);
        let mode = Mode::Differentiate { policies, chain: &chain, chain_ends: Vec::new() };
        let mut attend = ColumnAttention { column, mode, keeps_undo: 0..0, routers };
        let output = with_grad(|| pass.run(input.shallow_clone(), &mut attend, &mut |_, _| Ok(())))?;
        let ColumnAttention { mode, routers, .. } = attend;
        let chain_ends = if let Mode::Differentiate { chain_ends, .. } = mode { chain_ends } else { Vec::new() };
        Ok(Self { input, output, chain_ends, routers: routers.map(|task| task.roots).unwrap_or_default(), chain })
    }

    /// Runs backward from the gradient of the output, where there is one. `gradient_x` is that of the probabilities of any one real
    /// token, where routers have a loss. Returns the gradient of the input, where it is wanted.
    pub(super) fn differentiate(self, gradient: Option<&Tensor>, gradient_x: Option<&Tensor>) -> Result<Option<Tensor>, Fault> {
        let Self { input, output, chain, chain_ends, routers } = self;
        let end = link(&chain);
        let (mut roots, mut seeds): (Vec<&Tensor>, Vec<&Tensor>) = chain_ends.iter().map(|root| (root, &end)).unzip();
        // Without any trained parameter below, and no gradient wanted, the output has no history.
        if let Some(gradient) = gradient.filter(|_| output.requires_grad()) {
            roots.push(&output);
            seeds.push(gradient);
        }
        let of_routers = |gradient_x: &Tensor| -> Vec<Tensor> {
            let gradient = |(probability, real): &(Tensor, Tensor)| (real * gradient_x).to_kind(probability.kind());
            no_grad(|| routers.iter().map(gradient).collect())
        };
        let of_routers = gradient_x.map(of_routers).unwrap_or_default();
        for ((probability, _), gradient) in routers.iter().zip(&of_routers) {
            roots.push(probability);
            seeds.push(gradient);
        }
        run_backward(&roots, &seeds)?;
        let below = input.grad();
        Ok(Some(below).filter(|below| input.requires_grad() && below.defined()))
    }
}
