//! The state that outlives our process while a Cloud Hypervisor waits for pages, and the exact
//! service of its page faults over such a death.
//!
//! **Guarantee.** A page fault is answered once, however often our process dies, at any
//! instruction. An answer that is lost would hang a vCPU. One that is repeated would be taken for
//! that of the next page.
//!
//! **Mechanism.** Of each step, the kernel does the part that counts in one system call. A process
//! that is killed has done such a call or has not.
//!
//! - `recv(2)` takes a request off the connection straight into a mapped file ([`Shared`]).
//! - The answer lies in a pipe, and `splice(2)` moves it to the connection. So the pipe says
//!   whether the answer was given.
//!
//! | slot | pipe | the state |
//! |---|---|---|
//! | empty | empty | the last request was answered: fill the pipe |
//! | empty | full | the next request is due |
//! | a request | full | it is unanswered |
//! | a request | empty | it was answered: empty the slot |
//!
//! A request leaves the slot before the pipe is filled, and it comes only when the pipe is full. So
//! no two states look alike.
//!
//! **Neighbours.** `destination` serves the faults. `keeper` is the process that has the
//! descriptors too.

use super::error::ChError;
use super::keeper::{End, Lease};
use super::link::Link;
use super::wire::{HEADER_BYTES, Request, Status};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_migration::Orphan;
use pageferry_pager::{Ring, Shared};
use rustix::fs::MemfdFlags;
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

/// The numbers of the mapped file: how far the VM has come.
pub(super) const STATE: usize = 0;
/// Whether the VM comes paused.
const PAUSED: usize = 1;
/// The missing pages at the switch-over.
const MISSING_AT_START: usize = 2;
/// The progress of the main connection.
const MAIN: usize = 3;

/// The bitmaps of the mapped file.
const MISSING: usize = 0;
const ASKED: usize = 1;

const LOADED: u64 = 1;
const HANDED_OVER: u64 = 2;

/// A VM that is loaded here, or handed over from here, outlives our process.
pub(super) const fn is_kept(state: u64) -> bool {
    state != 0
}

/// The progress of the main connection, behind State.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
#[repr(u64)]
pub(super) enum Main {
    /// The answer to State is due.
    State = 0,
    /// It has come. It may still lie in the socket.
    StateAnswered = 1,
    /// Complete was sent.
    Complete = 2,
    /// It was answered.
    Completed = 3,
}

/// The descriptors that are not of RAM: the connection for faults, the mapped file, the connection
/// for commands, the record of the session, and the ends of the pipe.
pub(super) const FIXED: usize = 6;

/// The state that outlives the process.
pub(super) struct Kept {
    shared: Shared,
    ring: Mutex<Ring>,
    file: File,
    record: File,
    /// The ends to read and to write.
    pipe: (OwnedFd, OwnedFd),
    lease: Option<Lease>,
}

pub(super) fn memfd(name: &str) -> Result<File, ChError> {
    let made = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC);
    let made = made.map_err(|e| ChError::io("cannot make a file in memory", e))?;
    Ok(made.into())
}

pub(super) fn map_failed(e: std::io::Error) -> ChError {
    ChError::io("cannot map the state of the VM's pages", e)
}

impl Kept {
    /// A new state for a VM of so many pages, with the record of its session.
    pub(super) fn new(pages: u64, session: &[u8]) -> Result<Self, ChError> {
        let (file, record) = (memfd("pageferry-pages")?, memfd("pageferry-session")?);
        let (shared, ring) = Shared::create(&file, pages).map_err(map_failed)?;
        std::io::Write::write_all(&mut &record, session)
            .map_err(|e| ChError::io("cannot write the record of the session", e))?;
        let pipe = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
        let pipe = pipe.map_err(|e| ChError::io("cannot make a pipe", e))?;
        Ok(Self {
            shared,
            ring: Mutex::new(ring),
            file,
            record,
            pipe,
            lease: None,
        })
    }

    /// Lets a keeper have the descriptors too.
    pub(super) fn keep(&mut self, lease: Lease) {
        self.lease = Some(lease);
    }

    /// Ends the keeper: nobody is to go on with the VM. A keeper that is only dropped is left
    /// to the next process, as if this one had died.
    pub(super) fn end(&self) {
        if let Some(lease) = &self.lease {
            lease.end();
        }
    }

