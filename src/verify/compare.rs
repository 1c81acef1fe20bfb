//! The two roads side by side; how near to the exact gradient one must come whose stores round; and whether f64 is to be had.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::Reference;
use crate::data::Batch;
use crate::engine::{MicroBatchGradients, Settings};
use crate::head::SequenceLoss;
use crate::model::Model;
use crate::native::available_memory;
use crate::recipe::StoreForm;
use crate::units::{Exit, Fault};

#[derive(Clone, Debug, PartialEq)]
pub struct MatrixError {
    pub name: String,
    /// Frobenius norm of the reference gradient; a matrix whose reference is zero is untested.
    pub reference_norm: f64,
    /// Frobenius norm of the engine's gradient.
    pub norm: f64,
    /// Norm of the difference, relative to the reference's.
    pub relative_error: f64,
    pub cosine: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Mean loss of the engine, nats per target.
    pub loss: f64,
    /// Mean loss of the reference, nats per target.
    pub reference_loss: f64,
    pub matrices: Vec<MatrixError>,
}

impl Comparison {
    pub fn new(
        sequences: &[SequenceLoss],
        ours: &BTreeMap<String, Tensor>,
        reference_rows: &[SequenceLoss],
        theirs: &BTreeMap<String, Tensor>,
    ) -> Self {
        let compared = theirs.iter().map(|(name, reference)| difference(name, ours.get(name), reference));
        let mut matrices: Vec<MatrixError> = compared.collect();
        let zero = ROUNDED_ZERO * whole_norm(&matrices);
        for matrix in matrices.iter_mut().filter(|matrix| matrix.reference_norm > 0.0 && matrix.reference_norm <= zero) {
            let apart = matrix.relative_error * matrix.reference_norm;
            (matrix.reference_norm, matrix.relative_error, matrix.cosine) = (0.0, apart, 0.0);
        }
        Self { loss: mean(sequences), reference_loss: mean(reference_rows), matrices }
    }

    /// The largest relative error of all matrices and of the loss; infinite if nothing was tested, or not finite.
    ///
    /// Where the reference is zero, ours counts relative to the whole gradient. Example: the only query of a sequence of one token
    /// has the weight 1 whatever q and k are, so their gradients are zero, and ours are what is left of `do · v − do · o`.
    pub fn worst(&self) -> f64 {
        let whole = whole_norm(&self.matrices);
        let relative = |m: &MatrixError| if m.reference_norm > 0.0 { m.relative_error } else { m.norm / whole };
        let loss = (self.loss - self.reference_loss).abs() / self.reference_loss.abs().max(SMALL_LOSS);
        let all: Vec<f64> = self.matrices.iter().map(relative).chain([loss]).collect();
        let is_proof = whole > 0.0 && all.iter().all(|e| e.is_finite());
        if is_proof { all.into_iter().fold(0.0, f64::max) } else { f64::INFINITY }
    }

    /// Cosine and relative error of the whole gradient, all matrices taken as one vector.
    pub fn whole(&self) -> (f64, f64) {
        let (mut product, mut ours, mut theirs, mut apart) = (0.0, 0.0, 0.0, 0.0);
        for m in &self.matrices {
            let error = if m.reference_norm > 0.0 { m.relative_error * m.reference_norm } else { m.relative_error };
            product += m.cosine * m.norm * m.reference_norm;
            ours += m.norm.powi(2);
            theirs += m.reference_norm.powi(2);
            apart += error.powi(2);
        }
        (product / (ours * theirs).sqrt(), (apart / theirs).sqrt())
    }

    pub fn untested(&self) -> Vec<&str> {
        self.matrices.iter().filter(|m| m.reference_norm == 0.0).map(|m| m.name.as_str()).collect()
    }
}

/// A reference gradient of this part of the whole, in f64, is what rounding leaves of one that is zero: of a bias on all keys of a layer without
/// positions, say, which moves all scores of a query alike.
const ROUNDED_ZERO: f64 = 1e-14;

/// A loss is what is left of terms of the order of 1, whose last digits in f64 are of the order of 1e-16: of a smaller one fewer digits are right.
const SMALL_LOSS: f64 = 1e-3;

fn whole_norm(matrices: &[MatrixError]) -> f64 {
    matrices.iter().map(|m| m.reference_norm.powi(2)).sum::<f64>().sqrt()
}

fn mean(sequences: &[SequenceLoss]) -> f64 {
    sequences.iter().map(|r| r.loss_sum).sum::<f64>() / sequences.iter().map(|r| r.targets).sum::<usize>().max(1) as f64
}

fn difference(name: &str, ours: Option<&Tensor>, reference: &Tensor) -> MatrixError {
    let norm = |t: &Tensor| t.square().sum(Kind::Double).sqrt().double_value(&[]);
    let reference = reference.to_kind(Kind::Double);
    let ours = ours.map_or_else(|| reference.zeros_like(), |o| o.to_kind(Kind::Double));
    let (reference_norm, our_norm) = (norm(&reference), norm(&ours));
    let apart = norm(&(&ours - &reference));
    let relative_error = if reference_norm > 0.0 { apart / reference_norm } else { apart };
    let product = (&ours * &reference).sum(Kind::Double).double_value(&[]);
    let cosine = if reference_norm * our_norm > 0.0 { product / (reference_norm * our_norm) } else { 0.0 };
    MatrixError { name: name.to_owned(), reference_norm, norm: our_norm, relative_error, cosine }
}

