//! How many slots a layer needs: how many of its entries are worth more than a threshold, which is the same for all layers.

use tch::{Device, Kind, Tensor};

/// Importances are counted by their logarithm: bins for each doubling, from the lowest on.
const BINS_PER_DOUBLING: f64 = 8.0;
const MIN_LOG2: f64 = -120.0;
const BINS: i64 = 1280;

/// No layer gets less than this part of the mean: texts differ.
const MIN_SHARE: f64 = 0.25;

/// Counts of the entries that stand in a layer's cache, by what they are still worth to the queries that come.
#[derive(Debug, Default)]
pub(in crate::engine) struct SlotDemand {
    bins: Option<Tensor>,
    /// Caches of single heads that were counted.
    caches: f64,
}

impl SlotDemand {
    /// Counts the entries that stand before a chunk, `(B, G, P)`, in the slots that hold one.
    pub(super) fn count(&mut self, importance: &Tensor, is_held: &Tensor) {
        let held = importance.to_kind(Kind::Double).masked_select(is_held);
        let bin = ((held.log2() - MIN_LOG2) * BINS_PER_DOUBLING).clamp(0.0, BINS as f64 - 1.0).to_kind(Kind::Int64);
        let counts = bin.bincount(None::<&Tensor>, BINS).to_kind(Kind::Double);
        self.bins = Some(self.bins.take().map_or(counts.shallow_clone(), |total| total + counts));
        self.caches += importance.size()[..2].iter().product::<i64>() as f64;
    }

    /// The mean number of a cache's entries in the highest bins, down to each.
    fn down_to(&self) -> Vec<f64> {
        let bins = self.bins.as_ref().map(|bins| Vec::<f64>::try_from(bins.to_device(Device::Cpu)).unwrap_or_default());
        let above = bins.unwrap_or_default().into_iter().rev().scan(0.0, |sum, count| {
            *sum += count / self.caches;
            Some(*sum)
        });
        above.collect()
    }
}

/// Shares `mean` slots a layer out, by one threshold for the entries of all layers: multiples of `step`, none below `least`, together at
/// most `mean` times the layers. `None` before anything was counted.
pub(in crate::engine) fn share_out(demands: &[&SlotDemand], mean: usize, least: usize, step: usize) -> Option<Vec<usize>> {
    let down_to: Vec<Vec<f64>> = demands.iter().map(|demand| demand.down_to()).collect();
    let (total, mean) = (demands.len() * mean, mean as f64);
    let needed = |bin: usize| -> Vec<f64> {
        let of_layer = |counts: &Vec<f64>| counts.get(bin).map(|slots| slots.max(MIN_SHARE * mean).max(least as f64));
        down_to.iter().filter_map(of_layer).collect()
    };
    let fits = |slots: &Vec<f64>| slots.len() == demands.len() && slots.iter().sum::<f64>() <= total as f64;
    let most = (0..BINS as usize).map(needed).take_while(fits).last()?;
    // What is left when all are rounded down goes where most was cut off.
    let mut shares: Vec<usize> = most.iter().map(|slots| *slots as usize / step).collect();
    let cut_off = |layer: &usize| most[*layer] / step as f64 - shares[*layer] as f64;
    let mut by_rest: Vec<usize> = (0..most.len()).collect();
    by_rest.sort_by(|a, b| cut_off(b).total_cmp(&cut_off(a)));
    let left = (total / step).saturating_sub(shares.iter().sum());
    by_rest.into_iter().cycle().take(left).for_each(|layer| shares[layer] += 1);
    Some(shares.into_iter().map(|units| units * step).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache whose entries are worth 2^from and less, each half of the one before.
    fn demand(from: i32, entries: i32) -> SlotDemand {
        let worth: Vec<f64> = (0..entries).map(|i| f64::from(from - i).exp2()).collect();
        let worth = Tensor::from_slice(&worth).view([1, 1, -1]);
        let mut demand = SlotDemand::default();
        demand.count(&worth, &worth.gt(0.0));
        demand
    }

    #[test]
    fn one_threshold_shares_slots_out_and_nobody_goes_without() {
        // Above any threshold layer 0 has 30 entries more than layer 1, and layer 2 none.
        let (rich, poor, useless) = (demand(0, 100), demand(-30, 100), demand(-119, 1));
        let shares = share_out(&[&rich, &poor, &useless], 40, 1, 1).unwrap();
        assert_eq!(shares.iter().sum::<usize>(), 120, "{shares:?}");
        assert_eq!(shares[2], 10, "a quarter of the mean");
        assert!((shares[0] as i64 - shares[1] as i64 - 30).abs() <= 1, "{shares:?}");
        assert!(share_out(&[&rich, &poor, &useless], 40, 8, 8).unwrap().iter().all(|slots| slots % 8 == 0));
        assert!(share_out(&[&SlotDemand::default()], 40, 8, 8).is_none());
        // No layer gets less than the least, and all together no more for that.
        let coarse = share_out(&[&rich, &useless, &useless, &useless], 40, 32, 32).unwrap();
        assert_eq!(coarse, [64, 32, 32, 32]);
        let wide = share_out(&[&rich, &useless, &useless], 40, 32, 8).unwrap();
        assert_eq!(wide, [56, 32, 32]);
        assert!(share_out(&[&rich, &poor], 24, 32, 8).is_none());
    }

    #[test]
    fn entries_that_are_worth_nothing_are_counted_lowest() {
        let worth = Tensor::from_slice(&[0.0, 1.0, 0.0]).view([1, 1, 3]);
        let mut demand = SlotDemand::default();
        demand.count(&worth, &Tensor::from_slice(&[true, true, false]).view([1, 1, 3]));
        let down_to = demand.down_to();
        let of = [0, BINS as usize - 2, BINS as usize - 1].map(|bin| down_to[bin] as usize);
        assert_eq!(of, [0, 1, 2]);
    }
}
