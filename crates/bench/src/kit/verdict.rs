//! A bound, and whether a run's own figure kept it.

use serde::Serialize;
use std::fmt;

/// One bound and whether it held.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// What is bounded.
    pub name: String,
    /// With how many slots, of what has slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// The most it may be.
    pub limit: f64,
    /// What it is.
    pub measured: f64,
    /// The unit of both: `ns`, `ms`, or `x` for how many times as much as something else.
    pub unit: &'static str,
    /// Whether `measured` is at most `limit`.
    pub met: bool,
}

impl Verdict {
    /// Whether `measured` is at most `limit`.
    #[must_use]
    pub fn new(name: impl Into<String>, limit: f64, measured: f64, unit: &'static str) -> Self {
        Self {
            name: name.into(),
            slots: None,
            limit,
            measured,
            unit,
            met: measured <= limit,
        }
    }

    /// The same, of so many slots.
    #[must_use]
    pub fn with_slots(self, slots: u32) -> Self {
        Self {
            slots: Some(slots),
            ..self
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<6} ", if self.met { "met" } else { "MISSED" })?;
        match self.slots {
            Some(slots) => write!(f, "{slots:>5} slots  {:<46}", self.name)?,
            None => write!(f, "{:<70}", self.name)?,
        }
        write!(
            f,
            " {:>8.2} {:<2} (at most {} {})",
            self.measured, self.unit, self.limit, self.unit
        )
    }
}
