//! The optimiser's state of ranks that train all weights: each keeps that of some parameters, updates these and gives them to the others
//! (`ZeRO` 1: Rajbhandari et al. 2020, arXiv 1910.02054). On disk it is that of one rank.

use std::collections::BTreeMap;

use tch::{Device, Tensor};

use super::{RunRanks, not_saved};
use crate::checkpoint::OptimizerTensors;
use crate::data::share;
use crate::dist::ProcessGroup;
use crate::files::TensorHead;
use crate::model::Model;
use crate::store::room_for;
use crate::units::{Exit, Fault};

/// The part of the optimiser's state that this rank keeps.
pub struct ShardedOptimizerState {
    rank: usize,
    /// The rank of each parameter, by its name; none where every rank keeps all.
    owners: BTreeMap<String, usize>,
}

impl ShardedOptimizerState {
    /// Assigns the parameters to ranks: the largest first, each to who has least. An adapter's are few, and every rank keeps all of them.
    pub fn new(model: &Model, world: &ProcessGroup) -> Self {
        let mut owners = BTreeMap::new();
        if world.size() > 1 && model.adapter().is_none() {
            let parameters = model.parameters();
            let numbers: Vec<usize> = parameters.iter().map(|(_, parameter)| parameter.numel()).collect();
            for (rank, places) in share(&numbers, world.size()).into_iter().enumerate() {
                owners.extend(places.into_iter().map(|place| (parameters[place].0.clone(), rank)));
            }
        }
        Self { rank: world.rank(), owners }
    }

    /// Whether the state is divided over the ranks.
    pub(super) fn are_several(&self) -> bool {
        !self.owners.is_empty()
    }

    /// The parameters of `all`, or tensors of their state, that belong to this rank. What is of no parameter belongs to all.
    pub fn own(&self, mut all: Vec<(String, Tensor)>) -> Vec<(String, Tensor)> {
        all.retain(|(name, _)| self.owner(name).is_none_or(|rank| rank == self.rank));
        all
    }

    /// The rank that owns a parameter, or a tensor of its state, whose name begins with the parameter's.
    fn owner(&self, name: &str) -> Option<usize> {
        std::iter::successors(Some(name), |name| Some(name.rsplit_once('.')?.0)).find_map(|name| self.owners.get(name).copied())
    }

    /// Gives what this rank has updated to the others, and takes over what they have.
    pub fn exchange_updates(&self, world: &ProcessGroup, model: &Model) -> Result<(), Fault> {
        if !self.are_several() {
            return Ok(());
        }
        let owned = |(name, parameter): (String, Tensor)| Some((*self.owners.get(&name)?, parameter));
        model.parameters().into_iter().filter_map(owned).try_for_each(|(rank, parameter)| world.overwrite(&parameter, rank))
    }

    /// Lets the first rank `write` the state of all, of which `own` is this rank's, and the others bring theirs tensor by tensor meanwhile.
    pub(super) fn write<T>(
        &self,
        ranks: &RunRanks,
        own: Vec<(String, Tensor)>,
        write: impl FnOnce(&dyn OptimizerTensors) -> Result<T, Fault>,
    ) -> Result<Option<T>, Fault> {
        if !self.are_several() {
            return ranks.world.first("saving", || write(&own));
        }
        let heads = ranks.world.agree("about to write", own.heads().map_err(not_saved))?;
        let of_rank = |(rank, heads): (usize, Vec<TensorHead>)| heads.into_iter().map(move |head| (rank, head));
        let mut tensors: Vec<(usize, TensorHead)> = heads.into_iter().enumerate().flat_map(of_rank).collect();
        // What all have alike is the first one's.
        tensors.retain(|(rank, head)| *rank == 0 || self.owner(&head.name).is_some());
        let state = GatheredState { world: &ranks.world, own, tensors };
        if !ranks.world.is_first() {
            while let Some(index) = state.asked(None)? {
                drop(state.bring(index)?);
            }
        }
        ranks.world.first("saving", || {
            let written = write(&state);
            // The other ranks must not wait on, even if writing failed.
            let ended = state.asked(None);
            written.and_then(|written| ended.map(|_| written))
        })
    }
}

