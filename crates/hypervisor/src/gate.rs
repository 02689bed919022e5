//! The gate between a vCPU's thread and its guest, through which other threads reach the vCPU.
//!
//! **Guarantee.** When [`Gate::request`] and then [`Ticket::wait`] have returned:
//! 1. Every entry into the guest that began before the request has ended.
//! 2. All accesses of those entries to guest memory and tables happen before the return.
//! 3. A later entry begins only after the vCPU has taken the request: for example, after it has
//!    flushed its TLB.
//!
//! No kick is lost, whether the vCPU is inside, outside, or just entering.
//!
//! **Mechanism.** Each vCPU has one word: the open requests, one bit "inside the guest", and a
//! count of entries. KVM has the same protocol in two words (`vcpu->mode` and `vcpu->requests`, see
//! `Documentation/virt/kvm/vcpu-requests.rst`). Each side of it writes one word and reads the
//! other, so both need a sequentially consistent fence. Here both sides change *one* word by
//! read-modify-write operations, which are totally ordered:
//!
//! - The vCPU enters by a compare-exchange from "no request, outside" to "inside, one more entry".
//!   So no entry succeeds while a request is open.
//! - A requester sets its bit by `fetch_or`, and learns from the old value whether the vCPU is
//!   inside. If the `fetch_or` comes first, the entry fails, and the vCPU takes the request before
//!   it tries again. If the entry comes first, the requester sees the inside bit and waits for that
//!   entry to end.
//! - The end of an entry: the vCPU polls ([`Gate::has_requests`], one relaxed load) and leaves by a
//!   `fetch_and` with release order. [`Ticket::has_left`] reads it with acquire order. So
//!   everything that the vCPU did inside happens before the requester's next step.
//! - The begin of an entry: the vCPU takes requests by a `fetch_and` with acquire order. It reads
//!   the requester's release, or a later read-modify-write of the same release sequence. So
//!   everything that the requester did before (zapped SPTEs, published slots) happens before all
//!   later entries.
//!
//! **The poll flag** is a second word, which an interpreter polls. A requester sets it after its
//! `fetch_or`. The vCPU clears it before each read-modify-write of the first word by which it
//! enters or takes requests. There are two cases:
//! 1. The requester's `fetch_or` comes after that read-modify-write. Then it acquires the clearing,
//!    so the setting comes later in the flag's order and stays.
//! 2. The `fetch_or` comes before. Then the vCPU takes the request, or the request keeps the vCPU
//!    out. A flag that the requester sets late costs one needless exit.
//!
//! So the vCPU notices every request.
//!
//! The count of entries distinguishes a vCPU that left and entered again from a vCPU that never
//! left. So a requester waits for one exit at most, even if other threads keep making requests.
//!
//! **Neighbours.** [`crate::VcpuCore`] enters and leaves. The VM requests flushes, and
//! [`crate::KickHandle`] kicks. The gate knows nothing of TLBs, tables or slots. A loom model
//! checks it.

use crate::sync::{AtomicU32, AtomicU64, Ordering, sleep, spin_loop, yield_now};
use core::time::Duration;

/// A set of requests to a vCPU. Requests of several threads merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Requests(u64);

impl Requests {
    /// Return from `run` with [`crate::Exit::Kicked`].
    pub const KICK: Self = Self(1);
    /// Leave the guest once, so that every fault that read old slots has ended.
    pub const QUIESCE: Self = Self(1 << 1);
    /// Forget which pages are writable (after write protection).
    pub const FLUSH_WRITES: Self = Self(1 << 2);
    /// Forget all translations, and compare decoded code with memory.
    pub const FLUSH: Self = Self(1 << 3);
    /// Forget what the guest's tables say, like SFENCE.VMA without operands.
    pub const FENCE_VMA: Self = Self(1 << 4);
    /// Compare decoded code with memory, like FENCE.I.
    pub const FENCE_I: Self = Self(1 << 5);

    /// Take the interrupts that other threads have raised or lowered.
    pub const INTERRUPT: Self = Self(1 << 6);

    const ALL: u64 = 0x7f;

    /// Whether all of `other` is in `self`.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl core::ops::BitOr for Requests {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

const INSIDE: u64 = 1 << 7;
/// One entry, in the count that fills the rest of the word. 2^56 entries take two years at one a
/// nanosecond. Even a wrap would matter only if it hit the same count exactly.
const ENTRY: u64 = 1 << 8;

/// The gate of one vCPU. The module's documentation gives its protocol.
#[derive(Debug)]
#[repr(align(128))]
pub struct Gate {
    word: AtomicU64,
    /// Not 0 if the vCPU should leave.
    poll: AtomicU32,
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

impl Gate {
    /// Makes a gate without requests, whose vCPU is outside.
    #[must_use]
    pub fn new() -> Self {
        Self {
            word: AtomicU64::new(0),
            poll: AtomicU32::new(0),
        }
    }

