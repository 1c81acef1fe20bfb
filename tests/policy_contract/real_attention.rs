//! The engine's own attention: what a policy is told in the forward phase makes it choose what the slow rule chooses from a softmax
//! over the entries that a head holds. In the lowest layer, whose queries and keys depend on no earlier choice.

use std::collections::BTreeMap;

use kvtune::cache::ChunkSpan;
use kvtune::data::Batch;
use kvtune::model::{Attend, DropoutContext, Model, Qkv};
use kvtune::ops::attention::ModelFeature;
use kvtune::recipe::{BufferKind, Storage};
use kvtune::units::{Fault, LayerIdx};
use kvtune::verify::walk;
use tch::{Kind, Tensor, no_grad};

use super::content::{Content, Head, heads_of};
use super::scene::Scene;
use super::scenes::policies;
use super::slow_policies::{Notes, SlowAttention, SlowPolicy, SlowStatistics};
use crate::support::case::{Case, PLAIN};
use crate::support::{CPU, batch, engine, model};

/// Takes a layer's queries, keys and values away.
#[derive(Default)]
struct Taken {
    qkv: Option<[Tensor; 3]>,
    scale: f64,
    /// What the model says of entries, where it is asked.
    numbers: Option<Tensor>,
    number: Option<ModelFeature>,
}

impl Attend for Taken {
    fn attend(&mut self, _: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault> {
        self.numbers = qkv.own.further.first().map(Tensor::copy);
        self.qkv = Some([&qkv.q_bhnd, &qkv.own.k, &qkv.own.v].map(Tensor::copy));
        self.scale = qkv.rule.scale;
        Ok(qkv.q_bhnd.zeros_like())
    }

    fn model_feature(&self, _: LayerIdx) -> Option<ModelFeature> {
        self.number
    }
}

/// What the lowest layer would attend with for a batch.
fn lowest_layer(model: &Model, batch: &Batch, number: Option<ModelFeature>) -> Taken {
    let tokens = batch.max_len();
    let padded =
        batch.sequences.iter().flat_map(|sequence| (0..tokens).map(|i| sequence.inputs.get(i).map_or(0, |&id| i64::from(id))));
    let ids_bt = Tensor::from_slice(&padded.collect::<Vec<_>>()).view([batch.sequences.len() as i64, tokens as i64]);
    let lengths: Vec<usize> = batch.sequences.iter().map(|sequence| sequence.inputs.len()).collect();
    let position = Tensor::arange(tokens as i64, (Kind::Int64, CPU)).view([1, -1]);
    let positions = model.positions(position, &model.frequencies(&lengths));
    let mut taken = Taken { number, ..Taken::default() };
    let _ =
        no_grad(|| model.layer(LayerIdx(0), &model.embed(&ids_bt), &positions, &DropoutContext::default(), &mut taken).unwrap());
    taken
}

/// Softmax over what a head holds, query by query.
struct Softmax<'a> {
    model: &'a Model,
    content: &'a Content,
    queries: Vec<Head>,
    /// Query heads, query heads of a KV head, and tokens.
    shape: (usize, usize, usize),
    scale: f64,
}

impl SlowAttention for Softmax<'_> {
    fn query_statistics(&self, query_head: usize) -> SlowStatistics {
        let known: BTreeMap<String, Tensor> = self.model.gates().collect();
        let of_head = |name: &str| known[&format!("module_list.0.{name}")].get(query_head as i64);
        let numbers = |x: &Tensor| Vec::<f64>::try_from(x).unwrap();
        let speed = numbers(&self.model.frequencies(&[1])[0].inverse_bf.get(0));
        let (mean, longer) = (heads_of(&of_head("query_mean"))[0], numbers(&of_head("query_length_excess")));
        // The file has taken the mean over distances already.
        SlowStatistics { mean, longer, speed, distances: vec![0.0] }
    }

    fn mass(&self, [sequence, head]: [usize; 2], span: &ChunkSpan, last: Option<usize>, position: usize, held: &Notes) -> f32 {
        let per_group = self.shape.1;
        let first = last.map_or(0, |last| span.len.saturating_sub(last));
        let mut sum = 0.0;
        for at in (first..span.real_of(sequence)).map(|at| span.start + at) {
            for query_head in head * per_group..(head + 1) * per_group {
                let weights = self.weights(self.content, [sequence, query_head, at], span.start, held);
                sum += weights.get(&position).copied().unwrap_or_default();
            }
        }
        (sum / per_group as f64) as f32
    }

    fn query(&self, [sequence, head, position]: [usize; 3]) -> Head {
        let (heads, _, tokens) = self.shape;
        self.queries[(sequence * heads + head) * tokens + position]
    }

    fn shape(&self) -> (usize, f64) {
        (self.shape.1, self.scale)
    }
}

