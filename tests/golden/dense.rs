//! Logits, loss and gradients of a model with its adapter, through plain attention, as another program computed them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvtune::data::{Batch, Sequence, Targets};
use kvtune::engine::{Engine, MicroBatchContext, Settings, Silent};
use kvtune::files::TensorFile;
use kvtune::head::NextToken;
use kvtune::model::{Adapter, Attend, AttendError, DropoutContext, Model, Qkv};
use kvtune::recipe::Dtype;
use kvtune::store::load_tensor;
use kvtune::units::LayerIdx;
use tch::{Device, Kind, Tensor, no_grad};

use crate::support::case::{Case, PLAIN};
use crate::support::recipes;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Causal softmax attention over the whole sequence, or what a window shows of it, with nothing clever about it.
struct Dense;

impl Attend for Dense {
    fn attend(&mut self, _: LayerIdx, qkv: Qkv<'_>) -> Result<Tensor, AttendError> {
        let groups = qkv.q_bhnd.size()[1] / qkv.k_bgnd.size()[1];
        let by_head = |x: &Tensor| x.repeat_interleave_self_int(groups, 1, None);
        let (k, v) = (by_head(qkv.k_bgnd), by_head(qkv.v_bgnd));
        let score = qkv.q_bhnd.matmul(&k.transpose(2, 3)) * qkv.rule.scale;
        let length = score.size()[3];
        let ones = || Tensor::ones([length, length], (Kind::Bool, score.device()));
        let future = ones().triu(1);
        let unseen = match qkv.rule.window {
            Some(window) => future.logical_or(&ones().tril(-(window as i64))),
            None => future,
        };
        Ok(score.masked_fill(&unseen, f64::NEG_INFINITY).softmax(-1, None).matmul(&v))
    }
}

fn logits(model: &Model, ids_bn: &Tensor) -> Tensor {
    let positions = model.positions(Tensor::arange(ids_bn.size()[1], (Kind::Int64, ids_bn.device())));
    let mut hidden = model.embed(ids_bn);
    for layer in 0..model.config().num_layers() {
        hidden = model.layer(LayerIdx(layer), &hidden, &positions, &DropoutContext::default(), &mut Dense).unwrap();
    }
    model.logits(&model.final_norm(&hidden))
}

fn loss(logits_bnv: &Tensor, targets_bn: &Tensor) -> Tensor {
    logits_bnv.to_kind(Kind::Double).flatten(0, 1).cross_entropy_for_logits(&targets_bn.flatten(0, 1))
}

fn furthest(found: &Tensor, expected: &Tensor) -> f64 {
    f64::try_from((found - expected).abs().max()).unwrap()
}

struct Golden {
    file: TensorFile,
    ids_bn: Tensor,
    targets_bn: Tensor,
}

impl Golden {
    fn read() -> Self {
        let tokens = load_tensor(&TensorFile::open(&fixture("golden/tokens.safetensors")).unwrap(), "tokens").unwrap();
        let file = TensorFile::open(&fixture("golden/dense-qwen2.safetensors")).unwrap();
        Self { file, ids_bn: tokens.narrow(1, 0, 96), targets_bn: tokens.narrow(1, 1, 96) }
    }

    /// Of a family or a kind of adapter, whose file holds its tokens, and the logits of its first sequence.
    fn of_family(case: &str) -> Self {
        let file = TensorFile::open(&fixture(&format!("families/dense-{case}.safetensors"))).unwrap();
        let [ids_bn, targets_bn] = ["input_ids", "targets"].map(|name| load_tensor(&file, name).unwrap());
        Self { file, ids_bn, targets_bn }
    }

    fn get(&self, name: &str) -> Tensor {
        load_tensor(&self.file, name).unwrap()
    }
}

