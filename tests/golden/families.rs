//! Model families as another program computed them: logits, loss and gradients, through plain attention and through the engine.

use kvtune::cache::ReplayLog;
use kvtune::data::{Batch, Sequence, Targets};
use kvtune::engine::{Engine, MicroBatchContext, NoObserver, Settings};
use kvtune::generation::{GenerationRules, PromptLimits};
use kvtune::head::Head;
use kvtune::model::{Adapter, Model, ModelConfig, RopeSpec};
use kvtune::recipe::{Dtype, LossMean, Recipe};
use kvtune::train;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor, no_grad};

use super::dense::{Golden, assert_family, fixture, furthest, logits};
use super::fixture;
use crate::support;
use crate::support::case::{Case, PLAIN};
use crate::support::recipes;

/// The names of a case's numbers, of its model and of its adapter, and the windows of its layers.
struct FamilyCase {
    numbers: &'static str,
    model: &'static str,
    adapter: &'static str,
    windows: &'static [Option<usize>],
}

const fn case(name: &'static str) -> FamilyCase {
    FamilyCase { numbers: name, model: name, adapter: name, windows: &[None; 2] }
}

const CASES: &[FamilyCase] = &[
    case("llama2"),
    case("llama31"),
    case("llama-linear"),
    case("llama-dynamic"),
    FamilyCase { numbers: "llama-dynamic-short", ..case("llama-dynamic") },
    FamilyCase { windows: &[Some(24); 2], ..case("mistral") },
    FamilyCase { windows: &[None, Some(24), Some(24)], ..case("qwen2-swa") },
    case("qwen2-yarn"),
    case("seed-oss"),
    FamilyCase { windows: &[None; 3], ..case("smollm3") },
    FamilyCase { windows: &[Some(24), None, Some(24)], ..case("gemma2") },
    FamilyCase { windows: &[Some(24), Some(24), None], ..case("gemma3") },
    case("mixtral"),
    FamilyCase { model: "mixtral", ..case("mixtral-v4") },
    case("granite"),
    case("olmo2"),
    FamilyCase { windows: &[Some(24), Some(24), None], ..case("olmo3") },
    case("phi3"),
    FamilyCase { numbers: "phi3-short", ..case("phi3") },
    case("ministral3"),
    case("qwen3-moe"),
    FamilyCase { model: "qwen3-moe", ..case("qwen3-moe-v4") },
    FamilyCase { windows: &[Some(24), None], ..case("gpt-oss") },
    case("glm4-moe"),
];

/// The model without its adapter.
fn base(name: &str) -> Model {
    support::on_one_thread();
    Model::load(&fixture(&format!("families/model-{name}")), Dtype::F32, Device::Cpu).unwrap()
}

fn adapted(case: &FamilyCase) -> Model {
    let base = base(case.model);
    let adapter = fixture(&format!("families/adapter-{}", case.adapter));
    let adapter = Adapter::load_peft(&adapter, base.config(), base.kind(), Device::Cpu).unwrap();
    base.with_adapter(adapter)
}

/// The rotation of the layers with a window or of those without.
fn rotation(model: &ModelConfig, slides: bool) -> &RopeSpec {
    let attention = model.layers.iter().map(|layer| &layer.attention);
    let mut ropes = attention.filter(|attention| attention.rule.window.is_some() == slides).filter_map(|of| of.rope.as_ref());
    let first = ropes.next().unwrap();
    assert!(ropes.all(|rope| rope == first));
    first
}

/// The greatest relative difference of frequencies, and that of the factor.
fn assert_frequencies(rope: &RopeSpec, length: usize, (inverse_f, attention_factor): (&Tensor, f64)) {
    let found = rope.frequencies(&[length], Kind::Float, Device::Cpu);
    let error = f64::try_from(((found.inverse_bf.get(0) - inverse_f) / inverse_f).abs().max()).unwrap();
    println!("frequencies {error:.1e}");
    assert!(error <= 1e-6, "{rope:?}: {error:e}");
    let found = found.attention_factor_b.map_or(1.0, |of_b| f64::try_from(of_b.get(0)).unwrap());
    assert!((found / attention_factor - 1.0).abs() <= 1e-6, "{found}");
}

