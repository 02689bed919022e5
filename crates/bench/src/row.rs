//! What a benchmark says: rows of figures with their conditions.

use serde::Serialize;

/// One figure. The names of the keys are stable.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What was measured.
    pub case: &'static str,
    /// On what.
    pub subject: String,
    /// The median.
    pub value: f64,
    /// Its unit.
    pub unit: &'static str,
    /// `value` divided by the baseline's.
    pub ratio: Option<f64>,
    /// What `ratio` compares with, and in what sense it is to be read.
    pub baseline: Option<String>,
    /// The smallest sample.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many samples the median is of.
    pub samples: usize,
    /// What to reach: a bound of `ratio` if there is one, else of `value`.
    pub target: Option<String>,
    /// The conditions of the measurement.
    pub conditions: Conditions,
}

/// The conditions of a measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Conditions {
    /// Cores this process may run on.
    pub cores: usize,
    /// vCPUs.
    pub vcpus: u32,
    /// Guest memory in bytes.
    pub memory_bytes: u64,
    /// How faults were delivered, where there were any.
    pub delivery: Option<String>,
    /// The rest, in words.
    pub note: String,
}

impl Conditions {
    /// Conditions of this host.
    #[must_use]
    pub fn here(vcpus: u32, memory_bytes: u64, note: impl Into<String>) -> Self {
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            vcpus,
            memory_bytes,
            delivery: None,
            note: note.into(),
        }
    }

    /// The same with a delivery.
    #[must_use]
    pub fn with_delivery(mut self, delivery: pageferry_machine::Delivery) -> Self {
        self.delivery = Some(delivery.to_string());
        self
    }
}

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

    /// A row of these samples.
    #[must_use]
    pub fn row(
        &self,
        case: &'static str,
        subject: impl Into<String>,
        unit: &'static str,
        conditions: Conditions,
    ) -> Row {
        Row {
            case,
            subject: subject.into(),
            value: self.median(),
            unit,
            ratio: None,
            baseline: None,
            min: self.quantile(0.0),
            max: self.quantile(1.0),
            samples: self.len(),
            target: None,
            conditions,
        }
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        Self(samples.into_iter().collect())
    }
}

impl Row {
    /// The row with its ratio to a baseline.
    #[must_use]
    pub fn against(mut self, baseline: impl Into<String>, value: f64) -> Self {
        self.ratio = (value != 0.0).then(|| self.value / value);
        self.baseline = Some(baseline.into());
        self
    }

    /// The row with what is to be reached.
    #[must_use]
    pub fn aiming_at(mut self, target: impl Into<String>) -> Self {
        self.target = Some(target.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ends_are_those_of_the_sorted_samples() {
        let samples: Samples = [5.0, 1.0, 3.0].into_iter().collect();
        assert_eq!(
            (
                samples.median(),
                samples.quantile(0.0),
                samples.quantile(1.0)
            ),
            (3.0, 1.0, 5.0)
        );
        assert_eq!(Samples::default().median(), 0.0);
    }

    #[test]
    fn a_ratio_to_nothing_is_no_ratio() {
        let row = || Samples::from_iter([6.0]).row("case", "subject", "us", Conditions::default());
        assert_eq!(row().against("b", 4.0).ratio, Some(1.5));
        assert_eq!(row().against("b", 0.0).ratio, None);
    }
}
