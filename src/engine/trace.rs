//! What the forward phase hands to the backward phase.

use std::collections::HashMap;

use tch::{Device, Tensor};

use super::MicroBatchContext;
use super::cell_graph::CellGraph;
use super::head_run::HeadRun;
use super::router_balance::RouterSums;
use super::session::Session;
use crate::cache::ReplayLog;
use crate::native::cuda::upload;
use crate::store::Waiting;

pub struct ForwardTrace {
    /// What the batch contributes to a step; `None` of a forward phase that no backward phase follows.
    pub(super) context: Option<MicroBatchContext>,
    pub(super) session: Session,
    /// The ids of the batch, padded on the right: `(B, T)`, on the host.
    pub(super) ids_bt: Tensor,
    /// The sample of each sequence.
    pub(super) samples: Vec<u64>,
    /// Layer checkpoints: hidden states at the lower border of each layer band, by the layer above it and column.
    pub(super) checkpoints: HashMap<(usize, usize), Waiting<Tensor>>,
    /// Graphs that were kept, by band from the top and column.
    pub(super) kept: HashMap<(usize, usize), CellGraph>,
    pub(super) head: HeadRun,
    pub(super) routers: RouterSums,
    /// Gradient of the hidden states above the last layer, by column; `None` where no token has a target, and where cells make it.
    pub(super) top: Vec<Option<Waiting<Tensor>>>,
}

impl ForwardTrace {
    pub fn log(&self) -> ReplayLog {
        self.session.log()
    }

    #[cfg(test)]
    pub(crate) fn shift_first_victim(&self, layer: usize, chunk: usize) {
        crate::native::locked(&self.session.layers[layer]).log.shift_first_victim(chunk);
    }

    /// The ids of a column, of the sequences that are under way in it `(B, n)`.
    pub(super) fn ids(&self, c: usize, device: Device) -> Tensor {
        let plan = &self.session.plan;
        let (sequences, (start, len)) = (plan.sequences(&plan.columns[c]), plan.tokens(&plan.columns[c]));
        upload(&self.ids_bt.narrow(0, 0, sequences as i64).narrow(1, start as i64, len as i64), device)
    }

    pub(super) fn start(&self, c: usize) -> usize {
        self.session.plan.tokens(&self.session.plan.columns[c]).0
    }
}
