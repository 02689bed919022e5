//! Translation by the guest's tables: one test for each rule of the privileged specification, and
//! for each way in which a translation ends. Section names are those of the chapter
//! "Supervisor-Level ISA".

use crate::support::paging::{
    A, As, D, FREE, G, Guest, Kind, MXR, Outcome, R, RW, SUM, Scheme, U, V, W, X, pte,
};
use crate::support::vm::{PAGE, asm::*};
use pageferry_addr::{Gpa, Hva, RamPage};
use pageferry_hypervisor::hart::{Access, Mode};
use pageferry_hypervisor::{Exit, RemoteFence, SlotFlags, UserfaultBits};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

const SCHEMES: [Scheme; 2] = [Scheme::Sv39, Scheme::Sv48];
const KINDS: [Kind; 3] = [Kind::Load, Kind::Store, Kind::Fetch];
/// In another 512 GiB, 1 GiB, 2 MiB and 4 KiB than 0, and valid in Sv39.
const AT: u64 = 0x12_3456_7000;

const fn page_fault(kind: Kind) -> u64 {
    match kind {
        Kind::Fetch => 12,
        Kind::Load => 13,
        Kind::Store => 15,
    }
}

const fn access_fault(kind: Kind) -> u64 {
    match kind {
        Kind::Fetch => 1,
        Kind::Load => 5,
        Kind::Store => 7,
    }
}

/// A guest with one set of tables, and a page of data that begins with code which returns.
struct Test {
    guest: Guest,
    scheme: Scheme,
    root: u64,
    data: u64,
}

impl Test {
    fn new(scheme: Scheme) -> Self {
        let mut guest = Guest::new(64);
        let root = guest.root(scheme);
        let data = guest.page();
        guest.ram.code(data * PAGE, &[jalr(X0, RA, 0)]);
        Self {
            guest,
            scheme,
            root,
            data,
        }
    }

    fn satp(&self, asid: u64) -> u64 {
        self.scheme.satp(asid, self.root)
    }

    fn view(&self, mode: Mode, status: u64) -> As {
        As {
            satp: self.satp(0),
            mode,
            status,
        }
    }

    fn supervisor(&self) -> As {
        self.view(Mode::Supervisor, 0)
    }

    fn map(&mut self, address: u64, entry: u64) {
        self.guest.map(self.scheme, self.root, address, 0, entry);
    }

    fn fence(&mut self, address: Option<u64>, asid: Option<u64>) {
        self.guest.fence(self.satp(0), address, asid);
    }

    /// Whether the access happens. If not, it must be a page fault at the address.
    fn allowed(&mut self, view: As, kind: Kind, address: u64) -> bool {
        match self.guest.access(view, kind, address, 0x8067) {
            Outcome::Done(_) => true,
            outcome => {
                assert_eq!(outcome, Outcome::Trap(page_fault(kind), address));
                false
            }
        }
    }
}

fn both(test: impl Fn(Test)) {
    SCHEMES
        .into_iter()
        .for_each(|scheme| test(Test::new(scheme)));
}

/// "Virtual Address Translation Process", steps 5 to 8, and "Supervisor Memory Privilege in sstatus
/// Register": R, W, X, U, A and D in each view.
#[test]
fn the_bits_of_a_leaf_allow_what_they_say() {
    both(|mut test| {
        for bits in 0..128_u64 {
            let [r, w, x, u, a, d] = [R, W, X, U, A, D].map(|bit| bits << 1 & bit != 0);
            // W without R is reserved, and neither R nor X is a pointer.
            let leaf = r || x && !w;
            let entry = if r || w || x {
                pte(test.data, V | bits << 1)
            } else {
                pte(0, 0)
            };
            test.map(AT, entry);
            test.fence(None, None);
            for mode in [Mode::User, Mode::Supervisor] {
                for status in [0, SUM, MXR, SUM | MXR] {
                    for kind in KINDS {
                        let mode_ok = match (mode, kind) {
                            (Mode::User, _) => u,
                            (Mode::Supervisor, Kind::Fetch) => !u,
                            (Mode::Supervisor, _) => !u || status & SUM != 0,
                        };
                        let kind_ok = match kind {
                            Kind::Load => r || x && status & MXR != 0,
                            Kind::Store => w && d,
                            Kind::Fetch => x,
                        };
                        let expected = leaf && mode_ok && kind_ok && a;
                        let view = test.view(mode, status);
                        let allowed = test.allowed(view, kind, AT);
                        assert_eq!(
                            allowed, expected,
                            "{:?} {bits:#x} {mode:?} {status:#x} {kind:?}",
                            test.scheme
                        );
                    }
                }
            }
        }
    });
}

