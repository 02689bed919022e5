//! The urgent connection: requests for single pages, and their answers.

use super::checksum::{Xxh3, xxh3_64};
use pageferry_addr::RamPage;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::check;
use super::error::{in_range, reserved_zero};
use super::{PAGE_BYTES, Side, URGENT_BYTES, WireError};

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
    /// Either side: its last message on this connection.
    End = 4,
}

impl UrgentKind {
    /// Whether `side` may send this kind.
    #[must_use]
    pub const fn is_sent_by(self, side: Side) -> bool {
        match self {
            Self::Request => matches!(side, Side::Destination),
            Self::Page | Self::Zero => matches!(side, Side::Source),
            Self::End => true,
        }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct UrgentLayout {
    kind: u8,
    reserved: [u8; 3],
    check: U32,
    page: U64,
}

const _: () = assert!(size_of::<UrgentLayout>() == URGENT_BYTES);

/// A message of the urgent connection, without the bytes of the page that may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UrgentMessage {
    /// The kind of the message.
    pub kind: UrgentKind,
    /// The page, or 0 in [`UrgentKind::End`].
    pub page: RamPage,
    check: u32,
}

impl UrgentMessage {
    /// Returns the bytes of a message without page data.
    fn encode(kind: UrgentKind, page: RamPage) -> [u8; URGENT_BYTES] {
        Self::sealed(kind, page, xxh3_64(&covered(kind, page)))
    }

    fn sealed(kind: UrgentKind, page: RamPage, digest: u64) -> [u8; URGENT_BYTES] {
        zerocopy::transmute!(UrgentLayout {
            kind: kind as u8,
            reserved: [0; 3],
            check: (digest as u32).into(),
            page: page.0.into(),
        })
    }

    /// Returns the bytes of a request for a page.
    #[must_use]
    pub fn request(page: RamPage) -> [u8; URGENT_BYTES] {
        Self::encode(UrgentKind::Request, page)
    }

    /// Returns the bytes of a side's last message.
    #[must_use]
    pub fn end() -> [u8; URGENT_BYTES] {
        Self::encode(UrgentKind::End, RamPage(0))
    }

    /// Decodes a message that side `from` sent, for a VM of `memory_pages` pages.
    ///
    /// The checksum of a [`UrgentKind::Page`] also covers the page's bytes.
    /// [`verify_page`](Self::verify_page) compares it. Before that, not even the page's number can
    /// be trusted.
    ///
    /// # Errors
    /// [`WireError::BadField`] for an unknown kind, a kind that `from` never sends, reserved bytes,
    /// or a page in an End. [`WireError::OutOfRange`] for a page outside memory,
    /// [`WireError::Checksum`].
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
        let kind = [
            UrgentKind::Request,
            UrgentKind::Page,
            UrgentKind::Zero,
            UrgentKind::End,
        ]
        .into_iter()
        .find(|&known| known as u8 == layout.kind && known.is_sent_by(from))
        .ok_or(bad("kind", layout.kind.into()))?;
        reserved_zero(what, "reserved", &layout.reserved)?;
        let page = RamPage(layout.page.get());
        let message = Self {
            kind,
            page,
            check: layout.check.get(),
        };
        if kind != UrgentKind::Page {
            let digest = xxh3_64(&covered(kind, page));
            check(what, message.check.into(), (digest as u32).into())?;
        }
        if kind == UrgentKind::End {
            if page.0 != 0 {
                return Err(bad("page", page.0));
            }
        } else {
            if memory_pages == 0 {
                return Err(bad("page", page.0));
            }
            in_range(what, "page", page.0, 0, memory_pages - 1)?;
        }
        Ok(message)
    }

    /// Compares the checksum of a [`UrgentKind::Page`] with its bytes. No vCPU may see the page
    /// before that.
    ///
    /// # Errors
    /// [`WireError::Checksum`].
    pub fn verify_page(&self, bytes: &[u8; PAGE_BYTES]) -> Result<(), WireError> {
        let digest = page_digest(self.page, bytes);
        check("urgent page", self.check.into(), (digest as u32).into())
    }
}

/// Returns the header of an answer with a page. The caller sends it with the same bytes behind it.
///
/// The bytes must not change until they are sent.
#[must_use]
pub fn urgent_reply_page(page: RamPage, bytes: &[u8; PAGE_BYTES]) -> [u8; URGENT_BYTES] {
    UrgentMessage::sealed(UrgentKind::Page, page, page_digest(page, bytes))
}

/// Returns the answer for a zero page.
#[must_use]
pub fn urgent_reply_zero(page: RamPage) -> [u8; URGENT_BYTES] {
    UrgentMessage::encode(UrgentKind::Zero, page)
}

/// Returns the twelve bytes of a message without its checksum, in order.
fn covered(kind: UrgentKind, page: RamPage) -> [u8; URGENT_BYTES - 4] {
    let mut bytes = [0; URGENT_BYTES - 4];
    bytes[0] = kind as u8;
    bytes[4..].copy_from_slice(&page.0.to_le_bytes());
    bytes
}

fn page_digest(page: RamPage, bytes: &[u8; PAGE_BYTES]) -> u64 {
    let mut state = Xxh3::new();
    state.update(&covered(UrgentKind::Page, page));
    state.update(bytes);
    state.digest()
}
