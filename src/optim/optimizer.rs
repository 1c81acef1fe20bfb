//! The optimiser: it updates each parameter by the rule of its name, and keeps what that remembers.

use std::collections::{BTreeMap, BTreeSet};

use tch::{Device, Kind, Tensor, no_grad};

use super::clip::SQUARED_AT_ONCE;
use super::dynamic_map::DynamicMap;
use super::remembered::{Remembered, StateForm};
use super::update::{MOMENTUM, Rule, Update};
use super::{adadelta, adam, adamax, rmsprop, sgd};
use crate::recipe::{Offload, OptimizerName, OptimizerRecipe};
use crate::units::{Bytes, Fault, listed, quoted};

/// An optimiser over named parameters.
#[derive(Debug)]
pub struct Optimizer {
    recipe: OptimizerRecipe,
    form: StateForm,
    device: Device,
    step: i64,
    remembered: Vec<Remembered>,
}

const STEP: &str = "step";

fn by_name(tensors: &[(String, Tensor)]) -> BTreeMap<&str, &Tensor> {
    tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect()
}

/// The optimiser of a recipe, for `parameters` of a model on `device`, of which nothing is remembered; its state waits where `offload` says.
pub fn build(recipe: &OptimizerRecipe, offload: Offload, parameters: &[(String, Tensor)], device: Device) -> Optimizer {
    // The mean gradient has a sign, its mean square has none.
    let is_in_8_bits = recipe.name == OptimizerName::AdamW8bit;
    let maps = if is_in_8_bits { vec![DynamicMap::new(true), DynamicMap::new(false)] } else { Vec::new() };
    let form = StateForm { maps, is_on_host: offload != Offload::None };
    let slots = slots(recipe);
    let of_parameter = |(name, parameter): &(String, Tensor)| Remembered::new(&slots, &form, name, parameter, device);
    let remembered = parameters.iter().map(of_parameter).collect();
    Optimizer { recipe: recipe.clone(), form, device, step: 0, remembered }
}

fn rule(name: OptimizerName) -> Rule {
    match name {
        OptimizerName::AdamW | OptimizerName::AdamW8bit | OptimizerName::Adam => adam::RULE,
        OptimizerName::Sgd => sgd::RULE,
        OptimizerName::RmsProp => rmsprop::RULE,
        OptimizerName::Adadelta => adadelta::RULE,
        OptimizerName::Adamax => adamax::RULE,
    }
}

fn slots(recipe: &OptimizerRecipe) -> Vec<&'static str> {
    let is_used = |slot: &&str| *slot != MOMENTUM || recipe.momentum > 0.0;
    rule(recipe.name).slots.iter().copied().filter(is_used).collect()
}

/// What the optimiser remembers of each number that it updates in f32, in bytes: its moments, and a scale for each 256 where they are in 8 bits.
pub fn bytes_of_state(recipe: &OptimizerRecipe) -> f64 {
    let of_moment = if recipe.name == OptimizerName::AdamW8bit { 1.0 + 4.0 / 256.0 } else { 4.0 };
    slots(recipe).len() as f64 * of_moment
}

/// The most bytes that clipping and updating a tensor of so many numbers, of `wide` bytes each, take for a moment.
pub fn update_bytes(recipe: &OptimizerRecipe, numbers: u64, wide: u64) -> u64 {
    // Moments of 8 bits are unpacked, and found in a table again.
    let of_number = if recipe.name == OptimizerName::AdamW8bit { 30 } else { rule(recipe.name).tensors * wide };
    // Where weights decay through the gradient, it is copied.
    let of_decay = if recipe.decays_apart() || recipe.decay() <= 0.0 { 0 } else { wide };
    (numbers * (of_number + of_decay)).max(16 * numbers.min(SQUARED_AT_ONCE as u64))
}

/// Changes the parameter, which may decay first, and what is remembered, in place.
fn update(mut at: Update<'_>) {
    let weight_decay = at.recipe.decay();
    if at.recipe.decays_apart() {
        let _ = at.parameter.g_mul_scalar_(1.0 - at.learning_rate * weight_decay);
    } else if weight_decay > 0.0 {
        at.gradient = &at.gradient + &at.parameter * weight_decay;
    }
    (rule(at.recipe.name).update)(at);
}

impl Optimizer {
    /// Applies one update. `gradients` has one entry per parameter.
    pub fn step(&mut self, parameters: &[(String, Tensor)], gradients: &[(String, Tensor)], learning_rate: f64) {
        self.step += 1;
        let step = self.step as i32;
        let [parameters, gradients] = [parameters, gradients].map(by_name);
        let of = |all: &BTreeMap<&str, &Tensor>, name: &str| all.get(name).map(|tensor| tensor.detach());
        let (recipe, form, device) = (&self.recipe, &self.form, self.device);
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
                let learning_rate = if is_b { learning_rate * recipe.loraplus_lr_ratio } else { learning_rate };
                update(Update { recipe, parameter: parameter.shallow_clone(), gradient, slots: &mut slots, step, learning_rate });
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
        self.step = by_name[STEP].to_kind(Kind::Int64).int64_value(&[0]);
        for own in &mut self.remembered {
            let mut tensors = Vec::new();
            for (name, now) in own.named() {
                let saved = by_name[name.as_str()];
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