/// "Svade": the hypervisor never writes a guest's tables.
#[test]
fn accesses_do_not_set_a_and_d() {
    both(|mut test| {
        let entry = pte(test.data, V | R | W | A);
        test.map(AT, entry);
        let view = test.supervisor();
        assert!(test.allowed(view, Kind::Load, AT));
        assert!(!test.allowed(view, Kind::Store, AT), "D is clear");
        assert_eq!(test.guest.entry(test.scheme, test.root, AT, 0), entry);
        // The guest sets D, and need not fence: the page was not writable.
        test.map(AT, entry | D);
        assert!(test.allowed(view, Kind::Store, AT));
        test.map(AT, entry & !A);
        test.fence(None, None);
        assert!(!test.allowed(view, Kind::Load, AT), "A is clear");
        assert_eq!(test.guest.entry(test.scheme, test.root, AT, 0), entry & !A);
    });
}

/// Step 3: V = 0, W without R, reserved bits, and the reserved bits of pointers.
#[test]
fn entries_that_are_not_valid_are_page_faults() {
    both(|mut test| {
        let view = test.supervisor();
        let good = pte(test.data, RW | X);
        test.map(AT, good);
        assert!(test.allowed(view, Kind::Load, AT));
        for bad in (54..64)
            .map(|bit| good | 1 << bit)
            .chain([good & !V, good & !R])
        {
            test.map(AT, bad);
            test.fence(None, None);
            for kind in KINDS {
                assert!(!test.allowed(view, kind, AT), "{bad:#x}");
            }
        }
        test.map(AT, good);
        for level in 1..test.scheme.levels() {
            let pointer = test.guest.entry(test.scheme, test.root, AT, level);
            let bits = [U, A, D].into_iter().chain((54..64).map(|bit| 1 << bit));
            for bit in bits {
                test.guest
                    .map(test.scheme, test.root, AT, level, pointer | bit);
                test.fence(None, None);
                assert!(!test.allowed(view, Kind::Load, AT), "{bit:#x} at {level}");
            }
            test.guest.map(test.scheme, test.root, AT, level, pointer);
        }
        test.fence(None, None);
        assert!(test.allowed(view, Kind::Load, AT));
        // A pointer at the last level. RSW bits are the guest's.
        test.map(AT, pte(test.data, V));
        test.fence(None, None);
        assert!(!test.allowed(view, Kind::Load, AT));
        test.map(AT, good | 3 << 8);
        assert!(test.allowed(view, Kind::Load, AT));
    });
}

/// "Sv39" and "Sv48": the upper bits of an address equal the highest translated bit.
#[test]
fn addresses_that_are_not_canonical_are_page_faults() {
    both(|mut test| {
        let bits = 12 + 9 * test.scheme.levels();
        let high = !0 << (bits - 1) | 0x4567_8000;
        for at in [AT, high] {
            let entry = pte(test.data, RW | X);
            test.map(at, entry);
            for view in [test.supervisor(), test.view(Mode::User, 0)] {
                if view.mode == Mode::User {
                    test.map(at, entry | U);
                    test.fence(None, None);
                }
                for kind in KINDS {
                    assert!(test.allowed(view, kind, at));
                    for bit in bits..64 {
                        assert!(!test.allowed(view, kind, at ^ 1 << bit), "bit {bit}");
                    }
                }
            }
        }
    });
}

