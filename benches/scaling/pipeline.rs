//! A step over layers that lie on several devices: each runs the engine's own schedule of its layers, hidden states go up, their gradients
//! come down.

use std::ops::Range;

use kvtune::engine::Schedule;

use super::machine::Gpu;
use super::simulator::{Leaves, Message, Pass, Task};
use super::work::{ColumnWork, Subject};

/// What a device has and does.
pub(crate) struct Stage {
    pub(crate) layers: Range<usize>,
    /// `None` where it has the head alone.
    pub(crate) schedule: Option<Schedule>,
}

/// Seconds by column of some layers.
struct Seconds<'a> {
    gpu: &'a Gpu,
    columns: &'a [ColumnWork],
}

impl Seconds<'_> {
    fn head(&self, column: usize) -> f64 {
        self.columns[column].head / self.gpu.linear
    }
}

/// Cuts the layers for so many devices, at most one for each layer and one for the head. The last one has the head: it gets so many layers,
/// or none, that the slowest forward phase and the slowest backward phase take least together, and the others share the rest.
pub(crate) fn cut(subject: &Subject, columns: &[ColumnWork], devices: usize, gpu: &Gpu) -> Vec<Stage> {
    let (layers, all) = (subject.config.num_layers(), columns.iter().copied().sum::<ColumnWork>());
    let (devices, head) = (devices.clamp(1, layers + 1), all.head / gpu.linear);
    let cut_at = |of_last: usize| {
        let (below, parts) = (layers - of_last, devices - 1);
        let mut cuts: Vec<Range<usize>> = (0..parts).map(|at| at * below / parts..(at + 1) * below / parts).collect();
        cuts.push(below..layers);
        cuts
    };
    let slowest = |of_last: &usize| {
        let cuts = cut_at(*of_last);
        let has_head_in_cells = *of_last > 0 && subject.schedule(*of_last).has_head_in_cells();
        let phases = cuts.iter().enumerate().map(|(at, layers)| {
            let work = all.of(layers);
            let (forward, cells) = (work.forward(gpu), work.again(gpu) + work.backward(gpu));
            let head = if at + 1 == devices { head } else { 0.0 };
            if has_head_in_cells { [forward, cells + head] } else { [forward + head, cells] }
        });
        phases.fold([0.0f64; 2], |most, phase| [most[0].max(phase[0]), most[1].max(phase[1])]).iter().sum::<f64>()
    };
    let of_last = if devices == 1 {
        layers
    } else {
        (0..=layers + 1 - devices).rev().min_by(|a, b| slowest(a).total_cmp(&slowest(b))).unwrap()
    };
    let stage = |layers: Range<usize>| Stage { schedule: (!layers.is_empty()).then(|| subject.schedule(layers.len())), layers };
    cut_at(of_last).into_iter().map(stage).collect()
}

/// The tasks of all devices.
pub(crate) fn tasks(subject: &Subject, columns: &[ColumnWork], stages: &[Stage], gpu: &Gpu) -> Vec<Task> {
    let mut tasks: Vec<Task> = Vec::new();
    let mut ports: Vec<Ports> = Vec::new();
    for (device, stage) in stages.iter().enumerate() {
        let (seconds, is_last) = (Seconds { gpu, columns }, device + 1 == stages.len());
        ports.push(match &stage.schedule {
            Some(schedule) => program(&mut tasks, &seconds, (device, &stage.layers), (schedule, is_last)),
            None => head_alone(&mut tasks, &seconds, device),
        });
    }
    for pair in ports.windows(2) {
        for column in 0..columns.len() {
            let bytes = subject.hidden_bytes(column);
            let mut send = |from: usize, to: usize| tasks[from].sends.push(Message { to, bytes, leaves: Leaves::AtEnd });
            send(pair[0].forward[column], pair[1].forward[column]);
            send(pair[1].lowest_cells[column], pair[0].highest_cells[column]);
        }
    }
    tasks
}

/// The tasks of a device that others wait for or that wait for others, by column.
struct Ports {
    forward: Vec<usize>,
    /// The backward of the cells of its highest layer band, and of its lowest.
    highest_cells: Vec<usize>,
    lowest_cells: Vec<usize>,
}

/// Adds the tasks of a device without layers: in the forward phase it makes the gradients that the highest cells begin with.
fn head_alone(tasks: &mut Vec<Task>, seconds: &Seconds<'_>, device: usize) -> Ports {
    let first = tasks.len();
    let task = |c| Task { device, pass: Pass::Head, cell: (0, c), seconds: seconds.head(c), sends: Vec::new() };
    tasks.extend((0..seconds.columns.len()).map(task));
    let forward: Vec<usize> = (first..tasks.len()).collect();
    Ports { highest_cells: Vec::new(), lowest_cells: forward.clone(), forward }
}

/// Adds the tasks of a device with layers.
fn program(
    tasks: &mut Vec<Task>,
    seconds: &Seconds<'_>,
    (device, layers): (usize, &Range<usize>),
    (schedule, has_head): (&Schedule, bool),
) -> Ports {
    let (bands, count) = schedule.size();
    let mut ports = Ports { forward: vec![0; count], highest_cells: vec![0; count], lowest_cells: vec![0; count] };
    let of_band = |band: usize| {
        let own = schedule.layers(band);
        layers.start + own.start..layers.start + own.end
    };
    let mut add = |pass, cell, seconds| {
        tasks.push(Task { device, pass, cell, seconds, sends: Vec::new() });
        tasks.len() - 1
    };
    for c in 0..count {
        let work = seconds.columns[c].of(layers);
        ports.forward[c] = add(Pass::Forward, (0, c), work.forward(seconds.gpu));
        if has_head && !schedule.has_head_in_cells() {
            add(Pass::Head, (0, c), seconds.head(c));
        }
    }
    for band in 0..bands {
        if schedule.is_replayed(band) {
            let Range { start, end } = of_band(band);
            let again = seconds.columns.iter().map(|column| {
                column.of(&(start..end - 1)).again(seconds.gpu) + column.of(&(end - 1..end)).written / seconds.gpu.linear
            });
            let again = again.sum();
            add(Pass::Replay, (band, 0), again);
        }
        for column in (0..count).rev() {
            let work = seconds.columns[column].of(&of_band(band));
            if !schedule.is_kept(band, column) {
                add(Pass::Recompute, (band, column), work.again(seconds.gpu));
            }
            if has_head && schedule.has_head_in_cells() {
                add(Pass::Head, (band, column), seconds.head(column));
            }
            let cell = add(Pass::Backward, (band, column), work.backward(seconds.gpu));
            if band == 0 {
                ports.highest_cells[column] = cell;
            }
            if band + 1 == bands {
                ports.lowest_cells[column] = cell;
            }
        }
    }
    ports
}
