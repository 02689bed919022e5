//! Taking something away from running vCPUs: the protocol, once and for all.
//!
//! Three places hold on to a translation: the memory slots (the truth), the second-stage tables (shared) and
//! each vCPU's TLB and decoded code (private). A fault reads them in that order and fills them in that
//! order; it waits for nobody (the tables' own protocol is `docs/mmu.md`). Revoking goes the same way, one revocation at a
//! time, under the [`Shared::writer`] mutex, which no vCPU takes inside its gate.
//!
//! # A slot goes or moves
//!
//! 1. *Begin*: make the slot invalid. Until the commit, a fault in its frames finds
//!    [`Found::Invalid`](crate::Found::Invalid): it leaves the guest, lets the writer go on, and tries again.
//! 2. *Quiesce*: request it at every gate, wait for the vCPUs that are inside to leave.
//! 3. *Zap* the SPTEs of the slot's frames.
//! 4. *Flush*: request it at every gate, wait again.
//! 5. *Commit*: put the new state of the slots in place. Faults in the old frames find nothing, or, where the
//!    slot moved over a part of itself, the slot at its new place.
//!
//! Claim: after 4, no vCPU has a translation made from the old slot, and none will come to have one.
//! - A fault runs inside the gate from its look at the slots to its TLB fill. One that found the old slot valid
//!   entered before 2 ended, since an entry after the request has acquired what came before it
//!   ([`Gate`](crate::Gate), "begins"), the invalid mark included. So after 2 all of them are over and their
//!   SPTEs are there for 3 to see.
//! - From 2 on no fault maps anything in the old frames: slots do not overlap by frame, so the only slot there
//!   is the invalid one, until 5. So after 3 no SPTE is there, and none comes before 5.
//! - What TLBs and decoded code took from such SPTEs before 3 is gone when 4 has ended: who was inside has left, and
//!   nobody enters without flushing. Until its vCPU flushes, a TLB entry goes on reading and writing the old
//!   slot's memory, at its old place and no other: as if the guest had been faster.
//! - What 5 puts at those frames, or a later change does, meets empty entries. So an SPTE in a slot's frames always
//!   leads to that slot's memory, and a fault that finds another host page there has found a bug.
//!
//! What a vCPU sees of a deletion is therefore the memory, then nothing for a moment (it tries again), then MMIO;
//! of a move, the memory at the old place, then at the new one. It never sees the slot at both places, and never
//! another slot's bytes.
//!
//! KVM does the same: it installs an `INVALID` copy of the slot, waits for SRCU readers, zaps, flushes, and installs
//! the final state (`kvm_invalidate_memslot` and `kvm_set_memslot` in `virt/kvm/kvm_main.c`).
//!
//! *Giving up.* A change that is refused before 5 is dropped instead. If it has begun, faults may have found the
//! slot invalid for a moment; they try again and find it as it was. SPTEs that were zapped are mapped again by the
//! next touch. So nothing has changed, also where the writer's thread panicked in between.
//!
//! *When the memory's owner goes.* The old slot's record holds it ([`crate::HostMemory`]), and the scheme that
//! keeps the slots frees the record after 5, when no reader uses it any more (a grace period). No vCPU can reach
//! the memory then: by the claim that is so since 4, and what a fault holds of the record it holds inside its gate.
//! A reader elsewhere, with a guard of its own, delays the freeing and nothing else.
//!
//! # A slot comes
//!
//! Commit. Its frames were nobody's, so there is nothing to take away: an MMIO exit is cached nowhere.
//!
//! # A slot gets `USERFAULT`
//!
//! *Commit* the flag, then *quiesce*, *zap*, *flush*, as above. A fault that found the slot without the flag is over when the
//! vCPUs are quiesced, and its SPTE is zapped; later ones test the bit before they map. After the flush no TLB holds what
//! came from zapped SPTEs.
//!
//! # A notifier invalidates host pages
//!
//! It changes no slot, and needs no quiescence: the MMU's invalidation keeps faults of its frames out whose ticket is older than its end,
//! and a fault takes its ticket before it looks at the slots (`docs/mmu.md`, "A fault against an invalidation"). Every
//! translation from before is gone when it returns.
//!
//! A change of flags leaves each frame's host page what it was, so readers need not wait for it, and an SPTE that
//! outlives the change (a flag that goes takes nothing away) leads to the right page.
//!
//! # Dirty logging starts
//!
//! Commit the flag; quiesce; split what is large; *write-protect* the range; flush what TLBs know of writable pages. By
//! the same argument, afterwards no SPTE of the range is writable and no TLB holds one that was, unless its fault saw
//! the slot's log. That is the invariant from which the log is complete:
//!
//! > (W) A TLB entry lets writes through only if, since the vCPU's last entry that flushed writes, its fault
//! > saw the page's dirty bit set, or set it, after the SPTE was writable.
//!
//! # The dirty log is read
//!
//! For each word of the log: *take* the bits, *write-protect* those pages; at the end flush writes at every
//! gate and wait. Claim: each write to a page is reported by the first read that begins after it, or
//! by one before.
//! - Let a write go through a TLB entry whose fault saw the dirty bit set (W). The bit is cleared by a read of
//!   the log only. If no read has taken it since, the next read takes it: reported. If read R took
//!   it after the fault saw it, R's flush request came later still, so R waited for this stay inside the guest to
//!   end, and the TLB entry died with it. So the write came before R returned, and R reports the page:
//!   whoever copies the page after R returns copies the write.
//! - A fault tests the bit after the SPTE became writable, and R takes the bit before it protects the
//!   SPTE. So "writable but unlogged" cannot stay: if R's protection came before the SPTE became writable, so did
//!   R's taking, and the fault sees the bit clear and sets it for the next read.
//!
//! With [`DirtyBy::Bits`](crate::DirtyBy::Bits) the entries' dirty bits take the place of the log's in this: a TLB entry lets writes
//! through only if the SPTE was dirty when it was filled, and reading moves the bits to the log and flushes. With rings a page
//! is pushed where its bit would be set, and a reset protects, then flushes. With
//! [`DirtyProtect::InitiallySet`](crate::DirtyProtect::InitiallySet) all bits are set when logging starts, so that (W) holds with
//! nothing protected.
//!
//! A log that stops leaves its class in the SPTEs until the writer has undone it, and small pages where large ones could be: both
//! cost faults at most.
//!
//! A paused VM's log can be read without taking and protecting (`read_dirty_log`): bits stay, so a VM that
//! goes on after all has lost nothing.
//!
//! # Stores are tracked
//!
//! *Set* the pages' bits; *quiesce*; split what is large; make the SPTEs [`Writes::MmuForbids`](pageferry_tdp::format::Writes); flush
//! what TLBs know of writable pages. Claim:
//!
//! > (T) From then on, until a page's bit is cleared, its SPTE is not writable, and no TLB entry lets a store to it through.
//!
//! - A fault that found the bit clear is over when the vCPUs are quiesced, and the SPTE it made writable, or large, is there for
//!   the sweep. Later ones find the bit set: they map the page without the permission, and no large page over it.
//! - An SPTE of that class becomes writable by a fault that asked the bit, and by nothing else: the fast path
//!   refuses it, logs that start and stop pass over it, and recovery, under the same mutex, asks the bits of all pages that it
//!   joins. An SPTE that is zapped takes no bit with it.
//! - A store may go through an SPTE that the sweep has not met yet, or a TLB entry filled from it. The flush waits for it, so it
//!   is over when the call returns.
//!
//! Untracking clears the bit, with release. A fault that finds it clear acquires that, so its store comes after whatever the VMM has read of
//! the page. It gives and takes nothing: a vCPU that knows the page as tracked leaves its guest, or faults, once more.
//!
//! A store that is refused has not come to the log. One that goes through later comes by the fault that makes the SPTE writable, which
//! keeps (W) as for any other page. SPTEs that lose the permission to the tracker tell the log what their dirty bits say.
//!
//! # A page comes to be watched
//!
//! The first LR in a page makes all vCPUs drop what their TLBs know of writable pages, so that every store to that
//! page is seen from then on: announce, flush writes, confirm. Why this suffices is said at
//! [`crate::hart::Reservations`]. The vCPU that met the LR does it outside its gate.
//!
//! # What waits for what
//!
//! The writer waits for vCPUs to leave; they leave within a page of straight-line code, and on their way take no lock
//! that the writer holds. It may wait for readers of the slots, if many replaced records have gathered; a vCPU
//! is one during a fault only. A vCPU waits for the writer only as described above, outside its gate. Exits to the VMM
//! happen outside the gate too, so a VMM may call the VM from the thread of a vCPU it is serving.

