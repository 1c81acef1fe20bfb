//! Embedding and output projection, tokens to hidden states and hidden states to logits: one matrix where they are tied.

use tch::{Tensor, no_grad};

use super::config::ModelConfig;
use super::io_layers::TrainedCopies;
use super::linear::{Linear, LoraDelta};
use super::names::{EMBEDDING, EMBEDDING_MODULE, OUTPUT, OUTPUT_MODULE, SCORE, peft_tensor};
use super::positions::{DropoutContext, TokenContext};
use super::vectors::scaled;
use super::weights::Weights;
use crate::ops::attention::zero_sum_of;
use crate::ops::linear::{Weight, linear};
use crate::ops::pointwise::soft_cap;
use crate::units::Fault;

#[derive(Debug)]
pub(super) struct Embedding {
    /// The embedding's matrix `(V, E)`.
    input: Weight,
    /// The output projection, whose weight may be the embedding, with the addition to it.
    pub(super) output: Linear,
    has_output: bool,
    /// What is trained beside the embedding, which takes in tokens as ones among zeros, without dropout as in
    /// PEFT: A `(r, V)` and B `(E, r)`.
    pub(super) delta: Option<LoraDelta>,
    /// What scores classes in place of an output projection.
    score_ke: Option<Tensor>,
    /// What an adapter trains in their place.
    pub(super) trained: TrainedCopies,
    /// On what a token is turned into.
    scale: f64,
    divisor: f64,
    soft_cap: Option<f64>,
}

impl Embedding {
    pub(super) fn load(weights: &Weights, config: &ModelConfig) -> Result<Self, Fault> {
        // A tied model's file may hold an output projection; it is not looked at, as the embedding takes its place.
        let has_output = !config.tie_word_embeddings && !config.has_score;
        let score_ke = if config.has_score { Some(weights.load(SCORE)?) } else { None };
        let (input, divisor) = (weights.load_weight(EMBEDDING)?, config.logits_divisor);
        let output = Linear::output(if has_output { weights.load_weight(OUTPUT)? } else { input.map(Tensor::shallow_clone) });
        // As the published models were run: a factor in the dtype of what it multiplies.
        let scale = Tensor::from(config.embedding_scale).to_kind(input.kind()).double_value(&[]);
        Ok(Self {
            input,
            output,
            has_output,
            delta: None,
            score_ke,
            trained: TrainedCopies::default(),
            scale,
            divisor,
            soft_cap: config.logit_soft_cap,
        })
    }

    /// `(B, n)` int64 in, `(B, n, E)` out.
    pub(super) fn embed(&self, ids_bn: &Tensor) -> Tensor {
        let kind = self.input.kind();
        let trained_ve = self.trained.get(EMBEDDING);
        let own = trained_ve.map_or_else(|| self.input.select(ids_bn), |own_ve| rows(own_ve, ids_bn).to_kind(kind));
        let Some(lora) = &self.delta else { return scaled(own, self.scale) };
        let added = rows(&lora.a_ri.transpose(0, 1), ids_bn).matmul(&lora.b_or.transpose(0, 1)) * lora.scale;
        scaled(own + added.to_kind(kind), self.scale)
    }

    /// Computes [`Model::embed_backward`](super::Model::embed_backward): the gradients are in the kind in which they are summed.
    pub(super) fn embed_backward(&self, pieces: impl Iterator<Item = (Tensor, Tensor)>) -> Vec<Tensor> {
        let whole_ve = match &self.input {
            Weight::Plain(input_ve) if input_ve.requires_grad() => Some(input_ve),
            _ => self.trained.get(EMBEDDING),
        };
        let mut of_whole_ve = whole_ve.map(zero_sum_of);
        let mut beside = self.delta.as_ref().map(|lora| {
            let matrices = [&lora.a_ri, &lora.b_or].map(Tensor::detach);
            let sums = matrices.each_ref().map(Tensor::zeros_like);
            (lora.scale, matrices, sums)
        });
        for (ids_bn, gradient_bne) in pieces {
            let (ids_n, gradient_ne) = (ids_bn.flatten(0, 1), scaled(gradient_bne.flatten(0, 1), self.scale));
            if let Some(sum_ve) = &mut of_whole_ve {
                let _ = sum_ve.index_add_(0, &ids_n, &gradient_ne.to_kind(sum_ve.kind()));
            }
            if let Some((scale, [a_rv, b_er], [of_a_rv, of_b_er])) = &mut beside {
                let scaled_en = (gradient_ne.to_kind(a_rv.kind()) * *scale).transpose(0, 1);
                let _ = of_a_rv.index_add_(1, &ids_n, &b_er.transpose(0, 1).matmul(&scaled_en));
                let _ = of_b_er.g_add_(&scaled_en.matmul(&rows(&a_rv.transpose(0, 1), &ids_n)));
            }
        }
        of_whole_ve.into_iter().chain(beside.into_iter().flat_map(|(.., sums)| sums)).collect()
    }

