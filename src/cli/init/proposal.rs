//! The recipe that `kvtune init` proposes, by the lengths of the samples.

use std::fmt::Write;
use std::path::Path;

use tch::Device;

use crate::data::{ModelLimits, Survey, SurveyedPart, SurveyedRow, survey};
use crate::error::Error;
use crate::model::ModelConfig;
use crate::recipe::{DataFormat, Recipe};
use crate::report::console;
use crate::train;

/// Where no sample is longer, a cache that evicts would spare next to nothing.
const TINY: usize = 512;
/// The cache of a recipe that names none.
const LARGEST_CACHE: usize = 16384;
const LARGEST_CHUNK: usize = 1024;
/// With fewer samples none is held out.
const FEW_SAMPLES: usize = 10;

/// What was seen of the data.
struct Seen {
    format: DataFormat,
    /// Tokens of each sample, in ascending order.
    lengths: Vec<usize>,
    /// Rows that are no samples.
    bad: usize,
    /// Tokens of the longest sequence that the model was made for.
    positions: usize,
}

/// A recipe in TOML that `kvtune check` accepts.
pub(super) fn proposal(model: &Path, data: &Path, device: Device) -> Result<String, Error> {
    let text = |path: &Path| toml::Value::from(path.display().to_string());
    let paths =
        format!("model.path = {}\ndata = {{ train = {}, on_bad_row = 'drop', on_too_long = 'drop' }}\n", text(model), text(data));
    let parse = |text: String| Recipe::parse(text, Path::new("recipe.toml"), &[]);
    let recipe = parse(paths)?.recipe;
    let config = train::as_headed(&recipe, ModelConfig::load(&recipe.model)?)?;
    let seen = look(&recipe, &config)?;
    let proposed = written([&text(model), &text(data)].map(ToString::to_string), &seen, device);
    // What is printed is what would run.
    let mut recipe = parse(proposed.clone())?.recipe;
    recipe.grad = recipe.grad.closed();
    train::check_trained(&recipe, &config)?;
    train::engine(&recipe, &config, train::tokenizer(&recipe.model.path)?.as_ref(), None)?;
    Ok(proposed)
}

fn look(recipe: &Recipe, config: &ModelConfig) -> Result<Seen, Error> {
    let tokenizer = train::tokenizer(&recipe.model.path)?;
    let limits = ModelLimits { vocab_size: config.vocab_size, max_positions: config.longest_sequence() };
    let mut lengths = Vec::new();
    let mut take = |row: &SurveyedRow| {
        lengths.extend(row.sample.as_ref().map(|sample| sample.length));
        Ok::<(), Error>(())
    };
    let every = (SurveyedPart::Train, false);
    let data = (&recipe.data, &recipe.head);
    let Survey { source, counts, warnings } = survey(data, tokenizer.as_ref(), limits, every, &mut take)?;
    source.notes.iter().for_each(|note| console::note(note));
    for warning in &warnings {
        console::warning(warning);
    }
    lengths.sort_unstable();
    let (format, bad) = (source.format, counts.bad());
    if lengths.is_empty() {
        counts.verdict(&source)?;
    }
    Ok(Seen { format, lengths, bad, positions: limits.max_positions })
}

impl Seen {
    fn longest(&self) -> usize {
        self.lengths.last().copied().unwrap_or(0)
    }

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
        let longest = self.longest().min(self.positions);
        let most = (self.quantile(0.9).min(longest) / 2).max(longest / 8);
        (longest > TINY).then(|| (1 << most.ilog2()).min(LARGEST_CACHE))
    }

    /// The table `[data]`, but for its paths.
    fn data(&self) -> String {
        let (count, longest, positions) = (self.lengths.len(), self.longest(), self.positions);
        let mut text = format!("format = \"{}\"\nmax_seq_length = {}\n", self.format, longest.clamp(2, positions));
        let too_long = self.longer_than(positions);
        if too_long > 0 {
            let word = if self.format == DataFormat::Text { "split" } else { "drop" };
            let other =
                if word == "split" { "`drop` leaves them out" } else { "`truncate` cuts the middle of their prompts out" };
            let _ = writeln!(
                text,
                "on_too_long = \"{word}\"            # {too_long} of {count} samples are longer than the model's {positions} positions; {other}"
            );
        }
        if self.bad > 0 {
            let words = if self.bad == 1 {
                "1 row is no sample: `kvtune data` names it".to_owned()
            } else {
                format!("{} rows are no samples: `kvtune data` names them", self.bad)
            };
            let _ = writeln!(text, "on_bad_row = \"drop\"             # {words}");
        }
        text.push_str(match count {
            ..FEW_SAMPLES => "validation_fraction = 0.0        # so few samples are all trained on\n",
            _ => "validation_fraction = 0.1        # drawn from the training samples\n",
        });
        text
    }

    /// The table `[kv_cache]`.
    fn cache(&self) -> String {
        let count = self.lengths.len();
        let Some(cache) = self.cache_length() else {
            return format!(
                "# No sample is longer than {TINY} tokens: a cache that evicts would spare next to nothing, so that all entries stay.\n\
                 policy = \"dense\"\nstorage = \"growing\"\n"
            );
        };
        let longer = self.longer_than(cache);
        format!(
            "# {longer} of {count} samples ({:.0} %) are longer than the cache: they evict, and train the model to do with what stays.\n\
             policy = \"h2o\"                   # the entries stay that got the most attention; docs/reference/policies.md has the others\n\
             cache_length = {cache:<17} # slots per layer and KV head: fewer spare memory and time, and keep less\n\
             chunk_size = {:<19} # tokens that are run in one call, at most those of the cache\n",
            100.0 * longer as f64 / count as f64,
            (cache / 4).min(LARGEST_CHUNK)
        )
    }
}

fn written([model, data]: [String; 2], seen: &Seen, device: Device) -> String {
    let dtype = if device.is_cuda() {
        "\"bf16\"                   # a GPU computes; \"f32\" is exact and takes twice the memory"
    } else {
        "\"f32\"                    # the CPU computes; on a GPU write \"bf16\""
    };
    let (count, longest) = (seen.lengths.len(), seen.longest());
    let shape = format!(
        "# {count} samples: {} to {longest} tokens, half of them above {}, a tenth above {}",
        seen.lengths.first().copied().unwrap_or(0),
        seen.quantile(0.5),
        seen.quantile(0.9)
    );
    let accumulated = if count >= 80 { 8 } else { 1 };
    format!(
        "# Proposed by `kvtune init`. Look at it with `kvtune check FILE`, and train with `kvtune train FILE`.\n\
         # docs/reference/recipe.md has every key.\n\n\
         [model]\npath = {model}\ndtype = {dtype}\n\n\
         [lora]\nr = 16                           # rank of the adapter; `kvtune finetune-full` trains all weights instead\nalpha = 32\n\n\
         [data]\n{shape}\ntrain = {data}\n{}\n\
         [kv_cache]\n{}\n\
         [grad]\n# The tiling of the gradient: the planner decides for the memory of this machine.\n\
         layers_per_cell = \"auto\"\nchunks_per_cell = \"auto\"\n\n\
         [train]\nepochs = 1\nmicro_batch_size = 1             # sequences that run together\n\
         gradient_accumulation_steps = {accumulated}  # micro-batches of a step\n\n\
         [optimizer]\nlearning_rate = 2e-4\n",
        seen.data(),
        seen.cache()
    )
}
