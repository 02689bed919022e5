//! Memory to fault on, threads that touch it, and waiting with a limit.
#![expect(
    unsafe_code,
    reason = "maps memory, touches it like a guest, and registers it"
)]

use pageferry_addr::Hva;
use pageferry_testkit::{LIMIT, skip};
use pageferry_userfault::uffd::{
    Event, EventReader, Features, OpenError, PageFault, RangeIoctls, RegisterMode, Userfaultfd,
    Wait,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

pub(crate) const PAGE: u64 = 4096;
/// The time without an event that counts as no event.
const QUIET: Duration = Duration::from_millis(60);

/// Opens a userfaultfd with `features`. Without support it reports the reason and returns `None`.
/// An older kernel may lack features. There only a run that requires these ("poison", say) fails.
pub(crate) fn open(features: Features) -> Option<Userfaultfd> {
    match Userfaultfd::open(features) {
        Err(error @ OpenError::MissingFeatures { missing, .. }) => {
            skip(&missing.to_string().to_lowercase(), error);
            None
        }
        opened => opened.map_err(|error| skip("uffd", error)).ok(),
    }
}

/// Held by a test that forks, or that no fork may disturb. A fork sends an event to every
/// userfaultfd that asks for it. It also makes the child share all private pages, and hold all
/// descriptors.
pub(crate) fn lock_forks() -> MutexGuard<'static, ()> {
    static FORKS: Mutex<()> = Mutex::new(());
    FORKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The result of a child that panicked.
const PANICKED: u8 = 101;

/// Forks. The child runs `call`, which may only make system calls, and exits with its result.
/// Returns the child's process id. The caller holds [`lock_forks`].
pub(crate) fn fork(call: impl FnOnce() -> u8) -> i32 {
    // SAFETY: the child only makes system calls and exits, which is safe after a fork of a process
    // with many threads.
    match unsafe { libc::fork() } {
        0 => {
            let code = catch_unwind(AssertUnwindSafe(call)).unwrap_or(PANICKED);
            // SAFETY: as above.
            unsafe { libc::_exit(code.into()) }
        }
        child => {
            assert!(child > 0, "fork failed");
            child
        }
    }
}

/// Waits until a child exits. Returns its result.
pub(crate) fn exit_code(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the call waits for our child and writes `status`.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "the child died: {status:#x}");
    libc::WEXITSTATUS(status)
}

/// Pages at `guest`, where faults are reported. A memfd has the same pages at `alias`, where they
/// are not.
pub(crate) struct Memory {
    guest: usize,
    alias: Option<usize>,
    len: usize,
}

impl Memory {
    /// A memfd of `pages` empty pages, mapped twice.
    pub(crate) fn shared(pages: u64) -> Arc<Self> {
        let len = usize::try_from(pages * PAGE).unwrap();
        let file = memfd_create("pageferry-test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len as u64).unwrap();
        let map = || {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping at an address of the kernel's choice.
            unsafe { mmap(null_mut(), len, prot, MapFlags::SHARED, &file, 0) }
                .unwrap()
                .addr()
        };
        Arc::new(Self {
            guest: map(),
            alias: Some(map()),
            len,
        })
    }

    /// `pages` empty anonymous pages.
    pub(crate) fn anonymous(pages: u64) -> Arc<Self> {
        let len = usize::try_from(pages * PAGE).unwrap();
        // SAFETY: a new mapping at an address of the kernel's choice.
        let guest = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            mmap_anonymous(null_mut(), len, prot, MapFlags::PRIVATE)
        };
        Arc::new(Self {
            guest: guest.unwrap().addr(),
            alias: None,
            len,
        })
    }

    pub(crate) fn len(&self) -> u64 {
        self.len as u64
    }

    /// The address of a page where faults are reported.
    pub(crate) fn at(&self, page: u64) -> Hva {
        assert!(page * PAGE <= self.len());
        Hva(self.guest as u64 + page * PAGE)
    }