pub fn check_finite(batch: &Batch, sequences: &[SequenceLoss]) -> Result<(), Fault> {
    let mut losses = batch.sequences.iter().zip(sequences);
    let Some((sequence, _)) = losses.find(|(_, loss)| !loss.loss_sum.is_finite()) else { return Ok(()) };
    let message = format!("the loss is not finite, in sample {} (counted from 0)", sequence.sample);
    Err(Fault::new(Exit::NotFinite, message).with_hint("look at this sample and at the model's weights"))
}

impl Reference {
    pub fn compare(&self, ours: &MicroBatchGradients) -> Comparison {
        Comparison::new(&ours.losses, &ours.gradients, &self.sequences, &self.gradients)
    }
}

/// Bounds on the gradient as a whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ErrorBound {
    /// The least cosine with the exact gradient.
    pub smallest_cosine: f64,
    /// The greatest distance from the exact gradient, relative to its norm.
    pub largest_error: f64,
}

impl ErrorBound {
    pub fn of(form: StoreForm) -> Self {
        match form {
            StoreForm::Plain => Self { smallest_cosine: 1.0, largest_error: 0.0 },
            StoreForm::Int8 => Self { smallest_cosine: 0.9999, largest_error: 0.005 },
            StoreForm::Int4 => Self { smallest_cosine: 0.995, largest_error: 0.1 },
        }
    }

    /// The bounds of an engine's stores together, of a model that is trained from a layer on; `None` where its gradient is exact. The coarsest
    /// form decides: beside layer checkpoints an undo log of the same form adds little, as it rounds keys and values that are gone for most
    /// queries.
    pub fn of_stores(settings: &Settings, first_trained: usize) -> Option<Self> {
        let each = settings.inexact_stores(first_trained).into_iter().map(|(_, form)| Self::of(form));
        each.reduce(|a, b| Self {
            smallest_cosine: a.smallest_cosine.min(b.smallest_cosine),
            largest_error: a.largest_error.max(b.largest_error),
        })
    }
}

/// Whether weights and the reference's activations in f64 take at most half of the memory that is available.
pub fn fits_in_f64(model: &Model, batch: &Batch) -> bool {
    let config = model.config();
    let tokens = batch.sequences.len() * batch.max_len();
    // Per layer autograd keeps about a dozen tensors of the hidden width, six of the MLP's, and the attention's.
    let per_token = config.num_layers()
        * (14 * config.hidden_size
            + 6 * config.intermediate_size()
            + 6 * config.layers[0].attention.num_heads * config.layers[0].attention.head_dim);
    let layer = 4 * config.hidden_size * config.hidden_size + 3 * config.hidden_size * config.intermediate_size();
    let weights = config.num_layers() * layer + 2 * config.vocab_size * config.hidden_size;
    // A block of 512 queries against all keys, a few times over.
    let scores = 4 * batch.sequences.len() * config.layers[0].attention.num_heads * batch.max_len().min(512) * batch.max_len();
    // Where all weights are trained: their gradients by either road, and logits that are differentiated as a whole.
    let is_full = !model.head_parameters().is_empty();
    let trained = if is_full { 2 * weights + 4 * batch.num_targets() * config.vocab_size } else { 0 };
    let needed = 8 * (tokens * per_token + weights + scores + trained);
    available_memory().is_none_or(|available| needed as u64 <= available / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error of one matrix whose reference gradient is zero, or what rounding leaves of that, beside another that agrees.
    fn worst_of(ours_where_zero: f64) -> f64 {
        let [exact, rounded] = [0.0, 1e-17].map(|reference| worst_beside(ours_where_zero, reference));
        assert!(exact.total_cmp(&rounded).is_eq() || (exact - rounded).abs() < 1e-17, "{exact} {rounded}");
        exact
    }

    fn worst_beside(ours: f64, reference: f64) -> f64 {
        let named = |q: f64| {
            let tensors = [("q", q), ("v", 2.0)];
            tensors.map(|(name, value)| (name.to_owned(), Tensor::from_slice(&[value]))).into_iter().collect()
        };
        let sequences = [SequenceLoss { loss_sum: 1.0, targets: 1, correct: 0 }];
        let comparison = Comparison::new(&sequences, &named(ours), &sequences, &named(reference));
        assert_eq!(comparison.untested(), ["q"]);
        comparison.worst()
    }

    #[test]
    fn where_the_reference_is_zero_rounding_is_none_of_our_faults_and_a_gradient_is() {
        assert!(worst_of(0.0) <= 0.0);
        assert!((worst_of(2e-16) - 1e-16).abs() < 1e-20);
        assert!((worst_of(0.02) - 0.01).abs() < 1e-12);
        assert!(worst_of(f64::NAN).is_infinite());
    }
}