/// Step 6: a superpage's frame is aligned, and step 10: the address's low bits choose the page.
#[test]
fn superpages_map_their_pages_and_must_be_aligned() {
    both(|mut test| {
        let view = test.supervisor();
        for level in 1..test.scheme.levels() {
            let size = PAGE << (9 * level);
            let start = (AT + size) & !(size - 1);
            let entry = pte(0, RW);
            test.guest.map(test.scheme, test.root, start, level, entry);
            for page in FREE..64 {
                test.guest.ram.set(page * PAGE + 0x700, page);
                let outcome = test.guest.load(view, start + page * PAGE + 0x700);
                assert_eq!(outcome, Outcome::Done(page), "level {level}");
            }
            // Any bit of the frame below the superpage's size.
            for bit in 0..9 * level {
                let bad = pte(1 << bit, RW);
                test.guest.map(test.scheme, test.root, start, level, bad);
                test.fence(None, None);
                assert!(!test.allowed(view, Kind::Load, start), "bit {bit}");
            }
            test.guest.map(test.scheme, test.root, start, level, 0);
        }
    });
}

/// Steps 2 and 10: a table or a page where there is no memory. `stval` is the virtual address.
#[test]
fn memory_that_is_not_there_is_an_access_fault_or_mmio() {
    const DEVICE: u64 = 0x1000_0000;
    both(|mut test| {
        let view = test.supervisor();
        for level in 1..test.scheme.levels() {
            test.map(AT, pte(test.data, RW | X));
            let pointer = test.guest.entry(test.scheme, test.root, AT, level);
            let elsewhere = pte(DEVICE / PAGE, V);
            test.guest.map(test.scheme, test.root, AT, level, elsewhere);
            test.fence(None, None);
            for kind in KINDS {
                let outcome = test.guest.access(view, kind, AT, 0);
                assert_eq!(outcome, Outcome::Trap(access_fault(kind), AT));
            }
            test.guest.map(test.scheme, test.root, AT, level, pointer);
        }
        // A device's page: exits carry the guest-physical address, faults the virtual one.
        test.map(AT, pte(DEVICE / PAGE, RW | X));
        test.fence(None, None);
        let outcome = test.guest.access(view, Kind::Store, AT + 0x10, 7);
        let (gpa, size) = (Gpa(DEVICE + 0x10), 8);
        assert_eq!(
            outcome,
            Outcome::Exit(Exit::MmioWrite {
                gpa,
                size,
                value: 7
            })
        );
        let outcome = test.guest.load(view, AT + 0x10);
        assert_eq!(outcome, Outcome::Exit(Exit::MmioRead { gpa, size }));
        test.guest.vcpu.complete_mmio_read(99);
        assert_eq!(test.guest.resume(), Outcome::Done(99));
        let outcome = test.guest.access(view, Kind::Fetch, AT + 0x10, 0);
        assert_eq!(outcome, Outcome::Trap(1, AT + 0x10));
        let outcome = test.guest.load(view, AT + 0x11);
        assert_eq!(outcome, Outcome::Trap(5, AT + 0x11), "misaligned");
        let outcome = test.guest.access(view, Kind::Store, AT + 0x11, 0);
        assert_eq!(outcome, Outcome::Trap(7, AT + 0x11), "misaligned");
    });
}

/// A misaligned access over a page edge. `stval` is the part that faults, as the specification
/// says of the register: "the portion of the access that caused the fault".
#[test]
fn both_pages_of_a_misaligned_access_are_translated() {
    both(|mut test| {
        let view = test.supervisor();
        let second = test.guest.page();
        test.map(AT, pte(second, RW));
        let edge = AT + PAGE;
        for kind in [Kind::Load, Kind::Store] {
            let outcome = test.guest.access(view, kind, edge - 3, 0);
            assert_eq!(outcome, Outcome::Trap(page_fault(kind), edge));
        }
        // Contiguous only as virtual pages.
        test.map(edge, pte(test.data, RW));
        let value = 0x1122_3344_5566_7788;
        let outcome = test.guest.access(view, Kind::Store, edge - 3, value);
        assert_eq!(outcome, Outcome::Done(value));
        assert_eq!(test.guest.load(view, edge - 3), Outcome::Done(value));
        assert_eq!(test.guest.ram.get((second + 1) * PAGE - 8) >> 40, 0x66_7788);
        assert_eq!(
            test.guest.ram.get(test.data * PAGE) << 24 >> 24,
            0x11_2233_4455
        );
    });
}

