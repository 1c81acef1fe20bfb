//! What the planner says as lines of JSON.

use serde_json::{Value, json};

use crate::plan::{Alternative, Decision, Machine, PlannedPeak, StepPart};
use crate::report::console;
use crate::units::{Bytes, Fault};

/// Keys as `docs/reference/plan.md` has them; `kind` says what the line is.
pub(in crate::cli) fn alternative(kind: &str, alternative: &Alternative) -> Value {
    let Alternative { grad, cells, kept, forecast, device, host, operations, seconds, fits } = alternative;
    let peak = |peak: &PlannedPeak| {
        let parts: Vec<Value> = peak.parts.iter().map(|(part, bytes)| json!({ "part": part, "bytes": bytes.0 })).collect();
        json!({ "peak_in": peak.part.name(), "tensor_bytes": peak.bytes().0, "parts": parts })
    };
    let by_part = |seconds: &[f64; 6]| {
        let parts = StepPart::ALL.into_iter().zip(seconds);
        Value::Object(parts.map(|(part, seconds)| (part.name().to_owned(), json!(seconds))).collect())
    };
    json!({
        "kind": kind, "fits": fits, "layers_per_cell": grad.layers_per_cell, "chunks_per_cell": grad.chunks_per_cell,
        "layer_checkpoints": grad.layer_checkpoints.form.name(), "layer_checkpoints_place": grad.layer_checkpoints.place.name(),
        "undo_log": grad.undo_log.form.name(), "undo_log_place": grad.undo_log.place.name(),
        "attention_outputs": grad.attention_outputs.name(), "layer_bands": cells.0, "columns": cells.1, "kept_cells": kept,
        "process_bytes": host.0, "device_bytes": device.map(|bytes| bytes.0), "file_bytes": forecast.files.0,
        "tensors": peak(&forecast.device), "host_tensors": forecast.host.as_ref().map(peak),
        "operations": operations, "seconds": seconds.as_ref().map(by_part),
    })
}

pub(super) fn print(decision: &Decision, others: &[Alternative], machine: Machine) -> Result<(), Fault> {
    let limit = |bytes: Option<Bytes>| bytes.map(|bytes| bytes.0);
    let setup = json!({
        "kind": "machine", "device": if machine.device.is_cuda() { "cuda" } else { "cpu" }, "threads": machine.threads,
        "baseline_bytes": machine.baseline.bytes().0, "host_limit_bytes": limit(machine.limits.host), "device_limit_bytes": limit(machine.limits.device),
        "scratch_limit_bytes": limit(machine.limits.files), "is_timed": machine.rate.is_some(),
    });
    console::result(&setup.to_string())?;
    console::result(&alternative("chosen", &decision.chosen).to_string())?;
    others
        .iter()
        .filter(|other| other.grad != decision.chosen.grad)
        .try_for_each(|other| console::result(&alternative("alternative", other).to_string()))
}
