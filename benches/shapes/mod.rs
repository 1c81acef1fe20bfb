//! What the benches share: the products and the attention of one layer at the shapes of a chunk, and the clock that they are timed by.
#![allow(dead_code, reason = "each bench uses its part")]

use kvtune::model::{LinearSpec, ModelConfig};
use kvtune::native::product;
use kvtune::ops::attention::{self, Attended, KvBlock, Qkv, Queries, ScoreRule, attention_mass};
use rustix::time::{ClockId, clock_gettime};
use tch::{Device, Kind, Tensor, no_grad};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
/// Rank of the adapter.
const R: i64 = 8;

/// CPU time of the process, seconds.
pub(crate) fn cpu_now() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// The middle one.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// CPU-seconds of `work`: the median of calls for a quarter of a second, and at least 9.
pub(crate) fn cpu_seconds(work: impl Fn()) -> f64 {
    no_grad(|| {
        work();
        let (mut calls, mut total) = (Vec::new(), 0.0);
        while total < 0.25 || calls.len() < 9 {
            let began = cpu_now();
            work();
            calls.push(cpu_now() - began);
            total += calls[calls.len() - 1];
        }
        median(calls)
    })
}

/// CPU-seconds of one product of square matrices with so many operations.
pub(crate) fn product_of(flops: f64) -> f64 {
    let side = (flops / 2.0).cbrt().round() as i64;
    let (a, b) = (randn(&[side, side]), randn(&[side, side]));
    cpu_seconds(|| drop(product(&a, &b)))
}

pub(crate) fn randn(size: &[i64]) -> Tensor {
    Tensor::randn(size, F32)
}

struct Pair {
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    a: Tensor,
    b: Tensor,
    inner: Tensor,
}

/// The work on one chunk in one layer.
pub(crate) struct Work {
    linears: Vec<Pair>,
    hidden: Tensor,
    output: Tensor,
    pub(crate) attention: ChunkAttention,
}

impl Work {
    /// For chunks of so many tokens, and at most so many slots.
    pub(crate) fn new(config: &ModelConfig, (tokens, slots): (i64, i64), kind: Kind) -> Self {
        let randn = |size: &[i64]| randn(size).to_kind(kind);
        let pair = |linear: LinearSpec| {
            let [out, inner] = [linear.out, linear.inner].map(|size| size as i64);
            Pair {
                x: randn(&[tokens, inner]),
                weight: randn(&[out, inner]),
                dy: randn(&[tokens, out]),
                a: randn(&[R, inner]),
                b: randn(&[out, R]),
                inner: randn(&[tokens, R]),
            }
        };
        let (hidden, vocabulary) = (config.hidden_size as i64, config.vocab_size as i64);
        let heads = (
            config.layers[0].attention.num_heads as i64,
            config.layers[0].attention.num_kv_heads as i64,
            config.layers[0].attention.head_dim as i64,
        );
        Self {
            linears: config.layers[0].linears(config.hidden_size).into_iter().map(pair).collect(),
            hidden: randn(&[tokens, hidden]),
            output: randn(&[vocabulary, hidden]),
            attention: ChunkAttention::new(heads, (tokens, slots), kind),
        }
    }

    /// The projections of a layer with an adapter on each.
    pub(crate) fn linear_forward(&self) {
        for Pair { x, weight, a, b, .. } in &self.linears {
            let _ = product(x, weight);
            let _ = product(&product(x, a), b);
        }
    }

    /// What their backward multiplies: gradients of inputs, and of the adapter's matrices.
    pub(crate) fn linear_backward(&self) {
        for Pair { x, weight, dy, a, b, inner } in &self.linears {
            let _ = product(dy, &weight.tr());
            let d_inner = product(dy, &b.tr());
            let across = |short: &Tensor, wide: &Tensor| product(&short.tr().contiguous(), &wide.tr());
            let _ = (product(&d_inner, &a.tr()), across(&d_inner, x), across(inner, dy));
        }
    }

    /// The products of the head, for a target at every token.
    pub(crate) fn head(&self) {
        let logits = product(&self.hidden, &self.output);
        let _ = product(&logits, &self.output.tr());
    }
}

/// A chunk's attention to itself and to older slots.
pub(crate) struct ChunkAttention {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    old_k: Tensor,
    old_v: Tensor,
    scale: f64,
}

impl ChunkAttention {
    pub(crate) fn new((heads, groups, width): (i64, i64, i64), (tokens, slots): (i64, i64), kind: Kind) -> Self {
        let new = |heads, tokens| randn(&[1, heads, tokens, width]).to_kind(kind);
        Self {
            q: new(heads, tokens),
            k: new(groups, tokens),
            v: new(groups, tokens),
            dout: new(heads, tokens),
            old_k: new(groups, slots),
            old_v: new(groups, slots),
            scale: 1.0 / (width as f64).sqrt(),
        }
    }

    /// Operations of one product of queries and visible keys: forward is two, backward five, sums are one.
    pub(crate) fn product(&self, past: i64) -> f64 {
        let size = self.q.size();
        let pairs = size[2] * past + size[2] * (size[2] + 1) / 2;
        (2 * size[1] * size[3] * pairs) as f64
    }

    fn chunk(&self) -> Qkv {
        Qkv::new(&self.q, &self.k, &self.v, ScoreRule::scaled(self.scale))
    }

    fn with_past<T>(&self, past: i64, work: impl FnOnce(&[KvBlock]) -> T) -> T {
        let (k, v) = (self.old_k.narrow(2, 0, past), self.old_v.narrow(2, 0, past));
        let part = KvBlock::new(&k, &v);
        work(if past > 0 { std::slice::from_ref(&part) } else { &[] })
    }

    pub(crate) fn forward(&self, past: i64) -> Attended {
        self.with_past(past, |past| attention::attend(&self.chunk(), past))
    }

    pub(crate) fn backward(&self, past: i64, attended: &Attended) {
        self.with_past(past, |past| drop(attention::attend_backward(&self.dout, &self.chunk(), past, attended)));
    }

    pub(crate) fn sums(&self, past: i64, attended: &Attended) {
        self.with_past(past, |past| drop(attention_mass(&self.chunk(), past, &attended.lse_bhn, Queries::All)));
    }
}