/// "satp": a change of mode takes effect at once. A reserved mode changes nothing.
#[test]
fn modes_of_satp_take_effect_at_once() {
    let mut test = Test::new(Scheme::Sv39);
    let (sv39, sv48) = (test.satp(3), Scheme::Sv48);
    test.map(AT, pte(test.data, RW));
    test.guest.ram.set(test.data * PAGE + 8, 39);
    let root = test.guest.root(sv48);
    let other = test.guest.page();
    test.guest.map(sv48, root, AT, 0, pte(other, RW));
    test.guest.ram.set(other * PAGE + 8, 48);
    test.guest.ram.set(3 * PAGE + 0x800, 1234);
    for _ in 0..3 {
        let as_of = |satp| As {
            satp,
            mode: Mode::Supervisor,
            status: 0,
        };
        let outcome = test.guest.load(as_of(sv39), AT + 8);
        assert_eq!(outcome, Outcome::Done(39));
        // The same ASID, and no fence.
        let outcome = test.guest.load(as_of(sv48.satp(3, root)), AT + 8);
        assert_eq!(outcome, Outcome::Done(48));
        let outcome = test.guest.load(as_of(sv39 | 10 << 60), AT + 8);
        assert_eq!(outcome, Outcome::Done(48), "Sv57 is refused");
        let outcome = test.guest.load(as_of(0), 3 * PAGE + 0x800);
        assert_eq!(outcome, Outcome::Done(1234));
    }
}

/// A page that is missing: the data, or any table on the way. The access is repeated.
#[test]
fn missing_pages_of_data_and_tables_leave_the_guest() {
    both(|mut test| {
        test.map(AT, pte(test.data, RW | X));
        let mut pages = vec![test.data];
        for level in 1..test.scheme.levels() {
            pages.push(test.guest.entry(test.scheme, test.root, AT, level) >> 10);
        }
        let bitmap = Arc::new(PageBitmap::new(64));
        let mut region = test.guest.ram.region(0, 0, 0, 64);
        for page in pages {
            for (kind, access) in [
                (Kind::Load, Access::Load),
                (Kind::Store, Access::Store),
                (Kind::Fetch, Access::Fetch),
            ] {
                let view = test.supervisor();
                region.flags = SlotFlags::EMPTY;
                test.guest
                    .vm
                    .set_user_memory_region2(region.clone())
                    .unwrap();
                bitmap.set(RamPage(page));
                region.flags = SlotFlags::USERFAULT;
                region.userfault = Some(UserfaultBits {
                    bitmap: Arc::clone(&bitmap),
                    first: RamPage(0),
                });
                test.guest
                    .vm
                    .set_user_memory_region2(region.clone())
                    .unwrap();
                let mut outcome = test.guest.access(view, kind, AT, 0x8067);
                for _ in 0..2 {
                    let fault = Exit::MemoryFault {
                        gpa: Gpa(page * PAGE),
                        size: PAGE,
                        access,
                        userfault: true,
                        write_tracked: false,
                    };
                    assert_eq!(outcome, Outcome::Exit(fault));
                    outcome = test.guest.resume();
                }
                bitmap.clear(RamPage(page));
                assert!(matches!(test.guest.resume(), Outcome::Done(_)));
            }
        }
    });
}