use crate::clock::Clock;
use crate::gate::Requests;
use crate::hart::Reservations;
use crate::platform::Harts;
use crate::slots::Memslots;
use pageferry_addr::GfnRange;
use pageferry_tdp::format::Sv48x4Svadu;
use pageferry_tdp::ring::Resetter;
use pageferry_tdp::{Log, Mmu};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The format of the second-stage tables.
pub(crate) type Format = Sv48x4Svadu;

/// What changes and reads them.
pub(crate) type Worker = pageferry_tdp::Worker<Format, Harts>;

/// What all handles and vCPUs of a VM share.
pub(crate) struct Shared<M> {
    pub(crate) mmu: Arc<Mmu<Format, Harts>>,
    pub(crate) clock: Clock,
    pub(crate) reservations: Reservations,
    writer: Mutex<Writer<M>>,
}

/// What is changed by one thread at a time.
pub(crate) struct Writer<M> {
    pub(crate) slots: M,
    /// Whether the id was given to a vCPU; as many as there are ids.
    pub(crate) used: Vec<bool>,
    pub(crate) worker: Worker,
    /// The third ends of the vCPUs' dirty rings.
    pub(crate) rings: Vec<Resetter>,
    /// Where notifiers gather frames, so that they need not allocate.
    pub(crate) ranges: Vec<GfnRange>,
}

