//! The preamble of either connection, with protocol version, session and role.
//!
//! The layout of these two messages is the same in every version of the protocol. So sides of
//! different versions can always send each other the reason for a refusal.

use core::fmt;

use super::checksum::xxh3_64;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::check;
use super::error::reserved_zero;
use super::{
    Capabilities, FirstBytes, HELLO_BYTES, HELLO_MAGIC, MIN_VERSION, PAGE_BYTES, VERSION, WireError,
};

/// The identity of one migration: random, and the same on both of its connections.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session {self}")
    }
}

/// The role of a connection. The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Role {
    /// Carries frames: set-up, pages in bulk, switch-over, completion.
    Stream = 0,
    /// Carries requests for single pages, and their answers.
    Urgent = 1,
}

/// The destination's answer to a [`Hello`]. The numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u16)]
pub enum Status {
    /// The connection was accepted for the migration.
    #[error("accepted")]
    Accepted = 0,
    /// The two sides have no protocol version in common.
    #[error("the two sides have no protocol version in common")]
    VersionUnsupported = 1,
    /// The destination receives another migration.
    #[error("the destination is busy with another migration")]
    Busy = 2,
    /// The urgent connection has a session that the destination does not know.
    #[error("the destination does not know this session")]
    UnknownSession = 3,
    /// The destination does not know the role, or has a connection of this role in this session.
    #[error("the destination does not accept a connection of this role now")]
    BadRole = 4,
    /// The offer lacks a capability that this version requires.
    #[error("the destination requires a capability that was not offered")]
    CapabilityMissing = 5,
    /// The page sizes differ.
    #[error("the destination's page size differs")]
    PageSize = 6,
    /// The message is damaged: its checksum does not fit, or reserved bytes are not zero.
    #[error("the destination found the preamble damaged")]
    Malformed = 7,
}

impl Status {
    /// Every status, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Accepted,
        Self::VersionUnsupported,
        Self::Busy,
        Self::UnknownSession,
        Self::BadRole,
        Self::CapabilityMissing,
        Self::PageSize,
        Self::Malformed,
    ];
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HelloLayout {
    magic: [u8; 8],
    version: U16,
    min_version: U16,
    role: u8,
    reserved: [u8; 3],
    session: [u8; 16],
    capabilities: U64,
    page_size: U32,
    padding: [u8; 12],
    checksum: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HelloReplyLayout {
    magic: [u8; 8],
    version: U16,
    status: U16,
    reserved: [u8; 4],
    session: [u8; 16],
    capabilities: U64,
    padding: [u8; 16],
    checksum: U64,
}

const _: () = assert!(size_of::<HelloLayout>() == HELLO_BYTES);
const _: () = assert!(size_of::<HelloReplyLayout>() == HELLO_BYTES);

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

/// Checks the magic and then the checksum of a preamble.
fn check_frame(what: &'static str, bytes: &[u8; HELLO_BYTES]) -> Result<(), WireError> {
    check_magic(bytes)?;
    let (covered, found) = bytes
        .split_last_chunk::<8>()
        .expect("a preamble is longer than its checksum");
    check(what, u64::from_le_bytes(*found), xxh3_64(covered))
}

/// Puts the checksum into the last eight bytes.
fn sealed(mut bytes: [u8; HELLO_BYTES]) -> [u8; HELLO_BYTES] {
    let checksum = xxh3_64(&bytes[..HELLO_BYTES - 8]);
    bytes[HELLO_BYTES - 8..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// The source's first message on either connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The newest protocol version the source speaks.
    pub version: u16,
    /// The oldest protocol version the source speaks.
    pub min_version: u16,
    /// The role of the connection.
    pub role: Role,
    /// The session of the connection.
    pub session: SessionId,
    /// The capabilities of the source.
    pub capabilities: Capabilities,
    /// The size of the source's pages, in bytes.
    pub page_size: u32,
}

impl Hello {
    /// Returns this program's message as a source.
    #[must_use]
    pub const fn ours(role: Role, session: SessionId) -> Self {
        Self {
            version: VERSION,
            min_version: MIN_VERSION,
            role,
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
            role: self.role as u8,
            reserved: [0; 3],
            session: self.session.0,
            capabilities: self.capabilities.bits().into(),
            page_size: self.page_size.into(),
            padding: [0; 12],
            checksum: U64::ZERO,
        }))
    }

    /// Decodes the message and checks whether the two sides fit.
    ///
    /// On an error, [`HelloReply::refusal_of`] gives the answer.
    ///
    /// # Errors
    /// In this order: [`WireError::NotPageferry`], [`WireError::Checksum`], [`WireError::Version`]
    /// if there is no common version, [`WireError::BadField`] for reserved bytes, an unknown role,
    /// another page size or a missing capability. The version comes before the fields, since later
    /// versions may use reserved bytes.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, WireError> {
        const WHAT: &str = "Hello";
        check_frame(WHAT, bytes)?;
        let layout: &HelloLayout = zerocopy::transmute_ref!(bytes);
        let (version, min_version) = (layout.version.get(), layout.min_version.get());
        if version < MIN_VERSION || min_version > VERSION || min_version > version {
            return Err(WireError::Version {
                version,
                minimum: min_version,
            });
        }
        reserved_zero(WHAT, "reserved", &layout.reserved)?;
        reserved_zero(WHAT, "padding", &layout.padding)?;
        let bad = |field, value| WireError::BadField {
            what: WHAT,
            field,
            value,
        };
        let role = match layout.role {
            0 => Role::Stream,
            1 => Role::Urgent,
            other => return Err(bad("role", other.into())),
        };
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
            role,
            session: SessionId(layout.session),
            capabilities,
            page_size: layout.page_size.get(),
        })
    }
}

