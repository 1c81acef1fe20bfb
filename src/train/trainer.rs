//! A run in memory: everything that the loop moves forward, built from a recipe.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use tch::Device;

use super::answers::{Validation, ValidationAnswers};
use super::assignment::MicroBatchAssigner;
use super::meter::StepMeter;
use super::rank_facts::{check_same, of_data, of_model, of_recipe, resolved_run};
use super::run_ranks::check_even;
use super::step::{TrainStep, first_not_finite, leave_out, not_finite};
use super::teacher::Teacher;
use super::{ExpectedEvictions, Interrupt, ResolvedRun, RunRanks, RunSchedule, ShardedOptimizerState, build, tiling};
use crate::checkpoint::{Best, SampleCounts, SaveKind, TrainState};
use crate::data::{Dataset, Splits, Tokenizer};
use crate::dist::ProcessGroup;
use crate::engine::{Engine, Observer};
use crate::eval::{self, DatasetRun};
use crate::export::PolicyTrial;
use crate::files::{failpoint, io_fault};
use crate::measure::MemoryMeter;
use crate::model::{Model, fingerprint};
use crate::native::peak_resident;
use crate::optim::{self, Optimizer, learning_rate};
use crate::plan::{Alternative, Machine};
use crate::recipe::{BatchSize, OnNonFinite, OnOutOfMemory, Recipe};
use crate::report::console;
use crate::report::metrics::{KeptMetrics, METRICS, MetricsMark, StepMetrics};
use crate::units::{Bytes, Fault, FaultKind, quoted};

/// What a run is started with beside its recipe.
#[derive(Clone, Copy)]
pub struct Start<'a> {
    pub device: Device,
    pub interrupt: &'a Interrupt,
    pub world: &'a Rc<ProcessGroup>,
    /// Whether its memory is told by part.
    pub profiles_memory: bool,
}

pub struct Trainer {
    pub(super) recipe: Recipe,
    pub(super) dir: PathBuf,
    pub(super) model: Model,
    pub(super) data: Splits,
    pub(super) schedule: RunSchedule,
    pub(super) assigner: MicroBatchAssigner,
    engine: Engine,
    machine: Machine,
    /// What the heaviest step was planned to take.
    pub(super) planned: Alternative,
    pub(super) optimizer: Optimizer,
    pub(super) shard: ShardedOptimizerState,
    pub(super) ranks: RunRanks,
    /// How far it has come, and what else its checkpoints say; `kind` is each one's own. The hashes are taken when the run begins: it can be
    /// saved whatever becomes of the base.
    pub(super) state: TrainState,
    /// The last step with a checkpoint of its own.
    pub(super) saved: Cell<Option<u64>>,
    /// Whether what the last update made is known to be finite.
    is_finite: Cell<bool>,
    memory: Option<MemoryMeter>,
    limit: Bytes,
    answers: Option<ValidationAnswers>,
    teacher: Option<Teacher>,
    /// What a checkpoint's policy file is recorded with.
    pub(super) trial: PolicyTrial,
    /// Files that `final` has beside the adapter.
    pub(super) companions: Vec<(String, Vec<u8>)>,
}

