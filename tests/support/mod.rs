//! What the proofs run on: tiny random models, batches and engines, each from a few numbers and a seed.
//!
//! The suite, the proofs on a GPU and the library's own tests take what they need of this; what is public here is so for the tests beside it.
#![allow(dead_code, unreachable_pub, reason = "the suite, the proofs on a GPU and the library's own tests take what they need")]

pub mod case;
pub mod grid;
pub mod policies;
pub mod syncs;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use kvtune::cache::{ChunkSpan, LayerLog, ReplayLog};
use kvtune::data::{Batch, IGNORE, Sequence, SoftTargets, Targets};
use kvtune::engine::{Engine, MicroBatchContext, Settings};
use kvtune::head::Head;
use kvtune::model::{
    Adapter, GATE_TENSORS, Gates, Model, ModelConfig, ModelPlacement, ModulePatterns, NormSpec, PeftConfig, Preference,
};
use kvtune::recipe::{
    CacheLength, CacheRecipe, Dtype, GradRecipe, KeepGraph, LossMean, ModuleSet, OnOutOfMemory, PolicyRecipe, Recipe, TrainedBias,
};
use kvtune::units::StepKey;
use kvtune::verify::every_tiling;
use rand::RngExt;
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

use case::{Beside, Case, HeadKind, Tail, TargetsAt, Trains, Width};

/// Layers of every model here: a bottom, a middle and a top layer band.
pub const NUM_LAYERS: usize = 3;
/// Small, yet more than one block's padding would hide.
pub const VOCAB: usize = 50;
const HIDDEN: i64 = 24;
const HEAD_DIM: i64 = 8;
/// A channel that is not the first of a block.
const LOUD_CHANNEL: i64 = 17;
const LOUD: f64 = 1000.0;
/// Label tokens of the classification head.
pub const LABELS: [u32; 4] = [40, 41, 42, 43];
/// PEFT's names of the linear layers, in the order of the decoder layer.
pub const ALL_LINEAR: &[&str] = &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Normally distributed numbers: the same for the same seed, whatever other threads draw.
///
/// Most cases have the same weights. Drawing them would take a tenth of the proofs' time, so they are drawn once.
pub fn normal(seed: u64, shape: &[i64], deviation: f64) -> Tensor {
    type Drawn = BTreeMap<(u64, usize, u64), Arc<[f64]>>;
    static DRAWN: Mutex<Drawn> = Mutex::new(BTreeMap::new());
    let count = shape.iter().product::<i64>() as usize;
    let key = (seed, count, deviation.to_bits());
    let known = DRAWN.lock().unwrap().get(&key).cloned();
    let values = known.unwrap_or_else(|| {
        let values: Arc<[f64]> = draw(seed, count, deviation).into();
        DRAWN.lock().unwrap().insert(key, values.clone());
        values
    });
    Tensor::from_slice(&values).view(shape)
}

fn draw(seed: u64, count: usize, deviation: f64) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut one = || {
        let (u, v): (f64, f64) = (rng.random(), rng.random());
        deviation * (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    };
    (0..count).map(|_| one()).collect()
}

/// Makes libtorch compute on one thread. The tests are the parallelism: threads that wait for a CPU of other tests spin for longer than these
/// models compute. And a reduction split over threads would not repeat to the bit.
pub fn on_one_thread() {
    tch::set_num_threads(1);
}

/// The model of a case, written to a directory and read back. No bias is zero, no norm is one, and the B of an adapter
/// is drawn too.
pub fn model(case: &Case) -> Model {
    on_one_thread();
    let dir = tempfile::tempdir().unwrap();
    let path = if let Some(name) = case.quantised {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised").join(name)
    } else {
        std::fs::write(dir.path().join("config.json"), config(case).to_string()).unwrap();
        Tensor::write_safetensors(&weights(case), dir.path().join("model.safetensors")).unwrap();
        dir.path().to_owned()
    };
    let dtype = match case.kind {
        Kind::Double => Dtype::F64,
        Kind::BFloat16 => Dtype::Bf16,
        _ => Dtype::F32,
    };
    let at = ModelPlacement { device: case.device, keeps_layers_on_host: case.has_waiting_weights };
    let mut model = if case.trains == Trains::Adapter {
        adapted(case, &path, dtype, at)
    } else {
        Model::load_to_train(&path, dtype, at).unwrap()
    };
    if case.takes_gates() {
        model.set_gates(gates(&model));
    }
    model
}

