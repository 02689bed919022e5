//! The reports of a program: kinds of page errors, and the doorbell.

use crate::GuestError;
use crate::address_space::MAX_VCPUS;
use std::fmt;
use std::time::Duration;

/// An error in a page. The kinds exclude each other and are tried in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// All zero, where contents were expected. Words: the expected sequence, and 0.
    Lost,
    /// The checksum does not fit the contents. No visit wrote the page as it is: it mixes two
    /// versions, has a flipped bit, or holds foreign bytes. Words: the checksum of the contents,
    /// and the checksum in the page.
    Torn,
    /// Whole, but the page of another vCPU or of another index. Words: the tag or the index,
    /// expected and found.
    Foreign,
    /// Whole and the right page, but not of the previous pass. Words: the expected sequence, and
    /// the sequence in the page.
    Stale,
}

impl ErrorKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Lost, Self::Torn, Self::Foreign, Self::Stale];

    /// The number of this kind in control pages and on the doorbell: 1 to 4.
    #[must_use]
    pub const fn code(self) -> u64 {
        match self {
            Self::Lost => 1,
            Self::Torn => 2,
            Self::Foreign => 3,
            Self::Stale => 4,
        }
    }

    /// The kind with this number.
    #[must_use]
    pub fn from_code(code: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// The name used in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Torn => "torn",
            Self::Foreign => "foreign",
            Self::Stale => "stale",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// First bit of the event number in a doorbell value.
pub(crate) const EVENT_SHIFT: u32 = 16;
/// First bit of the error kind in a doorbell value.
pub(crate) const KIND_SHIFT: u32 = 24;
/// Number of the event "a page error".
pub(crate) const EVENT_ERROR: u32 = 1;
/// Number of the event "finished".
pub(crate) const EVENT_FINISHED: u32 = 2;
/// Number of the event "a page is done, and the vCPU rests".
const EVENT_REST: u32 = 3;

/// The reason for a store to the doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The program found a page error, and continues. Its control page counts errors and describes
    /// the first.
    Error(ErrorKind),
    /// The program has done its work. Entered again, it only stores to the doorbell again.
    Finished,
    /// A workload has done a page, and continues once the VMM lets it: after this time.
    Rest(Duration),
}

/// A value stored to the doorbell ([`crate::DOORBELL_GPA`]). Bits 0 to 15 hold the vCPU, 16 to 23
/// the event (1 error, 2 finished, 3 rest), 24 to 31 the error's kind or a rest in 100 µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Doorbell {
    /// The vCPU that stored the value.
    pub vcpu: u32,
    /// The reason.
    pub event: Event,
}

impl Doorbell {
    /// The unit of a rest.
    pub const REST_UNIT: Duration = Duration::from_micros(100);
    /// The longest rest.
    pub const MAX_REST: Duration = Self::REST_UNIT.saturating_mul(u8::MAX as u32);

    /// The value by which `vcpu` asks for a rest, in whole units of 100 µs: 0 for less than one.
    pub(crate) fn rest(vcpu: u32, rest: Duration) -> Result<u32, GuestError> {
        match u8::try_from(rest.as_micros() / Self::REST_UNIT.as_micros()) {
            Ok(0) => Ok(0),
            Ok(units) => Ok(u32::from(units) << KIND_SHIFT | EVENT_REST << EVENT_SHIFT | vcpu),
            Err(_) => Err(GuestError::RestTooLong { rest }),
        }
    }

    /// Whether `value` is one of [`Self::rest`].
    pub(crate) fn is_rest(vcpu: u32, value: u64) -> bool {
        let of_vcpu = |bell: Self| bell.vcpu == vcpu && matches!(bell.event, Event::Rest(_));
        value == 0 || u32::try_from(value).is_ok_and(|it| Self::parse(it).is_ok_and(of_vcpu))
    }

    /// Parses a 32-bit store to the doorbell.
    ///
    /// # Errors
    /// When no program writes this value.
    pub fn parse(value: u32) -> Result<Self, GuestError> {
        let refused = GuestError::Doorbell { value };
        let vcpu = value & 0xffff;
        if vcpu >= MAX_VCPUS {
            return Err(refused);
        }
        let kind = value >> KIND_SHIFT;
        let event = match value >> EVENT_SHIFT & 0xff {
            EVENT_ERROR => Event::Error(ErrorKind::from_code(kind.into()).ok_or(refused)?),
            EVENT_FINISHED if kind == 0 => Event::Finished,
            EVENT_REST if kind > 0 => Event::Rest(kind * Self::REST_UNIT),
            _ => return Err(refused),
        };
        Ok(Self { vcpu, event })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbell_values_are_read_or_refused() {
        let torn = Doorbell {
            vcpu: 5,
            event: Event::Error(ErrorKind::Torn),
        };
        assert_eq!(Doorbell::parse(0x0201_0005), Ok(torn));
        let finished = Doorbell {
            vcpu: 1023,
            event: Event::Finished,
        };
        assert_eq!(Doorbell::parse(0x0002_03ff), Ok(finished));
        let rests = Doorbell {
            vcpu: 7,
            event: Event::Rest(Duration::from_millis(3)),
        };
        assert_eq!(Doorbell::parse(0x1e03_0007), Ok(rests));
        for value in [
            0,
            5,
            0x0001_0005,
            0x0501_0005,
            0x0102_0005,
            0x0004_0000,
            0x0003_0000,
            0x0002_0400,
        ] {
            assert_eq!(Doorbell::parse(value), Err(GuestError::Doorbell { value }));
        }
    }
}
