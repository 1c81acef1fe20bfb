//! Layers whose weights wait on the host compute what they would if they stayed, on a device that is simulated.

use tch::{Kind, Tensor};

use super::mutations::{COPIED, support};
use crate::engine::{Event, MemoryByPart, NoObserver, Observer, Session, SessionSpec, decode_step};
use crate::model::{Adapter, CapturedLayers, Model};
use crate::recipe::{InitLora, LoraRecipe, ModuleSet};
use crate::store::{WaitFault, with_delayed_copies};
use support::case::{Beside, Case, PLAIN, Trains};

/// Experts of one layer whose router is in more bits and is corrected, with a dense layer below.
const GLM4_MOE: Case = Case {
    name: "a corrected router",
    config: r#"{"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 12, "routed_scaling_factor": 1.7, "use_qk_norm": true, "attention_bias": true}"#,
    ..PLAIN
};
const GPT_OSS: Case = Case {
    name: "attention sinks, and experts side by side",
    config: r#"{"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": false}}"#,
    sliding_layers: &[0, 2],
    ..PLAIN
};

/// Counts the layers whose weights are where the model computes, or on their way there.
struct LayersInFlight<'a>(&'a Model, usize);

impl Observer for LayersInFlight<'_> {
    fn observe(&mut self, _: Event, _: &dyn Fn() -> MemoryByPart) {
        self.1 = self.1.max(self.0.layers_in_flight());
    }
}

/// With weights that wait, or with copies of them all. In files tensors may lie so that products round otherwise: both are copies.
fn model(case: &Case, waits: bool) -> Model {
    let model = support::model(&Case { has_waiting_weights: true, ..*case });
    if waits { model } else { model.with_layers_here() }
}

/// As on a device with a memory of its own, in which the weights of two layer bands are at a time.
#[test]
fn weights_that_wait_on_the_host_give_the_very_gradients() {
    const DORA: Case = Case { name: "lengths of rows", beside: Beside::Magnitudes, layers_per_cell: 2, ..PLAIN };
    const NARROW: Case = Case { name: "all weights in bf16", kind: Kind::BFloat16, trains: Trains::AllTied, lora: &[], ..PLAIN };
    const UPPER: Case = Case { name: "upper layers", layers: &[1, 2], ..PLAIN };
    const HEAD: Case = Case { name: "nothing of the layers", lora: &["lm_head"], ..PLAIN };
    let narrow = |family: Case| Case { kind: NARROW.kind, trains: NARROW.trains, lora: NARROW.lora, ..family };
    for case in COPIED.iter().chain([&UPPER, &HEAD, &DORA, &NARROW, &GPT_OSS, &narrow(GLM4_MOE), &narrow(GPT_OSS)]) {
        let (batch, context) = (support::batch(case), support::context(case));
        let made = |waits: bool| {
            let model = model(case, waits);
            let mut seen = LayersInFlight(&model, 0);
            let mut run = || support::engine(case, &model).gradients(&model, &batch, context, &mut seen).unwrap();
            if waits {
                // What a micro-batch leaves behind must not reach the next.
                run();
            }
            let gradients = run();
            (gradients, seen.1, model.layers_in_flight())
        };
        let late = |waits| with_delayed_copies(WaitFault::Kept, || made(waits));
        let (here, waiting) = (late(false), late(true));
        assert_eq!((here.0.losses, here.0.log.hash()), (waiting.0.losses, waiting.0.log.hash()), "{case:?}");
        let trained = model(case, true).parameters();
        for (name, _) in trained {
            assert!(here.0.gradients[&name].equal(&waiting.0.gradients[&name]), "{name} of {case:?}");
        }
        assert_eq!((here.1, waiting.1, waiting.2), (0, (2 * case.layers_per_cell).min(3), 0), "{case:?}");
    }
}

/// An adapter that begins as the largest part of each weight, whose rest waits in its place.
#[test]
fn weights_that_lack_where_an_adapter_begins_wait_as_well() {
    let made = |waits: bool| {
        let lora = LoraRecipe { init_lora_weights: InitLora::Pissa, ..LoraRecipe::plain(2, 4.0, 0.0, ModuleSet::AllLinear) };
        let model = model(&PLAIN, waits);
        let adapter = Adapter::new(model.config(), &lora, 1, PLAIN.kind, PLAIN.device).unwrap();
        let model = model.with_adapter(adapter);
        let engine = support::engine(&PLAIN, &model);
        engine.gradients(&model, &support::batch(&PLAIN), support::context(&PLAIN), &mut NoObserver)
    };
    let [here, waiting] = [false, true].map(|waits| with_delayed_copies(WaitFault::Kept, || made(waits)).unwrap());
    assert!(here.gradients.iter().all(|(name, gradient)| gradient.equal(&waiting.gradients[name])));
}

/// A prompt, and tokens one by one.
#[test]
fn sessions_of_a_model_whose_weights_wait_come_to_the_very_hidden_states() {
    for case in [&PLAIN, &GPT_OSS] {
        let made = |waits: bool| {
            let model = model(case, waits);
            let (engine, mut outs) = (support::engine(case, &model), Vec::new());
            let mut session = Session::new(&engine, &model, &SessionSpec::new(1, 20)).unwrap();
            let prompt = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6, 5, 3]).view([1, -1]);
            session.extend(&engine, &model, &prompt, Some(&mut |_, hidden| outs.push(hidden.copy()))).unwrap();
            for id in [5u32, 8, 9] {
                outs.push(decode_step(&engine, &model, &mut CapturedLayers::default(), &mut [&mut session], &[id], 1).unwrap());
            }
            // What was read by tokens does not stand in the way of a step.
            engine.gradients(&model, &support::batch(case), support::context(case), &mut NoObserver).unwrap();
            outs
        };
        let [here, waiting] = [false, true].map(|waits| with_delayed_copies(WaitFault::Kept, || made(waits)));
        assert_eq!(here, waiting, "{case:?}");
    }
}

/// Weights are waited for: those that have not come would be others.
#[test]
fn a_wait_for_weights_that_is_lost_is_noticed() {
    let case = Case { trains: Trains::All, has_waiting_weights: true, ..PLAIN };
    let changed = |waits| {
        with_delayed_copies(waits, || {
            let model = support::model(&case);
            let values = |model: &Model| model.parameters().into_iter().map(|(_, leaf)| leaf.detach().copy()).collect::<Vec<_>>();
            let waiting = values(&model);
            model.bring_layers(0..1, Some(1..2));
            model.bring_layers(1..2, None);
            waiting.iter().zip(&values(&model)).filter(|(one, other)| !one.equal(other)).count()
        })
    };
    // Of the middle layer: two norms, seven linears and three biases.
    assert_eq!((changed(WaitFault::Kept), changed(WaitFault::Lost)), (0, 12));
}
