//! The gate before the VMM's own accesses to guest memory.
//!
//! **Guarantee.** A thread that closes the gate returns when no access that the gate let in is
//! under way. Until it opens the gate again, no access gets in.
//!
//! **Mechanism.** One atomic word has the numbers of reads and of writes under way, and two flags.
//! An access counts itself by one compare-exchange from a value whose flags let it in. A closing
//! thread sets its flag by one read-modify-write. Then it waits until the count of what it keeps
//! out is 0. The changes of one word are in one total order. So an access that comes behind the
//! flag sees it and is refused, and the closing thread sees the count of each access that came
//! before. Reads that go on do not delay a thread that keeps writes out. Neither do refused
//! accesses, as they change nothing.
//!
//! | flag | set | lets in |
//! |---|---|---|
//! | [`RECEIVING`] | from arming until post-copy begins: no page has its final bytes | nothing |
//! | [`FROZEN`] | while a source takes the last bytes of its stopped VM | reads |
//!
//! **Neighbours.** `access` enters. `ram` has the gate of its memory. The engines close it when
//! they arm, and open it when post-copy begins.

use crate::sync::{AtomicU64, yield_now};
use crate::{AccessError, MachineError};
use core::sync::atomic::Ordering;
use pageferry_userfault::PageBitmap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The longest wait for accesses under way, unless [`AccessGate::set_limit`] sets another. An
/// access is one copy, unless a device holds on to memory.
const LIMIT: Duration = Duration::from_secs(1);

/// Nothing gets in: the machine waits for its memory.
const RECEIVING: u64 = 1 << 63;
/// No write gets in.
const FROZEN: u64 = 1 << 62;
/// The bits of the writes under way. The flags are above, and the reads below.
const WRITES: u64 = FROZEN - Use::Write as u64;
const READS: u64 = Use::Write as u64 - 1;

/// The kind of an access, by what it adds to the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Use {
    Read = 1,
    Write = 1 << 31,
}

/// The gate of one VM's memory.
#[derive(Default)]
pub(crate) struct AccessGate {
    state: AtomicU64,
    /// The missing bitmap, once the machine was armed.
    missing: OnceLock<Arc<PageBitmap>>,
    limit: OnceLock<Duration>,
}

impl AccessGate {
    /// Lets an access in. It is under way until [`AccessGate::leave`].
    pub(crate) fn enter(&self, access: Use) -> Result<(), AccessError> {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            if state & RECEIVING != 0 {
                return Err(AccessError::Receiving);
            }
            if state & FROZEN != 0 && access == Use::Write {
                return Err(AccessError::Frozen);
            }
            // Acquire: an access that gets in finds the bytes and bits from before the gate was
            // opened.
            match self.state.compare_exchange_weak(
                state,
                state + access as u64,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(()),
                Err(now) => state = now,
            }
        }
    }

    /// Ends an access.
    pub(crate) fn leave(&self, access: Use) {
        // Release: a thread that closes the gate finds what the access wrote.
        self.state.fetch_sub(access as u64, Ordering::Release);
    }

    /// The missing bitmap, if the machine was ever armed. An access that was let in finds a page
    /// present if its bit is clear. The page then stays present, since no bit is set again.
    pub(crate) fn missing(&self) -> Option<&PageBitmap> {
        self.missing.get().map(|missing| &**missing)
    }

    /// Sets the longest wait for accesses under way, once.
    pub(crate) fn set_limit(&self, limit: Duration) {
        let first = self.limit.set(limit).is_ok();
        assert!(first, "the limit is set already");
    }

    /// Closes the gate, calls `arm`, and keeps the gate closed if `arm` succeeds.
    pub(crate) fn arm(
        &self,
        missing: &Arc<PageBitmap>,
        arm: impl FnOnce() -> Result<(), MachineError>,
    ) -> Result<(), MachineError> {
        if self.missing.get().is_some() {
            return Err(MachineError::WrongState("fault delivery was armed before"));
        }
        self.close(RECEIVING, READS | WRITES)?;
        let armed = arm();
        if armed.is_ok() {
            let first = self.missing.set(Arc::clone(missing)).is_ok();
            assert!(first, "only the thread that closed the gate arms");
        } else {
            self.open(RECEIVING);
        }
        armed
    }

    /// Lets accesses in again: every page whose bit is clear has its bytes.
    pub(crate) fn begin(&self) {
        self.open(RECEIVING);
    }

    /// Keeps writes out.
    pub(crate) fn freeze(&self) -> Result<(), MachineError> {
        self.close(FROZEN, WRITES)
    }

    /// Lets writes in again.
    pub(crate) fn thaw(&self) {
        self.open(FROZEN);
    }

    /// Sets `flag`, and waits until none of the accesses that `out` counts is under way.
    fn close(&self, flag: u64, out: u64) -> Result<(), MachineError> {
        if self.state.fetch_or(flag, Ordering::Acquire) & flag != 0 {
            return Err(MachineError::WrongState(
                "another migration of this machine is under way",
            ));
        }
        let deadline = Instant::now() + *self.limit.get().unwrap_or(&LIMIT);
        while self.state.load(Ordering::Acquire) & out != 0 {
            if Instant::now() > deadline {
                self.open(flag);
                return Err(MachineError::WrongState(
                    "a device holds on to guest memory: stop devices before a migration takes it",
                ));
            }
            yield_now();
        }
        Ok(())
    }

    fn open(&self, flag: u64) {
        // Release: pairs with `enter`.
        self.state.fetch_and(!flag, Ordering::Release);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Threads that are refused, and that try again at once, are not under way.
    #[test]
    fn refused_accesses_do_not_delay_a_thread_that_closes_the_gate() {
        let gate = AccessGate::default();
        let stop = pageferry_testkit::Stop::new();
        std::thread::scope(|scope| {
            let _stop = stop.on_drop();
            for _ in 0..4 {
                scope.spawn(|| {
                    while !stop.is_stopped() {
                        if gate.enter(Use::Write).is_ok() {
                            gate.leave(Use::Write);
                        }
                    }
                });
            }
            gate.freeze().unwrap();
            for _ in 0..1_000_000 {
                let writes = gate.state.load(Ordering::Relaxed) & WRITES;
                assert_eq!(writes, 0, "a refused write counted itself");
            }
            gate.thaw();
            let missing = Arc::new(PageBitmap::new(1));
            gate.arm(&missing, || Ok(())).unwrap();
            for _ in 0..1_000_000 {
                let inside = gate.state.load(Ordering::Relaxed) & (READS | WRITES);
                assert_eq!(inside, 0, "a refused access counted itself");
            }
        });
    }
}

