//! Layers over columns of fixed widths, without autograd: what a layer computes before and behind attention depends on its input and on positions
//! alone, so that it is captured once, and launched as one for every column that follows. Attention, which chooses slots, stays outside.

use std::collections::BTreeMap;

use tch::{Device, Tensor};

use super::attend::Attend;
use super::causal_lm::Model;
use super::decoder::DecoderLayer;
use super::positions::{DropoutContext, Positions, TokenContext};
#[cfg(test)]
use super::simulated;
use crate::native::cuda::{Graph, GraphRecorder};
use crate::units::{Fault, LayerIdx};

/// Runs the layers of a model over the columns of sessions.
#[derive(Debug, Default)]
pub struct CapturedLayers {
    recorder: Option<Recorder>,
    /// What belongs to a shape of columns, by sequences and tokens.
    shapes: BTreeMap<(usize, usize), OfShape>,
}

#[derive(Debug, Default)]
struct OfShape {
    columns: usize,
    held: Option<CapturedBuffers>,
    /// The operations of each layer before attention and behind it.
    pieces: BTreeMap<usize, [Option<Recorded>; 2]>,
}

#[derive(Debug)]
pub struct ColumnLayers<'a> {
    model: &'a Model,
    context: &'a DropoutContext<'a>,
    positions: &'a Positions,
    captured: Option<(&'a Recorder, &'a mut OfShape)>,
}

/// Where captured operations read and write; the same tensors for all layers, one after the other. All have heads of one shape.
#[derive(Debug)]
struct CapturedBuffers {
    /// The layer's input or output `(B, n, E)`.
    hidden_bne: Tensor,
    positions: Positions,
    /// `(B, H, n, D)`, and twice `(B, G, n, D)`; values lie as their projection has left them.
    qkv: [Tensor; 3],
    /// What attention has made, `(B, H, n, D)`.
    attended_bhnd: Tensor,
    /// The layer's input or output `(B, n, E)`.
    out_bne: Tensor,
}

impl CapturedBuffers {
    fn new(model: &Model, sequences: usize, tokens: usize, positions: &Positions) -> Self {
        let (config, options) = (model.config(), (model.kind(), model.device()));
        let attention = &config.layers[0].attention;
        let (sequences, tokens, head_dim) = (sequences as i64, tokens as i64, attention.head_dim as i64);
        let hidden = || Tensor::empty([sequences, tokens, config.hidden_size as i64], options);
        let by_head = |heads: usize| Tensor::empty([sequences, heads as i64, tokens, head_dim], options);
        let by_token = |heads: usize| Tensor::empty([sequences, tokens, heads as i64, head_dim], options).transpose(1, 2);
        Self {
            hidden_bne: hidden(),
            positions: positions.empty_like(),
            qkv: [by_head(attention.num_heads), by_head(attention.num_kv_heads), by_token(attention.num_kv_heads)],
            attended_bhnd: by_head(attention.num_heads),
            out_bne: hidden(),
        }
    }

    /// Computes a layer up to its attention. This part, and that behind attention, read and write only what is held here and what all columns
    /// have in common, so that a graph of them can be replayed.
    fn before_attention(&mut self, layer: &DecoderLayer, context: &DropoutContext<'_>) {
        #[cfg(test)]
        simulated::spoil(&mut self.qkv);
        let tokens = TokenContext { position_bn: &self.positions.position_bn, dropout: context };
        let x_bne = layer.attention_input(&self.hidden_bne);
        let made = layer.attention.project(&x_bne, &self.positions.rotations, &tokens);
        self.qkv.iter_mut().zip(&made).for_each(|(held, made)| held.copy_(made));
    }

    /// What is behind attention. Only a layer without experts is captured, which asks `attend` for nothing.
    fn behind_attention(&mut self, layer: &DecoderLayer, context: &DropoutContext<'_>, attend: &mut dyn Attend) {
        #[cfg(test)]
        simulated::spoil(std::slice::from_mut(&mut self.out_bne));
        let tokens = TokenContext { position_bn: &self.positions.position_bn, dropout: context };
        if let Ok(made) = layer.after_attention(&self.hidden_bne, self.attended_bhnd.shallow_clone(), &tokens, attend) {
            self.out_bne.copy_(&made);
        }
    }
}

