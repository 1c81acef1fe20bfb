//! `kvtune init`: a recipe for a model and data, by the lengths of the samples, or one made of another trainer's configuration.

use std::path::{Path, PathBuf};

use clap::Args;
use tch::Device;

use super::recipe_file::recipe_for;
use crate::data::{DataRequest, SampleRow, SplitName, SurveyedSample, Tokenizer, survey};
use crate::files;
use crate::model::ModelConfig;
use crate::recipe::{DataFormat, PolicyRecipe, Recipe};
use crate::report::console;
use crate::train;
use crate::units::Fault;

/// Where no sample is longer, a cache that evicts would spare next to nothing.
const TINY: usize = 512;
const MAX_CACHE: usize = 16384;
const MAX_CHUNK: usize = 1024;

/// Write a recipe for a model and data, or from another trainer's YAML.
#[derive(Debug, Args)]
pub(super) struct Init {
    /// Model directory; its configuration and tokenizer are read, its weights are not.
    #[arg(long, value_name = "DIR", required_unless_present = "from")]
    model: Option<PathBuf>,
    /// Training data: a file, a folder or a pattern. All samples are tokenised.
    #[arg(long, value_name = "FILE", required_unless_present = "from")]
    data: Option<PathBuf>,
    /// Convert this YAML of Axolotl or LLaMA-Factory; `--model` and `--data` replace the model and the data that it names.
    #[arg(long, value_name = "YAML")]
    from: Option<PathBuf>,
}

impl Init {
    pub(super) fn run(&self, device: Device) -> Result<(), Fault> {
        let [model, data] = [&self.model, &self.data].map(|path| path.as_deref().map(written));
        let text = match (&self.from, model, data) {
            (Some(from), model, data) => {
                let set: Vec<(&str, &Path)> = [("model.path", &model), ("data.train", &data)]
                    .into_iter()
                    .filter_map(|(key, path)| Some((key, path.as_deref()?)))
                    .collect();
                let (text, refused) = Recipe::import(from, &set)?;
                if let Some(error) = refused {
                    console::warning(&format!("the recipe is refused until this is changed: {error}"));
                }
                text
            }
            (None, Some(model), Some(data)) => proposal(&model, &data, device)?,
            // clap lets neither pass.
            (None, _, _) => return Ok(()),
        };
        console::part(&text)
    }
}

/// A path as the recipe has it, wherever that is written; what is not there stays as it is, as a name of the Hub or a pattern.
fn written(path: &Path) -> PathBuf {
    if path.exists() { files::absolute(path) } else { path.to_owned() }
}

struct Seen {
    format: &'static DataFormat,
    /// Tokens of each sample, in ascending order.
    lengths: Vec<usize>,
    /// Rows that are no samples.
    bad: usize,
    /// Tokens of the longest sequence that the model was made for.
    positions: usize,
}

/// A recipe in TOML that `kvtune check` accepts.
fn proposal(model: &Path, data: &Path, device: Device) -> Result<String, Fault> {
    let recipe = recipe_for(model, data, &[])?;
    let config = train::as_headed(&recipe, ModelConfig::load(&recipe.model)?)?;
    let tokenizer = Tokenizer::load_if_present(&recipe.model.path)?;
    let limits = train::limits(&config);
    let mut lengths = Vec::new();
    let mut take = |row: &SampleRow<SurveyedSample>| {
        lengths.extend(row.sample.as_ref().map(|sample| sample.length));
        Ok(())
    };
    let (files, head, tokenizer, seed) = (&recipe.data, &recipe.head, tokenizer.as_ref(), recipe.train.seed);
    let request = DataRequest { recipe: files, head, tokenizer, limits, initial: None, seed };
    let survey = survey(&request, SplitName::Train, false, &mut take)?;
    survey.source.notes.iter().for_each(|note| console::note(note));
    for warning in &survey.warnings {
        console::warning(warning);
    }
    lengths.sort_unstable();
    let seen = Seen { format: survey.source.format(), bad: survey.bad(), positions: limits.trained_positions, lengths };
    if seen.lengths.is_empty() {
        survey.verdict()?;
    }
    let text = |path: &Path| toml::Value::from(path.display().to_string()).to_string();
    let proposed = seen.recipe([model, data].map(text), device);
    // What is printed is what would run.
    let mut recipe = Recipe::parse(proposed.clone(), Path::new("recipe.toml"), &[])?.recipe;
    recipe.grad = recipe.grad.closed();
    train::check_trained(&recipe, &config)?;
    train::engine(&recipe, &config, tokenizer, None)?;
    Ok(proposed)
}

