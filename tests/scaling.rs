//! The simulator of `cargo bench --bench scaling`, against closed forms, and against what must hold of any step.
#![allow(dead_code, reason = "the bench alone has the speeds of real machines")]
#![allow(clippy::float_cmp, reason = "seconds and bytes that are whole or halves add up exactly")]

#[path = "../benches/scaling/machine.rs"]
mod machine;
#[path = "../benches/scaling/pipeline.rs"]
mod pipeline;
#[path = "../benches/scaling/ring.rs"]
mod ring;
#[path = "../benches/scaling/simulator.rs"]
mod simulator;
#[path = "../benches/scaling/work.rs"]
mod work;

use std::collections::HashMap;
use std::path::Path;

use kvtune::measure::random_batch;
use kvtune::model::ModelConfig;
use kvtune::plan::{Flops, Forecast};
use kvtune::recipe::Recipe;
use machine::{CLUSTERS, Cluster, Gpu};
use pipeline::{cut, tasks};
use ring::{Part, Ring};
use serde_json::json;
use simulator::{Leaves, Link, Message, Pass, Task, Timeline, run};
use work::{ColumnWork, Subject};

/// Every operation takes a second, so that seconds count operations.
const COUNTING: Gpu = Gpu { linear: 1.0, attention: 1.0, attention_backward: 1.0 };
const AT_ONCE: Link = Link { bytes_per_second: f64::INFINITY, latency: 0.0 };
const LAYERS: usize = 8;

/// 8 layers of 16 with 64 slots in chunks of 16; nothing is scored.
fn subject(tokens: usize, words: &[&str]) -> Subject {
    let text = "model.path = '.'\nlora.r = 2\ndata = { format = 'tokens', train = 'none' }\n\
                kv_cache = { policy = 'lastrec', cache_length = 64, chunk_size = 16 }\ngrad.chunks_per_cell = 1\n\
                grad.layers_per_cell = 8\ntrain.micro_batch_size = 1";
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let recipe = Recipe::parse(text.to_owned(), Path::new("recipe.toml"), &words).unwrap().recipe;
    let config = json!({
        "model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 24, "vocab_size": 90, "max_position_embeddings": 4096,
    });
    Subject::new(recipe, ModelConfig::from_object(config.as_object().unwrap()).unwrap(), tokens)
}

/// Columns that are all alike, without a head, as if no layer were the lowest.
fn alike(subject: &Subject) -> Vec<ColumnWork> {
    let last = subject.columns().pop().unwrap();
    let two = [last; 2].into_iter().sum::<ColumnWork>().of(&(1..2));
    let one = last.of(&(1..2));
    assert_eq!(two.forward(&COUNTING), 2.0 * one.forward(&COUNTING));
    vec![ColumnWork { lowest: one, head: 0.0, ..last }; subject.plan.columns.len()]
}

/// A step over so many devices, with its tasks.
fn step(subject: &Subject, columns: &[ColumnWork], devices: usize, link: &dyn Fn(usize, usize) -> Link) -> (Vec<Task>, Timeline) {
    let stages = cut(subject, columns, devices, &COUNTING);
    assert_eq!(stages.len(), devices);
    let tasks = tasks(subject, columns, &stages, &COUNTING);
    let timeline = run(devices, &tasks, link);
    (tasks, timeline)
}

fn is_near(found: f64, expected: f64) -> bool {
    (found / expected - 1.0).abs() < 1e-9
}

#[test]
fn a_single_device_takes_the_sum_of_what_the_planner_counts() {
    for words in
        [&[][..], &["grad.layers_per_cell=2"], &["grad.keep_graph=3"], &["grad.layers_per_cell=4", "grad.chunks_per_cell=2"]]
    {
        let subject = subject(203, words);
        let (tasks, timeline) = step(&subject, &subject.columns(), 1, &|_, _| AT_ONCE);
        let counted = subject.step(LAYERS, &subject.recipe.grad, |spec| Flops::of(spec, &subject.plan, 203, 203)).total();
        assert!(is_near(timeline.seconds(), counted), "{words:?}: {} and {counted}", timeline.seconds());
        assert!(timeline.idle().abs() < 1e-12 && timeline.carried.is_empty());
        assert_eq!(
            tasks.iter().filter(|task| task.pass == Pass::Replay).count(),
            LAYERS / subject.recipe.grad.layers_per_cell - 1
        );
    }
}

