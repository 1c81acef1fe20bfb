//! An optimiser made of a rule: it applies the rule to each parameter, and keeps what the rule remembers.

use tch::{Kind, Tensor, no_grad};

use super::rule::{Rule, Update};
use super::{OptimError, Optimizer};
use crate::units::Bytes;

/// A rule, and what it remembers of each parameter.
#[derive(Debug)]
pub(super) struct RuleOptimizer {
    rule: Box<dyn Rule>,
    /// How many times as fast the matrices B of an adapter learn (LoRA+).
    b_ratio: f64,
    step: i64,
    /// By parameter, in the order of the rule's slots.
    remembered: Vec<(String, Vec<Tensor>)>,
}

const STEP: &str = "step";

impl RuleOptimizer {
    /// With nothing remembered of `parameters`.
    pub(super) fn new(rule: Box<dyn Rule>, b_ratio: f64, parameters: &[(String, Tensor)]) -> Self {
        let zeros = |(name, p): &(String, Tensor)| (name.clone(), rule.slots().iter().map(|_| p.detach().zeros_like()).collect());
        Self { remembered: parameters.iter().map(zeros).collect(), rule, b_ratio, step: 0 }
    }

    fn slots(&self) -> impl Iterator<Item = (String, &Tensor)> {
        let ends = self.rule.slots();
        let of = move |(name, slots): &'_ (String, Vec<Tensor>)| -> Vec<String> {
            ends.iter().take(slots.len()).map(|end| format!("{name}.{end}")).collect()
        };
        self.remembered.iter().flat_map(move |parameter| of(parameter).into_iter().zip(&parameter.1))
    }
}

impl Optimizer for RuleOptimizer {
    fn step(&mut self, parameters: &[(String, Tensor)], gradients: &[(String, Tensor)], learning_rate: f64) {
        self.step += 1;
        no_grad(|| {
            for (name, gradient) in gradients {
                let remembered = self.remembered.iter_mut().find(|(own, _)| own == name);
                let parameter = parameters.iter().find(|(own, _)| own == name);
                if let (Some((_, slots)), Some((_, parameter))) = (remembered, parameter) {
                    let gradient = gradient.to_kind(parameter.kind());
                    let step = self.step as i32;
                    let is_b = name.contains(".lora_B.") || name.ends_with(".lora_embedding_B");
                    let learning_rate = if is_b { learning_rate * self.b_ratio } else { learning_rate };
                    self.rule.update(Update { parameter: parameter.detach(), gradient, slots, step, learning_rate });
                }
            }
        });
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        let step = (STEP.to_owned(), Tensor::from_slice(&[self.step]));
        std::iter::once(step).chain(self.slots().map(|(name, slot)| (name, slot.shallow_clone()))).collect()
    }

    fn bytes(&self) -> Bytes {
        let of = |slot: &Tensor| (slot.numel() * slot.kind().elt_size_in_bytes()) as u64;
        Bytes(self.remembered.iter().flat_map(|(_, slots)| slots).map(of).sum())
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<(), OptimError> {
        let find = |name: &str| {
            let found = state.iter().find(|(n, _)| n == name);
            found.map(|(_, t)| t).ok_or_else(|| OptimError::OtherState(format!("`{name}` is missing")))
        };
        let expected = self.slots().count() + 1;
        if state.len() != expected {
            return Err(OptimError::OtherState(format!("expected {expected} tensors, found {}", state.len())));
        }
        self.step = find(STEP)?.to_kind(Kind::Int64).int64_value(&[0]);
        for (parameter, slots) in &mut self.remembered {
            for (own, end) in slots.iter_mut().zip(self.rule.slots()) {
                let name = format!("{parameter}.{end}");
                let saved = find(&name)?;
                if saved.size() != own.size() {
                    let message = format!("`{name}`: expected {:?}, found {:?}", own.size(), saved.size());
                    return Err(OptimError::OtherState(message));
                }
                *own = saved.to_kind(own.kind()).to_device(own.device()).copy();
            }
        }
        Ok(())
    }
}
