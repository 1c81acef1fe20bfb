//! The crown: gradients of the tiled engine equal plain autograd through masked dense attention, for every policy and head.

mod answers;
mod buffers;
mod chunkings;
mod families;
mod full;
mod importance;
mod invariance;
mod kept;
mod outputs;
mod ranks;
mod session;
mod shapes;
mod stores;
mod upper_layers;

use kvtune::cache::LayerLog;
use kvtune::recipe::{BufferKind, Chunking, Storage};
use tch::Kind;

use crate::support;
use crate::support::case::{
    Beside, Case, HeadKind, NEAR_BF16, PLAIN, Tail, TargetsAt, Trains, Width, cosine_of_bf16, prove, run,
};
use crate::support::grid::{ACROSS_LAYERS, FURTHER, grid};

/// Four that behave differently: nothing leaves, one choice for all, one for each head, one for each sequence.
const KINDS: [Case; 4] = [
    Case { policy: "dense", cache: &[50], ..PLAIN },
    Case { policy: "lastrec", params: "init_grace_tokens = 4", ..PLAIN },
    Case { policy: "h2o", params: "grace_period = 4", ..PLAIN },
    Case { policy: "tova", ..PLAIN },
];

fn varied<const N: usize>(variations: [fn(Case) -> Case; N]) -> Vec<Case> {
    KINDS.iter().flat_map(|&case| variations.iter().map(move |vary| vary(case))).collect()
}

#[test]
fn every_policy_buffer_head_and_tiling() {
    prove("grid", &grid());
}

#[test]
fn every_variation_of_a_policy() {
    prove("variations", FURTHER);
}

#[test]
fn layers_share_one_budget() {
    let model = support::model(&ACROSS_LAYERS);
    let (_, log) = support::engine(&ACROSS_LAYERS, &model)
        .inspect(&model, &support::batch(&ACROSS_LAYERS), None, &mut |_, _| ())
        .expect("a forward phase");
    let slots = |sequence: usize| -> Vec<usize> {
        let of_layer = |layer: &LayerLog| layer.budgets.as_ref().expect("budgets").shares[sequence].iter().sum();
        log.layers.iter().map(of_layer).collect()
    };
    let (heads, cache_length) = (ACROSS_LAYERS.heads.1, ACROSS_LAYERS.cache[0]);
    for sequence in 0..2 {
        let slots = slots(sequence);
        assert_eq!(slots.iter().sum::<usize>(), slots.len() * heads * cache_length, "{slots:?}");
        assert!(slots.iter().any(|&own| own != heads * cache_length), "one layer has more than another: {slots:?}");
    }
}

#[test]
fn every_ratio_of_query_heads_to_kv_heads() {
    let cases = varied([
        |c| Case { name: "one to one", heads: (4, 4), ..c },
        |c| Case { name: "two to one", heads: (4, 2), ..c },
        |c| Case { name: "one KV head", heads: (4, 1), ..c },
        |c| Case { name: "eight to one", heads: (8, 1), ..c },
    ]);
    prove("GQA", &cases);
}

#[test]
fn every_shape_of_batch() {
    let cases = varied([
        |c| Case { name: "a single sequence", lengths: &[44], ..c },
        |c| Case { name: "sequences of one length", lengths: &[41, 41], ..c },
        |c| Case { name: "a sequence shorter than the cache", lengths: &[44, 11], ..c },
        |c| Case { name: "a sequence of one token", lengths: &[1, 44], ..c },
        |c| Case { name: "a sequence that ends at a chunk's border", lengths: &[23, 44, 28], ..c },
        |c| Case { name: "a sequence that ends with the prefill span", lengths: &[18, 44], ..c },
        |c| Case { name: "a sequence that ends one token after the prefill span", lengths: &[19, 44], ..c },
        |c| Case { name: "nearly equal sequences", lengths: &[44, 43, 42], ..c },
    ]);
    prove("batches", &cases);
}

#[test]
fn every_head() {
    let cases = varied([
        |c| Case { name: "classification", head: HeadKind::Classify, ..c },
        |c| Case {
            name: "classification in one cell",
            head: HeadKind::Classify,
            layers_per_cell: 3,
            width: Width::Chunks(100),
            ..c
        },
        |c| Case { name: "classification of single sequences", head: HeadKind::Classify, lengths: &[44], ..c },
        |c| Case { name: "distilled", head: HeadKind::Distilled, ..c },
        |c| Case { name: "distilled, at last tokens", head: HeadKind::Distilled, targets: TargetsAt::Last(3), ..c },
        |c| Case { name: "distilled, beside a copy of the output", head: HeadKind::Distilled, saved: &["lm_head"], ..whole(&c) },
        |c| Case { name: "scores of classes", head: HeadKind::Score, ..c },
        |c| Case { name: "scores of classes, in one cell", head: HeadKind::Score, ..whole(&c) },
    ]);
    prove("heads", &cases);
}

