//! Which tensors of a GGUF file stand for those of a checkpoint (llama.cpp, `tensor_mapping.py`), and what is undone of how they were written.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::files::{GgufDtype, GgufFile, TensorView};
use crate::model::config::{ModelConfig, PackedSizes};
use crate::model::layout::TensorEntry;
use crate::model::names::{EMBEDDING, FINAL_NORM, OUTPUT};
use crate::model::spec::{STACKED_DOWN, STACKED_GATE_UP};
use crate::model::tensor_problems::{TensorProblem, unfit};
use crate::native::{first_bad_block, packed_product, tensor_over, unpack};
use crate::ops::linear::{PackedForm, PackedWeight};
use crate::units::{Fault, quoted};

/// Tensors that are a part of the configuration.
pub(super) const OF_CONFIG: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// The tensors of a model in a GGUF file, by the names that they have in a checkpoint.
#[derive(Debug)]
pub(in crate::model) struct GgufWeights {
    pub(in crate::model) file: GgufFile,
    pub(in crate::model) config: ModelConfig,
}

/// Where a tensor of a checkpoint lies in the file.
#[derive(Debug)]
pub(super) enum Stored {
    Whole(String),
    /// With 1 added to each number.
    PlusOne(String),
    /// With the rows of so many heads in another order: halves of a head alternate.
    Alternating(String, usize),
    /// One of the matrices of all experts.
    Expert(String, usize),
    /// Outputs before inputs, where the checkpoint has inputs first.
    Transposed(String),
    /// Gate and up apart, which alternate along the checkpoint's last axis.
    GateUp([String; 2]),
}

impl Stored {
    pub(super) fn names(&self) -> &[String] {
        match self {
            Self::Whole(name)
            | Self::PlusOne(name)
            | Self::Alternating(name, _)
            | Self::Expert(name, _)
            | Self::Transposed(name) => std::slice::from_ref(name),
            Self::GateUp(names) => names,
        }
    }

    /// The name of what lies in the file as a product wants it, and which expert's matrix of it is meant.
    pub(super) fn matrix(&self) -> Option<(&String, Option<usize>)> {
        match self {
            Self::Whole(name) | Self::Alternating(name, _) => Some((name, None)),
            Self::Expert(name, expert) => Some((name, Some(*expert))),
            Self::PlusOne(_) | Self::Transposed(_) | Self::GateUp(_) => None,
        }
    }
}

impl PackedForm for GgufDtype {
    fn unpack(&self, parts: &[Tensor], rows: &Range<i64>, kind: Kind) -> Tensor {
        unpack(&parts[0].narrow(0, rows.start, rows.end - rows.start), self.id, kind)
    }

    fn select(&self, parts: &[Tensor], _: [i64; 2], index: &Tensor, kind: Kind) -> Tensor {
        unpack(&parts[0].index_select(0, index), self.id, kind)
    }

    fn product(&self, parts: &[Tensor], x: &Tensor) -> Option<Tensor> {
        Some(packed_product(x, &parts[0], self.id))
    }
}

impl GgufWeights {
    /// All differences between the tensors that are there and those that the model needs.
    pub(in crate::model) fn check(&self, entries: &[TensorEntry]) -> Result<(), Fault> {
        let (mut problems, mut used) = (Vec::new(), BTreeSet::new());
        for entry in entries {
            let Some(stored) = self.stored(&entry.name) else {
                problems.push(TensorProblem::missing(&entry.name));
                continue;
            };
            for name in stored.names() {
                let expected = expected_shape(&entry.shape, &stored);
                match self.file.get(name) {
                    None => problems.push(TensorProblem::missing(name)),
                    Some(found) if found.shape != fitted(&stored, &expected, found.shape) => {
                        problems.push(TensorProblem::shape(name, &expected, found.shape));
                    }
                    Some(_) => {}
                }
                used.insert(name.clone());
            }
        }
        let is_extra = |name: &&str| !used.contains(*name) && !OF_CONFIG.contains(name);
        problems.extend(self.file.names().filter(is_extra).map(TensorProblem::extra));
        problems.dedup();
        if problems.is_empty() { Ok(()) } else { Err(unfit(&problems, self.file.path(), "its keys")) }
    }