#[test]
fn through_plain_attention() {
    for case in CASES {
        let (golden, base) = (Golden::of_family(case.numbers), base(case.model));
        let windows: Vec<_> = base.config().layers.iter().map(|layer| layer.attention.rule.window).collect();
        assert_eq!(windows, case.windows);
        let all_slide = windows.iter().all(Option::is_some);
        for (rope, slides) in [("rope", all_slide), ("rope_local", true)] {
            if golden.file.contains(&format!("{rope}.inv_freq")) {
                let factor = f64::try_from(golden.get(&format!("{rope}.attention_factor")).get(0)).unwrap();
                let inverse_f = golden.get(&format!("{rope}.inv_freq"));
                assert_frequencies(rotation(base.config(), slides), golden.ids_bn.size()[1] as usize, (&inverse_f, factor));
            }
        }
        // Layers that slide come first, and have a rotation of their own.
        for (layer_type, rope) in ["sliding_attention", "full_attention"].iter().zip(base.config().rotations()) {
            let [frequencies, factor] = ["inv_freq", "attention_factor"].map(|of| format!("rope.{of}.{layer_type}"));
            if golden.file.contains(&frequencies) {
                let factor = f64::try_from(golden.get(&factor).get(0)).unwrap();
                assert_frequencies(rope, golden.ids_bn.size()[1] as usize, (&golden.get(&frequencies), factor));
            }
        }
        let has_base = golden.file.contains("logits_base");
        let of_base = || no_grad(|| golden.furthest_logits(&logits(&base, &golden.ids_bn.narrow(0, 0, 1)), "logits_base"));
        let of_base = if has_base { of_base() } else { 0.0 };
        assert!(of_base <= 1e-4, "{}: {of_base:e}", case.numbers);
        let [of_logits, of_loss, of_gradients] = assert_family(&adapted(case), &golden);
        let name = case.numbers;
        println!("{name}: base {of_base:.1e}, logits {of_logits:.1e}, loss {of_loss:.1e}, gradients {of_gradients:.1e}");
    }
}

/// A classification: the scores at the last token of each sequence, without what pads it.
#[test]
fn classes_by_a_matrix_of_their_own() {
    let numbers = Golden::of_classes("qwen2-seqcls");
    support::on_one_thread();
    let base = Model::load(&fixture("model-qwen2"), Dtype::F32, Device::Cpu).unwrap().with_classes(Some(4));
    let adapter = fixture("families/adapter-qwen2-seqcls");
    let adapter = Adapter::load_peft(&adapter, base.config(), base.kind(), Device::Cpu).unwrap();
    let model = base.with_adapter(adapter);
    let lengths = Vec::<i64>::try_from(numbers.get("attention_mask").sum_dim_intlist(&[1i64][..], false, Kind::Int64)).unwrap();
    let labels = Vec::<i64>::try_from(numbers.get("labels")).unwrap();
    let sequence = |(row, (&len, &class)): (usize, (&i64, &i64))| {
        let ids = Vec::<i64>::try_from(numbers.ids_bn.get(row as i64).narrow(0, 0, len)).unwrap();
        let inputs = ids.into_iter().map(|id| id as u32).collect();
        Sequence { sample: row as u64, inputs, targets: Targets::Class(class as usize), initial: None }
    };
    let batch = Batch { sequences: lengths.iter().zip(&labels).enumerate().map(sequence).collect() };
    for chunk in [1, 7, 96] {
        let (kv, grad) = recipes(&Case { policy: "dense", cache: &[96], chunk, ..PLAIN });
        let engine = Engine::new(Settings::new(model.config(), &kv, &grad).unwrap(), Head::ClassScores);
        let (scores_btk, _) = fixture::logits(&engine, &model, &batch);
        let last = |row: usize| scores_btk.get(row as i64).get(lengths[row] - 1);
        let of_logits = furthest(&Tensor::stack(&[last(0), last(1)], 0), &numbers.get("logits"));
        let context =
            MicroBatchContext { weight: 0.5, loss_mean: LossMean::Tokens, router_weight: 0.0, dropout: None, chunk_sizes: None };
        let made = engine.gradients(&model, &batch, context, &mut NoObserver).unwrap();
        let loss = made.losses.iter().map(|of| of.loss_sum).sum::<f64>() / 2.0;
        let of_loss = (loss - f64::try_from(numbers.get("loss").get(0)).unwrap()).abs();
        assert_eq!(made.gradients.len(), 43);
        let mut worst = 0.0f64;
        for (name, found) in &made.gradients {
            let expected = numbers.get(&format!("grad.{name}"));
            worst = worst.max(f64::try_from((found - &expected).norm() / expected.norm()).unwrap());
        }
        println!("seqcls, chunks of {chunk}: logits {of_logits:.1e}, loss {of_loss:.1e}, gradients {worst:.1e}");
        assert!(of_logits <= 1e-4 && of_loss <= 1e-5 && worst <= 1e-4, "{of_logits:e} {of_loss:e} {worst:e}");
    }
}

