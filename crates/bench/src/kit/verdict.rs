//! A bound on a figure, and whether a run met it.

use serde::Serialize;
use std::fmt;

/// An upper bound on one figure, and whether the run met it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Verdict {
    /// The name of the figure.
    pub(crate) name: String,
    /// The number of memory slots, if the figure is of slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) slots: Option<u32>,
    /// The largest figure that meets the bound, in `unit`.
    pub(crate) limit: f64,
    /// The figure of this run, in `unit`.
    pub(crate) measured: f64,
    /// The unit of `limit` and `measured`: `ns`, `ms`, or `x` for a ratio of two figures.
    pub(crate) unit: &'static str,
    /// Whether `measured` is at most `limit`.
    pub(crate) met: bool,
}

impl Verdict {
    /// Judges `measured` by `limit`, both in `unit`.
    #[must_use]
    pub(crate) fn new(
        name: impl Into<String>,
        limit: f64,
        measured: f64,
        unit: &'static str,
    ) -> Self {
        Self {
            name: name.into(),
            slots: None,
            limit,
            measured,
            unit,
            met: measured <= limit,
        }
    }

    /// The same verdict, for `slots` memory slots.
    #[must_use]
    pub(crate) fn with_slots(self, slots: u32) -> Self {
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
