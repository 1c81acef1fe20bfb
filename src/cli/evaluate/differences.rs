//! How much the figures of an evaluation differ from the first's, over the same samples, and how sure that is.

use std::collections::BTreeMap;

use super::table::Evaluated;
use crate::eval::{Contribution, PairedDifference};
use crate::report::table::Table;

/// The differences between an evaluation and the `first`, by figure, where both have it of the same samples.
pub(super) fn of(first: &Evaluated, evaluated: &Evaluated) -> BTreeMap<String, PairedDifference> {
    let firsts = contributions(first);
    let difference = |(figure, others): (String, Vec<Contribution>)| {
        let found = PairedDifference::of(firsts.get(&figure)?, &others)?;
        Some((figure, found))
    };
    contributions(evaluated).into_iter().filter_map(difference).collect()
}

fn contributions(of: &Evaluated) -> BTreeMap<String, Vec<Contribution>> {
    let mut figures: BTreeMap<String, Vec<Contribution>> = BTreeMap::new();
    let mut add = |figure: String, sample, sum, weight| {
        let all = figures.entry(figure).or_default();
        // Windows of one text are no samples of their own.
        match all.last_mut().filter(|last| last.sample == sample) {
            Some(last) => (last.sum, last.weight) = (last.sum + sum, last.weight + weight),
            None => all.push(Contribution { sample, sum, weight }),
        }
    };
    for (loss, classes) in of.losses.iter().zip(&of.class_sums) {
        add("loss".to_owned(), loss.sample, loss.loss.loss_sum, loss.loss.targets as f64);
        for (class, &(sum, targets)) in classes {
            add(format!("loss of {class}"), loss.sample, sum, targets as f64);
        }
    }
    for answer in of.answers.iter().flat_map(|(_, answers)| answers) {
        for (metric, &score) in &answer.scores {
            add(metric.clone(), answer.sample, score, 1.0);
        }
    }
    figures
}

/// A table of the differences from the first evaluation; `None` where there are none.
pub(super) fn table(results: &[Evaluated]) -> Option<Table> {
    let first = results.first().filter(|_| results.iter().any(|result| !result.differences.is_empty()))?;
    let against = format!("less `{}`, {}, {}", first.name.display(), first.policy, first.slots);
    let mut table = Table::new(&["evaluated", "policy", "slots", "figure", &against, "95 % interval"]);
    for Evaluated { name, policy, slots, differences, .. } in results {
        for (figure, PairedDifference { difference, low, high, .. }) in differences {
            let (name, interval) = (name.display().to_string(), format!("{low:+.4} to {high:+.4}"));
            table.row(&[&name, &policy.to_string(), slots, figure, &format!("{difference:+.4}"), &interval]);
        }
    }
    Some(table)
}
