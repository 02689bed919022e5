//! Rows of figures with their conditions: the output of most benchmarks.

use crate::kit::Samples;
use serde::Serialize;

/// One figure. The names of its JSON keys are stable.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// The name of the measurement, such as `push.rate`.
    pub(crate) case: &'static str,
    /// The object that was measured.
    pub(crate) subject: String,
    /// The median of the samples, in `unit`.
    pub(crate) value: f64,
    /// The unit of `value`, `min` and `max`: `us`, `ms`, `B`, `B/s`, `pages`, `pages/s`,
    /// `instructions/s`, `rounds/s` or `faults`.
    pub(crate) unit: &'static str,
    /// `value` divided by the baseline's.
    pub(crate) ratio: Option<f64>,
    /// The name of the baseline, if there is one.
    pub(crate) baseline: Option<String>,
    /// The smallest sample, in `unit`.
    pub(crate) min: f64,
    /// The largest sample, in `unit`.
    pub(crate) max: f64,
    /// The number of samples.
    pub(crate) samples: usize,
    /// The target in words: a bound on `ratio` if there is one, else on `value`.
    pub(crate) target: Option<String>,
    /// Whether the target was met.
    pub(crate) met: Option<bool>,
    /// The conditions of the measurement.
    pub(crate) conditions: Conditions,
}

/// The target of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bound {
    /// The ratio is at most this.
    RatioAtMost(f64),
    /// The ratio is at least this.
    RatioAtLeast(f64),
    /// The median is below this, in the row's unit.
    Below(f64),
    /// The median is at least this, in the row's unit.
    AtLeast(f64),
}

/// The conditions of a measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Conditions {
    /// The number of cores that this process may use.
    pub(crate) cores: usize,
    /// The number of vCPUs.
    pub(crate) vcpus: u32,
    /// Guest memory, in bytes.
    pub(crate) memory_bytes: u64,
    /// The delivery of faults, if the benchmark has faults.
    pub(crate) delivery: Option<String>,
    /// Further conditions, in words.
    pub(crate) note: String,
}

impl Conditions {
    /// The conditions on this host.
    #[must_use]
    pub(crate) fn here(vcpus: u32, memory_bytes: u64, note: impl Into<String>) -> Self {
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            vcpus,
            memory_bytes,
            delivery: None,
            note: note.into(),
        }
    }

    /// The same conditions, with a delivery of faults.
    #[must_use]
    pub(crate) fn with_delivery(mut self, delivery: pageferry_machine::Delivery) -> Self {
        self.delivery = Some(delivery.to_string());
        self
    }
}

impl Samples {
    /// A row with these samples, which are in `unit`.
    #[must_use]
    pub(crate) fn row(
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
    /// Adds the ratio to a baseline of `value`, in the row's unit. If `value` is 0, there is no
    /// ratio.
    #[must_use]
    pub(crate) fn against(mut self, baseline: impl Into<String>, value: f64) -> Self {
        self.ratio = (value != 0.0).then(|| self.value / value);
        self.baseline = Some(baseline.into());
        self
    }

    /// Adds the target, in words and as a bound.
    #[must_use]
    pub(crate) fn aiming_at(mut self, target: impl Into<String>, bound: Bound) -> Self {
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
