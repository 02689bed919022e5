//! The VMM's own accesses to the memory of a machine, on both engines.

use crate::place::placing;
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{
    AccessError, At, Delivery, Engine, Fetch, GuestRam, Machine, MachineSpec, NewMachine,
    RamLayout, create,
};
use pageferry_testkit::{Random, Stop, skip, stress_time};
use pageferry_userfault::PageBitmap;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

const PAGE: usize = PAGE_SIZE as usize;
pub(crate) const PAGES: u64 = 64;

fn machine(engine: Engine) -> Option<NewMachine> {
    let spec = MachineSpec::new(1, PAGES * PAGE_SIZE);
    match create(engine, spec) {
        Err(why) if engine == Engine::Kvm => {
            skip("kvm", why);
            None
        }
        new => Some(new.unwrap()),
    }
}

/// Calls `test` with a new machine of each engine.
fn on_each_engine(test: impl Fn(NewMachine)) {
    for engine in [Engine::Soft, Engine::Kvm] {
        if let Some(new) = machine(engine) {
            test(new);
        }
    }
}

/// Calls `test` with a new machine of each engine, for each delivery of this host.
pub(crate) fn on_each_delivery(test: impl Fn(NewMachine, Delivery)) {
    on_each_engine(|new| {
        let engine = new.machine.kind().engine.parse().unwrap();
        for delivery in new.machine.deliveries() {
            println!("{engine}, delivery '{delivery}'");
            test(machine(engine).unwrap(), delivery);
        }
    });
}

pub(crate) fn bytes_of(page: u64) -> [u8; PAGE] {
    std::array::from_fn(|at| (page as usize * 31 + at * 7) as u8)
}

/// Brings pages. No vCPU runs, so no other thread does.
pub(crate) struct Bringer {
    machine: Arc<dyn Machine>,
    missing: Arc<PageBitmap>,
    pages: Vec<[u8; PAGE]>,
    /// Brings no page.
    waits: bool,
    asked: Mutex<Vec<(u64, u64)>>,
}

impl Bringer {
    /// Arms a machine, and makes the pages `gone` missing.
    pub(crate) fn armed(
        machine: &Arc<dyn Machine>,
        delivery: Delivery,
        gone: core::ops::Range<usize>,
    ) -> Self {
        let missing = Arc::new(PageBitmap::new(PAGES as usize));
        // The events are not needed: no vCPU runs.
        let events = machine.arm_userfault(Arc::clone(&missing), delivery.into());
        drop(events.unwrap());
        missing.set_range(gone);
        Self {
            machine: Arc::clone(machine),
            missing,
            pages: (0..PAGES).map(bytes_of).collect(),
            waits: false,
            asked: Mutex::default(),
        }
    }

    /// Brings these bytes.
    pub(crate) fn with_pages(self, pages: Vec<[u8; PAGE]>) -> Self {
        Self { pages, ..self }
    }

    /// Brings nothing.
    pub(crate) fn that_waits(self) -> Self {
        Self {
            waits: true,
            ..self
        }
    }

    pub(crate) fn was_asked(&self) -> bool {
        !self.asked.lock().unwrap().is_empty()
    }

    /// The source of the machine's pages, as long as `self` lives.
    pub(crate) fn attach(self) -> Arc<Self> {
        let source = Arc::new(self);
        let fetch: Weak<dyn Fetch> = Arc::downgrade(&(Arc::clone(&source) as Arc<dyn Fetch>));
        source.machine.ram().attach(fetch).unwrap();
        source
    }
}

impl Fetch for Bringer {
    fn fetch(
        &self,
        first: RamPage,
        pages: u64,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), AccessError> {
        self.asked.lock().unwrap().push((first.0, pages));
        for page in (first.0..first.0 + pages).map(RamPage) {
            while !stop() && self.waits {
                std::thread::yield_now();
            }
            if stop() {
                return Err(AccessError::Stopped(page));
            }
            if !self.missing.test(page) {
                continue;
            }
            if self.machine.receives_in_place() {
                placing(self.machine.ram()).write(page, &self.pages[page.index()]);
                self.machine.install(page, 1).unwrap();
            } else {
                let bytes = &self.pages[page.index()];
                self.machine.install_copy(page, bytes).unwrap();
            }
            self.missing.clear(page);
        }
        Ok(())
    }
}