impl<M: Memslots> Shared<M> {
    pub(crate) fn new(slots: M, max_vcpus: u32) -> Self {
        let Ok(mmu) = Mmu::new(Harts::default()) else {
            unreachable!("the platform aborts where there is no memory");
        };
        let worker = mmu.worker();
        Self {
            mmu,
            clock: Clock::new(),
            reservations: Reservations::new(),
            writer: Mutex::new(Writer {
                slots,
                used: vec![false; max_vcpus as usize],
                worker,
                rings: Vec::new(),
                ranges: Vec::new(),
            }),
        }
    }

    /// Becomes the one who changes things. A panic of an earlier one is no obstacle: each step leaves the
    /// VM in a state from which every later call works.
    pub(crate) fn writer(&self) -> MutexGuard<'_, Writer<M>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every vCPU that was inside its guest has left it.
    pub(crate) fn quiesce(&self) {
        self.mmu.platform().request(Requests::QUIESCE);
    }

    /// Makes every vCPU forget which pages are writable.
    pub(crate) fn flush_writes(&self) {
        self.mmu.platform().request(Requests::FLUSH_WRITES);
    }

    /// Quiesces, zaps the SPTEs of `range`, and flushes; gives how many frames had one.
    pub(crate) fn unmap(&self, worker: &mut Worker, range: GfnRange, log: &impl Log) -> u64 {
        self.quiesce();
        // Where nothing was mapped it flushes nothing: TLBs and decoded code are filled from SPTEs, and whoever removes
        // SPTEs flushes before it is done.
        worker.zap(range, log)
    }

    /// Makes the page of the host address `address` one in which LR may reserve.
    pub(crate) fn watch(&self, address: u64) {
        let _writer = self.writer();
        if !self.reservations.is_watched(address) {
            self.reservations.announce(address);
            self.flush_writes();
            self.reservations.confirm(address);
        }
    }
}
