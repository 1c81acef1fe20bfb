//! A projection with a frozen or trained matrix and an addition of low rank (LoRA, Hu et al. 2021, arXiv 2106.09685), as one
//! operation: no second output for the addition, and nothing kept for a gradient that nobody wants.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use tch::{Device, Kind, Tensor, no_grad};

use super::attention::accumulation_kind;
use super::differentiable::differentiable;
use crate::native::{add_product, product};

/// `scale · x Aᵀ Bᵀ`.
#[derive(Clone, Copy, Debug)]
pub struct LowRank<'a> {
    /// The down projection `A (r, in)`.
    pub a_ri: &'a Tensor,
    /// The up projection `B (out, r)`.
    pub b_or: &'a Tensor,
    pub scale: f64,
    /// The input `(B, n, in)` where dropout has made it another than the projection's.
    pub x_bni: Option<&'a Tensor>,
}

/// The matrix `(out, in)` of a projection.
#[derive(Debug)]
pub enum Weight {
    Plain(Tensor),
    Packed(PackedWeight),
}

/// A frozen matrix in a form of fewer bits, from which it is made anew for each product.
#[derive(Debug)]
pub struct PackedWeight {
    /// The tensors that the packed form consists of.
    pub parts: Vec<Tensor>,
    /// Rows and columns of the matrix.
    pub size: [i64; 2],
    /// The dtype of the matrix.
    pub kind: Kind,
    pub form: Arc<dyn PackedForm>,
}

/// A form in which the rows of a matrix are packed, each by itself.
pub trait PackedForm: Debug + Send + Sync {
    /// Some rows `(rows, in)`, in a dtype.
    fn unpack(&self, parts: &[Tensor], rows: &Range<i64>, kind: Kind) -> Tensor;

    /// Rows by their numbers, of a matrix of `size`: `index (n)`, int64; `(n, in)` out.
    fn select(&self, parts: &[Tensor], size: [i64; 2], index: &Tensor, kind: Kind) -> Tensor {
        self.unpack(parts, &(0..size[0]), kind).index_select(0, index)
    }

    /// `x Wᵀ` of a few rows of f32 without the whole matrix; `None` where the form has no such way: `(n, in)` in, `(n, out)` out.
    fn product(&self, _parts: &[Tensor], _x: &Tensor) -> Option<Tensor> {
        None
    }
}

/// Rows up to which a product does without the whole matrix: those of texts that are written side by side.
const FEW_ROWS: i64 = 8;

/// Numbers of a packed weight that are unpacked at a time: an output projection is much larger than what is computed with it.
pub const TILE: i64 = 1 << 23;

/// Bytes that unpacking takes for each of them on another device than the CPU: its value, its scale and both together, all of 32 bits.
pub const UNPACKING_BYTES: u64 = 12;

impl PackedWeight {
    /// Makes a matrix with other parts, each of which `change` makes of one.
    fn with(&self, change: impl Fn(&Tensor) -> Tensor) -> Self {
        Self { parts: self.parts.iter().map(change).collect(), form: Arc::clone(&self.form), ..*self }
    }

    pub fn to_device(&self, device: Device) -> Self {
        self.with(|part| part.to_device(device))
    }

    /// The rows of a range, unpacked.
    fn rows(&self, rows: &Range<i64>) -> Tensor {
        self.form.unpack(&self.parts, rows, self.kind)
    }

    fn tiles(&self) -> impl Iterator<Item = Range<i64>> {
        let [rows, width] = self.size;
        let step = (TILE / width.max(1)).max(1);
        (0..rows).step_by(step as usize).map(move |start| start..rows.min(start + step))
    }
}

impl Weight {
    pub fn matrix(&self) -> Tensor {
        match self {
            Self::Plain(weight_oi) => weight_oi.shallow_clone(),
            Self::Packed(packed) => no_grad(|| packed.rows(&(0..packed.size[0]))),
        }
    }

    /// Rows `(…, in)` by their numbers `(…)`, int64, as an embedding has them.
    pub fn select(&self, index: &Tensor) -> Tensor {
        match self {
            Self::Plain(weight_oi) => Tensor::embedding(weight_oi, index, -1, false, false),
            Self::Packed(packed) => no_grad(|| {
                let flat = index.reshape([-1]);
                let size = [&index.size()[..], &packed.size[1..]].concat();
                packed.form.select(&packed.parts, packed.size, &flat, packed.kind).view(&size[..])
            }),
        }
    }

    /// Makes a weight of other tensors, each of which `change` makes of one.
    pub fn map(&self, change: impl Fn(&Tensor) -> Tensor) -> Self {
        match self {
            Self::Plain(weight_oi) => Self::Plain(change(weight_oi)),
            Self::Packed(packed) => Self::Packed(packed.with(change)),
        }
    }

