//! What a model knows of entries beforehand, layer by layer: gates, and statistics of queries; and the files of both.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use super::config::ModelConfig;
use super::delta::master_kind;
use super::gate::Gate;
use crate::files::{TensorFile, is_there, put_new_dir};
use crate::ops::query_statistics::QuerySums;
use crate::store::{load_tensor, pt_metadata, save_tensors};
use crate::units::{Fault, abridged};

/// The gates of a model, beside its adapter or its weights.
pub const GATE_TENSORS: &str = "kv_gates.safetensors";

/// Names in files begin so; the layer's number follows.
const PREFIX: &str = "module_list.";
/// What names begin with in later files of `KVzap`, and in converted ones of `Fast KVzip`.
const LATER_PREFIX: &str = "layers.";

/// What [`QuerySums::statistics`] makes: the ends of the names in files.
const QUERY_STATISTICS: [&str; 2] = ["query_mean", "query_length_excess"];

/// The gates of all layers, bottom to top, and the statistics of their queries where there are some.
#[derive(Debug)]
pub struct Gates(pub(super) Vec<(Gate, Option<[Tensor; 2]>)>);

/// What is known of a layer, by names in files.
pub(super) fn parameters(layer: usize, gate: &Gate, queries: Option<&[Tensor; 2]>) -> Vec<(String, Tensor)> {
    let queries = queries.into_iter().flat_map(|queries| QUERY_STATISTICS.into_iter().zip(queries));
    let named = |(name, tensor): (&str, &Tensor)| (format!("{PREFIX}{layer}.{name}"), tensor.shallow_clone());
    gate.named().into_iter().chain(queries).map(named).collect()
}

impl Gates {
    /// Linear gates in f32, by weight `(G, E)` and bias `(G)` of each layer, with its [`QuerySums`]; a layer that has none scores all entries
    /// alike.
    pub fn linear<'a>(config: &ModelConfig, layers: impl Iterator<Item = (Option<[Tensor; 2]>, Option<&'a QuerySums>)>) -> Self {
        let to = (Kind::Float, Device::Cpu);
        let known = |(layer, (output, sums)): (usize, (Option<[Tensor; 2]>, Option<&QuerySums>))| {
            let attention = &config.layers[layer].attention;
            let (heads, width) = (attention.num_kv_heads as i64, config.hidden_size as i64);
            let alike = || [Tensor::zeros([heads, width], to), Tensor::zeros([heads], to)];
            let output = output.map_or_else(alike, |pair| pair.map(|x| x.to_kind(to.0).to_device(to.1)));
            let none = |width: usize| Tensor::zeros([attention.num_heads as i64, width as i64], to);
            let frequencies = |device| attention.rope.as_ref().map(|rope| rope.frequencies(&[1], Kind::Double, device));
            let statistics = sums.and_then(|sums| sums.statistics(frequencies(sums.device()).as_ref()));
            let statistics = statistics.unwrap_or_else(|| [attention.head_dim, attention.pairs()].map(none));
            (Gate::Linear { hidden: None, output }, Some(statistics.map(|x| x.to_kind(to.0).to_device(to.1))))
        };
        Self(layers.enumerate().map(known).collect())
    }

    /// Writes the gates into a new directory.
    pub fn save(&self, dir: &Path) -> Result<(), Fault> {
        let known = self.0.iter().enumerate();
        let tensors: Vec<_> = known.flat_map(|(layer, (gate, queries))| parameters(layer, gate, queries.as_ref())).collect();
        put_new_dir(dir, |staged| save_tensors(&staged.join(GATE_TENSORS), &tensors, &pt_metadata()))
    }

    /// The error where a policy asks for gates that a model does not have.
    pub fn missing() -> Fault {
        let message = "the policy `learned` needs gates, and the model has none";
        Fault::usage(message, "make them with `kvtune calibrate` and name them with `kv_cache.gates`, or choose another policy")
    }

    /// The error where a policy needs statistics of queries, and neither `file`, which goes before all others, nor the model has them.
    pub fn without_query_statistics(file: Option<&Path>) -> Fault {
        let (who, hint) = match file {
            Some(file) => (format!("`{}`", abridged(file.display())), "replace it by the file that it writes"),
            None => ("the model".to_owned(), "name what it writes with `kv_cache.gates`"),
        };
        let message = format!("the policy `triattention` needs query statistics, and {who} has none");
        Fault::usage(message, format!("make them with `kvtune calibrate`: {hint}, or choose another policy"))
    }

    /// Whether there are statistics of the queries of all layers.
    pub fn have_query_statistics(&self) -> bool {
        self.0.iter().all(|(_, statistics)| statistics.is_some())
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
        let known = |layer| {
            let named = |name: &str| format!("{prefix}{layer}.{name}");
            let has = |name: &str| file.contains(&named(name));
            let load =
                |name: &str| Ok::<_, Fault>(load_tensor(&file, &named(name))?.to_kind(master_kind(kind)).to_device(device));
            let gate = Gate::read(config, layer, has, load)?;
            let [mean, excess] = QUERY_STATISTICS;
            let queries = if has(mean) { Some([load(mean)?, load(excess)?]) } else { None };
            if let Some(queries) = &queries {
                check_query_statistics(config, layer, queries, [mean, excess].map(named))?;
            }
            Ok::<_, Fault>((gate, queries))
        };
        Ok(Self((0..expected).map(known).collect::<Result<_, _>>()?))
    }
}

