//! Ring attention over the same sequence: every device has all layers and a part of the tokens, sees every key, and passes keys and values
//! on to its neighbour while it attends to them.

use super::machine::{Cluster, Gpu};
use super::simulator::{Leaves, Message, Pass, Task, Timeline, run};
use super::work::{Operations, Subject};

/// What a device does in one layer, and what it passes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) linear: f64,
    pub(crate) linear_backward: f64,
    /// Seconds of one turn: a block of queries attends to a block of keys.
    pub(crate) turn: f64,
    pub(crate) turn_backward: f64,
    /// Bytes of a block of keys and values.
    pub(crate) block: f64,
    /// Bytes of their gradients, in f32.
    pub(crate) gradients: f64,
}

/// A step of several devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    pub(crate) seconds: f64,
    pub(crate) idle: f64,
    pub(crate) bytes: f64,
    /// The most bytes at a time on a device.
    pub(crate) memory: f64,
}

impl Ring {
    /// Of a subject that is one chunk and keeps everything. Each device has tokens from the start and the end alike, so that causal attention
    /// is the same work for all. Layers are recomputed, as in the pipeline.
    pub(crate) fn of(subject: &Subject, devices: usize, (gpu, cluster): (&Gpu, &Cluster)) -> Self {
        let (layers, count) = (subject.config.num_layers() as f64, devices as f64);
        let [column] = subject.columns()[..] else { panic!("one chunk") };
        let all = column.of(&(0..subject.config.num_layers()));
        let part = Part::of(subject, &all, (devices, gpu));
        // Layers follow each other, and are alike.
        let timeline = layer(devices, &part, cluster);
        let head = column.head / gpu.linear / count;
        let seconds = layers * timeline.seconds() + head;
        let busy = layers * timeline.busy.iter().sum::<f64>() + count * head;
        let idle = 1.0 - busy / (count * seconds);
        Self { seconds, idle, bytes: layers * timeline.bytes(), memory: memory(subject, devices, &part) }
    }
}

impl Part {
    fn of(subject: &Subject, all: &Operations, (devices, gpu): (usize, &Gpu)) -> Self {
        let (layers, count) = (subject.config.num_layers() as f64, devices as f64);
        let [_, keys, values] = subject.config.layers[0].attention.widths();
        let numbers = ((keys + values) * subject.tokens()) as f64 / count;
        Self {
            linear: all.linear / gpu.linear / layers / count,
            linear_backward: all.linear_backward / gpu.linear / layers / count,
            turn: all.attention / gpu.attention / layers / count / count,
            turn_backward: all.attention_backward / gpu.attention_backward / layers / count / count,
            block: numbers * subject.element() as f64,
            gradients: numbers * 4.0,
        }
    }
}

/// One layer: forward, and later forward once more and backward.
pub(crate) fn layer(devices: usize, part: &Part, cluster: &Cluster) -> Timeline {
    run(devices, &tasks(devices, part), &|from, to| cluster.link(from, to))
}

/// Its tasks: in the second place of a cell is the turn.
pub(crate) fn tasks(devices: usize, part: &Part) -> Vec<Task> {
    let mut tasks = Vec::new();
    // A device's turns of a pass begin at these places of its program.
    let passes = [(Pass::Forward, 1), (Pass::Recompute, devices + 2), (Pass::Backward, 2 * devices + 2)];
    let length = 3 * devices + 3;
    for device in 0..devices {
        let task = |pass, turn, seconds| Task { device, pass, cell: (0, turn), seconds, sends: Vec::new() };
        for pass in [Pass::Forward, Pass::Recompute] {
            tasks.push(task(pass, 0, part.linear));
            tasks.extend((0..devices).map(|turn| task(pass, turn, part.turn)));
        }
        tasks.extend((0..devices).map(|turn| task(Pass::Backward, turn, part.turn_backward)));
        tasks.push(task(Pass::Backward, devices, part.linear_backward));
    }
    for device in 0..devices {
        let (own, next) = (device * length, (device + 1) % devices * length);
        for (pass, first) in passes {
            for turn in 0..devices {
                let at = |place: usize| next + first + place;
                let sends = &mut tasks[own + first + turn].sends;
                if turn + 1 < devices {
                    sends.push(Message { to: at(turn + 1), bytes: part.block, leaves: Leaves::AtBegin });
                }
                // The gradients of a block follow it a turn later, and come home before the projections' backward.
                if pass == Pass::Backward && devices > 1 {
                    sends.push(Message { to: at((turn + 2).min(devices)), bytes: part.gradients, leaves: Leaves::AtEnd });
                }
            }
        }
    }
    tasks
}

/// Weights, what is trained, the input of every layer, and of one layer what attention holds, the MLP being run block by block: as little as
/// it can be.
fn memory(subject: &Subject, devices: usize, part: &Part) -> f64 {
    let config = &subject.config;
    let standing = subject.step(config.num_layers(), &subject.recipe.grad, |spec| {
        let [weights, _] = spec.weights();
        weights.0 + spec.adapter().0 + spec.trained_bytes().0 + spec.optimizer_state().0
    });
    let tokens = subject.tokens() as f64 / devices as f64;
    let [queries, _, _] = config.layers[0].attention.widths();
    // Inputs of the layers, and the stream with its gradient; queries and output with their gradients.
    let numbers = tokens * ((config.num_layers() + 2) * config.hidden_size + 4 * queries) as f64;
    // A block that is attended to, one that comes and one's own; gradients that are added to and those that come.
    standing as f64 + numbers * subject.element() as f64 + 3.0 * part.block + 2.0 * part.gradients
}
