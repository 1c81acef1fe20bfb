//! What ranks exchange: sums, tensors of one, and bytes of all.

use tch::{Device, Kind, Tensor};

use super::ProcessGroup;
use super::process_group::Joined;
use crate::native::cuda::NcclGroup;
use crate::native::or_panic;
use crate::units::Fault;

impl ProcessGroup {
    /// Adds up `tensor` over all ranks, in place: all have the same bits then. It has the same shape and dtype on each, and is on the GPU or
    /// on the host on all.
    ///
    /// Where it lies in one piece on the host, or on a GPU among those that are connected, nothing is copied.
    pub fn sum(&self, tensor: &Tensor) -> Result<(), Fault> {
        let Some(joined) = &self.joined else { return Ok(()) };
        let during = "adding up gradients";
        in_one_piece(tensor, joined, |tensor, nccl| match nccl {
            Some(nccl) => joined.exchange(during, |_| nccl.sum(tensor)),
            None => joined.exchange(during, |gloo| gloo.sum(tensor)),
        })
    }

    /// Overwrites `tensor` with that of the rank `from`, which is alike in the same way.
    pub fn overwrite(&self, tensor: &Tensor, from: usize) -> Result<(), Fault> {
        let Some(joined) = self.joined.as_ref().filter(|_| tensor.numel() > 0) else { return Ok(()) };
        let during = "receiving what one rank has made";
        in_one_piece(tensor, joined, |tensor, nccl| {
            // Neither knows every dtype.
            let bytes = tensor.view([-1]).view_dtype(Kind::Uint8);
            match nccl {
                Some(nccl) => joined.exchange(during, |_| nccl.broadcast(&bytes, from)),
                None => joined.exchange(during, |gloo| gloo.broadcast(&bytes, from)),
            }
        })
    }

    /// The bytes of every rank, by rank.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
        let Some(joined) = &self.joined else { return Ok(vec![bytes.to_vec()]) };
        let (during, size) = ("gathering what each rank has", self.size() as i64);
        let lengths = Tensor::zeros([size, 1], (Kind::Int64, Device::Cpu));
        joined.exchange(during, |group| group.gather(&lengths, &Tensor::from_slice(&[bytes.len() as i64])))?;
        let lengths: Vec<usize> = (0..size).map(|rank| lengths.int64_value(&[rank, 0]).max(0) as usize).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest == 0 {
            return Ok(vec![Vec::new(); lengths.len()]);
        }
        let mut padded = bytes.to_vec();
        padded.resize(longest, 0);
        let all = Tensor::zeros([size, longest as i64], (Kind::Uint8, Device::Cpu));
        joined.exchange(during, |group| group.gather(&all, &Tensor::from_slice(&padded)))?;
        let of_rank =
            |(rank, length): (usize, &usize)| or_panic(Vec::try_from(all.get(rank as i64).narrow(0, 0, *length as i64)));
        Ok(lengths.iter().enumerate().map(of_rank).collect())
    }

    /// Waits until all ranks are here.
    pub fn barrier(&self) -> Result<(), Fault> {
        let Some(joined) = &self.joined else { return Ok(()) };
        let zero = Tensor::zeros([1], (Kind::Double, Device::Cpu));
        joined.exchange("waiting for all ranks", |group| group.sum(&zero))
    }
}

/// Changes `tensor` by an exchange of what lies in one piece, itself or a copy: on its GPU, where NCCL serves, else on the host.
fn in_one_piece(
    tensor: &Tensor,
    joined: &Joined,
    exchange: impl FnOnce(&Tensor, Option<&NcclGroup>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let own = tensor.detach();
    let nccl = joined.nccl.as_ref().filter(|nccl| nccl.device == own.device());
    let device = nccl.map_or(Device::Cpu, |nccl| nccl.device);
    if own.device() == device && own.is_contiguous() {
        return exchange(&own, nccl);
    }
    let piece = own.to_device(device).contiguous();
    exchange(&piece, nccl)?;
    own.shallow_clone().copy_(&piece);
    Ok(())
}
