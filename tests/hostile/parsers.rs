//! Ten parsers of the library, each with valid files, a door and the name that its errors must have. Used by the suite and by a bench.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Int64Array, ListArray, StringArray};
use arrow::datatypes::Int64Type;
use arrow::record_batch::RecordBatch;
use kvtune::cache::{ChunkSpan, LayerLog, ReplayLog};
use kvtune::data::{DataRequest, ModelLimits, SplitName, Tokenizer, survey};
use kvtune::files::TensorFile;
use kvtune::model::{MergedModel, ModelConfig, read_peft};
use kvtune::recipe::Recipe;
use kvtune::units::Fault;
use parquet::arrow::ArrowWriter;

use super::mutated::mutated;

/// How long a file of some kilobytes may take.
const LIMIT: Duration = Duration::from_secs(10);
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

/// Makes a file of a part of it.
type Frame = fn(&[u8]) -> Vec<u8>;

/// A parser.
pub(super) struct Parser {
    pub(super) name: &'static str,
    /// The file that it reads, in a directory of its own.
    file: &'static str,
    dir: tempfile::TempDir,
    seeds: Vec<Vec<u8>>,
    /// What a header becomes a part of, where the changes are to be in the header alone.
    frame: Option<Frame>,
    read: fn(&Path) -> Result<(), Fault>,
}

/// All of them.
pub(super) fn parsers() -> Vec<Parser> {
    vec![
        Parser::of("safetensors header", "x.safetensors", vec![small_header()], |dir| {
            let file = TensorFile::open(&dir.join("x.safetensors"))?;
            file.names().iter().try_for_each(|name| file.get(name).map(drop))?;
            Ok(())
        })
        .framed(|header| [&(header.len() as u64).to_le_bytes()[..], header, &[0; 16]].concat()),
        Parser::of("index", "model.safetensors.index.json", vec![index()], |dir| {
            MergedModel::open(&dir.to_path_buf(), None)?;
            Ok(())
        })
        .beside("model-qwen2", &[("config.json", "config.json"), ("model.safetensors", "a.safetensors")]),
        Parser::of("config", "config.json", vec![fixture("model-qwen2/config.json"), yarn()], |dir| {
            ModelConfig::load(&dir.to_path_buf())?;
            Ok(())
        }),
        Parser::of("tokenizer", "tokenizer.json", vec![fixture("model-qwen2/tokenizer.json")], |dir| {
            let tokenizer = Tokenizer::load(dir)?;
            tokenizer.encode("the words of a text")?;
            Ok(())
        })
        .beside("model-qwen2", &[("tokenizer_config.json", "tokenizer_config.json"), ("config.json", "config.json")]),
        Parser::of("adapter config", "adapter_config.json", vec![fixture("adapter-qwen2/adapter_config.json")], |dir| {
            read_peft(dir)?;
            Ok(())
        })
        .beside("adapter-qwen2", &[("adapter_model.safetensors", "adapter_model.safetensors")]),
        Parser::of("JSONL rows", "x.jsonl", rows(), |dir| surveyed(&dir.join("x.jsonl"))),
        Parser::of("Parquet rows", "x.parquet", vec![parquet()], |dir| surveyed(&dir.join("x.parquet"))),
        Parser::of("recipe", "x.toml", vec![RECIPE.into(), fixture("earlier-run/recipe.resolved.toml")], |dir| {
            Recipe::load(&dir.join("x.toml"), &[])?;
            Ok(())
        }),
        Parser::of("replay log", "x.kvlog", vec![log()], |dir| {
            ReplayLog::load(&dir.join("x.kvlog"))?;
            Ok(())
        }),
        Parser::of("state", "state.json", vec![fixture("earlier-run/step-000003/state.json")], |dir| {
            kvtune::checkpoint::state_of(dir)?;
            Ok(())
        }),
    ]
}

impl Parser {
    fn of(name: &'static str, file: &'static str, seeds: Vec<Vec<u8>>, read: fn(&Path) -> Result<(), Fault>) -> Self {
        Self { name, file, dir: tempfile::tempdir().unwrap(), seeds, frame: None, read }
    }

    fn framed(mut self, frame: Frame) -> Self {
        self.frame = Some(frame);
        self
    }

    /// Files that are sound.
    fn beside(self, from: &str, files: &[(&str, &str)]) -> Self {
        for (file, to) in files {
            fs::write(self.dir.path().join(to), fixture(&format!("{from}/{file}"))).unwrap();
        }
        self
    }