#[test]
fn several_devices_do_the_work_of_one_and_send_every_hidden_state_up_and_its_gradient_down() {
    let subject = subject(203, &[]);
    let columns = subject.columns();
    let counted = subject.step(LAYERS, &subject.recipe.grad, |spec| Flops::of(spec, &subject.plan, 203, 203)).total();
    for devices in [2, 3, 5, 8, LAYERS + 1] {
        let (_, timeline) = step(&subject, &columns, devices, &|_, _| AT_ONCE);
        assert!(is_near(timeline.busy.iter().sum(), counted), "{devices}");
        assert!(timeline.seconds() < counted && timeline.seconds() > counted / devices as f64);
        let of_states = (203 * 16 * subject.element()) as f64;
        assert!(is_near(timeline.bytes(), 2.0 * (devices - 1) as f64 * of_states), "{devices}");
    }
}

#[test]
fn equal_stages_wait_for_the_first_and_the_last_column_of_each_phase() {
    for (stages, count) in [(2, 4), (4, 13), (8, 3)] {
        // Every graph is kept: forward and backward, nothing else.
        let subject = subject(16 * count, &["grad.keep_graph=100"]);
        let columns = alike(&subject);
        let layers = LAYERS / stages;
        let work = columns[0].of(&(1..1 + layers));
        let (forward, again, backward) = (work.forward(&COUNTING), work.again(&COUNTING), work.backward(&COUNTING));
        let (_, timeline) = step(&subject, &columns, stages, &|_, _| AT_ONCE);
        let (s, m) = (stages as f64, count as f64);
        assert!(is_near(timeline.seconds(), (m + s - 1.0) * (forward + backward)), "{stages} and {count}");
        assert!(is_near(timeline.idle(), (s - 1.0) / (m + s - 1.0)), "{stages} and {count}");
        // Recomputed cells: while the gradient of the first comes down, it is computed again already.
        let subject = self::subject(16 * count, &[]);
        let (_, timeline) = step(&subject, &columns, stages, &|_, _| AT_ONCE);
        let cells = again + s * backward + (m - 1.0) * (again + backward);
        assert!(is_near(timeline.seconds(), (m + s - 1.0) * forward + cells), "{stages} and {count}");
        // A link that is slow in latency alone delays each of the ways through the stages.
        let (_, late) = step(&subject, &columns, stages, &|_, _| Link { latency: backward, ..AT_ONCE });
        assert!(is_near(late.seconds() - timeline.seconds(), 2.0 * (s - 1.0) * backward), "{stages} and {count}");
    }
}

#[test]
fn bands_below_the_highest_of_a_device_hold_up_all_devices_below() {
    let [one_band, bands] = [8, 1].map(|layers| {
        let subject = subject(512, &[&format!("grad.layers_per_cell={layers}")]);
        let columns = alike(&subject);
        step(&subject, &columns, 4, &|_, _| AT_ONCE).1.seconds()
    });
    let alone = {
        let subject = subject(512, &[]);
        step(&subject, &alike(&subject), 1, &|_, _| AT_ONCE).1.seconds()
    };
    // Four devices are less than twice as fast as one, though their replays only write keys and values.
    assert!(alone / one_band > 3.5 && alone / bands < 2.0, "{alone} {one_band} {bands}");
}

