//! A bundle of tensors that waits somewhere else until it is needed: overwritten entries, layer checkpoints, gradients between layer bands,
//! choices, losses, what an optimiser remembers.

use std::marker::PhantomData;
use std::sync::{Arc, LazyLock};

use tch::{Device, Kind, Tensor};

use super::arena::{Coming, Offloaded, moved};
use super::tensor_store::{Store, bytes_of};
use super::{Bits, blocks, copies_are_async};
use crate::native::or_panic;
use crate::recipe::StoreForm;
use crate::units::{Bytes, Fault};

/// Pinned memory is slow to get, so that all who send something away share one room.
static ROOM: LazyLock<Store> = LazyLock::new(|| Store::in_memory(StoreForm::Plain));

/// Something that can be taken apart into tensors and put together again.
pub trait Bundle: Sized {
    /// The tensors, which may share their memory with it.
    fn take_apart(&self) -> Vec<Tensor>;

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
        self.iter().map(Tensor::shallow_clone).collect()
    }

    fn put_together(tensors: Vec<Tensor>) -> Self {
        tensors
    }
}

/// A bundle of tensors that waits: here, in a store, or in both while a copy is ahead of its use. Clones share their room in the store, which
/// is free again when the last one is dropped: what waits is never written to.
#[derive(Debug)]
pub struct Waiting<T: Bundle> {
    /// How each tensor is made from those in the store; empty where none has been there.
    items: Vec<Item>,
    /// The tensors, or what came back from the store, perhaps still on its way.
    here: Option<Coming>,
    away: Option<Arc<Offloaded>>,
    bundle: PhantomData<T>,
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
        let away = Arc::new(Offloaded::new(&self.arena, &all)?);
        Ok(Waiting { items, here: None, away: Some(away), bundle: PhantomData })
    }
}

impl<T: Bundle> Clone for Waiting<T> {
    fn clone(&self) -> Self {
        match (&self.away, &self.here) {
            (None, Some(here)) => Self::of(self.decoded(here.wait())),
            (away, _) => Self { items: self.items.clone(), here: None, away: away.clone(), bundle: PhantomData },
        }
    }
}

impl<T: Bundle> Waiting<T> {
    pub fn here(bundle: &T) -> Self {
        Self::of(bundle.take_apart())
    }

    fn of(tensors: Vec<Tensor>) -> Self {
        Self { items: Vec::new(), here: Some(Coming::here(tensors)), away: None, bundle: PhantomData }
    }

    /// Sends tensors of one device to the host. From a CUDA device they go beside what is computed from here on, and must not be written to
    /// any more; those of the host stay where they are.
    pub fn send(bundle: &T) -> Self {
        // Only a file can refuse.
        or_panic(Self::send_to(&ROOM, bundle))
    }

    /// Sends tensors as [`Self::send`] does, to a store; tensors of the host need none of its room.
    pub fn send_to(store: &Store, bundle: &T) -> Result<Self, Fault> {
        let here = Self::here(bundle);
        let is_sent = here.tensors().iter().any(|x| copies_are_async(x.device()));
        if is_sent { store.offload(bundle) } else { Ok(here) }
    }

    /// Sets copies out to a device, so that they are there when [`Self::wait`] asks for them. Where copies go on beside what is computed
    /// this returns at once. Once they are under way it does nothing.
    pub fn prefetch(&mut self, device: Device) -> Result<(), Fault> {
        if let (None, Some(away)) = (&self.here, &self.away) {
            self.here = Some(away.get(device)?);
        }
        Ok(())
    }

    /// Moves the tensors to a device for good: begins the copies as [`Self::prefetch`] does, and gives the room on the host back.
    pub fn leave(&mut self, device: Device) -> Result<(), Fault> {
        self.prefetch(device)?;
        self.away = None;
        if self.items.is_empty() {
            self.here.iter_mut().flat_map(|here| &mut here.tensors).for_each(|x| *x = moved(x, device));
        }
        Ok(())
    }

    /// The bundle on a device: the copies that were prefetched, for which the device waits if need be, or others that are made now.
    pub fn wait(&mut self, device: Device) -> Result<T, Fault> {
        let bundle = self.fetch(device)?;
        if self.away.is_some() {
            self.here = None;
        }
        Ok(bundle)
    }

    /// Waits like [`Self::wait`], but others may still fetch the bundle: copies that were prefetched stay where they are.
    pub fn fetch(&self, device: Device) -> Result<T, Fault> {
        let tensors = match (&self.here, &self.away) {
            (Some(here), _) => self.decoded(here.wait()).iter().map(|x| moved(x, device)).collect(),
            (None, Some(away)) => self.decoded(away.get(device)?.wait()),
            (None, None) => Vec::new(),
        };
        Ok(T::put_together(tensors))
    }

    /// The bundle on the host, for which the host waits if it has not come; of one that was sent.
    pub fn on_host(&self) -> T {
        or_panic(self.fetch(Device::Cpu))
    }

    /// Whether it can be read on the host without waiting.
    pub fn has_come(&self) -> bool {
        match (&self.here, &self.away) {
            (None, Some(away)) => away.has_come(),
            _ => true,
        }
    }

    /// Bytes of its tensors where it waits; 0 once it has left.
    pub fn bytes(&self) -> Bytes {
        let of_item = |item: &Item| item.size.iter().product::<i64>() as u64 * item.kind.elt_size_in_bytes() as u64;
        if self.away.is_some() { Bytes(self.items.iter().map(of_item).sum()) } else { self.bytes_here() }
    }

    /// Bytes of its tensors outside any store, where it has never been in one.
    pub fn bytes_here(&self) -> Bytes {
        if self.items.is_empty() { bytes_of(self.tensors()) } else { Bytes(0) }
    }

    #[cfg(test)]
    pub(crate) fn bytes_in_store(&self) -> Bytes {
        self.away.as_ref().map_or(Bytes(0), |away| away.bytes())
    }

    #[cfg(test)]
    pub(super) fn tensors_ahead(&self) -> Vec<Tensor> {
        if self.items.is_empty() { Vec::new() } else { self.tensors().iter().map(Tensor::shallow_clone).collect() }
    }

    fn tensors(&self) -> &[Tensor] {
        self.here.as_ref().map_or(&[], |here| &here.tensors)
    }

    /// Tensors in their own kinds and shapes, from those that were in a store.
    fn decoded(&self, parts: Vec<Tensor>) -> Vec<Tensor> {
        if self.items.is_empty() {
            return parts;
        }
        let mut parts = parts.into_iter();
        let one = |item: &Item| {
            let own: Vec<Tensor> = parts.by_ref().take(item.parts).collect();
            match item.bits {
                None => own.into_iter().next().unwrap_or_default(),
                Some(bits) => blocks::decode(&own, bits, &item.size, item.kind),
            }
        };
        self.items.iter().map(one).collect()
    }
}

impl Waiting<Tensor> {
    pub fn size(&self) -> Vec<i64> {
        let stored = self.items.first().map(|item| item.size.clone());
        stored.unwrap_or_else(|| self.tensors().iter().flat_map(Tensor::size).collect())
    }

    pub fn kind(&self) -> Kind {
        let stored = self.items.first().map(|item| item.kind);
        stored.unwrap_or_else(|| self.tensors().first().map_or(Kind::Uint8, Tensor::kind))
    }
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