    pub fn kind(&self) -> Kind {
        match self {
            Self::Plain(weight_oi) => weight_oi.kind(),
            Self::Packed(packed) => packed.kind,
        }
    }

    /// The forward product `x Wᵀ`, without autograd.
    fn product(&self, x: &Tensor) -> Tensor {
        match self {
            Self::Plain(weight_oi) => product(x, weight_oi),
            Self::Packed(packed) => {
                let few = x.size()[0] <= FEW_ROWS && x.kind() != Kind::Double;
                let made = few.then(|| packed.form.product(&packed.parts, &x.to_kind(Kind::Float))).flatten();
                if let Some(made) = made {
                    return made.to_kind(x.kind());
                }
                let mut parts: Vec<Tensor> = packed.tiles().map(|rows| product(x, &packed.rows(&rows))).collect();
                if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(&parts, 1) }
            }
        }
    }

    /// The product `dy W` of the backward, without autograd.
    fn transposed_product(&self, dy: &Tensor) -> Tensor {
        match self {
            Self::Plain(weight_oi) => product(dy, &weight_oi.transpose(0, 1)),
            Self::Packed(packed) => {
                let mut parts = packed.tiles().map(|rows| {
                    let dy = dy.narrow(1, rows.start, rows.end - rows.start).contiguous();
                    product(&dy, &packed.rows(&rows).transpose(0, 1))
                });
                let first = parts.next().unwrap_or_default();
                // Several are summed in f32 at least, as one product would be.
                let mut sum: Option<Tensor> = None;
                for part in parts {
                    *sum.get_or_insert_with(|| first.to_kind(accumulation_kind(dy.kind()))) += part;
                }
                sum.map_or(first, |sum| sum.to_kind(dy.kind()))
            }
        }
    }

    /// The tensors that it is kept in.
    pub fn tensors(&self) -> &[Tensor] {
        match self {
            Self::Plain(weight_oi) => std::slice::from_ref(weight_oi),
            Self::Packed(packed) => &packed.parts,
        }
    }
}

/// `x Wᵀ + b`, and the addition where there is one. Under autograd if any of them requires a gradient.
///
/// Products run in the dtype of `x`; matrices of low rank may be kept in another, and get their gradients in it. A packed weight is unpacked
/// for the product of each pass, so many rows at a time, and gone after it.
///
/// # Shapes
/// `x (B, n, in)`, `weight (out, in)`, `bias (out)`; result `(B, n, out)`.
pub fn linear(x_bni: &Tensor, weight: &Weight, bias_o: Option<&Tensor>, low_rank: Option<LowRank<'_>>) -> Tensor {
    let (y_bno, saved) = no_grad(|| forward(x_bni, weight, bias_o, low_rank));
    let none = Tensor::new();
    let weight_oi = if let Weight::Plain(weight_oi) = weight { weight_oi } else { &none };
    let (a, b) = low_rank.map_or((&none, &none), |l| (l.a_ri, l.b_or));
    let inputs = [x_bni, low_rank.and_then(|l| l.x_bni).unwrap_or(&none), weight_oi, bias_o.unwrap_or(&none), a, b];
    differentiable(inputs, y_bno, move |dy_bno, needs| saved.backward(dy_bno, needs))
}

/// The Euclidean lengths `(out)` of the rows of `W + scale · B A`, which is not made for it; a constant for autograd, as `DoRA` has it, in the
/// dtype of A.
pub fn row_norms(weight: &Weight, low_rank: LowRank<'_>) -> Tensor {
    no_grad(|| match weight {
        Weight::Plain(weight_oi) => row_norms_of(weight_oi, low_rank),
        Weight::Packed(packed) => {
            let of_tile = |rows: Range<i64>| {
                let b_or = low_rank.b_or.narrow(0, rows.start, rows.end - rows.start);
                row_norms_of(&packed.rows(&rows), LowRank { b_or: &b_or, ..low_rank })
            };
            Tensor::cat(&packed.tiles().map(of_tile).collect::<Vec<_>>(), 0)
        }
    })
}

fn row_norms_of(weight_oi: &Tensor, LowRank { a_ri, b_or, scale, .. }: LowRank<'_>) -> Tensor {
    let sums = |x: Tensor| x.sum_dim_intlist(&[1i64][..], false, a_ri.kind());
    let (weight_oi, a_ri, b_or) = (weight_oi.detach(), a_ri.detach(), b_or.detach());
    // |w + sb|² = |w|² + 2s·wb + s²|b|², with b a row of B A.
    let squares_o = weight_oi.norm_scalaropt_dim_dtype(2, &[1i64][..], false, a_ri.kind()).square();
    let shared_or = weight_oi.matmul(&a_ri.transpose(0, 1).to_kind(weight_oi.kind())).to_kind(a_ri.kind());
    let added_or = b_or.matmul(&a_ri.matmul(&a_ri.transpose(0, 1)));
    (squares_o + sums((shared_or * (2.0 * scale) + added_or * (scale * scale)) * b_or)).sqrt()
}

