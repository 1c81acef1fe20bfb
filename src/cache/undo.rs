//! The undo log's entries: what a write overwrote, and how it is taken apart to wait in a store.

use tch::{Kind, Tensor};

use super::buffer::StoredEntries;
use super::moves::{Geometry, Moves, Retained};
use crate::store::bytes_of;
use crate::units::Bytes;

/// What a write overwrote: with it the cache before the write is restored exactly.
#[derive(Debug)]
pub struct Undo {
    pub(super) at: Geometry,
    pub(super) moves: Option<Moves>,
    /// The candidates as they were stored, and their positions `(B·G·e)`.
    pub(super) saved: Option<(StoredEntries, Tensor)>,
}

impl Undo {
    /// What is left without tensors, and these: the moves' `to` and `from`, what is retained (a mask and indices), the positions, the planes
    /// of the entries. Indices have 32 bits.
    pub fn take_apart(&self) -> (Self, Vec<Tensor>) {
        let bare = Self { at: self.at, moves: None, saved: None };
        let (Some(moves), Some((stored, position))) = (&self.moves, &self.saved) else { return (bare, Vec::new()) };
        let whole = |x: &Tensor| x.to_kind(Kind::Int);
        let mut all = vec![whole(&moves.to), whole(&moves.from)];
        if let Some(retained) = &moves.retained {
            all.extend([retained.mask_b1n.shallow_clone(), whole(&retained.saved)]);
        }
        all.push(whole(position));
        all.extend(stored.0.iter().map(Tensor::shallow_clone));
        (bare, all)
    }

    /// Puts together what [`Self::take_apart`] gave.
    pub fn put_together(&self, tensors: Vec<Tensor>) -> Self {
        let at = self.at;
        if tensors.is_empty() {
            return Self { at, moves: None, saved: None };
        }
        // A mask stands in the third place, or there is none.
        let has_retained = tensors.get(2).is_some_and(|x| x.kind() == Kind::Bool);
        let mut all = tensors.into_iter();
        let indices = |x: Option<Tensor>| x.unwrap_or_default().to_kind(Kind::Int64);
        let (to, from) = (indices(all.next()), indices(all.next()));
        let retained = has_retained.then(|| Retained { mask_b1n: all.next().unwrap_or_default(), saved: indices(all.next()) });
        let position = indices(all.next());
        Self { at, moves: Some(Moves { to, from, retained }), saved: Some((StoredEntries(all.collect()), position)) }
    }

    /// What the entries, their positions and the indices of their moves take.
    pub fn bytes(&self) -> Bytes {
        let saved = self.saved.iter().map(|(saved, position)| Bytes(saved.bytes().0 + bytes_of([position]).0));
        saved.chain(self.moves.as_ref().map(|moves| bytes_of(moves.tensors()))).sum()
    }
}
