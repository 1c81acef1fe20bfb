//! Gradients that are summed outside of their leaves: in f32 where weights are in fewer bits, and on the host where weights wait there.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::Tensor;

use crate::model::Model;
use crate::native::take_gradient;
use crate::ops::attention::accumulation_kind;
use crate::store::Waiting;
use crate::units::Fault;

#[derive(Debug, Default)]
pub(super) struct GradientSums {
    /// Sums of the band that is differentiated, or of all bands where no weights wait on the host.
    pub(super) here: BTreeMap<String, Tensor>,
    /// Sums of bands that are done and wait on the host.
    pub(super) away: BTreeMap<String, Waiting<Tensor>>,
}

impl GradientSums {
    /// A cell is done: what it has left in the leaves of its layers is added.
    pub(super) fn take(&mut self, model: &Model, layers: Range<usize>) -> Result<(), Fault> {
        for (name, leaf) in model.parameters_summed_apart(layers) {
            let Some(part) = take_gradient(&leaf)? else { continue };
            match self.here.get_mut(&name) {
                Some(sum) => drop(sum.g_add_(&part)),
                None => drop(self.here.insert(name, part.to_kind(accumulation_kind(part.kind())))),
            }
        }
        Ok(())
    }

    /// A band is done: where its weights wait on the host, its gradients follow them.
    pub(super) fn end_band(&mut self, model: &Model) {
        if model.has_waiting_layers() {
            let done = std::mem::take(&mut self.here).into_iter();
            self.away.extend(done.map(|(name, sum)| (name, Waiting::send(&sum))));
        }
    }

    /// A parameter's gradient, if it was summed here.
    pub(super) fn remove(&mut self, name: &str) -> Option<Tensor> {
        self.here.remove(name).or_else(|| self.away.remove(name).map(|sum| sum.on_host()))
    }
}