    /// The descriptors for the keeper, in the order of [`Found`].
    pub(super) fn descriptors<'a>(
        &'a self,
        [faults, main]: [BorrowedFd<'a>; 2],
    ) -> [BorrowedFd<'a>; FIXED] {
        let (out, into) = (self.pipe.0.as_fd(), self.pipe.1.as_fd());
        let (file, record) = (self.file.as_fd(), self.record.as_fd());
        [faults, file, main, record, out, into]
    }

    fn number(&self, index: usize) -> &AtomicU64 {
        self.shared.number(index)
    }

    /// All pages are missing.
    pub(super) fn all_missing(&self, pages: u64) {
        self.shared.bits(MISSING).set(0..pages);
    }

    /// The missing pages.
    pub(super) fn missing(&self) -> Vec<u64> {
        let words = self.shared.bits(MISSING).words().iter();
        words.map(|word| word.load(Ordering::Relaxed)).collect()
    }

    /// The pages that miss are final.
    pub(super) fn set_missing(&self, words: &[u64]) {
        let missing = self.shared.bits(MISSING);
        for (to, word) in missing.words().iter().zip(words) {
            to.store(*word, Ordering::Relaxed);
        }
        self.number(MISSING_AT_START)
            .store(missing.count(), Ordering::Relaxed);
    }

    /// Pages have their bytes in place. No receipt was given for them yet.
    pub(super) fn came(&self, first: RamPage, pages: u64) {
        let pages = first.0..first.0 + pages;
        self.shared.bits(MISSING).clear(pages);
    }

    /// The process is about to have these pages.
    pub(super) fn ask(&self, first: RamPage, pages: u64) {
        self.shared.bits(ASKED).set(first.0..first.0 + pages);
    }

    /// The number of pages that the process has asked for.
    pub(super) fn asked(&self) -> u64 {
        self.shared.bits(ASKED).count()
    }

    /// All that the VM needs to run is loaded: from now on it outlives this process.
    pub(super) fn loaded(&self, paused: bool) {
        self.number(PAUSED).store(paused.into(), Ordering::Relaxed);
        self.number(STATE).store(LOADED, Ordering::Relaxed);
    }

    /// The VM is here and nowhere else.
    pub(super) fn handed_over(&self) {
        self.number(STATE).store(HANDED_OVER, Ordering::Relaxed);
    }

    pub(super) fn main(&self) -> Main {
        match self.number(MAIN).load(Ordering::Relaxed) {
            0 => Main::State,
            1 => Main::StateAnswered,
            2 => Main::Complete,
            _ => Main::Completed,
        }
    }

    pub(super) fn set_main(&self, main: Main) {
        self.number(MAIN).store(main as u64, Ordering::Relaxed);
    }

    /// The next request of the process, which stays until [`Self::answer`]. `None` at the end of
    /// the connection.
    pub(super) fn request(
        &self,
        faults: &Link,
    ) -> Result<Option<(Request, [u8; HEADER_BYTES])>, ChError> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let full = rustix::io::ioctl_fionread(&self.pipe.0);
        let full = full.map_err(|e| ChError::io("cannot look into a pipe", e))? != 0;
        let slot = self.shared.messages(&mut ring)[0];
        if !full {
            // The last request was answered.
            self.shared.clear_message(&mut ring, 0);
            let answer = rustix::io::write(&self.pipe.1, &Status::Ok.encode());
            answer.map_err(|e| ChError::io("cannot fill a pipe", e))?;
        } else if slot != [0; 2 * HEADER_BYTES] {
            return split(&slot).map(Some);
        }
        let Some(length) = faults.await_request("ask for a page")? else {
            return Ok(None);
        };
        let slot = &mut self.shared.messages(&mut ring)[0];
        faults.take(&mut slot[..length])?;
        split(slot).map(Some)
    }

    /// Answers the last request.
    pub(super) fn answer(&self, faults: &Link) -> Result<(), ChError> {
        let moved = splice(
            &self.pipe.0,
            None,
            faults,
            None,
            HEADER_BYTES,
            SpliceFlags::empty(),
        );
        match moved {
            Ok(HEADER_BYTES) => Ok(()),
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) | Ok(_) => {
                Err(ChError::Closed("take an answer"))
            }
            Err(e) => Err(ChError::io("cannot answer Cloud Hypervisor", e)),
        }
    }
}

