//! Logits, loss and gradients of a model with its adapter, through plain attention, as another program computed them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvtune::files::TensorFile;
use kvtune::model::{Adapter, Attend, DropoutContext, Model, Qkv};
use kvtune::recipe::Dtype;
use kvtune::store::load_tensor;
use kvtune::units::{Fault, LayerIdx};
use tch::{Device, Kind, Tensor, no_grad};

use crate::support;

pub(super) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Causal softmax attention over the whole sequence, or what a window shows of it, with nothing clever about it.
struct Dense;

impl Attend for Dense {
    fn attend(&mut self, _: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault> {
        let groups = qkv.q_bhnd.size()[1] / qkv.own.k.size()[1];
        let by_head = |x: &Tensor| x.repeat_interleave_self_int(groups, 1, None);
        let (k, v) = (by_head(&qkv.own.k), by_head(&qkv.own.v));
        let score = qkv.q_bhnd.matmul(&k.transpose(2, 3)) * qkv.rule.scale;
        let score = qkv.rule.soft_cap.map_or_else(|| score.shallow_clone(), |cap| (&score / cap).tanh() * cap);
        let length = score.size()[3];
        let ones = || Tensor::ones([length, length], (Kind::Bool, score.device()));
        let future = ones().triu(1);
        let unseen = match qkv.rule.window {
            Some(window) => future.logical_or(&ones().tril(-(window as i64))),
            None => future,
        };
        let score = score.masked_fill(&unseen, f64::NEG_INFINITY);
        let Some(sink_logit_h) = qkv.sink_logit_h else { return Ok(score.softmax(-1, None).matmul(&v)) };
        let sink = sink_logit_h.view([1, -1, 1, 1]).expand([score.size()[0], -1, length, 1], false);
        Ok(Tensor::cat(&[score, sink], -1).softmax(-1, None).narrow(-1, 0, length).matmul(&v))
    }
}

/// # Shapes
/// `(B, T)` int64 in, `(B, T, V)` out.
pub(super) fn logits(model: &Model, ids_bt: &Tensor) -> Tensor {
    let (sequences, tokens) = ids_bt.size2().unwrap();
    let frequencies = model.frequencies(&vec![tokens as usize; sequences as usize]);
    let positions = model.positions(Tensor::arange(tokens, (Kind::Int64, ids_bt.device())), &frequencies);
    let mut hidden = model.embed(ids_bt);
    for layer in 0..model.config().num_layers() {
        hidden = model.layer(LayerIdx(layer), &hidden, &positions, &DropoutContext::default(), &mut Dense).unwrap();
    }
    model.logits(&model.final_norm(&hidden))
}

pub(super) fn loss(logits_bnv: &Tensor, targets_bn: &Tensor) -> Tensor {
    logits_bnv.to_kind(Kind::Double).flatten(0, 1).cross_entropy_for_logits(&targets_bn.flatten(0, 1))
}

pub(super) fn furthest(found: &Tensor, expected: &Tensor) -> f64 {
    f64::try_from((found - expected).abs().max()).unwrap()
}

pub(super) struct Golden {
    pub(super) file: TensorFile,
    pub(super) ids_bn: Tensor,
    pub(super) targets_bn: Tensor,
}

impl Golden {
    fn read() -> Self {
        let tokens = load_tensor(&TensorFile::open(&fixture("golden/tokens.safetensors")).unwrap(), "tokens").unwrap();
        let file = TensorFile::open(&fixture("golden/dense-qwen2.safetensors")).unwrap();
        Self { file, ids_bn: tokens.narrow(1, 0, 96), targets_bn: tokens.narrow(1, 1, 96) }
    }

    /// Of a family or a kind of adapter, whose file holds its tokens, and logits of its first sequence.
    pub(super) fn of_family(case: &str) -> Self {
        Self::of_model(&fixture(&format!("families/dense-{case}.safetensors")))
    }

    /// Of a file that holds its tokens.
    pub(super) fn of_model(path: &Path) -> Self {
        let file = TensorFile::open(path).unwrap();
        let [ids_bn, targets_bn] = ["input_ids", "targets"].map(|name| load_tensor(&file, name).unwrap());
        Self { file, ids_bn, targets_bn }
    }

    /// Of a classification, whose file has classes for targets.
    pub(super) fn of_classes(case: &str) -> Self {
        let file = TensorFile::open(&fixture(&format!("families/{case}.safetensors"))).unwrap();
        let [ids_bn, targets_bn] = ["input_ids", "labels"].map(|name| load_tensor(&file, name).unwrap());
        Self { file, ids_bn, targets_bn }
    }

    /// How far the first sequence's logits `(B, T, V)` are from those of the file, which may be of every so manieth position: the last of
    /// each group.
    pub(super) fn furthest_logits(&self, logits_btv: &Tensor, name: &str) -> f64 {
        let expected = self.get(name);
        let step = logits_btv.size()[1] / expected.size()[1];
        furthest(&logits_btv.narrow(0, 0, 1).slice(1, step - 1, None, step), &expected)
    }

