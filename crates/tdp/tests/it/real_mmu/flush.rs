//! The remote TLB flush: every vCPU leaves the guest, and loads CR3 before it goes on.
//!
//! A flush advances a number. A vCPU that finds it advanced when it is about to enter has KVM load
//! its CR3, which flushes what its TLB has; one that is inside is kicked until it is out. So when
//! the flush returns, each vCPU is out, or has come in by the new CR3. The load is the VMM's
//! (`KVM_SET_SREGS` with one bit of CR3 changed) and not an instruction of the stub: no instruction
//! of the guest is executed, and no speculative walk begins, on what must be flushed.
//!
//! Where KVM shadows the tables, more is cached than a TLB has: KVM keeps its shadows in step by
//! the *guest's* stores to its tables, and does not see ours. Its shadows go when a memory slot
//! does, so there a flush plugs and unplugs a slot.

use super::kick::kick;
use pageferry_testkit::LIMIT;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// What a vCPU shows to who flushes.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    /// At `KVM_RUN`, or about to be.
    inside: AtomicBool,
    thread: AtomicI32,
    /// The number of the last flush it has carried out.
    flushed: AtomicU64,
    /// How often it has loaded CR3 for a flush.
    reloads: AtomicU64,
}

impl Presence {
    /// How often it has loaded CR3 for a flush.
    pub(crate) fn reloads(&self) -> u64 {
        self.reloads.load(Ordering::Relaxed)
    }

    /// Announces an entry by `thread`. `Err` gives the number of a flush that has to be carried out
    /// first; then nothing is announced.
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

    /// Flush `number` is carried out by the next entry.
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

    /// One more vCPU to flush.
    pub(crate) fn register(&self, vcpu: Arc<Presence>) {
        let mut vcpus = self.vcpus.lock().unwrap_or_else(PoisonError::into_inner);
        vcpus.push(vcpu);
    }

    /// How many there were.
    pub(crate) fn count(&self) -> u64 {
        self.number.load(Ordering::Relaxed) - 1
    }

    /// Flushes all vCPUs; `drop_shadows` makes KVM forget its shadows of the tables, if it has any.
    pub(crate) fn flush(&self, drop_shadows: impl FnOnce()) {
        let number = self.number.fetch_add(1, Ordering::SeqCst) + 1;
        // A vCPU that faults from here on, even before it is kicked, has the tables walked as they
        // are now.
        drop_shadows();
        let end = Instant::now() + LIMIT / 2;
        for vcpu in &*self.vcpus.lock().unwrap_or_else(PoisonError::into_inner) {
            while vcpu.inside.load(Ordering::SeqCst)
                && vcpu.flushed.load(Ordering::Relaxed) < number
            {
                assert!(Instant::now() < end, "a vCPU does not leave the guest");
                kick(vcpu.thread.load(Ordering::Relaxed));
                std::thread::yield_now();
            }
        }
    }
}
