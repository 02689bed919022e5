//! Poison markers: a touch raises SIGBUS at once in the touching thread, and a page can replace a
//! marker.
#![expect(
    unsafe_code,
    reason = "installs a SIGBUS handler, which notices poisoned pages"
)]

use crate::support::{Memory, PAGE, assert_no_event, open};
use pageferry_addr::{Hva, PageSize};
use pageferry_userfault::uffd::{Features, RangeIoctls, RangeOp, RegisterMode, Userfaultfd, Wake};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const FEATURES: Features = Features::MINOR_SHMEM
    .union(Features::MISSING_SHMEM)
    .union(Features::POISON);

fn poisoned(uffd: &Userfaultfd, pages: u64) -> Arc<Memory> {
    let memory = Memory::shared(pages);
    let ioctls = memory.register(uffd, RegisterMode::MISSING | RegisterMode::MINOR);
    assert!(ioctls.contains(RangeIoctls::POISON));
    uffd.poison(memory.at(0), memory.len(), Wake::Now).unwrap();
    memory
}

#[test]
fn a_system_call_fails_on_a_marker_until_continue_goes_over_it() {
    let Some(uffd) = open(FEATURES) else { return };
    let memory = poisoned(&uffd, 4);
    assert_eq!(memory.get_by_syscall(1), Err(Errno::FAULT));
    memory.put(1, 0x77);
    assert_eq!(
        memory.get_by_syscall(1),
        Err(Errno::FAULT),
        "the marker outlives the page's arrival in the cache"
    );
    uffd.continue_range(memory.at(1), PAGE, Wake::Later)
        .unwrap();
    assert_eq!((memory.get_by_syscall(1), memory.get(1)), (Ok(0x77), 0x77));
    assert_eq!(
        memory.get_by_syscall(2),
        Err(Errno::FAULT),
        "its neighbour stays marked"
    );
    assert_no_event(&uffd);
}

#[test]
fn copy_goes_over_a_marker_too() {
    let Some(uffd) = open(FEATURES) else { return };
    let memory = poisoned(&uffd, 2);
    uffd.copy(memory.at(1), &[0x66; PAGE as usize], Wake::Later)
        .unwrap();
    assert_eq!(memory.get(1), 0x66);
}

#[test]
fn markers_go_neither_over_pages_nor_over_markers() {
    let Some(uffd) = open(FEATURES) else { return };
    let memory = Memory::shared(8);
    memory.register(&uffd, RegisterMode::MISSING | RegisterMode::MINOR);
    memory.put(2, 22);
    memory.put(6, 66); // in the page cache, yet not mapped: it can be marked
    uffd.continue_range(memory.at(2), PAGE, Wake::Later)
        .unwrap();
    let error = uffd
        .poison(memory.at(0), 8 * PAGE, Wake::Later)
        .unwrap_err();
    assert!(error.is_already_there());
    assert_eq!((error.op, error.done), (RangeOp::Poison, 2 * PAGE));
    let error = uffd.poison(memory.at(1), PAGE, Wake::Later).unwrap_err();
    assert!(error.is_already_there() && error.done == 0);
    let rest = || uffd.poison_unmapped(memory.at(0), 8 * PAGE, PageSize::Size4K, Wake::Later);
    assert_eq!(rest(), Ok(5 * PAGE));
    assert_eq!(rest(), Ok(0));
    assert_eq!(memory.get(2), 22);
    for page in [0, 1, 3, 4, 5, 6, 7] {
        assert_eq!(memory.get_by_syscall(page), Err(Errno::FAULT));
    }
}

#[test]
fn a_batch_of_continues_replaces_a_batch_of_markers() {
    let Some(uffd) = open(FEATURES) else { return };
    let memory = poisoned(&uffd, 600);
    for page in 0..600 {
        memory.put(page, page as u8);
    }
    uffd.continue_range(memory.at(0), memory.len(), Wake::Later)
        .unwrap();
    for page in 0..600 {
        assert_eq!(memory.get(page), page as u8);
    }
}

/// The state of the SIGBUS handler.
static SERVED: OnceLock<Userfaultfd> = OnceLock::new();
static SEEN_ADDRESS: AtomicU64 = AtomicU64::new(0);
static SEEN_THREAD: AtomicU32 = AtomicU32::new(0);

/// Installs the page over the marker, in the thread that touched it. It makes only system calls.
extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo_t, which for SIGBUS has an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr() as u64) };
    let page = Hva(address & !(PAGE - 1));
    let installed = SERVED
        .get()
        .is_some_and(|uffd| uffd.continue_range(page, PAGE, Wake::Later).is_ok());
    // A kernel without CONFIG_MEMORY_FAILURE sends ADRERR.
    if !matches!(code, libc::BUS_MCEERR_AR | libc::BUS_ADRERR) || !installed {
        // SAFETY: this ends the process. Otherwise it would repeat the access for ever.
        unsafe { libc::_exit(101) };
    }
    SEEN_ADDRESS.store(address, Ordering::Relaxed);
    SEEN_THREAD.store(
        rustix::thread::gettid()
            .as_raw_nonzero()
            .get()
            .cast_unsigned(),
        Ordering::Relaxed,
    );
}

#[test]
fn the_toucher_itself_installs_the_page_on_sigbus_and_goes_on() {
    let Some(uffd) = open(FEATURES) else { return };
    let uffd = SERVED.get_or_init(|| uffd);
    // SAFETY: all zeros is a valid sigaction. The handler is safe to run at any access to memory,
    // and SIGBUS has no other meaning in this program.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = (on_sigbus as extern "C" fn(_, _, _)) as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(
            libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()),
            0
        );
    }
    let memory = poisoned(uffd, 4);
    memory.put(3, 0x33);
    let toucher = memory.touch(3, None);
    let thread = toucher.thread;
    assert_eq!(toucher.value(), 0x33);
    assert_eq!(SEEN_ADDRESS.load(Ordering::Relaxed), memory.at(3).0);
    assert_eq!(SEEN_THREAD.load(Ordering::Relaxed), thread);
    assert_no_event(uffd);
}
