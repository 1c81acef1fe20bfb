//! Gates: in each layer a small function of attention's input that scores every new entry, for the policy `learned`. The files are those of
//! `KVzap` (Jegou and Jeblick 2026, arXiv 2601.07891): a linear layer, or one hidden layer with a GELU between two.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use super::config::ModelConfig;
use super::delta::master_kind;
use crate::files::{TensorFile, is_there, put_new_dir};
use crate::store::{load_tensor, pt_metadata, save_tensors};
use crate::units::{Fault, abridged};

/// The gates of a model, beside its adapter or its weights.
pub const GATE_TENSORS: &str = "kv_gates.safetensors";

/// Names in files begin so; the layer's number follows.
const PREFIX: &str = "module_list.";

/// The same in later files of `KVzap`.
const LATER_PREFIX: &str = "layers.";

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

    fn read(config: &ModelConfig, layer: usize, (file, prefix): (&TensorFile, &str), to: (Kind, Device)) -> Result<Self, Fault> {
        let both = |part: &str| {
            let load = |end: &str| {
                let tensor = load_tensor(file, &format!("{prefix}{layer}.{part}{end}"))?;
                Ok::<_, Fault>(tensor.to_kind(to.0).to_device(to.1))
            };
            Ok::<_, Fault>([load("weight")?, load("bias")?])
        };
        let is_linear = file.contains(&format!("{prefix}{layer}.weight"));
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
    /// Linear gates in f32, by weight `(G, E)` and bias `(G)` of each layer; a layer that has none scores all entries alike.
    pub fn linear(config: &ModelConfig, layers: impl Iterator<Item = Option<[Tensor; 2]>>) -> Self {
        let to = (Kind::Float, Device::Cpu);
        let gate = |(layer, output): (usize, Option<[Tensor; 2]>)| {
            let (heads, width) = (config.layers[layer].attention.num_kv_heads as i64, config.hidden_size as i64);
            let alike = || [Tensor::zeros([heads, width], to), Tensor::zeros([heads], to)];
            Gate { hidden: None, output: output.map_or_else(alike, |pair| pair.map(|x| x.to_kind(to.0).to_device(to.1))) }
        };
        Self(layers.enumerate().map(gate).collect())
    }

    /// Writes the gates into a new directory.
    pub fn save(&self, dir: &Path) -> Result<(), Fault> {
        let tensors: Vec<_> = self.0.iter().enumerate().flat_map(|(layer, gate)| gate.parameters(layer)).collect();
        put_new_dir(dir, |staged| save_tensors(&staged.join(GATE_TENSORS), &tensors, &pt_metadata()))
    }

    /// The error where a policy asks for gates that a model does not have.
    pub fn missing() -> Fault {
        let message = "the policy `learned` goes by gates, and the model has none";
        Fault::usage(message, "name them with `kv_cache.gates`, or choose another policy; `kvtune calibrate` makes them")
    }

    /// The file of gates that a path means: itself, or one in a directory.
    pub fn file(path: &Path) -> PathBuf {
        let names = [GATE_TENSORS, "model.safetensors"].into_iter().filter(|_| path.is_dir());
        names.map(|name| path.join(name)).find(|file| is_there(file)).unwrap_or_else(|| path.to_owned())
    }

    /// Whether there are gates in a directory, beside an adapter or a model.
    pub fn are_in(dir: &Path) -> bool {
        dir.is_dir() && is_there(&dir.join(GATE_TENSORS))
    }

    /// Reads gates from a file, or from a directory of a run or of `KVzap`, for a model that computes in `kind`.
    pub fn read(path: &Path, config: &ModelConfig, kind: Kind, device: Device) -> Result<Self, Fault> {
        let file = TensorFile::open(&Self::file(path))?;
        let expected = config.num_layers();
        let has_later = file.names().iter().any(|name| name.starts_with(LATER_PREFIX));
        let prefix = if has_later { LATER_PREFIX } else { PREFIX };
        let layer_of = |name: &String| name.strip_prefix(prefix)?.split('.').next()?.parse::<usize>().ok();
        let count = file.names().iter().filter_map(layer_of).collect::<BTreeSet<_>>().len();
        if count != expected {
            let message = format!("`{}` has gates of {count} layers, the model has {expected}", abridged(path.display()));
            return Err(Fault::data(message, "take gates that were trained for this model"));
        }
        let gate = |layer| Gate::read(config, layer, (&file, prefix), (master_kind(kind), device));
        Ok(Self((0..expected).map(gate).collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::small::config;

    /// Any numbers, in the layout with a hidden layer of some width or without one.
    fn tensors(hidden: i64, prefix: &str) -> Vec<(String, Tensor)> {
        let pairs: &[(&str, i64, i64)] = if hidden > 0 { &[("0.", hidden, 12), ("2.", 1, hidden)] } else { &[("", 1, 12)] };
        let of_layer = |layer: usize| {
            pairs.iter().flat_map(move |(part, out, inner)| {
                [("weight", vec![*out, *inner]), ("bias", vec![*out])].map(|(end, size)| {
                    let count: i64 = size.iter().product();
                    let values = Tensor::arange(count, (Kind::Float, Device::Cpu)) / 7.0 + layer as f64;
                    (format!("{prefix}{layer}.{part}{end}"), values.view(&size[..]))
                })
            })
        };
        (0..2).flat_map(of_layer).collect()
    }

    #[test]
    fn gates_are_read_from_a_file_and_from_directories_of_either_layout() {
        for hidden in [0, 3] {
            let dir = tempfile::tempdir().unwrap();
            for name in [GATE_TENSORS, "model.safetensors"] {
                let path = dir.path().join(name);
                for prefix in [PREFIX, LATER_PREFIX] {
                    save_tensors(&path, &tensors(hidden, prefix), &pt_metadata()).unwrap();
                    for from in [&path, dir.path()] {
                        let read = Gates::read(from, &config(), Kind::Float, Device::Cpu).unwrap();
                        let found: Vec<_> = read.0.iter().enumerate().flat_map(|(layer, gate)| gate.parameters(layer)).collect();
                        assert_eq!(found, tensors(hidden, PREFIX), "{hidden} {name}");
                    }
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
        assert!(refused(&tensors(3, PREFIX)[..4]).contains("has gates of 1 layers, the model has 2"));
        let mut narrow = tensors(3, PREFIX);
        narrow[4].1 = Tensor::zeros([3, 4], (Kind::Float, Device::Cpu));
        let error = refused(&narrow);
        assert!(error.starts_with("the gate of layer 1 has weights and biases of [[3, 4], [3]]"), "{error}");
    }
}
