//! What loading a model takes: itself, and one tensor at most beside it.

use std::path::Path;
use std::process::Command;

use kvtune::model::{Model, ModelSource, init_model};
use kvtune::native::AllocationMeter;
use kvtune::native::{peak_memory, reset_peak_memory, resident_memory};
use kvtune::recipe::Dtype;
use tch::Device;

/// 18 million weights, of which the embedding is the largest tensor.
const CONFIG: &str = r#"{
    "model_type": "qwen2", "vocab_size": 6000, "hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1536,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16"
}"#;
/// Bytes of the largest tensor in the file, and of all.
const MAX_BYTES: u64 = 6000 * 512 * 2;
const FILE: u64 = 2 * (2 * 6000 * 512 + 4 * 512 * (512 + 256 + 256 + 512 + 3 * 1536));

/// A way to load the model that lies in a directory, by its name.
type Backend = (&'static str, fn(&Path) -> Model);

const WAYS: [Backend; 3] = [
    ("f32 of a bf16 file", |dir| Model::load(dir, Dtype::F32, Device::Cpu).unwrap()),
    ("f32 of a bf16 file, to train", |dir| Model::load_to_train(dir, Dtype::F32, Device::Cpu).unwrap()),
    ("drawn", |dir| Model::load(ModelSource::from(dir).drawn(), Dtype::F32, Device::Cpu).unwrap()),
];

const WAY: &str = "KVTUNE_WAY_TO_LOAD";
const MODEL: &str = "KVTUNE_MODEL_TO_LOAD";

/// Loads in this process, which has had no model before, and looks how far it grows at most: tensors by the allocator's count, and by
/// what is resident whether the pages of the file stay. That depends on the system, so the bound lies halfway to what must not be.
fn check((name, load): Backend, dir: &Path) {
    tch::set_num_threads(1);
    // What libtorch reads in when it first converts belongs to no model.
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
    drop(Model::load(&small, Dtype::Bf16, Device::Cpu).unwrap());
    let before = resident_memory().unwrap();
    reset_peak_memory();
    let meter = AllocationMeter::start(Device::Cpu).unwrap();
    let model = load(dir);
    let (tensors, _) = meter.read();
    let resident = peak_memory().unwrap().saturating_sub(before);
    let weights = 4 * model.config().num_parameters() as u64;
    println!("{name}: weights {weights} bytes, {tensors:?}, {resident} resident");
    assert_eq!(tensors.live as u64, weights, "{name}: what stays");
    assert!(tensors.peak as u64 <= weights + MAX_BYTES, "{name}: {tensors:?}, {weights} of which are the model");
    assert!(resident <= weights + MAX_BYTES + FILE / 2, "{name}: {resident} bytes at the peak of a model of {weights}");
}

/// Each way in a process of its own: memory that was freed and kept would hide what is taken.
#[test]
fn no_second_copy_of_a_model_is_resident() {
    if let (Ok(way), Some(dir)) = (std::env::var(WAY), std::env::var_os(MODEL)) {
        return check(WAYS.into_iter().find(|(name, _)| *name == way).unwrap(), Path::new(&dir));
    }
    if !reset_peak_memory() {
        eprintln!("skipped: the system lets no peak begin anew");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (config, model) = (dir.path().join("config.json"), dir.path().join("model"));
    std::fs::write(&config, CONFIG).unwrap();
    init_model(&config, None, &model, 1).unwrap();
    for (name, _) in WAYS {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child
            .args(["--exact", "weights::no_second_copy_of_a_model_is_resident", "--nocapture"])
            .env(WAY, name)
            .env(MODEL, &model);
        assert!(child.status().unwrap().success(), "{name}");
    }
}
