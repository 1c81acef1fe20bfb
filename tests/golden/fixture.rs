//! Cases that another program ran: what it was given, and what it found.
//!
//! `tests/fixtures/golden/NAME.json` says how a case was made, `NAME.safetensors` what came out.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::print_stdout,
    reason = "the suite and the proofs on a GPU take what they need, and say what they saw"
)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvtune::cache::{LayerLog, ReplayLog, Victims};
use kvtune::data::{Batch, Sequence, Targets};
use kvtune::engine::{Engine, MicroBatchContext, NoObserver, Settings};
use kvtune::head::Head;
use kvtune::model::{Adapter, Model};
use kvtune::recipe::{
    AttentionOutputs, BufferKind, CacheLength, CacheRecipe, Chunking, Dtype, GradRecipe, KeepGraph, LossMean, OnOutOfMemory,
    PolicyRecipe, Storage, StoreRecipe,
};
use kvtune::verify::walk;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// A file of the fixtures: of this checkout, or of the folder that `KVTUNE_FIXTURES` names on another machine.
pub fn fixture(name: &str) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    std::env::var_os("KVTUNE_FIXTURES").map_or(here, PathBuf::from).join(name)
}

/// A case as it lies on disk.
pub struct Golden {
    pub name: &'static str,
    pub how: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

impl Golden {
    pub fn read(name: &'static str) -> Self {
        let how = std::fs::read_to_string(fixture(&format!("golden/{name}.json"))).unwrap();
        let tensors = Tensor::read_safetensors(fixture(&format!("golden/{name}.safetensors"))).unwrap();
        Self { name, how: serde_json::from_str(&how).unwrap(), tensors: tensors.into_iter().collect() }
    }

    pub fn number(&self, key: &str) -> f64 {
        self.how[key].as_f64().unwrap()
    }

    pub fn integers(&self, key: &str) -> Vec<Vec<i64>> {
        let tensor = &self.tensors[key];
        (0..tensor.size()[0]).map(|sequence| Vec::try_from(tensor.get(sequence)).unwrap()).collect()
    }

    /// The names of policy and buffer.
    pub fn cache(&self) -> (&str, BufferKind) {
        let name = self.how["cache"].as_str().unwrap();
        match name.strip_suffix("-torch-quantized8") {
            Some(policy) => (policy, BufferKind::Int8),
            None => (name.trim_end_matches("-default"), BufferKind::Plain),
        }
    }

    /// The range of a sequence that is protected, as the other program found it.
    fn initial(&self, sequence: usize) -> Option<(usize, usize)> {
        let ranges = self.how.get("protected_ranges_start_end_layer0")?;
        Some((count(&ranges[0][sequence]), count(&ranges[1][sequence])))
    }

    /// The policy with the parameters that it has here too; the reference's way of counting scorers where it normalises.
    pub fn policy(&self) -> PolicyRecipe {
        let (name, _) = self.cache();
        let mut params = toml::Table::new();
        for (key, value) in self.how["cache_kwargs"].as_object().unwrap() {
            // How many candidates the other program keeps at hand, and what decodes its tokens.
            if !["max_chunk_size", "tokenizer"].contains(&key.as_str()) {
                params.insert(key.clone(), toml::Value::try_from(value).unwrap());
            }
            if key == "normalize_scores" {
                params.insert("reference_counts".into(), true.into());
            }
        }
        PolicyRecipe::with_params(name, params)
    }

    /// Slots by layer.
    pub fn cache_lengths(&self, model: &Model) -> Vec<usize> {
        match &self.how["cache_length"] {
            Value::Array(lengths) => lengths.iter().map(count).collect(),
            uniform => vec![count(uniform); model.config().num_layers()],
        }
    }

    pub fn engine(&self, model: &Model) -> Engine {
        let lengths = self.cache_lengths(model);
        let kv = CacheRecipe { buffer: self.cache().1, ..caches(self.policy(), lengths, count(&self.how["chunk_size"])) };
        let grad = cells(count(&self.how["layers_per_cell"]), self.number("chunks_per_cell_multiplier"));
        let head: Head = if self.is_classification() {
            let labels = self.how["class_label_tokens"].as_array().unwrap();
            Head::on_logits(&labels.iter().map(|l| l.as_u64().unwrap() as u32).collect::<Vec<_>>())
        } else {
            Head::NextToken
        };
        Engine::new(Settings::new(model.config(), &kv, &grad).unwrap(), head)
    }