    /// Sizes of the model's packed matrices, which stay packed.
    pub(in crate::model) fn packed_sizes(&self, entries: &[TensorEntry]) -> PackedSizes {
        let mut sizes = PackedSizes { is_unpacked_on_gpu: true, ..PackedSizes::default() };
        for entry in entries.iter().filter(|entry| entry.shape.len() > 1) {
            let stored = self.stored(&entry.name);
            let view = stored.as_ref().and_then(|stored| self.file.get(stored.names().first()?));
            let Some(view) = view.filter(|view| view.dtype.is_packed()) else { continue };
            let numbers = entry.shape.iter().product::<usize>();
            let bytes = numbers / view.dtype.block * view.dtype.bytes;
            sizes.add(&entry.name, &entry.shape, bytes, view.dtype.name);
        }
        sizes
    }

    /// A tensor of a checkpoint, unpacked.
    pub(in crate::model) fn load(&self, name: &str, kind: Kind) -> Result<Tensor, Fault> {
        let stored = self.stored(name).ok_or_else(|| self.missing(name))?;
        let load = |name: &String| self.slice(name, None, kind);
        Ok(match &stored {
            Stored::Whole(name) => load(name)?,
            // Made in f32, as it was written.
            Stored::PlusOne(name) => (self.slice(name, None, Kind::Float)? - 1.0).to_kind(kind),
            Stored::Alternating(name, heads) => halves_together(&load(name)?, *heads),
            Stored::Expert(name, expert) => self.slice(name, Some(*expert), kind)?,
            Stored::Transposed(name) => load(name)?.transpose(1, 2).contiguous(),
            Stored::GateUp(names) => {
                let [gate, up] = [load(&names[0])?, load(&names[1])?];
                let both = Tensor::stack(&[gate, up], 2).flatten(1, 2);
                if both.dim() == 3 { both.transpose(1, 2).contiguous() } else { both }
            }
        })
    }

    /// A matrix as it is packed in the file; `None` where it is not, or would have to be rebuilt.
    pub(in crate::model) fn packed(&self, name: &str, kind: Kind) -> Result<Option<PackedWeight>, Fault> {
        let Some(stored) = self.stored(name) else { return Err(self.missing(name)) };
        let Some((stored_name, expert)) = stored.matrix() else { return Ok(None) };
        let view = self.view(stored_name)?;
        if !view.dtype.is_packed() {
            return Ok(None);
        }
        let rows = self.rows(stored_name, view, expert)?;
        let rows = if let Stored::Alternating(_, heads) = stored { halves_together(&rows, heads) } else { rows };
        let size = [rows.size()[0], view.shape.last().copied().unwrap_or(0) as i64];
        Ok(Some(PackedWeight { parts: vec![rows], size, kind, form: Arc::new(view.dtype) }))
    }

    /// The matrices of all experts that lie side by side in a checkpoint, each as it is packed in the file.
    pub(in crate::model) fn packed_experts(&self, name: &str, kind: Kind) -> Result<Option<Vec<PackedWeight>>, Fault> {
        let Some(stored) = self.stored(name) else { return Err(self.missing(name)) };
        let views = stored.names().iter().map(|name| self.view(name)).collect::<Result<Vec<_>, _>>()?;
        let Some(&first) = views.first().filter(|first| first.dtype.is_packed()) else { return Ok(None) };
        let (experts, width) = (first.shape[0], first.shape.last().copied().unwrap_or(0) as i64);
        let expert = |expert: usize| {
            let parts = stored.names().iter().zip(&views).map(|(name, view)| self.rows(name, *view, Some(expert)));
            let mut parts = parts.collect::<Result<Vec<_>, _>>()?;
            // Gate and up by turns, which copies them.
            let rows = if parts.len() == 1 { parts.remove(0) } else { Tensor::stack(&parts, 1).flatten(0, 1) };
            Ok(PackedWeight { size: [rows.size()[0], width], parts: vec![rows], kind, form: Arc::new(first.dtype) })
        };
        let is_alike = views.iter().all(|view| view.dtype == first.dtype);
        is_alike.then(|| (0..experts).map(expert).collect()).transpose()
    }

