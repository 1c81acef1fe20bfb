//! Layer checkpoints: hidden states at the lower border of each row of cells, on the host, by column.

use std::collections::HashMap;

use tch::{Device, Tensor};

use crate::recipe::LayerCheckpoints as Form;
use crate::store::Parked;

/// Hidden states by (border, column).
#[derive(Debug)]
pub(super) struct LayerCheckpoints {
    form: Form,
    parked: HashMap<(usize, usize), Parked>,
}

impl LayerCheckpoints {
    pub(super) fn new(form: Form) -> Self {
        Self { form, parked: HashMap::new() }
    }

    /// Parks the input of layer `border` for one column.
    pub(super) fn put(&mut self, border: usize, column: usize, hidden_bne: &Tensor) {
        let parked = match self.form {
            Form::Plain => Parked::plain(hidden_bne),
            Form::Int8 => Parked::int8(hidden_bne),
        };
        self.parked.insert((border, column), parked);
    }

    /// The hidden states, where there are any.
    pub(super) fn get(&self, border: usize, column: usize, device: Device) -> Option<Tensor> {
        self.parked.get(&(border, column)).map(|p| p.fetch(device))
    }

    /// Frees a border that is done with.
    pub(super) fn drop_border(&mut self, border: usize) {
        self.parked.retain(|(b, _), _| *b != border);
    }
}
