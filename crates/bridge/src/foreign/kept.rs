//! The state of a move that outlives our process, at either end.
//!
//! **Guarantee.** A VM that was handed over is never run again by its old VMM because our process
//! died. A VM that was not handed over is. At the destination, a VM that is loaded waits for its
//! pages until the next process brings them.
//!
//! **Mechanism.** Numbers and bitmaps lie in a mapped file ([`Shared`]), and the session's record
//! in another. A keeper has both, and the VMM's descriptors. The hand-over is noted before `Go` is
//! sent. Cloud Hypervisor waits at its connection, which the keeper has too: it hears nothing of
//! our death. If the VM was not handed over, the keeper lets the connection end, and Cloud
//! Hypervisor takes its VM back. Firecracker waits for nobody: the keeper lets a VM run again that
//! our process had paused.
//!
//! **Neighbours.** `keeper` has the descriptors too. `ch` and `fc` keep more in the same file.

use super::VmmError;
use super::keeper::{End, Lease, PAUSE_ASKED, STATE};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_migration::Orphan;
use pageferry_pager::{Ring, Shared};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;

/// The numbers of the mapped file, behind those of the keeper. The VM ran not when it left.
const PAUSED: usize = 2;
/// The missing pages at the switch-over.
const MISSING_AT_START: usize = 3;
/// The sending VMM keeps a paused VM.
const PRESERVES: usize = 4;
/// The sending VMM has let its VM go.
const RELEASED: usize = 5;
/// The processes that went on with the move.
const EARLIER: usize = 6;
/// The first number of the VMM's own.
pub(crate) const OWN: usize = 16;

/// The bitmap of the missing pages. The other is the VMM's own.
const MISSING: usize = 0;
pub(crate) const OWN_BITS: usize = 1;

const LOADED: u64 = 1;
const HANDED_OVER: u64 = 2;

/// The longest record of a session.
const MAX_RECORD: u64 = 1 << 20;

/// The state that outlives the process.
pub(crate) struct Kept {
    pub(crate) shared: Shared,
    file: File,
    record: File,
    lease: Option<Lease>,
}

fn memfd(name: &str) -> Result<File, VmmError> {
    let made = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC);
    let made = made.map_err(|e| VmmError::io("cannot make a file in memory", e))?;
    Ok(made.into())
}

fn map_failed(e: io::Error) -> VmmError {
    VmmError::io("cannot map the state of the VM's pages", e)
}

impl Kept {
    /// A new state for a VM of so many pages, with the record of what brings them.
    pub(crate) fn new(pages: u64, record: &[u8]) -> Result<(Self, Ring), VmmError> {
        let (file, of_record) = (memfd("pageferry-pages")?, memfd("pageferry-session")?);
        let (shared, ring) = Shared::create(&file, pages).map_err(map_failed)?;
        let failed = |e| VmmError::io("cannot write the record of the session", e);
        of_record.write_all_at(record, 0).map_err(failed)?;
        let kept = Self {
            shared,
            file,
            record: of_record,
            lease: None,
        };
        Ok((kept, ring))
    }

    /// The state of a VM that leaves. It has no pages of its own.
    pub(crate) fn leaving(runs: bool, preserves: bool) -> Result<Self, VmmError> {
        let (kept, _) = Self::new(0, &[])?;
        kept.set(PAUSED, u64::from(!runs));
        kept.set(PRESERVES, u64::from(preserves));
        Ok(kept)
    }