/// The model with an adapter whose matrices are drawn.
fn adapted(case: &Case, path: &Path, dtype: Dtype, at: ModelPlacement) -> Model {
    let classes = (case.head == HeadKind::Score).then_some(LABELS.len());
    let mut model = Model::load(path, dtype, at).unwrap().with_classes(classes);
    let adapter = Adapter::with_settings(model.config(), adapter_settings(case), 1, case.kind, case.device).unwrap();
    model.set_adapter(adapter);
    for (name, mut parameter) in model.parameters() {
        let size = parameter.size();
        let drawn = |deviation| normal(seed_of(&name), &size, deviation);
        let value = match &size[..] {
            [_, inner] if name.contains("lora_A") => drawn(1.0 / (*inner as f64).sqrt()),
            // Lengths stay near what they are.
            [_] if name.contains("magnitude") => &parameter.to_device(CPU).detach() * (drawn(0.1) + 1.0),
            _ => drawn(0.1),
        };
        tch::no_grad(|| parameter.copy_(&value));
    }
    model
}

/// Gates that tell entries apart, and queries of their own kind.
pub fn gates(model: &Model) -> Gates {
    let (config, dir, hidden) = (model.config(), tempfile::tempdir().unwrap(), 5);
    let of_layer = |layer: usize| {
        let attention = &config.layers[layer].attention;
        let (width, heads) = (config.hidden_size as i64, attention.num_kv_heads as i64);
        let sizes = [
            ("query_mean", vec![attention.num_heads as i64, attention.head_dim as i64]),
            ("query_length_excess", vec![attention.num_heads as i64, attention.pairs() as i64]),
            ("0.weight", vec![hidden, width]),
            ("0.bias", vec![hidden]),
            ("2.weight", vec![heads, hidden]),
            ("2.bias", vec![heads]),
        ];
        sizes.map(|(part, size)| {
            let name = format!("module_list.{layer}.{part}");
            (name.clone(), normal(seed_of(&name), &size, 0.5))
        })
    };
    let tensors: Vec<_> = (0..config.num_layers()).flat_map(of_layer).collect();
    Tensor::write_safetensors(&tensors, dir.path().join(GATE_TENSORS)).unwrap();
    Gates::read(dir.path(), config, model.kind(), model.device()).unwrap()
}

fn adapter_settings(case: &Case) -> PeftConfig {
    let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    // The experts of a Mixtral have names of their own, and those of gpt-oss none: they are targeted side by side.
    let routers: &[&str] = match case.config {
        config if config.contains("mixtral") => &["gate.weight"],
        config if config.contains("gpt_oss") => &["router.weight"],
        _ => &[],
    };
    let is_stacked = !routers.is_empty();
    let names: Vec<String> = owned(case.lora);
    let names =
        names.into_iter().filter(|name| !is_stacked || !["gate_proj", "up_proj", "down_proj"].contains(&&**name)).collect();
    let targets = match case.matching {
        Some(expression) => ModuleSet::matching(expression).unwrap(),
        None => ModuleSet::Names(names),
    };
    PeftConfig {
        use_rslora: case.is_rslora,
        rank_pattern: ModulePatterns::new(case.ranks.iter().map(|&(pattern, r)| (pattern.to_owned(), r))).unwrap(),
        alpha_pattern: ModulePatterns::new(case.alphas.iter().map(|&(pattern, alpha)| (pattern.to_owned(), alpha))).unwrap(),
        exclude_modules: ModuleSet::Names(owned(case.excluded)),
        target_parameters: owned(if is_stacked { &["gate_up_proj", "experts.down_proj"] } else { &[] })
            .into_iter()
            .chain(owned(routers))
            .collect(),
        layers_to_transform: case.layers.to_vec(),
        modules_to_save: owned(case.saved),
        is_classifier: case.head == HeadKind::Score,
        lora_bias: case.beside == Beside::BiasOfB,
        bias: match case.beside {
            Beside::AllBiases => TrainedBias::All,
            Beside::BaseBiases | Beside::MagnitudesAndBaseBiases => TrainedBias::LoraOnly,
            _ => TrainedBias::None,
        },
        use_dora: matches!(case.beside, Beside::Magnitudes | Beside::MagnitudesAndBaseBiases),
        ..PeftConfig::plain(4, 8.0, case.dropout, targets)
    }
}