impl Trainer {
    /// A run at its beginning, which watches its memory by part from here on where that is asked for.
    pub fn new(recipe: &Recipe, dir: &Path, start: Start<'_>) -> Result<Self, Fault> {
        let Start { device, profiles_memory, .. } = start;
        let ranks = RunRanks::new(start.world.clone(), start.interrupt.clone());
        check_same(start.world, "reading the recipe", of_recipe(recipe))?;
        check_even(&ranks.world, recipe)?;
        build::set_numerics(recipe, device);
        let mut machine = Machine::here(recipe.model.dtype, device).of_ranks(ranks.world.ranks_here(), ranks.world.size());
        let mut memory = profiles_memory.then(|| MemoryMeter::start(device)).flatten();
        if profiles_memory && memory.is_none() {
            console::warning("no memory by part: the system does not tell what the process takes");
        }
        let model = build::model(recipe, device, false)?;
        let model_hash = fingerprint(&recipe.model.path)?;
        check_same(start.world, "loading the model", of_model(&model_hash, &model)?)?;
        let tokenizer = machine.including(|| Tokenizer::load_if_present(&recipe.model.path))?;
        let resolve = |recipe| tiling::resolved_with_data(recipe, model.config(), tokenizer.as_ref(), Some(dir), machine, |_| {});
        let ResolvedRun { recipe, planned, engine, data, machine } = resolved_run(start.world, recipe, dir, resolve)?;
        check_same(start.world, "opening the data", of_data(&data))?;
        let schedule = RunSchedule::new(&recipe, data.train.lengths());
        let validation = data.validation.as_ref();
        let held_out = validation.map_or(0, Dataset::len);
        let state = TrainState {
            model_hash,
            data_hash: data.train.hash(),
            validation_hash: validation.map(Dataset::hash),
            samples: Some(SampleCounts { train: data.train.len(), validation: held_out }),
            threads: Some(tch::get_num_threads()),
            settings: Some(recipe.fixed_settings()),
            ..TrainState::new(0, recipe.train.seed, SaveKind::Regular, &model.parameters())
        };
        let answers = ValidationAnswers::new(&recipe, &data, tokenizer.as_ref(), &engine, &model)?;
        let teacher = Teacher::new(&recipe, model.config(), Some(dir))?;
        let shard = ShardedOptimizerState::new(&model, &ranks.world);
        let optimizer = optim::build(&recipe.optimizer, recipe.train.offload, &shard.own(model.parameters()), device);
        if let Some(memory) = &mut memory {
            memory.built(&model, optimizer.bytes());
        }
        Ok(Self {
            assigner: MicroBatchAssigner::new(&recipe, model.config())?,
            trial: PolicyTrial::smallest(model.config(), &recipe.kv_cache, &recipe.grad)?,
            companions: build::companions_of_end(&recipe)?,
            engine,
            ranks,
            dir: dir.to_owned(),
            model,
            data,
            schedule,
            machine,
            limit: planned.host,
            planned,
            recipe,
            optimizer,
            shard,
            state,
            saved: Cell::new(None),
            is_finite: Cell::new(true),
            memory,
            answers,
            teacher,
        })
    }

    pub fn step(&self) -> u64 {
        self.state.step
    }

    /// The memory of the heaviest steps of this start by part, where it is watched.
    pub(super) fn memory_by_part(&self) -> Option<String> {
        self.memory.as_ref().map(MemoryMeter::to_string)
    }

    /// What the policy will evict of the samples to train on; `None` where it never evicts.
    pub(super) fn expected_evictions(&self) -> Option<ExpectedEvictions> {
        ExpectedEvictions::new(&self.recipe, self.engine.settings(), self.data.train.lengths())
    }

    /// The first parameter, or tensor of the optimiser, that is not finite.
    pub(super) fn not_finite(&self) -> Result<Option<String>, Fault> {
        let (parameters, state) = (self.model.parameters(), self.optimizer.state());
        let tensors = parameters.iter().chain(&state).map(|(name, tensor)| (&name[..], tensor));
        let own = first_not_finite(tensors).map(str::to_owned);
        // Where each keeps a part of the state, another may see what this rank does not.
        let all = if self.shard.are_several() { self.ranks.world.agree("looking at an update", Ok(own))? } else { vec![own] };
        Ok(all.into_iter().flatten().next())
    }

    /// [`Self::require_finite`], where a validation or a save follows the last step: on a GPU the others need not be waited for.
    pub(super) fn check_if_built_on(&self) -> Result<(), Fault> {
        let is_asked = self.ranks.wants_save();
        let is_last = self.state.step == self.schedule.num_steps();
        if is_asked || is_last || self.is_eval_due() || self.save_due().is_some() { self.require_finite() } else { Ok(()) }
    }

    /// Fails where the last update made a number that is not finite: before anything is built on it, or saved.
    pub(super) fn require_finite(&self) -> Result<(), Fault> {
        if !self.is_finite.get()
            && let Some(name) = self.not_finite()?
        {
            let step = self.state.step;
            let hint = "what was saved before is intact: begin again with a lower `optimizer.learning_rate`, or resume with \
                        `--set train.on_non_finite=rollback`";
            return Err(not_finite(step, format!("step {step}: its update made `{}` not finite", quoted(name)), hint));
        }
        self.is_finite.set(true);
        Ok(())
    }

    /// The metrics up to the last step, all of which must be as they were written.
    pub(super) fn kept_metrics(&self) -> Result<KeptMetrics, Fault> {
        let mark = MetricsMark {
            step: self.state.step,
            total_tokens: self.state.total_tokens,
            unchecked: self.state.unchecked_metrics,
            is_owed: self.state.owes_validation,
        };
        KeptMetrics::read(&self.dir.join(METRICS), &mark)
    }