    /// Takes what an adapter trains; of a new one what begins as the model has it gets these values.
    pub(super) fn train(&mut self, adapter: TrainedCopies, is_new: bool) {
        let begin = |name, value: &dyn Fn() -> Option<Tensor>| {
            if let Some((leaf, value)) = adapter.get(name).and_then(|leaf| Some((leaf, value()?))) {
                no_grad(|| leaf.shallow_clone().copy_(&value));
            }
        };
        if is_new {
            begin(EMBEDDING, &|| Some(self.input.matrix()));
            begin(OUTPUT, &|| Some(self.output.weight()));
            begin(SCORE, &|| self.score_ke.as_ref().map(Tensor::shallow_clone));
            self.output.init_delta();
        }
        if let Some(base_ve) = adapter.bases.get(EMBEDDING_MODULE) {
            let own_ve = self.input.matrix();
            let base_ve = base_ve.to_kind(own_ve.kind()).to_device(own_ve.device());
            if !self.has_output {
                self.output.replace_weight(&base_ve);
            }
            if !base_ve.equal(&own_ve) {
                self.input = Weight::Plain(base_ve);
            }
        }
        if let Some(base_ve) = adapter.bases.get(OUTPUT_MODULE) {
            self.output.replace_weight(base_ve);
        }
        self.trained = adapter;
    }

    /// What is trained beside output projection and embedding, by their names.
    pub(super) fn deltas(&self) -> impl Iterator<Item = (&str, &LoraDelta)> {
        let output = self.output.delta.iter().map(|delta| (OUTPUT_MODULE, delta));
        output.chain(self.delta.iter().map(|delta| (EMBEDDING_MODULE, delta)))
    }

    /// What an adapter trains above the layers.
    pub(super) fn trained_of_head(&self) -> Vec<(String, Tensor)> {
        let named = |(part, leaf): (&str, &Tensor)| (peft_tensor(OUTPUT_MODULE, part), leaf.shallow_clone());
        let of_delta = self.output.delta.iter().flat_map(LoraDelta::parameters).map(named);
        of_delta.chain(self.trained.of_head()).collect()
    }

    /// What an adapter trains of them, for whoever looks at all of an adapter at once; with an addition to an end of the model comes the model's own.
    pub(super) fn alias_trained(&self) -> TrainedCopies {
        let input = self.delta.as_ref().map(|_| (EMBEDDING_MODULE, self.input.matrix()));
        let output = self.output.delta.as_ref().map(|_| (OUTPUT_MODULE, self.output.weight()));
        let mut trained = self.trained.map(Tensor::shallow_clone);
        trained.bases = input.into_iter().chain(output).collect();
        trained
    }

    pub(super) fn has_score(&self) -> bool {
        self.score_ke.is_some() || self.trained.get(SCORE).is_some()
    }

    /// The scores of the vocabulary, or of classes where there are some: `(…, E)` in, `(…, V)` or `(…, K)` out.
    pub(super) fn logits(&self, normed: &Tensor) -> Tensor {
        let kind = normed.kind();
        if let Some(score_ke) = self.trained.get(SCORE).or(self.score_ke.as_ref()) {
            return linear(normed, &Weight::Plain(score_ke.to_kind(kind)), None, None);
        }
        // Dividing what goes in is the same, and takes E numbers of a token where V would come out.
        let normed = scaled(normed.shallow_clone(), 1.0 / self.divisor);
        let logits = match self.trained.get(OUTPUT) {
            Some(own_ve) => linear(&normed, &Weight::Plain(own_ve.to_kind(kind)), None, None),
            None => {
                self.output.forward(&normed, &TokenContext { position_bn: &Tensor::new(), dropout: &DropoutContext::default() })
            }
        };
        self.soft_cap.map_or_else(|| logits.shallow_clone(), |cap| soft_cap(&logits, cap))
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let output = self.has_output.then(|| self.output.tensors());
        self.input.tensors().iter().chain(output.into_iter().flatten()).chain(&self.score_ke)
    }
}

fn rows(table: &Tensor, ids: &Tensor) -> Tensor {
    Tensor::embedding(table, ids, -1, false, false)
}
