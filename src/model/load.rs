//! Where a model comes from: the files of a directory, or weights that are drawn.

use tch::{Device, Kind};

use super::causal_lm::Model;
use super::config::ModelConfig;
#[cfg(test)]
use super::init::draw;
use super::layout;
use super::quantised::GgufWeights;
use super::source::ModelSource;
use super::waiting_layers::ModelPlacement;
use super::weights::{WeightSource, Weights};
use crate::files::GgufFile;
use crate::recipe::Dtype;
use crate::units::{Fault, abridged};

impl Model {
    /// Looks at a model directory without reading its weights: the configuration, and names, shapes and dtypes of all tensors.
    pub fn check<'a>(source: impl Into<ModelSource<'a>>) -> Result<ModelConfig, Fault> {
        Ok(Self::open(source.into(), Kind::Float, Device::Cpu.into())?.0)
    }

    pub(super) fn open(source: ModelSource<'_>, kind: Kind, at: ModelPlacement) -> Result<(ModelConfig, Weights), Fault> {
        let config = source.config()?;
        let gguf = if source.is_drawn { None } else { GgufFile::of_model(source.dir)? };
        let mut weights = match gguf {
            _ if source.is_drawn => drawn(&config, kind, at),
            Some(file) => Weights::of(WeightSource::Gguf(GgufWeights { file, config: config.clone() }), kind, at),
            None => Weights::open(source.dir, &source.object()?, kind, at)?,
        };
        weights.quantize = source.quantize;
        weights.leave_layers(config.num_layers(), config.further_layers);
        weights.check(&layout::entries(&config), config.tie_word_embeddings)?;
        Ok((config, weights))
    }

    /// Reads a model from a directory in Hugging Face's layout, converting its weights to `dtype`, or draws these.
    pub fn load<'a>(source: impl Into<ModelSource<'a>>, dtype: Dtype, at: impl Into<ModelPlacement>) -> Result<Self, Fault> {
        let (config, weights) = Self::open(source.into(), kind_of(dtype), at.into())?;
        Self::build(config, &weights)
    }

    /// Reads a model, or draws it, with every weight a parameter that is trained; a tied matrix is one.
    pub fn load_to_train<'a>(
        source: impl Into<ModelSource<'a>>,
        dtype: Dtype,
        at: impl Into<ModelPlacement>,
    ) -> Result<Self, Fault> {
        let source = source.into();
        let (config, weights) = Self::open(source, kind_of(dtype), at.into())?;
        // What is drawn is plain, whatever the directory has.
        if !config.packed.forms.is_empty() && !source.is_drawn {
            let dir = abridged(source.dir.display());
            let message = format!("the weights in `{dir}` are packed in few bits, and can not be trained");
            let hint = "train an adapter beside them with `kvtune finetune-lora`, or take the model in 16 bits";
            return Err(Fault::usage(message, hint));
        }
        Self::build_to_train(source, config, &weights)
    }

    /// A model with newly drawn weights, whose numbers depend on the seed alone.
    #[cfg(test)]
    pub(crate) fn random(config: ModelConfig, dtype: Dtype, device: Device, seed: u64) -> Result<Self, Fault> {
        let drawn = WeightSource::Memory(draw(&config, Kind::Float, seed).into_iter().collect());
        let weights = Weights::of(drawn, kind_of(dtype), device.into());
        Self::build(config, &weights)
    }

    /// A model whose weights libtorch's generator draws on the device; nothing of it is on a disk.
    pub fn drawn_of(config: ModelConfig, dtype: Dtype, at: impl Into<ModelPlacement>) -> Result<Self, Fault> {
        let weights = drawn(&config, kind_of(dtype), at.into());
        Self::build(config, &weights)
    }
}

fn drawn(config: &ModelConfig, kind: Kind, at: ModelPlacement) -> Weights {
    Weights::of(WeightSource::Drawn(layout::entries(config), config.initializer_range), kind, at)
}

/// The dtype by libtorch's name.
pub fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::F64 => Kind::Double,
    }
}
