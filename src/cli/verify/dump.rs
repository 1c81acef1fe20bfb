//! `kvtune verify --dump`: loss, gradients, logits and evictions, for comparison with other programs.

use std::collections::BTreeMap;
use std::path::Path;

use tch::{Device, Kind, Tensor, no_grad};

use crate::cache::ReplayLog;
use crate::data::Batch;
use crate::engine::{Engine, MicroBatchContext, NoObserver};
use crate::files;
use crate::model::Model;
use crate::store;
use crate::units::Fault;
use crate::verify::{check_finite, walk};

/// Logits are written up to so many values.
const MAX_LOGITS: usize = 1 << 27;

/// Writes `loss.json`, and as `.safetensors` `gradients`, `logits`, `evictions`, `replay_log`, and of a model with experts `routing`.
pub(super) fn write(dir: &Path, engine: &Engine, model: &Model, batch: &Batch, context: MicroBatchContext) -> Result<(), Fault> {
    let step = engine.gradients(model, batch, context, &mut NoObserver)?;
    check_finite(batch, &step.losses)?;
    files::make_dir(dir)?;
    let targets: usize = step.losses.iter().map(|r| r.targets).sum();
    let loss = step.losses.iter().map(|r| r.loss_sum).sum::<f64>() / targets.max(1) as f64;
    let loss = match step.router_loss {
        None => serde_json::json!({ "loss": loss }),
        Some(router) => {
            serde_json::json!({ "loss": loss + context.router_weight * router, "cross_entropy": loss, "router_loss": router })
        }
    };
    files::write_atomic(&dir.join("loss.json"), format!("{loss}\n").as_bytes())?;
    let save = |name: &str, tensors: &[(String, Tensor)]| store::save_tensors(&dir.join(name), tensors, &BTreeMap::new());
    save("gradients.safetensors", &step.gradients.into_iter().collect::<Vec<_>>())?;
    step.log.save(&dir.join("replay_log.safetensors"))?;
    save("evictions.safetensors", &evictions(&step.log, model)?)?;
    let routing = routing(&step.log, batch.sequences.len());
    if !routing.is_empty() {
        save("routing.safetensors", &routing)?;
    }
    if batch.sequences.len() * batch.max_len() * model.config().vocab_size <= MAX_LOGITS {
        save("logits.safetensors", &[("logits".to_owned(), logits(engine, model, batch, context)?)])?;
    }
    Ok(())
}

/// `layer.{l}`: the experts of each token, `(B · T, k)` int32, sequence after sequence, 0 for pads.
fn routing(log: &ReplayLog, sequences: usize) -> Vec<(String, Tensor)> {
    let of_layer = |layer: usize| {
        let chosen_btk = log.routing(layer, sequences, Device::Cpu)?;
        Some((format!("layer.{layer}"), chosen_btk.flatten(0, 1).to_kind(Kind::Int)))
    };
    (0..log.layers.len()).filter_map(of_layer).collect()
}

fn logits(engine: &Engine, model: &Model, batch: &Batch, context: MicroBatchContext) -> Result<Tensor, Fault> {
    let mut parts: Vec<Tensor> = Vec::new();
    let sequences = batch.sequences.len() as i64;
    engine.inspect(model, batch, Some(context), &mut |_start, hidden| {
        let logits = no_grad(|| model.logits(&model.final_norm(hidden))).to_device(Device::Cpu);
        // Zeros for sequences that have ended.
        parts.push(logits.constant_pad_nd([0, 0, 0, 0, 0, sequences - logits.size()[0]]));
    })?;
    Ok(Tensor::cat(&parts, 1))
}

/// `layer.{l}.chunk.{c}`: the positions held after the write of chunk `c`, `(B, G, C_l)`, −1 for empty.
fn evictions(log: &ReplayLog, model: &Model) -> Result<Vec<(String, Tensor)>, Fault> {
    let mut all = Vec::new();
    for (layer, groups) in model.config().num_kv_heads().into_iter().enumerate() {
        let slots = log.cache_lengths[layer];
        for (chunk, held) in walk(log, layer, groups)?.into_iter().enumerate() {
            let batch = held.len();
            let padded = held.into_iter().flatten().flat_map(|mut head| {
                head.resize(slots, -1);
                head
            });
            let flat: Vec<i64> = padded.collect();
            let shaped = Tensor::from_slice(&flat).view([batch as i64, groups as i64, slots as i64]).to_kind(Kind::Int);
            all.push((format!("layer.{layer}.chunk.{chunk}"), shaped));
        }
    }
    Ok(all)
}
