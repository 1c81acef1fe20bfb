//! What loading a model takes: itself, and one tensor at most beside it.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test that cannot go on fails, and says what it saw"
)]

use std::path::Path;

use kvtune::model::{Model, ModelConfig, init_model};
use kvtune::recipe::Dtype;
use kvtune::report::memory::{peak, reset_peak, resident};
use tch::Device;

/// About 60 million weights, of which the embedding is the largest tensor.
const CONFIG: &str = r#"{
    "model_type": "qwen2", "vocab_size": 12000, "hidden_size": 768, "num_hidden_layers": 6, "intermediate_size": 2048,
    "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": false, "torch_dtype": "bfloat16"
}"#;
const LARGEST: u64 = 12_000 * 768;
/// What allocators and libtorch's kernels keep, as seen: some buffers of a few hundred kilobytes.
const REST: u64 = 6 << 20;

/// How far the process grows at most while `load` runs, and how far it stays grown with what was loaded.
fn growth<T>(load: impl FnOnce() -> T) -> (u64, u64) {
    let before = resident().unwrap().all.0;
    let was_reset = reset_peak();
    let loaded = load();
    let (most, after) = (peak(was_reset).unwrap().resident.0, resident().unwrap().all.0);
    drop(loaded);
    (most.saturating_sub(before), after.saturating_sub(before))
}

fn check(what: &str, weights: u64, width: u64, load: impl FnOnce() -> Model) {
    let (most, after) = growth(load);
    println!("{what}: weights {} MiB, most {} MiB, after {} MiB", (weights * width) >> 20, most >> 20, after >> 20);
    // The tensor that is being read lies in the file in 2 bytes a number.
    let bound = weights * width + LARGEST * 2 + REST;
    assert!(most <= bound, "{what}: {most} bytes at the peak, expected at most {bound}");
    assert!(after <= weights * width + REST, "{what}: {after} bytes stay");
}

/// One test: the peak is the process'.
#[test]
fn no_second_copy_of_a_model_is_resident() {
    if !reset_peak() {
        eprintln!("skipped: the system lets no peak begin anew");
        return;
    }
    tch::set_num_threads(1);
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    std::fs::write(&config, CONFIG).unwrap();
    let model = dir.path().join("model");
    let weights = init_model(&config, None, &model, 1).unwrap().num_parameters() as u64;
    // What libtorch reads in when it first converts belongs to no model.
    drop(
        Model::load(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/model-qwen2")), Dtype::Bf16, Device::Cpu)
            .unwrap(),
    );
    check("f32 of a bf16 file", weights, 4, || Model::load(&model, Dtype::F32, Device::Cpu).unwrap());
    check("f32 of a bf16 file, to train", weights, 4, || Model::load_to_train(&model, Dtype::F32, Device::Cpu).unwrap());
    check("drawn", weights, 4, || Model::drawn(&model, Dtype::F32, Device::Cpu).unwrap());
    assert_eq!(ModelConfig::load(&model).unwrap().num_parameters() as u64, weights);
}