struct LinearSaved {
    /// Rows by channels, where a matrix needs it for its gradient.
    x: Option<Tensor>,
    weight: Weight,
    low_rank: Option<SavedLowRank>,
}

struct SavedLowRank {
    a_ri: Tensor,
    b_or: Tensor,
    /// The dtype in which A and B are kept.
    kind: Kind,
    scale: f64,
    /// The input of the addition, where it is another than the projection's.
    x: Option<Tensor>,
    /// `scale · x Aᵀ`, rows by r.
    inner: Tensor,
}

fn rows(x: &Tensor) -> Tensor {
    x.reshape([-1, x.size().last().copied().unwrap_or(1)])
}

/// Rows of other channels, in the shape that those of `x` had.
fn shaped_as(x: &Tensor, rows: &Tensor) -> Tensor {
    let size = x.size();
    rows.view(&[&size[..size.len().saturating_sub(1)], &rows.size()[1..]].concat()[..])
}

fn forward(x_bni: &Tensor, weight: &Weight, bias_o: Option<&Tensor>, low_rank: Option<LowRank<'_>>) -> (Tensor, LinearSaved) {
    let needs_weight = matches!(weight, Weight::Plain(weight_oi) if weight_oi.requires_grad());
    let (x, weight) = (rows(&x_bni.detach()), weight.map(Tensor::detach));
    let mut y = weight.product(&x);
    if let Some(bias_o) = bias_o {
        y += bias_o;
    }
    let low_rank = low_rank.map(|l| {
        let (a_ri, b_or) = (l.a_ri.detach().to_kind(x.kind()), l.b_or.detach().to_kind(x.kind()));
        let own = l.x_bni.map(|x_bni| rows(&x_bni.detach()));
        let inner = add_low_rank(&mut y, own.as_ref().unwrap_or(&x), &a_ri, &b_or.transpose(0, 1), l.scale);
        SavedLowRank { a_ri, b_or, kind: l.a_ri.kind(), scale: l.scale, x: own, inner }
    });
    let serves_a = low_rank.as_ref().is_some_and(|l| l.x.is_none());
    (shaped_as(x_bni, &y), LinearSaved { x: (serves_a || needs_weight).then_some(x), weight, low_rank })
}

/// Adds `inner · second` to `y` in place, with `inner = scale · x · firstᵀ`, which is the result: `y (m, o)`, `x (m, i)`, `first (r, i)`,
/// `second (r, o)`; result `(m, r)`.
fn add_low_rank(y: &mut Tensor, x: &Tensor, first_ri: &Tensor, second_ro: &Tensor, scale: f64) -> Tensor {
    let inner = product(x, first_ri).g_mul_scalar_(scale);
    add_product(y, &inner, second_ro);
    inner
}

/// `thinᵀ · wide`, summed up over rows: the gradient of a matrix of low rank. `thin (m, r)`, `wide (m, o)`; result `(r, o)`.
fn across(thin: &Tensor, wide: &Tensor) -> Tensor {
    // The large factor is the one that may lie transposed.
    product(&thin.transpose(0, 1).contiguous(), &wide.transpose(0, 1))
}