    pub(super) fn get(&self, name: &str) -> Tensor {
        load_tensor(&self.file, name).unwrap()
    }
}

fn adapted(dtype: Dtype) -> Model {
    support::on_one_thread();
    let model = Model::load(&fixture("model-qwen2"), dtype, Device::Cpu).unwrap();
    let adapter = Adapter::load_peft(&fixture("adapter-qwen2"), model.config(), model.kind(), Device::Cpu).unwrap();
    model.with_adapter(adapter)
}

/// Logits of the first sequence, the loss of all and its gradients, within the bounds of single precision; how far they were at most.
pub(super) fn assert_family(model: &Model, golden: &Golden) -> [f64; 3] {
    let logits = logits(model, &golden.ids_bn);
    let of_logits = golden.furthest_logits(&logits, "logits_lora");
    let loss = loss(&logits, &golden.targets_bn);
    let of_loss = furthest(&loss, &golden.get("loss").to_kind(Kind::Double));
    assert!(of_logits <= 1e-4 && of_loss <= 1e-5, "logits {of_logits:e}, loss {of_loss:e}");
    loss.backward();
    [of_logits, of_loss, assert_gradients(model, golden, 1e-4)]
}

/// The fixture's model with an adapter of another kind.
fn assert_adapter_kind(kind: &str) -> Model {
    support::on_one_thread();
    let base = Model::load(&fixture("model-qwen2"), Dtype::F32, Device::Cpu).unwrap();
    let adapter = fixture(&format!("families/adapter-{kind}"));
    let adapter = Adapter::load_peft(&adapter, base.config(), base.kind(), Device::Cpu).unwrap();
    let model = base.with_adapter(adapter);
    let [of_logits, of_loss, of_gradients] = assert_family(&model, &Golden::of_family(kind));
    println!("{kind}: logits {of_logits:.1e}, loss {of_loss:.1e}, gradients {of_gradients:.1e}");
    model
}

/// The names of what a model trains, without what all of them begin with.
fn trained(model: &Model) -> Vec<String> {
    let short = |name: &str| name.strip_prefix("base_model.model.model.layers.").unwrap().to_owned();
    model.parameters().iter().map(|(name, _)| short(name)).collect()
}

#[test]
fn an_expression_targets_the_linears_whose_whole_names_it_matches() {
    let names = trained(&assert_adapter_kind("qwen2-regex"));
    assert!(names.iter().all(|name| name.starts_with("0.") || name.starts_with("2.")) && names.len() == 12, "{names:?}");
}

#[test]
fn some_layers_alone_have_an_adapter() {
    let names = trained(&assert_adapter_kind("qwen2-layers"));
    assert!(names.iter().all(|name| name.starts_with("1.")) && names.len() == 14, "{names:?}");
}

#[test]
fn the_bias_of_b_is_scaled_as_the_rest_of_the_addition() {
    let names = trained(&assert_adapter_kind("qwen2-lorabias"));
    assert_eq!(names.iter().filter(|name| name.ends_with(".lora_B.bias")).count(), 21);
}

#[test]
fn the_biases_of_targets_are_trained_where_they_have_some() {
    let names = trained(&assert_adapter_kind("qwen2-biasloraonly"));
    assert_eq!(names.iter().filter(|name| name.ends_with("_proj.base_layer.bias")).count(), 6);
}

#[test]
fn dora_trains_the_lengths_of_rows_by_themselves() {
    let names = trained(&assert_adapter_kind("qwen2-dora"));
    assert_eq!(names.iter().filter(|name| name.ends_with(".lora_magnitude_vector")).count(), 21);
}

#[test]
fn whole_copies_and_matrices_beside_the_embedding_are_trained_though_the_model_is_tied() {
    for (kind, name) in [
        ("qwen2-lmhead", "base_model.model.lm_head.weight"),
        ("qwen2-norms", "base_model.model.model.layers.1.input_layernorm.weight"),
        ("qwen2-biasall", "base_model.model.model.layers.1.self_attn.v_proj.bias"),
        ("qwen2-norms", "base_model.model.model.norm.weight"),
        ("qwen2-loralmhead", "base_model.model.lm_head.lora_A.weight"),
        ("qwen2-doralmhead", "base_model.model.lm_head.lora_magnitude_vector"),
        ("qwen2-embed", "base_model.model.model.embed_tokens.weight"),
        ("qwen2-loraembed", "base_model.model.model.embed_tokens.lora_embedding_A"),
    ] {
        let model = assert_adapter_kind(kind);
        assert!(model.parameters().iter().any(|(own, _)| own == name), "{name}");
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

/// The gradients of all that is trained, each of which must be among the other program's, and none of those left over; the largest
/// relative error.
fn assert_gradients(model: &Model, golden: &Golden, tolerance: f64) -> f64 {
    let parameters = model.adapter().unwrap().parameters();
    let theirs = golden.file.names().into_iter().filter(|name| name.starts_with("grad.")).count();
    assert_eq!(parameters.len(), theirs);
    let mut worst: f64 = 0.0;
    for (name, parameter) in parameters {
        let (found, expected) =
            (parameter.grad().to_kind(Kind::Double), golden.get(&format!("grad.{name}")).to_kind(Kind::Double));
        let error = f64::try_from((&found - &expected).norm() / expected.norm()).unwrap();
        assert!(error <= tolerance, "{name}: {error:e}");
        worst = worst.max(error);
    }
    worst
}

#[test]
fn logits_loss_and_gradients_are_the_other_programs() {
    let golden = Golden::read();
    support::on_one_thread();
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
