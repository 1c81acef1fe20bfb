//! What a forecast is about: a step before it is made.

use std::ops::Range;

use tch::{Device, Kind};

use crate::data::share;
use crate::engine::Settings;
use crate::model::{ModelConfig, PackedSize, PackedSizes, TrainedPart, kind_of, sizes_of_weights};
use crate::ops::attention::accumulation_kind;
use crate::ops::linear::{TILE, UNPACKING_BYTES};
use crate::optim::{bytes_of_state, update_bytes};
use crate::recipe::{Offload, Recipe};
use crate::store::copies_are_async;
use crate::units::Bytes;

/// A step before it is made: of which model, by which settings, on what.
#[derive(Clone, Copy, Debug)]
pub struct StepSpec<'a> {
    pub recipe: &'a Recipe,
    pub config: &'a ModelConfig,
    pub settings: &'a Settings,
    pub trained: &'a TrainedPart,
    /// The dtype of hidden states and weights.
    pub kind: Kind,
    /// Where it computes; need not be there.
    pub device: Device,
    /// Threads that compute, on a CPU.
    pub threads: usize,
    pub ranks: usize,
}

impl<'a> StepSpec<'a> {
    /// A recipe's, on one thread of one rank.
    pub fn of(
        recipe: &'a Recipe,
        config: &'a ModelConfig,
        settings: &'a Settings,
        trained: &'a TrainedPart,
        device: Device,
    ) -> Self {
        Self { recipe, config, settings, trained, kind: kind_of(recipe.model.dtype), device, threads: 1, ranks: 1 }
    }

    /// Bytes of a number of the model.
    pub(super) fn element(&self) -> u64 {
        self.kind.elt_size_in_bytes() as u64
    }

    /// Bytes of a number that is summed up.
    pub(super) fn wide(&self) -> u64 {
        accumulation_kind(self.kind).elt_size_in_bytes() as u64
    }

    /// Whether the model computes in fewer bits than it sums in.
    pub(super) fn is_narrow(&self) -> bool {
        self.wide() > self.element()
    }

    pub(super) fn hidden(&self) -> u64 {
        self.config.hidden_size as u64
    }

    pub(super) fn trains_weights(&self) -> bool {
        self.trained.is_weights
    }

    /// Whether something before the first layer is trained, so that gradients go on below it.
    pub(super) fn trains_embedding(&self) -> bool {
        self.trained.embedding_numbers > 0
    }

    /// Numbers that are trained behind the last layer.
    pub(super) fn output_numbers(&self) -> u64 {
        self.trained.output_numbers as u64
    }

    /// Bytes of the gradients that are made at the end of a step alone. Of a tied embedding the head has made some of them before.
    pub(super) fn embedding_gradients(&self) -> u64 {
        let is_of_head = self.trains_weights() && self.config.tie_word_embeddings && !self.config.has_score;
        if is_of_head { 0 } else { self.trained.embedding_numbers as u64 * self.wide() }
    }

    /// Gradients that count all the while: an adapter's, which are small, and those that the head sums up. Those of layers whose weights
    /// are trained come with their bands, that of an embedding which is no output projection at the end.
    pub(super) fn lasting_gradients(&self) -> u64 {
        if self.trains_weights() {
            return self.output_numbers() * self.wide();
        }
        self.trained_bytes().0 - self.embedding_gradients()
    }

    /// The model's weights, without an adapter: where it computes, and on the host, where those of all layers wait but of two bands.
    pub fn weights(&self) -> [Bytes; 2] {
        let bytes = |numbers: u64, packed: PackedSize| (numbers - packed.numbers) * self.element() + packed.bytes.0;
        let packed = self.packed();
        let all = bytes(self.config.num_parameters() as u64, packed.map_or_else(PackedSize::default, PackedSizes::all));
        if !self.layers_wait() {
            return [Bytes(all), Bytes(0)];
        }
        let of_layer = |layer| bytes(self.of_layer(layer), packed.map_or_else(PackedSize::default, |packed| packed.layer(layer)));
        let of_band = |band: Range<usize>| band.map(of_layer).sum();
        let bands: Vec<u64> = self.settings.layer_bands(self.trained.first_layer).into_iter().map(of_band).collect();
        // A band computes, and the one above or below it is on its way.
        let in_flight = bands.windows(2).map(|pair| pair[0] + pair[1]).max().unwrap_or(bands.iter().sum());
        let layers: u64 = bands.iter().sum();
        [Bytes(all - layers + in_flight), Bytes(layers)]
    }

