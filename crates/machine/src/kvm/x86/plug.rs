//! Memory beyond RAM, plugged and unplugged while the machine runs.

use super::shared::VmShared;
use super::slots::{KvmSlot, check_adjacent, same};
use crate::{GuestRam, MachineError};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_memslot::{Request, Slot, SlotFlags, SlotTable};
use std::fmt;
use std::sync::Arc;

/// Plugs memory beyond RAM into a running machine of this engine, and unplugs it: a device's
/// window, a DAX window of virtio-fs, hotplugged memory that its driver manages.
///
/// The guest sees this memory, and nothing else does. It is in no dirty log, no missing bitmap and
/// no migration, and [`Machine::ram`](crate::Machine::ram) does not include it. Clones are handles
/// of the same machine.
///
/// Calls are serialized. Each takes O(log n) here plus the kernel's time (measured: 10 to 14 us).
/// vCPUs keep running. After [`unplug`](Self::unplug) and [`relocate`](Self::relocate), no vCPU
/// reaches the old place.
#[derive(Clone)]
pub struct MemoryPlug(Arc<VmShared>);

impl MemoryPlug {
    pub(super) fn new(shared: Arc<VmShared>) -> Self {
        Self(shared)
    }

    /// Shows all of `memory` to the guest from `gpa` on, as slot `id`. [`GuestRam::write`] and
    /// [`GuestRam::read`] reach the same bytes. With `read_only`, guest writes leave as
    /// [`Exit::MmioWrite`](crate::Exit::MmioWrite).
    ///
    /// The same memory may be plugged several times, under several ids.
    ///
    /// # Errors
    /// [`MachineError::Adopt`] if the VMM has mapped the memory for a guest itself
    /// ([`AdoptedRegion::mapped_at`](crate::AdoptedRegion::mapped_at)).
    /// [`MachineError::WrongState`] if the id is RAM's or taken. [`MachineError::Engine`] with a
    /// [`SlotError`](pageferry_memslot::SlotError) if the slot breaks a rule (no overlap, page
    /// alignment, the number of slots). [`MachineError::Os`] if the kernel refuses.
    pub fn plug(
        &self,
        id: u16,
        gpa: Gpa,
        memory: Arc<GuestRam>,
        read_only: bool,
    ) -> Result<(), MachineError> {
        check_adjacent(&memory)?;
        let flags = if read_only {
            SlotFlags::READONLY
        } else {
            SlotFlags::EMPTY
        };
        self.change(id, |old| match old {
            Some(_) => Err(MachineError::WrongState(
                "the slot is plugged already: unplug it first, or relocate it",
            )),
            None => Ok(Request {
                address_space: 0,
                id,
                gpa,
                size: memory.pages() * PAGE_SIZE,
                hva: memory.guest_hva(RamPage(0)),
                flags,
                userfault_bitmap: None,
                data: KvmSlot { memory },
            }),
        })
    }

    /// Takes slot `id` away from the guest and returns its memory. From now on an access there is
    /// MMIO.
    ///
    /// # Errors
    /// [`MachineError::WrongState`] if the id is RAM's or not plugged, [`MachineError::Os`] if the
    /// kernel refuses.
    pub fn unplug(&self, id: u16) -> Result<Arc<GuestRam>, MachineError> {
        let mut memory = None;
        self.change(id, |old| {
            let old = old.ok_or(NOT_PLUGGED)?;
            memory = Some(Arc::clone(&old.data.memory));
            let size = 0;
            Ok(Request { size, ..same(old) })
        })?;
        memory.ok_or(NOT_PLUGGED)
    }

    /// Moves slot `id` to `gpa`, with its bytes.
    ///
    /// # Errors
    /// As [`plug`](Self::plug), and [`MachineError::WrongState`] if the id is not plugged.
    pub fn relocate(&self, id: u16, gpa: Gpa) -> Result<(), MachineError> {
        self.change(id, |old| {
            let old = old.ok_or(NOT_PLUGGED)?;
            Ok(Request { gpa, ..same(old) })
        })
    }

    /// All slots of the machine, RAM's included, readable by any thread. A thread must not plug,
    /// unplug or relocate while it holds a guard of this table: the change may wait for that guard.
    #[must_use]
    pub fn slot_table(&self) -> SlotTable<KvmSlot> {
        self.0.slots.table().clone()
    }

    fn change(
        &self,
        id: u16,
        ask: impl FnOnce(Option<&Slot<KvmSlot>>) -> Result<Request<KvmSlot>, MachineError>,
    ) -> Result<(), MachineError> {
        let regions = self.0.ram.layout().regions();
        if regions.iter().any(|region| region.slot == u32::from(id)) {
            return Err(MachineError::WrongState(
                "the slot is RAM's: choose an id above those of RAM's regions",
            ));
        }
        self.0.slots.change(&self.0.vm, id, ask)
    }
}

const NOT_PLUGGED: MachineError = MachineError::WrongState("no such slot is plugged");

impl fmt::Debug for MemoryPlug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryPlug({:?})", self.0.slots.table().generation())
    }
}
