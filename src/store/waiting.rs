//! A bundle of tensors that waits somewhere else until it is needed: overwritten entries, layer checkpoints, gradients between layer bands,
//! choices, losses, what an optimiser remembers.

use std::marker::PhantomData;
use std::sync::{Arc, LazyLock};

use tch::{Device, Kind, Tensor};

use super::arena::{Coming, Offloaded};
use super::tensor_store::{Store, bytes_of};
use super::{Bits, blocks, copies_are_async};
use crate::native::cuda::upload;
use crate::native::or_panic;
use crate::recipe::StoreForm;
use crate::units::{Bytes, Fault};

/// Pinned memory is slow to get, so that all who send something away share one room.
static ROOM: LazyLock<Store> = LazyLock::new(|| Store::in_memory(StoreForm::Plain));

/// Something that can be taken apart into tensors and put together again.
pub trait Bundle: Sized {
    /// The tensors, which may share their memory with it.
    fn take_apart(&self) -> Vec<Tensor>;

    /// Puts together what [`Self::take_apart`] gave.
    fn put_together(tensors: Vec<Tensor>) -> Self;
}

impl Bundle for Tensor {
    fn take_apart(&self) -> Vec<Tensor> {
        vec![self.shallow_clone()]
    }

    fn put_together(tensors: Vec<Tensor>) -> Self {
        tensors.into_iter().next().unwrap_or_default()
    }
}

impl Bundle for Vec<Tensor> {
    fn take_apart(&self) -> Vec<Tensor> {
        shallow(self)
    }

    fn put_together(tensors: Vec<Tensor>) -> Self {
        tensors
    }
}

/// A bundle of tensors that waits. Clones share their room, which is free again when the last one is dropped: what waits is never written to.
#[derive(Debug)]
pub struct Waiting<T: Bundle> {
    /// How each tensor is made from those in the store; empty where none is.
    items: Vec<Item>,
    place: WaitingPlace,
    bundle: PhantomData<T>,
}

#[derive(Debug)]
enum WaitingPlace {
    /// The tensors themselves, which stay where they are.
    Here(Vec<Tensor>),
    Offloaded(Arc<Offloaded>),
    /// The tensors are being copied to a device. Their copies in the store stay, unless that memory was freed.
    Coming(Coming, Option<Arc<Offloaded>>),
}

/// How a tensor can be made again from what waits for it.
#[derive(Clone, Debug)]
struct Item {
    bits: Option<Bits>,
    size: Vec<i64>,
    kind: Kind,
    parts: usize,
}

impl Store {
    /// Offloads a copy of a bundle's tensors, all of one device: in the store's form if they are of a float kind, to the bit if they are of
    /// another. On a CUDA device the copy goes on beside what is computed from here on; the tensors must not be written to any more.
    ///
    /// # Shapes
    /// Any; quantised along the last axis.
    pub fn offload<T: Bundle>(&self, bundle: &T) -> Result<Waiting<T>, Fault> {
        let tensors = bundle.take_apart();
        if tensors.is_empty() {
            return Ok(Waiting::here(bundle));
        }
        let (mut items, mut all) = (Vec::with_capacity(tensors.len()), Vec::with_capacity(tensors.len()));
        for x in tensors {
            let (bits, size, kind) = (self.form().bits_of(&x.size(), x.kind()), x.size(), x.kind());
            let (x, before) = (x.detach(), all.len());
            match bits {
                None => all.push(x),
                Some(bits) => all.extend(blocks::encode(&x, bits)),
            }
            items.push(Item { bits, size, kind, parts: all.len() - before });
        }
        let place = WaitingPlace::Offloaded(Arc::new(Offloaded::new(&self.arena, &all)?));
        Ok(Waiting { items, place, bundle: PhantomData })
    }
}

impl<T: Bundle> Clone for Waiting<T> {
    fn clone(&self) -> Self {
        let place = match &self.place {
            WaitingPlace::Here(tensors) => WaitingPlace::Here(shallow(tensors)),
            WaitingPlace::Offloaded(offloaded) | WaitingPlace::Coming(_, Some(offloaded)) => {
                WaitingPlace::Offloaded(offloaded.clone())
            }
            WaitingPlace::Coming(coming, None) => WaitingPlace::Here(decoded(&self.items, coming.wait())),
        };
        Self { items: self.items.clone(), place, bundle: PhantomData }
    }
}

impl<T: Bundle> Waiting<T> {
    pub fn here(bundle: &T) -> Self {
        Self { items: Vec::new(), place: WaitingPlace::Here(bundle.take_apart()), bundle: PhantomData }
    }

    /// Sends tensors of one device to the host. From a CUDA device they go beside what is computed from here on, and must not be written to
    /// any more; those of the host stay where they are.
    pub fn send(bundle: &T) -> Self {
        Self::send_to(&ROOM, bundle)
    }

    /// Sends tensors as [`Self::send`] does, to a store in memory; tensors of the host need none of its room.
    pub fn send_to(store: &Store, bundle: &T) -> Self {
        let here = Self::here(bundle);
        let is_sent = matches!(&here.place, WaitingPlace::Here(tensors) if tensors.iter().any(|x| copies_are_async(x.device())));
        // Only a file can refuse.
        if is_sent { or_panic(store.offload(bundle)) } else { here }
    }

    /// Sets copies out to a device, so that they are there when [`Self::wait`] asks for them. Where copies go on beside what is computed
    /// this returns at once. Once they are under way it does nothing.
    pub fn prefetch(&mut self, device: Device) -> Result<(), Fault> {
        if let WaitingPlace::Offloaded(offloaded) = &self.place {
            self.place = WaitingPlace::Coming(offloaded.get(device)?, Some(offloaded.clone()));
        }
        Ok(())
    }