fn adapted(dtype: Dtype) -> Model {
    let model = Model::load(&fixture("model-qwen2"), dtype, Device::Cpu).unwrap();
    let adapter = Adapter::load_peft(&fixture("adapter-qwen2"), model.config(), model.kind(), Device::Cpu).unwrap();
    model.with_adapter(adapter)
}

/// Logits of the first sequence, the loss of all and its gradients, within the bounds of single precision.
fn assert_family(model: &Model, golden: &Golden) {
    let logits = logits(model, &golden.ids_bn);
    assert!(furthest(&logits.narrow(0, 0, 1), &golden.get("logits_lora")) <= 1e-4);
    let loss = loss(&logits, &golden.targets_bn);
    assert!(furthest(&loss, &golden.get("loss").to_kind(Kind::Double)) <= 1e-5);
    loss.backward();
    assert_gradients(model, golden, 1e-4);
}

/// The fixture's model with an adapter of another kind.
fn assert_adapter_kind(kind: &str) -> Model {
    let base = Model::load(&fixture("model-qwen2"), Dtype::F32, Device::Cpu).unwrap();
    let adapter = fixture(&format!("families/adapter-{kind}"));
    let adapter = Adapter::load_peft(&adapter, base.config(), base.kind(), Device::Cpu).unwrap();
    let model = base.with_adapter(adapter);
    assert_family(&model, &Golden::of_family(kind));
    model
}

#[test]
fn a_model_with_sliding_windows_is_the_other_programs() {
    let golden = Golden::of_family("qwen2-swa");
    let base = Model::load(&fixture("families/model-qwen2-swa"), Dtype::F32, Device::Cpu).unwrap();
    let windows = base.config().layers.iter().map(|layer| layer.attention.rule.window);
    assert_eq!(windows.collect::<Vec<_>>(), [None, Some(24), Some(24)]);
    let logits_base = no_grad(|| logits(&base, &golden.ids_bn.narrow(0, 0, 1)));
    assert!(furthest(&logits_base, &golden.get("logits_base")) <= 1e-4);
    let adapter = fixture("families/adapter-qwen2-swa");
    let adapter = Adapter::load_peft(&adapter, base.config(), base.kind(), Device::Cpu).unwrap();
    assert_family(&base.with_adapter(adapter), &golden);
}

/// The engine with a cache that holds all, in chunks of any size: the same numbers through rolling buffers.
#[test]
fn the_engine_gives_the_other_programs_numbers_through_windows() {
    let golden = Golden::of_family("qwen2-swa");
    let base = Model::load(&fixture("families/model-qwen2-swa"), Dtype::F32, Device::Cpu).unwrap();
    let adapter = fixture("families/adapter-qwen2-swa");
    let adapter = Adapter::load_peft(&adapter, base.config(), base.kind(), Device::Cpu).unwrap();
    let model = base.with_adapter(adapter);
    let sequence = |sample: i64| {
        let row = |of: &Tensor| Vec::<i64>::try_from(of.get(sample)).unwrap();
        let inputs = row(&golden.ids_bn).into_iter().map(|id| id as u32).collect();
        Sequence { sample: sample as u64, inputs, targets: Targets::NextToken(row(&golden.targets_bn)), initial: None }
    };
    let batch = Batch { sequences: vec![sequence(0), sequence(1)] };
    for chunk in [1, 7, 24, 96] {
        let (kv, grad) = recipes(&Case { policy: "dense", cache: &[96], chunk, ..PLAIN });
        let engine = Engine::new(Settings::new(model.config(), &kv, &grad).unwrap(), Box::new(NextToken));
        let context = MicroBatchContext { weight: 1.0 / 192.0, dropout: None, chunk_sizes: None };
        let made = engine.gradients(&model, &batch, context, &mut Silent).unwrap();
        let loss = made.losses.iter().map(|loss| loss.loss_sum).sum::<f64>() / 192.0;
        assert!((loss - f64::try_from(golden.get("loss")).unwrap()).abs() <= 1e-5, "chunks of {chunk}: {loss}");
        for (name, found) in &made.gradients {
            let expected = golden.get(&format!("grad.{name}"));
            let error = f64::try_from((found - &expected).norm() / expected.norm()).unwrap();
            assert!(error <= 1e-4, "chunks of {chunk}, {name}: {error:e}");
        }
    }
}