    /// Makes one step, or leaves it out.
    pub(super) fn advance(&mut self, observer: &mut dyn Observer) -> Result<StepMetrics, Fault> {
        self.require_finite()?;
        if self.state.skipped_steps.contains(&(self.state.step + 1)) {
            return Ok(self.pass_over("it was lost before"));
        }
        failpoint::pass("run.step").map_err(io_fault("train in", &self.dir))?;
        let began = Instant::now();
        let step = self.schedule.micro_batches(self.state.step);
        let mut assigned = self.assigner.assign(&step, &self.data.train, &self.recipe, self.model.config(), &self.ranks)?;
        if let Some(teacher) = &self.teacher {
            let softened = assigned.batches.iter_mut().try_for_each(|batch| teacher.soften(&mut self.model, batch, observer));
            self.ranks.world.agree("asking the teacher", softened)?;
        }
        let rate = learning_rate(&self.recipe.optimizer, self.state.step, self.schedule.num_steps());
        let (memory, limit) = (self.memory.as_mut(), Some(&mut self.limit));
        let mut meter = StepMeter { memory, limit, ..StepMeter::of(observer) };
        let mut train_step = TrainStep {
            recipe: &self.recipe,
            model: &self.model,
            engine: &mut self.engine,
            optimizer: &mut self.optimizer,
            ranks: &self.ranks,
        };
        let made = match train_step.step(&assigned, self.state.step, rate, &mut meter) {
            Ok(made) => made,
            Err(error) => {
                let error = self.advised(error);
                let why = error.to_string();
                leave_out(&mut self.state.skipped_steps, error, OnNonFinite::Skip, &self.recipe.train)?;
                return Ok(self.pass_over(&why));
            }
        };
        self.shard.exchange_updates(&self.ranks.world, &self.model)?;
        self.is_finite.set(false);
        let epoch = self.schedule.epoch(self.state.step);
        self.state.step += 1;
        self.state.total_tokens += made.tokens;
        let seconds = began.elapsed().as_secs_f64();
        Ok(StepMetrics {
            step: self.state.step,
            epoch,
            total_tokens: self.state.total_tokens,
            seconds,
            tokens_per_second: made.tokens as f64 / seconds,
            peak_memory: made.peak_memory.max(peak_resident()),
            ..made
        })
    }

    /// Counts the next step without making it.
    fn pass_over(&mut self, why: &str) -> StepMetrics {
        let epoch = self.schedule.epoch(self.state.step);
        self.state.step += 1;
        StepMetrics {
            step: self.state.step,
            epoch,
            skipped: Some(why.to_owned()),
            total_tokens: self.state.total_tokens,
            peak_memory: peak_resident(),
            ..StepMetrics::default()
        }
    }

    /// What is to be done about memory that ran out, as the planner sees it.
    fn advised(&self, error: Fault) -> Fault {
        // Smaller cells were tried already where the run retreats.
        if error.kind() != FaultKind::OutOfMemory || self.recipe.grad.on_out_of_memory == OnOutOfMemory::Retreat {
            return error;
        }
        let recipe = Recipe { grad: self.engine.settings().grad().clone(), ..self.recipe.clone() };
        match tiling::smaller(&recipe, self.model.config(), &self.data.train, self.machine, &self.planned) {
            Some(advice) => {
                error.with_hint(format!("{advice}; or `grad.on_out_of_memory = \"retreat\"`, which finds one by trying"))
            }
            None => error,
        }
    }

    /// Whether the step just made is followed by a validation.
    pub(super) fn is_eval_due(&self) -> bool {
        self.data.validation.is_some()
            && (self.state.step == self.schedule.num_steps() || self.state.step.is_multiple_of(self.recipe.eval.interval))
    }

    /// Scores the validation split, and notes whether it is the best so far.
    pub(super) fn validate(&mut self, observer: &mut dyn Observer) -> Result<Option<Validation>, Fault> {
        self.require_finite()?;
        let Some(validation) = &self.data.validation else { return Ok(None) };
        let passed = failpoint::pass("run.validate").map_err(io_fault("validate in", &self.dir));
        self.ranks.world.agree("about to validate", passed)?;
        let options = &self.recipe.eval;
        let batch = options.micro_batch_size.map_or(self.recipe.train.batch_size, BatchSize::Sequences);
        let engine = &self.engine;
        let (model, world) = (&self.model, &self.ranks.world);
        let batches = eval::batches(validation, batch, options.max_batches);
        let run = DatasetRun { engine, model, dataset: validation, batches: &batches, world };
        let scores = run.scores(&run.losses(false, observer)?)?;
        let answer = |answers: &ValidationAnswers| answers.answer(engine, model, world, &|| observer.wants_to_stop());
        let answers = self.answers.as_ref().map(answer).transpose()?;
        let mut validation = Validation { scores, answers, is_best: false };
        let value = validation.value(options.metric);
        let is_better = |best: &Best| options.mode.prefers(value, best.value);
        validation.is_best = self.state.step > 0 && self.state.best.as_ref().is_none_or(is_better);
        if validation.is_best {
            self.state.best = Some(Best { metric: options.metric.name().to_owned(), value, step: self.state.step });
        }
        Ok(Some(validation))
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Tensor, no_grad};

