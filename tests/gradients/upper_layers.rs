//! Models that are trained from some layer on: the backward phase ends there, and the gradient stays exact.

use kvtune::engine::{Event, MemoryByPart, Observer};
use kvtune::model::{Adapter, TrainedPart};
use kvtune::recipe::{AttentionOutputs, LoraRecipe, ModuleSet};
use kvtune::verify::ErrorBound;

use super::families::{MIXTRAL, of_family};
use super::kept::assert_same;
use super::{KINDS, whole};
use crate::support;
use crate::support::case::{Beside, Case, INT8, PLAIN, TargetsAt, Trains, Width, prove};

const UPPER: Case = Case { layers: &[1, 2], ..PLAIN };
const TOP: Case = Case { layers: &[2], ..PLAIN };
/// Nothing of the layers is trained.
const HEAD: Case = Case { lora: &["lm_head"], ..PLAIN };

#[test]
fn every_shape_of_cell() {
    let mut cases = vec![HEAD, whole(&HEAD)];
    for case in [UPPER, TOP] {
        for layers_per_cell in [1, 2, 3] {
            for width in [Width::Chunks(1), Width::Chunks(3), Width::Chunks(100)] {
                cases.push(Case { layers_per_cell, width, ..case });
            }
        }
    }
    prove("upper layers, cells", &cases);
}

#[test]
fn every_kind_of_cache() {
    prove("upper layers, caches", &KINDS.map(|case| Case { layers: &[1, 2], ..case }));
    prove("upper layers, caches, one band", &KINDS.map(|case| Case { layers: &[2], ..whole(&case) }));
}

#[test]
fn whatever_is_trained() {
    let cases = [
        Case { lora: &["layers.2.mlp.down_proj"], ..PLAIN },
        Case { lora: &["layers.1.self_attn.q_proj"], ..whole(&PLAIN) },
        Case { lora: &["layers.2.self_attn.o_proj"], saved: &["layers.1.input_layernorm"], ..PLAIN },
        // What is in front of the layers is reached through all of them.
        Case { saved: &["embed_tokens"], ..TOP },
        Case { saved: &["lm_head", "model.norm"], ..TOP },
        Case { beside: Beside::Magnitudes, dropout: 0.2, ..UPPER },
        Case { beside: Beside::AllBiases, config: r#"{"model_type": "qwen2"}"#, ..TOP },
        Case { targets: TargetsAt::Last(3), is_offloaded: true, ..whole(&UPPER) },
        // The routers' loss is one of all layers.
        of_family(("experts", MIXTRAL), &Case { lora: &["layers.1.self_attn.q_proj", "layers.2.self_attn.v_proj"], ..PLAIN }),
        of_family(("experts, one band", MIXTRAL), &Case { lora: &["layers.2.self_attn.o_proj"], ..whole(&PLAIN) }),
    ];
    prove("upper layers, trained parts", &cases);
}

#[test]
fn what_the_forward_phase_keeps_changes_no_bit() {
    for case in [UPPER, Case { layers_per_cell: 2, ..TOP }, whole(&UPPER), HEAD] {
        for kept in [1, 5, 1000] {
            assert_same(&case, &Case { kept, ..case });
        }
        assert_same(&case, &Case { outputs: AttentionOutputs::Keep, ..case });
    }
}

#[test]
fn a_band_that_begins_above_the_embedding_has_a_checkpoint() {
    let bound = |case: Case| {
        let model = support::model(&case);
        ErrorBound::of_stores(&support::settings(&case, &model), model.first_trained_layer())
    };
    let rounded = Case { layer_checkpoints: INT8, ..whole(&UPPER) };
    assert!(bound(rounded).is_some() && bound(whole(&UPPER)).is_none() && bound(whole(&HEAD)).is_none());
    assert!(bound(Case { layers: &[], ..rounded }).is_none());
}

#[test]
fn the_planner_and_the_engine_go_by_the_same_layer() {
    let all = LoraRecipe::plain(2, 4.0, 0.0, ModuleSet::AllLinear);
    let named = |name: &str| LoraRecipe { target_modules: ModuleSet::Names(vec![name.to_owned()]), ..all.clone() };
    let saved = |name: &str, lora: LoraRecipe| LoraRecipe { modules_to_save: vec![name.to_owned()], ..lora };
    let upper = |first| LoraRecipe { layers_to_transform: (first..support::NUM_LAYERS).collect(), ..all.clone() };
    let cases = [
        (upper(1), 1),
        (upper(2), 2),
        (named("lm_head"), 3),
        (named("layers.1.mlp.up_proj"), 1),
        (saved("layers.1.input_layernorm", upper(2)), 1),
        (saved("model.norm", upper(2)), 2),
        (saved("embed_tokens", upper(2)), 0),
        (all.clone(), 0),
    ];
    for (lora, first) in cases {
        let model = support::model(&PLAIN);
        let adapter = Adapter::new(model.config(), &lora, 1, PLAIN.kind, PLAIN.device).unwrap();
        let planned = TrainedPart::of(model.config(), Some(&lora)).unwrap().first_layer;
        assert_eq!((planned, model.with_adapter(adapter).first_trained_layer()), (first, first), "{lora:?}");
    }
    assert_eq!(support::model(&Case { trains: Trains::All, lora: &[], ..PLAIN }).first_trained_layer(), 0);
}

#[derive(Default)]
struct Bands {
    replayed: usize,
    /// Their number, and cells.
    cells: Vec<usize>,
}

impl Observer for Bands {
    fn observe(&mut self, event: Event, _: &dyn Fn() -> MemoryByPart) {
        match event {
            Event::Replay { .. } => self.replayed += 1,
            Event::CellBackward { num_bands, .. } => self.cells.push(num_bands),
            _ => {}
        }
    }
}

#[test]
fn layers_below_are_neither_replayed_nor_differentiated() {
    let count = |case: Case| {
        let (model, batch) = (support::model(&case), support::batch(&case));
        let mut seen = Bands::default();
        let engine = support::engine(&case, &model);
        engine.gradients(&model, &batch, support::context(&case), &mut seen).unwrap();
        let columns = engine.settings().plan(&batch, None).unwrap().columns.len();
        assert_eq!(seen.cells.len(), seen.cells.first().unwrap_or(&0) * columns);
        (seen.replayed, seen.cells.first().copied())
    };
    assert_eq!([PLAIN, UPPER, TOP, HEAD].map(count), [(2, Some(3)), (1, Some(2)), (0, Some(1)), (0, None)]);
}
