//! The double's guest: memory in memfds, and threads that stand for vCPUs.
//!
//! **Guarantee.** The contents of a page follow from the seed, its number and its version. Each
//! page has one writer, and its version is counted outside guest memory. So a check finds every
//! page that is old, lost or of another place.
#![expect(unsafe_code, reason = "maps memory, and touches it like a guest")]

use crate::Random;
use pageferry_addr::Hva;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

pub(super) const PAGE: u64 = 4096;
const WORDS: usize = 512;
/// The rest of a vCPU between two accesses: tests share the machine with others.
const REST: Duration = Duration::from_micros(50);

/// A region of RAM.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) slot: u32,
    pub(super) gpa: u64,
    pub(super) size: u64,
    pub(super) offset: u64,
    pub(super) fd: OwnedFd,
    base: Hva,
}

impl Region {
    /// Maps a part of a memfd, for the life of the process.
    pub(super) fn map(
        slot: u32,
        gpa: u64,
        size: u64,
        offset: u64,
        fd: OwnedFd,
    ) -> Result<Self, rustix::io::Errno> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an unused address.
        let base = unsafe {
            let null = std::ptr::null_mut();
            rustix::mm::mmap(null, size as usize, access, MapFlags::SHARED, &fd, offset)
        }?;
        Ok(Self {
            slot,
            gpa,
            size,
            offset,
            fd,
            base: Hva(base.expose_provenance() as u64),
        })
    }

    pub(super) fn base(&self) -> Hva {
        self.base
    }
}

/// A guest with its vCPUs.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) regions: Vec<Region>,
    pub(super) seed: u64,
    /// The writes of each page.
    pub(super) versions: Vec<AtomicU32>,
    /// Whether vCPUs go on.
    running: AtomicBool,
    alive: AtomicBool,
    /// One for each vCPU, which holds it while it is in the guest.
    inside: Vec<Mutex<()>>,
    pub(super) touches: AtomicU64,
    pub(super) wrong: AtomicU64,
    /// The first wrong page.
    pub(super) first_wrong: Mutex<String>,
}

impl Guest {
    pub(super) fn new(
        regions: Vec<Region>,
        seed: u64,
        versions: Vec<u32>,
        vcpus: usize,
    ) -> Arc<Self> {
        let guest = Arc::new(Self {
            regions,
            seed,
            versions: versions.into_iter().map(AtomicU32::new).collect(),
            running: AtomicBool::new(false),
            alive: AtomicBool::new(true),
            inside: (0..vcpus).map(|_| Mutex::default()).collect(),
            touches: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
            first_wrong: Mutex::default(),
        });
        for number in 0..vcpus {
            let guest = Arc::clone(&guest);
            std::thread::spawn(move || guest.vcpu(number as u64));
        }
        guest
    }

    pub(super) fn pages(&self) -> u64 {
        self.versions.len() as u64
    }