fn split(slot: &[u8; 2 * HEADER_BYTES]) -> Result<(Request, [u8; HEADER_BYTES]), ChError> {
    let (header, range) = slot.split_at(HEADER_BYTES);
    let mut halves = [[0; HEADER_BYTES]; 2];
    halves[0].copy_from_slice(header);
    halves[1].copy_from_slice(range);
    Ok((Request::decode(&halves[0])?, halves[1]))
}

/// A VM whose process is gone, with what was kept of it.
pub(super) struct Found {
    pub(super) kept: Kept,
    pub(super) record: Vec<u8>,
    pub(super) faults: Link,
    pub(super) main: Link,
    pub(super) ram: Vec<OwnedFd>,
}

impl Found {
    /// The VM of the process at an API socket, if it was left behind. `pages` reads the number of
    /// its pages from the record.
    pub(super) fn at(
        api: &std::path::Path,
        end: End,
        pages: &dyn Fn(&[u8]) -> Result<u64, ChError>,
    ) -> Result<Option<Self>, ChError> {
        let Some((lease, fds, ram)) = Lease::of::<FIXED>(api, end)? else {
            return Ok(None);
        };
        let [faults, file, main, record, out, into] = fds;
        let (file, record) = (File::from(file), File::from(record));
        let bytes = read_record(&record)?;
        let (shared, ring) = Shared::open(&file, pages(&bytes)?).map_err(map_failed)?;
        let kept = Kept {
            shared,
            ring: Mutex::new(ring),
            file,
            record,
            pipe: (out, into),
            lease: Some(lease),
        };
        Ok(Some(Self {
            kept,
            record: bytes,
            faults: Link::new(faults.into())?,
            main: Link::new(main.into())?,
            ram,
        }))
    }

    /// The VM of a migration.
    pub(super) fn arriving(api: &std::path::Path) -> Result<Option<(Self, Orphan)>, ChError> {
        let orphan = |record: &[u8]| Orphan::of(record).map_err(|e| ChError::Kept(e.to_string()));
        let pages = |record: &[u8]| Ok(orphan(record)?.offer().memory_bytes / PAGE_SIZE);
        let Some(found) = Self::at(api, End::Destination, &pages)? else {
            return Ok(None);
        };
        let number = |index| found.kept.number(index).load(Ordering::Relaxed);
        let mut orphan = orphan(&found.record)?;
        orphan.missing = found.kept.missing();
        orphan.missing_at_start = number(MISSING_AT_START);
        orphan.paused = number(PAUSED) != 0;
        orphan.handed_over = number(STATE) == HANDED_OVER;
        Ok(Some((found, orphan)))
    }
}

/// The longest record of a session.
const MAX_RECORD: u64 = 1 << 20;

