//! Layers whose weights wait on the host: those of a band come to where the model computes while the band before is computed.

use std::cell::RefCell;
use std::ops::Range;

use tch::{Device, Tensor};

use crate::native::cuda::host_tensor;
use crate::store::{CopyMark, CopyStream, copier_of, copies_are_async};

/// Where a model computes, and where its layers are meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelPlacement {
    pub device: Device,
    /// Whether the weights of layers wait on the host, where that is another memory.
    pub keeps_layers_on_host: bool,
}

impl From<Device> for ModelPlacement {
    fn from(device: Device) -> Self {
        Self { device, keeps_layers_on_host: false }
    }
}

impl ModelPlacement {
    /// Where a tensor of this name belongs.
    pub(super) fn home_of(self, name: &str) -> Device {
        if self.keeps_layers_on_host && name.starts_with("model.layers.") { Device::Cpu } else { self.device }
    }
}

/// The layers' tensors, and which of them are where the model computes.
#[derive(Debug)]
pub(super) struct WaitingLayers {
    device: Device,
    layers: Vec<Vec<WaitingTensor>>,
    in_flight: RefCell<BandsInFlight>,
}

/// A tensor of the model, whose content is now the host's and now a copy of it.
#[derive(Debug)]
struct WaitingTensor {
    own: Tensor,
    host: Tensor,
}

#[derive(Debug, Default)]
struct BandsInFlight {
    here: Range<usize>,
    /// Layers on their way, with their copies and the mark at which these have arrived.
    coming: Range<usize>,
    copies: Vec<Tensor>,
    mark: Option<CopyMark>,
}

impl WaitingTensor {
    /// In memory of the host that a device copies from by itself.
    fn new(own: &Tensor, device: Device) -> Self {
        let mut host = host_tensor(&own.size(), own.kind(), device);
        host.copy_(&own.detach());
        let waiting = Self { own: own.shallow_clone(), host };
        waiting.be(&waiting.host);
        waiting
    }

    /// All who share the tensor see the content change.
    fn be(&self, content: &Tensor) {
        self.own.shallow_clone().set_data(content);
    }
}

impl WaitingLayers {
    /// Sends layers away from where they compute; nothing where that is the host itself.
    pub(super) fn of<'a>(layers: impl Iterator<Item = Vec<&'a Tensor>>, placement: ModelPlacement) -> Option<Self> {
        let ModelPlacement { device, keeps_layers_on_host } = placement;
        let of_layer = |tensors: Vec<&Tensor>| tensors.into_iter().map(|own| WaitingTensor::new(own, device)).collect();
        let is_elsewhere = keeps_layers_on_host && copies_are_async(device);
        is_elsewhere.then(|| Self { device, layers: layers.map(of_layer).collect(), in_flight: RefCell::default() })
    }

    /// Takes tensors that stand in the place of others. No layer may be where it computes.
    pub(super) fn follow<'a>(&mut self, layers: impl Iterator<Item = impl Iterator<Item = &'a Tensor>>) {
        for (layer, tensors) in self.layers.iter_mut().zip(layers) {
            let mut before = std::mem::take(layer).into_iter();
            // A weight in another form is in another number of tensors.
            let follow = |new: &Tensor| match before.next() {
                Some(waiting) if waiting.own.data_ptr() == new.data_ptr() => waiting,
                _ => WaitingTensor::new(new, self.device),
            };
            *layer = tensors.map(follow).collect();
        }
    }

    /// Has the weights of some layers where they compute, lets those of `next` come beside what is computed, and no others.
    pub(super) fn bring(&self, layers: Range<usize>, next: Option<Range<usize>>) {
        let mut bands = self.in_flight.borrow_mut();
        if bands.here != layers {
            self.tensors(&bands.here).for_each(|tensor| tensor.be(&tensor.host));
            if bands.coming != layers {
                self.prefetch(&mut bands, layers.clone());
            }
            bands.mark.take().into_iter().for_each(|mark| copier_of(self.device).wait(mark));
            let copies = std::mem::take(&mut bands.copies);
            self.tensors(&layers).zip(&copies).for_each(|(tensor, copy)| tensor.be(copy));
            (bands.here, bands.coming) = (layers, 0..0);
        }
        let next = next.filter(|next| *next != bands.here).unwrap_or(0..0);
        if bands.coming != next {
            self.prefetch(&mut bands, next);
        }
    }

    /// Sets out copies of some layers in the place of those that were on their way.
    fn prefetch(&self, bands: &mut BandsInFlight, layers: Range<usize>) {
        (bands.copies, bands.mark) = (Vec::new(), None);
        bands.copies = self.tensors(&layers).map(|t| Tensor::empty(t.host.size(), (t.host.kind(), self.device))).collect();
        let pairs: Vec<(&Tensor, &Tensor)> =
            bands.copies.iter().zip(self.tensors(&layers)).map(|(to, t)| (to, &t.host)).collect();
        bands.mark = (!pairs.is_empty()).then(|| copier_of(self.device).start(CopyStream::ToDevice, &pairs, &[]));
        bands.coming = layers;
    }

    fn tensors(&self, layers: &Range<usize>) -> impl Iterator<Item = &WaitingTensor> {
        self.layers[layers.clone()].iter().flatten()
    }

    /// Whether a layer may compute.
    pub(super) fn is_here(&self, layer: usize) -> bool {
        self.in_flight.borrow().here.contains(&layer)
    }

    /// Layers that are where they compute, and those on their way.
    #[cfg(test)]
    pub(super) fn in_flight(&self) -> usize {
        let bands = self.in_flight.borrow();
        bands.here.len() + bands.coming.len()
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::store::{WaitFault, with_delayed_copies};

    #[test]
    fn a_tensor_in_the_place_of_another_waits_in_its_place() {
        with_delayed_copies(WaitFault::Kept, || {
            let [first, second] = [1.0, 2.0].map(|value| Tensor::full([3], value, (Kind::Float, Device::Cpu)));
            let placement = ModelPlacement { device: Device::Cpu, keeps_layers_on_host: true };
            let mut layers = WaitingLayers::of([vec![&first]].into_iter(), placement).unwrap();
            layers.follow([[&second].into_iter()].into_iter());
            let waits_at = second.data_ptr();
            layers.bring(0..1, None);
            assert!(second.data_ptr() != waits_at && second.equal(&Tensor::full([3], 2.0, (Kind::Float, Device::Cpu))));
            layers.bring(0..0, None);
            assert_eq!(second.data_ptr(), waits_at);
        });
    }
}
