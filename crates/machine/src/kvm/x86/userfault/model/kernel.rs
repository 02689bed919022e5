#![expect(unsafe_code, reason = "reads and writes the page cache")]
//! The model of the kernel: the page table of the guest's mapping, and the userfaultfd on it.
//!
//! Each entry changes in a step of its own, so that other threads run between the pages of one
//! call. The page cache is a real memfd.

use super::PAGES;
use crate::kvm::x86::userfault::Kernel;
use crate::{GuestRam, MachineError, UncheckedRam};
use pageferry_addr::{PAGE_SIZE, PageSize, RamPage};
use pageferry_userfault::uffd::{RangeError, RangeOp, Wake};
use rustix::io::Errno;
use shuttle::sync::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// The bytes of the page cache.
pub(super) fn placing(ram: &GuestRam) -> UncheckedRam<'_> {
    // SAFETY: shuttle runs one thread at a time, so no two accesses meet. A byte that is read too
    // early, or written twice, is what the model looks for.
    unsafe { ram.unchecked() }
}

/// An entry of the guest mapping's page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pte {
    Empty,
    Marker,
    Mapped,
}

/// The outcome of a vCPU's touch of a page, after any sleep.
pub(super) enum Touch {
    Byte(u8),
    Marker,
}

pub(super) struct State {
    pub(super) entries: [Pte; PAGES as usize],
    /// Whether the mapping is registered, and then whether it is for minor faults too.
    registered: Option<bool>,
    /// The number of the last sleep.
    last: u64,
    /// Sleeps and their pages.
    pub(super) sleepers: Vec<(u64, RamPage)>,
    /// Sleeps whose event was not read.
    events: VecDeque<(u64, RamPage)>,
    /// The reader of events ends.
    over: bool,
}

impl State {
    fn wake(&mut self, pages: Range<u64>) {
        self.sleepers.retain(|(_, page)| !pages.contains(&page.0));
        let sleepers = &self.sleepers;
        self.events.retain(|event| sleepers.contains(event));
    }
}

/// The kernel.
pub(super) struct Model {
    pub(super) ram: Arc<GuestRam>,
    state: Mutex<State>,
    /// A sleep has begun or ended, or `over` is set.
    changed: Condvar,
}

impl Model {
    /// A kernel whose entries are all empty. All of `ram` is registered for missing faults, and
    /// for `minor` ones too.
    pub(super) fn new(ram: Arc<GuestRam>, minor: bool) -> Arc<Self> {
        Arc::new(Self {
            ram,
            state: Mutex::new(State {
                entries: [Pte::Empty; PAGES as usize],
                registered: Some(minor),
                last: 0,
                sleepers: Vec::new(),
                events: VecDeque::new(),
                over: false,
            }),
            changed: Condvar::new(),
        })
    }

