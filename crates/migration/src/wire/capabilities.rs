//! What a side can do beyond the version's core.

use core::fmt;

use super::WireError;

/// A set of capabilities, one bit each.
///
/// The source offers, the destination accepts a subset. Bits nobody here knows are ignored in an
/// offer (a newer source may offer more) and are an error in an acceptance (nobody offered them).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Capabilities(u64);

impl Capabilities {
    /// Bit 0: runs of zero pages are sent as such, without their bytes.
    pub const ZERO_RUNS: Self = Self(1 << 0);
    /// Bit 1: a second connection carries requests for single pages and their answers.
    pub const URGENT_CHANNEL: Self = Self(1 << 1);
    /// All this side can do.
    pub const SUPPORTED: Self = Self(Self::ZERO_RUNS.0 | Self::URGENT_CHANNEL.0);
    /// What both sides must do in version 1.
    pub const REQUIRED: Self = Self::SUPPORTED;

    /// The set of these bits, known and unknown.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether every bit of `other` is in `self`.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }

    /// What is in both sets.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The destination's choice from an offer: what it knows of it, or `None` if a required bit is
    /// not offered.
    #[must_use]
    pub fn choose_from(offered: Self) -> Option<Self> {
        let chosen = offered.intersection(Self::SUPPORTED);
        chosen.contains(Self::REQUIRED).then_some(chosen)
    }

    /// The source's check of what the destination chose from `offered`.
    ///
    /// # Errors
    /// [`WireError::BadField`] if a bit was accepted that was not offered, or a required bit was
    /// not accepted.
    pub fn check_chosen(self, offered: Self) -> Result<Self, WireError> {
        if offered.contains(self) && self.contains(Self::REQUIRED) {
            return Ok(self);
        }
        Err(WireError::BadField {
            what: "HelloReply",
            field: "capabilities",
            value: self.0,
        })
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Self::ZERO_RUNS, "zero-runs"),
            (Self::URGENT_CHANNEL, "urgent-channel"),
        ];
        let mut separator = "";
        for (bit, name) in names {
            if self.contains(bit) {
                write!(f, "{separator}{name}")?;
                separator = ", ";
            }
        }
        let unknown = self.0 & !Self::SUPPORTED.0;
        if unknown != 0 {
            write!(f, "{separator}unknown {unknown:#x}")?;
        } else if separator.is_empty() {
            f.write_str("none")?;
        }
        Ok(())
    }
}