    fn is_classification(&self) -> bool {
        self.how["head"] == "cls"
    }

    /// Targets are those of the last tokens, or the class.
    pub fn batch(&self) -> Batch {
        let sequence = |(i, (inputs, targets)): (usize, (Vec<i64>, Vec<i64>))| {
            let targets = if self.is_classification() {
                Targets::Class(targets[0] as usize)
            } else {
                let unlabelled = inputs.len() - targets.len();
                Targets::NextToken(std::iter::repeat_n(-100, unlabelled).chain(targets).collect())
            };
            Sequence {
                sample: i as u64,
                inputs: inputs.into_iter().map(|id| id as u32).collect(),
                targets,
                initial: self.initial(i),
            }
        };
        let sequences = self.integers("input_ids").into_iter().zip(self.integers("targets"));
        Batch { sequences: sequences.enumerate().map(sequence).collect() }
    }

    /// The log of what the other program evicted: after each chunk, the slots whose positions it does not hold any more.
    pub fn choices(&self, engine: &Engine, batch: &Batch) -> ReplayLog {
        let spans = engine.settings().plan(batch, None).unwrap().spans;
        let layers = (0..3).map(|_| LayerLog::default()).collect();
        let mut log = ReplayLog { spans: Vec::new(), cache_lengths: vec![count(&self.how["cache_length"]); 3], layers };
        for span in spans {
            for layer in 0..3 {
                let held = walk(&log, layer, 2).unwrap();
                let evicts = span.chunk > 0;
                let victims = evicts.then(|| {
                    let theirs = &self.tensors[&format!("token_pos.layer{layer}.chunk{}", span.chunk)];
                    let mut slots: Vec<i64> = Vec::new();
                    for (sequence, heads) in held.last().unwrap().iter().enumerate() {
                        for (head, positions) in heads.iter().enumerate() {
                            let kept = Vec::<i64>::try_from(theirs.get(sequence as i64).get(head as i64)).unwrap();
                            slots.extend((0i64..).zip(positions).filter(|(_, p)| !kept.contains(p)).map(|(slot, _)| slot));
                        }
                    }
                    Victims::new(&Tensor::from_slice(&slots).view([2, 2, -1]), log.cache_lengths[layer])
                });
                log.layers[layer].record(victims);
            }
            log.spans.push(span);
        }
        log
    }

