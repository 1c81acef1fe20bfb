//! The teacher of `head.distill`: the model without its adapter, with a cache that keeps everything, asked once for each sample of a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::{Device, Kind, Tensor, no_grad};

use super::build::grad_of_run;
use crate::data::{Batch, IGNORE, Sequence, SoftTargets, Targets};
use crate::engine::{Engine, Observer, Settings};
use crate::files::{self, TensorFile, hash_bytes};
use crate::head::Head;
use crate::model::{Model, ModelConfig};
use crate::native::cuda::on_device;
use crate::recipe::{
    BufferKind, CacheLength, CacheRecipe, DistillRecipe, GradRecipe, PolicyRecipe, Recipe, Storage, full_cache_chunk_size,
};
use crate::store::{load_tensor, pt_metadata, save_tensors};
use crate::units::Fault;

/// The directory of predictions beside a run.
pub(super) const TEACHER: &str = "teacher";
const TOKENS: &str = "tokens";
const LOG_PROBS: &str = "log_probs";
/// Places whose logits are held at a time.
const BLOCK: usize = 64;

pub struct Teacher {
    engine: Engine,
    recipe: DistillRecipe,
    /// Where predictions are kept; `None`: nowhere.
    dir: Option<PathBuf>,
}

/// The caches that keep everything, with the chunks of a recipe.
pub(super) fn full_cache(recipe: &Recipe) -> CacheRecipe {
    CacheRecipe {
        policy: PolicyRecipe::named("dense"),
        gates: None,
        storage: Storage::Paged,
        buffer: BufferKind::Plain,
        r#static: false,
        ..recipe.kv_cache.clone()
    }
}

impl Teacher {
    /// The teacher of a recipe, if it has one, which keeps its predictions beside the run in `dir`.
    pub fn new(recipe: &Recipe, config: &ModelConfig, dir: Option<&Path>) -> Result<Option<Self>, Fault> {
        let Some(distill) = &recipe.distill else { return Ok(None) };
        let grad = GradRecipe { chunks_per_cell: Some(1), ..grad_of_run(recipe, dir) };
        // A preallocated cache gives a sample as many slots as it has tokens.
        let kv_cache = CacheRecipe {
            storage: Storage::Preallocated,
            cache_length: CacheLength::Uniform(u32::MAX as usize),
            chunk_size: Some(full_cache_chunk_size(recipe.kv_cache.wanted_chunk_size())),
            ..full_cache(recipe)
        };
        let engine = Engine::new(Settings::new(config, &kv_cache, &grad)?, Head::NextToken);
        let dir = dir.map(|dir| dir.join(TEACHER));
        let top_k = distill.top_k.min(config.num_scores());
        Ok(Some(Self { engine, recipe: DistillRecipe { top_k, ..distill.clone() }, dir }))
    }

    /// Gives every sequence of a batch what the teacher predicts where it has targets.
    pub fn soften(&self, model: &mut Model, batch: &mut Batch, observer: &dyn Observer) -> Result<(), Fault> {
        for sequence in &mut batch.sequences {
            let Some(labels) = sequence.targets.labels().map(<[i64]>::to_vec) else { continue };
            if observer.wants_to_stop() {
                return Err(Fault::interrupted());
            }
            let path = self.dir.as_ref().map(|dir| dir.join(self.name(sequence, &labels)));
            let soft = match path {
                Some(path) if path.exists() => self.read(&path, sequence.targets.count())?,
                path => {
                    let soft = model.without_adapter(|model| self.predict(model, sequence, &labels))?;
                    path.map_or(Ok(()), |path| write(&path, &soft))?;
                    soft
                }
            };
            sequence.targets = Targets::Distilled(labels, Arc::new(soft));
        }
        Ok(())
    }

    /// The name of a file by all that its content depends on beside the model.
    fn name(&self, sequence: &Sequence, labels: &[i64]) -> String {
        let mut bytes: Vec<u8> = sequence.inputs.iter().flat_map(|id| id.to_le_bytes()).collect();
        bytes.extend(labels.iter().map(|&label| u8::from(label != IGNORE)));
        bytes.extend(self.recipe.temperature.to_le_bytes());
        bytes.extend(self.recipe.top_k.to_le_bytes());
        format!("{}.safetensors", &hash_bytes(&bytes)[..32])
    }

    /// The likeliest tokens where the sequence has targets, and the logarithms of their probabilities.
    fn predict(&self, model: &Model, sequence: &Sequence, labels: &[i64]) -> Result<SoftTargets, Fault> {
        let top_k = self.recipe.top_k;
        // Without targets: the engine's own losses are of no use here.
        let targets = Targets::NextToken(vec![IGNORE; labels.len()]);
        let batch = Batch { sequences: vec![Sequence { targets, ..sequence.clone() }] };
        let none = |kind| vec![Tensor::zeros([0], (kind, Device::Cpu))];
        let (mut log_probs, mut tokens) = (none(Kind::Float), none(Kind::Int));
        self.engine.inspect(model, &batch, None, &mut |start, hidden_1ne| {
            let end = labels.len().min(start + hidden_1ne.size()[1] as usize);
            let places: Vec<i64> = (start..end).filter(|&at| labels[at] != IGNORE).map(|at| (at - start) as i64).collect();
            for places in places.chunks(BLOCK) {
                let (log_prob_nk, token_nk) = no_grad(|| {
                    let hidden_ne = hidden_1ne.get(0).index_select(0, &on_device(places, hidden_1ne.device()));
                    let logits_nv = model.logits(&model.final_norm(&hidden_ne)).to_kind(Kind::Float) / self.recipe.temperature;
                    logits_nv.log_softmax(-1, None).topk(top_k as i64, -1, true, true)
                });
                log_probs.push(log_prob_nk.view(-1).to_device(Device::Cpu));
                tokens.push(token_nk.view(-1).to_kind(Kind::Int).to_device(Device::Cpu));
            }
        })?;
        let [tokens, log_probs] = [tokens, log_probs].map(|parts| Tensor::cat(&parts, 0));
        Ok(SoftTargets { top_k, tokens: tokens.try_into()?, log_probs: log_probs.try_into()? })
    }