/// What holds of every timeline.
fn check(devices: usize, tasks: &[Task], timeline: &Timeline, link: &dyn Fn(usize, usize) -> Link) {
    let spans = &timeline.spans;
    for device in 0..devices {
        let own: Vec<usize> = (0..tasks.len()).filter(|&task| tasks[task].device == device).collect();
        assert!(own.windows(2).all(|pair| spans[pair[0]].1 <= spans[pair[1]].0), "two things at once");
        assert!(is_near(timeline.busy[device], own.iter().map(|&task| tasks[task].seconds).sum()));
    }
    for (task, span) in tasks.iter().zip(spans) {
        assert!((span.1 - span.0 - task.seconds).abs() <= 1e-9 * span.1);
        for Message { to, bytes, leaves } in &task.sends {
            let link = link(task.device, tasks[*to].device);
            let from = if *leaves == Leaves::AtBegin { span.0 } else { span.1 };
            let least = from + bytes / link.bytes_per_second + link.latency;
            assert!(spans[*to].0 >= least * (1.0 - 1e-12), "begins before its message comes");
        }
    }
    let mut free_at: HashMap<(usize, usize), f64> = HashMap::new();
    for message in &timeline.carried {
        let before = free_at.insert((message.from, message.to), message.ends).unwrap_or(0.0);
        let link = link(message.from, message.to);
        assert!(message.begins >= before, "a link carries two messages at once");
        assert!((message.ends - message.begins - message.bytes / link.bytes_per_second).abs() <= 1e-9 * message.ends);
        assert!(message.comes >= message.ends);
    }
    let sent: f64 = tasks.iter().flat_map(|task| &task.sends).map(|message| message.bytes).sum();
    assert!(timeline.bytes() == sent || is_near(timeline.bytes(), sent));
}

#[test]
fn nothing_happens_twice_at_once_or_before_what_it_needs() {
    // Links as slow as the work, and much slower.
    for (bytes_per_second, words) in [(1e-3, &[][..]), (1e-2, &["grad.layers_per_cell=1"]), (1.0, &["grad.keep_graph=4"])] {
        let subject = subject(203, words);
        let link =
            |from: usize, to: usize| Link { bytes_per_second: bytes_per_second * (1 + from + 2 * to) as f64, latency: 100.0 };
        let (tasks, timeline) = step(&subject, &subject.columns(), 5, &link);
        check(5, &tasks, &timeline, &link);
        // A cell follows those above and to the right of it, and its own recomputation.
        let ends = |pass: Pass| -> HashMap<(usize, (usize, usize)), (f64, f64)> {
            let of_pass = tasks.iter().zip(&timeline.spans).filter(|(task, _)| task.pass == pass);
            of_pass.map(|(task, span)| ((task.device, task.cell), *span)).collect()
        };
        let (forward, backward, again) = (ends(Pass::Forward), ends(Pass::Backward), ends(Pass::Recompute));
        let last = subject.plan.columns.len() - 1;
        for (&(device, (band, column)), span) in &backward {
            let right = backward.get(&(device, (band, column + 1)));
            let of_device_above = || {
                (0..LAYERS).filter_map(|band| backward.get(&(device + 1, (band, column)))).map(|span| span.1).fold(0.0, f64::max)
            };
            let above = if band > 0 { backward[&(device, (band - 1, column))].1 } else { of_device_above() };
            assert!(right.is_some() == (column < last) && right.is_none_or(|right| right.1 <= span.0) && above <= span.0);
            assert!(again.get(&(device, (band, column))).is_none_or(|again| again.1 <= span.0));
            let (own, below) =
                (forward[&(device, (0, column))], device.checked_sub(1).map(|below| forward[&(below, (0, column))]));
            assert!(own.1 <= span.0 && below.is_none_or(|below| below.1 <= own.0));
        }
    }
}

/// Three seconds of projections each way, and turns of one second forward and two backward.
const PART: Part = Part { linear: 3.0, linear_backward: 3.0, turn: 1.0, turn_backward: 2.0, block: 8.0, gradients: 16.0 };