    /// Positions after every chunk, as sets.
    pub fn check_positions(&self, log: &ReplayLog) {
        let mut checked = 0;
        for (layer, _) in log.layers.iter().enumerate() {
            for (chunk, sequences) in walk(log, layer, 2).unwrap().iter().enumerate() {
                // A dense cache has nothing to say.
                let Some(expected) = self.tensors.get(&format!("token_pos.layer{layer}.chunk{chunk}")) else { continue };
                for (sequence, heads) in sequences.iter().enumerate() {
                    for (head, held) in heads.iter().enumerate() {
                        let mut expected = Vec::<i64>::try_from(expected.get(sequence as i64).get(head as i64)).unwrap();
                        let mut held = held.clone();
                        expected.sort_unstable();
                        held.sort_unstable();
                        assert_eq!(
                            held, expected,
                            "{}: layer {layer}, chunk {chunk}, sequence {sequence}, head {head}",
                            self.name
                        );
                        checked += 1;
                    }
                }
            }
        }
        let files = self.tensors.keys().filter(|key| key.starts_with("token_pos.")).count();
        assert_eq!(checked, files * 4, "{}: 2 sequences and 2 KV heads for each of {files} tensors", self.name);
    }
}

pub fn count(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

/// Plain caches of these lengths by layer.
pub fn caches(policy: PolicyRecipe, lengths: Vec<usize>, chunk_size: usize) -> CacheRecipe {
    CacheRecipe {
        gates: None,
        policy,
        buffer: BufferKind::Plain,
        cache_length: CacheLength::PerLayer(lengths),
        chunk_size: Some(chunk_size),
        chunking: Chunking::Plain,
        randomize_chunk_sizes: false,
        decode_block: 1,
        r#static: false,
        storage: Storage::Preallocated,
        cpu_offload: false,
    }
}

/// Cells of this size, and plain stores.
pub fn cells(layers_per_cell: usize, chunks_per_cell_multiplier: f64) -> GradRecipe {
    GradRecipe {
        layers_per_cell,
        chunks_per_cell_multiplier,
        chunks_per_cell: None,
        layer_checkpoints: StoreRecipe::PLAIN,
        undo_log: StoreRecipe::PLAIN,
        scratch_dir: None,
        single_tokens_for_targets: false,
        on_out_of_memory: OnOutOfMemory::Fail,
        keep_graph: KeepGraph::None,
        attention_outputs: AttentionOutputs::Recompute,
        cuda_graphs: false,
        open: Vec::new(),
    }
}

/// The model with its adapter.
pub fn model(device: Device) -> Model {
    tch::set_num_threads(1);
    let mut model = Model::load(&fixture("model-qwen2"), Dtype::F32, device).unwrap();
    let adapter = Adapter::load_peft(&fixture("adapter-qwen2"), model.config(), Kind::Float, device).unwrap();
    model.set_adapter(adapter);
    model
}

/// Logits of a batch, on the CPU, and what was evicted.
pub fn logits(engine: &Engine, model: &Model, batch: &Batch) -> (Tensor, ReplayLog) {
    let mut columns = Vec::new();
    let sequences = batch.sequences.len() as i64;
    // Zeros for sequences that have ended.
    let mut sink = |_: usize, hidden: &Tensor| {
        let logits = model.logits(&model.final_norm(hidden));
        columns.push(logits.constant_pad_nd([0, 0, 0, 0, 0, sequences - logits.size()[0]]));
    };
    let (_, log) = engine.inspect(model, batch, None, &mut sink).unwrap();
    (Tensor::cat(&columns, 1).to_device(Device::Cpu), log)
}

fn norm(x: &Tensor) -> f64 {
    x.to_kind(Kind::Double).square().sum(Kind::Double).sqrt().double_value(&[])
}

/// The bounds of the golden numbers' own readme: they were computed in f32 too.
pub fn check(name: &'static str, gradients: &str, device: Device) {
    let (golden, model) = (Golden::read(name), model(device));
    let (engine, batch) = (golden.engine(&model), golden.batch());

    let (logits, log) = logits(&engine, &model, &batch);
    golden.check_positions(&log);
    let logit_error = (logits - &golden.tensors["logits"]).abs().max().double_value(&[]);
    assert!(logit_error <= 1e-4, "{name}: logits differ by {logit_error:.2e}");

    let num_targets = golden.tensors["targets"].numel();
    let context = MicroBatchContext {
        weight: 1.0 / num_targets as f64,
        loss_mean: LossMean::Tokens,
        router_weight: 0.0,
        dropout: None,
        chunk_sizes: None,
    };
    let ours = engine.gradients(&model, &batch, context, &mut NoObserver).unwrap();
    golden.check_positions(&ours.log);
    let loss = ours.losses.iter().map(|r| r.loss_sum).sum::<f64>() / num_targets as f64;
    let loss_error = (loss - golden.number("loss")).abs();
    assert!(loss_error <= 1e-5, "{name}: loss {loss}, expected {}", golden.number("loss"));

    let mut worst: f64 = 0.0;
    assert_eq!(ours.gradients.len(), golden.tensors.keys().filter(|key| key.starts_with(gradients)).count());
    for (parameter, gradient) in &ours.gradients {
        let expected = &golden.tensors[&format!("{gradients}{parameter}")];
        let error = norm(&(gradient.to_device(Device::Cpu) - expected)) / norm(expected);
        assert!(error <= 1e-4, "{name}: gradient of {parameter} differs by {error:.2e}");
        worst = worst.max(error);
    }
    println!("{name}: logits {logit_error:.1e}, loss {loss_error:.1e}, gradients {worst:.1e}");
}

/// What its own backward computed.
pub const ITS_OWN: &str = "grad.";
/// Plain autograd through the mask of its decisions; its own backward is wrong where layers have different lengths.
pub const BY_MASK: &str = "ref_grad.";
