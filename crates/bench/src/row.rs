//! What a benchmark says: rows of figures with their conditions.

use crate::kit::Samples;
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
    /// Whether it was reached.
    pub met: Option<bool>,
    /// The conditions of the measurement.
    pub conditions: Conditions,
}

/// What a row is to reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// The most its ratio may be.
    RatioAtMost(f64),
    /// The least its ratio may be.
    RatioAtLeast(f64),
    /// What its median must stay below.
    Below(f64),
    /// The least its median may be.
    AtLeast(f64),
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

impl Samples {
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
            met: None,
            conditions,
        }
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

    /// The row with what is to be reached, in words and as a bound.
    #[must_use]
    pub fn aiming_at(mut self, target: impl Into<String>, bound: Bound) -> Self {
        self.target = Some(target.into());
        self.met = match bound {
            Bound::RatioAtMost(most) => self.ratio.map(|ratio| ratio <= most),
            Bound::RatioAtLeast(least) => self.ratio.map(|ratio| ratio >= least),
            Bound::Below(most) => Some(self.value < most),
            Bound::AtLeast(least) => Some(self.value >= least),
        };
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_to_nothing_is_no_ratio() {
        let row = || Samples::from_iter([6.0]).row("case", "subject", "us", Conditions::default());
        assert_eq!(row().against("b", 4.0).ratio, Some(1.5));
        assert_eq!(row().against("b", 0.0).ratio, None);
    }

    #[test]
    fn a_target_is_met_or_missed_by_its_bound() {
        let row = || Samples::from_iter([6.0]).row("case", "subject", "us", Conditions::default());
        let met = |bound| row().against("b", 4.0).aiming_at("words", bound).met;
        assert_eq!(met(Bound::RatioAtMost(1.5)), Some(true));
        assert_eq!(met(Bound::RatioAtMost(1.4)), Some(false));
        assert_eq!(met(Bound::RatioAtLeast(1.6)), Some(false));
        assert_eq!(
            (met(Bound::Below(6.0)), met(Bound::AtLeast(6.0))),
            (Some(false), Some(true))
        );
        assert_eq!(row().aiming_at("words", Bound::RatioAtMost(2.0)).met, None);
    }
}
