//! What the caches of a run have evicted, summed up over its steps.

use super::metrics::StepMetrics;

/// Sums over steps, each weighted by its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evicted {
    tokens: f64,
    evicted: f64,
    stay: f64,
}

impl Evicted {
    /// Adds a step of so many tokens, of whose entries a share left, after a mean stay.
    fn add(&mut self, tokens: u64, share: f64, mean_stay: Option<f64>) {
        let evicted = share * tokens as f64;
        self.tokens += tokens as f64;
        self.evicted += evicted;
        self.stay += evicted * mean_stay.unwrap_or(0.0);
    }

    /// Adds a line, where it says what was evicted: those of earlier versions do not.
    pub fn note(&mut self, line: &StepMetrics) {
        if let Some(share) = line.evicted {
            self.add(line.tokens, share, line.mean_stay);
        }
    }

    /// Over some lines.
    pub fn over<'a>(lines: impl IntoIterator<Item = &'a StepMetrics>) -> Self {
        lines.into_iter().fold(Self::default(), |mut sums, line| {
            sums.note(line);
            sums
        })
    }

    /// Over some lines, by layer.
    pub fn by_layer(lines: &[StepMetrics]) -> Vec<Self> {
        let mut layers: Vec<Self> = Vec::new();
        for line in lines {
            layers.resize(layers.len().max(line.evicted_by_layer.len()), Self::default());
            for ((sums, share), stay) in layers.iter_mut().zip(&line.evicted_by_layer).zip(&line.mean_stay_by_layer) {
                sums.add(line.tokens, *share, *stay);
            }
        }
        layers
    }

    /// The share of all entries that left; `None` where nothing is known.
    pub fn share(&self) -> Option<f64> {
        (self.tokens > 0.0).then(|| self.evicted / self.tokens)
    }

    /// How many further tokens came before an entry left, in the mean; `None` where none did.
    pub fn mean_stay(&self) -> Option<f64> {
        (self.evicted > 0.0).then(|| self.stay / self.evicted)
    }

    /// In words; `None` where nothing is known.
    pub fn words(&self) -> Option<String> {
        let share = self.share()?;
        Some(match self.mean_stay() {
            Some(stay) => format!("{:.1} %, each after {stay:.0} further tokens in the mean", 100.0 * share),
            None => "none: nothing left the caches".to_owned(),
        })
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
        assert_eq!(all.words().unwrap(), "25.0 %, each after 16 further tokens in the mean");
        let layers = Evicted::by_layer(&lines);
        assert_eq!(layers.len(), 2);
        assert_eq!((layers[0], layers[1].share(), layers[1].mean_stay()), (all, Some(0.0), None));
        assert_eq!(layers[1].words().unwrap(), "none: nothing left the caches");
        assert_eq!(Evicted::over(&[StepMetrics::default()]).words(), None, "a line of an earlier version");
    }
}
