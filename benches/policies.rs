//! What a policy costs: a chunk through its cache, against attention of the same shape with no cache around it.
//!
//! `cargo bench --bench policies` prints ratios, by part of the work. The two are measured in turns in one run, on one thread, and the
//! median of the pairs counts: a machine that is busy with other things slows both. A word after `--` chooses policies by their name.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench that cannot go on fails")]

#[path = "../tests/support/policies.rs"]
#[allow(unreachable_pub, reason = "the tests have it in a library of their own")]
mod policies;

use std::time::Instant;

use kvtune::cache::{self, CacheShape, ChunkAttention, ChunkSpan, LayerCache, Policy, Queries};
use kvtune::ops::attention::{self, Attended, KvBlock, Qkv, ScoreRule, attention_mass, attention_weights};
use kvtune::ops::frequencies::RopeSpec;
use kvtune::ops::query_statistics::QueryStatistics;
use kvtune::recipe::{BufferKind, PolicyRecipe};
use kvtune::report::table::Table;
use kvtune::units::LayerIdx;
use policies::registered;
use tch::{Device, Kind, Tensor, no_grad};

/// Pairs of measurements by line.
const REPETITIONS: usize = 25;
/// Chunks before the first that counts.
const WARM_UP: usize = 2;

/// The shape of a layer and of a chunk.
struct Layer {
    heads: i64,
    groups: i64,
    head_dim: i64,
    cache_length: i64,
    chunk: i64,
}

const LAYERS: [Layer; 2] = [
    Layer { heads: 8, groups: 2, head_dim: 32, cache_length: 1024, chunk: 256 },
    Layer { heads: 14, groups: 2, head_dim: 64, cache_length: 4096, chunk: 512 },
];

/// A line of the table.
struct Line {
    policy: &'static str,
    /// As TOML.
    params: &'static str,
    buffer: BufferKind,
    /// What the whole may cost, where there is a bound.
    goal: Option<f64>,
}

/// Scores that nothing has to be asked for, and those of a few queries.
const FREE: Option<f64> = Some(1.05);
/// Scores by all queries.
const BY_ATTENTION: Option<f64> = Some(1.15);
/// Quantised buffers.
const QUANTISED: Option<f64> = Some(1.15);

/// What a policy may cost where it has a bound.
fn goal_of(policy: &str) -> Option<f64> {
    match policy {
        "lastrec" | "streaming-llm" | "smart-lastrec" | "knorm" | "keydiff" | "tova" | "snapkv" => FREE,
        "h2o" | "h2o-vlen" | "h2o-orig" => BY_ATTENTION,
        _ => None,
    }
}

/// Every policy of the registry that evicts, in a plain buffer if that gives it enough to go by; and quantised buffers.
fn lines() -> Vec<Line> {
    let line = |(policy, params): (&'static str, &'static str)| {
        let recipe = PolicyRecipe::with_params(policy, toml::from_str(params).unwrap());
        let built = cache::build(&recipe, LAYERS[0].cache_length as usize).unwrap();
        let traits = built.traits();
        let buffer = if traits.needs_quantised { BufferKind::Int8 } else { BufferKind::Plain };
        (!traits.keeps_all).then_some(Line { policy, params, buffer, goal: goal_of(policy) })
    };
    let quantised = [(BufferKind::Int8, QUANTISED), (BufferKind::Int4, None)];
    let lastrec = quantised.map(|(buffer, goal)| Line { policy: "lastrec", params: "", buffer, goal });
    let alone = Line { policy: "learned", params: "gate_alone = true", buffer: BufferKind::Plain, goal: FREE };
    registered().into_iter().filter_map(line).chain([alone]).chain(lastrec).collect()
}

/// The parts of the work on a chunk.
const PARTS: [&str; 4] = ["decide", "write", "attend", "note"];

impl Layer {
    fn randn(&self, heads: i64, tokens: i64) -> Tensor {
        Tensor::randn([1, heads, tokens, self.head_dim], (Kind::Float, Device::Cpu))
    }

    fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    /// A full cache of the policy, and attention to as many slots without one.
    fn bench(&self, line: &Line) -> [f64; 5] {
        let recipe = PolicyRecipe::with_params(line.policy, toml::from_str(line.params).unwrap());
        let policy = cache::build(&recipe, self.cache_length as usize).unwrap();
        let mut run = Run::new(self, policy, line.buffer);
        let (k, v) = (self.randn(self.groups, self.cache_length), self.randn(self.groups, self.cache_length));
        let past = self.cache_length - self.chunk;
        let (old_k, old_v) = (k.narrow(2, 0, past), v.narrow(2, 0, past));
        let plain = |[q, k, v]: &[Tensor; 3]| {
            let chunk = Qkv::new(q, k, v, ScoreRule::scaled(self.scale()));
            let began = Instant::now();
            let _ = attention::attend(&chunk, &[KvBlock::new(&old_k, &old_v)]);
            began.elapsed().as_secs_f64()
        };
        let mut ratios: [Vec<f64>; 5] = Default::default();
        for repetition in 0..WARM_UP + REPETITIONS {
            let qkv = [self.heads, self.groups, self.groups].map(|heads| self.randn(heads, self.chunk));
            // The one that comes second finds its memory warm: they take turns in that as well.
            let is_first = repetition % 2 == 0;
            let before = if is_first { plain(&qkv) } else { 0.0 };
            let parts = run.chunk(&qkv, self.scale());
            let unit = if is_first { before } else { plain(&qkv) };
            if repetition >= WARM_UP {
                let whole: f64 = parts.iter().sum();
                ratios.iter_mut().zip(parts.into_iter().chain([whole])).for_each(|(all, part)| all.push(part / unit));
            }
        }
        ratios.map(median)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A cache that goes on for as long as it is asked to.
struct Run {
    policy: Box<dyn Policy>,
    cache: LayerCache,
    index: usize,
    start: usize,
}

impl Run {
    fn new(layer: &Layer, policy: Box<dyn Policy>, buffer: BufferKind) -> Self {
        let cache_length = layer.cache_length as usize;
        let shape = CacheShape {
            batch: 1,
            groups: layer.groups,
            head_dim: layer.head_dim,
            model_feature: policy.traits().model_feature,
            further: &[],
            cache_length,
            allocated: cache_length,
            is_paged: false,
            buffer,
            is_offloaded: false,
            kind: Kind::Float,
            device: Device::Cpu,
        };
        let [mean_hd, length_hf] =
            [layer.head_dim, layer.head_dim / 2].map(|width| Tensor::rand([layer.heads, width], (Kind::Float, Device::Cpu)));
        let frequencies = RopeSpec::plain(1e4, layer.head_dim as usize).frequencies(&[1], Kind::Float, Device::Cpu);
        let statistics = QueryStatistics::new([&mean_hd, &length_hf], Some(frequencies));
        let mut cache = LayerCache::new(LayerIdx(0), shape, cache_length);
        cache.query_statistics = Some(statistics);
        let mut run = Self { policy, cache, index: 0, start: 0 };
        while run.start < cache_length {
            let qkv = [layer.heads, layer.groups, layer.groups].map(|heads| layer.randn(heads, layer.chunk));
            run.chunk(&qkv, layer.scale());
        }
        run
    }

    /// A chunk as the engine runs it in the forward phase; seconds by part.
    fn chunk(&mut self, [q, k, v]: &[Tensor; 3], scale: f64) -> [f64; 4] {
        let len = q.size()[2] as usize;
        let span = ChunkSpan { index: self.index, chunk: self.index, start: self.start, len, real: vec![len], is_block: false };
        // What the model says of entries is the model's work, and not timed.
        let has_number = self.policy.traits().model_feature.is_some();
        let numbers = has_number.then(|| Tensor::rand([1, k.size()[1], len as i64, 1], (Kind::Float, Device::Cpu)));
        let entries = KvBlock::of_planes([k, v].into_iter().chain(&numbers).map(Tensor::shallow_clone));
        let mut times = [Instant::now(); 5];
        times[0] = Instant::now();
        if let Some(budgets) = self.cache.allocate(&*self.policy, &span) {
            self.cache.apply_budgets(&budgets);
        }
        let victims = self.cache.choose_victims(&*self.policy, &span);
        times[1] = Instant::now();
        let written = self.cache.write(&span, victims.as_ref(), &entries).unwrap();
        let placement = written.placement;
        times[2] = Instant::now();
        let q = placement.place(q);
        let region = self.cache.region(&span);
        let valid = self.cache.valid_slots(region);
        let page = |block: KvBlock| KvBlock { valid: valid.as_ref().map(Tensor::shallow_clone), ..block };
        let past = self.cache.past(region).into_iter().map(page).collect();
        let chunk = Qkv { own: written.own, ..Qkv::new(&q, k, v, ScoreRule::scaled(scale)) };
        let mut seen = Seen { chunk, past, attended: None, mass: None };
        let asked = self.policy.traits().required_queries(false);
        let (attended, mass) = attention::attend_and_sum(&seen.chunk, &seen.past, asked);
        let _ = placement.unplace(&attended.out_bhnd);
        times[3] = Instant::now();
        (seen.attended, seen.mass) = (Some(attended), asked.zip(mass));
        self.cache.note(&*self.policy, &span, &seen.chunk.own, &seen);
        times[4] = Instant::now();
        (self.index, self.start) = (self.index + 1, self.start + len);
        [0, 1, 2, 3].map(|part| (times[part + 1] - times[part]).as_secs_f64())
    }
}

/// The attention of a chunk, as the engine shows it to a policy.
struct Seen {
    chunk: Qkv,
    past: Vec<KvBlock>,
    attended: Option<Attended>,
    mass: Option<(Queries, Tensor)>,
}

impl ChunkAttention for Seen {
    fn mass(&self, queries: Queries) -> Tensor {
        match &self.mass {
            Some((summed, mass)) if *summed == queries => return mass.shallow_clone(),
            _ => {}
        }
        attention_mass(&self.chunk, &self.past, &self.attended.as_ref().unwrap().lse_bhn, queries)
    }

    fn weights(&self, last: usize) -> Tensor {
        attention_weights(&self.chunk, &self.past, &self.attended.as_ref().unwrap().lse_bhn, Queries::Last(last))
    }

    fn queries(&self) -> (Tensor, f64) {
        (self.chunk.q_bhnd.shallow_clone(), self.chunk.rule.scale)
    }

    fn entries(&self) -> (Tensor, Tensor) {
        let blocks: Vec<KvBlock> = self.past.iter().chain([&self.chunk.own]).cloned().collect();
        let KvBlock { k, v, .. } = KvBlock::cat(&blocks);
        (k, v)
    }
}

fn main() {
    tch::set_num_threads(1);
    // `cargo bench` itself passes `--bench`.
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    for layer in &LAYERS {
        let Layer { heads, groups, head_dim, cache_length, chunk } = layer;
        println!(
            "\n{heads} query heads, {groups} KV heads of {head_dim}, {cache_length} slots, chunks of {chunk}, f32, one thread:"
        );
        let mut table = Table::new(&[&["policy", "buffer"], &PARTS[..], &["whole", "goal"]].concat());
        for line in &lines() {
            let Line { policy, params, buffer, goal } = line;
            if !wanted.is_empty() && !wanted.iter().any(|word| policy.contains(word.as_str())) {
                continue;
            }
            let ratios = no_grad(|| layer.bench(line)).map(|ratio| format!("{ratio:.3}"));
            let goal = goal.map_or("–".to_owned(), |goal| goal.to_string());
            let name = if params.contains("alone") { format!("{policy}, {params}") } else { (*policy).to_owned() };
            let cells = [&[name, buffer.to_string()], &ratios[..], &[goal]].concat();
            table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
        }
        println!("{table}");
    }
}