#[test]
fn an_access_finds_a_pages_bytes_or_touches_nothing() {
    on_each_delivery(|new, delivery| {
        let ram = new.machine.ram();
        for page in 0..PAGES {
            ram.try_write(RamPage(page), &[0x5a; PAGE]).unwrap();
        }
        let source = Bringer::armed(&new.machine, delivery, 10..40);
        let mut bytes = [1; 3 * PAGE];
        let early = Err(AccessError::Receiving);
        assert_eq!(ram.try_read(RamPage(0), &mut bytes), early);
        assert_eq!(ram.try_write(RamPage(0), &bytes), early);
        assert_eq!(ram.read(RamPage(10), &mut bytes, &|| false), early);
        new.machine.begin_postcopy().unwrap();

        let missing = Err(AccessError::Missing(RamPage(10)));
        assert_eq!(ram.try_read((RamPage(9), 100), &mut bytes), missing);
        assert_eq!(ram.try_write((RamPage(9), 100), &bytes), missing);
        assert_eq!(
            ram.read(RamPage(9), &mut bytes, &|| false),
            missing,
            "nobody fetches pages"
        );
        assert_eq!(bytes, [1; 3 * PAGE]);
        let mut untouched = [0; PAGE];
        ram.try_read(RamPage(9), &mut untouched).unwrap();
        assert_eq!(untouched, [0x5a; PAGE]);

        let source = source.attach();
        let stopped = ram.write(RamPage(10), &bytes, &|| true);
        assert_eq!(stopped, Err(AccessError::Stopped(RamPage(10))));
        let mut all = vec![0; 40 * PAGE];
        ram.read(RamPage(5), &mut all, &|| false).unwrap();
        for (page, bytes) in (5..).zip(all.chunks(PAGE)) {
            if (10..40).contains(&page) {
                assert_eq!(bytes, bytes_of(page), "page {page}");
            } else {
                assert_eq!(bytes, [0x5a; PAGE], "page {page}");
            }
        }
        let asked = source.asked.lock().unwrap().clone();
        assert_eq!(asked, [(10, 3), (10, 16), (26, 16)]);
        source.machine.disarm_userfault().unwrap();
        ram.try_write(RamPage(10), &bytes).unwrap();
    });
}

#[test]
fn the_source_of_pages_lives_no_longer_than_its_owner() {
    on_each_delivery(|new, delivery| {
        let source = Bringer::armed(&new.machine, delivery, 10..11);
        let source = source.attach();
        new.machine.begin_postcopy().unwrap();
        drop(source);
        let ram = new.machine.ram();
        let read = ram.read(RamPage(10), &mut [0], &|| false);
        assert_eq!(read, Err(AccessError::Missing(RamPage(10))));
    });
}

/// Copies the pages that a harvest names.
fn harvest(machine: &dyn Machine, copy: &mut [[u8; PAGE]], rearm: bool) {
    let dirty = PageBitmap::new(PAGES as usize);
    let newly = machine.harvest_dirty(&dirty, rearm).unwrap();
    assert_eq!(newly, dirty.count());
    while let Some(page) = dirty.next_set(0) {
        dirty.clear(RamPage(page as u64));
        let at = RamPage(page as u64);
        machine.ram().try_read(at, &mut copy[page]).unwrap();
    }
}

#[test]
fn every_write_is_in_a_harvest() {
    on_each_engine(|new| {
        let (machine, ram) = (&*new.machine, new.machine.ram());
        machine.set_dirty_log(true).unwrap();
        let mut copy = vec![[0; PAGE]; PAGES as usize];
        let stop = Stop::new();
        let writes: u64 = std::thread::scope(|scope| {
            let _stop = stop.on_drop();
            let writers: Vec<_> = (1..=2)
                .map(|seed| {
                    scope.spawn(move || {
                        let mut random = Random::new(seed);
                        for written in 0.. {
                            let at = (RamPage(random.below(PAGES - 2)), random.below(PAGE_SIZE));
                            let bytes = vec![random.below(256) as u8; random.below(5000) as usize];
                            match ram.try_write(at, &bytes) {
                                Ok(()) => {}
                                Err(AccessError::Frozen) => return written,
                                Err(error) => panic!("{error}"),
                            }
                        }
                        unreachable!("a write is refused at last")
                    })
                })
                .collect();
            let until = Instant::now() + stress_time(Duration::from_millis(500));
            while Instant::now() < until {
                harvest(machine, &mut copy, true);
            }
            // Writes go on until memory is frozen. The last harvest has all of them.
            let _frozen = ram.freeze().unwrap();
            harvest(machine, &mut copy, false);
            for (page, copied) in copy.iter().enumerate() {
                let mut bytes = [0; PAGE];
                ram.try_read(RamPage(page as u64), &mut bytes).unwrap();
                assert!(bytes == *copied, "a write to page {page} is in no harvest");
            }
            writers.into_iter().map(|w| w.join().unwrap()).sum()
        });
        println!("{}: {writes} writes", machine.kind().engine);
        ram.try_write(RamPage(0), b"again").unwrap();
    });
}

