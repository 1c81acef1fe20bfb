//! Families of which no other program's numbers lie here, or not with all their keys: logits beside a slow forward pass, written out
//! with plain sums over the tensors of a checkpoint.

use std::collections::BTreeMap;
use std::f64::consts::TAU;

use serde_json::Value;
use tch::{Kind, Tensor};

use super::dense::{furthest, logits};
use crate::support::case::{Case, PLAIN, Trains};
use crate::support::{config, model, weights};

/// A checkpoint with its configuration, and what is said of families in words.
struct ByHand {
    weights: BTreeMap<String, Tensor>,
    config: Value,
}

impl ByHand {
    fn count(&self, key: &str) -> i64 {
        self.config[key].as_i64().unwrap()
    }

    fn linear(&self, name: &str, x_ti: &Tensor) -> Tensor {
        let out = x_ti.matmul(&self.weights[&format!("{name}.weight")].transpose(0, 1));
        self.weights.get(&format!("{name}.bias")).map_or_else(|| out.shallow_clone(), |bias| &out + bias)
    }

    /// Over the last channels.
    fn norm(&self, name: &str, x: &Tensor) -> Tensor {
        let mean = x.square().mean_dim([-1].as_slice(), true, Kind::Double);
        x / (mean + self.config["rms_norm_eps"].as_f64().unwrap()).sqrt() * &self.weights[&format!("{name}.weight")]
    }

    /// Each pair of channels as a complex number, turned by its angle.
    fn rotated(&self, x_thd: &Tensor) -> Tensor {
        let (tokens, heads, width) = x_thd.size3().unwrap();
        let out = x_thd.copy();
        for position in 0..tokens {
            for pair in 0..width / 2 {
                let theta = self.config["rope_theta"].as_f64().unwrap();
                let angle = position as f64 * theta.powf(-2.0 * pair as f64 / width as f64) % TAU;
                let at = |x: &Tensor, channel: i64| x.get(position).narrow(1, channel, 1);
                let (low, high) = (at(x_thd, pair), at(x_thd, pair + width / 2));
                at(&out, pair).copy_(&(&low * angle.cos() - &high * angle.sin()));
                at(&out, pair + width / 2).copy_(&(&low * angle.sin() + &high * angle.cos()));
            }
        }
        assert_eq!(out.size(), [tokens, heads, width]);
        out
    }

    fn attention(&self, layer: &str, x_te: &Tensor, is_rotated: bool) -> Tensor {
        let (heads, groups, width) =
            (self.count("num_attention_heads"), self.count("num_key_value_heads"), self.count("head_dim"));
        let tokens = x_te.size()[0];
        let of =
            |name: &str, heads: i64| self.linear(&format!("{layer}.self_attn.{name}_proj"), x_te).view([tokens, heads, width]);
        let made = |name: &str, heads: i64| {
            let norm = format!("{layer}.self_attn.{name}_norm");
            let x = of(name, heads);
            let x = if self.weights.contains_key(&format!("{norm}.weight")) { self.norm(&norm, &x) } else { x };
            if is_rotated { self.rotated(&x) } else { x }
        };
        let (q, k, v) = (made("q", heads), made("k", groups), of("v", groups));
        let mut rows = Vec::new();
        for position in 0..tokens {
            for head in 0..heads {
                let group = head / (heads / groups);
                let past = |x: &Tensor| x.select(1, group).narrow(0, 0, position + 1);
                let score = past(&k).matmul(&q.get(position).get(head)) / (width as f64).sqrt();
                rows.push(past(&v).transpose(0, 1).matmul(&score.softmax(0, Kind::Double)));
            }
        }
        self.linear(&format!("{layer}.self_attn.o_proj"), &Tensor::stack(&rows, 0).view([tokens, heads * width]))
    }

    /// Of one sequence: `(T)` int64 in, `(T, V)` out.
    fn logits(&self, ids_t: &Tensor, rotates: &[bool]) -> Tensor {
        let mut hidden = self.weights["model.embed_tokens.weight"].index_select(0, ids_t);
        for (layer, &is_rotated) in rotates.iter().enumerate() {
            let layer = format!("model.layers.{layer}");
            hidden += self.attention(&layer, &self.norm(&format!("{layer}.input_layernorm"), &hidden), is_rotated);
            let x = self.norm(&format!("{layer}.post_attention_layernorm"), &hidden);
            let linear = |name: &str, x: &Tensor| self.linear(&format!("{layer}.mlp.{name}_proj"), x);
            hidden += linear("down", &(linear("gate", &x).silu() * linear("up", &x)));
        }
        self.linear("lm_head", &self.norm("model.norm", &hidden))
    }
}

#[test]
fn families_are_what_their_descriptions_say() {
    for (config_json, rotates) in [
        (r#"{"model_type": "qwen3"}"#, [true; 3]),
        (r#"{"model_type": "qwen3", "attention_bias": true}"#, [true; 3]),
        (r#"{"model_type": "llama", "attention_bias": true, "mlp_bias": true}"#, [true; 3]),
        (r#"{"model_type": "smollm3", "no_rope_layers": [0, 1, 0], "mlp_bias": true}"#, [false, true, false]),
    ] {
        let case = Case { config: config_json, trains: Trains::All, ..PLAIN };
        let by_hand = ByHand { weights: weights(&case).into_iter().collect(), config: config(&case) };
        let ids = Tensor::from_slice(&[3i64, 17, 44, 3, 9, 28, 31, 0, 12]);
        let found = tch::no_grad(|| logits(&model(&case), &ids.unsqueeze(0)));
        let error = furthest(&found.get(0), &by_hand.logits(&ids, &rotates));
        assert!(error < 1e-11, "{config_json}: {error:e}");
        println!("{config_json}: {error:.1e}");
    }
}
