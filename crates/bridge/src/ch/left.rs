//! The state that outlives our process at the source, once a VM was handed over: its memory, which
//! nobody else has, and the progress of the hand-over.
//!
//! **Guarantee.** A VM that was handed over is never run again by its Cloud Hypervisor because our
//! process died. A VM that was not handed over is.
//!
//! **Mechanism.** The connection to Cloud Hypervisor is one of the kept descriptors. So Cloud
//! Hypervisor, which waits for the answer to State, hears nothing of the death. The hand-over is
//! noted before `Go` is sent. A keeper whose process died before that lets the connection end, and
//! Cloud Hypervisor takes its VM back. Otherwise the next process gives the answers. If a process
//! dies between an answer and its note, the next one gives it again. Cloud Hypervisor takes that
//! for the answer to Complete, which is the same.
//!
//! **Neighbours.** `keeper` has the descriptors too. `source` moves the VM.

use super::error::ChError;
use super::keeper::{End, Lease};
use super::kept::{STATE, map_failed, memfd, read_record};
use super::link::Link;
use pageferry_migration::Orphan;
use pageferry_pager::Shared;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;

/// The numbers of the mapped file, behind that of the state.
const MISSING_AT_START: usize = 1;
/// The VM was paused when it left.
const PAUSED: usize = 2;
/// Cloud Hypervisor keeps a paused VM.
const PRESERVES: usize = 3;
/// Complete was answered.
const RELEASED: usize = 4;
/// The processes that went on with the move.
const EARLIER: usize = 5;

const HANDED_OVER: u64 = 1;

/// The descriptors that are not of RAM: the connection, the mapped file, the session's record.
const FIXED: usize = 3;

/// The state that outlives the process.
pub(super) struct Left {
    shared: Shared,
    file: File,
    record: File,
    lease: Option<Lease>,
}

impl Left {
    pub(super) fn new(runs: bool, preserves: bool) -> Result<Self, ChError> {
        let (file, record) = (memfd("pageferry-move")?, memfd("pageferry-session")?);
        let (shared, _) = Shared::create(&file, 0).map_err(map_failed)?;
        let left = Self {
            shared,
            file,
            record,
            lease: None,
        };
        left.set(PAUSED, u64::from(!runs));
        left.set(PRESERVES, u64::from(preserves));
        Ok(left)
    }

    /// Starts a keeper that has the connection, this state and the memory too.
    pub(super) fn keep(
        &mut self,
        command: &mut Command,
        (api, meeting): (&Path, &Path),
        link: &Link,
        ram: &[OwnedFd],
    ) -> Result<(), ChError> {
        let mut all: Vec<BorrowedFd<'_>> = vec![link.as_fd(), self.file.as_fd()];
        all.push(self.record.as_fd());
        all.extend(ram.iter().map(OwnedFd::as_fd));
        self.lease = Some(Lease::start(command, End::Source, api, meeting, &all)?);
        Ok(())
    }

    /// Ends the keeper: nobody is to go on with the move. One that is only dropped is left to the
    /// next process, as if this one had died.
    pub(super) fn end(&self) {
        if let Some(lease) = &self.lease {
            lease.end();
        }
    }

    fn set(&self, index: usize, value: u64) {
        self.shared.number(index).store(value, Ordering::Relaxed);
    }

    fn get(&self, index: usize) -> u64 {
        self.shared.number(index).load(Ordering::Relaxed)
    }

    /// The VM is about to be handed over, with this record of its session.
    pub(super) fn hand_over(&self, record: &[u8], missing: u64) {
        if let Err(why) = self.record.write_all_at(record, 0) {
            // Nobody could go on. The VM moves all the same.
            tracing::warn!(%why, "the record of the session cannot be kept");
            return;
        }
        self.set(MISSING_AT_START, missing);
        self.set(STATE, HANDED_OVER);
    }

    /// Cloud Hypervisor has the answer to Complete.
    pub(super) fn release(&self) {
        self.set(RELEASED, 1);
    }

    /// Whether a process before this one has handed the VM over.
    pub(super) fn was_handed_over(&self) -> bool {
        self.get(EARLIER) != 0
    }

    pub(super) fn is_released(&self) -> bool {
        self.get(RELEASED) != 0
    }

    pub(super) fn preserves(&self) -> bool {
        self.get(PRESERVES) != 0
    }
}

/// A move whose process died behind the hand-over.
pub(super) struct FoundMove {
    pub(super) left: Left,
    pub(super) orphan: Orphan,
    pub(super) link: Link,
    pub(super) ram: Vec<OwnedFd>,
}

impl FoundMove {
    /// The move from the process at an API socket, if it was left behind.
    pub(super) fn at(api: &Path) -> Result<Option<Self>, ChError> {
        let Some((lease, [link, file, record], ram)) = Lease::of::<FIXED>(api, End::Source)? else {
            return Ok(None);
        };
        let (file, record) = (File::from(file), File::from(record));
        let (shared, _) = Shared::open(&file, 0).map_err(map_failed)?;
        let orphan = Orphan::of(&read_record(&record)?);
        let mut orphan = orphan.map_err(|e| ChError::Kept(e.to_string()))?;
        let left = Left {
            shared,
            file,
            record,
            lease: Some(lease),
        };
        orphan.handed_over = true;
        orphan.paused = left.get(PAUSED) != 0;
        orphan.missing_at_start = left.get(MISSING_AT_START);
        orphan.earlier = u32::try_from(left.get(EARLIER)).unwrap_or(u32::MAX);
        left.set(EARLIER, left.get(EARLIER) + 1);
        Ok(Some(Self {
            left,
            orphan,
            link: Link::new(link.into())?,
            ram,
        }))
    }
}
