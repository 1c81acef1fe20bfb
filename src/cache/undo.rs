//! The undo log's entries: what a write overwrote, at hand or waiting in a store.

use tch::{Device, Kind, Tensor};

use super::CacheError;
use super::buffer::StoredEntries;
use super::moves::{Geometry, Moves, Retained};
use crate::store::{Parked, Prefetch, Store, StoreError, bytes_of};
use crate::units::Bytes;

/// What a write overwrote: with it the cache before the write is restored exactly.
#[derive(Debug)]
pub struct Undo {
    pub(super) at: Geometry,
    pub(super) moves: Option<Moves>,
    /// The candidates as they were stored, and their positions `(B·G·e)`.
    pub(super) saved: Option<(StoredEntries, Tensor)>,
}

/// The same in a store, where it waits for the backward phase: nothing of it stays on the device.
#[derive(Debug)]
pub struct ParkedUndo {
    at: Geometry,
    /// Nothing where nothing was overwritten.
    parked: Option<(Layout, Parked)>,
}

/// The same on its way back to a device.
#[derive(Debug)]
pub struct UndoPrefetch {
    at: Geometry,
    ahead: Option<(Layout, Prefetch)>,
}

/// Which tensors wait together: the moves' `to` and `from`, what is retained (a mask and indices), the positions, the planes of the keys
/// and as many of the values. Indices wait in 32 bits.
#[derive(Clone, Copy, Debug)]
struct Layout {
    has_retained: bool,
    planes: usize,
}

impl Undo {
    /// Puts it into a store.
    pub fn park(&self, store: &Store) -> Result<ParkedUndo, CacheError> {
        let (Some(moves), Some((stored, position))) = (&self.moves, &self.saved) else {
            return Ok(ParkedUndo { at: self.at, parked: None });
        };
        let whole = |x: &Tensor| x.to_kind(Kind::Int);
        let mut all = vec![whole(&moves.to), whole(&moves.from)];
        if let Some(retained) = &moves.retained {
            all.extend([retained.mask_b1n.shallow_clone(), whole(&retained.saved)]);
        }
        all.push(whole(position));
        let (k, v) = stored.planes();
        let layout = Layout { has_retained: moves.retained.is_some(), planes: k.len() };
        let all: Vec<&Tensor> = all.iter().chain(k).chain(v).collect();
        Ok(ParkedUndo { at: self.at, parked: Some((layout, store.park_all(&all)?)) })
    }

    /// What the entries, their positions and the indices of their moves take.
    pub fn bytes(&self) -> Bytes {
        let saved = self.saved.iter().map(|(saved, position)| Bytes(saved.bytes().0 + bytes_of([position]).0));
        saved.chain(self.moves.as_ref().map(|moves| bytes_of(moves.tensors()))).sum()
    }
}

impl ParkedUndo {
    /// Brings it to a device.
    pub fn fetch(&self, device: Device) -> Result<Undo, CacheError> {
        Ok(self.prefetch(device)?.wait())
    }

    /// Sets it out on its way to a device.
    pub fn prefetch(&self, device: Device) -> Result<UndoPrefetch, CacheError> {
        let out = |(layout, parked): &(Layout, Parked)| Ok::<_, StoreError>((*layout, parked.prefetch(device)?));
        Ok(UndoPrefetch { at: self.at, ahead: self.parked.as_ref().map(out).transpose()? })
    }
}

impl UndoPrefetch {
    /// The entry, for which the device waits if it is not there yet.
    pub fn wait(self) -> Undo {
        let Some((layout, ahead)) = self.ahead else { return Undo { at: self.at, moves: None, saved: None } };
        let mut all = ahead.wait();
        let v = all.split_off(all.len() - layout.planes);
        let k = all.split_off(all.len() - layout.planes);
        let mut whole = all.into_iter().map(|x| if x.kind() == Kind::Int { x.to_kind(Kind::Int64) } else { x });
        let mut next = || whole.next().unwrap_or_default();
        let (to, from) = (next(), next());
        let retained = layout.has_retained.then(|| Retained { mask_b1n: next(), saved: next() });
        let position = next();
        Undo { at: self.at, moves: Some(Moves { to, from, retained }), saved: Some((StoredEntries::of(k, v), position)) }
    }

    /// What it takes on the device before it has arrived.
    pub fn bytes(&self) -> Bytes {
        self.ahead.iter().map(|(_, ahead)| ahead.bytes()).sum()
    }
}