    /// Packed weights, where they stay so.
    fn packed(&self) -> Option<&PackedSizes> {
        Some(&self.config.packed).filter(|packed| (self.is_on_cpu() || !packed.is_unpacked_on_gpu) && !self.trains_weights())
    }

    fn is_on_cpu(&self) -> bool {
        self.device == Device::Cpu
    }

    /// What is unpacked of them for a product.
    pub(super) fn unpacked(&self) -> u64 {
        let beside = if self.is_on_cpu() { 0 } else { UNPACKING_BYTES };
        self.packed().map_or(0, |packed| packed.all().largest.min(TILE as u64) * (beside + self.element()))
    }

    /// Whether the layers' weights wait in another memory.
    pub fn layers_wait(&self) -> bool {
        self.recipe.train.offload == Offload::Weights && copies_are_async(self.device)
    }

    /// Whether the layers' gradients are taken out of their leaves after each cell.
    pub(super) fn sums_apart(&self) -> bool {
        self.trains_weights() && (self.is_narrow() || self.layers_wait())
    }

    /// How many numbers a layer has.
    pub(super) fn of_layer(&self, layer: usize) -> u64 {
        self.config.num_layer_parameters(layer) as u64
    }

    /// What is trained, in f32 at least, as gradients and an adapter's matrices are kept.
    pub fn trained_bytes(&self) -> Bytes {
        Bytes(self.trained.numbers as u64 * self.wide())
    }

    /// An adapter's own bytes; nothing where the weights are trained.
    pub fn adapter(&self) -> Bytes {
        if self.trains_weights() { Bytes(0) } else { self.trained_bytes() }
    }

    /// What clipping and updating the largest matrix takes for a moment.
    pub(super) fn largest_update(&self) -> u64 {
        let c = self.config;
        let TrainedPart { is_weights, r, embedding_numbers, output_numbers, .. } = *self.trained;
        let (inner, widest, of_ends) = if is_weights {
            (c.hidden_size, c.intermediate_size().max(c.vocab_size), 0)
        } else {
            (r, c.hidden_size.max(c.intermediate_size()), embedding_numbers.max(output_numbers))
        };
        // Linears that are several in one are wider than what the layer is made of.
        let of_linears = c.layers.iter().flat_map(|layer| layer.linears(c.hidden_size)).map(|linear| linear.out).max();
        let widest = widest.max(of_linears.unwrap_or(0));
        let numbers = (inner * widest).max(of_ends) as u64;
        // State that waits on the host comes for this matrix and for the next.
        let waits = self.recipe.train.offload != Offload::None && copies_are_async(self.device);
        let fetched = if waits { 2 * numbers * self.optimizer_state().0.div_ceil(self.trained.numbers.max(1) as u64) } else { 0 };
        update_bytes(&self.recipe.optimizer, numbers, self.wide()) + fetched
    }

    /// What the optimiser remembers, and the f32 masters of weights of fewer bits: where ranks share it, that of who has most.
    pub fn optimizer_state(&self) -> Bytes {
        let numbers = if self.trains_weights() && self.ranks > 1 {
            let sizes = sizes_of_weights(self.config);
            let of_rank = |places: Vec<usize>| places.into_iter().map(|place| sizes[place] as u64).sum();
            share(&sizes, self.ranks).into_iter().map(of_rank).max().unwrap_or(0)
        } else {
            self.trained.numbers as u64
        };
        let master = if self.trains_weights() && self.is_narrow() { self.wide() } else { 0 };
        let widened = bytes_of_state(&self.recipe.optimizer) * self.wide() as f64 / 4.0;
        Bytes((numbers as f64 * (widened + master as f64)).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::with_step;
    use super::*;

    #[test]
    fn ranks_share_the_state_of_all_weights_and_not_of_an_adapter() {
        with_step("", (Kind::BFloat16, Device::Cpu), |spec| {
            let state = |trained, ranks| StepSpec { trained, ranks, ..*spec }.optimizer_state().0;
            let (sizes, all) = (sizes_of_weights(spec.config), &TrainedPart::of(spec.config, None).unwrap());
            // Two moments and a master of each number, f32.
            assert_eq!(state(all, 1), 12 * sizes.iter().sum::<usize>() as u64);
            let least = (state(all, 1) / 3).max(12 * sizes.iter().copied().max().unwrap_or(0) as u64);
            assert!((least..=least * 11 / 10).contains(&state(all, 3)), "{} {least}", state(all, 3));
            assert_eq!(state(spec.trained, 3), state(spec.trained, 1));
        });
    }
}
