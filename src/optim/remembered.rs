//! What an optimiser remembers of a parameter between steps: in which form, and where.

use tch::{Device, Kind, Tensor};

use super::dynamic_map::DynamicMap;
use crate::native::or_panic;
use crate::store::Waiting;
use crate::units::Bytes;

/// How slots are remembered, and where between steps.
#[derive(Debug)]
pub(super) struct StateForm {
    /// The maps of slots in 8 bits, in their order; none where they stay as they are.
    pub(super) maps: Vec<DynamicMap>,
    /// Whether they wait on the host between steps.
    pub(super) is_on_host: bool,
}

/// The weight itself in more bits, where the model has it in few.
const MASTER: &str = "master";

#[derive(Debug)]
pub(super) struct Remembered {
    pub(super) name: String,
    /// The ends of the names of what is remembered: slots, or their codes and scales; and behind them the master, where there is one.
    ends: Vec<String>,
    tensors: Waiting<Vec<Tensor>>,
    is_on_host: bool,
    /// The device on which it is updated.
    device: Device,
}

impl StateForm {
    /// The slots as an update has them, the very tensors where they are plain.
    pub(super) fn decode(&self, tensors: &[Tensor]) -> Vec<Tensor> {
        if self.maps.is_empty() {
            return tensors.iter().map(Tensor::shallow_clone).collect();
        }
        self.maps.iter().zip(tensors.chunks(2)).map(|(map, pair)| map.decode(&pair[0], &pair[1])).collect()
    }

    /// Puts slots that have changed back.
    pub(super) fn encode(&self, slots: &[Tensor], tensors: &mut [Tensor]) {
        for ((map, slot), pair) in self.maps.iter().zip(slots).zip(tensors.chunks_mut(2)) {
            pair.swap_with_slice(&mut map.encode(slot));
        }
    }
}

impl Remembered {
    pub(super) fn new(slots: &[&str], form: &StateForm, name: &str, parameter: &Tensor, device: Device) -> Self {
        let parameter = parameter.detach().to_device(device);
        let has_master = parameter.kind() == Kind::BFloat16;
        let wide = if has_master { parameter.to_kind(Kind::Float) } else { parameter };
        let (mut ends, mut tensors) = (Vec::new(), Vec::new());
        for (index, end) in slots.iter().enumerate() {
            let zeros = wide.zeros_like();
            if let Some(map) = form.maps.get(index) {
                ends.extend(["codes", "scales"].map(|part| format!("{end}.{part}")));
                tensors.extend(map.encode(&zeros));
            } else {
                ends.push((*end).to_owned());
                tensors.push(zeros);
            }
        }
        if has_master {
            ends.push(MASTER.to_owned());
            tensors.push(wide);
        }
        let is_on_host = form.is_on_host;
        let mut own = Self { name: name.to_owned(), ends, tensors: Waiting::here(&Vec::new()), is_on_host, device };
        own.keep(&tensors);
        own
    }

    /// Begins to copy the tensors to where they are updated, if they wait elsewhere.
    pub(super) fn prefetch(&mut self) {
        or_panic(self.tensors.prefetch(self.device));
    }

    /// The tensors where they are updated.
    pub(super) fn fetch(&mut self) -> Vec<Tensor> {
        or_panic(self.tensors.wait(self.device))
    }

    /// Keeps the changed tensors in place of the old ones.
    pub(super) fn keep(&mut self, changed: &Vec<Tensor>) {
        self.tensors = if self.is_on_host { Waiting::send(changed) } else { Waiting::here(changed) };
    }

    pub(super) fn master(&self, tensors: &[Tensor]) -> Option<Tensor> {
        self.ends.iter().zip(tensors).find(|(end, _)| *end == MASTER).map(|(_, tensor)| tensor.shallow_clone())
    }

    pub(super) fn named(&self) -> Vec<(String, Tensor)> {
        let home = if self.is_on_host { Device::Cpu } else { self.device };
        self.names().zip(or_panic(self.tensors.fetch(home))).collect()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        self.ends.iter().map(|end| format!("{}.{end}", self.name))
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.tensors.bytes()
    }
}