    /// Ends the reader of events.
    pub(super) fn end(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn in_page_cache(&self, page: RamPage) -> bool {
        let next = self.ram.next_allocated(page, 1).unwrap();
        next.is_some_and(|pages| pages.start == page.0)
    }

    /// Changes entries one by one. `change` says whether it changed the entry.
    fn fill(
        &self,
        op: RangeOp,
        (first, count): (RamPage, u64),
        wake: Wake,
        change: impl Fn(&mut State, RamPage) -> Result<bool, Errno>,
    ) -> Result<(), RangeError> {
        let pages = first.0..first.0 + count;
        let mut changed = 0;
        for (done, page) in (0..).zip(pages.clone()) {
            let mut state = self.lock();
            let result = match state.registered {
                Some(_) => change(&mut state, RamPage(page)),
                None => Err(Errno::NOENT),
            };
            match result {
                Ok(one) => changed += u64::from(one),
                Err(errno) => {
                    return Err(RangeError {
                        op,
                        start: self.ram.guest_hva(first),
                        len: count * PAGE_SIZE,
                        done: done * PAGE_SIZE,
                        errno,
                    });
                }
            }
            // The kernel wakes the sleepers of the pages that it changed, even if it stops later.
            if wake == Wake::Now && matches!(result, Ok(true)) {
                state.wake(page..page + 1);
                self.changed.notify_all();
            }
        }
        if wake == Wake::Now && changed < pages.end - pages.start {
            self.wake(pages);
        }
        Ok(())
    }

    fn wake(&self, pages: Range<u64>) {
        self.lock().wake(pages);
        self.changed.notify_all();
    }

    /// A touch by a vCPU. It sleeps where the kernel would.
    pub(super) fn touch(&self, page: RamPage) -> Touch {
        let mut state = self.lock();
        loop {
            match state.entries[page.index()] {
                Pte::Marker => return Touch::Marker,
                Pte::Mapped => {
                    let mut bytes = [0; PAGE_SIZE as usize];
                    placing(&self.ram).read(page, &mut bytes);
                    return Touch::Byte(bytes[0]);
                }
                Pte::Empty => {}
            }
            let cached = self.in_page_cache(page);
            if state.registered.is_some_and(|minor| minor || !cached) {
                state.last += 1;
                let sleep = (state.last, page);
                state.sleepers.push(sleep);
                state.events.push_back(sleep);
                self.changed.notify_all();
                while state.sleepers.contains(&sleep) {
                    state = self.changed.wait(state).unwrap();
                }
            } else {
                if !cached {
                    placing(&self.ram).zero(page);
                }
                state.entries[page.index()] = Pte::Mapped;
            }
        }
    }

    /// Reads an event, and waits for one. Returns `None` at the end.
    pub(super) fn next_event(&self) -> Option<RamPage> {
        let mut state = self.lock();
        while !state.over && state.events.is_empty() {
            state = self.changed.wait(state).unwrap();
        }
        if state.over {
            return None;
        }
        state.events.pop_front().map(|(_, page)| page)
    }

    /// Drops a mapping, as reclaim does. Markers stay.
    pub(super) fn reclaim(&self, page: RamPage) {
        let entry = &mut self.lock().entries[page.index()];
        if *entry == Pte::Mapped {
            *entry = Pte::Empty;
        }
    }
}

impl Kernel for Arc<Model> {
    fn continue_unmapped(
        &self,
        first: RamPage,
        pages: u64,
        _: PageSize,
        wake: Wake,
    ) -> Result<(), RangeError> {
        self.fill(RangeOp::Continue, (first, pages), wake, |state, page| {
            let entry = &mut state.entries[page.index()];
            match *entry {
                _ if !self.in_page_cache(page) => Err(Errno::FAULT),
                Pte::Mapped => Ok(false),
                Pte::Empty | Pte::Marker => {
                    *entry = Pte::Mapped;
                    Ok(true)
                }
            }
        })
    }

    fn zeropage(&self, first: RamPage, pages: u64, wake: Wake) -> Result<(), RangeError> {
        self.fill(RangeOp::Zeropage, (first, pages), wake, |state, page| {
            if self.in_page_cache(page) {
                return Err(Errno::EXIST);
            }
            placing(&self.ram).zero(page);
            state.entries[page.index()] = Pte::Mapped;
            Ok(true)
        })
    }

    fn copy(&self, page: RamPage, bytes: &[u8], wake: Wake) -> Result<(), RangeError> {
        self.fill(RangeOp::Copy, (page, 1), wake, |state, page| {
            if self.in_page_cache(page) {
                return Err(Errno::EXIST);
            }
            placing(&self.ram).write_at(page, 0, bytes);
            state.entries[page.index()] = Pte::Mapped;
            Ok(true)
        })
    }

    fn poison_unmapped(
        &self,
        first: RamPage,
        pages: u64,
        _: PageSize,
        wake: Wake,
    ) -> Result<(), RangeError> {
        self.fill(RangeOp::Poison, (first, pages), wake, |state, page| {
            let entry = &mut state.entries[page.index()];
            let empty = *entry == Pte::Empty;
            if empty {
                *entry = Pte::Marker;
            }
            Ok(empty)
        })
    }

    fn wake(&self, first: RamPage, pages: u64) -> Result<(), RangeError> {
        Model::wake(self, first.0..first.0 + pages);
        Ok(())
    }

    fn register_private(&self) -> Result<(), MachineError> {
        Ok(())
    }

    fn unregister(&self) -> Result<(), RangeError> {
        let mut state = self.lock();
        state.registered = None;
        state.wake(0..PAGES);
        self.changed.notify_all();
        Ok(())
    }

    fn drop_mappings(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        for page in first.0..first.0 + pages {
            self.lock().entries[page as usize] = Pte::Empty;
        }
        Ok(())
    }

    fn markers(&self, pages: Range<u64>) -> Result<Option<Vec<bool>>, MachineError> {
        let entries = self.lock().entries;
        let of = |page| entries[page as usize] == Pte::Marker;
        Ok(Some(pages.map(of).collect()))
    }

    fn populate(&self, page: RamPage) -> Result<(), MachineError> {
        assert!(matches!(self.touch(page), Touch::Byte(_)));
        Ok(())
    }
}
