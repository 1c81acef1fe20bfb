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
    /// How entries moved, the candidates as they were stored, and their positions `(B·G·e)`.
    pub(super) overwritten: Option<(Moves, StoredEntries, Tensor)>,
}

impl Undo {
    /// What is left without tensors, and these: the moves' `to` and `from`, what is retained (a mask and indices), the positions, the planes
    /// of the entries. Indices have 32 bits.
    pub fn take_apart(&self) -> (Self, Vec<Tensor>) {
        let bare = Self { at: self.at, overwritten: None };
        let Some((moves, stored, position)) = &self.overwritten else { return (bare, Vec::new()) };
        let whole = |x: &Tensor| x.to_kind(Kind::Int);
        let mut all = vec![whole(&moves.to), whole(&moves.from)];
        if let Some(retained) = &moves.retained {
            all.extend([retained.mask_b1n.shallow_clone(), whole(&retained.saved)]);
        }
        all.push(whole(position));
        all.extend(stored.0.iter().map(Tensor::shallow_clone));
        (bare, all)
    }

    pub fn put_together(&self, tensors: Vec<Tensor>) -> Self {
        let at = self.at;
        if tensors.is_empty() {
            return Self { at, overwritten: None };
        }
        // A mask stands in the third place, or there is none.
        let has_retained = tensors.get(2).is_some_and(|x| x.kind() == Kind::Bool);
        let mut all = tensors.into_iter();
        let indices = |x: Option<Tensor>| x.unwrap_or_default().to_kind(Kind::Int64);
        let (to, from) = (indices(all.next()), indices(all.next()));
        let retained = has_retained.then(|| Retained { mask_b1n: all.next().unwrap_or_default(), saved: indices(all.next()) });
        let position = indices(all.next());
        Self { at, overwritten: Some((Moves { to, from, retained }, StoredEntries(all.collect()), position)) }
    }

    pub fn bytes(&self) -> Bytes {
        let tensors = self.overwritten.iter().flat_map(|(moves, saved, at)| moves.tensors().chain(&saved.0).chain([at]));
        bytes_of(tensors)
    }
}