/// The hypervisor takes a table's page back, moves it, or tracks stores to it.
#[test]
fn pages_of_tables_end_like_other_translations() {
    both(|mut test| {
        let view = test.supervisor();
        test.map(AT, pte(test.data, RW));
        test.map(AT + PAGE, pte(test.data, RW));
        assert!(test.allowed(view, Kind::Load, AT));
        let table = test.guest.entry(test.scheme, test.root, AT, 1) >> 10;
        // The table's page is cached. Other memory replaces it while the guest is outside.
        let hva = test.guest.ram.hva().0 + table * PAGE;
        let index = (AT >> 12 & 511) + 1;
        let (zapped, ()) = test
            .guest
            .vm
            .invalidate_hva_around(Hva(hva)..Hva(hva + PAGE), || {
                test.guest.set(table, index, 0);
            });
        assert_eq!(zapped, 1);
        assert!(!test.allowed(view, Kind::Load, AT + PAGE));
        // A write-tracked table serves walks, and the guest's store to it leaves.
        assert_eq!(test.guest.vm.track_writes(0, table..table + 1), Ok(1));
        assert!(test.allowed(view, Kind::Load, AT));
        test.map(AT + PAGE, pte(table, RW));
        let outcome = test.guest.access(view, Kind::Store, AT + PAGE + 8, 0);
        assert!(matches!(
            outcome,
            Outcome::Exit(Exit::MemoryFault {
                write_tracked: true,
                ..
            })
        ));
        // A dirty log sees no store of the hypervisor to a table.
        assert_eq!(test.guest.vm.untrack_writes(0, table..table + 1), Ok(1));
    });
}

/// A dirty log on: walks dirty nothing.
#[test]
fn walks_do_not_dirty_tables() {
    both(|mut test| {
        test.map(AT, pte(test.data, RW));
        let mut region = test.guest.ram.region(0, 0, 0, 64);
        region.flags = SlotFlags::LOG_DIRTY_PAGES;
        test.guest.vm.set_user_memory_region2(region).unwrap();
        let view = test.supervisor();
        assert!(test.allowed(view, Kind::Load, AT));
        assert!(test.allowed(view, Kind::Store, AT));
        let mut log = [0];
        test.guest.vm.get_dirty_log(0, &mut log).unwrap();
        assert_eq!(log, [1 << test.data], "only the stored page");
        // The TLB knows that the page is writable, until the log is read.
        assert!(test.allowed(view, Kind::Store, AT));
        test.guest.vm.get_dirty_log(0, &mut log).unwrap();
        assert_eq!(log, [1 << test.data]);
    });
}

/// "Supervisor Memory-Management Fence Instruction": each form, for own and global pages, and for
/// superpages of both. A fence of one address is exact for small pages. One of any address in a
/// superpage is for all of it.
#[test]
fn fences_cover_what_they_say() {
    for scheme in SCHEMES {
        for level in 0..scheme.levels() {
            let size = PAGE << (9 * level);
            // The distance of the fenced address from the accessed one, if the fence has one.
            let distances = [
                None,
                Some(0),
                Some(5 * PAGE),
                Some(size / 2),
                Some(size.saturating_sub(8 * PAGE)),
                Some(size << 9),
            ];
            for distance in distances {
                for (asid, global) in [None, Some(3), Some(4)]
                    .into_iter()
                    .flat_map(|asid| [(asid, 0), (asid, G)])
                {
                    check_fence(scheme, level, distance, asid, global);
                }
            }
        }
    }
}