#[test]
fn rslora_scales_by_the_root_of_the_rank() {
    assert_adapter_kind("qwen2-rslora");
}

#[test]
fn every_linear_has_the_rank_and_the_alpha_of_its_pattern_and_the_excluded_have_none() {
    let model = assert_adapter_kind("qwen2-patterns");
    let parameters: BTreeMap<String, Tensor> = model.parameters().into_iter().collect();
    let rank = |linear: &str| {
        let a = parameters.get(&format!("base_model.model.model.layers.{linear}.lora_A.weight"));
        a.map(|a_ri| a_ri.size()[0])
    };
    assert_eq!(["0.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj"].map(rank), [Some(8), Some(6), Some(4)]);
    assert_eq!(["0.mlp.down_proj", "1.mlp.down_proj", "1.self_attn.o_proj"].map(rank), [Some(4), Some(2), None]);
}

/// The gradients of all that is trained, each of which must be among the other program's, and none of those left over.
fn assert_gradients(model: &Model, golden: &Golden, tolerance: f64) {
    let parameters = model.adapter().unwrap().parameters();
    let theirs = golden.file.names().into_iter().filter(|name| name.starts_with("grad.")).count();
    assert_eq!(parameters.len(), theirs);
    for (name, parameter) in parameters {
        let (found, expected) =
            (parameter.grad().to_kind(Kind::Double), golden.get(&format!("grad.{name}")).to_kind(Kind::Double));
        let error = f64::try_from((&found - &expected).norm() / expected.norm()).unwrap();
        assert!(error <= tolerance, "{name}: {error:e}");
    }
}

#[test]
fn logits_loss_and_gradients_are_the_other_programs() {
    let golden = Golden::read();
    let base = Model::load(&fixture("model-qwen2"), Dtype::F32, Device::Cpu).unwrap();
    let logits_base = no_grad(|| logits(&base, &golden.ids_bn));
    assert!(furthest(&logits_base, &golden.get("logits_base")) <= 1e-4);

    let model = adapted(Dtype::F32);
    let logits_lora = logits(&model, &golden.ids_bn);
    assert!(furthest(&logits_lora, &golden.get("logits_lora")) <= 1e-4);
    let loss = loss(&logits_lora, &golden.targets_bn);
    assert!(furthest(&loss, &golden.get("loss").to_kind(Kind::Double)) <= 1e-5);
    loss.backward();
    assert_gradients(&model, &golden, 1e-4);
}

#[test]
fn in_f64_the_same_numbers_come_out() {
    let golden = Golden::read();
    let model = adapted(Dtype::F64);
    assert!(model.adapter().unwrap().parameters().iter().all(|(_, matrix)| matrix.kind() == Kind::Double));
    loss(&logits(&model, &golden.ids_bn), &golden.targets_bn).backward();
    assert_gradients(&model, &golden, 1e-5);
}

#[test]
fn in_bf16_the_matrices_stay_f32_and_the_loss_is_near() {
    let golden = Golden::read();
    let model = adapted(Dtype::Bf16);
    let logits = logits(&model, &golden.ids_bn);
    assert_eq!(logits.kind(), Kind::BFloat16);
    let loss = loss(&logits, &golden.targets_bn);
    assert!(furthest(&loss, &golden.get("loss").to_kind(Kind::Double)) < 0.1);
    loss.backward();
    for (name, matrix) in model.adapter().unwrap().parameters() {
        assert_eq!((matrix.kind(), matrix.grad().kind()), (Kind::Float, Kind::Float), "{name}");
    }
}
