//! The first message of the source on a channel: protocol version, session and channel.
//!
//! The magic, the versions, the session and the checksum lie at the same place in every version of
//! the protocol. So sides of different versions can always send each other the reason for a
//! refusal. Version 3 gives meaning to bytes that earlier versions reserved.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::{check_sealed, sealed};
use super::error::{in_range, reserved_zero};
use super::{
    Capabilities, ChannelKey, FirstBytes, HELLO_BYTES, HELLO_MAGIC, MIN_VERSION, PAGE_BYTES, Role,
    SessionId, VERSION, WireError,
};

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HelloLayout {
    magic: [u8; 8],
    version: U16,
    min_version: U16,
    role: u8,
    reserved: u8,
    index: U16,
    session: [u8; 16],
    capabilities: U64,
    page_size: U32,
    generation: U32,
    incarnation: U32,
    padding: [u8; 4],
    checksum: U64,
}

const _: () = assert!(size_of::<HelloLayout>() == HELLO_BYTES);

/// Checks whether `bytes`, the first of a connection, can begin a Pageferry preamble.
///
/// Only the first eight bytes matter. One wrong byte is enough to recognize another protocol,
/// without waiting for more.
///
/// # Errors
/// [`WireError::NotPageferry`] if they cannot.
pub fn check_magic(bytes: &[u8]) -> Result<(), WireError> {
    let len = bytes.len().min(HELLO_MAGIC.len());
    if bytes[..len] == HELLO_MAGIC[..len] {
        return Ok(());
    }
    Err(WireError::NotPageferry {
        first: FirstBytes::new(bytes),
    })
}

/// Returns the session in the bytes of a [`Hello`] of any version.
pub(super) fn session_in(bytes: &[u8; HELLO_BYTES]) -> SessionId {
    let layout: &HelloLayout = zerocopy::transmute_ref!(bytes);
    SessionId(layout.session)
}

/// The source's first message on a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The newest protocol version the source speaks.
    pub version: u16,
    /// The oldest protocol version the source speaks.
    pub min_version: u16,
    /// The place of the channel in the session.
    pub key: ChannelKey,
    /// The session of the channel.
    pub session: SessionId,
    /// The capabilities of the source.
    pub capabilities: Capabilities,
    /// The size of the source's pages, in bytes.
    pub page_size: u32,
}

impl Hello {
    /// Returns this program's message as a source.
    #[must_use]
    pub const fn ours(key: ChannelKey, session: SessionId) -> Self {
        Self {
            version: VERSION,
            min_version: MIN_VERSION,
            key,
            session,
            capabilities: Capabilities::SUPPORTED,
            page_size: PAGE_BYTES as u32,
        }
    }

    /// Returns the message's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        sealed(zerocopy::transmute!(HelloLayout {
            magic: HELLO_MAGIC,
            version: self.version.into(),
            min_version: self.min_version.into(),
            role: self.key.role as u8,
            reserved: 0,
            index: self.key.index.into(),
            session: self.session.0,
            capabilities: self.capabilities.bits().into(),
            page_size: self.page_size.into(),
            generation: self.key.generation.into(),
            incarnation: self.key.incarnation.into(),
            padding: [0; 4],
            checksum: U64::ZERO,
        }))
    }

    /// Decodes the message and checks whether the two sides fit.
    ///
    /// On an error, [`HelloReply::refusal_of`](super::HelloReply::refusal_of) gives the answer.
    ///
    /// # Errors
    /// In this order: [`WireError::NotPageferry`], [`WireError::Checksum`], [`WireError::Version`]
    /// if there is no common version, [`WireError::BadField`] for reserved bytes or an unknown
    /// role, [`WireError::OutOfRange`] for a control channel whose index is not 0 and for a
    /// generation or an incarnation of 0, [`WireError::BadField`] for another page size or a
    /// missing capability. The version comes before the fields, since other versions may use
    /// reserved bytes.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, WireError> {
        const WHAT: &str = "Hello";
        check_magic(bytes)?;
        check_sealed(WHAT, bytes)?;
        let layout: &HelloLayout = zerocopy::transmute_ref!(bytes);
        let (version, min_version) = (layout.version.get(), layout.min_version.get());
        if version < MIN_VERSION || min_version > VERSION || min_version > version {
            return Err(WireError::Version {
                version,
                minimum: min_version,
            });
        }
        reserved_zero(WHAT, "reserved", &[layout.reserved])?;
        reserved_zero(WHAT, "padding", &layout.padding)?;
        let bad = |field, value| WireError::BadField {
            what: WHAT,
            field,
            value,
        };
        let role = Role::of_number(layout.role).ok_or_else(|| bad("role", layout.role.into()))?;
        let index = layout.index.get();
        let highest = match role {
            Role::Control => 0,
            _ => u16::MAX,
        };
        in_range(WHAT, "index", index.into(), 0, highest.into())?;
        let (generation, incarnation) = (layout.generation.get(), layout.incarnation.get());
        in_range(WHAT, "generation", generation.into(), 1, u32::MAX.into())?;
        in_range(WHAT, "incarnation", incarnation.into(), 1, u32::MAX.into())?;
        if layout.page_size != PAGE_BYTES as u32 {
            return Err(bad("page_size", layout.page_size.get().into()));
        }
        let capabilities = Capabilities::from_bits(layout.capabilities.get());
        if Capabilities::choose_from(capabilities).is_none() {
            return Err(bad("capabilities", capabilities.bits()));
        }
        Ok(Self {
            version,
            min_version,
            key: ChannelKey {
                role,
                index,
                generation,
                incarnation,
            },
            session: SessionId(layout.session),
            capabilities,
            page_size: layout.page_size.get(),
        })
    }
}