/// The `config.json` of a case.
pub fn config(case: &Case) -> serde_json::Value {
    let layer_type = |layer| if case.sliding_layers.contains(&layer) { "sliding_attention" } else { "full_attention" };
    let slides = !case.sliding_layers.is_empty();
    // All layers of a Mistral slide, and no key says which.
    let has_types = slides && !case.config.contains("\"mistral\"");
    let mut config = serde_json::json!({
        "use_sliding_window": slides, "sliding_window": slides.then_some(case.window),
        "layer_types": has_types.then(|| (0..NUM_LAYERS).map(layer_type).collect::<Vec<_>>()),
        "model_type": "qwen2", "hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS, "intermediate_size": 40,
        "num_attention_heads": case.heads.0, "num_key_value_heads": case.heads.1, "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": case.trains == Trains::AllTied,
    });
    let further: serde_json::Value = serde_json::from_str(case.config).unwrap();
    config.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
    config
}

/// All weights by their names in a checkpoint.
pub fn weights(case: &Case) -> Vec<(String, Tensor)> {
    let config = ModelConfig::from_object(config(case).as_object().unwrap()).unwrap();
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB as i64, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCAB as i64, HIDDEN]),
    ];
    all.retain(|(name, _)| case.trains != Trains::AllTied && !config.has_score || name != "lm_head.weight");
    if let Some(classes) = config.num_classes {
        all.push(("score.weight".to_owned(), vec![classes as i64, HIDDEN]));
    }
    for linear in config.linears() {
        let (out, inner) = (linear.spec.out as i64, linear.spec.inner as i64);
        all.push((format!("{}.weight", linear.name), vec![out, inner]));
        if linear.spec.has_bias {
            all.push((format!("{}.bias", linear.name), vec![out]));
        }
    }
    for (layer, spec) in config.layers.iter().enumerate() {
        let of = |norm: NormSpec| (format!("model.layers.{layer}.{}.weight", norm.path), vec![norm.width as i64]);
        all.extend(spec.norms(HIDDEN as usize).into_iter().map(of));
        let mut add = |path: &str, shape: &[i64]| all.push((format!("model.layers.{layer}.{path}"), shape.into()));
        if spec.attention.has_sinks {
            add("self_attn.sinks", &[spec.attention.num_heads as i64]);
        }
        let Some(experts) = spec.feed_forward.experts() else { continue };
        let (count, width) = (experts.num_experts as i64, experts.intermediate_size as i64);
        if matches!(experts.preference, Preference::Sigmoid { .. }) {
            add("mlp.gate.e_score_correction_bias", &[count]);
        }
        if experts.names.linears.is_none() {
            add("mlp.experts.gate_up_proj", &[count, HIDDEN, 2 * width]);
            add("mlp.experts.gate_up_proj_bias", &[count, 2 * width]);
            add("mlp.experts.down_proj", &[count, width, HIDDEN]);
            add("mlp.experts.down_proj_bias", &[count, HIDDEN]);
        }
    }
    all.into_iter().map(|(name, shape)| (name.clone(), drawn(case, &name, &shape))).collect()
}

fn drawn(case: &Case, name: &str, shape: &[i64]) -> Tensor {
    let seed = seed_of(name);
    let drawn = match shape {
        [_] if name.ends_with("norm.weight") => normal(seed, shape, 0.2) + 1.0,
        [_] => normal(seed, shape, 0.3),
        _ if name.contains("embed") => normal(seed, shape, 1.0),
        [_, inner, ..] => normal(seed, shape, 1.0 / (*inner as f64).sqrt()),
        [] => Tensor::from(0.0),
    };
    if case.has_loud_channel {
        make_loud(name, &drawn);
    }
    drawn
}