    pub(super) fn view(&self, name: &str) -> Result<TensorView<'_, GgufDtype>, Fault> {
        self.file.get(name).ok_or_else(|| self.missing(name))
    }

    pub(super) fn missing(&self, name: &str) -> Fault {
        unfit(&[TensorProblem::missing(name)], self.file.path(), "the model")
    }

    /// A tensor, or one expert's matrix of it, in the shape of the file.
    fn slice(&self, name: &str, expert: Option<usize>, kind: Kind) -> Result<Tensor, Fault> {
        let view = self.view(name)?;
        let rows = self.rows(name, view, expert)?;
        let shape: Vec<i64> = view.shape[usize::from(expert.is_some())..].iter().map(|&size| size as i64).collect();
        let made = if view.dtype.is_packed() {
            unpack(&rows, view.dtype.id, kind).view(&shape[..])
        } else {
            let stored = match view.dtype.bytes {
                4 => Kind::Float,
                _ if view.dtype.name == "BF16" => Kind::BFloat16,
                _ => Kind::Half,
            };
            rows.view_dtype(stored).view(&shape[..]).to_kind(kind).copy()
        };
        if expert.is_none() {
            self.file.release(name);
        }
        Ok(made)
    }

    /// The bytes of a tensor, or of one expert's matrix of it, row by row. They lie in the file's memory.
    fn rows(&self, name: &str, view: TensorView<'_, GgufDtype>, expert: Option<usize>) -> Result<Tensor, Fault> {
        let width = view.shape.last().copied().unwrap_or(1) / view.dtype.block * view.dtype.bytes;
        let shape = &view.shape[usize::from(expert.is_some())..view.shape.len() - 1];
        let count: usize = shape.iter().product();
        let offset = view.offset + expert.unwrap_or(0) * count * width;
        let size = [count as i64, width as i64];
        let outside = || self.file.wrong(&format!("tensor `{}` is empty", quoted(name)));
        let rows = tensor_over(view.map, offset, &size, Kind::Uint8).ok_or_else(outside)?;
        if view.dtype.is_packed()
            && let Some(block) = first_bad_block(&rows, view.dtype.id)
        {
            let (name, kind) = (quoted(name), view.dtype.name);
            let reason = format!("tensor `{name}` ({kind}) has a scale that is no finite number, in block {block}");
            return Err(self.file.wrong(&reason));
        }
        Ok(rows)
    }

    /// Where a tensor of a checkpoint lies; `None` if no tensor of a file can be it.
    pub(super) fn stored(&self, name: &str) -> Option<Stored> {
        Stored::of(&self.config, name, |name| self.file.get(name).is_some())
    }
}

impl Stored {
    /// Where a file of the model has a tensor of a checkpoint, by which tensors `is_there`.
    pub(super) fn of(config: &ModelConfig, name: &str, is_there: impl Fn(&str) -> bool) -> Option<Self> {
        let adds_one = config.norms_add_one;
        let norm = |name: String| if adds_one { Stored::PlusOne(name) } else { Stored::Whole(name) };
        let layer = match name {
            EMBEDDING => return Some(Stored::Whole("token_embd.weight".into())),
            OUTPUT => return Some(Stored::Whole("output.weight".into())),
            FINAL_NORM => return Some(norm("output_norm.weight".into())),
            _ => name.strip_prefix("model.layers.")?,
        };
        let (layer, path) = layer.split_once('.')?;
        let spec = config.layers.get(layer.parse::<usize>().ok()?)?;
        let named = |name: &str| format!("blk.{layer}.{name}");
        let (module, part) = path.rsplit_once('.').unwrap_or(("", path));
        let turns = matches!(config.model_type, "llama" | "mistral" | "mixtral");
        let heads = |name: &str, heads: usize| {
            let name = named(&format!("{name}.{part}"));
            if turns { Stored::Alternating(name, heads) } else { Stored::Whole(name) }
        };
        let has_norms_around = spec.norms(1).iter().any(|norm| norm.path == "pre_feedforward_layernorm");
        Some(match module {
            "self_attn.q_proj" => heads("attn_q", spec.attention.num_heads),
            "self_attn.k_proj" => heads("attn_k", spec.attention.num_kv_heads),
            "self_attn.v_proj" => Stored::Whole(named(&format!("attn_v.{part}"))),
            "self_attn.o_proj" => Stored::Whole(named(&format!("attn_output.{part}"))),
            "self_attn.qkv_proj" => Stored::Whole(named(&format!("attn_qkv.{part}"))),
            "self_attn.q_norm" => norm(named("attn_q_norm.weight")),
            "self_attn.k_norm" => norm(named("attn_k_norm.weight")),
            "input_layernorm" => norm(named("attn_norm.weight")),
            "post_attention_layernorm" if has_norms_around || spec.attention.has_sinks => {
                norm(named("post_attention_norm.weight"))
            }
            "post_attention_layernorm" | "pre_feedforward_layernorm" => norm(named("ffn_norm.weight")),
            "post_feedforward_layernorm" => norm(named("post_ffw_norm.weight")),
            "mlp.gate_proj" => Stored::Whole(named(&format!("ffn_gate.{part}"))),
            "mlp.up_proj" | "mlp.gate_up_proj" => Stored::Whole(named(&format!("ffn_up.{part}"))),
            "mlp.down_proj" => Stored::Whole(named(&format!("ffn_down.{part}"))),
            "mlp.gate" | "mlp.router" | "block_sparse_moe.gate" => Stored::Whole(named(&format!("ffn_gate_inp.{part}"))),
            "self_attn" if part == "sinks" => Stored::Whole(named("attn_sinks.weight")),
            "mlp.experts" => match path {
                STACKED_GATE_UP => Stored::GateUp(["ffn_gate_exps.weight", "ffn_up_exps.weight"].map(named)),
                STACKED_DOWN => Stored::Transposed(named("ffn_down_exps.weight")),
                "mlp.experts.gate_up_proj_bias" => Stored::GateUp(["ffn_gate_exps.bias", "ffn_up_exps.bias"].map(named)),
                _ => Stored::Whole(named("ffn_down_exps.bias")),
            },
            _ => {
                let (expert, linear) = module.split_once(".experts.")?.1.split_once('.')?;
                let linear = match linear {
                    "gate_proj" | "w1" => "ffn_gate",
                    "up_proj" | "w3" => "ffn_up",
                    _ => "ffn_down",
                };
                let apart = named(&format!("{linear}.{expert}.weight"));
                if is_there(&apart) {
                    return Some(Stored::Whole(apart));
                }
                Stored::Expert(named(&format!("{linear}_exps.weight")), expert.parse().ok()?)
            }
        })
    }
}