fn ring_of(devices: usize, bytes_per_second: f64) -> f64 {
    let link = Link { bytes_per_second, latency: 0.0 };
    let cluster = Cluster { name: "", gpus_of_machine: 1, within: link, between: link };
    let tasks = ring::tasks(devices, &PART);
    let timeline = run(devices, &tasks, &|from, to| cluster.link(from, to));
    check(devices, &tasks, &timeline, &|from, to| cluster.link(from, to));
    let blocks = 3 * devices * (devices - 1);
    assert_eq!(timeline.bytes(), (blocks * 8 + if devices > 1 { devices * devices * 16 } else { 0 }) as f64);
    assert_eq!(ring::layer(devices, &PART, &cluster).seconds(), timeline.seconds());
    timeline.seconds()
}

#[test]
fn a_ring_hides_what_it_sends_or_takes_as_long_as_that() {
    assert_eq!(ring_of(1, 1.0), 9.0 + 1.0 + 1.0 + 2.0);
    // Blocks come while others are attended to; the last gradients alone are waited for.
    assert_eq!(ring_of(4, 32.0), 9.0 + 4.0 * (1.0 + 1.0 + 2.0) + 0.5);
    // A block takes twice as long as a turn: all turns but the first wait for it. In the backward the link never rests.
    let forwards = 2.0 * (3.0 + 3.0 * 2.0 + 1.0);
    assert_eq!(ring_of(4, 4.0), forwards + (4.0 * 16.0 + 3.0 * 8.0) / 4.0 + 3.0);
}

#[test]
fn a_ring_of_one_is_full_attention_on_one_device() {
    let whole = subject(203, &["kv_cache.policy=dense", "kv_cache.cache_length=203", "kv_cache.chunk_size=203"]);
    let ring = Ring::of(&whole, 1, (&COUNTING, &CLUSTERS[0]));
    let counted = whole.step(LAYERS, &whole.recipe.grad, |spec| Flops::of(spec, &whole.plan, 203, 203)).total();
    assert!(is_near(ring.seconds, counted) && ring.idle.abs() < 1e-9 && ring.bytes == 0.0, "{ring:?} {counted}");
    // Chunks are the same work on the same pairs.
    let chunks = subject(203, &["kv_cache.policy=dense", "kv_cache.cache_length=203"]);
    assert!(is_near(step(&chunks, &chunks.columns(), 1, &|_, _| AT_ONCE).1.seconds(), counted));
    let four = Ring::of(&whole, 4, (&COUNTING, &CLUSTERS[0]));
    assert!(is_near(four.seconds * (1.0 - four.idle) * 4.0, counted) && four.memory < ring.memory);
}

#[test]
fn stages_share_the_memory_of_a_device() {
    let subject = subject(203, &[]);
    let whole = subject.memory(&(0..LAYERS));
    let planned = subject.step(LAYERS, &subject.recipe.grad, |spec| {
        Forecast::of(spec, &subject.plan, &random_batch(&subject.recipe, &subject.config, &[203], 1).unwrap())
    });
    assert_eq!([whole.device, whole.host], [planned.device.bytes().0 as f64, planned.host.unwrap().bytes().0 as f64]);
    let parts = [0..3, 3..6, 6..8].map(|layers| subject.memory(&layers));
    assert!(parts.iter().all(|part| part.device < whole.device && part.device > 0.2 * whole.device), "{parts:?} {whole:?}");
    // The undo log of all layers, and the hidden states that came.
    let received = 2.0 * (203 * 16 * subject.element()) as f64;
    let host: f64 = parts.iter().map(|part| part.host).sum();
    assert!(host > received + 0.9 * whole.host && host < received + 1.5 * whole.host, "{parts:?} {whole:?}");
}

#[test]
#[should_panic(expected = "tasks wait for what never comes")]
fn tasks_that_wait_for_each_other_are_noticed() {
    let task = |device: usize, to| Task {
        device,
        pass: Pass::Forward,
        cell: (0, 0),
        seconds: 1.0,
        sends: vec![Message { to, bytes: 1.0, leaves: Leaves::AtEnd }],
    };
    run(2, &[task(0, 1), task(1, 0)], &|from, to| CLUSTERS[0].link(from, to));
}
