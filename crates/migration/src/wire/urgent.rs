//! Urgent channels: requests for single pages, their answers, and receipts.

use super::{Xxh3, xxh3_64};
use pageferry_addr::RamPage;
use std::time::Duration;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::check;
use super::{PAGE_BYTES, Side, URGENT_BYTES, WireError};
use super::{in_range, reserved_zero};

/// The kind of an urgent message. The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum UrgentKind {
    /// Destination: requests this page before all others.
    Request = 1,
    /// Source: the page. Its bytes follow.
    Page = 2,
    /// Source: the page is zero. Nothing follows.
    Zero = 3,
    /// Destination: the number of answers of this channel that are in place.
    Receipt = 5,
    /// Either side: the sender lives and has nothing else to say.
    Alive = 6,
    /// Source: the destination has the page's bytes already. Nothing follows, but the check covers
    /// them.
    Confirmed = 7,
}

impl UrgentKind {
    /// Every kind, in the order of their numbers.
    pub const ALL: [Self; 6] = [
        Self::Request,
        Self::Page,
        Self::Zero,
        Self::Receipt,
        Self::Alive,
        Self::Confirmed,
    ];

    /// Whether `side` may send this kind.
    #[must_use]
    pub const fn is_sent_by(self, side: Side) -> bool {
        match self {
            Self::Request | Self::Receipt => matches!(side, Side::Destination),
            Self::Page | Self::Zero | Self::Confirmed => matches!(side, Side::Source),
            Self::Alive => true,
        }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct UrgentLayout {
    kind: u8,
    took: [u8; 3],
    check: U32,
    page: U64,
}

const _: () = assert!(size_of::<UrgentLayout>() == URGENT_BYTES);

/// The unit of the time at the source on the wire, in nanoseconds.
const TOOK_UNIT_NS: u128 = 64;
/// The largest time at the source on the wire, about 1.07 s. Longer times are sent as this.
const MAX_TOOK: u32 = (1 << 24) - 1;

/// The time at the source as on the wire. 0 is no time, so a time is rounded up.
fn encode_took(at_source: Option<Duration>) -> [u8; 3] {
    let units = at_source.map_or(0, |time| {
        let units = time.as_nanos().div_ceil(TOOK_UNIT_NS);
        u32::try_from(units).unwrap_or(MAX_TOOK).clamp(1, MAX_TOOK)
    });
    let [first, second, third, _] = units.to_le_bytes();
    [first, second, third]
}

fn decode_took([first, second, third]: [u8; 3]) -> Option<Duration> {
    let units = u32::from_le_bytes([first, second, third, 0]);
    (units > 0).then(|| Duration::from_nanos(u64::from(units) * TOOK_UNIT_NS as u64))
}

/// A message of an urgent channel, without the bytes of the page that may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UrgentMessage {
    /// The kind of the message.
    pub kind: UrgentKind,
    /// The page of a request or an answer, else 0.
    pub page: RamPage,
    /// In a [`UrgentKind::Receipt`]: the number of answers of this channel whose pages are in
    /// place, from 1. They are the first ones that were sent on it. Else 0.
    pub placed: u64,
    /// In an answer: the time from the request's arrival at the source to the answer, in steps of
    /// 64 ns, at most about 1.07 s. `None` if the source did not measure it, and in all other
    /// messages.
    pub at_source: Option<Duration>,
    check: u32,
}

impl UrgentMessage {
    /// Returns the bytes of a message without page data.
    fn encode(kind: UrgentKind, number: u64) -> [u8; URGENT_BYTES] {
        Self::sealed(
            kind,
            [0; 3],
            number,
            xxh3_64(&covered(kind, [0; 3], number)),
        )
    }

    fn sealed(kind: UrgentKind, took: [u8; 3], number: u64, digest: u64) -> [u8; URGENT_BYTES] {
        zerocopy::transmute!(UrgentLayout {
            kind: kind as u8,
            took,
            check: (digest as u32).into(),
            page: number.into(),
        })
    }

    /// Returns the bytes of a request for a page.
    #[must_use]
    pub fn request(page: RamPage) -> [u8; URGENT_BYTES] {
        Self::encode(UrgentKind::Request, page.0)
    }

    /// Returns the bytes of a receipt: the pages of the channel's first `placed` answers are in
    /// place.
    ///
    /// # Panics
    /// If `placed` is 0: a receipt is for at least one answer.
    #[must_use]
    pub fn receipt(placed: u64) -> [u8; URGENT_BYTES] {
        assert!(placed > 0, "a receipt is for at least one answer");
        Self::encode(UrgentKind::Receipt, placed)
    }

    /// Returns the bytes of a sign of life.
    #[must_use]
    pub fn alive() -> [u8; URGENT_BYTES] {
        Self::encode(UrgentKind::Alive, 0)
    }

