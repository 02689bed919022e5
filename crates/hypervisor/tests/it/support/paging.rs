//! A guest with page tables: builds them, and executes single accesses in any view.
//!
//! The first pages of RAM have code, in S-mode and U-mode pages that every set of tables maps at
//! [`CODE`]. The rest is the test's.

use crate::support::vm::{HostRam, PAGE, asm::*, vcpu, vm};
use pageferry_hypervisor::hart::Mode;
use pageferry_hypervisor::{Exit, VcpuCore, Vm};
use std::sync::Arc;

pub(crate) const V: u64 = 1;
pub(crate) const R: u64 = 1 << 1;
pub(crate) const W: u64 = 1 << 2;
pub(crate) const X: u64 = 1 << 3;
pub(crate) const U: u64 = 1 << 4;
pub(crate) const G: u64 = 1 << 5;
pub(crate) const A: u64 = 1 << 6;
pub(crate) const D: u64 = 1 << 7;
pub(crate) const RW: u64 = V | R | W | A | D;

pub(crate) const SUM: u64 = 1 << 18;
pub(crate) const MXR: u64 = 1 << 19;
const SPP: u64 = 1 << 8;
const T3: u32 = 28;
/// No exception has this `scause`.
const NO_CAUSE: u64 = u64::MAX;
/// The offset of the code that enters a view.
const TRAMPOLINE: u64 = 256;

/// The virtual address of the code: in the last entry of every root.
const CODE: u64 = 0xffff_ffff_ffff_0000;
const USER_CODE: u64 = CODE + PAGE;
const HANDLER: u64 = CODE + 2 * PAGE;
/// The guest-physical pages of the code, and of the tables over it.
const CODE_PAGES: u64 = 3;
const CODE_TABLES: u64 = 3;
/// The first page that the test may use.
pub(crate) const FREE: u64 = CODE_PAGES + CODE_TABLES;

/// The kind of translation. Without any, `satp` is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    Sv39,
    Sv48,
}

impl Scheme {
    pub(crate) const fn levels(self) -> u32 {
        match self {
            Self::Sv39 => 3,
            Self::Sv48 => 4,
        }
    }

    pub(crate) const fn satp(self, asid: u64, root: u64) -> u64 {
        match self {
            Self::Sv39 => 8 << 60 | asid << 44 | root,
            Self::Sv48 => 9 << 60 | asid << 44 | root,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Load,
    Store,
    Fetch,
}

/// The view of one access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct As {
    pub(crate) satp: u64,
    pub(crate) mode: Mode,
    /// [`SUM`] and [`MXR`].
    pub(crate) status: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The access happened. A load has read this value.
    Done(u64),
    /// `scause` and `stval`.
    Trap(u64, u64),
    Exit(Exit),
}

pub(crate) struct Guest {
    pub(crate) ram: Arc<HostRam>,
    pub(crate) vm: Vm,
    pub(crate) vcpu: VcpuCore,
    /// The next page for a table.
    next: u64,
}

/// The leaf entry for the frame `page`.
pub(crate) const fn pte(page: u64, bits: u64) -> u64 {
    page << 10 | bits
}

impl Guest {
    pub(crate) fn new(pages: usize) -> Self {
        let ram = HostRam::new(pages);
        // a0: the value, a1: the address. WFI ends an access in S-mode, ECALL in U-mode.
        for (page, end) in [(0, WFI), (1, ECALL)] {
            let at = page * PAGE;
            ram.code(at, &[ld(A0, A1, 0), end]);
            ram.code(at + 16, &[sd(A0, A1, 0), end]);
            // A fetch: the code there returns to ra.
            ram.code(at + 32, &[jalr(RA, A1, 0), end]);
            ram.code(at + 48, &[sfence_vma(0, 0), end]);
            ram.code(at + 64, &[sfence_vma(A1, 0), end]);
            ram.code(at + 80, &[sfence_vma(0, A2), end]);
            ram.code(at + 96, &[sfence_vma(A1, A2), end]);
            ram.code(at + 112, &[FENCE_I, end]);
            ram.code(at + 128, &[jalr(RA, A2, 0), end]);
        }
        ram.code(2 * PAGE, &[WFI]);
        // Enters the view: satp from t0, sstatus from t1, the address from t2.
        let trampoline = [
            csrrw(X0, 0x180, T0),
            csrrw(X0, 0x100, T1),
            csrrw(X0, 0x141, T2),
            csrrw(X0, 0x142, T3),
            SRET,
        ];
        ram.code(TRAMPOLINE, &trampoline);
        let vm = vm(&ram);
        let vcpu = vcpu(&vm, 0, 0);
        let guest = Self {
            ram,
            vm,
            vcpu,
            next: FREE,
        };
        // Level 0, and pointers above it. Roots point at the level below theirs.
        for (index, bits) in [(0, X), (1, X | U), (2, X)] {
            guest.set(3, 496 + index, pte(index, V | A | G | bits));
        }
        guest.set(4, 511, pte(3, V));
        guest.set(5, 511, pte(4, V));
        guest
    }