/// Extents whose first or last bytes are parts of words.
pub(crate) const EXTENTS: [(usize, usize); 8] = [
    (2, 2),
    (4, 4),
    (2, 14),
    (6, 23),
    (12, 4),
    (8, 7),
    (4090, 10),
    (4094, 4110),
];

/// Whether each naturally aligned part of 2, 4 or 8 bytes in `extent` has the bytes of one write.
/// Each write writes one value to all bytes. `bytes` starts at an address that is a multiple of 8.
pub(crate) fn is_untorn((start, len): (usize, usize), bytes: &[u8]) -> bool {
    let inside = |part: usize, size| start <= part && part + size <= start + len;
    [2, 4, 8].into_iter().all(|size| {
        let parts = bytes.chunks_exact(size).zip((0..).step_by(size));
        parts.filter(|(_, at)| inside(*at, size)).all(|(part, _)| {
            let [first, rest @ ..] = part else {
                return true;
            };
            rest.iter().all(|byte| byte == first)
        })
    })
}

/// Calls `check` again and again while another thread calls `write` with 0 and 255 in turn.
pub(crate) fn beside(write: impl Fn(u8) + Sync, mut check: impl FnMut()) {
    let stop = Stop::new();
    std::thread::scope(|scope| {
        let _stop = stop.on_drop();
        scope.spawn(|| {
            while !stop.is_stopped() {
                [0, 0xff].into_iter().for_each(&write);
            }
        });
        let until = Instant::now() + Duration::from_millis(50);
        while Instant::now() < until {
            (0..100).for_each(|_| check());
        }
    });
}

#[test]
fn an_access_tears_no_aligned_part() {
    on_each_engine(|new| {
        let ram = new.machine.ram();
        for extent in EXTENTS {
            let (start, len) = extent;
            let (at, words) = (Gpa(start as u64), (start + len).next_multiple_of(8));
            let mut bytes = vec![0; words];
            // The words as one write leaves them, also if the other thread comes late. Accesses of
            // whole words tear nothing in any case.
            ram.try_write(Gpa(0), &bytes).unwrap();
            let write = |value| ram.try_write(at, &vec![value; len]).unwrap();
            beside(write, || {
                ram.try_read(Gpa(0), &mut bytes).unwrap();
                assert!(is_untorn(extent, &bytes), "torn write of {extent:?}");
            });
            bytes.fill(0);
            let write = |value| ram.try_write(Gpa(0), &vec![value; words]).unwrap();
            beside(write, || {
                ram.try_read(at, &mut bytes[start..start + len]).unwrap();
                assert!(is_untorn(extent, &bytes), "torn read of {extent:?}");
            });
        }
    });
}

/// The edges of memory that has a hole: the starts of the accesses under test.
fn edges(bytes: u64) -> [u64; 4] {
    [
        0,
        (3 << 30) - 5000,
        (4 << 30) - 5000,
        (1 << 30) + bytes - 5000,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Against a map of bytes by address. RAM has a hole from 3 GiB to 4 GiB.
    #[test]
    fn accesses_do_what_a_plain_memory_does(
        accesses in prop::collection::vec(
            (0..4_usize, 0..9000_u64, 0..9000_usize, any::<Option<u8>>(), any::<bool>()),
            1..40,
        ),
    ) {
        let layout = RamLayout::for_memory((3 << 30) + 16 * PAGE_SIZE).unwrap();
        let ram = GuestRam::new(layout.clone()).unwrap();
        let is_ram = |gpa: u64| layout.page_of(Gpa(gpa).gfn()).is_some();
        let mut model = BTreeMap::new();
        for (edge, behind, len, value, by_page) in accesses {
            let start = edges(layout.bytes())[edge] + behind;
            let range = start..start + len as u64;
            let gpa = Gpa(start);
            let at: At = match layout.page_of(gpa.gfn()) {
                // In RAM pages there is no hole, so only accesses that stay before it are the same.
                Some(page) if by_page && range.clone().all(is_ram) => (page, gpa.page_offset()).into(),
                _ => gpa.into(),
            };
            let is_inside = is_ram(start) && range.clone().all(is_ram);
            if let Some(value) = value {
                let done = ram.try_write(at, &vec![value; len]);
                prop_assert_eq!(done.is_ok(), is_inside, "{:?}", done);
                if is_inside {
                    model.extend(range.map(|gpa| (gpa, value)));
                }
            } else {
                let mut bytes = vec![0xee; len];
                let done = ram.try_read(at, &mut bytes);
                prop_assert_eq!(done.is_ok(), is_inside, "{:?}", done);
                for (gpa, byte) in range.zip(bytes) {
                    let expected = if is_inside { model.get(&gpa).copied().unwrap_or(0) } else { 0xee };
                    prop_assert_eq!(byte, expected, "at {:#x}", gpa);
                }
            }
        }
    }
}
