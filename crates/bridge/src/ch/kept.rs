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
//! **Neighbours.** `foreign::kept` has what all VMMs keep. `receiver` serves the faults.

use super::link::Link;
use super::wire::{HEADER_BYTES, Request, Status};
use crate::foreign::VmmError;
use crate::foreign::kept::{Kept, OWN, OWN_BITS};
use pageferry_addr::RamPage;
use pageferry_pager::Ring;
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

/// The progress of the main connection.
const MAIN: usize = OWN;

/// The progress of the main connection, behind the answer to State.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
#[repr(u64)]
pub(super) enum Main {
    /// The process has loaded State.
    Loaded = 0,
    /// Complete was sent.
    Complete = 1,
    /// It was answered.
    Completed = 2,
}

/// The service of page faults, as far as it outlives the process.
pub(super) struct Answers {
    pub(super) kept: Kept,
    ring: Mutex<Ring>,
    /// The ends to read and to write.
    pub(super) pipe: (OwnedFd, OwnedFd),
}

impl Answers {
    /// A new state of a VM of so many pages.
    pub(super) fn new(pages: u64, record: &[u8]) -> Result<Self, VmmError> {
        let (kept, ring) = Kept::new(pages, record)?;
        let pipe = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
        let pipe = pipe.map_err(|e| VmmError::io("cannot make a pipe", e))?;
        Ok(Self::of(kept, ring, pipe))
    }

    /// The state of a process that died, with its pipe.
    pub(super) fn of(kept: Kept, ring: Ring, pipe: (OwnedFd, OwnedFd)) -> Self {
        Self {
            kept,
            ring: Mutex::new(ring),
            pipe,
        }
    }

    /// The process is about to have these pages.
    pub(super) fn ask(&self, first: RamPage, pages: u64) {
        let asked = self.kept.shared.bits(OWN_BITS);
        asked.set(first.0..first.0 + pages);
    }

    /// The number of pages that the process has asked for.
    pub(super) fn asked(&self) -> u64 {
        self.kept.shared.bits(OWN_BITS).count()
    }

    pub(super) fn main(&self) -> Main {
        match self.kept.get(MAIN) {
            0 => Main::Loaded,
            1 => Main::Complete,
            _ => Main::Completed,
        }
    }

    pub(super) fn set_main(&self, main: Main) {
        self.kept.set(MAIN, main as u64);
    }

    /// The next request of the process, which stays until [`Self::answer`]. `None` at the end of
    /// the connection.
    pub(super) fn request(
        &self,
        faults: &Link,
    ) -> Result<Option<(Request, [u8; HEADER_BYTES])>, VmmError> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let full = rustix::io::ioctl_fionread(&self.pipe.0);
        let full = full.map_err(|e| VmmError::io("cannot look into a pipe", e))? != 0;
        let slot = self.kept.shared.messages(&mut ring)[0];
        if !full {
            // The last request was answered.
            self.kept.shared.clear_message(&mut ring, 0);
            let answer = rustix::io::write(&self.pipe.1, &Status::Ok.encode());
            answer.map_err(|e| VmmError::io("cannot fill a pipe", e))?;
        } else if slot != [0; 2 * HEADER_BYTES] {
            return split(&slot).map(Some);
        }
        let Some(length) = faults.await_request("ask for a page")? else {
            return Ok(None);
        };
        let slot = &mut self.kept.shared.messages(&mut ring)[0];
        faults.take(&mut slot[..length])?;
        split(slot).map(Some)
    }

    /// Answers the last request.
    pub(super) fn answer(&self, faults: &Link) -> Result<(), VmmError> {
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
                Err(VmmError::Closed("take an answer"))
            }
            Err(e) => Err(VmmError::io("cannot answer Cloud Hypervisor", e)),
        }
    }
}

fn split(slot: &[u8; 2 * HEADER_BYTES]) -> Result<(Request, [u8; HEADER_BYTES]), VmmError> {
    let (header, range) = slot.split_at(HEADER_BYTES);
    let mut halves = [[0; HEADER_BYTES]; 2];
    halves[0].copy_from_slice(header);
    halves[1].copy_from_slice(range);
    Ok((Request::decode(&halves[0])?, halves[1]))
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
        kept: Answers,
    }

    impl Scene {
        fn new() -> Self {
            let (vmm, ours) = UnixStream::pair().unwrap();
            vmm.set_read_timeout(Some(std::time::Duration::from_secs(10)))
                .unwrap();
            Self {
                vmm,
                faults: Link::new(ours).unwrap(),
                kept: Answers::new(100, b"session").unwrap(),
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
            let Answers { kept, pipe, .. } = kept;
            let (kept, ring) = kept.again(100);
            let kept = Answers::of(kept, ring, pipe);
            Self { vmm, faults, kept }
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
            scene.kept.kept.shared.clear_message(&mut ring, 0);
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
        assert!(matches!(cut, Err(VmmError::Closed(_))));
    }

    #[test]
    fn what_was_asked_for_is_found_again() {
        let scene = Scene::new();
        scene.kept.ask(RamPage(60), 10);
        scene.kept.set_main(Main::Complete);
        let scene = scene.dies();
        assert_eq!(
            (scene.kept.asked(), scene.kept.main()),
            (10, Main::Complete)
        );
    }
}