fn check_fence(scheme: Scheme, level: u32, distance: Option<u64>, asid: Option<u64>, global: u64) {
    let mut guest = Guest::new(32);
    let root = guest.root(scheme);
    let size = PAGE << (9 * level);
    let start = AT & !(size - 1);
    guest.map(scheme, root, start, level, pte(0, RW | global));
    let view = As {
        satp: scheme.satp(3, root),
        mode: Mode::Supervisor,
        status: 0,
    };
    // Not the first page of a superpage.
    let at = start + if level == 0 { 0 } else { 7 * PAGE };
    assert!(matches!(guest.load(view, at), Outcome::Done(_)));
    guest.map(scheme, root, start, level, 0);
    assert!(matches!(guest.load(view, at), Outcome::Done(_)));
    guest.fence(view.satp, distance.map(|distance| at + distance), asid);
    let gone = !matches!(guest.load(view, at), Outcome::Done(_));
    let covers_address = distance.is_none_or(|distance| distance < size);
    let covers_space = asid.is_none_or(|asid| asid == 3 && global == 0);
    let covered = covers_address && covers_space;
    let name = format!("{scheme:?} {level} {distance:x?} {asid:?} {global:#x}");
    assert!(gone || !covered, "{name}");
    // It may forget a global page together with the address space.
    assert!(level > 0 || global != 0 || gone == covered, "{name}");
}

/// Processes switch by ASID: nothing is forgotten on the way, and nothing is seen of the other.
#[test]
fn address_spaces_keep_their_translations_apart() {
    both(|mut test| {
        let views: Vec<As> = (0..40)
            .map(|asid| {
                let (root, page) = (test.guest.root(test.scheme), 40);
                test.guest
                    .map(test.scheme, root, AT, 0, pte(page + asid % 16, RW | U));
                As {
                    satp: test.scheme.satp(asid, root),
                    mode: if asid % 2 == 0 {
                        Mode::User
                    } else {
                        Mode::Supervisor
                    },
                    status: SUM,
                }
            })
            .take(4)
            .collect();
        for page in 40..56 {
            test.guest.ram.set(page * PAGE, page);
        }
        for _ in 0..3 {
            for (asid, view) in views.iter().enumerate() {
                assert_eq!(test.guest.load(*view, AT), Outcome::Done(40 + asid as u64));
            }
        }
        // The tables change. Without a fence, every address space still has its page.
        for view in &views {
            let root = view.satp & 0xfff_ffff_ffff;
            test.guest.map(test.scheme, root, AT, 0, 0);
        }
        for (asid, view) in views.iter().enumerate() {
            assert_eq!(test.guest.load(*view, AT), Outcome::Done(40 + asid as u64));
        }
    });
}

/// Another hart's fence, for pages and superpages of each size.
#[test]
fn a_remote_fence_ends_translations_and_code() {
    both(|mut test| {
        let view = test.supervisor();
        for level in 0..test.scheme.levels() {
            let start = AT & !((PAGE << (9 * level)) - 1);
            // A superpage maps all of memory: the data is at its place in it.
            let (frame, at) = match level {
                0 => (test.data, start),
                _ => (0, start + test.data * PAGE),
            };
            let (scheme, root) = (test.scheme, test.root);
            let set = |test: &mut Test, entry| test.guest.map(scheme, root, start, level, entry);
            let before = match level {
                0 => 0,
                _ => test.guest.entry(scheme, root, start, level),
            };
            set(&mut test, pte(frame, RW | X));
            test.fence(None, None);
            assert!(test.allowed(view, Kind::Load, at), "level {level}");
            assert!(test.allowed(view, Kind::Fetch, at));
            set(&mut test, 0);
            test.guest.vm.fence(RemoteFence::Translations, |id| id != 0);
            assert!(test.allowed(view, Kind::Load, at), "another vCPU's fence");
            assert!(test.allowed(view, Kind::Fetch, at));
            test.guest.vm.fence(RemoteFence::Translations, |id| id == 0);
            assert!(!test.allowed(view, Kind::Load, at), "level {level}");
            assert!(!test.allowed(view, Kind::Fetch, at));
            set(&mut test, before);
        }
    });
}