#[derive(Debug)]
enum Recorder {
    Device(&'static GraphRecorder),
    #[cfg(test)]
    Played,
}

#[derive(Debug)]
enum Recorded {
    Device(Graph),
    #[cfg(test)]
    Played,
}

impl CapturedLayers {
    /// Layers that are captured where the device has graphs; `Err` says what libtorch lacks for that.
    pub fn new(device: Device) -> Result<Self, Fault> {
        let recorder = match device {
            #[cfg(test)]
            _ if simulated::is_on() => Some(Recorder::Played),
            Device::Cuda(index) => Some(Recorder::Device(GraphRecorder::of(index)?)),
            _ => None,
        };
        Ok(Self { recorder, shapes: BTreeMap::new() })
    }

    /// The same, with columns of so many sequences and tokens among those that are captured.
    pub fn over(mut self, sequences: usize, tokens: usize) -> Self {
        self.shapes.insert((sequences, tokens), OfShape::default());
        self
    }

    /// The layers over the column that is next, of so many sequences and tokens. `model` is always the same, and so is `context` for all columns of one shape.
    pub fn column<'a>(
        &'a mut self,
        model: &'a Model,
        context: &'a DropoutContext<'a>,
        positions: &'a Positions,
        sequences: usize,
        tokens: usize,
    ) -> ColumnLayers<'a> {
        let mut captured = self.recorder.as_ref().zip(self.shapes.get_mut(&(sequences, tokens)));
        if let Some((_, of_shape)) = &mut captured {
            of_shape.columns += 1;
            if of_shape.columns == 1 {
                captured = None;
            } else {
                let held = of_shape.held.get_or_insert_with(|| CapturedBuffers::new(model, sequences, tokens, positions));
                held.positions.copy_(positions);
            }
        }
        ColumnLayers { model, context, positions, captured }
    }
}

impl<'a> ColumnLayers<'a> {
    /// Nothing of them is captured.
    pub fn plain(model: &'a Model, context: &'a DropoutContext<'a>, positions: &'a Positions) -> Self {
        Self { model, context, positions, captured: None }
    }

    /// One decoder layer, with the numbers and shapes of [`Model::layer`].
    pub fn layer(&mut self, idx: LayerIdx, hidden_bne: &Tensor, attend: &mut dyn Attend) -> Result<Tensor, Fault> {
        let (layer, context) = (self.model.decoder_layer(idx), self.context);
        // A gate sees what goes into attention, which is held nowhere; other numbers have not been tried in a graph.
        let is_captured = !layer.has_experts() && attend.model_feature(idx).is_none();
        let captured = self.captured.as_mut().filter(|_| is_captured);
        let Some((recorder, OfShape { held: Some(held), pieces, .. })) = captured else {
            return self.model.layer(idx, hidden_bne, self.positions, context, attend);
        };
        let [before, behind] = pieces.entry(idx.0).or_default();
        held.hidden_bne.copy_(hidden_bne);
        recorder.run(before, held, |held| held.before_attention(layer, context))?;
        let attended_bhnd = layer.attention.attend(None, held.qkv.each_ref(), attend)?;
        held.attended_bhnd.copy_(&attended_bhnd);
        drop(attended_bhnd);
        recorder.run(behind, held, |held| held.behind_attention(layer, context, attend))?;
        // What is handed out is not written over by the next column.
        Ok(held.out_bne.copy())
    }
}

