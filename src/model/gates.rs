//! What a model knows of entries beforehand, layer by layer: gates, and statistics of queries; and the files of both.
//!
//! A gate is a small function of attention's input that scores every new entry, for the policy `learned`. `KVzap` (Jegou and Jeblick 2026,
//! arXiv 2601.07891) has a linear layer, or one hidden layer with a GELU between two. `Fast KVzip` (Kim et al. 2026, arXiv 2601.17668) has
//! attention of a token to itself beside learned keys.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use super::config::ModelConfig;
use crate::files::{TensorFile, is_there, put_new_dir};
use crate::ops::attention::accumulation_kind;
use crate::ops::query_statistics::QuerySums;
use crate::ops::rms_norm::rms_norm;
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
    /// Linear gates in f32, by weight `(G, E)` and bias `(G)` of each layer, with its [`QuerySums`]; without a pair all entries score alike.
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
                |name: &str| Ok::<_, Fault>(load_tensor(&file, &named(name))?.to_kind(accumulation_kind(kind)).to_device(device));
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

/// The tensors of a `Fast KVzip` gate, in the order of [`Gate::SelfAttention`].
const SELF_ATTENTION: [&str; 7] =
    ["q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight", "k_base", "b"];

/// What its norms add to the mean square.
const EPS: f64 = 1e-6;

/// A gate, in the kind of what is trained.
#[derive(Debug)]
pub(super) enum Gate {
    Linear {
        /// Weight `(m, E)` and bias `(m)` of the hidden layer, where there is one.
        hidden: Option<[Tensor; 2]>,
        /// Weight `(G, E)` or `(G, m)`, and bias `(G)`.
        output: [Tensor; 2],
    },
    /// Of R queries for each KV head: their weight `(G · R · d, E)` and bias, the weight of keys `(G · d, E)`, of the norms of both `(d)`, the
    /// keys beside them `(G, 1, s, d)`, and what is added to the scores `(G, 1, R)`.
    SelfAttention([Tensor; 7]),
}

impl Gate {
    /// What an entry is worth, as a logarithm: `(B, n, E)` in, `(B, G, n, 1)` out, in the gate's kind.
    pub(super) fn score(&self, x_bne: &Tensor) -> Tensor {
        let score_bng = match self {
            Self::Linear { hidden, output: [weight, bias] } => {
                let x_bne = x_bne.to_kind(weight.kind());
                let hidden = hidden.as_ref().map(|[weight, bias]| x_bne.linear(weight, Some(bias)).gelu("none"));
                hidden.as_ref().unwrap_or(&x_bne).linear(weight, Some(bias))
            }
            Self::SelfAttention(tensors) => self_attention(x_bne, tensors),
        };
        score_bng.transpose(1, 2).unsqueeze(-1)
    }

    /// Its tensors by the ends of their names in files.
    pub(super) fn named(&self) -> Vec<(&'static str, &Tensor)> {
        match self {
            Self::Linear { hidden, output } => {
                let [weight, bias] = if hidden.is_some() { ["2.weight", "2.bias"] } else { ["weight", "bias"] };
                let hidden = hidden.iter().flat_map(|pair| ["0.weight", "0.bias"].into_iter().zip(pair));
                hidden.chain([weight, bias].into_iter().zip(output)).collect()
            }
            Self::SelfAttention(tensors) => SELF_ATTENTION.into_iter().zip(tensors).collect(),
        }
    }

    /// The gate of a layer, whose tensors are asked for by the ends of their names.
    pub(super) fn read(
        config: &ModelConfig,
        layer: usize,
        has: impl Fn(&str) -> bool,
        load: impl Fn(&str) -> Result<Tensor, Fault>,
    ) -> Result<Self, Fault> {
        let both = |part: &str| Ok::<_, Fault>([load(&format!("{part}weight"))?, load(&format!("{part}bias"))?]);
        let gate = if has("k_base") {
            let mut tensors = SELF_ATTENTION.map(|_| Tensor::new());
            for (tensor, name) in tensors.iter_mut().zip(SELF_ATTENTION) {
                *tensor = load(name)?;
            }
            Self::SelfAttention(tensors)
        } else if has("weight") {
            Self::Linear { hidden: None, output: both("")? }
        } else {
            Self::Linear { hidden: Some(both("0.")?), output: both("2.")? }
        };
        gate.check(config, layer)?;
        Ok(gate)
    }

    /// The sizes of its tensors, in the order of their names, by those that a gate may choose: `None` where one is 0 or more than a file holds.
    fn expected_sizes(&self, width: i64, heads: i64) -> Option<Vec<Vec<i64>>> {
        let chosen = |tensor: &Tensor, dim: usize| tensor.size().get(dim).copied().filter(|size| (1..1 << 32).contains(size));
        Some(match self {
            Self::Linear { hidden: None, .. } => vec![vec![heads, width], vec![heads]],
            Self::Linear { hidden: Some([weight, _]), .. } => {
                let inner = chosen(weight, 0)?;
                vec![vec![inner, width], vec![inner], vec![heads, inner], vec![heads]]
            }
            Self::SelfAttention([.., key_norm, base, offset]) => {
                let (d, queries, others) = (chosen(key_norm, 0)?, chosen(offset, 2)?, chosen(base, 2)?);
                let all = (heads * queries).checked_mul(d)?;
                let of_keys = [vec![heads * d, width], vec![d], vec![d], vec![heads, 1, others, d], vec![heads, 1, queries]];
                [vec![all, width], vec![all]].into_iter().chain(of_keys).collect()
            }
        })
    }

