//! Many vCPUs with a thread each, which a test can start, pause and stop; and host memory of large
//! pages for them.
#![expect(unsafe_code, reason = "puts test memory into slots")]

use crate::support::vm::{HostRam, PAGE};
use pageferry_addr::{Gpa, Hva, PageSize};
use pageferry_hypervisor::{Exit, HostMemory, KickHandle, Region, SlotFlags, VcpuCore, Vm};
use pageferry_testkit::LIMIT;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The number of 4 KiB pages in a page of 2 MiB.
pub(crate) const LARGE: u64 = 512;

pub(crate) const A4: u32 = 14;
pub(crate) const A5: u32 = 15;
pub(crate) const A6: u32 = 16;
pub(crate) const T3: u32 = 28;
pub(crate) const T4: u32 = 29;

#[derive(Default)]
struct State {
    paused: bool,
    /// The number of threads that wait for the end of the pause.
    parked: usize,
    /// No thread enters its guest any more.
    stopped: bool,
}

/// The threads of some vCPUs.
pub(crate) struct Fleet {
    kicks: Vec<KickHandle>,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the fleet is paused or stopped. A thread whose vCPU leaves often reads it without
    /// locking the state.
    wanted: AtomicBool,
}

/// All vCPUs are outside their guests as long as this lives.
#[must_use]
pub(crate) struct Paused<'a>(&'a Fleet);

/// Stops the fleet when dropped, also during a panic, so that no thread of a test waits forever.
pub(crate) struct Stop<'a>(&'a Fleet);

impl Fleet {
    pub(crate) fn of(vcpus: &[VcpuCore]) -> Self {
        Self {
            kicks: vcpus.iter().map(VcpuCore::kick_handle).collect(),
            state: Mutex::default(),
            changed: Condvar::new(),
            wanted: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stop_on_drop(&self) -> Stop<'_> {
        Stop(self)
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.state().stopped
    }

    /// The body of one vCPU's thread: runs the vCPU until the fleet is stopped. `exit` gets all
    /// exits but kicks.
    pub(crate) fn drive(&self, vcpu: &mut VcpuCore, mut exit: impl FnMut(&mut VcpuCore, Exit)) {
        let stop = Stop(self);
        loop {
            match vcpu.run() {
                Exit::Kicked => {}
                other => exit(vcpu, other),
            }
            if !self.wanted.load(Ordering::Acquire) {
                continue;
            }
            let mut state = self.state();
            if state.paused && !state.stopped {
                state.parked += 1;
                self.changed.notify_all();
                while state.paused && !state.stopped {
                    state = self.wait(state);
                }
                state.parked -= 1;
                self.changed.notify_all();
            }
            if state.stopped {
                break;
            }
        }
        // Only a panic of this thread may stop the others.
        std::mem::forget(stop);
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, Duration::from_millis(100));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Makes all vCPUs leave their guests. They run again when the result is dropped.
    #[track_caller]
    pub(crate) fn pause(&self) -> Paused<'_> {
        self.state().paused = true;
        let paused = Paused(self);
        self.wanted.store(true, Ordering::Release);
        self.kicks.iter().for_each(KickHandle::kick);
        self.wait_until("all vCPUs to be paused", |state| {
            state.parked == self.kicks.len()
        });
        paused
    }

    #[track_caller]
    fn wait_until(&self, what: &str, done: impl Fn(&State) -> bool) {
        let end = Instant::now() + LIMIT;
        let mut state = self.state();
        while !done(&state) {
            assert!(!state.stopped, "a vCPU's thread has failed");
            assert!(Instant::now() < end, "waited too long for {what}");
            state = self.wait(state);
        }
    }

    /// Calls `done` until it returns true.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let end = Instant::now() + LIMIT;
        while !done() {
            assert!(!self.is_stopped(), "a vCPU's thread has failed");
            assert!(Instant::now() < end, "waited too long for {what}");
            std::thread::yield_now();
        }
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        {
            let mut state = self.0.state();
            state.paused = false;
            self.0.wanted.store(state.stopped, Ordering::Release);
        }
        self.0.changed.notify_all();
        if !std::thread::panicking() {
            // Without this wait, the next pause would count threads that are still leaving this
            // one.
            let running = |state: &State| state.parked == 0 || state.stopped;
            self.0.wait_until("all vCPUs to run again", running);
        }
    }
}

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        {
            let mut state = self.0.state();
            state.stopped = true;
            self.0.wanted.store(true, Ordering::Release);
        }
        self.0.changed.notify_all();
        self.0.kicks.iter().for_each(KickHandle::kick);
    }
}