impl Recorder {
    /// Lets a piece of a layer write its results: by itself the first time, and from then on by what was captured of it.
    fn run(
        &self,
        recorded: &mut Option<Recorded>,
        held: &mut CapturedBuffers,
        mut compute: impl FnMut(&mut CapturedBuffers),
    ) -> Result<(), Fault> {
        match (self, &*recorded) {
            (_, Some(Recorded::Device(graph))) => graph.replay(),
            (Self::Device(recorder), _) => {
                let graph = recorder.capture(|| compute(held))?;
                *recorded = Some(Recorded::Device(graph));
            }
            #[cfg(test)]
            (Self::Played, None) => {
                // As a device does it, and captures it then.
                (0..2).for_each(|_| compute(held));
                *recorded = Some(Recorded::Played);
            }
            #[cfg(test)]
            (Self::Played, Some(Recorded::Played)) => {
                simulated::count_replay();
                compute(held);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tch::Kind;

    use super::*;
    use crate::model::{Adapter, ModelConfig, Qkv, while_graphs_are_simulated};
    use crate::recipe::{Dtype, LoraRecipe, ModuleSet};
    use crate::units::StepKey;

    fn model(dtype: Dtype) -> Model {
        model_with(dtype, &json!({}))
    }

    fn model_with(dtype: Dtype, more: &serde_json::Value) -> Model {
        let mut object = json!({
            "model_type": "qwen2", "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1,
            "intermediate_size": 20, "vocab_size": 11, "max_position_embeddings": 64, "initializer_range": 0.3,
        });
        object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = ModelConfig::from_object(object.as_object().unwrap()).unwrap();
        let lora = LoraRecipe::plain(2, 4.0, 0.3, ModuleSet::AllLinear);
        let model = Model::random(config, dtype, Device::Cpu, 1).unwrap();
        let adapter = Adapter::new(model.config(), &lora, 1, model.kind(), Device::Cpu).unwrap();
        adapter.set_b_normal(0.5, 2);
        model.with_adapter(adapter)
    }

    /// Attends each token to itself, and keeps what it was shown.
    #[derive(Default)]
    struct Keeps(Vec<Tensor>);

    impl Attend for Keeps {
        fn attend(&mut self, _: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault> {
            self.0.push(qkv.own.k.shallow_clone());
            Ok(qkv.own.v.expand_as(&qkv.q_bhnd) + &qkv.own.k * 0.1)
        }
    }

    /// Wants nothing of the upper layer but its keys and values.
    #[derive(Default)]
    struct Writes(Keeps);

    impl Attend for Writes {
        fn attend(&mut self, layer: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault> {
            self.0.attend(layer, qkv)
        }

        fn wants_output(&self, layer: LayerIdx) -> bool {
            layer.0 == 0
        }
    }

    /// The last hidden states of all columns, two sequences of tokens each.
    fn run(model: &Model, lengths: &[usize], attend: &mut dyn Attend) -> Vec<Tensor> {
        let (samples, dropout) = ([40, 41], Some(StepKey { seed: 3, step: 4 }));
        let context = DropoutContext { dropout, samples: &samples };
        let mut captured = CapturedLayers::new(Device::Cpu).unwrap().over(2, 4).over(2, 6);
        let frequencies = model.frequencies(&[64, 5]);
        let mut start = 0;
        let column = |&n: &usize| {
            let position_bn = Tensor::arange_start(start, start + n as i64, (Kind::Int64, Device::Cpu)).unsqueeze(0);
            start += n as i64;
            let mut hidden_bne = model.embed(&position_bn.remainder(11).expand([2, n as i64], false));
            let positions = model.positions(position_bn, &frequencies);
            let mut layers = captured.column(model, &context, &positions, 2, n);
            for layer in 0..2 {
                hidden_bne = layers.layer(LayerIdx(layer), &hidden_bne, attend).unwrap();
            }
            hidden_bne
        };
        tch::no_grad(|| lengths.iter().map(column).collect())
    }

    #[test]
    fn captured_columns_give_the_very_bits_whatever_comes_between() {
        let lengths = [6, 4, 4, 6, 4, 1, 4, 6, 6, 4, 1, 3, 6, 4, 6, 4, 6, 6, 4, 6];
        let by_length = json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16});
        for (dtype, more) in [(Dtype::F64, json!({})), (Dtype::F32, json!({})), (Dtype::Bf16, json!({})), (Dtype::F32, by_length)]
        {
            let model = model_with(dtype, &more);
            let plain = run(&model, &lengths, &mut Keeps::default());
            let (captured, replays) = while_graphs_are_simulated(|| run(&model, &lengths, &mut Keeps::default()));
            assert_eq!(plain, captured, "{dtype}");
            // Two layers in two pieces; eight columns of 4 tokens and nine of 6, of which the first is as ever and the second captured.
            assert_eq!(replays, 2 * 2 * (6 + 7));
        }
    }

    #[test]
    fn a_layer_whose_output_is_not_wanted_is_run_as_far_as_its_keys_and_values() {
        let model = model(Dtype::F64);
        let (mut keeps, mut writes) = (Keeps::default(), Writes::default());
        let (whole, written) = (run(&model, &[6], &mut keeps), run(&model, &[6], &mut writes));
        assert!(keeps.0 == writes.0.0 && whole != written);
    }

    #[test]
    fn who_keeps_what_is_written_again_is_found() {
        let model = model(Dtype::F64);
        let mut keeps = Keeps::default();
        let _ = while_graphs_are_simulated(|| run(&model, &[4; 9], &mut keeps));
        let of_column = |c: usize| &keeps.0[2 * c];
        assert_ne!(of_column(0), of_column(1), "the first column's is its own");
        assert_eq!(of_column(1), of_column(8), "the others' lie in one place");
    }
}