/// Code is kept by guest-physical page: two address spaces execute the same decoded page, and
/// FENCE.I keeps what did not change.
#[test]
fn code_is_shared_and_a_device_changes_it() {
    both(|mut test| {
        let mut views = vec![test.supervisor()];
        test.map(AT, pte(test.data, V | R | X | A));
        for asid in 1..5 {
            let root = test.guest.root(test.scheme);
            let at = AT + asid * PAGE;
            test.guest
                .map(test.scheme, root, at, 0, pte(test.data, V | R | X | A));
            views.push(As {
                satp: test.scheme.satp(asid, root),
                ..views[0]
            });
        }
        let satp = test.satp(0);
        let mut pages = None;
        for asid in (0..5).chain(0..5) {
            let (view, at) = (views[asid], AT + asid as u64 * PAGE);
            let outcome = test.guest.access(view, Kind::Fetch, at, 1);
            assert_eq!(outcome, Outcome::Done(1));
            let now = test.guest.vcpu.hart().code_pages();
            assert_eq!(*pages.get_or_insert(now), now);
        }
        // A device stores code. The guest sees it after its FENCE.I.
        let code = [addi(A0, A0, 5), jalr(X0, RA, 0)];
        test.guest.ram.code(test.data * PAGE, &code);
        let outcome = test.guest.access(views[0], Kind::Fetch, AT, 1);
        assert_eq!(outcome, Outcome::Done(1), "not yet");
        test.guest.fence_code(satp);
        for (asid, view) in views.iter().enumerate() {
            let at = AT + asid as u64 * PAGE;
            let outcome = test.guest.access(*view, Kind::Fetch, at, 1);
            assert_eq!(outcome, Outcome::Done(6));
        }
        assert_eq!(Some(test.guest.vcpu.hart().code_pages()), pages);
        let code = [addi(A0, A0, 7), jalr(X0, RA, 0)];
        test.guest.ram.code(test.data * PAGE, &code);
        test.guest.vm.fence(RemoteFence::Code, |_| true);
        let outcome = test.guest.access(views[3], Kind::Fetch, AT + 3 * PAGE, 1);
        assert_eq!(outcome, Outcome::Done(8));
    });
}

/// Code that needs more pages than are kept.
#[test]
fn decoded_code_is_bounded() {
    const PAGES: u64 = 1500;
    let mut guest = Guest::new(PAGES as usize);
    for page in FREE..PAGES {
        let code = [addi(A0, X0, (page % 2000) as i32), jalr(X0, RA, 0)];
        guest.ram.code(page * PAGE, &code);
    }
    let view = As {
        satp: 0,
        mode: Mode::Supervisor,
        status: 0,
    };
    for page in (FREE..PAGES).chain((FREE..PAGES).rev()) {
        let outcome = guest.access(view, Kind::Fetch, page * PAGE, 0);
        assert_eq!(outcome, Outcome::Done(page % 2000));
        assert!(guest.vcpu.hart().code_pages() <= 1024);
    }
    assert_eq!(guest.vcpu.hart().code_pages(), 1024);
}

/// An LR in one address space, and an SC at the same address in another one.
#[test]
fn an_sc_to_other_memory_fails() {
    both(|mut test| {
        let code = test.guest.page();
        let lr_sc = [
            atomic(LR, D_WIDTH, A0, A1, 0),
            jalr(X0, RA, 0),
            atomic(SC, D_WIDTH, A0, A1, A2),
            jalr(X0, RA, 0),
        ];
        test.guest.ram.code(code * PAGE, &lr_sc);
        let other = test.guest.root(test.scheme);
        let data = test.guest.page();
        test.map(AT, pte(test.data, RW));
        test.guest.map(test.scheme, other, AT, 0, pte(data, RW));
        let entry = pte(code, V | X | A);
        for root in [test.root, other] {
            test.guest.map(test.scheme, root, AT + PAGE, 0, entry);
        }
        let first = test.supervisor();
        let second = As {
            satp: test.scheme.satp(1, other),
            ..first
        };
        for (sc, failed) in [(first, 0), (second, 1)] {
            test.guest.call(first, AT + PAGE, AT);
            let outcome = test.guest.call(sc, AT + PAGE + 8, AT);
            assert_eq!(outcome, Outcome::Done(failed));
        }
    });
}

const D_WIDTH: u32 = crate::support::vm::asm::D;
