//! The crown over ranks: the gradient that two ranks make of a step, each of one of its sequences, is that of dense autograd over both.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::rc::Rc;
use std::thread;
use std::time::Duration;

use kvtune::dist::{Launched, ProcessGroup};
use kvtune::engine::{MicroBatchContext, NoObserver};
use kvtune::optim;
use kvtune::recipe::{LossMean, Offload, Recipe};
use kvtune::train::{MicroBatchAssignment, RunRanks, StepMeter, TrainStep};
use kvtune::units::StepKey;
use kvtune::verify::{Comparison, Reference};
use tch::{Device, Tensor};

use crate::support;
use crate::support::case::{Case, EXACT};
use crate::support::grid::each_policy;

const SEED: u64 = 3;
const STEP: u64 = 11;

/// Does `work` as each of two ranks, which are threads; what came of it, by rank.
fn as_two<T: Send>(work: impl Fn(Rc<ProcessGroup>) -> T + Sync) -> Vec<T> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (run_id, address, by) = ("crown".to_owned(), "127.0.0.1".to_owned(), "a test");
    thread::scope(|scope| {
        let start = |rank| {
            let launch = Launched {
                rank,
                size: 2,
                local_rank: rank,
                port,
                run_id: run_id.clone(),
                address: address.clone(),
                is_served: false,
                by,
            };
            let work = &work;
            scope.spawn(move || {
                let world = Rc::new(ProcessGroup::join(&launch, Duration::from_secs(60)).unwrap());
                let done = work(world.clone());
                world.leave(None).unwrap();
                done
            })
        };
        [0, 1].map(start).map(|rank| rank.join().unwrap()).into()
    })
}

/// What decides how a step is made, apart from the engine: nothing is clipped, and nothing drawn.
fn recipe() -> Recipe {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
    let text = format!(
        "[model]\npath = \"{}\"\n[lora]\n[data]\nformat = \"tokens\"\ntrain = \"t.jsonl\"\n[kv_cache]\npolicy = \"h2o\"\n\
         cache_length = 16\nchunk_size = 4\n[train]\nmax_grad_norm = inf\nseed = {SEED}\n\
         [optimizer]\nname = \"sgd\"\nmomentum = 0.5\nweight_decay = 0\n",
        model.display()
    );
    Recipe::parse(text, Path::new("r.toml"), &[]).unwrap().recipe
}

/// Mean loss and gradients of a step that this rank and the other make, each of one sequence.
fn shared(case: &Case, world: Rc<ProcessGroup>, targets: usize) -> (f64, BTreeMap<String, Tensor>) {
    let (recipe, model, rank) = (recipe(), support::model(case), world.rank());
    let mut engine = support::engine(case, &model);
    let mut optimizer = optim::build(&recipe.optimizer, Offload::None, &model.parameters(), Device::Cpu);
    let ranks = RunRanks::of(world);
    let mut learner = TrainStep { recipe: &recipe, model: &model, engine: &mut engine, optimizer: &mut optimizer, ranks: &ranks };
    let share = MicroBatchAssignment {
        batches: vec![support::single(case, rank)],
        indices: vec![rank],
        micro_batches: 2,
        targets,
        losses: targets,
    };
    let loss = learner.step(&share, STEP, 1.0, &mut StepMeter::of(&mut NoObserver)).unwrap().loss.unwrap();
    // Momentum begins with the first gradient as it is.
    let gradients = optimizer.state().into_iter();
    (loss, gradients.filter_map(|(name, buffer)| Some((name.strip_suffix(".momentum_buffer")?.to_owned(), buffer))).collect())
}

/// What dense autograd finds for the two sequences, one by one.
fn reference(case: &Case, targets: usize) -> Reference {
    let model = support::model(case);
    let engine = support::engine(case, &model);
    let chunk_sizes = Some(StepKey { seed: SEED, step: STEP });
    let context = MicroBatchContext {
        weight: 1.0 / targets as f64,
        loss_mean: LossMean::Tokens,
        router_weight: 0.0,
        dropout: None,
        chunk_sizes,
    };
    let [mut both, second] = [0, 1].map(|sequence| {
        let batch = support::single(case, sequence);
        let ours = engine.gradients(&model, &batch, context, &mut NoObserver).unwrap();
        Reference::new(&engine, &model, &batch, &ours.log, context).unwrap()
    });
    both.sequences.extend(second.sequences);
    for (name, gradient) in second.gradients {
        let _ = both.gradients.get_mut(&name).unwrap().g_add_(&gradient);
    }
    both
}

#[test]
fn two_ranks_make_the_gradient_of_dense_autograd_for_every_policy_and_head() {
    // Two of the sequences, with what belongs to them.
    let two = |case: Case| Case { lengths: &case.lengths[..2], initial: case.initial.get(..2).unwrap_or_default(), ..case };
    let cases: Vec<(Case, usize)> =
        each_policy().into_iter().map(two).map(|case| (case, support::batch(&case).num_targets())).collect();
    let found = as_two(|world| cases.iter().map(|(case, targets)| shared(case, world.clone(), *targets)).collect::<Vec<_>>());
    let mut worst: f64 = 0.0;
    for (at, (case, targets)) in cases.iter().enumerate() {
        let reference = reference(case, *targets);
        let sum: f64 = reference.sequences.iter().map(|sequence| sequence.loss_sum).sum();
        for shared in &found {
            let (loss, gradients) = &shared[at];
            assert!(
                (loss * *targets as f64 / sum - 1.0).abs() <= EXACT,
                "{case:?}: {loss} of {targets} targets, expected the sum {sum}"
            );
            let found = Comparison::new(&reference.sequences, gradients, &reference.sequences, &reference.gradients);
            assert!(found.worst() <= EXACT, "{case:?}: worst error {:.2e}\n{found:#?}", found.worst());
            assert_eq!(found.untested().len(), case.untested, "{case:?}: untested {:?}", found.untested());
            worst = worst.max(found.worst());
        }
    }
    println!("two ranks: {} cases, worst error {worst:.2e}", cases.len());
}
