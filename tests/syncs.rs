//! No operation inside a layer band lets the host wait for the device, which would run dry meanwhile.

use std::fs;
use std::path::{Path, PathBuf};

use kvtune::recipe::{BufferKind, StoreForm, StoreRecipe};
use tch::{Device, Kind, Tensor};

use crate::support::case::{Case, HeadKind, IN_MEMORY, PLAIN, Trains, Width, registered_policies};
use crate::support::syncs::{SyncNotes, syncs_of_step};

/// Beside every policy with its defaults: what else chooses other operations.
const FURTHER: &[Case] = &[
    Case { name: "h2o, normalised", policy: "h2o", params: "normalize_scores = true", ..PLAIN },
    Case { name: "qh2o-vlen, four bits", policy: "qh2o-vlen", buffer: BufferKind::Int4, ..PLAIN },
    Case { name: "dropout", dropout: 0.1, ..PLAIN },
    Case { name: "classification", head: HeadKind::Classify, ..PLAIN },
    Case { name: "a teacher", head: HeadKind::Distilled, ..PLAIN },
    Case { name: "caches that wait", is_offloaded: true, layers_per_cell: 3, ..PLAIN },
];

/// Layers of a cell, where they are not the case's own, its chunks, and what is trained.
const TILINGS: [(Option<usize>, usize, Trains); 8] = [
    (None, 1, Trains::Adapter),
    (Some(3), 3, Trains::All),
    (None, 1, Trains::All),
    (None, 3, Trains::Adapter),
    (None, 3, Trains::All),
    (Some(3), 1, Trains::Adapter),
    (Some(3), 1, Trains::All),
    (Some(3), 3, Trains::Adapter),
];

#[test]
fn nothing_waits_inside_a_row() {
    // To save time each policy meets the first two tilings.
    for (cases, count) in [(registered_policies(), 2), (FURTHER.to_vec(), TILINGS.len())] {
        for case in cases {
            for (layers, chunks, trains) in TILINGS[..count].iter().copied() {
                let lora = if trains == Trains::Adapter { case.lora } else { &[] };
                let layers_per_cell = layers.unwrap_or(case.layers_per_cell);
                let case = Case { layers_per_cell, width: Width::Chunks(chunks), lora, trains, ..case };
                assert_eq!(syncs_of_step(&case), Vec::<String>::new(), "{case:?}");
            }
        }
    }
}

/// Which channels are kept apart is looked for in every tensor that is rounded; nothing else waits there.
#[test]
fn rounding_stores_look_for_loud_channels_and_for_nothing_else() {
    for form in [StoreForm::Int8, StoreForm::Int4] {
        let rounding = StoreRecipe { form, ..IN_MEMORY };
        let case = Case { layer_checkpoints: rounding, undo_log: rounding, ..PLAIN };
        let found = syncs_of_step(&case);
        assert!(found.iter().all(|what| *what == "places looked for"), "{form:?}: {found:?}");
    }
}

/// What brings numbers of a device to the host in a way that no count sees on a CPU, or numbers of the host to a device while both wait.
const WAITING: &[&str] = &[
    "to_device(Device::Cpu)",
    "to_device(tch::Device::Cpu)",
    "copy_data",
    "::try_from(",
    "double_value(",
    "int64_value(",
    "cuda::wait(",
];

/// Rooms that run inside a row.
const ROOMS: &[&str] = &["engine", "cache", "model", "head", "ops", "store"];

/// Lines that may: how many of a file, and why.
const MAY_WAIT: &[(&str, usize, &str)] = &[
    (
        "cache/budget.rs",
        3,
        "shares out a layer's slots, once a step and layer: the length of its buffers follows from the scores",
    ),
    ("cache/replay.rs", 1, "a fault for tests"),
    ("cache/snapshot.rs", 1, "a copy of a cache knows its positions; none is made inside a step"),
    ("cache/victims.rs", 2, "reads choices on the host, which nothing does inside a row but for those that the host has made"),
    ("engine/importance/gate_fit.rs", 1, "says how good a fit is, after all batches of a calibration"),
    ("engine/importance/slot_demand.rs", 1, "shares slots out, after all batches of a calibration"),
    ("engine/router_balance.rs", 1, "the figure of a step, when it is made"),
    ("ops/experts.rs", 1, "asks how many tokens go to each expert: its products have as many rows"),
    ("model/adapter_files.rs", 1, "checks an adapter on the host, when a model takes it"),
    ("model/linear.rs", 1, "takes the beginning of an adapter to the host, when a model takes it"),
    ("model/quantised/load.rs", 12, "checks what is packed, when a model is loaded, on the host"),
    ("model/quantised/files.rs", 1, "looks for zeros in a file, when it is opened"),
    ("model/quantised/gguf_written.rs", 1, "writes files"),
    ("model/quantised/quantise.rs", 2, "packs what is loaded, on the host"),
    ("model/weights.rs", 1, "takes to the host what is packed there, when a model is loaded"),
    ("model/embedding.rs", 1, "rounds a factor, when a model is loaded"),
    ("ops/frequencies.rs", 3, "makes the frequencies of a batch, before its first column"),
    ("ops/attention/selector.rs", 1, "compares a kernel with the blocks, before a step"),
    ("engine/attend.rs", 1, "as the budgets of a layer, once for all layers"),
    ("head/column.rs", 2, "reads figures that have come, or after the step"),
    ("store/arena.rs", 2, "writes to a file what must be on the host for it"),
    ("store/tensor_io.rs", 4, "saves and loads files"),
];

