//! Where the keys and values of a layer lie: in one page of slots or several, plain or quantised, on the device or waiting on the
//! host. What is written is encoded once; nothing that stays is touched.

use std::cell::Cell;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::CacheShape;
use super::moves::{Moves, Retained, restore, with_retained};
use crate::native::cuda::host_tensor;
use crate::ops::attention::{KvBlock, accumulation_kind};
use crate::recipe::BufferKind;
use crate::store::{Bits, Copier, CopyMark, CopyStream, bytes_of, copier_of};
use crate::units::Bytes;

/// Entries in their stored form: the planes of the keys, those of the values, and what else an entry has.
#[derive(Debug)]
pub(super) struct StoredEntries(pub(super) Vec<Tensor>);

impl StoredEntries {
    fn map(&self, f: impl Fn(&Tensor) -> Tensor) -> Self {
        Self(self.0.iter().map(f).collect())
    }

    fn zip(&self, other: &Self, mut f: impl FnMut(&Tensor, &Tensor)) {
        self.0.iter().zip(&other.0).for_each(|(mine, theirs)| f(mine, theirs));
    }

    fn slots(&self) -> i64 {
        self.0[0].size()[2]
    }

    pub(super) fn bytes(&self) -> Bytes {
        bytes_of(&self.0)
    }

    /// A chunk's entries with the retained ones of `saved` in front.
    pub(super) fn with_retained(&self, saved: &Self, retained: &Retained) -> Self {
        Self(self.0.iter().zip(&saved.0).map(|(mine, theirs)| with_retained(mine, theirs, retained)).collect())
    }
}

/// The bits per number of a quantised buffer; `None` for a plain one.
fn bits_of(buffer: BufferKind) -> Option<Bits> {
    match buffer {
        BufferKind::Plain => None,
        BufferKind::Int8 => Some(Bits::Eight),
        BufferKind::Int4 => Some(Bits::Four),
    }
}

/// The planes that hold keys or values `(…, D)`.
fn encode(buffer: BufferKind, x: &Tensor) -> Vec<Tensor> {
    bits_of(buffer).map_or_else(|| vec![x.shallow_clone()], |bits| bits.quantise(x).into())
}

fn decode(buffer: BufferKind, planes: &[Tensor], head_dim: i64, kind: Kind) -> Tensor {
    match (bits_of(buffer), planes) {
        (Some(bits), [level, range]) => bits.restore(level, range, head_dim, kind),
        _ => planes[0].shallow_clone(),
    }
}

impl CacheShape {
    /// Width and kind of the planes that hold the keys of an entry, or its values.
    fn stored_planes(&self) -> Vec<(i64, Kind)> {
        match bits_of(self.buffer) {
            None => vec![(self.head_dim, self.kind)],
            Some(bits) => vec![(bits.level_bytes(self.head_dim), Kind::Uint8), (2, Kind::Int16)],
        }
    }

    /// Keys or values from the planes that hold them.
    fn decode(&self, planes: &[Tensor]) -> Tensor {
        decode(self.buffer, planes, self.head_dim, self.kind)
    }

    pub(super) fn planes(&self) -> Vec<(String, i64, Kind)> {
        let stored = self.stored_planes();
        let further = self.further_widths().map(|width| (width, self.further_kind())).collect();
        let named = |(name, planes): (&'static str, Vec<(i64, Kind)>)| {
            planes.into_iter().enumerate().map(move |(i, (width, kind))| (format!("{name}.{i}"), width, kind))
        };
        [("keys", stored.clone()), ("values", stored), ("further", further)].into_iter().flat_map(named).collect()
    }

    /// Widths of all that an entry has beside key and value, plane by plane.
    pub fn further_widths(&self) -> impl Iterator<Item = i64> + use<> {
        self.further.iter().copied().chain(self.model_feature.map(|_| 1))
    }

    /// The kind of what an entry has beside key and value.
    pub(super) fn further_kind(&self) -> Kind {
        accumulation_kind(self.kind)
    }

    /// Slots after room was made for `needed` in a cache that had `have`.
    pub(super) fn grown(&self, have: i64, needed: i64) -> i64 {
        match (needed > have, self.is_paged) {
            (false, _) => have,
            (true, true) => have + (needed - have + self.first_page() - 1) / self.first_page() * self.first_page(),
            (true, false) => needed.max((have * 2).min(self.cache_length as i64)),
        }
    }

    fn first_page(&self) -> i64 {
        self.allocated.max(1) as i64
    }
}

/// Keys or values as chunks after their own see them.
///
/// # Shapes
/// `(…, D)` in and out.
pub fn as_stored(buffer: BufferKind, x: &Tensor) -> Tensor {
    decode(buffer, &encode(buffer, x), x.size().last().copied().unwrap_or(0), x.kind())
}

#[derive(Debug)]
pub(super) struct Buffer {
    shape: CacheShape,
    /// Each of `(B, G, slots, width)` planes; more than one only where no entry ever leaves.
    pages: Vec<StoredEntries>,
    /// The pages' place on the host, for a buffer that waits there between its uses.
    home: Vec<StoredEntries>,
    is_away: bool,
    copier: Arc<dyn Copier>,
    /// When the pages have come to where they were carried last.
    carried: Cell<Option<CopyMark>>,
}

