//! Where copies run concurrently with the computation, a step holds what is planned too: what is prefetched is in the plan, to the byte.

#[path = "../../tests/plan/walked.rs"]
mod walked;

use crate::store::{WaitFault, with_delayed_copies};

#[test]
fn what_is_prefetched_is_held_as_it_is_planned() {
    for layers in ["grad.layers_per_cell=1", "grad.layers_per_cell=2", "grad.layers_per_cell=3"] {
        for chunks in ["grad.chunks_per_cell=1", "grad.chunks_per_cell=3"] {
            for more in [
                &["kv_cache.policy=h2o"][..],
                &["kv_cache.policy=lastrec", "train.micro_batch_size=2"],
                &["grad.layer_checkpoints=int8", "grad.undo_log=int4"],
                &["grad.layer_checkpoints_place=file", "grad.undo_log=int8"],
                &["train.weights=all"],
                &["train.weights=all", "model.dtype=bf16"],
                &["train.weights=all", "train.offload=weights"],
                &["model.dtype=bf16"],
                &["grad.keep_graph=2"],
                &["grad.keep_graph=9", "grad.undo_log=int8"],
                &["grad.attention_outputs=keep", "kv_cache.policy=h2o"],
                &["grad.attention_outputs=keep", "grad.keep_graph=2", "train.micro_batch_size=2", "model.dtype=bf16"],
            ] {
                let words = [&[layers, chunks], more].concat();
                with_delayed_copies(WaitFault::Kept, || walked::check(&words));
            }
        }
    }
    let (planned, _) = with_delayed_copies(WaitFault::Kept, || walked::both(&["grad.layers_per_cell=1"], &[walked::TOKENS]));
    assert!(planned.iter().any(|moment| moment.held.ahead.0 > 0));
    let (planned, _) = walked::both(&["grad.layers_per_cell=1"], &[walked::TOKENS]);
    assert!(planned.iter().all(|moment| moment.held.ahead.0 == 0), "on the CPU nothing is fetched before it is used");
}
