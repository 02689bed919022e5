//! The destination's answer to a [`Hello`]: a challenge, or the reason for a refusal.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::{check_sealed, sealed};
use super::error::reserved_zero;
use super::hello::session_in;
use super::{
    Capabilities, HELLO_BYTES, HELLO_MAGIC, Hello, SessionId, Status, VERSION, WireError,
    check_magic,
};

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct HelloReplyLayout {
    magic: [u8; 8],
    version: U16,
    status: U16,
    reserved: [u8; 4],
    session: [u8; 16],
    capabilities: U64,
    nonce: [u8; 16],
    checksum: U64,
}

const _: () = assert!(size_of::<HelloReplyLayout>() == HELLO_BYTES);

/// The destination's answer to a [`Hello`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HelloReply {
    /// The version of the migration. In a refusal, the newest version that the destination speaks.
    pub version: u16,
    /// Accepted if the source shall prove that it knows the session's secret, or the reason for a
    /// refusal.
    pub status: Status,
    /// The session of the [`Hello`], echoed.
    pub session: SessionId,
    /// The destination's choice from the offer, empty in a refusal.
    pub capabilities: Capabilities,
    /// Random bytes of this connection, zero in a refusal. The proofs cover them, so that a proof
    /// of another connection does not fit.
    pub nonce: [u8; 16],
}

impl HelloReply {
    /// Accepts `hello`, with the newest common version and the common capabilities.
    #[must_use]
    pub fn accept(hello: &Hello, nonce: [u8; 16]) -> Self {
        Self {
            version: hello.version.min(VERSION),
            status: Status::Accepted,
            session: hello.session,
            capabilities: hello.capabilities.intersection(Capabilities::SUPPORTED),
            nonce,
        }
    }

    /// Refuses the channel of `session` with `status`.
    #[must_use]
    pub const fn refuse(session: SessionId, status: Status) -> Self {
        Self {
            version: VERSION,
            status,
            session,
            capabilities: Capabilities::from_bits(0),
            nonce: [0; 16],
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
        Some(Self::refuse(session_in(bytes), status))
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
            nonce: self.nonce,
            checksum: U64::ZERO,
        }))
    }

    /// Decodes the answer to `hello`. A refusal is not an error here: check the status.
    ///
    /// # Errors
    /// [`WireError::NotPageferry`], [`WireError::Checksum`], [`WireError::BadField`] for reserved
    /// bytes, an unknown status, another session, or a nonce in a refusal. In an acceptance also
    /// [`WireError::Version`] for a version that was not offered, and [`WireError::BadField`] for
    /// capabilities that were not offered or lack a required one.
    pub fn decode(bytes: &[u8; HELLO_BYTES], hello: &Hello) -> Result<Self, WireError> {
        const WHAT: &str = "HelloReply";
        check_magic(bytes)?;
        check_sealed(WHAT, bytes)?;
        let layout: &HelloReplyLayout = zerocopy::transmute_ref!(bytes);
        reserved_zero(WHAT, "reserved", &layout.reserved)?;
        let number = layout.status.get();
        let status = Status::of_number(number).ok_or(WireError::BadField {
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
        } else {
            reserved_zero(WHAT, "nonce", &layout.nonce)?;
        }
        Ok(Self {
            version,
            status,
            session: hello.session,
            capabilities,
            nonce: layout.nonce,
        })
    }
}