/// One residual channel becomes [`LOUD`] times the others, as in real models, and the norms make up for it: without that it would
/// leave the other channels no influence, and there would be nothing to measure.
fn make_loud(name: &str, weight: &Tensor) {
    if name.contains("embed_tokens") {
        // The same sign for all tokens, and nearly the same size.
        let mut channel = weight.narrow(1, LOUD_CHANNEL, 1);
        channel.copy_(&((&channel * 0.1 + 1.0) * LOUD));
    } else if name.ends_with("norm.weight") {
        // The root mean square is about LOUD / sqrt(E) at any depth, while the others grow from 1 at the bottom to 2 at the top.
        let depth = ["0.input", "0.post", "1.input", "1.post", "2.input", "2.post", "model.norm"];
        let depth = depth.iter().position(|part| name.contains(part)).unwrap() as f64;
        let _ = weight.shallow_clone().g_mul_scalar_(LOUD / (HIDDEN as f64).sqrt() / (1.0 + 0.2 * depth));
        let _ = weight.narrow(0, LOUD_CHANNEL, 1).g_mul_scalar_(1.0 / LOUD);
    } else if name.contains("o_proj") || name.contains("down_proj") {
        // Norms that no longer see the others do not hold them in check either.
        let _ = weight.shallow_clone().g_mul_scalar_(0.4);
    }
}

