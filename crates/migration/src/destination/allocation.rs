//! Allocates the VM's memory in parallel with pre-copy, so that no page waits for the host's
//! allocator later.
//!
//! **Guarantee.** Once [`Allocation::is_ready`] returns true, every page has memory. Dropping an
//! [`Allocation`] ends its threads within a step. Allocation changes no byte, so pages may arrive
//! meanwhile. Writing a page before its turn allocates it.
//!
//! **Mechanism.** Threads take steps of 16 MiB from one counter. Their priority is low, except for
//! pages of a pool.

use crate::error::MigrationError;
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{GuestRam, MachineError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// The number of pages that a thread allocates at a time.
const STEP: u64 = (16 << 20) / PAGE_SIZE;
/// The most threads. More would contend for the kernel's page allocator.
const MAX_THREADS: usize = 8;

struct AllocationState {
    ram: Arc<GuestRam>,
    /// The first page of the next step.
    next: AtomicU64,
    /// The number of allocated pages.
    done: AtomicU64,
    stop: AtomicBool,
    failure: Mutex<Option<MachineError>>,
}

/// The allocation of one VM's memory.
pub(super) struct Allocation {
    shared: Arc<AllocationState>,
    /// Whether to allocate memory before it is needed.
    wanted: bool,
    threads: Vec<JoinHandle<()>>,
}

impl Allocation {
    /// Starts to allocate `ram`. Does nothing unless `wanted`.
    pub(super) fn start(ram: &Arc<GuestRam>, wanted: bool) -> Result<Self, MigrationError> {
        let mut allocation = Self {
            shared: Arc::new(AllocationState {
                ram: Arc::clone(ram),
                next: AtomicU64::new(0),
                done: AtomicU64::new(0),
                stop: AtomicBool::new(false),
                failure: Mutex::new(None),
            }),
            wanted,
            threads: Vec::new(),
        };
        let steps = usize::try_from(ram.pages().div_ceil(STEP)).unwrap_or(usize::MAX);
        let threads = if wanted { thread_count().min(steps) } else { 0 };
        for _ in 0..threads {
            let shared = Arc::clone(&allocation.shared);
            let thread = std::thread::Builder::new()
                .name("pf-allocate".into())
                .spawn(move || shared.run())
                .map_err(|e| MigrationError::os("cannot start a thread that allocates", e))?;
            allocation.threads.push(thread);
        }
        Ok(allocation)
    }

    /// The number of allocated pages.
    pub(super) fn done(&self) -> u64 {
        self.shared.done.load(Ordering::Acquire)
    }

    /// Whether the allocation is complete, so that the switch-over may begin.
    ///
    /// # Errors
    /// If the host does not have enough memory.
    pub(super) fn is_ready(&self) -> Result<bool, MigrationError> {
        let mut failure = self.shared.failure();
        match failure.take() {
            Some(error) => Err(error.into()),
            None => Ok(!self.wanted || self.done() == self.shared.ram.pages()),
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl AllocationState {
    fn failure(&self) -> std::sync::MutexGuard<'_, Option<MachineError>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        // The page that arrives next may wait until its huge page is all zero. That takes a second
        // for 1 GiB, and far longer at a low priority beside busy vCPUs.
        if !self.ram.backing().is_hugetlb() {
            crate::latency::lower_priority();
        }
        let total = self.ram.pages();
        while !self.stop.load(Ordering::Relaxed) {
            let first = self.next.fetch_add(STEP, Ordering::Relaxed);
            if first >= total {
                return;
            }
            let pages = STEP.min(total - first);
            if let Err(error) = self.ram.allocate_range(RamPage(first), pages) {
                self.failure().get_or_insert(error);
                self.stop.store(true, Ordering::Relaxed);
                return;
            }
            self.done.fetch_add(pages, Ordering::Release);
        }
    }
}

/// Half of the cores. The others serve the pages that arrive meanwhile.
fn thread_count() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 2).clamp(1, MAX_THREADS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_machine::RamLayout;
    use pageferry_testkit::wait_until;

    fn ram(bytes: u64) -> Arc<GuestRam> {
        Arc::new(GuestRam::new(RamLayout::for_memory(bytes).unwrap()).unwrap())
    }

    #[test]
    fn all_memory_is_allocated_and_bytes_written_meanwhile_stay() {
        let ram = ram((40 << 20) + PAGE_SIZE);
        let last = RamPage(ram.pages() - 1);
        ram.try_write(last, &[7; PAGE_SIZE as usize]).unwrap();
        let allocation = Allocation::start(&ram, true).unwrap();
        ram.try_write(RamPage(3), &[9; PAGE_SIZE as usize]).unwrap();
        wait_until("the memory", || allocation.is_ready().unwrap());
        assert_eq!(allocation.done(), ram.pages());
        assert_eq!(
            ram.next_allocated(RamPage(0), ram.pages()).unwrap(),
            Some(0..ram.pages())
        );
        for (page, byte) in [(RamPage(3), 9), (last, 7)] {
            let mut bytes = [0; PAGE_SIZE as usize];
            ram.try_read(page, &mut bytes).unwrap();
            assert_eq!(bytes, [byte; PAGE_SIZE as usize]);
        }
    }

    #[test]
    fn memory_is_not_allocated_unless_wanted() {
        let ram = ram(1 << 20);
        let allocation = Allocation::start(&ram, false).unwrap();
        assert!(allocation.is_ready().unwrap());
        assert!(allocation.threads.is_empty());
        drop(allocation);
        assert_eq!(ram.next_allocated(RamPage(0), 1).unwrap(), None);
    }

    #[test]
    fn a_dropped_allocation_stops() {
        let ram = ram(16 << 40);
        let allocation = Allocation::start(&ram, true).unwrap();
        wait_until("the first step", || allocation.done() > 0);
        drop(allocation);
        // It begins at the first page.
        let last = RamPage(ram.pages() - 1);
        assert_eq!(ram.next_allocated(last, 1).unwrap(), None);
    }
}
