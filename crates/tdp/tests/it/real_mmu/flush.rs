//! The remote TLB flush: every vCPU leaves the guest, and loads CR3 before it continues.
//!
//! A flush advances a number. A vCPU that finds it advanced before an entry has KVM load its CR3,
//! which flushes its TLB. A vCPU inside is kicked until it is out. So when the flush returns, each
//! vCPU is out, or has entered with the new CR3. The VMM makes this load (`KVM_SET_SREGS` with one
//! bit of CR3 changed), not an instruction of the stub. So the guest executes no instruction, and
//! starts no speculative walk, on stale translations.
//!
//! Where KVM shadows the tables, it caches more than a TLB. KVM updates its shadows at the
//! *guest's* stores to its tables, and does not see ours. It drops them with a memory slot, so
//! there a flush plugs and unplugs a slot.

use super::kick::kick;
use pageferry_testkit::LIMIT;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A kick that was lost is repeated after this time. Real-time signals queue up, so a thread that
/// got them faster than it takes them would run nothing but their handler.
const AGAIN: Duration = Duration::from_micros(200);

/// The state of a vCPU that the flushing thread reads.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    /// At `KVM_RUN`, or about to be.
    inside: AtomicBool,
    thread: AtomicI32,
    /// The number of the last flush that it has carried out.
    flushed: AtomicU64,
    /// The number of CR3 loads for a flush.
    reloads: AtomicU64,
}

impl Presence {
    /// The number of CR3 loads for a flush.
    pub(crate) fn reloads(&self) -> u64 {
        self.reloads.load(Ordering::Relaxed)
    }

    /// Announces an entry by `thread`. `Err` holds the number of a flush that the vCPU must carry
    /// out first. Then nothing is announced.
    pub(crate) fn try_enter(&self, flushes: &Flushes, thread: i32) -> Result<(), u64> {
        self.thread.store(thread, Ordering::Relaxed);
        self.inside.store(true, Ordering::SeqCst);
        let wanted = flushes.number.load(Ordering::SeqCst);
        if wanted == self.flushed.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.leave();
        Err(wanted)
    }

    /// The next entry carries out flush `number`.
    pub(crate) fn carried_out(&self, number: u64) {
        self.flushed.store(number, Ordering::Relaxed);
        self.reloads.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn leave(&self) {
        self.inside.store(false, Ordering::SeqCst);
    }
}

/// The flushes of one VM.
pub(crate) struct Flushes {
    /// Begins at 1, so that each vCPU's first entry loads CR3.
    number: AtomicU64,
    vcpus: Mutex<Vec<Arc<Presence>>>,
}

impl Flushes {
    pub(crate) fn new() -> Self {
        Self {
            number: AtomicU64::new(1),
            vcpus: Mutex::new(Vec::new()),
        }
    }

    /// Adds a vCPU to flush.
    pub(crate) fn register(&self, vcpu: Arc<Presence>) {
        let mut vcpus = self.vcpus.lock().unwrap_or_else(PoisonError::into_inner);
        vcpus.push(vcpu);
    }

    /// The number of flushes so far.
    pub(crate) fn count(&self) -> u64 {
        self.number.load(Ordering::Relaxed) - 1
    }

    /// Flushes all vCPUs. `drop_shadows` makes KVM drop its shadows of the tables, if it has any.
    pub(crate) fn flush(&self, drop_shadows: impl FnOnce()) {
        let number = self.number.fetch_add(1, Ordering::SeqCst) + 1;
        // If a vCPU faults from here on, even before its kick, the walk sees the current tables.
        drop_shadows();
        let end = Instant::now() + LIMIT / 2;
        for vcpu in &*self.vcpus.lock().unwrap_or_else(PoisonError::into_inner) {
            let mut next = Instant::now();
            while vcpu.inside.load(Ordering::SeqCst)
                && vcpu.flushed.load(Ordering::Relaxed) < number
            {
                let now = Instant::now();
                assert!(now < end, "a vCPU does not leave the guest");
                if now >= next {
                    kick(vcpu.thread.load(Ordering::Relaxed));
                    next = now + AGAIN;
                }
                std::thread::yield_now();
            }
        }
    }
}
