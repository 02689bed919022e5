//! Demand paging of a memfd by userfaultfd: one thread reads pages, another serves its faults.
//!
//! `cargo run -p pageferry-userfault --example memfd`
//!
//! The memfd is mapped twice. The *guest* mapping is registered for missing and minor faults: a
//! thread that touches a missing page there sleeps. The *alias* mapping never faults into
//! userfaultfd: the serving thread writes a page's bytes there, then maps the page for the guest by
//! `UFFDIO_CONTINUE`. [`PageStates`] records which pages are missing, so that each page is served
//! once.
#![expect(unsafe_code, reason = "maps memory, and registers it with userfaultfd")]

use pageferry_addr::{Hva, PAGE_SIZE, RamPage};
use pageferry_userfault::uffd::{
    Event, EventReader, Features, RegisterMode, Userfaultfd, Wait, Wake,
};
use pageferry_userfault::{Claim, PageBitmap, PageStates};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const PAGES: u64 = 256;
const BYTES: usize = (PAGES * PAGE_SIZE) as usize;
/// The limit after which the example fails.
const LIMIT: Duration = Duration::from_secs(60);

type Failure = Box<dyn std::error::Error>;

/// A shared mapping of the whole memfd, for the rest of the process's life.
#[derive(Clone, Copy)]
struct Mapping(u64);

impl Mapping {
    fn new(file: &OwnedFd) -> rustix::io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: the kernel chooses an unused address. Nothing existing is replaced.
        let start = unsafe { mmap(anywhere, BYTES, access, MapFlags::SHARED, file, 0)? };
        Ok(Self(start.expose_provenance() as u64))
    }

    /// The first word of a page.
    fn word(self, page: u64) -> *mut u64 {
        assert!(page < PAGES);
        std::ptr::with_exposed_provenance_mut((self.0 + page * PAGE_SIZE) as usize)
    }
}

/// The number that the first word of a page must hold.
const fn contents(page: u64) -> u64 {
    page * page + 1
}

/// Serves faults until `done`. Returns the number of pages that it brought.
fn serve(
    uffd: &Userfaultfd,
    states: &PageStates,
    guest: Mapping,
    alias: Mapping,
    done: impl Fn() -> bool,
) -> Result<u64, Failure> {
    let mut reader = EventReader::new(64);
    let wait = Wait {
        spin: Duration::from_micros(50),
        limit: Some(Duration::from_millis(5)),
        stop: None,
    };
    let end = Instant::now() + LIMIT;
    let mut brought = 0;
    while !done() {
        if Instant::now() > end {
            return Err("the reader did not finish in time".into());
        }
        while let Some(event) = reader.next(uffd, wait)? {
            let Event::PageFault(fault) = event else {
                return Err(format!("unexpected {event:?}: no such feature was requested").into());
            };
            let page = (fault.address.0 - guest.0) / PAGE_SIZE;
            if states.claim(RamPage(page)) == Claim::Mine {
                // SAFETY: the word is inside the alias mapping. No thread reads the page before it
                // is mapped.
                unsafe { alias.word(page).write_volatile(contents(page)) };
                let hva = Hva(guest.0 + page * PAGE_SIZE);
                uffd.continue_range(hva, PAGE_SIZE, Wake::Now)?;
                let arrival = states.arrive(RamPage(page), 1);
                assert_eq!((arrival.newly, arrival.requested), (1, 1));
                brought += 1;
            }
        }
    }
    Ok(brought)
}

fn main() -> Result<(), Failure> {
    let uffd = match Userfaultfd::open(Features::MINOR_SHMEM | Features::MISSING_SHMEM) {
        Ok(uffd) => uffd,
        Err(why) => {
            println!("SKIPPED: userfaultfd is not usable here: {why}");
            return Ok(());
        }
    };
    let file = memfd_create("pageferry-example", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, BYTES as u64)?;
    let (guest, alias) = (Mapping::new(&file)?, Mapping::new(&file)?);
    let missing = Arc::new(PageBitmap::new(PAGES as usize));
    missing.set_range(0..PAGES as usize);
    let states = PageStates::try_new(missing)?;
    let mode = RegisterMode::MISSING | RegisterMode::MINOR;
    // SAFETY: (1) Only the reading thread touches the guest mapping, and the thread that resolves
    // its faults uses the alias. (2) No reference into the mapping exists. (3) It is never
    // unmapped.
    unsafe { uffd.register(Hva(guest.0), BYTES as u64, mode)? };

    // Read every second page twice: the first touch faults, the second finds the page.
    let reader = thread::spawn(move || {
        let touched = (0..PAGES).step_by(2);
        // SAFETY: the word is inside the guest mapping, and this thread may sleep there.
        let read = |page| unsafe { guest.word(page).read_volatile() };
        touched.clone().chain(touched).map(read).sum::<u64>()
    });
    // Dropping `uffd` on an error wakes the reader.
    let brought = serve(&uffd, &states, guest, alias, || reader.is_finished())?;
    let sum = reader.join().map_err(|_| "the reader panicked")?;

    let expected: u64 = (0..PAGES).step_by(2).map(|page| 2 * contents(page)).sum();
    assert_eq!(sum, expected, "the reader found wrong bytes");
    assert_eq!(brought, PAGES / 2, "each touched page is brought once");
    assert_eq!(states.missing().count() as u64, PAGES - brought);
    println!("{brought} of {PAGES} pages served, and the reader found the right bytes");
    Ok(())
}
