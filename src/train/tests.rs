//! The gradient of several ranks is that of one: by parameter, in f64, over policies and heads.

use std::mem;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use tch::{Device, Tensor};

use super::*;
use crate::dist::ProcessGroup;
use crate::dist::tests::{as_ranks_within, free_port};
use crate::engine::NoObserver;
use crate::recipe::Recipe;

/// Does `work` as each of `size` ranks, which are threads; what came of it, by rank.
pub(super) fn as_ranks<T: Send>(size: usize, work: impl Fn(Rc<ProcessGroup>) -> T + Sync) -> Vec<T> {
    as_ranks_within(Duration::from_secs(60), size, free_port(), |world| {
        let world = Rc::new(mem::replace(world, ProcessGroup::alone()));
        let done = work(world.clone());
        world.leave(None).unwrap();
        done
    })
}

/// Five ragged samples: a step of four micro-batches, and one of a single one, of which other ranks have none.
fn write_samples(dir: &Path, has_classes: bool) {
    let line = |sample: usize| {
        let ids: Vec<usize> = (0..9 + sample * 7 % 30).map(|at| 1 + (sample * 31 + at * 17) % 200).collect();
        let targets = if has_classes { format!("\"label\": {}", sample % 2) } else { format!("\"labels\": {ids:?}") };
        format!("{{\"input_ids\": {ids:?}, {targets}}}\n")
    };
    std::fs::write(dir.join("t.jsonl"), (0..5).map(line).collect::<String>()).unwrap();
}

/// Two steps down the gradient itself; what each has changed, in one row.
fn steps(dir: &Path, words: &str, world: &Rc<ProcessGroup>) -> [Tensor; 2] {
    let mut trainer = trainer(dir, words, world);
    trainer.model.adapter().unwrap().set_b_normal(0.1, 3);
    let flat = |trainer: &Trainer| {
        let all: Vec<Tensor> = trainer.model.parameters().into_iter().map(|(_, p)| p.detach().flatten(0, -1)).collect();
        Tensor::cat(&all, 0)
    };
    [(); 2].map(|()| {
        let before = flat(&trainer);
        trainer.advance(&mut NoObserver).unwrap();
        before - flat(&trainer)
    })
}

/// A run in f64 on the samples of `dir`, with these words of a recipe.
fn trainer(dir: &Path, words: &str, world: &Rc<ProcessGroup>) -> Trainer {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
    let text = format!(
        "{words}\n[model]\npath = {model:?}\ndtype = \"f64\"\n[data]\nformat = \"tokens\"\ntrain = \"t.jsonl\"\n\
         validation_fraction = 0\n[lora]\nr = 2\ndropout = 0.1\n[train]\ngradient_accumulation_steps = 4\nmax_grad_norm = inf\n\
         [optimizer]\nname = \"sgd\"\nlearning_rate = 1\nschedule = \"constant\"\nwarmup_steps = 0\n"
    );
    let recipe = Recipe::parse(text, &dir.join("r.toml"), &[]).unwrap().recipe;
    let interrupt = Interrupt::default();
    let start = Start { device: Device::Cpu, interrupt: &interrupt, world, profiles_memory: false };
    Trainer::new(&recipe, dir, start).unwrap()
}

#[test]
fn the_gradient_of_several_ranks_is_that_of_one() {
    let window = "[kv_cache]\ncache_length = 16\nchunk_size = 4\n";
    for (words, ranks) in [
        (format!("{window}policy = \"h2o\"\nrandomize_chunk_sizes = true\n"), 4),
        (format!("{window}policy = \"keydiff\"\n"), 2),
        (format!("{window}policy = \"lastrec\"\n[head]\nkind = \"seq_classification\"\nnum_labels = 2\n"), 2),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write_samples(dir.path(), words.contains("[head]"));
        let whole = steps(dir.path(), &words, &ProcessGroup::alone().into());
        for shared in as_ranks(ranks, |world| steps(dir.path(), &words, &world)) {
            for (whole, shared) in whole.iter().zip(&shared) {
                let apart = ((whole - shared).norm() / whole.norm()).double_value(&[]);
                assert!(whole.norm().double_value(&[]) > 1e-3 && apart <= 1e-12, "{words}: {apart:e}");
            }
        }
    }
}

/// Each micro-batch is run by one rank, and where everything attends to everything a long sequence weighs more than many short ones.
#[test]
fn micro_batches_are_dealt_by_what_they_take() {
    let dir = tempfile::tempdir().unwrap();
    let line = |length: usize| format!("{{\"input_ids\": {ids:?}, \"labels\": {ids:?}}}\n", ids = vec![7; length]);
    // As many tokens in the first as in the six behind it.
    let lengths = [3001, 501, 501, 501, 501, 501, 501];
    std::fs::write(dir.path().join("t.jsonl"), lengths.map(line).concat()).unwrap();
    let words = "[kv_cache]\npolicy = \"dense\"\nstorage = \"growing\"\ncache_length = 4000\nchunk_size = 64\n";
    let step: Vec<Vec<usize>> = [vec![0], vec![1, 2, 3], vec![4, 5, 6]].into();
    let mut dealt = as_ranks(2, |world| {
        let trainer = trainer(dir.path(), words, &world);
        let (recipe, config) = (&trainer.recipe, trainer.model.config());
        let assigned = trainer.assigner.assign(&step, &trainer.data.train, recipe, config, &trainer.ranks).unwrap();
        (assigned.indices, assigned.micro_batches, assigned.targets)
    });
    dealt.sort();
    let targets = lengths.iter().map(|length| length - 1).sum();
    assert_eq!(dealt, [(vec![0], 3, targets), (vec![1, 2], 3, targets)]);
}