impl LinearSaved {
    /// Gradients of x, of the addition's own x, of the weight, of the bias, of A and of B, as far as they are needed.
    fn backward(&self, dy_bno: &Tensor, [x, own_x, weight, bias, a, b]: [bool; 6]) -> [Option<Tensor>; 6] {
        let dy = rows(dy_bno);
        let shaped = |dx: Tensor| shaped_as(dy_bno, &dx);
        let mut dx = x.then(|| self.weight.transposed_product(&dy));
        let weight = self.x.as_ref().filter(|_| weight).map(|x| product(&dy.transpose(0, 1), &x.transpose(0, 1)));
        let bias = bias.then(|| dy.sum_dim_intlist(&[0i64][..], false, dy.kind()));
        let Some(l) = &self.low_rank else {
            return [dx.map(shaped), None, weight, bias, None, None];
        };
        let dinner = match (&l.x, &mut dx) {
            (None, Some(dx)) => add_low_rank(dx, &dy, &l.b_or.transpose(0, 1), &l.a_ri, l.scale),
            _ => product(&dy, &l.b_or.transpose(0, 1)).g_mul_scalar_(l.scale),
        };
        let own_dx = own_x.then(|| product(&dinner, &l.a_ri.transpose(0, 1)));
        let own_x = l.x.as_ref().or(self.x.as_ref());
        let a = own_x.filter(|_| a).map(|x| across(&dinner, x).to_kind(l.kind));
        let b = b.then(|| across(&l.inner, &dy).transpose(0, 1).contiguous().to_kind(l.kind));
        [dx.map(shaped), own_dx.map(shaped), weight, bias, a, b]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(weight_oi: &Tensor) -> Weight {
        Weight::Plain(weight_oi.shallow_clone())
    }

    fn leaf(size: &[i64], kind: Kind) -> Tensor {
        Tensor::randn(size, (kind, Device::Cpu)).set_requires_grad(true)
    }

    #[test]
    fn output_and_all_gradients_equal_plain_autograd() {
        for (kind, bound) in [(Kind::Double, 1e-13), (Kind::Float, 2e-5)] {
            for (has_bias, has_low_rank, has_own_x) in
                [(false, false, false), (true, false, false), (true, true, false), (false, true, true)]
            {
                let (x, weight, bias) = (leaf(&[2, 5, 12], kind), leaf(&[7, 12], kind), leaf(&[7], kind));
                let (a, b, own) = (leaf(&[3, 12], kind), leaf(&[7, 3], kind), leaf(&[2, 5, 12], kind));
                let low_rank = LowRank { a_ri: &a, b_or: &b, scale: 0.7, x_bni: has_own_x.then_some(&own) };
                let ours = linear(&x, &plain(&weight), has_bias.then_some(&bias), has_low_rank.then_some(low_rank));
                let seed = Tensor::randn([2, 5, 7], (kind, Device::Cpu));
                let leaves = [&x, &weight, &bias, &a, &b, &own];
                let taken = |y: &Tensor| crate::native::gradients_of(&[y], &[&seed], &leaves).unwrap();
                let ours_gradients = taken(&ours);

                let input = if has_own_x { &own } else { &x };
                let addition = (input.linear(&a, None::<&Tensor>) * 0.7).linear(&b, None::<&Tensor>);
                let projected = x.linear(&weight, has_bias.then_some(&bias));
                let expected = if has_low_rank { projected + addition } else { projected };
                assert!(ours.allclose(&expected, 0.0, bound, false));
                for (i, (ours, plain)) in ours_gradients.iter().zip(taken(&expected)).enumerate() {
                    match (ours, plain) {
                        (Some(ours), Some(plain)) => assert!(ours.allclose(&plain, 0.0, 10.0 * bound, false), "gradient {i}"),
                        (ours, plain) => assert!(ours.is_none() && plain.is_none(), "gradient {i}"),
                    }
                }
            }
        }
    }

    #[test]
    fn masters_in_f32_serve_a_product_in_bf16_and_get_gradients_in_f32() {
        let x = leaf(&[1, 4, 8], Kind::BFloat16);
        let weight = Tensor::randn([6, 8], (Kind::BFloat16, Device::Cpu));
        let (a, b) = (leaf(&[2, 8], Kind::Float), leaf(&[6, 2], Kind::Float));
        let y = linear(&x, &plain(&weight), None, Some(LowRank { a_ri: &a, b_or: &b, scale: 1.0, x_bni: None }));
        assert_eq!(y.kind(), Kind::BFloat16);
        let grads = crate::native::gradients_of(&[&y], &[&y.ones_like()], &[&a, &b, &x]).unwrap();
        let kinds: Vec<Kind> = grads.iter().flatten().map(Tensor::kind).collect();
        assert_eq!(kinds, [Kind::Float, Kind::Float, Kind::BFloat16]);
    }

    #[test]
    fn lengths_of_rows_are_those_of_the_sum() {
        let (weight, a, b) = (leaf(&[7, 12], Kind::Double), leaf(&[3, 12], Kind::Double), leaf(&[7, 3], Kind::Double));
        let ours = row_norms(&plain(&weight), LowRank { a_ri: &a, b_or: &b, scale: 0.7, x_bni: None });
        let plain = (&weight + b.matmul(&a) * 0.7).norm_scalaropt_dim_dtype(2, &[1i64][..], false, Kind::Double);
        assert!(ours.allclose(&plain, 1e-13, 0.0, false) && !ours.requires_grad());
    }

    #[test]
    fn without_autograd_nothing_is_kept() {
        let (x, weight) = (leaf(&[1, 2, 3], Kind::Float), Tensor::randn([4, 3], tch::kind::FLOAT_CPU));
        let weight = plain(&weight);
        assert!(!no_grad(|| linear(&x, &weight, None, None)).requires_grad());
        assert!(!linear(&x.detach(), &weight, None, None).requires_grad());
        assert!(linear(&x, &weight, None, None).requires_grad());
    }
}