    /// Enters the guest if no request is open. Otherwise it takes the open requests: the vCPU stays
    /// outside, serves them, and tries again. Only the vCPU's own thread calls this, while it is
    /// outside.
    ///
    /// # Errors
    /// The requests that it took.
    ///
    /// # Panics
    /// If the vCPU is inside already.
    #[inline]
    pub fn enter(&self) -> Result<Inside<'_>, Requests> {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            self.poll.store(0, Ordering::Relaxed);
            assert!(word & INSIDE == 0, "a vCPU entered its guest twice");
            if word & Requests::ALL != 0 {
                let old = self.word.fetch_and(!Requests::ALL, Ordering::AcqRel);
                return Err(Requests(old & Requests::ALL));
            }
            let entered = word.wrapping_add(ENTRY) | INSIDE;
            match self.word.compare_exchange_weak(
                word,
                entered,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(Inside { gate: self }),
                Err(now) => word = now,
            }
        }
    }

    /// Whether a vCPU inside should leave. One relaxed load; it may return true without need.
    #[inline]
    #[must_use]
    pub fn has_requests(&self) -> bool {
        self.poll.load(Ordering::Relaxed) != 0
    }

    /// The word that [`Gate::has_requests`] loads. A loop may poll it directly, and leave when it
    /// is not 0.
    #[cfg(not(loom))]
    #[must_use]
    #[inline]
    pub const fn poll_flag(&self) -> &AtomicU32 {
        &self.poll
    }

    /// Whether a kick is open.
    #[must_use]
    pub fn is_kicked(&self) -> bool {
        self.word.load(Ordering::Relaxed) & Requests::KICK.0 != 0
    }

    /// Whether any of `requests` is open.
    #[must_use]
    pub fn has_any(&self, requests: Requests) -> bool {
        self.word.load(Ordering::Relaxed) & requests.0 != 0
    }

    /// Makes a request. If the vCPU is inside, it leaves soon, and the caller can wait for that
    /// with the ticket.
    pub fn request(&self, requests: Requests) -> Option<Ticket<'_>> {
        let old = self.word.fetch_or(requests.0, Ordering::AcqRel);
        self.poll.store(1, Ordering::Relaxed);
        (old & INSIDE != 0).then_some(Ticket {
            gate: self,
            entry: old & !Requests::ALL,
        })
    }
}

/// Proof that the vCPU is inside its guest. Dropping it leaves the guest, also during a panic.
#[derive(Debug)]
pub struct Inside<'gate> {
    gate: &'gate Gate,
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        self.gate.word.fetch_and(!INSIDE, Ordering::Release);
    }
}

/// One entry of a vCPU into its guest. A requester waits for its end.
#[derive(Debug)]
#[must_use = "the vCPU may still be inside"]
pub struct Ticket<'gate> {
    gate: &'gate Gate,
    entry: u64,
}

impl Ticket<'_> {
    /// Whether that entry has ended. If so, everything that the vCPU did in it happens before the
    /// return.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.gate.word.load(Ordering::Acquire) & !Requests::ALL != self.entry
    }

    /// Waits until that entry has ended. It spins for some microseconds, then yields, then sleeps
    /// for at most a millisecond at a time.
    ///
    /// A vCPU inside polls every few dozen instructions. So the wait is long only if that vCPU's
    /// thread waits for a CPU.
    pub fn wait(&self) {
        const SPINS: u32 = if cfg!(loom) { 0 } else { 200 };
        const YIELDS: u32 = if cfg!(loom) { 0 } else { 50 };
        for _ in 0..SPINS {
            if self.has_left() {
                return;
            }
            spin_loop();
        }
        for _ in 0..YIELDS {
            if self.has_left() {
                return;
            }
            yield_now();
        }
        let mut nap = Duration::from_micros(20);
        while !self.has_left() {
            sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(1));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_request_keeps_the_vcpu_out_until_it_is_taken() {
        let gate = Gate::new();
        assert!(gate.request(Requests::FLUSH).is_none());
        assert!(gate.request(Requests::KICK).is_none());
        let taken = gate.enter().unwrap_err();
        assert_eq!(taken, Requests::FLUSH | Requests::KICK);
        assert!(gate.enter().is_ok());
    }

    #[test]
    fn a_ticket_is_for_one_entry() {
        let gate = Gate::new();
        let inside = gate.enter().unwrap();
        let ticket = gate.request(Requests::QUIESCE).unwrap();
        assert!(gate.has_requests() && !ticket.has_left());
        drop(inside);
        assert!(ticket.has_left());
        assert_eq!(gate.enter().unwrap_err(), Requests::QUIESCE);
        let _again = gate.enter().unwrap();
        let _second = gate.request(Requests::QUIESCE).unwrap();
        assert!(ticket.has_left(), "a later entry or request does not count");
    }

    #[test]
    fn an_entry_that_panics_still_ends() {
        let gate = Gate::new();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _inside = gate.enter().unwrap();
            panic!("in the guest");
        }));
        assert!(caught.is_err());
        assert!(gate.request(Requests::FLUSH).is_none());
    }
}