impl Seen {
    /// Tokens that so much of the samples have at most.
    fn quantile(&self, part: f64) -> usize {
        let last = self.lengths.len().saturating_sub(1);
        self.lengths.get((last as f64 * part).round() as usize).copied().unwrap_or(0)
    }

    fn longer_than(&self, tokens: usize) -> usize {
        self.lengths.len() - self.lengths.partition_point(|length| *length <= tokens)
    }

    /// Half of what a tenth of the samples have, or an eighth of the longest one: a cache that the long ones overflow several times.
    fn cache_length(&self) -> Option<usize> {
        let longest = self.quantile(1.0).min(self.positions);
        let most = (self.quantile(0.9).min(longest) / 2).max(longest / 8);
        (longest > TINY).then(|| (1 << most.ilog2()).min(MAX_CACHE))
    }

    /// What the table `[data]` says of samples that are not used as they are.
    fn data(&self) -> String {
        let (count, positions, too_long) = (self.lengths.len(), self.positions, self.longer_than(self.positions));
        let (word, other) = match self.format {
            DataFormat { has_texts: true, has_prompt: false, has_messages: false, .. } => ("split", "`drop` leaves them out"),
            _ => ("drop", "`truncate` cuts the middle of their prompts out"),
        };
        let long = format!(
            "on_too_long = \"{word}\"            # {too_long} of {count} samples are longer than the model's {positions} positions; {other}\n"
        );
        let bad = format!("on_bad_row = \"drop\"             # no samples: {} rows, which `kvtune data` names\n", self.bad);
        [(too_long > 0, long), (self.bad > 0, bad)].into_iter().filter_map(|(is, line)| is.then_some(line)).collect()
    }

    fn kv_cache(&self) -> String {
        let Some(cache) = self.cache_length() else {
            return format!(
                "# No sample is longer than {TINY} tokens: a cache that evicts would spare next to nothing, so that all entries stay.\n\
                 policy = \"dense\"\nstorage = \"growing\""
            );
        };
        let (count, longer) = (self.lengths.len(), self.longer_than(cache));
        format!(
            "# {longer} of {count} samples ({:.0} %) are longer than the cache: they evict, and train the model to do with what stays.\n\
             # The entries stay that got the most attention, and the youngest; docs/reference/policies.md has other policies.\n\
             policy = {}\n\
             cache_length = {cache:<17} # slots per layer and KV head: fewer spare memory and time, and keep less\n\
             chunk_size = {:<19} # tokens that are run in one call, at most those of the cache",
            100.0 * longer as f64 / count as f64,
            PolicyRecipe::by_default().to_value(),
            (cache / 4).min(MAX_CHUNK)
        )
    }

    fn recipe(&self, [model, train]: [String; 2], device: Device) -> String {
        format!(
            include_str!("init.toml"),
            model = model,
            train = train,
            dtype = if device.is_cuda() { "\"bf16\"" } else { "\"f32\" " },
            samples = self.lengths.len(),
            shortest = self.quantile(0.0),
            longest = self.quantile(1.0),
            half = self.quantile(0.5),
            tenth = self.quantile(0.9),
            format = self.format.name,
            max_seq_length = self.quantile(1.0).min(self.positions).max(2),
            data = self.data(),
            kv_cache = self.kv_cache(),
        )
    }
}