#[cfg(all(test, shuttle))]
mod model {
    use super::*;
    use shuttle::sync::atomic::AtomicU64 as Inside;
    use shuttle::thread;

    /// Enters, and counts itself while it is inside.
    fn access(gate: &AccessGate, access: Use, inside: &Inside) {
        if gate.enter(access).is_ok() {
            inside.fetch_add(1, Ordering::SeqCst);
            inside.fetch_sub(1, Ordering::SeqCst);
            gate.leave(access);
        }
    }

    /// A thread that reads, one that writes, and one that freezes the memory, arms and begins.
    fn scenario() {
        let gate = Arc::new(AccessGate::default());
        let inside = [(); 2].map(|()| Arc::new(Inside::new(0)));
        let [reads, writes] = &inside;
        let threads: Vec<_> = [(Use::Read, reads), (Use::Write, writes)]
            .map(|(kind, inside)| {
                let (gate, inside) = (Arc::clone(&gate), Arc::clone(inside));
                thread::spawn(move || (0..2).for_each(|_| access(&gate, kind, &inside)))
            })
            .into();
        gate.freeze().unwrap();
        assert_eq!(writes.load(Ordering::SeqCst), 0, "a write in frozen memory");
        gate.thaw();
        let missing = Arc::new(PageBitmap::new(1));
        let none_inside = || {
            let all = reads.load(Ordering::SeqCst) + writes.load(Ordering::SeqCst);
            assert_eq!(all, 0, "an access while the machine waits for its memory");
        };
        let armed = gate.arm(&missing, || {
            none_inside();
            Ok(())
        });
        armed.unwrap();
        none_inside();
        assert_eq!(gate.enter(Use::Read), Err(AccessError::Receiving));
        gate.begin();
        gate.enter(Use::Read).unwrap();
        assert!(gate.missing().is_some());
        gate.freeze().unwrap();
        assert_eq!(gate.enter(Use::Write), Err(AccessError::Frozen));
        gate.leave(Use::Read);
        for thread in threads {
            thread.join().unwrap();
        }
    }

    #[test]
    fn what_a_closed_gate_keeps_out_is_never_inside() {
        shuttle::check_random(scenario, 5_000);
        shuttle::check_pct(scenario, 5_000, 3);
    }
}