#[test]
fn targets_anywhere() {
    let cases = varied([
        |c| Case { name: "in the first chunk only", targets: TargetsAt::First(5), ..c },
        |c| Case { name: "in the prefill span only", targets: TargetsAt::First(17), width: Width::Chunks(1), ..c },
        |c| Case { name: "at the end only", targets: TargetsAt::Last(3), ..c },
        |c| Case { name: "in the last chunk only", lengths: &[44, 44], targets: TargetsAt::Last(1), ..c },
        |c| Case { name: "a single one in the middle", targets: TargetsAt::Only(20), ..c },
        |c| Case { name: "a single one at a chunk's first column", targets: TargetsAt::Only(23), width: Width::Chunks(2), ..c },
        |c| Case {
            name: "a single one at the end, in one cell",
            targets: TargetsAt::Only(43),
            layers_per_cell: 3,
            width: Width::Chunks(100),
            ..c
        },
    ]);
    prove("targets", &cases);
}

#[test]
fn sliding_windows() {
    let slides = |window, sliding_layers| Case { window, sliding_layers, ..PLAIN };
    let cases = [
        Case { name: "the middle layer", ..slides(7, &[1]) },
        Case { name: "the upper layers, wider than the cache", ..slides(25, &[1, 2]) },
        Case { name: "the outer layers", ..slides(4, &[0, 2]) },
        Case { name: "every layer", ..slides(9, &[0, 1, 2]) },
        Case { name: "every layer, in one cell", layers_per_cell: 3, width: Width::Chunks(100), ..slides(9, &[0, 1, 2]) },
        Case { name: "every layer, two layers a cell", layers_per_cell: 2, width: Width::Chunks(1), ..slides(6, &[0, 1, 2]) },
        Case { name: "itself alone", untested: 8, ..slides(1, &[0, 1]) },
        Case { name: "as wide as a chunk", ..slides(5, &[0, 2]) },
        Case { name: "wider than all", ..slides(100, &[1]) },
        Case { name: "one token a chunk", chunk: 1, lengths: &[24, 19], cache: &[12], ..slides(7, &[0, 2]) },
        Case {
            name: "one token a chunk, itself alone",
            untested: 8,
            chunk: 1,
            lengths: &[24, 19],
            cache: &[12],
            ..slides(1, &[0, 2])
        },
        Case { name: "chunks wider than the window", chunk: 11, ..slides(4, &[0, 1]) },
        Case { name: "chunks of drawn sizes", is_randomized: true, ..slides(7, &[0, 2]) },
        Case { name: "caches of different length", cache: &[22, 18, 30], chunking: Chunking::Reference, ..slides(7, &[1]) },
        Case { name: "one by one at the end", tail: Tail::OneByOne, targets: TargetsAt::Last(9), ..slides(7, &[0, 2]) },
        Case { name: "beside all that there was", policy: "dense", storage: Storage::Growing, ..slides(7, &[0, 2]) },
        Case { name: "beside pages", policy: "dense", storage: Storage::Paged, ..slides(7, &[0, 2]) },
        Case {
            name: "beside shares by head",
            policy: "adakv",
            params: "floor = 0.5\npolicy.snapkv = { window_size = 2 }",
            ..slides(7, &[0, 2])
        },
        Case { name: "beside the last", policy: "lastrec", ..slides(7, &[0, 2]) },
        Case { name: "quantised", buffer: BufferKind::Int8, ..slides(7, &[0, 2]) },
        Case { name: "waiting on the host", is_offloaded: true, layers_per_cell: 3, ..slides(7, &[0, 1]) },
        Case { name: "all weights", trains: Trains::AllTied, ..slides(7, &[1, 2]) },
        Case { name: "classification", head: HeadKind::Classify, ..slides(7, &[0, 1, 2]) },
    ];
    prove("windows", &cases);
}

#[test]
fn adapters_on_some_layers() {
    let cases = varied([
        |c| Case { name: "the MLP", lora: &["gate_proj", "up_proj", "down_proj"], ..c },
        |c| Case {
            name: "the MLP, in one cell",
            lora: &["gate_proj", "up_proj", "down_proj"],
            layers_per_cell: 3,
            width: Width::Chunks(100),
            ..c
        },
        |c| Case { name: "o_proj", lora: &["o_proj"], ..c },
        |c| Case { name: "o_proj, two layers a cell", lora: &["o_proj"], layers_per_cell: 2, ..c },
        |c| Case { name: "v_proj", lora: &["v_proj"], ..c },
        |c| Case { name: "v_proj, one chunk a cell", lora: &["v_proj"], width: Width::Chunks(1), ..c },
        |c| Case { name: "q_proj", lora: &["q_proj"], ..c },
        |c| Case { name: "k_proj", lora: &["k_proj"], ..c },
    ]);
    prove("adapters", &cases);
}

