//! The whole model: embedding, decoder layers, final norm, output projection, and what of it is trained.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::adapter::{self, Adapter};
use super::all_weights::AllWeights;
use super::attend::Attend;
use super::config::ModelConfig;
use super::decoder::DecoderLayer;
use super::embedding::Embedding;
use super::gates::{self, GATE_TENSORS, Gates};
use super::io_layers::BASE_WEIGHT;
use super::linear::{Linear, LoraDelta, PissaInit};
use super::names::{EMBEDDING_MODULE, FINAL_NORM, OUTPUT_MODULE, layer_of};
use super::peft::PeftConfig;
use super::positions::{DropoutContext, Positions, TokenContext};
use super::source::ModelSource;
use super::vectors::{CopyableVector, RmsNorm};
use super::waiting_layers::WaitingLayers;
use super::weights::Weights;
use crate::ops::frequencies::Frequencies;
use crate::ops::query_statistics::QueryStatistics;
use crate::ops::rope::Rotation;
use crate::recipe::InitLora;
use crate::store::{bytes_of, pt_metadata, save_tensors};
use crate::units::{Bytes, Exit, Fault, LayerIdx};

/// A decoder-only language model; knows no cache and no tokenizer.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    pub(super) embedding: Embedding,
    pub(super) layers: Vec<DecoderLayer>,
    waiting: Option<WaitingLayers>,
    final_norm: RmsNorm,
    pub(super) trained: Trainable,
    kind: Kind,
    device: Device,
}

#[derive(Debug)]
pub(super) enum Trainable {
    Nothing,
    /// With these settings; its matrices are the linears' own.
    Adapter(PeftConfig),
    AllWeights(AllWeights),
}

impl Model {
    /// With every weight a parameter that is trained; a tied matrix is one.
    pub(super) fn build_to_train(source: ModelSource<'_>, config: ModelConfig, weights: &Weights) -> Result<Self, Fault> {
        let all = AllWeights::load(source, &config, weights)?;
        let model = Self::build(config, &all.weights(weights.kind, weights.placement))?;
        Ok(Self { trained: Trainable::AllWeights(all), ..model })
    }

    pub(super) fn build(config: ModelConfig, weights: &Weights) -> Result<Self, Fault> {
        let (kind, at) = (weights.kind, weights.placement);
        let layer = |idx| DecoderLayer::load(weights, &config, LayerIdx(idx));
        let layers = (0..config.num_layers()).map(layer).collect::<Result<Vec<_>, _>>()?;
        let embedding = Embedding::load(weights, &config)?;
        let final_norm = RmsNorm::load(weights, &config, FINAL_NORM)?;
        let waiting = WaitingLayers::of(layers.iter().map(|layer| layer.tensors().collect()), at);
        Ok(Self { config, embedding, layers, waiting, final_norm, trained: Trainable::Nothing, kind, device: at.device })
    }

    /// A model whose last hidden states are scored by `num_classes` classes ([`ModelConfig::with_classes`]).
    pub fn with_classes(self, num_classes: Option<usize>) -> Self {
        Self { config: self.config.with_classes(num_classes), ..self }
    }

