//! What the simulated machines are assumed to do, number by number, and where the numbers come from. None was measured with kvtune.

use super::simulator::Link;

/// Operations a second that a GPU reaches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gpu {
    /// In a layer's projections and the head, with the norms, gates and rotations between them.
    pub(crate) linear: f64,
    pub(crate) attention: f64,
    pub(crate) attention_backward: f64,
}

/// GPUs and what is between them, in the order of their numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cluster {
    pub(crate) name: &'static str,
    pub(crate) gpus_of_machine: usize,
    pub(crate) within: Link,
    pub(crate) between: Link,
}

impl Cluster {
    pub(crate) fn link(&self, from: usize, to: usize) -> Link {
        let machine = |gpu: usize| gpu / self.gpus_of_machine;
        if machine(from) == machine(to) { self.within } else { self.between }
    }
}

const GB: f64 = 1e9;
const PEAK: f64 = 989e12;
const LINEAR: f64 = 0.5;
const ATTENTION: f64 = 0.5;
const ATTENTION_BACKWARD: f64 = 0.4;
const NVLINK: f64 = 450e9;
const NVLINK_REACHED: f64 = 0.8;
const ETHERNET_REACHED: f64 = 0.9;

pub(crate) const H200: Gpu =
    Gpu { linear: LINEAR * PEAK, attention: ATTENTION * PEAK, attention_backward: ATTENTION_BACKWARD * PEAK };
/// Bytes of an H200, and of an H100.
pub(crate) const MEMORY: [f64; 2] = [141e9, 80e9];

const OF_NVLINK: Link = Link { bytes_per_second: NVLINK * NVLINK_REACHED, latency: 10e-6 };

const fn ethernet(gigabits: f64) -> Link {
    Link { bytes_per_second: gigabits * 1e9 / 8.0 * ETHERNET_REACHED, latency: 50e-6 }
}

pub(crate) const CLUSTERS: [Cluster; 4] = [
    Cluster { name: "NVLink", gpus_of_machine: usize::MAX, within: OF_NVLINK, between: OF_NVLINK },
    Cluster { name: "8 a machine, 100 Gbit/s", gpus_of_machine: 8, within: OF_NVLINK, between: ethernet(100.0) },
    Cluster { name: "100 Gbit/s", gpus_of_machine: 1, within: OF_NVLINK, between: ethernet(100.0) },
    Cluster { name: "25 Gbit/s", gpus_of_machine: 1, within: OF_NVLINK, between: ethernet(25.0) },
];

/// What is assumed, how much, and why.
pub(crate) fn assumptions() -> Vec<[String; 3]> {
    let part = |part: f64| format!("{:.0} % of it: {:.0} TFLOP/s", 100.0 * part, part * PEAK / 1e12);
    let gb = MEMORY.map(|bytes| bytes / GB);
    let of_nvlink =
        format!("{:.0} GB/s, {:.0} % reached, {:.0} µs", NVLINK / GB, 100.0 * NVLINK_REACHED, 1e6 * OF_NVLINK.latency);
    let of_ethernet =
        format!("100 or 25 Gbit/s, {:.0} % reached, {:.0} µs", 100.0 * ETHERNET_REACHED, 1e6 * ethernet(1.0).latency);
    let rows = [
        ("bf16, dense", format!("{:.0} TFLOP/s", PEAK / 1e12), "data sheets of H100 SXM and H200"),
        ("memory", format!("{:.0} GB (H200), {:.0} GB (H100)", gb[0], gb[1]), "the same"),
        (
            "projections, head",
            part(LINEAR),
            "assumed, with all work by element; Llama 3's training reached 380 to 430 with exchanges and bubbles (arXiv 2407.21783)",
        ),
        (
            "attention, forward",
            part(ATTENTION),
            "assumed; on an H100 FlashAttention 2 reached 35 %, FlashAttention 3 75 % (arXiv 2407.08608)",
        ),
        ("attention, backward", part(ATTENTION_BACKWARD), "assumed; the slower one in the same paper"),
        ("NVLink, each way", of_nvlink, "data sheet (900 GB/s both ways together); the rest is assumed"),
        ("Ethernet, each way", of_ethernet, "assumed"),
        (
            "launching kernels, copies to the host",
            "hidden".to_owned(),
            "assumed; with 8 GPUs undo log and checkpoints come to some 2.5 GB/s a GPU",
        ),
    ];
    rows.map(|(what, how_much, why)| [what.to_owned(), how_much, why.to_owned()]).to_vec()
}
