//! What the planner says that the engine holds, against what the engine says, event by event and to the byte.

use kvtune::engine::{MemoryByPart, MemoryPart, MemoryPlace};
use kvtune::plan::Span;
use kvtune::units::Bytes;

use super::walked::{TOKENS, both, check, check_event, check_sequences};

#[test]
fn every_policy_holds_what_is_planned() {
    for policy in ["h2o", "h2o-vlen", "lastrec", "keydiff", "knorm", "snapkv", "tova", "streaming-llm", "expected-attention"] {
        let policy = format!("kv_cache.policy={policy}");
        check(&[&policy, "grad.layers_per_cell=2"]);
        check(&[&policy, "grad.layers_per_cell=3", "grad.chunks_per_cell=2", "train.micro_batch_size=2"]);
    }
}

#[test]
fn every_tiling_and_store_holds_what_is_planned() {
    for layers in ["grad.layers_per_cell=1", "grad.layers_per_cell=2", "grad.layers_per_cell=3"] {
        for chunks in ["grad.chunks_per_cell=1", "grad.chunks_per_cell=3", "grad.chunks_per_cell=100"] {
            for stores in [
                ["grad.layer_checkpoints=plain", "grad.undo_log=plain"],
                ["grad.layer_checkpoints=int8", "grad.undo_log=int4"],
                ["grad.layer_checkpoints_place=file", "grad.undo_log=int8"],
                ["grad.layer_checkpoints=int4", "grad.undo_log_place=file"],
            ] {
                check(&[layers, chunks, stores[0], stores[1]]);
            }
        }
    }
}

#[test]
fn other_caches_kinds_heads_and_full_training_hold_what_is_planned() {
    check(&["kv_cache.buffer=int8", "grad.layers_per_cell=2"]);
    check(&["kv_cache.buffer=int8", "kv_cache.policy=qh2o", "grad.layers_per_cell=2"]);
    check(&["kv_cache.buffer=int4", "train.micro_batch_size=2"]);
    check(&["kv_cache.cache_length=[80, 64, 48]", "grad.chunks_per_cell=2"]);
    check(&["kv_cache.cache_length=400"]);
    check(&["kv_cache.policy=dense", "kv_cache.storage=growing", "grad.layers_per_cell=2"]);
    check(&["kv_cache.policy=dense", "kv_cache.storage=paged", "train.micro_batch_size=2"]);
    check(&["model.dtype=bf16", "grad.layers_per_cell=2"]);
    check(&["model.dtype=f64", "grad.chunks_per_cell=2"]);
    check(&["train.weights=all", "grad.layers_per_cell=2"]);
    check(&["head.kind=seq_classification_on_logits", "head.label_tokens=[3, 5]", "grad.layers_per_cell=1"]);
    check(&["lora.target_modules=[\"down_proj\", \"v_proj\"]", "lora.r=3"]);
    for kind in ["model.dtype=f32", "model.dtype=bf16"] {
        check(&["lora.modules_to_save=[\"lm_head\"]", kind, "grad.layers_per_cell=2"]);
        check(&["lora.modules_to_save=[\"embed_tokens\", \"lm_head\"]", kind, "grad.layers_per_cell=3"]);
        check(&["lora.modules_to_save=[\"embed_tokens\", \"norm\"]", kind, "grad.layers_per_cell=2"]);
        check(&["lora.target_modules=[\"embed_tokens\", \"v_proj\"]", kind, "grad.layers_per_cell=1"]);
        check(&["lora.target_modules=[\"lm_head\", \"v_proj\"]", kind, "grad.layers_per_cell=2"]);
        check(&["lora.target_modules=[\"lm_head\"]", "lora.use_dora=true", kind, "grad.layers_per_cell=3"]);
        check(&["head.kind=seq_classification", "head.num_labels=3", kind, "grad.layers_per_cell=2"]);
    }
}

