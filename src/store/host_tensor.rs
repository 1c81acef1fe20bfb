//! A tensor that waits on the host without a store of its own: gradients between layer bands, choices, losses.

use std::sync::{Arc, LazyLock};

use tch::{Device, Kind, Tensor};

use super::{Form, Parked, Prefetch, Store, StoreError, bytes_of, copies_are_async};
use crate::native::cuda::upload;
use crate::native::{BackwardError, or_panic};
use crate::units::Bytes;

/// Pinned memory is slow to get, so that all who send something away share one room.
static ROOM: LazyLock<Store> = LazyLock::new(|| Store::in_memory(Form::Plain));

/// A tensor on the host, or on its way there; to the bit.
#[derive(Clone, Debug)]
pub struct HostTensor(HostTensorState);

#[derive(Debug)]
enum HostTensorState {
    /// It was on the host already.
    Here(Tensor),
    Parked(Arc<Parked>),
}

impl Clone for HostTensorState {
    /// What waits is never written to, so that both may lie in the same memory.
    fn clone(&self) -> Self {
        match self {
            Self::Here(tensor) => Self::Here(tensor.shallow_clone()),
            Self::Parked(parked) => Self::Parked(parked.clone()),
        }
    }
}

impl HostTensor {
    /// Sends a tensor to the host. From a CUDA device it goes beside what is computed from here on, and must not be written to any
    /// more; of a tensor of the host it is the very tensor.
    ///
    /// # Shapes
    /// Any.
    pub fn send(x: &Tensor) -> Self {
        Self::send_to(&ROOM, x)
    }

    /// The same to a store in memory; a tensor of the host needs none of its room.
    ///
    /// # Shapes
    /// Any.
    pub fn send_to(store: &Store, x: &Tensor) -> Self {
        if !copies_are_async(x.device()) {
            return Self::here(x);
        }
        Self(HostTensorState::Parked(Arc::new(in_memory(store.park(x)))))
    }

    /// A tensor that is on the host, and stays where it is.
    ///
    /// # Shapes
    /// Any.
    pub fn here(x: &Tensor) -> Self {
        Self(HostTensorState::Here(x.shallow_clone()))
    }

    /// Whether it can be read without waiting.
    pub fn has_come(&self) -> bool {
        match &self.0 {
            HostTensorState::Here(_) => true,
            HostTensorState::Parked(parked) => parked.has_come(),
        }
    }

    /// The tensor on the host, for which the host waits if it has not come.
    ///
    /// # Shapes
    /// Those of the tensor that was sent.
    pub fn on_host(&self) -> Tensor {
        match &self.0 {
            HostTensorState::Here(tensor) => tensor.shallow_clone(),
            HostTensorState::Parked(parked) => in_memory(parked.fetch(Device::Cpu)),
        }
    }

    /// Sets it out on its way to a device.
    pub fn prefetch(&self, device: Device) -> TensorPrefetch {
        match &self.0 {
            HostTensorState::Here(tensor) => TensorPrefetch::Here(upload(tensor, device)),
            HostTensorState::Parked(parked) => TensorPrefetch::OnItsWay(in_memory(parked.prefetch(device))),
        }
    }

    pub fn size(&self) -> Vec<i64> {
        match &self.0 {
            HostTensorState::Here(tensor) => tensor.size(),
            HostTensorState::Parked(parked) => parked.size().to_vec(),
        }
    }

    pub fn kind(&self) -> Kind {
        match &self.0 {
            HostTensorState::Here(tensor) => tensor.kind(),
            HostTensorState::Parked(parked) => parked.kind(),
        }
    }

    /// What its numbers take outside any store.
    pub fn bytes_here(&self) -> Bytes {
        if let HostTensorState::Here(tensor) = &self.0 { bytes_of([tensor]) } else { Bytes(0) }
    }

    pub fn bytes(&self) -> Bytes {
        Bytes(self.size().iter().product::<i64>() as u64 * self.kind().elt_size_in_bytes() as u64)
    }
}

/// A tensor that was away, on its way to a device.
#[derive(Debug)]
pub enum TensorPrefetch {
    Here(Tensor),
    /// It comes beside what is computed.
    OnItsWay(Prefetch),
}

impl TensorPrefetch {
    /// The tensor, for which the device waits if it is not there yet.
    ///
    /// # Shapes
    /// Those of the tensor that was sent.
    pub fn wait(self) -> Tensor {
        match self {
            Self::Here(tensor) => tensor,
            Self::OnItsWay(ahead) => ahead.wait().swap_remove(0),
        }
    }

    /// What it takes on the device.
    pub fn bytes(&self) -> Bytes {
        match self {
            Self::Here(tensor) => bytes_of([tensor]),
            Self::OnItsWay(ahead) => ahead.bytes(),
        }
    }
}

/// What a store in memory gives: only a file can refuse.
fn in_memory<T>(given: Result<T, StoreError>) -> T {
    or_panic(given.map_err(|error| BackwardError(error.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_on_the_host_stays_where_it_is() {
        let x = Tensor::arange(6, (Kind::Int16, Device::Cpu)).view([2, 3]);
        let away = HostTensor::send(&x);
        assert!(away.has_come());
        assert_eq!((away.size(), away.kind(), away.bytes()), (vec![2, 3], Kind::Int16, Bytes(12)));
        assert_eq!(away.on_host().data_ptr(), x.data_ptr());
        assert_eq!(away.clone().prefetch(Device::Cpu).wait().data_ptr(), x.data_ptr());
    }
}