pub(super) fn read_record(file: &File) -> Result<Vec<u8>, ChError> {
    use std::os::unix::fs::FileExt as _;
    let failed = |e| ChError::io("cannot read the record of the session", e);
    let length = file.metadata().map_err(failed)?.len();
    if length > MAX_RECORD {
        return Err(ChError::Kept(format!(
            "a record of {length} bytes, expected at most {MAX_RECORD}"
        )));
    }
    let mut bytes = vec![0; length as usize];
    // The place in the file is that of the process that wrote it.
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::wire::Command;
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    struct Scene {
        vmm: UnixStream,
        faults: Link,
        kept: Kept,
    }

    impl Scene {
        fn new() -> Self {
            let (vmm, ours) = UnixStream::pair().unwrap();
            vmm.set_read_timeout(Some(std::time::Duration::from_secs(10)))
                .unwrap();
            Self {
                vmm,
                faults: Link::new(ours).unwrap(),
                kept: Kept::new(100, b"session").unwrap(),
            }
        }

        /// The VMM asks for a page, in two parts as the real one does.
        fn ask(&self, page: u64) {
            let header = Request::encode(Command::PageFault, 16);
            (&self.vmm).write_all(&header).unwrap();
            let range = [(page * 4096).to_le_bytes(), 4096_u64.to_le_bytes()].concat();
            (&self.vmm).write_all(&range).unwrap();
        }

        fn serves(&self, page: u64) {
            let (request, range) = self.kept.request(&self.faults).unwrap().unwrap();
            assert_eq!(request.command, Command::PageFault);
            assert_eq!(range[..8], (page * 4096).to_le_bytes());
        }

        /// The process dies, and the next one has what was kept.
        fn dies(self) -> Self {
            let Self { vmm, faults, kept } = self;
            let clone = |file: &File| file.try_clone().unwrap();
            let (file, record) = (clone(&kept.file), clone(&kept.record));
            let pipe = (&kept.pipe.0, &kept.pipe.1);
            let pipe = (pipe.0.try_clone().unwrap(), pipe.1.try_clone().unwrap());
            drop(kept);
            let (shared, ring) = Shared::open(&file, 100).unwrap();
            Self {
                vmm,
                faults,
                kept: Kept {
                    shared,
                    ring: Mutex::new(ring),
                    file,
                    record,
                    pipe,
                    lease: None,
                },
            }
        }

        fn assert_answered_once(&self) {
            let mut answer = [0; 16];
            (&self.vmm).read_exact(&mut answer).unwrap();
            assert_eq!(answer, Status::Ok.encode());
            self.vmm.set_nonblocking(true).unwrap();
            let more = (&self.vmm).read(&mut answer);
            assert_eq!(more.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
            self.vmm.set_nonblocking(false).unwrap();
        }
    }

    /// A takeover that fails, as for want of memory, must not end the VM.
    #[test]
    fn a_vm_that_is_only_dropped_is_left_to_the_next_process() {
        for ends in [false, true] {
            let (ours, mut keeper) = UnixStream::pair().unwrap();
            let mut kept = Kept::new(100, b"session").unwrap();
            kept.keep(Lease::new(ours));
            if ends {
                kept.end();
            }
            drop(kept);
            let mut said = Vec::new();
            keeper.read_to_end(&mut said).unwrap();
            assert_eq!(!said.is_empty(), ends);
        }
    }

    /// Each line of the table of states.
    #[test]
    fn a_request_is_answered_once_wherever_the_process_dies() {
        // It has taken the request.
        let scene = Scene::new();
        scene.ask(7);
        scene.serves(7);
        let scene = scene.dies();
        scene.serves(7);
        scene.kept.answer(&scene.faults).unwrap();
        scene.assert_answered_once();
        // It has answered. The VMM has asked for the next page.
        let scene = scene.dies();
        scene.ask(8);
        scene.serves(8);
        scene.kept.answer(&scene.faults).unwrap();
        scene.assert_answered_once();
        // It has answered, and emptied the slot.
        let clear = |scene: &Scene| {
            let mut ring = scene.kept.ring.lock().unwrap();
            scene.kept.shared.clear_message(&mut ring, 0);
        };
        clear(&scene);
        let scene = scene.dies();
        scene.ask(9);
        scene.serves(9);
        scene.kept.answer(&scene.faults).unwrap();
        scene.assert_answered_once();
        // It has filled the pipe, and waits for a request.
        clear(&scene);
        rustix::io::write(&scene.kept.pipe.1, &Status::Ok.encode()).unwrap();
        let scene = scene.dies();
        scene.ask(10);
        scene.serves(10);
        scene.kept.answer(&scene.faults).unwrap();
        scene.assert_answered_once();
    }

    #[test]
    fn the_end_of_a_connection_is_no_request() {
        let scene = Scene::new();
        drop(scene.vmm);
        assert!(scene.kept.request(&scene.faults).unwrap().is_none());
        let scene = Scene::new();
        (&scene.vmm).write_all(&[9, 0, 0]).unwrap();
        drop(scene.vmm);
        let cut = scene.kept.request(&scene.faults);
        assert!(matches!(cut, Err(ChError::Closed(_))));
    }

    #[test]
    fn what_was_kept_is_found_again() {
        let scene = Scene::new();
        scene.kept.set_missing(&[u64::MAX, 1 << 35]);
        scene.kept.came(RamPage(3), 62);
        scene.kept.ask(RamPage(60), 10);
        scene.kept.loaded(true);
        scene.kept.set_main(Main::Complete);
        let scene = scene.dies();
        assert_eq!(scene.kept.missing(), [7, 1 << 35]);
        assert_eq!(
            (scene.kept.asked(), scene.kept.main()),
            (10, Main::Complete)
        );
        assert_eq!(
            scene.kept.number(MISSING_AT_START).load(Ordering::Relaxed),
            65
        );
        assert_eq!(read_record(&scene.kept.record).unwrap(), b"session");
    }
}
