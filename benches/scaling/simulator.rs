//! Devices that each do their tasks in order, and links that carry what the tasks send: a step in simulated time, event by event.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap, VecDeque};

/// To which pass of a step a task belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pass {
    /// Without autograd, policies choose.
    Forward,
    Head,
    /// A layer band once more over all columns.
    Replay,
    /// With autograd.
    Recompute,
    Backward,
}

/// What a device does when it is free, has done all before it, and the messages to it have come.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Task {
    pub(crate) device: usize,
    pub(crate) pass: Pass,
    /// Its layer band, from the top of its device, and its column; in a ring, of no meaning and the turn.
    pub(crate) cell: (usize, usize),
    pub(crate) seconds: f64,
    pub(crate) sends: Vec<Message>,
}

/// What a task sends to a task of another device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Message {
    /// Index of the task that waits for it.
    pub(crate) to: usize,
    pub(crate) bytes: f64,
    pub(crate) leaves: Leaves,
}

/// When a message can leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// When its task begins: it passes on what that has received.
    AtBegin,
    /// When its task ends: it is the result.
    AtEnd,
}

/// From one device to another, one way; it carries one message at a time, in the order in which they could leave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Link {
    pub(crate) bytes_per_second: f64,
    /// From the last byte that left to the last that came.
    pub(crate) latency: f64,
}

/// A message under way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Carried {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) bytes: f64,
    /// When the link begins and ends to carry it, and when it is there.
    pub(crate) begins: f64,
    pub(crate) ends: f64,
    pub(crate) comes: f64,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    /// When the tasks begin and end.
    pub(crate) spans: Vec<(f64, f64)>,
    /// In the order in which they began to be carried.
    pub(crate) carried: Vec<Carried>,
    /// Seconds in which devices were busy.
    pub(crate) busy: Vec<f64>,
}

impl Timeline {
    /// From the first task to the end of the last.
    pub(crate) fn seconds(&self) -> f64 {
        self.spans.iter().map(|span| span.1).fold(0.0, f64::max)
    }

    /// The part of their time in which devices wait.
    pub(crate) fn idle(&self) -> f64 {
        1.0 - self.busy.iter().sum::<f64>() / (self.seconds() * self.busy.len() as f64)
    }

    pub(crate) fn bytes(&self) -> f64 {
        self.carried.iter().fold(0.0, |bytes, message| bytes + message.bytes)
    }
}

/// Lets `devices` do their tasks, each in the order of `tasks`, over the link that there is from one device to another.
pub(crate) fn run(devices: usize, tasks: &[Task], link: &dyn Fn(usize, usize) -> Link) -> Timeline {
    let mut simulation = Simulation {
        tasks,
        link,
        programs: vec![VecDeque::new(); devices],
        awaited: vec![0; tasks.len()],
        is_busy: vec![false; devices],
        free_at: HashMap::new(),
        events: BinaryHeap::new(),
        expected: 0,
        timeline: Timeline { spans: vec![(f64::NAN, f64::NAN); tasks.len()], carried: Vec::new(), busy: vec![0.0; devices] },
    };
    for (index, task) in tasks.iter().enumerate() {
        simulation.programs[task.device].push_back(index);
        for message in &task.sends {
            simulation.awaited[message.to] += 1;
        }
    }
    for device in 0..devices {
        simulation.begin(device, 0.0);
    }
    while let Some(Reverse(event)) = simulation.events.pop() {
        simulation.take(&event);
    }
    assert!(simulation.programs.iter().all(VecDeque::is_empty), "tasks wait for what never comes");
    simulation.timeline
}

struct Simulation<'a> {
    tasks: &'a [Task],
    link: &'a dyn Fn(usize, usize) -> Link,
    /// By device, the tasks that are still to begin.
    programs: Vec<VecDeque<usize>>,
    /// By task, messages that are still to come.
    awaited: Vec<usize>,
    is_busy: Vec<bool>,
    /// When a link can carry its next message.
    free_at: HashMap<(usize, usize), f64>,
    events: BinaryHeap<Reverse<Event>>,
    /// Events that were expected so far.
    expected: usize,
    timeline: Timeline,
}

/// Something that happens to a task, in the order of time; of what happens at once, what was expected first.
struct Event {
    at: f64,
    number: usize,
    task: usize,
    what: Happens,
}

#[derive(Clone, Copy)]
enum Happens {
    Ends,
    /// A message to it comes.
    Hears,
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.total_cmp(&other.at).then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Event {}

impl Simulation<'_> {
    fn take(&mut self, event: &Event) {
        let device = self.tasks[event.task].device;
        match event.what {
            Happens::Ends => {
                self.is_busy[device] = false;
                self.send(event.task, Leaves::AtEnd, event.at);
            }
            Happens::Hears => self.awaited[event.task] -= 1,
        }
        self.begin(device, event.at);
    }

    /// The device's next task, where nothing is in its way.
    fn begin(&mut self, device: usize, now: f64) {
        let next = self.programs[device].front().copied().filter(|&task| !self.is_busy[device] && self.awaited[task] == 0);
        let Some(task) = next else { return };
        self.programs[device].pop_front();
        self.is_busy[device] = true;
        let seconds = self.tasks[task].seconds;
        self.timeline.spans[task] = (now, now + seconds);
        self.timeline.busy[device] += seconds;
        self.send(task, Leaves::AtBegin, now);
        self.expect(now + seconds, task, Happens::Ends);
    }

    fn send(&mut self, task: usize, leaves: Leaves, now: f64) {
        let sender = &self.tasks[task];
        for message in sender.sends.iter().filter(|message| message.leaves == leaves) {
            let ends = (sender.device, self.tasks[message.to].device);
            let link = (self.link)(ends.0, ends.1);
            let free_at = self.free_at.entry(ends).or_insert(0.0);
            let begins = now.max(*free_at);
            *free_at = begins + message.bytes / link.bytes_per_second;
            let (from, to) = ends;
            let carried = Carried { from, to, bytes: message.bytes, begins, ends: *free_at, comes: *free_at + link.latency };
            self.timeline.carried.push(carried);
            self.expect(carried.comes, message.to, Happens::Hears);
        }
    }

    fn expect(&mut self, at: f64, task: usize, what: Happens) {
        self.expected += 1;
        self.events.push(Reverse(Event { at, number: self.expected, task, what }));
    }
}
