//! Changes of a hart's view: of the mode of `satp`, the address space, the privilege mode and the
//! rights. No view shows the memory or the code of another one. A change of view hides nothing
//! that was taken away meanwhile.

use crate::support::paging::{As, Guest, Kind, MXR, Outcome, RW, SUM, Scheme, U, X, pte};
use crate::support::vm::{HostRam, PAGE, asm::*};
use pageferry_hypervisor::hart::Mode;
use pageferry_hypervisor::{Exit, SlotFlags};

/// "Supervisor Address Translation and Protection (satp) Register": the mode and the ASID that are
/// written hold at once, without a fence. The guest itself writes them, and every switch follows
/// every other one.
#[test]
fn satp_decides_what_loads_stores_and_fetches_reach() {
    const AT: u64 = 60 * PAGE;
    const LOAD: u64 = 0;
    const STORE: u64 = 16;
    const FETCH: u64 = 32;
    const LOADED: i32 = 0x7f8;
    const STORED: i32 = 0x7f0;
    let mut guest = Guest::new(64);
    let program = guest.page();
    for (offset, access) in [
        (LOAD, ld(A0, A1, LOADED)),
        (STORE, sd(A2, A1, STORED)),
        (FETCH, jalr(RA, A1, 0)),
    ] {
        let code = [csrrw(X0, 0x180, T0), access, WFI];
        guest.ram.code(program * PAGE + offset, &code);
    }
    // A value of `satp`, and the page that AT then is. Bare needs no tables.
    let mut spaces = vec![(0, AT / PAGE)];
    for (scheme, asid) in [Scheme::Sv39, Scheme::Sv48]
        .into_iter()
        .flat_map(|scheme| [0, 3, 4].map(|asid| (scheme, asid)))
    {
        let (root, page) = (guest.root(scheme), 50 + spaces.len() as u64);
        guest.map(scheme, root, AT, 0, pte(page, RW | X));
        let same = pte(program, RW | X);
        guest.map(scheme, root, program * PAGE, 0, same);
        spaces.push((scheme.satp(asid, root), page));
    }
    for &(_, page) in &spaces {
        let code = [addi(A0, X0, page as i32), jalr(X0, RA, 0)];
        guest.ram.code(page * PAGE, &code);
        guest.ram.set(page * PAGE + LOADED as u64, page);
    }
    let mut token = 0;
    let mut visit = |(satp, page): (u64, u64), before: &[u64]| {
        token += 1;
        for offset in [LOAD, STORE, FETCH] {
            let hart = guest.vcpu.hart_mut();
            hart.set_pc(program * PAGE + offset).unwrap();
            for (register, value) in [(T0, satp), (A0, 0), (A1, AT), (A2, token)] {
                hart.set_x(register as u8, value);
            }
            assert_eq!(guest.vcpu.run(), Exit::Halted);
            let got = match offset {
                STORE => guest.ram.get(page * PAGE + STORED as u64),
                _ => guest.vcpu.hart().x(10),
            };
            let expected = if offset == STORE { token } else { page };
            assert_eq!(got, expected, "at {offset}: {satp:#x} after {before:x?}");
        }
    };
    for &first in &spaces {
        for &second in &spaces {
            for &third in &spaces {
                visit(first, &[]);
                visit(second, &[first.0]);
                visit(third, &[first.0, second.0]);
            }
        }
    }
}

/// A slot of data, which every view maps at the same addresses.
const DATA: u64 = 0x4000_0000;
const PAGES: u64 = 4;

/// A guest with [`DATA`], whose odd pages are U-mode's, and all kinds of views of it. Each view has
/// the number of a page that it may store to.
fn guest_with_views(scheme: Scheme) -> (Guest, std::sync::Arc<HostRam>, Vec<(As, u64)>) {
    let mut guest = Guest::new(32);
    let data = HostRam::new(PAGES as usize);
    let region = data.region(1, DATA, 0, PAGES);
    guest.vm.set_user_memory_region2(region).unwrap();
    let root = guest.root(scheme);
    for page in 0..PAGES {
        let entry = pte(DATA / PAGE + page, RW | (U * (page % 2)));
        guest.map(scheme, root, DATA + page * PAGE, 0, entry);
    }
    let view = |asid, mode, status| As {
        satp: scheme.satp(asid, root),
        mode,
        status,
    };
    let bare = As {
        satp: 0,
        ..view(0, Mode::Supervisor, 0)
    };
    let views = vec![
        (bare, 0),
        (view(0, Mode::Supervisor, 0), 2),
        (view(0, Mode::Supervisor, SUM), 1),
        (view(0, Mode::Supervisor, MXR), 2),
        (view(0, Mode::User, 0), 3),
        (view(1, Mode::Supervisor, 0), 2),
    ];
    (guest, data, views)
}

/// A view stores to a page, and another view replaces it. Then something is taken away: the page's
/// bit in the log, the right to store, or the slot. The first view finds that when it comes back.
#[test]
fn what_is_taken_from_a_view_that_is_away_is_gone_when_it_is_back() {
    for scheme in [Scheme::Sv39, Scheme::Sv48] {
        let (mut guest, data, views) = guest_with_views(scheme);
        let slot = |size: u64, flags| pageferry_hypervisor::Region {
            flags,
            ..data.region(1, DATA, 0, size)
        };
        let logged = slot(PAGES, SlotFlags::LOG_DIRTY_PAGES);
        guest.vm.set_user_memory_region2(logged.clone()).unwrap();
        for (i, &(first, page)) in views.iter().enumerate() {
            for (j, &(other, others_page)) in views.iter().enumerate() {
                let name = format!("{scheme:?}: view {i} and view {j}");
                let at = DATA + page * PAGE;
                // The second store needs nothing but the TLB's first level.
                let leave = |guest: &mut Guest| {
                    for _ in 0..2 {
                        let stored = guest.access(first, Kind::Store, at, 1);
                        assert!(matches!(stored, Outcome::Done(_)), "{name}: {stored:x?}");
                    }
                    let loaded = guest.load(other, DATA + others_page * PAGE);
                    assert!(matches!(loaded, Outcome::Done(_)), "{name}: {loaded:x?}");
                };
                let harvest = |guest: &Guest| {
                    let mut log = [0];
                    guest.vm.get_dirty_log(1, &mut log).unwrap();
                    log[0]
                };

                leave(&mut guest);
                assert_eq!(harvest(&guest), 1 << page, "{name}");
                let stored = guest.access(first, Kind::Store, at, 2);
                assert!(matches!(stored, Outcome::Done(_)), "{name}: {stored:x?}");
                assert_eq!(harvest(&guest), 1 << page, "{name}: in no log");

                leave(&mut guest);
                guest.vm.track_writes(1, page..page + 1).unwrap();
                let refused = guest.access(first, Kind::Store, at, 3);
                let tracked = matches!(
                    refused,
                    Outcome::Exit(Exit::MemoryFault {
                        write_tracked: true,
                        ..
                    })
                );
                assert!(tracked, "{name}: {refused:x?}");
                guest.vm.untrack_writes(1, page..page + 1).unwrap();

                leave(&mut guest);
                let gone = slot(0, SlotFlags::EMPTY);
                guest.vm.set_user_memory_region2(gone).unwrap();
                let load = guest.load(first, at);
                let mmio = matches!(load, Outcome::Exit(Exit::MmioRead { .. }));
                assert!(mmio, "{name}: {load:x?}");
                guest.vm.set_user_memory_region2(logged.clone()).unwrap();
            }
        }
    }
}
