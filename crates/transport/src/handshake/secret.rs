//! The secret of a session, and the proofs of knowing it.

use core::fmt;

use hmac::{Hmac, KeyInit, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use std::io;

use crate::wire::{HELLO_BYTES, PROOF_BYTES, SECRET_BYTES, SessionId, Side};

/// The secret of a session. It is overwritten when it is dropped, and never printed.
#[derive(Clone)]
pub struct Secret([u8; SECRET_BYTES]);

/// The source's knowledge of its session.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The name of the session.
    pub session: SessionId,
    /// Its secret.
    pub secret: Secret,
}

impl Identity {
    /// Returns a new session with a new secret.
    ///
    /// # Errors
    /// The error of getrandom(2).
    pub fn random() -> io::Result<Self> {
        Ok(Self {
            session: SessionId::random()?,
            secret: Secret(random_bytes()?),
        })
    }
}

/// The bytes that a proof covers. They differ for each connection: the destination's answer has a
/// nonce.
pub(super) struct Transcript {
    pub(super) hello: [u8; HELLO_BYTES],
    pub(super) reply: [u8; HELLO_BYTES],
    /// Binds the proof to the TLS connection. All zero without TLS.
    pub(super) exporter: [u8; 32],
}

impl Secret {
    /// Returns the secret of these bytes.
    #[must_use]
    pub const fn of_bytes(bytes: [u8; SECRET_BYTES]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes, for the channel that opens the session, and for a process that takes it
    /// over.
    #[must_use]
    pub const fn bytes(&self) -> [u8; SECRET_BYTES] {
        self.0
    }

    /// Returns the proof of `side`.
    pub(super) fn prove(&self, side: Side, transcript: &Transcript) -> [u8; PROOF_BYTES] {
        self.mac(side, transcript).finalize().into_bytes().into()
    }

    /// Whether `proof` is that of `side`. Takes the same time for every proof.
    pub(super) fn verify(
        &self,
        side: Side,
        transcript: &Transcript,
        proof: &[u8; PROOF_BYTES],
    ) -> bool {
        self.mac(side, transcript).verify_slice(proof).is_ok()
    }

    fn mac(&self, side: Side, transcript: &Transcript) -> Hmac<Sha256> {
        let mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.chain_update(covered(side, transcript))
    }
}

fn covered(side: Side, transcript: &Transcript) -> Vec<u8> {
    let label: &[u8] = match side {
        Side::Source => b"pageferry 6 source",
        Side::Destination => b"pageferry 6 destination",
    };
    let Transcript {
        hello,
        reply,
        exporter,
    } = transcript;
    [label, hello, reply, exporter].concat()
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.fill(0);
        // Keeps the compiler from removing the writes.
        std::hint::black_box(&self.0);
    }
}

impl SessionId {
    /// Returns a new identity, made of the kernel's random numbers.
    ///
    /// # Errors
    /// The error of getrandom(2).
    pub fn random() -> io::Result<Self> {
        Ok(Self(random_bytes()?))
    }
}

/// Returns random bytes of the kernel.
///
/// # Errors
/// The error of getrandom(2).
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut left = &mut bytes[..];
    while !left.is_empty() {
        let filled = rustix::io::retry_on_intr(|| getrandom(&mut *left, GetRandomFlags::empty()))?;
        left = &mut left[filled..];
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transcript() -> Transcript {
        Transcript {
            hello: [1; 64],
            reply: [2; 64],
            exporter: [3; 32],
        }
    }

    #[test]
    fn a_proof_fits_its_secret_side_and_bytes_only() {
        let secret = Secret::of_bytes([9; 32]);
        let proof = secret.prove(Side::Source, &transcript());
        assert!(secret.verify(Side::Source, &transcript(), &proof));
        assert!(!secret.verify(Side::Destination, &transcript(), &proof));
        assert!(!Secret::of_bytes([8; 32]).verify(Side::Source, &transcript(), &proof));
        let changes: [fn(&mut Transcript); 3] = [
            |t| t.hello[63] ^= 1,
            |t| t.reply[40] ^= 1,
            |t| t.exporter[0] ^= 1,
        ];
        for change in changes {
            let mut other = transcript();
            change(&mut other);
            assert!(!secret.verify(Side::Source, &other, &proof));
        }
    }

    /// The same value as Python's hmac module gives.
    #[test]
    fn a_proof_keeps_its_value() {
        let secret = Secret::of_bytes([9; 32]);
        let proof = secret.prove(Side::Source, &transcript());
        let hex: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, PROOF_HEX);
    }

    const PROOF_HEX: &str = "a26fb72d534a59f72c5fcc0cccd52bcf3654444b801700246350ec0b6fbfebbf";

    #[test]
    fn a_secret_is_not_printed() {
        let identity = Identity {
            session: SessionId([0; 16]),
            secret: Secret::of_bytes([123; 32]),
        };
        assert!(!format!("{identity:?}").contains("123"));
    }
}
