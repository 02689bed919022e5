//! Rows of figures with their conditions: the output of every benchmark.

use crate::kit::Samples;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// One figure. The names of its JSON keys are stable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// The name of the measurement, such as `push.rate`.
    pub(crate) case: Cow<'static, str>,
    /// The object that was measured.
    pub(crate) subject: String,
    /// The median of the samples, in `unit`.
    pub(crate) value: f64,
    /// The unit of `value`, `min` and `max`.
    pub(crate) unit: Cow<'static, str>,
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
    /// The target in words: a bound on `ratio` or on `value`.
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
    /// The median is at most this, in the row's unit.
    AtMost(f64),
    /// The median is at least this, in the row's unit.
    AtLeast(f64),
}

/// The conditions of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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

/// The number of cores that this process may use.
pub(crate) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, usize::from) as u32
}

impl Conditions {
    /// The conditions on this host.
    pub(crate) fn here(vcpus: u32, memory_bytes: u64, note: impl Into<String>) -> Self {
        Self {
            cores: cores() as usize,
            vcpus,
            memory_bytes,
            delivery: None,
            note: note.into(),
        }
    }

    /// The same conditions, with a delivery of faults if there is one.
    pub(crate) fn with_delivery(
        mut self,
        delivery: impl Into<Option<pageferry_machine::Delivery>>,
    ) -> Self {
        self.delivery = delivery.into().map(|delivery| delivery.to_string());
        self
    }
}

impl Samples {
    /// A row with these samples, which are in `unit`.
    pub(crate) fn row(
        &self,
        case: impl Into<Cow<'static, str>>,
        subject: impl Into<String>,
        unit: &'static str,
        conditions: Conditions,
    ) -> Row {
        Row {
            case: case.into(),
            subject: subject.into(),
            value: self.median(),
            unit: unit.into(),
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
    pub(crate) fn against(self, baseline: impl Into<String>, value: f64) -> Self {
        let ratio = (value != 0.0).then(|| self.value / value);
        Self {
            baseline: Some(baseline.into()),
            ratio,
            ..self
        }
    }

    /// Adds the target.
    #[must_use]
    pub(crate) fn aiming_at(mut self, bound: Bound) -> Self {
        let (words, met) = match bound {
            Bound::RatioAtMost(most) => (
                format!("ratio <= {}", plain(most)),
                self.ratio.map(|r| r <= most),
            ),
            Bound::RatioAtLeast(least) => (
                format!("ratio >= {}", plain(least)),
                self.ratio.map(|r| r >= least),
            ),
            Bound::Below(most) => (self.bound("<", most), Some(self.value < most)),
            Bound::AtMost(most) => (self.bound("<=", most), Some(self.value <= most)),
            Bound::AtLeast(least) => (self.bound(">=", least), Some(self.value >= least)),
        };
        (self.target, self.met) = (Some(words), met);
        self
    }

    fn bound(&self, sign: &str, limit: f64) -> String {
        format!("{sign} {}", quantity(limit, &self.unit))
    }

    /// The value with its unit.
    pub(crate) fn figure(&self) -> String {
        quantity(self.value, &self.unit)
    }
}

/// A bound on a ratio, without needless digits.
fn plain(ratio: f64) -> String {
    let text = format!("{ratio:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A number of three digits with its unit, and a prefix if it is large.
pub(crate) fn quantity(value: f64, unit: &str) -> String {
    let (value, unit) = match unit {
        "ns" if value >= 1e9 => (value / 1e9, "s"),
        "us" if value >= 1e6 => (value / 1e6, "s"),
        "us" if value >= 1e3 => (value / 1e3, "ms"),
        "ms" if value >= 1e3 => (value / 1e3, "s"),
        _ => (value, unit),
    };
    let (scaled, prefix) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$} {prefix}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Samples::from_iter([6.0]).row("case", "subject", "us", Conditions::default())
    }

    #[test]
    fn a_ratio_to_nothing_is_no_ratio() {
        assert_eq!(row().against("b", 4.0).ratio, Some(1.5));
        assert_eq!(row().against("b", 0.0).ratio, None);
    }

    #[test]
    fn a_target_is_met_or_missed_by_its_bound() {
        let met = |bound| row().against("b", 4.0).aiming_at(bound).met;
        assert_eq!(met(Bound::RatioAtMost(1.5)), Some(true));
        assert_eq!(met(Bound::RatioAtMost(1.4)), Some(false));
        assert_eq!(met(Bound::RatioAtLeast(1.6)), Some(false));
        assert_eq!(met(Bound::Below(6.0)), Some(false));
        assert_eq!(
            (met(Bound::AtMost(6.0)), met(Bound::AtLeast(6.0))),
            (Some(true), Some(true))
        );
        assert_eq!(row().aiming_at(Bound::RatioAtMost(2.0)).met, None);
        let target = row().aiming_at(Bound::Below(5e6)).target;
        assert_eq!(target.as_deref(), Some("< 5.00 s"));
    }

    #[test]
    fn quantities_have_three_digits() {
        for (value, unit, shown) in [
            (7.456, "us", "7.46 us"),
            (812.3, "us", "812 us"),
            (9999.0, "us", "10.0 ms"),
            (45_600.0, "B", "45.6 kB"),
            (4.25e9, "B/s", "4.25 GB/s"),
        ] {
            assert_eq!(quantity(value, unit), shown);
        }
    }
}
