//! What the caches of a run have evicted, as sums.

use serde::{Deserialize, Serialize};

use super::metrics::StepMetrics;

/// Sums over the heads of a layer, over layers, or over steps, each of which counts by its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evicted {
    pub entries: f64,
    pub evicted: f64,
    /// Tokens that came between the writing and the leaving of these.
    pub stay: f64,
}

impl Evicted {
    fn of_step(tokens: u64, share: f64, mean_stay: Option<f64>) -> Self {
        let (entries, evicted) = (tokens as f64, share * tokens as f64);
        Self { entries, evicted, stay: evicted * mean_stay.unwrap_or(0.0) }
    }

    /// Over the lines that say what was evicted: those of earlier versions do not.
    pub fn over<'a>(lines: impl IntoIterator<Item = &'a StepMetrics>) -> Self {
        let known = lines.into_iter().filter_map(|line| Some(Self::of_step(line.tokens, line.evicted?, line.mean_stay)));
        known.fold(Self::default(), Self::plus)
    }

    pub fn by_layer(lines: &[StepMetrics]) -> Vec<Self> {
        let mut layers: Vec<Self> = Vec::new();
        for line in lines {
            layers.resize(layers.len().max(line.evicted_by_layer.len()), Self::default());
            for ((sums, share), stay) in layers.iter_mut().zip(&line.evicted_by_layer).zip(&line.mean_stay_by_layer) {
                *sums = sums.plus(Self::of_step(line.tokens, *share, *stay));
            }
        }
        layers
    }

    pub fn plus(self, Self { entries, evicted, stay }: Self) -> Self {
        Self { entries: self.entries + entries, evicted: self.evicted + evicted, stay: self.stay + stay }
    }

    /// The share of all entries that left; `None` where nothing is known.
    pub fn share(&self) -> Option<f64> {
        (self.entries > 0.0).then(|| self.evicted / self.entries)
    }

    /// How many further tokens came before an entry left, on average; `None` where none did.
    pub fn mean_stay(&self) -> Option<f64> {
        (self.evicted > 0.0).then(|| self.stay / self.evicted)
    }

    /// In words; `None` where nothing is known.
    pub fn words(&self) -> Option<String> {
        let share = 100.0 * self.share()?;
        let stay = self.mean_stay().map(|stay| format!("{share:.1} %, on average {stay:.0} tokens after they were written"));
        Some(stay.unwrap_or_else(|| "none: nothing left the caches".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_count_by_their_tokens_and_stays_by_what_left() {
        let line = |tokens, evicted, mean_stay| StepMetrics {
            tokens,
            evicted: Some(evicted),
            mean_stay,
            evicted_by_layer: vec![evicted, 0.0],
            mean_stay_by_layer: vec![mean_stay, None],
            ..StepMetrics::default()
        };
        let lines = [line(100, 0.5, Some(10.0)), line(300, 0.25, Some(20.0)), line(100, 0.0, None), StepMetrics::default()];
        let all = Evicted::over(&lines);
        assert_eq!((all.share(), all.mean_stay()), (Some(0.25), Some(16.0)));
        assert_eq!(all.words().unwrap(), "25.0 %, on average 16 tokens after they were written");
        let layers = Evicted::by_layer(&lines);
        assert_eq!(layers.len(), 2);
        assert_eq!((layers[0], layers[1].share(), layers[1].mean_stay()), (all, Some(0.0), None));
        assert_eq!(layers[1].words().unwrap(), "none: nothing left the caches");
        assert_eq!(Evicted::over(&[StepMetrics::default()]).words(), None, "a line of an earlier version");
    }
}