    fn read(&self, path: &Path, targets: usize) -> Result<SoftTargets, Fault> {
        let (file, top_k) = (TensorFile::open(path)?, self.recipe.top_k);
        let column = |name| {
            let found = load_tensor(&file, name)?;
            if found.size() == [targets as i64, top_k as i64] {
                return Ok(found.view(-1));
            }
            let message = format!("`{name}` in `{}` is {:?}, expected [{targets}, {top_k}]", path.display(), found.size());
            Err(Fault::data(message, "remove the file: it is made again"))
        };
        let (tokens, log_probs) = (column(TOKENS)?, column(LOG_PROBS)?);
        Ok(SoftTargets { top_k, tokens: tokens.try_into()?, log_probs: log_probs.try_into()? })
    }
}

fn write(path: &Path, soft: &SoftTargets) -> Result<(), Fault> {
    // The directory is made this late because a run must begin in an empty one.
    path.parent().map_or(Ok(()), files::make_dir)?;
    let size = [-1, soft.top_k as i64];
    let tokens = (TOKENS.to_owned(), Tensor::from_slice(&soft.tokens).view(size));
    let log_probs = (LOG_PROBS.to_owned(), Tensor::from_slice(&soft.log_probs).view(size));
    save_tensors(path, &[tokens, log_probs], &pt_metadata())
}

#[cfg(test)]
mod tests {
    use super::super::build;
    use super::*;
    use crate::engine::NoObserver;
    use crate::recipe::Dtype;

    /// A recipe over a small model, with a cache far shorter than the sample of the test.
    fn recipe(dir: &Path) -> Recipe {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        let text = format!(
            "[model]\npath = {model:?}\n[data]\nformat = \"tokens\"\ntrain = \"t.jsonl\"\n[kv_cache]\ncache_length = 16\n\
             chunk_size = 8\n[head]\ndistill = {{ weight = 0.5, temperature = 2.0, top_k = 5 }}\n"
        );
        Recipe::parse(text, &dir.join("r.toml"), &[]).unwrap().recipe
    }

    #[test]
    fn predictions_are_the_base_model_s_with_everything_in_the_cache_and_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let recipe = recipe(dir.path());
        assert_eq!(recipe.model.dtype, Dtype::F32);
        let mut model = build::model(&recipe, Device::Cpu, false).unwrap();
        no_grad(|| model.parameters().into_iter().for_each(|(_, leaf)| drop(leaf.shallow_clone().g_add_scalar_(0.1))));
        // Longer than a chunk of the teacher's.
        let length = full_cache_chunk_size(8) + 60;
        let inputs: Vec<u32> = (0..length as u32).map(|at| (at * 7 + at * at) % 30).collect();
        let labels: Vec<i64> = (0..length as i64).map(|at| if at % 4 == 1 { IGNORE } else { at % 30 }).collect();
        let sequence = Sequence { sample: 3, inputs, targets: Targets::NextToken(labels.clone()), initial: None };
        let mut batch = Batch { sequences: vec![sequence] };
        let teacher = Teacher::new(&recipe, model.config(), Some(dir.path())).unwrap().unwrap();
        let plain = batch.clone();
        teacher.soften(&mut model, &mut batch, &NoObserver).unwrap();
        let soft = batch.sequences[0].targets.soft().unwrap().clone();

        // The base model with a cache that takes the whole sample as one chunk.
        let base = build::base_model(&recipe, None, Device::Cpu).unwrap();
        let whole = CacheRecipe {
            policy: PolicyRecipe::named("dense"),
            cache_length: CacheLength::Uniform(length),
            chunk_size: Some(length),
            ..recipe.kv_cache.clone()
        };
        let settings = Settings::new(base.config(), &whole, &grad_of_run(&recipe, Some(dir.path()))).unwrap();
        let mut hidden = Tensor::new();
        Engine::new(settings, Head::NextToken).inspect(&base, &plain, None, &mut |_, of_all| hidden = of_all.get(0)).unwrap();
        let all_nv = no_grad(|| (base.logits(&base.final_norm(&hidden)) / 2.0).log_softmax(-1, Kind::Float));
        let rows: Vec<i64> = (0..length as i64).filter(|&at| labels[at as usize] != IGNORE).collect();
        let (expected, tokens) = all_nv.index_select(0, &Tensor::from_slice(&rows)).topk(5, -1, true, true);
        assert!(Tensor::from_slice(&soft.log_probs).view_as(&expected).allclose(&expected, 1e-5, 1e-5, false));
        assert!(Tensor::from_slice(&soft.tokens).view_as(&tokens).eq_tensor(&tokens).all().int64_value(&[]) == 1);

        // The adapter is on again, and what was kept is what was predicted.
        assert!(!model.parameters().is_empty());
        let mut again = plain;
        teacher.soften(&mut model, &mut again, &NoObserver).unwrap();
        assert_eq!(again, batch);
    }
}