    /// Whether something scores the classes of a classifier: the model's own matrix, or an adapter's.
    pub fn has_score(&self) -> bool {
        self.embedding.has_score()
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The dtype of hidden states and weights.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn device(&self) -> Device {
        self.device
    }

    /// The bytes of all weights, without an adapter.
    pub fn weight_bytes(&self) -> Bytes {
        let layers = self.layers.iter().flat_map(DecoderLayer::tensors);
        bytes_of(layers.chain(self.embedding.tensors()).chain([self.final_norm.tensor()]))
    }

    pub fn with_adapter(mut self, adapter: Adapter) -> Self {
        self.set_adapter(adapter);
        self
    }

    /// Puts an adapter in place of what was trained; its matrices move to the model's device, and to f64 in an f64 model. What of a new one
    /// begins as the model has it gets these values.
    pub fn set_adapter(&mut self, adapter: Adapter) {
        if let Trainable::AllWeights(all) = &self.trained {
            all.freeze();
        }
        let Adapter { settings, deltas, copies, is_new } = adapter.moved_to(self.kind, self.device);
        let mut deltas: BTreeMap<_, _> = deltas.into_iter().collect();
        self.release_layers();
        self.linears_mut().for_each(|linear| linear.set_pissa(None));
        self.linears_mut().for_each(|linear| linear.delta = deltas.remove(&linear.name));
        self.stacked_mut().for_each(|(name, delta)| *delta = deltas.remove(name));
        self.embedding.output.delta = deltas.remove(OUTPUT_MODULE);
        self.embedding.delta = deltas.remove(EMBEDDING_MODULE);
        if is_new && settings.init == InitLora::Pissa {
            self.linears_mut().for_each(Linear::init_pissa);
        }
        self.let_linears_wait();
        self.copyable_mut().for_each(|vector| vector.trained = copies.get(&vector.name).map(Tensor::shallow_clone));
        if is_new {
            for idx in 0..self.layers.len() {
                self.bring_layers(idx..idx + 1, None);
                self.layers[idx].linears().for_each(Linear::init_delta);
                self.layers[idx].copyable_mut().for_each(|vector| vector.init_trained());
            }
            self.final_norm.weight_e.init_trained();
            self.release_layers();
        }
        self.embedding.train(copies, is_new);
        self.trained = Trainable::Adapter(settings);
    }

    /// Has the layers score new entries for the policy `learned`, and tell `triattention` of their queries, where these ask for it.
    pub fn set_gates(&mut self, gates: Gates) {
        for (layer, (gate, query_statistics)) in self.layers.iter_mut().zip(gates.0) {
            (layer.attention.gate, layer.attention.query_statistics) = (Some(gate), query_statistics);
        }
    }

    /// Statistics of the queries of a layer, for sequences with these [`Self::frequencies`].
    pub fn query_statistics(&self, layer: LayerIdx, frequencies: &[Frequencies]) -> Result<QueryStatistics, Fault> {
        self.layers[layer.0].attention.query_statistics(frequencies).ok_or_else(|| Gates::without_query_statistics(None))
    }

    pub fn has_gates(&self) -> bool {
        self.gates().next().is_some()
    }

    /// Weights and biases of the gates, and statistics of queries, by their names in files.
    pub fn gates(&self) -> impl Iterator<Item = (String, Tensor)> {
        let known = self.layers.iter().map(|layer| &layer.attention).enumerate();
        let known = known.filter_map(|(i, attention)| Some((i, attention.gate.as_ref()?, attention.query_statistics.as_ref())));
        known.flat_map(|(layer, gate, queries)| gates::parameters(layer, gate, queries))
    }

    /// The adapter, where one is trained; its matrices are the leaves themselves.
    pub fn adapter(&self) -> Option<Adapter> {
        let Trainable::Adapter(settings) = &self.trained else { return None };
        let alias = |(linear, delta): (&str, &LoraDelta)| (linear.to_owned(), delta.map(Tensor::shallow_clone));
        let (deltas, copies) = (self.deltas().map(alias).collect(), self.embedding.alias_trained());
        Some(Adapter { settings: settings.clone(), deltas, copies, is_new: false })
    }

    fn deltas(&self) -> impl Iterator<Item = (&str, &LoraDelta)> {
        self.layers.iter().flat_map(DecoderLayer::deltas).chain(self.embedding.deltas())
    }

    fn all_weights(&self) -> Option<&AllWeights> {
        if let Trainable::AllWeights(all) = &self.trained { Some(all) } else { None }
    }

    /// What is trained, by the names in files: PEFT's of an adapter, or those of all weights; the tensors are the leaves themselves.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        match &self.trained {
            Trainable::Nothing => Vec::new(),
            Trainable::Adapter(settings) => {
                let of_layers = self.deltas().flat_map(|(name, delta)| adapter::parameters(settings, name, delta));
                of_layers.chain(self.embedding.trained.parameters()).collect()
            }
            Trainable::AllWeights(all) => all.parameters(),
        }
    }

    /// The lowest layer that the gradient of something trained passes; the number of layers where only what is behind them is trained.
    pub fn first_trained_layer(&self) -> usize {
        if !self.embedding_parameters().is_empty() {
            return 0;
        }
        let of_deltas = self.layers.iter().position(|layer| !layer.deltas().is_empty());
        let of_copies = self.embedding.trained.tensors.iter().filter_map(|(name, _)| layer_of(name)).min();
        of_deltas.into_iter().chain(of_copies).min().unwrap_or(self.layers.len())
    }

    /// The parameters of some layers whose gradients are summed outside: all weights, where they have fewer bits than sums, or wait on the host.
    pub fn parameters_summed_apart(&self, layers: Range<usize>) -> Vec<(String, Tensor)> {
        let is_apart = self.waiting.is_some() || self.kind == Kind::BFloat16;
        self.all_weights().filter(|_| is_apart).map(|all| all.of_layers(layers)).unwrap_or_default()
    }

    pub fn has_waiting_layers(&self) -> bool {
        self.waiting.is_some()
    }

    /// How many layers that wait are where the model computes, or on their way there.
    #[cfg(test)]
    pub(crate) fn layers_in_flight(&self) -> usize {
        self.waiting.as_ref().map_or(0, WaitingLayers::in_flight)
    }

    /// The model with copies of all layers' weights where it computes, for good.
    #[cfg(test)]
    pub(crate) fn with_layers_here(mut self) -> Self {
        self.bring_layers(0..self.layers.len(), None);
        self.waiting = None;
        self
    }

    /// Has the weights of some layers here, where they are not always: only these can run. Those of `next` come meanwhile, and no others stay.
    pub fn bring_layers(&self, layers: Range<usize>, next: Option<Range<usize>>) {
        if let Some(waiting) = &self.waiting {
            waiting.bring(layers, next);
        }
    }

    /// Lets all layers wait again, with their weights to be read and written.
    pub fn release_layers(&self) {
        self.bring_layers(0..0, None);
    }

    /// The parameters behind the last layer, in final norm and output projection; with an adapter, what it trains in its place.
    pub fn head_parameters(&self) -> Vec<(String, Tensor)> {
        self.all_weights().map_or_else(|| self.embedding.trained_of_head(), AllWeights::head)
    }

    /// The parameters before the first layer: the embedding `(V, E)`, where it is trained, and of an adapter what it adds. Of a tied
    /// model all of whose weights are trained the embedding is among the [`Self::head_parameters`], too.
    pub fn embedding_parameters(&self) -> Vec<(String, Tensor)> {
        let Trainable::Adapter(settings) = &self.trained else {
            return self.all_weights().and_then(AllWeights::embedding).into_iter().collect();
        };
        let beside = self.embedding.delta.iter().flat_map(|delta| adapter::parameters(settings, EMBEDDING_MODULE, delta));
        self.embedding.trained.of_embedding().into_iter().chain(beside).collect()
    }

    /// Picks from tensors that [`Self::save_trained`] has written those that are trained, as [`Self::parameters`] has them. Where an adapter has
    /// begun as a part of the weights, it has begun as these say from now on.
    pub fn take_saved(&mut self, saved: Vec<(String, Tensor)>) -> Vec<(String, Tensor)> {
        self.release_layers();
        let settings = match &self.trained {
            Trainable::Nothing => return saved,
            Trainable::Adapter(settings) => settings,
            Trainable::AllWeights(all) => return saved.into_iter().filter(|(name, _)| !all.is_constant(name)).collect(),
        };
        // What goes with an addition to it is a constant.
        let mut saved: BTreeMap<_, _> = saved.into_iter().filter(|(name, _)| !name.ends_with(BASE_WEIGHT)).collect();
        for linear in self.layers.iter_mut().flat_map(DecoderLayer::linears_mut).filter(|_| settings.init == InitLora::Pissa) {
            let Some(delta) = &linear.delta else { continue };
            let of_delta = adapter::parameters(settings, &linear.name, delta);
            let [(a_name, a_ri), (b_name, b_or), ..] = &of_delta[..] else { continue };
            let Some((saved_a, saved_b)) = saved.get(a_name).zip(saved.get(b_name)) else { continue };
            let (r, inner, out) = (a_ri.size()[0], a_ri.size()[1], b_or.size()[0]);
            // What has another shape is of another adapter, as whoever takes it will see.
            if saved_a.size() != [2 * r, inner] || saved_b.size() != [out, 2 * r] {
                continue;
            }
            let pissa = PissaInit::of_saved(saved_a, saved_b);
            let trained = [saved_a.narrow(0, 0, r).contiguous(), saved_b.narrow(1, 0, r).contiguous()];
            saved.extend([a_name.clone(), b_name.clone()].into_iter().zip(trained));
            linear.set_pissa(Some(pissa));
        }
        self.let_linears_wait();
        saved.into_iter().collect()
    }

    /// Where linears have other weights than before, these wait from now on.
    pub(super) fn let_linears_wait(&mut self) {
        if let Some(waiting) = &mut self.waiting {
            waiting.follow(self.layers.iter().map(DecoderLayer::tensors));
        }
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.layers.iter_mut().flat_map(DecoderLayer::linears_mut)
    }

    pub(super) fn stacked_mut(&mut self) -> impl Iterator<Item = &mut (String, Option<LoraDelta>)> {
        self.layers.iter_mut().flat_map(DecoderLayer::stacked_mut)
    }

    pub(super) fn copyable_mut(&mut self) -> impl Iterator<Item = &mut CopyableVector> {
        self.layers.iter_mut().flat_map(DecoderLayer::copyable_mut).chain([&mut self.final_norm.weight_e])
    }

    /// Writes what is trained into a directory that exists: an adapter in PEFT's format, which names `base_model`, or all
    /// weights as a model of their own; and the gates, where there are any.
    pub fn save_trained(&self, dir: &Path, base_model: &str) -> Result<(), Fault> {
        let gates: Vec<_> = self.gates().collect();
        if !gates.is_empty() {
            save_tensors(&dir.join(GATE_TENSORS), &gates, &pt_metadata())?;
        }
        match (self.adapter(), self.all_weights()) {
            (Some(adapter), _) => adapter.save_peft(dir, base_model),
            (None, Some(all)) => all.save(dir),
            (None, None) => Err(Fault::new(Exit::Data, "nothing of the model is trained, so there is nothing to save")),
        }
    }

    /// About as much as [`Self::save_trained`] writes.
    pub fn trained_bytes(&self) -> Bytes {
        let bytes = |tensors: Vec<(String, Tensor)>| bytes_of(tensors.iter().map(|(_, tensor)| tensor)).0;
        let has_pissa = matches!(&self.trained, Trainable::Adapter(settings) if settings.init == InitLora::Pissa);
        let adapter = || {
            // With an addition to the embedding or the output projection goes that.
            let bases = bytes_of(self.embedding.alias_trained().bases.values());
            Bytes(bytes(self.parameters()) * if has_pissa { 2 } else { 1 } + bases.0)
        };
        Bytes(self.all_weights().map_or_else(adapter, AllWeights::saved_bytes).0 + bytes(self.gates().collect()))
    }

    /// Hidden states `(B, n, E)` of tokens `(B, n)`, int64.
    pub fn embed(&self, ids_bn: &Tensor) -> Tensor {
        self.embedding.embed(ids_bn)
    }

    /// The backward of [`Self::embed`] over pieces of a sequence, ids `(B, n)` and the gradients of their hidden states `(B, n, E)`: the gradients of
    /// the [`Self::embedding_parameters`].
    pub fn embed_backward(&self, pieces: impl Iterator<Item = (Tensor, Tensor)>) -> Vec<Tensor> {
        self.embedding.embed_backward(pieces)
    }

    /// The frequencies of the layers' rotations, as [`ModelConfig::rotations`] names them, for sequences of these lengths in tokens: all
    /// of a sequence's, of whatever part of it is run. They are made once for a batch.
    pub fn frequencies(&self, lengths: &[usize]) -> Vec<Frequencies> {
        self.config.rotations().iter().map(|rope| rope.frequencies(lengths, self.kind, self.device)).collect()
    }

    /// Tokens at true positions, `(B, n)`, or `(1, n)` or `(n)` where all sequences share them, int64, with these [`Self::frequencies`].
    pub fn positions(&self, position_bn: Tensor, frequencies: &[Frequencies]) -> Positions {
        let rotations = frequencies.iter().map(|of| Rotation::at(&position_bn, of, self.kind)).collect();
        Positions { position_bn, rotations }
    }

    /// One decoder layer with its part of the adapter: `(B, n, E)` in and out.
    pub fn layer(
        &self,
        idx: LayerIdx,
        hidden_bne: &Tensor,
        positions: &Positions,
        context: &DropoutContext<'_>,
        attend: &mut dyn Attend,
    ) -> Result<Tensor, Fault> {
        let tokens = TokenContext { position_bn: &positions.position_bn, dropout: context };
        self.decoder_layer(idx).forward(hidden_bne, &positions.rotations, &tokens, attend)
    }

    pub(super) fn decoder_layer(&self, idx: LayerIdx) -> &DecoderLayer {
        debug_assert!(self.waiting.as_ref().is_none_or(|waiting| waiting.is_here(idx.0)), "{idx} is not here");
        &self.layers[idx.0]
    }

    /// The norm between the last layer and the output projection: `(…, E)` in and out.
    pub fn final_norm(&self, hidden: &Tensor) -> Tensor {
        self.final_norm.apply(hidden)
    }

    /// The scores `(…, V)` of all tokens of the vocabulary, or `(…, K)` of a classifier's classes, for normed hidden states.
    pub fn logits(&self, normed: &Tensor) -> Tensor {
        self.embedding.logits(normed)
    }
}