fn check_query_statistics(config: &ModelConfig, layer: usize, found: &[Tensor; 2], names: [String; 2]) -> Result<(), Fault> {
    let attention = &config.layers[layer].attention;
    let expected = [attention.head_dim, attention.pairs()].map(|width| [attention.num_heads as i64, width as i64]);
    let (sizes, [mean, excess]) = (found.each_ref().map(Tensor::size), names);
    if sizes == expected.map(Vec::from) {
        return Ok(());
    }
    let message = format!("`{mean}` and `{excess}` have {sizes:?}, the model's queries need {expected:?}");
    Err(Fault::data(message, "take statistics that were taken of this model"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::small::config;

    type GateSizes = [(&'static str, &'static [i64])];
    const LINEAR: &GateSizes = &[("weight", &[1, 12]), ("bias", &[1])];
    const DEEP: &GateSizes = &[("0.weight", &[3, 12]), ("0.bias", &[3]), ("2.weight", &[1, 3]), ("2.bias", &[1])];
    const SELF_ATTENTION: &GateSizes = &[
        ("q_proj.weight", &[4, 12]),
        ("q_proj.bias", &[4]),
        ("k_proj.weight", &[2, 12]),
        ("q_norm.weight", &[2]),
        ("k_norm.weight", &[2]),
        ("k_base", &[1, 1, 3, 2]),
        ("b", &[1, 1, 2]),
    ];

    /// Any numbers.
    fn tensors(sizes: &GateSizes, prefix: &str) -> Vec<(String, Tensor)> {
        let of_layer = |layer: usize| {
            sizes.iter().map(move |(name, size)| {
                let values = Tensor::arange(size.iter().product::<i64>(), (Kind::Float, Device::Cpu)) / 7.0 + layer as f64;
                (format!("{prefix}{layer}.{name}"), values.view(*size))
            })
        };
        (0..2).flat_map(of_layer).collect()
    }

    #[test]
    fn gates_are_read_from_a_file_and_from_directories_of_every_layout() {
        for sizes in [LINEAR, DEEP, SELF_ATTENTION] {
            let dir = tempfile::tempdir().unwrap();
            for name in [GATE_TENSORS, "model.safetensors"] {
                let path = dir.path().join(name);
                for prefix in [PREFIX, LATER_PREFIX] {
                    save_tensors(&path, &tensors(sizes, prefix), &pt_metadata()).unwrap();
                    for from in [&path, dir.path()] {
                        let read = Gates::read(from, &config(), Kind::Float, Device::Cpu).unwrap();
                        let layers = read.0.iter().enumerate();
                        let found: Vec<_> = layers.flat_map(|(layer, (gate, _))| parameters(layer, gate, None)).collect();
                        assert_eq!(found, tensors(sizes, PREFIX), "{sizes:?} {name}");
                    }
                }
                std::fs::remove_file(path).unwrap();
            }
            assert!(!Gates::are_in(dir.path()));
        }
    }

    #[test]
    fn gates_of_another_model_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(GATE_TENSORS);
        let refused = |tensors: &[(String, Tensor)]| {
            save_tensors(&path, tensors, &pt_metadata()).unwrap();
            Gates::read(&path, &config(), Kind::Float, Device::Cpu).unwrap_err().to_string()
        };
        assert!(refused(&tensors(DEEP, PREFIX)[..4]).contains("has gates of 1 layers, the model has 2"));
        let mut narrow = tensors(DEEP, PREFIX);
        narrow[4].1 = Tensor::zeros([3, 4], (Kind::Float, Device::Cpu));
        let error = refused(&narrow);
        assert!(error.starts_with("the gate of layer 1 has tensors of [3, 4], [3], [1, 3], [1]; the model has 12"), "{error}");
        // Sizes of 0, of no dimension, and whose product no number holds.
        for (of, at, size) in [
            (DEEP, 0, &[][..]),
            (SELF_ATTENTION, 4, &[0]),
            (SELF_ATTENTION, 6, &[1, 1, 0]),
            (SELF_ATTENTION, 6, &[0, 1, 1 << 62]),
        ] {
            let mut hostile = tensors(of, PREFIX);
            hostile[at].1 = Tensor::zeros(size, (Kind::Float, Device::Cpu));
            let error = refused(&hostile);
            assert!(error.starts_with("the gate of layer 0 has tensors of ["), "{error}");
        }
        let mut flat = tensors(SELF_ATTENTION, PREFIX);
        flat[5].1 = Tensor::zeros([2], (Kind::Float, Device::Cpu));
        assert!(refused(&flat).starts_with("the gate of layer 0 has tensors of [4, 12], [4], [2, 12], [2], [2], [2], [1, 1, 2]"));
    }
}