#[test]
fn adapters_that_differ_by_linear() {
    let cases = varied([
        |c| Case { name: "rsLoRA", is_rslora: true, ..c },
        |c| Case { name: "rsLoRA, in one cell, with dropout", is_rslora: true, dropout: 0.1, ..whole(&c) },
        |c| Case { name: "ranks", ranks: &[("q_proj", 7), (r"layers\.(0|2)\.mlp\..*", 1), ("layers.1.*", 5)], ..c },
        |c| Case { name: "ranks, in one cell", ranks: &[(".*_proj", 3), ("q_proj", 6)], ..whole(&c) },
        |c| Case { name: "alphas", alphas: &[("v_proj", 20.0), ("layers.1.mlp.up_proj", 0.5)], ..c },
        |c| Case { name: "no o_proj", excluded: &["o_proj"], ..c },
        |c| Case { name: "none in the middle layer's MLP", excluded: MLP_OF_THE_MIDDLE, layers_per_cell: 2, ..c },
        |c| Case { name: "the top layer's alone", excluded: ALL_BUT_THE_TOP, ..c },
        |c| Case { name: "the top layer's alone, in one cell", excluded: ALL_BUT_THE_TOP, ..whole(&c) },
        |c| Case {
            name: "everything at once, with dropout",
            is_rslora: true,
            ranks: &[("q_proj", 6), ("layers.2.*", 2)],
            alphas: &[("down_proj", 3.0)],
            excluded: &["k_proj", "layers.0.mlp.gate_proj"],
            dropout: 0.2,
            width: Width::Chunks(1),
            ..c
        },
    ]);
    prove("adapters by linear", &cases);
    let [plain, rslora] = [false, true].map(|is_rslora| run(&Case { is_rslora, ..PLAIN }).loss);
    assert!((plain - rslora).abs() > 1e-4, "{plain} with LoRA's scale and with rsLoRA's");
}

#[test]
fn adapters_of_other_kinds() {
    let cases = varied([
        |c| Case { name: "an expression", matching: Some(r".*\.(0|2)\.(self_attn\.(q|v)_proj|mlp\.down_proj)"), ..c },
        |c| Case { name: "the middle layer", layers: &[1], layers_per_cell: 2, ..c },
        |c| Case { name: "the bias of B", beside: Beside::BiasOfB, ..c },
        |c| Case { name: "the bias of B, in one cell, with dropout", beside: Beside::BiasOfB, dropout: 0.1, ..whole(&c) },
        |c| Case { name: "biases of targets", beside: Beside::BaseBiases, ..c },
        |c| Case { name: "biases of targets, two layers a cell", beside: Beside::BaseBiases, layers_per_cell: 2, ..c },
        |c| Case { name: "all biases", beside: Beside::AllBiases, lora: &["q_proj", "up_proj"], layers_per_cell: 2, ..c },
        |c| Case { name: "DoRA", beside: Beside::Magnitudes, ..c },
        |c| Case { name: "DoRA with rsLoRA, in one cell", beside: Beside::Magnitudes, is_rslora: true, ..whole(&c) },
        |c| Case { name: "DoRA, with dropout", beside: Beside::Magnitudes, dropout: 0.1, ..c },
        |c| Case { name: "DoRA and biases", beside: Beside::MagnitudesAndBaseBiases, lora: &["q_proj", "up_proj"], ..c },
    ]);
    prove("adapters of other kinds", &cases);
}