fn sequence(golden: &Golden, row: i64) -> Sequence {
    let of = |x: &Tensor| Vec::<i64>::try_from(x.get(row)).unwrap();
    let inputs = of(&golden.ids_bn).into_iter().map(|id| id as u32).collect();
    Sequence { sample: row as u64, inputs, targets: Targets::NextToken(of(&golden.targets_bn)), initial: None }
}

/// With a cache that holds all.
fn engine(model: &Model, chunk: usize) -> Engine {
    let (kv, grad) = recipes(&Case { policy: "dense", cache: &[96], chunk, ..PLAIN });
    Engine::new(Settings::new(model.config(), &kv, &grad).unwrap(), Head::NextToken)
}

/// A layer of each kind: plain, with a window, with two rotations, with experts of either kind, with attention sinks. In f64 every family is proved token
/// by token (`every_family_with_every_kind_of_policy`).
const ONE_BY_ONE: [&str; 6] = ["llama2", "qwen2-swa", "gemma3", "mixtral", "gpt-oss", "glm4-moe"];

#[test]
fn through_the_engine_in_chunks_of_any_size() {
    for case in CASES {
        let (golden, model, name) = (Golden::of_family(case.numbers), adapted(case), case.numbers);
        let batch = Batch { sequences: vec![sequence(&golden, 0), sequence(&golden, 1)] };
        let targets = golden.targets_bn.numel() as f64;
        let mut worst = [0.0f64; 3];
        let of_one_token = ONE_BY_ONE.contains(&name).then_some(1);
        for chunk in [7, 24, 96].into_iter().chain(of_one_token) {
            let engine = engine(&model, chunk);
            let of_logits = golden.furthest_logits(&fixture::logits(&engine, &model, &batch).0, "logits_lora");
            let context = MicroBatchContext {
                weight: 1.0 / targets,
                loss_mean: LossMean::Tokens,
                router_weight: 0.0,
                dropout: None,
                chunk_sizes: None,
            };
            let made = engine.gradients(&model, &batch, context, &mut NoObserver).unwrap();
            assert_routing(&golden, &made.log);
            let loss = made.losses.iter().map(|loss| loss.loss_sum).sum::<f64>() / targets;
            let of_loss = (loss - f64::try_from(golden.get("loss")).unwrap()).abs();
            let error = |(name, found): (&String, &Tensor)| {
                let expected = golden.get(&format!("grad.{name}"));
                f64::try_from((found - &expected).norm() / expected.norm()).unwrap()
            };
            let of_gradients = made.gradients.iter().map(error).fold(0.0, f64::max);
            let errors = [of_logits, of_loss, of_gradients];
            assert!(of_logits <= 1e-4 && of_loss <= 1e-5 && of_gradients <= 1e-4, "{name}, chunks of {chunk}: {errors:?}");
            worst.iter_mut().zip(errors).for_each(|(worst, error)| *worst = worst.max(error));
        }
        println!("{name}: logits {:.1e}, loss {:.1e}, gradients {:.1e}", worst[0], worst[1], worst[2]);
    }
}

