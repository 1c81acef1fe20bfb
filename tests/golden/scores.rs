//! The scores behind the choices: what each policy has noted of each position after each chunk, beside another program's.

use std::collections::BTreeMap;

use kvtune::cache::{self, CacheShape, ChunkAttention, ChunkSpan, LayerCache, LayerLog, Policy, Queries};
use kvtune::engine::{ChunkPlan, ColumnWidth};
use kvtune::model::{Attend, DropoutContext, Model, Qkv};
use kvtune::ops::attention::{self, KvBlock};
use kvtune::recipe::BufferKind;
use kvtune::units::{Fault, LayerIdx};
use tch::{Device, Kind, Tensor, no_grad};

use super::fixture::{Golden, model};

/// The bound of the golden numbers' readme.
const BOUND: f64 = 1e-4;

/// Attention over caches, one per layer, whose policies may be looked at between the chunks.
struct Listening {
    caches: Vec<LayerCache>,
    policies: Vec<Box<dyn Policy>>,
    logs: Vec<LayerLog>,
    span: ChunkSpan,
}

/// A chunk's attention, for the policy to ask about.
struct Seen<'a> {
    chunk: &'a Qkv,
    past: &'a [KvBlock],
    lse_bhn: Tensor,
}

impl ChunkAttention for Seen<'_> {
    fn mass(&self, queries: Queries) -> Tensor {
        attention::attention_mass(self.chunk, self.past, &self.lse_bhn, queries)
    }

    fn weights(&self, last: usize) -> Tensor {
        attention::attention_weights(self.chunk, self.past, &self.lse_bhn, Queries::Last(last))
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

impl Listening {
    fn new(golden: &Golden, model: &Model, plan: &ChunkPlan) -> Self {
        let lengths = golden.cache_lengths(model);
        let config = model.config();
        let cache = |(layer, &cache_length): (usize, &usize)| {
            let shape = CacheShape {
                batch: 2,
                groups: config.layers[0].attention.num_kv_heads as i64,
                head_dim: config.layers[0].attention.head_dim as i64,
                further: &[],
                model_feature: None,
                cache_length,
                allocated: cache_length,
                is_paged: false,
                buffer: BufferKind::Plain,
                is_offloaded: false,
                kind: Kind::Float,
                device: Device::Cpu,
            };
            LayerCache::new(LayerIdx(layer), shape, plan.prefill)
        };
        Self {
            caches: lengths.iter().enumerate().map(cache).collect(),
            policies: lengths.iter().map(|&length| cache::build(&golden.policy(), length).unwrap()).collect(),
            logs: lengths.iter().map(|_| LayerLog::default()).collect(),
            span: plan.spans[0].clone(),
        }
    }
}

impl Attend for Listening {
    fn attend(&mut self, layer: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault> {
        let (cache, log, span) = (&mut self.caches[layer.0], &mut self.logs[layer.0], &self.span);
        let policy = &*self.policies[layer.0];
        log.record(cache.choose_victims(policy, span));
        let victims = cache.recall(log, span)?;
        let written = cache.write(span, victims, &qkv.own)?;
        let past = cache.past(cache.region(span));
        let chunk = Qkv { own: written.own, ..qkv };
        let attended = attention::attend(&chunk, &past);
        let seen = Seen { chunk: &chunk, past: &past, lse_bhn: attended.lse_bhn };
        cache.note(policy, span, &chunk.own, &seen);
        Ok(attended.out_bhnd)
    }
}

/// Scores by sequence, head and position.
fn by_position(position_bgc: &Tensor, score_bgc: &Tensor) -> BTreeMap<(usize, i64), f64> {
    let positions = Vec::<i64>::try_from(position_bgc.to_kind(Kind::Int64).contiguous().view(-1)).unwrap();
    let scores = Vec::<f64>::try_from(score_bgc.to_kind(Kind::Double).contiguous().view(-1)).unwrap();
    let slots = position_bgc.size()[2] as usize;
    positions.into_iter().zip(scores).enumerate().map(|(i, (position, score))| ((i / slots, position), score)).collect()
}

/// Runs a case chunk by chunk and compares what has been noted after each; returns the worst difference.
fn worst(name: &'static str) -> f64 {
    let (golden, model) = (Golden::read(name), model(Device::Cpu));
    let ids_bt = &golden.tensors["input_ids"];
    let tokens = ids_bt.size()[1];
    let lengths = golden.cache_lengths(&model);
    let span = lengths.iter().copied().min().unwrap();
    let plan = ChunkPlan::new(&[tokens as usize; 2], span, golden.number("chunk_size") as usize, ColumnWidth::Chunks(1));
    let mut listening = Listening::new(&golden, &model, &plan);
    let (mut worst, mut compared): (f64, usize) = (0.0, 0);
    for span in &plan.spans {
        listening.span = span.clone();
        let (start, len) = (span.start as i64, span.len as i64);
        let mut hidden = model.embed(&ids_bt.narrow(1, start, len));
        let position = Tensor::arange_start(start, start + len, (Kind::Int64, Device::Cpu)).view([1, -1]);
        let positions = model.positions(position, &model.frequencies(&[tokens as usize; 2]));
        for layer in 0..lengths.len() {
            hidden = model.layer(LayerIdx(layer), &hidden, &positions, &DropoutContext::default(), &mut listening).unwrap();
        }
        // The prefill span is scored by nobody.
        if span.is_prefill() {
            assert!(listening.caches.iter().all(|cache| cache.observed().is_none()), "{name}");
            continue;
        }
        for (layer, cache) in listening.caches.iter().enumerate() {
            let key = |what: &str| format!("{what}.layer{layer}.chunk{}", span.chunk);
            let expected = by_position(&golden.tensors[&key("token_pos")], &golden.tensors[&key("scores")]);
            let found = by_position(&cache.positions(), &cache.observed().unwrap());
            assert!(found.keys().eq(expected.keys()), "{name}: other positions in layer {layer}, chunk {}", span.chunk);
            worst = found.iter().map(|(at, score)| (score - expected[at]).abs()).fold(worst, f64::max);
            compared += 1;
        }
    }
    let zero = &golden.tensors["scores.layer0.chunk0"];
    assert!(zero.equal(&zero.zeros_like()), "{name}");
    let files = golden.tensors.keys().filter(|key| key.starts_with("scores.") && !key.ends_with("chunk0")).count();
    assert_eq!(compared, files, "{name}: a file of scores was not read");
    worst
}

#[test]
fn what_is_noted_of_every_position_is_what_another_program_noted() {
    let names = [
        "h2o",
        "h2o-keep0",
        "h2o-topk",
        "h2o-norm",
        "h2o-grace4-fixed",
        "h2o-grace12-fixed",
        "h2o-mixed",
        "h2o-vlen",
        "h2o-orig",
    ];
    for name in names {
        let worst = no_grad(|| worst(name));
        println!("{name}: scores {worst:.1e}");
        assert!(worst <= BOUND, "{name}: scores differ by {worst:.2e}");
    }
}