/// The part of a file before its tests.
fn source(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    text.split("#[cfg(test)]\nmod tests").next().unwrap().to_owned()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    // A file of tests alone runs in no row.
    let is_code = |path: &PathBuf| path.file_name().is_none_or(|name| name != "tests.rs");
    entries.filter(is_code).flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Lines of code that would wait, a host's number being one that was read from a tensor.
fn waiting_lines(text: &str) -> Vec<&str> {
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let reads = |line: &&str| {
        WAITING.iter().any(|word| line.contains(word) && (*word != "::try_from(" || line.contains("Vec")))
            || (line.contains("from_slice(") && line.contains(".to_device("))
    };
    text.lines().filter(is_code).filter(reads).collect()
}

#[test]
fn lines_that_would_wait_are_seen() {
    let bad = "let x = Vec::<i64>::try_from(y)?;\nlet z = Tensor::from_slice(&a).to_device(device);\n// x.double_value(&[])\n\
               let n = usize::try_from(3);";
    assert_eq!(waiting_lines(bad).len(), 2);
}

#[test]
fn lines_that_would_wait_are_known() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for path in ROOMS.iter().flat_map(|room| files(&root.join(room))) {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        let text = source(&path);
        let found = waiting_lines(&text);
        let allowed = MAY_WAIT.iter().find(|(file, ..)| *file == name).map_or(0, |(_, count, _)| *count);
        assert!(
            found.len() <= allowed,
            "`{name}` has {} lines that wait, {allowed} are known:\n{}",
            found.len(),
            found.join("\n")
        );
    }
}

fn noted<T>(work: impl FnOnce() -> T) -> Vec<String> {
    let notes = SyncNotes::start();
    let _ = work();
    notes.read()
}

#[test]
fn what_the_host_must_know_is_noted() {
    let x = Tensor::arange(8, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    assert_eq!(noted(|| x.sum(Kind::Float).double_value(&[])), ["number read"]);
    assert_eq!(noted(|| x.gt(3.0).nonzero()), ["places looked for"]);
    assert_eq!(noted(|| x.index(&[Some(x.gt(3.0))])), ["places looked for"], "a mask as an index");
    assert_eq!(noted(|| x.detach().equal(&x.detach())), ["tensors compared"]);
    assert!(noted(|| (&x * 2.0).softmax(0, Kind::Float).topk(2, 0, true, true)).is_empty());
    // No notes are taken any more.
    x.sum(Kind::Float).double_value(&[]);
    assert!(noted(|| ()).is_empty());
}

/// On a CPU nothing waits for an event, so that the name alone can be compared.
#[test]
fn the_shim_s_own_wait_has_the_name_that_is_noted() {
    const NAME: &str = "\"kvtune::event_synchronize\"";
    let asked = include_str!("../src/native/shim/cuda/streams.cpp");
    assert!(asked.contains(&format!("RECORD_FUNCTION({NAME}, ")) && include_str!("support/waits.cpp").contains(NAME));
}

#[test]
fn a_backward_is_noted_and_other_threads_are_not() {
    let x = Tensor::arange(8, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let y = &x * 1.0;
    let read = x.detach();
    kvtune::native::attach_backward(&[&x], &[&y], move |grads| {
        read.double_value(&[3]);
        Ok(grads)
    })
    .unwrap();
    let found = noted(|| {
        std::thread::spawn(|| Tensor::from(1.0).double_value(&[])).join().unwrap();
        y.sum(Kind::Float).backward();
    });
    assert_eq!(found, ["number read"]);
}
