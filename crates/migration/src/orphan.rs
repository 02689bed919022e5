//! A process goes on with the session of one that died, when the VM itself lives elsewhere.
//!
//! **Guarantee.** The session goes on as after the loss of all its channels. No page is placed
//! twice and none is called present whose bytes are not in place. A VM that was handed over stays
//! so.
//!
//! **Mechanism.** The owner of a process keeps what must outlive it: the memory, and the record of
//! the session. The dead process had all channels, so no message of theirs is under way.
//!
//! *At the destination* the bits of the missing pages are kept too. A machine clears its kept bit
//! in [`Machine::install`], when the bytes are in place and the source has no receipt yet. So the
//! kept bits say at most that a page is missing which is here: the source then sends it again. The
//! source opens the next generation, says `Resume`, and hears which pages are missing: rule 4 of
//! [`session`](crate::session) holds without readers. A session that takes generation 1 for the
//! last one takes each later one.
//!
//! *At the source* the owner hears of the hand-over before `Go` is sent
//! ([`Observer::handing_over`]). So no `Go` is sent that the next process does not know of. It
//! knows nothing of pages: all are unsent until the destination names those that are missing. It
//! sends each with its bytes, since it has no hashes of what was sent before. Its first generation
//! lies far above those of the process that died, so the destination takes it.
//!
//! [`Machine::install`]: pageferry_machine::Machine::install
//! [`Observer::handing_over`]: crate::Observer::handing_over

use crate::error::MigrationError;
use crate::file::{damaged, next};
use crate::session::Generation;
use crate::session::destination::Stage;
use crate::wire::{Frame, SECRET_BYTES, SessionId, Setup};
use pageferry_transport::handshake::{Identity, Secret};

const MAGIC: &[u8; 8] = b"PFORPHN\x01";
/// The generations of one process of a source. None opens so many.
const GENERATIONS: Generation = 1 << 20;
pub(crate) const WHAT: &str = "this is no record of a session";

/// A VM that was sent, or received, in part by a process that died.
#[derive(Clone)]
pub struct Orphan {
    pub(crate) identity: Identity,
    pub(crate) setup: Setup,
    /// Whether the source's `Go` was heard.
    pub handed_over: bool,
    /// Whether the VM came paused.
    pub paused: bool,
    /// The number of missing pages at the switch-over.
    pub missing_at_start: u64,
    /// At the destination, the missing pages: bit `i` of word `w` is RAM page `64 * w + i`.
    pub missing: Vec<u64>,
    /// At the source, how many processes went on with it before, at most 4000.
    pub earlier: u32,
}

impl std::fmt::Debug for Orphan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Orphan")
            .field("handed_over", &self.handed_over)
            .field("missing_at_start", &self.missing_at_start)
            .finish_non_exhaustive()
    }
}

impl Orphan {
    /// Reads a [record](crate::Incoming::record). The VM was not handed over, and lacks no page,
    /// until the caller says so.
    ///
    /// # Errors
    /// [`MigrationError::Mismatch`] for bytes that are no record, [`MigrationError::Wire`] for
    /// damaged ones.
    pub fn of(record: &[u8]) -> Result<Self, MigrationError> {
        let short = || damaged(WHAT, "it is cut off");
        let rest = record
            .strip_prefix(MAGIC)
            .ok_or_else(|| damaged(WHAT, "it does not begin as one"))?;
        let (session, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let (secret, mut rest) = rest.split_first_chunk::<SECRET_BYTES>().ok_or_else(short)?;
        let Frame::Setup(setup) = next(&mut rest, 0)? else {
            return Err(damaged(WHAT, "it has no description of the machine"));
        };
        if !rest.is_empty() {
            return Err(damaged(WHAT, "its length is wrong"));
        }
        Ok(Self {
            identity: Identity {
                session: SessionId(*session),
                secret: Secret::of_bytes(*secret),
            },
            missing: vec![0; setup.memory_pages().div_ceil(64) as usize],
            setup,
            handed_over: false,
            paused: false,
            missing_at_start: 0,
            earlier: 0,
        })
    }

    /// The stage at which the session goes on. A source that had a receipt for each page may be
    /// gone for good. So a VM that is whole does not wait for it.
    pub(crate) fn stage(&self) -> Stage {
        match self.handed_over {
            false => Stage::Ready,
            true if self.missing.iter().all(|word| *word == 0) => Stage::Complete,
            true => Stage::Running,
        }
    }
}

impl Orphan {
    /// The generation before the first of the process that goes on with it, at a source.
    pub(crate) fn generation(&self) -> Generation {
        self.earlier.saturating_add(1).saturating_mul(GENERATIONS)
    }
}

/// The record of a session.
pub(crate) fn record(identity: &Identity, setup: &Setup) -> Result<Vec<u8>, MigrationError> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&identity.session.0);
    bytes.extend_from_slice(&identity.secret.bytes());
    let mut frame = Vec::new();
    Frame::Setup(setup.clone()).encode(&mut frame)?;
    bytes.extend_from_slice(&frame);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Kind, Region};
    use pageferry_addr::Gfn;
    use proptest::prelude::*;

    fn record() -> Vec<u8> {
        let name = |text: &str| text.parse().unwrap();
        let setup = Setup {
            bulk_channels: 2,
            urgent_channels: 1,
            kind: Kind {
                engine: name("other"),
                isa: name("x86_64"),
                state_format: name("other/1"),
            },
            vcpus: 1,
            memory_bytes: 100 * 4096,
            regions: vec![Region {
                slot: 0,
                gfn: Gfn(0),
                pages: 100,
            }],
            devices: Vec::new(),
            description: b"guest".to_vec(),
        };
        let mut bytes = MAGIC.to_vec();
        bytes.extend([7; 16]);
        bytes.extend([9; SECRET_BYTES]);
        let mut frame = Vec::new();
        Frame::Setup(setup).encode(&mut frame).unwrap();
        bytes.extend(frame);
        bytes
    }

    #[test]
    fn a_record_has_the_session_and_the_vm() {
        let mut orphan = Orphan::of(&record()).unwrap();
        assert_eq!(orphan.identity.session, SessionId([7; 16]));
        assert_eq!(orphan.setup.description, b"guest");
        assert_eq!((orphan.missing.len(), orphan.stage()), (2, Stage::Ready));
        orphan.handed_over = true;
        assert_eq!(orphan.stage(), Stage::Complete);
        orphan.missing[1] = 1;
        assert_eq!(orphan.stage(), Stage::Running);
        assert!(!format!("{orphan:?}").contains('9'));
    }

    proptest! {
        #[test]
        fn other_bytes_are_refused(at in 0..record().len(), other in 1u8..) {
            let mut bytes = record();
            prop_assert!(Orphan::of(&bytes[..at]).is_err());
            bytes[at] ^= other;
            // The secret and the name of the session may be any.
            let ids = MAGIC.len()..MAGIC.len() + 16 + SECRET_BYTES;
            prop_assert_eq!(Orphan::of(&bytes).is_ok(), ids.contains(&at));
        }
    }
}