impl Buffer {
    pub(super) fn new(shape: CacheShape) -> Self {
        let (pages, home, copier) = (Vec::new(), Vec::new(), copier_of(shape.device));
        let mut buffer = Self { shape, pages, home, is_away: shape.is_offloaded, copier, carried: Cell::new(None) };
        // A cache that waits on the host begins there: the caches of all layers need not fit on the device for a moment either.
        let first = buffer.page(shape.first_page(), shape.is_offloaded);
        let held = if shape.is_offloaded { &mut buffer.home } else { &mut buffer.pages };
        held.push(first);
        buffer
    }

    /// A page of zeros, on the host or on the device.
    fn page(&self, slots: i64, is_on_host: bool) -> StoredEntries {
        let CacheShape { batch, groups, device, .. } = self.shape;
        let plane = |(_, width, kind): (String, i64, Kind)| {
            let size = [batch, groups, slots, width];
            if is_on_host { host_tensor(&size, kind, device).zero_() } else { Tensor::zeros(size, (kind, device)) }
        };
        StoredEntries(self.shape.planes().into_iter().map(plane).collect())
    }

    /// The pages where they are now, when they have come there.
    fn held(&self) -> &[StoredEntries] {
        if self.is_away {
            self.carried.take().into_iter().for_each(|mark| self.copier.finish(mark));
            return &self.home;
        }
        self.arrive();
        &self.pages
    }

    /// The device waits for pages that are on their way to it.
    fn arrive(&self) {
        self.carried.take().into_iter().for_each(|mark| self.copier.wait(mark));
    }

    /// What the pages take, and what their place on the host does.
    pub(super) fn bytes(&self) -> (Bytes, Bytes) {
        (self.pages.iter().map(StoredEntries::bytes).sum(), self.home.iter().map(StoredEntries::bytes).sum())
    }

    pub(super) fn slots(&self) -> i64 {
        slots_in(if self.is_away { &self.home } else { &self.pages })
    }

    /// Makes room for `top` slots: by further pages, or by doubling the only one.
    pub(super) fn reserve(&mut self, top: i64) {
        self.prefetch();
        self.arrive();
        let (have, slots) = (self.slots(), self.shape.grown(self.slots(), top));
        if self.shape.is_paged {
            let page = self.shape.first_page();
            self.pages.extend((0..(slots - have) / page).map(|_| self.page(page, false)).collect::<Vec<_>>());
        } else if slots > have {
            let larger = self.page(slots, false);
            larger.zip(&self.pages[0], |larger, old| larger.narrow(2, 0, have).copy_(old));
            self.pages = vec![larger];
        }
    }

    /// Sets the pages out to the device, where they stay until they are offloaded; who uses them first waits for them.
    pub(super) fn prefetch(&mut self) {
        if self.is_away {
            let target = |plane: &Tensor| Tensor::empty(plane.size(), (plane.kind(), self.shape.device));
            self.pages = self.home.iter().map(|page| page.map(target)).collect();
            self.carry(CopyStream::ToDevice);
            self.is_away = false;
        }
    }

    /// Sends the pages to wait on the host, for a buffer that does so.
    pub(super) fn offload(&mut self) {
        if !self.shape.is_offloaded || self.is_away {
            return;
        }
        // Nobody may have used them since they were brought.
        self.arrive();
        // Pages grow, or more of them come.
        if slots_in(&self.home) != self.slots() {
            self.home = self.pages.iter().map(|page| page.map(|x| host_tensor(&x.size(), x.kind(), self.shape.device))).collect();
        }
        self.carry(CopyStream::ToHost);
        self.pages.clear();
        self.is_away = true;
    }

    /// Asks for copies of all pages, behind those that were asked for before.
    fn carry(&self, stream: CopyStream) {
        let (to, from) = if stream == CopyStream::ToHost { (&self.home, &self.pages) } else { (&self.pages, &self.home) };
        let copies: Vec<(&Tensor, &Tensor)> = to.iter().zip(from).flat_map(|(to, from)| to.0.iter().zip(&from.0)).collect();
        let before = self.carried.take();
        self.carried.set(Some(self.copier.start(stream, &copies, before.as_slice())));
    }

    /// Where entries can be moved: the only page.
    fn single(&mut self) -> &StoredEntries {
        self.prefetch();
        self.arrive();
        &self.pages[0]
    }