    pub(crate) fn guest(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.guest)
    }

    /// Registers all pages.
    pub(crate) fn register(&self, uffd: &Userfaultfd, mode: RegisterMode) -> RangeIoctls {
        // SAFETY: (1) In these tests only separate threads touch missing pages. (2) Nobody holds a
        // reference into the memory. (3) It is mapped until dropped.
        unsafe { uffd.register(self.at(0), self.len(), mode) }.unwrap()
    }

    /// Writes `value` to the first byte of a page without a fault on the guest's side.
    pub(crate) fn put(&self, page: u64, value: u8) {
        let alias: *mut u8 =
            std::ptr::with_exposed_provenance_mut(self.alias.expect("a second mapping"));
        assert!(page * PAGE < self.len());
        // SAFETY: inside the alias mapping, which lives as long as `self`.
        unsafe { alias.byte_add((page * PAGE) as usize).write_volatile(value) };
    }

    /// Reads the first byte of a present page.
    pub(crate) fn get(&self, page: u64) -> u8 {
        assert!(page * PAGE < self.len());
        // SAFETY: inside the guest mapping, which lives as long as `self`.
        unsafe {
            self.guest()
                .byte_add((page * PAGE) as usize)
                .read_volatile()
        }
    }

    /// Writes `value` to the first byte of a present page.
    pub(crate) fn write(&self, page: u64, value: u8) {
        assert!(page * PAGE < self.len());
        let at = self.guest().wrapping_byte_add((page * PAGE) as usize);
        // SAFETY: inside the guest mapping, which lives as long as `self`.
        unsafe { at.write_volatile(value) };
    }

    /// Drops pages (`MADV_DONTNEED`). With `EVENT_REMOVE` it sleeps until the event is read.
    pub(crate) fn drop_pages(&self, first: u64, pages: u64) {
        assert!((first + pages) * PAGE <= self.len());
        let at = self.guest().wrapping_byte_add((first * PAGE) as usize);
        // SAFETY: inside the guest mapping, and nobody has a reference into it.
        let result =
            unsafe { libc::madvise(at.cast(), (pages * PAGE) as usize, libc::MADV_DONTNEED) };
        assert_eq!(result, 0);
    }

    /// Reads the first byte of a page by a system call.
    pub(crate) fn get_by_syscall(&self, page: u64) -> rustix::io::Result<u8> {
        let (reader, writer) = rustix::pipe::pipe()?;
        let at = self.guest().wrapping_byte_add((page * PAGE) as usize);
        // SAFETY: write(2) reads one byte from `at` or fails with EFAULT.
        let sent = unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&writer), at.cast(), 1) };
        if sent != 1 {
            let error = std::io::Error::last_os_error();
            return Err(rustix::io::Errno::from_io_error(&error).unwrap());
        }
        let mut byte = [0];
        rustix::io::read(&reader, &mut byte)?;
        Ok(byte[0])
    }

    /// Starts a thread that reads or writes the first byte of a page.
    pub(crate) fn touch(self: &Arc<Self>, page: u64, write: Option<u8>) -> Toucher {
        assert!(page * PAGE < self.len());
        let (send, told) = channel();
        let memory = Arc::clone(self);
        thread::spawn(move || {
            send.send(
                rustix::thread::gettid()
                    .as_raw_nonzero()
                    .get()
                    .cast_unsigned()
                    .into(),
            )
            .unwrap();
            let at = memory.guest().wrapping_byte_add((page * PAGE) as usize);
            // SAFETY: inside the guest mapping, which `memory` keeps; this thread may sleep.
            let value = unsafe {
                if let Some(value) = write {
                    at.write_volatile(value);
                }
                at.read_volatile()
            };
            // The test may have failed and ended.
            let _ = send.send(value.into());
        });
        let thread = u32::try_from(told.recv_timeout(LIMIT).unwrap()).unwrap();
        Toucher { told, thread }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for start in [Some(self.guest), self.alias].into_iter().flatten() {
            // SAFETY: this is our mapping. Every thread that touches it holds an `Arc` of `self`.
            unsafe { munmap(std::ptr::with_exposed_provenance_mut(start), self.len) }.unwrap();
        }
    }
}

/// Runs a call that sleeps until its event is read.
pub(crate) fn in_thread<R: Send + 'static>(
    memory: &Arc<Memory>,
    call: impl FnOnce(&Memory) -> R + Send + 'static,
) -> thread::JoinHandle<R> {
    let memory = Arc::clone(memory);
    thread::spawn(move || call(&memory))
}

/// A thread that touches a page.
pub(crate) struct Toucher {
    told: Receiver<u64>,
    /// The thread's id.
    pub(crate) thread: u32,
}

impl Toucher {
    /// The value that it read. It must wake up in time.
    pub(crate) fn value(self) -> u8 {
        u8::try_from(
            self.told
                .recv_timeout(LIMIT)
                .expect("the toucher does not wake up"),
        )
        .unwrap()
    }

    /// Asserts that it sleeps.
    pub(crate) fn assert_asleep(&self) {
        assert_eq!(
            self.told.recv_timeout(QUIET),
            Err(RecvTimeoutError::Timeout),
            "the toucher does not sleep"
        );
    }
}

/// The next event within `limit`, if one comes.
fn event_within(uffd: &Userfaultfd, limit: Duration) -> Option<Event> {
    let wait = Wait {
        limit: Some(limit),
        ..Wait::default()
    };
    EventReader::new(1).next(uffd, wait).unwrap()
}

/// The next event. It must come in time.
pub(crate) fn next_event(uffd: &Userfaultfd) -> Event {
    event_within(uffd, LIMIT).expect("no event comes")
}

/// The next event, which must be a page fault.
pub(crate) fn next_fault(uffd: &Userfaultfd) -> PageFault {
    match next_event(uffd) {
        Event::PageFault(fault) => fault,
        other => panic!("not a page fault: {other:?}"),
    }
}

/// Asserts that no event comes.
pub(crate) fn assert_no_event(uffd: &Userfaultfd) {
    let event = event_within(uffd, QUIET);
    assert!(event.is_none(), "unexpected: {event:?}");
}
