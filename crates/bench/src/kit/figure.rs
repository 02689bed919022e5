//! Samples, and their quantiles.

/// Samples of one figure, all in the same unit. The unit is in the name of the variable or field
/// that holds them. Samples are finite.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// Adds a sample.
    pub(crate) fn push(&mut self, sample: f64) {
        self.0.push(sample);
    }

    /// The sample at quantile `q` of the sorted samples (nearest rank). `q` is from 0.0 to 1.0.
    /// Without samples the result is 0.0.
    #[must_use]
    pub(crate) fn quantile(&self, q: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        sorted
            .get((q * last as f64).round() as usize)
            .copied()
            .unwrap_or(0.0)
    }

    /// The sample at quantile 0.5. Of an even number of samples it is the upper of the two middle
    /// ones.
    #[must_use]
    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The mean. Without samples it is 0.0.
    #[must_use]
    pub(crate) fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.len().max(1) as f64
    }

    /// The number of samples.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no samples.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        Self(samples.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ends_are_those_of_the_sorted_samples() {
        let samples = Samples::from_iter([5.0, 1.0, 3.0]);
        let ends = [0.5, 0.0, 1.0].map(|q| samples.quantile(q));
        assert_eq!((ends, samples.len()), ([3.0, 1.0, 5.0], 3));
        assert_eq!(Samples::default().median(), 0.0);
        assert_eq!(Samples::from_iter([5.0, 1.0]).mean(), 3.0);
        assert_eq!(Samples::default().mean(), 0.0);
    }
}
