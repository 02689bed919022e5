//! Guest memory for the hart's tests, and a small assembler.
#![expect(
    unsafe_code,
    reason = "accesses guest memory through raw pointers, like the real TLB"
)]

pub(crate) use crate::support::asm;

use pageferry_hypervisor::hart::{
    AmoInt, AmoOp, Bus, BusFault, GuestInt, Hart, HartExit, MemoryFault, PAGE_WORDS, Reservations,
    Reserved, View,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// The start of RAM.
pub(crate) const RAM: u64 = 0x8000_0000;
/// The start of test code.
pub(crate) const CODE: u64 = RAM;
/// The start of test data, four pages behind the code.
pub(crate) const DATA: u64 = RAM + 0x4000;

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Page {
    Present,
    Missing,
    Refused,
}

/// RAM that harts share.
pub(crate) struct Ram {
    words: Vec<AtomicU64>,
    pages: Vec<AtomicU8>,
}

impl Ram {
    pub(crate) fn new(pages: usize) -> Arc<Self> {
        Arc::new(Self {
            words: (0..pages * 512).map(|_| AtomicU64::new(0)).collect(),
            pages: (0..pages)
                .map(|_| AtomicU8::new(Page::Present as u8))
                .collect(),
        })
    }

    pub(crate) fn set_page(&self, gpa: u64, page: Page) {
        self.pages[((gpa - RAM) >> 12) as usize].store(page as u8, Ordering::Relaxed);
    }

    fn cell<T: GuestInt>(&self, gpa: u64) -> &T::Atomic {
        let offset = (gpa - RAM) as usize;
        assert!(offset.is_multiple_of(T::BYTES as usize) && offset < self.words.len() * 8);
        // SAFETY: inside `words`, whose atomics allow shared mutation, and aligned for `T`.
        unsafe {
            &*self
                .words
                .as_ptr()
                .cast::<u8>()
                .add(offset)
                .cast::<T::Atomic>()
        }
    }

    pub(crate) fn get<T: GuestInt>(&self, gpa: u64) -> T {
        T::load(self.cell::<T>(gpa))
    }

    pub(crate) fn set<T: GuestInt>(&self, gpa: u64, value: T) {
        T::store(self.cell::<T>(gpa), value);
    }

    pub(crate) fn bytes(&self, gpa: u64, len: u64) -> Vec<u8> {
        (gpa..gpa + len).map(|gpa| self.get(gpa)).collect()
    }

    pub(crate) fn fill(&self, gpa: u64, bytes: &[u8]) {
        for (gpa, &byte) in (gpa..).zip(bytes) {
            self.set(gpa, byte);
        }
    }

    pub(crate) fn code(&self, gpa: u64, code: &[u32]) {
        for (gpa, &word) in (gpa..).step_by(4).zip(code) {
            self.set(gpa, word);
        }
    }
}

#[derive(Clone, Copy)]
struct Entry {
    read: u64,
    write: u64,
    addend: u64,
}

const EMPTY: Entry = Entry {
    read: u64::MAX,
    write: u64::MAX,
    addend: 0,
};

/// One hart's view of a [`Ram`], with a TLB like the real TLB. Below and above RAM is MMIO.
pub(crate) struct TestBus {
    pub(crate) ram: Arc<Ram>,
    pub(crate) now: u64,
    /// The ticks that pass with each look at the clock.
    pub(crate) tick: u64,
    /// The number of looks at the clock.
    pub(crate) looks: u64,
    /// The number of TLB misses that succeed before one returns `BusFault::Requested`.
    pub(crate) request_after: Option<u32>,
    /// The page that has to be watched for an LR. The LR has left the guest for that.
    pub(crate) to_watch: Option<u64>,
    /// Decides whether an SC succeeds. Without it, SCs compare values.
    reservations: Option<Arc<Reservations>>,
    tlb: Box<[Entry; 256]>,
}

impl TestBus {
    pub(crate) fn new(ram: Arc<Ram>) -> Self {
        Self {
            ram,
            now: 0,
            tick: 0,
            looks: 0,
            request_after: None,
            to_watch: None,
            reservations: None,
            tlb: Box::new([EMPTY; 256]),
        }
    }

    pub(crate) fn with_reservations(ram: Arc<Ram>, reservations: &Arc<Reservations>) -> Self {
        Self {
            reservations: Some(Arc::clone(reservations)),
            ..Self::new(ram)
        }
    }

    pub(crate) fn flush(&mut self) {
        self.tlb.fill(EMPTY);
    }

    pub(crate) fn flush_writes(&mut self) {
        for entry in &mut self.tlb[..] {
            entry.write = u64::MAX;
        }
    }

    #[inline(always)]
    fn hit(&self, gpa: u64, size: u64, write: bool) -> Option<*mut u8> {
        let entry = &self.tlb[(gpa >> 12) as usize % 256];
        let tag = if write { entry.write } else { entry.read };
        (tag == gpa & !(4095 ^ (size - 1)))
            .then(|| entry.addend.wrapping_add(gpa) as usize as *mut u8)
    }

    #[cold]
    #[inline(never)]
    fn miss(&mut self, gpa: u64, size: u64, write: bool) -> Result<*mut u8, BusFault> {
        if !gpa.is_multiple_of(size) {
            return Err(BusFault::Misaligned);
        }
        match &mut self.request_after {
            Some(0) => {
                self.request_after = None;
                return Err(BusFault::Requested);
            }
            Some(left) => *left -= 1,
            None => {}
        }
        let page = gpa & !4095;
        let state = match page.checked_sub(RAM) {
            Some(offset) if offset >> 12 < self.ram.pages.len() as u64 => {
                self.ram.pages[(offset >> 12) as usize].load(Ordering::Relaxed)
            }
            _ => return Err(BusFault::Mmio { address: gpa, gpa }),
        };
        if state == Page::Missing as u8 {
            return Err(BusFault::Memory(MemoryFault {
                gpa: page,
                size: 4096,
                flags: 7,
            }));
        }
        if state == Page::Refused as u8 {
            return Err(BusFault::Access { address: gpa });
        }
        let addend = (self.ram.words.as_ptr() as u64).wrapping_sub(RAM);
        let watched = self
            .reservations
            .as_ref()
            .is_some_and(|all| all.is_announced(gpa));
        let write_tag = if write && !watched { page } else { u64::MAX };
        self.tlb[(gpa >> 12) as usize % 256] = Entry {
            read: page,
            write: write_tag,
            addend,
        };
        Ok(addend.wrapping_add(gpa) as usize as *mut u8)
    }

    #[inline(always)]
    fn readable<T: GuestInt>(&mut self, gpa: u64) -> Result<&T::Atomic, BusFault> {
        let host = match self.hit(gpa, T::BYTES, false) {
            Some(host) => host,
            None => self.miss(gpa, T::BYTES, false)?,
        };
        // SAFETY: the entry leads to a page of `ram`, which `self` keeps. It matches aligned
        // addresses only.
        Ok(unsafe { &*host.cast::<T::Atomic>() })
    }

    /// Calls `write` with the cell at `gpa`. If the TLB has the page as writable, there are no
    /// reservations in it, so `write` bypasses them.
    #[inline(always)]
    fn writable<T: GuestInt, R>(
        &mut self,
        gpa: u64,
        write: impl FnOnce(&T::Atomic) -> R,
    ) -> Result<R, BusFault> {
        // SAFETY: the same as in `readable`.
        let cell = |host: *mut u8| unsafe { &*host.cast::<T::Atomic>() };
        match self.hit(gpa, T::BYTES, true) {
            Some(host) => Ok(write(cell(host))),
            None => {
                let host = self.miss(gpa, T::BYTES, true)?;
                Ok(match &self.reservations {
                    Some(all) => all.write(gpa, T::BYTES, || write(cell(host))),
                    None => write(cell(host)),
                })
            }
        }
    }
}

impl Bus for TestBus {
    #[inline(always)]
    fn load<T: GuestInt>(&mut self, gpa: u64) -> Result<T, BusFault> {
        Ok(T::load(self.readable::<T>(gpa)?))
    }

    #[inline(always)]
    fn store<T: GuestInt>(&mut self, gpa: u64, value: T) -> Result<(), BusFault> {
        self.writable::<T, ()>(gpa, |cell| T::store(cell, value))
    }

    fn store_bytes(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), BusFault> {
        for i in 0..bytes.len() as u64 {
            self.miss(gpa.wrapping_add(i), 1, true)?;
        }
        let ram = Arc::clone(&self.ram);
        let write = || ram.fill(gpa, bytes);
        match &self.reservations {
            Some(all) => all.write(gpa, bytes.len() as u64, write),
            None => write(),
        }
        Ok(())
    }

    fn amo<T: AmoInt>(&mut self, gpa: u64, op: AmoOp, operand: T) -> Result<T, BusFault> {
        self.writable::<T, T>(gpa, |cell| T::amo(cell, op, operand))
    }

    fn load_reserved<T: AmoInt>(&mut self, gpa: u64) -> Result<Reserved<T>, BusFault> {
        let Some(all) = self.reservations.clone() else {
            return Ok(Reserved {
                value: T::load_ordered(self.readable::<T>(gpa)?),
                version: 0,
                place: 0,
            });
        };
        let cell = self.readable::<T>(gpa)?;
        if all.is_watched(gpa) {
            return Ok(all.load_reserved::<T>(gpa, cell));
        }
        self.to_watch = Some(gpa);
        Err(BusFault::Requested)
    }

    fn store_conditional<T: AmoInt>(
        &mut self,
        gpa: u64,
        reserved: Reserved<T>,
        value: T,
    ) -> Result<bool, BusFault> {
        let all = self.reservations.clone();
        let host = self.miss(gpa, T::BYTES, true)?;
        // SAFETY: as in `readable`.
        let cell = unsafe { &*host.cast::<T::Atomic>() };
        Ok(match all {
            Some(all) => all.store_conditional::<T>(gpa, cell, reserved, value),
            None => T::compare_exchange(cell, reserved.value, value),
        })
    }

    fn fetch_page(&mut self, gpa: u64, words: &mut [u32; PAGE_WORDS]) -> Result<(), BusFault> {
        for (gpa, word) in (gpa..).step_by(4).zip(words) {
            *word = self.load(gpa)?;
        }
        Ok(())
    }

    fn locate_code(&mut self, address: u64) -> Result<u64, BusFault> {
        Ok(address & !4095)
    }

    fn set_view(&mut self, _view: View) {}

    fn fence_translations(&mut self, _address: Option<u64>, _asid: Option<u16>) {}

    fn time(&mut self) -> u64 {
        self.looks += 1;
        self.now += self.tick;
        self.now
    }
}

/// A request word without requests.
pub(crate) static NO_REQUEST: AtomicU32 = AtomicU32::new(0);

/// One hart with 16 pages of RAM.
pub(crate) struct Machine {
    pub(crate) hart: Hart,
    pub(crate) bus: TestBus,
}

impl Machine {
    /// Makes a machine with `code` at [`CODE`], where the hart starts.
    pub(crate) fn new(code: &[u32]) -> Self {
        let ram = Ram::new(16);
        ram.code(CODE, code);
        let mut hart = Hart::new();
        hart.set_pc(CODE).unwrap();
        Self {
            hart,
            bus: TestBus::new(ram),
        }
    }

    pub(crate) fn ram(&self) -> &Ram {
        &self.bus.ram
    }

    /// Executes at most `budget` instructions.
    pub(crate) fn run(&mut self, budget: u64) -> HartExit {
        self.hart.run(&mut self.bus, &NO_REQUEST, Some(budget))
    }

    /// Executes one instruction and expects that it retires and stays in the guest.
    pub(crate) fn step(&mut self) {
        let before = self.hart.instret();
        assert_eq!(self.run(1), HartExit::Budget);
        assert_eq!(self.hart.instret(), before + 1, "{:x?}", self.hart);
    }

    /// Executes one instruction and expects that it raises an exception. Returns (scause, stval).
    pub(crate) fn trap(&mut self) -> (u64, u64) {
        let mut state = self.hart.state();
        state.scause = u64::MAX;
        self.hart.set_state(&state).unwrap();
        assert_eq!(self.run(1), HartExit::Budget);
        let after = self.hart.state();
        assert_eq!(after.instret, state.instret, "an exception does not retire");
        assert_eq!(after.sepc, state.pc);
        assert_eq!(after.pc, after.stvec & !3);
        assert_eq!(after.x, state.x, "an exception has no other effect");
        (after.scause, after.stval)
    }
}

/// Runs one register-register instruction on `a` and `b`.
pub(crate) fn alu(instruction: impl Fn(u32, u32, u32) -> u32, a: u64, b: u64) -> u64 {
    let mut machine = Machine::new(&[instruction(asm::A0, asm::A1, asm::A2)]);
    machine.hart.set_x(11, a);
    machine.hart.set_x(12, b);
    machine.step();
    machine.hart.x(10)
}

/// Runs one register-immediate instruction on `a`.
pub(crate) fn alu_imm(instruction: u32, a: u64) -> u64 {
    let mut machine = Machine::new(&[instruction]);
    machine.hart.set_x(11, a);
    machine.step();
    machine.hart.x(10)
}