    pub(super) fn vcpus(&self) -> usize {
        self.inside.len()
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst)
    }

    pub(super) fn resume(&self) {
        self.running.store(true, Ordering::SeqCst);
    }

    /// Stops the vCPUs, and waits until each has left the guest.
    pub(super) fn pause(&self) {
        self.running.store(false, Ordering::SeqCst);
        for inside in &self.inside {
            drop(inside.lock().expect("no vCPU panics"));
        }
    }

    /// Ends the vCPUs.
    pub(super) fn end(&self) {
        self.alive.store(false, Ordering::SeqCst);
    }

    /// The region and the address of a page.
    fn find(&self, page: u64) -> Hva {
        let mut offset = page * PAGE;
        for region in &self.regions {
            if offset < region.size {
                return Hva(region.base.0 + offset);
            }
            offset -= region.size;
        }
        panic!("page {page} is not in the guest");
    }

    /// The page at an address of the mapping.
    pub(super) fn page_at(&self, at: Hva) -> Option<u64> {
        let mut first = 0;
        for region in &self.regions {
            if let Some(offset) = at.0.checked_sub(region.base.0).filter(|o| *o < region.size) {
                return Some(first + offset / PAGE);
            }
            first += region.size / PAGE;
        }
        None
    }

    /// The guest-physical address of a page, and the address of its mapping.
    pub(super) fn place(&self, page: u64) -> (u64, Hva) {
        let hva = self.find(page);
        let region = self.regions.iter().find(|r| {
            let offset = hva.0.checked_sub(r.base.0);
            offset.is_some_and(|offset| offset < r.size)
        });
        let region = region.expect("a page of the guest");
        (region.gpa + (hva.0 - region.base.0), hva)
    }

    /// The words of a page. Every access to them may sleep on a userfaultfd.
    fn words(&self, page: u64) -> &[AtomicU64; WORDS] {
        let start =
            std::ptr::with_exposed_provenance::<[AtomicU64; WORDS]>(self.find(page).0 as usize);
        // SAFETY: the page lies in a mapping that is never unmapped, and words are atomic.
        unsafe { &*start }
    }

    fn word(&self, page: u64, version: u32, index: usize) -> u64 {
        if version == 0 {
            return 0;
        }
        let first = Random::new(self.seed ^ page << 32 ^ u64::from(version)).next();
        first.wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// Enters the guest as the writer of a page.
    fn enter(&self, page: u64) -> MutexGuard<'_, ()> {
        let owner = page as usize % self.inside.len();
        self.inside[owner].lock().expect("no vCPU panics")
    }

    /// Checks a page, whose writer this thread is.
    fn check(&self, page: u64) {
        let version = self.versions[page as usize].load(Ordering::SeqCst);
        let words = self.words(page);
        let wrong = (0..WORDS).find(|index| {
            words[*index].load(Ordering::Relaxed) != self.word(page, version, *index)
        });
        self.touches.fetch_add(1, Ordering::Relaxed);
        if let Some(index) = wrong {
            self.wrong.fetch_add(1, Ordering::SeqCst);
            let found = words[index].load(Ordering::Relaxed);
            let mut first = self.first_wrong.lock().expect("no thread panics here");
            if first.is_empty() {
                let expected = self.word(page, version, index);
                *first = format!(
                    "page {page} of version {version}: word {index} is {found:#x}, expected \
                     {expected:#x}"
                );
            }
        }
    }

    fn write(&self, page: u64) {
        let version = self.versions[page as usize].load(Ordering::SeqCst) + 1;
        for (index, word) in self.words(page).iter().enumerate() {
            word.store(self.word(page, version, index), Ordering::Relaxed);
        }
        self.versions[page as usize].store(version, Ordering::SeqCst);
    }

    /// Checks every page.
    pub(super) fn verify(&self) {
        for page in 0..self.pages() {
            let _inside = self.enter(page);
            self.check(page);
        }
    }

    /// Checks one page, as the restore of a vCPU reads its clock.
    pub(super) fn touch(&self, page: u64) {
        let _inside = self.enter(page);
        self.check(page);
    }

    /// Writes half of the pages once. No vCPU has run.
    pub(super) fn fill(&self) {
        for page in (0..self.pages()).filter(|page| page % 4 < 2) {
            self.write(page);
        }
    }

    fn vcpu(&self, number: u64) {
        let mut random = Random::new(self.seed ^ number);
        let vcpus = self.inside.len() as u64;
        let own = (self.pages() - number).div_ceil(vcpus);
        while self.alive.load(Ordering::SeqCst) {
            std::thread::sleep(REST);
            if !self.is_running() {
                std::thread::sleep(REST * 20);
                continue;
            }
            let page = number + vcpus * random.below(own);
            let _inside = self.enter(page);
            // A pause may have begun.
            if self.is_running() {
                self.check(page);
                if random.below(2) == 0 {
                    self.write(page);
                }
            }
        }
    }
}