    /// What is wrong with how the `number`th file is taken; `None` where nothing is.
    pub(super) fn fault(&self, number: u64) -> Option<String> {
        let at = number as usize;
        let seed = &self.seeds[at % self.seeds.len()];
        let other = &self.seeds[(at / 2) % self.seeds.len()];
        let frame = self.frame.unwrap_or(<[u8]>::to_vec);
        // Of what has a frame, every fourth is changed as a whole.
        let bytes =
            if number.is_multiple_of(4) { mutated(&frame(seed), other, number) } else { frame(&mutated(seed, other, number)) };
        fs::write(self.dir.path().join(self.file), bytes).unwrap();
        let began = Instant::now();
        let read = catch_unwind(AssertUnwindSafe(|| (self.read)(self.dir.path())));
        let fault = match read {
            Err(_) => Some("it panics".to_owned()),
            Ok(Ok(())) => None,
            Ok(Err(error)) => {
                let words = words(&error);
                let names_it = words.contains(self.file) || words.contains(&*self.dir.path().to_string_lossy());
                let is_printable = words.len() < 16384 && !words.chars().any(|c| c.is_control() && c != '\n' && c != '\t');
                (!names_it || !is_printable)
                    .then(|| format!("{} bytes of words: {}", words.len(), words.escape_debug().take(300).collect::<String>()))
            }
        };
        let fault =
            fault.or_else(|| (began.elapsed() > LIMIT).then(|| format!("it takes {:.1} s", began.elapsed().as_secs_f64())));
        fault.map(|fault| format!("{} {number}: {fault}", self.name))
    }

    /// The seeds are valid, or no change of theirs says anything.
    pub(super) fn check_seeds(&self) {
        for seed in &self.seeds {
            let frame = self.frame.unwrap_or(<[u8]>::to_vec);
            // A header alone belongs to no data.
            if self.frame.is_none() {
                fs::write(self.dir.path().join(self.file), frame(seed)).unwrap();
                (self.read)(self.dir.path()).unwrap_or_else(|error| panic!("{}: {error}", self.name));
            }
        }
    }
}

/// An error and what caused it, as they are printed.
fn words(error: &Fault) -> String {
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn fixture(name: &str) -> Vec<u8> {
    fs::read(PathBuf::from(FIXTURES).join(name)).unwrap()
}

fn small_header() -> Vec<u8> {
    br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[8,16]}}"#
        .to_vec()
}

/// Every tensor of the fixture in one shard.
fn index() -> Vec<u8> {
    let file = TensorFile::open(&PathBuf::from(FIXTURES).join("model-qwen2/model.safetensors")).unwrap();
    let map: serde_json::Map<_, _> = file.names().into_iter().map(|name| (name, "a.safetensors".into())).collect();
    serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map }).to_string().into_bytes()
}

/// A configuration with scaled embeddings and sliding layers.
fn yarn() -> Vec<u8> {
    let mut config: serde_json::Value = serde_json::from_slice(&fixture("model-qwen2/config.json")).unwrap();
    config["rope_parameters"] = serde_json::json!({
        "rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "beta_fast": 32, "beta_slow": 1
    });
    config["use_sliding_window"] = true.into();
    config["sliding_window"] = 64.into();
    config["max_window_layers"] = 1.into();
    config["layer_types"] = serde_json::json!(["full_attention", "sliding_attention", "sliding_attention"]);
    config.to_string().into_bytes()
}

const RECIPE: &str = include_str!("../../recipes/longbench.toml");

fn rows() -> Vec<Vec<u8>> {
    [
        "{\"input_ids\": [1, 2, 3, 4], \"labels\": [-100, 2, 3, 4]}\n{\"input_ids\": [5, 6], \"labels\": [5, 6]}\n",
        "{\"prompt\": \"Which sea is \\u0067rey?\", \"completion\": \"the North Sea\"}\n",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n",
        "{\"text\": \"some words\"}\n\n{\"text\": \"and \\\"more\\\"\"}\n",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}

fn parquet() -> Vec<u8> {
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a prompt", "another", "a third"]));
    let completions: ArrayRef = Arc::new(StringArray::from(vec!["yes", "maybe", "no"]));
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
    let lists: ArrayRef =
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(vec![Some(vec![Some(1)]), None, Some(vec![])]));
    let columns = [("prompt", texts), ("completion", completions), ("numbers", numbers), ("lists", lists)];
    let batch = RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    bytes
}

/// A chunk without evictions.
fn log() -> Vec<u8> {
    let span = |index, start, len| ChunkSpan { index, chunk: index, start, len, real: vec![len], is_block: false };
    let log = ReplayLog { spans: vec![span(0, 0, 8)], cache_lengths: vec![8; 2], layers: vec![LayerLog::default(); 2] };
    let dir = tempfile::tempdir().unwrap();
    log.save(&dir.path().join("x")).unwrap();
    fs::read(dir.path().join("x")).unwrap()
}

/// Looks at each row of a file, up to the first bad one.
fn surveyed(path: &Path) -> Result<(), Fault> {
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}";
    let text = format!("model.path = 'x'\ndata.train = {:?}\ndata.chat_template = {template:?}\n", path.display().to_string());
    let recipe = Recipe::parse(text, Path::new("recipe"), &[])?.recipe;
    let tokenizer = Tokenizer::load(&PathBuf::from(FIXTURES).join("model-qwen2"))?;
    let limits = ModelLimits { vocab_size: 512, trained_positions: 4096, computable_positions: 4096, pad: None };
    let (data, head, tokenizer) = (&recipe.data, &recipe.head, Some(&tokenizer));
    let request = DataRequest { recipe: data, head, tokenizer, limits, initial: None, seed: 1 };
    survey(&request, SplitName::Train, false, &mut |_| Ok(()))?;
    Ok(())
}