/// Runs each vCPU on a separate thread until its guest halts. `exit` gets the vCPU's index, the
/// vCPU, and each exit before that.
#[track_caller]
pub(crate) fn run_until_halted(
    vcpus: &mut [VcpuCore],
    exit: impl Fn(usize, &mut VcpuCore, Exit) + Sync,
) {
    let kicks: Vec<_> = vcpus.iter().map(VcpuCore::kick_handle).collect();
    std::thread::scope(|scope| {
        let exit = &exit;
        let threads: Vec<_> = vcpus
            .iter_mut()
            .enumerate()
            .map(|(index, vcpu)| {
                scope.spawn(move || {
                    loop {
                        match vcpu.run() {
                            Exit::Halted => break,
                            Exit::Kicked => panic!("vCPU {index} did not halt in time: {vcpu:?}"),
                            other => exit(index, vcpu, other),
                        }
                    }
                })
            })
            .collect();
        let end = Instant::now() + LIMIT;
        while !threads.iter().all(|thread| thread.is_finished()) {
            if Instant::now() > end {
                kicks.iter().for_each(KickHandle::kick);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    });
}

/// Fails at every exit, for [`run_until_halted`].
pub(crate) fn no_exit(index: usize, vcpu: &mut VcpuCore, exit: Exit) {
    panic!("vCPU {index}: {exit:?}, {vcpu:?}");
}

/// Sets a vCPU's registers, the program counter first.
pub(crate) fn set(vcpu: &mut VcpuCore, pc: u64, registers: &[(u32, u64)]) {
    vcpu.hart_mut().set_pc(pc).unwrap();
    for &(register, value) in registers {
        vcpu.hart_mut().set_x(register as u8, value);
    }
}

/// Host memory that reports pages of 2 MiB, and is aligned to 2 MiB.
pub(crate) struct LargeRam {
    ram: Arc<HostRam>,
    skip: u64,
    pages: u64,
}

// SAFETY: the range is a part of `ram`, which keeps the contract.
unsafe impl HostMemory for LargeRam {
    fn hva_range(&self) -> Range<Hva> {
        let first = self.hva(0).0;
        Hva(first)..Hva(first + self.pages * PAGE)
    }

    fn page_size(&self) -> PageSize {
        PageSize::Size2M
    }
}

impl LargeRam {
    pub(crate) fn new(large_pages: u64) -> Arc<Self> {
        let pages = large_pages * LARGE;
        let ram = HostRam::new((pages + LARGE) as usize);
        let misaligned = ram.hva().0 / PAGE % LARGE;
        let skip = (LARGE - misaligned) % LARGE;
        Arc::new(Self { ram, skip, pages })
    }

    /// The address of a page.
    pub(crate) fn hva(&self, page: u64) -> Hva {
        Hva(self.ram.hva().0 + (self.skip + page) * PAGE)
    }

    /// The addresses of `pages` pages from `first`.
    pub(crate) fn hvas(&self, first: u64, pages: u64) -> Range<Hva> {
        self.hva(first)..self.hva(first + pages)
    }

    pub(crate) fn get(&self, offset: u64) -> u64 {
        self.ram.get(self.skip * PAGE + offset)
    }

    pub(crate) fn set(&self, offset: u64, value: u64) {
        self.ram.set(self.skip * PAGE + offset, value);
    }

    /// The same as [`HostRam::replace`].
    pub(crate) fn replace(&self, offset: u64, value: u64) -> u64 {
        self.ram.replace(self.skip * PAGE + offset, value)
    }

    /// Slot `slot` at `gpa`, over all of this memory.
    pub(crate) fn region(self: &Arc<Self>, slot: u16, gpa: u64, flags: SlotFlags) -> Region {
        Region {
            slot,
            flags,
            gpa: Gpa(gpa),
            size: self.pages * PAGE,
            hva: self.hva(0),
            memory: Some(Arc::clone(self) as Arc<dyn HostMemory>),
            userfault: None,
        }
    }
}

/// The pages in a log.
pub(crate) fn named(log: &[u64]) -> impl Iterator<Item = u64> + '_ {
    log.iter().enumerate().flat_map(|(w, &word)| {
        let bits = (0..64).filter(move |bit| word >> bit & 1 == 1);
        bits.map(move |bit| w as u64 * 64 + bit)
    })
}

/// Fetches a log into a vector.
#[track_caller]
pub(crate) fn dirty_log(vm: &Vm, slot: u16, pages: u64) -> Vec<u64> {
    let mut log = vec![0; pages.div_ceil(64) as usize];
    let count = vm.get_dirty_log(slot, &mut log).unwrap();
    assert_eq!(named(&log).count() as u64, count);
    log
}