/// The state of all ranks, as the first one reads it.
struct GatheredState<'a> {
    world: &'a ProcessGroup,
    own: Vec<(String, Tensor)>,
    tensors: Vec<(usize, TensorHead)>,
}

impl GatheredState<'_> {
    /// Which tensor the first rank asks for, on all ranks; none when it has all.
    fn asked(&self, index: Option<usize>) -> Result<Option<usize>, Fault> {
        self.world.of_first("bringing the optimiser's state", || Ok(index))
    }

    fn bring(&self, index: usize) -> Result<Tensor, Fault> {
        let (rank, head) = &self.tensors[index];
        let own = || self.own.iter().find(|(name, _)| *name == head.name).map(|(_, tensor)| tensor.to_device(Device::Cpu));
        let tensor = if *rank == self.world.rank() { own() } else { None }.unwrap_or_else(|| room_for(head));
        if *rank > 0 {
            self.world.overwrite(&tensor, *rank)?;
        }
        Ok(tensor)
    }
}

impl OptimizerTensors for GatheredState<'_> {
    fn heads(&self) -> Result<Vec<TensorHead>, Fault> {
        Ok(self.tensors.iter().map(|(_, head)| head.clone()).collect())
    }

    fn tensor(&self, index: usize) -> Result<Tensor, Fault> {
        let asked = if self.tensors[index].0 == 0 { Ok(None) } else { self.asked(Some(index)) };
        let lost = |error: Fault| {
            error.map_message(|said| format!("the optimiser's state can't be gathered: {said}")).with_exit(Exit::Failed)
        };
        asked.and_then(|_| self.bring(index)).map_err(lost)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::rc::Rc;

    use tch::Kind;

    use super::super::rank_facts::{check_same, of_trained};
    use super::super::tests::as_ranks;
    use super::super::{Interrupt, Start, Trainer, build};
    use super::*;
    use crate::engine::NoObserver;
    use crate::files::TensorFile;
    use crate::model::sizes_of_weights;
    use crate::optim;
    use crate::recipe::Recipe;
    use crate::store::{load_tensors, pt_metadata, save_streamed, save_tensors};
    use crate::units::Fault;

    /// All weights of a tiny model are trained, with these `words` of its dtype, optimiser and offloading.
    fn recipe(dir: &Path, words: &[&str]) -> Recipe {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        let text = format!(
            "[model]\npath = {model:?}\n[data]\nformat = \"tokens\"\ntrain = \"t.jsonl\"\nvalidation_fraction = 0\n\
             [kv_cache]\npolicy = \"lastrec\"\ncache_length = 16\nchunk_size = 8\n"
        );
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        Recipe { lora: None, ..Recipe::parse(text, &dir.join("r.toml"), &words).unwrap().recipe }
    }

    /// Two updates by gradients that are the same on every rank, from what an earlier call has left in `dir` on. Leaves there what came of
    /// it, and returns the bytes of state that this rank keeps.
    fn update(world: &Rc<ProcessGroup>, recipe: &Recipe, dir: &Path) -> u64 {
        let model = build::model(recipe, Device::Cpu, false).unwrap();
        let ranks = RunRanks::of(world.clone());
        let parts = ShardedOptimizerState::new(&model, world);
        let sizes: Vec<usize> = model.parameters().iter().map(|(_, parameter)| parameter.numel()).collect();
        assert_eq!(sizes_of_weights(model.config()), sizes, "as the planner assigns them");
        let mut optimizer = optim::build(&recipe.optimizer, recipe.train.offload, &parts.own(model.parameters()), Device::Cpu);
        let [weights, state] = ["weights", "state"].map(|name| dir.join(name));
        if state.exists() {
            let read = |path: &Path| load_tensors(&TensorFile::open(path).unwrap()).unwrap();
            build::take_parameters(&model, &read(&weights), dir).unwrap();
            optimizer.load_state(&parts.own(read(&state))).unwrap();
        }
        for step in 0..2 {
            let wave = |of: &Tensor| (Tensor::arange(of.numel() as i64, (Kind::Float, Device::Cpu)) * 12.9898 + step).sin();
            let gradient = |(name, of): (String, Tensor)| (name, wave(&of).view(&of.size()[..]));
            let gradients: Vec<_> = model.parameters().into_iter().map(gradient).collect();
            optimizer.step(&model.parameters(), &gradients, 0.01);
            parts.exchange_updates(world, &model).unwrap();
        }
        check_same(&ranks.world, "having updated", of_trained(&model).unwrap()).unwrap();
        let written = parts.write(&ranks, optimizer.state(), |all| {
            save_tensors(&weights, &model.parameters(), &pt_metadata()).map_err(not_saved)?;
            let heads = all.heads().map_err(not_saved)?;
            save_streamed(&state, &heads, &pt_metadata(), |index| all.tensor(index)).map_err(not_saved)
        });
        assert_eq!(written.unwrap().is_some(), world.is_first());
        let refused = parts.write(&ranks, optimizer.state(), |_| Err::<(), Fault>(Fault::usage("x", "y"))).unwrap_err();
        assert_eq!(refused.to_string() == "x", world.is_first(), "{refused}");
        optimizer.bytes().0
    }

    #[test]
    fn parts_of_the_state_make_the_very_bits_that_one_rank_makes_of_it() {
        const CASES: [&[&str]; 3] = [
            &["optimizer.name=adamw", "model.dtype=bf16"],
            &["optimizer.name=adamw_8bit"],
            &["optimizer.name=sgd", "optimizer.momentum=0.9", "train.offload=optimizer"],
        ];
        let dir = tempfile::tempdir().unwrap();
        let update_all = |world: &Rc<ProcessGroup>, run: &str| {
            CASES.map(|words| {
                let place = dir.path().join(format!("{run} {}", words[0]));
                std::fs::create_dir_all(&place).unwrap();
                update(world, &recipe(&place, words), &place)
            })
        };
        let whole = [(); 3].map(|()| update_all(&ProcessGroup::alone().into(), "whole"))[0];
        for size in [3, 1, 2] {
            let kept = if size > 1 {
                as_ranks(size, |world| update_all(&world, "parts"))
            } else {
                vec![update_all(&ProcessGroup::alone().into(), "parts")]
            };
            for (case, whole) in whole.into_iter().enumerate() {
                let own = kept.iter().map(|own| own[case]);
                assert_eq!(own.clone().sum::<u64>(), whole);
                assert!(own.max().is_some_and(|most| most * size as u64 <= whole * 5 / 4), "{:?}: {kept:?}", CASES[case]);
            }
        }
        for name in CASES.iter().flat_map(|words| ["weights", "state"].map(|name| format!("{}/{name}", words[0]))) {
            let [whole, parts] = ["whole", "parts"].map(|run| std::fs::read(dir.path().join(format!("{run} {name}"))).unwrap());
            assert!(whole == parts, "{name}");
        }
    }

    #[test]
    fn a_state_that_is_not_finite_on_one_rank_ends_all() {
        let dir = tempfile::tempdir().unwrap();
        let ids: Vec<usize> = (1..30).collect();
        let sample = format!("{{\"input_ids\": {ids:?}, \"labels\": {ids:?}}}\n");
        std::fs::write(dir.path().join("t.jsonl"), sample.repeat(4)).unwrap();
        let recipe = recipe(dir.path(), &["train.gradient_accumulation_steps=2"]);
        let said = as_ranks(2, |world| {
            let interrupt = Interrupt::default();
            let start = Start { device: Device::Cpu, interrupt: &interrupt, world: &world, profiles_memory: false };
            let mut trainer = Trainer::new(&recipe, dir.path(), start).unwrap();
            trainer.advance(&mut NoObserver).unwrap();
            if world.rank() == 1 {
                let (_, mut moment) = trainer.optimizer.state().swap_remove(1);
                let _ = moment.fill_(f64::NAN);
            }
            let made = trainer.advance(&mut NoObserver);
            made.map_or_else(|error| error.to_string(), |_| String::new())
        });
        assert!(said[0] == said[1] && said[0].contains("exp_avg"), "{said:?}");
    }
}
