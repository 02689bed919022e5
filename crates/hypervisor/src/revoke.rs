//! How something is taken away from running vCPUs: the protocol and its proof, for the whole crate.
//!
//! Three places hold a translation: the memory slots (the truth), the second-stage tables (shared),
//! and each vCPU's TLB and decoded code (private). A fault reads them in that order, fills them in
//! that order, and waits for no other thread. (The tables have a protocol of their own, which
//! `pageferry-tdp` documents.) A revocation goes the same way. One revocation runs at a time, under
//! the mutex of [`Changes`](crate::state::Changes), which no vCPU takes inside its gate.
//!
//! # A slot is deleted or moved
//!
//! 1. *Begin*: make the slot invalid. Until the commit, a fault in its frames finds
//!    [`Found::Invalid`](crate::Found::Invalid). The vCPU leaves the guest, lets the writer go on,
//!    and tries again.
//! 2. *Quiesce*: make a request at every gate, and wait for the vCPUs that are inside to leave.
//! 3. *Zap* the SPTEs of the slot's frames.
//! 4. *Flush*: make a request at every gate, and wait again.
//! 5. *Commit*: put the new state of the slots in place. A fault in the old frames then finds
//!    nothing. If the slot moved over a part of itself, the fault finds the slot at its new place.
//!
//! Claim: after 4, no vCPU has a translation made from the old slot, and no vCPU will get one.
//!
//! 1. A fault runs inside the gate from its look-up of the slot to its TLB fill.
//! 2. A fault that found the old slot valid entered before 2 ended: an entry after the request has
//!    acquired all that came before it ([`Gate`](crate::Gate), "the begin of an entry"), the
//!    invalid mark included.
//! 3. So after 2 all such faults are over, and step 3 sees their SPTEs.
//! 4. From 2 on, no fault maps anything in the old frames until 5. Slots do not overlap by frame,
//!    so the only slot there is the invalid one. So after 3 there is no SPTE, and none comes before
//!    5.
//! 5. What TLBs and decoded code took from such SPTEs is gone when 4 has ended: the vCPUs that were
//!    inside have left, and none enters without flushing.
//! 6. Until its vCPU flushes, a TLB entry goes on reading and writing the old slot's memory, at its
//!    old place and no other. This looks as if the guest had been faster.
//! 7. Step 5, or a later change, puts new slots over empty entries. So an SPTE in a slot's frames
//!    always leads to that slot's memory. A fault that finds another host page there has found a
//!    bug.
//!
//! So a vCPU sees a deletion as follows: the memory, then nothing for a moment (it tries again),
//! then MMIO. It sees a move as the memory at the old place, then at the new one. It never sees the
//! slot at both places, and never another slot's bytes.
//!
//! KVM does the same. It installs an `INVALID` copy of the slot, waits for SRCU readers, zaps,
//! flushes, and installs the final state (`kvm_invalidate_memslot` and `kvm_set_memslot` in
//! `virt/kvm/kvm_main.c`).
//!
//! *Giving up.* A change that is refused before 5 is dropped. If it had begun, faults may have
//! found the slot invalid for a moment. They try again and find it as it was. The next touch maps
//! zapped SPTEs again. So nothing has changed, even if the writer's thread panicked in between.
//!
//! *When the memory's owner is dropped.* The old slot's record holds it ([`crate::HostMemory`]).
//! The scheme frees the record after 5, when no reader uses it any more (a grace period). No vCPU
//! can reach the memory then: by the claim this holds since 4, and a fault holds parts of the
//! record only inside its gate. A reader elsewhere, with a guard of its own, delays the freeing and
//! nothing else.
//!
//! # A slot is created
//!
//! *Commit*. Its frames belonged to no slot, so there is nothing to take away: no MMIO exit is
//! cached.
//!
//! # A slot gets `USERFAULT`
//!
//! *Commit* the flag. Then *quiesce*, *zap* and *flush*, as above. A fault that found the slot
//! without the flag is over when the vCPUs are quiesced, and its SPTE is zapped. Later faults test
//! the bit before they map. After the flush no TLB holds a translation from a zapped SPTE.
//!
//! A change of flags leaves each frame's host page what it was, so readers need not wait for it. An
//! SPTE that outlives the change (a flag that goes takes nothing away) leads to the right page.
//!
//! # A notifier invalidates host pages
//!
//! It changes no slot, and needs no quiescence. The MMU's invalidation refuses a fault of its
//! frames whose ticket is older than the invalidation's end. A fault takes its ticket before it
//! looks at the slots. Every translation from before is gone when the call returns.
//!
//! # Dirty logging starts
//!
//! *Commit* the flag. *Quiesce*. Split what is large, *write-protect* the range, and *flush* what
//! TLBs know of writable pages. By the argument above, no SPTE of the range is then writable, and
//! no TLB holds one that was, unless its fault saw the slot's log. From this invariant the log is
//! complete:
//!
//! > (W) A TLB entry lets writes through only if its fault saw the page's dirty bit set, or set it,
//! > after the SPTE was writable, and after the vCPU's last entry that flushed writes.
//!
//! # The dirty log is read
//!
//! For each word of the log: *take* the bits, and *write-protect* those pages. At the end flush
//! writes at every gate, and wait. Claim: each write to a page is reported by the first read that
//! begins after the write, or by an earlier one.
//!
//! 1. Let a write go through a TLB entry whose fault saw the dirty bit set (W). Only a read of the
//!    log clears that bit.
//! 2. If no read has taken it since, the next read takes it, and reports the page.
//! 3. If read R took it after the fault saw it, R's flush request came later still. So R waited for
//!    this stay inside the guest to end, and the TLB entry was dropped with it. So the write came
//!    before R returned, and R reports the page. A caller that copies the page after R returned
//!    copies the write.
//! 4. A fault tests the bit after the SPTE became writable. R takes the bit before it protects the
//!    SPTE. So no page stays writable and unlogged: if R's protection came before the SPTE became
//!    writable, R had taken the bit before. The fault then sees it clear, and sets it for the next
//!    read.
//!
//! With [`DirtyBy::Bits`](crate::DirtyBy::Bits) the entries' dirty bits take the place of the
//! log's. A TLB entry lets writes through only if the SPTE was dirty when the entry was filled.
//! Reading moves the bits to the log, and flushes. With rings, a page is pushed where its bit would
//! be set. A reset protects, then flushes. With
//! [`DirtyProtect::InitiallySet`](crate::DirtyProtect::InitiallySet) all bits are set when logging
//! starts, so (W) holds with nothing protected.
//!
//! A log that stops leaves its class in the SPTEs until the writer has undone it. It leaves small
//! pages where large ones could be. Both cost faults at most.
//!
//! A paused VM's log can be read without taking and protecting (`read_dirty_log`). The bits stay,
//! so a VM that runs on after all has lost nothing.
//!
//! # Stores are tracked
//!
//! *Set* the pages' bits. *Quiesce*. Split what is large, and make the SPTEs
//! [`Writes::MmuForbids`](pageferry_tdp::format::Writes). Flush what TLBs know of writable pages.
//! Claim:
//!
//! > (T) From then on until a page's bit is cleared, its SPTE is not writable, and no TLB entry
//! > lets a store to it through.
//!
//! 1. A fault that found the bit clear is over when the vCPUs are quiesced. The sweep sees the SPTE
//!    that it made writable, or large.
//! 2. Later faults find the bit set. They map the page without the permission, and no large page
//!    over it.
//! 3. An SPTE of that class becomes writable only by a fault that tested the bit. The fast path
//!    refuses the class. Logs that start and stop pass over it. Recovery, under the same mutex,
//!    tests the bits of all pages that it joins. Zapping an SPTE clears no bit.
//! 4. A store may go through an SPTE that the sweep has not reached yet, or a TLB entry filled from
//!    it. The flush waits for it, so it is over when the call returns.
//!
//! Untracking clears the bit with release order. A fault that finds it clear acquires that. So its
//! store comes after everything that the VMM has read of the page. Untracking changes no SPTE and
//! no TLB: a vCPU that knows the page as tracked leaves its guest, or faults, once more.
//!
//! A refused store has not reached the log. A store that goes through later comes by the fault that
//! makes the SPTE writable, which keeps (W) as for any other page. SPTEs that lose the permission
//! to tracking tell the log what their dirty bits say.
//!
//! # A page comes to be watched
//!
//! The first LR in a page makes all vCPUs drop what their TLBs know of writable pages. So every
//! store to that page is seen from then on: announce, flush writes, confirm.
//! [`crate::hart::Reservations`] says why this suffices. The vCPU that met the LR does it outside
//! its gate.
//!
//! # What waits for what
//!
//! The writer waits for vCPUs to leave. They leave within a page of straight-line code, and on
//! their way take no lock that the writer holds. The writer may also wait for readers of the slots,
//! if many replaced records have gathered. A vCPU is such a reader during a fault only.
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

    /// Quiesces, zaps the SPTEs of `range`, and flushes. Returns how many frames had one.
    pub(crate) fn unmap(&self, worker: &mut Worker, range: GfnRange, log: &impl Log) -> u64 {
        self.quiesce();
        // Where nothing was mapped it flushes nothing: TLBs and decoded code are filled from SPTEs,
        // and each removal of SPTEs flushes before it is done.
        worker.zap(range, log)
    }

    /// Lets LR reserve in the page of the host address `address`.
    /// The caller holds [`Changes`](crate::state::Changes), so that one thread at a time announces.
    pub(crate) fn watch(&self, address: u64) {
        if !self.reservations.is_watched(address) {
            self.reservations.announce(address);
            self.flush_writes();
            self.reservations.confirm(address);
        }
    }
}