    fn check(&self, config: &ModelConfig, layer: usize) -> Result<(), Fault> {
        let (width, heads) = (config.hidden_size as i64, config.layers[layer].attention.num_kv_heads as i64);
        let sizes: Vec<Vec<i64>> = self.named().into_iter().map(|(_, tensor)| tensor.size()).collect();
        if Some(&sizes) == self.expected_sizes(width, heads).as_ref() {
            return Ok(());
        }
        let found = sizes.iter().map(|size| format!("{size:?}")).collect::<Vec<_>>().join(", ");
        let message =
            format!("the gate of layer {layer} has tensors of {found}; the model has {width} channels and {heads} KV heads");
        Err(Fault::data(message, "take gates that were trained for this model"))
    }
}

/// The logarithm of the attention that a token's query pays to its own key beside the learned ones, the mean over the queries of a KV head:
/// `(B, n, E)` in, `(B, n, G)` out.
fn self_attention(x_bne: &Tensor, tensors: &[Tensor; 7]) -> Tensor {
    let [query, query_bias, key, query_norm, key_norm, base, offset] = tensors;
    let (groups, d) = (base.size()[0], base.size()[3]);
    let (x_bne, scale) = (x_bne.to_kind(query.kind()), 1.0 / (d as f64).sqrt());
    let heads = |x: &Tensor, weight: &Tensor| rms_norm(&x.unflatten(-1, [groups, -1, d]), weight, EPS);
    let q_bngrd = heads(&x_bne.linear(query, Some(query_bias)), query_norm);
    let k_bng1d = heads(&x_bne.linear(key, None::<&Tensor>), key_norm);
    let own_bngr1 = (&q_bngrd * &k_bng1d).sum_dim_intlist(&[-1i64][..], true, q_bngrd.kind()) * scale + offset.transpose(1, 2);
    // Groups in front, so that the learned keys are not copied for each token.
    let size = q_bngrd.size();
    let others_gms = q_bngrd.permute([2, 0, 1, 3, 4]).flatten(1, 3).bmm(&base.squeeze_dim(1).transpose(-1, -2)) * scale;
    let others_bngrs = others_gms.unflatten(1, [size[0], size[1], size[3]]).permute([1, 2, 0, 3, 4]);
    let all = Tensor::cat(&[&own_bngr1, &others_bngrs], -1);
    let log_bngr = own_bngr1.squeeze_dim(-1) - all.logsumexp([-1i64], false);
    let queries = log_bngr.size()[3] as f64;
    log_bngr.logsumexp([-1i64], false) - queries.ln()
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

#[cfg(test)]
mod tests_of_one {
    use super::*;

    fn of(values: &[f64], size: &[i64]) -> Tensor {
        Tensor::from_slice(values).view(size)
    }

    /// PyTorch's `Linear` and `GELU`, on one token.
    #[test]
    fn a_hidden_layer_has_a_gelu_behind_it() {
        let hidden = [of(&[1.0, 2.0, -1.0, 0.5], &[2, 2]), of(&[0.5, 0.0], &[2])];
        let gate = Gate::Linear { hidden: Some(hidden), output: [of(&[1.0, -2.0], &[1, 2]), of(&[0.25], &[1])] };
        let gelu = |x: f64| x * 0.5 * (1.0 + libm_erf(x / std::f64::consts::SQRT_2));
        let expected = gelu(1.0 + 4.0 + 0.5) - 2.0 * gelu(-1.0 + 1.0) + 0.25;
        let found = gate.score(&of(&[1.0, 2.0], &[1, 1, 2]));
        assert_eq!(found.size(), [1, 1, 1, 1]);
        assert!((found.double_value(&[0, 0, 0, 0]) - expected).abs() < 1e-6);
    }

    fn libm_erf(x: f64) -> f64 {
        Tensor::from(x).erf().double_value(&[])
    }

    /// The published formula `mean over queries of 1 / (1 + Σ exp(base·q − (k·q + b)))`, on one token with two queries and two learned keys.
    #[test]
    fn a_token_attends_to_itself_beside_learned_keys() {
        let tensors = [
            of(&[1.0, 0.5, -1.0, 2.0], &[4, 1]),
            of(&[0.5, 0.0, 0.25, -0.5], &[4]),
            of(&[0.5, -2.0], &[2, 1]),
            of(&[1.0, 2.0], &[2]),
            of(&[0.5, 1.5], &[2]),
            of(&[0.3, -0.2, 0.7, 0.1], &[1, 1, 2, 2]),
            of(&[0.1, -0.3], &[1, 1, 2]),
        ];
        let x = 1.5;
        let normed = |v: [f64; 2], w: [f64; 2]| {
            let rms = (f64::midpoint(v[0] * v[0], v[1] * v[1]) + EPS).sqrt();
            [v[0] / rms * w[0], v[1] / rms * w[1]]
        };
        let dot = |a: [f64; 2], b: [f64; 2]| (a[0] * b[0] + a[1] * b[1]) / 2f64.sqrt();
        let k = normed([0.5 * x, -2.0 * x], [0.5, 1.5]);
        let one = |q: [f64; 2], b: f64| {
            let q = normed(q, [1.0, 2.0]);
            let others = [[0.3, -0.2], [0.7, 0.1]].map(|base| (dot(base, q) - (dot(k, q) + b)).exp());
            1.0 / (1.0 + others[0] + others[1])
        };
        let expected = f64::midpoint(one([x + 0.5, 0.5 * x], 0.1), one([-x + 0.25, 2.0 * x - 0.5], -0.3)).ln();
        let found = Gate::SelfAttention(tensors).score(&of(&[x], &[1, 1, 1]));
        assert_eq!(found.size(), [1, 1, 1, 1]);
        assert!((found.double_value(&[0, 0, 0, 0]) - expected).abs() < 1e-12);
    }
}