    /// Sets an entry of the table in `page`.
    pub(crate) fn set(&self, page: u64, index: u64, entry: u64) {
        self.ram.set(page * PAGE + index * 8, entry);
    }

    /// A new page, for a table or for data.
    pub(crate) fn page(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Makes the table in `page` a root that maps the code.
    pub(crate) fn make_root(&self, scheme: Scheme, page: u64) {
        let below = if scheme == Scheme::Sv39 { 4 } else { 5 };
        self.set(page, 511, pte(below, V));
    }

    pub(crate) fn root(&mut self, scheme: Scheme) -> u64 {
        let page = self.page();
        self.make_root(scheme, page);
        page
    }

    /// Puts `entry` for `address` at `level`, with new tables above it where there are none.
    pub(crate) fn map(&mut self, scheme: Scheme, root: u64, address: u64, level: u32, entry: u64) {
        let mut table = root;
        for above in (level + 1..scheme.levels()).rev() {
            let index = address >> (12 + 9 * above) & 511;
            let at = table * PAGE + index * 8;
            if self.ram.get(at) & V == 0 {
                let page = self.page();
                self.ram.set(at, pte(page, V));
            }
            table = self.ram.get(at) >> 10;
        }
        self.set(table, address >> (12 + 9 * level) & 511, entry);
    }

    /// The entry for `address` at `level`, below existing tables.
    pub(crate) fn entry(&self, scheme: Scheme, root: u64, address: u64, level: u32) -> u64 {
        let mut table = root;
        for above in (level..scheme.levels()).rev() {
            let index = address >> (12 + 9 * above) & 511;
            let entry = self.ram.get(table * PAGE + index * 8);
            if above == level {
                return entry;
            }
            table = entry >> 10;
        }
        unreachable!("no such level")
    }

    fn run(&mut self, view: As, offset: u64, registers: [u64; 3]) -> Outcome {
        let place = |at: u64| if view.satp == 0 { at - CODE } else { at };
        let pc = match view.mode {
            Mode::Supervisor => place(CODE),
            Mode::User => place(USER_CODE),
        } + offset;
        let before = self.vcpu.state();
        if before.mode == Mode::User || (before.satp == 0) != (view.satp == 0) {
            // This drops translations too.
            let mut state = before;
            state.mode = Mode::Supervisor;
            state.satp = view.satp;
            state.stvec = place(HANDLER);
            self.vcpu.set_state(&state).unwrap();
        }
        let hart = self.vcpu.hart_mut();
        let previous = match view.mode {
            Mode::Supervisor => SPP,
            Mode::User => 0,
        };
        for (register, value) in [
            (5, view.satp),
            (6, view.status | previous),
            (7, pc),
            (28, NO_CAUSE),
        ] {
            hart.set_x(register, value);
        }
        for (register, value) in (10..).zip(registers) {
            hart.set_x(register, value);
        }
        hart.set_pc(place(CODE) + TRAMPOLINE).unwrap();
        self.resume()
    }

    /// Continues after an exit.
    pub(crate) fn resume(&mut self) -> Outcome {
        let exit = self.vcpu.run();
        let state = self.vcpu.state();
        match (exit, state.scause) {
            (Exit::Halted, NO_CAUSE | 8) => Outcome::Done(state.x[10]),
            (Exit::Halted, cause) => Outcome::Trap(cause, state.stval),
            (other, _) => Outcome::Exit(other),
        }
    }

    /// One access of 8 bytes. A fetch needs code that returns to `ra`.
    pub(crate) fn access(&mut self, view: As, kind: Kind, address: u64, value: u64) -> Outcome {
        let offset = match kind {
            Kind::Load => 0,
            Kind::Store => 16,
            Kind::Fetch => 32,
        };
        self.run(view, offset, [value, address, 0])
    }

    /// Calls the code at `code`, which returns to `ra`, with `a1` in a1.
    pub(crate) fn call(&mut self, view: As, code: u64, a1: u64) -> Outcome {
        self.run(view, 128, [0, a1, code])
    }

    pub(crate) fn load(&mut self, view: As, address: u64) -> Outcome {
        self.access(view, Kind::Load, address, 0)
    }

    /// FENCE.I, executed in S-mode under `satp`.
    pub(crate) fn fence_code(&mut self, satp: u64) {
        let view = As {
            satp,
            mode: Mode::Supervisor,
            status: 0,
        };
        assert!(matches!(self.run(view, 112, [0; 3]), Outcome::Done(_)));
    }

    /// SFENCE.VMA, executed in S-mode under `satp`.
    pub(crate) fn fence(&mut self, satp: u64, address: Option<u64>, asid: Option<u64>) {
        let view = As {
            satp,
            mode: Mode::Supervisor,
            status: 0,
        };
        let offset = match (address, asid) {
            (None, None) => 48,
            (Some(_), None) => 64,
            (None, Some(_)) => 80,
            (Some(_), Some(_)) => 96,
        };
        let registers = [0, address.unwrap_or(0), asid.unwrap_or(0)];
        assert!(matches!(
            self.run(view, offset, registers),
            Outcome::Done(_)
        ));
    }
}
