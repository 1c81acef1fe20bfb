//! A run that is killed at random places, again and again: TensorBoard shows each step once, and nothing is left behind.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use protobuf::Message;
use serde_json::Value;
use tensorboard_proto::event::{Event, SessionLog_SessionStatus};

use super::workshop::{Ended, Workshop, ended, finetune_arguments, names};

const SET: &[&str] = &[
    "train.max_steps=8",
    "train.gradient_accumulation_steps=1",
    "eval.interval=3",
    "checkpoint.save_interval=3",
    "checkpoint.intermediate_save_keep=2",
    "grad.layer_checkpoints_place=file",
    "grad.undo_log_place=file",
];

/// The values of a tag by step, as TensorBoard shows them: a start of a session takes back what files before it say of its step and all
/// behind. A record that was cut short is the end of its file.
fn shown(dir: &Path, tag: &str) -> BTreeMap<i64, Vec<f32>> {
    let mut shown: BTreeMap<i64, Vec<f32>> = BTreeMap::new();
    for bytes in names(dir).iter().map(|name| fs::read(dir.join(name)).unwrap()) {
        let mut rest = &bytes[..];
        while let Some((length, behind)) = rest.split_first_chunk::<8>() {
            let end = 4 + u64::from_le_bytes(*length) as usize;
            let Some(next) = behind.get(end + 4..) else { break };
            let event = Event::parse_from_bytes(&behind[4..end]).unwrap();
            rest = next;
            if event.has_session_log() && event.get_session_log().get_status() == SessionLog_SessionStatus::START {
                shown.retain(|step, _| *step < event.get_step());
            }
            for value in event.get_summary().get_value().iter().filter(|value| value.get_tag() == tag) {
                shown.entry(event.get_step()).or_default().push(value.get_simple_value());
            }
        }
    }
    shown
}

fn assert_shown(workshop: &Workshop, run: &str) {
    let text = fs::read_to_string(workshop.path(run).join("metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (tag, key) in [("train/loss", "loss"), ("eval/loss", "eval_loss")] {
        let expected: BTreeMap<i64, Vec<f32>> =
            lines.iter().filter_map(|line| Some((line["step"].as_i64()?, vec![line[key].as_f64()? as f32]))).collect();
        assert_eq!(shown(&workshop.path(run).join("tensorboard"), tag), expected, "{run}: {tag}");
    }
}

#[test]
fn killed_at_random_each_step_is_shown_once_and_nothing_is_left_behind() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", SET);
    let temporary = workshop.path("tmp");
    fs::create_dir(&temporary).unwrap();
    let (mut seed, mut kills, mut pids) = (7u64, 0, Vec::new());
    // `KVTUNE_KILLS` has a run survive more of them.
    let most = std::env::var("KVTUNE_KILLS").map_or(10, |text| text.parse().unwrap());
    let mut start = |arguments: &[&str]| -> Ended {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let place = if kills < most { format!("any=kill:{}", 30 + (seed >> 33) % 150) } else { String::new() };
        let child = workshop.command(&place, arguments).env("TMPDIR", &temporary).spawn().unwrap();
        pids.push(child.id());
        kills += 1;
        ended(child)
    };
    let mut now = start(&finetune_arguments("run", SET));
    while now.code == Err(9) {
        now = start(&["resume", "run"]);
    }
    now.with(0);
    workshop.assert_left("run", &whole);
    assert_shown(&workshop, "run");
    assert!(names(&workshop.path("run/tensorboard")).len() > 3);
    // With a checkpoint that was damaged, the one before is shown.
    fs::write(workshop.path("run/final/state.json"), "").unwrap();
    for name in ["step-000008", "best"] {
        fs::write(workshop.path("run").join(name).join("state.json"), "").unwrap();
    }
    let words = start(&["resume", "run"]);
    if words.code == Err(9) {
        start(&["resume", "run"]).with(0);
    }
    assert_shown(&workshop, "run");

    assert_eq!(names(&temporary), [""; 0]);
    let shared = fs::read_dir("/dev/shm").into_iter().flatten().flatten().map(|entry| entry.file_name().into_string().unwrap());
    let ours = |name: &String| name.contains("kvtune") || pids.iter().any(|pid| name.contains(&format!("_{pid}_")));
    assert_eq!(shared.filter(ours).collect::<Vec<_>>(), [""; 0]);
}