    /// Starts a keeper that has this state and the VMM's descriptors too.
    pub(crate) fn keep<'a>(
        &mut self,
        command: Option<&mut Command>,
        end: End,
        (api, meeting): (&Path, &Path),
        of_vmm: impl IntoIterator<Item = BorrowedFd<'a>>,
    ) -> Result<(), VmmError> {
        let Some(command) = command else {
            return Ok(());
        };
        let mut all = vec![self.file.as_fd(), self.record.as_fd()];
        for fd in of_vmm {
            all.push(fd);
        }
        self.lease = Some(Lease::start(command, end, api, meeting, &all)?);
        Ok(())
    }

    /// Gives the keeper more descriptors.
    pub(crate) fn keep_more(&self, fds: &[BorrowedFd<'_>]) -> Result<(), VmmError> {
        match &self.lease {
            Some(lease) => lease.add(fds),
            None => Ok(()),
        }
    }

    /// The state at an API socket whose process is gone, with the VMM's descriptors. `pages` reads
    /// the number of pages from the record.
    #[expect(clippy::type_complexity, reason = "the parts of what was kept")]
    pub(crate) fn found(
        api: &Path,
        end: End,
        pages: &dyn Fn(&[u8]) -> Result<u64, VmmError>,
    ) -> Result<Option<(Self, Ring, Vec<u8>, Vec<OwnedFd>)>, VmmError> {
        let Some((lease, mut fds)) = Lease::of(api, end)? else {
            return Ok(None);
        };
        if fds.len() < 2 {
            return Err(VmmError::Kept("it has no descriptors".into()));
        }
        let of_vmm = fds.split_off(2);
        let [file, record] = [0, 1].map(|_| File::from(fds.remove(0)));
        let bytes = read_record(&record)?;
        let (shared, ring) = Shared::open(&file, pages(&bytes)?).map_err(map_failed)?;
        let kept = Self {
            shared,
            file,
            record,
            lease: Some(lease),
        };
        Ok(Some((kept, ring, bytes, of_vmm)))
    }

    /// The move at an API socket whose process is gone, at either end.
    #[expect(clippy::type_complexity, reason = "the parts of what was kept")]
    pub(crate) fn found_move(
        api: &Path,
        end: End,
    ) -> Result<Option<(Self, Ring, Orphan, Vec<OwnedFd>)>, VmmError> {
        let orphan = |record: &[u8]| Orphan::of(record).map_err(|e| VmmError::Kept(e.to_string()));
        let pages = |record: &[u8]| match end {
            End::Source => Ok(0),
            _ => Ok(orphan(record)?.offer().memory_bytes / PAGE_SIZE),
        };
        let Some((kept, ring, record, fds)) = Self::found(api, end, &pages)? else {
            return Ok(None);
        };
        let mut orphan = orphan(&record)?;
        orphan.missing = kept.missing();
        orphan.missing_at_start = kept.get(MISSING_AT_START);
        orphan.paused = kept.get(PAUSED) != 0;
        orphan.handed_over = kept.is_handed_over();
        if end == End::Source {
            orphan.earlier = u32::try_from(kept.get(EARLIER)).unwrap_or(u32::MAX);
            kept.set(EARLIER, kept.get(EARLIER) + 1);
        }
        Ok(Some((kept, ring, orphan, fds)))
    }

    /// Ends the keeper: nobody is to go on. One that is only dropped is left to the next process,
    /// as if this one had died.
    pub(crate) fn end(&self) {
        if let Some(lease) = &self.lease {
            lease.end();
        }
    }

    pub(crate) fn set(&self, index: usize, value: u64) {
        self.shared.number(index).store(value, Ordering::Relaxed);
    }

    pub(crate) fn get(&self, index: usize) -> u64 {
        self.shared.number(index).load(Ordering::Relaxed)
    }

    // ---- the source

    /// The VM is about to be handed over, with this record of its session.
    pub(super) fn hand_over(&self, record: &[u8], missing: u64) -> io::Result<()> {
        self.record.write_all_at(record, 0)?;
        self.set(MISSING_AT_START, missing);
        self.handed_over();
        Ok(())
    }

    /// The VMM is about to pause its VM, and resumes it by nothing but a call.
    pub(crate) fn pause_asked(&self, asked: bool) {
        self.set(PAUSE_ASKED, u64::from(asked && self.ran()));
    }

    /// The VM is here again.
    pub(super) fn taken_back(&self) {
        self.set(STATE, 0);
        self.pause_asked(false);
    }

    /// Whether the VM ran when it was taken.
    pub(crate) fn ran(&self) -> bool {
        self.get(PAUSED) == 0
    }

    /// Whether a process before this one has handed the VM over.
    pub(crate) fn was_handed_over(&self) -> bool {
        self.get(EARLIER) != 0
    }

    /// The VMM has let its VM go.
    pub(crate) fn release(&self) {
        self.set(RELEASED, 1);
    }

    pub(crate) fn is_released(&self) -> bool {
        self.get(RELEASED) != 0
    }

    pub(crate) fn preserves(&self) -> bool {
        self.get(PRESERVES) != 0
    }

    // ---- the destination

    /// All pages are missing.
    pub(crate) fn all_missing(&self, pages: u64) {
        self.shared.bits(MISSING).set(0..pages);
    }

    pub(crate) fn missing(&self) -> Vec<u64> {
        let words = self.shared.bits(MISSING).words().iter();
        words.map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// The pages that miss are final.
    pub(crate) fn set_missing(&self, words: &[u64]) {
        let missing = self.shared.bits(MISSING);
        for (to, word) in missing.words().iter().zip(words) {
            to.store(*word, Ordering::Relaxed);
        }
        self.set(MISSING_AT_START, missing.count());
    }

    /// Pages have their bytes in place. No receipt was given for them yet.
    pub(crate) fn came(&self, first: RamPage, pages: u64) {
        let pages = first.0..first.0 + pages;
        self.shared.bits(MISSING).clear(pages);
    }

    /// All that the VM needs to run is loaded: from now on it outlives this process.
    pub(crate) fn loaded(&self, paused: bool) {
        self.set(PAUSED, paused.into());
        self.set(STATE, LOADED);
    }

    /// The VM is at the destination and nowhere else.
    pub(crate) fn handed_over(&self) {
        self.set(STATE, HANDED_OVER);
    }

    pub(super) fn is_handed_over(&self) -> bool {
        self.get(STATE) == HANDED_OVER
    }
}

fn read_record(file: &File) -> Result<Vec<u8>, VmmError> {
    let failed = |e| VmmError::io("cannot read the record of the session", e);
    let length = file.metadata().map_err(failed)?.len();
    if length > MAX_RECORD {
        return Err(VmmError::Kept(format!(
            "a record of {length} bytes, expected at most {MAX_RECORD}"
        )));
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    impl Kept {
        /// The state as the next process finds it.
        pub(crate) fn again(self, pages: u64) -> (Self, Ring) {
            let Self { file, record, .. } = self;
            let (shared, ring) = Shared::open(&file, pages).unwrap();
            let kept = Self {
                shared,
                file,
                record,
                lease: None,
            };
            (kept, ring)
        }
    }

    /// A takeover that fails, as for want of memory, must not end the VM.
    #[test]
    fn a_vm_that_is_only_dropped_is_left_to_the_next_process() {
        for ends in [false, true] {
            let (ours, mut keeper) = UnixStream::pair().unwrap();
            let (mut kept, _) = Kept::new(100, b"session").unwrap();
            kept.lease = Some(Lease::new(ours));
            if ends {
                kept.end();
            }
            drop(kept);
            let mut said = Vec::new();
            keeper.read_to_end(&mut said).unwrap();
            assert_eq!(!said.is_empty(), ends);
        }
    }

    #[test]
    fn what_was_kept_is_found_again() {
        let (kept, _) = Kept::new(100, b"session").unwrap();
        kept.set_missing(&[u64::MAX, 1 << 35]);
        kept.came(RamPage(3), 62);
        kept.loaded(true);
        let (kept, _) = kept.again(100);
        assert_eq!(kept.missing(), [7, 1 << 35]);
        assert_eq!(kept.get(MISSING_AT_START), 65);
        assert!(!kept.ran() && !kept.is_handed_over());
        assert_eq!(read_record(&kept.record).unwrap(), b"session");
    }
}
