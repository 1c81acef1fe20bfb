//! What the forward phase hands to the backward phase.

use std::collections::HashMap;

use tch::{Device, Tensor};

use super::cell_graph::CellGraph;
use super::head_run::HeadRun;
use super::router_balance::RouterSums;
use super::session::Session;
use super::{ChunkPlan, MicroBatchContext};
use crate::cache::ReplayLog;
use crate::data::Batch;
use crate::model::DropoutContext;
use crate::native::cuda::upload;
use crate::store::Waiting;

pub struct ForwardTrace {
    pub log: ReplayLog,
    /// What the batch contributes to a step; `None` of a forward phase that no backward phase follows.
    pub(super) context: Option<MicroBatchContext>,
    pub(super) session: Session,
    pub(super) tokens: BatchIds,
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
    /// The ids of a column `(B, n)`.
    pub(super) fn ids(&self, c: usize) -> Tensor {
        self.tokens.ids(&self.session.plan, c)
    }

    pub(super) fn start(&self, c: usize) -> usize {
        self.session.plan.tokens(&self.session.plan.columns[c]).0
    }
}

/// The ids of a batch, padded on the right.
pub(super) struct BatchIds {
    ids_bt: Tensor,
    samples: Vec<u64>,
    device: Device,
}

impl BatchIds {
    /// The ids of `batch`, each sequence padded to `total` tokens.
    pub(super) fn new(batch: &Batch, total: usize, device: Device) -> Self {
        let ids_bt = Tensor::from_slice(&batch.padded_inputs(total)).view([batch.sequences.len() as i64, total as i64]);
        Self { ids_bt, samples: batch.sequences.iter().map(|sequence| sequence.sample).collect(), device }
    }

    /// The ids of a column, of the sequences that are under way in it `(B, n)`.
    pub(super) fn ids(&self, plan: &ChunkPlan, c: usize) -> Tensor {
        let (column, sequences) = (&plan.columns[c], plan.sequences(&plan.columns[c]));
        let (start, len) = plan.tokens(column);
        upload(&self.ids_bt.narrow(0, 0, sequences as i64).narrow(1, start as i64, len as i64), self.device)
    }

    /// What makes randomness independent of the chunking.
    pub(super) fn dropout_context(&self, context: Option<MicroBatchContext>) -> DropoutContext<'_> {
        DropoutContext { dropout: context.and_then(|c| c.dropout), samples: &self.samples }
    }
}