/// The routers' load-balance loss is one of all tokens and layers, in chunks of any size; pads do not count.
#[test]
fn routers_are_balanced_over_the_whole_batch() {
    let (golden, model) = (Golden::of_family("mixtral-aux"), adapted(&case("mixtral")));
    let number = |name: &str| f64::try_from(golden.get(name).to_kind(Kind::Double).get(0)).unwrap();
    let (coef, targets) = (number("coef"), golden.targets_bn.numel() as f64);
    let whole = Batch { sequences: vec![sequence(&golden, 0), sequence(&golden, 1)] };
    let mut cut = whole.clone();
    for (row, sequence) in cut.sequences.iter_mut().enumerate() {
        let tokens = golden.get("attention_mask").get(row as i64).sum(Kind::Int64).int64_value(&[]) as usize;
        sequence.inputs.truncate(tokens);
        sequence.targets = Targets::NextToken(vec![0; tokens]);
    }
    cut.sequences.sort_by_key(|sequence| std::cmp::Reverse(sequence.inputs.len()));
    for chunk in [1, 7, 24, 96] {
        let engine = engine(&model, chunk);
        let context = MicroBatchContext {
            weight: 1.0 / targets,
            loss_mean: LossMean::Tokens,
            router_weight: coef,
            dropout: None,
            chunk_sizes: None,
        };
        let made = engine.gradients(&model, &whole, context, &mut NoObserver).unwrap();
        let loss = made.losses.iter().map(|loss| loss.loss_sum).sum::<f64>() / targets;
        let of_routers = made.router_loss.unwrap();
        assert!((of_routers - number("aux_loss")).abs() <= 1e-5, "{of_routers}");
        assert!((loss + coef * of_routers - number("loss")).abs() <= 1e-5, "{loss}");
        for (name, found) in &made.gradients {
            let expected = golden.get(&format!("grad.{name}"));
            let error = f64::try_from((found - &expected).norm() / expected.norm()).unwrap();
            assert!(error <= 1e-4, "chunks of {chunk}, {name}: {error:e}");
        }
        let of_cut = engine.gradients(&model, &cut, context, &mut NoObserver).unwrap().router_loss.unwrap();
        assert!((of_cut - number("aux_loss_masked")).abs() <= 1e-5, "{of_cut}, expected {}", number("aux_loss_masked"));
    }
}

/// Where the other program has written down which experts its tokens went to, ours went to the same.
fn assert_routing(golden: &Golden, log: &ReplayLog) {
    for (layer, log) in log.layers.iter().enumerate() {
        let name = format!("router_lora.layer{layer}.index");
        if !golden.file.contains(&name) {
            continue;
        }
        let of_chunk = |index: usize| log.routing(index).map(|routing| routing.chosen(Device::Cpu));
        let chosen_bnk = Tensor::cat(&(0..).map_while(of_chunk).collect::<Vec<_>>(), 1);
        let sorted = |experts: Tensor| experts.flatten(0, -2).sort(-1, false).0;
        assert_eq!(sorted(chosen_bnk), sorted(golden.get(&name)), "layer {layer}");
    }
}

/// `dynamic` has no end, also where data are opened and texts are written: the case has three times the model's positions.
#[test]
fn texts_longer_than_a_dynamic_scaling_is_made_for() {
    let (golden, model) = (Golden::of_family("llama-dynamic"), adapted(&case("llama-dynamic")));
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<i64> = Vec::try_from(golden.ids_bn.get(0)).unwrap();
    // The last one is a target and nothing else.
    let row = [&ids[..], &[1]].concat();
    std::fs::write(dir.path().join("t.jsonl"), format!("{{\"input_ids\": {row:?}, \"labels\": {row:?}}}\n")).unwrap();
    let open = |length: &str| {
        let path = fixture("families/model-llama-dynamic");
        let text =
            format!("model.path = {path:?}\n[data]\nformat = 'tokens'\ntrain = 't.jsonl'\nvalidation_fraction = 0\n{length}");
        let recipe = Recipe::parse(text, &dir.path().join("r.toml"), &[]).unwrap().recipe;
        train::check_data(&recipe, model.config()).unwrap();
        train::open_data(&recipe, model.config(), None)
    };
    assert_eq!((ids.len(), model.config().trained_positions()), (96, 64));
    assert!(open("").is_err(), "a recipe without a length keeps to what the model is made for");
    let batch = open("max_seq_length = 97").unwrap().train.batch(&[0]).unwrap();
    let (logits, _) = fixture::logits(&engine(&model, 7), &model, &batch);
    assert_eq!(logits.size()[1], 96);
    assert!(golden.furthest_logits(&logits, "logits_lora") <= 1e-4);
    let limits = PromptLimits::of(model.config(), engine(&model, 7).settings(), true);
    let prompt: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
    assert_eq!(
        limits.check(&prompt[..91], &GenerationRules { max_new_tokens: Some(5), ..GenerationRules::default() }).unwrap(),
        5
    );
}

