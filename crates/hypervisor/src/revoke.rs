//! The protocol of revocations, with its proof: how a call takes memory or rights away from running
//! vCPUs. It holds for the whole crate.
//!
//! Three places hold a translation: the memory slots (the truth), the second-stage tables (shared),
//! and each vCPU's TLB and decoded code (private). The guest's own tables are a fourth, but only
//! the guest changes them. To the hypervisor they are guest memory: a walk reads them through the
//! TLB, and what it finds goes into the same TLB, so each flush here covers both.
//!
//! The rest concerns the first three. A fault reads and fills them in that order, and waits for no
//! other thread. (`pageferry-tdp` documents the protocol of the tables.) A revocation uses the same
//! order. One revocation runs at a time, under the mutex of
//! [`Changes`](crate::state::Changes), which no vCPU takes inside its gate.
//!
//! # A slot is deleted or moved
//!
//! 1. *Begin*: make the slot invalid. Until the commit, a fault in its frames finds
//!    [`Found::Invalid`](crate::Found::Invalid). The vCPU leaves the guest, yields its CPU to the
//!    writer, and tries again.
//! 2. *Quiesce*: make a request at every gate, and wait for the vCPUs that are inside to leave.
//! 3. *Zap* the SPTEs of the slot's frames.
//! 4. *Flush*: make a request at every gate, and wait again.
//! 5. *Commit*: publish the new state of the slots. A fault in the old frames then finds nothing.
//!    If the slot moved over a part of itself, the fault finds the slot at its new place.
//!
//! Claim: after 4, no vCPU has a translation made from the old slot, and no vCPU will get one.
//!
//! 1. A fault runs inside the gate from its look-up of the slot to its TLB fill.
//! 2. A fault that found the old slot valid runs in an entry from before the request of step 2. An
//!    entry after the request has acquired everything that came before the request
//!    ([`Gate`](crate::Gate), "the begin of an entry"), the invalid mark included.
//! 3. So after step 2 all such faults have ended, and step 3 sees their SPTEs.
//! 4. From step 2 to step 5, no fault maps anything in the old frames. Slots do not overlap by
//!    frame, so the only slot there is the invalid one. So there is no SPTE from step 3 to step 5.
//! 5. After step 4, no TLB and no decoded code has a translation from such an SPTE: the vCPUs that
//!    were inside have left, and none enters without flushing.
//! 6. Until its vCPU flushes, a TLB entry still reads and writes the old slot's memory, at its old
//!    place and no other. To the guest, this is the same as an earlier access.
//! 7. Step 5, or a later change, puts new slots over empty entries. So an SPTE in a slot's frames
//!    always leads to that slot's memory. A fault that finds another host page there has found a
//!    bug.
//!
//! So a vCPU sees a deletion as follows: first the memory, then an invalid slot (it tries again),
//! then MMIO. It sees a move as the memory at the old place, then at the new place. It never sees
//! the slot at both places, and never another slot's bytes.
//!
//! KVM does the same. It installs an `INVALID` copy of the slot, waits for SRCU readers, zaps,
//! flushes, and installs the final state (`kvm_invalidate_memslot` and `kvm_set_memslot` in
//! `virt/kvm/kvm_main.c`).
//!
//! *Giving up.* A change that fails before step 5 is dropped. If it had begun, faults may have
//! found the slot invalid for a moment. They try again and find it unchanged. The next access maps
//! zapped SPTEs again. So nothing has changed, even if the writer's thread panicked in between.
//!
//! *When the memory's owner is dropped.* The old slot's record holds it ([`crate::HostMemory`]).
//! The scheme frees the record after step 5, when no reader uses it any more (a grace period). No
//! vCPU can reach the memory then: the claim holds since step 4, and a fault uses the record only
//! inside its gate. Any other reader with a guard delays the freeing, and nothing else.
//!
//! # A slot is created
//!
//! *Commit*. No slot had its frames, and vCPUs do not cache MMIO exits. So there is nothing to take
//! away.
//!
//! # A slot gets `USERFAULT`
//!
//! *Commit* the flag. Then *quiesce*, *zap* and *flush*, as above. A fault that found the slot
//! without the flag has ended when the vCPUs are quiesced, so its SPTE is zapped. Later faults test
//! the bit before they map. After the flush no TLB holds a translation from a zapped SPTE.
//!
//! A change of flags changes no frame's host page, so readers need not wait for it. An SPTE that
//! outlives the change leads to the right page. (A removed flag takes nothing away.)
//!
//! # A notifier invalidates host pages
//!
//! It changes no slot, and needs no quiescence. A fault takes a ticket before it reads the slots.
//! The tables refuse a fault of the invalidated frames if its ticket is older than the end of the
//! invalidation. Every earlier translation is gone when the call returns.
//!
//! # Dirty logging starts
//!
//! *Commit* the flag. *Quiesce*. Split large pages, *write-protect* the range, and *flush* writes
//! (the TLB entries for writing). By the argument above, no SPTE of the range is then writable, and
//! no TLB has an entry from a writable one. The only exceptions are those of faults that saw the
//! slot's log. This invariant makes the log complete:
//!
//! > (W) A TLB entry lets writes through only if its fault saw the page's dirty bit set, or set it.
//! > That happened after the SPTE was writable, and after the vCPU's last entry that flushed
//! > writes.
//!
//! # The dirty log is read
//!
//! For each word of the log: *take* the bits, and *write-protect* those pages. At the end *flush*
//! writes, and wait. Claim: each write to a page is reported by the first read that begins after
//! the write, or by an earlier read.
//!
//! 1. Let a write go through a TLB entry whose fault saw the dirty bit set (W). Only a read of the
//!    log clears that bit.
//! 2. If no read has taken it since, the next read takes it, and reports the page.
//! 3. If read R took it after the fault saw it, R's flush request came later still. So R waited for
//!    this entry into the guest to end, which dropped the TLB entry. So the write came before R
//!    returned, and R reports the page. A caller that copies the page after R returned copies the
//!    write.
//! 4. A fault tests the bit after the SPTE became writable. R takes the bit before it protects the
//!    SPTE. So no page stays writable and unlogged: if R's protection came before the SPTE became
//!    writable, R had taken the bit before. The fault then sees it clear, and sets it for the next
//!    read.
//!
//! Variants:
//! - With [`DirtyBy::Bits`](crate::DirtyBy::Bits), the dirty bits of the SPTEs replace the log's. A
//!   TLB entry lets writes through only if the SPTE was dirty when the entry was filled. Reading
//!   moves the bits to the log, and flushes.
//! - With rings, a fault pushes the page instead of setting its bit. A reset protects, then
//!   flushes.
//! - With [`DirtyProtect::InitiallySet`](crate::DirtyProtect::InitiallySet), all bits are set when
//!   logging starts. So (W) holds with nothing protected.
//!
//! When a log stops, the SPTEs keep its class and its small pages until the writer recovers them.
//! Both cost faults at most.
//!
//! `read_dirty_log` neither takes bits nor protects pages. It serves a paused VM. The bits stay, so
//! a VM that resumes after all has lost nothing.
//!
//! # Stores are tracked
//!
//! *Set* the pages' bits. *Quiesce*. Split large pages, and make the SPTEs
//! [`Writes::MmuForbids`](pageferry_tdp::format::Writes). *Flush* writes. Claim:
//!
//! > (T) Until a page's bit is cleared, its SPTE is not writable, and no TLB entry lets a store to
//! > it through.
//!
//! 1. A fault that found the bit clear has ended when the vCPUs are quiesced. The sweep sees the
//!    SPTE that it made writable, or large.
//! 2. Later faults find the bit set. They map the page read-only, and no large page over it.
//! 3. An SPTE of that class becomes writable only by a fault that tested the bit. The fast path
//!    refuses the class. Starting and stopping a log skips it. Recovery, under the same mutex,
//!    tests the bits of all pages that it joins. Zapping an SPTE clears no bit.
//! 4. A store may go through an SPTE before the sweep reaches it, or through a TLB entry from such
//!    an SPTE. The flush waits for that store, so it is over when the call returns.
//!
//! Untracking clears the bit with release order. A fault that finds it clear acquires that. So its
//! store comes after all reads of the page that the VMM did before. Untracking changes no SPTE and
//! no TLB. So a vCPU may leave its guest, or fault, once more for the page.
//!
//! A refused store has not reached the log. When the store is repeated, its fault makes the SPTE
//! writable, which keeps (W) as for any other page. An SPTE that loses the write permission to
//! tracking passes its dirty bit to the log.
//!
//! # A page becomes watched
//!
//! The first LR in a page makes all vCPUs drop their TLB entries for writing: announce, flush
//! writes, confirm. From then on, every store to the page takes the miss path.
//! [`crate::hart::Reservations`] shows why this suffices. The vCPU that executed the LR does it
//! outside its gate.
//!
//! The sets of watched pages become empty by the same means: begin, flush writes, finish.
//!
//! # A hart fences another one
//!
//! A hart stores to the guest's tables, leaves the guest, and requests FENCE_VMA at another gate
//! ([`Vm::fence`](crate::Vm::fence)). Claim: when the ticket has been waited for, the other hart
//! uses no translation from before the store.
//!
//! 1. If the other hart was inside, that entry has ended.
//! 2. A later entry follows the taking of the request, which empties all banks of the TLB, its
//!    second level, and the virtual table of decoded code.
//! 3. A walk after that has acquired everything that came before the request, the store included.
//!
//! # What waits for what
//!
//! The writer waits for vCPUs to leave. They leave within a page of straight-line code, and take no
//! lock that the writer holds before that. The writer may also wait for readers of the slots, if
//! many replaced records wait to be freed. A vCPU is such a reader during a fault only.
//!
//! A vCPU waits for the writer only as described above, outside its gate. Exits to the VMM happen
//! outside the gate too. So a VMM may call the VM from the thread of a vCPU that it serves.

