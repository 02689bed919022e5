//! Optional features of a side.

use core::fmt;

use super::WireError;

/// A set of capabilities, one bit each.
///
/// The source offers a set, the destination accepts a subset. Unknown bits are ignored in an offer:
/// a newer source may offer more. In an acceptance they are an error: this side did not offer them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Capabilities(u64);

impl Capabilities {
    /// Bit 0: the source sends runs of zero pages without their bytes.
    pub const ZERO_RUNS: Self = Self(1 << 0);
    /// Bit 1: a second connection carries requests for single pages and their answers.
    pub const URGENT_CHANNEL: Self = Self(1 << 1);
    /// All capabilities of this side.
    pub const SUPPORTED: Self = Self(Self::ZERO_RUNS.0 | Self::URGENT_CHANNEL.0);
    /// The capabilities that both sides must have.
    pub const REQUIRED: Self = Self::SUPPORTED;

    /// Returns the set of these bits, known and unknown.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the bits.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether every bit of `other` is in `self`.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }

    /// Returns the capabilities that are in both sets.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the destination's choice: the known bits of the offer. Returns `None` if the offer
    /// lacks a required bit.
    #[must_use]
    pub fn choose_from(offered: Self) -> Option<Self> {
        let chosen = offered.intersection(Self::SUPPORTED);
        chosen.contains(Self::REQUIRED).then_some(chosen)
    }

    /// Checks, at the source, the destination's choice from `offered`.
    ///
    /// # Errors
    /// [`WireError::BadField`] if the choice has a bit that was not offered, or lacks a required
    /// bit.
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