    /// Moves the region's survivors into the victims' slots; returns what stood there.
    pub(super) fn overwrite(&mut self, moves: &Moves) -> StoredEntries {
        let page = self.single();
        #[cfg(test)]
        if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::ValueMovedWithoutKey) {
            let (keys, values) = page.0.split_at(page.0.len() / 2);
            let unmoved = keys.iter().map(|plane| super::moves::take(plane, &moves.to));
            return StoredEntries(unmoved.chain(values.iter().map(|plane| moves.overwrite(plane))).collect());
        }
        page.map(|plane| moves.overwrite(plane))
    }

    /// The inverse of [`Self::overwrite`], of what it returned.
    pub(super) fn restore(&mut self, moves: &Moves, saved: &StoredEntries) {
        self.single().zip(saved, |plane, saved| restore(plane, moves, saved));
    }

    /// Entries `(B, G, n, ·)` in their stored form.
    pub(super) fn encode(&self, block: &KvBlock) -> StoredEntries {
        let further = block.further.iter().map(Tensor::shallow_clone);
        StoredEntries([&block.k, &block.v].into_iter().flat_map(|x| encode(self.shape.buffer, x)).chain(further).collect())
    }

    /// Entries `(…, ·)` as they are read.
    pub(super) fn decode(&self, stored: &StoredEntries) -> KvBlock {
        let count = self.shape.stored_planes().len();
        let (k, v, further) = (&stored.0[..count], &stored.0[count..2 * count], &stored.0[2 * count..]);
        let exact = further.iter().map(Tensor::shallow_clone);
        KvBlock::of_planes([k, v].map(|planes| self.shape.decode(planes)).into_iter().chain(exact))
    }

    pub(super) fn write(&mut self, start: i64, chunk: &StoredEntries) {
        self.prefetch();
        self.arrive();
        let len = chunk.slots();
        for (page, slots, from) in parts(self.pages.iter(), start, len) {
            page.zip(chunk, |plane, new| {
                write_slots(plane, slots, &new.narrow(2, from.0, from.1));
            });
        }
    }

    /// The entries of the slots from `start` on by page, of the first `sequences`.
    pub(super) fn read(&self, sequences: i64, start: i64, len: i64) -> Vec<KvBlock> {
        let read = |(page, slots, (_, len)): (&StoredEntries, i64, (i64, i64))| {
            let block = self.decode(&page.map(|plane| slots_of(plane, sequences, slots, len)));
            if self.is_away { block.map(|x| x.to_device(self.shape.device)) } else { block }
        };
        parts(self.held().iter(), start, len).map(read).collect()
    }

    /// The keys alone of the first `len` slots, `(B, G, ·, D)` by page, of the first `sequences`: no values are restored.
    pub(super) fn read_keys(&self, sequences: i64, len: i64) -> Vec<Tensor> {
        let parts = parts(self.held().iter(), 0, len);
        let read = |(page, slots, (_, len)): (&StoredEntries, i64, (i64, i64))| {
            let keys: Vec<Tensor> =
                page.0[..self.shape.stored_planes().len()].iter().map(|plane| slots_of(plane, sequences, slots, len)).collect();
            self.shape.decode(&keys).to_device(self.shape.device)
        };
        parts.map(read).collect()
    }

    /// The first `len` slots in their stored form, of all sequences, side by side.
    pub(super) fn stored(&self, len: i64) -> StoredEntries {
        let pages: Vec<StoredEntries> = parts(self.held().iter(), 0, len)
            .map(|(page, slots, (_, len))| page.map(|plane| plane.narrow(2, slots, len)))
            .collect();
        let join = |i: usize| match &pages[..] {
            [page] => page.0[i].shallow_clone(),
            pages => Tensor::cat(&pages.iter().map(|page| &page.0[i]).collect::<Vec<_>>(), 2),
        };
        if pages.is_empty() { self.page(0, false) } else { StoredEntries((0..pages[0].0.len()).map(join).collect()) }
    }
}

fn slots_in(pages: &[StoredEntries]) -> i64 {
    pages.iter().map(StoredEntries::slots).sum()
}

/// The slots `start .. start + len` of the first `sequences`, `(B, G, len, …)`. Most batches are whole and most caches full, and views that
/// change nothing would be made for each plane, chunk and layer.
pub(super) fn slots_of(plane: &Tensor, sequences: i64, start: i64, len: i64) -> Tensor {
    let size = plane.size();
    let slots = if (start, len) == (0, size[2]) { plane.shallow_clone() } else { plane.narrow(2, start, len) };
    if size[0] == sequences { slots } else { slots.narrow(0, 0, sequences) }
}

/// Writes a chunk to the slots of a plane from `start` on, in the first sequences.
pub(super) fn write_slots(plane: &Tensor, start: i64, chunk: &Tensor) {
    slots_of(plane, chunk.size()[0], start, chunk.size()[2]).copy_(chunk);
}

/// The pages that hold the slots `start .. start + len`: first slot within the page, and which of the `len` it holds (from, count).
fn parts<'a>(
    pages: impl Iterator<Item = &'a StoredEntries>,
    start: i64,
    len: i64,
) -> impl Iterator<Item = (&'a StoredEntries, i64, (i64, i64))> {
    let mut first = 0;
    pages.filter_map(move |page| {
        let (begin, end) = (first, first + page.slots());
        first = end;
        let (from, to) = (start.max(begin), (start + len).min(end));
        (from < to).then_some((page, from - begin, (from - start, to - from)))
    })
}