/// The rows of `heads` heads, of which the file has those of the two halves by turns.
fn halves_together(rows: &Tensor, heads: usize) -> Tensor {
    let (size, heads) = (rows.size(), heads as i64);
    let by_pair = [&[heads, size[0] / heads / 2, 2], &size[1..]].concat();
    rows.reshape(&by_pair[..]).transpose(1, 2).reshape(&size[..])
}

/// The shape in the file of what has this one in a checkpoint.
fn expected_shape(shape: &[usize], stored: &Stored) -> Vec<usize> {
    match (stored, shape) {
        (Stored::Transposed(_), &[experts, inner, out]) => vec![experts, out, inner],
        (Stored::GateUp(_), &[experts, inner, both]) => vec![experts, both / 2, inner],
        (Stored::GateUp(_), &[experts, both]) => vec![experts, both / 2],
        _ => shape.to_vec(),
    }
}

/// The shape that is expected with as many experts as are there.
fn fitted(stored: &Stored, expected: &[usize], found: &[usize]) -> Vec<usize> {
    match (stored, found.first()) {
        (Stored::Expert(_, expert), Some(&count)) if count > *expert => [&[count], expected].concat(),
        _ => expected.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::files::TensorFile;
    use crate::store::load_tensor;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised").join(name)
    }

    fn bits(x: &Tensor) -> Vec<u32> {
        Vec::<f32>::try_from(x.reshape([-1])).unwrap().into_iter().map(f32::to_bits).collect()
    }

    /// One tensor of each type, as ggml and its package for Python unpack it.
    #[test]
    fn every_type_is_unpacked_to_the_bit() {
        let (packed, plain) = (GgufFile::open(&fixture("gguf-types.gguf")).unwrap(), fixture("gguf-types.safetensors"));
        let (plain, config) = (TensorFile::open(&plain).unwrap(), crate::model::small::config());
        let weights = GgufWeights { file: packed, config };
        let mut types = BTreeSet::new();
        for name in plain.names() {
            let expected = load_tensor(&plain, &name).unwrap();
            let found = weights.slice(&name, None, Kind::Float).unwrap();
            assert!(bits(&found.view_as(&expected)) == bits(&expected), "{name}");
            types.insert(weights.file.get(&name).unwrap().dtype.name);
            for kind in [Kind::Double, Kind::BFloat16] {
                assert!(weights.slice(&name, None, kind).unwrap().equal(&found.to_kind(kind)), "{name}");
            }
        }
        assert_eq!(types.len(), 16, "{types:?}");
    }
}
