//! How near to the exact gradient one must come: to rounding, or as far as its stores round.

use crate::engine::Settings;
use crate::recipe::{Dtype, StoreForm};

/// The relative error that the rounding of a proof in `dtype` explains.
pub fn tolerance(dtype: Dtype) -> f64 {
    if dtype == Dtype::F64 { 1e-12 } else { 2e-5 }
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

    /// The bounds of an engine's stores together; `None` where its gradient is exact. The coarsest form decides: beside layer
    /// checkpoints an undo log of the same form adds little, as it rounds keys and values that are gone for most queries.
    pub fn of_stores(settings: &Settings) -> Option<Self> {
        let each = settings.inexact_stores().into_iter().map(|(_, form)| Self::of(form));
        each.reduce(|a, b| Self {
            smallest_cosine: a.smallest_cosine.min(b.smallest_cosine),
            largest_error: a.largest_error.max(b.largest_error),
        })
    }

    /// Whether a gradient with this cosine and this error is near enough.
    pub fn holds(&self, cosine: f64, error: f64) -> bool {
        cosine >= self.smallest_cosine && error <= self.largest_error
    }
}