    /// Moves the tensors to a device for good: begins the copies as [`Self::prefetch`] does, and gives the room on the host back.
    pub fn leave(&mut self, device: Device) -> Result<(), Fault> {
        match &mut self.place {
            WaitingPlace::Here(tensors) => tensors.iter_mut().for_each(|x| *x = moved(x, device)),
            WaitingPlace::Offloaded(offloaded) => self.place = WaitingPlace::Coming(offloaded.get(device)?, None),
            WaitingPlace::Coming(_, source) => *source = None,
        }
        Ok(())
    }

    /// The bundle on a device: the copies that were prefetched, for which the device waits if they are not there yet, or others that are
    /// made now.
    pub fn wait(&mut self, device: Device) -> Result<T, Fault> {
        let bundle = self.fetch(device)?;
        if let WaitingPlace::Coming(_, Some(source)) = &self.place {
            self.place = WaitingPlace::Offloaded(source.clone());
        }
        Ok(bundle)
    }

    /// Waits like [`Self::wait`], but others may still fetch the bundle: copies that were prefetched stay where they are.
    pub fn fetch(&self, device: Device) -> Result<T, Fault> {
        let tensors = match &self.place {
            WaitingPlace::Here(tensors) => tensors.iter().map(|x| moved(x, device)).collect(),
            WaitingPlace::Offloaded(offloaded) => decoded(&self.items, offloaded.get(device)?.wait()),
            WaitingPlace::Coming(coming, _) => {
                decoded(&self.items, coming.wait()).into_iter().map(|x| x.to_device(device)).collect()
            }
        };
        Ok(T::put_together(tensors))
    }

    /// The bundle on the host, for which the host waits if it has not come; of one that was sent.
    pub fn on_host(&self) -> T {
        or_panic(self.fetch(Device::Cpu))
    }

    /// Whether it can be read on the host without waiting.
    pub fn has_come(&self) -> bool {
        if let WaitingPlace::Offloaded(offloaded) = &self.place { offloaded.has_come() } else { true }
    }

    /// Bytes of its tensors where it waits; 0 once it has left.
    pub fn bytes(&self) -> Bytes {
        match &self.place {
            WaitingPlace::Here(tensors) => bytes_of(tensors),
            WaitingPlace::Offloaded(_) | WaitingPlace::Coming(_, Some(_)) => self.items.iter().map(Item::bytes).sum(),
            WaitingPlace::Coming(_, None) => Bytes(0),
        }
    }

    /// Bytes of its tensors outside any store.
    pub fn bytes_here(&self) -> Bytes {
        if let WaitingPlace::Here(tensors) = &self.place { bytes_of(tensors) } else { Bytes(0) }
    }

    #[cfg(test)]
    pub(crate) fn bytes_in_store(&self) -> Bytes {
        if let WaitingPlace::Offloaded(offloaded) | WaitingPlace::Coming(_, Some(offloaded)) = &self.place {
            offloaded.bytes()
        } else {
            Bytes(0)
        }
    }

    #[cfg(test)]
    pub(super) fn tensors_ahead(&self) -> Vec<Tensor> {
        if let WaitingPlace::Coming(coming, _) = &self.place { shallow(coming.tensors()) } else { Vec::new() }
    }
}

impl Waiting<Tensor> {
    pub fn size(&self) -> Vec<i64> {
        match (&self.place, &self.items[..]) {
            (_, [item, ..]) => item.size.clone(),
            (WaitingPlace::Here(tensors), _) => tensors.iter().flat_map(Tensor::size).collect(),
            _ => Vec::new(),
        }
    }

    pub fn kind(&self) -> Kind {
        match (&self.place, &self.items[..]) {
            (_, [item, ..]) => item.kind,
            (WaitingPlace::Here(tensors), _) => tensors.first().map_or(Kind::Uint8, Tensor::kind),
            _ => Kind::Uint8,
        }
    }
}

impl Item {
    fn bytes(&self) -> Bytes {
        Bytes(self.size.iter().product::<i64>() as u64 * self.kind.elt_size_in_bytes() as u64)
    }
}

/// Tensors in their own kinds and shapes, from those that were in a store.
fn decoded(items: &[Item], parts: Vec<Tensor>) -> Vec<Tensor> {
    let mut parts = parts.into_iter();
    let one = |item: &Item| {
        let own: Vec<Tensor> = parts.by_ref().take(item.parts).collect();
        match item.bits {
            None => own.into_iter().next().unwrap_or_default(),
            Some(bits) => blocks::decode(&own, bits, &item.size, item.kind),
        }
    };
    items.iter().map(one).collect()
}

fn moved(x: &Tensor, device: Device) -> Tensor {
    if x.device() == device { x.shallow_clone() } else { upload(x, device) }
}

fn shallow(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_on_the_host_stays_where_it_is() {
        let x = Tensor::arange(6, (Kind::Int16, Device::Cpu)).view([2, 3]);
        let mut away = Waiting::send(&x);
        assert!(away.has_come());
        assert_eq!((away.bytes(), away.bytes_here()), (Bytes(12), Bytes(12)));
        assert_eq!((away.on_host().size(), away.on_host().kind()), (vec![2, 3], Kind::Int16));
        assert_eq!(away.on_host().data_ptr(), x.data_ptr());
        assert_eq!(away.clone().wait(Device::Cpu).unwrap().data_ptr(), x.data_ptr());
        away.leave(Device::Cpu).unwrap();
        assert_eq!(away.wait(Device::Cpu).unwrap().data_ptr(), x.data_ptr());
    }
}