use crate::gate::Requests;
use crate::platform::Worker;
use crate::state::VmState;
use pageferry_addr::GfnRange;
use pageferry_tdp::Log;

impl VmState {
    /// Waits until every vCPU that was inside its guest has left it.
    pub(crate) fn quiesce(&self) {
        self.mmu.platform().request(Requests::QUIESCE);
    }

    /// Makes every vCPU forget which pages are writable.
    pub(crate) fn flush_writes(&self) {
        self.mmu.platform().request(Requests::FLUSH_WRITES);
    }

    /// Quiesces, zaps the SPTEs of `range`, and flushes. Returns the number of frames that had one.
    pub(crate) fn unmap(&self, worker: &mut Worker, range: GfnRange, log: &impl Log) -> u64 {
        self.quiesce();
        // If nothing was mapped, this flushes nothing: TLBs and decoded code are filled from SPTEs,
        // and each removal of SPTEs flushes before it returns.
        worker.zap(range, log)
    }

    /// Allows LR to reserve in the page of the host address `address`. The caller holds
    /// [`Changes`](crate::state::Changes), so that one thread at a time announces.
    pub(crate) fn watch(&self, address: u64) {
        if !self.reservations.is_watched(address) {
            self.reservations.announce(address);
            self.flush_writes();
            self.vmm_stores.wait();
            self.reservations.confirm(address);
        }
    }

    /// Makes stores to all watched pages fast again. The caller holds
    /// [`Changes`](crate::state::Changes).
    pub(crate) fn unwatch(&self) {
        self.reservations.begin_unwatch();
        self.flush_writes();
        self.reservations.finish_unwatch();
    }
}
