//! Taking something away from running vCPUs: the protocol, once and for all.
//!
//! Three places hold on to a translation: the memory slots (the truth), the second-stage tables (shared) and
//! each vCPU's TLB and decoded code (private). A fault reads them in that order and fills them in that
//! order, without a lock. Revoking goes the same way, one revocation at a time, under the [`Shared::writer`]
//! mutex, which no vCPU takes inside its gate.
//!
//! # Slots go, move, or get `USERFAULT`; a notifier invalidates host pages
//!
//! 1. *Publish* the new version of the slots.
//! 2. *Quiesce*: request it at every gate, wait for the vCPUs that are inside to leave.
//! 3. *Zap* the SPTEs of the old range.
//! 4. *Flush*: request it at every gate, wait again.
//!
//! Claim: after 4, no vCPU has a translation made from the old version, and none will come to have one.
//! - A fault runs inside the gate from its look at the slots to its TLB fill. One that looked at the old
//!   version entered before 2 ended, since an entry after the request has acquired the publication
//!   ([`Gate`](crate::Gate), "begins"). So after 2 all of them are over and their SPTEs are there for 3 to see,
//!   and later faults look at the new version: none maps the old host page of the range any more.
//! - After 3, no SPTE of the old version is left and, by the first point, none will be installed.
//! - What TLBs took from such SPTEs before 3 is gone when 4 has ended: who was inside has left, and nobody
//!   enters without flushing.
//! - Between 1 and 3 a fault by the new version may find an old SPTE at its frame (a slot that moves over a part
//!   of itself). It differs in its host page, so the fault does not use it; it leaves the guest, lets the
//!   writer go on, and tries again.
//!
//! KVM does the same under other names: it installs an `INVALID` slot, waits for SRCU readers, zaps,
//! flushes. One grace period would do if every fault compared the SPTE with the slots after the walk, but
//! the second wait is the flush that is needed anyway, and the first costs a few microseconds.
//!
//! # Dirty logging starts
//!
//! Publish; quiesce; *write-protect* the range; flush what TLBs know of writable pages. By the same argument,
//! afterwards no SPTE of the range is writable and no TLB holds one that was, unless its fault saw
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
//! A paused VM's log can be read without taking and protecting (`read_dirty_log`): bits stay, so a VM that
//! goes on after all has lost nothing.
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
//! but the one around the current `Arc` of the slots, which the writer does not hold while it waits. A vCPU
//! waits for the writer only as described above, outside its gate. Exits to the VMM happen outside the gate
//! too, so a VMM may call the VM from the thread of a vCPU it is serving.

use crate::clock::Clock;
use crate::gate::Requests;
use crate::hart::Reservations;
use crate::slots::{Published, Table};
use crate::vcpu::Link;
use pageferry_addr::GfnRange;
use pageferry_tdp::StageTwo;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What all handles and vCPUs of a VM share.
pub(crate) struct Shared {
    pub(crate) tables: StageTwo,
    pub(crate) slots: Published,
    pub(crate) clock: Clock,
    pub(crate) reservations: Reservations,
    writer: Mutex<Writer>,
}

/// What is changed by one thread at a time.
pub(crate) struct Writer {
    /// The version published last.
    pub(crate) table: Arc<Table>,
    /// The vCPUs, by id; those created later flush nothing, as they have seen nothing.
    pub(crate) vcpus: Vec<Option<Arc<Link>>>,
}

impl Shared {
    pub(crate) fn new(table: Table, max_vcpus: u32) -> Self {
        let table = Arc::new(table);
        Self {
            tables: StageTwo::new(),
            slots: Published::new(Arc::clone(&table)),
            clock: Clock::new(),
            reservations: Reservations::new(),
            writer: Mutex::new(Writer {
                table,
                vcpus: (0..max_vcpus).map(|_| None).collect(),
            }),
        }
    }

    /// Becomes the one who changes things. A panic of an earlier one is no obstacle: each step leaves the
    /// VM in a state from which every later call works.
    pub(crate) fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Step 1.
    pub(crate) fn publish(&self, writer: &mut Writer, table: Table) {
        writer.table = Arc::new(table);
        self.slots.publish(Arc::clone(&writer.table));
    }

    /// Steps 2 to 4, for the SPTEs of `ranges`; gives how many there were.
    pub(crate) fn unmap(&self, writer: &Writer, ranges: &[GfnRange]) -> u64 {
        writer.request(Requests::QUIESCE);
        let zapped = ranges.iter().map(|&range| self.tables.zap(range)).sum();
        // Where nothing was mapped, no TLB and no decoded code knows anything: both are filled from SPTEs, and
        // whoever removes SPTEs flushes before it lets the next writer in.
        if zapped != 0 {
            writer.request(Requests::FLUSH);
        }
        zapped
    }

    /// Steps 2 to 4 for the start of dirty logging.
    pub(crate) fn protect(&self, writer: &Writer, range: GfnRange) {
        writer.request(Requests::QUIESCE);
        self.tables.write_protect(range);
        writer.request(Requests::FLUSH_WRITES);
    }

    /// Makes the page of the host address `address` one in which LR may reserve.
    pub(crate) fn watch(&self, address: u64) {
        let writer = self.writer();
        if !self.reservations.is_watched(address) {
            self.reservations.announce(address);
            writer.request(Requests::FLUSH_WRITES);
            self.reservations.confirm(address);
        }
    }
}

impl Writer {
    /// Makes the request at every gate and waits until all vCPUs that were inside have left.
    pub(crate) fn request(&self, requests: Requests) {
        // All are asked before any is waited for.
        let tickets: Vec<_> = self
            .vcpus
            .iter()
            .flatten()
            .filter_map(|link| link.gate.request(requests))
            .collect();
        for ticket in tickets {
            ticket.wait();
        }
    }
}
