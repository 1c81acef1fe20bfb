//! The optimiser: it applies a rule to each parameter, and keeps what the rule remembers.

use std::collections::{BTreeMap, BTreeSet};

use tch::{Device, Kind, Tensor, no_grad};

use super::remembered::{Remembered, StateForm};
use super::rule::{Rule, Update};
use crate::units::{Bytes, Fault, listed, quoted};

/// An optimiser over named parameters.
#[derive(Debug)]
pub struct Optimizer {
    rule: Box<dyn Rule>,
    /// How many times as fast the matrices B of an adapter learn (LoRA+).
    b_ratio: f64,
    form: StateForm,
    device: Device,
    step: i64,
    remembered: Vec<Remembered>,
}

const STEP: &str = "step";

fn by_name(tensors: &[(String, Tensor)]) -> BTreeMap<&str, &Tensor> {
    tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect()
}

impl Optimizer {
    /// With nothing remembered of `parameters`, which are updated on `device`.
    pub(super) fn new(
        rule: Box<dyn Rule>,
        b_ratio: f64,
        form: StateForm,
        parameters: &[(String, Tensor)],
        device: Device,
    ) -> Self {
        let remembered =
            parameters.iter().map(|(name, parameter)| Remembered::new(&*rule, &form, name, parameter, device)).collect();
        Self { rule, b_ratio, form, device, step: 0, remembered }
    }

    /// Applies one update. `gradients` has one entry per parameter.
    pub fn step(&mut self, parameters: &[(String, Tensor)], gradients: &[(String, Tensor)], learning_rate: f64) {
        self.step += 1;
        let step = self.step as i32;
        let [parameters, gradients] = [parameters, gradients].map(by_name);
        let of = |all: &BTreeMap<&str, &Tensor>, name: &str| all.get(name).map(|tensor| tensor.detach());
        let (form, device) = (&self.form, self.device);
        no_grad(|| {
            for index in 0..self.remembered.len() {
                let mut tensors = self.remembered[index].fetch();
                self.remembered.get_mut(index + 1).into_iter().for_each(Remembered::prefetch);
                let own = &mut self.remembered[index];
                let (Some(gradient), Some(stored)) = (of(&gradients, &own.name), of(&parameters, &own.name)) else { continue };
                // A weight of fewer bits follows its master, and one that waits on the host is updated where the others are.
                let parameter = own.master(&tensors).unwrap_or_else(|| stored.to_device(device));
                let gradient = gradient.to_device(device).to_kind(parameter.kind());
                let mut slots = form.decode(&tensors);
                let is_b = own.name.contains(".lora_B.") || own.name.ends_with(".lora_embedding_B");
                let learning_rate = if is_b { learning_rate * self.b_ratio } else { learning_rate };
                let update = Update { parameter: parameter.shallow_clone(), gradient, slots: &mut slots, step, learning_rate };
                self.rule.update(update);
                form.encode(&slots, &mut tensors);
                if stored.data_ptr() != parameter.data_ptr() {
                    stored.shallow_clone().copy_(&parameter);
                }
                own.keep(&tensors);
            }
        });
    }

    /// The state by name, to be saved.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let step = (STEP.to_owned(), Tensor::from_slice(&[self.step]));
        std::iter::once(step).chain(self.remembered.iter().flat_map(Remembered::named)).collect()
    }

    pub fn bytes(&self) -> Bytes {
        self.remembered.iter().map(Remembered::bytes).sum()
    }

    pub fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<(), Fault> {
        let by_name = by_name(state);
        let find = |name: &str| by_name.get(name).copied().ok_or_else(|| other_state(&format!("`{name}` is missing")));
        let own = self.remembered.iter().flat_map(Remembered::names).chain([STEP.to_owned()]);
        let (own, saved): (BTreeSet<String>, BTreeSet<String>) =
            (own.collect(), state.iter().map(|(name, _)| name.clone()).collect());
        for (what, mut names) in
            [("it lacks", own.difference(&saved).peekable()), ("it has beside", saved.difference(&own).peekable())]
        {
            if names.peek().is_some() {
                let names = listed(names.map(|name| format!("`{}`", quoted(name))));
                return Err(other_state(&format!("{what} {names}")));
            }
        }
        self.step = find(STEP)?.to_kind(Kind::Int64).int64_value(&[0]);
        for own in &mut self.remembered {
            let mut tensors = Vec::new();
            for (name, now) in own.named() {
                let saved = find(&name)?;
                if (saved.size(), saved.kind()) != (now.size(), now.kind()) {
                    let [expected, found] = [&now, saved].map(|t| format!("{:?} {:?}", t.size(), t.kind()));
                    return Err(other_state(&format!("`{name}`: expected {expected}, found {found}")));
                }
                tensors.push(saved.to_device(self.device).copy());
            }
            own.keep(&tensors);
        }
        Ok(())
    }
}

/// Saved state that does not belong to these parameters.
fn other_state(difference: &str) -> Fault {
    let message = format!("the optimiser's state does not fit what is trained: {difference}");
    Fault::data(message, "resume with the settings that the run began with")
}
