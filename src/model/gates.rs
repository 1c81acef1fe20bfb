//! Gates: in each layer a small function of attention's input that scores every new entry, for the policy `learned`. The files are those of
//! `KVzap` (Jegou and Jeblick 2026, arXiv 2601.07891): a linear layer, or one hidden layer with a GELU between two.

use std::collections::BTreeSet;
use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::config::ModelConfig;
use super::delta::master_kind;
use super::random;
use crate::files::{TensorFile, is_there};
use crate::store::load_tensor;
use crate::units::{Fault, abridged};

/// The gates of a model that were trained with it, beside its adapter.
pub const GATE_TENSORS: &str = "kv_gates.safetensors";

/// Names in files begin so; the layer's number follows.
const PREFIX: &str = "module_list.";

/// Whether a tensor is one of a gate, by its name in files.
pub(super) fn is_of_gate(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// The gate of one layer, in the kind of what is trained.
#[derive(Debug)]
pub(super) struct Gate {
    /// Weight `(m, E)` and bias `(m)` of the hidden layer, where there is one.
    hidden: Option<[Tensor; 2]>,
    /// Weight `(G, E)` or `(G, m)`, and bias `(G)`.
    output: [Tensor; 2],
}

/// The gates of all layers, bottom to top.
#[derive(Debug)]
pub struct Gates(pub(super) Vec<Gate>);

impl Gate {
    /// # Shapes
    /// `(B, n, E)` in, `(B, G, n, 1)` out, in the gate's kind.
    pub(super) fn score(&self, x_bne: &Tensor) -> Tensor {
        let x_bne = x_bne.to_kind(self.output[0].kind());
        let hidden = self.hidden.as_ref().map(|[weight, bias]| x_bne.linear(weight, Some(bias)).gelu("none"));
        let [weight, bias] = &self.output;
        hidden.as_ref().unwrap_or(&x_bne).linear(weight, Some(bias)).transpose(1, 2).unsqueeze(-1)
    }

    /// Its weights and biases by their names in files.
    pub(super) fn parameters(&self, layer: usize) -> Vec<(String, Tensor)> {
        let output = if self.hidden.is_some() { "2." } else { "" };
        let pairs = self.hidden.iter().map(|pair| ("0.", pair)).chain([(output, &self.output)]);
        let named = |(part, pair): (&str, &[Tensor; 2])| {
            [("weight", &pair[0]), ("bias", &pair[1])]
                .map(|(end, tensor)| (format!("{PREFIX}{layer}.{part}{end}"), tensor.shallow_clone()))
        };
        pairs.flat_map(named).collect()
    }

    fn read(config: &ModelConfig, layer: usize, file: &TensorFile, to: (Kind, Device)) -> Result<Self, Fault> {
        let both = |part: &str| {
            let load = |end: &str| {
                let tensor = load_tensor(file, &format!("{PREFIX}{layer}.{part}{end}"))?;
                Ok::<_, Fault>(tensor.to_kind(to.0).to_device(to.1))
            };
            Ok::<_, Fault>([load("weight")?, load("bias")?])
        };
        let is_linear = file.contains(&format!("{PREFIX}{layer}.weight"));
        let gate = if is_linear {
            Self { hidden: None, output: both("")? }
        } else {
            Self { hidden: Some(both("0.")?), output: both("2.")? }
        };
        gate.check(config, layer)?;
        Ok(gate)
    }

    fn check(&self, config: &ModelConfig, layer: usize) -> Result<(), Fault> {
        let (width, heads) = (config.hidden_size as i64, config.layers[layer].attention.num_kv_heads as i64);
        let sizes = |pair: &[Tensor; 2]| pair.each_ref().map(Tensor::size);
        let inner = self.hidden.as_ref().map_or(width, |[weight, _]| weight.size()[0]);
        let fits = |pair: &[Tensor; 2], out: i64, inner: i64| sizes(pair) == [vec![out, inner], vec![out]];
        if self.hidden.iter().all(|hidden| fits(hidden, inner, width)) && fits(&self.output, heads, inner) {
            return Ok(());
        }
        let found =
            self.hidden.iter().chain([&self.output]).map(|pair| format!("{:?}", sizes(pair))).collect::<Vec<_>>().join(", ");
        let message = format!(
            "the gate of layer {layer} has weights and biases of {found}; the model has {width} channels and {heads} KV heads"
        );
        Err(Fault::data(message, "take gates that were trained for this model"))
    }
}

impl Gates {
    /// New gates for a model that computes in `kind`, which give all entries the same score: a hidden layer is drawn as PyTorch draws it, from
    /// a stream of its own for each, and the rest is zero. `hidden` is its width, 0 for none.
    pub fn new(config: &ModelConfig, hidden: usize, seed: u64, kind: Kind, device: Device) -> Self {
        let (width, to) = (config.hidden_size as i64, (master_kind(kind), device));
        let zeros = |size: &[i64]| Tensor::zeros(size, to);
        let gate = |layer: usize| {
            let (heads, inner) = (config.layers[layer].attention.num_kv_heads as i64, hidden as i64);
            let drawn = |part: &str, size: &[i64]| {
                let name = format!("{PREFIX}{layer}.0.{part}");
                random::uniform(seed, &name, size, 1.0 / (width as f64).sqrt()).to_kind(to.0).to_device(to.1)
            };
            let hidden = (hidden > 0).then(|| [drawn("weight", &[inner, width]), drawn("bias", &[inner])]);
            let last = if hidden.is_some() { inner } else { width };
            Gate { hidden, output: [zeros(&[heads, last]), zeros(&[heads])] }
        };
        Self((0..config.num_layers()).map(gate).collect())
    }

    /// All weights and biases by their names in `KVzap`'s files, bottom to top.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        self.0.iter().enumerate().flat_map(|(layer, gate)| gate.parameters(layer)).collect()
    }

    /// The error where a policy asks for gates that a model does not have.
    pub fn missing() -> Fault {
        let message = "the policy `learned` goes by gates, and the model has none";
        Fault::usage(message, "name them with `kv_cache.gates`, or choose another policy")
    }

    /// Whether there are gates in a directory, beside an adapter or a model.
    pub fn are_in(dir: &Path) -> bool {
        dir.is_dir() && is_there(&dir.join(GATE_TENSORS))
    }

    /// Reads gates from a file, or from a directory of a run or of `KVzap`, for a model that computes in `kind`.
    pub fn read(path: &Path, config: &ModelConfig, kind: Kind, device: Device) -> Result<Self, Fault> {
        let names = [GATE_TENSORS, "model.safetensors"].into_iter().filter(|_| path.is_dir());
        let inside = names.map(|name| path.join(name)).find(|file| is_there(file));
        let file = TensorFile::open(inside.as_deref().unwrap_or(path))?;
        let expected = config.num_layers();
        let layer_of = |name: &String| name.strip_prefix(PREFIX)?.split('.').next()?.parse::<usize>().ok();
        let count = file.names().iter().filter_map(layer_of).collect::<BTreeSet<_>>().len();
        if count != expected {
            let message = format!("`{}` has gates of {count} layers, the model has {expected}", abridged(path.display()));
            return Err(Fault::data(message, "take gates that were trained for this model"));
        }
        let gate = |layer| Gate::read(config, layer, &file, (master_kind(kind), device));
        Ok(Self((0..expected).map(gate).collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::small::config;
    use crate::store::{pt_metadata, save_tensors};

    fn new(hidden: usize) -> Gates {
        Gates::new(&config(), hidden, 1, Kind::Float, Device::Cpu)
    }

    #[test]
    fn gates_are_read_from_a_file_and_from_directories_of_either_layout() {
        for hidden in [0, 3] {
            let dir = tempfile::tempdir().unwrap();
            for name in [GATE_TENSORS, "model.safetensors"] {
                let path = dir.path().join(name);
                save_tensors(&path, &new(hidden).parameters(), &pt_metadata()).unwrap();
                for from in [&path, dir.path()] {
                    let read = Gates::read(from, &config(), Kind::Float, Device::Cpu).unwrap();
                    assert_eq!(read.parameters(), new(hidden).parameters(), "{hidden} {name}");
                }
                std::fs::remove_file(path).unwrap();
            }
            assert!(!Gates::are_in(dir.path()));
        }
    }

    /// PyTorch's `Linear` and `GELU`, on one token.
    #[test]
    fn a_hidden_layer_has_a_gelu_behind_it() {
        let of = |values: &[f64], size: &[i64]| Tensor::from_slice(values).view(size);
        let hidden = [of(&[1.0, 2.0, -1.0, 0.5], &[2, 2]), of(&[0.5, 0.0], &[2])];
        let gate = Gate { hidden: Some(hidden), output: [of(&[1.0, -2.0], &[1, 2]), of(&[0.25], &[1])] };
        let gelu = |x: f64| x * 0.5 * (1.0 + libm_erf(x / std::f64::consts::SQRT_2));
        let expected = gelu(1.0 + 4.0 + 0.5) - 2.0 * gelu(-1.0 + 1.0) + 0.25;
        let found = gate.score(&of(&[1.0, 2.0], &[1, 1, 2]));
        assert_eq!(found.size(), [1, 1, 1, 1]);
        assert!((found.double_value(&[0, 0, 0, 0]) - expected).abs() < 1e-6);
    }

    fn libm_erf(x: f64) -> f64 {
        Tensor::from(x).erf().double_value(&[])
    }

    #[test]
    fn gates_of_another_model_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(GATE_TENSORS);
        let refused = |tensors: &[(String, Tensor)]| {
            save_tensors(&path, tensors, &pt_metadata()).unwrap();
            Gates::read(&path, &config(), Kind::Float, Device::Cpu).unwrap_err().to_string()
        };
        assert!(refused(&new(3).parameters()[..4]).contains("has gates of 1 layers, the model has 2"));
        let mut narrow = new(3).parameters();
        narrow[4].1 = Tensor::zeros([3, 4], (Kind::Float, Device::Cpu));
        let error = refused(&narrow);
        assert!(error.starts_with("the gate of layer 1 has weights and biases of [[3, 4], [3]]"), "{error}");
    }
}
