//! The dimensions of a cache.

use tch::{Device, Kind};

use crate::ops::attention::ModelFeature;
use crate::recipe::BufferKind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    pub batch: i64,
    pub groups: i64,
    pub head_dim: i64,
    /// Widths of what an entry has beside key and value, plane by plane; stored as it is.
    pub further: &'static [i64],
    /// The number that the model says of each entry, where the policy asks for one: the plane behind these, which has no gradient.
    pub model_feature: Option<ModelFeature>,
    pub cache_length: usize,
    /// Slots to allocate at once; fewer than `cache_length` for a cache that grows, or a sequence that is shorter.
    pub allocated: usize,
    /// Whether a cache that grows does so by further pages of `allocated` slots instead of doubling.
    pub is_paged: bool,
    pub buffer: BufferKind,
    /// Whether keys and values wait on the host between [`LayerCache::offload`](super::LayerCache::offload) and [`LayerCache::prefetch`](super::LayerCache::prefetch).
    pub is_offloaded: bool,
    pub kind: Kind,
    pub device: Device,
}