#[test]
fn kept_graphs_hold_what_is_planned() {
    for kept in ["grad.keep_graph=1", "grad.keep_graph=6", "grad.keep_graph=1000"] {
        for layers in ["grad.layers_per_cell=1", "grad.layers_per_cell=2", "grad.layers_per_cell=3"] {
            check(&[kept, layers, "kv_cache.policy=h2o"]);
            check(&[kept, layers, "grad.chunks_per_cell=2", "kv_cache.policy=lastrec", "train.micro_batch_size=2"]);
            check(&[kept, layers, "grad.layer_checkpoints=int8", "grad.undo_log=int8"]);
            check(&[kept, layers, "train.weights=all", "model.dtype=bf16"]);
        }
        check(&[kept, "kv_cache.buffer=int8", "grad.layers_per_cell=2", "head.kind=seq_classification", "head.num_labels=3"]);
        check(&[kept, "kv_cache.policy=dense", "kv_cache.storage=growing", "grad.chunks_per_cell=1"]);
        check_sequences(&[kept, "kv_cache.policy=h2o", "grad.layers_per_cell=2", "grad.chunks_per_cell=2"], &[90, TOKENS, 20]);
    }
}

#[test]
fn kept_outputs_hold_what_is_planned() {
    let keep = "grad.attention_outputs=keep";
    for layers in ["grad.layers_per_cell=1", "grad.layers_per_cell=2", "grad.layers_per_cell=3"] {
        check(&[keep, layers, "kv_cache.policy=h2o"]);
        check(&[keep, layers, "grad.chunks_per_cell=1", "grad.keep_graph=6", "kv_cache.buffer=int8"]);
        check(&[keep, layers, "train.weights=all", "model.dtype=bf16"]);
        check_sequences(&[keep, layers, "kv_cache.policy=h2o", "grad.chunks_per_cell=2"], &[90, TOKENS, 20]);
    }
    let (planned, _) = both(&[keep], &[TOKENS]);
    // 3 layers with 4 heads of 8 numbers and a log-sum-exp, all of which wait at the end of the forward phase.
    let most = planned.iter().map(|moment| moment.held.attention_outputs).max();
    assert_eq!(most, Some(Bytes(3 * TOKENS as u64 * 4 * (8 + 1) * 4)));
}

#[test]
fn sequences_of_different_lengths_hold_what_is_planned() {
    for lengths in [&[90, TOKENS, 20][..], &[1, 150], &[60, 50]] {
        check_sequences(&["kv_cache.policy=h2o", "grad.layers_per_cell=2"], lengths);
        check_sequences(&["kv_cache.policy=lastrec", "grad.chunks_per_cell=3", "grad.undo_log=int8"], lengths);
        check_sequences(&["kv_cache.buffer=int8", "grad.chunks_per_cell=2"], lengths);
    }
    check_sequences(&["kv_cache.policy=dense", "kv_cache.storage=growing"], &[90, TOKENS, 20]);
}

/// Compares event by event, where caches are planned only as the most: at most `more` of what is told beyond it.
fn check_rough(words: &[&str], more: &dyn Fn(&Span, u64) -> u64) {
    let (planned, told) = both(words, &[TOKENS; 2]);
    assert_eq!(planned.len(), told.len() + 2, "{words:?}");
    for (i, (planned, (part, memory))) in planned.iter().zip(told).enumerate() {
        let of_caches = |memory: &MemoryByPart| memory.get(MemoryPart::KvCache, MemoryPlace::Device);
        let (most, found) = (of_caches(&planned.held.by_part()), of_caches(&memory));
        let bound = found.0 + more(planned, found.0);
        assert!(most >= found && most.0 <= bound, "{words:?}, event {i}: {most} planned, {found} told");
        // With caches as they are, the rest is exact.
        let mut exact = memory;
        exact.add(MemoryPart::KvCache, MemoryPlace::Device, Bytes(most.0 - found.0));
        check_event(planned, (part, exact), &format!("{words:?}, event {i}"));
    }
}

/// Three layers are planned to be on the device at every moment; between two turns there are fewer.
#[test]
fn caches_that_wait_on_the_host_hold_at_most_what_is_planned() {
    for tiling in [["grad.layers_per_cell=1", "grad.chunks_per_cell=1"], ["grad.layers_per_cell=3", "grad.chunks_per_cell=3"]] {
        for more in ["kv_cache.policy=h2o", "kv_cache.buffer=int8"] {
            check_rough(&["kv_cache.cpu_offload=true", tiling[0], tiling[1], more], &|planned, _| planned.held.waiting_caches.0);
        }
    }
}

/// Heads' shares are known when the choices are, and lie between the cache length and what is planned, here one and a half times that.
#[test]
fn adakv_holds_at_most_what_is_planned() {
    check_rough(&["kv_cache.policy.adakv={ policy = 'keydiff', floor = 0.5 }", "grad.layers_per_cell=2"], &|_, told| {
        told.div_ceil(2)
    });
}