    /// Decodes a message that side `from` sent, for a VM of `memory_pages` pages.
    ///
    /// The checksum of a [`UrgentKind::Page`] also covers the page's bytes.
    /// [`verify_page`](Self::verify_page) compares it. Before that, not even the page's number can
    /// be trusted.
    ///
    /// # Errors
    /// [`WireError::BadField`] for an unknown kind, a kind that `from` never sends, reserved bytes,
    /// or a page in an Alive. [`WireError::OutOfRange`] for a page outside memory or a receipt for
    /// nothing, [`WireError::Checksum`].
    pub fn decode(
        bytes: &[u8; URGENT_BYTES],
        from: Side,
        memory_pages: u64,
    ) -> Result<Self, WireError> {
        let what = match from {
            Side::Source => "urgent reply",
            Side::Destination => "urgent request",
        };
        let layout: &UrgentLayout = zerocopy::transmute_ref!(bytes);
        let bad = |field, value| WireError::BadField { what, field, value };
        let kind = UrgentKind::ALL
            .into_iter()
            .find(|&known| known as u8 == layout.kind && known.is_sent_by(from))
            .ok_or(bad("kind", layout.kind.into()))?;
        let is_answer = matches!(
            kind,
            UrgentKind::Page | UrgentKind::Zero | UrgentKind::Confirmed
        );
        if !is_answer {
            reserved_zero(what, "reserved", &layout.took)?;
        }
        let number = layout.page.get();
        let mut message = Self {
            kind,
            page: RamPage(0),
            placed: 0,
            at_source: decode_took(layout.took),
            check: layout.check.get(),
        };
        if !matches!(kind, UrgentKind::Page | UrgentKind::Confirmed) {
            let digest = xxh3_64(&covered(kind, layout.took, number));
            check(what, message.check.into(), (digest as u32).into())?;
        }
        match kind {
            UrgentKind::Request | UrgentKind::Page | UrgentKind::Zero | UrgentKind::Confirmed => {
                let last = memory_pages.checked_sub(1).ok_or(bad("page", number))?;
                in_range(what, "page", number, 0, last)?;
                message.page = RamPage(number);
            }
            UrgentKind::Receipt => {
                in_range(what, "placed", number, 1, u64::MAX)?;
                message.placed = number;
            }
            UrgentKind::Alive if number != 0 => return Err(bad("page", number)),
            UrgentKind::Alive => {}
        }
        Ok(message)
    }

    /// Compares the checksum of a [`UrgentKind::Page`] with its bytes, or that of a
    /// [`UrgentKind::Confirmed`] with the bytes that are here. No vCPU may see the page before
    /// that.
    ///
    /// # Errors
    /// [`WireError::Checksum`].
    pub fn verify_page(&self, bytes: &[u8; PAGE_BYTES]) -> Result<(), WireError> {
        let digest = page_digest(self.kind, self.page, encode_took(self.at_source), bytes);
        check("urgent page", self.check.into(), (digest as u32).into())
    }
}

/// Returns the header of an answer: with a page, whose bytes the caller sends behind it, or for a
/// zero page. `at_source` is the time since the request arrived, if it was measured.
///
/// The bytes must not change until they are sent.
#[must_use]
pub fn urgent_reply(
    page: RamPage,
    bytes: Option<&[u8; PAGE_BYTES]>,
    at_source: Option<Duration>,
) -> [u8; URGENT_BYTES] {
    let took = encode_took(at_source);
    let (kind, digest) = match bytes {
        Some(bytes) => {
            let kind = UrgentKind::Page;
            (kind, page_digest(kind, page, took, bytes))
        }
        None => {
            let kind = UrgentKind::Zero;
            (kind, xxh3_64(&covered(kind, took, page.0)))
        }
    };
    UrgentMessage::sealed(kind, took, page.0, digest)
}

/// Returns an answer for a page whose bytes the destination has already. They do not travel.
#[must_use]
pub fn urgent_reply_confirmed(
    page: RamPage,
    bytes: &[u8; PAGE_BYTES],
    at_source: Option<Duration>,
) -> [u8; URGENT_BYTES] {
    let (kind, took) = (UrgentKind::Confirmed, encode_took(at_source));
    let digest = page_digest(kind, page, took, bytes);
    UrgentMessage::sealed(kind, took, page.0, digest)
}

/// [`urgent_reply`] with a page and without a time.
#[must_use]
pub fn urgent_reply_page(page: RamPage, bytes: &[u8; PAGE_BYTES]) -> [u8; URGENT_BYTES] {
    urgent_reply(page, Some(bytes), None)
}

/// [`urgent_reply`] for a zero page and without a time.
#[must_use]
pub fn urgent_reply_zero(page: RamPage) -> [u8; URGENT_BYTES] {
    urgent_reply(page, None, None)
}

/// Returns the twelve bytes of a message without its checksum, in order.
fn covered(kind: UrgentKind, took: [u8; 3], number: u64) -> [u8; URGENT_BYTES - 4] {
    let mut bytes = [0; URGENT_BYTES - 4];
    bytes[0] = kind as u8;
    bytes[1..4].copy_from_slice(&took);
    bytes[4..].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn page_digest(kind: UrgentKind, page: RamPage, took: [u8; 3], bytes: &[u8; PAGE_BYTES]) -> u64 {
    let mut state = Xxh3::new();
    state.update(&covered(kind, took, page.0));
    state.update(bytes);
    state.digest()
}