    use super::super::Interrupt;
    use super::*;
    use crate::dist::ProcessGroup;
    use crate::engine::{Event, MemoryByPart, NoObserver};

    fn copied(tensors: Vec<(String, Tensor)>) -> Vec<(String, Tensor)> {
        tensors.into_iter().map(|(name, tensor)| (name, tensor.detach().copy())).collect()
    }

    /// A run over three samples, with further words of its recipe.
    fn trainer(dir: &Path, words: &str) -> Trainer {
        let ids: Vec<usize> = (1..30).collect();
        let sequence = format!("{{\"input_ids\": {ids:?}, \"labels\": {ids:?}}}\n");
        std::fs::write(dir.join("t.jsonl"), sequence.repeat(3)).unwrap();
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        let text = format!(
            "{words}\n[model]\npath = {model:?}\n[data]\nformat = \"tokens\"\ntrain = \"t.jsonl\"\nvalidation_fraction = 0\n\
             [kv_cache]\ncache_length = 16\nchunk_size = 8\n"
        );
        let recipe = Recipe::parse(text, &dir.join("r.toml"), &[]).unwrap().recipe;
        let (interrupt, world) = (Interrupt::default(), ProcessGroup::alone().into());
        let start = Start { device: Device::Cpu, interrupt: &interrupt, world: &world, profiles_memory: false };
        Trainer::new(&recipe, dir, start).unwrap()
    }

    #[test]
    fn a_step_that_is_not_finite_leaves_optimiser_and_adapter_untouched() {
        let dir = tempfile::tempdir().unwrap();
        let mut trainer = trainer(dir.path(), "");
        trainer.advance(&mut NoObserver).unwrap();
        let (_, first) = trainer.model.parameters().swap_remove(0);
        drop(no_grad(|| first.get(0).fill_(f64::NAN)));
        // As if the update had not made it.
        trainer.is_finite.set(true);
        let before = (copied(trainer.optimizer.state()), copied(trainer.model.parameters()));

        let error = trainer.advance(&mut NoObserver).unwrap_err();
        assert_eq!(error.kind(), FaultKind::NotFinite { step: 2 });
        assert!(error.to_string().contains("in sample "), "{error}");
        let after = (copied(trainer.optimizer.state()), copied(trainer.model.parameters()));
        for (before, after) in [(before.0, after.0), (before.1, after.1)] {
            for ((name, before), (_, after)) in before.iter().zip(&after) {
                assert!(before.allclose(after, 0.0, 0.0, true), "{name}");
            }
        }
        assert_eq!((trainer.step(), trainer.state.total_tokens), (1, 28));
    }

    /// Gives up at the n-th event.
    struct GivesUp(usize);

    impl Observer for GivesUp {
        fn observe(&mut self, _event: Event, _: &dyn Fn() -> MemoryByPart) {
            self.0 = self.0.saturating_sub(1);
        }

        fn wants_to_stop(&self) -> bool {
            self.0 == 0
        }
    }

    #[test]
    fn a_step_that_is_given_up_anywhere_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut trainer = trainer(dir.path(), "grad.layers_per_cell = 1");
        let untouched = (copied(trainer.optimizer.state()), copied(trainer.model.parameters()));
        let mut events = 0;
        while let Err(error) = trainer.advance(&mut GivesUp(events + 1)) {
            assert_eq!(error.kind(), FaultKind::Interrupted, "{error}");
            for (before, after) in [(&untouched.0, trainer.optimizer.state()), (&untouched.1, trainer.model.parameters())] {
                assert!(before.iter().zip(&after).all(|((_, before), (_, after))| before.equal(after)), "event {events}");
            }
            assert_eq!(trainer.step(), 0);
            events += 1;
        }
        assert!(events > 10, "{events}");
        let other = tempfile::tempdir().unwrap();
        let mut whole = self::trainer(other.path(), "grad.layers_per_cell = 1");
        whole.advance(&mut NoObserver).unwrap();
        for ((name, a), (_, b)) in trainer.model.parameters().iter().zip(&whole.model.parameters()) {
            assert!(a.equal(b), "{name} after {events} steps that were given up");
        }
    }
}