/// What is trained outside the layers, of a model with an output projection of its own and of one that has none.
#[test]
fn adapters_at_the_ends_of_a_model() {
    const BOTH: &[&str] = &["embed_tokens", "lm_head"];
    const TIED: &str = r#"{"tie_word_embeddings": true}"#;
    let cases = varied([
        |c| Case { name: "a copy of the output projection", saved: &["lm_head"], ..c },
        |c| Case { name: "a copy of the embedding, tied", saved: &["embed_tokens"], config: TIED, ..c },
        |c| Case { name: "copies of both, tied, two layers a cell", saved: BOTH, config: TIED, layers_per_cell: 2, ..c },
        |c| Case { name: "copies of both, in one cell", saved: BOTH, ..whole(&c) },
        |c| Case { name: "beside the embedding", lora: &["embed_tokens", "q_proj", "down_proj"], config: TIED, ..c },
        |c| Case {
            name: "beside the embedding alone, with a rank and a scale of its own",
            lora: &["embed_tokens"],
            is_rslora: true,
            ranks: &[("embed_tokens", 3)],
            alphas: &[("model.embed_tokens", 5.0)],
            width: Width::Chunks(1),
            ..c
        },
        |c| Case { name: "beside the output projection", lora: &["lm_head", "q_proj"], ..c },
        |c| Case {
            name: "beside both ends, tied, in one cell",
            lora: &["embed_tokens", "lm_head"],
            config: TIED,
            ranks: &[("lm_head", 3)],
            alphas: &[("lm_head", 5.0)],
            ..whole(&c)
        },
        |c| Case { name: "DoRA beside the output projection", lora: &["lm_head", "v_proj"], beside: Beside::Magnitudes, ..c },
        |c| Case { name: "copies of embedding and all norms", saved: &["embed_tokens", "norm"], ..c },
        |c| Case {
            name: "copies of some norms, two layers a cell",
            saved: &["model.norm", "1.input_layernorm"],
            layers_per_cell: 2,
            ..c
        },
        |c| Case {
            name: "copies of all norms, also of heads, in one cell",
            saved: &["norm"],
            config: r#"{"model_type": "qwen3"}"#,
            ..whole(&c)
        },
        |c| Case { name: "classes, and a copy of the embedding", head: HeadKind::Score, saved: &["embed_tokens"], ..c },
    ]);
    prove("ends of a model", &cases);
    let scaled = r#"{"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 4.0}"#;
    let granite = Case { config: scaled, lora: &["embed_tokens", "v_proj"], saved: &["lm_head"], ..PLAIN };
    let gemma = Case {
        saved: BOTH,
        config: r#"{"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "hidden_act": null}"#,
        ..PLAIN
    };
    let both = Case { lora: &["lm_head", "v_proj"], saved: &["norm"], ..granite };
    let capped = Case { lora: &["lm_head"], saved: &["embed_tokens"], ..gemma };
    prove("scaled ends of a model", &[granite, gemma, both, capped]);
}

/// A case as one cell.
fn whole(case: &Case) -> Case {
    Case { layers_per_cell: 3, width: Width::Chunks(100), ..*case }
}

const MLP_OF_THE_MIDDLE: &[&str] = &["layers.1.mlp.gate_proj", "layers.1.mlp.up_proj", "layers.1.mlp.down_proj"];
const ALL_BUT_THE_TOP: &[&str] = &[
    "0.self_attn.q_proj",
    "0.self_attn.k_proj",
    "0.self_attn.v_proj",
    "0.self_attn.o_proj",
    "0.mlp.gate_proj",
    "0.mlp.up_proj",
    "0.mlp.down_proj",
    "1.self_attn.q_proj",
    "1.self_attn.k_proj",
    "1.self_attn.v_proj",
    "1.self_attn.o_proj",
    "1.mlp.gate_proj",
    "1.mlp.up_proj",
    "1.mlp.down_proj",
];

#[test]
fn dropout() {
    let cases = varied([
        |c| Case { name: "dropout", dropout: 0.1, ..c },
        |c| Case { name: "dropout, in one cell", dropout: 0.1, layers_per_cell: 3, width: Width::Chunks(100), ..c },
        |c| Case { name: "dropout, two layers a cell", dropout: 0.5, layers_per_cell: 2, width: Width::Chunks(1), ..c },
        |c| Case { name: "dropout, on the MLP", dropout: 0.1, lora: &["up_proj", "down_proj"], ..c },
        |c| Case { name: "dropout, classification", dropout: 0.1, head: HeadKind::Classify, ..c },
    ]);
    prove("dropout", &cases);
    let [without, with] = [0.0, 0.1].map(|dropout| run(&Case { dropout, ..PLAIN }).loss);
    assert!((without - with).abs() > 1e-4, "{without} with and without dropout");
}

#[test]
fn single_precision() {
    let cases = varied([|c| Case { name: "f32", kind: Kind::Float, ..c }]);
    prove("f32", &cases);
}

#[test]
fn bf16_is_near_f32() {
    let cases = varied([
        |c| Case { name: "bands of one layer", ..c },
        |c| Case { name: "in one band", layers_per_cell: 3, ..c },
        |c| Case { name: "a single target", targets: TargetsAt::Last(1), ..c },
        |c| Case { name: "classification", head: HeadKind::Classify, ..c },
        |c| Case { name: "trained ends", saved: &["embed_tokens", "lm_head"], ..c },
        |c| Case { name: "waiting on the host", is_offloaded: true, layers_per_cell: 2, ..c },
        |c| Case { name: "all weights", trains: Trains::AllTied, lora: &[], ..c },
    ]);
    let mut least: f64 = 1.0;
    for case in &cases {
        let cosine = cosine_of_bf16(case);
        assert!(cosine >= NEAR_BF16, "{case:?}: cosine {cosine}");
        least = least.min(cosine);
    }
    println!("bf16: {} cases, least cosine {least:.6}", cases.len());
}
