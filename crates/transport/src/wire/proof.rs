//! The second message of either side on a channel: the proofs that both know the session's secret.
//!
//! This module only lays out bytes. [`handshake`](crate::handshake) computes and checks the proofs.

use core::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::checksum::{check_sealed, sealed};
use super::error::reserved_zero;
use super::{
    CREDENTIALS_BYTES, CREDENTIALS_MAGIC, FirstBytes, PROOF_BYTES, SECRET_BYTES, Status,
    WELCOME_BYTES, WELCOME_MAGIC, WireError,
};

/// Bit 0 of the flags of [`Credentials`]: the channel opens a session.
const OPENS: u32 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct CredentialsLayout {
    magic: [u8; 4],
    flags: U32,
    secret: [u8; SECRET_BYTES],
    proof: [u8; PROOF_BYTES],
    checksum: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct WelcomeLayout {
    magic: [u8; 4],
    status: U16,
    reserved: [u8; 2],
    proof: [u8; PROOF_BYTES],
    checksum: U64,
}

const _: () = assert!(size_of::<CredentialsLayout>() == CREDENTIALS_BYTES);
const _: () = assert!(size_of::<WelcomeLayout>() == WELCOME_BYTES);

/// The source's proof that it knows the secret of the session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The secret, if the channel opens the session.
    pub secret: Option<[u8; SECRET_BYTES]>,
    /// The proof.
    pub proof: [u8; PROOF_BYTES],
}

/// Keeps the secret out of logs.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("opens", &self.secret.is_some())
            .finish_non_exhaustive()
    }
}

impl Credentials {
    /// Returns the message's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; CREDENTIALS_BYTES] {
        let flags = if self.secret.is_some() { OPENS } else { 0 };
        sealed(zerocopy::transmute!(CredentialsLayout {
            magic: CREDENTIALS_MAGIC,
            flags: flags.into(),
            secret: self.secret.unwrap_or_default(),
            proof: self.proof,
            checksum: U64::ZERO,
        }))
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// [`WireError::NotPageferry`] for another magic, [`WireError::Checksum`],
    /// [`WireError::BadField`] for unknown flags and for a secret where none belongs.
    pub fn decode(bytes: &[u8; CREDENTIALS_BYTES]) -> Result<Self, WireError> {
        const WHAT: &str = "Credentials";
        check_short_magic(CREDENTIALS_MAGIC, bytes)?;
        check_sealed(WHAT, bytes)?;
        let layout: &CredentialsLayout = zerocopy::transmute_ref!(bytes);
        let flags = layout.flags.get();
        if flags & !OPENS != 0 {
            return Err(WireError::BadField {
                what: WHAT,
                field: "flags",
                value: flags.into(),
            });
        }
        let secret = if flags == OPENS {
            Some(layout.secret)
        } else {
            reserved_zero(WHAT, "secret", &layout.secret)?;
            None
        };
        Ok(Self {
            secret,
            proof: layout.proof,
        })
    }
}

/// The destination's last word on a channel. After [`Status::Accepted`], frames or urgent messages
/// follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Welcome {
    /// Accepted, or the reason for a refusal.
    pub status: Status,
    /// The destination's proof that it knows the secret too, zero in a refusal.
    pub proof: [u8; PROOF_BYTES],
}

impl Welcome {
    /// Accepts the channel.
    #[must_use]
    pub const fn accept(proof: [u8; PROOF_BYTES]) -> Self {
        Self {
            status: Status::Accepted,
            proof,
        }
    }

    /// Refuses the channel with `status`.
    #[must_use]
    pub const fn refuse(status: Status) -> Self {
        Self {
            status,
            proof: [0; PROOF_BYTES],
        }
    }

