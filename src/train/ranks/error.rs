//! What can go wrong between the ranks of a run.

use crate::dist::DistError;
use crate::units::{Exit, Failure, abridged};

/// Why several ranks can't work together, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
    /// A rank can't be reached, or has failed.
    #[error(transparent)]
    Dist(#[from] DistError),
    /// The micro-batches of a step can't be dealt to ranks evenly.
    #[error("`train.gradient_accumulation_steps` is {micro_batches}, which {ranks} ranks can't share evenly")]
    Uneven { ranks: usize, micro_batches: usize },
    /// A rank would do something else than the first one.
    #[error("rank {rank} differs from rank 0:{}", listed(*rank, differences))]
    Other {
        rank: usize,
        /// What differs, what it is on rank 0, and what on that rank.
        differences: Vec<[String; 3]>,
    },
}

fn listed(rank: usize, differences: &[[String; 3]]) -> String {
    let line = |[what, first, other]: &[String; 3]| {
        format!("\n  `{what}`: {} on rank 0, {} on rank {rank}", abridged(first), abridged(other))
    };
    differences.iter().map(line).collect()
}

impl RankError {
    /// Whether it says that another rank was asked to stop.
    pub(in crate::train) fn is_given_up(&self) -> bool {
        matches!(self, Self::Dist(DistError::OtherGaveUp { .. }))
    }
}

impl Failure for RankError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Dist(error) => error.hint(),
            Self::Uneven { ranks, .. } => {
                Some(format!("it counts the micro-batches of all ranks: set it to {ranks} or a multiple, or start fewer ranks"))
            }
            Self::Other { .. } => Some("start every rank with the same recipe, model, data and version".into()),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Dist(error) => error.exit(),
            Self::Uneven { .. } => Exit::Usage,
            Self::Other { .. } => Exit::Data,
        }
    }
}