/// A seed of its own for each name (FNV-1a).
fn seed_of(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The batch of a case: tokens and targets that depend on the sequence and the position alone.
pub fn batch(case: &Case) -> Batch {
    Batch { sequences: case.lengths.iter().enumerate().map(|(i, &len)| row(case, i, len)).collect() }
}

/// Sequence `i` of a case's batch, alone.
pub fn single(case: &Case, i: usize) -> Batch {
    Batch { sequences: vec![row(case, i, case.lengths[i])] }
}

fn row(case: &Case, i: usize, len: usize) -> Sequence {
    let inputs = (0..len).map(|j| ((j * 7 + i * 13 + j * j) % VOCAB) as u32).collect();
    let target = |j: usize| {
        let has_target = match case.targets {
            TargetsAt::All => true,
            TargetsAt::First(count) => j < count,
            TargetsAt::Last(count) => j + count >= len,
            TargetsAt::Only(position) => i == 0 && j == position,
        };
        if has_target { ((j * 5 + i + 1) % VOCAB) as i64 } else { -100 }
    };
    let targets = match case.head {
        HeadKind::NextToken => Targets::NextToken((0..len).map(target).collect()),
        HeadKind::Distilled => {
            let labels: Vec<i64> = (0..len).map(target).collect();
            let soft = soft_targets(labels.iter().filter(|&&label| label != IGNORE).count(), i);
            Targets::Distilled(labels, Arc::new(soft))
        }
        HeadKind::Classify | HeadKind::Score => Targets::Class((i + 1) % LABELS.len()),
    };
    Sequence { sample: 70 + i as u64, inputs, targets, initial: case.initial.get(i).copied() }
}

/// What a teacher would predict in so many places of sequence `i`: three tokens, with 0.9 of the probability together.
fn soft_targets(places: usize, i: usize) -> SoftTargets {
    let tokens = (0..places).flat_map(|at| [0, 5, 11].map(|other| ((at * 3 + i + other) % VOCAB) as i32)).collect();
    let log_probs = (0..places).flat_map(|at| [0.5, 0.3, 0.1].map(|p: f32| (p + 0.01 * (at % 3) as f32).ln())).collect();
    SoftTargets { top_k: 3, tokens, log_probs }
}

/// The engine of a case for `model`.
pub fn engine(case: &Case, model: &Model) -> Engine {
    engine_with(case, settings(case, model))
}

/// What the engine of a case is built from.
pub fn settings(case: &Case, model: &Model) -> Settings {
    let (kv, grad) = recipes(case);
    Settings::new(model.config(), &kv, &grad).unwrap()
}

/// What a recipe would say of a case's cache and gradient.
pub fn recipes(case: &Case) -> (CacheRecipe, GradRecipe) {
    let params = toml::from_str(case.params).unwrap();
    let cache_length = match case.cache {
        [uniform] => CacheLength::Uniform(*uniform),
        per_layer => CacheLength::PerLayer(per_layer.to_vec()),
    };
    let kv = CacheRecipe {
        gates: None,
        policy: PolicyRecipe::with_params(case.policy, params),
        buffer: case.buffer,
        cache_length,
        chunk_size: Some(case.chunk),
        chunking: case.chunking,
        randomize_chunk_sizes: case.is_randomized,
        r#static: case.is_static,
        decode_block: if let Tail::InBlocks(block) = case.tail { block } else { 1 },
        storage: case.storage,
        cpu_offload: case.is_offloaded,
    };
    let (chunks_per_cell, chunks_per_cell_multiplier) = match case.width {
        Width::Chunks(chunks) => (Some(chunks), 1.0),
        Width::Multiplier(multiplier) => (None, multiplier),
    };
    let grad = GradRecipe {
        layers_per_cell: case.layers_per_cell,
        chunks_per_cell_multiplier,
        chunks_per_cell,
        layer_checkpoints: case.layer_checkpoints,
        undo_log: case.undo_log,
        scratch_dir: Some(std::env::temp_dir().join(format!("kvtune-proofs-{}", std::process::id()))),
        single_tokens_for_targets: case.tail != Tail::InChunks,
        on_out_of_memory: OnOutOfMemory::Fail,
        keep_graph: KeepGraph::of(case.kept),
        attention_outputs: case.outputs,
        cuda_graphs: case.has_cuda_graphs,
        open: Vec::new(),
    };
    (kv, grad)
}

/// Every tiling that is proved of a case's model and batch.
pub fn tilings(case: &Case, model: &Model) -> Vec<Recipe> {
    let (kv_cache, grad) = recipes(case);
    let settings = settings(case, model);
    let plan = settings.plan(&batch(case), context(case).chunk_sizes).unwrap();
    let own = Recipe { kv_cache, grad, ..Recipe::of_model(Path::new("model"), &[]).unwrap().recipe };
    every_tiling(&own, &(model.first_trained_layer()..NUM_LAYERS), &settings, &plan)
}

/// The engine of a case with other settings.
pub fn engine_with(case: &Case, settings: Settings) -> Engine {
    let head: Head = match case.head {
        HeadKind::NextToken => Head::NextToken,
        HeadKind::Distilled => Head::Distilled { weight: 0.6, temperature: 1.5 },
        HeadKind::Score => Head::ClassScores,
        HeadKind::Classify => Head::on_logits(&LABELS),
    };
    Engine::new(settings, head)
}

/// The weight and the randomness of a case.
pub fn context(case: &Case) -> MicroBatchContext {
    let dropout = (case.dropout > 0.0).then_some(StepKey { seed: 3, step: 11 });
    // Where there are routers, their loss counts.
    let router_weight = if case.config.contains("expert") { 0.7 } else { 0.0 };
    MicroBatchContext {
        weight: 0.01,
        loss_mean: LossMean::Tokens,
        router_weight,
        dropout,
        chunk_sizes: Some(StepKey { seed: 3, step: 11 }),
    }
}

/// The log of one chunk that holds every token and evicts none: what plain full attention sees.
pub fn full_attention(batch: &Batch) -> ReplayLog {
    let len = batch.max_len();
    let real = batch.sequences.iter().map(|sequence| sequence.inputs.len()).collect();
    let span = ChunkSpan { index: 0, chunk: 0, start: 0, len, real, is_block: false };
    let layers = (0..NUM_LAYERS).map(|_| LayerLog::default()).collect();
    ReplayLog { spans: vec![span], cache_lengths: vec![len; NUM_LAYERS], layers }
}

/// Where the proofs run.
pub const CPU: Device = Device::Cpu;
/// Tensors of the exact proofs.
pub const F64: (Kind, Device) = (Kind::Double, Device::Cpu);