/// The other program ran them one by one: with a rotation that depends on the length, neither changes beside the other.
#[test]
fn a_long_sequence_and_a_short_one_in_one_batch() {
    let (long, short) = (Golden::of_family("llama-dynamic"), Golden::of_family("llama-dynamic-short"));
    let model = adapted(&case("llama-dynamic"));
    for chunk in [1, 7, 40] {
        let batch = Batch { sequences: vec![sequence(&long, 0), sequence(&short, 0)] };
        let (logits, _) = fixture::logits(&engine(&model, chunk), &model, &batch);
        assert!(long.furthest_logits(&logits, "logits_lora") <= 1e-4);
        let of_short = logits.narrow(0, 1, 1).narrow(1, 0, short.ids_bn.size()[1]);
        assert!(short.furthest_logits(&of_short, "logits_lora") <= 1e-4);
        assert!(
            furthest(&of_short, &logits.narrow(0, 0, 1).narrow(1, 0, of_short.size()[1])) > 0.1,
            "the same tokens, turned otherwise"
        );
    }
}

/// Of families with heads of 16 channels (or as said), in keys that a Llama may have, too.
#[test]
fn frequencies_of_further_kinds() {
    let phi3 = json!({"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_theta": 10000.0, "rope_scaling": {
        "type": "longrope", "long_factor": [1.1, 1.7, 3.5, 6.5, 10.7, 16.1], "short_factor": [1.0, 1.02, 1.08, 1.18, 1.32, 1.5],
        "partial_rotary_factor": 0.75,
    }});
    let yarn = |max_positions: usize, more: Value| {
        let mut rope = json!({"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32});
        rope.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"max_position_embeddings": max_positions, "rope_parameters": rope})
    };
    let mut wide = yarn(512, json!({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e6}));
    wide["head_dim"] = json!(24);
    let cases: [(Value, usize, f64, &[f32]); 6] = [
        (phi3.clone(), 96, 1.183_216, &[0.909_090_9, 0.126_731_44, 0.013_261_68, 0.001_538_461_5, 0.000_201_349, 2.882_974_7e-5]),
        (phi3, 32, 1.183_216, &[1.0, 0.211_219_09, 0.042_977_67, 0.008_474_577, 0.001_632_147_1, 0.000_309_439_32]),
        (
            yarn(256, json!({"factor": 8.0, "rope_theta": 150_000.0, "truncate": false})),
            96,
            1.207_944_2,
            &[1.0, 0.044_905_394, 0.006_351_659, 0.001_431_778_3, 0.000_322_748_62, 7.275_335e-5, 1.639_991_4e-5, 3.696_835_9e-6],
        ),
        (
            wide,
            96,
            1.0,
            &[
                1.0,
                0.167_996,
                0.006_25,
                0.001_976_423_7,
                0.000_624_999_9,
                0.000_197_642_38,
                6.25e-5,
                1.976_424e-5,
                6.249_998e-6,
                1.976_423_4e-6,
                6.250_002e-7,
                1.976_423_1e-7,
            ],
        ),
        (
            yarn(128, json!({"factor": 4.0, "rope_theta": 10000.0, "attention_factor": 1.138_629_436_111_989})),
            96,
            1.138_629_4,
            &[1.0, 0.197_642_36, 0.025, 0.007_905_695, 0.002_5, 0.000_790_569_47, 0.000_25, 7.905_695e-5],
        ),
        (
            json!({"max_position_embeddings": 4096, "partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e6}}),
            96,
            1.0,
            &[1.0, 0.031_622_78, 0.001, 3.162_277_4e-5],
        ),
    ];
    for (keys, length, attention_factor, inverse_f) in cases {
        let mut object = json!({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "intermediate_size": 8, "vocab_size": 8});
        object.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let config = ModelConfig::from_object(object.as_object().unwrap()).unwrap();
        assert_frequencies(rotation(&config, false), length, (&Tensor::from_slice(inverse_f), attention_factor));
    }
}
