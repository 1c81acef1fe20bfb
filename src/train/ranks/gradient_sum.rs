//! The sum of the ranks' gradients: one flat buffer for each kind of number, so that ranks meet once a step.

use std::collections::BTreeMap;

use tch::{Tensor, no_grad};

use crate::dist::ProcessGroup;
use crate::model::Model;
use crate::ops::attention::zero_sum_of;
use crate::units::Fault;

/// The sum of `own` over all ranks, by parameter: parts of the buffers in which it was made. A rank that has run nothing adds nothing.
pub(in crate::train) fn sum_over(
    world: &ProcessGroup,
    model: &Model,
    own: BTreeMap<String, Tensor>,
) -> Result<BTreeMap<String, Tensor>, Fault> {
    let nothing = || model.parameters().into_iter().map(|(name, parameter)| (name, zero_sum_of(&parameter))).collect();
    let own = if own.is_empty() { nothing() } else { own };
    let alike = |gradient: &Tensor| (gradient.kind(), gradient.device());
    let mut groups: Vec<Vec<(String, Tensor)>> = Vec::new();
    for (name, gradient) in own {
        match groups.iter_mut().find(|group| alike(&group[0].1) == alike(&gradient)) {
            Some(group) => group.push((name, gradient)),
            None => groups.push(vec![(name, gradient)]),
        }
    }
    let mut sums = BTreeMap::new();
    for group in groups {
        let sizes: Vec<(String, Vec<i64>)> = group.iter().map(|(name, gradient)| (name.clone(), gradient.size())).collect();
        let flat =
            no_grad(|| Tensor::cat(&group.into_iter().map(|(_, gradient)| gradient.flatten(0, -1)).collect::<Vec<_>>(), 0));
        world.sum(&flat)?;
        let mut start = 0;
        for (name, size) in sizes {
            let count: i64 = size.iter().product();
            sums.insert(name, flat.narrow(0, start, count).view(&size[..]));
            start += count;
        }
    }
    Ok(sums)
}
