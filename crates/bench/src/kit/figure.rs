//! Samples, and the figure that they give.

use serde::Serialize;

/// Samples of one figure.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Adds one.
    pub fn push(&mut self, sample: f64) {
        self.0.push(sample);
    }

    /// The sample at quantile `q` (0 to 1) of those in order; 0 where there are none.
    #[must_use]
    pub fn quantile(&self, q: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        sorted
            .get((q * last as f64).round() as usize)
            .copied()
            .unwrap_or(0.0)
    }

    /// The median.
    #[must_use]
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        Self(samples.into_iter().collect())
    }
}

/// A median with its ends; the unit is in the name of what holds it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// The median of the samples.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many.
    pub samples: usize,
}

impl Figure {
    /// Of these samples.
    #[must_use]
    pub fn of(samples: &Samples) -> Self {
        Self {
            median: samples.median(),
            min: samples.quantile(0.0),
            max: samples.quantile(1.0),
            samples: samples.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ends_are_those_of_the_sorted_samples() {
        let figure = Figure::of(&[5.0, 1.0, 3.0].into_iter().collect());
        assert_eq!((figure.median, figure.min, figure.max), (3.0, 1.0, 5.0));
        assert_eq!(figure.samples, 3);
        assert_eq!(Samples::default().median(), 0.0);
    }
}
