//! Which experts the tokens of a chunk were sent to, kept on the host in the fewest bytes that serve.

use tch::{Device, Kind, Tensor};

use crate::native::or_panic;
use crate::store::Waiting;
use crate::units::Bytes;

/// Experts by sequence and token of a chunk, pads among them; the choices of one layer.
#[derive(Clone, Debug)]
pub struct Routing {
    chosen: Waiting<Tensor>,
    /// The largest number that an expert can have.
    pub(super) largest: i64,
}

impl Routing {
    /// Packs the choices among `num_experts`.
    ///
    /// # Shapes
    /// `(B, n, k)`, int64.
    pub fn new(chosen_bnk: &Tensor, num_experts: usize) -> Self {
        let chosen = Waiting::send(&chosen_bnk.to_kind(Self::kind(num_experts)).contiguous());
        Self { chosen, largest: num_experts as i64 - 1 }
    }

    /// Takes choices that the host has read, and the largest number among them.
    pub(super) fn of_host(chosen_bnk: &Tensor, largest: i64) -> Self {
        Self { chosen: Waiting::here(chosen_bnk), largest }
    }

    /// Appends the routing of further tokens of the same chunk.
    pub(super) fn followed_by(&self, next: &Self) -> Self {
        Self::of_host(&Tensor::cat(&[self.packed(), next.packed()], 1), self.largest.max(next.largest))
    }

    fn kind(num_experts: usize) -> Kind {
        if num_experts <= 0x100 { Kind::Uint8 } else { Kind::Int16 }
    }

    pub fn bytes_of_token(top_k: usize, num_experts: usize) -> u64 {
        (top_k * Self::kind(num_experts).elt_size_in_bytes()) as u64
    }

    /// Sequences, tokens, and experts of a token.
    pub fn size(&self) -> [i64; 3] {
        <[i64; 3]>::try_from(self.chosen.size()).unwrap_or_default()
    }

    /// The choices `(B, n, k)`, int64.
    pub fn chosen(&self, device: Device) -> Tensor {
        or_panic(self.chosen.fetch(device)).to_kind(Kind::Int64)
    }

    /// The packed choices, on the host.
    pub(super) fn packed(&self) -> Tensor {
        self.chosen.on_host()
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.chosen.bytes()
    }
}
