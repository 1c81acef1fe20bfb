//! An adapter that begins as the largest part of each weight: `PiSSA` (Meng et al. 2024, arXiv 2404.02948).

use tch::{Device, Tensor};

/// Matrices as they were before the first step, on the host. The weight lacks their product, so that both together are the model's own.
#[derive(Debug)]
pub(super) struct PissaInit {
    pub(super) a_ri: Tensor,
    pub(super) b_or: Tensor,
}

impl PissaInit {
    /// The `r` largest singular values of a weight with their vectors, shared evenly between both matrices, as PEFT has them:
    /// `scale · B A` is the nearest to the weight of all matrices of rank r. A weight that is not finite has none, and gets what is not
    /// finite either: the first step says so.
    ///
    /// # Shapes
    /// `(out, in)` in, of f32 or f64.
    pub(super) fn of(weight_oi: &Tensor, r: i64, scale: f64) -> Self {
        let parts = weight_oi.f_svd(true, true).map(|(u_ok, s_k, v_ik)| {
            let root_r = (s_k.narrow(0, 0, r) / scale).sqrt();
            (v_ik.narrow(1, 0, r).transpose(0, 1) * root_r.unsqueeze(1), u_ok.narrow(1, 0, r) * root_r)
        });
        let [out, inner] = [0, 1].map(|dim| weight_oi.size()[dim]);
        let none = |shape: [i64; 2]| weight_oi.new_full(shape, f64::NAN, (weight_oi.kind(), weight_oi.device()));
        let (a_ri, b_or) = parts.unwrap_or_else(|_| (none([r, inner]), none([out, r])));
        Self { a_ri: a_ri.contiguous().to_device(Device::Cpu), b_or: b_or.contiguous().to_device(Device::Cpu) }
    }

    /// `B A` on a device.
    ///
    /// # Shapes
    /// `(out, in)` out.
    pub(super) fn product(&self, device: Device) -> Tensor {
        self.b_or.to_device(device).matmul(&self.a_ri.to_device(device))
    }

    /// Where a saved adapter began: its matrices hold that behind what was trained (`[A; A₀]`, `[B, −B₀]`).
    ///
    /// # Shapes
    /// `(2r, in)` and `(out, 2r)` in.
    pub(super) fn of_saved(a_ri: &Tensor, b_or: &Tensor) -> Self {
        let r = b_or.size()[1] / 2;
        Self { a_ri: a_ri.narrow(0, r, r).contiguous(), b_or: -b_or.narrow(1, r, r).contiguous() }
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        self.a_ri.equal(&other.a_ri) && self.b_or.equal(&other.b_or)
    }
}

impl Clone for PissaInit {
    fn clone(&self) -> Self {
        Self { a_ri: self.a_ri.shallow_clone(), b_or: self.b_or.shallow_clone() }
    }
}
