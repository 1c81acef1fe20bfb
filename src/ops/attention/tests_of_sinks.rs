//! Attention sinks on every backend, against plain attention under autograd.

use tch::{Device, Kind, Tensor};

use super::tests::{OPTS, WAYS, worst};
use super::*;

/// Sink logits far below the scores, among them and far above, against a textbook's softmax with one more column, under autograd.
#[test]
fn an_attention_sink_takes_its_share_in_every_way() {
    tch::manual_seed(8);
    for (n, past, h, g, d) in [(5, 7, 6, 2, 8), (1, 3, 4, 4, 8), (70, 300, 4, 2, 8)] {
        for loudness in [-40.0, 0.0, 3.0, 60.0] {
            let [q, dout] = [h, h].map(|heads| Tensor::randn([2, heads, n, d], OPTS));
            let [k, v] = [g, g].map(|heads| Tensor::randn([2, heads, past + n, d], OPTS));
            let sink_logit = Tensor::randn([h], OPTS) + loudness;
            let [q, k, v, sink_logit] = [q, k, v, sink_logit].map(|x| x.set_requires_grad(true));
            let wide = |x: &Tensor| x.repeat_interleave_self_int(h / g, 1, None);
            let later = Tensor::ones([n, past + n], (Kind::Bool, Device::Cpu)).triu(past + 1);
            let scores = (q.matmul(&wide(&k).transpose(-1, -2)) * 0.4).masked_fill(&later, f64::NEG_INFINITY);
            let column = sink_logit.view([1, h, 1, 1]).expand([2, h, n, 1], false);
            let weights = Tensor::cat(&[scores, column], -1).softmax(-1, Kind::Double).narrow(-1, 0, past + n);
            let expected = weights.matmul(&wide(&v));
            (&expected * &dout).sum(Kind::Double).backward();

            let [q0, k0, v0, sink_logit0] = [&q, &k, &v, &sink_logit].map(Tensor::detach);
            let part = |x: &Tensor, start, len| x.narrow(2, start, len).contiguous();
            let (old_k, old_v, own_k, own_v) = (part(&k0, 0, past), part(&v0, 0, past), part(&k0, past, n), part(&v0, past, n));
            let of_chunk = Qkv::new(&q0, &own_k, &own_v, ScoreRule::scaled(0.4));
            let joined = Some(KvBlock::new(&k0, &v0));
            let chunk = Qkv { sink_logit_h: Some(sink_logit0.shallow_clone()), joined, ..of_chunk };
            let pages = [KvBlock::new(&old_k, &old_v)];
            let sums = weights.detach().sum_dim_intlist(&[2i64][..], false, Kind::Double);
            let mean = sums.view([2, g, h / g, past + n]).mean_dim(&[2i64][..], false, Kind::Double);
            for backend in WAYS {
                forced::with(backend, || {
                    let (attended, on_the_way) = attend_and_sum(&chunk, &pages, Some(Queries::All));
                    assert!(worst(&attended.out_bhnd, &expected) < 1e-13, "{backend:?}, {n} tokens, {loudness}");
                    let grads = attend_backward(&dout, &chunk, &pages, &attended);
                    let all = |old: &Tensor, new: &Tensor| Tensor::cat(&[old, new], 2);
                    assert!(worst(&grads.dq_bhnd, &q.grad()) < 1e-12);
                    let mut past = grads.past.into_iter();
                    let KvBlock { k: past_k, v: past_v, .. } = past.next().unwrap();
                    assert!(worst(&all(&past_k, &grads.own.k), &k.grad()) < 1e-12);
                    assert!(worst(&all(&past_v, &grads.own.v), &v.grad()) < 1e-12);
                    assert!(worst(&sink_logit_backward(&dout, &attended, &sink_logit0), &sink_logit.grad()) < 1e-12);
                    assert!(worst(&attention_mass(&chunk, &pages, &attended.lse_bhn, Queries::All), &mean) < 1e-12);
                    assert!(on_the_way.is_none(), "it would be the mass without the sink logit");
                });
            }
        }
    }
}
