//! The load-balance loss of the routers over a whole batch, though its tokens come in chunks and layer by layer (Fedus et al. 2021, arXiv
//! 2101.03961, equations 4 to 6): X · Σ (share of the tokens that went to an expert) · (its mean probability), both over the real
//! tokens of all layers with experts together. The shares are constants in the backward; the forward phase has counted them.

use tch::{Kind, Tensor, no_grad};

use crate::cache::ChunkSpan;
use crate::native::cuda::on_device;

#[derive(Debug, Default)]
pub(super) struct RouterSums {
    /// Sums for each expert `(X)`, f64: its probabilities, and how many tokens went to it.
    sums: Option<(Tensor, Tensor)>,
    tokens: usize,
}

impl RouterSums {
    /// Adds one layer's tokens of a column.
    pub(super) fn add(&mut self, spans: &[ChunkSpan], probability_bnx: &Tensor, chosen_bnk: &Tensor) {
        no_grad(|| {
            let real_bn1 = real_tokens(spans, probability_bnx);
            let over_tokens = |of: Tensor| (of * &real_bn1).sum_dim_intlist(&[0i64, 1][..], false, Kind::Double);
            let probability_bnx = probability_bnx.detach().to_kind(Kind::Double);
            let chosen_bnx = probability_bnx.zeros_like().scatter_value(-1, chosen_bnk, 1.0);
            let (probability_x, count_x) = (over_tokens(probability_bnx), over_tokens(chosen_bnx));
            self.sums = Some(match self.sums.take() {
                None => (probability_x, count_x),
                Some((probabilities, counts)) => (probabilities + probability_x, counts + count_x),
            });
        });
        self.tokens += spans.iter().flat_map(|span| &span.real).sum::<usize>();
    }

    /// The loss; `None` where there are no experts.
    pub(super) fn loss(&self) -> Option<f64> {
        let (probability_x, count_x) = self.sums.as_ref()?;
        let tokens = self.tokens as f64;
        let product = (probability_x / tokens * (count_x / tokens)).sum(Kind::Double);
        Some(product.double_value(&[]) * count_x.numel() as f64)
    }

    /// The gradient of `weight` times the loss with respect to the probabilities of any one token `(X)`, f64.
    pub(super) fn gradient(&self, weight: f64) -> Option<Tensor> {
        let (_, count_x) = self.sums.as_ref().filter(|_| weight > 0.0)?;
        let tokens = self.tokens as f64;
        Some(count_x * (weight * count_x.numel() as f64 / (tokens * tokens)))
    }
}

/// What is done with the probabilities of routers while a column runs, where they have a loss.
#[derive(Default)]
pub(super) struct RouterTask<'a> {
    /// The sums to which they are added, in the forward phase.
    pub(super) sums: Option<&'a mut RouterSums>,
    /// Roots of the backward, where autograd runs: probabilities, and which of the tokens are real.
    pub(super) roots: Vec<(Tensor, Tensor)>,
}

impl RouterTask<'_> {
    pub(super) fn take(&mut self, spans: &[ChunkSpan], probability_bnx: &Tensor, chosen_bnk: &Tensor) {
        if let Some(sums) = &mut self.sums {
            sums.add(spans, probability_bnx, chosen_bnk);
        }
        if probability_bnx.requires_grad() {
            self.roots.push((probability_bnx.shallow_clone(), no_grad(|| real_tokens(spans, probability_bnx))));
        }
    }
}

/// `(B, n, 1)`, f64: 1 for tokens, 0 for pads.
fn real_tokens(spans: &[ChunkSpan], like: &Tensor) -> Tensor {
    let sequences = spans[0].num_sequences();
    let mut flat = Vec::new();
    for sequence in 0..sequences {
        for span in spans {
            flat.extend((0..span.len).map(|at| f64::from(at < span.real[sequence])));
        }
    }
    on_device(&flat, like.device()).view([sequences as i64, -1, 1])
}