    /// Returns the message's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; WELCOME_BYTES] {
        sealed(zerocopy::transmute!(WelcomeLayout {
            magic: WELCOME_MAGIC,
            status: (self.status as u16).into(),
            reserved: [0; 2],
            proof: self.proof,
            checksum: U64::ZERO,
        }))
    }

    /// Decodes the message. A refusal is not an error here: check the status.
    ///
    /// # Errors
    /// [`WireError::NotPageferry`] for another magic, [`WireError::Checksum`],
    /// [`WireError::BadField`] for reserved bytes, an unknown status, or a proof in a refusal.
    pub fn decode(bytes: &[u8; WELCOME_BYTES]) -> Result<Self, WireError> {
        const WHAT: &str = "Welcome";
        check_short_magic(WELCOME_MAGIC, bytes)?;
        check_sealed(WHAT, bytes)?;
        let layout: &WelcomeLayout = zerocopy::transmute_ref!(bytes);
        reserved_zero(WHAT, "reserved", &layout.reserved)?;
        let number = layout.status.get();
        let status = Status::of_number(number).ok_or(WireError::BadField {
            what: WHAT,
            field: "status",
            value: number.into(),
        })?;
        if status != Status::Accepted {
            reserved_zero(WHAT, "proof", &layout.proof)?;
        }
        Ok(Self {
            status,
            proof: layout.proof,
        })
    }
}

/// Checks the four bytes with which a message begins.
fn check_short_magic(magic: [u8; 4], bytes: &[u8]) -> Result<(), WireError> {
    if bytes.starts_with(&magic) {
        return Ok(());
    }
    Err(WireError::NotPageferry {
        first: FirstBytes::new(bytes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changes one byte and puts a checksum that fits behind it.
    fn changed<const N: usize>(mut bytes: [u8; N], at: usize, to: u8) -> [u8; N] {
        bytes[at] = to;
        sealed(bytes)
    }

    fn bad_field<T: fmt::Debug>(result: Result<T, WireError>) -> &'static str {
        match result {
            Err(WireError::BadField { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn credentials_keep_their_layout() {
        let opens = Credentials {
            secret: Some([7; 32]),
            proof: [9; 32],
        };
        let bytes = opens.encode();
        assert_eq!(&bytes[..8], b"PGFC\x01\0\0\0");
        assert_eq!(
            (&bytes[8..40], &bytes[40..72]),
            (&[7; 32][..], &[9; 32][..])
        );
        assert_eq!(Credentials::decode(&bytes), Ok(opens));
        let later = Credentials {
            secret: None,
            ..opens
        };
        assert_eq!(Credentials::decode(&later.encode()), Ok(later));
    }

    #[test]
    fn credentials_with_other_fields_are_refused() {
        let later = Credentials {
            secret: None,
            proof: [9; 32],
        };
        let bytes = later.encode();
        let decode = |bytes| Credentials::decode(&bytes);
        assert_eq!(bad_field(decode(changed(bytes, 4, 2))), "flags");
        assert_eq!(bad_field(decode(changed(bytes, 39, 1))), "secret");
        let other = decode(changed(bytes, 3, b'W'));
        assert!(matches!(other, Err(WireError::NotPageferry { .. })));
        let mut damaged = bytes;
        damaged[50] ^= 1;
        assert!(matches!(decode(damaged), Err(WireError::Checksum { .. })));
    }

    #[test]
    fn a_welcome_keeps_its_layout() {
        let welcome = Welcome::accept([5; 32]);
        let bytes = welcome.encode();
        assert_eq!(&bytes[..8], b"PGFW\0\0\0\0");
        assert_eq!(&bytes[8..40], &[5; 32]);
        assert_eq!(Welcome::decode(&bytes), Ok(welcome));
        for status in Status::ALL.into_iter().skip(1) {
            let refusal = Welcome::refuse(status);
            assert_eq!(Welcome::decode(&refusal.encode()), Ok(refusal));
        }
    }

    #[test]
    fn a_welcome_with_other_fields_is_refused() {
        let decode = |bytes| Welcome::decode(&bytes);
        let accepted = Welcome::accept([5; 32]).encode();
        assert_eq!(bad_field(decode(changed(accepted, 4, 15))), "status");
        assert_eq!(bad_field(decode(changed(accepted, 7, 1))), "reserved");
        let refused = Welcome::refuse(Status::BadProof).encode();
        assert_eq!(bad_field(decode(changed(refused, 8, 1))), "proof");
        let other = decode(changed(refused, 3, b'C'));
        assert!(matches!(other, Err(WireError::NotPageferry { .. })));
    }

    #[test]
    fn a_secret_is_not_printed() {
        let credentials = Credentials {
            secret: Some([123; 32]),
            proof: [231; 32],
        };
        let text = format!("{credentials:?}");
        assert!(!text.contains("123") && !text.contains("231"), "{text}");
    }
}
