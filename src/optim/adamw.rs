//! AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101): decoupled weight decay, bias-corrected moments, as `torch.optim.AdamW`.

use tch::{Kind, Tensor, no_grad};

use super::{OptimError, Optimizer};
use crate::recipe::OptimizerRecipe;
use crate::units::Bytes;

/// AdamW with moments in the parameters' own kind (f32 for f32 masters).
#[derive(Debug)]
pub struct AdamW {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    step: i64,
    moments: Vec<Moments>,
}

#[derive(Debug)]
struct Moments {
    name: String,
    first: Tensor,
    second: Tensor,
}

const STEP: &str = "step";
const FIRST: &str = ".exp_avg";
const SECOND: &str = ".exp_avg_sq";

impl AdamW {
    /// Zero moments for `parameters`.
    pub fn new(recipe: &OptimizerRecipe, parameters: &[(String, Tensor)]) -> Self {
        let moments = |(name, p): &(String, Tensor)| Moments {
            name: name.clone(),
            first: p.detach().zeros_like(),
            second: p.detach().zeros_like(),
        };
        Self {
            betas: recipe.betas,
            eps: recipe.eps,
            weight_decay: recipe.weight_decay,
            step: 0,
            moments: parameters.iter().map(moments).collect(),
        }
    }

    fn update(&mut self, index: usize, parameter: &Tensor, gradient: &Tensor, learning_rate: f64) {
        let (b1, b2) = self.betas;
        let (correction1, correction2) = (1.0 - b1.powi(self.step as i32), 1.0 - b2.powi(self.step as i32));
        let Moments { first, second, .. } = &mut self.moments[index];
        let gradient = gradient.to_kind(parameter.kind());
        let mut parameter = parameter.detach();
        let _ = parameter.g_mul_scalar_(1.0 - learning_rate * self.weight_decay);
        let _ = first.g_mul_scalar_(b1).g_add_(&(&gradient * (1.0 - b1)));
        let _ = second.g_mul_scalar_(b2).g_add_(&(gradient.square() * (1.0 - b2)));
        let spread = second.sqrt() / correction2.sqrt() + self.eps;
        let _ = parameter.g_sub_(&(&*first / spread * (learning_rate / correction1)));
    }
}

impl Optimizer for AdamW {
    fn step(&mut self, parameters: &[(String, Tensor)], gradients: &[(String, Tensor)], learning_rate: f64) {
        self.step += 1;
        no_grad(|| {
            for (name, gradient) in gradients {
                let index = self.moments.iter().position(|m| m.name == *name);
                let parameter = parameters.iter().find(|(n, _)| n == name);
                if let (Some(index), Some((_, parameter))) = (index, parameter) {
                    self.update(index, parameter, gradient, learning_rate);
                }
            }
        });
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        let mut state = vec![(STEP.to_owned(), Tensor::from_slice(&[self.step]))];
        for m in &self.moments {
            state.push((format!("{}{FIRST}", m.name), m.first.shallow_clone()));
            state.push((format!("{}{SECOND}", m.name), m.second.shallow_clone()));
        }
        state
    }

    fn bytes(&self) -> Bytes {
        let of = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        Bytes(self.moments.iter().map(|m| of(&m.first) + of(&m.second)).sum())
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<(), OptimError> {
        let find = |name: &str| {
            let found = state.iter().find(|(n, _)| n == name);
            found.map(|(_, t)| t).ok_or_else(|| OptimError::OtherState(format!("`{name}` is missing")))
        };
        if state.len() != 2 * self.moments.len() + 1 {
            let message = format!("expected {} tensors, found {}", 2 * self.moments.len() + 1, state.len());
            return Err(OptimError::OtherState(message));
        }
        self.step = find(STEP)?.to_kind(Kind::Int64).int64_value(&[0]);
        for m in &mut self.moments {
            for (own, suffix) in [(&mut m.first, FIRST), (&mut m.second, SECOND)] {
                let name = format!("{}{suffix}", m.name);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{Schedule, Warmup};

    fn recipe() -> OptimizerRecipe {
        OptimizerRecipe {
            learning_rate: 0.1,
            weight_decay: 0.3,
            betas: (0.9, 0.99),
            eps: 1e-8,
            schedule: Schedule::Constant,
            warmup: Warmup::Steps(0),
        }
    }

    fn named(values: &[f64]) -> Vec<(String, Tensor)> {
        vec![("w".to_owned(), Tensor::from_slice(values))]
    }

    /// The formula of the paper in plain numbers.
    fn by_hand(mut x: f64, gradients: &[f64]) -> f64 {
        let (r, mut m, mut v) = (recipe(), 0.0, 0.0);
        for (i, g) in gradients.iter().enumerate() {
            x *= 1.0 - r.learning_rate * r.weight_decay;
            m = r.betas.0 * m + (1.0 - r.betas.0) * g;
            v = r.betas.1 * v + (1.0 - r.betas.1) * g * g;
            let t = i as i32 + 1;
            let (m_hat, v_hat) = (m / (1.0 - r.betas.0.powi(t)), v / (1.0 - r.betas.1.powi(t)));
            x -= r.learning_rate * m_hat / (f64::sqrt(v_hat) + r.eps);
        }
        x
    }

    #[test]
    fn fifty_steps_follow_the_formula_and_survive_saving() {
        let gradients: Vec<f64> = (0..50).map(|i| (f64::from(i) * 0.7).sin() + 0.1).collect();
        let parameters = named(&[1.5]);
        let mut optimizer = AdamW::new(&recipe(), &parameters);
        for (i, g) in gradients.iter().enumerate() {
            if i == 20 {
                let mut other = AdamW::new(&recipe(), &parameters);
                other.load_state(&optimizer.state()).unwrap();
                optimizer = other;
            }
            optimizer.step(&parameters, &named(&[*g]), 0.1);
        }
        assert!((parameters[0].1.double_value(&[0]) - by_hand(1.5, &gradients)).abs() < 1e-12);
    }

    #[test]
    fn foreign_state_is_refused() {
        let mut optimizer = AdamW::new(&recipe(), &named(&[1.0]));
        let other = AdamW::new(&recipe(), &named(&[1.0, 2.0]));
        assert!(optimizer.load_state(&other.state()).unwrap_err().to_string().contains("expected [1], found [2]"));
        assert!(optimizer.load_state(&other.state()[..2]).is_err());
    }
}
