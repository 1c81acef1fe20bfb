//! How a chunk's attention is computed: which kernel, and past and chunk at once or in parts.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind};

use super::chunk::{Chunk, Past};
use super::part::PartKernel;
use crate::native;
use crate::native::cuda::Vendor;

/// A way to attend; forward and backward go the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// kvtune's own kernel for the CPU.
    Own,
    /// Keys of past and chunk at once, where they lie side by side; else in parts.
    Joined(Vendor),
    /// Past and chunk apart, merged.
    Parts(PartKernel),
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => f.write_str("kvtune's CPU kernel"),
            Self::Joined(vendor) => f.write_str(vendor.name()),
            Self::Parts(PartKernel::Vendor(vendor)) => write!(f, "{} in parts", vendor.name()),
            Self::Parts(PartKernel::Blocks) => f.write_str("blockwise"),
        }
    }
}

/// What decides which way is the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Of queries, keys and values.
    pub kind: Kind,
    /// Rows.
    pub batch: i64,
    /// Query heads.
    pub heads: i64,
    /// KV heads.
    pub groups: i64,
    /// Width of a head.
    pub head_dim: i64,
    /// Tokens of a chunk.
    pub tokens: i64,
    /// Slots below it.
    pub past: i64,
}

impl Shape {
    fn of(chunk: &Chunk<'_>, past: &[Past<'_>]) -> Self {
        let (batch, heads, tokens, head_dim) = chunk.q_bhnd.size4().unwrap_or_default();
        let past = past.iter().map(|past| past.k_bgpd.size()[2]).sum();
        Self { kind: chunk.q_bhnd.kind(), batch, heads, groups: chunk.num_kv_heads(), head_dim, tokens, past }
    }

    /// How far another shape is; `None` where its choice says nothing about this one.
    fn distance(&self, other: &Self) -> Option<f64> {
        let heads = |shape: &Self| (shape.kind, shape.heads, shape.groups, shape.head_dim);
        let apart = |a: i64, b: i64| ((a as f64 + 1.0) / (b as f64 + 1.0)).ln().abs();
        let rows = apart(self.batch, other.batch);
        (heads(self) == heads(other)).then(|| rows + apart(self.tokens, other.tokens) + apart(self.past, other.past))
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, batch, heads, groups, head_dim, tokens, past } = self;
        write!(f, "{batch} × {heads}/{groups} heads of {head_dim}, {tokens} tokens on {past} slots, {kind:?}")
    }
}

/// Whether a kernel that comes with libtorch may serve at all: the rest computes in blocks.
pub(super) fn is_for_vendors(device: Device, kind: Kind) -> bool {
    device.is_cuda() && matches!(kind, Kind::BFloat16 | Kind::Half | Kind::Float)
}

impl Way {
    /// Where no shape has been measured.
    pub(super) fn unmeasured(device: Device, kind: Kind) -> Self {
        match kind {
            _ if native::computes(device, kind) => Self::Own,
            _ if !is_for_vendors(device, kind) => Self::Parts(PartKernel::Blocks),
            Kind::BFloat16 | Kind::Half => Self::Joined(Vendor::Flash),
            _ => Self::Parts(PartKernel::Vendor(Vendor::Efficient)),
        }
    }

    /// How the chunk attends to itself and to its past.
    pub(super) fn of(chunk: &Chunk<'_>, past: &[Past<'_>]) -> Self {
        let (device, kind) = (chunk.q_bhnd.device(), chunk.q_bhnd.kind());
        #[cfg(test)]
        if let Some(way) = forced::way() {
            return way;
        }
        #[cfg(test)]
        if crate::sabotage::is_active(crate::sabotage::Sabotage::MergeMissing) {
            return Self::Parts(PartKernel::Blocks);
        }
        if !is_for_vendors(device, kind) {
            return Self::unmeasured(device, kind);
        }
        let leaves_out = chunk.in_use_bgn.is_some() || past.iter().any(|past| past.in_use_bgp.is_some());
        if leaves_out {
            return Self::Parts(PartKernel::Blocks);
        }
        chosen(&Shape::of(chunk, past)).unwrap_or_else(|| Self::unmeasured(device, kind))
    }
}

/// What was found to be the fastest.
static CHOICES: Mutex<Vec<(Shape, Way)>> = Mutex::new(Vec::new());

fn choices() -> MutexGuard<'static, Vec<(Shape, Way)>> {
    CHOICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The way of the nearest shape that was measured.
fn chosen(shape: &Shape) -> Option<Way> {
    let near = |(measured, way): &(Shape, Way)| shape.distance(measured).map(|distance| (distance, *way));
    choices().iter().filter_map(near).min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, way)| way)
}

/// Keeps a choice for the life of the process.
pub(super) fn remember(shape: Shape, way: Way) {
    choices().push((shape, way));
}

/// Whether this very shape has been measured.
pub(super) fn is_known(shape: &Shape) -> bool {
    choices().iter().any(|(measured, _)| measured == shape)
}

#[cfg(test)]
pub(crate) mod forced {
    //! A way that tests go where the device would go another.
    use std::cell::Cell;

    use super::Way;

    thread_local! { static WAY: Cell<Option<Way>> = const { Cell::new(None) }; }

    pub(super) fn way() -> Option<Way> {
        WAY.get()
    }

    /// Runs `body`, on this thread, with all attention going `way`.
    pub(crate) fn with<T>(way: Way, body: impl FnOnce() -> T) -> T {
        let before = WAY.replace(Some(way));
        let result = body();
        WAY.set(before);
        result
    }
}
