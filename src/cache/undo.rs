//! The undo log's entries: what a write overwrote, at hand or waiting in a store.

use tch::{Device, Kind, Tensor};

use super::CacheError;
use super::buffer::{Stored, StoredAway};
use super::moves::{Geometry, Moves, Retained};
use crate::store::{Parked, Store, StoreError, bytes_of};
use crate::units::Bytes;

/// What a write overwrote: with it the cache before the write is restored exactly.
#[derive(Debug)]
pub struct Undo {
    pub(super) at: Geometry,
    pub(super) moves: Option<Moves>,
    /// The candidates as they were stored, and their positions `(B·G·e)`.
    pub(super) saved: Option<(Stored, Tensor)>,
}

/// The same in a store, where it waits for the backward phase: nothing of it stays on the device.
#[derive(Debug)]
pub struct ParkedUndo {
    at: Geometry,
    moves: Option<ParkedMoves>,
    saved: Option<(StoredAway, Parked)>,
}

/// Indices wait in 32 bits.
#[derive(Debug)]
struct ParkedMoves {
    to: Parked,
    from: Parked,
    retained: Option<[Parked; 2]>,
}

impl Undo {
    /// Puts it into a store.
    pub fn park(&self, store: &Store) -> Result<ParkedUndo, CacheError> {
        let whole = |x: &Tensor| store.park(&x.to_kind(Kind::Int));
        let moves = |moves: &Moves| {
            let retained = moves.retained.as_ref().map(|r| Ok::<_, StoreError>([store.park(&r.mask_b1n)?, whole(&r.saved)?]));
            Ok::<_, StoreError>(ParkedMoves { to: whole(&moves.to)?, from: whole(&moves.from)?, retained: retained.transpose()? })
        };
        let saved = |(stored, position): &(Stored, Tensor)| Ok::<_, StoreError>((stored.park(store)?, whole(position)?));
        Ok(ParkedUndo {
            at: self.at,
            moves: self.moves.as_ref().map(moves).transpose()?,
            saved: self.saved.as_ref().map(saved).transpose()?,
        })
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
        let whole = |x: &Parked| Ok::<_, StoreError>(x.fetch(device)?.to_kind(Kind::Int64));
        let retained =
            |[mask, saved]: &[Parked; 2]| Ok::<_, StoreError>(Retained { mask_b1n: mask.fetch(device)?, saved: whole(saved)? });
        let moves = |moves: &ParkedMoves| {
            let retained = moves.retained.as_ref().map(retained).transpose()?;
            Ok::<_, StoreError>(Moves { to: whole(&moves.to)?, from: whole(&moves.from)?, retained })
        };
        let saved = |(away, position): &(StoredAway, Parked)| Ok::<_, StoreError>((away.fetch(device)?, whole(position)?));
        Ok(Undo {
            at: self.at,
            moves: self.moves.as_ref().map(moves).transpose()?,
            saved: self.saved.as_ref().map(saved).transpose()?,
        })
    }
}