/// The destination's answer to a [`Hello`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HelloReply {
    /// The version of the migration. In a refusal, the newest version that the destination speaks.
    pub version: u16,
    /// Accepted, or the reason for a refusal.
    pub status: Status,
    /// The session of the [`Hello`], echoed.
    pub session: SessionId,
    /// The destination's choice from the offer, empty in a refusal.
    pub capabilities: Capabilities,
}

impl HelloReply {
    /// Accepts `hello`, with the newest common version and the common capabilities.
    #[must_use]
    pub fn accept(hello: &Hello) -> Self {
        Self {
            version: hello.version.min(VERSION),
            status: Status::Accepted,
            session: hello.session,
            capabilities: hello.capabilities.intersection(Capabilities::SUPPORTED),
        }
    }

    /// Refuses the connection of `session` with `status`.
    #[must_use]
    pub const fn refuse(session: SessionId, status: Status) -> Self {
        Self {
            version: VERSION,
            status,
            session,
            capabilities: Capabilities::from_bits(0),
        }
    }

    /// Returns the answer to a preamble that [`Hello::decode`] refused with `error`. Returns `None`
    /// for a peer that would understand no answer.
    #[must_use]
    pub fn refusal_of(bytes: &[u8; HELLO_BYTES], error: &WireError) -> Option<Self> {
        let status = match error {
            WireError::NotPageferry { .. } => return None,
            WireError::Version { .. } => Status::VersionUnsupported,
            WireError::BadField { field: "role", .. } => Status::BadRole,
            WireError::BadField {
                field: "page_size", ..
            } => Status::PageSize,
            WireError::BadField {
                field: "capabilities",
                ..
            } => Status::CapabilityMissing,
            _ => Status::Malformed,
        };
        let layout: &HelloLayout = zerocopy::transmute_ref!(bytes);
        Some(Self::refuse(SessionId(layout.session), status))
    }

    /// Returns the message's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        sealed(zerocopy::transmute!(HelloReplyLayout {
            magic: HELLO_MAGIC,
            version: self.version.into(),
            status: (self.status as u16).into(),
            reserved: [0; 4],
            session: self.session.0,
            capabilities: self.capabilities.bits().into(),
            padding: [0; 16],
            checksum: U64::ZERO,
        }))
    }

    /// Decodes the answer to `hello`. A refusal is not an error here: check the status.
    ///
    /// # Errors
    /// [`WireError::NotPageferry`], [`WireError::Checksum`], [`WireError::BadField`] for reserved
    /// bytes, an unknown status or another session. In an acceptance also [`WireError::Version`]
    /// for a version that was not offered, and [`WireError::BadField`] for capabilities that were
    /// not offered or lack a required one.
    pub fn decode(bytes: &[u8; HELLO_BYTES], hello: &Hello) -> Result<Self, WireError> {
        const WHAT: &str = "HelloReply";
        check_frame(WHAT, bytes)?;
        let layout: &HelloReplyLayout = zerocopy::transmute_ref!(bytes);
        reserved_zero(WHAT, "reserved", &layout.reserved)?;
        reserved_zero(WHAT, "padding", &layout.padding)?;
        let number = layout.status.get();
        let status = Status::ALL
            .into_iter()
            .find(|&known| known as u16 == number)
            .ok_or(WireError::BadField {
                what: WHAT,
                field: "status",
                value: number.into(),
            })?;
        if layout.session != hello.session.0 {
            return Err(WireError::BadField {
                what: WHAT,
                field: "session",
                value: layout.session[0].into(),
            });
        }
        let version = layout.version.get();
        let capabilities = Capabilities::from_bits(layout.capabilities.get());
        if status == Status::Accepted {
            if !(hello.min_version..=hello.version).contains(&version) {
                return Err(WireError::Version {
                    version,
                    minimum: version,
                });
            }
            capabilities.check_chosen(hello.capabilities)?;
        }
        Ok(Self {
            version,
            status,
            session: hello.session,
            capabilities,
        })
    }
}