/// The case of the crown as a scene.
fn scene(case: &Case) -> Scene {
    Scene {
        policy: case.policy,
        params: case.params.to_owned(),
        buffer: case.buffer,
        is_offloaded: case.is_offloaded,
        storage: Storage::Preallocated,
        groups: case.heads.1 as i64,
        lengths: case.lengths.to_vec(),
        capacity: case.cache[0],
        chunk: case.chunk,
        levels: 1,
        first: case.cache[0],
        initial_parts: case.initial.to_vec(),
    }
}

/// Compares what the engine holds after every event with what the slow rule holds; whether all could be foreseen.
fn is_as_foreseen(case: &Case) -> bool {
    let (model, batch, scene) = (model(case), batch(case), scene(case));
    let (_, log) = engine(case, &model).inspect(&model, &batch, None, &mut |_, _| ()).unwrap();
    let walk = walk(&log, 0, case.heads.1).unwrap();

    let Taken { qkv, scale, numbers, .. } = lowest_layer(&model, &batch, scene.build().traits().model_feature);
    let [q, k, v] = qkv.unwrap();
    let content = Content::of_tensors(case.buffer, [k, v], numbers);
    let shape = (case.heads.0, case.heads.0 / case.heads.1, batch.max_len());
    let policy = scene.build();
    let softmax = Softmax { model: &model, content: &content, queries: heads_of(&q), shape, scale };
    let prefill = scene.plan(!policy.traits().keeps_all).prefill;
    let mut reference = SlowPolicy::new(&scene, (&content, &softmax), prefill, &*policy);
    for span in &log.spans {
        reference.take(span);
        reference.observe(span);
        // A piece of the prefill span is not yet an event.
        if log.spans.get(span.index + 1).is_some_and(|next| next.chunk == span.chunk) {
            continue;
        }
        for (sequence, heads) in walk[span.chunk].iter().enumerate() {
            for (head, held) in heads.iter().enumerate() {
                let mut held: Vec<i64> = held.iter().copied().filter(|&p| p >= 0).collect();
                held.sort_unstable();
                if let Some(expected) = reference.held(sequence, head) {
                    assert_eq!(held, expected, "{case:?}: chunk {}, sequence {sequence}, head {head}", span.index);
                }
            }
        }
    }
    !reference.is_unclear()
}

#[test]
fn the_engine_tells_policies_what_a_softmax_over_their_entries_would() {
    let (mut simulated, mut foreseen) = (0, 0);
    for (i, &(policy, params)) in policies().iter().enumerate().filter(|(_, (policy, _))| *policy != "dense") {
        let heads = [(6, 2), (8, 1), (4, 4)][i % 3];
        let buffer = if params.contains("qh2o") || policy.starts_with("qh2o") || i % 2 == 0 {
            BufferKind::Int8
        } else {
            BufferKind::Plain
        };
        let initial: &[(usize, usize)] = if policy == "smart-lastrec" { &[(0, 5), (3, 20), (1, 2)] } else { &[] };
        let case = Case { name: "choices", policy, params, heads, buffer, initial, ..PLAIN };
        let case = Case { chunk: case.chunk.min(scene(&case).largest_chunk()), ..case };
        simulated += 1;
        foreseen += usize::from(is_as_foreseen(&case));
    }
    println!("{foreseen} of {simulated} could be foreseen to the end");
    assert!((simulated - foreseen) * 20 <= simulated, "{foreseen} of {simulated} could be foreseen to the end");
}
